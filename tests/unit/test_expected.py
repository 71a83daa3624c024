"""Templates follow from their specification: whatever a forged file changes is named, digests signed anew."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import struct
import time
from pathlib import Path

import pytest
import torch
from forged import changes, check_refused, with_template
from made_catalog import BUCKETS, SM_COUNT, SPECS, make_catalog, make_cubin, setup_of

from podgraph.catalog import cubin, expected, static, store
from podgraph.catalog.format import decode, encode
from podgraph.catalog.model import Catalog, Fingerprint
from podgraph.dispatch.runtime import OpenCatalog
from podgraph.errors import CatalogError
from podgraph.planner import packed, sm90
from podgraph.planner.policy import Capacity
from podgraph.providers.nvcc import IDENTITY
from podgraph.shapes import AttentionSpec, Bucket

replace = dataclasses.replace

KINDS = {"+".join(node.function for node in t.nodes): i for i, t in enumerate(make_catalog().templates)}


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return make_catalog()


def test_what_is_made_is_proven(catalog: Catalog, tmp_path: Path) -> None:
    store.write(tmp_path / "made.podcat", catalog)
    content = store.read(tmp_path / "made.podcat")
    assert content == catalog
    assert len(static.check(content)) == 3
    assert set(static.prove(content)) == set(SPECS)
    functions = {tuple(n.function for n in t.nodes) for t in content.templates}
    assert functions == {
        ("podgraph_check_pages", "podgraph_plan_sm90"),
        ("podgraph_check_pages", "podgraph_plan_flashinfer"),
        ("podgraph_pod_sm90",),
        ("podgraph_pod", "podgraph_merge"),
    }


def test_proving_takes_milliseconds(catalog: Catalog) -> None:
    start = time.perf_counter()
    static.prove(catalog)
    assert time.perf_counter() - start < 0.2  # 10 ms; a slow machine is none of this test's business


@pytest.mark.parametrize("index", KINDS.values(), ids=KINDS)
def test_every_change_of_a_template_is_named(catalog: Catalog, index: int) -> None:
    forged = list(changes(catalog, index))
    assert len(forged) > 100
    for field, template in forged:
        check_refused(with_template(catalog, index, template), f"templates[{index}].{field}")


# --- templates as a whole ---------------------------------------------------------------------------------------------


def planner_of(catalog: Catalog, name: str) -> int:
    return catalog.specs[name].planner


def with_planner(catalog: Catalog, name: str, index: int) -> Catalog:
    return replace(catalog, specs={**catalog.specs, name: replace(catalog.specs[name], planner=index)})


def test_templates_swapped(catalog: Catalog) -> None:
    """Each is right, but not for whom it is taken."""
    hopper, several, small = (planner_of(catalog, name) for name in SPECS)
    check_refused(with_planner(catalog, "hopper", several), f"templates[{several}].")
    check_refused(with_planner(catalog, "hopper", small), f"templates[{small}].")
    check_refused(with_planner(catalog, "hopper", catalog.records[0].template), "nodes: got ['podgraph_pod_sm90']")
    for spec in SPECS:
        records = catalog.buckets(spec)
        others = {r.template for r in catalog.records if r.template != records[0].template} | {hopper}
        for other in others:
            changed = tuple(
                replace(r, template=other) if (r.spec, r.variant) == (spec, records[0].variant) else r
                for r in catalog.records
            )
            check_refused(replace(catalog, records=changed), f"templates[{other}].")


def test_one_template_for_each_variant(catalog: Catalog) -> None:
    first, *rest = catalog.records
    other = next(r.template for r in rest if r.template != first.template)
    again = next(i for i, r in enumerate(catalog.records[1:], 1) if r.variant == first.variant)
    records = list(catalog.records)
    records[again] = replace(records[again], template=other)
    check_refused(
        replace(catalog, records=tuple(records)),
        f"records[{again}].template: got {other}, expected {first.template}: one template for spec hopper in variant ",
    )


def test_equal_templates(catalog: Catalog) -> None:
    twice = replace(catalog, templates=(*catalog.templates, catalog.templates[1]))
    with pytest.raises(CatalogError, match=rf"templates\[{len(catalog.templates)}\]: the same as templates\[1\]"):
        static.prove(twice)


def test_limits_of_the_planner(catalog: Catalog) -> None:
    for field in ("max_pages", "max_kv_len"):
        changed = replace(catalog, **{field: getattr(catalog, field) * 2})
        check_refused(
            changed, f"nodes[0].params.{field}: got {getattr(catalog, field)}, expected {changed.max_pages}"[:40]
        )
    sms = replace(catalog, fingerprint=replace(catalog.fingerprint, sm_count=2 * SM_COUNT))
    with pytest.raises(CatalogError, match=r"spec hopper: bucket .* needs "):
        static.prove(sms)
    check_refused(replace(catalog, partition="kv_load"), "params.partition: got 0, expected 1")


@pytest.mark.parametrize("field", ["num_kv_heads", "sm_scale", "window_left", "head_dim", "page_size", "dtype"])
def test_a_specification_that_the_kernels_were_not_made_for(catalog: Catalog, field: str) -> None:
    """As numbers of the parameters, or of the images' own."""
    values = {"num_kv_heads": 16, "sm_scale": 0.5, "window_left": 100, "head_dim": 64, "page_size": 64}
    spec = replace(
        SPECS["hopper"], kv_dtype="float16" if field == "dtype" else "bfloat16", **{field: values.get(field, "float16")}
    )
    forged = replace(make_catalog({"hopper": spec}), templates=(), images={}, records=())
    entry = replace(forged.specs["hopper"], planner=planner_of(catalog, "hopper"))
    settings = expected.variants_of(spec, "sm90", "sm_90a", BUCKETS[0])
    records = tuple(r for r in catalog.records if r.spec != "hopper" or r.variant in settings)
    with pytest.raises(CatalogError, match=r"templates\[\d+\]\.(nodes\[\d\]\.(image|params|shared_bytes)|relocations)"):
        static.prove(replace(catalog, specs={**catalog.specs, "hopper": entry}, records=records))


