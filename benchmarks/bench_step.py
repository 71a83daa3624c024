"""What a step costs the host: plan() and a run() for each of 32 layers, against FlashInfer's eager calls.

    python -m benchmarks.bench_step --commit $(git rev-parse HEAD)

Steps are those of an engine that serves the committed slice of a trace; metadata lie on the GPU. Each step is taken
three ways in turn: with q and out where they always are; with both elsewhere in every call; and, where it has prefills
and decodes, by FlashInfer's batch POD, planned and run eagerly. The stream is idle when a way begins, so that the
driver's queue never fills up, and only the host's time counts: of each call, and from the plan's begin to the last
run's end. FlashInfer's metadata are split into its two sides beforehand.

Graph memory is that of fresh processes that bind 32 layers and make every graph. Buckets are many there, but built few:
a catalog whose records are copies of others, for buckets that its work lists hold too. Only memory is asked of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.bench_plan import Int32, arrays_of, indptr, on_gpu, sides
from benchmarks.flashinfer_calls import POD_WORKSPACE_BYTES
from benchmarks.main_job import KERNELS, ROOT, azure_slice
from benchmarks.result import write_result
from benchmarks.shapes import BALLAST
from podgraph.batch import Batch
from podgraph.build import build
from podgraph.catalog import store
from podgraph.catalog.model import Catalog, Record
from podgraph.config import load_config
from podgraph.dispatch.dispatcher import Dispatcher
from podgraph.dispatch.runtime import OpenCatalog
from podgraph.dispatch.runtime import open as open_catalog
from podgraph.planner import Capacity
from podgraph.shapes import AttentionSpec, Bucket
from podgraph.workload.scheduler import SchedulerConfig
from podgraph.workload.simulation import simulate

NAME = "llama3-8b"
CONFIG = ROOT / "configs" / f"{NAME}.yaml"
LAYERS = 32
STEPS, LEAST_STEPS, WARM_STEPS = 2000, 100, 20
RATE = 6.0  # requests a second, of steps of 20 ms
PAGES = 8192  # of each layer's cache
TOKEN_BUDGET, MAX_RUNNING, MAX_PREFILLS = 512, 64, 8  # within the buckets of the config
MANY, FEW = 500, 50
BUDGET = 4 << 20
SWITCHES, ROUNDS = 300, 30

# One catalog's graphs in a process of their own: a driver that made graphs before keeps some of their memory.
GRAPHS = """
import json, sys
import torch
import podgraph
path, layers, budget = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
catalog = podgraph.open(path)
(entry,) = catalog.content.specs.values()
spec = entry.attention
shape = (16, 2, spec.page_size, spec.num_kv_heads, spec.head_dim)
caches = [torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]
dispatcher = catalog.bind(kv_caches=caches, memory_budget=budget or None)
q, out, _ = dispatcher.static_buffers()
dispatcher.prewarm(list({record.template: record for record in catalog.content.records}.values()))
for record in catalog.content.records[::7]:
    dispatcher.plan([0, 1], [0, 1], [0], [1], bucket=record.bucket)
    for layer in (0, layers - 1):
        dispatcher.run(q, layer=layer, out=out)
