"""The best buckets for a workload, and how far from the best of all sets they can be at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from podgraph.errors import ConfigError
from podgraph.shapes import Bucket
from podgraph.workload.costs import Costs, Counts, Eager, Floats, eager_part, eager_us, rows_of
from podgraph.workload.coverage import assign
from podgraph.workload.fits import demands
from podgraph.workload.optimise_rows import best_row_sets
from podgraph.workload.optimise_shapes import Demands, best_of_all, best_of_list
from podgraph.workload.steps import StepHistogram

# A set must also serve what comes next. So the workload counts as if this many steps more had been seen: most of them
# of row counts nearby, up to that share of a step's rows away, some of any count up to the budget. Tuned on the first
# halves of five traces, that left a quarter of the waste on the second half of the shortest one, never more on any, and
# cost 0.005 % at most on the first.
PRIOR_STEPS, NEARBY, WIDTH = 300.0, 10 / 11, 0.15
# Time and memory of the search grow with the largest step. This one takes seconds, and no engine has such steps.
MAX_ROWS = 1 << 18


@dataclass(frozen=True)
class Limits:
    """What a set of buckets may be.

    Attributes:
        token_budget: query rows of one step of the engine.
        max_running: its requests.
        max_buckets: of the set.
        bucket_bytes: device memory of one bucket.
        max_bytes: of all buckets together, without what they share; None is no bound.

    Raises:
        ConfigError: no bucket is allowed, or a value is out of range.
    """

    token_budget: int
    max_running: int
    max_buckets: int
    bucket_bytes: int = 0
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_running", "max_buckets"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be > 0, got {getattr(self, name)}")
        if self.affordable < 1:
            raise ConfigError(
                f"memory budget: leaves {self.max_bytes} bytes for buckets of {self.bucket_bytes}, allowed: one at "
                "least; raise it"
            )

    @property
    def affordable(self) -> int:
        """How many buckets both bounds allow."""
        if self.max_bytes is None or not self.bucket_bytes:
            return self.max_buckets
        return min(self.max_buckets, self.max_bytes // self.bucket_bytes)


@dataclass(frozen=True)
class Tuned:
    """A set of buckets, and what is proven about it.

    Attributes:
        buckets: ascending by rows.
        expected_us: mean time of the workload's steps with this set.
        bound_us: no set of as many buckets, of any shapes, has a lower mean.
        method: how it was found, for people.
    """

    buckets: tuple[Bucket, ...]
    expected_us: float
    bound_us: float
    method: str

    @property
    def gap(self) -> float:
        """How far above the best possible the expected time can be at most, as a share."""
        return max(0.0, self.expected_us / self.bound_us - 1) if self.bound_us > 0 else 0.0


def tune(steps: StepHistogram, costs: Costs, eager: Eager, limits: Limits) -> Tuned:
    """The set of at most ``limits.affordable`` buckets with the least expected time.

    Raises:
        ConfigError: the workload is empty, or a limit excludes every set.
    """
    return frontier(steps, costs, eager, limits, [limits.affordable])[0]


def frontier(
    steps: StepHistogram, costs: Costs, eager: Eager, limits: Limits, counts: Sequence[int]
) -> tuple[Tuned, ...]:
    """The best set of at most each number of buckets, which must not exceed ``limits.affordable``.

    Raises:
        ConfigError: the workload is empty, or a step of it or of the engine is larger than ``MAX_ROWS``.
    """
    if not len(steps):
        raise ConfigError(f"{steps.source}: no step to tune for; give a trace that has some")
    most = max(int((steps.prefill_len + steps.decode_count).max()), limits.token_budget)
    if most > MAX_ROWS:
        raise ConfigError(
            f"{steps.source}: the largest step: got {most:,} query rows, allowed: at most {MAX_ROWS:,}; "
            "take such steps out of the log, or lower the token budget"
        )
    if costs.by_rows:
        return _by_rows(steps, costs, eager, limits, counts)
    real = _demands(steps, costs, eager)
    found = []
    for count in counts:
        if costs.choices is not None:
            shapes, us = costs.choices, costs.bucket_us(costs.choices)
            chosen, bound = best_of_list(real, shapes, us, np.zeros(len(shapes), np.int64), count, None)
            method = "best of the listed buckets: greedy, exchanges, HiGHS; Lagrangian bound"
        else:
            wished = _with_limits(real, limits)
            chosen, bound = best_of_all(real, wished, costs, 0, count, None)
            method = "greedy and exchanges on cells; Lagrangian bound over all buckets"
        found.append(_tuned(steps, costs, eager, [Bucket(*shape) for shape in chosen.tolist()], bound, method))
    return tuple(found)


def _by_rows(
    steps: StepHistogram, costs: Costs, eager: Eager, limits: Limits, counts: Sequence[int]
) -> tuple[Tuned, ...]:
    rows, real = np.maximum(rows_of(steps), 1), _demands(steps, costs, eager)
    own, weight = costs.own_us(steps), real.weight
    top = max(int(rows.max()), limits.token_budget, costs.last_rows)
    cost = _rows_us(costs, np.arange(1, top + 1))
    more, extra, mean_own = _spread(rows, weight, own, limits.token_budget)
    exact: Floats = np.where(np.isfinite(cost), cost, cost[np.isfinite(cost)].max(initial=0.0))[more - 1]
    sets = best_row_sets(
        np.concatenate([rows, more]),
        np.concatenate([weight, extra]),
        np.concatenate([real.without, eager_part(exact, mean_own, costs.host_us, eager)]),
        cost,
        max(counts),
    )
    bound = best_row_sets(rows, weight, real.floor, cost, max(counts)).bound
    slots = max(limits.max_running, int((steps.prefill_requests + steps.decode_count).max()))
    found = []
    for count in counts:
        buckets = [Bucket(min(n, slots), n, 0) for n in sets.rows[count]]
        method = "dynamic program over row counts, exact for all buckets; weights spread for steps to come"
        found.append(_tuned(steps, costs, eager, buckets, float(bound[count]), method))
    return tuple(found)


def _demands(steps: StepHistogram, costs: Costs, eager: Eager) -> Demands:
    without = eager_us(costs, steps, eager)
    floor = np.minimum(without, costs.split_us(steps))
    if costs.scope == "attention":
        # The dispatcher splits what no bucket holds, and what that costs depends on the set. The search is to avoid it.
        without = eager_us(costs, steps, "penalty")
    return Demands(demands(steps), steps.steps.astype(np.float64), without, costs.best_us(steps), floor)


def _tuned(
    steps: StepHistogram, costs: Costs, eager: Eager, buckets: Sequence[Bucket], bound: float, method: str
) -> Tuned:
    """``bound``: of the bucket part, summed over steps."""
    ordered = tuple(sorted(buckets, key=lambda b: (b.prefill_len + b.decode_count, b)))
    expected = float(steps.steps @ assign(steps, ordered, costs, eager).expected_us) / steps.total
    least = (float(steps.steps @ costs.own_us(steps)) + bound) / steps.total
    return Tuned(ordered, expected, min(least, expected), method)


def _rows_us(costs: Costs, rows: Counts) -> Floats:
    return costs.bucket_us(np.stack([rows, rows, np.zeros_like(rows)], axis=1))


def _spread(rows: Counts, weight: Floats, own: Floats, token_budget: int) -> tuple[Counts, Floats, Floats]:
    """Row counts that may come, ``[m]``; their weights; and the mean of ``own`` over the steps behind each."""
    top = max(token_budget, int(rows.max()))
    each = PRIOR_STEPS * NEARBY / weight.sum()
    anywhere = PRIOR_STEPS * (1 - NEARBY) / token_budget
    total = np.bincount(rows, weight, minlength=top + 1)
    parts = np.bincount(rows, weight * own, minlength=top + 1)
    spread, spread_own = np.zeros(top + 1), np.zeros(top + 1)
    for count in np.flatnonzero(total).tolist():
        reach = max(2, int(WIDTH * count))
        low, high = max(1, count - reach), min(top, count + reach)
        share = 1 - np.abs(np.arange(low, high + 1) - count) / (reach + 1)
        share *= each / share.sum()
        spread[low : high + 1] += share * total[count]
        spread_own[low : high + 1] += share * parts[count]
    spread[1 : token_budget + 1] += anywhere
    spread_own[1 : token_budget + 1] += anywhere * (weight @ own) / weight.sum()
    more = np.flatnonzero(spread)
    return more, spread[more], spread_own[more] / spread[more]


def _with_limits(steps: Demands, limits: Limits) -> Demands:
    """The workload, and a little weight on the largest steps of the engine."""
    budget, running = limits.token_budget, limits.max_running
    prefills = int(steps.demand[:, 1].max())
    largest = [
        (prefills, prefills, budget, budget),
        (running, 0, 0, running),
        (running, min(prefills, running), max(0, budget - running + prefills), budget),
    ]
    weight = np.full(len(largest), PRIOR_STEPS * (1 - NEARBY) / len(largest))
    without = np.full(len(largest), steps.without.max())
    return Demands(
        np.concatenate([steps.demand, np.array(largest, dtype=np.int64)]),
        np.concatenate([steps.weight, weight]),
        np.concatenate([steps.without, without]),
        np.concatenate([steps.least, np.zeros(len(largest))]),
        np.concatenate([steps.floor, without]),
    )
