"""Specifications and buckets: limits, what fits, what is enumerated."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import ragged
from hypothesis import given, settings
from hypothesis import strategies as st

from podgraph.errors import ConfigError
from podgraph.shapes import AttentionSpec, Bucket, BucketSpace, Demand, count_families

SPEC = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128, page_size=16)


def demand_of(qo_lens: list[int], decode_rows: int = 1) -> Demand:
    prefills = [n for n in qo_lens if n > decode_rows]
    decodes = sum(0 < n <= decode_rows for n in qo_lens)
    return Demand(len(prefills), sum(prefills), decodes, qo_lens.count(0), decode_rows)


def test_spec_derives_what_follows_from_it() -> None:
    assert SPEC.sm_scale == 1 / math.sqrt(128)
    assert dataclasses.replace(SPEC, sm_scale=0.5).sm_scale == 0.5
    assert SPEC.group_size == 4
    assert SPEC.page_bytes == 2 * 16 * 8 * 128 * 2
    assert SPEC.kv_dtype == "bfloat16"
    fp8 = AttentionSpec(32, 8, 128, 16, kv_dtype="float8_e4m3fn", k_scale=0.5)
    assert fp8.page_bytes == SPEC.page_bytes // 2
    assert (fp8.dtype, fp8.kv_scales) == ("bfloat16", (0.5, 1.0))
    assert AttentionSpec(**SPEC.to_dict()) == SPEC
    assert list(SPEC.limits()) == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_qo_heads": 0}, "num_qo_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"num_kv_heads": 5}, "num_kv_heads"),
        ({"num_kv_heads": 1}, "num_kv_heads"),
        ({"num_kv_heads": 64}, "num_kv_heads"),
        ({"head_dim": 96}, "head_dim"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": 129}, "page_size"),
        ({"dtype": "float32", "kv_dtype": "float32"}, "dtype"),
        ({"kv_dtype": "float16"}, "kv_dtype"),
        ({"kv_layout": "NDH"}, "kv_layout"),
        ({"sm_scale": -1.0}, "sm_scale"),
        ({"sm_scale": math.inf}, "sm_scale"),
        ({"sm_scale": math.nan}, "sm_scale"),
        ({"k_scale": 0.5}, "k_scale"),
        ({"v_scale": 2.0}, "v_scale"),
        ({"v_scale": 0.0, "kv_dtype": "float8_e4m3fn"}, "v_scale"),
        ({"window_left": -2}, "window_left"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap"),
        ({"logits_soft_cap": math.inf}, "logits_soft_cap"),
        ({"decode_rows": 0}, "decode_rows"),
    ],
    ids=str,
)
def test_limits_name_what_no_kernel_serves(changes: dict[str, Any], field: str) -> None:
    problems = list(dataclasses.replace(SPEC, **changes).limits())
    assert field in [name for name, _, _ in problems]
    got = next(got for name, got, _ in problems if name == field)
    assert got is changes[field] or got == changes[field]


def test_limits_name_decodes_beyond_the_tile() -> None:
    ((field, got, allowed),) = dataclasses.replace(SPEC, decode_rows=5).limits()
    assert (field, got) == ("num_kv_heads", 8)
    assert allowed.startswith("num_qo_heads / num_kv_heads * decode_rows <= 16")


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 64},
        {"head_dim": 256},
        {"page_size": 1},
        {"page_size": 128},
        {"dtype": "float16", "kv_dtype": "float16"},
        {"kv_dtype": "float8_e4m3fn", "k_scale": 0.5, "v_scale": 0.25},
        {"kv_layout": "HND"},
        {"window_left": 0},
        {"logits_soft_cap": 30.0},
        {"decode_rows": 4},
    ],
    ids=str,
)
def test_limits_allow_what_kernels_serve(changes: dict[str, Any]) -> None:
    assert list(dataclasses.replace(SPEC, **changes).limits()) == []


@pytest.mark.parametrize(
    ("num_qo_heads", "num_kv_heads"), [(1, 1), (16, 1), (64, 4), (32, 32)], ids=["1/1", "16/1", "64/4", "32/32"]
)
def test_limits_allow_every_group_of_up_to_16(num_qo_heads: int, num_kv_heads: int) -> None:
    spec = dataclasses.replace(SPEC, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads)
    assert list(spec.limits()) == []


@pytest.mark.parametrize(
    ("bucket", "qo_lens", "fits"),
    [
        pytest.param(Bucket(2, 0, 2), [], True, id="nothing"),
        pytest.param(Bucket(2, 0, 2), [1, 1], True, id="decodes fill it"),
        pytest.param(Bucket(2, 0, 2), [1, 1, 1], False, id="one decode too many"),
        pytest.param(Bucket(2, 0, 2), [2], False, id="a prefill without a slot"),
        pytest.param(Bucket(3, 8, 1), [4, 4, 1], True, id="every slot taken"),
        pytest.param(Bucket(3, 8, 1), [3, 3, 3], False, id="one prefill too many"),
        pytest.param(Bucket(3, 8, 1), [8, 1], True, id="every row taken"),
        pytest.param(Bucket(3, 8, 1), [9, 1], False, id="one row too many"),
        pytest.param(Bucket(3, 8, 1), [7, 1, 1], True, id="a decode in a prefill slot"),
        pytest.param(Bucket(3, 8, 1), [8, 1, 1], False, id="a decode without a row"),
        pytest.param(Bucket(3, 8, 1), [4, 1, 4], True, id="any order"),
        pytest.param(Bucket(3, 8, 1), [1, 1, 1], True, id="decodes only"),
        pytest.param(Bucket(3, 8, 0), [1, 1, 1], True, id="decodes in a prefill bucket"),
        pytest.param(Bucket(3, 2, 0), [1, 1, 1], False, id="decodes in too short a prefill bucket"),
        pytest.param(Bucket(3, 8, 1), [0, 0, 8], True, id="idle requests take any slot"),
        pytest.param(Bucket(3, 8, 1), [0, 0, 0, 8], False, id="idle requests take slots"),
        pytest.param(Bucket(3, 8, 1), [1, 1, 0, 2], False, id="more requests than slots"),
    ],
)
def test_fits(bucket: Bucket, qo_lens: list[int], fits: bool) -> None:
    assert bucket.fits(demand_of(qo_lens)) is fits


def test_a_decode_in_excess_counts_for_all_of_its_rows() -> None:
    # it may have fewer rows than decode_rows, which the demand does not say
    assert Bucket(2, 4, 1).fits(demand_of([1, 3], decode_rows=4))
    assert not Bucket(2, 3, 1).fits(demand_of([1, 3], decode_rows=4))


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    bucket=ragged.buckets(slots=4, prefill_len=16),
    qo_lens=st.lists(st.integers(0, 9), max_size=9),
    decode_rows=st.integers(1, 4),
)
def test_fits_is_the_rule_of_what_fits(bucket: Bucket, qo_lens: list[int], decode_rows: int) -> None:
    spec = dataclasses.replace(SPEC, decode_rows=decode_rows)
    assert bucket.fits(demand_of(qo_lens, decode_rows)) == ragged.holds(bucket, spec, qo_lens)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(small=ragged.buckets(slots=4), more=st.tuples(*[st.integers(0, 3)] * 3), qo_lens=st.lists(st.integers(0, 9)))
def test_a_bucket_with_more_of_everything_fits_no_less(
    small: Bucket, more: tuple[int, int, int], qo_lens: list[int]
) -> None:
    prefills, rows, decodes = more
    large = Bucket(small.batch + prefills + decodes, small.prefill_len + rows, small.decode_count + decodes)
    if small.fits(demand_of(qo_lens)):
        assert large.fits(demand_of(qo_lens))


@pytest.mark.parametrize(
    ("bucket", "reason"),
    [
        (Bucket(4, 0, 4), None),
        (Bucket(4, 8, 0), None),
        (Bucket(4, 8, 2), None),
        (Bucket(4, 8, 5), "decode_count > batch"),
        (Bucket(0, 0, 0), "no request"),
        (Bucket(4, 0, 2), "prefill slots without prefill rows"),
        (Bucket(4, 8, 4), "prefill rows without a prefill slot"),
    ],
    ids=str,
)
def test_unreachable(bucket: Bucket, reason: str | None) -> None:
    assert bucket.unreachable == reason


@pytest.mark.parametrize(
    ("bucket", "family", "prefill_slots"),
    [(Bucket(4, 0, 4), "decode", 0), (Bucket(4, 8, 0), "prefill", 4), (Bucket(4, 8, 3), "mixed", 1)],
    ids=["decode", "prefill", "mixed"],
)
def test_families(bucket: Bucket, family: str, prefill_slots: int) -> None:
    assert bucket.family == family
    assert bucket.prefill_slots == prefill_slots
    assert count_families([bucket, bucket]) == {"decode": 0, "mixed": 0, "prefill": 0, family: 2}


def test_rows_and_name() -> None:
    bucket = Bucket(5, 64, 3)
    assert bucket.rows(SPEC) == 67
    assert bucket.rows(dataclasses.replace(SPEC, decode_rows=2)) == 70
    assert str(bucket) == "(batch=5, prefill_len=64, decode_count=3)"


def test_enumeration_is_complete_distinct_and_largest_first() -> None:
    space = BucketSpace((1, 2, 4), (0, 8, 32), (0, 1, 2, 4, 9))
    buckets, dropped = space.enumerate()
    reachable = [Bucket(*axes) for axes in itertools.product((1, 2, 4), (0, 8, 32), (0, 1, 2, 4, 9))]
    reachable = [b for b in reachable if b.unreachable is None]
    assert set(buckets) == set(reachable)
    assert len(buckets) == len(reachable)
    assert list(buckets) == sorted(buckets, key=lambda b: (b.batch, b.prefill_len, b.decode_count), reverse=True)
    assert buckets[0] == Bucket(4, 32, 2)
    assert len(buckets) + sum(dropped.values()) == 45
    assert dropped == {
        "decode_count > batch": 3 * (3 + 2 + 1),
        "prefill slots without prefill rows": 1 + 2 + 3,
        "prefill rows without a prefill slot": 2 * 3,
    }


def test_a_space_without_a_reachable_bucket_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no combination .* is reachable .*'decode_count > batch': 1"):
        BucketSpace((2,), (0,), (4,)).enumerate()
