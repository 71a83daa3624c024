"""What planning one step costs the host, in numpy: check the arrays, plan into a bucket, pack the work list. No GPU.

    python -m benchmarks.bench_host_plan --commit $(git rev-parse HEAD)

Without the copy to the GPU, and without the choice of the bucket.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.result import write_cpu_result
from podgraph.batch import Batch
from podgraph.config import BuildSpec, load_config
from podgraph.planner import Layout, Policy, plan, preferred_setting
from podgraph.planner.policy import SM90, Kernels

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "llama3-8b"
BATCHES = {"8 decodes": [1] * 8, "64 decodes": [1] * 64, "2x512 rows and 64 decodes": [512, 512, *[1] * 64]}
FAMILIES: tuple[Kernels, ...] = ("sm90", "flashinfer")
SM_COUNT = 132
ROUNDS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    config = load_config(ROOT / "configs" / f"{CONFIG}.yaml")
    metrics = {kernels: {name: _ms(config, kernels, rows) for name, rows in BATCHES.items()} for kernels in FAMILIES}
    print(metrics)
    path = write_cpu_result("host_plan", options.commit, {"config": CONFIG, "ms": metrics}, "bench_host_plan")
    print(f"wrote {path}")


def _ms(config: BuildSpec, kernels: Kernels, rows: list[int]) -> float:
    """Median milliseconds of a step of so many query rows by request, on 500 to 8,000 tokens each."""
    spec, policy = config.specs[CONFIG], Policy.for_sms(SM_COUNT, kernels)
    layout = Layout.of(spec, config.buckets, policy)
    step, rng = np.zeros(layout.step_bytes // 4, np.int32), np.random.default_rng(0)
    kv = np.array(rows) + rng.integers(500, 8000, len(rows))
    pages = -(-kv // spec.page_size)
    indptr = [np.concatenate([[0], np.cumsum(lengths)]) for lengths in (rows, pages)]
    arrays: list[Any] = [*indptr, rng.permutation(int(pages.sum())), (kv - 1) % spec.page_size + 1]
    limits = {"page_size": spec.page_size, "max_kv_len": config.workspace.max_kv_len}
    demand = Batch.of(*arrays, **limits).demand(spec)
    bucket = min((b for b in config.buckets if b.fits(demand)), key=lambda b: b.rows(spec))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        batch = Batch.of(*arrays, **limits)
        variant = SM90 + preferred_setting(batch, spec) if kernels == "sm90" else ""
        plan(batch, bucket, spec, policy, variant).pack(layout, step)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


if __name__ == "__main__":
    main()
