"""The tensors of run(): what is checked again when they come again, and what is never taken."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_dispatcher import MIXED, SPEC, bind, tensors_of
from test_dispatcher import plan as plan_batch

from podgraph.dispatch.calls import CallChecker
from podgraph.errors import BatchError

CPU = torch.device("cpu")
ROWS = 7
SHAPE = (ROWS, SPEC.num_qo_heads, SPEC.head_dim)


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape or SHAPE, dtype=dtype)


def wide(rows: int = ROWS) -> torch.Tensor:
    """A slice of a fused tensor."""
    return made(rows, 3 * SPEC.num_qo_heads, SPEC.head_dim)[:, : SPEC.num_qo_heads]


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "other memory": lambda t: t.set_(t.clone()),
    "fewer rows": lambda t: t.resize_(ROWS - 1, *SHAPE[1:]),
    "other shape": lambda t: t.resize_(ROWS, SHAPE[1] * 2, SHAPE[2] // 2),
    "other strides": lambda t: t.as_strided_(SHAPE, (SHAPE[2], ROWS * SHAPE[2], 1)),
    "other dtype": lambda t: setattr(t, "data", t.data.view(torch.float16)),
}


@pytest.mark.parametrize("which", ["q", "out", "lse"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_was_changed_in_place_is_another_one(which: str, change: str) -> None:
    tensors = {"q": made(), "out": made(), "lse": made(ROWS, SPEC.num_qo_heads, dtype=torch.float32)}
    call = CallChecker(SPEC, CPU).check(ROWS, tensors["q"], tensors["out"], tensors["lse"])
    assert call.same(*tensors.values(), ROWS)
    if which == "lse":
        changes: dict[str, Callable[[torch.Tensor], Any]] = {
            "other memory": CHANGES["other memory"],
            "fewer rows": lambda t: t.resize_(ROWS - 1, SPEC.num_qo_heads),
            "other shape": lambda t: t.resize_(ROWS * 2, SPEC.num_qo_heads // 2),
            "other strides": lambda t: t.as_strided_((ROWS, SPEC.num_qo_heads), (1, ROWS)),
            "other dtype": lambda t: setattr(t, "data", t.data.view(torch.int32)),
        }
        changes[change](tensors[which])
    else:
        CHANGES[change](tensors[which])
    assert not call.same(*tensors.values(), ROWS)


@pytest.mark.parametrize("which", ["q", "out", "lse"])
def test_a_tensor_that_is_gone_is_no_tensor_that_is_missing(which: str) -> None:
    tensors: dict[str, Any] = {"q": made(), "out": made(), "lse": made(ROWS, SPEC.num_qo_heads, dtype=torch.float32)}
    call = CallChecker(SPEC, CPU).check(ROWS, tensors["q"], tensors["out"], tensors["lse"])
    tensors[which] = None
    gc.collect()
    assert not call.same(tensors["q"], tensors["out"], tensors["lse"], ROWS)


def test_an_lse_more_or_less_is_another_call() -> None:
    q, out, lse = made(), made(), made(ROWS, SPEC.num_qo_heads, dtype=torch.float32)
    checker = CallChecker(SPEC, CPU)
    assert not checker.check(ROWS, q, out, None).same(q, out, lse, ROWS)
    assert not checker.check(ROWS, q, out, lse).same(q, out, None, ROWS)
    assert not checker.check(ROWS, q, out, lse).same(q, out, lse, ROWS + 1)


REFUSED: dict[str, tuple[Callable[[], tuple[Any, Any, Any]], str]] = {
    "q none": (lambda: (None, made(), None), "q: got NoneType, allowed: a tensor"),
    "q an array": (lambda: (made().float().numpy(), made(), None), "q: got ndarray, allowed: a tensor"),
    "q sparse": (lambda: (made().to_sparse(), made(), None), "q: got layout torch.sparse_coo"),
    "q meta": (lambda: (made().to("meta"), made(), None), "q: got a tensor on meta"),
    "q flat": (lambda: (made(ROWS, SHAPE[1] * SHAPE[2]), made(), None), "q: got shape"),
    "q of one dimension": (lambda: (made(5), made(), None), "q: got shape"),
    "q few rows": (lambda: (made(ROWS - 1, *SHAPE[1:]), made(), None), "q: got 6 rows"),
    "q off its alignment": (
        lambda: (made(ROWS * SHAPE[1] * SHAPE[2] + 1)[1:].view(SHAPE), made(), None),
        "q: got (address|strides)",
    ),
    "out an array": (lambda: (made(), made().float().numpy(), None), "out: got ndarray, allowed: a tensor"),
    "out meta": (lambda: (made(), made().to("meta"), None), "out: got a tensor on meta"),
    "out wide": (lambda: (made(), wide(), None), "out: got .* allowed: contiguous"),
    "out off its alignment": (
        lambda: (made(), made(ROWS * SHAPE[1] * SHAPE[2] + 1)[1:].view(SHAPE), None),
        "out: got (address|strides)",
    ),
    "lse a list": (lambda: (made(), made(), [1.0]), "lse: got list, allowed: a tensor or None"),
    "lse sparse": (
        lambda: (made(), made(), made(ROWS, 4, dtype=torch.float32).to_sparse()),
        "lse: got torch.float32",
    ),
    "lse meta": (lambda: (made(), made(), made(ROWS, 4, dtype=torch.float32).to("meta")), "lse: got torch.float32"),
}


@pytest.mark.parametrize("warm", [False, True], ids=["first", "behind a good one"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_such_tensor_is_refused_in_words(case: str, warm: bool) -> None:
    checker = CallChecker(SPEC, CPU)
    if warm:
        checker.check(ROWS, made(), made(), None)
    make, message = REFUSED[case]
    with pytest.raises(BatchError, match=message):
        checker.check(ROWS, *make())


def overlapping() -> list[tuple[Any, Any, Any]]:
    memory = made(4 * ROWS, *SHAPE[1:])
    q, lse = memory[ROWS : 2 * ROWS], memory.view(torch.float32).view(-1)
    fused = made(ROWS, 3 * SHAPE[1], SHAPE[2])
    small = lse[: ROWS * SPEC.num_qo_heads].view(ROWS, SPEC.num_qo_heads)
    return [
        (q, q, None),
        (q, memory[ROWS - 1 : 2 * ROWS - 1], None),
        (q, memory[2 * ROWS - 1 : 3 * ROWS - 1], None),
        (fused[:, : SHAPE[1]], fused.view(-1)[: ROWS * SHAPE[1] * SHAPE[2]].view(SHAPE), None),
        (memory[:ROWS], memory[ROWS : 2 * ROWS], small),
        (memory[ROWS : 2 * ROWS], memory[:ROWS], small),
    ]


@pytest.mark.parametrize("warm", [False, True], ids=["first", "behind a good one"])
@pytest.mark.parametrize("number", range(len(overlapping())))
def test_memory_that_is_read_and_written_is_refused(number: int, warm: bool) -> None:
    checker = CallChecker(SPEC, CPU)
    q, out, lse = overlapping()[number]
    if warm:
        checker.check(ROWS, q, made(), None)
    with pytest.raises(BatchError, match=r"(out|lse): got memory that (q|out) lies in too"):
        checker.check(ROWS, q, out, lse)


def test_memory_side_by_side_is_no_overlap() -> None:
    memory, checker = made(3 * ROWS, *SHAPE[1:]), CallChecker(SPEC, CPU)
    for _ in range(2):
        checker.check(ROWS, memory[:ROWS], memory[ROWS : 2 * ROWS], None)
        checker.check(ROWS, memory[2 * ROWS :], memory[ROWS : 2 * ROWS], None)
        checker.check(0, memory[:0], memory[:0], None)


def test_calls_of_one_form_have_their_own_addresses_and_rows() -> None:
    checker = CallChecker(SPEC, CPU)
    for rows in (ROWS, ROWS, ROWS + 2, ROWS):
        for q in (made(rows, *SHAPE[1:]), wide(rows)):
            out = made(rows + 1, *SHAPE[1:])
            call = checker.check(ROWS, q, out, None)
            assert call.key == (q.data_ptr(), out.data_ptr(), 0, q.stride(0), q.stride(1))
            assert call.rows == rows
            assert call.same(q, out, None, ROWS)


@pytest.mark.parametrize("layer", ["0", 0.0, [0], -1, 1, 1 << 40, None], ids=str)
def test_a_layer_that_is_none_is_refused(layer: Any) -> None:
    tensors = tensors_of(MIXED)
    catalog = bind()
    with catalog as dispatcher:
        plan_batch(dispatcher, MIXED)
        with pytest.raises(BatchError, match=r"layer: got|got no cache"):
            dispatcher.run(tensors.q, layer=layer)


@pytest.mark.parametrize(
    ("hints", "message"),
    [
        ({"prefill_len": "5", "decode_count": 2}, "prefill_len: got '5', allowed: a whole number below 2"),
        ({"prefill_len": 5, "decode_count": 2.0}, "decode_count: got 2.0, allowed"),
        ({"prefill_len": -1, "decode_count": 2}, "prefill_len: got -1, allowed"),
        ({"prefill_len": 5, "decode_count": 1 << 31}, "decode_count: got 2147483648, allowed"),
        ({"bucket": [4, 16, 2]}, r"bucket: got \[4, 16, 2\], allowed: one of the catalog's"),
        ({"bucket": "4x16x2"}, "bucket: got 4x16x2, allowed: one of the catalog's"),
    ],
)
def test_hints_that_are_none_are_refused(hints: dict[str, Any], message: str) -> None:
    with bind() as dispatcher, pytest.raises(BatchError, match=message):
        dispatcher.plan(MIXED.qo_indptr, MIXED.kv_indptr, MIXED.kv_indices, MIXED.kv_last_page_len, **hints)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool], ids=str)
def test_metadata_of_another_kind_are_refused(dtype: torch.dtype) -> None:
    with bind() as dispatcher, pytest.raises(BatchError, match=r"got .* allowed: "):
        dispatcher.plan(
            torch.tensor([0, 1]).to(dtype), MIXED.kv_indptr[:2], MIXED.kv_indices, MIXED.kv_last_page_len[:1]
        )


@pytest.mark.parametrize(
    "q", [None, 3, [1.0], made().float().numpy(), made().to_sparse(), made().to("meta"), made()[0]], ids=type
)
def test_an_output_is_made_for_a_tensor_only(q: Any) -> None:
    tensors = tensors_of(MIXED)
    with bind() as dispatcher:
        plan_batch(dispatcher, MIXED)
        with pytest.raises(BatchError, match="q: got"):
            dispatcher.run(q, (tensors.k, tensors.v))


def test_an_output_that_is_made_is_contiguous() -> None:
    tensors = tensors_of(MIXED)
    fused = torch.cat([tensors.q, tensors.q], 1)[:, : SPEC.num_qo_heads]
    with bind() as dispatcher:
        plan_batch(dispatcher, MIXED)
        out = dispatcher.run(fused, (tensors.k, tensors.v))
        assert out.is_contiguous()
        assert torch.equal(out[:ROWS], dispatcher.run(tensors.q, (tensors.k, tensors.v))[:ROWS])
