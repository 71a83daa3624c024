"""What benchmarks/bench_choices.py takes out: each edit still finds its place, and all lists hold the same work."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

from benchmarks import bench_choices
from benchmarks.bench_choices import (
    BEGIN,
    CHOICES,
    CONTROL,
    END,
    KERNEL_CHOICES,
    LIST_CHOICES,
    PAGE,
    Choice,
    edited,
    lists_without,
    planned,
    promoted,
    summarise,
    table,
    with_room,
    with_table,
)
from benchmarks.bench_plan import nine_spec
from benchmarks.kernel_shapes import MAIN, NINE
from benchmarks.shapes import Shape
from podgraph import driver
from podgraph.batch import Batch
from podgraph.catalog.model import Record
from podgraph.errors import PodgraphError
from podgraph.planner import Layout, Policy, plan, preferred_setting
from podgraph.planner.policy import SM90, SM90_SETTINGS
from podgraph.planner.sm90 import Sm90WorkList
from podgraph.providers import nvcc, planner, pod_sm90

POLICY = Policy.for_sms(132, "sm90")  # an H200's
ADDRESS = 1 << 40
NAMES = [shape.name for shape in NINE]


def digests() -> dict[str, str]:
    return {setting: pod_sm90.source(MAIN, setting).digest(pod_sm90.ARCH) for setting in SM90_SETTINGS}


def case_of(shape: Shape) -> tuple[Batch, Record]:
    batch = Batch.of(*shape.arrays(MAIN), page_size=MAIN.page_size, max_kv_len=max(shape.kv_lens))
    return batch, Record("", shape.bucket, SM90 + preferred_setting(batch, MAIN), 0)


def test_choices_can_be_told_apart_and_quoted() -> None:
    names = [choice.name for choice in CHOICES]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)
    taken_out = [bool(c.edits) + bool(c.lists) + bool(c.setting) + (c.promote is not None) for c in CHOICES]
    assert taken_out == [int(c is not CONTROL) for c in CHOICES], "each is one thing, and all the rest stays"


@pytest.mark.parametrize("choice", KERNEL_CHOICES, ids=lambda c: c.name)
def test_edits_find_their_places(choice: Choice) -> None:
    before, plan_source = digests(), planner.plan_source("sm90").digest(pod_sm90.ARCH)
    with edited(choice):
        after = digests()
        assert planner.plan_source("sm90").digest(pod_sm90.ARCH) == plan_source
        for file, _, new in choice.edits:
            assert new in (nvcc.kernel_folder() / file).read_text()
    assert digests() == before, "the sources themselves are as they were"
    assert all(after[setting] != before[setting] for setting in SM90_SETTINGS)


@pytest.mark.parametrize(("old", "times"), [("no such text", 0), ("namespace podgraph::sm90", 2)])
def test_an_edit_that_does_not_fit_is_an_error(old: str, times: int) -> None:
    choice = Choice("odd", "", "", edits=(("sm90.h", old, ""),))
    with pytest.raises(PodgraphError, match=rf"odd: sm90.h: .* stands there {times} times, allowed: exactly once"):
        edited(choice).__enter__()


@pytest.mark.parametrize("shape", NINE, ids=NAMES)
@pytest.mark.parametrize("choice", LIST_CHOICES, ids=lambda c: c.name)
def test_lists_hold_the_same_work(choice: Choice, shape: Shape) -> None:
    batch, record = case_of(shape)
    usual = plan(batch, record.bucket, MAIN, POLICY, record.variant)
    with with_room(choice), planned(choice):
        work = plan(batch, record.bucket, MAIN, POLICY, record.variant)
        layout = Layout.of(MAIN, nine_spec().buckets, POLICY)
        step = np.zeros(layout.step_bytes // 4, np.int32)
        work.pack(layout, step)
    assert isinstance(work, Sm90WorkList)
    assert isinstance(usual, Sm90WorkList)
    views = layout.views(step)
    tiles, units = views["tiles"][: work.tiles.size].reshape(-1, 12), views["units"][: work.units.size].reshape(-1, 8)
    assert tokens_of(tiles, units) == tokens_of(usual.tiles, usual.units)


def tokens_of(tiles: np.ndarray[Any, Any], units: np.ndarray[Any, Any]) -> dict[int, int]:
    """KV tokens that each query row is multiplied with, over all tiles, units and parts."""
    tokens: dict[int, int] = {}
    for first, rows, position, _, begin, end in tiles[:, 2:8].tolist():
        for i in range(rows):
            tokens[first + i] = tokens.get(first + i, 0) + max(0, min(end, position + i + 1) - begin)
    for begin, end, row in units[:, 2:5].tolist():
        tokens[row] = tokens.get(row, 0) + end - begin
    return tokens


@pytest.mark.parametrize("choice", LIST_CHOICES, ids=lambda c: c.name)
def test_lists_differ_somewhere_and_only_by_the_choice(choice: Choice) -> None:
    with with_room(choice):
        layout = Layout.of(MAIN, nine_spec().buckets, POLICY)
    found = {}
    for shape in NINE:
        batch, record = case_of(shape)
        found[shape.name] = lists_without(choice, batch, record, POLICY, layout, ADDRESS) is not None
        assert lists_without(CONTROL, batch, record, POLICY, layout, ADDRESS) is None
    assert any(found.values())


def test_descriptors_are_promoted_alike() -> None:
    for choice in CHOICES:
        with mock.patch.object(driver, "tensor_map", return_value=b"") as make:
            with promoted(choice):
                driver.tensor_map(0, "bfloat16", (), (), (), True)
                driver.tensor_map(0, "bfloat16", (), (), (), False)
            flags = [call.args[-1] for call in make.call_args_list]
        assert flags == ([True, False] if choice.promote is None else [choice.promote] * 2)


def test_a_setting_that_serves_the_shape_anyway_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, record = case_of(NINE[0])
    dispatcher = mock.Mock(_records=[Record("", record.bucket, SM90 + name, 0) for name in SM90_SETTINGS])
    timed = {
        choice.setting: bench_choices._plan(dispatcher, choice, batch, record, ADDRESS)
        for choice in CHOICES
        if choice.setting
    }
    assert timed == {name: SM90 + name != record.variant for name in SM90_SETTINGS}
    assert [call.args[0].variant for call in dispatcher.plan_into.call_args_list] == [
        SM90 + name for name, differs in timed.items() if differs
    ]


def test_summary_and_table() -> None:
    choices = [Choice(name, f"what {name}", f"not {name}") for name in ("some", "all", "none", "bad")]
    rows = {
        "a": {"ratio": {"some": 1.21, "all": 1.1, "bad": 1.5}, "wrong": []},
        "b": {"ratio": {"all": 0.9}, "wrong": ["bad"]},
    }
    figures = summarise(choices, rows)
    assert figures["some"]["geomean"] == pytest.approx(1.1)
    assert figures["some"]["ratio"] == {"a": 1.21, "b": None}
    assert (figures["none"]["geomean"], figures["bad"]["geomean"]) == (1.0, None)
    assert table(figures).splitlines()[2:] == [
        "| what some | not some | 1.100 | 1.00 | 1.21 | `a` |",
        "| what all | not all | 0.995 | 0.90 | 1.10 | `a` |",
        "| what none | not none | no difference |  |  |  |",
        "| what bad | not bad | wrong |  |  |  |",
    ]


def test_the_page_has_the_table_of_the_result() -> None:
    text = PAGE.read_text()
    assert text == with_table(text), "run python -m benchmarks.bench_choices --document"
    with pytest.raises(PodgraphError, match="must each stand there once"):
        with_table(text.replace(END, ""))
    changed = text.replace(BEGIN, BEGIN + "\nanything")
    assert with_table(changed) == text
