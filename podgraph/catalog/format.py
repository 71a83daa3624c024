"""The file format: a catalog as tensors and one JSON document, and back.

The document is canonical JSON (ASCII, keys sorted, no blanks):

    format_version  1; checked before anything else
    digest          sha256, see `content_digest`
    fingerprint     backend, compute_capability, sm_count, driver_min
    specs           name -> attention (fields of AttentionSpec), capacity (of Capacity), planner (a template),
                    regions [{name, size}]
    workspace       max_pages, max_kv_len
    templates       [{nodes: [{image, function, grid, block, shared_bytes, params: [offset, size]}],
                      slots: [{name, node, offset, size}]}]
    variants        names, sorted, that records refer to by index
    regions         names, sorted, that relocations refer to by index
    built_with      name -> version
    partition       tiles or kv_load

Tensors, little-endian:

    image/<sha256>  uint8 [bytes]       a kernel image
    params          uint8 [bytes]       the parameters of every node, in the order of templates and nodes
    relocations     int64 [n, 5]        template, node, offset, region, addend
    edges           int64 [n, 4]        template, source, target, data (8 bytes as one little-endian word)
    records         int64 [n, 6]        specification (index among the sorted names), batch, prefill_len, decode_count,
                                        template, variant
    replay_us       float64 [n]         one per record
    max_error       float64 [n]         one per record
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from podgraph.catalog.checks import (
    MAX_COUNT,
    MAX_NODES,
    MAX_PARAMS_BYTES,
    MAX_REGIONS,
    MAX_ROWS,
    MAX_SLOTS,
    MAX_SPECS,
    MAX_TEMPLATES,
    WORD_BYTES,
    check_catalog,
    integer,
    mapping,
    refuse,
    sequence,
    text,
)
from podgraph.catalog.model import (
    FORMAT_VERSION,
    Catalog,
    Edge,
    Fingerprint,
    KernelNode,
    Record,
    Region,
    Relocation,
    Slot,
    SpecEntry,
    Template,
)
from podgraph.errors import CatalogError
from podgraph.planner.policy import Capacity
from podgraph.shapes import AttentionSpec, Bucket

Tensor = npt.NDArray[Any]

MAX_DOCUMENT_BYTES = 1 << 26

_IMAGE = "image/"
_WORDS = {"|u1": "U8", "<i8": "I64", "<f8": "F64"}  # numpy's name of a dtype -> safetensors' name
_COLUMNS = {"relocations": 5, "edges": 4, "records": 6}
_DTYPES = {"params": "U8", **dict.fromkeys(_COLUMNS, "I64"), "replay_us": "F64", "max_error": "F64"}


def encode(catalog: Catalog) -> tuple[dict[str, Tensor], str]:
    """Returns the tensors by name and the JSON document; equal catalogs give equal bytes.

    Raises:
        CatalogError: the catalog holds something that no file may hold.
    """
    check_catalog(catalog)
    spec_names = sorted(catalog.specs)
    variants = sorted({r.variant for r in catalog.records})
    regions = sorted({r.region for t in catalog.templates for r in t.relocations})
    tensors = _encode_tables(catalog, spec_names, variants, regions)
    for digest, image in catalog.images.items():
        tensors[_IMAGE + digest] = np.frombuffer(image, np.uint8)
    document = {
        "format_version": FORMAT_VERSION,
        "fingerprint": dataclasses.asdict(catalog.fingerprint),
        "specs": {name: _encode_spec(entry) for name, entry in catalog.specs.items()},
        "workspace": {"max_pages": catalog.max_pages, "max_kv_len": catalog.max_kv_len},
        "templates": _encode_templates(catalog.templates),
        "variants": variants,
        "regions": regions,
        "built_with": dict(catalog.built_with),
        "partition": catalog.partition,
    }
    document["digest"] = content_digest(tensors, document)
    return tensors, dump_json(document)


def decode(tensors: Mapping[str, Tensor], document: str) -> Catalog:
    """Returns the catalog that `encode` made these of. Nothing in them is trusted, a correct digest included.

    Raises:
        CatalogError: one line with what is wrong, what was got and what is allowed.
    """
    fields = load_json(document, "document")
    version = fields.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise refuse(
            "format_version", version, f"{FORMAT_VERSION}; build the catalog again with this version of podgraph"
        )
    check_canonical(fields, document, "document")
    keys = (
        "digest",
        "fingerprint",
        "specs",
        "workspace",
        "templates",
        "variants",
        "regions",
        "built_with",
        "partition",
    )
    _entry(fields, "document", ("format_version", *keys))
    _check_tensors(tensors)
    actual = content_digest(tensors, fields)
    if fields["digest"] != actual:
        raise refuse("digest", fields["digest"], f"{actual}, that of the content; the file is damaged, copy it again")
    catalog = _decode_catalog(tensors, fields)
    check_catalog(catalog)
    return catalog


def content_digest(tensors: Mapping[str, Tensor], document: Mapping[str, object]) -> str:
    """sha256 over all tensors and the document.

    For each tensor, in sorted name order: ``["name","dtype",[shape]]``, a line feed, its bytes; dtype is safetensors'
    word (``U8``, ``I64``, ``F64``). Then the document as canonical JSON, without its ``digest``.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(dump_json([name, _WORDS[tensor.dtype.str], list(tensor.shape)]).encode() + b"\n")
        digest.update(tensor.tobytes())
    digest.update(dump_json({key: value for key, value in document.items() if key != "digest"}).encode())
    return digest.hexdigest()


