"""What goes into the file: never a setting in which some bucket of the specification is not verified."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import ragged
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from podgraph import choice, verify
from podgraph.catalog.model import Catalog, Fingerprint, KernelNode, Record, SpecEntry, Template
from podgraph.dispatch.counters import Counters
from podgraph.dispatch.dispatcher import Dispatcher
from podgraph.dispatch.runtime import OpenCatalog
from podgraph.shapes import AttentionSpec, Bucket

SPEC = AttentionSpec(32, 8, 128, 16)
BUCKETS = (Bucket(72, 1024, 64), Bucket(8, 256, 0), Bucket(16, 0, 16))
SETTINGS = ("pod_sm90_w64", "pod_sm90_w128", "pod_sm90_w64d")
TEMPLATES = tuple(
    Template((KernelNode(f"image {v}", "podgraph_pod_sm90", (132, 1, 1), (512, 1, 1), 0, b""),), (), (), ())
    for v in SETTINGS
)


def catalog_of(records: list[Record]) -> Catalog:
    images = {f"image {v}": b"" for v in SETTINGS}
    specs = {"a": SpecEntry(SPEC, ())}
    return Catalog(Fingerprint("cuda", "9.0", 132), specs, 9000, 9000, TEMPLATES, tuple(records), images)


def every_way(buckets: tuple[Bucket, ...] = BUCKETS) -> Catalog:
    return catalog_of([Record("a", b, v, i) for b in buckets for i, v in enumerate(SETTINGS)])


def results_of(candidate: Catalog, us: dict[Any, float], broken: Collection[Any] = ()) -> list[dict[str, Any]]:
    return [
        {
            "problem": "wrong" if (r.bucket, r.variant) in broken else "",
            "replay_us": us.get((r.bucket, r.variant), 10.0),
            "error": 0.001,
        }
        for r in candidate.records
    ]


def test_the_fastest_wins_by_more_than_noise() -> None:
    candidate = every_way()
    first, second, third = BUCKETS
    us = {(first, SETTINGS[1]): 9.85, (second, SETTINGS[2]): 9.0, (third, SETTINGS[1]): 11.0}
    catalog, failures = choice.with_evidence(candidate, results_of(candidate, us))
    assert failures == []
    assert [(r.bucket, r.variant, r.replay_us) for r in catalog.records] == [
        (first, SETTINGS[0], 10.0),
        (second, SETTINGS[2], 9.0),
        (third, SETTINGS[0], 10.0),
    ]
    assert len(catalog.templates) == len(catalog.images) == 2, "a setting that nobody uses is left out"
    for record in catalog.records:
        assert catalog.templates[record.template].nodes[0].image == f"image {record.variant}"


def test_a_setting_that_fails_once_is_used_nowhere() -> None:
    candidate = every_way()
    us = dict.fromkeys([(b, SETTINGS[1]) for b in BUCKETS], 1.0)
    catalog, failures = choice.with_evidence(candidate, results_of(candidate, us, {(BUCKETS[2], SETTINGS[1])}))
    assert failures == [f"a {BUCKETS[2]}: wrong"]
    assert {r.bucket for r in catalog.records} == set(BUCKETS)
    assert SETTINGS[1] not in {r.variant for r in catalog.records}


def test_where_every_setting_failed_somewhere_one_is_held() -> None:
    candidate = every_way()
    broken = {
        (BUCKETS[0], SETTINGS[0]),
        (BUCKETS[0], SETTINGS[1]),
        (BUCKETS[1], SETTINGS[1]),
        (BUCKETS[2], SETTINGS[2]),
    }
    catalog, failures = choice.with_evidence(candidate, results_of(candidate, {}, broken))
    assert {r.variant for r in catalog.records} == {SETTINGS[2]}
    assert {r.bucket for r in catalog.records} == {BUCKETS[0], BUCKETS[1]}
    assert failures[-1] == f"a {BUCKETS[2]}: verified only in settings that failed in other buckets"


def test_variants_over_flashinfer_are_left_alone() -> None:
    """Nobody swaps these: a failed one costs its own bucket only."""
    names = ("pod_flashinfer_p128_d16", "pod_flashinfer_p128_d16", "pod_flashinfer_p0_d16")
    candidate = catalog_of([Record("a", b, v, 0) for b, v in zip(BUCKETS, names, strict=True)])
    catalog, failures = choice.with_evidence(candidate, results_of(candidate, {}, {(BUCKETS[0], names[0])}))
    assert [r.bucket for r in catalog.records] == list(BUCKETS[1:])
    assert failures == [f"a {BUCKETS[0]}: wrong"]
    assert catalog.settings("a") == {}


class Earlier:
    """A journal that knows what an earlier catalog chose."""

    def __init__(self, chosen: set[tuple[Bucket, str]]) -> None:
        self._chosen = chosen

    def chosen(self, record: Record) -> bool:
        return (record.bucket, record.variant) in self._chosen


def test_new_buckets_keep_to_the_settings_of_the_earlier_catalog() -> None:
    earlier: Any = Earlier({(BUCKETS[0], SETTINGS[0]), (BUCKETS[1], SETTINGS[2])})
    candidate = choice.without_losers(every_way(), earlier)
    assert [(r.bucket, r.variant) for r in candidate.records] == [
        (BUCKETS[0], SETTINGS[0]),
        (BUCKETS[1], SETTINGS[2]),
        (BUCKETS[2], SETTINGS[0]),
        (BUCKETS[2], SETTINGS[2]),
    ]
    nothing: Any = Earlier(set())
    assert choice.without_losers(every_way(), nothing) == every_way()


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.data())
def test_whatever_fails_every_pair_that_can_run_was_verified(data: st.DataObject) -> None:
    """Over a first build and one with more buckets: a batch is only ever put where its bucket was verified."""
    pairs = [(b, v) for b in BUCKETS for v in SETTINGS]
    broken = data.draw(st.sets(st.sampled_from(pairs)))
    us = {pair: data.draw(st.sampled_from([5.0, 8.0, 10.0])) for pair in pairs}
    verified: set[Any] = set()

    def build(buckets: tuple[Bucket, ...], earlier: Any) -> Catalog:
        candidate = choice.without_losers(every_way(buckets), earlier)
        verified.update({(r.bucket, r.variant) for r in candidate.records} - broken)
        catalog, failures = choice.with_evidence(candidate, results_of(candidate, us, broken))
        assert {r.bucket for r in catalog.records} == set(buckets) or failures
        for record in catalog.records:
            for variant in catalog.settings("a"):
                assert (record.bucket, variant) in verified
        return catalog

    first = build(BUCKETS[:2], Earlier(set()))
    build(BUCKETS, Earlier({(r.bucket, r.variant) for r in first.records}))


class Recorder:
    """A backend that remembers what it was given."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.captures = False

    def plan(self, parts: list[tuple[Record, Any]], rows: int) -> None:
        self.records = [record for record, _ in parts]

    def run(self, *arguments: Any) -> tuple[str, None]:
        return "captured" if self.captures else "graph", None


