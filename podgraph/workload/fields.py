"""One field of a log: what counts as a number, a time, a good row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timezone

from podgraph.workload.layouts import Count, Layout

Record = Mapping[str, object]
Time = int | float


class BadRowError(Exception):
    """Why one row is left out."""


def parse_row(record: Record, layout: Layout) -> tuple[Time, list[int]]:
    """(arrival in units of the layout, or 0; the counts in the layout's order) of one row.

    Raises:
        BadRowError: a field is missing, or no number in its range.
    """
    counts = [_count(record, count) for count in layout.counts]
    if layout.is_steps:
        check_step(*counts[:3])
    if layout.arrival is None:
        return 0, counts
    parse_time = date_ns if layout.time_unit == "date" else number
    time = parse_time(record.get(layout.arrival))
    # Above int64 is no time in any unit, and an int that no float holds would overflow in the division.
    if time is None or not 0 <= time < 2**63:
        allowed = "a date" if layout.time_unit == "date" else f"a time in {layout.time_unit}, >= 0"
        raise BadRowError(f"{layout.arrival}: must be {allowed}, got {short(record.get(layout.arrival))}")
    return time, counts


def check_step(prefill_len: int, prefill_requests: int, decode_count: int) -> None:
    """Refuses steps that no engine makes.

    Raises:
        BadRowError: the step is empty, or a prefill has no row.
    """
    if not (prefill_len or prefill_requests or decode_count):
        raise BadRowError("prefill_len, prefill_requests, decode_count: got a step of nothing; leave idle steps out")
    if prefill_requests > prefill_len or (prefill_len and not prefill_requests):
        raise BadRowError(
            f"prefill_requests: must be in 1..prefill_len={prefill_len}, 0 where that is 0, got {prefill_requests}"
        )


def _count(record: Record, count: Count) -> int:
    if count.default is not None and count.column not in record:
        return count.default
    found = number(record.get(count.column))
    if not isinstance(found, int) or not count.least <= found <= count.most:
        got = short(record.get(count.column))
        raise BadRowError(f"{count.column}: must be a whole number in {count.least}..{count.most}, got {got}")
    return found


# Narrower than int() and float(), which also take 1_000, "nan" and other scripts' digits. 40 characters hold any time.
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?")


def number(value: object) -> Time | None:
    """The number that a CSV field or JSON value holds, an int where it is whole, or None."""
    if isinstance(value, str):
        value = value.strip()
        found = _NUMBER.fullmatch(value) if len(value) <= 40 else None
        if found is None:
            return None
        # An int keeps all 19 digits of a time in ns since 1970.
        value = int(value) if found.lastindex is None else float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # Whole floats are ints too: a data frame writes an integer column with a gap in it as 7564.0.
    return int(value) if isinstance(value, float) and value.is_integer() else value


_DATE = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2})[ T]([0-9:]{8})(?:\.([0-9]{1,9}))?(Z|[+-][0-9]{2}:[0-9]{2})?")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def date_ns(value: object) -> int | None:
    """Nanoseconds since 1970, or None; a date without an offset counts as UTC."""
    found = _DATE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    day, clock, decimals, offset = found.groups()
    try:
        # The decimals apart: datetime holds 6 of them, and fromisoformat refuses 7 before Python 3.11.
        date = datetime.fromisoformat(f"{day}T{clock}{'+00:00' if offset in (None, 'Z') else offset}")
    except ValueError:
        return None
    since = date - _EPOCH
    return (since.days * 86400 + since.seconds) * 10**9 + int((decimals or "").ljust(9, "0"))


def short(value: object) -> str:
    """What an error quotes."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
