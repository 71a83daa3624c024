"""What a template must be, node by node: all of it follows from specification, policy, capacities and variant.

The build holds what it captured against this, a reader what a file says. Only the images cannot be derived; each says
what it was compiled from (`Source.identity`) and how much shared memory it needs.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podgraph.catalog.cubin import Cubin
from podgraph.catalog.model import Edge, KernelNode, Relocation, Slot, Template
from podgraph.catalog.values import shown
from podgraph.errors import CatalogError
from podgraph.planner import Layout, Policy
from podgraph.planner.args import PLAN, PLAN_THREADS, RUN, ParamStruct, fill, fill_plan, params_of
from podgraph.planner.policy import SM90, Kernels
from podgraph.providers import flashinfer, planner, pod_sm90
from podgraph.providers.nvcc import Source
from podgraph.shapes import AttentionSpec, Bucket

POD_THREADS, MERGE_THREADS = 128, 256  # of a block over FlashInfer's headers, and of the merge behind it
MARK = 1 << 44  # apart by more than any region has bytes

Params = Callable[[Mapping[str, int], Mapping[str, int]], ctypes.Structure]


@dataclass(frozen=True)
class Setup:
    """What the graphs of one specification follow from, beside bucket and variant."""

    spec: AttentionSpec
    layout: Layout
    policy: Policy
    sm_count: int
    arch: str


@dataclass(frozen=True)
class Kernel:
    """One node: what it is compiled from, its entry name, and how it is launched.

    Attributes:
        grid, block: in x.
        shared: dynamic shared memory: a constant of the image that holds bytes, and how many times as much; without a
            name none.
    """

    source: Source
    function: str
    grid: int
    block: int
    shared: tuple[str, int] = ("", 0)


@dataclass(frozen=True)
class Graph:
    """A template before its images are known: kernels one behind the other, which all take the same parameters.

    Attributes:
        kernels: in order.
        takes: the struct.
        params: fills it for addresses and scalars.
        own: bytes of the regions that the runtime allocates and the parameters refer to.
    """

    kernels: tuple[Kernel, ...]
    takes: ParamStruct
    params: Params
    own: Mapping[str, int]


def variants_of(spec: AttentionSpec, kernels: Kernels, arch: str, bucket: Bucket) -> tuple[str, ...]:
    """Every way to compute a bucket with these kernels; none where they do not serve the specification."""
    if kernels == "flashinfer":
        return (flashinfer.PodVariant.of(bucket, spec).name,)
    if pod_sm90.refusal(spec, arch):
        return ()
    return tuple(map(pod_sm90.variant_of, pod_sm90.settings_of(spec)))


def attention_graph(setup: Setup, bucket: Bucket, variant: str) -> Graph:
    """What computes a bucket in one of its `variants_of`; the same for every bucket of a variant."""
    spec, layout, shared = setup.spec, setup.layout, ("podgraph_smem_bytes", 1)
    if setup.policy.kernels == "sm90":
        source = pod_sm90.source(spec, variant.removeprefix(SM90))
        # a persistent grid; it merges partial results itself
        kernels = [Kernel(source, "podgraph_pod_sm90", setup.policy.ctas, pod_sm90.THREADS, shared)]
    else:
        source = flashinfer.pod_source(spec, flashinfer.PodVariant.of(bucket, spec), setup.arch)
        kernels = [
            Kernel(source, "podgraph_pod", setup.policy.ctas, POD_THREADS, shared),
            Kernel(flashinfer.merge_source(spec), "podgraph_merge", setup.sm_count, MERGE_THREADS, shared),
        ]
    return Graph(tuple(kernels), RUN, lambda bases, scalars: fill(spec, layout, bases, scalars), layout.sizes)


def planner_graph(setup: Setup, max_pages: int, max_kv_len: int) -> Graph:
    """The check of page numbers and the planner, of which the runtime launches one or both."""
    spec, layout, policy = setup.spec, setup.layout, setup.policy
    shared = "podgraph_smem_bytes_per_request", layout.capacity.requests + 1
    plan = planner.plan_source(policy.kernels), planner.plan_function(policy.kernels)
    return Graph(
        (
            Kernel(planner.check_source(), planner.CHECK_FUNCTION, planner.CHECK_CTAS, planner.CHECK_THREADS),
            Kernel(*plan, 1, max(PLAN_THREADS), shared),
        ),
        PLAN,
        lambda bases, scalars: fill_plan(spec, layout, policy, (max_pages, max_kv_len), bases, scalars),
        {name: layout.sizes[name] for name in ("meta", "plan")},
    )


def template_of(graph: Graph, images: Sequence[tuple[str, Cubin]]) -> Template:
    """The whole template.

    Args:
        images: sha256 and content of each kernel's image.

    Raises:
        CatalogError: an image lacks a kernel or a constant.
    """
    params, words = _addresses(graph)
    nodes, relocations, slots = [], [], []
    for number, (kernel, (digest, cubin)) in enumerate(zip(graph.kernels, images, strict=True)):
        if cubin.kernels.get(kernel.function) != graph.takes.size:
            found = ", ".join(f"{name} of {size} bytes" for name, size in cubin.kernels.items())
            raise CatalogError(
                f"nodes[{number}].image: got kernels {found or 'none'}, expected {kernel.function} of "
                f"{graph.takes.size} bytes of parameters"
            )
        constant, times = kernel.shared
        try:
            shared_bytes = cubin.uint32(constant) * times if constant else 0
        except CatalogError as e:
            raise CatalogError(f"nodes[{number}].image: {e}") from None
        grid, block = (kernel.grid, 1, 1), (kernel.block, 1, 1)
        nodes.append(KernelNode(digest, kernel.function, grid, block, shared_bytes, params))
        relocations += [Relocation(number, *word) for word in words]
        slots += [Slot(name, number, *place) for name, place in graph.takes.slots.items()]
    edges = tuple(Edge(number, number + 1) for number in range(len(nodes) - 1))
    return Template(tuple(nodes), edges, tuple(relocations), tuple(slots))


def _addresses(graph: Graph) -> tuple[bytes, list[tuple[int, str, int]]]:
    """The parameters without addresses and scalars, and (offset, region, addend) of each address."""
    regions = (*graph.takes.pointers, *graph.own)
    bases = {region: MARK * (i + 1) for i, region in enumerate(regions)}
    filled = graph.params(bases, dict.fromkeys(graph.takes.scalars, 0))
    words = []
    for name, kind, *_ in graph.takes.fields._fields_:
        if kind is ctypes.c_uint64 and (word := getattr(filled, name)):
            words.append((graph.takes.offset_of(name), regions[word // MARK - 1], word % MARK))
            setattr(filled, name, 0)
    return bytes(filled), words


@dataclass(frozen=True)
class Difference:
    """One field of a template that is not what it must be."""

    field: str
    got: object
    wanted: object

    def __str__(self) -> str:
        return f"{self.field}: got {shown(self.got)}, expected {shown(self.wanted)}"


def difference(got: Template, want: Template) -> Difference | None:
    """The first field that differs; None where the templates are equal."""
    if len(got.nodes) != len(want.nodes):
        return Difference("nodes", *([node.function for node in template.nodes] for template in (got, want)))
    for number, (node, wanted) in enumerate(zip(got.nodes, want.nodes, strict=True)):
        for name in ("function", "image", "grid", "block", "shared_bytes"):
            if getattr(node, name) != getattr(wanted, name):
                return Difference(f"nodes[{number}].{name}", getattr(node, name), getattr(wanted, name))
        if node.params != wanted.params:
            return _params_difference(f"nodes[{number}].params", wanted.function, node.params, wanted.params)
    for table in ("edges", "relocations", "slots"):
        if found := _rows_difference(table, getattr(got, table), getattr(want, table)):
            return found
    return None


def _params_difference(where: str, function: str, got: bytes, want: bytes) -> Difference:
    if len(got) != len(want):
        return Difference(where, f"{len(got)} bytes", f"{len(want)} bytes")
    struct = params_of(function).fields
    at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
    name = next(n for n, *_ in reversed(struct._fields_) if getattr(struct, n).offset <= at)
    return Difference(f"{where}.{name}", *(getattr(struct.from_buffer_copy(data), name) for data in (got, want)))


def _rows_difference(table: str, got: Sequence[Any], want: Sequence[Any]) -> Difference | None:
    for row, (a, b) in enumerate(zip(got, want, strict=False)):
        for field in dataclasses.fields(b):
            if getattr(a, field.name) != getattr(b, field.name):
                return Difference(f"{table}[{row}].{field.name}", getattr(a, field.name), getattr(b, field.name))
    return None if len(got) == len(want) else Difference(table, f"{len(got)} rows", f"{len(want)} rows")