@pytest.mark.parametrize("variant", ["pod_flashinfer_p64_d16", "pod_flashinfer_p128_d0", "interpreter"])
def test_a_variant_for_other_tiles(variant: str) -> None:
    """The planner makes lists for the tile that follows from the bucket."""
    catalog = make_catalog({"small": SPECS["small"]})
    records = (replace(catalog.records[0], variant=variant), *catalog.records[1:])
    with pytest.raises(CatalogError, match=rf"spec small: variant {variant}, allowed: pod_flashinfer_p128_d16: "):
        static.prove(replace(catalog, records=records))


def test_another_kind_of_gpu(catalog: Catalog) -> None:
    for capability, problem in (("8.0", "allowed: no sm90 kernels"), ("8.6", r"got 8\.6, allowed: 8\.0, 9\.0")):
        changed = replace(catalog, fingerprint=replace(catalog.fingerprint, compute_capability=capability))
        with pytest.raises(CatalogError, match=problem):
            static.prove(changed)


# --- images -----------------------------------------------------------------------------------------------------------


def swapped(catalog: Catalog, old: str, data: bytes) -> Catalog:
    """The catalog with other content for one image, under its own sha256."""
    new = hashlib.sha256(data).hexdigest()
    templates = tuple(
        replace(t, nodes=tuple(replace(n, image=new) if n.image == old else n for n in t.nodes))
        for t in catalog.templates
    )
    images = {new if digest == old else digest: image for digest, image in catalog.images.items()}
    return replace(catalog, templates=templates, images={**images, new: data})


def test_an_image_of_another_specification(catalog: Catalog) -> None:
    """Same kernel, same parameters, same shared memory: only what it was compiled from tells them apart."""
    others = make_catalog({"other": AttentionSpec(32, 8, 128, 64)})
    theirs = {r.variant: others.templates[r.template].nodes[0].image for r in others.records}
    for record in catalog.buckets("hopper")[:3]:
        (node,) = catalog.templates[record.template].nodes
        forged = swapped(catalog, node.image, others.images[theirs[record.variant]])
        check_refused(forged, f"templates[{record.template}].nodes[0].image: got one compiled from ")


