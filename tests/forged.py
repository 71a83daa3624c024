"""Every single change to a template of a catalog, and the field that a refusal must name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from podgraph.catalog import static
from podgraph.catalog.format import decode, encode
from podgraph.catalog.model import Catalog, Edge, KernelNode, Relocation, Slot, Template
from podgraph.errors import CatalogError


def check_refused(catalog: Catalog, names: str) -> None:
    """Signs the catalog, reads it again, and proves it: one of these must fail and name a field."""
    with pytest.raises(CatalogError, match=re.escape(names)) as caught:
        static.prove(decode(*encode(catalog)))  # what may not be written may not be read either: the same checks
    assert re.search(r": got .*(expected|allowed: )", str(caught.value)), caught.value
    assert len(str(caught.value)) < 600


def with_template(catalog: Catalog, index: int, template: Template) -> Catalog:
    templates = catalog.templates
    return replace(catalog, templates=(*templates[:index], template, *templates[index + 1 :]))


def changes(catalog: Catalog, index: int) -> Iterator[tuple[str, Template]]:
    """(field, changed template) for each field of a template, one by one."""
    template = catalog.templates[index]
    for number, node in enumerate(template.nodes):
        for name, changed in _node_changes(catalog, template, number, node):
            nodes = (*template.nodes[:number], changed, *template.nodes[number + 1 :])
            yield f"nodes[{number}].{name}", replace(template, nodes=nodes)
    yield "nodes", replace(template, nodes=(*template.nodes, template.nodes[-1]))
    if len(template.nodes) > 1:
        yield "nodes[0].function", replace(template, nodes=template.nodes[::-1])
        yield "edges", replace(template, edges=())
        yield "edges[0].data", replace(template, edges=(Edge(0, 1, b"\1" + bytes(7)),))
    yield from _table_changes(template, "relocations", _relocation_changes)
    yield from _table_changes(template, "slots", _slot_changes)


def _node_changes(
    catalog: Catalog, template: Template, number: int, node: KernelNode
) -> Iterator[tuple[str, KernelNode]]:
    other = next(n for t in catalog.templates for n in t.nodes if n.function != node.function)
    yield "function", replace(node, function=other.function)
    for image in catalog.images:
        if image != node.image:
            yield "image", replace(node, image=image)
    for name, axis in itertools.product(("grid", "block"), range(3)):
        for size in {1, 2, getattr(node, name)[axis] // 2} - {0, getattr(node, name)[axis]}:
            sizes = list(getattr(node, name))
            sizes[axis] = size
            yield name, replace(node, **{name: tuple(sizes)})
    for size in {0, node.shared_bytes + 16, max(node.shared_bytes - 16, 0)} - {node.shared_bytes}:
        yield "shared_bytes", replace(node, shared_bytes=size)
    yield "params", replace(node, params=node.params + bytes(8))
    filled = {r.offset + i for r in template.relocations if r.node == number for i in range(8)}
    for offset in range(0, len(node.params), 4):
        changed = bytearray(node.params)
        changed[offset] ^= 1
        if offset not in filled:  # those are refused at reading, by the name of their relocation
            yield "params.", replace(node, params=bytes(changed))


def _table_changes(template: Template, table: str, change: Any) -> Iterator[tuple[str, Template]]:
    rows = getattr(template, table)
    for i, row in enumerate(rows):
        yield table, replace(template, **{table: (*rows[:i], *rows[i + 1 :])})
        for name, changed in change(row):  # without a name: whatever is found of the table first, or of the template
            names = {"": table, "*": ""}.get(name, f"{table}[{i}].{name}")
            yield names, replace(template, **{table: (*rows[:i], changed, *rows[i + 1 :])})
    yield table, replace(template, **{table: rows[::-1]})


def _relocation_changes(row: Relocation) -> Iterator[tuple[str, Relocation]]:
    yield "region", replace(row, region="lse" if row.region != "lse" else "q")
    yield "region", replace(row, region="kv_indices" if row.region != "kv_indices" else "counters")
    yield "addend", replace(row, addend=row.addend + 16)
    yield "*", replace(row, offset=row.offset + 8)  # which another row has too, or a slot, or which is not zero
    yield "", replace(row, node=row.node + 1)
    if row.addend:
        yield "addend", replace(row, addend=0)


def _slot_changes(row: Slot) -> Iterator[tuple[str, Slot]]:
    yield "name", replace(row, name="x")
    yield "", replace(row, offset=row.offset + row.size)
    yield "", replace(row, size=row.size // 2)  # which may also cut through a relocated word
    yield "", replace(row, node=row.node + 1)


assert {f.name for f in fields(KernelNode)} == {"image", "function", "grid", "block", "shared_bytes", "params"}
assert {f.name for f in fields(Slot)} == {"name", "node", "offset", "size"}
assert {f.name for f in fields(Relocation)} == {"node", "offset", "region", "addend"}
