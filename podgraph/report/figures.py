"""The report's figures, as SVG without a date or a random name: equal input gives equal bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from podgraph.report.content import Point, Report
from podgraph.workload.costs import Costs
from podgraph.workload.coverage import HIT, assign

MIB = 1 << 20
BINS = 12  # at most, of each axis of the heat maps
# a marker and a shade for each set, so that a page printed in grey can be read
MARKERS = {
    "this": ("*", "#b2182b"),
    "best": ("o", "#1f4e79"),
    "vllm": ("s", "#444444"),
    "sglang": ("D", "#777777"),
    "tensorrt_llm": ("^", "#444444"),
    "megatron": ("v", "#777777"),
    "pow2": ("X", "#aaaaaa"),
}
STYLE: Any = {
    "svg.hashsalt": "podgraph",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
}


def pareto(report: Report, form: str = "svg") -> bytes:
    """Memory against the time and the coverage that it buys: this set, the best ones, and engines' lists."""
    with _figure(7.2, 6.4, 2, 1) as (figure, axes):
        for panel, label, value in (
            (axes[0], "expected step above the best, %", lambda p: max(100 * p.waste, 1e-4)),
            (axes[1], "steps served by one replay, %", lambda p: 100 * p.covered),
        ):
            _series(panel, report.points, value)
            panel.set_ylabel(label)
            panel.set_xscale("log")
        axes[0].set_yscale("log")
        axes[0].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
        kind = "modelled" if report.memory.modelled else "execs and images as measured"
        axes[1].set_xlabel(f"device memory with a graph for each bucket, MiB ({kind})")
        return _bytes(figure, form)


def _series(panel: Any, points: tuple[Point, ...], value: Callable[[Point], float]) -> None:
    for name, (marker, color) in MARKERS.items():
        chosen = [p for p in points if p.name == name]
        if chosen:
            panel.plot(
                [p.dedicated_bytes / MIB for p in chosen],
                [value(p) for p in chosen],
                marker=marker,
                color=color,
                linestyle="-" if name == "best" else "none",
                markersize=11 if name == "this" else 6,
                zorder=3 if name == "this" else 2,
                label={"this": "this set", "best": "best set of 1 to 64"}.get(name, name),
            )


def heat_maps(report: Report, costs: Costs) -> bytes:
    """Prefill rows by decodes: how many steps, how many of them hit, and the time that padding takes."""
    steps = report.steps
    found = assign(steps, report.source.build.buckets, costs, report.eager)
    rows, decodes = _edges(steps.prefill_len), _edges(steps.decode_count)
    at = (_bin(steps.prefill_len, rows), _bin(steps.decode_count, decodes))
    shape = (len(rows), len(decodes))
    total, hit, waste = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    np.add.at(total, at, steps.steps)
    np.add.at(hit, at, steps.steps * (found.kind == HIT))
    np.add.at(waste, at, steps.steps * (found.expected_us - found.best_us))
    with np.errstate(invalid="ignore", divide="ignore"):
        panels = (
            ("share of steps, %", np.where(total > 0, 100 * total / total.sum(), np.nan)),
            ("served by one replay, %", 100 * hit / total),
            ("waste of a step, us", waste / total),
        )
    with _figure(9.6, 3.6, 1, 3) as (figure, axes):
        for panel, (title, values) in zip(axes, panels, strict=True):
            image = panel.imshow(values.T, origin="lower", aspect="auto", cmap="Greys", vmin=0)
            panel.grid(visible=False)
            panel.set_title(title, fontsize=10)
            panel.set_xticks(range(len(rows)), [str(n) for n in rows], rotation=90, fontsize=7)
            panel.set_yticks(range(len(decodes)), [str(n) for n in decodes], fontsize=7)
            panel.set_xlabel("prefill_len up to", fontsize=8)
            figure.colorbar(image, ax=panel, fraction=0.05)
        axes[0].set_ylabel("decode_count up to", fontsize=8)
        return _bytes(figure, "svg")


def _edges(values: Any) -> list[int]:
    """Upper ends of bins: 0, then powers of two as far as the values go, the last ones if there are many."""
    most = int(values.max(initial=0))
    ends = [0, *(1 << n for n in range(max(0, most - 1).bit_length() + 1))] if most else [0]
    return ends if len(ends) <= BINS else [0, *ends[-(BINS - 1) :]]


def _bin(values: Any, edges: list[int]) -> Any:
    return np.minimum(np.searchsorted(np.array(edges), values), len(edges) - 1)


@contextmanager
def _figure(width: float, height: float, rows: int, columns: int) -> Iterator[tuple[Any, Any]]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.subplots(rows, columns)


def _bytes(figure: Any, form: str) -> bytes:
    buffer = io.BytesIO()
    metadata = {"Date": None} if form == "svg" else {"Software": None}
    figure.savefig(buffer, format=form, metadata=metadata, dpi=144)
    return buffer.getvalue()
