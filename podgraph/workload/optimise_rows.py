"""The best sets of buckets where a bucket's cost depends on its rows only: exact, by dynamic programming.

Why no other bucket can do better. Let c(n) be the cost of n rows, and c*(n) the least cost of n rows or more.

- A bucket of P prefill rows, D decodes and any slots holds only steps of at most ``n = P + D`` rows: a decode in a
  prefill slot takes a row too. ``Bucket(min(n, most requests), n, 0)`` has the same cost and holds all of those. So
  sets of row counts are all that there is.
- A row count n costs no less than the largest n' with ``c(n') = c*(n)``, which holds more. So only row counts with
  ``c(n) < c(n')`` for all n' > n are candidates. Among these a larger one costs more.
- Then each step takes the smallest chosen candidate that holds it, or no graph. A set is a chain of candidates, and its
  cost a sum over neighbours: ``best(k, j) = min over i < j of best(k - 1, i) + cost(i, j)``.

Where there are more than `MAX_CANDIDATES`, neighbours are merged: a group with the capacity of its last candidate and
the cost of its first is at least as good as each of them, so the optimum over such groups is a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from podgraph.workload.costs import Counts, Floats

MAX_CANDIDATES = 3072


@dataclass(frozen=True, eq=False)
class RowSets:
    """The best set of every size.

    Attributes:
        rows: by number of buckets, from 0: the chosen row counts, ascending.
        cost: the bucket part of the expected time of each, summed over steps, ``[max_buckets + 1]``.
        bound: no set of that many buckets costs less, ``[max_buckets + 1]``; equal to ``cost`` where it is exact.
    """

    rows: tuple[tuple[int, ...], ...]
    cost: Floats
    bound: Floats


def candidates(cost: Floats) -> Counts:
    """Row counts that cost less than every larger one; ``cost[i]`` is that of ``i + 1`` rows. Ascending."""
    following = np.minimum.accumulate(cost[::-1])[::-1]
    beyond = np.append(following[1:], np.inf)
    # an infinite cost is one that cannot be had
    return np.flatnonzero(cost < beyond) + 1


def best_row_sets(rows: Counts, weight: Floats, without: Floats, cost: Floats, max_buckets: int) -> RowSets:
    """The cheapest set of at most k buckets for every k up to ``max_buckets``.

    Args:
        rows: of each step, ``[n]``, at least 1.
        weight: how often it happens, ``[n]``.
        without: what it costs without a graph, ``[n]``.
        cost: of a bucket of 1, 2... rows, microseconds, in any order; infinite where it cannot be had. What lies beyond
            the last one must cost no less.
        max_buckets: the largest set.
    """
    tops = candidates(cost)
    # beyond the largest step only the cheapest is of use, and that is the first
    tops = tops[: np.searchsorted(tops, rows.max(initial=1)) + 1]
    # a candidate that no step has as its smallest is beaten by the one below
    cell = np.searchsorted(tops, rows)
    used = np.unique(cell[cell < tops.size])
    tops = tops[used]
    if not tops.size:
        lost = np.full(max_buckets + 1, weight @ without)
        return RowSets(((),) * (max_buckets + 1), lost, lost)
    groups = np.unique(np.linspace(-1, tops.size - 1, min(tops.size, MAX_CANDIDATES) + 1).round().astype(np.int64))
    last, first = groups[1:], groups[:-1] + 1
    chosen, value = _chains(tops[last], cost[tops[last] - 1], rows, weight, without, max_buckets)
    bound = value
    if last.size < tops.size:
        _, bound = _chains(tops[last], cost[tops[first] - 1], rows, weight, without, max_buckets)
    return RowSets(chosen, value, np.minimum(bound, value))


def _chains(
    tops: Counts, us: Floats, rows: Counts, weight: Floats, without: Floats, max_buckets: int
) -> tuple[tuple[tuple[int, ...], ...], Floats]:
    """Row counts and cost of the best chains of at most 0, 1... ``max_buckets`` candidates."""
    m = tops.size
    cell = np.searchsorted(tops, rows)  # m for steps beyond every candidate
    order = np.argsort(cell, kind="stable")
    weight, without, cell = weight[order], without[order], cell[order]
    starts = np.searchsorted(cell, np.arange(m + 1))
    eager = np.concatenate([[0.0], np.cumsum(weight * without)])
    beyond = eager[-1] - eager[starts[1:]]  # steps above candidate j
    # served[j, i]: steps of cells i..j by candidate j; i = j + 1 is none
    served = np.full((m, m), np.inf)
    for j in range(m):
        stop = starts[j + 1]
        each = np.concatenate([[0.0], np.cumsum(weight[:stop] * np.minimum(us[j], without[:stop]))])
        served[j, : j + 1] = each[-1] - each[starts[: j + 1]]
    # [j]: cells 0..j, of which j is a chosen candidate
    value = served[:, 0].copy()
    parents = [np.full(m, -1)]
    values = [float(eager[-1]), float((value + beyond).min())]
    ends = [-1, int((value + beyond).argmin())]
    for _ in range(2, min(max_buckets, m) + 1):
        # candidate i is the last but one: the next serves from cell i + 1 on
        through = served[:, 1:] + value[None, :-1]
        parent = through.argmin(axis=1) if m > 1 else np.zeros(m, np.int64)
        value = np.concatenate([[np.inf], through[np.arange(1, m), parent[1:]]]) if m > 1 else np.full(m, np.inf)
        parents.append(parent)
        values.append(float((value + beyond).min()))
        ends.append(int((value + beyond).argmin()))
    chains: list[tuple[int, ...]] = [()]
    cost = [values[0]]
    for k in range(1, max_buckets + 1):
        # a larger set may be no better: then the smaller one is taken
        if k < len(values) and values[k] < cost[-1]:
            chain, j = [], ends[k]
            for parent in reversed(parents[:k]):
                chain.append(int(tops[j]))
                j = int(parent[j])
            chains.append(tuple(reversed(chain)))
            cost.append(values[k])
        else:
            chains.append(chains[-1])
            cost.append(cost[-1])
    return tuple(chains), np.array(cost)
