"""How the page and the terminal write numbers."""

from __future__ import annotations

import math

from podgraph.workload.costs import Eager

EAGER_NAMES: dict[Eager, str] = {
    "penalty": "host time on top",
    "hidden": "host time hidden",
}


def percent(share: float, digits: int = 2) -> str:
    """``12.34 %``; a share that is more than nothing, or less than all, never looks like either."""
    least = 10.0**-digits
    value = 100 * share
    if 0 < value < least / 2:
        return f"< {least:.{digits}f} %"
    if 100 - least / 2 <= value < 100:
        return f"> {100 - least:.{digits}f} %"
    return f"{value:.{digits}f} %"


def bound(share: float) -> str:
    """What a share is at most, with four digits, rounded up; 0.0001 at least."""
    return f"{max(math.ceil(share * 1e6 - 1e-6), 1) / 1e4:.4f} %"


def size(count: int) -> str:
    """Bytes in binary units."""
    if abs(count) < 1 << 20:
        return f"{count / (1 << 10):,.1f} KiB"
    return f"{count / (1 << 20):,.1f} MiB" if abs(count) < 1 << 30 else f"{count / (1 << 30):,.2f} GiB"


def whole(count: float) -> str:
    """With thousands separators."""
    return f"{count:,.0f}"


def tenths(number: float) -> str:
    """One digit behind the point."""
    return f"{number:,.1f}"


def microseconds(us: float) -> str:
    """None behind the point from 10,000 on, one from 100, two from 0.1, else four; what is more than nothing shows."""
    if 0 < abs(us) < 0.00005:
        return "< 0.0001" if us > 0 else "> -0.0001"
    digits = next((n for n, least in ((0, 10_000), (1, 100), (2, 0.1)) if abs(us) >= least), 4 if us else 2)
    return f"{us:,.{digits}f}"


FORMATS = {
    "percent": percent,
    "bound": bound,
    "size": size,
    "whole": whole,
    "tenths": tenths,
    "us": microseconds,
}
