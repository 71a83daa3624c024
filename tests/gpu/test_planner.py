"""The planner on the card: the numpy planner's lists for thousands of batches, steps without the host, refusals."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import planned
import pytest
import torch

from podgraph import driver, samples
from podgraph.batch import Batch
from podgraph.dispatch.dispatcher import Dispatcher
from podgraph.dispatch.planning import REFUSALS
from podgraph.dispatch.runtime import OpenCatalog
from podgraph.errors import BatchError, BucketMiss
from podgraph.planner import Layout, Policy
from podgraph.planner.args import PLAN, bucket_scalars, fill_plan
from podgraph.providers import nvcc, planner
from podgraph.samples import make_inputs, reference, relative_error
from podgraph.shapes import AttentionSpec, Bucket

from .conftest import KERNELS
from .test_replay import BOUND, CUDA, random_batch

BATCHES = 5_000
SPACE = 1 << 24  # bytes for one step's arrays, and as many for its plan
GUARD = 4096  # bytes in front of a plan and behind it
INT_MIN, INT_MAX = -(1 << 31), (1 << 31) - 1
METADATA = ("qo_indptr", "kv_indptr", "kv_last_page_len", "kv_indices")


class Card:
    """The planner's kernels, launched alone, with parameters of a test's choice."""

    def __init__(self) -> None:
        sources = [planner.plan_source("sm90"), planner.plan_source("flashinfer"), planner.check_source()]
        compiled = nvcc.compile_all(sources, "sm_90a", KERNELS)
        self.images = [driver.Image(compiled[source].cubin) for source in sources]
        shared = 40 * (planner.MAX_BATCH + 1)
        self.plans = {
            kernels: image.function(planner.plan_function(kernels), shared, PLAN.size)
            for kernels, image in zip(("sm90", "flashinfer"), self.images, strict=False)
        }
        self.check = self.images[2].function(planner.CHECK_FUNCTION, 0, PLAN.size)
        self.step = torch.empty(SPACE, dtype=torch.uint8, device=CUDA)
        self.made = torch.empty(SPACE, dtype=torch.uint8, device=CUDA)
        self.status = driver.PinnedMemory(16)
        self.report = (ctypes.c_int32 * 4).from_address(self.status.address)

    def plan(
        self,
        arrays: Mapping[str, Sequence[int] | np.ndarray],
        spec: AttentionSpec,
        bucket: Bucket,
        policy: Policy,
        variant: str,
        layout: Layout,
        threads: int = 256,
        report: Sequence[int] = (0,) * 4,
        **changed: int,
    ) -> tuple[dict[str, np.ndarray], list[int]]:
        """Plans a step with as much shared memory as a catalog would give it.

        Args:
            arrays: by `METADATA`.
            report: what the report is before.
            changed: fields of the parameters instead of those that follow from the rest.

        Returns:
            Every array of the plan, `planned.POISON` where nothing was written, and the report.
        """
        host = [np.asarray(arrays[name], np.int32) for name in METADATA]
        packed = np.concatenate([np.pad(a, (0, -len(a) % 4)) for a in host])
        self.step[: packed.nbytes] = torch.from_numpy(packed.view(np.uint8)).to(CUDA)
        lengths = [4 * (len(a) + -len(a) % 4) for a in host]
        at = [self.step.data_ptr() + sum(lengths[:j]) for j in range(4)]
        plan_at = self.made.data_ptr() + GUARD
        bases = dict(zip(PLAN.pointers, (*at, self.status.address), strict=True))
        bases |= {"meta": plan_at, "plan": plan_at + layout.sizes["meta"]}
        scalars = {
            "plan_number": 0,
            "first_row": 0,
            "num_requests": len(arrays["kv_last_page_len"]),
            "num_indices": len(arrays["kv_indices"]),
            "num_pages": 0,
            "rows": int(arrays["qo_indptr"][-1]),
            "given_prefill_len": -1,
            "given_decode_count": -1,
            **bucket_scalars(spec, bucket, variant),
        }
        args = fill_plan(spec, layout, policy, (1 << 24, 1 << 24), bases, scalars)
        for name, value in changed.items():
            setattr(args, name, value)
        whole = self.made[: layout.step_bytes + 2 * GUARD].view(torch.int32)
        whole.fill_(planned.POISON)
        array = layout.arrays["bad_page"]
        whole[(GUARD + layout.sizes["meta"] + array.offset) // 4] = -1
        self.report[:] = report
        stream = torch.cuda.current_stream()
        shared = 40 * (layout.capacity.requests + 1)
        if args.num_pages:
            grid, block = (planner.CHECK_CTAS, 1, 1), (planner.CHECK_THREADS, 1, 1)
            driver.Launch(self.check, grid, block, 0, bytes(args)).enqueue(stream.cuda_stream)
        function = self.plans[policy.kernels]
        driver.Launch(function, (1, 1, 1), (threads, 1, 1), shared, bytes(args)).enqueue(stream.cuda_stream)
        stream.synchronize()
        got = whole.cpu().numpy()
        for guard in (got[: GUARD // 4], got[-(GUARD // 4) :]):
            assert (guard == planned.POISON).all(), "written out of bounds"
        return layout.views(got[GUARD // 4 : -(GUARD // 4)]), list(self.report)

    def close(self) -> None:
        for image in self.images:
            image.close()
        self.status.close()


@pytest.fixture(scope="module")
def card() -> Iterator[Card]:
    card = Card()
    yield card
    card.close()


def test_thousands_of_plans_are_those_of_the_numpy_planner(card: Card) -> None:
    rng = np.random.default_rng(1)
    for i in range(BATCHES):
        case = planned.random_case(rng)
        arrays = {name: getattr(case.batch, name) for name in METADATA[:3]} | {"kv_indices": []}
        got, report = card.plan(
            arrays,
            case.spec,
            case.bucket,
            case.policy,
            case.variant,
            case.layout,
            threads=int(rng.choice([256, 512, 1024])),
            num_indices=case.batch.num_pages,
            plan_number=i,
        )
        assert report == [0] * 4, f"batch {i}, {case}"
        difference = planned.difference(case.expected(), got)
        assert not difference, f"batch {i}, {case}: {difference}"


SPEC, BUCKET = AttentionSpec(8, 2, 128, 16), Bucket(6, 64, 4)
ARRAYS = {
    "qo_indptr": [0, 1, 21, 22, 22, 23],
    "kv_indptr": [0, 7, 9, 12, 13, 13],
    "kv_last_page_len": [4, 4, 1, 16, 0],
    "kv_indices": [0] * 13,
}
GPU_REFUSALS = [
    ({"qo_indptr": [0, 1, 21, 20, 22, 23]}, "qo_indptr", 2, 20),
    ({"qo_indptr": [-1, 1, 21, 22, 22, 23]}, "qo_indptr", 0, -1),
    ({"qo_indptr": [0, INT_MIN, INT_MAX, INT_MIN, 0, 23]}, "qo_indptr", 0, INT_MIN),
    ({"qo_indptr": [5, 6, 26, 27, 27, 28], "plan_number": 7}, "qo_indptr", 0, 5),
    ({"qo_indptr": [5, 6, 26, 27, 27, 28], "plan_number": 7, "first_row": 5}, "", 0, 0),
    ({"kv_indptr": [0, 7, 9, 8, 13, 13]}, "kv_indptr", 2, 8),
    ({"kv_indptr": [1, 8, 10, 13, 14, 14]}, "kv_indptr", 0, 1),
    ({"kv_indptr": [INT_MIN, 7, 9, 12, 13, 13]}, "kv_indptr", 0, INT_MIN),
    ({"kv_last_page_len": [4, 4, 17, 16, 0]}, "kv_last_page_len", 2, 17),
    ({"kv_last_page_len": [INT_MIN, 4, 1, 16, 0]}, "kv_last_page_len", 0, INT_MIN),
    ({"kv_last_page_len": [4, 3, 1, 16, 0]}, "KV shorter than rows", 1, 19),
    ({"max_kv_len": 99}, "max_kv_len", 0, 100),
    ({"kv_indptr": [0, INT_MAX, INT_MAX, INT_MAX, INT_MAX, INT_MAX]}, "max_kv_len", 0, INT_MAX),
    ({"rows": 22}, "more rows than promised", 5, 23),
    ({"rows": INT_MIN}, "more rows than promised", 5, 23),
    ({"num_indices": 12}, "more pages than kv_indices", 5, 13),
    ({"max_pages": 12}, "more pages than kv_indices", 5, 13),
    ({"decode_count": 4, "batch": 5, "qo_indptr": [0, 2, 22, 23, 23, 24]}, "more prefills than slots", 5, 2),
    ({"prefill_len": 19}, "more prefill rows than the bucket", 5, 20),
    ({"prefill_len": INT_MIN}, "more prefill rows than the bucket", 5, 20),
    ({"batch": 4}, "more requests than the bucket", 5, 5),
    ({"num_requests": -1, "num_pages": 6}, "more requests than the bucket", -1, -1),
    ({"num_requests": INT_MIN}, "more requests than the bucket", INT_MIN, INT_MIN),
    ({"num_requests": 7, "batch": INT_MAX}, "more requests than the bucket", 7, 7),
    ({"num_requests": INT_MAX, "batch": INT_MAX, "num_pages": 6}, "more requests than the bucket", INT_MAX, INT_MAX),
    ({"given_prefill_len": 19}, "prefill_len is another", 5, 20),
    ({"given_decode_count": 4}, "decode_count is another", 5, 3),
    ({"kv_indices": [0] * 8 + [5] + [0] * 4, "num_pages": 5}, "kv_indices", 1, 5),
    ({"kv_indices": [0] * 12 + [INT_MIN], "num_pages": INT_MAX}, "kv_indices", 3, INT_MIN),
    ({"kv_indices": [0] * 12 + [INT_MAX], "num_pages": INT_MAX}, "kv_indices", 3, INT_MAX),
    ({"kv_indices": [0] * 12 + [INT_MAX - 1], "num_pages": INT_MAX}, "", 0, 0),
    ({"num_pages": -1}, "kv_indices", 0, 0),
    ({"decode_items": 1, "prefill_items": 0}, "capacity", 5, 0),
    ({}, "", 0, 0),
]


@pytest.mark.parametrize("kernels", ["sm90", "flashinfer"])
@pytest.mark.parametrize(("changed", "kind", "request_", "got"), GPU_REFUSALS)
def test_each_refusal(
    card: Card, kernels: str, changed: dict[str, list[int] | int], kind: str, request_: int, got: int
) -> None:
    """Whatever metadata and scalars are: the report names it and the plan's number, and nothing is planned."""
    policy = Policy.for_sms(132, kernels)  # type: ignore[arg-type]
    layout, variant = Layout.of(SPEC, [BUCKET], policy), "pod_sm90_w64" if kernels == "sm90" else "pod"
    arrays = {**ARRAYS, **{name: values for name, values in changed.items() if name in ARRAYS}}
    scalars = {"rows": 1 << 20, **{name: value for name, value in changed.items() if name not in ARRAYS}}
    place = arrays, SPEC, BUCKET, policy, variant, layout
    made, report = card.plan(*place, **scalars)  # type: ignore[arg-type]
    code = [name for name, _, _ in REFUSALS].index(kind)
    assert report == [code, request_, got, scalars.get("plan_number", 0) if code else 0]
    assert made["counts"].tolist()[:1] == [0 if code else 5]
    assert made["bad_page"].tolist() == [-1]
    if code == 0:
        return
    assert made["counts"].tolist() == [0] * 5
    # the first refusal stays until the host makes its code 0
    first = [code % (len(REFUSALS) - 1) + 1, 3, -9, 41]
    numbered = {**scalars, "plan_number": 42}
    made, report = card.plan(*place, report=first, **numbered)  # type: ignore[arg-type]
    assert report == first
    assert made["counts"].tolist() == [0] * 5
    _, report = card.plan(*place, report=[0, *first[1:]], **numbered)  # type: ignore[arg-type]
    assert report == [code, request_, got, 42]


