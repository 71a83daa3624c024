"""Sample batches, their poisoned inputs, and the reference that verification compares with."""

from __future__ import annotations

import math

import numpy as np
import oracle
import pytest
import ragged
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from podgraph.batch import Batch
from podgraph.samples import Inputs, make_inputs, reference, relative_error, sample_batches
from podgraph.shapes import AttentionSpec, Bucket

SPEC = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=128, page_size=16)
CPU = torch.device("cpu")
BATCH = ragged.make_batch([1, 5, 0, 3, 1], [40, 5, 20, 0, 1], SPEC)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(data=st.data(), spec=ragged.specs(), rows_last=st.integers(0, 100))
def test_reference_equals_the_oracle(data: st.DataObject, spec: AttentionSpec, rows_last: int) -> None:
    qo_lens = data.draw(st.lists(st.integers(0, 6), max_size=5))
    batch = data.draw(ragged.batches(qo_lens, spec, kv_len=100))
    tensors = ragged.make_tensors(batch, spec, rows_last)
    live = int(batch.qo_indptr[-1])
    out, lse = reference(batch, spec, Inputs(tensors.q[:live], tensors.k, tensors.v))
    want, want_lse = oracle.attention(batch, spec, tensors.q[:live], tensors.k, tensors.v)
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-4, atol=ragged.TOLERANCE)
    np.testing.assert_allclose(lse.numpy(), want_lse, rtol=1e-4, atol=ragged.TOLERANCE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_shows_the_error_of_its_precision(dtype: str) -> None:
    spec = AttentionSpec(4, 2, 128, 16, dtype=dtype)
    batch = ragged.make_batch([1, 9], [200, 100], spec)
    inputs = make_inputs(batch, spec, CPU, 0)
    exact, exact_lse = reference(batch, spec, inputs)
    rounded, rounded_lse = reference(batch, spec, inputs, round_to=inputs.q.dtype)
    unit = torch.finfo(inputs.q.dtype).eps
    assert unit / 20 < relative_error(rounded, exact) < unit
    assert torch.equal(exact_lse, rounded_lse)
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, rounded.to(inputs.q.dtype).float())


def budgets(bucket: Bucket) -> st.SearchStrategy[int]:
    """Pages that a configuration may give a bucket, from the least on."""
    least = bucket.batch + -(-bucket.prefill_len // SPEC.page_size)
    return st.integers(least, least + 200)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    data=st.data(),
    bucket=ragged.buckets(slots=8, prefill_len=300),
    kv_len=st.integers(1, 500),
    max_kv_len=st.integers(400, 1000),
    seed=st.integers(0, 99),
)
def test_sample_batches_fit_their_bucket(
    data: st.DataObject, bucket: Bucket, kv_len: int, max_kv_len: int, seed: int
) -> None:
    max_pages = data.draw(budgets(bucket))
    batches = sample_batches(bucket, SPEC, kv_len, max_pages, seed, max_kv_len)
    both = bucket.prefill_len and bucket.decode_count
    assert list(batches) == ["full", "ragged", "sparse", *(["overflow"] if both else [])]
    if both:
        decodes = int((batches["overflow"].qo_lens == 1).sum())
        assert decodes > bucket.decode_count
        alone = bucket.prefill_slots == 1 or bucket.prefill_len < 4 * bucket.prefill_slots
        assert decodes < batches["overflow"].num_requests or alone
    for name, batch in batches.items():
        assert ragged.holds(bucket, SPEC, batch.qo_lens.tolist()), name
        assert batch.num_requests > 0
        assert batch.num_pages <= max_pages
        assert len(set(batch.kv_indices.tolist())) == batch.num_pages, "a page belongs to two requests"
        assert ((batch.kv_lens >= batch.qo_lens) | (batch.kv_lens == 0)).all()
        assert (batch.kv_lens <= kv_len + batch.qo_lens).all()
        assert (batch.kv_lens <= max_kv_len).all()
        assert batch.qo_indptr[-1] > 0 or name == "ragged"
    full = batches["full"]
    assert full.num_requests == bucket.batch
    assert int(full.qo_indptr[-1]) == bucket.prefill_len + bucket.decode_count
    assert ((full.kv_lens > 0) | (full.qo_lens == 0)).all()
    assert batches["sparse"].num_requests == 1


def arrays(batch: Batch) -> list[list[int]]:
    return [a.tolist() for a in (batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)]


