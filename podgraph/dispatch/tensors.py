"""The tensors of one call of run(), checked and reduced to what a kernel needs: addresses and strides."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from podgraph.errors import BatchError
from podgraph.shapes import AttentionSpec

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn}
ALIGN_BYTES = 16  # the kernels load and store 16 bytes at a time
MAX_OFFSET = 1 << 31  # row offsets are 32-bit in FlashInfer's kernel

KVCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Call:
    """One call's tensors; k and v in the spec's layout."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None

    def pointers(self) -> tuple[int, int, int, int, int]:
        """Addresses in the order of ``RUN_POINTERS``, without the last one, ``kv_maps``."""
        lse = 0 if self.lse is None else self.lse.data_ptr()
        return self.q.data_ptr(), self.k.data_ptr(), self.v.data_ptr(), self.out.data_ptr(), lse

    def strides(self, spec: AttentionSpec) -> tuple[int, ...]:
        """Strides in elements, in the order of ``RUN_STRIDES``."""
        n, h = (1, 2) if spec.kv_layout == "NHD" else (2, 1)
        k, v = self.k.stride(), self.v.stride()
        return self.q.stride(0), self.q.stride(1), k[0], k[n], k[h], v[0], v[n], v[h]


def check_call(
    spec: AttentionSpec,
    device: torch.device,
    rows: int,
    max_page: int,
    q: torch.Tensor,
    paged_kv_cache: KVCache,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> Call:
    """Checks shapes, dtypes, devices and alignment; makes ``out`` where none is given.

    Args:
        rows: query rows of the planned batch.
        max_page: the largest page number it names, -1 for none.

    Raises:
        BatchError: naming the tensor, what was got and what is allowed.
    """
    dtype = DTYPES[spec.dtype]
    heads = (spec.num_qo_heads, spec.head_dim)
    _check("q", q, device, dtype, (None, *heads))
    if q.shape[0] < rows:
        raise BatchError(f"q: got {q.shape[0]} rows, allowed: at least the planned batch's {rows}")
    if q.shape[0] * abs(q.stride(0)) >= MAX_OFFSET:
        raise BatchError(f"q: got {q.shape[0]} rows {q.stride(0)} elements apart, allowed: below 2^31 elements in all")
    k, v = _split_cache(spec, paged_kv_cache)
    shape = (spec.page_size, spec.num_kv_heads) if spec.kv_layout == "NHD" else (spec.num_kv_heads, spec.page_size)
    for name, cache in (("K cache", k), ("V cache", v)):
        _check(name, cache, device, DTYPES[spec.kv_dtype], (None, *shape, spec.head_dim))
        if cache.shape[0] <= max_page:
            raise BatchError(f"kv_indices: got page {max_page}, allowed: below the {name}'s {cache.shape[0]} pages")
    if out is None:
        out = torch.empty((q.shape[0], *heads), dtype=dtype, device=device)
    _check("out", out, device, dtype, (None, *heads))
    if out.numel() >= MAX_OFFSET:
        raise BatchError(f"out: got {out.numel()} elements, allowed: below 2^31")
    if out.shape[0] < rows or not out.is_contiguous():
        raise BatchError(
            f"out: got {tuple(out.shape)} strides {out.stride()}, allowed: contiguous, at least {rows} rows"
        )
    if lse is not None:
        if lse.device != device or lse.dtype != torch.float32 or lse.dim() != 2 or not lse.is_contiguous():
            raise BatchError(
                f"lse: got {lse.dtype} {tuple(lse.shape)} on {lse.device}, allowed: contiguous float32 on {device}"
            )
        if lse.shape[0] < rows or lse.shape[1] != spec.num_qo_heads:
            raise BatchError(f"lse: got shape {tuple(lse.shape)}, allowed: at least ({rows}, {spec.num_qo_heads})")
    return Call(q, k, v, out, lse)


def _split_cache(spec: AttentionSpec, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashInfer's two forms: one tensor ``[pages, 2, ...]`` or a (k, v) pair."""
    if isinstance(cache, torch.Tensor):
        if cache.dim() != 5 or cache.shape[1] != 2:
            raise BatchError(
                f"paged_kv_cache: got shape {tuple(cache.shape)}, allowed: [pages, 2, ...] or a (k, v) pair"
            )
        return cache[:, 0], cache[:, 1]
    if not (isinstance(cache, tuple) and len(cache) == 2 and all(isinstance(c, torch.Tensor) for c in cache)):
        raise BatchError(f"paged_kv_cache: got {type(cache).__name__}, allowed: a tensor or a (k, v) pair of tensors")
    return cache


def _check(
    name: str, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype, shape: tuple[int | None, ...]
) -> None:
    if tensor.device != device:
        raise BatchError(f"{name}: got a tensor on {tensor.device}, allowed: {device}, where the catalog is bound")
    if tensor.dtype != dtype:
        raise BatchError(f"{name}: got {tensor.dtype}, allowed: {dtype}")
    if tensor.dim() != len(shape) or any(
        want not in (None, got) for got, want in zip(tensor.shape, shape, strict=True)
    ):
        raise BatchError(f"{name}: got shape {tuple(tensor.shape)}, allowed: {shape} with any first dimension")
    step = ALIGN_BYTES // tensor.element_size()
    if max(tensor.stride()) >= MAX_OFFSET:
        raise BatchError(f"{name}: got strides {tensor.stride()}, allowed: below 2^31 elements")
    if tensor.stride(-1) != 1 or any(s % step for s in tensor.stride()[:-1]) or tensor.data_ptr() % ALIGN_BYTES:
        raise BatchError(
            f"{name}: got strides {tensor.stride()}, allowed: last dimension contiguous, other strides multiples of "
            f"{step} elements, address on {ALIGN_BYTES} bytes"
        )
