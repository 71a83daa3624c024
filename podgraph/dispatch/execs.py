"""Graphs made executable at the runtime's addresses, and how many of them stay in memory."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from podgraph import driver
from podgraph.catalog.model import Template
from podgraph.dispatch.calls import Call
from podgraph.dispatch.counters import Counters
from podgraph.dispatch.tensors import Cache
from podgraph.errors import CudaError
from podgraph.planner.args import RUN

# Device memory that the driver takes at a time for execs: what one more may need at once.
GROWTH_BYTES = 2 << 20

PACK_POINTERS, PACK_SCALARS = struct.Struct("<6Q").pack_into, struct.Struct("<8I").pack_into

Key = tuple[int, object]  # template, and what the exec is for: a layer, or one record


class Launches:
    """The kernels of one template at the runtime's addresses; what one call of run() sets can be set again."""

    def __init__(self, template: Template, images: Mapping[str, driver.Image], regions: Mapping[str, int]) -> None:
        self._spans = _spans(template)
        params = [bytearray(node.params) for node in template.nodes]
        for relocation in template.relocations:
            if relocation.region in regions:  # the others are slots
                address = regions[relocation.region] + relocation.addend
                struct.pack_into("<Q", params[relocation.node], relocation.offset, address)
        self.kernels = [
            driver.Kernel(
                driver.Launch(
                    images[n.image].function(n.function, n.shared_bytes, len(n.params)),
                    n.grid,
                    n.block,
                    n.shared_bytes,
                    bytes(filled),
                )
            )
            for n, filled in zip(template.nodes, params, strict=True)
        ]

    def set(self, call: Call, cache: Cache, maps: int) -> None:
        """Points every kernel at the tensors of one call."""
        q, out, lse, q_n, q_h = call.key
        k, v, *strides = cache.key
        for kernel, (pointers, scalars) in zip(self.kernels, self._spans, strict=True):
            PACK_POINTERS(kernel.params, pointers, q, k, v, out, lse, maps)
            PACK_SCALARS(kernel.params, scalars, q_n, q_h, *strides)

    def enqueue(self, stream: int) -> None:
        """Launches the kernels one by one."""
        for kernel in self.kernels:
            kernel.enqueue(stream)

    def alone(self, stream: int, cache: Cache, maps: int) -> Callable[[Call], int] | None:
        """What launches the template's only kernel over one cache, and returns the driver's status.

        None where the template has several kernels.
        """
        if len(self.kernels) > 1:
            return None
        (kernel,), ((pointers, scalars),) = self.kernels, self._spans
        params, launch, (k, v, *strides) = kernel.params, kernel.launcher(stream), cache.key

        def launch_alone(call: Call) -> int:
            q, out, lse, q_n, q_h = call.key
            PACK_POINTERS(params, pointers, q, k, v, out, lse, maps)
            PACK_SCALARS(params, scalars, q_n, q_h, *strides)  # the other layers' caches share these parameters
            return launch()

        return launch_alone


class GraphExec:
    """One template made executable."""

    def __init__(self, template: Template, images: Mapping[str, driver.Image], regions: Mapping[str, int]) -> None:
        self._launches = Launches(template, images, regions)
        self._graph = driver.Graph()
        try:
            for kernel in self._launches.kernels:
                self._graph.add_kernel(kernel)
            for edge in template.edges:
                self._graph.add_edge(edge.source, edge.target, edge.data)
            self._exec = self._graph.instantiate()
        except BaseException:
            self._graph.close()
            raise
        self._held: tuple[tuple[int, ...], tuple[int, ...], int] | None = None

    @property
    def held(self) -> tuple[int, ...]:
        """`Call.key` of what it holds; empty where it holds nothing yet."""
        return () if self._held is None else self._held[0]

    def launcher(self, stream: int) -> Callable[[], int]:
        """What replays it with what it holds, and returns the driver's status."""
        return self._exec.launcher(stream)

    def upload(self, stream: int) -> None:
        """Moves the exec to the device now rather than at its first launch."""
        self._exec.upload(stream)

    def holds(self, call: Call, cache: Cache, maps: int) -> bool:
        """Whether a replay would need no other addresses or strides."""
        return self._held == (call.key, cache.key, maps)

    def replay(self, stream: int, call: Call, cache: Cache, maps: int) -> int:
        """Launches the graph; returns 1 where addresses or strides had to be changed first."""
        updated = 0
        if not self.holds(call, cache, maps):
            self._held = None  # should the driver fail half way
            self._launches.set(call, cache, maps)
            for node, kernel in enumerate(self._launches.kernels):
                self._exec.set_kernel(node, kernel)
            self._held = call.key, cache.key, maps
            updated = 1
        self._exec.launch(stream)
        return updated

    def close(self) -> None:
        self._exec.close()
        self._graph.close()


class ExecPool:
    """Execs by what they are for, made when first needed; the least recently used one goes where memory is short.

    The driver destroys an exec only when its launches are done, and gives its memory to the next one: nothing here
    waits.

    Args:
        memory_budget: bytes of device memory for execs, or None for no limit. One exec is always kept.

    Attributes:
        evicts: whether an exec may go before the pool is closed.
        bytes: device memory that making execs took, by the driver's own count.
    """

    def __init__(
        self,
        templates: Sequence[Template],
        images: Mapping[str, driver.Image],
        regions: Mapping[str, int],
        counters: Counters,
        memory_budget: int | None,
    ) -> None:
        self._templates, self._images, self._regions = templates, images, regions
        self._counters, self._budget = counters, memory_budget
        self._execs: OrderedDict[Key, GraphExec] = OrderedDict()
        self._find = self._execs.get
        self._launches: dict[int, Launches] = {}
        self.evicts = memory_budget is not None
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._execs)

    def launches(self, template: int) -> Launches:
        """The template's kernels, for plain launches."""
        if template not in self._launches:
            self._launches[template] = Launches(self._templates[template], self._images, self._regions)
        return self._launches[template]

    def get(self, key: Key, template: int) -> GraphExec:
        """The exec for a use, made where there is none."""
        found = self._find(key)
        if found is None:
            return self._make(key, template)
        if self._budget is not None:
            self._execs.move_to_end(key)
        return found

    def find(self, key: Key) -> GraphExec | None:
        """The exec for a use, where there is one."""
        return self._find(key)

    def _make(self, key: Key, template: int) -> GraphExec:
        if self._budget is not None and self._execs and self.bytes + GROWTH_BYTES > self._budget:
            # the next one takes the memory that this one leaves
            self._execs.popitem(last=False)[1].close()
            self._counters.exec_evictions += 1
        before = driver.free_memory()
        made = GraphExec(self._templates[template], self._images, self._regions)
        self.bytes += max(0, before - driver.free_memory())
        self._execs[key] = made
        self._counters.exec_instantiations += 1
        return made

    def close(self) -> None:
        while self._execs:
            self._execs.popitem()[1].close()
        self._launches = {}


def _spans(template: Template) -> list[tuple[int, int]]:
    """Per node, where the pointers and the scalars that run() sets begin: each kind lies in one piece.

    Raises:
        CudaError: a slot is missing, or lies elsewhere.
    """
    found = {(s.node, s.name): (s.offset, s.size) for s in template.slots}
    for node in range(len(template.nodes)):
        for name, place in RUN.slots.items():
            if found.get((node, name)) != place:
                raise CudaError(f"template node {node}: no slot {name} where this podgraph has it")
    return [(RUN.offset_of(RUN.pointers[0]), RUN.offset_of(RUN.scalars[0]))] * len(template.nodes)
