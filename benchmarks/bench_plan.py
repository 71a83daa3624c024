"""What planning a step costs: the planner's kernels, the host's part of plan(), and what the lists are worth.

    python -m benchmarks.bench_plan --commit $(git rev-parse HEAD)

Kernel durations are those of captured graphs of 64 launches, each behind the one before, by 64; the GPU is busy while
the host enqueues them, and the graphs take turns. What lies between two kernels of a graph is part of that: an empty
kernel measured in the same way is beside them, and nothing is subtracted.

Host times are of single calls on two sides of up to 64 requests, metadata on the GPU, hints given. Nothing is waited
for within a call of podgraph's plan; between a few of them the stream is, so that the driver's queue stays short.
FlashInfer's plan of the same batches gets both sides ready on the GPU, and an idle stream.

On the nine shapes of bench_kernels four replays take turns: pod_sm90 with lists that the planner's kernel made, and
with those of the numpy planner, copied; FlashInfer's kernel within podgraph, with podgraph's plan; FlashInfer's own
batch POD with its own plan. The catalogs are not verified first: here the four results are held against each other.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.bench_kernels import KERNELS, ROOT, TOLERANCE
from benchmarks.flashinfer_calls import POD_WORKSPACE_BYTES, FlashInferCalls
from benchmarks.kernel_shapes import MAIN, NINE, build_specs, spec_name
from benchmarks.result import write_result
from benchmarks.shapes import Shape, graphed, interleaved
from podgraph import build as building
from podgraph import driver, samples
from podgraph.batch import Batch
from podgraph.buckets import BucketSpace
from podgraph.catalog import store
from podgraph.catalog.model import Record
from podgraph.config import BuildSpec, Workspace
from podgraph.dispatch.dispatcher import Dispatcher
from podgraph.dispatch.gpu import GpuBackend
from podgraph.dispatch.planning import Addresses
from podgraph.dispatch.runtime import OpenCatalog
from podgraph.dispatch.runtime import open as open_catalog
from podgraph.planner import Layout, Policy, plan, preferred_setting
from podgraph.planner.policy import SM90, Kernels
from podgraph.providers import pod_sm90
from podgraph.shapes import AttentionSpec, Bucket

Int32 = npt.NDArray[np.int32]

FAMILIES: tuple[Kernels, ...] = ("sm90", "flashinfer")
LAUNCHES = 64
COUNTS = (1, 8, 64, 128, 512, 1024, 2048)  # requests of a batch
CHECKS = {"64x256": (64, 256), "512x1024": (512, 1024)}  # requests, pages of each
CHUNK = 512  # query rows of one prefill at most
HISTORY, MOST_HISTORY = 1000, 32_000  # KV tokens in front of a request's rows: the median, and the most
PLANNED = range(49, 65)  # requests of the batches that the host plans in turn
CALLS_IN_A_ROW, TURNS = 8, 300
MAX_PAGES, MAX_KV_LEN = 1 << 20, 1 << 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--compile", action="store_true", help="compile what is missing, and stop; needs no GPU")
    options = parser.parse_args()
    if options.compile:
        compile_all()
        return
    start = time.perf_counter()
    with torch.no_grad(), contextlib.ExitStack() as stack:
        planners = {k: stack.enter_context(unverified(planner_spec(), k).bind()) for k in FAMILIES}
        metrics: dict[str, Any] = {**_kernel_us(planners), **_host_us(planners["sm90"])}
        print(json.dumps(metrics), f"{time.perf_counter() - start:.1f} s", flush=True)
        rows = _shapes()
    metrics |= {
        "kernel_ratio_device_vs_host_lists": statistics.geometric_mean(
            r["device_over_host_lists"] for r in rows.values()
        ),
        "flashinfer_plan_speedup": statistics.geometric_mean(r["plan_speedup"] for r in rows.values()),
        "shapes": rows,
    }
    path = write_result("plan", options.commit, metrics, "bench_plan")
    print(json.dumps({k: v for k, v in metrics.items() if k != "shapes"}, indent=1))
    print(f"wrote {path} after {time.perf_counter() - start:.1f} s")
    if wrong := [name for name, row in rows.items() if row["wrong"]]:
        sys.exit(f"wrong results: {', '.join(wrong)}")


# --- catalogs ------------------------------------------------------------------------------------------------------


def prefills_of(requests: int) -> int:
    """Requests of a batch that prefill: more of them where there are many, but never more rows than an engine takes."""
    return next(prefills for below, prefills in ((16, 1), (256, 2), (1024, 4), (1 << 30, 8)) if requests < below)


def bucket_of(requests: int) -> Bucket:
    """A bucket for `mixed_batch`. All of this module's have both sides, and so one kernel of FlashInfer's."""
    prefills = prefills_of(requests)
    decodes = max(1, requests - prefills)
    return Bucket(prefills + decodes, CHUNK * prefills, decodes)


def check_bucket(requests: int) -> Bucket:
    """A bucket for `even_batch`."""
    return Bucket(requests + 1, CHUNK, requests)


def planner_spec() -> BuildSpec:
    """The catalog whose planners are measured."""
    buckets = {bucket_of(n) for n in COUNTS} | {check_bucket(n) for n, _ in CHECKS.values()}
    return BuildSpec(
        specs=MappingProxyType({spec_name(MAIN): MAIN}),
        space=BucketSpace(),
        buckets=tuple(sorted(buckets, reverse=True)),
        dropped=MappingProxyType({}),
        workspace=Workspace(MAX_PAGES, MAX_KV_LEN),
        backend="cuda",
        source="benchmarks/bench_plan.py",
    )


def nine_spec() -> BuildSpec:
    """The catalog of bench_kernels' nine shapes."""
    return build_specs(["nine"])[spec_name(MAIN)]


