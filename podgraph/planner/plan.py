"""The numpy planner: one batch -> the work list of one bucket.

It decides what FlashInfer's ``plan()`` decides (tiles, KV chunks, where partial results go), for both sides of a
uniform batch at once, into the arrays that the kernels read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from podgraph.batch import Batch
from podgraph.errors import BucketOverflow
from podgraph.planner.layout import UNSPLIT, Layout
from podgraph.planner.order import longest_first
from podgraph.planner.policy import (
    CHUNK_UNIT,
    DECODE_LEAST_CHUNK,
    DECODE_SHARES,
    GAIN,
    LEVELS,
    Capacity,
    Policy,
    prefill_tile,
    sm90_setting,
)
from podgraph.planner.sm90 import Sm90WorkList, plan_sm90
from podgraph.shapes import DECODE_TILE, AttentionSpec, Bucket

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Items:
    """One side's list: (request, q tile, kv chunk) of each item, longest first. All ``[items]`` int64."""

    request_indices: Int64
    qo_tile_indices: Int64
    kv_tile_indices: Int64


@dataclass(frozen=True)
class WorkList:
    """The plan of one batch; array names are those of ``Args`` in kernels/args.h.

    Attributes:
        batch: the batch that it was made for.
        prefill, decode: the two lists.
        kv_chunk_size: ``[requests]``, tokens of one KV chunk, or ``UNSPLIT``.
        o_indptr: ``[requests]``, first partial row of a split request; row r, chunk c is at
            ``o_indptr + r * chunks + c``.
        merge_rows: rows of out with partial results.
        merge_first, merge_count: their first partial row and how many chunks they see.
    """

    batch: Batch
    prefill: Items
    decode: Items
    kv_chunk_size: Int64
    o_indptr: Int64
    merge_rows: Int64
    merge_first: Int64
    merge_count: Int64

    def pack(self, layout: Layout, step: npt.NDArray[np.int32]) -> None:
        """Writes metadata and plan into ``step`` (int32, ``layout.step_bytes``), every list at its place."""
        views = layout.views(step)
        n = self.batch.num_requests
        views["qo_indptr"][: n + 1] = self.batch.qo_indptr
        views["kv_indptr"][: n + 1] = self.batch.kv_indptr
        views["kv_last_page_len"][:n] = self.batch.kv_last_page_len
        views["counts"][:] = (
            n,
            len(self.prefill.request_indices),
            len(self.decode.request_indices),
            len(self.merge_rows),
            0,
        )
        for side, items in (("prefill", self.prefill), ("decode", self.decode)):
            count = len(items.request_indices)
            views[f"{side}_request_indices"][:count] = items.request_indices
            views[f"{side}_qo_tile_indices"][:count] = items.qo_tile_indices
            views[f"{side}_kv_tile_indices"][:count] = items.kv_tile_indices
        views["kv_chunk_size"][:n] = self.kv_chunk_size
        views["o_indptr"][:n] = self.o_indptr
        rows = len(self.merge_rows)
        views["merge_rows"][:rows] = self.merge_rows
        views["merge_first"][:rows] = self.merge_first
        views["merge_count"][:rows] = self.merge_count


def plan(
    batch: Batch, bucket: Bucket, spec: AttentionSpec, policy: Policy, variant: str = ""
) -> WorkList | Sm90WorkList:
    """Plans a batch into a bucket, for the policy's kernels.

    Args:
        variant: of pod_sm90, whose settings split and share tiles differently; others make no difference.

    Raises:
        BucketOverflow: the bucket does not hold the batch.
    """
    demand = batch.demand(spec)
    if not bucket.fits(demand):
        raise BucketOverflow(
            f"bucket {bucket} does not hold {demand.requests} requests: {demand.prefills} prefills of "
            f"{demand.prefill_rows} rows, {demand.decodes} decodes; choose a larger one or split the batch"
        )
    if policy.kernels == "sm90":
        return plan_sm90(batch, bucket, spec, policy, sm90_setting(variant))
    return _plan_flashinfer(batch, bucket, spec, policy)


