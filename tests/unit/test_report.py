"""The report's content: its figures are those of coverage, and what it says of a change or a memory is so."""

from __future__ import annotations

import csv
import io
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from podgraph.catalog import store
from podgraph.errors import ConfigError
from podgraph.report.bucket_rows import csv_text
from podgraph.report.cells import BINS, bins_of, cells_of
from podgraph.report.changes import additions, removals
from podgraph.report.content import make_report
from podgraph.report.formats import bound, microseconds, percent, size
from podgraph.report.source import Workload, engine_limits, read_source, source_of_catalog
from podgraph.shapes import Bucket
from podgraph.workload.cost_files import costs_of
from podgraph.workload.costs import EAGERS, Scope
from podgraph.workload.coverage import HIT, assign, coverage
from podgraph.workload.memory import memory_of
from podgraph.workload.profile import load_profile
from tests.reports_made import CATALOG, CONFIG, made, steps_of_an_engine
from tests.steps_made import PlainCosts, histogram

SCOPES: tuple[Scope, ...] = ("step", "attention")


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("eager", EAGERS)
def test_figures_are_those_of_coverage(scope: Scope, eager) -> None:
    report = made(scope, eager=eager)
    build, profile = report.source.build, load_profile("h200")
    costs = costs_of(build, profile, scope)
    assert report.now == {name: coverage(report.workload.steps, build.buckets, costs, name) for name in EAGERS}
    this = report.points[0]
    assert (this.name, this.buckets, this.expected_us) == ("this", 12, report.now[eager].expected_us)
    assert (this.other_us, this.other_waste) == (
        report.now[report.other].expected_us,
        report.now[report.other].waste,
    )
    best = [p for p in report.points if p.name == "best"]
    assert [p.buckets for p in best] == sorted({p.buckets for p in best})
    assert all(a.expected_us >= b.expected_us for a, b in itertools.pairwise(best))
    assert all(p.gap is not None and 0 <= p.gap < 0.02 for p in best)
    assert [p.name for p in report.points if p.gap is None][1:] == [
        "vllm",
        "sglang",
        "tensorrt_llm",
        "megatron",
        "pow2",
    ]


@pytest.mark.parametrize("scope", SCOPES)
def test_memory_is_each_sets_own(scope: Scope) -> None:
    report = made(scope)
    build = report.source.build
    assert report.memory == memory_of(tuple(build.specs.values()), build.buckets, load_profile("h200"), scope, 32)
    assert report.points[0].dedicated_bytes == report.memory.total(12)
    assert report.points[0].shared_bytes == report.memory.total(12, shared=True)
    assert all(p.modelled for p in report.points)
    # TensorRT-LLM's largest graph has 128 rows: its regions are smaller than those of 1,024
    (small,) = (p for p in report.points if p.name == "tensorrt_llm")
    assert small.dedicated_bytes < report.memory.total(small.buckets)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_change_is_worth_what_it_says(scope: Scope) -> None:
    report = made(scope)
    steps, costs = report.workload.steps, costs_of(report.source.build, load_profile("h200"), scope)
    assert report.add
    assert len(report.drop) > 1
    idle = set(report.unused)
    left = [b for b in report.source.build.buckets if b not in idle]
    now = coverage(steps, left, costs, "penalty")
    assert now.expected_us == pytest.approx(report.now["penalty"].expected_us), "unused buckets are worth nothing"
    for have, changes in ((list(report.source.build.buckets), report.add), (left, report.drop)):
        before = report.now["penalty"].expected_us
        for change in changes:
            have = [*have, change.bucket] if changes is report.add else [b for b in have if b != change.bucket]
            after = coverage(steps, have, costs, "penalty")
            assert change.gain_us == pytest.approx(before - after.expected_us)
            assert (change.expected_us, change.waste) == pytest.approx((after.expected_us, after.waste))
            assert (change.covered, change.buckets) == (after.hits / after.steps, len(have))
            before = after.expected_us
    assert all(change.gain_us > 0 for change in report.add)
    assert all(change.gain_us <= 0 for change in report.drop)


