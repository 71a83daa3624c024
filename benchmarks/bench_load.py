"""How fast a serving process is ready: podgraph's file against capturing the same buckets anew with FlashInfer.

    python -m benchmarks.bench_load --commit $(git rev-parse HEAD)

Three fresh processes each way, medians. The clock starts when torch and the CUDA context are ready. Every bucket gets a
graph of its own here, as a captured one is; podgraph's would share one of each template.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.result import write_result
from podgraph.build import build
from podgraph.config import load_config

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "benchmarks" / "llama3-8b-200.yaml"
CATALOG = ROOT / "build" / "llama3-8b-200.podcat"
PROCESSES = 3

READY = """
import json, sys, time
import torch
torch.zeros(1, device="cuda"); torch.cuda.synchronize()
free = lambda: (torch.cuda.synchronize(), torch.cuda.mem_get_info()[0])[1]
start = time.perf_counter()
"""

SERVE = (
    READY
    + """
sys.modules["flashinfer"] = None
import podgraph
catalog = podgraph.open(sys.argv[1])
dispatcher = catalog.bind()
spec = dispatcher.spec
bf16 = dict(device="cuda", dtype=torch.bfloat16)
q = torch.empty(3, spec.num_qo_heads, spec.head_dim, **bf16).normal_()
cache = torch.empty(8, 2, spec.page_size, spec.num_kv_heads, spec.head_dim, **bf16).normal_()
dispatcher.plan([0, 2, 3], [0, 1, 3], [5, 0, 7], [2, 9])
out = dispatcher.run(q, cache)
torch.cuda.synchronize()
first = time.perf_counter() - start
before, begin = free(), time.perf_counter()
dispatcher.dedicate()
torch.cuda.synchronize()
ready = first + time.perf_counter() - begin
records = catalog.content.records
from podgraph import samples
from podgraph.batch import Batch
batch = Batch.of([0, 2, 3], [0, 1, 3], [5, 0, 7], [2, 9], page_size=16, max_kv_len=1000)
want, _ = samples.reference(batch, spec, samples.Inputs(q, cache[:, 0], cache[:, 1]))
assert samples.relative_error(out, want) < 6e-3, "the first replay is wrong"
print(json.dumps({
    "first_ms": first * 1e3,
    "ready_ms": ready * 1e3,
    "dedicated_bytes": (before - free()) / len(records),
}))
"""
)

RECAPTURE = (
    READY
    + """
import numpy as np
import flashinfer
import podgraph
from podgraph import samples
content = podgraph.open(sys.argv[1]).content
(entry,) = content.specs.values()
spec = entry.attention
bf16 = dict(device="cuda", dtype=torch.bfloat16)
workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
cache = torch.empty(20_000, 2, spec.page_size, spec.num_kv_heads, spec.head_dim, device="cuda", dtype=torch.bfloat16)
pair = (cache[:, 0], cache[:, 1])
tensor = lambda a: torch.from_numpy(np.ascontiguousarray(a, np.int32)).cuda()
dims = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, spec.page_size)
dtypes = dict(q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
kept, warm = [], None
for record in content.records:
    b = record.bucket
    slots = b.prefill_slots
    rows = [b.prefill_len // slots + (i < b.prefill_len % slots) for i in range(slots)] if slots else []
    sides = []
    for lengths in (rows, [1] * b.decode_count):
        pages = [max(1, -(-n // spec.page_size)) for n in lengths]
        sides.append([tensor(np.cumsum([0, *lengths])), tensor(np.cumsum([0, *pages])), tensor(np.arange(sum(pages))),
                      tensor(np.full(len(lengths), spec.page_size))])
    if b.family == "mixed":
        wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace, spec.kv_layout)
        q_p, q_d = (torch.zeros(n, dims[0], dims[2], **bf16) for n in (b.prefill_len, b.decode_count))
        wrapper.plan(*sides[0], *sides[1], *dims, **dtypes)
        run = lambda w=wrapper, q_p=q_p, q_d=q_d: w.run(q_p, pair, q_d, pair, causal_p=True, enable_pdl=False)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, spec.kv_layout, backend="fa2")
        q = torch.zeros(b.prefill_len + b.decode_count, dims[0], dims[2], **bf16)
        out = torch.empty_like(q)
        wrapper.plan(*sides[b.family == "decode"], *dims, causal=b.family == "prefill", **dtypes)
        run = lambda w=wrapper, q=q, out=out: w.run(q, pair, out=out, enable_pdl=False)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    kept.append((graph, run))
    warm = warm or time.perf_counter()
torch.cuda.synchronize()
end = time.perf_counter()
print(json.dumps({"ready_ms": (end - start) * 1e3, "warm_ms": (end - warm) * 1e3}))
"""
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    start = time.perf_counter()
    result = build(load_config(CONFIG), CATALOG, kernels=ROOT / "build" / "kernels", backend="cuda", fresh=True)
    build_seconds = time.perf_counter() - start - result.seconds["compile"]
    # one process more each, not counted: it writes the bytecode that an installed package comes with
    ours, theirs = ([_process(script) for _ in range(PROCESSES + 1)][1:] for script in (SERVE, RECAPTURE))
    first, ready, dedicated = (_median(ours, key) for key in ("first_ms", "ready_ms", "dedicated_bytes"))
    recapture, warm = _median(theirs, "ready_ms"), _median(theirs, "warm_ms")
    buckets = len(result.catalog.records)
    metrics: dict[str, Any] = {
        "buckets": buckets,
        "first_replay_ms": first,
        "all_ready_ms": ready,
        "recapture_all_ready_ms": recapture,
        "ratio_all_ready": recapture / ready,
        "ratio_warm_capture_only": warm / (ready - first),
        "bytes_per_bucket_dedicated": dedicated,
        "bytes_per_bucket_shared": dedicated * len(result.catalog.replayed) / buckets,
        "build_seconds": build_seconds,
        "catalog_bytes": result.catalog_bytes,
        "processes": {"podgraph": ours, "recapture": theirs},
    }
    path = write_result("load", options.commit, metrics, module="bench_load")
    print(json.dumps({k: v for k, v in metrics.items() if k != "processes"}, indent=1))
    print(f"wrote {path}")


def _process(script: str) -> dict[str, float]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", script, str(CATALOG)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    facts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return facts


def _median(facts: list[dict[str, float]], key: str) -> float:
    return statistics.median(f[key] for f in facts)


if __name__ == "__main__":
    main()
