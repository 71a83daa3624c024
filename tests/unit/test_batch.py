"""One step's metadata: what is refused and how it is said, what is read, and what a part of a batch is."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import ragged
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from podgraph.batch import Batch
from podgraph.errors import BatchError
from podgraph.shapes import AttentionSpec, Demand

SPEC = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=32, page_size=16)
GOOD = {
    "qo_indptr": [0, 3, 4, 4, 6],
    "kv_indptr": [0, 2, 5, 6, 6],
    "kv_indices": [7, 3, 9, 0, 2, 5],
    "kv_last_page_len": [16, 1, 5, 0],
}
MAX_KV_LEN = 48


def of(**changes: Any) -> Batch:
    return Batch.of(**{**GOOD, **changes}, page_size=16, max_kv_len=MAX_KV_LEN)


def test_lengths_and_demand() -> None:
    batch = of()
    assert batch.num_requests == 4
    assert batch.num_pages == 6
    assert batch.qo_lens.tolist() == [3, 1, 0, 2]
    assert batch.kv_lens.tolist() == [32, 33, 5, 0]
    assert batch.demand(SPEC) == Demand(prefills=2, prefill_rows=5, decodes=1, idle=1, decode_rows=1)


def test_demand_counts_decodes_by_the_specs_rows() -> None:
    spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=32, page_size=16, decode_rows=2)
    assert of().demand(spec) == Demand(prefills=1, prefill_rows=3, decodes=2, idle=1, rows_per_decode=2, decode_rows=3)


@pytest.mark.parametrize(
    "convert",
    [
        list,
        tuple,
        lambda x: np.array(x, np.int64),
        lambda x: np.array(x, np.uint8),
        lambda x: np.repeat(np.array(x, np.int32), 2)[::2],
        lambda x: torch.tensor(x, dtype=torch.int32),
    ],
    ids=["list", "tuple", "int64", "uint8", "strided", "torch"],
)
def test_reads_any_integers_on_the_host(convert: Any) -> None:
    batch = of(**{name: convert(values) for name, values in GOOD.items()})
    for name, values in GOOD.items():
        array = getattr(batch, name)
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
        assert array.tolist() == values


@pytest.mark.parametrize("empty", [[], np.zeros(0), np.zeros(0, np.int64)], ids=["list", "float64", "int64"])
def test_an_empty_batch_is_a_batch(empty: Any) -> None:
    batch = Batch.of([0], [0], empty, empty, page_size=16, max_kv_len=1)
    assert (batch.num_requests, batch.num_pages) == (0, 0)
    assert batch.demand(SPEC) == Demand(0, 0, 0, decode_rows=0)


def test_pages_behind_the_last_request_are_left_out() -> None:
    assert of(kv_indices=[*GOOD["kv_indices"], -1, -1]).kv_indices.tolist() == GOOD["kv_indices"]


def test_a_request_without_pages_may_name_any_last_page_len() -> None:
    assert of(kv_last_page_len=[16, 1, 5, 99]).kv_lens.tolist() == [32, 33, 5, 0]


def test_values_at_the_limits_pass() -> None:
    assert of(kv_last_page_len=[16, 16, 1, 0]).kv_lens.max() == MAX_KV_LEN
    assert of(kv_indices=[2**31 - 1, 0, 0, 0, 0, 0]).kv_indices[0] == 2**31 - 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"qo_indptr": []}, "qo_indptr: got [] at the start, allowed: 0", id="qo_indptr empty"),
        pytest.param({"kv_indptr": []}, "kv_indptr: got [] at the start, allowed: 0", id="kv_indptr empty"),
        pytest.param(
            {"qo_indptr": [1, 3, 4, 4, 6]}, "qo_indptr: got [1] at the start, allowed: 0", id="qo_indptr start"
        ),
        pytest.param(
            {"kv_indptr": [2, 2, 5, 6, 6]}, "kv_indptr: got [2] at the start, allowed: 0", id="kv_indptr start"
        ),
        pytest.param(
            {"qo_indptr": [0, 3, 2, 4, 6]},
            "qo_indptr[2]: got 2, allowed: at least qo_indptr[1] = 3",
            id="qo_indptr descends",
        ),
        pytest.param(
            {"kv_indptr": [0, 2, 5, 4, 6]},
            "kv_indptr[3]: got 4, allowed: at least kv_indptr[2] = 5",
            id="kv_indptr descends",
        ),
        pytest.param(
            {"qo_indptr": [0, 2**31 - 1, -(2**31), 4, 6]},
            "qo_indptr[2]: got -2147483648, allowed: at least qo_indptr[1] = 2147483647",
            id="qo_indptr descends by more than 32 bits",
        ),
        pytest.param(
            {"kv_indptr": [0, 2, 5, 6]},
            "kv_indptr: got 4 entries, allowed: 5, as many as qo_indptr",
            id="kv_indptr short",
        ),
        pytest.param(
            {"kv_last_page_len": [16, 1, 5]},
            "kv_last_page_len: got 3 entries, allowed: 4, one for each request",
            id="kv_last_page_len short",
        ),
        pytest.param(
            {"kv_last_page_len": [16, 1, 5, 0, 0]},
            "kv_last_page_len: got 5 entries, allowed: 4, one for each request",
            id="kv_last_page_len long",
        ),
        pytest.param(
            {"kv_indices": [7, 3, 9, 0, 2]},
            "kv_indices: got 5 entries, allowed: at least kv_indptr[-1] = 6",
            id="kv_indices short",
        ),
        pytest.param(
            {"kv_last_page_len": [16, 0, 5, 0]},
            "kv_last_page_len of request 1: got 0, allowed: 1 to page_size=16",
            id="kv_last_page_len zero",
        ),
        pytest.param(
            {"kv_last_page_len": [16, 1, 17, 0]},
            "kv_last_page_len of request 2: got 17, allowed: 1 to page_size=16",
            id="kv_last_page_len beyond the page",
        ),
        pytest.param(
            {"qo_indptr": [0, 33, 34, 34, 36]},
            "KV length of request 0: got 32, allowed: 0, or at least the request's query rows",
            id="KV shorter than the rows",
        ),
        pytest.param(
            {"kv_indptr": [0, 0, 4, 6, 6], "kv_last_page_len": [0, 1, 5, 0]},
            "KV length of request 1: got 49, allowed: at most workspace.max_kv_len = 48",
            id="KV too long",
        ),
        pytest.param(
            {"kv_indices": [7, 3, 9, -1, 2, 5]},
            "kv_indices of entry 3: got -1, allowed: page numbers from 0",
            id="negative page",
        ),
        pytest.param(
            {"qo_indptr": [[0, 3, 4, 4, 6]]},
            "qo_indptr: got shape (1, 5), dtype int64; allowed: one dimension of integers",
            id="two dimensions",
        ),
        pytest.param(
            {"kv_indices": 7},
            "kv_indices: got shape (), dtype int64; allowed: one dimension of integers",
            id="a number",
        ),
        pytest.param(
            {"kv_last_page_len": [16.0, 1.0, 5.0, 0.0]},
            "kv_last_page_len: got shape (4,), dtype float64; allowed: one dimension of integers",
            id="floats",
        ),
        pytest.param(
            {"kv_last_page_len": [True, True, True, False]},
            "kv_last_page_len: got shape (4,), dtype bool; allowed: one dimension of integers",
            id="bools",
        ),
        pytest.param(
            {"kv_indices": None},
            "kv_indices: got shape (), dtype object; allowed: one dimension of integers",
            id="None",
        ),
        pytest.param(
            {"qo_indptr": ["0", "3", "4", "4", "6"]},
            "qo_indptr: got shape (5,), dtype <U1; allowed: one dimension of integers",
            id="text",
        ),
        pytest.param(
            {"kv_indices": [7, 3, 9, 0, 2, 2**31]},
            "kv_indices: got values beyond 32 bits, allowed: int32",
            id="beyond 32 bits",
        ),
        pytest.param(
            {"kv_indices": [-(2**31) - 1, 3, 9, 0, 2, 1]},
            "kv_indices: got values beyond 32 bits, allowed: int32",
            id="below 32 bits",
        ),
        pytest.param(
            {"kv_indices": np.array([2**64 - 1, 3, 9, 0, 2, 1], np.uint64)},
            "kv_indices: got values beyond 32 bits, allowed: int32",
            id="beyond 63 bits",
        ),
        pytest.param(
            {"kv_indices": [2**70, 3, 9, 0, 2, 1]},
            "kv_indices: got shape (6,), dtype object; allowed: one dimension of integers",
            id="beyond 64 bits",
        ),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError) as raised:
        of(**changes)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(data=st.data(), spec=ragged.specs())
def test_parts_compute_what_the_whole_does(data: st.DataObject, spec: AttentionSpec) -> None:
    qo_lens = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    batch = data.draw(ragged.batches(qo_lens, spec, kv_len=60))
    tensors = ragged.make_tensors(batch, spec)
    whole, whole_lse = oracle.attention(batch, spec, tensors.q, tensors.k, tensors.v)
    out, lse = np.full_like(whole, np.nan), np.full_like(whole_lse, np.nan)
    first = 0
    while first < len(qo_lens):
        last = data.draw(st.integers(first + 1, len(qo_lens)))
        cut = data.draw(st.integers(0, qo_lens[last - 1]))
        parts = [batch.part(first, last)]
        if cut not in (0, qo_lens[last - 1]):
            parts = [batch.part(first, last, (0, cut)), batch.part(last - 1, last, (cut, qo_lens[last - 1]))]
        for part in parts:
            assert part.num_requests in (last - first, 1)
            assert part.kv_indptr[0] == 0
            assert len(part.kv_indices) == part.num_pages == part.kv_indptr[-1]
            got, got_lse = oracle.attention(part, spec, tensors.q, tensors.k, tensors.v)
            rows = slice(*part.qo_indptr[[0, -1]])
            assert np.isnan(out[rows]).all(), "a row belongs to two parts"
            out[rows], lse[rows] = got[rows], got_lse[rows]
        first = last
    np.testing.assert_allclose(out, whole, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-12, atol=1e-12)


def test_a_part_keeps_its_rows_addresses_and_its_own_pages() -> None:
    part = of().part(1, 3)
    assert part.qo_indptr.tolist() == [3, 4, 4]
    assert part.kv_indptr.tolist() == [0, 3, 4]
    assert part.kv_indices.tolist() == [9, 0, 2, 5]
    assert part.kv_last_page_len.tolist() == [1, 5]


def test_a_block_of_rows_names_only_the_pages_that_its_last_row_sees() -> None:
    batch = ragged.make_batch([20], [50], SPEC)
    part = batch.part(0, 1, (1, 3))
    # row 19 sees 50 tokens, so row 2 sees 33: one in the third page
    assert part.qo_indptr.tolist() == [1, 3]
    assert part.kv_lens.tolist() == [33]
    assert part.kv_indices.tolist() == batch.kv_indices[:3].tolist()
    part = batch.part(0, 1, (0, 2))
    assert (part.num_pages, part.kv_last_page_len.tolist()) == (2, [16])


def test_a_part_does_not_change_its_batch() -> None:
    batch, before = of(), of()
    part = batch.part(0, 1, (1, 2))
    for array in (part.qo_indptr, part.kv_indptr, part.kv_last_page_len):
        array[:] = 77
    for name in GOOD:
        np.testing.assert_array_equal(getattr(batch, name), getattr(before, name))


def test_nested_lists_are_refused() -> None:
    with pytest.raises(BatchError, match="qo_indptr: got list"):
        Batch.of([[0], [0, 1]], [0], [], [], page_size=16, max_kv_len=3)
