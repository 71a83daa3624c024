"""The report: its figures agree with coverage, its page is one file that shows them, and names in it do no harm."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
import subprocess
import xml.dom.minidom
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from podgraph.catalog import store
from podgraph.config import load_config
from podgraph.report import figures
from podgraph.report.content import Report, Source, engine_limits, make_report, source_of_catalog
from podgraph.report.page import render
from podgraph.workload.cost_files import costs_of
from podgraph.workload.costs import Costs, Scope
from podgraph.workload.coverage import coverage
from podgraph.workload.profile import load_profile
from podgraph.workload.steps import StepHistogram

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "llama3-8b-h200.podcat"
VOID = {"meta", "br", "path", "use", "rect", "image", "line", "circle"}


def histogram(source: str = "steps.csv") -> StepHistogram:
    rng = np.random.default_rng(1)
    shapes = {(0, 0, int(n)) for n in rng.integers(1, 64, 40)}
    shapes |= {(int(p), int(r), int(d)) for p, r, d in rng.integers((2, 1, 0), (1500, 3, 60), (60, 3)) if p > r}
    rows = np.array(sorted(shapes), np.int64)
    steps = rng.integers(1, 100, len(rows))
    sums = dict.fromkeys(("decode_kv_tokens", "prefill_kv_tokens", "prefill_pairs"), steps * 1000)
    return StepHistogram(rows[:, 0], rows[:, 1], rows[:, 2], steps, **sums, source=source)


def made(scope: Scope = "step", source: str = "steps.csv", name: str = "llama3-8b.yaml") -> tuple[Report, Costs]:
    build = load_config(ROOT / "configs" / "llama3-8b.yaml")
    profile = load_profile("h200")
    costs = costs_of(build, profile, scope)
    return make_report(Source(name, build), histogram(source), costs, profile, "penalty"), costs


@pytest.mark.parametrize("scope", ["step", "attention"])
def test_figures_are_those_of_coverage(scope: Scope) -> None:
    report, costs = made(scope)
    for eager in ("penalty", "hidden"):
        again = coverage(report.steps, report.source.build.buckets, costs, eager)
        assert report.now[eager] == again
    this = report.points[0]
    assert (this.name, this.buckets, this.expected_us) == ("this", 12, report.now["penalty"].expected_us)
    best = [p for p in report.points if p.name == "best"]
    assert [p.buckets for p in best] == sorted({p.buckets for p in best})
    # not exactly: sets are chosen for these steps and a few not yet seen
    assert all(b.expected_us <= 1.001 * a.expected_us for a, b in itertools.pairwise(best))
    assert all(p.gap is not None and 0 <= p.gap < 0.02 for p in best)
    assert {"vllm", "sglang", "tensorrt_llm", "megatron", "pow2"} <= {p.name for p in report.points}


def test_a_change_is_worth_what_it_says() -> None:
    report, costs = made()
    buckets = list(report.source.build.buckets)
    before = report.now["penalty"].expected_us
    assert report.add
    for change in report.add:
        buckets.append(change.bucket)
        after = coverage(report.steps, buckets, costs, "penalty").expected_us
        assert before - after == pytest.approx(change.gain_us)
        assert change.gain_us > 0
        before = after
    for change in report.drop:
        left = [b for b in report.source.build.buckets if b != change.bucket]
        after = coverage(report.steps, left, costs, "penalty").expected_us
        assert report.now["penalty"].expected_us - after == pytest.approx(change.gain_us)
    gains = [c.gain_us for c in report.drop]
    assert gains == sorted(gains, reverse=True)


def test_a_catalog_is_reported_with_what_was_measured() -> None:
    catalog = store.read(GOLDEN)
    source = source_of_catalog(GOLDEN, catalog)
    profile = load_profile("h200")
    costs = costs_of(source.build, profile, "attention")
    report = make_report(source, histogram(), costs, profile, "penalty")
    assert report.measured == {r.bucket: r.replay_us for r in catalog.records}
    assert not report.memory.modelled
    assert report.memory.image_bytes == sum(map(len, catalog.images.values()))
    assert report.source.file_bytes == GOLDEN.stat().st_size
    page = render(report, costs)
    assert f"{GOLDEN.stat().st_size:,}" in page
    assert engine_limits(source.build) == (1024, 72)


def test_it_is_plain_data() -> None:
    report, _ = made()
    document = json.loads(json.dumps(report.to_dict()))
    assert document["scope"] == "step"
    assert set(document["coverage"]) == {"penalty", "hidden"}
    assert len(document["coverage"]["penalty"]["uses"]) == 12


class Page(HTMLParser):
    """Collects tags and attributes, and checks that elements close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def test_the_page_is_one_file_for_a_phone_and_a_screen_reader() -> None:
    report, costs = made()
    page = render(report, costs)
    parsed = Page()
    parsed.feed(page)
    assert parsed.open == []
    assert "<script" not in page
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", page)
    assert "@import" not in page
    assert 'name="viewport"' in page
    labels = [value for name, value in parsed.attributes if name == "aria-label"]
    assert len(labels) == page.count("<figure") == 2
    assert all(label and len(label) > 60 for label in labels)
    assert "modelled" in page
    assert render(report, costs) == page, "equal input must give equal bytes"


def test_names_from_files_are_escaped() -> None:
    report, costs = made(source="<script>alert(1)</script>.csv", name='"><img src=x onerror=alert(1)>.yaml')
    page = render(report, costs)
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page


def test_figures_are_valid_and_have_no_date() -> None:
    report, costs = made()
    for svg in (figures.pareto(report), figures.heat_maps(report, costs)):
        xml.dom.minidom.parseString(svg)
        assert b"dc:date" not in svg
    assert figures.pareto(report, "png").startswith(b"\x89PNG")


def test_one_bucket_and_one_step() -> None:
    report, costs = made()
    build = dataclasses.replace(report.source.build, buckets=report.source.build.buckets[:1])
    one = {name: np.array([5], np.int64) for name in ("decode_kv_tokens", "prefill_kv_tokens", "prefill_pairs")}
    value = np.array([1], np.int64)
    steps = StepHistogram(np.array([0]), np.array([0]), value, value, **one, source="one")
    small = make_report(Source("one.yaml", build), steps, costs, load_profile("h200"), "hidden")
    assert small.drop == ()
    assert "one.yaml" in render(small, costs)


CHROMIUM = shutil.which("chromium")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("width", [412, 1200], ids=["phone", "desktop"])
def test_a_browser_draws_it(tmp_path: Path, width: int) -> None:
    report, costs = made()
    page, picture = tmp_path / "report.html", tmp_path / "report.png"
    page.write_text(render(report, costs))
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}", f"--window-size={width},2400"]
    subprocess.run([*command, page.as_uri()], check=True, capture_output=True, timeout=120)
    from matplotlib.image import imread

    pixels = imread(picture)
    assert pixels.shape[0] == 2400
    dark = (pixels[..., :3].mean(axis=2) < 0.5).mean()
    assert 0.005 < dark < 0.5, "text and figures, not an empty page"
