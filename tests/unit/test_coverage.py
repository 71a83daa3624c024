"""What a set of buckets does for a workload, against one step and one bucket at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podgraph.config import load_config
from podgraph.shapes import Bucket, Demand
from podgraph.workload.costs import EAGERS, AttentionCosts, Eager
from podgraph.workload.coverage import CHEAPER_EAGER, HIT, MISS, SPLIT, assign, coverage
from podgraph.workload.engine_lists import (
    engine_lists,
    megatron_buckets,
    pow2_grids,
    sglang_sizes,
    tensorrt_llm_sizes,
    vllm_sizes,
)
from podgraph.workload.fits import capacities, cheapest, demands, fitting
from podgraph.workload.profile import load_profile
from tests.steps_made import PlainCosts, demands_of, expected_us, histogram

ROOT = Path(__file__).parents[2]
BUCKETS = st.builds(
    lambda slots, rows, decodes: Bucket(slots + decodes, rows, decodes),
    st.integers(0, 4),
    st.integers(0, 12),
    st.integers(0, 4),
)
STEPS = st.builds(
    lambda prefills, more, decodes: (prefills * 2 + more if prefills else 0, prefills, decodes),
    st.integers(0, 3),
    st.integers(0, 6),
    st.integers(0, 5),
)


@given(st.lists(STEPS, min_size=1, max_size=8, unique=True), st.lists(BUCKETS, min_size=1, max_size=8))
def test_fitting_is_what_a_bucket_says(steps: list[tuple[int, int, int]], buckets: list[Bucket]) -> None:
    counted = histogram(*((*step, 1) for step in steps))
    shapes = np.array([(b.batch, b.prefill_len, b.decode_count) for b in buckets])
    fits = fitting(demands(counted), capacities(shapes))
    assert fits.tolist() == [[b.fits(demand) for b in buckets] for demand in demands_of(counted)]


def test_the_cheapest_of_many_pairs_is_found_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    demand, capacity = rng.integers(0, 9, (50, 4)), rng.integers(0, 12, (7, 4))
    us = np.array([3.0, 1.0, 2.0, 1.0, np.inf, 5.0, 4.0])
    whole = cheapest(demand, capacity, us)
    monkeypatch.setattr("podgraph.workload.fits.PAIRS", 10)
    assert (cheapest(demand, capacity, us) == whole).all()
    fits = fitting(demand, capacity) & np.isfinite(us)
    assert ((whole >= 0) == fits.any(axis=1)).all()
    least = np.where(fits, us, np.inf).min(axis=1)
    assert (us[whole[whole >= 0]] == least[whole >= 0]).all()
    assert not (whole == 3).any()  # of equal ones the first
    assert (cheapest(demand, capacity[:0], us[:0]) == -1).all()


@settings(max_examples=60)
@given(
    st.lists(st.tuples(STEPS, st.integers(1, 9)), min_size=1, max_size=8, unique_by=lambda step: step[0]),
    st.dictionaries(BUCKETS, st.integers(1, 60).map(float), max_size=6),
    st.sampled_from(EAGERS),
)
def test_expected_time_is_that_of_every_step_in_turn(
    steps: list[tuple[tuple[int, int, int], int]], price: dict[Bucket, float], eager: Eager
) -> None:
    counted, costs = histogram(*((*step, n) for step, n in steps)), PlainCosts(price)
    found = coverage(counted, list(price), costs, eager)
    assert found.expected_us == pytest.approx(expected_us(counted, price, costs, eager))
    assert found.hits + found.splits + found.misses + found.cheaper_eager == found.steps == counted.total
    assert found.waste >= -1e-12
    assert sum(found.reasons.values()) == found.misses
    assert sum(use.steps for use in found.uses) == found.hits
    assert found.hit_time + found.split_time + found.miss_time + found.eager_time == pytest.approx(1)
    assert found.best_us <= found.expected_us + 1e-9


def test_each_way_to_be_served() -> None:
    small, large = Bucket(4, 4, 0), Bucket(8, 8, 0)
    costs = PlainCosts({small: 5.0, large: 70.0})
    steps = histogram((0, 0, 3, 6), (6, 1, 0, 2), (9, 1, 0, 1), (0, 0, 9, 1))
    found = assign(steps, [small, large], costs)
    # ascending by key: 3 decodes, 9 decodes, 6 rows, 9 rows
    assert found.kind.tolist() == [HIT, MISS, HIT, MISS]
    assert found.bucket.tolist() == [0, -1, 1, -1]
    assert found.replays.tolist() == [1, 0, 1, 0]
    assert found.padded_rows.tolist() == [1, 0, 2, 0]
    assert found.expected_us.tolist() == [15.0, 120.0, 80.0, 120.0]
    assert coverage(steps, [small, large], costs).reasons == {"requests > 8": 1, "prefill_len > 8": 1}
    cheap = PlainCosts({small: 5.0, large: 170.0, Bucket(8, 9, 0): 1.0})
    assert assign(steps, [small, large], cheap).kind.tolist() == [HIT, MISS, CHEAPER_EAGER, MISS]


def test_a_combination_that_no_bucket_holds_is_called_that() -> None:
    costs = PlainCosts({Bucket(1, 8, 0): 1.0, Bucket(4, 0, 4): 1.0})
    found = coverage(histogram((6, 1, 2, 5)), list(costs.price), costs)
    assert found.reasons == {"no bucket holds the combination": 5}


def test_attention_is_split_where_no_bucket_holds_it() -> None:
    build = load_config(ROOT / "configs" / "llama3-8b.yaml")
    costs = AttentionCosts(load_profile("h200"), tuple(build.specs.values()))
    buckets = [Bucket(8, 16, 4), Bucket(2, 2, 0)]
    steps = histogram((30, 2, 4, 1), (16, 2, 4, 1), (0, 0, 1, 1))
    found = assign(steps, buckets, costs)
    assert found.kind.tolist() == [HIT, HIT, SPLIT]
    assert found.replays.tolist() == [1, 1, 2]
    us = costs.bucket_us(np.array([[8, 16, 4]]))[0]
    own = costs.own_us(steps)
    assert found.expected_us[2] == pytest.approx(own[2] + 2 * us)
    assert (costs.split_us(steps) >= costs.exact_us(steps)).all()
    assert coverage(steps, [], costs).misses == 3


def test_an_empty_set_serves_nothing() -> None:
    costs = PlainCosts({Bucket(1, 1, 0): 3.0})
    found = coverage(histogram((0, 0, 1, 4)), [], costs)
    assert (found.misses, found.hits, found.expected_us) == (4, 0, 53.0)
    assert found.reasons == {"requests > 0": 4}


def test_lists_of_engines() -> None:
    assert len(vllm_sizes()) == 51
    assert vllm_sizes()[:5] == [1, 2, 4, 8, 16]
    assert vllm_sizes()[-3:] == [480, 496, 512]
    assert vllm_sizes(4) == [1, 2, 4]
    assert tensorrt_llm_sizes() == [1, 2, 4, *range(8, 129, 8)]
    assert tensorrt_llm_sizes(600)[-3:] == [256, 512, 600]
    assert {12, 28, 576, 1280, 2048} < set(sglang_sizes(2048))
    assert max(sglang_sizes(300)) == 288
    assert megatron_buckets(64, 16) == (
        Bucket(8, 0, 8),
        Bucket(8, 8, 0),
        Bucket(16, 0, 16),
        Bucket(16, 16, 0),
        Bucket(16, 32, 0),
        Bucket(16, 64, 0),
    )
    lists = engine_lists(2048, 256)
    assert {name: len(buckets) for name, buckets in lists.items()} == {
        "vllm": 51,
        "sglang": 58,
        "tensorrt_llm": 19,
        "megatron": 15,
        "pow2": 12,
    }
    for buckets in lists.values():
        assert all(b.unreachable is None and b.batch <= 256 for b in buckets)
    assert Bucket(256, 512, 0).fits(Demand(3, 300, 200))


def test_grids_of_powers_of_two() -> None:
    steps = histogram((100, 3, 5, 1), (0, 0, 9, 1))
    grids = pow2_grids(steps, 20)
    assert grids
    for grid in grids:
        assert len(set(grid)) == len(grid) <= 20
        assert all(bucket.unreachable is None for bucket in grid)
        assert {bucket.prefill_len for bucket in grid} >= {0, 128}
        assert max(bucket.decode_count for bucket in grid) == 16
