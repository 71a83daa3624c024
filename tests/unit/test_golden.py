"""A real catalog, built on an H200 and committed: the format stays readable, and its relocations mean what they say."""

from __future__ import annotations

import contextlib
import random
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from podgraph.catalog import cubin, static, store
from podgraph.catalog.model import Catalog, Fingerprint
from podgraph.dispatch.runtime import OpenCatalog
from podgraph.errors import CatalogError
from podgraph.providers.nvcc import IDENTITY
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


@pytest.mark.xfail(raises=CatalogError, reason="re-take: it was made before images said what they were compiled from")
def test_it_holds_together(golden: Catalog) -> None:
    """Images and templates against what this version makes of the specification; test_expected.py forges them."""
    assert len(static.check(golden)) == 3


def test_an_image_of_another_origin_is_refused(golden: Catalog) -> None:
    """Whatever else holds: what says of none of its images what it was compiled from is not taken."""
    images = {digest: data.replace(IDENTITY.encode(), b"x" * len(IDENTITY)) for digest, data in golden.images.items()}
    with pytest.raises(CatalogError, match=f"image [0-9a-f]+: got no {IDENTITY}, expected one: "):
        static.check(replace(golden, images=images))


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
