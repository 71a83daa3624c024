"""TMA descriptors of KV caches in device memory: what `KvMaps` in kernels/pod_sm90_memory.h reads.

Each cache (addresses, strides, pages) is described once. Its entry stays as it is while any graph may name it: a full
table starts over, in the order of the stream, unless an entry was captured by somebody.
"""

from __future__ import annotations

import ctypes
import struct

import torch

from podgraph import driver
from podgraph.dispatch.tensors import Cache
from podgraph.errors import BatchError, PodgraphError
from podgraph.shapes import AttentionSpec

ENTRY_BYTES = 768  # sizeof(KvMaps)
BLOCK_ENTRIES = 64
MAX_ENTRIES = 8192  # far more layers than any model has; only who makes a cache for each call, as tests do, has more
PREFILL_TOKENS = 16  # of one box: kPrefillBox
DECODE_TOKENS = 64  # at most: kBox
GROUP = 8  # tokens of a swizzle atom

Key = tuple[int, ...]


class KvMaps:
    """The descriptors of every cache that one dispatcher has seen.

    Raises:
        CudaError: not enough device memory.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._blocks: list[driver.Memory] = []
        self._addresses: dict[Key, int] = {}
        self._captured = False

    def address_of(self, cache: Cache, stream: int, capturing: bool) -> int:
        """Where the descriptors of a cache lie; made, and their copy enqueued, where the cache is a new one.

        Raises:
            BatchError: TMA cannot address these strides.
            PodgraphError: a new cache while the stream is captured; the copy would become part of the capture.
        """
        k, v = cache.k, cache.v
        key = (*cache.key, k.shape[0], v.shape[0])
        found = self._addresses.get(key)
        if found is not None:
            self._captured |= capturing
            return found
        if capturing:
            raise PodgraphError(
                "run: this cache is new, and the stream is captured; run() with it once before the capture"
            )
        if len(self._addresses) == MAX_ENTRIES:
            if self._captured:
                raise PodgraphError(f"run: more than {MAX_ENTRIES} different caches, and some were captured; bind anew")
            # replays under way read the old entries before the copies below, which come later in the stream
            self._addresses.clear()
        packed = self._packed("K cache", k) + self._packed("V cache", v)
        block, place = divmod(len(self._addresses), BLOCK_ENTRIES)
        if block == len(self._blocks):
            self._blocks.append(driver.Memory(BLOCK_ENTRIES * ENTRY_BYTES))
        address = self._blocks[block].address + place * ENTRY_BYTES
        # pageable memory: the driver has copied it when the call returns
        source = ctypes.create_string_buffer(packed, ENTRY_BYTES)
        driver.copy_to_device(address, ctypes.addressof(source), ENTRY_BYTES, stream)
        self._addresses[key] = address
        return address

    def _packed(self, name: str, cache: torch.Tensor) -> bytes:
        """`KvMap`: descriptors for prefill's and decode's boxes, and the factors of their coordinates."""
        spec = self._spec
        n, h = (1, 2) if spec.kv_layout == "NHD" else (2, 1)
        page, token, head = (cache.stride(i) * 2 for i in (0, n, h))  # bytes
        halves, pages, heads = spec.head_dim // 64, cache.shape[0], spec.num_kv_heads
        # (heads and halves, pages and heads): a head is either a step within the first or within the last dimension
        if head == spec.head_dim * 2 or heads == 1:
            third, last, factors = heads * halves, (pages, page), (halves, 0, 1)
        elif page % head == 0:
            third, last, factors = halves, (pages * (page // head), head), (0, 1, page // head)
        else:
            raise BatchError(
                f"{name}: got strides {cache.stride()}, allowed: heads next to each other, or pages a multiple of a "
                "head's stride apart"
            )
        sizes = (64, GROUP, third, spec.page_size // GROUP, last[0])
        strides = (token, 128, GROUP * token, last[1])
        if max(strides) >= 1 << 40 or sizes[4] >= 1 << 31:
            raise BatchError(f"{name}: got strides {cache.stride()}, allowed: below 2^40 bytes")
        maps = b""
        for tokens, promote in ((PREFILL_TOKENS, True), (min(spec.page_size, DECODE_TOKENS), False)):
            box = (64, GROUP, halves, tokens // GROUP, 1)
            maps += driver.tensor_map(cache.data_ptr(), spec.dtype, sizes, strides, box, promote)
        return (maps + struct.pack("<3i", *factors)).ljust(ENTRY_BYTES // 2, b"\0")

    def close(self) -> None:
        while self._blocks:
            self._blocks.pop().close()
        self._addresses = {}