def dump_json(value: object, sort_keys: bool = True) -> str:
    return json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False)


def load_json(document: str, where: str) -> dict[str, Any]:
    """Parses a JSON mapping.

    Raises:
        CatalogError: also for absurd sizes, nesting and numbers.
    """
    if len(document) > MAX_DOCUMENT_BYTES:
        raise refuse(f"size of the {where}", len(document), f"at most {MAX_DOCUMENT_BYTES} characters")
    try:
        fields = json.loads(document, parse_int=_parse_int)
    except (ValueError, RecursionError) as e:
        reason = "too deeply nested" if isinstance(e, RecursionError) else str(e)
        raise CatalogError(f"{where}: not valid JSON: {reason:.200}; the file is damaged, copy it again") from e
    if not isinstance(fields, dict):
        raise refuse(where, fields, "a mapping")
    return fields


def check_canonical(fields: Mapping[str, object], document: str, where: str, sort_keys: bool = True) -> None:
    """Refuses JSON that `dump_json` would write otherwise: damage could hide in another spelling or a repeated key."""
    try:
        canonical = dump_json(fields, sort_keys)
    except (ValueError, RecursionError) as e:  # infinite numbers; nesting that only the parser endures
        raise CatalogError(f"{where}: cannot be canonical JSON: {e}; the file is damaged, copy it again") from e
    if canonical != document:
        keys = "sorted keys" if sort_keys else "each key once"
        raise refuse(where, document, f"canonical JSON (ASCII, {keys}, no blanks); the file is damaged, copy it again")


def _parse_int(digits: str) -> int:
    # 64-bit words have up to 20 characters; parsing time grows with the square of the digits.
    if len(digits) > 20:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _encode_spec(entry: SpecEntry) -> dict[str, object]:
    attention = entry.attention.to_dict()
    for name, kind in typing.get_type_hints(AttentionSpec).items():
        if kind is float:
            attention[name] = float(attention[name])
    return {
        "attention": attention,
        "capacity": dataclasses.asdict(entry.capacity),
        "planner": entry.planner,
        "regions": [dataclasses.asdict(region) for region in entry.regions],
    }


def _encode_templates(templates: Iterable[Template]) -> list[dict[str, object]]:
    offset = 0
    encoded: list[dict[str, object]] = []
    for template in templates:
        nodes: list[dict[str, object]] = []
        for node in template.nodes:
            fields = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
            nodes.append({**fields, "params": [offset, len(node.params)]})
            offset += len(node.params)
        encoded.append({"nodes": nodes, "slots": [dataclasses.asdict(slot) for slot in template.slots]})
    return encoded


