"""Replays on the card: random batches, changed data, poisoned memory, other processes, other addresses."""

from __future__ import annotations

import contextlib
import hashlib
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from podgraph import samples
from podgraph.batch import Batch
from podgraph.dispatch.dispatcher import Dispatcher
from podgraph.dispatch.runtime import OpenCatalog
from podgraph.dispatch.runtime import open as open_catalog
from podgraph.errors import BatchError, BucketMiss, PodgraphError
from podgraph.samples import make_inputs, reference, relative_error

CUDA = torch.device("cuda", 0)
BOUND = 6e-3  # relative; rounding weights and output to bfloat16 makes 2.3e-3


def random_batch(rng: np.random.Generator, page_size: int = 16) -> Batch:
    """Any mix of requests, also beyond every bucket of the quickstart catalog."""
    n = int(rng.integers(1, 30))
    qo = np.where(rng.random(n) < 0.6, 1, rng.integers(0, 300, n))
    kv = np.where(rng.random(n) < 0.05, 0, qo + rng.integers(0, rng.choice([10, 300, 4000]), n))
    pages = -(-kv // page_size)
    order = rng.permutation(int(pages.sum()) + samples.SPARE_PAGES)[: int(pages.sum())]
    last = np.where(kv > 0, (kv - 1) % page_size + 1, 0)
    indptr = [np.concatenate([[0], np.cumsum(x)]) for x in (qo, pages)]
    return Batch.of(*indptr, order, last, page_size=page_size, max_kv_len=1 << 20)


def plan(dispatcher: Dispatcher, batch: Batch) -> int:
    return len(dispatcher.plan(batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len))


def test_random_batches_against_the_reference(catalog: OpenCatalog) -> None:
    """One dispatcher, 150 batches in a row: whatever the last step left behind must not matter."""
    rng = np.random.default_rng(1)
    splits = 0
    with catalog.bind() as dispatcher:
        for i in range(150):
            batch = random_batch(rng)
            inputs = make_inputs(batch, dispatcher.spec, CUDA, i)
            splits += plan(dispatcher, batch) > 1
            out = torch.full_like(inputs.q, math.nan)
            lse = torch.full(out.shape[:2], math.nan, device=CUDA)
            dispatcher.run(inputs.q, (inputs.k, inputs.v), out, lse)
            want, want_lse = reference(batch, dispatcher.spec, inputs)
            assert relative_error(out, want) < BOUND, batch
            assert torch.equal(torch.isinf(lse), torch.isinf(want_lse))
            finite = torch.isfinite(want_lse)
            assert not lse.isnan().any()
            assert not finite.any() or (lse - want_lse)[finite].abs().max() < 0.01
    assert splits > 10, "the batches must also reach beyond the buckets"


def test_split_batch_equals_its_requests_alone(catalog: OpenCatalog) -> None:
    """A batch beyond every bucket gives, request by request, what each request gives by itself."""
    rng = np.random.default_rng(2)
    with catalog.bind() as dispatcher:
        batch = random_batch(rng)
        while plan(dispatcher, batch) < 2:
            batch = random_batch(rng)
        inputs = make_inputs(batch, dispatcher.spec, CUDA, 0)
        out = dispatcher.run(inputs.q, (inputs.k, inputs.v)).clone()
        want, _ = reference(batch, dispatcher.spec, inputs)
        assert relative_error(out, want) < BOUND
        assert sum(dispatcher.counters.splits.values()) >= 1


def test_replays_are_bitwise_reproducible(catalog: OpenCatalog) -> None:
    rng = np.random.default_rng(3)
    with catalog.bind() as dispatcher:
        for i in range(10):
            batch = random_batch(rng)
            inputs = make_inputs(batch, dispatcher.spec, CUDA, i)
            plan(dispatcher, batch)
            first = dispatcher.run(inputs.q, (inputs.k, inputs.v)).clone()
            for _ in range(20):
                again = dispatcher.run(inputs.q, (inputs.k, inputs.v))
                assert torch.equal(first.view(torch.int16), again.view(torch.int16))


def test_one_plan_serves_every_layer(catalog: OpenCatalog) -> None:
    """Layers have caches and queries of their own; execs are re-pointed between them without a synchronisation."""
    rng = np.random.default_rng(4)
    with catalog.bind() as dispatcher:
        batch = random_batch(rng)
        layers = [make_inputs(batch, dispatcher.spec, CUDA, i) for i in range(8)]
        plan(dispatcher, batch)
        outs = [dispatcher.run(x.q, (x.k, x.v)) for x in layers]
        for inputs, out in zip(layers, outs, strict=True):
            assert relative_error(out, reference(batch, dispatcher.spec, inputs)[0]) < BOUND


def test_steps_back_to_back_without_synchronisation(catalog: OpenCatalog) -> None:
    """100 steps enqueued at once give what each gives alone: no step overwrites another's plan on its way."""
    rng = np.random.default_rng(5)
    with catalog.bind() as dispatcher:
        batches = [random_batch(rng) for _ in range(100)]
        inputs = [make_inputs(b, dispatcher.spec, CUDA, i) for i, b in enumerate(batches)]
        alone = []
        for batch, x in zip(batches, inputs, strict=True):
            plan(dispatcher, batch)
            alone.append(dispatcher.run(x.q, (x.k, x.v)))
            torch.cuda.synchronize()
        together = []
        for batch, x in zip(batches, inputs, strict=True):
            plan(dispatcher, batch)
            together.append(dispatcher.run(x.q, (x.k, x.v)))
        torch.cuda.synchronize()
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("form", ["one tensor", "pair", "strided q", "no lse", "own out"])
def test_tensor_forms(catalog: OpenCatalog, form: str) -> None:
    rng = np.random.default_rng(6)
    with catalog.bind() as dispatcher:
        spec, batch = dispatcher.spec, random_batch(rng)
        inputs = make_inputs(batch, spec, CUDA, 0)
        cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = (inputs.k, inputs.v)
        q = inputs.q
        if form == "one tensor":
            cache = torch.stack([inputs.k, inputs.v], dim=1)
        if form == "strided q":  # a slice of a fused QKV projection
            width = spec.num_qo_heads + 2 * spec.num_kv_heads
            fused = torch.full((q.shape[0], width, spec.head_dim), math.nan, dtype=q.dtype, device=CUDA)
            fused[:, : spec.num_qo_heads] = q
            q = fused[:, : spec.num_qo_heads]
        plan(dispatcher, batch)
        lse = None if form == "no lse" else torch.empty(q.shape[:2], device=CUDA)
        out = torch.full_like(inputs.q, math.nan) if form == "own out" else None
        got = dispatcher.run(q, cache, out, lse)
        assert out is None or got is out
        assert relative_error(got, reference(batch, spec, inputs)[0]) < BOUND


def test_plain_launches_inside_another_capture(catalog: OpenCatalog) -> None:
    """A stream that is being captured gets the kernels themselves; the captured graph follows later plans."""
    rng = np.random.default_rng(7)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), catalog.bind(stream=stream) as dispatcher:
        bucket = dispatcher.plan([0, 1, 2], [0, 1, 2], [0, 1], [3, 4])
        q = torch.randn(2, dispatcher.spec.num_qo_heads, 128, device=CUDA).bfloat16()
        cache = torch.randn(600, 2, 16, dispatcher.spec.num_kv_heads, 128, device=CUDA).bfloat16()
        out = torch.empty_like(q)
        dispatcher.run(q, cache, out)  # a new cache is described to TMA before the capture
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            dispatcher.run(q, cache, out)
        for _ in range(3):
            kv = rng.integers(1, 4000, 2)
            pages = -(-kv // 16)
            indices = rng.permutation(600)[: int(pages.sum())]
            args = ([0, 1, 2], np.cumsum([0, *pages]), indices, (kv - 1) % 16 + 1)
            assert dispatcher.plan(*args) == bucket
            q.normal_()
            out.fill_(math.nan)
            graph.replay()
            batch = Batch.of(*args, page_size=16, max_kv_len=1 << 20)
            want, _ = reference(batch, dispatcher.spec, samples.Inputs(q, cache[:, 0], cache[:, 1]))
            assert relative_error(out, want) < BOUND
        # a plan for another template would be replayed by the captured kernel, and wrong
        templates = {r.template for r in catalog.content.records}
        assert len(templates) > 1
        with contextlib.suppress(BucketMiss):
            assert {r.template for r in dispatcher.plan([0, 20], [0, 2], [0, 1], [4])} == {bucket[0].template}
        dispatcher.forget_captures()
        assert dispatcher.plan([0, 20], [0, 2], [0, 1], [4])
        with pytest.raises(PodgraphError, match="while the stream captures"):  # noqa: PT012, SIM117 (the graph ends first)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
                q.zero_()
                dispatcher.plan([0, 1], [0, 1], [0], [1])
        dispatcher.plan([0, 1], [0, 1], [0], [1])
        with pytest.raises(PodgraphError, match="this cache is new"):  # noqa: PT012, SIM117 (the graph ends first)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
                q.zero_()
                dispatcher.run(q, cache[:100], out)


def test_page_beyond_the_cache_is_refused(catalog: OpenCatalog) -> None:
    with catalog.bind() as dispatcher:
        spec = dispatcher.spec
        dispatcher.plan([0, 1], [0, 1], [7], [5])
        q = torch.zeros(1, spec.num_qo_heads, spec.head_dim, dtype=torch.bfloat16, device=CUDA)
        cache = torch.zeros(7, 2, 16, spec.num_kv_heads, spec.head_dim, dtype=torch.bfloat16, device=CUDA)
        with pytest.raises(BatchError, match="got page 7, allowed: below"):
            dispatcher.run(q, cache)
        with pytest.raises(BatchError, match="got a tensor on cpu"):
            dispatcher.run(q.cpu(), cache)


def test_use_after_close(catalog: OpenCatalog) -> None:
    dispatcher = catalog.bind()
    dispatcher.close()
    dispatcher.close()
    with pytest.raises(PodgraphError, match="closed"):
        dispatcher.plan([0, 1], [0, 1], [0], [1])


SERVE = """
import sys
sys.modules["flashinfer"] = None
import hashlib, pathlib, torch
pad = torch.empty(int(sys.argv[2]) << 20, dtype=torch.uint8, device="cuda")  # everything lies elsewhere
import podgraph
from podgraph import samples
catalog = podgraph.open(sys.argv[1])
with catalog.bind() as dispatcher:
    digest = hashlib.sha256()
    content = catalog.content
    for record in content.records:
        batches = samples.sample_batches(
            record.bucket, dispatcher.spec, 2048, content.max_pages, 5, content.max_kv_len
        )
        for batch in batches.values():
            inputs = samples.make_inputs(batch, dispatcher.spec, torch.device("cuda", 0), 5)
            dispatcher.plan(batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)
            digest.update(dispatcher.run(inputs.q, (inputs.k, inputs.v)).view(torch.int16).cpu().numpy().tobytes())
    print(digest.hexdigest(), dispatcher._backend.regions["plan"])
"""


def test_fresh_processes_replay_bit_for_bit(catalog_path: Path) -> None:
    """Two processes without FlashInfer and without a compiler, their memory at different places: equal bits."""
    outputs = []
    for megabytes in ("1", "700"):
        done = subprocess.run(
            [sys.executable, "-c", SERVE, str(catalog_path), megabytes],
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": "", "PYTHONPATH": ":".join(sys.path)},
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.split())
    (first, _), (second, _) = outputs
    assert len(first) == len(hashlib.sha256().hexdigest())
    assert first == second


def test_device_and_host_metadata_agree(catalog: OpenCatalog) -> None:
    rng = np.random.default_rng(8)
    with catalog.bind() as dispatcher:
        batch = random_batch(rng)
        while len(dispatcher._selector.parts(batch)) > 1:
            batch = random_batch(rng)
        inputs = make_inputs(batch, dispatcher.spec, CUDA, 0)
        arrays = batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len
        (record,) = dispatcher.plan(*arrays)
        host = dispatcher.run(inputs.q, (inputs.k, inputs.v))
        # the same setting, which the host chooses by KV lengths where it knows them
        dispatcher.plan_into(record, batch)
        assert torch.equal(host.view(torch.int16), dispatcher.run(inputs.q, (inputs.k, inputs.v)).view(torch.int16))
        recorded = dispatcher._by_bucket[record.bucket]
        dispatcher.plan_into(recorded, batch)
        host = dispatcher.run(inputs.q, (inputs.k, inputs.v))
        dispatcher.plan(arrays[0], *(torch.from_numpy(a).to(CUDA) for a in arrays[1:]))
        device = dispatcher.run(inputs.q, (inputs.k, inputs.v))
        assert torch.equal(host.view(torch.int16), device.view(torch.int16))


def test_closing_gives_all_memory_back(catalog_path: Path) -> None:
    from podgraph import driver

    catalog = open_catalog(catalog_path)
    catalog.bind().close()  # what the driver keeps for itself is allocated once
    before = driver.free_memory()
    for _ in range(30):
        catalog.bind().close()
    assert driver.free_memory() == before
