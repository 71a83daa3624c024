"""Which bucket a batch takes, and how a batch beyond every bucket is cut. Integers only, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from podgraph.batch import Batch
from podgraph.catalog.model import Record
from podgraph.dispatch.counters import OVER_PADDING_CAP, TOO_MANY_PAGES
from podgraph.errors import BatchError, BucketMiss
from podgraph.shapes import AttentionSpec, Bucket, Demand

CACHED_CHOICES = 65_536


class Selector:
    """The buckets of one specification, cheapest first.

    A bucket's cost is its measured replay time, raised where necessary so that a bucket never costs less than one that
    it contains; without measurements it is its query rows. Equal costs go to the smaller bucket, so that every process
    decides alike.

    Args:
        records: the specification's records.
        max_pages: KV pages that one replay may name.
        padding_cap: share of a bucket's rows that may stay empty; a bucket beyond it is taken only where no other holds
            the batch. None is no cap.
    """

    def __init__(
        self, records: Iterable[Record], spec: AttentionSpec, max_pages: int, padding_cap: float | None = None
    ) -> None:
        self.spec, self.max_pages, self.padding_cap = spec, max_pages, padding_cap
        self._by_cost = _by_cost(list(records))
        self._cache: dict[Demand, Record | None] = {}

    def choose(self, demand: Demand) -> Record | None:
        """The cheapest bucket that holds the demand, or None.

        Buckets that leave the fewest decodes to prefill slots go first: there a decode is computed as a prefill tile.
        """
        if demand in self._cache:
            return self._cache[demand]
        fitting = [r for r in self._by_cost if r.bucket.fits(demand)]
        record = min(
            fitting,
            key=lambda r: (self.over_cap(r, demand), max(0, demand.decodes - r.bucket.decode_count)),
            default=None,
        )
        if len(self._cache) < CACHED_CHOICES:
            self._cache[demand] = record
        return record

    def over_cap(self, record: Record, demand: Demand) -> bool:
        """Whether more of the bucket's rows would stay empty than ``padding_cap`` allows."""
        if self.padding_cap is None:
            return False
        capacity = record.bucket.rows(self.spec)
        used = demand.prefill_rows + demand.rows_of(demand.decodes)
        return capacity - used > self.padding_cap * capacity

    def padding(self, record: Record, demand: Demand) -> tuple[int, int, int]:
        """Prefill rows and request slots that a batch leaves empty, and whether that is beyond ``padding_cap``."""
        bucket = record.bucket
        overflow = max(0, demand.decodes - bucket.decode_count)
        rows = bucket.prefill_len - demand.prefill_rows - demand.rows_of(overflow)
        return rows, bucket.batch - demand.requests, int(self.over_cap(record, demand))

    def check(self, batch: Batch) -> None:
        """Refuses a batch that no bucket holds as it is.

        Raises:
            BucketMiss: naming what is exceeded.
        """
        demand = batch.demand(self.spec)
        record = self.choose(demand)
        largest = max((r.bucket for r in self._by_cost), key=_size)  # of those that plans may use now
        if record is None:
            raise BucketMiss(
                f"no bucket holds {demand.prefills} prefills of {demand.prefill_rows} rows and {demand.decodes} "
                f"decodes (the largest is {largest}); add a bucket, or bind with on_miss='split'"
            )
        if batch.num_pages > self.max_pages:
            raise BucketMiss(
                f"the batch names {batch.num_pages} pages, allowed: workspace.max_pages = {self.max_pages}; "
                "raise it, or bind with on_miss='split'",
                TOO_MANY_PAGES,
            )
        if self.over_cap(record, demand):
            raise BucketMiss(
                f"every bucket that holds the batch leaves more than padding_cap={self.padding_cap} of its rows empty "
                f"(the closest is {record.bucket}); add a closer bucket, or bind with on_miss='split'",
                OVER_PADDING_CAP,
            )

    def parts(self, batch: Batch) -> list[tuple[Record, Batch]]:
        """Cuts a batch into parts that buckets hold: itself where one does.

        Attention is independent from request to request, and from row to row within a prefill, so the parts' results
        are those of the whole.

        Raises:
            BatchError: one request names more pages than a replay may.
        """
        record = self.choose(batch.demand(self.spec))
        if record is not None and batch.num_pages <= self.max_pages:
            return [(record, batch)]
        return list(self._cut(batch))

    def _cut(self, batch: Batch) -> Iterator[tuple[Record, Batch]]:
        qo_lens, kv_lens = batch.qo_lens.tolist(), batch.kv_lens.tolist()
        first, begin = 0, 0  # the part starts at row `begin` of request `first`
        while first < batch.num_requests:
            part, end = self._fill(qo_lens, kv_lens, first, begin)
            if part == first:
                raise BatchError(
                    f"request {first}: {qo_lens[first]} rows on {kv_lens[first]} KV tokens fit no bucket, even alone "
                    f"(workspace.max_pages = {self.max_pages}); build a catalog with larger limits or prefill slots"
                )
            last = part - 1
            whole = end == qo_lens[last] and (last > first or begin == 0)
            rows = None if whole else (begin if last == first else 0, end)
            piece = batch.part(first, part, rows)
            if begin and last > first:  # the first request of several: its earlier rows are done
                piece.qo_indptr[0] += begin
            record = self.choose(piece.demand(self.spec))
            assert record is not None
            yield record, piece
            first, begin = (part, 0) if end == qo_lens[last] else (last, end)

    def _fill(self, qo_lens: list[int], kv_lens: list[int], first: int, begin: int) -> tuple[int, int]:
        """How far a replay reaches from row ``begin`` of request ``first``: (requests up to, rows of the last one)."""
        prefills = rows = decodes = decode_rows = idle = pages = 0
        end = 0
        for i in range(first, len(qo_lens)):
            offset = begin if i == first else 0
            length = qo_lens[i] - offset
            pages += -(-kv_lens[i] // self.spec.page_size)
            if pages > self.max_pages:
                return i, end
            if length <= self.spec.decode_rows:
                decodes, decode_rows, idle = decodes + (length > 0), decode_rows + length, idle + (length == 0)
                demand = Demand(prefills, rows, decodes, idle, self.spec.decode_rows, decode_rows)
                if self.choose(demand) is None:
                    return i, end
                end = qo_lens[i]
                continue
            room = self._room(Demand(prefills + 1, rows, decodes, idle, self.spec.decode_rows, decode_rows))
            if room >= length:
                prefills, rows, end = prefills + 1, rows + length, qo_lens[i]
                continue
            # a block that is left over must not turn into a decode by its length alone: any length is right, though
            if room > self.spec.decode_rows:
                return i + 1, offset + room
            return i, end
        return len(qo_lens), end

    def _room(self, demand: Demand) -> int:
        """Rows that the last of the demand's prefills may bring, over all buckets."""
        room = 0
        for record in self._by_cost:
            b = record.bucket
            overflow = max(0, demand.decodes - b.decode_count)
            if demand.requests <= b.batch and demand.prefills + overflow <= b.prefill_slots:
                room = max(room, b.prefill_len - demand.prefill_rows - demand.rows_of(overflow))
        return room


def _by_cost(records: list[Record]) -> list[Record]:
    records.sort(key=lambda r: _size(r.bucket))
    shape = np.array([(r.bucket.prefill_slots, r.bucket.prefill_len, r.bucket.decode_count) for r in records])
    measured = all(r.replay_us > 0 for r in records)
    cost = np.array([r.replay_us if measured else sum(_size(r.bucket)[:1]) for r in records], np.float64)
    for i in range(len(records)):  # ascending in size: whatever a bucket contains comes before it
        contained = (shape[:i] <= shape[i]).all(axis=1)
        cost[i] = max(cost[i], cost[:i][contained].max(initial=0.0))
    order = sorted(range(len(records)), key=lambda i: (cost[i], _size(records[i].bucket)))
    return [records[i] for i in order]


def _size(bucket: Bucket) -> tuple[int, int, int, int]:
    rows = bucket.prefill_len + bucket.decode_count
    return rows, bucket.batch, bucket.prefill_len, bucket.decode_count
