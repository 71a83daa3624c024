"""Plans whose metadata lie on the GPU: which bucket, and what the host may promise of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from podgraph.batch import Batch, check_hints, demand_of
from podgraph.catalog.model import Record
from podgraph.dispatch.counters import NO_BUCKET, OVER_PADDING_CAP
from podgraph.dispatch.planning import Addresses
from podgraph.dispatch.select import CACHED_CHOICES, Selector
from podgraph.dispatch.tensors import check_metadata, to_host
from podgraph.errors import BatchError, BucketMiss
from podgraph.shapes import AttentionSpec, Bucket, Demand

METADATA = ("qo_indptr", "kv_indptr", "kv_last_page_len", "kv_indices")
INT32 = torch.int32


class Choice(NamedTuple):
    """A bucket for what the host knows of a batch.

    Attributes:
        record: of the bucket; ``names`` has it with its name, as counters call it.
        rows: query rows that q and out need.
        padded_rows, padded_slots, over_cap: what `Counters` are told; zeros where nobody knows the batch.
    """

    record: Record
    names: tuple[tuple[Record, str], ...]
    rows: int
    padded_rows: int = 0
    padded_slots: int = 0
    over_cap: int = 0


class InPlace:
    """Chooses buckets for batches that the host does not see.

    Args:
        selector: over the buckets that plans may use now.
        strict: whether a bucket beyond ``padding_cap`` is no bucket at all.
    """

    def __init__(self, spec: AttentionSpec, device: torch.device, selector: Selector, strict: bool) -> None:
        self._spec, self._device, self._selector, self._strict = spec, device, selector, strict
        self._index = device.index
        self._by_hint: dict[tuple[int, int | None, int | None], Choice] = {}
        self._by_bucket: dict[Bucket, Choice] = {}

    def addresses(self, qo: Any, kv: Any, last: Any, indices: Any) -> Addresses | None:
        """Where the arrays lie, if all are on the GPU and as they must be: contiguous int32, and long enough."""
        try:
            n, index = qo.numel(), self._index
            if (
                qo.dtype is kv.dtype is last.dtype is indices.dtype is INT32
                and qo.get_device() == kv.get_device() == last.get_device() == indices.get_device() == index
                and qo.is_contiguous()
                and kv.is_contiguous()
                and last.is_contiguous()
                and indices.is_contiguous()
                and kv.numel() >= n <= last.numel() + 1
                and n > 0
                and qo.dim() == kv.dim() == last.dim() == indices.dim() == 1
            ):
                # an empty tensor has no address, and nothing is read from it
                return qo.data_ptr() or 1, kv.data_ptr() or 1, last.data_ptr() or 1, indices.data_ptr() or 1
        except (AttributeError, TypeError):  # no tensors at all
            pass
        return None

    def check(self, arrays: Sequence[Any]) -> tuple[list[Any], Addresses]:
        """The arrays one by one: those on the host as numpy, with address 0.

        Raises:
            BatchError: naming the array that is not as it must be.
        """
        try:
            n = len(arrays[0]) - 1
        except TypeError as e:
            raise BatchError(f"qo_indptr: got {type(arrays[0]).__name__}, allowed: one dimension of integers") from e
        if n < 0:
            raise BatchError("qo_indptr: got no entries, allowed: at least 1 (an empty batch is [0])")
        ready: list[Any] = []
        addresses: list[int] = []
        for name, array, least in zip(METADATA, arrays, (n + 1, n + 1, n, 0), strict=True):
            if isinstance(array, torch.Tensor) and array.is_cuda:
                addresses.append(check_metadata(name, array, self._device, least) or 1)
                ready.append(array)
                continue
            addresses.append(0)
            host = Batch.host_array(name, to_host(array), least)
            # nothing is read beyond these
            ready.append(host if name == "kv_indices" else host[:least])
        if addresses[3] == 0:
            if addresses[1] == 0:
                ready[3] = ready[3][: int(ready[1][-1])]
            if len(ready[3]) > self._selector.max_pages:
                raise BatchError(
                    f"kv_indices: got {len(ready[3])} entries on the host, allowed: at most workspace.max_pages = "
                    f"{self._selector.max_pages}"
                )
        return ready, (addresses[0], addresses[1], addresses[2], addresses[3])

    def choose(
        self,
        arrays: Sequence[Any],
        addresses: Addresses,
        prefill_len: int | None,
        decode_count: int | None,
        named: Record | None,
    ) -> tuple[Choice, int, int]:
        """The bucket of a step, its number of requests, and how many entries kv_indices has.

        Args:
            arrays, addresses: as `addresses` or `check` found them, in the order of `METADATA`.
            named: the record of the bucket that the caller named.

        Raises:
            BatchError: nothing says which bucket, or the named one has fewer slots than the batch has requests.
            BucketMiss: no bucket holds the batch.
        """
        qo, indices = arrays[0], arrays[3]
        n = (qo.numel() if addresses[0] else len(qo)) - 1
        length = indices.numel() if addresses[3] else len(indices)
        if addresses[0] == 0:
            demand = demand_of(qo, self._spec)
            check_hints(demand, prefill_len, decode_count)
        if named is not None:
            if n > named.bucket.batch:
                raise BatchError(
                    f"got {n} requests, allowed: at most the {named.bucket.batch} of bucket {named.bucket}"
                )
            return self._named(named), n, length
        if addresses[0] == 0:
            return self._chosen(demand, int(qo[-1])), n, length
        choice = self._by_hint.get((n, prefill_len, decode_count))
        if choice is None:
            if prefill_len is None or decode_count is None:
                raise BatchError(
                    "plan: qo_indptr lies on the GPU, and nothing else says which bucket: give it on the host, or give "
                    "prefill_len= and decode_count=, or bucket="
                )
            choice = self._hinted(n, prefill_len, decode_count)
        return choice, n, length

    def _named(self, record: Record) -> Choice:
        choice = self._by_bucket.get(record.bucket)
        if choice is None or choice.record is not record:
            choice = Choice(record, ((record, str(record.bucket)),), record.bucket.rows(self._spec))
            self._by_bucket[record.bucket] = choice
        return choice

    def _hinted(self, n: int, prefill_len: int, decode_count: int) -> Choice:
        others = n - decode_count
        if others < 0 or prefill_len < 0 or decode_count < 0:
            raise BatchError(
                f"prefill_len={prefill_len}, decode_count={decode_count}: allowed: 0 or more, and no more decodes than "
                f"the batch's {n} requests"
            )
        prefills = others if prefill_len else 0
        demand = Demand(prefills, prefill_len, decode_count, others - prefills, self._spec.decode_rows)
        choice = self._chosen(demand, prefill_len + decode_count * self._spec.decode_rows)
        if len(self._by_hint) == CACHED_CHOICES:
            self._by_hint.clear()
        self._by_hint[n, prefill_len, decode_count] = choice
        return choice

    def _chosen(self, demand: Demand, rows: int) -> Choice:
        record = self._selector.choose(demand)
        if record is None or (self._strict and self._selector.over_cap(record, demand)):
            reason = OVER_PADDING_CAP if record else NO_BUCKET
            raise BucketMiss(
                f"no bucket holds {demand.prefills} prefills of {demand.prefill_rows} rows and {demand.decodes} "
                "decodes, and a batch whose metadata lie on the GPU cannot be split: bring them to the host, or add a "
                "bucket",
                reason,
            )
        return Choice(record, ((record, str(record.bucket)),), rows, *self._selector.padding(record, demand))
