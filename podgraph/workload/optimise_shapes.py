"""The best sets of buckets where all three axes have a price: bounds for all buckets there are, from few of them.

Costs are either a list (`Costs.choices`: no other bucket can be had), or never fall as a bucket grows. In the second
case the buckets fill a box, which is cut into cells along its axes. A cell counts once as its largest bucket, at that
one's price: a real choice. And once as an ideal bucket with the capacities of the cell's largest and the price of its
smallest: whatever bucket of the cell a set holds, the ideal one serves the same steps for no more. So the optimum over
ideal buckets bounds all sets of all buckets from below.

Buckets beyond the box are no use. With most requests n, rows r and decodes d of any step: ``decode_count = d`` serves
what a larger one does, and so do ``prefill_len = r`` and ``batch = n + d``, which leaves n slots beside d decodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from podgraph.workload.costs import Costs, Counts, Floats
from podgraph.workload.cover import Cover, heuristic, lower_bound, solve
from podgraph.workload.fits import BOUNDS, capacities, cheapest, fitting

LEVELS = (10, 18, 10)  # of batch, prefill_len, decode_count
MAX_KINDS = 3_000


@dataclass(frozen=True, eq=False)
class Demands:
    """Steps as the search sees them.

    Attributes:
        demand: ``[n, 4]``, as `podgraph.workload.fits.demands` gives it.
        weight: how often each happens, ``[n]``.
        without: the bucket part of its cost where no bucket holds it, ``[n]``, as the search sees it.
        least: no bucket that holds it costs less, ``[n]``.
        floor: without a bucket that holds it, it costs no less, ``[n]``; for bounds.
    """

    demand: Counts
    weight: Floats
    without: Floats
    least: Floats
    floor: Floats

    def cost(self, shapes: Counts, us: Floats) -> float:
        """Of a set, summed over steps."""
        chosen = cheapest(self.demand, capacities(shapes), us)
        price = np.where(chosen >= 0, us[chosen] if us.size else np.inf, np.inf)
        return float(self.weight @ np.minimum(price, self.without))


def best_of_list(
    steps: Demands, shapes: Counts, us: Floats, size: Counts, max_buckets: int, max_bytes: int | None
) -> tuple[Counts, float]:
    """The best set of listed buckets, ``[k, 3]``, and a bound for all such sets.

    Args:
        steps: the workload.
        shapes, us, size: ``[m, 3]``, ``[m]``, ``[m]``: buckets, what they cost, their bytes.
        max_buckets, max_bytes: bounds of a set.
    """
    kept = _undominated(capacities(shapes), us, size)
    solution = solve(_cover(steps, capacities(shapes)[kept], us[kept], size[kept], max_buckets, max_bytes, up=True))
    bound = solution.bound
    if len(steps.demand) > MAX_KINDS or (steps.floor < steps.without).any():
        bound = _bound(
            steps, _cover(steps, capacities(shapes)[kept], us[kept], size[kept], max_buckets, max_bytes, up=False)
        )
    return shapes[kept][solution.chosen], bound


def best_of_all(
    steps: Demands, wished: Demands, costs: Costs, size: int, max_buckets: int, max_bytes: int | None
) -> tuple[Counts, float]:
    """A good set of any buckets, ``[k, 3]``, and a bound for all sets, where costs never fall as a bucket grows.

    Args:
        steps: the workload, for the bound.
        wished: what the set is chosen for: the same, and what else it should hold.
        costs: what buckets cost.
        size: bytes of a bucket.
        max_buckets, max_bytes: bounds of a set.
    """
    if max_bytes is not None:
        max_buckets = min(max_buckets, max_bytes // size if size else max_buckets)
    low, high = _cells(wished)
    real = high[high[:, 2] <= high[:, 0]]
    us = costs.bucket_us(real)
    flat = np.zeros(len(real), dtype=np.int64)
    kept = _undominated(capacities(real), us, flat)
    real, us = real[kept], us[kept]
    solution = solve(_cover(wished, capacities(real), us, flat[kept], max_buckets, None, up=True))
    chosen = _shrunk(wished, real[solution.chosen], costs)
    ideal = np.stack(
        [high[:, 0], high[:, 0] - low[:, 2], high[:, 1], high[:, 1] + high[:, 2]],
        axis=1,
    )
    price = costs.bucket_us(low)
    kept = _undominated(ideal, price, np.zeros(len(ideal), dtype=np.int64))
    flat = np.zeros(kept.size, dtype=np.int64)
    return chosen, _bound(steps, _cover(steps, ideal[kept], price[kept], flat, max_buckets, None, up=False))


def _bound(steps: Demands, loose: Cover) -> float:
    """A lower bound from a table that costs no more than the workload does."""
    chosen = heuristic(loose)
    served = loose.us[:, chosen].min(axis=1, initial=np.inf)
    bound = lower_bound(loose, loose.cost(chosen), served)[0]
    return max(bound, float(steps.weight @ np.minimum(steps.least, steps.floor)))


def _cells(steps: Demands) -> tuple[Counts, Counts]:
    """The smallest and the largest bucket of every cell, ``[m, 3]`` each."""
    requests, _, lengths, rows = steps.demand.T
    decodes = rows - lengths
    box = (
        int(requests.max(initial=1)) + int(decodes.max(initial=0)),
        int(rows.max(initial=1)),
        int(decodes.max(initial=0)),
    )
    ends = [
        _levels(values, steps.weight, most, count)
        for values, most, count in zip((requests, lengths, decodes), box, LEVELS, strict=True)
    ]
    starts = [np.concatenate([[0], end[:-1] + 1]) for end in ends]
    starts[0][0] = 1
    high = np.stack([axis.ravel() for axis in np.meshgrid(*ends, indexing="ij")], axis=1)
    low = np.stack([axis.ravel() for axis in np.meshgrid(*starts, indexing="ij")], axis=1)
    return low, high


def _levels(values: Counts, weight: Floats, most: int, count: int) -> Counts:
    """Ends of cells from 0 to ``most``, ascending: every value where they are few, else even by weight and by size."""
    every = np.unique(np.append(values, most))
    if most + 1 <= 2 * count:
        return np.arange(0 if values.min(initial=0) == 0 else 1, most + 1)
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weight[order]) / max(float(weight.sum()), 1e-300)
    shares = values[order][np.searchsorted(reached, np.linspace(0, 1, count // 2 + 1)[1:-1]).clip(max=values.size - 1)]
    sizes = (
        np.geomspace(max(1, int(every[every > 0].min(initial=1))), most, count - count // 2).round().astype(np.int64)
    )
    zero = [0] if values.min(initial=0) == 0 else []
    return np.unique(np.concatenate([zero, shares, sizes, [int(values.max(initial=1)), most]]).astype(np.int64))


def _undominated(capacity: Counts, us: Floats, size: Counts) -> Counts:
    """Indices of buckets than which no other holds as much for no more time and bytes; the first of equal ones."""
    kept = np.flatnonzero(np.isfinite(us))
    # a bucket that dominates another comes before it: cheaper, then larger in all
    order = kept[np.lexsort([-capacity[kept].sum(axis=1), size[kept], us[kept]])]
    alive: list[int] = []
    offers = np.concatenate([capacity, -size[:, None]], axis=1)
    for index in order.tolist():
        if not (offers[alive] >= offers[index]).all(axis=1).any():
            alive.append(index)
    return np.array(sorted(alive), dtype=np.int64)


def _cover(
    steps: Demands, capacity: Counts, us: Floats, size: Counts, max_buckets: int, max_bytes: int | None, up: bool
) -> Cover:
    """The table of what each kind of step costs in each bucket.

    Steps that the same buckets hold are one kind. Where these are too many, demands are rounded to fewer values:
    ``up``, for a search, or down, for a bound: then the table costs no more than the steps do, whatever serves them.
    """
    demand, levels = steps.demand, 4 * MAX_KINDS
    while True:
        rounded = np.stack(
            [_rounded(demand[:, bound], capacity[:, bound], levels, up) for bound in range(len(BOUNDS))], axis=1
        )
        kinds, kind = np.unique(rounded, axis=0, return_inverse=True)
        if len(kinds) <= MAX_KINDS or levels <= 4:
            break
        levels //= 2
    kind = kind.ravel()
    unserved = steps.without if up else np.minimum(steps.floor, steps.without)
    without: Floats = np.bincount(kind, steps.weight * unserved, minlength=len(kinds)).astype(np.float64)
    order = np.argsort(kind, kind="stable")
    starts = np.searchsorted(kind[order], np.arange(len(kinds)))
    weight, price, least = steps.weight[order], unserved[order], steps.least[order]
    table = np.empty((len(kinds), us.size))
    for bucket, cost in enumerate(us.tolist()):
        # a step in a bucket that is dearer than none goes without; one in an ideal bucket costs as in its best
        us_of_steps = np.minimum(cost if up else np.maximum(cost, least), price)
        table[:, bucket] = np.add.reduceat(weight * us_of_steps, starts)
    table[~fitting(kinds, capacity)] = np.inf
    return Cover(table, without, size, max_buckets, max_bytes)


def _rounded(values: Counts, offered: Counts, levels: int, up: bool) -> Counts:
    """Each value as one of the offered ones, which holds the same steps: the next larger; a larger one than all stays.

    Where the offered ones are more than ``levels``, only some of them count.
    """
    ends = np.unique(offered)
    if ends.size > levels:
        ends = ends[np.unique(np.linspace(0, ends.size - 1, levels).round().astype(np.int64))]
    position = np.searchsorted(ends, values)
    beyond = np.append(ends, np.iinfo(np.int64).max)
    if up or ends.size == np.unique(offered).size:
        result: Counts = beyond[position]
        return result
    # down: what is above the last end that does not exceed the value is at least one more than that
    exact = beyond[position] == values
    below = np.append(0, ends + 1)[position]
    return np.where(exact, values, below)


def _shrunk(steps: Demands, shapes: Counts, costs: Costs) -> Counts:
    """Each bucket cut to what its steps need, where that is cheaper; twice, as steps move."""
    for _ in range(2):
        us = costs.bucket_us(shapes)
        chosen = cheapest(steps.demand, capacities(shapes), us)
        cut = shapes.copy()
        for index in range(len(shapes)):
            mine = steps.demand[chosen == index]
            if len(mine):
                requests, slots, length, rows = mine.max(axis=0)
                decodes = np.arange(int((mine[:, 3] - mine[:, 2]).max()) + 1)
                options = np.stack(
                    [np.maximum(requests, slots + decodes), np.maximum(length, rows - decodes), decodes], axis=1
                )
                # a batch that leaves prefill slots without a prefill row is none
                options = options[(options[:, 1] > 0) == (options[:, 0] > options[:, 2])]
                if len(options):
                    # the most decodes of equal ones: a decode is computed as one only there
                    prices = costs.bucket_us(options)
                    cut[index] = options[len(options) - 1 - prices[::-1].argmin()]
        cut = np.unique(cut, axis=0)
        if steps.cost(cut, costs.bucket_us(cut)) > steps.cost(shapes, us):
            break
        shapes = cut
    return shapes
