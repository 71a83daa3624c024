"""A real catalog, built on an H200 and committed: the format stays readable, and its relocations mean what they say."""

from __future__ import annotations

import contextlib
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podgraph.catalog import cubin, static, store
from podgraph.catalog.model import Catalog, Fingerprint
from podgraph.dispatch.runtime import OpenCatalog
from podgraph.errors import CatalogError
from podgraph.planner.args import params_of
from podgraph.shapes import AttentionSpec, Bucket, count_families

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "llama3-8b-h200.podcat"


@pytest.fixture(scope="module")
def golden() -> Catalog:
    return store.read(GOLDEN)


def test_content(golden: Catalog) -> None:
    assert golden.fingerprint.compute_capability == "9.0"
    assert golden.fingerprint.sm_count == 132
    assert golden.specs["llama3-8b"].attention == AttentionSpec(32, 8, 128, 16)
    assert count_families(r.bucket for r in golden.records) == {"decode": 2, "mixed": 6, "prefill": 4}
    assert golden.records[0].bucket == Bucket(72, 1024, 64)
    assert {r.variant for r in golden.records} == {"pod_sm90_w64", "pod_sm90_w128", "pod_sm90_w64d"}
    assert all(r.replay_us > 0 and 0 < r.max_error < 6e-3 for r in golden.records)
    assert GOLDEN.stat().st_size < 2 << 20


def test_writing_it_again_gives_the_same_bytes(golden: Catalog, tmp_path: Path) -> None:
    store.write(tmp_path / "again.podcat", golden)
    assert (tmp_path / "again.podcat").read_bytes() == GOLDEN.read_bytes()


def test_it_holds_together(golden: Catalog) -> None:
    """Images, parameters, relocations and regions against each other and against this version."""
    assert len(static.check(golden)) == 3


@pytest.fixture(params=["planner", "attention"])
def graph(golden: Catalog, request: pytest.FixtureRequest) -> int:
    """Index of a planner's template, and of one that buckets replay."""
    (entry,) = golden.specs.values()
    return entry.planner if request.param == "planner" else golden.replayed[0]


def with_template(catalog: Catalog, graph: int, **changes: Any) -> Catalog:
    templates = list(catalog.templates)
    templates[graph] = replace(templates[graph], **changes)
    return replace(catalog, templates=tuple(templates))


def last_node(catalog: Catalog, graph: int, **changes: Any) -> Catalog:
    nodes = catalog.templates[graph].nodes
    return with_template(catalog, graph, nodes=(*nodes[:-1], replace(nodes[-1], **changes)))


def test_changed_parameters_are_found(golden: Catalog, graph: int) -> None:
    """Whatever word of the parameters changes, unless a relocation or a slot fills it anyway."""
    template = golden.templates[graph]
    last, node = len(template.nodes) - 1, template.nodes[-1]
    filled = {r.offset + i for r in template.relocations if r.node == last for i in range(8)}
    filled |= {s.offset + i for s in template.slots if s.node == last for i in range(s.size)}
    plain = [i for i in range(0, len(node.params), 4) if i not in filled]
    assert len(plain) >= 5
    for offset in plain:
        changed = bytearray(node.params)
        changed[offset] ^= 1
        with pytest.raises(
            CatalogError, match=rf"graph {graph}, node {last} \({node.function}\): parameter offset {offset} "
        ):
            static.check(last_node(golden, graph, params=bytes(changed)))


def test_changed_relocations_are_found(golden: Catalog, graph: int) -> None:
    template = golden.templates[graph]
    for i, relocation in enumerate(template.relocations):
        for changed in (
            replace(relocation, addend=relocation.addend + 16),
            replace(relocation, region="lse" if relocation.region != "lse" else "q"),
        ):
            relocations = (*template.relocations[:i], changed, *template.relocations[i + 1 :])
            with pytest.raises(CatalogError, match=f"graph {graph}, node "):
                static.check(with_template(golden, graph, relocations=relocations))


def test_slots_are_the_fields_that_are_set_by_name(golden: Catalog, graph: int) -> None:
    template = golden.templates[graph]
    takes = params_of(template.nodes[-1].function)
    assert len(template.slots) == len(template.nodes) * len(takes.slots)
    for i, slot in enumerate(template.slots):
        with pytest.raises(CatalogError, match=f"no slot for {slot.name}"):
            static.check(with_template(golden, graph, slots=(*template.slots[:i], *template.slots[i + 1 :])))


