"""Which buckets hold which steps, for thousands of each: `Bucket.fits` in arrays.

A step of k prefills with r rows and d decodes, one row each, fits a bucket where decodes beyond its ``decode_count``
find a prefill slot and a prefill row. With B slots, P rows and D decodes that is the same as four bounds::

    k + d <= B     k <= B - D     r <= P     r + d <= P + D

since ``k + max(0, d - D) <= B - D`` says ``k <= B - D`` and ``k + d <= B``, and likewise for rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from podgraph.workload.steps import StepHistogram

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

# what a bound is called where it is exceeded
BOUNDS = ("requests", "prefill_requests", "prefill_len", "rows")
# (step, bucket) pairs that are looked at in one go: 32 MiB
PAIRS = 1 << 22


def demands(steps: StepHistogram) -> Counts:
    """``[n, 4]``, in the order of `BOUNDS`: what each distinct step asks for."""
    requests = steps.prefill_requests + steps.decode_count
    return np.stack([requests, steps.prefill_requests, steps.prefill_len, steps.prefill_len + steps.decode_count], 1)


def capacities(shapes: Counts) -> Counts:
    """``[n, 3]`` (batch, prefill_len, decode_count) -> ``[n, 4]``, in the order of `BOUNDS`: what buckets offer."""
    batch, prefill_len, decode_count = shapes.T
    return np.stack([batch, batch - decode_count, prefill_len, prefill_len + decode_count], axis=1)


def fitting(demand: Counts, capacity: Counts) -> Flags:
    """``[n, 4]``, ``[m, 4]`` -> ``[n, m]``: whether each bucket holds each step."""
    result: Flags = demand[:, None, 0] <= capacity[None, :, 0]
    for bound in range(1, len(BOUNDS)):
        result &= demand[:, None, bound] <= capacity[None, :, bound]
    return result


def cheapest(demand: Counts, capacity: Counts, us: Floats) -> Counts:
    """The cheapest bucket that holds each step, the first of equal ones; -1 where none does.

    Args:
        demand: ``[n, 4]``, of steps.
        capacity: ``[m, 4]``, of buckets.
        us: ``[m]``, of buckets; one of infinite cost is never taken.

    Returns:
        ``[n]``, indices into the buckets.
    """
    order = np.argsort(us, kind="stable")
    order = order[np.isfinite(us[order])]
    chosen = np.full(len(demand), -1, dtype=np.int64)
    if not order.size:
        return chosen
    ordered = capacity[order]
    size = max(1, PAIRS // order.size)
    for start in range(0, len(demand), size):
        fits = fitting(demand[start : start + size], ordered)
        first = fits.argmax(axis=1)
        found = fits[np.arange(len(fits)), first]
        chosen[start : start + size] = np.where(found, order[first], -1)
    return chosen
