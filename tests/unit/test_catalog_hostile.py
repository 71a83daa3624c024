"""Catalogs that somebody forged: the digest is right, the content is not.

The digest is computed here from its description, not by the code under test.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from podgraph.catalog.format import decode, encode
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
from podgraph.errors import CatalogError
from podgraph.shapes import AttentionSpec, Bucket

Tensors = dict[str, npt.NDArray[Any]]
Document = dict[str, Any]
Forge = Callable[[Tensors, Document], object]

IMAGE = b"\x7fELF"
NAME = hashlib.sha256(IMAGE).hexdigest()
DTYPES = {"uint8": "U8", "int64": "I64", "float64": "F64"}


def make_catalog(backend: str = "cuda") -> Catalog:
    """Two nodes of 48 and 16 bytes; three relocations; two slots, of which ``q`` is also a relocated word."""
    nodes = (
        KernelNode(NAME, "pod", (132, 1, 1), (384, 1, 1), 200_000, bytes(48)),
        KernelNode(NAME, "merge", (8, 1, 1), (128, 1, 1), 0, bytes(16)),
    )
    template = Template(
        nodes,
        edges=(Edge(0, 1),),
        relocations=(Relocation(0, 0, "q", 0), Relocation(0, 8, "plan", 64), Relocation(1, 0, "plan", 0)),
        slots=(Slot("q", 0, 0, 8), Slot("stride", 0, 16, 4)),
    )
    cuda = backend == "cuda"
    regions = Region("q", 0), Region("plan", 4096)
    entry = SpecEntry(AttentionSpec(32, 8, 128, 16), regions, planner=0 if cuda else -1)
    return Catalog(
        fingerprint=Fingerprint("cuda", "9.0", 132, 13000) if cuda else Fingerprint("cpu"),
        specs={"s": entry},
        max_pages=64,
        max_kv_len=1024,
        templates=(template,) if cuda else (),
        records=(
            Record("s", Bucket(4, 0, 4), "v", 0 if cuda else -1, 10.0, 0.001),
            Record("s", Bucket(3, 64, 2), "v", 0 if cuda else -1, 20.0, 0.001),
        ),
        images={NAME: IMAGE} if cuda else {},
        built_with={"nvcc": "13.0"},
    )


def canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def signed(tensors: Tensors, fields: Document) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        dtype = DTYPES.get(tensor.dtype.name, "?")
        digest.update(canonical([name, dtype, list(tensor.shape)]).encode() + b"\n" + tensor.tobytes())
    digest.update(canonical({key: value for key, value in fields.items() if key != "digest"}).encode())
    return canonical({**fields, "digest": digest.hexdigest()})


def opened(backend: str = "cuda") -> tuple[Tensors, Document]:
    tensors, document = encode(make_catalog(backend))
    return {name: tensor.copy() for name, tensor in tensors.items()}, json.loads(document)


def put(*path: str | int, value: object) -> Forge:
    """Sets one value of the document."""

    def forge(tensors: Tensors, fields: Document) -> None:
        target: Any = fields
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    return forge


def cell(name: str, row: int, column: int, value: int) -> Forge:
    """Sets one word of a table."""
    return lambda tensors, fields: tensors[name].__setitem__((row, column), value)


def tensor(name: str, value: npt.NDArray[Any]) -> Forge:
    return lambda tensors, fields: tensors.__setitem__(name, value)


def both(*forges: Forge) -> Forge:
    return lambda tensors, fields: [forge(tensors, fields) for forge in forges]


NODE = ("templates", 0, "nodes", 0)
SLOT = ("templates", 0, "slots", 1)
ATTENTION = ("specs", "s", "attention")
REGION = ("specs", "s", "regions", 1)
OTHER = "0" * 64

DOCUMENT: dict[str, tuple[Forge, str]] = {
    "version_missing": (lambda t, d: d.pop("format_version"), "format_version: got None, allowed: 1"),
    "version_next": (put("format_version", value=2), "format_version: got 2, allowed: 1; build the catalog again"),
    "version_bool": (put("format_version", value=True), "format_version: got True"),
    "version_float": (put("format_version", value=1.0), r"format_version: got 1\.0"),
    "version_before_keys": (both(put("format_version", value=2), put("new", value=0)), "format_version: got 2"),
    "unknown_key": (put("extra", value=1), "document: got 'extra', allowed: exactly the keys format_version, "),
    "missing_key": (lambda t, d: d.pop("workspace"), "document: got 'no workspace'"),
    "fingerprint_list": (put("fingerprint", value=[]), r"fingerprint: got \[\], allowed: a mapping"),
    "fingerprint_key": (put("fingerprint", "sm", value=1), "fingerprint: got 'sm'"),
    "backend": (put("fingerprint", "backend", value="rocm"), "fingerprint.backend: got 'rocm', allowed: cuda or cpu"),
    "capability": (put("fingerprint", "compute_capability", value="9.0a\n"), "compute_capability: got"),
    "sm_count_zero": (put("fingerprint", "sm_count", value=0), "sm_count: got 0"),
    "sm_count_bool": (put("fingerprint", "sm_count", value=True), "sm_count: got True, allowed: an integer"),
    "driver_min": (put("fingerprint", "driver_min", value=-1), "driver_min: got -1"),
    "max_pages": (put("workspace", "max_pages", value=1 << 40), "workspace.max_pages: got 1099511627776"),
    "max_kv_len": (put("workspace", "max_kv_len", value=1.5), r"workspace.max_kv_len: got 1\.5"),
    "specs_list": (put("specs", value=[]), "specs: got .*a mapping"),
    "spec_name_escape": (lambda t, d: d["specs"].update({"\x1b[2J": d["specs"].pop("s")}), "specs: name: got"),
    "spec_key": (put("specs", "s", "extra", value=1), "specs.s: got 'extra'"),
    "planner_missing": (lambda t, d: d["specs"]["s"].pop("planner"), "specs.s: got 'no planner'"),
    "planner_beyond": (put("specs", "s", "planner", value=1), "specs.s.planner: got 1, allowed: the index of one of"),
    "planner_none": (put("specs", "s", "planner", value=-1), "specs.s.planner: got -1"),
    "planner_bool": (put("specs", "s", "planner", value=False), "specs.s.planner: got False"),
    "attention_key": (lambda t, d: d["specs"]["s"]["attention"].pop("dtype"), "specs.s.attention: got 'no dtype'"),
    "heads_zero": (put(*ATTENTION, "num_qo_heads", value=0), "specs.s.attention.num_qo_heads: got 0"),
    "heads_indivisible": (put(*ATTENTION, "num_kv_heads", value=7), "num_kv_heads: got 7, allowed: a divisor of"),
    "heads_bool": (put(*ATTENTION, "num_kv_heads", value=True), "num_kv_heads: got True"),
    "heads_huge": (put(*ATTENTION, "num_qo_heads", value=1 << 62), "num_qo_heads: got 4611686018427387904"),
    "head_dim_zero": (put(*ATTENTION, "head_dim", value=0), "head_dim: got 0"),
    "head_dim_text": (put(*ATTENTION, "head_dim", value="128"), "head_dim: got '128'"),
    "sm_scale_zero": (put(*ATTENTION, "sm_scale", value=0.0), r"sm_scale: got 0\.0, allowed: a positive number"),
    "sm_scale_negative": (put(*ATTENTION, "sm_scale", value=-1.0), r"sm_scale: got -1\.0"),
    "sm_scale_int": (put(*ATTENTION, "sm_scale", value=1), "sm_scale: got 1"),
    "soft_cap_text": (put(*ATTENTION, "logits_soft_cap", value="0"), "logits_soft_cap: got '0'"),
    "dtype": (put(*ATTENTION, "dtype", value=["bfloat16"]), "dtype: got"),
    "group_too_large": (put(*ATTENTION, "num_kv_heads", value=1), "num_kv_heads: got 1, .*decode tile"),
    "region_key": (put(*REGION, "extra", value=1), r"specs.s.regions\[1\]: got 'extra'"),
    "region_twice": (put(*REGION, "name", value="q"), r"specs.s.regions\[1\].name: got 'q', allowed: each name once"),
    "region_name_type": (put(*REGION, "name", value=[]), r"regions\[1\].name: got \[\]"),
    "region_negative": (put(*REGION, "size", value=-1), r"regions\[1\].size: got -1"),
    "region_huge": (put(*REGION, "size", value=(1 << 40) + 1), r"regions\[1\].size: got 1099511627777"),
    "regions_many": (put("specs", "s", "regions", value=[{}] * 65), "length of specs.s.regions: got 65"),
    "templates_mapping": (put("templates", value={}), "templates: got {}, allowed: a list"),
    "template_key": (put("templates", 0, "extra", value=1), r"templates\[0\]: got 'extra'"),
    "nodes_none": (put("templates", 0, "nodes", value=None), r"templates\[0\].nodes: got None, allowed: a list"),
    "node_key": (put(*NODE, "extra", value=1), r"templates\[0\].nodes\[0\]: got 'extra'"),
    "image_unknown": (put(*NODE, "image", value=OTHER), r"nodes\[0\].image: got '0000.*one of the catalog's 1 images"),
    "image_type": (put(*NODE, "image", value={}), r"nodes\[0\].image: got {}"),
    "function_mangled": (put(*NODE, "function", value="a b"), "function: got 'a b', allowed: a C identifier"),
    "function_line": (put(*NODE, "function", value="pod\n"), "function: got"),
    "function_long": (put(*NODE, "function", value="f" * 1025), "function: got"),
    "grid_zero": (put(*NODE, "grid", value=[0, 1, 1]), r"grid.x: got 0, allowed: an integer from 1 to 2147483647"),
    "grid_y": (put(*NODE, "grid", value=[1, 65_536, 1]), "grid.y: got 65536"),
    "grid_two": (put(*NODE, "grid", value=[1, 1]), "length of .*grid: got 2"),
    "grid_bool": (put(*NODE, "grid", value=[True, 1, 1]), "grid.x: got True"),
    "block_x": (put(*NODE, "block", value=[1025, 1, 1]), "block.x: got 1025"),
    "block_z": (put(*NODE, "block", value=[1, 1, 65]), "block.z: got 65"),
    "block_threads": (put(*NODE, "block", value=[1024, 2, 1]), "block: got .*at most 1024 threads"),
    "shared_negative": (put(*NODE, "shared_bytes", value=-1), "shared_bytes: got -1"),
    "shared_large": (put(*NODE, "shared_bytes", value=262_145), "shared_bytes: got 262145"),
    "params_offset": (put(*NODE, "params", value=[8, 48]), "params: offset: got 8, allowed: 0"),
    "params_offset_bool": (put(*NODE, "params", value=[False, 48]), "params: offset: got False"),
    "params_overlap": (
        put("templates", 0, "nodes", 1, "params", value=[32, 16]),
        "params: offset: got 32, allowed: 48",
    ),
    "params_beyond": (put("templates", 0, "nodes", 1, "params", value=[48, 17]), "params: size: got 17"),
    "params_negative": (put(*NODE, "params", value=[0, -8]), "params: size: got -8"),
    "params_left_over": (put("templates", 0, "nodes", 1, "params", value=[48, 8]), "size of tensor params: got 64"),
    "slot_key": (lambda t, d: d["templates"][0]["slots"][1].pop("size"), r"slots\[1\]: got 'no size'"),
    "slot_name": (put(*SLOT, "name", value=""), r"slots\[1\].name: got ''"),
    "slot_node": (put(*SLOT, "node", value=2), r"slots\[1\].node: got 2"),
    "slot_size_zero": (put(*SLOT, "size", value=0), r"slots\[1\].size: got 0"),
    "slot_beyond": (
        put(*SLOT, "offset", value=48),
        r"slots\[1\].offset: got 48, allowed: 4 bytes inside the node's 48",
    ),
    "slot_negative": (put(*SLOT, "offset", value=-4), r"slots\[1\].offset: got -4"),
    "slot_unaligned": (put(*SLOT, "offset", value=18), r"slots\[1\].offset: got 18, allowed: a multiple of 4"),
    "slot_twice": (
        put(*SLOT, value={"name": "x", "node": 0, "offset": 4, "size": 4}),
        r"slots: offset in node 0: got 4",
    ),
    "slot_half_word": (put(*SLOT, "offset", value=12), "slots: bytes of node 0: got '12 to 16', .*no relocated word"),
    "slot_two_words": (
        put(*SLOT, value={"name": "x", "node": 0, "offset": 8, "size": 16}),
        "slots: bytes of node 0: got '8 to 24'",
    ),
    "variants_unsorted": (put("variants", value=["v", "a"]), "variants: got .*sorted names"),
    "variants_type": (put("variants", value=[1]), r"variants\[0\]: got 1"),
    "regions_twice": (put("regions", value=["plan", "plan", "q"]), "regions: got .*each once"),
    "built_with_type": (put("built_with", "nvcc", value=13), "built_with.nvcc: got 13"),
    "built_with_list": (put("built_with", value=["nvcc"]), "built_with: got .*a mapping"),
    "built_with_long": (put("built_with", "nvcc", value="x" * 4097), "built_with.nvcc: got 'x"),
    "built_with_escape": (put("built_with", "\x1b", value="x"), "built_with: key: got"),
}

TENSORS: dict[str, tuple[Forge, str]] = {
    "missing": (lambda t, d: t.pop("edges"), "tensors: got 'no edges'"),
    "unknown": (tensor("weights", np.zeros(1, np.uint8)), "tensors: got 'weights', allowed: exactly params, "),
    "dtype": (tensor("edges", np.zeros((0, 4), np.uint8)), "dtype of tensor 'edges': got 'U8', allowed: I64"),
    "dtype_unsigned": (tensor("edges", np.zeros((0, 4), np.uint64)), "dtype of tensor 'edges': got 'uint64'"),
    "dtype_image": (tensor(f"image/{OTHER}", np.zeros(1)), "dtype of tensor 'image/0000"),
    "columns": (tensor("edges", np.zeros((1, 5), np.int64)), r"shape of tensor 'edges': got \(1, 5\), .*\[n, 4\]"),
    "dimensions": (tensor("params", np.zeros((8, 8), np.uint8)), r"shape of tensor 'params': got \(8, 8\)"),
    "scalar": (tensor("params", np.array(0, np.uint8)), r"shape of tensor 'params': got \(\)"),
    "rows": (tensor("edges", np.zeros(((1 << 20) + 1, 4), np.int64)), "rows of tensor edges: got 1048577"),
    "measured_rows": (tensor("replay_us", np.zeros(3)), "rows of tensor replay_us: got 3, allowed: 2, one per record"),
    "image_name": (tensor("image/../../etc", np.zeros(1, np.uint8)), "images: name: got '../../etc'"),
    "image_upper": (
        tensor(f"image/{NAME.upper()}", np.frombuffer(IMAGE, np.uint8)),
        "images: name: .*lower-case hex digits",
    ),
    "image_content": (tensor(f"image/{NAME}", np.frombuffer(b"evil", np.uint8)), "sha256 of image/.*: got "),
    "image_empty": (
        tensor(f"image/{hashlib.sha256().hexdigest()}", np.zeros(0, np.uint8)),
        "size of image/e3b0.*: got 0",
    ),
    "relocation_template": (cell("relocations", 0, 0, 1), r"relocations\[0\]: template: got 1"),
    "relocation_template_negative": (cell("relocations", 0, 0, -1), r"relocations\[0\]: template: got -1"),
    "relocation_node": (cell("relocations", 2, 1, 2), r"templates\[0\].relocations\[2\].node: got 2"),
    "relocation_beyond": (cell("relocations", 2, 2, 16), r"relocations\[2\].offset: got 16, .*inside the node's 16"),
    "relocation_cut": (cell("relocations", 2, 2, 12), r"relocations\[2\].offset: got 12, .*inside the node's 16"),
    "relocation_negative": (cell("relocations", 2, 2, -8), r"relocations\[2\].offset: got -8"),
    "relocation_wraps": (cell("relocations", 2, 2, 2**63 - 4), r"relocations\[2\].offset: got 9223372036854775804"),
    "relocation_unaligned": (cell("relocations", 2, 2, 4), r"relocations\[2\].offset: got 4, allowed: a multiple of 8"),
    "relocation_twice": (cell("relocations", 1, 2, 0), r"relocations\[1\].offset: got 0, allowed: each word of a node"),
    "relocation_region": (cell("relocations", 0, 3, 2), r"relocations\[0\]: region: got 2"),
    "relocation_region_negative": (cell("relocations", 0, 3, -1), r"relocations\[0\]: region: got -1"),
    "relocation_region_of_nobody": (
        put("regions", value=["plan", "secret"]),
        r"templates\[0\].relocations\[0\].region: got 'secret', allowed: a region of its specifications: plan, q",
    ),
    "addend_beyond": (cell("relocations", 1, 4, 4097), r"relocations\[1\].addend: got 4097, .*from 0 to 4096"),
    "addend_negative": (cell("relocations", 1, 4, -1), r"relocations\[1\].addend: got -1"),
    "addend_absurd": (cell("relocations", 0, 4, 2**62), r"relocations\[0\].addend: got 4611686018427387904"),
    "relocated_word": (lambda t, d: t["params"].__setitem__(15, 1), r"relocations\[1\]: the relocated word: got"),
    "edge_template": (cell("edges", 0, 0, 1), r"edges\[0\]: template: got 1"),
    "edge_target": (cell("edges", 0, 2, 2), r"templates\[0\].edges\[0\].target: got 2"),
    "edge_source": (cell("edges", 0, 1, -1), r"templates\[0\].edges\[0\].source: got -1"),
    "edge_to_itself": (cell("edges", 0, 2, 0), r"edges\[0\].target: got 0, allowed: above the edge's source 0"),
    "edge_cycle": (
        tensor("edges", np.array([[0, 0, 1, 0], [0, 1, 0, 0]])),
        r"edges\[1\].target: got 0, allowed: above the edge's source 1",
    ),
    "edge_twice": (
        tensor("edges", np.array([[0, 0, 1, 0], [0, 0, 1, 5]])),
        r"edges\[1\]: got .*each pair of nodes once",
    ),
    "record_spec": (cell("records", 0, 0, 1), r"records\[0\]: specification: got 1"),
    "record_spec_negative": (cell("records", 0, 0, -1), r"records\[0\]: specification: got -1"),
    "record_batch": (cell("records", 0, 1, 2**40), r"records\[0\].bucket.batch: got 1099511627776"),
    "record_batch_negative": (cell("records", 0, 1, -4), r"records\[0\].bucket.batch: got -4"),
    "record_unreachable": (cell("records", 0, 3, 5), r"records\[0\].bucket: got .*decode_count > batch"),
    "record_twice": (
        lambda t, d: t["records"].__setitem__(1, t["records"][0]),
        r"records\[1\].bucket: got .*each bucket of spec s once",
    ),
    "record_template": (cell("records", 1, 4, 1), r"records\[1\].template: got 1, .*one of the 1 templates"),
    "record_template_cpu_only": (cell("records", 1, 4, -1), r"records\[1\].template: got -1"),
    "record_variant": (cell("records", 1, 5, 1), r"records\[1\]: variant: got 1"),
    "replay_us_nan": (tensor("replay_us", np.array([1.0, np.nan])), r"records\[1\].replay_us: got nan"),
    "replay_us_infinite": (tensor("replay_us", np.array([np.inf, 1.0])), r"records\[0\].replay_us: got inf"),
    "replay_us_negative": (tensor("replay_us", np.array([-1.0, 1.0])), r"records\[0\].replay_us: got -1\.0"),
    "max_error_nan": (tensor("max_error", np.array([np.nan, 0.0])), r"records\[0\].max_error: got nan"),
}

CPU: dict[str, tuple[Forge, str]] = {
    "template": (cell("records", 0, 4, 0), r"records\[0\].template: got 0, allowed: -1, since the cpu backend"),
    "sm_count": (put("fingerprint", "sm_count", value=132), "sm_count: got 132"),
    "capability": (put("fingerprint", "compute_capability", value="9.0"), "compute_capability: got '9.0'"),
    "as_cuda": (
        put("fingerprint", value={"backend": "cuda", "compute_capability": "9.0", "sm_count": 1, "driver_min": 1}),
        r"records\[0\].template: got -1, allowed: the index of one of the 0 templates",
    ),
}


def check_refused(forge: Forge, message: str, backend: str = "cuda") -> None:
    tensors, fields = opened(backend)
    forge(tensors, fields)
    document = signed(tensors, fields)
    with pytest.raises(CatalogError, match=message) as caught:
        decode(tensors, document)
    assert "allowed: " in str(caught.value)
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_signature_of_the_tests(backend: str) -> None:
    tensors, fields = opened(backend)
    assert decode(tensors, signed(tensors, fields)) == make_catalog(backend)
    assert signed(tensors, fields) == canonical(fields)


@pytest.mark.parametrize(("forge", "message"), DOCUMENT.values(), ids=DOCUMENT)
def test_document(forge: Forge, message: str) -> None:
    check_refused(forge, message)


@pytest.mark.parametrize(("forge", "message"), TENSORS.values(), ids=TENSORS)
def test_tensors(forge: Forge, message: str) -> None:
    check_refused(forge, message)


@pytest.mark.parametrize(("forge", "message"), CPU.values(), ids=CPU)
def test_cpu(forge: Forge, message: str) -> None:
    check_refused(forge, message, "cpu")


class TestUnsigned:
    @pytest.mark.parametrize("name", ["params", "relocations", "edges", "records", "replay_us", f"image/{NAME}"])
    def test_changed_tensor(self, name: str) -> None:
        tensors, fields = opened()
        tensors[name].reshape(-1).view(np.uint8)[-1] ^= 1
        with pytest.raises(CatalogError, match=r"digest: got .*; the file is damaged, copy it again"):
            decode(tensors, canonical(fields))

    def test_changed_document(self) -> None:
        tensors, fields = opened()
        fields["workspace"]["max_pages"] = 65
        with pytest.raises(CatalogError, match="digest: got "):
            decode(tensors, canonical(fields))

    @pytest.mark.parametrize("digest", [None, 5, [], "", "É" * 64], ids=repr)
    def test_digest_type(self, digest: object) -> None:
        tensors, fields = opened()
        with pytest.raises(CatalogError, match="digest: got "):
            decode(tensors, canonical({**fields, "digest": digest}))


class TestJson:
    @pytest.mark.parametrize(
        ("document", "message"),
        [
            ("", "document: not valid JSON"),
            ("{", "document: not valid JSON"),
            ("[]", r"document: got \[\], allowed: a mapping"),
            ("1", "document: got 1, allowed: a mapping"),
            ("{}", "format_version: got None"),
            ('{"a":' * 100_000, "too deeply nested"),
            ("[" * 100_000 + "]" * 100_000, "too deeply nested"),
            ('{"format_version":' + "1" * 5000 + "}", "an integer of 5000 digits"),
            ('{"format_version":-' + "1" * 20 + "}", "an integer of 21 digits"),
            ('{"a":NaN,"format_version":1}', "cannot be canonical JSON"),
            ('{"a":1e999,"format_version":1}', "cannot be canonical JSON"),
            ('{"a":1E5,"format_version":1}', "document: got .*canonical JSON"),
            ('{"format_version": 1}', "document: got .*canonical JSON"),
            ('{"format_version":1,"format_version":1}', "document: got .*canonical JSON"),
            ('{"format_version":1,"a":1}', "document: got .*canonical JSON"),
            ('{"a":"é","format_version":1}', "document: got .*canonical JSON"),
        ],
        ids=[
            "empty",
            "cut",
            "list",
            "number",
            "no_keys",
            "deep_mapping",
            "deep_list",
            "huge_integer",
            "long_integer",
            "nan",
            "infinite",
            "spelling",
            "blank",
            "key_twice",
            "unsorted",
            "not_ascii",
        ],
    )
    def test_refused(self, document: str, message: str) -> None:
        with pytest.raises(CatalogError, match=message) as caught:
            decode({}, document)
        assert len(str(caught.value)) < 500

    def test_too_long(self) -> None:
        with pytest.raises(CatalogError, match="size of the document: got 67108865"):
            decode({}, " " * ((1 << 26) + 1))


class TestSharedTemplate:
    """A template's addends hold for every specification that uses it."""

    def forged(self, first_size: int, second_size: int, users: tuple[int, ...]) -> tuple[Tensors, str]:
        tensors, fields = opened()
        fields["specs"]["t"] = copy.deepcopy(fields["specs"]["s"])
        fields["specs"]["s"]["regions"][1]["size"] = first_size
        fields["specs"]["t"]["regions"][1]["size"] = second_size
        for user, name in enumerate("st"):  # whoever has records has a planner
            fields["specs"][name]["planner"] = 0 if user in users else -1
        rows = [[user, 4, 0, 4, 0, 0] for user in users]
        tensors["records"] = np.array(rows, np.int64).reshape(len(rows), 6)
        tensors["replay_us"] = tensors["max_error"] = np.zeros(len(rows))
        return tensors, signed(tensors, fields)

    @pytest.mark.parametrize("users", [(0,), (0, 1)], ids=["one", "both"])
    def test_too_small_for_a_user(self, users: tuple[int, ...]) -> None:
        with pytest.raises(CatalogError, match=r"relocations\[1\].addend: got 64, allowed: an integer from 0 to 63"):
            decode(*self.forged(63, 4096, users))

    @pytest.mark.parametrize("users", [(1,), ()], ids=["other", "none"])
    def test_too_small_for_others(self, users: tuple[int, ...]) -> None:
        decode(*self.forged(63, 4096, users))

    def test_too_small_for_a_planner(self) -> None:
        tensors, fields = opened()
        fields["specs"]["t"] = copy.deepcopy(fields["specs"]["s"])
        fields["specs"]["t"]["regions"][1]["size"] = 63
        with pytest.raises(CatalogError, match=r"relocations\[1\].addend: got 64, allowed: an integer from 0 to 63"):
            decode(tensors, signed(tensors, fields))

    def test_too_small_for_all(self) -> None:
        with pytest.raises(CatalogError, match=r"relocations\[1\].addend: got 64, allowed: an integer from 0 to 63"):
            decode(*self.forged(63, 62, ()))