def test_a_planner_of_other_kernels_is_found(golden: Catalog) -> None:
    ((name, entry),) = golden.specs.items()
    for planner in golden.replayed:
        bad = replace(golden, specs={name: replace(entry, planner=planner)})
        with pytest.raises(CatalogError, match=r"spec llama3-8b: its planner is \['podgraph_pod_sm90'\], allowed: "):
            static.check(bad)
    bad = last_node(golden, entry.planner, function="podgraph_plan_flashinfer")
    with pytest.raises(CatalogError, match="no kernel podgraph_plan_flashinfer of 304 bytes"):
        static.check(bad)


def test_an_image_that_does_not_fit_is_found(golden: Catalog) -> None:
    graph = golden.replayed[0]
    node = golden.templates[graph].nodes[0]
    image = golden.images[node.image]
    other_gpu = bytearray(image)
    other_gpu[49] = 80  # the SM version in the ELF header's flags
    for data, problem in (
        (bytes(other_gpu), "compiled for SM 80, the catalog's GPU is SM 90"),
        (image[:200], "a damaged cubin"),
        (b"#!/bin/sh" + image, "not a cubin"),
        (image.replace(b"podgraph_pod", b"podgraph_foo"), "no kernel podgraph_pod_sm90 of 280 bytes of parameters"),
    ):
        bad = replace(golden, images={**golden.images, node.image: data})
        with pytest.raises(CatalogError, match=problem):
            static.check(bad)
    with pytest.raises(CatalogError, match="no kernel podgraph_pod_sm90 of 288 bytes"):
        static.check(last_node(golden, graph, params=node.params + bytes(8)))


def test_regions_of_another_planner_are_found(golden: Catalog) -> None:
    ((name, entry),) = golden.specs.items()
    regions = tuple(replace(r, size=r.size + 16) if r.name == "plan" else r for r in entry.regions)
    with pytest.raises(CatalogError, match="spec llama3-8b: region plan has"):
        static.check(replace(golden, specs={name: replace(entry, regions=regions)}))


def test_an_image_cut_or_flipped_anywhere_never_crashes(golden: Catalog) -> None:
    rng = random.Random(1)
    for image in golden.images.values():
        for _ in range(200):
            data = bytearray(image[: rng.randrange(len(image))] if rng.random() < 0.3 else image)
            for _ in range(rng.randrange(4)):
                if data:
                    data[rng.randrange(min(len(data), 2048))] ^= 1 << rng.randrange(8)
            with contextlib.suppress(CatalogError):
                cubin.kernels(bytes(data))


@pytest.mark.parametrize("variant", ["pod_sm90_w999", "pod_sm90_", "pod_flashinfer_p128_d16", "interpreter"])
def test_an_unknown_variant_is_refused(golden: Catalog, variant: str) -> None:
    records = (replace(golden.records[0], variant=variant), *golden.records[1:])
    with pytest.raises(CatalogError, match=r"spec llama3-8b: variant .*, allowed: "):
        static.check(replace(golden, records=records))


def test_a_gpu_variant_on_the_cpu_is_refused(golden: Catalog) -> None:
    (name,) = golden.specs
    records = tuple(replace(r, template=-1) for r in golden.records)
    cpu = replace(golden, fingerprint=Fingerprint("cpu"), records=records, templates=(), images={})
    with pytest.raises(CatalogError, match=r"variant pod_sm90_w[0-9a-z]+, allowed: interpreter"):
        static.check(cpu)
    with pytest.raises(CatalogError, match=f"cpu.podcat: spec {name}: variant"):
        OpenCatalog(Path("cpu.podcat"), cpu).bind()


def test_an_image_that_speaks_of_more_than_it_holds_is_refused(golden: Catalog) -> None:
    """Sections and segments that end behind the file: the driver would read on."""
    for image in golden.images.values():
        segments_at, sections_at = struct.unpack_from("<QQ", image, 32)
        segments, _, sections = struct.unpack_from("<HHH", image, 56)
        ends = [segments_at + i * cubin.SEGMENT.size + 32 for i in range(segments)]
        for i in range(sections):
            at = sections_at + i * cubin.SECTION.size
            if struct.unpack_from("<I", image, at + 4) != (cubin.NO_BITS,):
                ends.append(at + 32)
        assert len(ends) > 10
        for size_at in ends:
            data = bytearray(image)
            struct.pack_into("<Q", data, size_at, len(image) + 1)
            with pytest.raises(CatalogError, match=f"a damaged cubin: {len(image)} bytes, it speaks of "):
                cubin.kernels(bytes(data))
