"""The optimiser against every set there is, on problems small enough to try them all."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podgraph.config import load_config
from podgraph.errors import ConfigError
from podgraph.shapes import Bucket
from podgraph.workload import optimise, optimise_rows, optimise_shapes
from podgraph.workload.cost_tables import RowCosts
from podgraph.workload.costs import EAGERS, AttentionCosts, Eager, StepCosts
from podgraph.workload.cover import Cover, lower_bound, solve
from podgraph.workload.coverage import coverage
from podgraph.workload.fits import capacities
from podgraph.workload.optimise import Limits, frontier, tune
from podgraph.workload.optimise_rows import best_row_sets, candidates
from podgraph.workload.optimise_shapes import best_of_all, best_of_list
from podgraph.workload.profile import load_profile
from podgraph.workload.steps import StepHistogram
from tests.steps_made import PlainCosts, best_of_every_set, histogram

ROOT = Path(__file__).parents[2]
BUILD = load_config(ROOT / "configs" / "llama3-8b.yaml")
SPECS = tuple(BUILD.specs.values())
DEVICE = load_profile("h200")
assert BUILD.model is not None
STEP = StepCosts(DEVICE, BUILD.model, SPECS)

BUCKETS = st.builds(
    lambda slots, rows, decodes: Bucket(slots + decodes, rows, decodes),
    st.integers(0, 3),
    st.integers(0, 9),
    st.integers(0, 3),
)
STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 4), st.integers(1, 9)).map(
        lambda t: (2 * t[0] + t[1] if t[0] else 0, t[0], t[2], t[3])
    ),
    min_size=1,
    max_size=7,
    unique_by=lambda step: step[:3],
)
PRICES = st.dictionaries(BUCKETS, st.integers(1, 60).map(float), min_size=1, max_size=9)


def workload(seed: int, distinct: int, rows: int, decodes: int) -> StepHistogram:
    rng = np.random.default_rng(seed)
    prefills = rng.integers(0, 4, distinct)
    lengths = np.where(prefills > 0, 2 * prefills + rng.integers(0, rows, distinct), 0)
    steps = zip(lengths, prefills, rng.integers(1, decodes, distinct), rng.integers(1, 50, distinct), strict=True)
    return histogram(*(tuple(int(value) for value in step) for step in steps))


@settings(max_examples=80, deadline=None)
@given(STEPS, PRICES, st.integers(1, 3), st.sampled_from(EAGERS))
def test_a_listed_set_is_the_best_of_all(
    steps: list[tuple[int, ...]], price: dict[Bucket, float], most: int, eager: Eager
) -> None:
    counted, costs = histogram(*steps), PlainCosts(price)
    tuned = tune(counted, costs, eager, Limits(64, 64, most))
    best = best_of_every_set(counted, costs, eager, list(price), most)
    assert len(tuned.buckets) <= most
    assert tuned.expected_us == pytest.approx(best)
    assert tuned.bound_us <= best * (1 + 1e-9)
    assert tuned.gap < 1e-5
    assert coverage(counted, tuned.buckets, costs, eager).expected_us == pytest.approx(tuned.expected_us)


@settings(max_examples=80, deadline=None)
@given(STEPS, PRICES, st.integers(1, 3), st.integers(1, 12))
def test_bytes_are_kept_to(steps: list[tuple[int, ...]], price: dict[Bucket, float], most: int, max_bytes: int) -> None:
    counted, costs = histogram(*steps), PlainCosts(price)
    sizes = np.array([1 + hash((b, most)) % 5 for b in price])
    real = optimise._demands(counted, costs, "penalty")
    us = np.array(list(price.values()))
    chosen, bound = best_of_list(real, costs.choices, us, sizes, most, max_bytes)
    places = [costs.choices.tolist().index(shape) for shape in chosen.tolist()]
    assert len(places) <= most
    assert sizes[places].sum() <= max_bytes
    best = min(
        real.cost(costs.choices[list(subset)], us[list(subset)])
        for n in range(most + 1)
        for subset in itertools.combinations(range(len(us)), n)
        if sizes[list(subset)].sum() <= max_bytes
    )
    assert real.cost(chosen, us[places]) == pytest.approx(best)
    assert bound <= best * (1 + 1e-9)


@settings(max_examples=80, deadline=None)
@given(
    STEPS,
    st.lists(st.one_of(st.integers(1, 60).map(float), st.just(float("inf"))), min_size=7, max_size=9),
    st.integers(0, 4),
)
def test_sets_of_row_counts_are_the_best_of_all_buckets(
    steps: list[tuple[int, ...]], price: list[float], most: int
) -> None:
    counted = histogram(*steps)
    rows = np.maximum(counted.prefill_len + counted.decode_count, 1)
    weight, without = counted.steps.astype(np.float64), np.linspace(20.0, 50.0, len(counted))
    found = best_row_sets(rows, weight, without, np.array(price), most)
    # with three axes: any bucket costs what its rows do, and holds what `fits` says
    every = [Bucket(b, p, d) for p in range(10) for d in range(4) for b in (d, 8) if 1 <= p + d <= len(price)]
    costs = PlainCosts({b: price[b.prefill_len + b.decode_count - 1] for b in every})
    shapes = costs.choices
    real = optimise._demands(counted, costs, "penalty")
    real = dataclasses.replace(real, without=without, floor=without)
    for k in range(most + 1):
        chosen = np.array([(8, n, 0) for n in found.rows[k]], dtype=np.int64).reshape(-1, 3)
        us = np.array([price[n - 1] for n in found.rows[k]])
        assert len(chosen) <= k
        assert found.cost[k] == pytest.approx(real.cost(chosen, us))
        assert found.bound[k] <= found.cost[k]
    one = min(
        [float(weight @ without), *(real.cost(shapes[[i]], costs.bucket_us(shapes[[i]])) for i in range(len(every)))]
    )
    if most:
        assert found.cost[1] == pytest.approx(one)
    two = range(0, len(every), 4)
    pairs = [np.array(pair) for pair in itertools.combinations(two, 2)]
    for pair in pairs if most > 1 else []:
        assert found.bound[2] <= real.cost(shapes[pair], costs.bucket_us(shapes[pair])) * (1 + 1e-9)


def test_candidates_are_those_that_no_larger_one_beats() -> None:
    assert candidates(np.array([3.0, 2.0, 2.0, 5.0, 4.0, np.inf])).tolist() == [3, 5]
    assert candidates(np.array([np.inf])).tolist() == []


def test_merged_candidates_give_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    rows, weight = rng.integers(1, 200, 400), rng.random(400)
    without, cost = np.full(400, 500.0), np.cumsum(rng.random(200)) + 100
    exact = best_row_sets(rows, weight, without, cost, 20)
    assert (exact.bound == exact.cost).all()
    assert (np.diff(exact.cost) <= 0).all()
    monkeypatch.setattr(optimise_rows, "MAX_CANDIDATES", 40)
    coarse = best_row_sets(rows, weight, without, cost, 20)
    assert (coarse.cost >= exact.cost - 1e-6).all()
    assert (coarse.bound <= exact.cost + 1e-6).all()
    assert coarse.cost[20] < coarse.bound[20] * 1.02


def test_the_relaxed_problem_bounds_every_set() -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        us = rng.integers(1, 40, (6, 7)).astype(np.float64)
        us[rng.random((6, 7)) < 0.4] = np.inf
        problem = Cover(us, rng.integers(20, 60, 6).astype(np.float64), rng.integers(1, 6, 7), 3, 7)
        sets = [np.array(chosen, dtype=np.int64) for n in range(4) for chosen in itertools.combinations(range(7), n)]
        best = min(problem.cost(chosen) for chosen in sets if problem.allows(chosen))
        bound, keep = lower_bound(problem, best * 1.2)
        assert bound <= best * (1 + 1e-9)
        # what is left out is in no set that is cheaper than the one that was found
        for chosen in sets:
            if problem.allows(chosen) and problem.cost(chosen) < best * 1.2 * (1 - 1e-9):
                assert keep[chosen].all()
        solution = solve(problem)
        assert problem.allows(solution.chosen)
        assert solution.cost == pytest.approx(best)
        assert solution.bound <= best * (1 + 1e-9)


@pytest.mark.parametrize("most", [1, 2])
def test_cells_bound_all_buckets(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimise_shapes, "LEVELS", (2, 3, 2))
    costs = AttentionCosts(dataclasses.replace(DEVICE, idle_slot_us=3.0, idle_row_us=2.0), SPECS)
    for seed in range(3):
        steps = workload(seed, 8, 5, 4)
        real = optimise._demands(steps, costs, "penalty")
        chosen, bound = best_of_all(real, real, costs, 0, most, None)
        every = np.array(
            [(b, p, d) for b in range(1, 8) for p in range(13) for d in range(4) if d <= b and (p > 0) == (b > d)]
        )
        us = costs.bucket_us(every)
        # buckets that hold the same steps for more are no help
        kept = optimise_shapes._undominated(capacities(every), us, np.zeros(len(every), np.int64))
        best = min(
            real.cost(every[kept[list(subset)]], us[kept[list(subset)]])
            for n in range(most + 1)
            for subset in itertools.combinations(range(len(kept)), n)
        )
        assert bound <= best * (1 + 1e-9)
        assert len(chosen) <= most
        assert real.cost(chosen, costs.bucket_us(chosen)) >= best * (1 - 1e-9)


def test_rounded_demands_keep_the_bound_below(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, most = workload(1, 60, 40, 12), 3
    rng = np.random.default_rng(1)
    price = {
        Bucket(int(b), int(p), int(d)): float(rng.integers(20, 60)) for b, p, d in rng.integers(1, 50, (40, 3)) if d < b
    }
    costs = PlainCosts(price)
    real = optimise._demands(steps, costs, "penalty")
    size, us = np.zeros(len(price), np.int64), np.array(list(price.values()))
    exact = best_of_list(real, costs.choices, us, size, most, None)
    monkeypatch.setattr(optimise_shapes, "MAX_KINDS", 12)
    coarse, bound = best_of_list(real, costs.choices, us, size, most, None)
    cost = real.cost(exact[0], costs.bucket_us(exact[0]))
    assert bound <= cost * (1 + 1e-9)
    assert real.cost(coarse, costs.bucket_us(coarse)) >= exact[1] * (1 - 1e-9)


@pytest.mark.parametrize("eager", EAGERS)
def test_more_buckets_are_never_worse_and_the_gap_is_small(eager: Eager) -> None:
    steps = workload(5, 400, 900, 100)
    sets = frontier(steps, STEP, eager, Limits(1024, 128, 24), range(1, 25))
    assert [len(tuned.buckets) <= n + 1 for n, tuned in enumerate(sets)]
    assert (np.diff([tuned.bound_us for tuned in sets]) <= 1e-9).all()
    for tuned in sets:
        assert tuned.bound_us <= tuned.expected_us
        assert tuned.gap < 0.02
    assert sets == frontier(steps, STEP, eager, Limits(1024, 128, 24), range(1, 25))
    # what may come is held too: the largest step of the engine
    assert eager == "hidden" or sets[-1].buckets[-1].prefill_len == 1024


def test_a_set_for_a_smooth_roofline_is_no_set_for_a_staircase() -> None:
    steps = workload(2, 300, 900, 100)
    bare = dataclasses.replace(DEVICE, products={}, elementwise=None, logits=None)
    smooth = dataclasses.replace(STEP, device=dataclasses.replace(bare, tile_rows=1))
    stairs = dataclasses.replace(STEP, device=dataclasses.replace(bare, tile_rows=64))
    limits = Limits(1024, 128, 16)
    wasted = [
        coverage(steps, tune(steps, costs, "penalty", limits).buckets, stairs).waste for costs in (smooth, stairs)
    ]
    assert wasted[0] > 2 * wasted[1]


def test_a_table_that_falls_is_used_where_it_is_low() -> None:
    costs = RowCosts(STEP, (8, 16, 24, 32), (900.0, 500.0, 700.0, 650.0), "a table")
    steps = histogram((0, 0, 3, 5), (0, 0, 20, 5))
    tuned = tune(steps, costs, "penalty", Limits(32, 32, 8))
    assert [b.prefill_len for b in tuned.buckets] == [16, 32]
    found = coverage(steps, tuned.buckets, costs)
    assert found.waste == pytest.approx(0)
    assert found.waste_unpadded < 0


def test_a_budget_of_bytes_is_a_number_of_buckets() -> None:
    steps = workload(5, 100, 300, 30)
    few = tune(steps, STEP, "penalty", Limits(512, 64, 50, bucket_bytes=1000, max_bytes=7999))
    assert len(few.buckets) == 7
    with pytest.raises(
        ConfigError, match=r"memory budget: leaves 999 bytes for buckets of 1000, allowed: one at least"
    ):
        Limits(512, 64, 50, bucket_bytes=1000, max_bytes=999)


@pytest.mark.parametrize("field", ["token_budget", "max_running", "max_buckets"])
def test_limits_are_above_zero(field: str) -> None:
    values = {"token_budget": 1, "max_running": 1, "max_buckets": 1} | {field: 0}
    with pytest.raises(ConfigError, match=f"{field}: must be > 0, got 0"):
        Limits(**values)


def test_no_step_is_an_error() -> None:
    with pytest.raises(ConfigError, match="made up: no step to tune for"):
        tune(histogram(), STEP, "penalty", Limits(8, 8, 8))


def test_attention_is_tuned_within_its_gap() -> None:
    costs = AttentionCosts(DEVICE, SPECS, 32)
    steps = workload(7, 500, 500, 60)
    tuned = tune(steps, costs, "penalty", Limits(512, 64, 24))
    found = coverage(steps, tuned.buckets, costs)
    assert found.misses == found.splits == 0
    assert tuned.gap < 0.01
    # decodes are computed as decodes, not in prefill slots
    assert any(bucket.family == "mixed" for bucket in tuned.buckets)
    assert all(bucket.unreachable is None for bucket in tuned.buckets)


def test_without_scipy_the_exact_search_says_so() -> None:
    code = (
        "import sys; sys.modules['scipy'] = None\n"
        "import numpy as np\n"
        "from podgraph.workload.cover import Cover, _milp\n"
        "try: _milp(Cover(np.ones((1, 1)), np.ones(1) * 2, np.ones(1), 1), np.array([0]))\n"
        "except Exception as e: print(type(e).__name__, e)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.startswith("ConfigError the exact search needs scipy, which is not installed: pip install")
