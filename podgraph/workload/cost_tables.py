"""Costs from measured tables, in the place of a model's bucket part: any times in any order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from podgraph.workload.costs import Costs, Counts, Floats, Scope, least_beyond, rows_of
from podgraph.workload.fits import capacities, cheapest, demands
from podgraph.workload.steps import StepHistogram


@dataclass(frozen=True)
class RowCosts:
    """Measured times of whole steps by rows, in the place of another model's bucket part.

    Attributes:
        base: gives the scope, the step's own part and the host's time.
        rows: ascending, ``[n]``.
        us: of a bucket with that many rows; the next larger count is taken, and a larger one than all is not to be had.
        source: of the table.
    """

    base: Costs
    rows: tuple[int, ...]
    us: tuple[float, ...]
    source: str
    by_rows: bool = True
    choices: None = None

    @property
    def last_rows(self) -> int:
        return self.rows[-1]

    @property
    def scope(self) -> Scope:
        return self.base.scope

    @property
    def host_us(self) -> float:
        return self.base.host_us

    def bucket_us(self, shapes: Counts) -> Floats:
        return self._rows_us(shapes[:, 1] + shapes[:, 2])

    def own_us(self, steps: StepHistogram) -> Floats:
        return self.base.own_us(steps)

    def exact_us(self, steps: StepHistogram) -> Floats:
        # A step beyond the table can only be served eagerly, and then takes the last time at least.
        return self._rows_us(np.minimum(rows_of(steps), self.rows[-1]))

    def best_us(self, steps: StepHistogram) -> Floats:
        rows = np.minimum(rows_of(steps), self.rows[-1])
        return least_beyond(self._rows_us, rows, self.rows[-1])

    def split_us(self, steps: StepHistogram) -> Floats:
        return _two_of(min(self.us), self.scope, steps)

    def _rows_us(self, rows: Counts) -> Floats:
        times = np.array([*self.us, np.inf])
        return times[np.searchsorted(np.array(self.rows), rows)]


@dataclass(frozen=True, eq=False)
class TableCosts:
    """Measured times of single buckets, in the place of another model's bucket part.

    Attributes:
        base: gives the scope, the step's own part and the host's time.
        shapes: ``[n, 3]``: the buckets that can be had; no other one can.
        us: of each, ``[n]``.
        source: of the table.
    """

    base: Costs
    shapes: Counts
    us: Floats
    source: str
    by_rows: bool = False
    last_rows: int = 0

    @property
    def choices(self) -> Counts:
        return self.shapes

    @property
    def scope(self) -> Scope:
        return self.base.scope

    @property
    def host_us(self) -> float:
        return self.base.host_us

    def bucket_us(self, shapes: Counts) -> Floats:
        known = {tuple(shape): us for shape, us in zip(self.shapes.tolist(), self.us.tolist(), strict=True)}
        return np.array([known.get(tuple(shape), np.inf) for shape in shapes.tolist()], dtype=np.float64)

    def own_us(self, steps: StepHistogram) -> Floats:
        return self.base.own_us(steps)

    def exact_us(self, steps: StepHistogram) -> Floats:
        return self.best_us(steps)

    def best_us(self, steps: StepHistogram) -> Floats:
        """The cheapest listed bucket that holds each step; where none does, the dearest: it takes that at least."""
        chosen = cheapest(demands(steps), capacities(self.shapes), self.us)
        return np.where(chosen >= 0, self.us[chosen], self.us.max(initial=0.0))

    def split_us(self, steps: StepHistogram) -> Floats:
        return _two_of(float(self.us.min(initial=np.inf)), self.scope, steps)


def _two_of(us: float, scope: Scope, steps: StepHistogram) -> Floats:
    return np.full(len(steps), 2 * us if scope == "attention" else np.inf)
