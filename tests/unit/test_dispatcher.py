"""The runtime's face on the CPU backend: bind, plan, run, what it counts and what it refuses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import ragged
import torch

import podgraph
from podgraph.batch import Batch
from podgraph.catalog import store
from podgraph.catalog.model import Catalog, Fingerprint, Record, Region, SpecEntry
from podgraph.dispatch.dispatcher import Dispatcher
from podgraph.dispatch.runtime import OpenCatalog
from podgraph.errors import BatchError, BucketMiss, BucketOverflow, CatalogError, ConfigError, PodgraphError
from podgraph.planner import Layout, Policy
from podgraph.shapes import AttentionSpec, Bucket

SPEC = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=128, page_size=16)
BUCKETS = (Bucket(4, 16, 2), Bucket(4, 0, 4), Bucket(2, 16, 0))
MAX_PAGES, MAX_KV_LEN = 64, 800
POLICY = Policy.for_sms(0)
ROUNDED = 2.0**-8  # relative, bfloat16
SENTINEL = 7.0


def catalog_of(specs: dict[str, AttentionSpec] | None = None, buckets: Sequence[Bucket] = BUCKETS) -> Catalog:
    """What a build with ``backend: cpu`` writes."""
    entries = {}
    for name, spec in (specs or {"tiny": SPEC}).items():
        layout = Layout.of(spec, buckets, POLICY)
        sizes = dict.fromkeys(("q", "k", "v", "out", "lse"), 0) | layout.sizes
        entries[name] = SpecEntry(spec, tuple(Region(*item) for item in sorted(sizes.items())), layout.capacity)
    records = tuple(Record(name, bucket, "interpreter", -1) for name in entries for bucket in buckets)
    return Catalog(Fingerprint("cpu"), entries, MAX_PAGES, MAX_KV_LEN, (), records, {}, {"podgraph": "test"})


def bind(spec: AttentionSpec = SPEC) -> Dispatcher:
    return OpenCatalog(Path("memory.podcat"), catalog_of({"tiny": spec})).bind()


@pytest.fixture
def dispatcher(tmp_path: Path) -> Dispatcher:
    """Bound from a file."""
    path = tmp_path / "tiny.podcat"
    store.write(path, catalog_of())
    return podgraph.open(path).bind()


def tensors_of(batch: Batch, seed: int = 0, spec: AttentionSpec = SPEC) -> ragged.Tensors:
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}[spec.dtype]
    tensors = ragged.make_tensors(batch, spec, seed, dtype)
    for tensor in (tensors.out, tensors.lse):
        tensor[int(batch.qo_indptr[-1]) :] = SENTINEL
    return tensors


def plan(dispatcher: Dispatcher, batch: Batch) -> list[Bucket]:
    records = dispatcher.plan(batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)
    return [record.bucket for record in records]


def assert_right(batch: Batch, tensors: ragged.Tensors, spec: AttentionSpec = SPEC) -> None:
    """Rows of the batch are the oracle's, rows behind them hold what they held."""
    live = int(batch.qo_indptr[-1])
    want, want_lse = oracle.attention(batch, spec, tensors.q, tensors.k, tensors.v)
    np.testing.assert_allclose(oracle.float64(tensors.out[:live]), want[:live], rtol=ROUNDED, atol=1e-5)
    np.testing.assert_allclose(oracle.float64(tensors.lse[:live]), want_lse[:live], rtol=1e-5, atol=1e-4)
    assert bool((tensors.out[live:] == SENTINEL).all())
    assert bool((tensors.lse[live:] == SENTINEL).all())


MIXED = ragged.make_batch([1, 5, 1], [300, 40, 7], SPEC)
STEPS = {
    "mixed": MIXED,
    "decode": ragged.make_batch([1, 1, 1, 1], [1, 500, 16, 17], SPEC),
    "prefill": ragged.make_batch([9, 7], [200, 7], SPEC),
    "one row": ragged.make_batch([1], [33], SPEC),
    "no KV": ragged.make_batch([1, 3], [0, 0], SPEC),
    "idle": ragged.make_batch([0, 2, 0], [50, 60, 0], SPEC),
    "beyond every bucket": ragged.make_batch([20, 1, 1, 1, 30, 1, 1], [20, 100, 0, 100, 33, 3, 4], SPEC),
    "too many pages": ragged.make_batch([1, 1, 1], [512, 512, 64], SPEC),
}