def on_gpu(batch: Batch) -> list[torch.Tensor]:
    arrays = batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len
    return [torch.from_numpy(np.ascontiguousarray(a, np.int32)).to(CUDA) for a in arrays]


def fitting_batch(rng: np.random.Generator, dispatcher: Dispatcher) -> Batch:
    """A batch that one bucket holds."""
    while True:
        batch = random_batch(rng)
        if batch.num_pages <= 4096 and dispatcher._selector.choose(batch.demand(dispatcher.spec)) is not None:
            return batch


@pytest.mark.parametrize("hint", ["counts", "bucket", "host qo_indptr"])
def test_metadata_on_the_gpu(catalog: OpenCatalog, hint: str) -> None:
    rng = np.random.default_rng(11)
    with catalog.bind() as dispatcher:
        for i in range(40):
            batch = fitting_batch(rng, dispatcher)
            demand = batch.demand(dispatcher.spec)
            inputs = make_inputs(batch, dispatcher.spec, CUDA, i)
            arrays = on_gpu(batch)
            q = inputs.q
            if hint == "counts":
                try:
                    dispatcher.plan(*arrays, prefill_len=demand.prefill_rows, decode_count=demand.decodes)
                except BucketMiss:
                    continue  # idle requests count as prefills then
            elif hint == "bucket":
                record = dispatcher._selector.choose(demand)
                assert record is not None
                dispatcher.plan(*arrays, bucket=record.bucket)
                q = torch.full(
                    (record.bucket.rows(dispatcher.spec), *q.shape[1:]), math.nan, dtype=q.dtype, device=CUDA
                )
                q[: len(inputs.q)] = inputs.q
            else:
                dispatcher.plan(batch.qo_indptr, *arrays[1:])
            out = torch.full_like(q, math.nan)
            dispatcher.run(q, (inputs.k, inputs.v), out)
            dispatcher.check()
            live = int(batch.qo_indptr[-1])
            assert relative_error(out[:live], reference(batch, dispatcher.spec, inputs)[0]) < BOUND
            assert out[live:].isnan().all()


