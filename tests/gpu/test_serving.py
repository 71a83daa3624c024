"""As a serving process uses it: bound layers, a model that is captured whole, threads, budgets, forks."""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import replace

import numpy as np
import planned
import pytest
import torch

from podgraph import driver, samples
from podgraph.dispatch.dispatcher import Dispatcher
from podgraph.dispatch.runtime import OpenCatalog
from podgraph.errors import BatchError, PodgraphError
from podgraph.samples import reference, relative_error
from podgraph.shapes import AttentionSpec, Bucket

from .test_replay import BOUND, CUDA

PAGES = 512
LAYERS = 4


def spec_of(catalog: OpenCatalog) -> AttentionSpec:
    return next(iter(catalog.content.specs.values())).attention


def caches_of(spec: AttentionSpec, layers: int = LAYERS, pages: int = PAGES) -> list[torch.Tensor]:
    shape = (pages, 2, spec.page_size, spec.num_kv_heads, spec.head_dim)
    return [torch.randn(shape, device=CUDA).bfloat16() for _ in range(layers)]


def check(
    dispatcher: Dispatcher, batch: planned.Batch, q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor
) -> None:
    live = int(batch.qo_indptr[-1])
    inputs = samples.Inputs(q[:live], cache[:, 0], cache[:, 1])
    assert relative_error(out[:live], reference(batch, dispatcher.spec, inputs)[0]) < BOUND


def some_batch(rng: np.random.Generator, spec: AttentionSpec, requests: int = 6, pages: int = PAGES) -> planned.Batch:
    qo = np.where(rng.random(requests) < 0.5, 1, rng.integers(1, 40, requests))
    batch = planned.make_batch(qo, qo + rng.integers(0, 600, requests), spec.page_size)
    return replace(batch, kv_indices=rng.permutation(pages)[: batch.num_pages].astype(np.int32))


def test_bound_layers_are_patched_once(catalog: OpenCatalog) -> None:
    rng = np.random.default_rng(21)
    spec = spec_of(catalog)
    caches = caches_of(spec)
    with catalog.bind(kv_caches=caches) as dispatcher:
        dispatcher.prewarm()
        q, out, lse = dispatcher.static_buffers(lse=True)
        assert lse is not None
        for step in range(12):
            batch = some_batch(rng, spec)
            q.normal_()
            dispatcher.plan(batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)
            for layer, cache in enumerate(caches):
                out.fill_(math.nan)
                dispatcher.run(q, layer=layer, out=out, lse=lse)
                check(dispatcher, batch, q, cache, out)
                assert out[int(batch.qo_indptr[-1]) :].isnan().all(), step
        c = dispatcher.counters
        assert c.runs == 12 * LAYERS
        assert c.exec_updates <= LAYERS * len({r.template for r in catalog.content.records}), "each exec once"
        # a slice of a fused projection, elsewhere at each call
        for _ in range(3):
            fused = torch.randn(q.shape[0], spec.num_qo_heads + 8, spec.head_dim, device=CUDA).bfloat16()
            batch = some_batch(rng, spec)
            dispatcher.plan(batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)
            got = dispatcher.run(fused[:, 4 : 4 + spec.num_qo_heads], layer=2)
            check(dispatcher, batch, fused[:, 4 : 4 + spec.num_qo_heads], caches[2], got)


def test_layers_at_old_and_new_addresses_in_any_order(catalog: OpenCatalog) -> None:
    """Graphs that hold a call, graphs that are patched, and lone kernels take turns; each result is looked at."""
    rng = np.random.default_rng(22)
    spec = spec_of(catalog)
    caches = caches_of(spec)
    with catalog.bind(kv_caches=caches) as dispatcher:
        rows = dispatcher.static_buffers()[0].shape[0]
        qs = torch.randn(3, rows, spec.num_qo_heads, spec.head_dim, device=CUDA).bfloat16()
        outs = torch.empty_like(qs)
        for _ in range(25):
            batch = some_batch(rng, spec)
            dispatcher.plan(batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)
            for layer, which in zip(rng.integers(0, LAYERS, 8).tolist(), rng.integers(0, 3, 8).tolist(), strict=True):
                outs.fill_(math.nan)
                again = rng.random() < 0.5  # the very same objects, or others at the same place
                q, out = (t[which] if again else t[which][:] for t in (qs, outs))
                for _ in range(1 + (rng.random() < 0.3)):
                    dispatcher.run(q, layer=layer, out=out)
                check(dispatcher, batch, q, caches[layer], out)
                assert outs[(which + 1) % 3].isnan().all()
        counted = dispatcher.counters.to_dict()
        assert counted["runs"] == sum(counted["replays"].values()) == sum(counted["replays_by_mode"].values()) > 200
        assert set(counted["replays_by_mode"]) == {"graph", "eager"}


