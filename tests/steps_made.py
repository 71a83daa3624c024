"""Step histograms and costs that tests of tuning make up."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from podgraph.shapes import Bucket, Demand
from podgraph.workload.costs import Eager, Scope
from podgraph.workload.steps import KEY, SUMS, StepHistogram, summed

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


def histogram(*steps: tuple[int, ...]) -> StepHistogram:
    """Of (prefill_len, prefill_requests, decode_count, steps) each, with 100 KV tokens a request."""
    rows = np.array(steps, dtype=np.int64).reshape(-1, 4)
    columns = dict(zip(KEY, rows.T[:3], strict=True))
    weight = rows[:, 3]
    sums = (weight, weight * rows[:, 2] * 100, weight * rows[:, 1] * 100, weight * rows[:, 0] * 50)
    return summed(columns | dict(zip(SUMS, sums, strict=True)), "made up")


@dataclass(frozen=True)
class PlainCosts:
    """Costs whose every part can be read off: ``price`` of a bucket, 10 us of its own for each step, 40 us of host."""

    price: dict[Bucket, float]
    scope: Scope = "step"
    source: str = "made up"
    host_us: float = 40.0
    by_rows: bool = False
    last_rows: int = 0

    @property
    def choices(self) -> Counts:
        return np.array([(b.batch, b.prefill_len, b.decode_count) for b in self.price], dtype=np.int64).reshape(-1, 3)

    def bucket_us(self, shapes: Counts) -> Floats:
        return np.array([self.price.get(Bucket(*shape), np.inf) for shape in shapes.tolist()], dtype=np.float64)

    def own_us(self, steps: StepHistogram) -> Floats:
        return np.full(len(steps), 10.0)

    def exact_us(self, steps: StepHistogram) -> Floats:
        return self.best_us(steps)

    def best_us(self, steps: StepHistogram) -> Floats:
        dearest = max(self.price.values(), default=0.0)
        least = [
            min((us for bucket, us in self.price.items() if bucket.fits(demand)), default=dearest)
            for demand in demands_of(steps)
        ]
        return np.array(least, dtype=np.float64)

    def split_us(self, steps: StepHistogram) -> Floats:
        return np.full(len(steps), np.inf)


def demands_of(steps: StepHistogram) -> list[Demand]:
    columns = (steps.prefill_requests, steps.prefill_len, steps.decode_count)
    return [Demand(*(int(value) for value in row)) for row in zip(*columns, strict=True)]


def expected_us(steps: StepHistogram, buckets: Iterable[Bucket], costs: PlainCosts, eager: Eager) -> float:
    """What `coverage` should say, one step and one bucket at a time."""
    total, chosen = 0.0, list(buckets)
    for demand, weight, exact in zip(demands_of(steps), steps.steps.tolist(), costs.exact_us(steps), strict=True):
        without = exact + 40.0 if eager == "penalty" else max(10.0 + exact, 40.0) - 10.0
        total += weight * (10.0 + min([without, *(costs.price[b] for b in chosen if b.fits(demand))]))
    return total / steps.total


def best_of_every_set(
    steps: StepHistogram, costs: PlainCosts, eager: Eager, candidates: Sequence[Bucket], most: int
) -> float:
    """The least expected time of any set of at most ``most`` buckets, by trying all of them."""
    sets = itertools.chain.from_iterable(itertools.combinations(candidates, n) for n in range(most + 1))
    return min(expected_us(steps, chosen, costs, eager) for chosen in sets)