@pytest.fixture
def bound() -> tuple[Dispatcher, Recorder]:
    records = [Record("a", b, SETTINGS[i % 3], i % 3, 10.0) for i, b in enumerate(BUCKETS)]
    catalog, backend = catalog_of(records), Recorder()
    used: Any = backend
    return Dispatcher(catalog, "a", used, Counters()), backend


def plan(dispatcher: Dispatcher, qo_lens: list[int], kv_lens: list[int]) -> Record:
    batch = ragged.make_batch(qo_lens, kv_lens, SPEC, max_kv_len=9000)
    (record,) = dispatcher.plan(batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)
    return record


def test_a_batch_is_put_into_the_setting_made_for_it(bound: tuple[Dispatcher, Recorder]) -> None:
    dispatcher, backend = bound
    for qo_lens, kv_lens, setting in (
        ([1] * 16, [8000] * 16, 0),
        ([250], [8000], 1),
        ([20, 1], [60, 60], 2),
    ):
        record = plan(dispatcher, qo_lens, kv_lens)
        assert (record.variant, record.template) == (SETTINGS[setting], setting)
        assert backend.records == [record]


def test_captured_launches_keep_their_setting(bound: tuple[Dispatcher, Recorder]) -> None:
    dispatcher, backend = bound
    captured = plan(dispatcher, [250], [8000])
    backend.captures = True
    q = torch.zeros(250, 32, 128, dtype=torch.bfloat16)
    cache = torch.zeros(600, 2, 16, 8, 128, dtype=torch.bfloat16)
    dispatcher.run(q, cache)
    assert plan(dispatcher, [20], [60]).template == captured.template == 1


def test_verification_runs_each_bucket_in_every_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[tuple[Bucket, str]]] = []

    def verify_bucket(catalog: Any, dispatcher: Any, ways: list[Record], seed: int, measure: bool) -> str:
        seen.append([(way.bucket, way.variant) for way in ways])
        return "done"

    @contextlib.contextmanager
    def bind(self: OpenCatalog, spec: str) -> Iterator[None]:
        yield None

    monkeypatch.setattr(verify, "_verify_bucket", verify_bucket)
    monkeypatch.setattr(OpenCatalog, "bind", bind)
    final, _ = choice.with_evidence(every_way(), results_of(every_way(), {(BUCKETS[1], SETTINGS[2]): 1.0}))
    assert list(verify.verify(OpenCatalog(Path("x"), final))) == ["done"] * 3
    assert sorted(pair for ways in seen for pair in ways) == sorted(
        (b, v) for b in BUCKETS for v in (SETTINGS[0], SETTINGS[2])
    )
    assert [ways[0] for ways in seen] == [(r.bucket, r.variant) for r in final.records]
    seen.clear()
    list(verify.verify(OpenCatalog(Path("x"), every_way())))
    assert [len(ways) for ways in seen] == [1] * 9, "in a candidate each way has a record of its own"


def test_a_record_in_another_setting_claims_no_measurement() -> None:
    record = Record("a", BUCKETS[0], SETTINGS[0], 0, 12.0, 0.002)
    other = record.in_setting(SETTINGS[1], 1)
    assert dataclasses.astuple(other)[2:] == (SETTINGS[1], 1, 0.0, 0.0)
    assert record.replay_us == 12.0


def test_verification_passes_over_a_specification_without_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an increment, where all buckets of one specification are known and those of another are new."""
    bound: list[str] = []

    @contextlib.contextmanager
    def bind(self: OpenCatalog, spec: str) -> Iterator[None]:
        bound.append(spec)
        yield None

    monkeypatch.setattr(verify, "_verify_bucket", lambda *arguments: "done")
    monkeypatch.setattr(OpenCatalog, "bind", bind)
    catalog = every_way(BUCKETS[:1])
    catalog = dataclasses.replace(catalog, specs={"b": SpecEntry(SPEC, ()), **catalog.specs})
    assert len(list(verify.verify(OpenCatalog(Path("x"), catalog)))) == 3
    assert bound == ["a"]