def test_an_image_that_says_less_than_it_must(catalog: Catalog) -> None:
    node = catalog.templates[catalog.records[0].template].nodes[0]
    said = cubin.read(catalog.images[node.image])
    for constants, sm, kernels, problem in (
        ({}, 90, said.kernels, f"got no {IDENTITY}, expected one: made by an older podgraph"),
        ({IDENTITY: said.constants[IDENTITY]}, 90, said.kernels, "constant podgraph_smem_bytes: got 0 bytes"),
        (said.constants, 80, said.kernels, "compiled for SM 80, the catalog's GPU is SM 90"),
        (said.constants, 90, {"f": 280}, "got kernels f of 280 bytes, expected podgraph_pod_sm90 of 280 bytes"),
        (said.constants, 90, {"podgraph_pod_sm90": 288}, "got kernels podgraph_pod_sm90 of 288 bytes, expected"),
    ):
        with pytest.raises(CatalogError, match=problem):
            static.prove(swapped(catalog, node.image, make_cubin(kernels, constants, sm)))


def test_an_image_that_is_damaged(catalog: Catalog) -> None:
    image = catalog.images[digest := next(iter(catalog.images))]
    for data, problem in (
        (image[:200], "a damaged cubin"),
        (b"", "a damaged cubin"),
        (b"#!/bin/sh" + image, "not a cubin"),
    ):
        with pytest.raises(CatalogError, match=f"image {digest[:12]}: {problem}"):
            static.prove(replace(catalog, images={**catalog.images, digest: data}))


def test_two_images_of_one_origin(catalog: Catalog) -> None:
    data = next(iter(catalog.images.values()))
    twice = swapped(replace(catalog, images={**catalog.images, "x": b""}), "x", data + b"\0")
    with pytest.raises(CatalogError, match=r"image [0-9a-f]{12}: compiled from the same as [0-9a-f]{12}, allowed: one"):
        static.prove(twice)


HEADER = {  # of an ELF file: how it is packed, and where
    "segments_at": ("<Q", 32),
    "sections_at": ("<Q", 40),
    "segment_size": ("<H", 54),
    "segments": ("<H", 56),
    "section_size": ("<H", 58),
    "sections": ("<H", 60),
    "names": ("<H", 62),
}


@pytest.mark.parametrize("name", HEADER)
def test_absurd_headers(catalog: Catalog, name: str) -> None:
    form, at = HEADER[name]
    image = next(iter(catalog.images.values()))
    top = (1 << 8 * struct.calcsize(form)) - 1
    refused = 0
    for value in (1, 7, top >> 1, (top >> 1) + 1, top - 63, top):
        data = bytearray(image)
        struct.pack_into(form, data, at, value)
        try:
            cubin.read(bytes(data))
        except CatalogError as e:
            assert "damaged cubin" in str(e)
            refused += 1
    assert refused >= (0 if name == "segment_size" else 4)  # it has no segments


def test_absurd_tables(catalog: Catalog) -> None:
    """Every field of every section and symbol, one by one: a CatalogError or what the driver would see too."""
    image = next(iter(catalog.images.values()))
    (sections_at,) = struct.unpack_from("<Q", image, 40)
    for at in [*range(64, len(image) - 8, 4), *range(sections_at, len(image) - 8, 4)]:
        for value in (1 << 63, (1 << 64) - 1, (1 << 62) + 5, len(image)):
            data = bytearray(image)
            struct.pack_into("<Q", data, at, value)
            with contextlib.suppress(CatalogError):
                cubin.read(bytes(data))


# --- capacities -------------------------------------------------------------------------------------------------------


def with_capacity(name: str, **counts: int) -> Catalog:
    catalog = make_catalog({name: SPECS[name]})
    entry = catalog.specs[name]
    return replace(catalog, specs={name: replace(entry, capacity=replace(entry.capacity, **counts))})