def test_samples_follow_from_bucket_and_seed() -> None:
    first, again, other = (sample_batches(Bucket(6, 100, 3), SPEC, 200, 500, seed) for seed in (1, 1, 2))
    for name in first:
        assert arrays(first[name]) == arrays(again[name])
    assert any(arrays(first[name]) != arrays(other[name]) for name in first)


def test_samples_meet_what_is_special() -> None:
    """Over a few seeds: interleaving, idle requests, empty KV, both kinds of sparse batch."""
    seen = set()
    bucket = Bucket(8, 40, 4)
    for seed in range(40):
        batches = sample_batches(bucket, SPEC, 100, 500, seed)
        for batch in batches.values():
            lens = batch.qo_lens
            seen |= {"idle"} if (lens == 0).any() else set()
            seen |= {"empty KV"} if ((batch.kv_lens == 0) & (lens > 0)).any() else set()
            seen |= {"decode before prefill"} if lens[0] == 1 and (lens > 1).any() else set()
            seen |= {"prefill before decode"} if lens[0] > 1 and (lens == 1).any() else set()
        seen.add(f"sparse of {batches['sparse'].qo_lens[0]}")
    assert seen == {
        "idle",
        "empty KV",
        "decode before prefill",
        "prefill before decode",
        "sparse of 1",
        "sparse of 5",
    }


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_exactly_what_no_request_owns_is_nan(layout: str, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    spec = AttentionSpec(
        4, 2, 128, 16, dtype="float16" if name == "float16" else "bfloat16", kv_dtype=name, kv_layout=layout
    )
    inputs = make_inputs(BATCH, spec, CPU, 3)
    owned = {
        (int(BATCH.kv_indices[int(BATCH.kv_indptr[request]) + i // 16]), i % 16)
        for request, kv_len in enumerate([40, 5, 20, 0, 1])
        for i in range(kv_len)
    }
    assert inputs.q.shape == (10, 4, 128)
    assert inputs.q.dtype == (torch.float16 if name == "float16" else torch.bfloat16)
    assert bool(inputs.q.isfinite().all())
    for cache in (inputs.k, inputs.v):
        assert cache.is_contiguous()
        assert cache.dtype == dtype
        slots = (cache if layout == "NHD" else cache.transpose(1, 2)).float()
        assert slots.shape[1:] == (16, 2, 128)
        assert slots.shape[0] > BATCH.num_pages, "no page is spare"
        for page in range(slots.shape[0]):
            for slot in range(16):
                values = slots[page, slot]
                assert bool(values.isfinite().all() if (page, slot) in owned else values.isnan().all())


def test_scales_leave_the_inputs_normal() -> None:
    spec = AttentionSpec(4, 2, 128, 16, kv_dtype="float8_e4m3fn", k_scale=0.25, v_scale=4.0)
    inputs = make_inputs(ragged.make_batch([1], [1600], spec), spec, CPU, 0)
    for cache, scale in ((inputs.k, 0.25), (inputs.v, 4.0)):
        deviation = float((cache.float().nan_to_num(0) * scale).std())
        assert 0.9 < deviation < 1.1


def test_inputs_follow_from_the_seed() -> None:
    first, again, other = (make_inputs(BATCH, SPEC, CPU, seed) for seed in (1, 1, 2))
    for name in ("q", "k", "v"):
        one, same, another = (getattr(x, name).nan_to_num(9.0) for x in (first, again, other))
        assert torch.equal(one, same)
        assert not torch.equal(one, another)
    assert not torch.equal(first.k.nan_to_num(9.0), first.v.nan_to_num(9.0))


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.5], [3.0, 4.0], 0.1),
        ([0.0, 0.0], [3.0, 4.0], 1.0),
        ([0.0, 2.0], [0.0, 0.0], 2.0),
        ([], [], 0.0),
        ([3.0, math.nan], [3.0, 4.0], math.inf),
        ([3.0, math.inf], [3.0, 4.0], math.inf),
        ([3.0, -math.inf], [3.0, 4.0], math.inf),
    ],
    ids=["equal", "near", "zero", "of zero", "nothing", "NaN", "infinity", "negative infinity"],
)
def test_relative_error(got: list[float], want: list[float], error: float) -> None:
    assert relative_error(torch.tensor(got), torch.tensor(want)) == pytest.approx(error)


def test_relative_error_of_a_narrow_dtype_is_taken_in_float32() -> None:
    want = torch.full((1000,), 1.0)
    assert relative_error(want.bfloat16(), want) == 0.0
    # 257 is not a bfloat16
    assert relative_error(torch.tensor([257.0]).bfloat16(), torch.tensor([257.0])) == pytest.approx(1 / 257)