def test_a_thread_that_torch_never_saw(catalog: OpenCatalog) -> None:
    """Threads after one another, which the system gives one number: none has a current context of its own."""
    rng = np.random.default_rng(23)
    spec = spec_of(catalog)
    caches = caches_of(spec)
    with catalog.bind(kv_caches=caches) as dispatcher:
        q, out, _ = dispatcher.static_buffers()
        q.normal_()
        batch = some_batch(rng, spec)
        failures: list[BaseException] = []

        def serve() -> None:
            try:
                dispatcher.plan(batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)
                dispatcher.run(q, layer=0, out=out)
                dispatcher.check()
            except BaseException as e:
                failures.append(e)

        for _ in range(4):
            out.fill_(math.nan)
            torch.cuda.synchronize()
            thread = threading.Thread(target=serve)
            thread.start()
            thread.join(60)
            assert not failures
            check(dispatcher, batch, q, caches[0], out)


class Block(torch.nn.Module):
    """A layer of a toy transformer, with podgraph's attention in the middle."""

    def __init__(self, spec: AttentionSpec, hidden: int, layer: int, dispatcher: Dispatcher) -> None:
        super().__init__()
        heads = spec.num_qo_heads
        self.q = torch.nn.Linear(hidden, heads * spec.head_dim, bias=False, device=CUDA, dtype=torch.bfloat16)
        self.o = torch.nn.Linear(heads * spec.head_dim, hidden, bias=False, device=CUDA, dtype=torch.bfloat16)
        self.spec, self.layer, self.dispatcher = spec, layer, dispatcher

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).view(len(x), self.spec.num_qo_heads, self.spec.head_dim)
        attention = self.dispatcher.run(q, layer=self.layer, out=torch.zeros_like(q))
        return x + self.o(attention.view(len(x), -1))


@torch.no_grad()
def test_a_model_captured_whole(catalog: OpenCatalog) -> None:
    """A transformer of four layers in one torch graph, planned inside it, while lengths change from step to step."""
    rng = np.random.default_rng(22)
    spec, hidden = spec_of(catalog), 256
    caches = caches_of(spec)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), catalog.bind(stream=stream, kv_caches=caches) as dispatcher:
        bucket = max((r.bucket for r in catalog.content.records), key=lambda b: b.rows(spec))
        rows, n = bucket.rows(spec), bucket.batch
        step = {
            "qo_indptr": torch.zeros(n + 1, dtype=torch.int32, device=CUDA),
            "kv_indptr": torch.zeros(n + 1, dtype=torch.int32, device=CUDA),
            "kv_indices": torch.zeros(PAGES, dtype=torch.int32, device=CUDA),
            "kv_last_page_len": torch.zeros(n, dtype=torch.int32, device=CUDA),
        }
        blocks = [Block(spec, hidden, i, dispatcher) for i in range(LAYERS)]
        x, y = (torch.zeros(rows, hidden, dtype=torch.bfloat16, device=CUDA) for _ in range(2))

        def model() -> None:
            dispatcher.plan(**step, bucket=bucket)
            state = x
            for block in blocks:
                state = block(state)
            y.copy_(state)

        model()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            model()
        assert dispatcher.counters.replays_by_mode["captured"] == LAYERS
        for _ in range(15):
            batch = some_batch(rng, spec, int(rng.integers(1, 5)))
            if not bucket.fits(batch.demand(spec)):
                continue
            for name, tensor in step.items():
                array = getattr(batch, name)
                tensor[: len(array)] = torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(CUDA)
                if name.endswith("indptr"):
                    tensor[len(array) :] = int(array[-1])
            x.normal_()
            graph.replay()
            dispatcher.check()
            live = int(batch.qo_indptr[-1])
            state = x[:live]
            for block, cache in zip(blocks, caches, strict=True):
                q = block.q(state).view(live, spec.num_qo_heads, spec.head_dim)
                want, _ = reference(batch, spec, samples.Inputs(q, cache[:, 0], cache[:, 1]))
                state = state + block.o(want.to(torch.bfloat16).view(live, -1))
            assert relative_error(y[:live], state.float()) < BOUND