def _plan_flashinfer(batch: Batch, bucket: Bucket, spec: AttentionSpec, policy: Policy) -> WorkList:
    qo_lens, kv_lens = batch.qo_lens, batch.kv_lens
    n = batch.num_requests
    decodes = (qo_lens > 0) & (qo_lens <= spec.decode_rows)
    # decodes beyond the bucket's slots, in request order, take prefill slots
    decodes &= np.cumsum(decodes) <= bucket.decode_count

    chunk_size = np.full(n, UNSPLIT, np.int64)
    chunks = np.ones(n, np.int64)
    members_of = np.flatnonzero((qo_lens > 0) & ~decodes), np.flatnonzero(decodes)
    tile_of = prefill_tile(bucket, spec), DECODE_TILE
    tiles_of = [-(-qo_lens[m] * spec.group_size // max(t, 1)) for m, t in zip(members_of, tile_of, strict=True)]
    spans = [_span(kv_lens[m], t, spec) for m, t in zip(members_of, tile_of, strict=True)]
    load = [int((tiles * -(-span // CHUNK_UNIT)).sum()) for tiles, span in zip(tiles_of, spans, strict=True)]
    shares = policy.shares(spec, (int(tiles_of[0].sum()), int(tiles_of[1].sum())), (load[0], load[1]))
    chunk_of = [_chunk_tokens(t, span, share) for t, span, share in zip(tiles_of, spans, shares, strict=True)]
    prefill = _prefill_work(kv_lens[members_of[0]], qo_lens[members_of[0]], tiles_of[0], spans[0], shares[0])
    chunk_of[1] = _decode_chunk(spans[1], chunk_of[1], prefill, spec, policy)
    sides = []
    for members, tile, tiles, span, chunk in zip(members_of, tile_of, tiles_of, spans, chunk_of, strict=True):
        chunks[members] = -(-span // chunk)
        chunk_size[members] = np.where(chunks[members] > 1, chunk, UNSPLIT)
        sides.append(_items(members, tiles, tile, qo_lens, kv_lens, chunk, chunks, spec))

    partial_rows = np.where(chunks > 1, qo_lens * chunks, 0)
    o_indptr = np.cumsum(partial_rows) - partial_rows
    split = np.flatnonzero((chunks > 1) & (qo_lens > 0))
    rows = qo_lens[split]
    request = np.repeat(split, rows)
    row = np.arange(len(request)) - np.repeat(np.cumsum(rows) - rows, rows)
    work = WorkList(
        batch=batch,
        prefill=sides[0],
        decode=sides[1],
        kv_chunk_size=chunk_size,
        o_indptr=o_indptr,
        merge_rows=batch.qo_indptr[:-1].astype(np.int64)[request] + row,
        merge_first=o_indptr[request] + row * chunks[request],
        merge_count=_chunks_seen(request, row, qo_lens, kv_lens, chunk_size, chunks, spec),
    )
    _check(work, Capacity.of(bucket, spec, policy), int(partial_rows.sum()), bucket)
    return work


def _span(kv_lens: Int64, tile: int, spec: AttentionSpec) -> Int64:
    """KV tokens that one tile may look at, at least 1: what FlashInfer's kernel divides by the chunk size."""
    span = kv_lens if spec.window_left < 0 else np.minimum(kv_lens, spec.window_left + tile)
    return np.maximum(span, 1)


def _chunk_tokens(tiles: Int64, span: Int64, split_items: int) -> int:
    """The shortest KV chunk, in tokens, with at most ``split_items`` items; all of KV where tiles alone exceed that."""
    low, high = 1, int(-(-span.max(initial=1) // CHUNK_UNIT))
    budget = max(split_items, int(tiles.sum()))
    if int(tiles.sum()) >= split_items:
        return high * CHUNK_UNIT
    while low < high:
        middle = (low + high) // 2
        if int((tiles * -(-span // (middle * CHUNK_UNIT))).sum()) > budget:
            low = middle + 1
        else:
            high = middle
    return low * CHUNK_UNIT


def _prefill_work(kv_lens: Int64, qo_lens: Int64, tiles: Int64, span: Int64, share: int) -> tuple[int, int]:
    """Items of prefill, about, and what they read in units of `CHUNK_UNIT` tokens: what decodes have beside them."""
    seen = np.minimum(span, np.maximum(kv_lens - qo_lens // 2, 1))  # a tile, on average: the causal mask hides the rest
    count = int(tiles.sum())
    return max(count, share) if count else 0, int((tiles * -(-seen // CHUNK_UNIT)).sum())


def _decode_chunk(span: Int64, chunk: int, prefill: tuple[int, int], spec: AttentionSpec, policy: Policy) -> int:
    """The KV chunk of decodes, in tokens: the given one, or a finer one with which they are done sooner.

    A decode is one tile, since its rows fit one.
    """
    longest = int(span.max(initial=1))
    best, least = chunk, 0
    for share in DECODE_SHARES:
        finer = max(-(-longest // (share * CHUNK_UNIT)) * CHUNK_UNIT, DECODE_LEAST_CHUNK)
        if finer >= chunk or int((-(-span // finer)).sum()) - len(span) > policy.decode_extra(spec):
            continue
        time = policy.decode_time(spec, prefill, *_decode_levels(span, finer))
        if best == chunk or time < least:
            best, least = finer, time
    if best == chunk:
        return chunk
    whole = policy.decode_time(spec, prefill, *_decode_levels(span, chunk))
    return best if least * GAIN[1] < whole * GAIN[0] else chunk


def _decode_levels(span: Int64, chunk: int) -> tuple[list[int], list[int], int, int]:
    """Items of decode by length, as `Policy.decode_time` takes them. Lengths are multiples of `CHUNK_UNIT`."""
    longest = int(span.max(initial=1))
    full, most = chunk // CHUNK_UNIT + 1, -(-longest // chunk)
    top = full if most > 1 else -(-longest // CHUNK_UNIT)
    parts = -(-span // chunk)
    last = -(-(span - (parts - 1) * chunk) // CHUNK_UNIT) + (parts > 1)
    level = -(-last * LEVELS // top) - 1
    counts = np.bincount(level, minlength=LEVELS)
    sums = np.array([int(last[level == i].sum()) for i in range(LEVELS)])
    before_last = int((parts - 1).sum())
    if before_last:
        counts[-1] += before_last
        sums[-1] += before_last * full
    return counts.tolist(), sums.tolist(), top, most


def _items(
    members: Int64,
    tiles: Int64,
    tile: int,
    qo_lens: Int64,
    kv_lens: Int64,
    chunk: int,
    chunks: Int64,
    spec: AttentionSpec,
) -> Items:
    """Expands requests into items, drops those that the causal mask hides whole, sorts longest first."""
    per_request = tiles * chunks[members]
    request = np.repeat(members, per_request)
    index = np.arange(len(request)) - np.repeat(np.cumsum(per_request) - per_request, per_request)
    qo_tile, kv_tile = index // chunks[request], index % chunks[request]
    last_row = np.minimum(((qo_tile + 1) * tile - 1) // spec.group_size, qo_lens[request] - 1)
    seen = np.maximum(kv_lens[request] - qo_lens[request] + last_row + 1, 0)
    if spec.window_left >= 0:
        # with a window a chunk starts where its tile's window does; the kernel sorts out what lies beyond it
        length = np.minimum(np.where(chunks[request] > 1, chunk, spec.window_left + tile), seen)
        keep = np.ones(len(request), bool)
    else:
        begin = np.where(chunks[request] > 1, kv_tile * chunk, 0)
        end = np.where(chunks[request] > 1, np.minimum((kv_tile + 1) * chunk, seen), seen)
        length = end - begin
        keep = (length > 0) | (chunks[request] == 1)
    order = longest_first(-(-length[keep] // CHUNK_UNIT))
    return Items(request[keep][order], qo_tile[keep][order], kv_tile[keep][order])


def _chunks_seen(
    request: Int64, row: Int64, qo_lens: Int64, kv_lens: Int64, chunk_size: Int64, chunks: Int64, spec: AttentionSpec
) -> Int64:
    """How many partial results each row of a split request has: chunks beyond its causal limit are never written."""
    if spec.window_left >= 0:
        return chunks[request]
    seen = kv_lens[request] - qo_lens[request] + row + 1
    return -(-seen // chunk_size[request])


def _check(work: WorkList, capacity: Capacity, partial_rows: int, bucket: Bucket) -> None:
    needs = {
        "requests": work.batch.num_requests,
        "prefill_items": len(work.prefill.request_indices),
        "decode_items": len(work.decode.request_indices),
        "partial_rows": partial_rows,
        "merge_rows": len(work.merge_rows),
    }
    for name, need in needs.items():
        if need > getattr(capacity, name):
            raise BucketOverflow(f"bucket {bucket}: the batch needs {need} {name}, got {getattr(capacity, name)}")