@pytest.mark.parametrize(
    ("name", "field", "most"),
    [
        ("several", "merge_rows", 1 << 16),  # tickets of work units, beside the rows of a decode
        ("several", "requests", packed.MAX_BATCH),
        ("small", "partial_rows", ((1 << 32) - 1) // (8 * 64)),
    ],
)
def test_what_overflows_is_refused_at_reading(name: str, field: str, most: int) -> None:
    for count in (most + 1, 1 << 24):
        tensors, document = encode(make_catalog({name: SPECS[name]}))
        with pytest.raises(
            CatalogError, match=rf"specs\.{name}\.capacity\.{field}: got {count}, allowed: at most {most}"
        ):
            encode(with_capacity(name, **{field: count}))
    encode(with_capacity(name, **{field: most}))
    decode(tensors, document)


def test_limits_of_lists_by_heads() -> None:
    wide = AttentionSpec(1024, 1024, 64, 16)
    found = {
        kernels: [f for f, _, _ in packed.limits(wide, Capacity(1, *[1 << 22] * 4), kernels)]
        for kernels in ("sm90", "flashinfer")
    }
    assert found == {
        "sm90": ["prefill_items", "decode_items", "merge_rows"],
        "flashinfer": ["prefill_items", "decode_items", "merge_rows", "partial_rows"],
    }
    assert not list(packed.limits(wide, Capacity(*[3072] * 5), "sm90"))


def test_what_constants_alone_bound_fits_its_bits() -> None:
    most_rows = 16
    assert sm90.MOST_PARTS < 1 << 12
    assert sm90.MOST_TILE_PARTS < 1 << 12
    assert most_rows - 1 < 1 << 4
    assert sm90.CHUNK - 1 + most_rows - 1 < 1 << 7, "tokens that the window hides, below the sign"
    assert packed.TICKET_BITS + 4 + 4 < 31


# --- opening and binding ----------------------------------------------------------------------------------------------


def test_a_cpu_catalog_holds_no_graphs(catalog: Catalog) -> None:
    cpu = replace(catalog, fingerprint=Fingerprint("cpu"))
    with pytest.raises(CatalogError, match=r"number of templates: got \d+, allowed: 0, since the cpu backend"):
        encode(cpu)
    with pytest.raises(CatalogError, match=r"number of images: got \d+, allowed: 0, since the cpu backend"):
        encode(replace(cpu, templates=()))


def test_bind_proves_once(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenCatalog, "_find_gpu", lambda self, device: torch.device("cuda", 0))
    monkeypatch.setattr(OpenCatalog, "_bind_gpu", lambda self, *arguments: pytest.fail("bound"))
    index = planner_of(catalog, "hopper")
    for nodes, problem in (
        (
            catalog.templates[index].nodes[1:],
            r"nodes: got \['podgraph_plan_sm90'\], expected \['podgraph_check_pages', ",
        ),
        (catalog.templates[index].nodes[:1], r"nodes: got \['podgraph_check_pages'\], expected "),
        ((catalog.templates[index].nodes[1],) * 2, r"nodes\[0\]\.function: got 'podgraph_plan_sm90', expected "),
    ):
        bad = with_template(catalog, index, replace(catalog.templates[index], nodes=nodes, edges=()))
        with pytest.raises(CatalogError, match=rf"^forged\.podcat: templates\[{index}\]\.{problem}"):
            OpenCatalog(Path("forged.podcat"), bad).bind("hopper")
    times = []
    real = static.prove
    monkeypatch.setattr(static, "prove", lambda content: times.append(1) or real(content))
    opened = OpenCatalog(Path("made.podcat"), catalog)
    for _ in range(3):
        with pytest.raises(pytest.fail.Exception, match="bound"):
            opened.bind("small")
    assert len(times) == 1


def test_a_bucket_without_a_template_of_its_own(catalog: Catalog) -> None:
    """A bucket that was not built, in the template of another: it follows from the same specification."""
    more = replace(catalog.records[0], bucket=Bucket(60, 900, 50))
    static.prove(replace(catalog, records=(*catalog.records, more)))
    assert setup_of(SPECS["hopper"]).layout.capacity == catalog.specs["hopper"].capacity
