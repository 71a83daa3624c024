"""Batches to time, FlashInfer's ways to compute them, and how both are timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from podgraph.shapes import AttentionSpec, Bucket

ROUNDS = 20
BALLAST = 8192
BYTES_PER_S, FLOPS_PER_S = 4.3e12, 780e12  # measured on an H200: device-to-device copy, bf16 matrix product


@dataclass(frozen=True)
class Case:
    """One batch with its tensors: prefills first, then decodes."""

    qo_lens: list[int]
    kv_lens: list[int]
    prefills: int
    arrays: tuple[np.ndarray[Any, Any], ...]
    q: torch.Tensor
    cache: torch.Tensor


@dataclass(frozen=True)
class Shape:
    """Prefills as (rows, kv) and decodes by their kv."""

    name: str
    prefills: list[tuple[int, int]]
    decodes: list[int]

    @property
    def qo_lens(self) -> list[int]:
        return [rows for rows, _ in self.prefills] + [1] * len(self.decodes)

    @property
    def kv_lens(self) -> list[int]:
        return [kv for _, kv in self.prefills] + self.decodes

    @property
    def bucket(self) -> Bucket:
        """The smallest bucket that holds the batch."""
        return Bucket(len(self.qo_lens), sum(rows for rows, _ in self.prefills), len(self.decodes))

    def pages(self, spec: AttentionSpec) -> list[int]:
        """KV pages of each request."""
        return [-(-kv // spec.page_size) for kv in self.kv_lens]

    def arrays(self, spec: AttentionSpec) -> tuple[np.ndarray[Any, Any], ...]:
        """What `Dispatcher.plan` takes, the pages in random order."""
        pages = self.pages(spec)
        indices = np.random.default_rng(7).permutation(sum(pages)).astype(np.int32)
        last = np.array([(kv - 1) % spec.page_size + 1 for kv in self.kv_lens], np.int32)
        return _indptr(self.qo_lens), _indptr(pages), indices, last

    def make(self, spec: AttentionSpec) -> Case:
        q = torch.randn(sum(self.qo_lens), spec.num_qo_heads, spec.head_dim, device="cuda").to(torch.bfloat16)
        pages = sum(self.pages(spec))
        cache = torch.empty(
            pages, 2, spec.page_size, spec.num_kv_heads, spec.head_dim, dtype=torch.bfloat16, device="cuda"
        ).normal_()
        return Case(self.qo_lens, self.kv_lens, len(self.prefills), self.arrays(spec), q, cache)


SHAPES = [
    Shape("512@4k+32x4k", [(512, 4096)], [4096] * 32),
    Shape("1024@12k+64x12k", [(1024, 12288)], [12288] * 64),
    Shape("2x512@2k+64x2k", [(512, 2048)] * 2, [2048] * 64),
    Shape("512@8k+64x8k", [(512, 8192)], [8192] * 64),
    Shape("1024@16k+60x16k", [(1024, 16384)], [16384] * 60),
    Shape("256@1k+16x1k", [(256, 1024)], [1024] * 16),
    Shape("ragged", [(512, 2048), (100, 700)], [(i * 977) % 6000 + 50 for i in range(64)]),
    Shape("prefill 1024@4k", [(1024, 4096)], []),
    Shape("decode 64x4k", [], [4096] * 64),
]


def floor_us(case: Case | Shape, spec: AttentionSpec) -> float:
    """The larger of bytes over bandwidth and operations over rate, in microseconds."""
    row = spec.head_dim * spec.bytes_per_element
    moved = sum(case.kv_lens) * 2 * spec.num_kv_heads * row + 2 * sum(case.qo_lens) * spec.num_qo_heads * row
    pairs = sum(q * (kv - q) + q * (q + 1) / 2 for q, kv in zip(case.qo_lens, case.kv_lens, strict=True))
    return max(moved / BYTES_PER_S, 4 * spec.num_qo_heads * spec.head_dim * pairs / FLOPS_PER_S) * 1e6


def flashinfer_ways(case: Case, spec: AttentionSpec) -> dict[str, Callable[[], Any]]:
    """FlashInfer's batch POD where the batch has both sides, else its paged prefill, as captured graphs."""
    import flashinfer

    arrays = [torch.from_numpy(np.ascontiguousarray(a, np.int32)).cuda() for a in case.arrays]
    qo, kv, indices, last = arrays
    pair = (case.cache[:, 0], case.cache[:, 1])
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    n, rows = case.prefills, sum(case.qo_lens[: case.prefills])
    dims = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, spec.page_size)
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    if 0 < n < len(case.qo_lens):
        wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace, spec.kv_layout)
        split = int(kv[n])
        wrapper.plan(
            qo[: n + 1], kv[: n + 1], indices[:split], last[:n],
            qo[n:] - qo[n], kv[n:] - split, indices[split:], last[n:], *dims, **dtypes,
        )  # fmt: skip
        q_p, q_d = case.q[:rows], case.q[rows:]
        return {"batch_pod": graphed(lambda: wrapper.run(q_p, pair, q_d, pair, causal_p=True, enable_pdl=False))}
    out = torch.empty_like(case.q)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, spec.kv_layout, backend="fa2")
    wrapper.plan(qo, kv, indices, last, *dims, causal=n > 0, **dtypes)
    return {"batch_pod": graphed(lambda: wrapper.run(case.q, pair, out=out, enable_pdl=False))}


def graphed(run: Callable[[], Any]) -> Callable[[], Any]:
    """The call captured by torch, as a replay that keeps alive what the call holds (workspaces, plans)."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay(keep: Any = run) -> None:
        graph.replay()

    return replay


def interleaved(ways: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, float]:
    """Median microseconds of each way, taken in turn; the GPU is kept busy while the host enqueues.

    Each round starts with another way: none is always the one behind the ballast, or behind the same neighbour's heat.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    ballast = torch.ones(BALLAST, BALLAST, dtype=torch.bfloat16, device="cuda")
    for run in ways.values():
        run()
    order = list(ways)
    for turn in range(rounds):
        marks = []
        torch.mm(ballast, ballast)
        first = turn % len(order)
        for name in order[first:] + order[:first]:
            run = ways[name]
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            run()
            end.record()
            marks.append((name, start, end))
        torch.cuda.synchronize()
        for name, start, end in marks:
            times[name].append(start.elapsed_time(end) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def _indptr(lengths: list[int]) -> np.ndarray[Any, Any]:
    return np.cumsum([0, *lengths]).astype(np.int32)
