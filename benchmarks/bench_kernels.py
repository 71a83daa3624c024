"""podgraph's catalogs against FlashInfer's ways to compute the same batches, interleaved, on one GPU.

    python -m benchmarks.bench_kernels --commit $(git rev-parse HEAD)

For each specification a catalog is built whose buckets just hold the shapes, so that the build chooses their settings
(on its own samples, not on these batches). Each batch is planned once; then podgraph's replay and a captured graph of
each way take turns. A way's result must agree with podgraph's before it is timed. Needs FlashInfer with its modules for
bfloat16 and head dim 128; a way whose module is not there is null, with the reason.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.flashinfer_calls import FlashInferCalls, Way
from benchmarks.gpu_clock import ClockLog, summary
from benchmarks.kernel_shapes import SETS, build_specs, spec_name
from benchmarks.result import write_result
from benchmarks.shapes import ROUNDS, Case, Shape, floor_us, graphed, interleaved
from podgraph import samples
from podgraph.batch import Batch
from podgraph.build import build
from podgraph.dispatch.dispatcher import Dispatcher
from podgraph.dispatch.runtime import open as open_catalog
from podgraph.shapes import AttentionSpec

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "build" / "kernels"
TOLERANCE = 1e-2  # |way - podgraph| / |podgraph|: two results rounded to bfloat16 are 2e-3 to 4e-3 apart
HEAD_DIM = 128  # of FlashInfer's modules; compiling others takes its batch POD half an hour of compiler time
OURS = "podgraph"

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--only", choices=SETS, help="one set of shapes; the result is kernels_SET.json then")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--without", action="append", default=[], metavar="WAY", help="leave a way out; repeatable")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    names = [options.only] if options.only else list(SETS)
    clocks = ClockLog()
    rows: dict[str, Row] = {}
    with torch.no_grad():
        for name, build_spec in build_specs(names).items():
            path = ROOT / "build" / f"bench-{name}.podcat"
            start = time.perf_counter()
            # fresh: settings are chosen by what is measured on this GPU, now
            result = build(build_spec, path, kernels=KERNELS, backend="cuda", fresh=True)
            seconds = {stage: round(value, 1) for stage, value in result.seconds.items()}
            print(f"{name}: built in {time.perf_counter() - start:.1f} s {seconds}", flush=True)
            with open_catalog(path).bind(on_miss="error") as dispatcher:
                for group in names:
                    for spec, shape in SETS[group]:
                        if spec_name(spec) == name:
                            row = {"set": group, **_time(dispatcher, shape, options.rounds, options.without, clocks)}
                            rows[shape.name] = row
                            print(shape.name, json.dumps(row), flush=True)
                            gc.collect()  # FlashInfer's wrappers may refer to one another
                            torch.cuda.empty_cache()
    metrics = {
        "rounds": options.rounds,
        **summarise(rows),
        "clocks": {**summary(clocks.samples), "problem": clocks.problem},
        "shapes": rows,
    }
    written = write_result(
        f"kernels_{options.only}" if options.only else "kernels", options.commit, metrics, "bench_kernels"
    )
    _print_table(rows)
    print(json.dumps({k: v for k, v in metrics.items() if k != "shapes"}, indent=1))
    print(f"wrote {written}")
    if wrong := [f"{name}: {way} {error:.1e}" for name, row in rows.items() for way, error in row["wrong"].items()]:
        sys.exit(f"wrong results, relative to podgraph's: {', '.join(wrong)}")


def _time(dispatcher: Dispatcher, shape: Shape, rounds: int, without: list[str], clocks: ClockLog) -> Row:
    """One shape's row of the result; everything that it allocates is free again afterwards."""
    spec = dispatcher.spec
    case = shape.make(spec)
    (record,) = dispatcher.plan(*case.arrays)
    out = torch.full_like(case.q, math.nan)

    def ours() -> None:
        dispatcher.run(case.q, case.cache, out)

    ours()
    replays, errors, reasons = _flashinfer(case, spec, out, without)
    wrong = {name: error for name, error in errors.items() if error > TOLERANCE}
    if not errors:  # nothing to agree with
        error = _dense_error(case, spec, out)
        errors["dense reference"] = error
        wrong |= {"dense reference": error} if error > TOLERANCE else {}
    timed = {OURS: ours, **{name: replay for name, replay in replays.items() if name not in wrong}}
    us, clock = clocks.watch(lambda: interleaved(timed, rounds))
    floor = floor_us(case, spec)
    return {
        **_compare(us),
        "us": {**us, **dict.fromkeys(reasons), **{way: None for way in wrong if way in replays}},
        "floor_us": floor,
        "over_floor": us[OURS] / floor,
        "variant": record.variant,
        "bucket": str(record.bucket),
        "clocks": clock,
        "errors": errors,
        "wrong": wrong,
        "reasons": reasons,
    }


