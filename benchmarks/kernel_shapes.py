"""The batches that `bench_kernels` times, and the catalogs that it builds for them. Needs no GPU.

Three sets: ``nine`` of one specification, which the kernel was designed on; ``twelve`` further ones over other heads,
head dims and page sizes, which it was not; ``sides`` that only prefill or only decode.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from benchmarks.shapes import Shape
from podgraph.buckets import BucketSpace
from podgraph.config import BuildSpec, Workspace
from podgraph.shapes import AttentionSpec

MAIN = AttentionSpec(32, 8, 128, 16)
K = 1024


def _further(spec: AttentionSpec, name: str, prefills: list[tuple[int, int]], decodes: list[int]) -> Shape:
    """A shape whose name says the specification too. No slash: results are looked up by paths."""
    heads = f"{spec.num_qo_heads}-{spec.num_kv_heads} d{spec.head_dim} p{spec.page_size}"
    return Shape(f"{heads} {name}", prefills, decodes)


NINE = [
    Shape("512@4k+32x4k", [(512, 4 * K)], [4 * K] * 32),
    Shape("1024@12k+80x12k", [(1024, 12 * K)], [12 * K] * 80),
    Shape("2x2048@2k+128x2k", [(2048, 2 * K)] * 2, [2 * K] * 128),
    Shape("512@8k+64x8k", [(512, 8 * K)], [8 * K] * 64),
    Shape("2048@16k+60x16k", [(2048, 16 * K)], [16 * K] * 60),
    Shape("256@1k+16x1k", [(256, K)], [K] * 16),
    Shape("ragged", [(700, 4096), (300, 9000), (1500, 1500)], [(i * 977) % 9000 + 50 for i in range(100)]),
    Shape("128@8k+128x4k", [(128, 8 * K)], [4 * K] * 128),
    Shape("4096@4k+32x4k", [(4096, 4 * K)], [4 * K] * 32),
]

_FURTHER: list[tuple[AttentionSpec, str, list[tuple[int, int]], list[int]]] = [
    (AttentionSpec(16, 4, 128, 16), "8192@8k+1x8k", [(8192, 8 * K)], [8 * K]),
    (AttentionSpec(16, 4, 128, 16), "64@2k+256x2k", [(64, 2 * K)], [2 * K] * 256),
    (AttentionSpec(28, 4, 128, 16), "512@4k+48x4k", [(512, 4 * K)], [4 * K] * 48),
    (AttentionSpec(28, 4, 128, 16), "2048@2k+16x8k", [(2048, 2 * K)], [8 * K] * 16),
    (AttentionSpec(40, 8, 128, 32), "1024@8k+64x8k", [(1024, 8 * K)], [8 * K] * 64),
    (AttentionSpec(40, 8, 128, 32), "256@2k+8x2k", [(256, 2 * K)], [2 * K] * 8),
    (AttentionSpec(64, 8, 128, 64), "512@4k+32x4k", [(512, 4 * K)], [4 * K] * 32),
    (AttentionSpec(64, 8, 128, 64), "4x512@2k+96x3k", [(512, 2 * K)] * 4, [3 * K] * 96),
    (AttentionSpec(32, 32, 128, 16), "512@2k+32x2k", [(512, 2 * K)], [2 * K] * 32),
    (AttentionSpec(32, 32, 128, 16), "1024@4k+8x4k", [(1024, 4 * K)], [4 * K] * 8),
    (AttentionSpec(32, 8, 64, 16), "512@4k+64x4k", [(512, 4 * K)], [4 * K] * 64),
    # one long request among short ones: whole requests are no fair shares of work any more
    (MAIN, "skew 512@2k+1x100k+64xshort", [(512, 2 * K)], [100 * K] + [300 + (i * 61) % 600 for i in range(64)]),
]

SIDES = [
    Shape("prefill 512@4k", [(512, 4 * K)], []),
    Shape("prefill 4096@4k", [(4096, 4 * K)], []),
    Shape("prefill 2048@16k", [(2048, 16 * K)], []),
    Shape("decode 32x4k", [], [4 * K] * 32),
    Shape("decode 128x2k", [], [2 * K] * 128),
    Shape("decode ragged", [], [(i * 977) % 9000 + 50 for i in range(64)]),
]

SETS: dict[str, list[tuple[AttentionSpec, Shape]]] = {
    "nine": [(MAIN, shape) for shape in NINE],
    "twelve": [(spec, _further(spec, *rest)) for spec, *rest in _FURTHER],  # type: ignore[arg-type]
    "sides": [(MAIN, shape) for shape in SIDES],
}


def spec_name(spec: AttentionSpec) -> str:
    return f"{spec.num_qo_heads}-{spec.num_kv_heads}-d{spec.head_dim}-p{spec.page_size}"


def build_specs(sets: Iterable[str] = tuple(SETS)) -> dict[str, BuildSpec]:
    """One build for each specification, with a bucket that just holds each of its shapes, by `spec_name`.

    Args:
        sets: of `SETS`; all of them unless given.
    """
    shapes: dict[AttentionSpec, list[Shape]] = {}
    for name in sets:
        for spec, shape in SETS[name]:
            shapes.setdefault(spec, []).append(shape)
    return {
        spec_name(spec): BuildSpec(
            specs=MappingProxyType({spec_name(spec): spec}),
            space=BucketSpace(),
            buckets=tuple(sorted({shape.bucket for shape in some}, reverse=True)),
            dropped=MappingProxyType({}),
            workspace=Workspace(
                max_pages=max(sum(shape.pages(spec)) for shape in some),
                max_kv_len=max(kv for shape in some for kv in shape.kv_lens),
            ),
            backend="cuda",
            source="benchmarks/kernel_shapes.py",
        )
        for spec, some in shapes.items()
    }
