"""The GPU backend: images, regions and graph execs of one bound catalog.

Addresses of the runtime's own regions never change until `close`. All buckets of a specification share their regions
and, through their templates, their execs: device memory does not grow with the number of buckets.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from podgraph import driver
from podgraph.catalog import cubin
from podgraph.catalog.model import Catalog, Record, Template
from podgraph.dispatch.counters import Counters
from podgraph.dispatch.kv_maps import KvMaps
from podgraph.dispatch.tensors import Call
from podgraph.errors import CudaError
from podgraph.planner import AnyWorkList, Layout, kernels_of
from podgraph.planner.args import RUN_POINTERS, RUN_STRIDES
from podgraph.shapes import AttentionSpec

RING_SLOTS = 4
NAN_BYTE = 0xFF  # bfloat16, float16 and float32 NaN; what must not be read shows itself


class GpuBackend:
    """Owns everything on the device for one (catalog, spec, stream).

    Raises:
        CudaError: not enough device memory, or a kernel that is not in its image. Nothing stays allocated then.
        CatalogError: an image is damaged.
    """

    def __init__(self, catalog: Catalog, spec_name: str, layout: Layout, device: torch.device, stream: int) -> None:
        self.device, self.stream, self.layout = device, stream, layout
        self.spec: AttentionSpec = catalog.specs[spec_name].attention
        self._owned: list[driver.Memory | driver.Image | Ring | GraphExec | KvMaps] = []
        self._execs: dict[int, GraphExec] = {}  # by template: shared by its buckets
        self._dedicated: dict[Record, GraphExec] = {}
        self._images: dict[str, driver.Image] = {}
        self._templates = catalog.templates
        self._parts: list[tuple[Record, AnyWorkList]] = []
        self._kv_maps: KvMaps | None = None
        try:
            self._place_regions(catalog.max_pages)
            self._load_execs(catalog, spec_name)
            self._ring = Ring(layout.step_bytes + 4 * catalog.max_pages)
            self._owned.append(self._ring)
            if any(kernels_of(r.variant) == "sm90" for r in catalog.buckets(spec_name)):
                self._kv_maps = KvMaps(self.spec)
                self._owned.append(self._kv_maps)
            self.reset()
        except BaseException:
            self.close()
            raise

    def _place_regions(self, max_pages: int) -> None:
        needed = sum(self.layout.sizes.values()) + 4 * max_pages
        free = driver.free_memory()
        if needed > free:
            raise CudaError(
                f"the catalog's regions need {needed:,} bytes of device memory, {free:,} are free; free some "
                "(torch keeps what it freed: torch.cuda.empty_cache()), or build with fewer prefill slots"
            )
        # meta, plan and kv_indices lie behind one another: a step is one copy
        step = self._allocate(self.layout.step_bytes + 4 * max_pages)
        self._partials = self._allocate(self.layout.sizes["partials"])
        self._counters = self._allocate(self.layout.sizes["counters"])
        self._step = step
        self.regions = {
            "meta": step.address,
            "plan": step.address + self.layout.sizes["meta"],
            "kv_indices": step.address + self.layout.step_bytes,
            "partials": self._partials.address,
            "counters": self._counters.address,
        }

    def _allocate(self, size: int) -> driver.Memory:
        memory = driver.Memory(size)
        self._owned.append(memory)
        return memory

    def _load_execs(self, catalog: Catalog, spec_name: str) -> None:
        for index in sorted({r.template for r in catalog.buckets(spec_name)}):
            for node in self._templates[index].nodes:
                if node.image not in self._images:
                    cubin.kernels(catalog.images[node.image])  # one that is cut would crash the driver
                    self._images[node.image] = driver.Image(catalog.images[node.image])
                    self._owned.append(self._images[node.image])
            self._execs[index] = self._make_exec(index)

    def _make_exec(self, template: int) -> GraphExec:
        graph = GraphExec(self._templates[template], self._images, self.regions)
        self._owned.append(graph)
        return graph

    def prewarm(self, records: Sequence[Record]) -> None:
        """Gives each record an exec of its own, instantiated and uploaded."""
        for record in records:
            if record not in self._dedicated:
                self._dedicated[record] = self._make_exec(record.template)
                self._dedicated[record].upload(self.stream)

    def reset(self) -> None:
        """Zeroes the counters and fills the scratch with NaN: the state after bind. Enqueued on the stream."""
        self._partials.fill(NAN_BYTE, self.stream)
        self._step.fill(NAN_BYTE, self.stream)
        self._counters.fill(0, self.stream)
        self._parts = []

    def plan(self, parts: list[tuple[Record, AnyWorkList]]) -> None:
        """Keeps the parts of a step; a single part goes to the device at once."""
        self._parts = parts
        if len(parts) == 1:
            self._upload(parts[0][1])

    def run(self, call: Call, counters: Counters, eager: bool) -> bool:
        """Replays every part. A capturing stream, or ``eager``, gets plain launches instead of a graph.

        Returns:
            Whether the launches went into somebody's capture.
        """
        capturing = driver.is_capturing(self.stream)
        maps = 0 if self._kv_maps is None else self._kv_maps.address_of(call, self.stream, capturing)
        pointers, strides = (*call.pointers(), maps), call.strides(self.spec)
        if capturing and len(self._parts) > 1:
            raise CudaError("run: a split batch cannot be captured; capture with a batch that one bucket holds")
        for record, work in self._parts:
            if len(self._parts) > 1:
                self._upload(work)
            graph = self._dedicated.get(record) or self._execs[record.template]
            if eager or capturing:
                graph.enqueue(self.stream, pointers, strides)
            else:
                counters.exec_updates += graph.replay(self.stream, pointers, strides)
        return capturing

    def _upload(self, work: AnyWorkList) -> None:
        if driver.is_capturing(self.stream):
            raise CudaError("plan: host metadata cannot be planned while the stream captures; plan before the capture")
        pages = work.batch.kv_indices
        size = self.layout.step_bytes + 4 * len(pages)
        with self._ring.slot(self.stream) as slot:
            work.pack(self.layout, slot[: self.layout.step_bytes // 4])
            slot[self.layout.step_bytes // 4 : size // 4] = pages
            driver.copy_to_device(self._step.address, slot.ctypes.data, size, self.stream)

    def memory(self) -> dict[str, int]:
        """Bytes of the regions and images; execs are measured by the caller, from the driver."""
        regions = self._step.size + self._partials.size + self._counters.size
        return {"regions": regions, "pinned": self._ring.size}

    def close(self) -> None:
        """Waits for the stream, then frees everything."""
        if self._owned:
            driver.call("cuStreamSynchronize", self.stream)
        while self._owned:
            self._owned.pop().close()
        self._execs, self._dedicated, self._images = {}, {}, {}


class GraphExec:
    """One template made executable at the runtime's addresses; q, out, lse and the caches are set per replay."""

    def __init__(self, template: Template, images: dict[str, driver.Image], regions: dict[str, int]) -> None:
        self._params = [bytearray(node.params) for node in template.nodes]
        for relocation in template.relocations:
            if relocation.region in regions:  # the others are slots
                address = regions[relocation.region] + relocation.addend
                struct.pack_into("<Q", self._params[relocation.node], relocation.offset, address)
        self._pointer_slots = _slot_offsets(template, RUN_POINTERS, 8)
        self._stride_slots = _slot_offsets(template, RUN_STRIDES, 4)
        self._launches = [
            driver.Launch(
                images[n.image].function(n.function, n.shared_bytes, len(n.params)),
                n.grid,
                n.block,
                n.shared_bytes,
                b"",
            )
            for n in template.nodes
        ]
        self._graph = driver.Graph()
        for launch in self._filled((0,) * len(RUN_POINTERS), (0,) * len(RUN_STRIDES)):
            self._graph.add_kernel(launch)
        for edge in template.edges:
            self._graph.add_edge(edge.source, edge.target, edge.data)
        self._exec = self._graph.instantiate()
        self._current: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def upload(self, stream: int) -> None:
        """Moves the exec to the device now rather than at its first launch."""
        self._exec.upload(stream)

    def replay(self, stream: int, pointers: tuple[int, ...], strides: tuple[int, ...]) -> int:
        """Launches the graph; returns 1 where addresses or strides had to be changed first."""
        updated = 0
        if self._current != (pointers, strides):
            for node, launch in enumerate(self._filled(pointers, strides)):
                self._exec.set_kernel(node, launch)
            self._current = (pointers, strides)
            updated = 1
        self._exec.launch(stream)
        return updated

    def enqueue(self, stream: int, pointers: tuple[int, ...], strides: tuple[int, ...]) -> None:
        """The same kernels, launched one by one."""
        for launch in self._filled(pointers, strides):
            launch.enqueue(stream)

    def _filled(self, pointers: tuple[int, ...], strides: tuple[int, ...]) -> list[driver.Launch]:
        filled = []
        for node, (launch, params) in enumerate(zip(self._launches, self._params, strict=True)):
            for value, offset in zip(pointers, self._pointer_slots[node], strict=True):
                struct.pack_into("<Q", params, offset, value)
            for value, offset in zip(strides, self._stride_slots[node], strict=True):
                struct.pack_into("<I", params, offset, value)
            filled.append(driver.Launch(launch.function, launch.grid, launch.block, launch.shared_bytes, bytes(params)))
        return filled

    def close(self) -> None:
        self._exec.close()
        self._graph.close()


