"""Plans on the GPU: the catalog's planner, launched with one step's metadata."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from podgraph import driver
from podgraph.catalog.model import Record, Template
from podgraph.dispatch.counters import Counters
from podgraph.errors import BatchError, CudaError
from podgraph.planner.args import PLAN, PLANNERS, bucket_scalars, plan_threads
from podgraph.shapes import AttentionSpec

RING_SLOTS = 4
ALIGN_INTS = 4  # every array of a slot starts on 16 bytes
MOST_INT32 = (1 << 31) - 1
STATUS_BYTES = 16  # sizeof(Report) in kernels/args.h

# Refusal in kernels/args.h: as counters name it, what was wrong (where request names one), and what is allowed.
REFUSALS = (
    ("", "", ""),
    ("qo_indptr", "qo_indptr at request {request}: got {got}", "from 0, never decreasing"),
    ("kv_indptr", "kv_indptr at request {request}: got {got}", "from 0, never decreasing"),
    ("kv_last_page_len", "kv_last_page_len of request {request}: got {got}", "1 to page_size={page_size}"),
    ("KV shorter than rows", "KV length of request {request}: got {got}", "0, or at least the request's query rows"),
    ("max_kv_len", "KV length of request {request}: got {got}", "at most workspace.max_kv_len = {max_kv_len}"),
    (
        "more rows than promised",
        "qo_indptr: got {got} query rows",
        "no more than prefill_len= and decode_count=, or the named bucket, promise",
    ),
    (
        "more pages than kv_indices",
        "kv_indptr: got {got} pages",
        "as many as kv_indices has, and at most workspace.max_pages = {max_pages}",
    ),
    (
        "more prefills than slots",
        "got {got} prefills, decodes beyond the bucket's decode_count included",
        "as many as its prefill slots",
    ),
    ("more prefill rows than the bucket", "got {got} prefill rows", "no more than the bucket's prefill_len"),
    ("more requests than the bucket", "got {got} requests", "no more than the bucket's batch"),
    ("prefill_len is another", "prefill_len: the batch has {got} prefill rows", "what plan() was told"),
    ("decode_count is another", "decode_count: the batch has {got} decodes", "what plan() was told"),
    ("kv_indices", "kv_indices of request {request}: got page {got}", "a page of every bound cache"),
    ("capacity", "a work list is too short", "any batch that fits its bucket; report this"),
)


@dataclass(frozen=True)
class Limits:
    """What refusals speak of."""

    page_size: int
    max_pages: int
    max_kv_len: int


# Of qo_indptr, kv_indptr, kv_last_page_len and kv_indices in device memory; 0 for one that lies on the host.
Addresses = tuple[int, int, int, int]


class Planner:
    """The planner of one specification at the runtime's addresses.

    Attributes:
        report: the first that the GPU refused since the code was 0: code, request, got, number of the launch. In host
            memory, written by the GPU.

    Args:
        template: its nodes, by function name: the check of page numbers, and the planner.
        regions: addresses of ``meta`` and ``plan``.
    """

    def __init__(
        self,
        template: Template,
        images: Mapping[str, driver.Image],
        regions: Mapping[str, int],
        spec: AttentionSpec,
        limits: Limits,
        counters: Counters,
    ) -> None:
        self._spec, self._limits, self._counters = spec, limits, counters
        self._number = 0  # of the last launch
        self._record: Record | None = None  # whose bucket the parameters hold
        self._status = driver.PinnedMemory(STATUS_BYTES)
        try:
            self.report = (ctypes.c_int32 * 4).from_address(self._status.address)
            self.report[:] = [0] * 4
            self._params, kernels = bytearray(template.nodes[-1].params), {}
            for relocation in template.relocations:
                if relocation.region in regions:
                    address = regions[relocation.region] + relocation.addend
                    struct.pack_into("<Q", self._params, relocation.offset, address)
            struct.pack_into("<Q", self._params, PLAN.offset_of("status"), self._status.address)
            for node in template.nodes:
                if node.function not in PLANNERS or len(node.params) != len(self._params):
                    raise CudaError(f"the planner's kernel {node.function} is none that this podgraph knows")
                function = images[node.image].function(node.function, node.shared_bytes, len(node.params))
                launch = driver.Launch(function, node.grid, node.block, node.shared_bytes, node.params)
                kernels[node.function] = driver.Kernel(launch, self._params)
        except BaseException:
            self._status.close()
            raise
        self._check_pages = kernels.pop("podgraph_check_pages")
        (self._plan,) = kernels.values()
        self._pack_addresses = struct.Struct("<4Q").pack_into
        told = PLAN.scalars.index("batch")  # in front of what a bucket decides: what each step tells anew
        self._pack_step = struct.Struct(f"<{told}i").pack_into
        self._pack_bucket = struct.Struct(f"<{len(PLAN.scalars) - told}i").pack_into
        self._step_at, self._bucket_at = PLAN.offset_of(PLAN.scalars[0]), PLAN.offset_of("batch")

    def launch(
        self,
        stream: int,
        record: Record,
        addresses: Addresses,
        num_requests: int,
        num_indices: int,
        rows: int,
        num_pages: int = 0,
        prefill_len: int = -1,
        decode_count: int = -1,
        first_row: int = 0,
    ) -> None:
        """Enqueues the plan of a step into a bucket.

        Args:
            addresses: of the step's metadata in device memory.
            num_requests, num_indices: entries of kv_last_page_len and kv_indices.
            rows: query rows that q and out will have at least.
            num_pages: pages of the smallest cache; 0 does not check page numbers.
            prefill_len, decode_count: what the caller said, -1 for nothing.
            first_row: qo_indptr[0], which is not 0 where the step is a part of a batch.
        """
        params = self._params
        if record is not self._record:
            self._pack_bucket(
                params, self._bucket_at, *bucket_scalars(self._spec, record.bucket, record.variant).values()
            )
            self._record = record
        self._pack_addresses(params, 0, *addresses)
        self._number = number = self._number % MOST_INT32 + 1
        self._pack_step(
            params,
            self._step_at,
            number,
            first_row,
            num_requests,
            num_indices if num_indices < MOST_INT32 else MOST_INT32,
            num_pages,
            rows,
            prefill_len,
            decode_count,
        )
        if num_pages:
            self._check_pages.enqueue(stream)
        self._plan.enqueue(stream, plan_threads(num_requests))

    def raise_refusal(self) -> None:
        """Raises what the GPU found wrong with a step since the last call, if anything is known of it by now.

        Raises:
            BatchError: the step computed nothing.
        """
        code = self.report[0]
        if code == 0:
            return
        _, request, got, number = self.report
        self.report[0] = 0  # from here on the next one may be written
        unknown = f"refusal {code}"
        kind, wrong, allowed = (
            REFUSALS[code] if 0 < code < len(REFUSALS) else (unknown, unknown, "what this podgraph knows")
        )
        self._counters.planner_errors[kind] += 1
        words = {"request": request, "got": got, **vars(self._limits)}
        raise BatchError(
            f"an earlier plan() (the planner's launch {number} of {self._number} so far) was refused on the GPU, and "
            f"its run() computed nothing: {wrong.format(**words)}, "
            f"allowed: {allowed.format(**words)}"
        )

    def close(self) -> None:
        self._status.close()


class Staging:
    """Brings metadata from the host to the device: a ring of pinned slots, and one place in device memory.

    A full ring waits for its oldest copy only.

    Args:
        requests, pages: what a step has at most.
    """

    def __init__(self, requests: int, pages: int) -> None:
        lengths = (requests + 1, requests + 1, requests, pages)
        self._places, at = [], 0
        for length in lengths:
            self._places.append(at)
            at += -(-max(length, 1) // ALIGN_INTS) * ALIGN_INTS
        self._lengths = lengths
        self.size = 4 * at
        self._device = driver.Memory(self.size)
        self._events: list[driver.Event] = []
        self._next = 0
        try:
            self._pinned = driver.PinnedMemory(RING_SLOTS * self.size)
            self.pinned_size = self._pinned.size
            for _ in range(RING_SLOTS):
                self._events.append(driver.Event())
        except BaseException:
            self._device.close()
            raise
        ring = np.ctypeslib.as_array((ctypes.c_int32 * (RING_SLOTS * at)).from_address(self._pinned.address))
        self._slots = [ring[i * at : (i + 1) * at] for i in range(RING_SLOTS)]

    def upload(
        self, stream: int, arrays: list[npt.NDArray[np.int32] | torch.Tensor], addresses: list[int]
    ) -> tuple[int, int, int, int]:
        """Copies what lies on the host; returns where all four arrays lie on the device.

        Args:
            arrays: qo_indptr, kv_indptr, kv_last_page_len, kv_indices.
            addresses: of those that lie on the device already.

        Raises:
            BatchError: an array has more entries than any step may have.
        """
        index = self._next
        self._next = (index + 1) % RING_SLOTS
        self._events[index].wait()
        slot = self._slots[index]
        first = last = -1
        placed = list(addresses)
        for i, array in enumerate(arrays):
            if isinstance(array, torch.Tensor):
                continue
            if len(array) > self._lengths[i]:
                name = ("qo_indptr", "kv_indptr", "kv_last_page_len", "kv_indices")[i]
                raise BatchError(f"{name}: got {len(array)} entries, allowed: at most {self._lengths[i]}")
            at = self._places[i]
            slot[at : at + len(array)] = array
            placed[i] = self._device.address + 4 * at
            first, last = at if first < 0 else first, at + len(array)
        if last > first:
            driver.copy_to_device(
                self._device.address + 4 * first, slot.ctypes.data + 4 * first, 4 * (last - first), stream
            )
        self._events[index].record(stream)
        return placed[0], placed[1], placed[2], placed[3]

    def close(self) -> None:
        for event in self._events:
            event.wait()
            event.close()
        self._events = []
        self._pinned.close()
        self._device.close()