def test_captured_steps_follow_their_metadata(catalog: OpenCatalog) -> None:
    """Plan and runs are captured whole, which no copy and no synchronisation survives; lengths change in between.

    One graph for each template, all of one dispatcher, replayed in any order.
    """
    rng = np.random.default_rng(12)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), catalog.bind(stream=stream) as dispatcher:
        spec = dispatcher.spec
        buckets = list({r.template: r.bucket for r in sorted(catalog.content.records, key=lambda r: r.bucket)}.values())
        assert len(buckets) > 1
        n, rows = max(b.batch for b in buckets), max(b.rows(spec) for b in buckets)
        pages = 2048
        shapes = {"qo_indptr": n + 1, "kv_indptr": n + 1, "kv_indices": pages, "kv_last_page_len": n}
        step = {name: torch.zeros(size, dtype=torch.int32, device=CUDA) for name, size in shapes.items()}
        q = torch.randn(rows, spec.num_qo_heads, spec.head_dim, device=CUDA).bfloat16()
        shape = (pages, 2, spec.page_size, spec.num_kv_heads, spec.head_dim)
        layers = [torch.randn(shape, device=CUDA).bfloat16() for _ in range(3)]
        outs = [torch.empty_like(q) for _ in layers]

        def whole_step(bucket: Bucket) -> None:
            own = {
                k: v if k == "kv_indices" else v[: bucket.batch + (k != "kv_last_page_len")] for k, v in step.items()
            }
            dispatcher.plan(**own, bucket=bucket)
            for cache, out in zip(layers, outs, strict=True):
                dispatcher.run(q, cache, out)

        graphs = []
        for bucket in buckets:
            whole_step(bucket)
            stream.synchronize()
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], stream=stream):
                whole_step(bucket)
        for i in range(30):
            which = int(rng.integers(len(buckets)))
            bucket = buckets[which]
            prefills = int(rng.integers(0, bucket.prefill_slots + 1))
            qo = np.array([1] * int(rng.integers(0, bucket.decode_count + 1)), np.int64)
            if prefills:
                most = bucket.prefill_len // prefills
                qo = np.append(qo, rng.integers(min(2, most), most + 1, prefills))
            qo = rng.permutation(qo)
            batch = planned.make_batch(qo, qo + rng.integers(0, 300, len(qo)), spec.page_size)
            if not bucket.fits(batch.demand(spec)):
                continue
            batch = replace(batch, kv_indices=rng.permutation(pages)[: batch.num_pages].astype(np.int32))
            for name, tensor in step.items():
                array = getattr(batch, name)
                tensor[: len(array)] = torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(CUDA)
                if name.endswith("indptr"):  # requests that the batch lacks have no rows and no pages
                    tensor[len(array) :] = int(array[-1])
            for out in outs:
                out.fill_(math.nan)
            q.normal_()
            graphs[which].replay()
            dispatcher.check()
            live = int(batch.qo_indptr[-1])
            for cache, out in zip(layers, outs, strict=True):
                want, _ = reference(batch, spec, samples.Inputs(q[:live], cache[:, 0], cache[:, 1]))
                assert relative_error(out[:live], want) < BOUND, i
                assert out[live:].isnan().all()


