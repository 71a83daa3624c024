"""Random batches without end: every kind of specification, compared with float32 and bit for bit with itself.

    python -m benchmarks.stress --seconds 600

A process of its own does the work and says so batch by batch; one that is silent for a minute hangs, and is killed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from podgraph import samples
from podgraph.buckets import BucketSpace
from podgraph.build import build
from podgraph.catalog.model import Record
from podgraph.config import BuildSpec, Workspace
from podgraph.dispatch.dispatcher import Dispatcher
from podgraph.dispatch.runtime import open as open_catalog
from podgraph.shapes import AttentionSpec, Bucket

ROOT = Path(__file__).resolve().parent.parent
SILENCE_S = 60
REPEATS = 3
KV_LENS = (1, 70, 900, 9000)  # a batch's requests have up to as many tokens
BUCKETS = (Bucket(40, 700, 33), Bucket(9, 300, 6), Bucket(33, 0, 33), Bucket(3, 300, 0))
SPECS = {
    "llama3-8b": AttentionSpec(32, 8, 128, 16),
    "group 7, HND, page 64": AttentionSpec(28, 4, 128, 64, kv_layout="HND"),
    "group 5, float16, page 32": AttentionSpec(20, 4, 128, 32, dtype="float16"),
    "group 1, head_dim 64, page 128": AttentionSpec(8, 8, 64, 128),
    "window": AttentionSpec(16, 4, 128, 16, window_left=200),
    "soft cap, window": AttentionSpec(16, 8, 128, 16, logits_soft_cap=30.0, window_left=33),
    "one KV head": AttentionSpec(8, 1, 128, 16),
    "head_dim 256": AttentionSpec(8, 4, 256, 16),
    "fp8 cache": AttentionSpec(8, 2, 128, 16, kv_dtype="float8_e4m3fn", k_scale=0.5, v_scale=2.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _work(options.seconds, options.seed)
        return
    command = [sys.executable, "-m", "benchmarks.stress", "--child", "--seconds", str(options.seconds)]
    child = subprocess.Popen([*command, "--seed", str(options.seed)], stdout=subprocess.PIPE, text=True)
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(child, lines), daemon=True).start()
    last = ""
    while True:
        try:
            # the first line comes after the build
            line = lines.get(timeout=SILENCE_S if last else 10 * SILENCE_S)
        except queue.Empty:
            child.kill()
            sys.exit(f"hangs: nothing for {SILENCE_S} s after {last}")
        if line is None:
            break
        last = line
    if child.wait() != 0:
        sys.exit(f"failed after {last}")
    print(last)


def _read(child: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line.strip())
    lines.put(None)


def _work(seconds: float, seed: int) -> None:
    spec = BuildSpec(
        specs=MappingProxyType(SPECS),
        space=BucketSpace(),  # a build reads the buckets alone
        buckets=BUCKETS,
        dropped=MappingProxyType({}),
        workspace=Workspace(60_000, 20_000),
        backend="cuda",
        source="stress",
    )
    path = ROOT / "build" / "stress.podcat"
    build(spec, path, kernels=ROOT / "build" / "kernels")
    catalog = open_catalog(path)
    dispatchers = {name: catalog.bind(name) for name in SPECS}
    start, batches, worst = time.monotonic(), 0, 0.0
    for round_ in itertools.count(seed):
        for name, dispatcher in dispatchers.items():
            count, error = _round(catalog.content.buckets(name), dispatcher, round_)
            batches, worst = batches + count, max(worst, error)
        facts = {"batches": batches, "seconds": round(time.monotonic() - start, 1), "worst_error": worst}
        print(json.dumps(facts), flush=True)
        if time.monotonic() - start > seconds:
            return


def _round(records: tuple[Record, ...], dispatcher: Dispatcher, seed: int) -> tuple[int, float]:
    """How many batches ran, and their worst relative error; KV lengths and data follow from the seed."""
    count, worst = 0, 0.0
    rng = np.random.default_rng(seed)
    for record in records:
        kv_len = int(rng.choice(KV_LENS))
        batches = samples.sample_batches(record.bucket, dispatcher.spec, kv_len, 60_000, seed, 20_000)
        for name, batch in batches.items():
            inputs = samples.make_inputs(batch, dispatcher.spec, dispatcher.device, seed)
            dispatcher.plan_into(record, batch)
            outs = [
                dispatcher.run(inputs.q, (inputs.k, inputs.v), torch.full_like(inputs.q, math.nan))
                for _ in range(REPEATS)
            ]
            want, _ = samples.reference(batch, dispatcher.spec, inputs)
            rounded, _ = samples.reference(batch, dispatcher.spec, inputs, round_to=inputs.q.dtype)
            error = samples.relative_error(outs[0], want)
            if error > 2 * samples.relative_error(rounded, want) + 1e-6:
                raise AssertionError(f"{dispatcher.spec} {record} {name} seed {seed} kv {kv_len}: error {error}")
            if not all(torch.equal(outs[0].view(torch.int16), out.view(torch.int16)) for out in outs):
                raise AssertionError(f"{dispatcher.spec} {record} {name} seed {seed} kv {kv_len}: bits differ")
            count, worst = count + 1, max(worst, error)
    return count, worst


if __name__ == "__main__":
    main()
