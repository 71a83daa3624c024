"""What one step of a model costs on this GPU, piece by piece: the measurements behind ``configs/devices/*.yaml``.

    python -m benchmarks.bench_device --commit $(git rev-parse HEAD)

Matrix products of Llama 3 8B's layers at many row counts (a staircase, not a line), what stands between them, what
launching a graph costs, and what the host needs for a step without one.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.result import write_result
from benchmarks.shapes import graphed

# (inputs, outputs) of Llama 3 8B: q, k and v; the output projection; gate and up; down; the logits
PRODUCTS = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
LOGITS = (4096, 128256)
HIDDEN, INTERMEDIATE, LAYERS = 4096, 14336, 32
ROWS = sorted({1, 2, 4, *range(8, 513, 8), *range(512, 2049, 32), *(n + 1 for n in range(64, 2048, 128)), 4096})
L2_BYTES = 128 << 20  # more than any L2: weights must come from memory, as in a model of many layers
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    with torch.no_grad():
        metrics: dict[str, Any] = {
            "rows": ROWS,
            "products": {name: _products(shape, ROWS) for name, shape in PRODUCTS.items()},
            "product_shapes": PRODUCTS,
            "logits": dict(zip(map(str, LOGIT_ROWS), _products(LOGITS, LOGIT_ROWS), strict=True)),
            "elementwise_us": {str(rows): _elementwise(rows) for rows in (1, 64, 512, 2048)},
            "copy_bytes_per_s": _copy_rate(),
            "graph": _graphs(),
            "eager": _eager(),
        }
    for name, times in metrics["products"].items():
        print(name, [f"{rows}: {us:.1f}" for rows, us in zip(ROWS, times, strict=True) if rows in LOGIT_ROWS])
    print({name: metrics[name] for name in ("logits", "elementwise_us", "copy_bytes_per_s", "graph", "eager")})
    print(f"wrote {write_result('device', options.commit, metrics, 'bench_device')}")


LOGIT_ROWS = [1, 8, 64, 128, 256, 512]


def _seconds(run: Callable[[], Any], times: int = 1) -> float:
    """Median seconds of a call on the GPU, of ``times`` things that it does."""
    marks = []
    run()
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in marks)) / 1e3 / times


def _products(shape: tuple[int, int], rows: list[int]) -> list[float]:
    """Microseconds of ``[rows, inputs] x [inputs, outputs]`` in bfloat16, one after the other in one graph."""
    inputs, outputs = shape
    copies = max(2, -(-L2_BYTES // (inputs * outputs * 2)))
    weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    times = []
    for n in rows:
        x = torch.randn(n, inputs, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(n, outputs, device="cuda", dtype=torch.bfloat16)
        turns = [weights[i % copies] for i in range(max(8, copies))]

        def run(x: torch.Tensor = x, out: torch.Tensor = out, turns: list[torch.Tensor] = turns) -> None:
            for weight in turns:
                torch.mm(x, weight.T, out=out)

        times.append(_seconds(graphed(run), len(turns)) * 1e6)
    return times


def _elementwise(rows: int) -> float:
    """Microseconds of what stands between the products of one layer: two norms with residuals, rotation, activation."""
    x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    residual, norm = torch.randn_like(x), torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    qk = torch.randn(rows, 5120, device="cuda", dtype=torch.bfloat16)
    gate_up = torch.randn(rows, 2 * INTERMEDIATE, device="cuda", dtype=torch.bfloat16)

    def layer() -> None:
        for _ in range(2):
            torch.nn.functional.rms_norm(x + residual, (HIDDEN,), norm)
        qk.mul(2)  # as many bytes as a rotation moves
        torch.nn.functional.silu(gate_up[:, :INTERMEDIATE])

    def layers() -> None:
        for _ in range(8):
            layer()

    return _seconds(graphed(layers), 8) * 1e6


def _copy_rate() -> float:
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source))


def _graphs() -> dict[str, float]:
    """A graph of many tiny kernels: what each adds, what its launch costs the host, and what is left over."""
    x = torch.zeros(1, device="cuda")
    counts = (32, 512)
    replays = {n: graphed(lambda n=n: [x.add_(1) for _ in range(n)]) for n in counts}  # type: ignore[misc]
    device = {n: _seconds(replay) * 1e6 for n, replay in replays.items()}
    per_kernel = (device[512] - device[32]) / (512 - 32)
    host = []
    for _ in range(50):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        replays[512]()
        host.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return {
        "kernel_us": per_kernel,
        "fixed_us": device[32] - 32 * per_kernel,
        "launch_host_us": statistics.median(host) * 1e6,
    }


def _eager() -> dict[str, float]:
    """Host microseconds to enqueue one layer without attention (7 kernels and views), and FlashInfer's plan and run."""
    x = torch.randn(8, HIDDEN, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    weights = {n: torch.randn(out, inp, device="cuda", dtype=torch.bfloat16) for n, (inp, out) in PRODUCTS.items()}

    def layer(x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.rms_norm(x, (HIDDEN,), norm)
        q = torch.mm(y, weights["qkv"].T)[:, :HIDDEN]
        q = torch.mm(q.mul(2), weights["o"].T)
        y = torch.nn.functional.rms_norm(x + q, (HIDDEN,), norm)
        gate_up = torch.mm(y, weights["gate_up"].T)
        y = torch.nn.functional.silu(gate_up[:, :INTERMEDIATE]) * gate_up[:, INTERMEDIATE:]
        return torch.mm(y, weights["down"].T)

    host = []
    for _ in range(20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(LAYERS):
            layer(x)
        host.append((time.perf_counter() - begin) / LAYERS)
    torch.cuda.synchronize()
    return {"layer_host_us": statistics.median(host) * 1e6, **_flashinfer_host()}


def _flashinfer_host() -> dict[str, float]:
    """Host microseconds of FlashInfer's eager batch POD on 2 prefills of 256 rows and 64 decodes."""
    import flashinfer

    prefill, decode = [256, 256], [1] * 64
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(torch.empty(256 << 20, dtype=torch.uint8, device="cuda"))
    sides = []
    for rows, kv in ((prefill, 2048), (decode, 2048)):
        pages = kv // 16
        qo = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32, device="cuda")
        indptr = torch.arange(len(rows) + 1, dtype=torch.int32, device="cuda") * pages
        indices = torch.arange(len(rows) * pages, dtype=torch.int32, device="cuda")
        sides += [qo, indptr, indices, torch.full((len(rows),), 16, dtype=torch.int32, device="cuda")]
    q_p, q_d = (torch.randn(sum(r), 32, 128, device="cuda", dtype=torch.bfloat16) for r in (prefill, decode))
    cache = torch.randn(64 * 128, 2, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    pair = (cache[:, 0], cache[:, 1])
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    plans, runs = [], []
    for _ in range(30):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        wrapper.plan(*sides, 32, 8, 128, 16, **dtypes)
        middle = time.perf_counter()
        wrapper.run(q_p, pair, q_d, pair, causal_p=True)
        plans.append(middle - begin)
        runs.append(time.perf_counter() - middle)
    torch.cuda.synchronize()
    return {"plan_host_us": statistics.median(plans) * 1e6, "run_host_us": statistics.median(runs) * 1e6}


if __name__ == "__main__":
    main()
