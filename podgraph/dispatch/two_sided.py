"""The face of FlashInfer's BatchPOD, for callers who tell prefill and decode apart themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from podgraph.batch import Batch
from podgraph.catalog.model import Record
from podgraph.dispatch.dispatcher import Dispatcher
from podgraph.dispatch.tensors import KVCache, to_host
from podgraph.errors import BatchError, PodgraphError


class TwoSided:
    """Plans and runs a prefill batch and a decode batch as one uniform batch, prefills first.

    The rule of the specification decides what is computed as a decode, whatever side it comes from. Where ``q_d`` lies
    right behind ``q_p`` in memory, as two slices of one tensor do, nothing is copied.

    Args:
        dispatcher: whose plan is set and used.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._rows: tuple[int, int] | None = None

    def plan(
        self,
        qo_indptr_p: Any,
        kv_indptr_p: Any,
        kv_indices_p: Any,
        last_page_len_p: Any,
        qo_indptr_d: Any,
        kv_indptr_d: Any,
        kv_indices_d: Any,
        last_page_len_d: Any,
    ) -> list[Record]:
        """Plans one step; the arrays are those of `Dispatcher.plan`, once for each side.

        Raises:
            BatchError: naming the side.
        """
        prefill = self._side("prefill", qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p)
        decode = self._side("decode", qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d)
        records = self._dispatcher.plan(
            np.concatenate([prefill.qo_indptr, prefill.qo_indptr[-1] + decode.qo_indptr[1:]]),
            np.concatenate([prefill.kv_indptr, prefill.kv_indptr[-1] + decode.kv_indptr[1:]]),
            np.concatenate([prefill.kv_indices, decode.kv_indices]),
            np.concatenate([prefill.kv_last_page_len, decode.kv_last_page_len]),
        )
        self._rows = int(prefill.qo_indptr[-1]), int(decode.qo_indptr[-1])
        return records

    def _side(self, name: str, *arrays: Any) -> Batch:
        d = self._dispatcher
        try:
            return Batch.of(*map(to_host, arrays), page_size=d.spec.page_size, max_kv_len=d.max_kv_len)
        except BatchError as e:
            raise BatchError(f"{name} side: {e}") from None

    def run(
        self,
        q_p: torch.Tensor,
        paged_kv_cache_p: KVCache,
        q_d: torch.Tensor,
        paged_kv_cache_d: KVCache,
        out_p: torch.Tensor | None = None,
        out_d: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of both sides over one layer's cache.

        Args:
            q_p, q_d: ``[rows of the side, num_qo_heads, head_dim]``.
            paged_kv_cache_p, paged_kv_cache_d: the same cache, in the forms of `Dispatcher.run`.
            out_p, out_d: like q, written where given.

        Returns:
            The outputs of both sides.

        Raises:
            BatchError: the sides have different caches, other rows than planned, or a tensor is none that fits.
            PodgraphError: nothing is planned.
        """
        if self._rows is None:
            raise PodgraphError("run: nothing is planned; call plan() first")
        for name, q, rows in (("q_p", q_p, self._rows[0]), ("q_d", q_d, self._rows[1])):
            if not isinstance(q, torch.Tensor):
                raise BatchError(f"{name}: got {type(q).__name__}, allowed: a tensor")
            if q.dim() != 3 or q.shape[0] != rows:
                raise BatchError(f"{name}: got shape {tuple(q.shape)}, allowed: {rows} rows, as planned")
        for name, given, q in (("out_p", out_p, q_p), ("out_d", out_d, q_d)):
            if given is not None and not _alike(given, q):
                raise BatchError(
                    f"{name}: got {_described(given)}, allowed: {_described(q)}, as the side's q (any strides), or None"
                )
        if q_p.shape[1:] != q_d.shape[1:] or q_p.dtype != q_d.dtype or q_p.device != q_d.device:
            raise BatchError(f"q_d: got {_described(q_d)}, allowed: heads, dtype and device of q_p, {_described(q_p)}")
        if not _same_cache(paged_kv_cache_p, paged_kv_cache_d):
            raise BatchError("paged_kv_cache_d: got another cache than paged_kv_cache_p, allowed: the same one")
        out = self._dispatcher.run(_joined(q_p, q_d), paged_kv_cache_p)
        results = out[: self._rows[0]], out[self._rows[0] :]
        for given, result in ((out_p, results[0]), (out_d, results[1])):
            if given is not None:
                given.copy_(result)
        return results[0] if out_p is None else out_p, results[1] if out_d is None else out_d


def _joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """One tensor over both: a view where the second lies right behind the first, else a copy."""
    end = first.data_ptr() + first.shape[0] * first.stride(0) * first.element_size()
    kinds = [(q.dtype, q.device, q.shape[1:], q.stride(), q.untyped_storage().data_ptr()) for q in (first, second)]
    if kinds[0] != kinds[1] or end != second.data_ptr():
        return torch.cat([first, second])
    return first.as_strided((first.shape[0] + second.shape[0], *first.shape[1:]), first.stride())


def _alike(a: Any, b: torch.Tensor) -> bool:
    return isinstance(a, torch.Tensor) and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _described(a: Any) -> str:
    return f"{a.dtype} {tuple(a.shape)} on {a.device}" if isinstance(a, torch.Tensor) else type(a).__name__


def _same_cache(a: KVCache, b: KVCache) -> bool:
    tensors = [tuple(c) if isinstance(c, tuple | list) else (c,) for c in (a, b)]
    if not all(isinstance(c, torch.Tensor) for some in tensors for c in some):
        return a is b  # `Dispatcher.run` says what is wrong with it
    return len(tensors[0]) == len(tensors[1]) and all(
        x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()
        for x, y in zip(*tensors, strict=True)
    )
