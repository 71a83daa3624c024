"""Two batches, prefill and decode, planned and run as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ragged
import torch

import podgraph
from podgraph.batch import Batch
from podgraph.catalog.model import Catalog, Fingerprint, Record, Region, SpecEntry
from podgraph.dispatch.dispatcher import Dispatcher
from podgraph.dispatch.runtime import OpenCatalog
from podgraph.dispatch.two_sided import TwoSided
from podgraph.errors import BatchError, PodgraphError
from podgraph.planner import Layout, Policy
from podgraph.shapes import AttentionSpec, Bucket

SPEC = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=16)
BUCKETS = (Bucket(6, 64, 3), Bucket(4, 0, 4))
WHOLE = ragged.make_batch([9, 3, 1, 1], [300, 5, 40, 700], SPEC)
ROWS = 12  # of the prefill side


@pytest.fixture
def dispatcher() -> Dispatcher:
    layout = Layout.of(SPEC, BUCKETS, Policy.for_sms(0))
    regions = tuple(Region(name, size) for name, size in layout.sizes.items())
    catalog = Catalog(
        Fingerprint("cpu"),
        {"tiny": SpecEntry(SPEC, regions, layout.capacity)},
        100,
        1000,
        (),
        tuple(Record("tiny", bucket, "interpreter", -1) for bucket in BUCKETS),
        {},
    )
    return OpenCatalog(Path("memory.podcat"), catalog).bind()


def side(first: int, last: int) -> list[Any]:
    """A side's arrays, each from 0 on."""
    part = WHOLE.part(first, last)
    return [part.qo_indptr - part.qo_indptr[0], part.kv_indptr, part.kv_indices, part.kv_last_page_len]


NOTHING = [[0], [0], [], []]


def tensors_of(batch: Batch = WHOLE) -> ragged.Tensors:
    return ragged.make_tensors(batch, SPEC, dtype=torch.bfloat16)


