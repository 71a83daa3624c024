"""What can be proven about a catalog without the GPU that it was built for.

Reading a file already checks every count, offset and digest. Here its parts are held against each other and against
this version of podgraph: regions and capacities against the planner, parameters against `Args`, images against the
nodes that use them.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator

from podgraph.catalog import cubin
from podgraph.catalog.model import Catalog, Template
from podgraph.errors import CatalogError
from podgraph.planner import Capacity, Layout, kernels_of
from podgraph.planner.args import RUN_POINTERS, RUN_STRIDES, Args, fill, offset_of, size_of
from podgraph.planner.policy import SM90, SM90_SETTINGS
from podgraph.shapes import AttentionSpec


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
            _check_params(catalog.templates[index], index, catalog.specs[name].attention, layouts[name])
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


def _check_params(template: Template, index: int, spec: AttentionSpec, layout: Layout) -> None:
    """Relocates every node to made-up addresses and compares it with what the planner would launch there."""
    regions = (*RUN_POINTERS, "kv_indices", *layout.sizes)
    bases = {name: 0x7F00_0000_0000 + 0x1_0000_0000 * i for i, name in enumerate(regions)}
    strides = {name: 8 * (i + 1) for i, name in enumerate(RUN_STRIDES)}
    wanted = bytes(fill(spec, layout, bases, strides))
    slots = {(s.node, s.name, s.offset, s.size) for s in template.slots}
    for number, node in enumerate(template.nodes):
        where = f"graph {index}, node {number} ({node.function})"
        if len(node.params) != ctypes.sizeof(Args):
            raise CatalogError(f"{where}: {len(node.params)} bytes of parameters, allowed: {ctypes.sizeof(Args)}")
        params = bytearray(node.params)
        for name in (*RUN_POINTERS, *RUN_STRIDES):
            if (number, name, offset_of(name), size_of(name)) not in slots:
                raise CatalogError(f"{where}: no slot for {name}: rebuild the catalog")
        for relocation in template.relocations:
            if relocation.node == number:
                struct.pack_into("<Q", params, relocation.offset, bases[relocation.region] + relocation.addend)
        for name in RUN_STRIDES:
            struct.pack_into("<I", params, offset_of(name), strides[name])
        if bytes(params) != wanted:
            offset = next(i for i, (got, want) in enumerate(zip(params, wanted, strict=True)) if got != want)
            raise CatalogError(
                f"{where}: parameter offset {offset} is not what this podgraph fills in: rebuild the catalog"
            )
