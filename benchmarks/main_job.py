"""The main job from end to end on a GPU: build, verify in a fresh process, replay a real trace; kernels side by side.

python -m benchmarks.main_job --commit $(git rev-parse HEAD)
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.result import write_result
from benchmarks.shapes import SHAPES, Shape, flashinfer_ways, floor_us, interleaved
from podgraph.build import build
from podgraph.config import load_config
from podgraph.dispatch.runtime import open as open_catalog
from podgraph.replay import describe, replay_trace
from podgraph.workload.requests import Trace, at_rate

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "build" / "kernels"
# FlashInfer's own module is compared with where the specification is the one that its module is commonly built for
CATALOGS = {"quickstart": True, "llama3-8b": True, "llama2-7b": False, "hybrid-window": False, "head64-page1": False}
TRACE = ROOT / "tests" / "data" / "azure_conv_slice.csv"

# A process that only serves: what it takes from nothing to the first correct replay.
SERVE = """
import json, sys, time
sys.modules["flashinfer"] = None
import torch
torch.zeros(1, device="cuda"); torch.cuda.synchronize()
start = time.perf_counter()
import podgraph
catalog = podgraph.open(sys.argv[1])
opened = time.perf_counter()
dispatcher = catalog.bind(next(iter(catalog.content.specs)))
spec = dispatcher.spec
bound = time.perf_counter()
dtype = getattr(torch, spec.dtype)
q = torch.randn(2, spec.num_qo_heads, spec.head_dim, device="cuda").to(dtype)
cache = torch.randn(8, 2, spec.page_size, spec.num_kv_heads, spec.head_dim, device="cuda").to(dtype)
torch.cuda.synchronize()
ready = time.perf_counter()
dispatcher.plan([0, 1, 2], [0, 1, 3], [5, 0, 7], [1, 1])
dispatcher.run(q, cache)
torch.cuda.synchronize()
end = time.perf_counter()
seconds = {"open_ms": opened - start, "bind_ms": bound - opened, "first_replay_ms": end - ready}
print(json.dumps({name: value * 1e3 for name, value in seconds.items()}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--steps", type=int, default=300, help="steps of the trace to replay")
    options = parser.parse_args()
    metrics: dict[str, Any] = {"catalogs": {}}
    for name, compare in CATALOGS.items():
        metrics["catalogs"][name] = _catalog(name, compare, options.steps)
    metrics["kernels"] = _kernels(ROOT / "build" / "llama3-8b.podcat")
    path = write_result("main_job", options.commit, metrics)
    print(f"wrote {path}")


def _catalog(name: str, compare: bool, steps: int) -> dict[str, Any]:
    path = ROOT / "build" / f"{name}.podcat"
    start = time.perf_counter()
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    result = build(config, path, kernels=KERNELS, backend="cuda", fresh=True, compare_flashinfer=compare)
    build_seconds = time.perf_counter() - start
    catalog = open_catalog(path)
    trace = azure_slice(40)
    reports = {spec: describe(replay_trace(catalog, trace, spec=spec, limit=steps)) for spec in result.catalog.specs}
    served = [json.loads(_serve(path)) for _ in range(3)]
    facts = {
        "buckets": len(result.catalog.records),
        "templates": len(result.catalog.replayed),
        "variants": dict(collections.Counter(r.variant for r in result.catalog.records)),
        "catalog_bytes": result.catalog_bytes,
        "build_seconds": build_seconds,
        "stage_seconds": result.seconds,
        "max_error": max(r.max_error for r in result.catalog.records),
        "fresh_process_ms": {key: statistics.median(s[key] for s in served) for key in served[0]},
        "replay": reports,
    }
    print(
        f"{name}: {facts['buckets']} buckets in {facts['templates']} graphs, {facts['catalog_bytes']:,} bytes, "
        f"built and verified in {build_seconds:.1f} s, worst error {facts['max_error']:.1e}; fresh process "
        f"{facts['fresh_process_ms']}; {facts['variants']}"
    )
    for spec, report in reports.items():
        print(
            f"  {spec}: {report['steps']} steps of {report['requests']} requests replayed, "
            f"{sum(report['splits'].values())} split, worst error {report['worst_error']:.1e}"
        )
        assert report["failures"] == 0
    return facts


def azure_slice(rate: float) -> Trace:
    """The slice's requests, so many a second, at random: what a GPU machine needs no data frame library for."""
    lengths = np.loadtxt(TRACE, np.int64, delimiter=",", skiprows=1, usecols=(1, 2))
    arrivals = np.zeros(len(lengths))
    return at_rate(Trace(arrivals, lengths[:, 0].copy(), lengths[:, 1].copy(), TRACE.name, 0, has_arrivals=False), rate)


def _serve(path: Path) -> str:
    done = subprocess.run([sys.executable, "-c", SERVE, str(path)], capture_output=True, text=True, check=True)
    return done.stdout


def _kernels(path: Path) -> dict[str, Any]:
    """The catalog's graphs beside FlashInfer's batch POD with its own eager plan, both as graph replays."""
    rows: dict[str, Any] = {}
    catalog = open_catalog(path)
    for shape in SHAPES:
        torch.cuda.empty_cache()
        rows[shape.name] = _compare(catalog, shape)
        print(shape.name, json.dumps(rows[shape.name]), flush=True)
    return rows


def _compare(catalog: Any, shape: Shape) -> dict[str, float]:
    with catalog.bind() as dispatcher:
        case = shape.make(dispatcher.spec)
        parts = dispatcher.plan(*case.arrays)
        out = torch.empty_like(case.q)
        ways = {"podgraph": lambda: dispatcher.run(case.q, case.cache, out), **flashinfer_ways(case, dispatcher.spec)}
        times = interleaved(ways)
    return {
        **{f"{name}_us": value for name, value in times.items()},
        "replays": len(parts),
        "floor_us": floor_us(case, dispatcher.spec),
        "ratio_vs_batch_pod": times["batch_pod"] / times["podgraph"],
    }


if __name__ == "__main__":
    main()