def test_the_first_change_is_the_best_one() -> None:
    steps = histogram((0, 0, 4, 90), (100, 1, 4, 30), (40, 1, 0, 10))
    prices = {Bucket(8, 100, 4): 50.0, Bucket(4, 0, 4): 5.0, Bucket(8, 40, 4): 20.0, Bucket(2, 40, 0): 10.0}
    costs = PlainCosts(prices)
    have = [Bucket(8, 100, 4)]
    # before, those 90 are served eagerly: 5 us in the exact bucket, and 40 of the host
    (first, second) = additions(steps, costs, "penalty", have, prices)
    assert (first.bucket, first.gain_us) == (Bucket(4, 0, 4), pytest.approx(90 * 40 / 130))
    assert (second.bucket, second.gain_us) == (Bucket(2, 40, 0), pytest.approx(10 * 40 / 130))
    (dropped,) = removals(steps, costs, "penalty", [Bucket(8, 100, 4), Bucket(4, 0, 4)])
    assert (dropped.bucket, dropped.gain_us) == (Bucket(8, 100, 4), pytest.approx(-30 * 40 / 130))
    assert removals(steps, costs, "penalty", have) == ()


@pytest.mark.parametrize("scope", SCOPES)
def test_cells_add_up(scope: Scope) -> None:
    report = made(scope)
    steps = report.workload.steps
    found = assign(
        steps, report.source.build.buckets, costs_of(report.source.build, load_profile("h200"), scope), "penalty"
    )
    assert report.cells == cells_of(steps, found)
    assert sum(c.steps for c in report.cells) == steps.total
    assert sum(c.share for c in report.cells) == pytest.approx(1)
    assert sum(c.waste for c in report.cells) == pytest.approx(1)
    assert sum(c.hits * c.steps for c in report.cells) == pytest.approx(report.now["penalty"].hits)
    for cell in report.cells:
        inside = (steps.prefill_len >= cell.prefill_from) & (steps.prefill_len <= cell.prefill_to)
        inside &= (steps.decode_count >= cell.decode_from) & (steps.decode_count <= cell.decode_to)
        assert cell.steps == steps.steps[inside].sum()
        assert cell.hits == pytest.approx(steps.steps[inside & (found.kind == HIT)].sum() / cell.steps)


@pytest.mark.parametrize(
    ("values", "bins"),
    [
        ([0], [(0, 0)]),
        ([0, 1], [(0, 0), (1, 1)]),
        ([5], [(0, 0), (1, 1), (2, 2), (3, 4), (5, 8)]),
    ],
)
def test_bins_double(values: list[int], bins: list[tuple[int, int]]) -> None:
    assert bins_of(np.array(values)) == bins


def test_bins_are_never_too_many() -> None:
    bins = bins_of(np.array([0, 100_000]))
    assert len(bins) == BINS
    assert (bins[0], bins[-1]) == ((0, 0), (65_537, 131_072))
    assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(bins))


def test_a_catalog_is_reported_with_what_was_measured() -> None:
    catalog = store.read(CATALOG)
    report = made("attention", path=CATALOG)
    assert report.replay_us == {r.bucket: r.replay_us for r in catalog.records}
    assert report.memory.image_bytes == sum(map(len, catalog.images.values()))
    assert report.memory.region_bytes == sum(r.size for entry in catalog.specs.values() for r in entry.regions)
    assert [p.modelled for p in report.points] == [False] + [True] * (len(report.points) - 1)
    document = report.to_dict()
    assert document["file"] == {"bytes": CATALOG.stat().st_size, "build_seconds": None}
    assert document["kinds"] == {
        "steps": "logged",
        "times": "modelled",
        "memory_graphs": "measured",
        "replay_us": "measured",
        "file": "measured",
    }