def test_eight_threads_on_eight_streams(catalog: OpenCatalog) -> None:
    """Each with a dispatcher of its own, all from one open catalog; results equal those of one thread alone."""
    spec, seconds = spec_of(catalog), float(os.environ.get("PODGRAPH_THREAD_SECONDS", "6"))
    caches = caches_of(spec, 2)
    failures: list[BaseException] = []
    steps: list[int] = []

    def serve(seed: int) -> None:
        try:
            rng, count = np.random.default_rng(seed), 0
            stream = torch.cuda.Stream()
            end = time.monotonic() + seconds
            with torch.cuda.stream(stream), catalog.bind(stream=stream, kv_caches=caches) as dispatcher:
                batches = [some_batch(rng, spec) for _ in range(4)]
                q = torch.randn(256, spec.num_qo_heads, spec.head_dim, device=CUDA).bfloat16()
                wanted: dict[tuple[int, int], torch.Tensor] = {}
                while time.monotonic() < end:
                    which, layer = int(rng.integers(4)), int(rng.integers(2))
                    batch = batches[which]
                    dispatcher.plan(batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)
                    live = int(batch.qo_indptr[-1])
                    got = dispatcher.run(q, layer=layer)[:live]
                    if (which, layer) not in wanted:
                        check(dispatcher, batch, q, caches[layer], got)
                        wanted[which, layer] = got.clone()
                    assert torch.equal(got.view(torch.int16), wanted[which, layer].view(torch.int16))
                    count += 1
            steps.append(count)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 60)
    assert not failures, failures[0]
    assert len(steps) == 8
    assert min(steps) > 50


def test_another_stream_is_refused(catalog: OpenCatalog) -> None:
    with catalog.bind(stream=torch.cuda.Stream()) as dispatcher:
        with pytest.raises(PodgraphError, match="bound to another stream"):
            dispatcher.plan([0, 1], [0, 1], [0], [1])
        with pytest.raises(PodgraphError, match="bound to another stream"):
            dispatcher.run(torch.zeros(1, device=CUDA))


def test_graph_memory_stays_within_its_budget(catalog: OpenCatalog) -> None:
    rng = np.random.default_rng(23)
    spec = spec_of(catalog)
    caches = caches_of(spec, 64, 64)
    batch = some_batch(rng, spec, 3, 64)
    while batch.num_pages > 64:
        batch = some_batch(rng, spec, 3, 64)
    q = torch.randn(256, spec.num_qo_heads, spec.head_dim, device=CUDA).bfloat16()
    budget = 4 << 20
    with catalog.bind(kv_caches=caches, memory_budget=budget) as dispatcher:
        before = driver.free_memory()
        for i in range(300):
            layer = int(rng.integers(64))
            record = catalog.content.records[int(rng.integers(len(catalog.content.records)))]
            if not record.bucket.fits(batch.demand(spec)):
                record = dispatcher.plan(batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)[0]
            dispatcher.plan_into(record, batch)
            out = dispatcher.run(q, layer=layer)
            if i % 30 == 0:
                check(dispatcher, batch, q, caches[layer], out)
        torch.cuda.synchronize()
        assert dispatcher.memory()["execs"] <= budget
        assert before - driver.free_memory() <= budget + (2 << 20)


def test_hot_path_neither_waits_nor_copies(catalog: OpenCatalog) -> None:
    """A long kernel keeps the stream busy; planning and running behind it return at once, and give the right thing."""
    rng = np.random.default_rng(24)
    spec = spec_of(catalog)
    caches = caches_of(spec, 1)
    batch = some_batch(rng, spec)
    q = torch.randn(256, spec.num_qo_heads, spec.head_dim, device=CUDA).bfloat16()
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
    arrays = {n: torch.from_numpy(np.ascontiguousarray(getattr(batch, n), np.int32)).to(CUDA) for n in names}
    demand = batch.demand(spec)
    with catalog.bind(kv_caches=caches) as dispatcher:
        hints = {"prefill_len": demand.prefill_rows, "decode_count": demand.decodes}
        dispatcher.plan(**arrays, **hints)
        out = torch.empty_like(q)
        dispatcher.run(q, layer=0, out=out)
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)  # cycles: half a second
        asleep = torch.cuda.Event()
        asleep.record()
        for _ in range(20):
            dispatcher.plan(**arrays, **hints)
            dispatcher.run(q, layer=0, out=out)
        assert not asleep.query(), "a call waited for the stream"
        check(dispatcher, batch, q, caches[0], out)


def test_named_buckets_need_their_rows(catalog: OpenCatalog) -> None:
    spec = spec_of(catalog)
    bucket: Bucket = max((r.bucket for r in catalog.content.records), key=lambda b: b.rows(spec))
    with catalog.bind() as dispatcher:
        zeros = [torch.zeros(2, dtype=torch.int32, device=CUDA) for _ in range(4)]
        dispatcher.plan(*zeros, bucket=bucket)
        q = torch.zeros(bucket.rows(spec) - 1, spec.num_qo_heads, spec.head_dim, dtype=torch.bfloat16, device=CUDA)
        cache = caches_of(spec, 1)[0]
        with pytest.raises(BatchError, match="allowed: at least the planned batch's"):
            dispatcher.run(q, cache)
