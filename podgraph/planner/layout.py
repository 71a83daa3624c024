"""Where each array of the metadata and of the work list lies in device memory.

One layout serves every bucket of a specification: offsets are kernel parameters, so equal offsets let buckets share one
graph. All arrays are int32 (one is an address in two of them) and start on 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from podgraph.planner.policy import Capacity, Kernels, Policy
from podgraph.shapes import AttentionSpec, Bucket

UNSPLIT = 0x7FFFFFFF  # kv_chunk_size of a request whose rows go straight to out (kUnsplit in kernels/args.h)
COUNTS = ("num_requests", "prefill_items", "decode_items", "merge_rows", "empty_requests")
ALIGN = 16
TILE_INTS, UNIT_INTS = 12, 8  # of a Tile and of a Unit of pod_sm90, in kernels/args.h


@dataclass(frozen=True)
class Array:
    """An int32 array of ``length`` elements at ``offset`` bytes of its region."""

    name: str
    region: str
    offset: int
    length: int


@dataclass(frozen=True)
class Layout:
    """The ``meta``, ``plan``, ``partials`` and ``counters`` regions of one specification.

    Attributes:
        capacity: what the lists hold at most, over all buckets.
        arrays: every int32 array of ``meta`` and ``plan`` by name.
        sizes: bytes of each region.
        partial_lse_offset: where the log-sum-exps of the partial results start in ``partials``, bytes.
    """

    capacity: Capacity
    arrays: dict[str, Array]
    sizes: dict[str, int]
    partial_lse_offset: int

    @classmethod
    def of(cls, spec: AttentionSpec, buckets: Iterable[Bucket], policy: Policy) -> Layout:
        """The layout that holds every batch of any of the buckets."""
        capacity = Capacity()
        for bucket in buckets:
            capacity = capacity.union(Capacity.of(bucket, spec, policy))
        return cls.for_capacity(spec, capacity, policy.kernels)

    @classmethod
    def for_capacity(cls, spec: AttentionSpec, capacity: Capacity, kernels: Kernels) -> Layout:
        arrays: dict[str, Array] = {}
        sizes: dict[str, int] = {}
        for region, name, length in _arrays(capacity) if kernels == "flashinfer" else _arrays_sm90(capacity):
            arrays[name] = Array(name, region, sizes.get(region, 0), length)
            sizes[region] = _align(arrays[name].offset + 4 * max(length, 1))
        sizes.setdefault("meta", ALIGN)
        row = capacity.partial_rows * spec.num_qo_heads
        # pod_sm90 keeps its partial results in float32
        partial_bytes = spec.bytes_per_element if kernels == "flashinfer" else 4
        partial_lse_offset = _align(row * spec.head_dim * partial_bytes)
        sizes["partials"] = _align(max(partial_lse_offset + 4 * row, ALIGN))
        tickets = 0 if kernels == "flashinfer" else capacity.merge_rows * spec.num_kv_heads
        sizes["counters"] = _align(ALIGN + 4 * tickets)
        return cls(capacity, arrays, sizes, partial_lse_offset)

    @property
    def step_bytes(self) -> int:
        """Bytes that one step writes: ``meta`` and ``plan``, one behind the other."""
        return self.sizes["meta"] + self.sizes["plan"]

    def views(self, step: npt.NDArray[np.int32]) -> dict[str, npt.NDArray[np.int32]]:
        """Every array as a view into ``step``, an int32 buffer of ``step_bytes``."""
        base = {"meta": 0, "plan": self.sizes["meta"]}
        return {a.name: step[(base[a.region] + a.offset) // 4 :][: a.length] for a in self.arrays.values()}


def _common() -> Iterator[tuple[str, str, int]]:
    """What both kinds of kernels have: how long the lists are, where kv_indices lie, which of these names no page."""
    yield "plan", "counts", len(COUNTS)
    yield "plan", "kv_indices_at", 2
    yield "plan", "bad_page", 1


def _arrays(capacity: Capacity) -> Iterator[tuple[str, str, int]]:
    """(region, name, length) in order; the names are the fields of ``Args`` in kernels/args.h."""
    n = capacity.requests
    yield "meta", "qo_indptr", n + 1
    yield "meta", "kv_indptr", n + 1
    yield "meta", "kv_last_page_len", n
    yield from _common()
    for side, items in (("prefill", capacity.prefill_items), ("decode", capacity.decode_items)):
        for name in ("request_indices", "qo_tile_indices", "kv_tile_indices"):
            yield "plan", f"{side}_{name}", items
    yield "plan", "kv_chunk_size", n
    yield "plan", "o_indptr", n
    for name in ("merge_rows", "merge_first", "merge_count"):
        yield "plan", name, capacity.merge_rows


def _arrays_sm90(capacity: Capacity) -> Iterator[tuple[str, str, int]]:
    """The same for pod_sm90, whose items hold all that a CTA must know of them."""
    yield from _common()
    yield "plan", "tiles", TILE_INTS * capacity.prefill_items
    yield "plan", "units", UNIT_INTS * capacity.decode_items
    yield "plan", "empty_rows", 2 * capacity.requests


def _align(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
