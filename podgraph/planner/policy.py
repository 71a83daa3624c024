"""How much a bucket may split: constants of the bucket, and the capacities that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from podgraph.shapes import DECODE_TILE, AttentionSpec, Bucket

# KV chunks are multiples of this many tokens: the KV tile of the decode side, so that no tile is computed half empty.
CHUNK_UNIT = 128

# CTAs that share an SM: one for prefill and one for decode, until either side is drained.
CTAS_PER_SM = 2


# Whose work lists: those of kernels/pod_flashinfer.cu and the interpreter, or those of kernels/pod_sm90.cu.
Kernels = Literal["flashinfer", "sm90"]
SM90 = "pod_sm90_"  # what the names of its variants begin with


def kernels_of(variant: str) -> Kernels:
    """Whose work lists a record's variant reads."""
    return "sm90" if variant.startswith(SM90) else "flashinfer"


@dataclass(frozen=True)
class Sm90Setting:
    """One way of pod_sm90 to share the memory of an SM between prefill and decode.

    Attributes:
        kv_block: KV tokens of a prefill step.
        stages: K and V blocks of prefill in flight.
        slots: 64-token chunks of K or V of decode in flight.
    """

    kv_block: int
    stages: int
    slots: int

    @property
    def shares_tiles(self) -> bool:
        """Whether few tiles are shared by both consumer warpgroups of a CTA: pays with four stages or more."""
        return self.stages >= 4

    @property
    def splits_tiles(self) -> bool:
        """Whether few tiles are split over CTAs: the wide setting has no registers left for partial results."""
        return self.kv_block < 128


# for steps where decode weighs most, where prefill does, and for short ones: see docs/pod_sm90.md
SM90_SETTINGS = {"w64": Sm90Setting(64, 2, 7), "w128": Sm90Setting(128, 2, 3), "w64d": Sm90Setting(64, 4, 3)}


def sm90_setting(variant: str) -> Sm90Setting:
    """The setting of a variant of pod_sm90."""
    return SM90_SETTINGS[variant.removeprefix(SM90)]


# pod_sm90: parts that decodes are split into beyond one for each, in rounds of the grid.
SM90_SPLIT_ROUNDS = 4


# pod_flashinfer: decodes may be split further than into one round, where an estimate says that it pays. The chunks that
# are tried are these shares of the longest KV, none shorter than DECODE_LEAST_CHUNK; they may make so many parts beyond
# one for each decode, in rounds of the grid.
DECODE_SHARES = (2, 3, 4, 6, 10, 18, 32)
DECODE_LEAST_CHUNK = 1024
DECODE_SPLIT_ROUNDS = 6
# The estimate counts the time of a CTA in decode tokens. Fitted by simulation, see docs/planner.md.
PART_COST = CHUNK_UNIT  # of a part, beside its tokens
MERGE_COST = 16  # of each part of the decode that has most
PREFILL_COST = (7, 5)  # of a token of a prefill tile
LEVELS = 8  # classes of length that the estimate tells apart
GAIN = (97, 100)  # finer chunks must be estimated to take less than this of the time


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


# How the two sides share one round of the grid (pod_flashinfer; pod_sm90 shares by drawing from two lists).
# tiles:   a side may be split into what the other's whole tiles leave of the round, half of it at least.
# kv_load: each side gets the share that its KV tokens are of both; the rule of FlashInfer's proposal for a uniform POD.
Partition = Literal["tiles", "kv_load"]
PARTITIONS: tuple[Partition, ...] = ("tiles", "kv_load")