class TestEveryValue:
    """Whatever one value is replaced by, the result is a CatalogError or a catalog that can be written again."""

    VALUES: tuple[object, ...] = (
        None,
        True,
        -1,
        0,
        1,
        7,
        1 << 40,
        -(1 << 63),
        10**19,
        1.5,
        "",
        "x",
        "\ud800",
        "x" * 10_000,
        [],
        [[]],
        {},
    )

    def leaves(self, value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
        if path:
            yield path
        if isinstance(value, dict | list):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                yield from self.leaves(item, (*path, key))

    def check(self, tensors: Tensors, fields: Document) -> None:
        document = signed(tensors, fields)
        try:
            catalog = decode(tensors, document)
        except CatalogError as e:
            assert str(e).isprintable()
        else:
            encode(catalog)

    def test_document(self) -> None:
        original = opened()
        for path in self.leaves(original[1]):
            for value in self.VALUES:
                tensors, fields = copy.deepcopy(original)
                put(*path, value=value)(tensors, fields)
                self.check(tensors, fields)

    def test_tables(self) -> None:
        original = opened()
        for name in ("relocations", "edges", "records"):
            for row, column in np.ndindex(original[0][name].shape):
                for value in (-(2**63), -1, 0, 1, 2, 8, 63, 2**31, 2**63 - 1):
                    tensors, fields = copy.deepcopy(original)
                    cell(name, row, column, value)(tensors, fields)
                    self.check(tensors, fields)
