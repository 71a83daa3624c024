"""Request traces: when each request arrived, and how many tokens it had."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from podgraph.errors import TraceError
from podgraph.workload.layouts import MAX_TOKENS


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order they arrived.

    Attributes:
        arrival_s: ``[n]``, float64, seconds from the first request, nondecreasing.
        input_len: ``[n]``, int64, prompt tokens, at least 1.
        output_len: ``[n]``, int64, generated tokens, at least 0.
        source: the file it was read from, or another name for error messages.
        skipped: bad rows that were left out.
        has_arrivals: False where the source had no arrival times and ``arrival_s`` is all zero.
        bad_rows: the first few of the skipped ones, each with its place and reason.

    Raises:
        TraceError: an array has another dtype, shape or range.
    """

    arrival_s: npt.NDArray[np.float64]
    input_len: npt.NDArray[np.int64]
    output_len: npt.NDArray[np.int64]
    source: str
    skipped: int
    has_arrivals: bool
    bad_rows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Checked here although a reader checks its rows: arrivals that were drawn come in by dataclasses.replace.
        n = self.input_len.size
        for name, dtype in (("arrival_s", np.float64), ("input_len", np.int64), ("output_len", np.int64)):
            values = getattr(self, name)
            if values.dtype != dtype or values.shape != (n,):
                allowed = f"{np.dtype(dtype)} of shape ({n},), as input_len has {n} values"
                raise TraceError(
                    f"{self.source}: {name}: must be {allowed}, got {values.dtype} of shape {values.shape}"
                )
        in_range = {
            "arrival_s": (np.isfinite(self.arrival_s) & (self.arrival_s >= 0), "finite and >= 0"),
            "input_len": ((self.input_len >= 1) & (self.input_len <= MAX_TOKENS), f"in 1..{MAX_TOKENS}"),
            "output_len": ((self.output_len >= 0) & (self.output_len <= MAX_TOKENS), f"in 0..{MAX_TOKENS}"),
        }
        for name, (good, allowed) in in_range.items():
            if not good.all():
                index = int(np.argmin(good))
                got = getattr(self, name)[index]
                raise TraceError(f"{self.source}: {name}[{index}]: must be {allowed}, got {got}")
        if (np.diff(self.arrival_s) < 0).any():
            index = int(np.argmax(np.diff(self.arrival_s) < 0)) + 1
            raise TraceError(
                f"{self.source}: arrival_s[{index}]: must be at least the one before, {self.arrival_s[index - 1]}, "
                f"got {self.arrival_s[index]}; sort the requests by arrival"
            )

    def __len__(self) -> int:
        return self.input_len.size

    def keep(self, chosen: npt.NDArray[np.bool_]) -> Trace:
        """The requests where ``chosen``, ``[n]``, is true; arrivals stay as they are."""
        arrays = {name: getattr(self, name)[chosen] for name in ("arrival_s", "input_len", "output_len")}
        return dataclasses.replace(self, **arrays)


def at_rate(trace: Trace, rate: float, seed: int = 0) -> Trace:
    """The trace at another mean load: its arrivals stretched, or Poisson arrivals where it has none.

    Args:
        rate: requests per second.
        seed: of the Poisson arrivals.
    """
    if trace.has_arrivals:
        mean_gap_s = trace.arrival_s[-1] / max(1, len(trace) - 1)
        arrival_s = trace.arrival_s * (1 / rate / mean_gap_s) if mean_gap_s > 0 else trace.arrival_s
    else:
        gaps = np.random.default_rng(seed).exponential(1 / rate, len(trace))
        arrival_s = np.cumsum(gaps) - gaps[0]
    return dataclasses.replace(trace, arrival_s=arrival_s, has_arrivals=True)
