"""Replays every bucket of a catalog against a dense reference: ``podgraph verify``, and the child process of a build.

For each bucket several batches run through one graph in turn. Everything that must not be read is NaN, everything that
must not be written is checked bit by bit, and the replay is compared with the same kernels and work list launched one
by one.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from podgraph import samples
from podgraph.batch import Batch
from podgraph.catalog.model import Record
from podgraph.dispatch.dispatcher import Dispatcher
from podgraph.dispatch.runtime import OpenCatalog
from podgraph.dispatch.runtime import open as open_catalog
from podgraph.errors import PodgraphError

KV_LEN = {"cpu": 256, "cuda": 4096}  # KV tokens of a request in the samples
ERROR_FACTOR = 2.0  # at most twice the error of rounding weights and output (the rule of flash-attention's tests)
LSE_TOLERANCE = 0.01  # absolute, base 2
EXTRA_ROWS = 8  # rows of out and lse behind the live ones
TIMED_REPLAYS = 10
BALLAST = 12_288  # rows of a square matrix product that takes milliseconds on any GPU of today


@dataclass(frozen=True)
class BucketResult:
    """What one bucket did.

    Attributes:
        spec, batch, prefill_len, decode_count: which bucket.
        error: worst relative error of out against the float32 reference, over its batches.
        bound: what was allowed.
        lse_error: worst absolute error of lse, base 2.
        replay_us: median duration of a replay of the full batch, microseconds; 0 where not measured.
        problem: what was wrong, empty where nothing was.
    """

    spec: str
    batch: int
    prefill_len: int
    decode_count: int
    error: float
    bound: float
    lse_error: float
    replay_us: float
    problem: str


def verify(catalog: OpenCatalog, *, seed: int = 0, measure: bool = False) -> Iterator[BucketResult]:
    """Verifies bucket by bucket, each in every setting that the runtime may put its batches into.

    Args:
        seed: of the batches and their data.
        measure: also time a replay of the full batch, on a GPU.

    Raises:
        PodgraphError: the catalog cannot be bound here.
    """
    for name in catalog.content.specs:
        records = catalog.content.buckets(name)
        if not records:  # all of its buckets are known from before, or none verified
            continue
        with catalog.bind(name) as dispatcher:
            recorded = {(r.bucket, r.variant) for r in records}
            for record in records:
                # a setting with a record of its own for the bucket has its own turn, as in a candidate of the build
                others = [
                    record.in_setting(variant, template)
                    for variant, template in catalog.content.settings(name).items()
                    if (record.bucket, variant) not in recorded
                ]
                yield _verify_bucket(catalog, dispatcher, [record, *others], seed, measure)


def _verify_bucket(
    catalog: OpenCatalog, dispatcher: Dispatcher, ways: list[Record], seed: int, measure: bool
) -> BucketResult:
    """One bucket in one or more ways to compute it, of which the first is the one that is measured."""
    spec, device = dispatcher.spec, dispatcher.device
    record = ways[0]
    error = bound = lse_error = replay_us = 0.0
    problems = []
    limit = catalog.content.max_kv_len
    kv_len = min(KV_LEN[device.type], limit)
    batches = samples.sample_batches(record.bucket, spec, kv_len, catalog.content.max_pages, seed, limit)
    for name, batch in batches.items():
        inputs = samples.make_inputs(batch, spec, device, seed)
        want, want_lse = samples.reference(batch, spec, inputs)
        rounded, _ = samples.reference(batch, spec, inputs, round_to=inputs.q.dtype)
        allowed = ERROR_FACTOR * samples.relative_error(rounded, want) + 1e-6
        for way in ways:
            dispatcher.reset()
            dispatcher.plan_into(way, batch)
            out, lse, problem = _run_twice(dispatcher, inputs, batch)
            got_error = samples.relative_error(out, want)
            finite = torch.isfinite(want_lse)
            got_lse = float((lse - want_lse)[finite].abs().max()) if bool(finite.any()) else 0.0
            if not torch.equal(torch.isfinite(lse), finite) or math.isnan(got_lse):
                problem = problem or "lse is not finite where it must be, or finite where it must not"
            if got_error > allowed:
                problem = problem or f"relative error {got_error:.2e}, allowed {allowed:.2e}"
            if got_lse > LSE_TOLERANCE:
                problem = problem or f"lse error {got_lse:.2e}, allowed {LSE_TOLERANCE}"
            if problem:
                where = f"{name} batch" if way is record else f"{name} batch in {way.variant}"
                problems.append(f"{where}: {problem}")
            if got_error >= error:
                error, bound = got_error, allowed
            lse_error = max(lse_error, got_lse)
            if measure and way is record and name == "full" and device.type == "cuda":
                replay_us = _measure(dispatcher, inputs)
    b = record.bucket
    return BucketResult(
        record.spec, b.batch, b.prefill_len, b.decode_count, error, bound, lse_error, replay_us, "; ".join(problems)
    )


def _run_twice(dispatcher: Dispatcher, inputs: samples.Inputs, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, str]:
    """The live rows of out and lse from a replay, and what is wrong with it beside its values."""
    live = int(batch.qo_indptr[-1])
    results = []
    for eager in (False, True, False):
        # q is longer than the batch, and what lies behind it must not be read
        q = torch.full((live + EXTRA_ROWS, *inputs.q.shape[1:]), math.nan, dtype=inputs.q.dtype, device=inputs.q.device)
        q[:live] = inputs.q
        out = torch.full_like(q, math.nan)
        lse = torch.full(q.shape[:2], math.nan, device=q.device)
        untouched = _bits(out)[live:].clone(), _bits(lse)[live:].clone()
        dispatcher.run(q, (inputs.k, inputs.v), out, lse, eager=eager)
        if not (torch.equal(_bits(out)[live:], untouched[0]) and torch.equal(_bits(lse)[live:], untouched[1])):
            return out[:live], lse[:live], "rows beyond the batch were written"
        results.append((out[:live], lse[:live]))
    (out, lse), *others = results
    for what, (other_out, other_lse) in zip(("kernels launched one by one", "a second replay"), others, strict=True):
        if not (torch.equal(_bits(out), _bits(other_out)) and torch.equal(_bits(lse), _bits(other_lse))):
            return out, lse, f"the replay differs bitwise from {what}"
    return out, lse, ""


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def _measure(dispatcher: Dispatcher, inputs: samples.Inputs) -> float:
    """Median time of a replay; the host enqueues them all while the GPU is still busy with something else."""
    out = torch.empty_like(inputs.q)
    ballast = torch.ones(BALLAST, BALLAST, dtype=inputs.q.dtype, device=inputs.q.device)
    torch.mm(ballast, ballast)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED_REPLAYS + 1)]  # type: ignore[no-untyped-call]
    for event in events:
        dispatcher.run(inputs.q, (inputs.k, inputs.v), out)
        event.record()
    events[-1].synchronize()
    return statistics.median(float(a.elapsed_time(b)) * 1e3 for a, b in itertools.pairwise(events))


def use_one_thread(catalog: OpenCatalog) -> None:
    """For processes that only verify or replay: the interpreter's small steps lose by more torch threads."""
    if catalog.content.fingerprint.backend == "cpu":
        torch.set_num_threads(1)


def main(arguments: list[str]) -> int:
    """The child process of a build: one JSON line for each bucket on standard output, or one with an error."""
    path, seed = arguments
    try:
        catalog = open_catalog(Path(path))
        use_one_thread(catalog)
        for result in verify(catalog, seed=int(seed), measure=True):
            print(json.dumps(dataclasses.asdict(result)), flush=True)
    except PodgraphError as e:
        print(json.dumps({"error": str(e)}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