def test_refusals_leave_everything_untouched(catalog: OpenCatalog) -> None:
    rng = np.random.default_rng(13)
    with catalog.bind() as dispatcher:
        spec = dispatcher.spec
        cache = torch.zeros(8, 2, spec.page_size, spec.num_kv_heads, spec.head_dim, dtype=torch.bfloat16, device=CUDA)
        good = planned.make_batch(np.array([1, 5, 1]), np.array([17, 40, 3]), spec.page_size)
        for changed, match in (
            ({0: [0, 1, 0, 7]}, "qo_indptr of request 1"),
            ({1: [0, 2, 1, 6]}, "kv_indptr of request 1"),
            ({1: [1, 3, 6, 7]}, "kv_indptr of request 0"),
            ({3: [1, 99, 3]}, r"kv_last_page_len of request 1: got 99, allowed: 1 to page_size=16"),
            ({1: [0, 2, 2, 3]}, ""),
            ({1: [0, 2, 3, 4], 3: [1, 4, 3]}, "KV length of request 1: got 4, allowed: 0, or at least"),
            ({1: [0, 2, 5, 7]}, "kv_indptr: got 7 pages, allowed: as many as kv_indices has"),
            ({0: [0, 1, 7, 8]}, "qo_indptr: got 8 query rows"),
            ({0: [0, 2, 6, 7]}, "prefill_len: the batch has 6 prefill rows"),
        ):
            arrays = on_gpu(good)
            for i, values in changed.items():
                arrays[i] = torch.tensor(values, dtype=torch.int32, device=CUDA)
            dispatcher.plan(*arrays, prefill_len=5, decode_count=2)
            q = torch.zeros(7, spec.num_qo_heads, spec.head_dim, dtype=torch.bfloat16, device=CUDA)
            out = torch.full_like(q, math.nan)
            dispatcher.run(q, cache, out)
            if not match:
                dispatcher.check()
                continue
            torch.cuda.synchronize()
            assert out.isnan().all()
            again = functools.partial(dispatcher.plan, *on_gpu(good), prefill_len=5, decode_count=2)
            with pytest.raises(BatchError, match=match):
                (dispatcher.check if rng.random() < 0.5 else again)()
            dispatcher.plan(*on_gpu(good), prefill_len=5, decode_count=2)  # and it goes on
            dispatcher.run(q, cache, out)
            dispatcher.check()
            assert not out.isnan().any()
        with pytest.raises(BatchError, match="nothing else says which bucket"):
            dispatcher.plan(*on_gpu(good))
        with pytest.raises(BatchError, match=r"got torch\.int64"):
            dispatcher.plan(*(a.long() for a in on_gpu(good)), prefill_len=5, decode_count=2)
        with pytest.raises(BatchError, match="no cache is bound"):
            dispatcher.plan(*on_gpu(good), prefill_len=5, decode_count=2, check_pages=True)
        with pytest.raises(BatchError, match="one of the catalog's"):
            dispatcher.plan(*on_gpu(good), bucket=Bucket(999, 1, 3))


