"""Steps by prefill rows and decodes, in bins that double: the data of the heat maps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from podgraph.workload.costs import Counts
from podgraph.workload.coverage import HIT, Assignment
from podgraph.workload.steps import StepHistogram

BINS = 12  # of an axis at most


@dataclass(frozen=True)
class Cell:
    """The steps of one bin of either axis.

    Attributes:
        prefill_from, prefill_to: least and largest ``prefill_len`` of the bin.
        decode_from, decode_to: the same of ``decode_count``.
        steps: how many there are, above 0.
        share: of all steps.
        hits: share of them that one replay serves.
        waste: share of the time that all steps waste, in them; 0 where nothing is wasted.
        waste_us: what one of them wastes, microseconds: its time beyond the cheapest of all buckets.
    """

    prefill_from: int
    prefill_to: int
    decode_from: int
    decode_to: int
    steps: int
    share: float
    hits: float
    waste: float
    waste_us: float


def cells_of(steps: StepHistogram, found: Assignment) -> tuple[Cell, ...]:
    """Every cell that has steps, by prefill rows, then by decodes."""
    rows, decodes = bins_of(steps.prefill_len), bins_of(steps.decode_count)
    at = np.searchsorted([last for _, last in rows], steps.prefill_len)
    at = at * len(decodes) + np.searchsorted([last for _, last in decodes], steps.decode_count)
    count, wasted = len(rows) * len(decodes), steps.steps * (found.expected_us - found.best_us)
    total = np.bincount(at, steps.steps, count)
    hit = np.bincount(at, steps.steps * (found.kind == HIT), count)
    waste = np.bincount(at, np.maximum(wasted, 0.0), count)
    all_steps, all_waste = total.sum(), waste.sum()
    return tuple(
        Cell(
            prefill_from=rows[index // len(decodes)][0],
            prefill_to=rows[index // len(decodes)][1],
            decode_from=decodes[index % len(decodes)][0],
            decode_to=decodes[index % len(decodes)][1],
            steps=int(total[index]),
            share=float(total[index] / all_steps),
            hits=float(hit[index] / total[index]),
            waste=float(waste[index] / all_waste) if all_waste > 0 else 0.0,
            waste_us=float(waste[index] / total[index]),
        )
        for index in np.flatnonzero(total).tolist()
    )


def bins_of(values: Counts) -> list[tuple[int, int]]:
    """(least, largest) of each bin: 0, 1, 2, 3 to 4, 5 to 8... as far as values go; small ones share one if need be."""
    most = int(values.max(initial=0))
    ends = [0, *(1 << n for n in range((most - 1).bit_length() + 1))] if most else [0]
    if len(ends) > BINS:
        ends = [0, *ends[1 - BINS :]]
    return [(before + 1, last) for before, last in zip([-1, *ends], ends, strict=False)]
