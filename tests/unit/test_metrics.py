"""Counters as plain data and as Prometheus metrics: of a dispatcher that serves, and of numbers made up."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from podgraph.catalog.model import Catalog, Fingerprint, Record, Region, SpecEntry
from podgraph.dispatch import metrics
from podgraph.dispatch.counters import MISS_REASONS, MODES, NO_BUCKET, SPLIT_REASONS, TOO_MANY_PAGES, Counters
from podgraph.dispatch.dispatcher import Dispatcher
from podgraph.dispatch.metrics import DispatcherCollector
from podgraph.dispatch.runtime import OpenCatalog
from podgraph.errors import BucketMiss, ConfigError
from podgraph.planner import Layout, Policy
from podgraph.shapes import AttentionSpec, Bucket

SPEC = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=16)
MIXED, DECODES = Bucket(4, 16, 2), Bucket(4, 0, 4)

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def bind(on_miss: str = "split") -> Dispatcher:
    layout = Layout.of(SPEC, (MIXED, DECODES), Policy.for_sms(0))
    sizes = dict.fromkeys(("q", "k", "v", "out", "lse", "kv_indices"), 0) | layout.sizes
    entry = SpecEntry(SPEC, tuple(Region(*item) for item in sorted(sizes.items())), layout.capacity)
    records = tuple(Record("tiny", bucket, "interpreter", -1) for bucket in (MIXED, DECODES))
    catalog = Catalog(Fingerprint("cpu"), {"tiny": entry}, 64, 800, (), records, {}, {"podgraph": "test"})
    return OpenCatalog(Path("memory.podcat"), catalog).bind(on_miss=on_miss)  # type: ignore[arg-type]


def serve(dispatcher: Dispatcher, rows: list[int], runs: int = 1, pages: int = 1) -> None:
    """Plans requests of so many rows, each on full pages, and runs them once for each layer."""
    n, total = len(rows), sum(rows)
    indices = np.arange(n * pages) % 8
    dispatcher.plan(np.cumsum([0, *rows]), np.arange(n + 1) * pages, indices, [SPEC.page_size] * n)
    cache = torch.zeros(8, 2, SPEC.page_size, SPEC.num_kv_heads, SPEC.head_dim).bfloat16()
    for _ in range(runs):
        dispatcher.run(torch.zeros(total, SPEC.num_qo_heads, SPEC.head_dim).bfloat16(), cache)


def samples_of(text: str) -> Samples:
    """Every sample of a scrape by its name and labels, each family and sample there only once."""
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    found = [((s.name, tuple(sorted(s.labels.items()))), s.value) for family in families for s in family.samples]
    assert len(dict(found)) == len(found)
    return dict(found)


def scrape(collector: DispatcherCollector) -> Samples:
    registry = CollectorRegistry()
    registry.register(collector)
    return samples_of(generate_latest(registry).decode())


def test_to_dict_has_every_field_and_shares_nothing() -> None:
    counters = Counters(plans=3, replays=Counter(a=2), misses=Counter(b=1), exec_evictions=4)
    written = counters.to_dict()
    assert list(written) == [field.name for field in dataclasses.fields(Counters)]
    assert written == {name: getattr(counters, name) for name in written}
    assert {type(value) for value in written.values()} == {int, dict}
    counters.replays["a"] += 1
    assert written["replays"] == {"a": 2}


def test_every_counter_is_a_metric_with_its_kind() -> None:
    assert list(metrics.FIGURES) == [field.name for field in dataclasses.fields(Counters)]
    for name, value in dataclasses.asdict(Counters()).items():
        assert (metrics.FIGURES[name].label is None) == isinstance(value, int), name


def test_a_scrape_reads_what_was_served() -> None:
    with bind() as dispatcher:
        collector = DispatcherCollector(dispatcher)
        serve(dispatcher, [5, 1, 1], runs=3)  # 11 of 16 rows and 1 of 4 slots empty
        serve(dispatcher, [1], runs=2)  # 3 of 4 slots empty
        serve(dispatcher, [20], pages=2)  # 16 rows and 4: 12 rows and 3 slots empty twice
        got = scrape(collector)
        assert got["podgraph_plans_total", ()] == 3
        assert got["podgraph_runs_total", ()] == 6
        assert got["podgraph_replays_total", (("bucket", str(MIXED)),)] == 3 + 2
        assert got["podgraph_replays_total", (("bucket", str(DECODES)),)] == 2
        modes = {mode: got["podgraph_replays_by_mode_total", (("mode", mode),)] for mode in MODES}
        assert modes == {"graph": 0, "eager": 0, "captured": 0, "interpreter": 7}
        assert got["podgraph_splits_total", (("reason", NO_BUCKET),)] == 1
        assert got["podgraph_splits_total", (("reason", TOO_MANY_PAGES),)] == 0
        assert got["podgraph_padded_rows_total", ()] == 11 + 0 + 12
        assert got["podgraph_padded_slots_total", ()] == 1 + 3 + 3 + 3
        assert got["podgraph_memory_bytes", (("kind", "regions"),)] == 0
        serve(dispatcher, [1])
        assert scrape(collector)["podgraph_plans_total", ()] == 4  # read anew


def test_every_number_arrives() -> None:
    counters = Counters()
    for number, field in enumerate(dataclasses.fields(Counters), 1):
        value = getattr(counters, field.name)
        setattr(counters, field.name, number if isinstance(value, int) else Counter({f'"{field.name}\\\n': number}))
    got = samples_of(metrics.text(counters, {"regions": 1 << 40, "pinned": 4096}))
    for number, (name, figure) in enumerate(metrics.FIGURES.items(), 1):
        labels = () if figure.label is None else ((figure.label, f'"{name}\\\n'),)
        assert got.pop((f"podgraph_{name}_total", labels)) == number
    assert got.pop(("podgraph_memory_bytes", (("kind", "regions"),))) == 1 << 40
    assert got.pop(("podgraph_memory_bytes", (("kind", "pinned"),))) == 4096
    assert set(got.values()) == {0}  # what is known of without having happened
    assert len(got) == len(MODES) + len(SPLIT_REASONS) + len(MISS_REASONS)


def test_the_text_follows_the_format() -> None:
    lines = metrics.text(Counters(plans=2), {"regions": 5}).splitlines()
    assert lines[:3] == [
        "# HELP podgraph_plans_total Calls of plan().",
        "# TYPE podgraph_plans_total counter",
        "podgraph_plans_total 2.0",
    ]
    assert lines[-2:] == ["# TYPE podgraph_memory_bytes gauge", 'podgraph_memory_bytes{kind="regions"} 5.0']


def test_batches_that_are_cut_or_refused_are_counted_with_known_reasons() -> None:
    with bind() as dispatcher:
        serve(dispatcher, [20], runs=0, pages=2)
        serve(dispatcher, [1, 1, 1], runs=0, pages=30)
        assert dispatcher.counters.splits == {NO_BUCKET: 1, TOO_MANY_PAGES: 1}
    with bind(on_miss="error") as dispatcher:
        with pytest.raises(BucketMiss):
            serve(dispatcher, [20], runs=0, pages=2)
        assert dispatcher.counters.misses == {NO_BUCKET: 1}
        assert scrape(DispatcherCollector(dispatcher))["podgraph_misses_total", (("reason", NO_BUCKET),)] == 1


def test_several_dispatchers_share_the_metrics() -> None:
    with bind() as full, bind() as windowed:
        collector = DispatcherCollector(full, {"spec": "full", "rank": "0"})
        collector.add(windowed, {"rank": "0", "spec": "windowed"})
        serve(full, [1], runs=2)
        serve(windowed, [1], runs=5)
        got = scrape(collector)
        assert got["podgraph_runs_total", (("rank", "0"), ("spec", "full"))] == 2
        assert got["podgraph_runs_total", (("rank", "0"), ("spec", "windowed"))] == 5
        bucket = (("bucket", str(DECODES)), ("rank", "0"), ("spec", "windowed"))
        assert got["podgraph_replays_total", bucket] == 5
        collector.remove(full)
        collector.remove(full)
        assert {dict(labels)["spec"] for _, labels in scrape(collector)} == {"windowed"}


def test_a_registry_refuses_the_same_metrics_twice() -> None:
    registry = CollectorRegistry()
    with bind() as dispatcher:
        first = DispatcherCollector(dispatcher)
        registry.register(first)
        with pytest.raises(ValueError, match="Duplicated timeseries"):
            registry.register(DispatcherCollector(dispatcher, {"spec": "other"}))
        registry.unregister(first)
        registry.register(DispatcherCollector(dispatcher, {"spec": "other"}))


@pytest.mark.parametrize("name", ["bucket", "kind", "mode", "reason", "", "a-b", "1st", "__name__", "spec\n", "ä"])
def test_a_label_that_cannot_be_is_refused(name: str) -> None:
    with bind() as dispatcher, pytest.raises(ConfigError, match=r"^labels: got .*, allowed: letters, digits and _"):
        DispatcherCollector(dispatcher, {name: "x"})


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({}, r"labels: got \[\], allowed: exactly \['spec'\]"),
        ({"spec": "b", "rank": "0"}, r"labels: got \['rank', 'spec'\], allowed: exactly \['spec'\]"),
        ({"spec": "a"}, "which another dispatcher of this collector has"),
    ],
    ids=["missing", "one more", "the same"],
)
def test_labels_that_do_not_tell_dispatchers_apart_are_refused(labels: dict[str, str], message: str) -> None:
    with bind() as dispatcher:
        collector = DispatcherCollector(dispatcher, {"spec": "a"})
        with pytest.raises(ConfigError, match=message):
            collector.add(dispatcher, labels)
        assert len({labels for name, labels in scrape(collector) if name == "podgraph_plans_total"}) == 1


def test_a_scrape_may_come_while_another_thread_counts() -> None:
    counters, done = Counters(), threading.Event()

    def count() -> None:
        for i in range(50_000):
            counters.replays[str(i)] += 1
            counters.plans += 1
        done.set()

    thread = threading.Thread(target=count)
    thread.start()
    seen = [counters.to_dict()]
    while not done.is_set():
        seen.append(counters.to_dict())
    thread.join()
    totals = [sum(snapshot["replays"].values()) for snapshot in [*seen, counters.to_dict()]]
    assert totals == sorted(totals)
    assert totals[-1] == 50_000


def test_serving_does_not_load_prometheus() -> None:
    code = "import podgraph, sys\nassert podgraph.open, podgraph.TwoSided\nprint('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
