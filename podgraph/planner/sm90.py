"""The work lists of pod_sm90: prefill tiles and decode units, longest first.

A unit is a whole (request, KV head) pair wherever that balances: splitting costs partial results, a merge and a restart
of the decode pipeline. Both lists follow from prefix sums over requests sorted by size class, in integers and without a
heap: kernels/plan_sm90.cu makes the same lists in one thread block, number for number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from podgraph.batch import Batch
from podgraph.errors import BucketOverflow
from podgraph.planner.layout import TILE_INTS, UNIT_INTS, Layout
from podgraph.planner.order import CLASSES, longest_first, size_class
from podgraph.planner.policy import SM90_SPLIT_ROUNDS, Capacity, Policy, Sm90Setting
from podgraph.shapes import AttentionSpec, Bucket

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

CHUNK = 64  # tokens of one decode step (kChunk in kernels/pod_sm90_memory.h)
# Ways to split: (a part is at most 2 / rounds of what an SM has still to do, least part as a share of an SM's work).
# The last parts are then the smallest ones. (0, 1) splits nothing. kWays in kernels/plan_sm90.cu.
SPLITS = ((0, 1), (2, 8), (2, 16), (2, 32), (3, 16), (3, 32), (5, 32))
LEAST_PART = 4  # chunks; a first part then holds the window's edge of every row of its request
MOST_PARTS = 4095  # of one request: they are numbered in 12 bits
TILE_UNIT = 128  # tokens: the largest KV block of any setting, so that a part is whole blocks in all of them
LEAST_TILE_PART = 2  # units
MOST_TILE_PARTS = 256  # of all tiles
# What a part costs beside its chunks, and what any split costs, in units of 1 / COST_UNIT chunk: integers, so that the
# planner on the GPU finds the same. Fitted on one H200, see docs/pod_sm90.md.
COST_UNIT = 32
WHOLE_COST, PART_COST, SPLIT_COST, MERGE_COST = 16, 80, 128, 11


# What a batch's two sides take alone, from rates that the settings reach on one H200; only their ratio matters, and
# whether both are short.
PREFILL_FLOPS, DECODE_BYTES_PER_S = 600e12, 4.4e12
SHORT_US = 40.0
PREFILL_SHARE = 0.7  # of decode's time: above it prefill weighs more


def preferred_setting(batch: Batch, spec: AttentionSpec) -> str:
    """The setting made for a batch like this; a bucket cannot know it, since KV lengths are not part of its shape.

    Measured on 27 shapes: where the setting that the build's own samples favour differs, this one was faster.
    """
    rows, kv_lens = batch.qo_lens.astype(np.int64), batch.kv_lens.astype(np.int64)
    prefills = rows > spec.decode_rows
    pairs = float((rows * kv_lens - rows * (rows - 1) // 2)[prefills].sum())
    prefill_us = 4 * spec.num_qo_heads * spec.head_dim * pairs / PREFILL_FLOPS * 1e6
    token_bytes = 2 * spec.num_kv_heads * spec.head_dim * spec.kv_bytes_per_element
    decode_us = float(kv_lens[~prefills].sum()) * token_bytes / DECODE_BYTES_PER_S * 1e6
    if max(prefill_us, decode_us) < SHORT_US:
        return "w64d" if prefill_us else "w64"
    return "w128" if prefill_us > PREFILL_SHARE * decode_us else "w64"


@dataclass(frozen=True)
class Sm90WorkList:
    """The plan of one batch.

    Attributes:
        batch: the batch that it was made for.
        tiles, units: ``[n, 12]`` and ``[n, 8]`` int64, rows of `Tile` and `Unit` in kernels/args.h.
        empty_rows: ``[n, 2]`` int64, first row and rows of each request that has rows and no KV.
        parts: rows of partial results in all.
    """

    batch: Batch
    tiles: Int64
    units: Int64
    empty_rows: Int64
    parts: int

    def pack(self, layout: Layout, step: Int32) -> None:
        """Writes the plan into ``step`` (int32, ``layout.step_bytes``), every list at its place."""
        views = layout.views(step)
        views["counts"][:] = (self.batch.num_requests, len(self.tiles), len(self.units), 0, len(self.empty_rows))
        for name in ("tiles", "units", "empty_rows"):
            values = getattr(self, name)
            views[name][: values.size] = values.ravel()


def plan_sm90(batch: Batch, bucket: Bucket, spec: AttentionSpec, policy: Policy, setting: Sm90Setting) -> Sm90WorkList:
    """Plans a batch that fits a bucket.

    Raises:
        BucketOverflow: a list is longer than the bucket's capacity.
    """
    qo_lens, kv_lens = batch.qo_lens.astype(np.int64), batch.kv_lens.astype(np.int64)
    decodes = np.flatnonzero((qo_lens > 0) & (qo_lens <= spec.decode_rows) & (kv_lens > 0))
    prefills = np.flatnonzero((qo_lens > spec.decode_rows) & (kv_lens > 0))
    empty = np.flatnonzero((qo_lens > 0) & (kv_lens == 0))
    begin = batch.qo_indptr[:-1].astype(np.int64)
    units, parts, tickets = _units(batch, decodes, spec, policy)
    tiles, tile_parts, tile_tickets = _tiles(batch, prefills, spec, policy, setting, parts, tickets)
    parts, tickets = parts + tile_parts, tickets + tile_tickets
    work = Sm90WorkList(
        batch=batch,
        tiles=tiles,
        units=units,
        empty_rows=np.stack([begin[empty], qo_lens[empty]], axis=1),
        parts=parts,
    )
    capacity = Capacity.of(bucket, spec, policy)
    needs = {
        "prefill_items": len(work.tiles),
        "decode_items": len(work.units),
        "partial_rows": parts,
        "merge_rows": tickets,
    }
    for name, need in needs.items():
        if need > getattr(capacity, name):
            raise BucketOverflow(f"bucket {bucket}: the batch needs {need} {name}, got {getattr(capacity, name)}")
    return work


def _tiles(
    batch: Batch,
    prefills: Int64,
    spec: AttentionSpec,
    policy: Policy,
    setting: Sm90Setting,
    first_part: int,
    first_ticket: int,
) -> tuple[Int64, int, int]:
    """The prefill tiles, and how many rows of partial results and how many counters they use."""
    qo_lens, kv_lens = batch.qo_lens.astype(np.int64)[prefills], batch.kv_lens.astype(np.int64)[prefills]
    half = 64 // spec.group_size  # rows of one warpgroup
    per_request = -(-qo_lens // (2 * half))
    shared = setting.shares_tiles and int(per_request.sum()) * spec.num_kv_heads <= policy.ctas // 2
    size = half if shared else 2 * half
    per_request = -(-qo_lens // size)
    request = np.repeat(np.arange(len(prefills)), per_request)
    first = (np.arange(len(request)) - np.repeat(np.cumsum(per_request) - per_request, per_request)) * size
    rows = np.minimum(size, qo_lens[request] - first)
    position = kv_lens[request] - qo_lens[request] + first
    start = np.zeros_like(position)
    if spec.window_left >= 0:
        start = np.maximum(position - spec.window_left, 0) // TILE_UNIT * TILE_UNIT
    end = position + rows
    length = -(-(end - start) // TILE_UNIT)
    size = _tile_part(length, min(policy.ctas // spec.num_kv_heads, MOST_TILE_PARTS) if setting.splits_tiles else 0)
    parts = -(-length // size)
    tile = np.repeat(np.arange(len(request)), parts)
    number = np.arange(len(tile)) - np.repeat(np.cumsum(parts) - parts, parts)
    split = parts > 1
    partial_rows = np.where(split, parts * rows, 0)
    tiles = np.zeros((len(tile), TILE_INTS), np.int64)
    tiles[:, 0] = batch.kv_indptr[:-1][prefills][request][tile]
    tiles[:, 1] = np.diff(batch.kv_indptr).astype(np.int64)[prefills][request][tile]
    tiles[:, 2] = (batch.qo_indptr[:-1][prefills][request] + first)[tile]
    tiles[:, 3] = rows[tile]
    tiles[:, 4] = position[tile]
    tiles[:, 5] = kv_lens[request][tile]
    tiles[:, 6] = start[tile] + number * size * TILE_UNIT
    tiles[:, 7] = np.minimum(tiles[:, 6] + size * TILE_UNIT, end[tile])
    tiles[:, 8] = shared
    tiles[:, 9] = first_part + (np.cumsum(partial_rows) - partial_rows)[tile]
    tiles[:, 10] = number | parts[tile] << 12
    tiles[:, 11] = first_ticket + (np.cumsum(split) - split)[tile]
    work = -(-(tiles[:, 7] - tiles[:, 6]) // CHUNK)
    return tiles[longest_first(work)], int(partial_rows.sum()), int(split.sum())


def _tile_part(length: Int64, most: int) -> int:
    """The shortest part, in units, with at most ``most`` of them in all; whole tiles where these alone are as many."""
    longest = int(length.max(initial=1))
    low, high = min(LEAST_TILE_PART, longest), longest
    while low < high:
        middle = (low + high) // 2
        if int((-(-length // middle)).sum()) > most:
            low = middle + 1
        else:
            high = middle
    return low


def _units(batch: Batch, decodes: Int64, spec: AttentionSpec, policy: Policy) -> tuple[Int64, int, int]:
    """The decode units, and how many rows of partial results and counters they use.

    A part has room for the partial results of ``decode_rows`` rows, whatever the request has: a constant of the kernel.
    """
    qo_lens, kv_lens = batch.qo_lens.astype(np.int64)[decodes], batch.kv_lens.astype(np.int64)[decodes]
    hidden = np.zeros((2, len(decodes)), np.int64)  # tokens that the window hides from the first row, and from the last
    if spec.window_left >= 0:
        hidden = np.maximum(np.stack([kv_lens - qo_lens, kv_lens - 1]) - spec.window_left, 0)
    start = hidden[0] // CHUNK * CHUNK
    skip = hidden[1] - start
    chunks = -(-(kv_lens - start) // CHUNK)
    order = longest_first(chunks)
    decodes, qo_lens, kv_lens, start, skip, chunks = (
        x[order] for x in (decodes, qo_lens, kv_lens, start, skip, chunks)
    )
    parts = _parts(chunks, spec, policy)
    size = -(-chunks // parts)  # chunks of a part
    parts = -(-chunks // size)  # rounding up may leave the last part empty
    request = np.repeat(np.arange(len(decodes)), parts)
    number = np.arange(len(request)) - np.repeat(np.cumsum(parts) - parts, parts)
    split = parts > 1
    partial_rows = np.where(split, parts * spec.decode_rows, 0)
    first_part = np.cumsum(partial_rows) - partial_rows
    ticket = np.cumsum(split) - split
    units = np.zeros((len(request), UNIT_INTS), np.int64)
    units[:, 0] = batch.kv_indptr[:-1][decodes][request]
    units[:, 1] = np.diff(batch.kv_indptr).astype(np.int64)[decodes][request]
    units[:, 2] = start[request] + number * size[request] * CHUNK
    units[:, 3] = np.minimum(units[:, 2] + size[request] * CHUNK, kv_lens[request])
    units[:, 4] = batch.qo_indptr[:-1][decodes][request]
    units[:, 5] = first_part[request]
    units[:, 6] = number | parts[request] << 12 | np.where(number == 0, skip[request], 0) << 24
    more_rows = qo_lens[request] - 1
    units[:, 7] = ticket[request] | more_rows << 16 | np.minimum(kv_lens[request] - units[:, 3], more_rows) << 20
    length = -(-(units[:, 3] - units[:, 2]) // CHUNK)
    return units[longest_first(length)], int(partial_rows.sum()), int(split.sum())


def _parts(chunks: Int64, spec: AttentionSpec, policy: Policy) -> Int64:
    """Parts of each request, from the way of splitting with the least estimated time; chunks are in falling order."""
    whole = np.ones_like(chunks)
    if not len(chunks):
        return whole
    heads, workers = spec.num_kv_heads, policy.ctas
    total = int(chunks.sum()) * heads
    left = total - heads * (np.cumsum(chunks) - chunks)  # work of this request and all behind it
    most = SM90_SPLIT_ROUNDS * -(-workers // heads)  # parts beyond one each that the lists have room for
    best, least = whole, -1
    for rounds, share in SPLITS:
        if rounds == 0:
            parts = whole
        else:
            smallest = max(LEAST_PART, total // (workers * share))
            size = np.maximum(smallest, -(-2 * left // (rounds * workers)))
            parts = np.where(chunks <= size + smallest // 2, 1, np.minimum(-(-chunks // size), MOST_PARTS))
            if int((parts - 1).sum()) > most:
                continue
        time = _estimate(chunks, parts, heads, workers)
        if least < 0 or time < least:
            best, least = parts, time
    return best


def _estimate(chunks: Int64, parts: Int64, heads: int, workers: int) -> int:
    """Time of the longest worker, in `COST_UNIT`: the lower of two bounds on a list that is drawn longest first.

    Each draw of all workers takes as long as its longest unit; or, a unit starts when the work before it is spread
    evenly (Graham's bound). Equal lengths make the first exact, ragged ones the second one close. Units of one size
    class count with their mean, which leaves one number and one sum for each class.
    """
    size = -(-chunks // parts)
    cost = COST_UNIT * size + np.where(parts > 1, PART_COST, WHOLE_COST)
    classes = size_class(cost // COST_UNIT)
    units, sums = np.zeros(CLASSES, np.int64), np.zeros(CLASSES, np.int64)
    np.add.at(units, classes, parts)
    np.add.at(sums, classes, parts * cost)
    held = np.flatnonzero(units)[::-1]
    mean = sums[held] // units[held]
    last = heads * np.cumsum(units[held])
    first = last - heads * units[held]
    draws = int((mean * (-(-last // workers) - -(-first // workers))).sum())
    spread = int(((heads * np.cumsum(sums[held]) - mean) // workers + mean).max())
    most = int(parts.max())
    return min(draws, spread) + (SPLIT_COST + MERGE_COST * most if most > 1 else 0)