@contextlib.contextmanager
def served_by(kernels: Kernels) -> Iterator[None]:
    """Has builds take FlashInfer's kernels for specifications that pod_sm90 serves too, where these are asked for."""
    if kernels == "sm90":
        yield
        return
    with mock.patch.object(pod_sm90, "refusal", return_value="FlashInfer's kernels are measured"):
        yield


def compile_all() -> None:
    """Compiles every kernel of this benchmark."""
    for kernels in FAMILIES:
        with served_by(kernels):
            for spec in (planner_spec(), nine_spec()):
                building.compile_kernels(spec, pod_sm90.ARCH, KERNELS)


def unverified(spec: BuildSpec, kernels: Kernels) -> OpenCatalog:
    """What a build has before it verifies: every bucket in every setting, without measurements."""
    path = ROOT / "build" / f"bench-plan-{kernels}-{max(b.batch for b in spec.buckets)}.podcat"
    path.parent.mkdir(exist_ok=True)
    with served_by(kernels):
        candidate = building._cuda_candidate(spec, KERNELS, torch.cuda.current_device(), lambda *_: None, {})
    store.write(path, candidate)
    return open_catalog(path)


# --- batches -------------------------------------------------------------------------------------------------------


def mixed_batch(requests: int, seed: int = 0) -> Batch:
    """A step of chunked prefill: prefills among decodes, in any order, KV lengths as of conversations."""
    rng = np.random.default_rng([seed, requests])
    rows = np.ones(requests, np.int64)
    prefills = prefills_of(requests)
    rows[rng.permutation(requests)[:prefills]] = rng.integers(CHUNK // 4, CHUNK + 1, prefills)
    history = np.exp(rng.normal(math.log(HISTORY), 1.0, requests)).astype(np.int64)
    return _batch(rng, rows, rows + np.minimum(history, MOST_HISTORY))


def even_batch(requests: int, pages: int) -> Batch:
    """Decodes of so many full pages each."""
    rng = np.random.default_rng([requests, pages])
    return _batch(rng, np.ones(requests, np.int64), np.full(requests, pages * MAIN.page_size))


def _batch(rng: np.random.Generator, rows: npt.NDArray[np.int64], kv_lens: npt.NDArray[np.int64]) -> Batch:
    pages = -(-kv_lens // MAIN.page_size)
    return Batch.of(
        indptr(rows),
        indptr(pages),
        rng.permutation(int(pages.sum())),
        (kv_lens - 1) % MAIN.page_size + 1,
        page_size=MAIN.page_size,
        max_kv_len=MAX_KV_LEN,
    )


def indptr(lengths: npt.ArrayLike) -> Int32:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def arrays_of(batch: Batch) -> tuple[Int32, Int32, Int32, Int32]:
    """What `Dispatcher.plan` takes."""
    return batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len


def sides(batch: Batch) -> tuple[tuple[Int32, ...], tuple[Int32, ...]]:
    """The prefills and the decodes of a batch, each as FlashInfer's four arrays."""
    prefill = batch.qo_lens > 1
    return _side(batch, np.flatnonzero(prefill)), _side(batch, np.flatnonzero(~prefill))


def _side(batch: Batch, members: npt.NDArray[np.int64]) -> tuple[Int32, ...]:
    kv = batch.kv_indptr
    indices = np.concatenate([batch.kv_indices[kv[i] : kv[i + 1]] for i in members])
    return (
        indptr(batch.qo_lens[members]),
        indptr(np.diff(kv)[members]),
        indices,
        batch.kv_last_page_len[members],
    )


def on_gpu(arrays: tuple[Int32, ...]) -> list[torch.Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(a, np.int32)).cuda() for a in arrays]


# --- kernels of the planner ----------------------------------------------------------------------------------------


def _kernel_us(planners: dict[Kernels, Dispatcher]) -> dict[str, Any]:
    """Every duration of a planner's kernel, all graphs in turn."""
    replays: dict[str, Callable[[], Any]] = {"empty": graphed(_empty_launches)}
    for kernels, dispatcher in planners.items():
        replays |= {f"{kernels} {n}": _planner_graph(dispatcher, mixed_batch(n), bucket_of(n)) for n in COUNTS}
    for name, (n, pages) in CHECKS.items():
        replays[f"check {name}"] = _check_graph(planners["sm90"], even_batch(n, pages), check_bucket(n))
    us = {name: value / LAUNCHES for name, value in interleaved(replays).items()}
    for dispatcher in planners.values():
        dispatcher.check()  # what was refused was not planned
    return {
        "planner_us": {str(n): us[f"sm90 {n}"] for n in COUNTS},
        "planner_us_flashinfer": {str(n): us[f"flashinfer {n}"] for n in COUNTS},
        "page_check_us": {name: us[f"check {name}"] for name in CHECKS},
        "empty_kernel_us": us["empty"],
    }


def _empty_launches() -> None:
    for _ in range(LAUNCHES):
        torch.cuda._sleep(0)  # type: ignore[no-untyped-call]


def _planner_graph(dispatcher: Dispatcher, batch: Batch, bucket: Bucket) -> Callable[[], Any]:
    planner, record = backend_of(dispatcher)._planner, _record(dispatcher, batch, bucket)
    arrays = on_gpu(arrays_of(batch))

    def run(keep: list[torch.Tensor] = arrays) -> None:
        stream, step = torch.cuda.current_stream().cuda_stream, _step(batch, keep, dispatcher.spec, 0)
        for _ in range(LAUNCHES):
            planner.launch(stream, record, *step)

    return graphed(run)


def _check_graph(dispatcher: Dispatcher, batch: Batch, bucket: Bucket) -> Callable[[], Any]:
    """The check of page numbers alone."""
    planner, record = backend_of(dispatcher)._planner, _record(dispatcher, batch, bucket)
    arrays = on_gpu(arrays_of(batch))
    # sets the parameters, which both kernels share
    planner.launch(
        torch.cuda.current_stream().cuda_stream, record, *_step(batch, arrays, dispatcher.spec, batch.num_pages)
    )
    torch.cuda.synchronize()

    def run(keep: list[torch.Tensor] = arrays) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for _ in range(LAUNCHES):
            planner._check_pages.enqueue(stream)

    return graphed(run)


def _record(dispatcher: Dispatcher, batch: Batch, bucket: Bucket) -> Record:
    """The bucket's record; of pod_sm90 in the setting that is made for the batch."""
    records = [r for r in dispatcher._records if r.bucket == bucket]
    preferred = SM90 + preferred_setting(batch, dispatcher.spec)
    return next((r for r in records if r.variant == preferred), records[0])


def _step(
    batch: Batch, arrays: list[torch.Tensor], spec: AttentionSpec, num_pages: int
) -> tuple[Addresses, int, int, int, int, int, int]:
    """What `Planner.launch` takes behind the record."""
    qo, kv, indices, last = (a.data_ptr() for a in arrays)
    demand = batch.demand(spec)
    return (
        (qo, kv, last, indices),
        batch.num_requests,
        len(batch.kv_indices),
        int(batch.qo_indptr[-1]),
        num_pages,
        demand.prefill_rows,
        demand.decodes,
    )


def backend_of(dispatcher: Dispatcher) -> GpuBackend:
    backend = dispatcher._backend
    assert isinstance(backend, GpuBackend)
    return backend


# --- the host ------------------------------------------------------------------------------------------------------


def _host_us(dispatcher: Dispatcher) -> dict[str, float]:
    """Host times of plan(): podgraph's and FlashInfer's on the same batches, in turn."""
    import flashinfer

    spec = dispatcher.spec
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(
        torch.zeros(POD_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"), spec.kv_layout
    )
    dims = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, spec.page_size)
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    steps, eager_steps = [], []
    for n in PLANNED:
        batch = mixed_batch(n)
        demand = batch.demand(spec)
        steps.append((on_gpu(arrays_of(batch)), demand.prefill_rows, demand.decodes))
        prefill, decode = sides(batch)
        eager_steps.append((*on_gpu(prefill), *on_gpu(decode)))
    for arrays, prefill_len, decode_count in steps:
        dispatcher.plan(*arrays, prefill_len=prefill_len, decode_count=decode_count)
    for eager in eager_steps[:3]:
        wrapper.plan(*eager, *dims, **dtypes)
    ours, theirs = [], []
    for turn in range(TURNS):
        torch.cuda.synchronize()
        for call in range(CALLS_IN_A_ROW):
            arrays, prefill_len, decode_count = steps[(turn * CALLS_IN_A_ROW + call) % len(steps)]
            begin = time.perf_counter_ns()
            dispatcher.plan(*arrays, prefill_len=prefill_len, decode_count=decode_count)
            ours.append(time.perf_counter_ns() - begin)
        torch.cuda.synchronize()
        eager = eager_steps[turn % len(eager_steps)]
        begin = time.perf_counter_ns()
        wrapper.plan(*eager, *dims, **dtypes)
        theirs.append(time.perf_counter_ns() - begin)
    dispatcher.check()
    ours_us, theirs_us = statistics.median(ours) / 1e3, statistics.median(theirs) / 1e3
    return {
        "host_step_us": ours_us,
        "host_step_us_p99": float(np.percentile(ours, 99)) / 1e3,
        "flashinfer_host_step_us": theirs_us,
        "ratio_host": theirs_us / ours_us,
    }


# --- what the lists are worth --------------------------------------------------------------------------------------


def _shapes() -> dict[str, dict[str, Any]]:
    rows = {}
    sm90, flashinfer = unverified(nine_spec(), "sm90"), unverified(nine_spec(), "flashinfer")
    # two dispatchers of one catalog: each keeps lists of its own
    with sm90.bind() as device, sm90.bind() as host, flashinfer.bind() as theirs:
        policy = sm90.content.policy(spec_name(MAIN))
        for shape in NINE:
            rows[shape.name] = _shape(shape, device, host, theirs, policy)
            print(shape.name, json.dumps(rows[shape.name]), flush=True)
            gc.collect()  # FlashInfer's wrappers may refer to one another
            torch.cuda.empty_cache()
    return rows


def _shape(shape: Shape, device: Dispatcher, host: Dispatcher, theirs: Dispatcher, policy: Policy) -> dict[str, Any]:
    case = shape.make(MAIN)
    batch = Batch.of(*case.arrays, page_size=MAIN.page_size, max_kv_len=max(case.kv_lens))
    (record,) = device.plan(*case.arrays)
    theirs.plan(*case.arrays)
    host.plan_into(record, batch)
    indices = on_gpu((batch.kv_indices,))[0]
    _copy_lists(host, host_lists(batch, record, policy, backend_of(host).layout, indices.data_ptr()))
    outs = {name: torch.full_like(case.q, math.nan) for name in ("device_lists", "host_lists", "pod_flashinfer")}
    ways: dict[str, Callable[[], Any]] = {
        name: lambda d=dispatcher, out=outs[name]: d.run(case.q, case.cache, out)  # type: ignore[misc]
        for name, dispatcher in zip(outs, (device, host, theirs), strict=True)
    }
    way = FlashInferCalls(case, MAIN).ways()["batch_pod"]()
    ways["batch_pod"] = graphed(way)
    us = interleaved(ways)
    for dispatcher in (device, host, theirs):
        dispatcher.check()
    want = outs["device_lists"].float()
    same_bits = torch.equal(outs["device_lists"].view(torch.int16), outs["host_lists"].view(torch.int16))
    errors = {
        "pod_flashinfer": samples.relative_error(outs["pod_flashinfer"], want),
        "batch_pod": samples.relative_error(torch.cat(way.outputs), want),
    }
    return {
        "us": us,
        "device_over_host_lists": us["device_lists"] / us["host_lists"],
        "plan_speedup": us["batch_pod"] / us["pod_flashinfer"],
        "variant": record.variant,
        "same_bits": same_bits,
        "errors": errors,
        "wrong": not same_bits or max(errors.values()) > TOLERANCE,
    }


def host_lists(batch: Batch, record: Record, policy: Policy, layout: Layout, indices: int) -> Int32:
    """The regions ``meta`` and ``plan``, one behind the other, as the numpy planner fills them.

    Args:
        indices: address of kv_indices in device memory.
    """
    step = np.zeros(layout.step_bytes // 4, np.int32)
    plan(batch, record.bucket, MAIN, policy, record.variant).pack(layout, step)
    views = layout.views(step)
    views["kv_indices_at"][:] = np.array([indices], np.uint64).view(np.int32)
    views["bad_page"][:] = -1
    return step


def _copy_lists(dispatcher: Dispatcher, step: Int32) -> None:
    """Over what the planner's kernel put there."""
    backend = backend_of(dispatcher)
    torch.cuda.synchronize()
    at = 0
    for region in ("meta", "plan"):
        size = backend.layout.sizes[region]
        driver.copy_to_device(backend.regions[region], step.ctypes.data + at, size, backend.stream)
        at += size
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
