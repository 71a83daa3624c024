"""What benchmarks/bench_step.py serves and builds, as far as that needs no GPU."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import bench_step
from benchmarks.bench_step import (
    CONFIG,
    FEW,
    GRAPHS,
    LAYERS,
    LEAST_STEPS,
    MANY,
    NAME,
    PAGES,
    WARM_STEPS,
    StepArrays,
    figures,
    switches,
    trace_steps,
    with_buckets,
)
from podgraph import build as building
from podgraph.catalog import static, store
from podgraph.catalog.model import Catalog, Fingerprint, Record
from podgraph.config import load_config
from podgraph.dispatch.select import Selector
from podgraph.planner.policy import SM90
from podgraph.shapes import AttentionSpec, Bucket

SPEC = AttentionSpec(32, 8, 128, 16)
SETTINGS = ("w64", "w128", "w64d")


@pytest.fixture(scope="module")
def content() -> Catalog:
    """As built for an H200, without its graphs."""
    config = load_config(CONFIG)
    records = [
        Record(NAME, bucket, SM90 + SETTINGS[i % 3], 1 + i % 3, 10.0 + i) for i, bucket in enumerate(config.buckets)
    ]
    return building._catalog(config, Fingerprint("cuda", "9.0", 132, 13000), (), {NAME: 0}, records, {})


@pytest.fixture(scope="module")
def steps() -> list[StepArrays]:
    return trace_steps(SPEC, 300)


def test_every_step_has_a_bucket(content: Catalog) -> None:
    """A batch whose metadata lie on the GPU cannot be split."""
    assert content.specs[NAME].attention == SPEC
    selector = Selector(content.buckets(NAME), SPEC, content.max_pages)
    steps = trace_steps(SPEC, bench_step.STEPS + WARM_STEPS)
    assert len(steps) == bench_step.STEPS + WARM_STEPS
    for step in steps:
        selector.check(step.batch)
        demand = step.batch.demand(SPEC)
        assert (step.prefill_len, step.decode_count) == (demand.prefill_rows, demand.decodes)
        assert step.batch.kv_indices.max() < PAGES
        assert int(step.batch.kv_lens.max()) <= content.max_kv_len
    assert sum(step.sides is not None for step in steps) > 300
    assert any(step.sides is not None for step in steps[WARM_STEPS : WARM_STEPS + LEAST_STEPS])


def test_prefills_come_first(steps: list[StepArrays]) -> None:
    """FlashInfer's two sides of q are slices of it then."""
    for step in steps:
        lengths = step.batch.qo_lens
        assert (np.diff((lengths == 1).astype(int)) >= 0).all()
        if step.sides is None:
            assert step.prefill_len == 0 or step.decode_count == 0
            continue
        prefill, decode = step.sides
        assert (prefill[0][-1], decode[0][-1]) == (step.prefill_len, step.decode_count)
        assert [*prefill[2], *decode[2]] == step.batch.kv_indices.tolist()


def test_steps_start_over() -> None:
    first, *_, last = trace_steps(SPEC, 4000)
    assert first.batch.qo_lens.tolist() == trace_steps(SPEC, 1)[0].batch.qo_lens.tolist()
    assert last.batch.num_requests > 0


@pytest.mark.parametrize("count", [FEW, MANY])
def test_catalogs_of_many_buckets(content: Catalog, count: int) -> None:
    made = with_buckets(content, NAME, count)
    buckets = {r.bucket for r in made.records}
    assert len(buckets) == len(made.records) == count
    assert all(bucket.unreachable is None for bucket in buckets)
    assert {b.family for b in buckets} == {"decode", "mixed", "prefill"}
    assert {r.template for r in made.records} == {r.template for r in content.records}
    static.layout_of(made, NAME)  # as bind does
    assert made.specs == content.specs


def test_more_buckets_than_the_lists_hold(content: Catalog) -> None:
    with pytest.raises(ValueError, match="1000000 buckets: the catalog's work lists hold"):
        with_buckets(content, NAME, 1_000_000)


def test_such_a_catalog_is_a_file(content: Catalog, tmp_path: Path) -> None:
    records = tuple(replace(r, variant="interpreter", template=-1) for r in content.records)
    on_cpu = building._catalog(load_config(CONFIG), Fingerprint("cpu"), (), {}, list(records), {})
    store.write(tmp_path / "many.podcat", with_buckets(on_cpu, NAME, MANY))
    assert len(store.read(tmp_path / "many.podcat").records) == MANY


def test_switches(content: Catalog) -> None:
    record, others = switches(content.buckets(NAME))
    assert record.bucket == Bucket(72, 1024, 64)
    assert others["same"] == record
    assert others["bucket"].template == record.template
    assert others["bucket"].bucket != record.bucket
    assert others["template"].template != record.template
    same = tuple(replace(r, template=1) for r in content.buckets(NAME))
    assert set(switches(same)[1]) == {"same", "bucket"}
    for other in (record, *others.values()):
        step = bench_step._full(other.bucket, SPEC)
        demand = step.batch.demand(SPEC)
        assert other.bucket.fits(demand)
        assert (demand.prefill_rows, demand.decodes) == (other.bucket.prefill_len, other.bucket.decode_count)
        assert other.bucket.fits(bench_step._two_decodes(SPEC).demand(SPEC))
        assert step.batch.kv_indices.max() < PAGES


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes on by a microsecond whenever it is asked."""
    ticks = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(bench_step.time, "perf_counter_ns", lambda: next(ticks))
    monkeypatch.setattr(bench_step.torch.cuda, "synchronize", lambda: None)


@pytest.mark.usefixtures("clock")
def test_figures() -> None:
    times = [bench_step._Times() for _ in range(3)]
    layers: list[int] = []
    for some in times:
        some.take(lambda: None, layers.append)
    assert layers == list(range(LAYERS)) * 3
    found = figures(*times)
    assert found["run_us_p50"] == found["plan_us_p50"] == found["ratio_run"] == 1
    assert found["step_us_p50"] == found["eager_step_us_p50"] == LAYERS + 1
    times[0].clear()
    assert times[0].runs == times[0].plans == times[0].steps == []


def test_the_child_is_python() -> None:
    ast.parse(GRAPHS)