def test_it_is_plain_data() -> None:
    document = json.loads(json.dumps(made().to_dict()))
    assert document["scope"] == "step"
    assert set(document["coverage"]) == {"penalty", "hidden"}
    assert len(document["coverage"]["penalty"]["uses"]) == 12
    assert document["file"] == {"bytes": None, "build_seconds": None}
    assert made(again=True).to_dict() == made().to_dict()


def test_rows_of_buckets() -> None:
    for path, scope in ((CATALOG, "attention"), (CONFIG, "step")):
        report = made(scope, path=path)
        rows = list(csv.DictReader(io.StringIO(csv_text(report))))
        assert [(int(r["batch"]), int(r["prefill_len"]), int(r["decode_count"])) for r in rows] == [
            (b.batch, b.prefill_len, b.decode_count) for b in report.source.build.buckets
        ]
        assert sum(int(r["steps"]) for r in rows) == report.now["penalty"].hits
        assert all(float(r["bucket_us_modelled"]) > 0 for r in rows)
        assert all((r["replay_us_measured"] != "") == (path == CATALOG) for r in rows)


def test_a_table_of_costs_prices_what_it_lists(tmp_path: Path) -> None:
    table = tmp_path / "costs.csv"
    table.write_text("batch,prefill_len,decode_count,us\n64,0,64,10\n72,1024,64,60\n")
    source, profile = read_source(CONFIG), load_profile("h200")
    costs = costs_of(source.build, profile, "step", table)
    workload = Workload(steps_of_an_engine(), "steps.csv", "logged", 1600, 72)
    report = make_report(source, workload, costs, profile, "penalty")
    assert report.timed == "table"
    rows = csv.DictReader(io.StringIO(csv_text(report)))
    assert sorted(row["bucket_us_table"] for row in rows) == [""] * 10 + ["10.0", "60.0"]
    # JSON has no infinity
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    uses = document["coverage"]["penalty"]["uses"]
    assert sorted(use["us"] for use in uses if use["us"] is not None) == [10.0, 60.0]


def test_small_sets_and_workloads() -> None:
    one = made(steps=histogram((0, 0, 5, 3)), eager="hidden", buckets=1)
    assert one.drop == ()
    assert sum(c.steps for c in one.cells) == 3
    with pytest.raises(ConfigError, match=r"steps\.csv: no step to report on"):
        made(steps=histogram())


def test_limits_of_the_engine() -> None:
    build = read_source(CONFIG).build
    assert engine_limits(build) == (1024, 72)
    assert engine_limits(build, 512) == (512, 72)
    assert engine_limits(build, 8) == (8, 8)
    assert engine_limits(build, None, 2000) == (2000, 2000)
    assert engine_limits(build, 300, 5) == (300, 5)
    source = source_of_catalog(CATALOG, store.read(CATALOG))
    assert source.build.buckets == build.buckets


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0.00 %"),
        (1e-7, "< 0.01 %"),
        (0.1234, "12.34 %"),
        (0.99999, "> 99.99 %"),
        (1.0, "100.00 %"),
        (7.5, "750.00 %"),
    ],
)
def test_a_share_never_looks_like_none_or_all(share: float, text: str) -> None:
    assert percent(share) == text


def test_numbers_are_readable() -> None:
    assert [bound(gap) for gap in (0.0, 1e-14, 0.00012, 0.00120001)] == ["0.0001 %", "0.0001 %", "0.0120 %", "0.1201 %"]
    assert [size(n) for n in (100, 5 << 20, 3 << 30)] == ["0.1 KiB", "5.0 MiB", "3.00 GiB"]
    assert [microseconds(us) for us in (0, 1e-9, 0.00123, 0.123, 123.45, 12345.6, -3)] == [
        "0.00",
        "< 0.0001",
        "0.0012",
        "0.12",
        "123.5",
        "12,346",
        "-3.00",
    ]