def test_one_dispatcher_serves_any_batches_in_a_row(dispatcher: Dispatcher) -> None:
    for seed, name in enumerate([*STEPS, *reversed(STEPS)]):
        plan(dispatcher, STEPS[name])
        for layer in range(2):
            tensors = tensors_of(STEPS[name], 10 * seed + layer)
            got = dispatcher.run(tensors.q, (tensors.k, tensors.v), tensors.out, tensors.lse)
            assert got is tensors.out
            assert_right(STEPS[name], tensors)


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(4, 2, 128, 16, kv_layout="HND"),
        AttentionSpec(4, 2, 128, 16, dtype="float16"),
        AttentionSpec(4, 2, 128, 16, kv_dtype="float8_e4m3fn", k_scale=0.5, v_scale=1.25),
        AttentionSpec(4, 2, 128, 16, kv_dtype="float8_e4m3fn", kv_layout="HND"),
        AttentionSpec(4, 2, 128, 16, window_left=20),
        AttentionSpec(4, 2, 128, 16, logits_soft_cap=3.0),
        AttentionSpec(4, 2, 128, 16, sm_scale=0.3),
        AttentionSpec(4, 2, 128, 16, decode_rows=2),
        AttentionSpec(4, 2, 64, 16),
        AttentionSpec(4, 2, 256, 16),
        AttentionSpec(4, 2, 128, 8),
        AttentionSpec(6, 2, 128, 16),
    ],
    ids=[
        "HND",
        "float16",
        "fp8",
        "fp8 HND",
        "window",
        "soft cap",
        "scale",
        "decode rows",
        "64",
        "256",
        "pages of 8",
        "3",
    ],
)
def test_every_specification(spec: AttentionSpec) -> None:
    with bind(spec) as dispatcher:
        batch = ragged.make_batch([1, 5, 1], [300, 40, 7], spec)
        plan(dispatcher, batch)
        tensors = tensors_of(batch, spec=spec)
        dispatcher.run(tensors.q, (tensors.k, tensors.v), tensors.out, tensors.lse)
        assert_right(batch, tensors, spec)


def test_makes_out_where_none_is_given(dispatcher: Dispatcher) -> None:
    plan(dispatcher, MIXED)
    tensors = tensors_of(MIXED)
    dispatcher.run(tensors.q, (tensors.k, tensors.v), tensors.out)
    made = dispatcher.run(tensors.q, (tensors.k, tensors.v))
    assert made.shape == tensors.q.shape
    assert made.dtype == tensors.q.dtype
    assert torch.equal(made[:7], tensors.out[:7])


def test_eager_equals_replay(dispatcher: Dispatcher) -> None:
    plan(dispatcher, MIXED)
    tensors = tensors_of(MIXED)
    replayed = dispatcher.run(tensors.q, (tensors.k, tensors.v))[:7]
    eager = dispatcher.run(tensors.q, (tensors.k, tensors.v), eager=True)[:7]
    assert torch.equal(eager, replayed)


def test_q_may_be_a_slice_of_a_wider_tensor(dispatcher: Dispatcher) -> None:
    plan(dispatcher, MIXED)
    tensors = tensors_of(MIXED)
    wide = torch.full((tensors.q.shape[0], 8, 128), torch.nan, dtype=torch.bfloat16)
    wide[:, 2:6] = tensors.q
    dispatcher.run(wide[:, 2:6], (tensors.k, tensors.v), tensors.out, tensors.lse)
    assert_right(MIXED, tensors)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_one_cache_tensor_is_a_pair(layout: str) -> None:
    spec = dataclasses.replace(SPEC, kv_layout=layout)
    with bind(spec) as dispatcher:
        plan(dispatcher, MIXED)
        tensors = tensors_of(MIXED, spec=spec)
        dispatcher.run(tensors.q, torch.stack([tensors.k, tensors.v], 1), tensors.out, tensors.lse)
        assert_right(MIXED, tensors, spec)


def test_metadata_may_be_torch_tensors(dispatcher: Dispatcher) -> None:
    arrays = (MIXED.qo_indptr, MIXED.kv_indptr, MIXED.kv_indices, MIXED.kv_last_page_len)
    dispatcher.plan(*(torch.from_numpy(array) for array in arrays))
    tensors = tensors_of(MIXED)
    dispatcher.run(tensors.q, (tensors.k, tensors.v), tensors.out, tensors.lse)
    assert_right(MIXED, tensors)


