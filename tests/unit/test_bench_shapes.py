"""The tables behind benchmarks/bench_kernels.py: what it would only find out on a GPU otherwise."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from benchmarks.kernel_shapes import MAIN, SETS, build_specs, spec_name
from benchmarks.shapes import Shape, floor_us
from podgraph.batch import Batch
from podgraph.planner import Layout, Policy, plan
from podgraph.providers import pod_sm90
from podgraph.shapes import AttentionSpec

ALL = [(spec, shape) for some in SETS.values() for spec, shape in some]
EACH = pytest.mark.parametrize(("spec", "shape"), ALL, ids=[shape.name for _, shape in ALL])


def test_sets() -> None:
    assert {name: len(some) for name, some in SETS.items()} == {"nine": 9, "twelve": 12, "sides": 6}
    assert len({shape.name for _, shape in ALL}) == len(ALL)
    # README looks figures up by paths
    assert not any("/" in shape.name for _, shape in ALL)
    assert all(spec == MAIN for spec, _ in SETS["nine"] + SETS["sides"])


def test_twelve_cover_what_they_should() -> None:
    specs = [spec for spec, _ in SETS["twelve"]]
    shapes = [shape for _, shape in SETS["twelve"]]
    heads = {(spec.num_qo_heads, spec.num_kv_heads) for spec in specs}
    assert heads >= {(16, 4), (28, 4), (40, 8), (64, 8), (32, 32)}
    assert {spec.page_size for spec in specs} == {16, 32, 64}
    assert {spec.head_dim for spec in specs} == {64, 128}
    decodes = [len(shape.decodes) for shape in shapes]
    rows = [shape.bucket.prefill_len for shape in shapes]
    assert (min(decodes), max(decodes)) == (1, 256)
    assert (min(rows), max(rows)) == (64, 8192)
    assert any(max(shape.decodes) > 50 * statistics.median(shape.decodes) for shape in shapes)


def test_sides_are_one_sided() -> None:
    families = [shape.bucket.family for _, shape in SETS["sides"]]
    assert families == [shape.name.split()[0] for _, shape in SETS["sides"]]
    assert {shape.bucket.family for _, shape in SETS["nine"] + SETS["twelve"]} == {"mixed"}


@EACH
def test_kernel_serves_the_specification(spec: AttentionSpec, shape: Shape) -> None:
    assert not list(spec.limits())
    assert pod_sm90.refusal(spec, pod_sm90.ARCH) == ""


@EACH
def test_bucket_and_workspace_hold_the_batch(spec: AttentionSpec, shape: Shape) -> None:
    build_spec = build_specs()[spec_name(spec)]
    assert build_spec.specs[spec_name(spec)] == spec
    assert shape.bucket in build_spec.buckets
    limits = build_spec.workspace
    batch = Batch.of(*shape.arrays(spec), page_size=spec.page_size, max_kv_len=limits.max_kv_len)
    assert batch.kv_lens.tolist() == shape.kv_lens
    assert batch.num_pages <= limits.max_pages
    demand = batch.demand(spec)
    assert shape.bucket.fits(demand)
    assert demand.requests == shape.bucket.batch
    assert (demand.prefill_rows, demand.decodes) == (shape.bucket.prefill_len, shape.bucket.decode_count)


@EACH
def test_work_list_fits_its_catalog(spec: AttentionSpec, shape: Shape) -> None:
    batch = Batch.of(*shape.arrays(spec), page_size=spec.page_size, max_kv_len=max(shape.kv_lens))
    policy = Policy.for_sms(132, "sm90")
    layout = Layout.of(spec, build_specs()[spec_name(spec)].buckets, policy)
    for setting in pod_sm90.settings_of(spec):
        # raises where the bucket does not hold it
        work = plan(batch, shape.bucket, spec, policy, pod_sm90.variant_of(setting))
        work.pack(layout, np.zeros(layout.step_bytes // 4, np.int32))


@EACH
def test_floor(spec: AttentionSpec, shape: Shape) -> None:
    assert 1 < floor_us(shape, spec) < 5000


def test_floor_counts_bytes_and_operations() -> None:
    """One decode reads its K and V; one prefill without history multiplies half a square."""
    kv_bytes = 4096 * 2 * 8 * 128 * 2 + 2 * 32 * 128 * 2
    assert floor_us(Shape("", [], [4096]), MAIN) == pytest.approx(kv_bytes / 4.3e12 * 1e6)
    pairs = 4096 * 4097 / 2
    assert floor_us(Shape("", [(4096, 4096)], []), MAIN) == pytest.approx(4 * 32 * 128 * pairs / 780e12 * 1e6)


def test_builds_of_some_sets_only() -> None:
    assert list(build_specs(["nine"])) == [spec_name(MAIN)]
    assert len(build_specs(["nine"])[spec_name(MAIN)].buckets) == 9
    assert len(build_specs()) == len({spec for spec, _ in ALL})