@dataclass(frozen=True)
class Policy:
    """How far requests are split over KV.

    One round of the persistent grid is shared by both sides, by a rule of `PARTITIONS`. A side that has its share in
    whole tiles already is not split; below that, KV is cut into the shortest chunks that stay within it. Splitting
    further evens out lengths, but every part costs a partial result and its merge. A prefill tile has those for all of
    its rows: measured on nine shapes, more rounds lost 3 to 50 %. A decode has them for one row, and so decodes alone
    are split further where `decode_time` says that it pays.

    Attributes:
        ctas: CTAs of the persistent grid.
        kernels: whose work lists are made; pod_sm90 splits by rules of its own (podgraph/planner/sm90.py).
        partition: how the sides share a round.
    """

    ctas: int
    kernels: Kernels = "flashinfer"
    partition: Partition = "tiles"

    @classmethod
    def for_sms(cls, sm_count: int, kernels: Kernels = "flashinfer", partition: Partition = "tiles") -> Policy:
        """The policy of a GPU with ``sm_count`` multiprocessors; 0 is the interpreter, which splits as 8 would."""
        return cls((CTAS_PER_SM if kernels == "flashinfer" else 1) * (sm_count or 8), kernels, partition)

    def round_items(self, spec: AttentionSpec) -> int:
        """Items (per KV head) of one round of the grid: what a split side has at most."""
        return max(1, self.ctas // spec.num_kv_heads)

    def shares(self, spec: AttentionSpec, tiles: tuple[int, int], load: tuple[int, int]) -> tuple[int, int]:
        """Items that each side, prefill and decode, may be split into.

        Args:
            tiles: whole tiles of each side.
            load: KV that the tiles of each side read, in units of `CHUNK_UNIT` tokens.
        """
        items, total = self.round_items(spec), max(sum(load), 1)
        if self.partition == "kv_load":
            return max(1, items * load[0] // total), max(1, items * load[1] // total)
        return max(items - tiles[1], items // 2, 1), max(items - tiles[0], items // 2, 1)

    def decode_time(
        self,
        spec: AttentionSpec,
        prefill: tuple[int, int],
        counts: Sequence[int],
        sums: Sequence[int],
        longest: int,
        parts: int,
    ) -> int:
        """When the last decode is done, about, in tokens that one CTA decodes: what chunk sizes are compared by.

        Whole decodes leave a tail: some CTAs are still at a long one when nothing is left for the others. Decodes are
        drawn longest first, so it is enough to look, for each length, at the items of that length or longer. The last
        of them is done, whichever of these is earliest, when

        - all CTAs have done them and all of prefill, and half of one more: CTAs come free one after the other;
        - the CTAs that prefill leaves alone have done them, and half of one more;
        - those CTAs have drawn them in rounds, each as long as its items: exact where all are equal;
        - all CTAs have drawn them in rounds, after prefill.

        Integers only: kernels/plan_flashinfer.cu makes the same numbers.

        Args:
            prefill: items of prefill, about, and what they read in units of `CHUNK_UNIT` tokens, both for one KV head.
            counts: items of decode by length, `LEVELS` classes from short to long.
            sums: their lengths together, part costs included, in units of `CHUNK_UNIT`.
            longest: the longest item, likewise.
            parts: of the decode that has most.
        """
        heads, ctas = spec.num_kv_heads, self.ctas
        before = prefill[1] * heads * CHUNK_UNIT * PREFILL_COST[0] // PREFILL_COST[1]
        taken = min(ctas // 2, prefill[0] * heads)  # CTAs that prefill begins with
        time, count, work = longest * CHUNK_UNIT, 0, 0
        own_rounds = own_time = all_rounds = all_time = 0
        for level in reversed(range(LEVELS)):
            count += counts[level] * heads
            work += sums[level] * heads * CHUNK_UNIT
            length = longest * CHUNK_UNIT * (level + 1) // LEVELS
            rounds = -(-count // (ctas - taken))
            own_time, own_rounds = own_time + length * (rounds - own_rounds), rounds
            rounds = -(-count // ctas)
            all_time, all_rounds = all_time + length * (rounds - all_rounds), rounds
            shared = (before + work) // ctas + length // 2
            alone = work // (ctas - taken) + length // 2
            time = max(time, min(shared, alone, own_time, all_time + before // max(taken, 1)))
        return max(time, (before + work) // ctas) + (MERGE_COST * parts if parts > 1 else 0)

    def decode_extra(self, spec: AttentionSpec) -> int:
        """Items beyond one for each decode that they are split into at most where `decode_time` decides."""
        return DECODE_SPLIT_ROUNDS * self.round_items(spec)


@dataclass(frozen=True)
class Capacity:
    """What the work list of a bucket holds at most; a batch that needs more is a `BucketOverflow`.

    Attributes:
        requests: request slots.
        prefill_items, decode_items: entries of the two lists (with pod_sm90 tiles and units).
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
        if policy.kernels == "sm90":
            return cls._of_sm90(bucket, spec, policy)
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
            # either one round holds all parts, or each decode has one and these are more, of so many decodes at most
            extra = min(policy.decode_extra(spec), (DECODE_SHARES[-1] - 1) * bucket.decode_count)
            several = min(bucket.decode_count, max(extra, split // 2))
            decode_items = max(split, bucket.decode_count + extra)
            partial_rows += max(split, extra + several) * spec.decode_rows
            merge_rows += several * spec.decode_rows
        return cls(bucket.batch, prefill_items, decode_items, partial_rows, merge_rows)

    @classmethod
    def _of_sm90(cls, bucket: Bucket, spec: AttentionSpec, policy: Policy) -> Capacity:
        """Any request of at most ``decode_rows`` rows decodes there, whatever slot it takes: every slot may be one."""
        # each CTA's first item is read before their number is known, so the lists reach that far
        round_items = -(-policy.ctas // spec.num_kv_heads)
        tile_rows = 2 * (64 // spec.group_size)
        tiles = bucket.prefill_len // tile_rows + bucket.prefill_slots
        more = SM90_SPLIT_ROUNDS * round_items
        # tiles are split only as long as all parts are drawn in one round
        tile_parts = round_items if bucket.prefill_len else 0
        return cls(
            bucket.batch,
            max(tiles, round_items),
            bucket.batch + more,
            2 * more * spec.decode_rows + tile_parts * tile_rows,
            more + tile_parts // 2,
        )

    def union(self, other: Capacity) -> Capacity:
        """The least capacity that holds both."""
        return Capacity(*map(max, self._counts, other._counts))

    def holds(self, other: Capacity) -> bool:
        return all(mine >= needed for mine, needed in zip(self._counts, other._counts, strict=True))

    @property
    def _counts(self) -> tuple[int, ...]:
        return self.requests, self.prefill_items, self.decode_items, self.partial_rows, self.merge_rows


assert CHUNK_UNIT % DECODE_TILE == 0
assert DECODE_LEAST_CHUNK % CHUNK_UNIT == 0
assert PART_COST == CHUNK_UNIT  # one unit, in the sums of `decode_time`