def test_later_changes_of_the_callers_arrays_do_not_matter(dispatcher: Dispatcher) -> None:
    arrays = [a.copy() for a in (MIXED.qo_indptr, MIXED.kv_indptr, MIXED.kv_indices, MIXED.kv_last_page_len)]
    dispatcher.plan(*arrays)
    for array in arrays:
        array[:] = 0
    tensors = tensors_of(MIXED)
    dispatcher.run(tensors.q, (tensors.k, tensors.v), tensors.out, tensors.lse)
    assert_right(MIXED, tensors)


def test_an_empty_batch_runs_and_writes_nothing(dispatcher: Dispatcher) -> None:
    assert dispatcher.plan([0], [0], [], []) == []
    tensors = tensors_of(MIXED)
    tensors.out[:], tensors.lse[:] = SENTINEL, SENTINEL
    dispatcher.run(tensors.q, (tensors.k, tensors.v), tensors.out, tensors.lse)
    assert bool((tensors.out == SENTINEL).all())
    assert bool((tensors.lse == SENTINEL).all())
    assert dispatcher.run(tensors.q[:0], (tensors.k, tensors.v)).shape == (0, 4, 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"q": torch.zeros(6, 4, 128).bfloat16()}, "q: got 6 rows, allowed: at least", id="q short"),
        pytest.param({"q": torch.zeros(9, 4, 128)}, "q: got torch.float32, allowed: torch.bfloat16", id="q dtype"),
        pytest.param({"q": torch.zeros(9, 2, 128).bfloat16()}, "q: got shape (9, 2, 128), allowed:", id="q heads"),
        pytest.param({"q": torch.zeros(9, 512).bfloat16()}, "q: got shape (9, 512), allowed:", id="q dimensions"),
        pytest.param(
            {"q": torch.zeros(9, 4, 128, dtype=torch.bfloat16, device="meta")},
            "q: got a tensor on meta, allowed: cpu",
            id="q device",
        ),
        pytest.param(
            {"q": torch.zeros(9, 4, 256).bfloat16()[:, :, ::2]},
            "q: got strides (1024, 256, 2), allowed:",
            id="q strides",
        ),
        pytest.param(
            {"q": torch.zeros(9, 4, 130).bfloat16()[:, :, :128]},
            "q: got strides (520, 130, 1), allowed:",
            id="q rows off 16 bytes",
        ),
        pytest.param(
            {"q": torch.zeros(9 * 512 + 1).bfloat16()[1:].view(9, 4, 128)},
            "q: got strides (512, 128, 1), allowed:",
            id="q address off 16 bytes",
        ),
        pytest.param(
            {"q": torch.zeros(0, 4, 128).bfloat16()},
            "q: got 0 rows",
            id="q empty",
        ),
        pytest.param(
            {"out": torch.zeros(6, 4, 128).bfloat16()},
            "out: got 6 rows, allowed: at least the planned batch's 7",
            id="out short",
        ),
        pytest.param(
            {"out": torch.zeros(9, 4, 128)}, "out: got torch.float32, allowed: torch.bfloat16", id="out dtype"
        ),
        pytest.param(
            {"out": torch.zeros(9, 8, 128).bfloat16()[:, :4]}, "out: got (9, 4, 128) strides (1024", id="out strided"
        ),
        pytest.param({"lse": torch.zeros(6, 4)}, "lse: got shape (6, 4), allowed: at least (7, 4)", id="lse short"),
        pytest.param({"lse": torch.zeros(9, 3)}, "lse: got shape (9, 3), allowed: at least (7, 4)", id="lse heads"),
        pytest.param({"lse": torch.zeros(9, 4).bfloat16()}, "lse: got torch.bfloat16 (9, 4) on cpu", id="lse dtype"),
        pytest.param(
            {"lse": torch.zeros(4, 9).t()}, "lse: got torch.float32 (9, 4) on cpu, allowed: contig", id="lse order"
        ),
        pytest.param(
            {"cache": torch.zeros(99, 16, 2, 128).bfloat16()},
            "paged_kv_cache: got shape (99, 16, 2, 128), allowed: [pages, 2, ...]",
            id="cache dimensions",
        ),
        pytest.param(
            {"cache": torch.zeros(99, 3, 16, 2, 128).bfloat16()},
            "paged_kv_cache: got shape (99, 3, 16, 2, 128), allowed: [pages, 2, ...]",
            id="cache without K and V",
        ),
        pytest.param({"cache": "no cache"}, "paged_kv_cache: got str, allowed: a tensor or a (k, v) pair", id="text"),
        pytest.param(
            {"cache": (torch.zeros(99, 16, 2, 128).bfloat16(),)},
            "paged_kv_cache: got tuple, allowed: a tensor or a (k, v) pair",
            id="one of a pair",
        ),
        pytest.param(
            {"cache": torch.zeros(99, 2, 2, 16, 128).bfloat16()},
            "K cache: got shape (99, 2, 16, 128), allowed: (None, 16, 2, 128)",
            id="cache layout",
        ),
        pytest.param(
            {"cache": (torch.zeros(99, 16, 2, 128).bfloat16(), torch.zeros(99, 16, 2, 128))},
            "V cache: got torch.float32, allowed: torch.bfloat16",
            id="V cache dtype",
        ),
        pytest.param(
            {"cache": (torch.zeros(99, 16, 2, 128).bfloat16(), torch.zeros(23, 16, 2, 128).bfloat16())},
            "kv_indices: got page ",
            id="page beyond the V cache",
        ),
    ],
)
def test_refuses_tensors(dispatcher: Dispatcher, changes: dict[str, Any], message: str) -> None:
    batch = MIXED
    plan(dispatcher, batch)
    tensors = tensors_of(batch)
    given = {"q": tensors.q, "cache": (tensors.k, tensors.v), "out": tensors.out, "lse": tensors.lse, **changes}
    with pytest.raises(BatchError) as raised:
        dispatcher.run(given["q"], given["cache"], given["out"], given["lse"])
    assert str(raised.value).startswith(message)
    assert dispatcher.counters.runs == 0
    assert not tensors.out[:7].isfinite().any(), "a refused call wrote something"