dispatcher.check()
print(json.dumps({
    "buckets": len(catalog.content.records),
    "execs": dispatcher.memory()["execs"],
    "evictions": dispatcher.counters.exec_evictions,
}))
"""


@dataclass(frozen=True)
class StepArrays:
    """One step of the trace, prefills first.

    Attributes:
        batch: as podgraph plans it.
        prefill_len, decode_count: what the host knows of it.
        sides: FlashInfer's arrays, where there are prefills and decodes.
    """

    batch: Batch
    prefill_len: int
    decode_count: int
    sides: tuple[tuple[Int32, ...], tuple[Int32, ...]] | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    if options.steps < LEAST_STEPS:
        parser.error(f"--steps: at least {LEAST_STEPS}, so that some have both sides")
    start = time.perf_counter()
    path = ROOT / "build" / f"{NAME}.podcat"
    content = build(load_config(CONFIG), path, kernels=KERNELS, backend="cuda").catalog
    print(f"built after {time.perf_counter() - start:.1f} s", flush=True)
    metrics: dict[str, Any] = _graph_bytes(content)
    print(json.dumps(metrics), f"{time.perf_counter() - start:.1f} s", flush=True)
    with torch.no_grad():
        catalog = open_catalog(path)
        spec = content.specs[NAME].attention
        shape = (PAGES, 2, spec.page_size, spec.num_kv_heads, spec.head_dim)
        caches = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
        metrics |= _serve(catalog, caches, trace_steps(spec, WARM_STEPS + options.steps))
        print(json.dumps(metrics), f"{time.perf_counter() - start:.1f} s", flush=True)
        metrics |= _switch(catalog, caches)
    written = write_result("step", options.commit, metrics, "bench_step")
    print(json.dumps(metrics, indent=1))
    print(f"wrote {written} after {time.perf_counter() - start:.1f} s")


# --- steps of a trace ----------------------------------------------------------------------------------------------


def trace_steps(spec: AttentionSpec, count: int) -> list[StepArrays]:
    """The first steps of an engine that serves the slice, over and over where it ends before."""
    config = SchedulerConfig(
        token_budget=TOKEN_BUDGET,
        max_running=MAX_RUNNING,
        max_pages=PAGES,
        page_size=spec.page_size,
        max_prefills=MAX_PREFILLS,
    )
    lengths = [[(c.qo_len, c.kv_len) for c in step.requests] for step in simulate(azure_slice(RATE), config)]
    return [
        _step(spec, some, np.random.default_rng(number))
        for number, some in enumerate(itertools.islice(itertools.cycle(lengths), count))
    ]


def _step(spec: AttentionSpec, requests: list[tuple[int, int]], rng: np.random.Generator) -> StepArrays:
    """Pages are drawn anew for each step: which of them a request has makes no difference to the host."""
    requests = sorted(requests, key=lambda r: r[0] == 1)
    rows, kv = (np.array(lengths) for lengths in zip(*requests, strict=True))
    pages = -(-kv // spec.page_size)
    batch = Batch.of(
        indptr(rows),
        indptr(pages),
        rng.permutation(PAGES)[: int(pages.sum())],
        (kv - 1) % spec.page_size + 1,
        page_size=spec.page_size,
        max_kv_len=int(kv.max()),
    )
    demand = batch.demand(spec)
    two_sided = demand.prefills > 0 and demand.decodes > 0
    return StepArrays(batch, demand.prefill_rows, demand.decodes, sides(batch) if two_sided else None)


# --- serving -------------------------------------------------------------------------------------------------------


class _Times:
    """Nanoseconds of one way's calls."""

    def __init__(self) -> None:
        self.plans: list[int] = []
        self.runs: list[int] = []
        self.steps: list[int] = []

    def take(self, plan: Callable[[], Any], run: Callable[[int], Any]) -> None:
        """One step on an idle stream."""
        torch.cuda.synchronize()
        now = time.perf_counter_ns
        stamps = [now()]
        plan()
        stamps.append(now())
        for layer in range(LAYERS):
            run(layer)
            stamps.append(now())
        torch.cuda.synchronize()
        self.plans.append(stamps[1] - stamps[0])
        self.runs += [end - begin for begin, end in itertools.pairwise(stamps[1:])]
        self.steps.append(stamps[-1] - stamps[0])

    def clear(self) -> None:
        self.plans, self.runs, self.steps = [], [], []


