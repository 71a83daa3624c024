"""Which bucket to add next, and which to drop, and what that does to the mean step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from podgraph.shapes import Bucket
from podgraph.workload.costs import Costs, Counts, Eager, Floats, shapes_of, tight_shapes
from podgraph.workload.coverage import Assignment, Coverage, assign, summarise
from podgraph.workload.fits import PAIRS, capacities, demands, fitting
from podgraph.workload.steps import COLUMNS, StepHistogram

STEPS_ON = 5  # changes that are named, one after the other
LOOKED_AT = 64  # kinds of steps that waste most, whose own shape may be worth a bucket; buckets that serve least
TRIED = 8  # of the candidates, the best by a first estimate


@dataclass(frozen=True)
class Change:
    """One bucket more or less, after those before it in the list.

    Attributes:
        bucket: to add or to drop.
        gain_us: of the mean step, microseconds; negative is a loss.
        expected_us: mean time of a step afterwards.
        waste: afterwards; see `Coverage`.
        covered: share of steps that one replay serves afterwards.
        buckets: how many there are afterwards.
    """

    bucket: Bucket
    gain_us: float
    expected_us: float
    waste: float
    covered: float
    buckets: int


def additions(
    steps: StepHistogram, costs: Costs, eager: Eager, buckets: Sequence[Bucket], more: Iterable[Bucket]
) -> tuple[Change, ...]:
    """What helps most, then what helps most beside it, and so on; only what helps.

    Candidates are ``more`` and the shapes of the steps that waste most. Each is priced by what its steps would save;
    those that save most are tried for good.
    """
    have = list(buckets)
    changes: list[Change] = []
    found, now = _served(steps, have, costs, eager)
    wasted = steps.steps * (found.expected_us - found.best_us)
    worst = np.argsort(-wasted, kind="stable")[:LOOKED_AT]
    own = (Bucket(*shape) for shape in tight_shapes(steps)[worst].tolist())
    candidates = sorted({bucket for bucket in (*more, *own) if bucket.unreachable is None} - set(have))
    while candidates and len(changes) < STEPS_ON:
        estimate = _savings(steps, costs, found, shapes_of(candidates))
        best: tuple[Bucket, Assignment, Coverage] | None = None
        for index in np.argsort(-estimate, kind="stable")[:TRIED].tolist():
            tried, after = _served(steps, [*have, candidates[index]], costs, eager)
            if after.expected_us < (now if best is None else best[2]).expected_us * (1 - 1e-12):
                best = candidates[index], tried, after
        if best is None:
            break
        changes.append(_change(best[0], now, best[2]))
        have.append(best[0])
        candidates.remove(best[0])
        _, found, now = best
    return tuple(changes)


def removals(steps: StepHistogram, costs: Costs, eager: Eager, buckets: Sequence[Bucket]) -> tuple[Change, ...]:
    """What hurts least, then what hurts least without it, and so on; a bucket is left.

    Buckets that serve no step are not among them: nothing is lost without them. Where very many serve steps, only those
    are looked at that serve the fewest.
    """
    idle = set(unused(assign(steps, buckets, costs, eager)))
    have = [b for b in buckets if b not in idle]
    changes: list[Change] = []
    while len(have) > 1 and len(changes) < STEPS_ON:
        found, now = _served(steps, have, costs, eager)
        served = [int(steps.steps[found.bucket == index].sum()) for index in range(len(have))]
        fewest = np.argsort(served, kind="stable")[:LOOKED_AT].tolist()
        losses = [_loss(steps, costs, eager, have, found, index) for index in fewest]
        index = fewest[int(np.argmin(losses))]
        bucket = have.pop(index)
        changes.append(_change(bucket, now, _served(steps, have, costs, eager)[1]))
    return tuple(changes)


def unused(found: Assignment) -> tuple[Bucket, ...]:
    """The buckets that serve no step, not even a part of one."""
    used = set(found.bucket.tolist())
    return tuple(bucket for index, bucket in enumerate(found.buckets) if index not in used)


def _served(steps: StepHistogram, buckets: Sequence[Bucket], costs: Costs, eager: Eager) -> tuple[Assignment, Coverage]:
    found = assign(steps, buckets, costs, eager)
    return found, summarise(steps, found, costs, eager)


def _change(bucket: Bucket, before: Coverage, after: Coverage) -> Change:
    gain = before.expected_us - after.expected_us
    covered = after.hits / max(1, after.steps)
    return Change(bucket, gain, after.expected_us, after.waste, covered, len(after.uses))


def _savings(steps: StepHistogram, costs: Costs, found: Assignment, shapes: Counts) -> Floats:
    """``[m, 3]`` -> ``[m]``: what steps would save in each bucket. Parts of split steps are not looked at."""
    demand, capacity, us = demands(steps), capacities(shapes), costs.bucket_us(shapes)
    price = found.expected_us - costs.own_us(steps)
    total: Floats = np.zeros(len(shapes))
    size = max(1, PAIRS // max(1, len(shapes)))
    for start in range(0, len(steps), size):
        part = slice(start, start + size)
        saved = np.where(fitting(demand[part], capacity), price[part, None] - us[None, :], 0.0)
        total += steps.steps[part] @ np.maximum(saved, 0.0)
    return total


def _loss(steps: StepHistogram, costs: Costs, eager: Eager, have: list[Bucket], found: Assignment, index: int) -> float:
    """Without one bucket, over all steps: only those that it serves are served otherwise."""
    hit = np.flatnonzero(found.bucket == index)
    some = StepHistogram(**{name: getattr(steps, name)[hit] for name in COLUMNS}, source=steps.source)
    after = assign(some, [*have[:index], *have[index + 1 :]], costs, eager)
    return float(some.steps @ (after.expected_us - found.expected_us[hit]))
