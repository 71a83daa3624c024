"""What can be proven about a catalog without the GPU that it was built for.

Reading a file already checks every count, offset and digest. Here its parts are held against each other and against
this version of podgraph: regions and capacities against the planner, parameters against the structs of kernels/args.h,
images against the nodes that use them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping

from podgraph.catalog import cubin
from podgraph.catalog.model import Catalog, SpecEntry, Template
from podgraph.errors import CatalogError
from podgraph.planner import Capacity, Layout, kernels_of
from podgraph.planner.args import PLAN, PLANNERS, RUN, ParamStruct, fill, fill_plan
from podgraph.planner.policy import SM90, SM90_SETTINGS


def layout_of(catalog: Catalog, name: str) -> Layout:
    """Where a specification's work lists lie, checked against what this version of podgraph would plan into them.

    Raises:
        CatalogError: another version of podgraph, or nobody, would have made these regions.
    """
    entry = catalog.specs[name]
    if not catalog.buckets(name):
        raise CatalogError(f"spec {name}: holds no bucket, none of it verified: rebuild the catalog")
    policy = catalog.policy(name)
    mixed = [r for r in catalog.buckets(name) if kernels_of(r.variant) != policy.kernels]
    if mixed:
        raise CatalogError(f"spec {name}: variant {mixed[0].variant}, allowed: those of {policy.kernels} kernels only")
    known = {f"{SM90}{setting}" for setting in SM90_SETTINGS}
    for record in catalog.buckets(name) if policy.kernels == "sm90" else ():
        if record.variant not in known or catalog.fingerprint.backend != "cuda":
            allowed = ", ".join(sorted(known)) if catalog.fingerprint.backend == "cuda" else "interpreter"
            raise CatalogError(f"spec {name}: variant {record.variant}, allowed: {allowed}: rebuild the catalog")
    layout = Layout.for_capacity(entry.attention, entry.capacity, policy.kernels)
    regions = {r.name: r.size for r in entry.regions}
    for region, size in layout.sizes.items():
        if regions.get(region) != size:
            raise CatalogError(
                f"spec {name}: region {region} has {regions.get(region)} bytes, this podgraph plans {size}: "
                "rebuild the catalog"
            )
    for record in catalog.buckets(name):
        needs = Capacity.of(record.bucket, entry.attention, policy)
        if not entry.capacity.holds(needs):
            raise CatalogError(
                f"spec {name}: bucket {record.bucket} needs {needs}, the catalog has {entry.capacity}: "
                "rebuild the catalog"
            )
    return layout


def check(catalog: Catalog) -> list[str]:
    """Proves a catalog as far as that is possible without its GPU, and says what was proven.

    Raises:
        CatalogError: naming the specification, graph, node or image that does not hold.
    """
    layouts = {name: layout_of(catalog, name) for name in catalog.specs if catalog.buckets(name)}
    proven = [f"{len(layouts)} specifications: regions and capacities are those that this podgraph plans for"]
    if catalog.templates:
        for image, index, text in _image_problems(catalog):
            raise CatalogError(f"image {image[:12]} of graph {index}: {text}: rebuild the catalog")
        proven.append(
            f"{len(catalog.images)} images: each kernel is there, for this GPU, and takes the stored parameters"
        )
        users = sorted({(r.template, r.spec) for r in catalog.records})
        for index, name in users:
            _check_run(catalog.templates[index], index, catalog.specs[name], layouts[name])
        for name, layout in layouts.items():
            _check_planner(catalog, name, layout)
        proven.append(
            f"{len(catalog.templates)} graphs: relocated elsewhere, every parameter is what the planner fills in"
        )
    return proven


def _image_problems(catalog: Catalog) -> Iterator[tuple[str, int, str]]:
    major, minor = catalog.fingerprint.compute_capability.split(".")
    wanted = 10 * int(major) + int(minor)
    read: dict[str, tuple[int, dict[str, int]]] = {}
    for index, template in enumerate(catalog.templates):
        for node in template.nodes:
            try:
                sm, found = read.setdefault(node.image, cubin.kernels(catalog.images[node.image]))
            except CatalogError as e:
                yield node.image, index, str(e)
                return
            if sm != wanted:
                yield node.image, index, f"compiled for SM {sm}, the catalog's GPU is SM {wanted}"
            if found.get(node.function) != len(node.params):
                allowed = ", ".join(f"{name} of {size} bytes" for name, size in found.items())
                yield (
                    node.image,
                    index,
                    f"no kernel {node.function} of {len(node.params)} bytes of parameters, has {allowed}",
                )


def _check_run(template: Template, index: int, entry: SpecEntry, layout: Layout) -> None:
    _check_params(template, index, RUN, layout, lambda bases, scalars: fill(entry.attention, layout, bases, scalars))


def _check_planner(catalog: Catalog, name: str, layout: Layout) -> None:
    entry, policy = catalog.specs[name], catalog.policy(name)
    template = catalog.templates[entry.planner]
    wanted = ["podgraph_check_pages", f"podgraph_plan_{policy.kernels}"]
    functions = [node.function for node in template.nodes]
    if functions != wanted:
        raise CatalogError(f"spec {name}: its planner is {functions}, allowed: {wanted}: rebuild the catalog")
    limits = catalog.max_pages, catalog.max_kv_len
    _check_params(
        template,
        entry.planner,
        PLAN,
        layout,
        lambda bases, scalars: fill_plan(entry.attention, layout, policy, limits, bases, scalars),
    )


def _check_params(
    template: Template,
    index: int,
    takes: ParamStruct,
    layout: Layout,
    fill: Callable[[Mapping[str, int], Mapping[str, int]], object],
) -> None:
    """Relocates every node to made-up addresses and compares it with what this podgraph would launch there."""
    bases = {name: 0x7F00_0000_0000 + 0x1_0000_0000 * i for i, name in enumerate((*takes.pointers, *layout.sizes))}
    scalars = {name: 8 * (i + 1) for i, name in enumerate(takes.scalars)}
    wanted = bytes(fill(bases, scalars))  # type: ignore[call-overload]
    slots = {(s.node, s.name, s.offset, s.size) for s in template.slots}
    for number, node in enumerate(template.nodes):
        where = f"graph {index}, node {number} ({node.function})"
        if len(node.params) != takes.size or (node.function in PLANNERS) != (takes is PLAN):
            raise CatalogError(f"{where}: {len(node.params)} bytes of parameters, allowed: {takes.size}")
        params = bytearray(node.params)
        for name, (offset, size) in takes.slots.items():
            if (number, name, offset, size) not in slots:
                raise CatalogError(f"{where}: no slot for {name}: rebuild the catalog")
        for relocation in template.relocations:
            if relocation.node == number:
                base = bases.get(relocation.region)
                if base is None:
                    raise CatalogError(f"{where}: refers to region {relocation.region}: rebuild the catalog")
                struct.pack_into("<Q", params, relocation.offset, base + relocation.addend)
        for name in takes.scalars:
            struct.pack_into("<I", params, takes.offset_of(name), scalars[name])
        if bytes(params) != wanted:
            offset = next(i for i, (got, want) in enumerate(zip(params, wanted, strict=True)) if got != want)
            raise CatalogError(
                f"{where}: parameter offset {offset} is not what this podgraph fills in: rebuild the catalog"
            )
