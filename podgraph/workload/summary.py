"""What `podgraph trace show` tells about a histogram or a trace, as plain data."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from podgraph.workload.provenance import Provenance
from podgraph.workload.steps import StepHistogram

PERCENTILES = (0, 10, 50, 90, 99, 100)
TOP = 10


def describe(histogram: StepHistogram, origin: Provenance | None = None) -> dict[str, Any]:
    """The facts of a histogram: counts, shares of the kinds of steps, percentiles over steps, the commonest steps."""
    total = max(1, histogram.total)
    prefills, decodes = histogram.prefill_requests > 0, histogram.decode_count > 0
    kinds = {
        "decode": ~prefills & decodes,
        "mixed": prefills & decodes,
        "prefill": prefills & ~decodes,
    }
    rows = histogram.prefill_len + histogram.decode_count
    top = np.argsort(-histogram.steps, kind="stable")[:TOP]
    return {
        "steps": histogram.total,
        "distinct": len(histogram),
        "shares": {name: int(histogram.steps[chosen].sum()) / total for name, chosen in kinds.items()},
        "percentiles": {
            name: _percentiles(values, histogram.steps)
            for name, values in {
                "prefill_len": histogram.prefill_len,
                "prefill_requests": histogram.prefill_requests,
                "decode_count": histogram.decode_count,
                "rows": rows,
            }.items()
        },
        "top": [
            {
                "prefill_len": int(histogram.prefill_len[i]),
                "prefill_requests": int(histogram.prefill_requests[i]),
                "decode_count": int(histogram.decode_count[i]),
                "steps": int(histogram.steps[i]),
            }
            for i in top.tolist()
        ],
    }


def _percentiles(values: npt.NDArray[np.int64], weights: npt.NDArray[np.int64]) -> dict[str, int]:
    """The smallest value that at least that share of the steps does not exceed."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    if not reached.size:
        return {}
    wanted = [max(1, -(-int(reached[-1]) * p // 100)) for p in PERCENTILES]
    found = np.searchsorted(reached, wanted)
    return {f"p{p}": int(values[order[i]]) for p, i in zip(PERCENTILES, found.tolist(), strict=True)}
