"""From tensors and a parsed document to the model: what building it needs is checked here, values come later."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from podgraph.catalog.model import (
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
from podgraph.catalog.values import (
    MAX_COUNT,
    MAX_NODES,
    MAX_PARAMS_BYTES,
    MAX_REGIONS,
    MAX_ROWS,
    MAX_SLOTS,
    MAX_SPECS,
    MAX_TEMPLATES,
    WORD_BYTES,
    integer,
    mapping,
    refuse,
    sequence,
    text,
)
from podgraph.planner.policy import Capacity
from podgraph.shapes import AttentionSpec, Bucket

Tensor = npt.NDArray[Any]

IMAGE = "image/"
WORDS = {"|u1": "U8", "<i8": "I64", "<f8": "F64"}  # numpy's name of a dtype -> safetensors' name
COLUMNS = {"relocations": 5, "edges": 4, "records": 6}
DTYPES = {"params": "U8", **dict.fromkeys(COLUMNS, "I64"), "replay_us": "F64", "max_error": "F64"}


def check_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Names, dtypes and shapes; the values come later."""
    for name in DTYPES:
        if name not in tensors:
            raise refuse("tensors", f"no {name}", f"exactly {', '.join(DTYPES)} and image/<sha256>")
    for name, tensor in tensors.items():
        if name not in DTYPES and not name.startswith(IMAGE):
            raise refuse("tensors", name, f"exactly {', '.join(DTYPES)} and image/<sha256>")
        wanted = DTYPES.get(name, "U8")
        dtype = WORDS.get(tensor.dtype.str, str(tensor.dtype))
        if dtype != wanted:
            raise refuse(f"dtype of tensor {name!r:.100}", dtype, wanted)
        columns = COLUMNS.get(name)
        if tensor.ndim != (1 if columns is None else 2) or (columns is not None and tensor.shape[1] != columns):
            raise refuse(
                f"shape of tensor {name!r:.100}", tensor.shape, "[n]" if columns is None else f"[n, {columns}]"
            )
        if wanted != "U8":
            integer(len(tensor), f"rows of tensor {name}", 0, MAX_ROWS)
    for name in ("replay_us", "max_error"):
        if len(tensors[name]) != len(tensors["records"]):
            raise refuse(f"rows of tensor {name}", len(tensors[name]), f"{len(tensors['records'])}, one per record")


def decode_catalog(tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> Catalog:
    """Builds the model, unchecked but for what building it needs: keys, lists, and indices that are looked up."""
    fingerprint = exactly(fields["fingerprint"], "fingerprint", _names(Fingerprint))
    workspace = exactly(fields["workspace"], "workspace", ("max_pages", "max_kv_len"))
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
            name.removeprefix(IMAGE): tensor.tobytes() for name, tensor in tensors.items() if name.startswith(IMAGE)
        },
        built_with=fields["built_with"],
        partition=fields["partition"],
    )


def _decode_spec(where: str, value: object) -> SpecEntry:
    entry = exactly(value, where, ("attention", "capacity", "planner", "regions"))
    attention = exactly(entry["attention"], f"{where}.attention", _names(AttentionSpec))
    if type(attention["sm_scale"]) is not float or not attention["sm_scale"] > 0:
        # AttentionSpec would put its default, which needs a valid head_dim, in the place of a zero.
        raise refuse(f"{where}.attention.sm_scale", attention["sm_scale"], "a positive number")
    if attention["kv_dtype"] == "":
        raise refuse(f"{where}.attention.kv_dtype", "", "a dtype")
    regions = sequence(entry["regions"], f"{where}.regions", MAX_REGIONS)
    return SpecEntry(
        AttentionSpec(**attention),
        tuple(Region(**exactly(region, f"{where}.regions[{i}]", _names(Region))) for i, region in enumerate(regions)),
        Capacity(**exactly(entry["capacity"], f"{where}.capacity", _names(Capacity))),
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
        entry = exactly(value, where, ("nodes", "slots"))
        nodes = sequence(entry["nodes"], f"{where}.nodes", MAX_NODES)
        slots = sequence(entry["slots"], f"{where}.slots", MAX_SLOTS)
        templates.append(
            Template(
                nodes=tuple(_decode_node(f"{where}.nodes[{i}]", node, blob) for i, node in enumerate(nodes)),
                edges=tuple(edges[index]),
                relocations=tuple(relocations[index]),
                slots=tuple(Slot(**exactly(slot, f"{where}.slots[{i}]", _names(Slot))) for i, slot in enumerate(slots)),
            )
        )
    blob.check_used()
    return tuple(templates)


def _decode_node(where: str, value: object, blob: _Blob) -> KernelNode:
    entry = exactly(value, where, _names(KernelNode))
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


def exactly(value: object, where: str, keys: Sequence[str]) -> Mapping[str, Any]:
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