def test_rows_too_far_apart_are_refused(dispatcher: Dispatcher, tmp_path: Path) -> None:
    plan(dispatcher, MIXED)
    tensors = tensors_of(MIXED)
    sparse, elements = tmp_path / "q", (7 << 28) + 512
    with sparse.open("wb") as file:
        file.truncate(2 * elements)
    far = torch.from_file(str(sparse), shared=True, size=elements, dtype=torch.bfloat16)
    far = far.as_strided((8, 4, 128), (1 << 28, 128, 1))
    with pytest.raises(BatchError, match=r"q: got 8 rows 268435456 elements apart, allowed: below 2\^31"):
        dispatcher.run(far, (tensors.k, tensors.v))
    dispatcher.run(far[:7], (tensors.k, tensors.v))  # just below


def test_the_last_page_of_a_cache_is_allowed(dispatcher: Dispatcher) -> None:
    batch = ragged.make_batch([1], [16], SPEC)
    batch = dataclasses.replace(batch, kv_indices=np.array([5], np.int32))
    plan(dispatcher, batch)
    q, cache = torch.ones(1, 4, 128).bfloat16(), torch.ones(6, 2, 16, 2, 128).bfloat16()
    assert bool((dispatcher.run(q, cache) == 1).all())
    with pytest.raises(BatchError, match="kv_indices: got page 5, allowed: below the cache's 5"):
        dispatcher.run(q, cache[:5])


def test_nothing_runs_before_a_plan(dispatcher: Dispatcher) -> None:
    tensors = tensors_of(MIXED)
    with pytest.raises(PodgraphError, match=r"run: nothing is planned; call plan\(\) first"):
        dispatcher.run(tensors.q, (tensors.k, tensors.v))
    plan(dispatcher, MIXED)
    dispatcher.reset()
    with pytest.raises(PodgraphError, match="nothing is planned"):
        dispatcher.run(tensors.q, (tensors.k, tensors.v))


