"""What an engine's steps looked like, counted: the common currency of simulation, optimiser and report.

One row is one kind of step; the rest are sums over its steps, so that histograms of many machines add up exactly.
"""

from __future__ import annotations

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

    def __len__(self) -> int:
        return self.steps.size

    @property
    def total(self) -> int:
        """Steps in all."""
        return int(self.steps.sum())
