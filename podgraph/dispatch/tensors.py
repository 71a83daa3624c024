"""Caches, metadata, and what is asked of every tensor: checked and reduced to addresses and strides."""

from __future__ import annotations

from typing import Any

import torch

from podgraph.errors import BatchError
from podgraph.shapes import AttentionSpec

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn}
ALIGN_BYTES = 16  # the kernels load and store 16 bytes at a time
MAX_OFFSET = 1 << 31  # row offsets are 32-bit in FlashInfer's kernel

KVCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Cache:
    """One layer's KV cache, checked; k and v in the spec's layout.

    Attributes:
        key: (k, v) addresses and (page, token, head) strides of k and of v in elements, as kernels take them.
        pages: page numbers below this are in both of them.
        maps: where its TMA descriptors lie, where it is bound; 0 else.
    """

    __slots__ = ("k", "key", "maps", "pages", "v")

    def __init__(self, spec: AttentionSpec, k: torch.Tensor, v: torch.Tensor) -> None:
        n, h = (1, 2) if spec.kv_layout == "NHD" else (2, 1)
        ks, vs = k.stride(), v.stride()
        self.k, self.v, self.pages, self.maps = k, v, min(k.shape[0], v.shape[0]), 0
        self.key = k.data_ptr(), v.data_ptr(), ks[0], ks[n], ks[h], vs[0], vs[n], vs[h]


def check_cache(spec: AttentionSpec, device: torch.device, paged_kv_cache: KVCache) -> Cache:
    """Checks one layer's cache.

    Raises:
        BatchError: naming the tensor, what was got and what is allowed.
    """
    k, v = _split_cache(spec, paged_kv_cache)
    shape = (spec.page_size, spec.num_kv_heads) if spec.kv_layout == "NHD" else (spec.num_kv_heads, spec.page_size)
    for name, cache in (("K cache", k), ("V cache", v)):
        check_tensor(name, cache, device, DTYPES[spec.kv_dtype], (None, *shape, spec.head_dim))
    return Cache(spec, k, v)


def to_host(array: Any) -> Any:
    """Torch tensors, wherever they are, as numpy; anything else as it is.

    Raises:
        BatchError: a tensor that numpy has no equal of.
    """
    if not isinstance(array, torch.Tensor):
        return array
    try:
        return array.detach().cpu().numpy()
    except (TypeError, RuntimeError, NotImplementedError) as e:
        raise BatchError(
            f"metadata: got a tensor of {array.dtype}, {array.layout}, on {array.device}, allowed: int32"
        ) from e


def check_metadata(name: str, array: torch.Tensor, device: torch.device, least: int) -> int:
    """The address of one of a step's arrays on the GPU.

    Args:
        least: entries that it has at least.

    Raises:
        BatchError: not int32, not contiguous, elsewhere or too short.
    """
    if array.dtype is not torch.int32 or array.dim() != 1 or not array.is_contiguous() or array.device != device:
        raise BatchError(
            f"{name}: got {array.dtype} {tuple(array.shape)} on {array.device}, allowed: one contiguous dimension of "
            f"int32 on {device} (or all of it on the host)"
        )
    if array.shape[0] < least:
        raise BatchError(f"{name}: got {array.shape[0]} entries, allowed: at least {least}")
    return array.data_ptr()


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


def check_tensor(
    name: str, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype, shape: tuple[int | None, ...]
) -> None:
    """Checks one tensor whose rows are loaded 16 bytes at a time.

    Args:
        shape: what it must have; None is any number.

    Raises:
        BatchError: naming the tensor, what was got and what is allowed.
    """
    if not isinstance(tensor, torch.Tensor):
        raise BatchError(f"{name}: got {type(tensor).__name__}, allowed: a tensor")
    if tensor.layout is not torch.strided:
        raise BatchError(f"{name}: got layout {tensor.layout}, allowed: a dense tensor")
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