def test_nothing_runs_after_close(dispatcher: Dispatcher) -> None:
    plan(dispatcher, MIXED)
    tensors = tensors_of(MIXED)
    with dispatcher:
        dispatcher.run(tensors.q, (tensors.k, tensors.v))
    for call in (
        lambda: dispatcher.run(tensors.q, (tensors.k, tensors.v)),
        lambda: dispatcher.plan([0], [0], [], []),
        lambda: dispatcher.reset(),
    ):
        with pytest.raises(PodgraphError, match="this dispatcher is closed; bind the catalog again"):
            call()
    dispatcher.close()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (([0, 1], [0, 1], [0], [17]), "kv_last_page_len of request 0: got 17"),
        (
            ([0, 1], [0, 51], [0] * 51, [1]),
            "KV length of request 0: got 801, allowed: at most workspace.max_kv_len = 800",
        ),
        (([1, 1], [0, 1], [0], [1]), "qo_indptr: got [1] at the start"),
    ],
    ids=["last page", "KV too long", "start"],
)
def test_a_refused_plan_leaves_the_last_one_in_force(
    dispatcher: Dispatcher, arrays: tuple[Any, ...], message: str
) -> None:
    plan(dispatcher, MIXED)
    with pytest.raises(BatchError) as raised:
        dispatcher.plan(*arrays)
    assert str(raised.value).startswith(message)
    tensors = tensors_of(MIXED)
    dispatcher.run(tensors.q, (tensors.k, tensors.v), tensors.out, tensors.lse)
    assert_right(MIXED, tensors)
    assert dispatcher.counters.plans == 1


def test_a_request_that_fits_nowhere_leaves_the_last_plan_in_force() -> None:
    dispatcher = OpenCatalog(Path("decodes.podcat"), catalog_of(buckets=[Bucket(4, 0, 4)])).bind()
    batch = STEPS["decode"]
    plan(dispatcher, batch)
    with pytest.raises(BatchError, match="request 1: 5 rows on 40 KV tokens fit no bucket, even alone"):
        plan(dispatcher, MIXED)
    tensors = tensors_of(batch)
    dispatcher.run(tensors.q, (tensors.k, tensors.v), tensors.out, tensors.lse)
    assert_right(batch, tensors)


def test_a_bucket_of_choice(dispatcher: Dispatcher) -> None:
    records = {r.bucket: r for r in catalog_of().records}
    batch = ragged.make_batch([1], [500], SPEC)
    for bucket in BUCKETS:
        dispatcher.plan_into(records[bucket], batch)
        tensors = tensors_of(batch)
        dispatcher.run(tensors.q, (tensors.k, tensors.v), tensors.out, tensors.lse)
        assert_right(batch, tensors)
    with pytest.raises(BucketOverflow, match=r"bucket \(batch=4, prefill_len=0, decode_count=4\) does not hold"):
        dispatcher.plan_into(records[Bucket(4, 0, 4)], MIXED)
    with pytest.raises(BucketOverflow, match=r"the batch names 68 pages, allowed: at most workspace\.max_pages = 64"):
        dispatcher.plan_into(records[Bucket(4, 0, 4)], STEPS["too many pages"])
    # the last good plan is still there
    tensors = tensors_of(batch)
    dispatcher.run(tensors.q, (tensors.k, tensors.v), tensors.out, tensors.lse)
    assert_right(batch, tensors)


def test_plan_names_the_buckets_that_serve(dispatcher: Dispatcher) -> None:
    assert plan(dispatcher, MIXED) == [Bucket(4, 16, 2)]
    assert plan(dispatcher, STEPS["decode"]) == [Bucket(4, 0, 4)]
    assert plan(dispatcher, STEPS["prefill"]) == [Bucket(2, 16, 0)]
    assert plan(dispatcher, STEPS["too many pages"]) == [Bucket(4, 0, 4)] * 2


