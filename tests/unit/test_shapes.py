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

from podgraph.buckets import BucketSpace, arithmetic, geometric
from podgraph.errors import ConfigError
from podgraph.shapes import AttentionSpec, Bucket, Demand, count_families

SPEC = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128, page_size=16)


def demand_of(qo_lens: list[int], decode_rows: int = 1) -> Demand:
    prefills = [n for n in qo_lens if n > decode_rows]
    decodes = [n for n in qo_lens if 0 < n <= decode_rows]
    return Demand(len(prefills), sum(prefills), len(decodes), qo_lens.count(0), decode_rows, sum(decodes))


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
        ({"sm_scale": 1e-60}, "sm_scale"),
        ({"sm_scale": math.nan}, "sm_scale"),
        ({"k_scale": 0.5}, "k_scale"),
        ({"v_scale": 2.0}, "v_scale"),
        ({"v_scale": 0.0, "kv_dtype": "float8_e4m3fn"}, "v_scale"),
        ({"window_left": -2}, "window_left"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap"),
        ({"logits_soft_cap": math.inf}, "logits_soft_cap"),
        ({"logits_soft_cap": 1e300}, "logits_soft_cap"),
        ({"num_qo_heads": 1025}, "num_qo_heads"),
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


def test_decodes_in_excess_count_for_as_many_rows_as_they_may_have() -> None:
    # which of the decodes takes the prefill slot is open: one of 1 row or one of 3
    assert Bucket(2, 4, 1).fits(demand_of([1, 3], decode_rows=4))
    assert not Bucket(2, 3, 1).fits(demand_of([1, 3], decode_rows=4))
    assert Bucket(3, 6, 1).fits(demand_of([2, 1, 3], decode_rows=3))
    assert not Bucket(3, 5, 1).fits(demand_of([2, 1, 3], decode_rows=3))
    # where the rows of the decodes are not known, each has all that it may have
    assert Bucket(2, 4, 1).fits(Demand(0, 0, 2, rows_per_decode=4))
    assert not Bucket(2, 3, 1).fits(Demand(0, 0, 2, rows_per_decode=4))


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


def mixed_of(batch: tuple[int, ...], prefill_len: tuple[int, ...], decode_count: tuple[int, ...]) -> set[Bucket]:
    """Every combination that leaves a slot and a row for prefill."""
    every = (Bucket(*axes) for axes in itertools.product(batch, prefill_len, decode_count))
    return {b for b in every if 0 < b.decode_count < b.batch and b.prefill_len}


AXES = {"batch": (1, 2, 4), "prefill_len": (0, 8, 32), "decode_count": (0, 1, 2)}
MIXED = mixed_of(**AXES)
PREFILL = {Bucket(b, p, 0) for b in (1, 2, 4) for p in (8, 32)}
DECODE = {Bucket(n, 0, n) for n in (1, 2)}


@pytest.mark.parametrize(
    ("families", "expected"),
    [
        (None, MIXED | PREFILL | DECODE),
        (("mixed", "prefill", "decode"), MIXED | PREFILL | DECODE),
        (("mixed",), MIXED),
        (("prefill",), PREFILL),
        (("decode", "prefill"), PREFILL | DECODE),
    ],
    ids=str,
)
def test_enumeration_is_complete_distinct_and_largest_first(
    families: tuple[str, ...] | None, expected: set[Bucket]
) -> None:
    space = BucketSpace(**AXES, families=families)
    if families is not None and "mixed" not in families and "decode" not in families:
        space = dataclasses.replace(space, decode_count=())
    buckets, dropped = space.enumerate()
    assert set(buckets) == expected
    assert len(buckets) == len(expected)
    assert list(buckets) == sorted(buckets, key=lambda b: (b.batch, b.prefill_len, b.decode_count), reverse=True)
    assert len(buckets) <= space.candidates
    assert all(count > 0 for count in dropped.values())


def test_enumeration_says_what_it_drops() -> None:
    _, dropped = BucketSpace(**AXES, families=("mixed", "decode")).enumerate()
    assert dropped == {
        "decode_count > batch": 3,
        "prefill slots without prefill rows": 6,
        "prefill rows without a prefill slot": 4,
        "no prefill in families": 6,
    }


def test_one_sided_families_need_no_zero_in_the_axes() -> None:
    buckets, _ = BucketSpace((1, 2, 4), (8, 32), (1, 2)).enumerate()
    assert set(buckets) == MIXED | PREFILL | DECODE


@pytest.mark.parametrize(
    ("space", "family"),
    [(BucketSpace(decode_count=(1, 2)), "decode"), (BucketSpace((2,), (8,)), "prefill")],
    ids=["decode", "prefill"],
)
def test_families_follow_from_the_axes(space: BucketSpace, family: str) -> None:
    buckets, _ = space.enumerate()
    assert {bucket.family for bucket in buckets} == {family}


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (BucketSpace((2,), (0,), (0,)), "buckets: no bucket is reachable"),
        (BucketSpace((2,), (0,), (1,), ("prefill",)), "buckets.prefill_len: no size above 0"),
        (BucketSpace((2,), (8,), (4,)), "buckets.batch: no mixed bucket has a slot for prefill, got 2 at most"),
        (BucketSpace((2,), (0,), (4,)), "buckets.batch: no bucket has the largest value, got 2"),
        (BucketSpace((2,), (8,), (1, 4), ("mixed",)), "buckets.decode_count: no bucket has the largest value, got 4"),
    ],
    ids=["nothing", "no prefill rows", "no prefill slot", "batch", "decode_count"],
)
def test_a_space_that_cannot_be_meant_is_refused(space: BucketSpace, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        space.enumerate()
    assert str(raised.value).startswith(message)


def test_progressions_end_with_their_last_value() -> None:
    assert arithmetic(2, 9, 3) == (2, 5, 8, 9)
    assert arithmetic(4, 4, 1) == (4,)
    assert geometric(1, 64, 2.0) == (1, 2, 4, 8, 16, 32, 64)
    assert geometric(2, 9, 1.5) == (2, 3, 4, 7, 9)
    assert geometric(5, 5, 2.0) == (5,)
