"""One step's ragged metadata, in FlashInfer's words, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from podgraph.errors import BatchError
from podgraph.shapes import AttentionSpec, Demand

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """A uniform batch: requests in any order, prefill and decode interleaved.

    Attributes:
        qo_indptr: ``[n + 1]``, first query row of each request; may start above 0 where the batch is a part of another.
        kv_indptr: ``[n + 1]``, first page of each request in ``kv_indices``.
        kv_indices: ``[kv_indptr[n]]`` or longer, page numbers.
        kv_last_page_len: ``[n]``, tokens in each request's last page, 1 to ``page_size``.
        page_size: tokens per page.
    """

    qo_indptr: Int32
    kv_indptr: Int32
    kv_indices: Int32
    kv_last_page_len: Int32
    page_size: int

    @property
    def num_requests(self) -> int:
        return len(self.kv_last_page_len)

    @property
    def num_pages(self) -> int:
        return int(self.kv_indptr[-1] - self.kv_indptr[0])

    @property
    def qo_lens(self) -> npt.NDArray[np.int64]:
        """Query rows of each request, ``[n]`` int64."""
        indptr = self.qo_indptr.astype(np.int64)
        return indptr[1:] - indptr[:-1]

    @property
    def kv_lens(self) -> npt.NDArray[np.int64]:
        """KV tokens of each request, ``[n]`` int64."""
        indptr = self.kv_indptr.astype(np.int64)
        pages = indptr[1:] - indptr[:-1]
        return np.where(pages > 0, (pages - 1) * self.page_size + self.kv_last_page_len, 0)

    def demand(self, spec: AttentionSpec) -> Demand:
        """What the choice of a bucket looks at. A request with at most ``decode_rows`` query rows decodes."""
        return demand_of(self.qo_indptr, spec)

    @staticmethod
    def host_array(name: str, values: Any, least: int) -> Int32:
        """One of a step's arrays by itself, checked as far as that goes.

        Raises:
            BatchError: no integers, fewer than ``least``, or no indptr where it is one.
        """
        array = _indptr(name, values) if name.endswith("indptr") else _integers(name, values)
        if len(array) < least:
            raise BatchError(f"{name}: got {len(array)} entries, allowed: at least {least}")
        return array

    @classmethod
    def of(
        cls, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_last_page_len: Any, *, page_size: int, max_kv_len: int
    ) -> Batch:
        """Checks one step's arrays.

        Args:
            qo_indptr, kv_indptr, kv_indices, kv_last_page_len: anything that numpy reads as integers, on the host;
                shapes as in the attributes, ``qo_indptr[0] = kv_indptr[0] = 0``.
            page_size: tokens per page.
            max_kv_len: KV tokens that one request may have.

        Raises:
            BatchError: naming the array, the index, what was got and what is allowed.
        """
        qo, kv = _indptr("qo_indptr", qo_indptr), _indptr("kv_indptr", kv_indptr)
        indices = _integers("kv_indices", kv_indices)
        last = _integers("kv_last_page_len", kv_last_page_len)
        n = len(qo) - 1
        if len(kv) != n + 1:
            raise BatchError(f"kv_indptr: got {len(kv)} entries, allowed: {n + 1}, as many as qo_indptr")
        if len(last) != n:
            raise BatchError(f"kv_last_page_len: got {len(last)} entries, allowed: {n}, one for each request")
        if len(indices) < kv[-1]:
            raise BatchError(f"kv_indices: got {len(indices)} entries, allowed: at least kv_indptr[-1] = {kv[-1]}")
        batch = cls(qo, kv, indices[: kv[-1]], last, page_size)
        pages = np.diff(kv)
        _refuse(
            "kv_last_page_len", (pages > 0) & ((last < 1) | (last > page_size)), last, f"1 to page_size={page_size}"
        )
        qo_lens, kv_lens = batch.qo_lens, batch.kv_lens
        # a shorter KV wraps an unsigned subtraction in FlashInfer's kernel, which then skips the causal mask
        _refuse("KV length", (kv_lens > 0) & (kv_lens < qo_lens), kv_lens, "0, or at least the request's query rows")
        _refuse("KV length", kv_lens > max_kv_len, kv_lens, f"at most workspace.max_kv_len = {max_kv_len}")
        _refuse("kv_indices", batch.kv_indices < 0, batch.kv_indices, "page numbers from 0", unit="entry")
        return batch

    def part(self, first: int, last: int, rows: tuple[int, int] | None = None) -> Batch:
        """Requests ``first`` to ``last`` (exclusive), rows of q and out still addressed as in the whole batch.

        Args:
            rows: where only a block of the last request's rows belongs to the part, its begin and end within the
                request. The block sees the KV tokens that its last row sees.
        """
        qo = self.qo_indptr[first : last + 1].copy()
        kv = self.kv_indptr[first : last + 1].copy()
        page_len = self.kv_last_page_len[first:last].copy()
        if rows is not None:
            begin, end = rows
            request = last - 1
            start, rows_of_request = int(self.qo_indptr[request]), int(self.qo_lens[request])
            kv_len = int(self.kv_lens[request])
            if last - first == 1:
                qo[0] = start + begin
            qo[-1] = start + end
            if kv_len:
                kv_len -= rows_of_request - end
                pages = -(-kv_len // self.page_size)
                kv[-1] = kv[-2] + pages
                page_len[-1] = kv_len - (pages - 1) * self.page_size
        indices = self.kv_indices[int(kv[0]) : int(kv[-1])]
        return Batch(qo, kv - kv[0], indices, page_len, self.page_size)


def demand_of(qo_indptr: Int32, spec: AttentionSpec) -> Demand:
    """What a batch with these query rows asks of a bucket."""
    qo_lens = np.diff(qo_indptr.astype(np.int64))
    prefill = qo_lens > spec.decode_rows
    prefills, idle = int(prefill.sum()), int((qo_lens == 0).sum())
    decodes = len(qo_lens) - prefills - idle
    prefill_rows = int(qo_lens[prefill].sum())
    return Demand(prefills, prefill_rows, decodes, idle, spec.decode_rows, int(qo_lens.sum()) - prefill_rows)


def _integers(name: str, values: Any) -> Int32:
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as e:  # nested lists of unequal lengths, objects that are no arrays
        raise BatchError(f"{name}: got {type(values).__name__}, allowed: one dimension of integers ({e})") from e
    if array.size == 0 and array.ndim <= 1:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BatchError(f"{name}: got shape {array.shape}, dtype {array.dtype}; allowed: one dimension of integers")
    limits = np.iinfo(np.int32)
    if array.dtype != np.int32 and (int(array.min()) < limits.min or int(array.max()) > limits.max):
        raise BatchError(f"{name}: got values beyond 32 bits, allowed: int32")
    return np.ascontiguousarray(array, dtype=np.int32)


def _indptr(name: str, values: Any) -> Int32:
    array = _integers(name, values)
    if len(array) == 0 or array[0] != 0:
        raise BatchError(f"{name}: got {array[:1].tolist()} at the start, allowed: 0 (an empty batch is [0])")
    down = np.flatnonzero(array[1:] < array[:-1])
    if len(down):
        i = int(down[0])
        raise BatchError(f"{name}[{i + 1}]: got {array[i + 1]}, allowed: at least {name}[{i}] = {array[i]}")
    return array


def _refuse(what: str, bad: npt.NDArray[np.bool_], got: npt.NDArray[Any], allowed: str, unit: str = "request") -> None:
    where = np.flatnonzero(bad)
    if len(where):
        raise BatchError(f"{what} of {unit} {where[0]}: got {got[where[0]]}, allowed: {allowed}")


def check_hints(demand: Demand, prefill_len: int | None, decode_count: int | None) -> None:
    """Holds what a caller said of a batch against the batch, where the host sees it.

    Raises:
        BatchError: naming the hint that is not true.
    """
    for name, said, is_ in (
        ("prefill_len", prefill_len, demand.prefill_rows),
        ("decode_count", decode_count, demand.decodes),
    ):
        if said is not None and said != is_:
            raise BatchError(f"{name}: got {said}, the batch has {is_}; leave it out, qo_indptr is on the host")