def test_counters(dispatcher: Dispatcher) -> None:
    counters = dispatcher.counters
    plan(dispatcher, MIXED)  # 5 of 16 rows, 3 of 4 slots
    tensors = tensors_of(MIXED)
    for _ in range(3):
        dispatcher.run(tensors.q, (tensors.k, tensors.v))
    mixed, decode, prefill = map(str, BUCKETS)
    assert (counters.padded_rows, counters.padded_slots) == (11, 1)
    plan(dispatcher, ragged.make_batch([1, 1, 1, 4], [9] * 4, SPEC))  # a third decode takes a prefill slot and a row
    assert (counters.padded_rows, counters.padded_slots) == (11 + 11, 1)
    batch = ragged.make_batch([1, 20], [30, 20], SPEC)
    plan(dispatcher, batch)  # 1 + 16 rows, then 4
    tensors = tensors_of(batch)
    dispatcher.run(tensors.q, (tensors.k, tensors.v))
    assert (counters.padded_rows, counters.padded_slots) == (22 + 0 + 12, 1 + 2 + 1)
    plan(dispatcher, STEPS["too many pages"])
    dispatcher.plan([0], [0], [], [])
    dispatcher.run(tensors.q, (tensors.k, tensors.v))
    assert (counters.plans, counters.runs, counters.exec_updates) == (5, 5, 0)
    assert counters.replays == {mixed: 4, prefill: 1}
    assert counters.splits == {"no bucket holds the batch": 1, "more pages than workspace.max_pages": 1}
    assert (counters.padded_rows, counters.padded_slots) == (34, 4 + (4 - 2) + (4 - 1))
    written = counters.to_dict()
    assert {name: getattr(counters, name) for name in written} == written
    assert decode not in counters.replays


def test_bind_takes_a_specification_by_name() -> None:
    wide = dataclasses.replace(SPEC, num_qo_heads=8)
    catalog = OpenCatalog(Path("two.podcat"), catalog_of({"narrow": SPEC, "wide": wide}))
    assert catalog.bind("narrow").spec == SPEC
    assert catalog.bind("wide").spec == wide
    for name in (None, "broad"):
        with pytest.raises(CatalogError) as raised:
            catalog.bind(name)
        assert str(raised.value) == f"two.podcat: spec: got {name!r}, allowed: narrow, wide; name one of them"


def test_a_miss_may_be_an_error() -> None:
    catalog = OpenCatalog(Path("memory.podcat"), catalog_of())
    dispatcher = catalog.bind(on_miss="error", padding_cap=0.7)
    plan(dispatcher, MIXED)
    for name in ("beyond every bucket", "too many pages", "one row"):
        with pytest.raises(BucketMiss, match="bind with on_miss='split'"):
            plan(dispatcher, STEPS[name])
    # the last good plan is still there
    tensors = tensors_of(MIXED)
    dispatcher.run(tensors.q, (tensors.k, tensors.v), tensors.out, tensors.lse)
    assert_right(MIXED, tensors)
    assert dispatcher.plan([0], [0], [], []) == []


def test_padding_beyond_the_cap_is_counted() -> None:
    dispatcher = OpenCatalog(Path("memory.podcat"), catalog_of()).bind(padding_cap=0.7)
    plan(dispatcher, MIXED)  # 11 of 18 rows empty
    assert dispatcher.counters.over_padding_cap == 0
    plan(dispatcher, STEPS["one row"])  # 3 of 4
    assert dispatcher.counters.over_padding_cap == 1
    assert dispatcher.counters.to_dict()["over_padding_cap"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_miss": "ignore"}, "on_miss: got 'ignore', allowed: 'split' or 'error'"),
        ({"padding_cap": 1.5}, "padding_cap: got 1.5, allowed: 0 to 1, or None"),
        ({"padding_cap": -0.1}, "padding_cap: got -0.1, allowed: 0 to 1, or None"),
        ({"padding_cap": math.nan}, "padding_cap: got nan, allowed: 0 to 1, or None"),
        ({"padding_cap": "x"}, "padding_cap: got 'x', allowed: 0 to 1, or None"),
        ({"memory_budget": "1GB"}, "memory_budget: got '1GB', allowed: bytes, 0 or more, or None"),
        ({"memory_budget": 1.5}, "memory_budget: got 1.5, allowed: bytes, 0 or more, or None"),
        ({"kv_caches": 3}, "kv_caches: got int, allowed: a list with every layer's cache"),
        ({"device": "bogus"}, "device: got 'bogus', allowed: what torch.device takes, such as 'cuda:0'"),
        ({"device": 1.5}, "device: got 1.5, allowed: what torch.device takes, such as 'cuda:0'"),
    ],
    ids=str,
)
def test_bind_refuses_other_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        OpenCatalog(Path("memory.podcat"), catalog_of()).bind(**options)
    assert str(raised.value) == message