def _slot_offsets(template: Template, names: tuple[str, ...], size: int) -> list[list[int]]:
    """Per node, the offset of each named slot."""
    found = {(s.node, s.name): s for s in template.slots}
    offsets = []
    for node in range(len(template.nodes)):
        missing = [name for name in names if (node, name) not in found or found[node, name].size != size]
        if missing:
            raise CudaError(f"template node {node}: slot {missing[0]} is missing or of another size than {size} bytes")
        offsets.append([found[node, name].offset for name in names])
    return offsets


class Ring:
    """Pinned host buffers for steps on their way to the device: a full ring waits for its oldest copy only."""

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = -(-slot_bytes // 256) * 256
        self.size = RING_SLOTS * self._slot_bytes
        self._memory = driver.PinnedMemory(self.size)
        self._events = [driver.Event() for _ in range(RING_SLOTS)]
        self._next = 0

    def slot(self, stream: int) -> _Slot:
        index = self._next
        self._next = (index + 1) % RING_SLOTS
        self._events[index].wait()
        address = self._memory.address + index * self._slot_bytes
        return _Slot(address, self._slot_bytes, self._events[index], stream)

    def close(self) -> None:
        for event in self._events:
            event.wait()
            event.close()
        self._memory.close()


class _Slot:
    """A slot of the ring as an int32 array; leaving the block marks when the stream is done with it."""

    def __init__(self, address: int, size: int, event: driver.Event, stream: int) -> None:
        self._address, self._size, self._event, self._stream = address, size, event, stream

    def __enter__(self) -> npt.NDArray[np.int32]:
        return np.ctypeslib.as_array((ctypes.c_int32 * (self._size // 4)).from_address(self._address))

    def __exit__(self, *_: object) -> None:
        self._event.record(self._stream)
