"""What a catalog may hold, checked before a file is written and after one is read.

A reader builds the model from the file's values and calls `check_catalog` before anyone else sees it, so types are
checked here too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import re
import typing
from collections.abc import Mapping

from podgraph.catalog.model import Catalog, Fingerprint, KernelNode, Record, Slot, SpecEntry, Template
from podgraph.catalog.values import (
    MAX_BLOCK,
    MAX_BUILT_WITH,
    MAX_BUILT_WITH_TEXT,
    MAX_COUNT,
    MAX_GRID,
    MAX_IMAGE_BYTES,
    MAX_NODES,
    MAX_PARAMS_BYTES,
    MAX_REGION_BYTES,
    MAX_REGIONS,
    MAX_ROWS,
    MAX_SHARED_BYTES,
    MAX_SLOTS,
    MAX_SPECS,
    MAX_TEMPLATES,
    MAX_THREADS,
    WORD_BYTES,
    integer,
    mapping,
    matching,
    number,
    refuse,
    sequence,
    text,
)
from podgraph.planner import packed
from podgraph.planner.policy import PARTITIONS
from podgraph.shapes import AttentionSpec

_C_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,1023}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMPUTE_CAPABILITY = re.compile(r"[1-9][0-9]?\.[0-9]")


def check_catalog(catalog: Catalog) -> None:
    """Checks every value of a catalog: types, ranges, references, overlaps, image hashes.

    Raises:
        CatalogError: for the first value that is not allowed.
    """
    _check_fingerprint(catalog.fingerprint)
    integer(catalog.max_pages, "workspace.max_pages", 1, MAX_COUNT)
    integer(catalog.max_kv_len, "workspace.max_kv_len", 1, MAX_COUNT)
    for name, entry in mapping(catalog.specs, "specs", MAX_SPECS).items():
        text(name, "specs: name")
        _check_spec(f"specs.{name}", entry)
    for digest, image in mapping(catalog.images, "images", MAX_ROWS).items():
        _check_image(digest, image)
    for index, template in enumerate(sequence(catalog.templates, "templates", MAX_TEMPLATES)):
        _check_template(f"templates[{index}]", template, catalog.images)
    if catalog.partition not in PARTITIONS:
        raise refuse("partition", catalog.partition, " or ".join(PARTITIONS))
    if catalog.fingerprint.backend == "cpu":
        for name in ("templates", "images"):
            if held := len(getattr(catalog, name)):
                raise refuse(f"number of {name}", held, "0, since the cpu backend has no graphs")
    _check_records(catalog)
    _check_capacities(catalog)
    _check_planners(catalog)
    _check_regions(catalog)
    for key, value in mapping(catalog.built_with, "built_with", MAX_BUILT_WITH).items():
        text(key, "built_with: key")
        text(value, f"built_with.{key}", MAX_BUILT_WITH_TEXT)


def _check_fingerprint(fingerprint: Fingerprint) -> None:
    where = "fingerprint"
    if fingerprint.backend not in ("cuda", "cpu"):
        raise refuse(f"{where}.backend", fingerprint.backend, "cuda or cpu")
    if fingerprint.backend == "cpu":
        if fingerprint.compute_capability != "":
            raise refuse(f"{where}.compute_capability", fingerprint.compute_capability, "'' for the cpu backend")
        integer(fingerprint.sm_count, f"{where}.sm_count", 0, 0)
        integer(fingerprint.driver_min, f"{where}.driver_min", 0, 0)
    else:
        matching(fingerprint.compute_capability, f"{where}.compute_capability", _COMPUTE_CAPABILITY, "such as '9.0'")
        integer(fingerprint.sm_count, f"{where}.sm_count", 1, 4096)
        integer(fingerprint.driver_min, f"{where}.driver_min", 0, 1_000_000)


def _check_spec(where: str, entry: SpecEntry) -> None:
    for field, kind in typing.get_type_hints(AttentionSpec).items():
        value = getattr(entry.attention, field)
        if kind is int:
            integer(value, f"{where}.attention.{field}", -1, MAX_COUNT)
        elif kind is float:
            number(value, f"{where}.attention.{field}")
    for name, got, allowed in entry.attention.limits():
        raise refuse(f"{where}.attention.{name}", got, allowed)
    for name, count in dataclasses.asdict(entry.capacity).items():
        integer(count, f"{where}.capacity.{name}", 0, MAX_COUNT)
    seen: set[str] = set()
    for index, region in enumerate(sequence(entry.regions, f"{where}.regions", MAX_REGIONS)):
        name = text(region.name, f"{where}.regions[{index}].name")
        if name in seen:
            raise refuse(f"{where}.regions[{index}].name", name, "each name once")
        seen.add(name)
        integer(region.size, f"{where}.regions[{index}].size", 0, MAX_REGION_BYTES)


def _check_image(digest: str, image: bytes) -> None:
    matching(digest, "images: name", _SHA256, "64 lower-case hex digits")
    integer(len(image), f"size of image/{digest}", 1, MAX_IMAGE_BYTES)
    actual = hashlib.sha256(image).hexdigest()
    if actual != digest:
        raise refuse(f"sha256 of image/{digest}", actual, "its name; the image is damaged, build the catalog again")


def _check_template(where: str, template: Template, images: Mapping[str, bytes]) -> None:
    for index, node in enumerate(sequence(template.nodes, f"{where}.nodes", MAX_NODES, least=1)):
        _check_node(f"{where}.nodes[{index}]", node, images)
    _check_edges(where, template)
    words = _check_relocations(where, template)
    _check_slots(where, template, words)


def _check_node(where: str, node: KernelNode, images: Mapping[str, bytes]) -> None:
    if matching(node.image, f"{where}.image", _SHA256, "64 lower-case hex digits") not in images:
        raise refuse(f"{where}.image", node.image, f"one of the catalog's {len(images)} images")
    matching(node.function, f"{where}.function", _C_IDENTIFIER, "a C identifier of at most 1024 characters")
    for name, sizes, limits in (("grid", node.grid, MAX_GRID), ("block", node.block, MAX_BLOCK)):
        for axis, size, limit in zip("xyz", sequence(sizes, f"{where}.{name}", 3, least=3), limits, strict=True):
            integer(size, f"{where}.{name}.{axis}", 1, limit)
    if math.prod(node.block) > MAX_THREADS:
        raise refuse(f"{where}.block", node.block, f"at most {MAX_THREADS} threads in all")
    integer(node.shared_bytes, f"{where}.shared_bytes", 0, MAX_SHARED_BYTES)
    integer(len(node.params), f"size of {where}.params", 0, MAX_PARAMS_BYTES)


def _check_edges(where: str, template: Template) -> None:
    seen: set[tuple[int, int]] = set()
    last = len(template.nodes) - 1
    for index, edge in enumerate(sequence(template.edges, f"{where}.edges", MAX_ROWS)):
        # Nodes are in a topological order, which leaves no room for a cycle.
        integer(edge.source, f"{where}.edges[{index}].source", 0, last)
        integer(edge.target, f"{where}.edges[{index}].target", 0, last)
        if edge.source >= edge.target:
            raise refuse(f"{where}.edges[{index}].target", edge.target, f"above the edge's source {edge.source}")
        if (edge.source, edge.target) in seen:
            raise refuse(f"{where}.edges[{index}]", (edge.source, edge.target), "each pair of nodes once")
        seen.add((edge.source, edge.target))
        integer(len(edge.data), f"size of {where}.edges[{index}].data", WORD_BYTES, WORD_BYTES)


def _check_relocations(where: str, template: Template) -> set[tuple[int, int]]:
    """Returns (node, offset) of each relocated word; regions and addends are left to `_check_regions`."""
    words: set[tuple[int, int]] = set()
    for index, relocation in enumerate(sequence(template.relocations, f"{where}.relocations", MAX_ROWS)):
        at = f"{where}.relocations[{index}]"
        node = integer(relocation.node, f"{at}.node", 0, len(template.nodes) - 1)
        params = template.nodes[node].params
        offset = integer(relocation.offset, f"{at}.offset", 0, MAX_PARAMS_BYTES)
        if offset + WORD_BYTES > len(params):
            raise refuse(f"{at}.offset", offset, f"{WORD_BYTES} bytes inside the node's {len(params)} bytes of params")
        if offset % WORD_BYTES:
            raise refuse(f"{at}.offset", offset, f"a multiple of {WORD_BYTES}")
        if (node, offset) in words:
            raise refuse(f"{at}.offset", offset, "each word of a node once")
        if any(params[offset : offset + WORD_BYTES]):
            raise refuse(f"{at}: the relocated word", params[offset : offset + WORD_BYTES].hex(), "zero bytes")
        words.add((node, offset))
    return words


def _check_slots(where: str, template: Template, words: set[tuple[int, int]]) -> None:
    spans: list[tuple[int, int, int]] = []
    for index, slot in enumerate(sequence(template.slots, f"{where}.slots", MAX_SLOTS)):
        at = f"{where}.slots[{index}]"
        text(slot.name, f"{at}.name")
        node = integer(slot.node, f"{at}.node", 0, len(template.nodes) - 1)
        _check_slot_span(at, slot, len(template.nodes[node].params))
        spans.append((node, slot.offset, slot.offset + slot.size))
    spans.sort()
    for (node, _, end), (next_node, start, _) in itertools.pairwise(spans):
        if node == next_node and start < end:
            raise refuse(f"{where}.slots: offset in node {node}", start, f"{end} or more, where the slot before ends")
    for node, start, end in spans:
        # A word may be both: relocated at load, then set at each call. Then both must mean the same 8 bytes.
        same_word = start % WORD_BYTES == 0 and end - start == WORD_BYTES
        touched = range(start - start % WORD_BYTES, end, WORD_BYTES)
        if not same_word and any((node, offset) in words for offset in touched):
            raise refuse(
                f"{where}.slots: bytes of node {node}", f"{start} to {end}", "no relocated word, or exactly one"
            )


def _check_slot_span(at: str, slot: Slot, params_bytes: int) -> None:
    integer(slot.size, f"{at}.size", 1, MAX_PARAMS_BYTES)
    integer(slot.offset, f"{at}.offset", 0, MAX_PARAMS_BYTES)
    if slot.offset + slot.size > params_bytes:
        raise refuse(f"{at}.offset", slot.offset, f"{slot.size} bytes inside the node's {params_bytes} bytes of params")
    alignment = min(slot.size & -slot.size, WORD_BYTES)  # the largest power of two that divides the size
    if slot.offset % alignment:
        raise refuse(f"{at}.offset", slot.offset, f"a multiple of {alignment} for {slot.size} bytes")


def _check_planners(catalog: Catalog) -> None:
    """Whoever has records has a planner; a specification without any may lack it."""
    used = {record.spec for record in catalog.records}
    for name, entry in catalog.specs.items():
        if name in used or entry.planner != -1:
            _check_template_index(f"specs.{name}.planner", entry.planner, catalog)


def _check_records(catalog: Catalog) -> None:
    seen: set[tuple[object, ...]] = set()
    for index, record in enumerate(sequence(catalog.records, "records", MAX_ROWS)):
        at = f"records[{index}]"
        if text(record.spec, f"{at}.spec") not in catalog.specs:
            raise refuse(f"{at}.spec", record.spec, f"one of {', '.join(sorted(catalog.specs)) or 'no specification'}")
        _check_bucket(at, record)
        key = (record.spec, record.bucket, record.variant)
        if key in seen:
            raise refuse(f"{at}.bucket", str(record.bucket), f"each bucket of spec {record.spec} once in a variant")
        seen.add(key)
        text(record.variant, f"{at}.variant")
        number(record.replay_us, f"{at}.replay_us")
        number(record.max_error, f"{at}.max_error")
        _check_template_index(f"{at}.template", record.template, catalog)


def _check_capacities(catalog: Catalog) -> None:
    """What the kernels of a specification's records pack into words must fit there."""
    if catalog.fingerprint.backend == "cpu":
        return
    for name in dict.fromkeys(record.spec for record in catalog.records):
        entry = catalog.specs[name]
        for field, got, allowed in packed.limits(entry.attention, entry.capacity, catalog.policy(name).kernels):
            raise refuse(f"specs.{name}.capacity.{field}", got, allowed)


