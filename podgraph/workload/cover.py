"""Which of many buckets to have, where what each costs each kind of step is a table: a facility location problem.

Minimise, over sets Y of at most K buckets of at most M bytes, ``sum over s of min(without[s], min over b in Y of
us[s, b])``. Solved from both sides:

- *Upper*: greedy additions, then the best single exchanges.
- *Lower*: each step must be served once; that condition is priced with multipliers l[s] (Lagrange). For any l,
  ``sum of l + sum of min(0, without - l) + min over Y of sum over b in Y of sum over s of min(0, us[s, b] - l[s])`` is
  at most the optimum: the relaxed problem lets a step be served by several buckets or none, and pays l[s] for what is
  missing. The minimum over Y is a choice of the K most negative terms; bytes are priced by one more multiplier.
- *Exact*: a bucket that would raise the lower bound above the upper one cannot be in a better set. What is left goes to
  HiGHS as a mixed-integer program where it is small, with a bound on nodes, so that results do not depend on the clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from podgraph.errors import ConfigError
from podgraph.workload.costs import Counts, Floats

ITERATIONS = 200
EXCHANGES = 60
MAX_MILP_CELLS = 30_000
MILP_NODES = 2_000
MILP_SECONDS = 30.0  # only against a stuck solver: results that it cuts off are not used


@dataclass(frozen=True, eq=False)
class Cover:
    """One problem: ``n`` kinds of steps, ``m`` buckets.

    Attributes:
        us: ``[n, m]``: a kind's cost in a bucket, all of its steps together; infinite where it does not fit.
        without: ``[n]``: the same without a graph.
        size: bytes of each bucket, ``[m]``, int64.
        max_buckets: of a set.
        max_bytes: of a set; None is no bound.
    """

    us: Floats
    without: Floats
    size: Counts
    max_buckets: int
    max_bytes: int | None = None

    def cost(self, chosen: Counts) -> float:
        """Of a set of buckets."""
        return float(np.minimum(self.without, self.us[:, chosen].min(axis=1, initial=np.inf)).sum())

    def allows(self, chosen: Counts) -> bool:
        """Whether a set keeps within both bounds."""
        return chosen.size <= self.max_buckets and (
            self.max_bytes is None or int(self.size[chosen].sum()) <= self.max_bytes
        )


@dataclass(frozen=True, eq=False)
class Solution:
    """A set and what is proven about it.

    Attributes:
        chosen: indices of buckets, ascending.
        cost: of the set.
        bound: no set costs less.
    """

    chosen: Counts
    cost: float
    bound: float


def solve(problem: Cover) -> Solution:
    """The best set that is found, and a proven bound; the same for the same problem."""
    affordable = np.flatnonzero(problem.size <= (np.inf if problem.max_bytes is None else problem.max_bytes))
    if affordable.size < problem.size.size:
        inner = Cover(
            problem.us[:, affordable],
            problem.without,
            problem.size[affordable],
            problem.max_buckets,
            problem.max_bytes,
        )
        solution = solve(inner)
        return Solution(affordable[solution.chosen], solution.cost, solution.bound)
    chosen = heuristic(problem)
    cost = problem.cost(chosen)
    if not problem.us.size:
        return Solution(chosen, cost, cost)
    bound, keep = lower_bound(problem, cost, problem.us[:, chosen].min(axis=1, initial=np.inf))
    if bound < cost * (1 - 1e-9):
        exact = _milp(problem, np.union1d(np.flatnonzero(keep), chosen))
        if exact is not None:
            better, proven = exact
            # Buckets left out are in no set that is cheaper than `cost`.
            bound = max(bound, min(cost, proven))
            if problem.allows(better) and problem.cost(better) < cost:
                chosen, cost = better, problem.cost(better)
    return Solution(chosen, cost, min(bound, cost))


def heuristic(problem: Cover) -> Counts:
    """A good set: the best of two greedy ones, by gain and by gain per byte, each improved by exchanges."""
    sets = [_exchange(problem, _greedy(problem, per_byte)) for per_byte in {False, problem.max_bytes is not None}]
    return min(sets, key=problem.cost)


def _greedy(problem: Cover, per_byte: bool) -> Counts:
    now, room = problem.without.copy(), problem.max_bytes
    chosen: list[int] = []
    while len(chosen) < problem.max_buckets and problem.size.size:
        gain = np.maximum(now[:, None] - problem.us, 0.0).sum(axis=0)
        gain[chosen] = 0.0
        if room is not None:
            gain[problem.size > room] = 0.0
        rate = gain / np.maximum(problem.size, 1) if per_byte else gain
        best = int(rate.argmax())
        if gain[best] <= 0:
            break
        chosen.append(best)
        now = np.minimum(now, problem.us[:, best])
        room = None if room is None else room - int(problem.size[best])
    return np.array(sorted(chosen), dtype=np.int64)


def _exchange(problem: Cover, chosen: Counts) -> Counts:
    """Swaps one bucket of the set for another as long as that helps, the best swap first."""
    for _ in range(EXCHANGES):
        if not chosen.size:
            break
        options = np.concatenate([problem.us[:, chosen], problem.without[:, None]], axis=1)
        near = options.argmin(axis=1)
        first, second = np.partition(options, 1, axis=1)[:, :2].T
        # served by `near`, or by the new bucket where that is cheaper; without `near`, by the second best
        gain = np.maximum(first[:, None] - problem.us, 0.0).sum(axis=0)
        loss = np.zeros((chosen.size, problem.size.size))
        for position in range(chosen.size):
            mine = near == position
            us = problem.us[mine]
            loss[position] = (np.minimum(us, second[mine, None]) - np.minimum(us, first[mine, None])).sum(axis=0)
        change = loss - gain
        change[:, chosen] = np.inf
        if problem.max_bytes is not None:
            used = int(problem.size[chosen].sum())
            change[used - problem.size[chosen][:, None] + problem.size[None, :] > problem.max_bytes] = np.inf
        out, new = np.unravel_index(change.argmin(), change.shape)
        if not change[out, new] < -1e-9 * max(first.sum(), 1e-300):
            break
        chosen = np.sort(np.append(np.delete(chosen, out), new))
    return chosen


def lower_bound(problem: Cover, cost: float, start: Floats | None = None) -> tuple[float, np.ndarray]:
    """The Lagrangian bound, and which buckets a set cheaper than ``cost`` may still hold, ``[m]``, bool.

    Args:
        problem: the table.
        cost: of a set that was found; steps of the search are as long as the distance to it.
        start: first multipliers, ``[n]``, such as what each kind costs in that set.
    """
    prices = problem.without.copy() if start is None else np.minimum(start, problem.without)
    best, keep, patience, scale = -np.inf, np.ones(problem.size.size, dtype=np.bool_), 0, 1.0
    for _ in range(ITERATIONS):
        reduced = np.minimum(problem.us - prices[:, None], 0.0)
        terms = reduced.sum(axis=0)
        value, taken, rise = _relaxed_set(problem, terms)
        value += float(prices.sum() + np.minimum(problem.without - prices, 0.0).sum())
        keep &= value + rise <= cost * (1 + 1e-9)
        if value > best + 1e-7 * abs(best):
            patience = 0
        else:
            patience += 1
        best = max(best, value)
        if best >= cost * (1 - 1e-9):
            break
        if patience == 10:
            scale, patience = scale / 2, 0
        served = (reduced[:, taken] < 0).sum(axis=1) + (problem.without < prices)
        slope = 1.0 - served
        norm = float(slope @ slope)
        if norm == 0 or scale < 1e-4:
            break
        prices = np.minimum(prices + scale * (cost - value) / norm * slope, problem.without)
    return best, keep


def _relaxed_set(problem: Cover, terms: Floats) -> tuple[float, Counts, Floats]:
    """The least sum of terms over sets that the bounds allow, from below.

    Returns:
        The value, a set that has it (for the slope), and by how much it rises at least where a bucket must be taken.
    """

    def priced(price: float) -> tuple[float, Counts, Floats]:
        each = terms + price * problem.size
        order = np.argsort(each, kind="stable")[: problem.max_buckets]
        taken = order[each[order] < 0]
        total = float(each[taken].sum())
        # one that is taken by force takes the place of the last one, or an empty one
        last = float(each[taken[-1]]) if taken.size == problem.max_buckets else 0.0
        rise = np.where(np.isin(np.arange(each.size), taken), 0.0, each - last)
        return total - price * (problem.max_bytes or 0), taken, rise

    value, taken, rise = priced(0.0)
    if problem.max_bytes is None or int(problem.size[taken].sum()) <= problem.max_bytes:
        return value, taken, rise
    # the value is concave in the price of a byte, and rises as long as the set is too large
    low, high = 0.0, float((-terms / np.maximum(problem.size, 1)).max())
    best = (value, taken, rise)
    for _ in range(40):
        middle = (low + high) / 2
        now = priced(middle)
        if now[0] > best[0]:
            best = now
        low, high = (middle, high) if int(problem.size[now[1]].sum()) > problem.max_bytes else (low, middle)
    return best


def _milp(problem: Cover, buckets: Counts) -> tuple[Counts, float] | None:
    """The exact optimum over some of the buckets, and what the solver proved; None where it is too large for it.

    Variables: whether a bucket is there, and which of them serves a kind of step; no variable means no graph.
    """
    try:
        from scipy import sparse
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError:
        raise ConfigError(
            "the exact search needs scipy, which is not installed: pip install 'podgraph[tune]'"
        ) from None

    us = problem.us[:, buckets]
    step, bucket = np.nonzero(us < problem.without[:, None])
    cells, m, n = step.size, buckets.size, problem.without.size
    if cells > MAX_MILP_CELLS:
        return None
    if not cells:
        return np.zeros(0, dtype=np.int64), float(problem.without.sum())
    scale = 1e3 / max(float(problem.without.sum()), 1e-300)
    saved = (us[step, bucket] - problem.without[step]) * scale
    numbers = np.arange(cells)
    ones = np.ones(cells)
    once = sparse.csr_array((ones, (step, m + numbers)), shape=(n, m + cells))
    there = sparse.csr_array(
        (np.concatenate([ones, -ones]), (np.concatenate([numbers, numbers]), np.concatenate([m + numbers, bucket]))),
        shape=(cells, m + cells),
    )
    bounds = [LinearConstraint(once, -np.inf, 1.0), LinearConstraint(there, -np.inf, 0.0)]
    count = sparse.csr_array((np.ones(m), (np.zeros(m, np.int64), np.arange(m))), shape=(1, m + cells))
    bounds.append(LinearConstraint(count, -np.inf, float(problem.max_buckets)))
    if problem.max_bytes is not None:
        unit = max(float(problem.max_bytes), 1.0)
        size = problem.size[buckets] / unit
        total = sparse.csr_array((size, (np.zeros(m, np.int64), np.arange(m))), shape=(1, m + cells))
        bounds.append(LinearConstraint(total, -np.inf, problem.max_bytes / unit))
    result = milp(
        np.concatenate([np.zeros(m), saved]),
        constraints=bounds,
        bounds=Bounds(0.0, 1.0),
        integrality=np.concatenate([np.ones(m), np.zeros(cells)]),
        options={"node_limit": MILP_NODES, "mip_rel_gap": 0.0, "time_limit": MILP_SECONDS},
    )
    if result.status not in (0, 1) or result.x is None or "ime limit" in result.message:
        return None
    proven = float(problem.without.sum()) + (result.mip_dual_bound - 1e-6) / scale
    return buckets[result.x[:m] > 0.5], proven