def _serve(catalog: OpenCatalog, caches: list[torch.Tensor], steps: list[StepArrays]) -> dict[str, Any]:
    """Every step in each of the three ways, which take turns at being first."""
    import flashinfer

    # each way has graphs of its own, which the other does not point elsewhere
    with catalog.bind(kv_caches=caches) as bound, catalog.bind(kv_caches=caches) as repointed:
        spec = bound.spec
        bound.prewarm()
        repointed.prewarm()
        q, out, _ = bound.static_buffers()
        moving = torch.zeros(2, 2, LAYERS, *q.shape, dtype=q.dtype, device="cuda")  # turn, q or out, layer
        wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(
            torch.zeros(POD_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"), spec.kv_layout
        )
        pairs = [(cache[:, 0], cache[:, 1]) for cache in caches]
        times = {name: _Times() for name in ("bound", "repointed", "eager")}
        for number, step in enumerate(steps):
            if number == WARM_STEPS:
                for some in times.values():
                    some.clear()
            arrays = on_gpu(arrays_of(step.batch))
            hints = {"prefill_len": step.prefill_len, "decode_count": step.decode_count}
            qs, outs = (list(moving[number % 2, which]) for which in range(2))
            ways: dict[str, tuple[Callable[[], Any], Callable[[int], Any]]] = {
                "bound": (
                    lambda a=arrays, h=hints: bound.plan(*a, **h),  # type: ignore[misc]
                    lambda layer: bound.run(q, layer=layer, out=out),
                ),
                "repointed": (
                    lambda a=arrays, h=hints: repointed.plan(*a, **h),  # type: ignore[misc]
                    lambda layer, qs=qs, outs=outs: repointed.run(qs[layer], layer=layer, out=outs[layer]),  # type: ignore[misc]
                ),
            }
            if step.sides is not None:
                ways["eager"] = _eager(wrapper, spec, step, q, pairs)
            order = list(ways)
            first = number % len(order)
            for name in order[first:] + order[:first]:
                times[name].take(*ways[name])
        bound.check()
        repointed.check()
        updates = {name: d.counters.exec_updates for name, d in (("bound", bound), ("repointed", repointed))}
    return {**figures(times["bound"], times["repointed"], times["eager"]), "exec_updates": updates}


def _eager(
    wrapper: Any, spec: AttentionSpec, step: StepArrays, q: torch.Tensor, pairs: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[Callable[[], Any], Callable[[int], Any]]:
    """FlashInfer's plan and run; it makes its outputs itself."""
    assert step.sides is not None
    arrays = [tensor for side in step.sides for tensor in on_gpu(side)]
    dims = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, spec.page_size)
    dtypes = {"q_data_type": q.dtype, "kv_data_type": q.dtype}
    q_p, q_d = q[: step.prefill_len], q[step.prefill_len : step.prefill_len + step.decode_count]
    return (
        lambda: wrapper.plan(*arrays, *dims, **dtypes),
        lambda layer: wrapper.run(q_p, pairs[layer], q_d, pairs[layer], causal_p=True, enable_pdl=False),
    )


def figures(bound: _Times, repointed: _Times, eager: _Times) -> dict[str, Any]:
    """Medians in microseconds; those of FlashInfer are of the steps with prefills and decodes."""
    run, moved, theirs = (statistics.median(times.runs) / 1e3 for times in (bound, repointed, eager))
    step, moved_step, their_step = (statistics.median(times.steps) / 1e3 for times in (bound, repointed, eager))
    return {
        "layers": LAYERS,
        "steps": len(bound.steps),
        "eager_steps": len(eager.steps),
        "run_us_p50": run,
        "run_us_p99": float(np.percentile(bound.runs, 99)) / 1e3,
        "run_repointed_us_p50": moved,
        "run_repointed_us_p99": float(np.percentile(repointed.runs, 99)) / 1e3,
        "eager_run_us_p50": theirs,
        "ratio_run": theirs / run,
        "ratio_run_repointed": theirs / moved,
        "plan_us_p50": statistics.median(bound.plans) / 1e3,
        "eager_plan_us_p50": statistics.median(eager.plans) / 1e3,
        "step_us_p50": step,
        "step_repointed_us_p50": moved_step,
        "eager_step_us_p50": their_step,
        "ratio_step": their_step / step,
    }


# --- graph memory --------------------------------------------------------------------------------------------------


def _graph_bytes(content: Catalog) -> dict[str, Any]:
    """Device memory of graphs with many and with few buckets, and within a budget."""
    paths = {count: ROOT / "build" / f"bench-step-{count}.podcat" for count in (MANY, FEW)}
    for count, path in paths.items():
        store.write(path, with_buckets(content, NAME, count))
    many, few, budget = (
        _graphs(path, bytes_) for path, bytes_ in ((paths[MANY], 0), (paths[FEW], 0), (paths[MANY], BUDGET))
    )
    return {
        f"graph_bytes_{MANY}_buckets": many["execs"],
        f"graph_bytes_{FEW}_buckets": few["execs"],
        "graph_bytes_budget": budget["execs"],
        "budget_bytes": BUDGET,
        "budget_evictions": budget["evictions"],
        "templates": len(content.replayed),
    }


def with_buckets(content: Catalog, name: str, count: int) -> Catalog:
    """The catalog with so many buckets of a specification, all within what its work lists hold.

    Raises:
        ValueError: they hold fewer.
    """
    records, entry, policy = content.buckets(name), content.specs[name], content.policy(name)
    most = max(records, key=lambda r: r.bucket.batch).bucket
    lengths, decodes = (
        sorted({max(1, most_of * i // 12) for i in range(1, 13)})
        for most_of in (max(r.bucket.prefill_len for r in records), max(r.bucket.decode_count for r in records))
    )
    own = [r.bucket for r in records][:count]
    more = []
    for batch, prefill_len, decode_count in itertools.product(range(1, most.batch + 1), [0, *lengths], [0, *decodes]):
        bucket = Bucket(batch, prefill_len, decode_count)
        held = bucket.unreachable is None and entry.capacity.holds(Capacity.of(bucket, entry.attention, policy))
        if held and bucket not in own:
            more.append(bucket)
    missing = count - len(own)
    if len(more) < missing:
        raise ValueError(f"{count} buckets: the catalog's work lists hold {len(own) + len(more)}")
    chosen = [*own, *(more[i * len(more) // missing] for i in range(missing))]
    copies = [
        dataclasses.replace(record, bucket=bucket)
        for record, bucket in zip(itertools.cycle(records), chosen, strict=False)  # one is endless
    ]
    return dataclasses.replace(content, records=tuple(copies))


def _graphs(path: Path, budget: int) -> dict[str, int]:
    command = [sys.executable, "-c", GRAPHS, str(path), str(LAYERS), str(budget)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    facts: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return facts


# --- switching between buckets and templates -----------------------------------------------------------------------


def _switch(catalog: OpenCatalog, caches: list[torch.Tensor]) -> dict[str, Any]:
    """A run behind a plan into another bucket or template: the host's time, and the GPU's."""
    with catalog.bind(kv_caches=caches) as shared, catalog.bind(kv_caches=caches) as dedicated:
        record, others = switches(catalog.content.buckets(NAME))
        shared.prewarm()
        dedicated.prewarm()
        dedicated.dedicate([record])
        q, out, _ = shared.static_buffers()
        arrays = on_gpu(arrays_of(_two_decodes(shared.spec)))

        def go(dispatcher: Dispatcher, some: Record) -> None:
            dispatcher.plan(*arrays, bucket=some.bucket)
            dispatcher.run(q, layer=0, out=out)

        host: dict[str, list[int]] = {name: [] for name in others}
        for number in range(SWITCHES + WARM_STEPS):
            for name, other in others.items():
                go(shared, other)
                go(shared, other)
                torch.cuda.synchronize()
                shared.plan(*arrays, bucket=record.bucket)
                begin = time.perf_counter_ns()
                shared.run(q, layer=0, out=out)
                took = time.perf_counter_ns() - begin
                if number >= WARM_STEPS:
                    host[name].append(took)
        us = {name: statistics.median(values) / 1e3 for name, values in host.items()}
        gpu = {
            name: _replays_us(shared, dedicated, record, other, q, out)
            for name, other in others.items()
            if name != "same"
        }
        shared.check()
        dedicated.check()
    hardest = "template" if "template" in others else "bucket"
    return {
        "switch_us": us[hardest],
        "switch_us_by_kind": us,
        "replay_after_switch_ratio": gpu[hardest]["shared"] / gpu[hardest]["dedicated"],
        "replay_us_by_kind": gpu,
    }


def switches(records: tuple[Record, ...]) -> tuple[Record, dict[str, Record]]:
    """The record of the largest bucket, and those to switch from: itself, and another bucket of its template and of
    another one, where there are such.
    """
    record = max(records, key=lambda r: (r.bucket.prefill_len + r.bucket.decode_count, r.bucket))
    others = {"same": record}
    for kind, same in (("bucket", True), ("template", False)):
        some = [r for r in records if r != record and (r.template == record.template) == same]
        if some:
            others[kind] = max(some, key=lambda r: (r.bucket.prefill_len + r.bucket.decode_count, r.bucket))
    return record, others


def _two_decodes(spec: AttentionSpec) -> Batch:
    """What every bucket holds that has two slots."""
    last = [spec.page_size] * 2
    return Batch.of([0, 1, 2], [0, 64, 128], np.arange(128), last, page_size=spec.page_size, max_kv_len=PAGES)


def _full(bucket: Bucket, spec: AttentionSpec) -> StepArrays:
    """As many decodes as the bucket has, of 1,000 tokens each, and one prefill of all its rows."""
    prefill = [(bucket.prefill_len, bucket.prefill_len + 1000)] if bucket.prefill_len else []
    return _step(spec, [*prefill, *[(1, 1000)] * bucket.decode_count], np.random.default_rng(0))


def _replays_us(
    shared: Dispatcher, dedicated: Dispatcher, record: Record, other: Record, q: torch.Tensor, out: torch.Tensor
) -> dict[str, float]:
    """Median GPU time of a replay of a full batch behind one of another bucket, with a shared graph and its own one."""
    steps = {r: on_gpu(arrays_of(_full(r.bucket, shared.spec).batch)) for r in (record, other)}
    ballast = torch.ones(BALLAST, BALLAST, dtype=torch.bfloat16, device="cuda")
    times: dict[str, list[float]] = {"shared": [], "dedicated": []}
    for turn in range(ROUNDS + 2):
        torch.mm(ballast, ballast)
        marks = []
        order = [("shared", shared), ("dedicated", dedicated)]
        for name, dispatcher in order if turn % 2 else reversed(order):
            dispatcher.plan(*steps[other], bucket=other.bucket)
            dispatcher.run(q, layer=0, out=out)
            dispatcher.plan(*steps[record], bucket=record.bucket)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            dispatcher.run(q, layer=0, out=out)
            end.record()
            marks.append((name, start, end))
        torch.cuda.synchronize()
        for name, start, end in marks:
            if turn >= 2:
                times[name].append(start.elapsed_time(end) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    main()
