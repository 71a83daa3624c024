"""Everything that podgraph knows of FlashInfer: its headers, its tiles, and its eager result to compare with."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podgraph.errors import CompileError
from podgraph.planner.policy import CTAS_PER_SM, prefill_tile
from podgraph.providers.nvcc import Source
from podgraph.shapes import DECODE_TILE, AttentionSpec, Bucket

if TYPE_CHECKING:
    import torch

    from podgraph.batch import Batch

VERSION = "0.7.2.post1"
C_TYPES = {"bfloat16": "nv_bfloat16", "float16": "half", "float8_e4m3fn": "__nv_fp8_e4m3"}

# Shared memory of one SM in bytes (CUDA C++ programming guide, technical specifications per compute capability).
SM_SHARED_BYTES = {"sm_80": 167936, "sm_90a": 233472}


@dataclass(frozen=True)
class PodVariant:
    """Which of a specification's kernels a bucket needs.

    Attributes:
        prefill_tile: packed rows of a prefill tile: 16, 64 or 128; 0 where there is no prefill.
        decode_tile: 16, or 0 where there is no decode.
    """

    prefill_tile: int
    decode_tile: int

    @classmethod
    def of(cls, bucket: Bucket, spec: AttentionSpec) -> PodVariant:
        return cls(prefill_tile(bucket, spec), DECODE_TILE if bucket.decode_count else 0)

    @property
    def name(self) -> str:
        return f"pod_flashinfer_p{self.prefill_tile}_d{self.decode_tile}"


def header_folder() -> Path:
    """FlashInfer's header folder, found without importing FlashInfer.

    Raises:
        CompileError: FlashInfer is missing, or of another version than the pinned one.
    """
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or not spec.submodule_search_locations:
        raise CompileError(f"FlashInfer's headers are needed to compile: pip install flashinfer-python=={VERSION}")
    try:
        version = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    if version != VERSION:
        raise CompileError(f"flashinfer-python: got {version}, allowed: {VERSION} (its kernels are reached by name)")
    folder = Path(spec.submodule_search_locations[0]) / "data" / "include"
    if not (folder / "flashinfer" / "attention" / "prefill.cuh").is_file():
        raise CompileError(f"{folder}: FlashInfer's headers are missing: reinstall flashinfer-python=={VERSION}")
    return folder


def pod_source(spec: AttentionSpec, variant: PodVariant, arch: str) -> Source:
    """The attention kernel of a variant: kernels/pod_flashinfer.cu with the spec's constants."""
    return Source(
        file="pod_flashinfer.cu",
        defines=(
            *_type_defines(spec),
            ("PODGRAPH_KV_DTYPE", C_TYPES[spec.kv_dtype]),
            ("PODGRAPH_GROUP_SIZE", spec.group_size),
            ("PODGRAPH_PAGE_SIZE", spec.page_size),
            ("PODGRAPH_WINDOW", int(spec.window_left >= 0)),
            ("PODGRAPH_SOFT_CAP", int(spec.logits_soft_cap > 0)),
            ("PODGRAPH_DECODE_ROWS", spec.decode_rows),
            ("PODGRAPH_TILE_P", variant.prefill_tile),
            ("PODGRAPH_TILE_D", variant.decode_tile),
            ("PODGRAPH_MMA_KV_P", mma_kv(variant.prefill_tile, spec, arch)),
            ("PODGRAPH_MMA_KV_D", mma_kv(variant.decode_tile, spec, arch)),
            ("PODGRAPH_CTAS_PER_SM", CTAS_PER_SM),
            ("FLASHINFER_ENABLE_F16", 1),
            ("FLASHINFER_ENABLE_BF16", 1),
        ),
        vendor=f"flashinfer-python {VERSION}",
        headers=header_folder,
    )


def merge_source(spec: AttentionSpec) -> Source:
    """The merge of partial results: kernels/merge.cu, podgraph's own."""
    return Source(file="merge.cu", defines=_type_defines(spec))


def reachable(spec: AttentionSpec, buckets: Iterable[Bucket]) -> list[PodVariant]:
    """The variants that any of the buckets needs, without duplicates."""
    return sorted({PodVariant.of(b, spec) for b in buckets}, key=lambda v: v.name)


def mma_kv(tile: int, spec: AttentionSpec, arch: str) -> int:
    """16-token KV steps of one warp's tile (``NUM_MMA_KV``), as FlashInfer's dispatch chooses it for two CTAs an SM.

    Source: ``BatchPODWithKVCacheTensorDispatched`` in FlashInfer's ``attention/batch_pod.cuh``.
    """
    if tile == 0:
        return 0
    mma_q, warps_q = (2 if tile > 64 else 1), (4 if tile > 16 else 1)
    step_bytes = 16 * spec.head_dim * spec.bytes_per_element
    budget = SM_SHARED_BYTES[arch] // 2 // step_bytes
    steps = min((budget - mma_q * warps_q) // (2 * (4 // warps_q)), 8 // mma_q)
    return next(n for n in (8, 4, 2, 1) if n <= steps)


def _type_defines(spec: AttentionSpec) -> tuple[tuple[str, str | int], ...]:
    return (("PODGRAPH_DTYPE", C_TYPES[spec.dtype]), ("PODGRAPH_HEAD_DIM", spec.head_dim))


class EagerReference:
    """FlashInfer's own eager result for a uniform batch: what podgraph's error is held against.

    One paged prefill call with the causal mask covers decodes too: a single row sees its whole KV. Needs a GPU and
    FlashInfer's module, which FlashInfer compiles at first use where it is not there already.
    """

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        import flashinfer
        import torch

        self.spec = spec
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        self._wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, spec.kv_layout, backend="fa2")

    def run(self, batch: Batch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """out, shaped like q (``[rows, num_qo_heads, head_dim]``), for a batch whose rows start at 0."""
        import torch

        spec = self.spec

        def tensor(values: Any) -> torch.Tensor:
            return torch.from_numpy(values).to(q.device)

        self._wrapper.plan(
            tensor(batch.qo_indptr),
            tensor(batch.kv_indptr),
            tensor(batch.kv_indices),
            tensor(batch.kv_last_page_len),
            spec.num_qo_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.page_size,
            causal=True,
            sm_scale=spec.sm_scale,
            window_left=spec.window_left,
            logits_soft_cap=spec.logits_soft_cap or None,
            q_data_type=q.dtype,
            kv_data_type=k.dtype,
        )
        result: torch.Tensor = self._wrapper.run(q, (k, v))
        return result
