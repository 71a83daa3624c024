"""The report's figures, as SVG or PNG without a date or a random name: equal input gives equal bytes.

Each is as wide as a phone, and is read without colour: by markers, by filled and hollow ones, by shades and hatching.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from podgraph.report.cells import Cell
from podgraph.report.content import Point, Report

MIB = 1 << 20
LEAST_WASTE = 0.001  # percent: what is less is drawn there
NAMES = {
    "this": "this set",
    "best": "best of 1 to 64 buckets",
    "vllm": "vLLM's list",
    "sglang": "SGLang's list",
    "tensorrt_llm": "TensorRT-LLM's list",
    "megatron": "Megatron style",
    "pow2": "powers of two",
}
# marker, size, colour, and whether it is filled
LOOKS = {
    "this": ("*", 15, "#b2182b", True),
    "best": ("o", 6, "#1f4e79", True),
    "vllm": ("s", 8, "#222222", False),
    "sglang": ("D", 7.5, "#222222", False),
    "tensorrt_llm": ("^", 9, "#222222", False),
    "megatron": ("v", 9, "#222222", False),
    "pow2": ("X", 9, "#222222", False),
}
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "podgraph",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "sans-serif"],
    "font.size": 10,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.color": "#999999",
    "hatch.linewidth": 0.5,
    "text.parse_math": False,
}


def pareto_waste(report: Report) -> bytes:
    """Memory against the time that a set wastes."""
    with _figure(4.8, 4.5) as (figure, panel):
        _waste(panel, report)
        _finish(figure, panel, report)
        return _bytes(figure, "svg")


def pareto_coverage(report: Report) -> bytes:
    """Memory against the share of steps that one replay serves."""
    with _figure(4.8, 4.5) as (figure, panel):
        _coverage(panel, report)
        _finish(figure, panel, report)
        return _bytes(figure, "svg")


def pareto_png(report: Report) -> bytes:
    """Both, side by side, as a picture of 1,440 pixels."""
    with _figure(10, 4.8, 2) as (figure, panels):
        _waste(panels[0], report)
        _coverage(panels[1], report)
        for panel in panels:
            _memory_axis(panel, report)
        _legend(figure, panels[0], 4)
        return _bytes(figure, "png")


def steps_map(report: Report) -> bytes:
    """Which steps there are."""
    return _map(report.cells, "steps in a cell, % of all", lambda cell: 100 * cell.share, None)


def hits_map(report: Report) -> bytes:
    """Which of them one replay serves."""
    return _map(report.cells, "of a cell's steps, served by one replay, %", lambda cell: 100 * cell.hits, 100.0)


def waste_map(report: Report) -> bytes:
    """Where time is wasted."""
    return _map(report.cells, "of all wasted time, in a cell, %", lambda cell: 100 * cell.waste, None)


def _waste(panel: Any, report: Report) -> None:
    _series(panel, report.points, lambda point: max(100 * point.waste, LEAST_WASTE))
    panel.set_ylabel("expected step above the best, %")
    panel.set_yscale("log")
    _plain_ticks(panel.yaxis, [max(100 * p.waste, LEAST_WASTE) for p in report.points], (1, 3))


def _coverage(panel: Any, report: Report) -> None:
    _series(panel, report.points, lambda point: 100 * point.covered)
    panel.set_ylabel("steps served by one replay, %")
    least = min(100 * point.covered for point in report.points)
    panel.set_ylim(least - 4, 104)
    panel.set_yticks([tick for tick in panel.get_yticks() if least - 4 <= tick <= 100])


def _series(panel: Any, points: tuple[Point, ...], value: Callable[[Point], float]) -> None:
    for name, (marker, size, color, filled) in LOOKS.items():
        chosen = [point for point in points if point.name == name]
        if not chosen:
            continue
        panel.plot(
            [point.dedicated_bytes / MIB for point in chosen],
            [value(point) for point in chosen],
            marker=marker,
            color=color,
            markerfacecolor=color if filled else "white",
            linestyle="-" if name == "best" else "none",
            markersize=size,
            zorder=3 if name == "this" else 2,
            label=NAMES[name],
        )
        for point in chosen if name == "best" else ():
            panel.annotate(
                str(point.buckets),
                (point.dedicated_bytes / MIB, value(point)),
                textcoords="offset points",
                xytext=(0, -12),
                ha="center",
                fontsize=8,
                color=color,
            )


def _finish(figure: Any, panel: Any, report: Report) -> None:
    _memory_axis(panel, report)
    _legend(figure, panel, 2)


def _memory_axis(panel: Any, report: Report) -> None:
    values = [point.dedicated_bytes / MIB for point in report.points]
    panel.set_xscale("log")
    _plain_ticks(panel.xaxis, values, (1, 2, 5) if max(values) > 20 * min(values) else (1, 1.5, 2, 3, 5, 7))
    panel.set_xlabel("device memory, a graph for each bucket, MiB")


def _plain_ticks(axis: Any, values: list[float], digits: tuple[float, ...]) -> None:
    """Round numbers instead of powers; one beyond the data at either end."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = np.floor(np.log10(min(values))) - 1, np.ceil(np.log10(max(values))) + 1
    ticks = [digit * 10.0**power for power in np.arange(low, high + 1) for digit in digits]
    inside = [tick for tick in ticks if min(values) * 0.999 <= tick <= max(values) * 1.001]
    first = max((tick for tick in ticks if tick < min(values)), default=min(values))
    last = min((tick for tick in ticks if tick > max(values)), default=max(values))
    # without the outer ones where the data would be squeezed into a small part of the axis
    outer = len(inside) < 2 or (max(values) / min(values)) ** 0.3 > max(min(values) / first, last / max(values))
    axis.set_major_locator(FixedLocator([first, *inside, last] if outer else inside))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if outer:
        axis.axes.set(**{f"{axis.axis_name}lim": (first * 0.93, last * 1.08)})


