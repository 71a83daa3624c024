"""The GPU backend: images, regions, planner and graph execs of one bound catalog.

Addresses of the runtime's own regions never change until `close`. All buckets of a specification share their regions
and, through their templates, their execs: device memory does not grow with the number of buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from podgraph import driver
from podgraph.batch import Batch
from podgraph.catalog.model import Catalog, Record
from podgraph.dispatch.again import Repeat
from podgraph.dispatch.calls import Call
from podgraph.dispatch.counters import Counters
from podgraph.dispatch.execs import ExecPool, Key
from podgraph.dispatch.images import Images, Loaded
from podgraph.dispatch.kv_maps import KvMaps
from podgraph.dispatch.planning import Addresses, Limits, Planner, Staging
from podgraph.dispatch.tensors import Cache
from podgraph.errors import CudaError
from podgraph.planner import Layout, kernels_of
from podgraph.shapes import AttentionSpec

NAN_BYTE = 0xFF  # bfloat16, float16 and float32 NaN; what must not be read shows itself

Metadata = list[npt.NDArray[np.int32] | torch.Tensor]


class GpuBackend:
    """Owns everything on the device for one (catalog, spec, stream).

    Raises:
        CudaError: not enough device memory, or a kernel that is not in its image. Nothing stays allocated then.
        CatalogError: an image is damaged.
    """

    def __init__(
        self,
        catalog: Catalog,
        spec_name: str,
        layout: Layout,
        device: torch.device,
        stream: int,
        images: Images,
        counters: Counters,
        memory_budget: int | None,
    ) -> None:
        self.device, self.stream, self.layout = device, stream, layout
        entry = catalog.specs[spec_name]
        self.spec: AttentionSpec = entry.attention
        self._owned: list[driver.Memory | Loaded | Planner | Staging | ExecPool | KvMaps] = []
        self._counters = counters
        self._parts: list[tuple[Record, Batch]] = []
        self._keys: list[tuple[int, Record | None]] = []  # of what is planned: template, and record with its own exec
        self._dedicated: set[Record] = set()
        self._rows = 0
        self._kv_maps: KvMaps | None = None
        self._bound_maps: KvMaps | None = None  # apart: these stay, however many others come and go
        self.capturing = driver.CaptureProbe(stream)
        self._context = driver.current_context()
        try:
            self._place_regions(4 * (catalog.max_pages + 3 * layout.capacity.requests))
            loaded = images.acquire({r.template for r in catalog.buckets(spec_name)} | {entry.planner})
            self._owned.append(loaded)
            limits = Limits(self.spec.page_size, catalog.max_pages, catalog.max_kv_len)
            self._planner = Planner(
                catalog.templates[entry.planner], loaded.by_digest, self.regions, self.spec, limits, counters
            )
            self._owned.append(self._planner)
            self.report = self._planner.report
            self._staging = Staging(layout.capacity.requests, catalog.max_pages)
            self._owned.append(self._staging)
            self._pool = ExecPool(catalog.templates, loaded.by_digest, self.regions, counters, memory_budget)
            self._owned.append(self._pool)
            for record in catalog.buckets(spec_name):  # so that a kernel that is not in its image is found here
                self._pool.launches(record.template)
            if any(kernels_of(r.variant) == "sm90" for r in catalog.buckets(spec_name)):
                self._kv_maps, self._bound_maps = KvMaps(self.spec), KvMaps(self.spec)
                self._owned += [self._kv_maps, self._bound_maps]
            self.reset()
        except BaseException:
            self.close()
            raise

    def _place_regions(self, staging: int) -> None:
        needed = sum(self.layout.sizes.values()) + staging
        free = driver.free_memory()
        if needed > free:
            raise CudaError(
                f"the catalog's regions need {needed:,} bytes of device memory, {free:,} are free; free some "
                "(torch keeps what it freed: torch.cuda.empty_cache()), or build with fewer prefill slots"
            )
        self._memory = {name: self._allocate(size) for name, size in self.layout.sizes.items()}
        self.regions = {name: memory.address for name, memory in self._memory.items()}

    def _allocate(self, size: int) -> driver.Memory:
        memory = driver.Memory(size)
        self._owned.append(memory)
        return memory

    def prewarm(self, records: Sequence[Record], layers: Sequence[int | None]) -> None:
        """Makes the execs that these records use, and uploads them."""
        for template in sorted({record.template for record in records}):
            for layer in layers:
                self._pool.get((template, layer), template).upload(self.stream)

    def dedicate(self, records: Sequence[Record]) -> None:
        """Gives each record an exec of its own, instantiated and uploaded."""
        for record in records:
            self._pool.get((record.template, record), record.template).upload(self.stream)
            self._dedicated.add(record)

    def reset(self) -> None:
        """Zeroes the counters and fills the scratch with NaN: the state after bind. Enqueued on the stream."""
        for name, memory in self._memory.items():
            memory.fill(0 if name == "counters" else NAN_BYTE, self.stream)
        self._parts, self._keys = [], []

    def plan(self, parts: list[tuple[Record, Batch]], rows: int) -> None:
        """Plans from the host. Keeps the parts of a step; a single part goes to the device at once."""
        self._parts, self._rows = parts, rows
        self._keys = [self._key(record) for record, _ in parts]
        if len(parts) == 1:
            self._plan_batch(*parts[0])

    def _key(self, record: Record) -> tuple[int, Record | None]:
        return record.template, record if record in self._dedicated else None

    def _plan_batch(self, record: Record, batch: Batch) -> None:
        arrays: Metadata = [batch.qo_indptr, batch.kv_indptr, batch.kv_last_page_len, batch.kv_indices]
        addresses = self._staging.upload(self.stream, arrays, [0] * 4)
        self._planner.launch(
            self.stream,
            record,
            addresses,
            batch.num_requests,
            len(batch.kv_indices),
            self._rows,
            first_row=int(batch.qo_indptr[0]),
        )

    def plan_in_place(
        self,
        record: Record,
        arrays: Sequence[Any],
        addresses: Addresses,
        num_requests: int,
        num_indices: int,
        rows: int,
        num_pages: int,
        prefill_len: int,
        decode_count: int,
    ) -> None:
        """Plans a step whose metadata lie on the GPU, some of them at least.

        Args:
            arrays: qo_indptr, kv_indptr, kv_last_page_len, kv_indices.
            addresses: of those that lie on the GPU; the others are brought there.
        """
        self._keys = [self._key(record)] if self._dedicated else [(record.template, None)]
        if 0 in addresses:
            addresses = self._staging.upload(self.stream, list(arrays), list(addresses))
        self._planner.launch(
            self.stream, record, addresses, num_requests, num_indices, rows, num_pages, prefill_len, decode_count
        )

    def capture_id(self) -> int:
        """Which capture the stream is in, 0 for none."""
        return driver.capture_id(self.stream)

    def enter_thread(self) -> None:
        """Makes the device's context current in the calling thread."""
        driver.make_current(self._context)

    def raise_refusal(self) -> None:
        """Raises what the GPU is known to have refused."""
        self._planner.raise_refusal()

    def synchronize(self) -> None:
        driver.call("cuStreamSynchronize", self.stream)

    def describe(self, cache: Cache) -> int:
        """Where the TMA descriptors of a cache that is bound will lie, 0 where no kernel needs them."""
        if self._bound_maps is None:
            return 0
        return self._bound_maps.address_of(cache, self.stream, self.capturing())

    def run(
        self,
        call: Call,
        cache: Cache,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        layer: int | None,
        came: bool,
        eager: bool,
    ) -> tuple[str, Repeat | None]:
        """Replays every part. A capturing stream, or ``eager``, gets plain launches instead of a graph.

        So does a bound layer's call at addresses that neither its graph holds nor the call before had, where a template
        is a single kernel: launching that takes the driver half as long as patching a graph and launching it. Who comes
        with the same tensors again gets the graph.

        Args:
            came: whether the layer's call before was the same.

        Returns:
            How it ran: ``graph``, ``eager``, or ``captured`` by somebody. And how the layer can run again under any
            plan of the template, unless this is not for sure.
        """
        capturing, maps = self.capturing(), cache.maps
        if maps == 0 and self._kv_maps is not None:
            maps = self._kv_maps.address_of(cache, self.stream, capturing)
        repeat = None
        for i, (template, record) in enumerate(self._keys):
            if len(self._keys) > 1:
                self._plan_batch(*self._parts[i])
            key: Key = (template, layer if record is None else record)
            launches = self._pool.launches(template)
            graph = self._pool.find(key)
            if not came and layer is not None and len(launches.kernels) == 1:
                eager |= graph is None or not graph.holds(call, cache, maps)
            if eager or capturing:
                launches.set(call, cache, maps)
                launches.enqueue(self.stream)
            else:
                graph = self._pool.get(key, template)
                self._counters.exec_updates += graph.replay(self.stream, call, cache, maps)
            if record is None and layer is not None and len(self._keys) == 1 and not (capturing or self._pool.evicts):
                alone = launches.alone(self.stream, cache, maps)
                if graph is not None:
                    repeat = Repeat(graph.held, graph.launcher(self.stream), alone)
                elif alone is not None:
                    repeat = Repeat((), None, alone)
        return "captured" if capturing else "eager" if eager else "graph", repeat

    def memory(self) -> dict[str, int]:
        """Bytes of the regions, the staging memory and the execs; the execs' by the driver's own count."""
        regions = sum(memory.size for memory in self._memory.values()) + self._staging.size
        return {"regions": regions, "pinned": self._staging.pinned_size, "execs": self._pool.bytes}

    def close(self) -> None:
        """Waits for the stream, then frees everything."""
        if self._owned:
            self.synchronize()
        while self._owned:
            self._owned.pop().close()
