"""What an engine's steps looked like, counted: the common currency of simulation, optimiser and report.

One row is one kind of step; the rest are sums over its steps, so that histograms of many machines add up exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from podgraph.errors import TraceError

KEY = ("prefill_len", "prefill_requests", "decode_count")
SUMS = ("steps", "decode_kv_tokens", "prefill_kv_tokens", "prefill_pairs")
COLUMNS = (*KEY, *SUMS)

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StepHistogram:
    """Distinct steps, ascending by key and each once; every array is ``[n]``, int64.

    Attributes:
        prefill_len: query rows of prefill in a step, over all its requests.
        prefill_requests: requests that prefill in a step.
        decode_count: requests that decode in a step, one row each.
        steps: how many such steps there were (a weight).
        decode_kv_tokens: KV tokens that decodes read, summed over those steps.
        prefill_kv_tokens: KV tokens that prefills read, summed over those steps.
        prefill_pairs: visible (query row, KV token) pairs of prefills, summed over those steps.
        source: where the steps came from, for messages and the report.

    Raises:
        TraceError: an array has another dtype, shape, order or range.
    """

    prefill_len: Counts
    prefill_requests: Counts
    decode_count: Counts
    steps: Counts
    decode_kv_tokens: Counts
    prefill_kv_tokens: Counts
    prefill_pairs: Counts
    source: str

    def __post_init__(self) -> None:
        n = self.steps.size
        for name in COLUMNS:
            values = getattr(self, name)
            if values.dtype != np.int64 or values.shape != (n,):
                raise TraceError(f"{self.source}: {name}: must be int64 of shape ({n},), got {values.dtype}")
            if (values < (1 if name == "steps" else 0)).any():
                raise TraceError(f"{self.source}: {name}: must not be negative, got {values.min()}")
        key = np.stack([getattr(self, name) for name in KEY])
        changed = np.diff(key) != 0
        first = changed.argmax(axis=0)
        if (~changed.any(axis=0)).any() or (np.diff(key)[first, np.arange(first.size)] < 0).any():
            raise TraceError(f"{self.source}: {', '.join(KEY)}: must ascend, each once; use `summed`")

    def __len__(self) -> int:
        return self.steps.size

    @property
    def total(self) -> int:
        """Steps in all."""
        return int(self.steps.sum())


def summed(columns: Mapping[str, Counts], source: str) -> StepHistogram:
    """The histogram of rows in any order, where a key may come more than once.

    Args:
        columns: every name of ``COLUMNS``, ``[n]``, int64.
        source: of the histogram.

    Raises:
        TraceError: a value is out of range, or a sum does not fit int64.
    """
    if not columns["steps"].size:
        return StepHistogram(**dict(columns), source=source)
    order = np.lexsort([columns[name] for name in reversed(KEY)])
    ordered = {name: columns[name][order] for name in COLUMNS}
    new = np.zeros(order.size, dtype=np.bool_)
    new[0] = True
    for name in KEY:
        new[1:] |= np.diff(ordered[name]) != 0
    starts = np.flatnonzero(new)
    for name in SUMS:
        # The float sum is only a bound: beyond it int64 might wrap, and a wrapped sum can look good.
        if np.abs(ordered[name], dtype=np.float64).sum() >= 2**62:
            raise TraceError(f"{source}: {name}: the sum must be below 2**62; cut the log in parts")
    rows = {name: ordered[name][starts] for name in KEY}
    rows |= {name: np.add.reduceat(ordered[name], starts) for name in SUMS}
    return StepHistogram(**rows, source=source)


def merge(histograms: Sequence[StepHistogram], source: str) -> StepHistogram:
    """The sum of histograms, at least one; the order does not matter.

    Raises:
        TraceError: a sum does not fit int64.
    """
    return summed({name: np.concatenate([getattr(h, name) for h in histograms]) for name in COLUMNS}, source)
