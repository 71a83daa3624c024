"""What `podgraph trace show` tells about a log, as plain data."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from podgraph.workload.provenance import Provenance
from podgraph.workload.requests import Trace
from podgraph.workload.steps import COLUMNS, StepHistogram

PERCENTILES = (0, 10, 50, 90, 99, 100)
TOP = 10


def describe_steps(histogram: StepHistogram, origin: Provenance | None = None) -> dict[str, Any]:
    """The facts of a histogram: counts, shares of the kinds of steps, percentiles over steps, the commonest steps."""
    prefills, decodes = histogram.prefill_requests > 0, histogram.decode_count > 0
    kinds = {"decode": ~prefills & decodes, "mixed": prefills & decodes, "prefill": prefills & ~decodes}
    axes = {
        "prefill_len": histogram.prefill_len,
        "prefill_requests": histogram.prefill_requests,
        "decode_count": histogram.decode_count,
        "rows": histogram.prefill_len + histogram.decode_count,
    }
    top = np.argsort(-histogram.steps, kind="stable")[:TOP].tolist()
    return {
        "kind": "steps",
        "steps": histogram.total,
        "distinct": len(histogram),
        "shares": {name: int(histogram.steps[kind].sum()) / max(1, histogram.total) for name, kind in kinds.items()},
        "percentiles": {name: _percentiles(values, histogram.steps) for name, values in axes.items()},
        "top": [{name: int(getattr(histogram, name)[index]) for name in COLUMNS[:4]} for index in top],
        "simulation": None if origin is None else _describe_origin(origin),
    }


def _describe_origin(origin: Provenance) -> dict[str, Any]:
    totals = ("requests", "finished", "dropped", "preempted")
    return {
        "settings": origin.settings,
        "traces": sorted({part.name for part in origin.parts}),
        "shards": sorted({f"{part.shard}/{part.shards}" for part in origin.parts}),
        "rates": sorted({part.rate for part in origin.parts if part.rate is not None}),
        **{name: origin.total(name) for name in totals},
        "simulated_s": origin.total("simulated_us") / 1e6,
    }


def describe_requests(trace: Trace) -> dict[str, Any]:
    """The facts of a request log: how many, how long, at which rate, and what was left out."""
    ones = np.ones(len(trace), dtype=np.int64)
    span_s = float(trace.arrival_s[-1])
    timed = trace.has_arrivals and span_s > 0
    return {
        "kind": "requests",
        "requests": len(trace),
        "skipped_rows": trace.skipped,
        "bad_rows": list(trace.bad_rows),
        "span_s": span_s if trace.has_arrivals else None,
        "rate": (len(trace) - 1) / span_s if timed else None,
        "input_tokens": int(trace.input_len.sum()),
        "output_tokens": int(trace.output_len.sum()),
        "percentiles": {name: _percentiles(getattr(trace, name), ones) for name in ("input_len", "output_len")},
    }


def _percentiles(values: npt.NDArray[np.int64], weights: npt.NDArray[np.int64]) -> dict[str, int]:
    """By percent, the smallest value that at least that share of the steps does not exceed."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    wanted = [max(1, -(-int(reached[-1]) * p // 100)) for p in PERCENTILES]
    found = np.searchsorted(reached, wanted).tolist()
    return {f"p{p}": int(values[order[index]]) for p, index in zip(PERCENTILES, found, strict=True)}