def _legend(figure: Any, panel: Any, columns: int) -> None:
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def _map(cells: tuple[Cell, ...], title: str, value: Callable[[Cell], float], most: float | None) -> bytes:
    """Shades on a scale of square roots, so that small shares are seen; cells without steps are hatched."""
    from matplotlib.colors import PowerNorm

    rows = sorted({(c.prefill_from, c.prefill_to) for c in cells})
    decodes = sorted({(c.decode_from, c.decode_to) for c in cells})
    values = np.full((len(decodes), len(rows)), np.nan)
    for c in cells:
        values[decodes.index((c.decode_from, c.decode_to)), rows.index((c.prefill_from, c.prefill_to))] = value(c)
    top = most or max(float(np.nanmax(values)), 1e-9)
    with _figure(4.4, 3.9) as (figure, panel):
        panel.patch.set(hatch="/////", edgecolor="#999999", facecolor="white")
        norm = PowerNorm(1.0 if most else 0.5, 0, top)
        image = panel.pcolormesh(values, cmap="Greys", norm=norm, edgecolors="#888888", linewidth=0.4)
        panel.grid(visible=False)
        panel.set_title(title, fontsize=10)
        panel.set_xticks(np.arange(len(rows)) + 0.5, [_bin(*ends) for ends in rows], rotation=90, fontsize=9)
        panel.set_yticks(np.arange(len(decodes)) + 0.5, [_bin(*ends) for ends in decodes], fontsize=9)
        panel.set_xlabel("prefill_len")
        panel.set_ylabel("decode_count")
        figure.colorbar(image, ax=panel, fraction=0.06, format="%.3g")
        return _bytes(figure, "svg")


def _bin(least: int, most: int) -> str:
    return str(most) if least == most else f"\N{LESS-THAN OR EQUAL TO}{most}"


@contextmanager
def _figure(width: float, height: float, columns: int = 1) -> Iterator[tuple[Any, Any]]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # of a user's own settings, none
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.subplots(1, columns)


def _bytes(figure: Any, form: str) -> bytes:
    buffer = io.BytesIO()
    nothing = ("Date", "Creator", "Format", "Type") if form == "svg" else ("Software",)
    figure.savefig(buffer, format=form, metadata=dict.fromkeys(nothing), dpi=144)
    return buffer.getvalue()