def test_page_numbers_are_checked_on_the_gpu(catalog: OpenCatalog) -> None:
    spec = next(iter(catalog.content.specs.values())).attention
    caches = [
        torch.zeros(n, 2, spec.page_size, spec.num_kv_heads, spec.head_dim, dtype=torch.bfloat16, device=CUDA)
        for n in (9, 7)
    ]
    with catalog.bind(kv_caches=caches) as dispatcher:
        q = torch.zeros(7, spec.num_qo_heads, spec.head_dim, dtype=torch.bfloat16, device=CUDA)
        good = planned.make_batch(np.array([1, 5, 1]), np.array([17, 40, 3]), spec.page_size)
        for page, request in ((6, -1), (7, 1), (-1, 1), (1 << 30, 1), (6, -1)):
            arrays = on_gpu(good)
            arrays[2][3] = page
            dispatcher.plan(*arrays, prefill_len=5, decode_count=2, check_pages=True)
            out = torch.full_like(q, math.nan)
            dispatcher.run(q, layer=1, out=out)
            if request < 0:
                dispatcher.check()
                assert not out.isnan().any()
                continue
            with pytest.raises(BatchError, match=rf"kv_indices of request {request}: got page {page}, allowed: a page"):
                dispatcher.check()
            assert out.isnan().all()


