"""How much a bucket may split: constants of the bucket, and the capacities that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from podgraph.shapes import DECODE_TILE, AttentionSpec, Bucket

# KV chunks are multiples of this many tokens: the KV tile of the decode side, so that no tile is computed half empty.
CHUNK_UNIT = 128

# CTAs that share an SM: one for prefill and one for decode, until either side is drained.
CTAS_PER_SM = 2


def prefill_tile(bucket: Bucket, spec: AttentionSpec) -> int:
    """Packed rows (row x head of the group) of one prefill tile; 0 where the bucket has no prefill.

    FlashInfer's rule (``FA2DetermineCtaTileQ`` in its ``utils.cuh``), for the longest prefill that the bucket holds.
    """
    packed = bucket.prefill_len * spec.group_size
    if packed == 0:
        return 0
    if packed <= 16:
        return 16
    return 64 if packed <= 64 or spec.head_dim >= 256 else 128


@dataclass(frozen=True)
class Policy:
    """How far requests are split over KV.

    One round of the persistent grid is shared by both sides. A side that has its share in whole tiles already is not
    split; below that, KV is cut into the shortest chunks that stay within it. Splitting further evens out lengths, but
    every part costs a partial result and its merge: measured on nine shapes, more rounds lost 3 to 50 %.

    Attributes:
        ctas: CTAs of the persistent grid.
    """

    ctas: int

    @classmethod
    def for_sms(cls, sm_count: int) -> Policy:
        """The policy of a GPU with ``sm_count`` multiprocessors; 0 is the interpreter, which splits as 8 would."""
        return cls(ctas=CTAS_PER_SM * (sm_count or 8))

    def round_items(self, spec: AttentionSpec) -> int:
        """Items (per KV head) of one round of the grid: what a split side has at most."""
        return max(1, self.ctas // spec.num_kv_heads)

    def share(self, spec: AttentionSpec, other_tiles: int) -> int:
        """Items that a side may be split into beside the other's whole tiles: the rest of a round, half at least."""
        items = self.round_items(spec)
        return max(items - other_tiles, items // 2, 1)


@dataclass(frozen=True)
class Capacity:
    """What the work list of a bucket holds at most; a batch that needs more is a `BucketOverflow`.

    Attributes:
        requests: request slots.
        prefill_items, decode_items: entries of the two lists.
        partial_rows: rows of partial results.
        merge_rows: rows with several partial results.
    """

    requests: int = 0
    prefill_items: int = 0
    decode_items: int = 0
    partial_rows: int = 0
    merge_rows: int = 0

    @classmethod
    def of(cls, bucket: Bucket, spec: AttentionSpec, policy: Policy) -> Capacity:
        prefill_items = decode_items = partial_rows = merge_rows = 0
        tile = prefill_tile(bucket, spec)
        if tile:
            split = policy.round_items(spec)
            # sum of ceil(packed rows / tile) over the slots, each rounded up once
            tiles = bucket.prefill_len * spec.group_size // tile + bucket.prefill_slots
            prefill_items = max(split, tiles)
            # a request of t tiles has at most t * tile / group rows; split only while all tiles x chunks stay <= split
            rows = split * tile // spec.group_size
            partial_rows += rows
            merge_rows += min(bucket.prefill_len, rows // 2)
        if bucket.decode_count:
            split = policy.round_items(spec)
            decode_items = max(split, bucket.decode_count)
            rows = split * spec.decode_rows
            partial_rows += rows
            merge_rows += min(bucket.decode_count * spec.decode_rows, rows // 2)
        return cls(bucket.batch, prefill_items, decode_items, partial_rows, merge_rows)

    def union(self, other: Capacity) -> Capacity:
        """The least capacity that holds both."""
        return Capacity(*map(max, self._counts, other._counts))

    def holds(self, other: Capacity) -> bool:
        return all(mine >= needed for mine, needed in zip(self._counts, other._counts, strict=True))

    @property
    def _counts(self) -> tuple[int, ...]:
        return self.requests, self.prefill_items, self.decode_items, self.partial_rows, self.merge_rows


assert CHUNK_UNIT % DECODE_TILE == 0
