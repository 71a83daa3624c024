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
import hashlib
import typing
from collections.abc import Iterable, Mapping

import numpy as np

from podgraph.catalog.canonical_json import check_canonical, dump_json, load_json
from podgraph.catalog.checks import check_catalog
from podgraph.catalog.decoding import COLUMNS, IMAGE, WORDS, Tensor, check_tensors, decode_catalog, exactly
from podgraph.catalog.model import FORMAT_VERSION, Catalog, SpecEntry, Template
from podgraph.catalog.values import refuse
from podgraph.shapes import AttentionSpec


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
        tensors[IMAGE + digest] = np.frombuffer(image, np.uint8)
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
    exactly(fields, "document", ("format_version", *keys))
    check_tensors(tensors)
    actual = content_digest(tensors, fields)
    if fields["digest"] != actual:
        raise refuse("digest", fields["digest"], f"{actual}, that of the content; the file is damaged, copy it again")
    catalog = decode_catalog(tensors, fields)
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
        digest.update(dump_json([name, WORDS[tensor.dtype.str], list(tensor.shape)]).encode() + b"\n")
        digest.update(tensor.tobytes())
    digest.update(dump_json({key: value for key, value in document.items() if key != "digest"}).encode())
    return digest.hexdigest()


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
            name: np.array(rows, "<i8").reshape(len(rows), COLUMNS[name])
            for name, rows in (("relocations", relocations), ("edges", edges), ("records", records))
        },
        "replay_us": np.array([r.replay_us for r in catalog.records], "<f8"),
        "max_error": np.array([r.max_error for r in catalog.records], "<f8"),
    }