def test_a_thousand_host_steps_without_waiting(catalog: OpenCatalog) -> None:
    """Metadata from the host in a ring of pinned slots: 1,000 steps in flight equal the same steps one by one."""
    rng = np.random.default_rng(14)
    with catalog.bind() as dispatcher:
        spec = dispatcher.spec
        cache = torch.randn(600, 2, spec.page_size, spec.num_kv_heads, spec.head_dim, device=CUDA).bfloat16()
        q = torch.randn(64, spec.num_qo_heads, spec.head_dim, device=CUDA).bfloat16()
        steps = []
        for _ in range(1000):
            qo = rng.integers(0, 9, int(rng.integers(1, 8)))
            kv = qo + rng.integers(0, 500, len(qo))
            batch = planned.make_batch(qo, kv, spec.page_size)
            steps.append((batch, rng.permutation(600)[: batch.num_pages].astype(np.int32)))
        results = []
        for wait in (True, False):
            outs = []
            for batch, indices in steps:
                dispatcher.plan(batch.qo_indptr, batch.kv_indptr, indices, batch.kv_last_page_len)
                out = torch.zeros_like(q)
                outs.append(dispatcher.run(q, cache, out))
                if wait:
                    torch.cuda.synchronize()
            torch.cuda.synchronize()
            results.append(torch.stack(outs).view(torch.int16))
        assert torch.equal(*results)


def test_planner_sources_are_found() -> None:
    assert all((Path(nvcc.kernel_folder()) / f"{name}.cu").is_file() for name in ("plan_sm90", "plan_flashinfer"))
