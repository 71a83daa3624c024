"""What a set of buckets does for a workload: which step is served by what, and what that costs.

Each step takes the cheapest bucket that holds it. In scope ``step`` it takes no graph where that is cheaper still, and
where no bucket holds it: a miss. Engines' own lists are given the same choice. In scope ``attention`` a step that no
bucket holds is split over several replays, as the dispatcher does, and no step is served eagerly that can be split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from podgraph.shapes import Bucket
from podgraph.workload.costs import Costs, Counts, Eager, Floats, Scope, eager_us, shapes_of
from podgraph.workload.fits import BOUNDS, capacities, cheapest, demands
from podgraph.workload.steps import StepHistogram

MAX_REPLAYS = 64

# how a step is served
HIT, SPLIT, MISS, CHEAPER_EAGER = range(4)
KINDS = ("hit", "split", "miss", "cheaper eager")


@dataclass(frozen=True, eq=False)
class Assignment:
    """How each distinct step of a histogram is served. Every array is ``[n]``, times in microseconds of one step.

    Attributes:
        buckets: the set.
        kind: index into ``KINDS``, int64.
        bucket: index into ``buckets``, int64; -1 for steps served eagerly. Of a split step, the bucket of every part.
        replays: of that bucket, int64: 1, 0 for eager steps, more for split ones.
        reason: index into ``reasons`` for splits and misses, -1 for others, int64.
        reasons: what is exceeded, such as ``prefill_len > 512``.
        rows: query rows of the step, int64.
        padded_rows: empty rows of the bucket, int64; 0 for splits and eager steps.
        expected_us: the whole step, as it is served.
        exact_us: the whole step in a graph without padding.
        best_us: the whole step in the cheapest of all buckets; below ``exact_us`` where a cost table falls.
    """

    buckets: tuple[Bucket, ...]
    kind: Counts
    bucket: Counts
    replays: Counts
    reason: Counts
    reasons: tuple[str, ...]
    rows: Counts
    padded_rows: Counts
    expected_us: Floats
    exact_us: Floats
    best_us: Floats


@dataclass(frozen=True)
class BucketUse:
    """What one bucket of a set does.

    Attributes:
        bucket: its shape.
        us: what depends on the bucket in a step's time.
        steps: steps that it serves in one replay.
        share: of all steps.
        padded_rows: empty rows over those steps.
        padding_us: their time beyond the best bucket's, in all.
    """

    bucket: Bucket
    us: float
    steps: int
    share: float
    padded_rows: int
    padding_us: float


@dataclass(frozen=True)
class Coverage:
    """An assignment summed up. Means are over all steps; times in microseconds.

    Attributes:
        scope: ``step`` or ``attention``.
        source: where costs are from.
        eager: how eager steps are priced.
        steps: how many there are.
        hits, splits, misses, cheaper_eager: steps served by one replay; by several; without a graph, as no bucket
            holds them; and without one although a bucket holds them.
        hit_time, split_time, miss_time, eager_time: the shares of the expected time that those take.
        reasons: steps that are split or missed, by what is exceeded, commonest first.
        expected_us: mean time of a step.
        exact_us: the same in graphs without padding, and no eager step.
        best_us: the same in the cheapest of all buckets: no set does better.
        padding_us: mean time that hits take beyond ``best_us``.
        padded_rows: share of the rows of replayed buckets that are empty.
        waste: ``expected_us / best_us - 1``, never negative: what this package calls waste.
        waste_unpadded: ``expected_us / exact_us - 1``; may be negative where a cost table falls.
        uses: every bucket, in the order of the set.
    """

    scope: Scope
    source: str
    eager: Eager
    steps: int
    hits: int
    splits: int
    misses: int
    cheaper_eager: int
    hit_time: float
    split_time: float
    miss_time: float
    eager_time: float
    reasons: dict[str, int]
    expected_us: float
    exact_us: float
    best_us: float
    padding_us: float
    padded_rows: float
    waste: float
    waste_unpadded: float
    uses: tuple[BucketUse, ...]


def assign(steps: StepHistogram, buckets: Sequence[Bucket], costs: Costs, eager: Eager = "penalty") -> Assignment:
    """Serves every distinct step of a histogram by a set of buckets.

    Args:
        steps: the workload, ``n`` distinct steps.
        buckets: the set, in any order; it may be empty.
        costs: what buckets cost.
        eager: how a step without a graph is priced.
    """
    shapes = shapes_of(buckets)
    us, own, without = costs.bucket_us(shapes), costs.own_us(steps), eager_us(costs, steps, eager)
    demand, capacity = demands(steps), capacities(shapes)
    bucket = cheapest(demand, capacity, us)
    held = bucket >= 0
    price = np.where(held, us[bucket] if us.size else np.inf, np.inf)
    kind = np.where(held, HIT, MISS)
    replays = held.astype(np.int64)
    if costs.scope == "attention":
        _split(demand, capacity, us, np.flatnonzero(~held), bucket, replays, price)
        kind[replays > 1] = SPLIT
    else:
        kind[(kind == HIT) & (without < price)] = CHEAPER_EAGER
    graphed = (kind == HIT) | (kind == SPLIT)
    bucket, replays = np.where(graphed, bucket, -1), np.where(graphed, replays, 0)
    reason, reasons = _reasons(demand, capacity, (kind == MISS) | (kind == SPLIT))
    rows = demand[:, BOUNDS.index("rows")]
    padded = np.zeros_like(rows)
    hits = kind == HIT
    padded[hits] = capacity[bucket[hits], BOUNDS.index("rows")] - rows[hits]
    return Assignment(
        buckets=tuple(buckets),
        kind=kind,
        bucket=bucket,
        replays=replays,
        reason=reason,
        reasons=reasons,
        rows=rows,
        padded_rows=padded,
        expected_us=own + np.where(graphed, price, without),
        exact_us=own + costs.exact_us(steps),
        best_us=own + costs.best_us(steps),
    )


def coverage(steps: StepHistogram, buckets: Sequence[Bucket], costs: Costs, eager: Eager = "penalty") -> Coverage:
    """Serves a histogram by a set of buckets, and sums up: `assign`, then `summarise`."""
    return summarise(steps, assign(steps, buckets, costs, eager), costs, eager)


def summarise(steps: StepHistogram, assignment: Assignment, costs: Costs, eager: Eager) -> Coverage:
    """Sums an assignment up; arguments as given to `assign`."""
    weights = steps.steps
    total = max(1, int(weights.sum()))
    spent = weights * assignment.expected_us
    hit = assignment.kind == HIT
    padding = np.where(hit, assignment.expected_us - assignment.best_us, 0.0)
    counts = [int(weights[assignment.kind == kind].sum()) for kind in range(len(KINDS))]
    times = [float(spent[assignment.kind == kind].sum() / max(spent.sum(), 1e-300)) for kind in range(len(KINDS))]
    expected, exact, best = (
        float(weights @ us / total) for us in (assignment.expected_us, assignment.exact_us, assignment.best_us)
    )
    replayed = int(weights[hit] @ (assignment.rows + assignment.padded_rows)[hit])
    by_reason = np.bincount(
        assignment.reason[assignment.reason >= 0],
        weights[assignment.reason >= 0],
        minlength=len(assignment.reasons),
    ).astype(np.int64)
    order = np.argsort(-by_reason, kind="stable")
    return Coverage(
        scope=costs.scope,
        source=costs.source,
        eager=eager,
        steps=int(weights.sum()),
        hits=counts[HIT],
        splits=counts[SPLIT],
        misses=counts[MISS],
        cheaper_eager=counts[CHEAPER_EAGER],
        hit_time=times[HIT],
        split_time=times[SPLIT],
        miss_time=times[MISS],
        eager_time=times[CHEAPER_EAGER],
        reasons={assignment.reasons[i]: int(by_reason[i]) for i in order.tolist() if by_reason[i]},
        expected_us=expected,
        exact_us=exact,
        best_us=best,
        padding_us=float(weights @ padding / total),
        padded_rows=int(weights @ assignment.padded_rows) / max(1, replayed),
        waste=expected / best - 1 if best else 0.0,
        waste_unpadded=expected / exact - 1 if exact else 0.0,
        uses=_uses(weights, assignment, hit, padding, costs, total),
    )


def _uses(
    weights: Counts, assignment: Assignment, hit: np.ndarray, padding: Floats, costs: Costs, total: int
) -> tuple[BucketUse, ...]:
    chosen, count = assignment.bucket[hit], len(assignment.buckets)
    served = np.bincount(chosen, weights[hit], minlength=count)
    rows = np.bincount(chosen, (weights * assignment.padded_rows)[hit], minlength=count)
    lost = np.bincount(chosen, (weights * padding)[hit], minlength=count)
    us = costs.bucket_us(shapes_of(assignment.buckets))
    columns = zip(assignment.buckets, us.tolist(), served.tolist(), rows.tolist(), lost.tolist(), strict=True)
    return tuple(BucketUse(b, cost, int(n), n / total, int(r), lost_us) for b, cost, n, r, lost_us in columns)


def _split(
    demand: Counts, capacity: Counts, us: Floats, missed: Counts, bucket: Counts, replays: Counts, price: Floats
) -> None:
    """Finds the fewest equal parts that a bucket holds, for steps that none holds whole; fills in the last three.

    An estimate of what the dispatcher does, as a histogram does not know single requests: requests and rows are dealt
    out evenly, and each part has one prefill more, as a prefill may be cut between two of them.
    """
    for parts in range(2, MAX_REPLAYS + 1):
        if not missed.size or not us.size:
            return
        requests, prefills, rows, _ = demand[missed].T
        decodes = -(-(requests - prefills) // parts)
        some = np.where(prefills > 0, -(-prefills // parts) + 1, 0)
        length = -(-rows // parts)
        part = np.stack([some + decodes, some, length, length + decodes], axis=1)
        chosen = cheapest(part, capacity, us)
        found = chosen >= 0
        index = missed[found]
        bucket[index], replays[index], price[index] = chosen[found], parts, parts * us[chosen[found]]
        missed = missed[~found]


def _reasons(demand: Counts, capacity: Counts, wanted: np.ndarray) -> tuple[Counts, tuple[str, ...]]:
    """The first bound that no bucket meets, or that only all together are too much: index by step, and texts."""
    most = capacity.max(axis=0, initial=0)
    exceeded = demand > most
    texts = tuple(f"{name} > {limit}" for name, limit in zip(BOUNDS, most.tolist(), strict=True))
    first = np.where(exceeded.any(axis=1), exceeded.argmax(axis=1), len(BOUNDS))
    return np.where(wanted, first, -1), (*texts, "no bucket holds the combination")
