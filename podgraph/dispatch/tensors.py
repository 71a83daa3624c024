"""The tensors of plan() and run(), checked and reduced to what a kernel needs: addresses and strides."""

from __future__ import annotations

import weakref

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


class Call:
    """The other tensors of one call, which it does not keep alive.

    Attributes:
        key: addresses of q, out and lse (0: none), strides of q in elements.
        rows: rows that q and out have.
    """

    __slots__ = ("_lse", "_out", "_q", "key", "rows")

    def __init__(
        self, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, key: tuple[int, ...], rows: int
    ) -> None:
        self._q, self._out = weakref.ref(q), weakref.ref(out)
        self._lse = None if lse is None else weakref.ref(lse)
        self.key, self.rows = key, rows

    def same(self, q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None, rows: int) -> bool:
        """Whether the same tensors come again, unchanged, with room for so many rows."""
        return (
            self._q() is q
            and self._out() is out
            and (lse is None if self._lse is None else self._lse() is lse)
            and self.rows >= rows
            and q.size(0) >= rows
            and self.key[0] == q.data_ptr()
            and out is not None
            and self.key[1] == out.data_ptr()
        )


def empty_like(spec: AttentionSpec, q: torch.Tensor) -> torch.Tensor:
    """An output for q, contiguous; q may be a slice of a wider tensor, or wrong, which `check_call` finds."""
    return torch.empty(q.shape, dtype=DTYPES[spec.dtype], device=q.device)


def check_cache(spec: AttentionSpec, device: torch.device, paged_kv_cache: KVCache) -> Cache:
    """Checks one layer's cache.

    Raises:
        BatchError: naming the tensor, what was got and what is allowed.
    """
    k, v = _split_cache(spec, paged_kv_cache)
    shape = (spec.page_size, spec.num_kv_heads) if spec.kv_layout == "NHD" else (spec.num_kv_heads, spec.page_size)
    for name, cache in (("K cache", k), ("V cache", v)):
        _check(name, cache, device, DTYPES[spec.kv_dtype], (None, *shape, spec.head_dim))
    return Cache(spec, k, v)


class CallChecker:
    """Checks the tensors of run() for one specification on one device."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self._spec, self._device = spec, device
        self._dtype = DTYPES[spec.dtype]
        self._index = device.index if device.type == "cuda" else -1  # what get_device() gives
        self._step = ALIGN_BYTES // self._dtype.itemsize
        self._row = [spec.num_qo_heads, spec.head_dim]

    def check(self, rows: int, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None) -> Call:
        """The call, where everything is as it must be.

        Args:
            rows: query rows of the planned batch.

        Raises:
            BatchError: naming the tensor, what was got and what is allowed.
        """
        key: tuple[int, ...] = ()
        try:
            (length, heads, head_dim), (row, head, last), (room, *out_row) = q.shape, q.stride(), out.shape
            if (
                q.dtype is out.dtype is self._dtype
                and q.get_device() == out.get_device() == self._index
                and heads == self._row[0]
                and head_dim == self._row[1]
                and out_row == self._row
                and last == 1
                and row % self._step == head % self._step == 0
                and out.is_contiguous()
                and length * row < MAX_OFFSET > room * heads * head_dim
                and row < MAX_OFFSET > head
                and length >= rows <= room
            ):
                key = q.data_ptr(), out.data_ptr(), 0 if lse is None else lse.data_ptr(), row, head
        except (AttributeError, TypeError, ValueError):  # no tensors, or of other dimensions
            pass
        if not key or (key[0] | key[1]) % ALIGN_BYTES or lse is not None:
            self._explain(rows, q, out, lse)
            if not key:
                raise BatchError(f"q, out: got {type(q).__name__} and {type(out).__name__}, allowed: plain tensors")
        return Call(q, out, lse, key, min(length, room, length if lse is None else lse.shape[0]))

    def _explain(self, rows: int, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """The same one by one, with words for what is wrong, and lse too."""
        device, heads = self._device, tuple(self._row)
        _check("q", q, device, self._dtype, (None, *heads))
        if q.shape[0] < rows:
            raise BatchError(f"q: got {q.shape[0]} rows, allowed: at least the planned batch's {rows}")
        if q.shape[0] * abs(q.stride(0)) >= MAX_OFFSET:
            raise BatchError(
                f"q: got {q.shape[0]} rows {q.stride(0)} elements apart, allowed: below 2^31 elements in all"
            )
        _check("out", out, device, self._dtype, (None, *heads))
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
            if lse.shape[0] < rows or lse.shape[1] != heads[0]:
                raise BatchError(f"lse: got shape {tuple(lse.shape)}, allowed: at least ({rows}, {heads[0]})")


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