def assert_right(out: torch.Tensor, tensors: ragged.Tensors) -> None:
    want, _ = ragged.oracle.attention(WHOLE, SPEC, tensors.q, tensors.k, tensors.v)
    np.testing.assert_allclose(ragged.oracle.float64(out), want[: out.shape[0]], rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize(
    "gap", [0, 3, -14, None], ids=["one behind the other", "apart", "the other way round", "two tensors"]
)
@pytest.mark.parametrize("given", [True, False], ids=["out given", "out made"])
def test_two_sides_are_one_batch(dispatcher: Dispatcher, gap: int | None, given: bool) -> None:
    pod = podgraph.TwoSided(dispatcher)
    (record,) = pod.plan(*side(0, 2), *side(2, 4))
    assert record.bucket == BUCKETS[0]
    tensors = tensors_of()
    q_p, q_d = tensors.q[:ROWS].clone(), tensors.q[ROWS:14].clone()
    if gap is not None:  # slices of one tensor, NaN between them
        wide = torch.full((20, *q_p.shape[1:]), torch.nan, dtype=q_p.dtype)
        first = 0 if gap >= 0 else 2
        wide[first : first + ROWS], wide[first + ROWS + gap :][:2] = q_p, q_d
        q_p, q_d = wide[first : first + ROWS], wide[first + ROWS + gap :][:2]
    outs = [torch.full_like(x, torch.nan) for x in (q_p, q_d)] if given else [None, None]
    cache = torch.stack([tensors.k, tensors.v], 1)
    out_p, out_d = pod.run(q_p, cache, q_d, cache, *outs)
    if given:
        assert out_p is outs[0]
        assert out_d is outs[1]
    assert (out_p.shape, out_d.shape) == (q_p.shape, q_d.shape)
    assert_right(torch.cat([out_p, out_d]), tensors)


@pytest.mark.parametrize("sides", [(4, "prefill"), (0, "decode")], ids=["prefill only", "decode only"])
def test_one_side_may_be_empty(dispatcher: Dispatcher, sides: tuple[int, str]) -> None:
    pod = TwoSided(dispatcher)
    both = (side(0, 4), NOTHING) if sides[1] == "prefill" else (NOTHING, side(0, 4))
    pod.plan(*both[0], *both[1])
    tensors = tensors_of()
    q, empty, cache = tensors.q[:14], tensors.q[:0], (tensors.k, tensors.v)
    outs = pod.run(q, cache, empty, cache) if sides[1] == "prefill" else pod.run(empty, cache, q, cache)
    assert_right(torch.cat(outs), tensors)


def test_pages_behind_a_sides_last_request_are_left_out(dispatcher: Dispatcher) -> None:
    pod, prefill = TwoSided(dispatcher), side(0, 2)
    prefill[2] = [*prefill[2], 7, 7]
    pod.plan(*prefill, *side(2, 4))
    tensors = tensors_of()
    cache = (tensors.k, tensors.v)
    assert_right(torch.cat(pod.run(tensors.q[:ROWS], cache, tensors.q[ROWS:14], cache)), tensors)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_the_side_at_fault_is_named(dispatcher: Dispatcher, name: str) -> None:
    sides = {"prefill": side(0, 2), "decode": side(2, 4)}
    sides[name][3] = [17, 1]
    with pytest.raises(BatchError) as raised:
        TwoSided(dispatcher).plan(*sides["prefill"], *sides["decode"])
    assert str(raised.value) == f"{name} side: kv_last_page_len of request 0: got 17, allowed: 1 to page_size=16"


def test_nothing_runs_before_a_plan(dispatcher: Dispatcher) -> None:
    tensors = tensors_of()
    cache = (tensors.k, tensors.v)
    with pytest.raises(PodgraphError, match=r"nothing is planned; call plan\(\) first"):
        TwoSided(dispatcher).run(tensors.q, cache, tensors.q, cache)


def test_rows_other_than_planned_and_other_caches_are_refused(dispatcher: Dispatcher) -> None:
    pod = TwoSided(dispatcher)
    pod.plan(*side(0, 2), *side(2, 4))
    tensors = tensors_of()
    q_p, q_d, cache = tensors.q[:ROWS], tensors.q[ROWS:14], (tensors.k, tensors.v)
    with pytest.raises(BatchError, match=r"q_p: got shape \(11, 4, 64\), allowed: 12 rows, as planned"):
        pod.run(q_p[:-1], cache, q_d, cache)
    with pytest.raises(BatchError, match=r"q_d: got shape \(3, 4, 64\), allowed: 2 rows, as planned"):
        pod.run(q_p, cache, tensors.q[:3], cache)
    for other in ((tensors.k, tensors.k), (tensors.k.clone(), tensors.v), torch.stack([tensors.k, tensors.v], 1)):
        with pytest.raises(BatchError, match="paged_kv_cache_d: got another cache than paged_kv_cache_p"):
            pod.run(q_p, cache, q_d, other)


def test_outputs_unlike_their_side_are_refused(dispatcher: Dispatcher) -> None:
    """A copy into them would spread or convert in silence."""
    pod = TwoSided(dispatcher)
    pod.plan(*side(0, 2), *side(2, 4))
    tensors = tensors_of()
    q_p, q_d, cache = tensors.q[:ROWS], tensors.q[ROWS:14], (tensors.k, tensors.v)
    for out_p, out_d, message in (
        (q_p.float(), None, "out_p: got torch.float32"),
        (torch.empty(ROWS + 1, *q_p.shape[1:], dtype=q_p.dtype), None, "out_p: got"),
        (None, torch.empty(1, *q_d.shape[1:], dtype=q_d.dtype), "out_d: got"),
        (None, [0.0], "out_d: got list"),
    ):
        with pytest.raises(BatchError, match=message):
            pod.run(q_p, cache, q_d, cache, out_p, out_d)  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="q_d: got NoneType"):
        pod.run(q_p, cache, None, cache)  # type: ignore[arg-type]
    with pytest.raises(BatchError, match=r"q_d: got .* allowed: heads, dtype and device of q_p"):
        pod.run(q_p, cache, q_d[:, :2], cache)
    with pytest.raises(BatchError, match="paged_kv_cache: got int"):
        pod.run(q_p, 3, q_d, 3)  # type: ignore[arg-type]
