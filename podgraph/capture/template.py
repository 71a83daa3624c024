"""From kernel launches to a template: capture, read back, prove, order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from podgraph import driver
from podgraph.capture.relocate import Capture, Place, relocate
from podgraph.catalog.model import Edge, KernelNode, Template
from podgraph.errors import CaptureError
from podgraph.planner.args import ParamStruct

# What the loader sets on every node it adds; a captured node with anything else would replay differently.
DEFAULT_ATTRIBUTES = {"cooperative": 0, "clusterDim": 0, "programmaticStreamSerializationAllowed": 0}
REGION_ALIGN = 256


@dataclass(frozen=True)
class Function:
    """A loaded kernel and where a catalog finds it again."""

    handle: driver.Handle
    image: str
    name: str


LaunchesAt = Callable[[Mapping[str, int], Mapping[str, int]], list[driver.Launch]]


def make_template(
    launches_at: LaunchesAt, functions: list[Function], takes: ParamStruct, region_sizes: Mapping[str, int]
) -> Template:
    """Captures a bucket's launches three times and turns them into a template.

    Args:
        launches_at: the launches for given region addresses and scalars.
        functions: every kernel that may appear.
        takes: the struct that each of them takes.
        region_sizes: bytes of every region; external ones with any size that keeps them apart.

    Raises:
        CaptureError: something cannot be stored or explained.
    """
    span = sum(_padded(size) for size in region_sizes.values())
    slab = driver.Memory(2 * span + REGION_ALIGN * len(region_sizes) ** 2)
    try:
        low, high = _places(slab.address, region_sizes, 0), _places(slab.address + span, region_sizes, REGION_ALIGN)
        # powers of two apart from each other, so that a swapped pair of scalars cannot go unnoticed
        scalars_a = {name: 128 << i for i, name in enumerate(takes.scalars)}
        scalars_b = {name: 8 * (i + 3) for i, name in enumerate(takes.scalars)}
        a, edges = _capture(launches_at, functions, low, scalars_a)
        again, edges_again = _capture(launches_at, functions, low, scalars_a)
        b, edges_b = _capture(launches_at, functions, high, scalars_b)
        if not edges == edges_again == edges_b:
            raise CaptureError("the graph's edges differ between captures of the same bucket")
        relocated = relocate(a, again, b, takes, driver.is_device_address)
    finally:
        slab.close()
    return Template(relocated.nodes, edges, relocated.relocations, relocated.slots)


def _padded(size: int) -> int:
    return -(-max(size, 1) // REGION_ALIGN) * REGION_ALIGN


def _places(address: int, region_sizes: Mapping[str, int], step: int) -> dict[str, Place]:
    """Regions one behind the other, the i-th of them i steps further on."""
    places = {}
    for i, (name, size) in enumerate(region_sizes.items()):
        places[name] = Place(address + step * i, size)
        address += _padded(size)
    return places


def _capture(
    launches_at: LaunchesAt, functions: list[Function], places: Mapping[str, Place], scalars: Mapping[str, int]
) -> tuple[Capture, tuple[Edge, ...]]:
    graph = driver.Graph.capture(launches_at({name: place.address for name, place in places.items()}, scalars))
    try:
        nodes, edges = graph.describe()
    finally:
        graph.close()
    order = topological_order(len(nodes), [(source, target) for source, target, _ in edges])
    position = {node: i for i, node in enumerate(order)}
    by_handle = {int(function.handle): function for function in functions}
    kernels = tuple(_kernel_node(i, nodes[node], by_handle) for i, node in enumerate(order))
    links = sorted((position[source], position[target], data) for source, target, data in edges)
    return Capture(kernels, places, scalars), tuple(Edge(*link) for link in links)


def topological_order(count: int, edges: list[tuple[int, int]]) -> list[int]:
    """Node numbers such that every edge goes forward; among free nodes the lowest first."""
    waits = [0] * count
    for _, target in edges:
        waits[target] += 1
    order: list[int] = []
    free = [i for i in range(count) if waits[i] == 0]
    while free:
        node = min(free)
        free.remove(node)
        order.append(node)
        for source, target in edges:
            if source == node:
                waits[target] -= 1
                if waits[target] == 0:
                    free.append(target)
    if len(order) != count:
        raise CaptureError("the captured graph has a cycle")
    return order


def _kernel_node(index: int, node: driver.NodeInfo, functions: Mapping[int, Function]) -> KernelNode:
    if node.kind != driver.GRAPH_KERNEL_NODE:
        raise CaptureError(f"node {index}: {node.kind} cannot be stored in a catalog, allowed: kernel nodes")
    function = functions.get(node.function)
    if function is None or function.name != node.function_name:
        raise CaptureError(f"node {index}: kernel {node.function_name} comes from no image of the catalog")
    if len(node.params) != 1:
        raise CaptureError(f"node {index} ({function.name}): {len(node.params)} parameters, allowed: one struct")
    for name, value in node.attributes:
        if name in DEFAULT_ATTRIBUTES and value not in (
            DEFAULT_ATTRIBUTES[name],
            *([1] if name == "clusterDim" else []),
        ):
            raise CaptureError(f"node {index} ({function.name}): launch attribute {name}={value} cannot be stored")
    return KernelNode(function.image, function.name, node.grid, node.block, node.shared_bytes, node.params[0])