@pytest.mark.parametrize("field", ["requests", "prefill_items", "decode_items", "partial_rows", "merge_rows"])
def test_bind_refuses_lists_too_short_for_a_bucket(field: str) -> None:
    catalog = catalog_of()
    entry = catalog.specs["tiny"]
    capacity = dataclasses.replace(entry.capacity, **{field: getattr(entry.capacity, field) - 1})
    sizes = Layout.for_capacity(SPEC, capacity, "flashinfer").sizes
    regions = tuple(dataclasses.replace(r, size=sizes.get(r.name, 0)) for r in entry.regions)
    changed = dataclasses.replace(catalog, specs={"tiny": SpecEntry(SPEC, regions, capacity)})
    with pytest.raises(CatalogError, match=r"^short\.podcat: spec tiny: bucket .* needs .* rebuild the catalog$"):
        OpenCatalog(Path("short.podcat"), changed).bind()


def test_lists_longer_than_any_bucket_needs_do_no_harm() -> None:
    # as in a catalog whose largest bucket did not verify
    catalog = catalog_of()
    fewer = dataclasses.replace(catalog, records=catalog.records[1:])
    dispatcher = OpenCatalog(Path("fewer.podcat"), fewer).bind()
    batch = STEPS["prefill"]
    plan(dispatcher, batch)
    tensors = tensors_of(batch)
    dispatcher.run(tensors.q, (tensors.k, tensors.v), tensors.out, tensors.lse)
    assert_right(batch, tensors)


@pytest.mark.parametrize("region", ["meta", "plan", "partials", "counters"])
@pytest.mark.parametrize("change", [16, -16, None], ids=["larger", "smaller", "missing"])
def test_bind_refuses_regions_of_another_layout(region: str, change: int | None) -> None:
    catalog = catalog_of()
    regions = [
        dataclasses.replace(r, size=r.size + (change or 0)) if r.name == region else r
        for r in catalog.specs["tiny"].regions
        if r.name != region or change is not None
    ]
    entry = dataclasses.replace(catalog.specs["tiny"], regions=tuple(regions))
    changed = dataclasses.replace(catalog, specs={"tiny": entry})
    with pytest.raises(CatalogError, match=rf"^other\.podcat: spec tiny: region {region} has .* rebuild the catalog$"):
        OpenCatalog(Path("other.podcat"), changed).bind()


def test_bind_refuses_a_bucket_beyond_the_capacity() -> None:
    catalog = catalog_of()
    larger = dataclasses.replace(catalog.records[0], bucket=Bucket(400, 160, 2))
    changed = dataclasses.replace(catalog, records=(*catalog.records, larger))
    with pytest.raises(CatalogError, match=r"bucket \(batch=400, prefill_len=160, decode_count=2\) needs"):
        OpenCatalog(Path("other.podcat"), changed).bind()


def test_buckets_may_be_missing() -> None:
    """A build that leaves out its largest bucket keeps the lists of the others where they are."""
    catalog = catalog_of()
    smaller = dataclasses.replace(catalog, records=catalog.records[-1:])
    with OpenCatalog(Path("other.podcat"), smaller).bind() as dispatcher:
        assert dispatcher.plan([0, 5], [0, 1], [0], [5]) == [catalog.records[-1]]


def test_open_keeps_the_path_and_the_content(tmp_path: Path) -> None:
    path = tmp_path / "tiny.podcat"
    store.write(path, catalog_of())
    opened = podgraph.open(str(path))
    assert opened.path == path
    assert opened.content == catalog_of()
    assert opened.bind().device == torch.device("cpu")
    assert set(opened.bind().memory()) >= {"regions"}


def test_a_specification_without_buckets_is_refused() -> None:
    both = catalog_of({"narrow": SPEC, "wide": SPEC})
    one = dataclasses.replace(both, records=both.buckets("wide"))
    opened = OpenCatalog(Path("one.podcat"), one)
    opened.bind("wide").close()
    with pytest.raises(CatalogError, match=r"^one\.podcat: spec narrow: holds no bucket, none of it verified"):
        opened.bind("narrow")


@pytest.mark.parametrize("path", [None, 3, b"tiny.podcat", ["tiny.podcat"]], ids=str)
def test_a_path_that_is_none_is_refused(path: Any) -> None:
    with pytest.raises(CatalogError, match=r"path: got .*, allowed: the path of a catalog"):
        podgraph.open(path)
