"""What a work list may hold at most, because kernels pack its numbers into words or multiply them in 32 bits.

What is packed and bounded by constants alone is held by a test: numbers of parts (12 bits of ``Tile.parts`` and
``Unit.parts``), tokens that a window hides (7 bits), rows of a decode (4 bits).
"""

from __future__ import annotations

from collections.abc import Iterator

from podgraph.planner.policy import Capacity, Kernels
from podgraph.shapes import AttentionSpec

# Requests that a planner's shared memory has room for on every architecture: 40 bytes each beside 37 KB, of 163 KB.
MAX_BATCH = 3072
TICKET_BITS = 16  # of Unit.ticket in kernels/args.h, where a decode may have several rows
# Counters are int32, and every CTA or warp adds its step once more than there is work.
MAX_INDEX = (1 << 31) - (1 << 16)
MAX_UINT32 = (1 << 32) - 1


def limits(spec: AttentionSpec, capacity: Capacity, kernels: Kernels) -> Iterator[tuple[str, int, str]]:
    """Yields (field of `Capacity`, got, allowed) for each that the kernels of a GPU could not hold."""
    if capacity.requests > MAX_BATCH:
        yield "requests", capacity.requests, f"at most {MAX_BATCH}: one thread block plans a step"
    for field in ("prefill_items", "decode_items"):
        # drawn as item * num_kv_heads + head
        most = MAX_INDEX // spec.num_kv_heads
        if getattr(capacity, field) > most:
            yield field, getattr(capacity, field), f"at most {most} for {spec.num_kv_heads} KV heads (32-bit tickets)"
    if kernels == "sm90":
        most = MAX_INDEX // spec.num_kv_heads  # counters of finished parts
        if spec.decode_rows > 1:
            most = min(most, 1 << TICKET_BITS)
        if capacity.merge_rows > most:
            yield "merge_rows", capacity.merge_rows, f"at most {most}, which tickets of work units have room for"
        return
    most = MAX_INDEX // spec.num_qo_heads  # drawn as row * num_qo_heads + head
    if capacity.merge_rows > most:
        yield "merge_rows", capacity.merge_rows, f"at most {most} for {spec.num_qo_heads} heads (32-bit tickets)"
    # FlashInfer's kernels multiply a row by its elements as uint32_t
    most = MAX_UINT32 // (spec.num_qo_heads * spec.head_dim)
    if capacity.partial_rows > most:
        yield "partial_rows", capacity.partial_rows, f"at most {most}: 2^32 elements of partial results"
