"""Replays a request trace through a bound catalog, step by step, and compares what comes out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from podgraph import samples
from podgraph.batch import Batch
from podgraph.dispatch.counters import Counters
from podgraph.dispatch.dispatcher import Dispatcher
from podgraph.dispatch.runtime import OpenCatalog
from podgraph.errors import TraceError
from podgraph.shapes import AttentionSpec
from podgraph.workload.requests import Trace
from podgraph.workload.scheduler import Chunk, SchedulerConfig
from podgraph.workload.simulation import simulate

KV_POOL_TOKENS = 262_144  # tokens that the replayed cache holds at most
MAX_RUNNING = 256


@dataclass(frozen=True)
class ReplayReport:
    """What happened.

    Attributes:
        steps: steps replayed.
        requests: requests that took part; ``too_long`` ones of the trace have more tokens than ``max_kv_len``.
        rows: query rows of real requests.
        slots: real requests over all steps.
        worst_error: largest relative error of a step against the float32 reference.
        bound: what rounding to the spec's dtype alone would explain, twice.
        failures: steps whose error exceeded their bound.
        counters: what the dispatcher counted meanwhile.
        memory: bytes that it held at the end, by kind.
    """

    steps: int
    requests: int
    too_long: int
    rows: int
    slots: int
    worst_error: float
    bound: float
    failures: int
    counters: Counters
    memory: dict[str, int]


def replay_trace(
    catalog: OpenCatalog,
    trace: Trace,
    *,
    spec: str | None = None,
    limit: int = 200,
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> ReplayReport:
    """Schedules a trace (continuous batching, chunked prefill) and replays its first steps.

    Args:
        limit: how many steps.
        seed: of the data, and of the order of requests within a step.
        progress: called with the number of steps done.

    Raises:
        TraceError: the trace makes no step that the catalog could serve.
    """
    fitting = trace.input_len + trace.output_len <= catalog.content.max_kv_len
    trace, too_long = trace.keep(fitting), int((~fitting).sum())
    with catalog.bind(spec) as dispatcher:
        config = scheduler_config(catalog, dispatcher.spec)
        pool = _PagePool(config.max_pages, seed)
        cache = _random_cache(config.max_pages, dispatcher, seed)
        rng = np.random.default_rng(seed)
        requests: set[int] = set()
        steps = rows = slots = failures = 0
        worst = bound = 0.0
        for step in islice(simulate(trace, config), limit):
            order = rng.permutation(len(step.requests))  # an engine reuses slots: decodes and prefills interleave
            chunks = [step.requests[i] for i in order]
            batch = pool.batch(chunks, dispatcher.spec, catalog.content.max_kv_len)
            error, allowed = _run_step(dispatcher, batch, cache, seed + steps)
            failures += error > allowed
            if error >= worst:
                worst, bound = error, allowed
            requests.update(c.request for c in chunks)
            rows += int(batch.qo_indptr[-1])
            slots += len(chunks)
            steps += 1
            progress(steps)
        if not steps:
            raise TraceError(f"{trace.source}: no request fits the catalog (max_kv_len {catalog.content.max_kv_len})")
        return ReplayReport(
            steps=steps,
            requests=len(requests),
            too_long=too_long,
            rows=rows,
            slots=slots,
            worst_error=worst,
            bound=bound,
            failures=failures,
            counters=dispatcher.counters,
            memory=dispatcher.memory(),
        )


def scheduler_config(catalog: OpenCatalog, spec: AttentionSpec) -> SchedulerConfig:
    """A scheduler that keeps to what the catalog was built for: its largest batch and prefill length."""
    buckets = [r.bucket for r in catalog.content.records]
    running = min(max(b.batch for b in buckets), MAX_RUNNING)
    pages = min(catalog.content.max_pages, KV_POOL_TOKENS // spec.page_size)
    budget = max(running, max(b.prefill_len for b in buckets))
    return SchedulerConfig(token_budget=budget, max_running=running, max_pages=pages, page_size=spec.page_size)


class _PagePool:
    """Pages of the running requests; a request that is not in the step gives its pages back when they are needed."""

    def __init__(self, pages: int, seed: int) -> None:
        self._free = np.random.default_rng(seed).permutation(pages).tolist()
        self._held: dict[int, list[int]] = {}

    def batch(self, chunks: list[Chunk], spec: AttentionSpec, max_kv_len: int) -> Batch:
        wanted = {c.request: -(-c.kv_len // spec.page_size) for c in chunks}
        short = sum(max(0, n - len(self._held.get(r, ()))) for r, n in wanted.items()) - len(self._free)
        for request in [r for r in self._held if r not in wanted] if short > 0 else []:
            self._free += self._held.pop(request)
        for request, count in wanted.items():
            held = self._held.setdefault(request, [])
            while len(held) > count:  # preempted and started over
                self._free.append(held.pop())
            while len(held) < count:
                held.append(self._free.pop())
        qo = np.cumsum([0, *(c.qo_len for c in chunks)])
        kv = np.cumsum([0, *(wanted[c.request] for c in chunks)])
        indices = np.array([p for c in chunks for p in self._held[c.request]], np.int32)
        last = np.array([(c.kv_len - 1) % spec.page_size + 1 for c in chunks])
        return Batch.of(qo, kv, indices, last, page_size=spec.page_size, max_kv_len=max_kv_len)


def _random_cache(pages: int, dispatcher: Dispatcher, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    spec = dispatcher.spec
    middle = (spec.page_size, spec.num_kv_heads) if spec.kv_layout == "NHD" else (spec.num_kv_heads, spec.page_size)
    generator = torch.Generator(dispatcher.device).manual_seed(seed)
    shape = (pages, 2, *middle, spec.head_dim)
    cache = torch.empty(shape, dtype=samples.DTYPES[spec.dtype], device=dispatcher.device)
    cache = cache.normal_(generator=generator).to(samples.DTYPES[spec.kv_dtype])
    return cache[:, 0], cache[:, 1]


def _run_step(
    dispatcher: Dispatcher, batch: Batch, cache: tuple[torch.Tensor, torch.Tensor], seed: int
) -> tuple[float, float]:
    spec = dispatcher.spec
    generator = torch.Generator(dispatcher.device).manual_seed(seed)
    q = torch.empty(
        (int(batch.qo_indptr[-1]), spec.num_qo_heads, spec.head_dim),
        dtype=samples.DTYPES[spec.dtype],
        device=dispatcher.device,
    ).normal_(generator=generator)
    dispatcher.plan(batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)
    out = dispatcher.run(q, cache, torch.full_like(q, math.nan))
    inputs = samples.Inputs(q, *cache)
    want, _ = samples.reference(batch, spec, inputs)
    rounded, _ = samples.reference(batch, spec, inputs, round_to=q.dtype)
    return samples.relative_error(out, want), 2 * samples.relative_error(rounded, want) + 1e-6


def describe(report: ReplayReport) -> dict[str, Any]:
    """The report as plain data, with the shares that people ask for; buckets most used first."""
    counted = report.counters
    return {
        "steps": report.steps,
        "requests": report.requests,
        "too_long": report.too_long,
        "replays": dict(counted.replays.most_common()),
        "splits": dict(counted.splits),
        "rows": report.rows,
        "padded_rows": counted.padded_rows,
        "slots": report.slots,
        "padded_slots": counted.padded_slots,
        "worst_error": report.worst_error,
        "bound": report.bound,
        "failures": report.failures,
        "replays_total": sum(counted.replays.values()),
        "steps_in_one_replay": report.steps - sum(counted.splits.values()),
        "padded_rows_share": counted.padded_rows / max(1, counted.padded_rows + report.rows),
        "padded_slots_share": counted.padded_slots / max(1, counted.padded_slots + report.slots),
    }
