"""A real catalog, built on an H200 and committed: the format stays readable, and its relocations mean what they say."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from podgraph.catalog import store
from podgraph.catalog.model import Catalog
from podgraph.planner import Layout, Policy
from podgraph.planner.args import RUN_POINTERS, RUN_STRIDES, fill, offset_of, size_of
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
    assert count_families(r.bucket for r in golden.records) == {"decode": 2, "mixed": 6, "prefill": 6}
    assert golden.records[0].bucket == Bucket(72, 1024, 64)
    assert all(r.replay_us > 0 and 0 < r.max_error < 6e-3 for r in golden.records)
    assert GOLDEN.stat().st_size < 2 << 20


def test_writing_it_again_gives_the_same_bytes(golden: Catalog, tmp_path: Path) -> None:
    store.write(tmp_path / "again.podcat", golden)
    assert (tmp_path / "again.podcat").read_bytes() == GOLDEN.read_bytes()


def test_every_region_moves_with_its_own_relocations(golden: Catalog) -> None:
    """Relocating the stored parameters to made-up addresses gives what the planner would have launched there."""
    (entry,) = golden.specs.values()
    layout = Layout.of(entry.attention, [r.bucket for r in golden.records], Policy.for_sms(golden.fingerprint.sm_count))
    bases = {region.name: 0x7F00_0000_0000 + 0x1_0000_0000 * i for i, region in enumerate(entry.regions)}
    strides = {name: 8 * (i + 1) for i, name in enumerate(RUN_STRIDES)}
    want = bytes(fill(entry.attention, layout, bases, strides))
    for template in golden.templates:
        params = [bytearray(node.params) for node in template.nodes]
        for r in template.relocations:
            assert struct.unpack_from("<Q", params[r.node], r.offset) == (0,)
            struct.pack_into("<Q", params[r.node], r.offset, bases[r.region] + r.addend)
        for slot in template.slots:
            if slot.name in strides:
                struct.pack_into("<I", params[slot.node], slot.offset, strides[slot.name])
        assert all(bytes(p) == want for p in params)


def test_slots_are_the_fields_that_run_sets(golden: Catalog) -> None:
    for template in golden.templates:
        want = {
            (node, name, offset_of(name), size_of(name))
            for node in range(len(template.nodes))
            for name in (*RUN_POINTERS, *RUN_STRIDES)
        }
        assert {(s.node, s.name, s.offset, s.size) for s in template.slots} == want