def _flashinfer(
    case: Case, spec: AttentionSpec, want: torch.Tensor, without: list[str]
) -> tuple[dict[str, Callable[[], Any]], dict[str, float], dict[str, str]]:
    """Replays of the ways that there are, how far their results are from ``want``, and why the others are missing."""
    replays: dict[str, Callable[[], Any]] = {}
    errors: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for name, make in FlashInferCalls(case, spec).ways().items():
        if name in without:
            reasons[name] = "left out on request"
            continue
        if spec.head_dim != HEAD_DIM:
            reasons[name] = f"FlashInfer's modules are compiled for head dim {HEAD_DIM} only"
            continue
        try:
            way = make()
            replay = graphed(way)
        except Exception as e:  # whatever FlashInfer, its loader or the capture raises
            torch.cuda.set_stream(torch.cuda.default_stream())  # a capture that fails leaves its own stream current
            torch.cuda.synchronize()  # raises where the GPU itself is in error: nothing can go on then
            reasons[name] = _first_line(e)
            continue
        replays[name] = replay
        errors[name] = _replayed_error(way, replay, want)
    return replays, errors, reasons


def _replayed_error(way: Way, replay: Callable[[], Any], want: torch.Tensor) -> float:
    """The relative error of what a replay writes: of the graph that is timed, not of the call before it."""
    for block in way.outputs:
        block.fill_(math.nan)
    replay()
    return samples.relative_error(torch.cat(way.outputs), want.float())


def _dense_error(case: Case, spec: AttentionSpec, out: torch.Tensor) -> float:
    batch = Batch.of(*case.arrays, page_size=spec.page_size, max_kv_len=max(case.kv_lens))
    want, _ = samples.reference(batch, spec, samples.Inputs(case.q, case.cache[:, 0], case.cache[:, 1]))
    return samples.relative_error(out, want)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _compare(us: dict[str, float]) -> Row:
    """Speed-ups over FlashInfer's best way and over its batch POD; null where there is none."""
    theirs = {name: value for name, value in us.items() if name != OURS}
    best = min(theirs, key=theirs.__getitem__, default=None)
    return {
        "best": best,
        "vs_best": None if best is None else theirs[best] / us[OURS],
        "vs_batchpod": theirs["batch_pod"] / us[OURS] if "batch_pod" in theirs else None,
    }


def summarise(rows: dict[str, Row]) -> dict[str, Any]:
    """The figures over each set that was timed; shapes that nothing compares with count for the floor only."""
    result: dict[str, Any] = {}
    for group, prefix in (("nine", ""), ("twelve", "further_")):
        some = [row for row in rows.values() if row["set"] == group]
        if not some:
            continue
        vs_best = [row["vs_best"] for row in some if row["vs_best"] is not None]
        result |= {
            f"{prefix}geomean_vs_best": _mean(vs_best),
            f"{prefix}worst_vs_best": min(vs_best, default=None),
            f"{prefix}geomean_vs_batchpod": _mean([r["vs_batchpod"] for r in some if r["vs_batchpod"] is not None]),
            f"{prefix}geomean_vs_floor": _mean([row["over_floor"] for row in some]),
        }
    sides = {name: row for name, row in rows.items() if row["set"] == "sides"}
    prefill = [
        row["us"]["fa3"] / row["us"][OURS]
        for name, row in sides.items()
        if name.startswith("prefill") and row["us"].get("fa3") is not None
    ]
    decode = [r["vs_best"] for name, r in sides.items() if name.startswith("decode") and r["vs_best"] is not None]
    for name, values in (("prefill_vs_fa3", prefill), ("decode_vs_best", decode)) if sides else ():
        result |= {name: _mean(values), f"worst_{name}": min(values, default=None)}
    return result


def _mean(values: list[float]) -> float | None:
    return statistics.geometric_mean(values) if values else None


def _print_table(rows: dict[str, Row]) -> None:
    print(f"{'shape':44} {'variant':14} {'podgraph':>8} {'best':>8} {'by':22} {'x best':>6} {'x POD':>6} {'/floor':>6}")
    for name, row in rows.items():
        theirs = f"{row['us'][row['best']]:8.1f} {row['best']:22}" if row["best"] else f"{'-':>8} {'':22}"
        ratios = (row["vs_best"], row["vs_batchpod"], row["over_floor"])
        figures = " ".join(f"{'-':>6}" if value is None else f"{value:6.2f}" for value in ratios)
        print(f"{name:44} {row['variant']:14} {row['us'][OURS]:8.1f} {theirs} {figures}")


if __name__ == "__main__":
    main()