def _encode_tables(
    catalog: Catalog, spec_names: list[str], variants: list[str], regions: list[str]
) -> dict[str, Tensor]:
    params = b"".join(node.params for template in catalog.templates for node in template.nodes)
    spec_of, variant_of, region_of = ({name: i for i, name in enumerate(x)} for x in (spec_names, variants, regions))
    relocations = [
        (index, r.node, r.offset, region_of[r.region], r.addend)
        for index, template in enumerate(catalog.templates)
        for r in template.relocations
    ]
    edges = [
        (index, e.source, e.target, int.from_bytes(e.data, "little", signed=True))
        for index, template in enumerate(catalog.templates)
        for e in template.edges
    ]
    records = [
        (spec_of[r.spec], *dataclasses.astuple(r.bucket), r.template, variant_of[r.variant]) for r in catalog.records
    ]
    return {
        "params": np.frombuffer(params, np.uint8),
        **{
            name: np.array(rows, "<i8").reshape(len(rows), _COLUMNS[name])
            for name, rows in (("relocations", relocations), ("edges", edges), ("records", records))
        },
        "replay_us": np.array([r.replay_us for r in catalog.records], "<f8"),
        "max_error": np.array([r.max_error for r in catalog.records], "<f8"),
    }


def _check_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Names, dtypes and shapes; the values come later."""
    for name in _DTYPES:
        if name not in tensors:
            raise refuse("tensors", f"no {name}", f"exactly {', '.join(_DTYPES)} and image/<sha256>")
    for name, tensor in tensors.items():
        if name not in _DTYPES and not name.startswith(_IMAGE):
            raise refuse("tensors", name, f"exactly {', '.join(_DTYPES)} and image/<sha256>")
        wanted = _DTYPES.get(name, "U8")
        dtype = _WORDS.get(tensor.dtype.str, str(tensor.dtype))
        if dtype != wanted:
            raise refuse(f"dtype of tensor {name!r:.100}", dtype, wanted)
        columns = _COLUMNS.get(name)
        if tensor.ndim != (1 if columns is None else 2) or (columns is not None and tensor.shape[1] != columns):
            raise refuse(
                f"shape of tensor {name!r:.100}", tensor.shape, "[n]" if columns is None else f"[n, {columns}]"
            )
        if wanted != "U8":
            integer(len(tensor), f"rows of tensor {name}", 0, MAX_ROWS)
    for name in ("replay_us", "max_error"):
        if len(tensors[name]) != len(tensors["records"]):
            raise refuse(f"rows of tensor {name}", len(tensors[name]), f"{len(tensors['records'])}, one per record")


def _decode_catalog(tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> Catalog:
    """Builds the model, unchecked but for what building it needs: keys, lists, and indices that are looked up."""
    fingerprint = _entry(fields["fingerprint"], "fingerprint", _names(Fingerprint))
    workspace = _entry(fields["workspace"], "workspace", ("max_pages", "max_kv_len"))
    return Catalog(
        fingerprint=Fingerprint(**fingerprint),
        specs={
            text(name, "specs: name"): _decode_spec(f"specs.{name}", entry)
            for name, entry in mapping(fields["specs"], "specs", MAX_SPECS).items()
        },
        max_pages=workspace["max_pages"],
        max_kv_len=workspace["max_kv_len"],
        templates=_decode_templates(tensors, fields),
        records=_decode_records(tensors, fields),
        images={
            name.removeprefix(_IMAGE): tensor.tobytes() for name, tensor in tensors.items() if name.startswith(_IMAGE)
        },
        built_with=fields["built_with"],
        partition=fields["partition"],
    )


def _decode_spec(where: str, value: object) -> SpecEntry:
    entry = _entry(value, where, ("attention", "capacity", "planner", "regions"))
    attention = _entry(entry["attention"], f"{where}.attention", _names(AttentionSpec))
    if type(attention["sm_scale"]) is not float or not attention["sm_scale"] > 0:
        # AttentionSpec would put its default, which needs a valid head_dim, in the place of a zero.
        raise refuse(f"{where}.attention.sm_scale", attention["sm_scale"], "a positive number")
    if attention["kv_dtype"] == "":
        raise refuse(f"{where}.attention.kv_dtype", "", "a dtype")
    regions = sequence(entry["regions"], f"{where}.regions", MAX_REGIONS)
    return SpecEntry(
        AttentionSpec(**attention),
        tuple(Region(**_entry(region, f"{where}.regions[{i}]", _names(Region))) for i, region in enumerate(regions)),
        Capacity(**_entry(entry["capacity"], f"{where}.capacity", _names(Capacity))),
        entry["planner"],
    )


def _decode_templates(tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> tuple[Template, ...]:
    entries = sequence(fields["templates"], "templates", MAX_TEMPLATES)
    regions = _decode_names(fields["regions"], "regions")
    blob = _Blob(tensors["params"].tobytes())
    relocations: list[list[Relocation]] = [[] for _ in entries]
    for row, (template, node, offset, region, addend) in enumerate(tensors["relocations"].tolist()):
        integer(template, f"relocations[{row}]: template", 0, len(entries) - 1)
        integer(region, f"relocations[{row}]: region", 0, len(regions) - 1)
        relocations[template].append(Relocation(node, offset, regions[region], addend))
    edges: list[list[Edge]] = [[] for _ in entries]
    for row, (template, source, target, data) in enumerate(tensors["edges"].tolist()):
        integer(template, f"edges[{row}]: template", 0, len(entries) - 1)
        edges[template].append(Edge(source, target, data.to_bytes(WORD_BYTES, "little", signed=True)))
    templates: list[Template] = []
    for index, value in enumerate(entries):
        where = f"templates[{index}]"
        entry = _entry(value, where, ("nodes", "slots"))
        nodes = sequence(entry["nodes"], f"{where}.nodes", MAX_NODES)
        slots = sequence(entry["slots"], f"{where}.slots", MAX_SLOTS)
        templates.append(
            Template(
                nodes=tuple(_decode_node(f"{where}.nodes[{i}]", node, blob) for i, node in enumerate(nodes)),
                edges=tuple(edges[index]),
                relocations=tuple(relocations[index]),
                slots=tuple(Slot(**_entry(slot, f"{where}.slots[{i}]", _names(Slot))) for i, slot in enumerate(slots)),
            )
        )
    blob.check_used()
    return tuple(templates)


def _decode_node(where: str, value: object, blob: _Blob) -> KernelNode:
    entry = _entry(value, where, _names(KernelNode))
    grid, block = (tuple(sequence(entry[name], f"{where}.{name}", 3, least=3)) for name in ("grid", "block"))
    params = blob.take(sequence(entry["params"], f"{where}.params", 2, least=2), f"{where}.params")
    return KernelNode(**{**entry, "grid": grid, "block": block, "params": params})


def _decode_records(tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> tuple[Record, ...]:
    spec_names = sorted(fields["specs"])
    variants = _decode_names(fields["variants"], "variants")
    measured = zip(tensors["replay_us"].tolist(), tensors["max_error"].tolist(), strict=True)
    records: list[Record] = []
    for row, ((spec, *bucket, template, variant), (replay_us, max_error)) in enumerate(
        zip(tensors["records"].tolist(), measured, strict=True)
    ):
        integer(spec, f"records[{row}]: specification", 0, len(spec_names) - 1)
        integer(variant, f"records[{row}]: variant", 0, len(variants) - 1)
        records.append(Record(spec_names[spec], Bucket(*bucket), variants[variant], template, replay_us, max_error))
    return tuple(records)


def _decode_names(value: object, where: str) -> list[str]:
    names = [text(name, f"{where}[{i}]") for i, name in enumerate(sequence(value, where, MAX_ROWS))]
    if names != sorted(set(names)):
        raise refuse(where, names, "sorted names, each once")
    return names


def _entry(value: object, where: str, keys: Sequence[str]) -> Mapping[str, Any]:
    """A mapping with exactly these keys."""
    entry = mapping(value, where, MAX_COUNT)
    for key in keys:
        if key not in entry:
            raise refuse(where, f"no {key}", f"exactly the keys {', '.join(keys)}")
    for key in entry:
        if key not in keys:
            raise refuse(where, key, f"exactly the keys {', '.join(keys)}")
    return entry


@functools.cache
def _names(model: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(model))


class _Blob:
    """Hands out the bytes of ``params`` front to back: none is left over, none is used twice."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._used = 0

    def take(self, span: Sequence[object], where: str) -> bytes:
        size = integer(span[1], f"{where}: size", 0, min(MAX_PARAMS_BYTES, len(self._data) - self._used))
        if type(span[0]) is not int or span[0] != self._used:
            raise refuse(f"{where}: offset", span[0], f"{self._used}, the end of the node before")
        self._used += size
        return self._data[self._used - size : self._used]

    def check_used(self) -> None:
        if self._used != len(self._data):
            raise refuse("size of tensor params", len(self._data), f"{self._used}, what the nodes use")