def _check_bucket(at: str, record: Record) -> None:
    bucket = record.bucket
    for name in ("batch", "prefill_len", "decode_count"):
        integer(getattr(bucket, name), f"{at}.bucket.{name}", 0, MAX_COUNT)
    if bucket.unreachable:
        raise refuse(f"{at}.bucket", str(bucket), f"a shape that a batch can have ({bucket.unreachable})")


def _check_template_index(at: str, template: object, catalog: Catalog) -> None:
    if catalog.fingerprint.backend == "cpu":
        if type(template) is not int or template != -1:
            raise refuse(at, template, "-1, since the cpu backend has no graphs")
    elif type(template) is not int or not 0 <= template < len(catalog.templates):
        raise refuse(at, template, f"the index of one of the {len(catalog.templates)} templates")


def _check_regions(catalog: Catalog) -> None:
    """A relocation stays inside a region of every specification whose records use its template."""
    users: dict[int, set[str]] = {}
    for record in catalog.records:
        users.setdefault(record.template, set()).add(record.spec)
    for name, entry in catalog.specs.items():
        users.setdefault(entry.planner, set()).add(name)
    by_users: dict[tuple[str, ...], dict[str, int]] = {}
    for index, template in enumerate(catalog.templates):
        names = tuple(sorted(users.get(index, ())))
        if names not in by_users:
            by_users[names] = _region_limits(catalog, names)
        limits = by_users[names]
        for row, relocation in enumerate(template.relocations):
            at = f"templates[{index}].relocations[{row}]"
            name = text(relocation.region, f"{at}.region")
            if name not in limits:
                raise refuse(f"{at}.region", name, f"a region of its specifications: {', '.join(sorted(limits))}")
            integer(relocation.addend, f"{at}.addend", 0, limits[name])


def _region_limits(catalog: Catalog, users: tuple[str, ...]) -> dict[str, int]:
    """The largest addend by region, for a template that ``users`` share.

    A template that no record uses may belong to any specification.
    """
    sizes = [
        # Memory that the caller brings has no size here: only absurd addends are refused.
        {region.name: region.size or MAX_REGION_BYTES for region in catalog.specs[name].regions}
        for name in users or catalog.specs
    ]
    names: set[str] = set().union(*sizes)
    if not users:
        return {name: max(size.get(name, 0) for size in sizes) for name in names}
    return {name: min(size[name] for size in sizes) for name in names if all(name in size for size in sizes)}
