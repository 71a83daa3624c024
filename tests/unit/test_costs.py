"""Costs of buckets: device profiles, the two scopes, tables of one's own, memory."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.device_profile import profile as profile_text
from podgraph.catalog import store
from podgraph.config import load_config, parse_config
from podgraph.errors import ConfigError
from podgraph.shapes import Bucket
from podgraph.workload.cost_files import costs_of, read_costs
from podgraph.workload.cost_tables import RowCosts, TableCosts
from podgraph.workload.costs import AttentionCosts, Scope, StepCosts, attention_us, eager_us
from podgraph.workload.memory import memory_of, memory_of_catalog
from podgraph.workload.profile import Table, load_profile, profiles
from tests.steps_made import histogram

ROOT = Path(__file__).parents[2]
H200 = ROOT / "configs" / "devices" / "h200.yaml"
BUILD = load_config(ROOT / "configs" / "llama3-8b.yaml")
SPECS = tuple(BUILD.specs.values())
DEVICE = load_profile("h200")
assert BUILD.model is not None
STEP = StepCosts(DEVICE, BUILD.model, SPECS)
ATTENTION = AttentionCosts(DEVICE, SPECS, 32)
STEPS = histogram((300, 2, 10, 4), (0, 0, 40, 9), (512, 1, 0, 2))


def shapes(*rows: tuple[int, int, int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64)


def test_the_shipped_profile_is_what_was_measured() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "device.json").read_text())
    assert H200.read_text() == profile_text(measured)
    assert profiles() == ["h200"]
    assert load_profile(H200) == DEVICE
    assert DEVICE.products["qkv"].step_us(np.array([448]), 64) == pytest.approx(
        measured["metrics"]["products"]["qkv"][61], abs=0.06
    )


def test_a_table_steps_up_to_the_next_measured_count() -> None:
    table = Table((1, 8, 16, 400), (5.0, 3.0, 9.0, 393.0), 1)
    rows = np.array([1, 2, 8, 9, 16, 17, 64, 65, 400, 401, 800])
    # whole tiles of 64 are interpolated between 16 and 400, and what is beyond grows with its tiles
    between = [57.0, 57.0, 121.0]
    beyond = [393.0 * 448 / 400, 393.0 * 832 / 400]
    assert table.step_us(rows, 64) == pytest.approx([5.0, 3.0, 3.0, 9.0, 9.0, *between, 393.0 * 448 / 400, *beyond])
    assert table.line_us(np.array([1, 4, 800])) == pytest.approx([5.0, 5 - 2 * 3 / 7, 786.0])


def test_other_models_scale_the_table_by_the_roofline() -> None:
    rows = np.array([1, 100, 2048])
    same = DEVICE.product_us("down", 14336, 4096, rows)
    assert same == pytest.approx(DEVICE.products["down"].step_us(rows, 64))
    double = DEVICE.product_us("down", 14336, 8192, rows)
    ratio = DEVICE.roofline_us(14336, 8192, rows) / DEVICE.roofline_us(14336, 4096, rows)
    assert double == pytest.approx(same * ratio)
    bare = dataclasses.replace(DEVICE, products={})
    assert bare.product_us("down", 14336, 4096, rows) == pytest.approx(bare.roofline_us(14336, 4096, rows))
    # bytes of the weights where rows are few, operations of whole tiles where they are many
    assert bare.roofline_us(4096, 4096, np.array([1]))[0] == pytest.approx(2 * (4096**2 + 8192) / bare.bandwidth * 1e6)
    assert bare.roofline_us(4096, 4096, np.array([2000]))[0] == pytest.approx(2 * 4096**2 * 2048 / bare.flops * 1e6)


def test_a_step_costs_its_rows_whatever_they_are() -> None:
    us = STEP.bucket_us(shapes((8, 300, 10), (200, 310, 0), (310, 0, 310)))
    assert us[0] == us[1] == us[2]
    assert us[0] in STEP.exact_us(STEPS)
    assert (STEP.best_us(STEPS) <= STEP.exact_us(STEPS)).all()
    # the table falls behind 448 rows
    falls = histogram((440, 1, 8, 1))
    assert STEP.best_us(falls)[0] < 0.9 * STEP.exact_us(falls)[0]
    layers = dataclasses.replace(BUILD.model, num_layers=64)
    twice = StepCosts(DEVICE, layers, SPECS).bucket_us(shapes((1, 64, 0)))
    assert twice - DEVICE.launch_us == pytest.approx(2 * (STEP.bucket_us(shapes((1, 64, 0))) - DEVICE.launch_us))


def test_a_steps_own_part_is_its_attention_and_its_logits() -> None:
    own, attention = STEP.own_us(STEPS), 32 * attention_us(DEVICE, SPECS, STEPS)
    logits = own - attention
    assert DEVICE.logits is not None
    # 40, 12 and 1 requests, ascending by prefill_len
    assert logits == pytest.approx(DEVICE.logits.line_us(np.array([40, 12, 1])))
    assert ATTENTION.own_us(STEPS) == pytest.approx(attention)


def test_attention_is_bytes_and_operations() -> None:
    (spec,) = SPECS
    decodes = histogram((0, 0, 40, 9))
    us = attention_us(DEVICE, SPECS, decodes)[0]
    assert us == pytest.approx(DEVICE.attention_fixed_us + 1e6 * 40 * 100 * 4096 / DEVICE.attention_bandwidth)
    narrow = (dataclasses.replace(spec, window_left=9),)
    us = attention_us(DEVICE, narrow, decodes)[0]
    assert us == pytest.approx(DEVICE.attention_fixed_us + 1e6 * 40 * 10 * 4096 / DEVICE.attention_bandwidth)
    mean = attention_us(DEVICE, (*SPECS, *narrow), decodes)[0]
    assert mean == pytest.approx((attention_us(DEVICE, SPECS, decodes)[0] + us) / 2)


def test_both_prices_of_an_eager_step() -> None:
    exact, own = STEP.exact_us(STEPS), STEP.own_us(STEPS)
    assert STEP.host_us == pytest.approx(DEVICE.plan_host_us + 32 * (DEVICE.layer_host_us + DEVICE.attention_host_us))
    assert eager_us(STEP, STEPS, "penalty") == pytest.approx(exact + STEP.host_us)
    assert eager_us(STEP, STEPS, "hidden") + own == pytest.approx(np.maximum(own + exact, STEP.host_us))


def test_attention_pads_for_next_to_nothing() -> None:
    tight, wide = ATTENTION.bucket_us(shapes((12, 300, 10), (256, 2048, 10)))
    assert 0 < wide - tight < 32 * 5
    assert (np.diff(ATTENTION.bucket_us(shapes((1, 1, 0), (2, 1, 0), (2, 9, 0), (9, 9, 4)))) >= 0).all()
    assert np.isinf(STEP.split_us(STEPS)).all()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: NVIDIA H200", "name: 3", "name: must be a line of text, got 3"),
        ("tile_rows: 64 ", "tile_rows: 6.5 ", "tile_rows: got 6.5, allowed: an integer above 0"),
        ("tile_rows: 64 ", "tile_row: 64 ", "tile_row: unknown key; did you mean 'tile_rows'"),
        ("sm_count: 132", "", "sm_count: missing"),
        ("launch_us: 2.46", "launch_us: -1", "graph.launch_us: got -1, allowed: a number of 0 or more"),
        ("launch_us: 2.46", "launch: 2.46", "graph.launch: unknown key; did you mean 'launch_us'"),
        ("launch_us: 2.46", "launch_us: .inf", "graph.launch_us: got inf, allowed: a number of 0 or more"),
        ("shape: [4096, 6144]", "shape: [4096]", r"products.qkv.shape: got \[4096\], allowed: \[inputs, outputs\]"),
        ("  rows: [1, 2, 4,", "  rows: [2, 1, 4,", "products.qkv.rows: must ascend, each once"),
        ("  rows: [1, 2, 4,", "  rows: [1, 4,", "products.qkv.us: must be a list with one time for each of rows"),
        ("  qkv:", "  qvk:", "products.qvk: unknown key; did you mean 'qkv'"),
        ("rows: [1, 64, 512, 2048]", "rows: {a: 1}", "elementwise.us: must be a list"),
        ("flops: 7.8e+14", "flops: 0", "flops: got 0, allowed: a number above 0"),
    ],
)
def test_a_bad_profile_is_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = H200.read_text()
    assert old in text
    path = tmp_path / "odd.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=rf"odd\.yaml: {message}") as caught:
        load_profile(path)
    assert "\n" not in str(caught.value)


def test_profiles_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device profile: got 'h300', allowed: h200, or the path of a YAML file"):
        load_profile("h300")
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load_profile(tmp_path / "none.yaml")
    for text in ("", "[]", "a: ["):
        (tmp_path / "a.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"a\.yaml: "):
            load_profile(tmp_path / "a.yaml")


def test_a_profile_may_have_no_tables(tmp_path: Path) -> None:
    text = H200.read_text().split("\nproducts:")[0]
    path = tmp_path / "plain.yaml"
    path.write_text(text)
    costs = StepCosts(load_profile(path), STEP.model, SPECS)
    assert costs.last_rows == 0
    assert (costs.bucket_us(shapes((1, 1, 0), (1, 65, 0))) > 0).all()
    assert (costs.own_us(STEPS) > 0).all()


def test_tables_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("rows,us\n64,9.5\n\n8,4\n32,12\n")
    costs = read_costs(path, STEP)
    assert isinstance(costs, RowCosts)
    assert costs.rows == (8, 32, 64)
    assert costs.bucket_us(shapes((1, 8, 0), (1, 8, 1), (9, 33, 0), (9, 65, 0))).tolist() == [4.0, 12.0, 9.5, np.inf]
    steps = histogram((0, 0, 9, 1), (0, 0, 70, 1))
    assert costs.exact_us(steps).tolist() == [12.0, 9.5]
    assert costs.best_us(steps).tolist() == [9.5, 9.5]
    assert (costs.own_us(steps) == STEP.own_us(steps)).all()
    assert (costs.scope, costs.host_us) == ("step", STEP.host_us)
    assert "rows.csv" in costs.source
    assert np.isinf(costs.split_us(steps)).all()
    assert read_costs(path, ATTENTION).split_us(steps).tolist() == [8.0, 8.0]


def test_tables_of_buckets(tmp_path: Path) -> None:
    path = tmp_path / "buckets.csv"
    path.write_text("batch,prefill_len,decode_count,us\n4,0,4,7\n8,16,4,3\n")
    costs = read_costs(path, ATTENTION)
    assert isinstance(costs, TableCosts)
    assert costs.choices.tolist() == [[4, 0, 4], [8, 16, 4]]
    assert costs.bucket_us(shapes((8, 16, 4), (4, 0, 4), (1, 1, 0))).tolist() == [3.0, 7.0, np.inf]
    steps = histogram((0, 0, 3, 1), (99, 1, 0, 1))
    assert costs.best_us(steps).tolist() == [3.0, 7.0]
    assert costs.split_us(steps).tolist() == [6.0, 6.0]
    assert (costs.scope, costs.by_rows) == ("attention", False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: got columns none, allowed: rows, us or batch, prefill_len, decode_count, us"),
        ("rows,time\n", "line 1: got columns rows, time, allowed: rows, us or"),
        ("rows,us\n", "no row below the header"),
        ("rows,us\n8,1\n8,2\n", "line 3: 8 is there twice"),
        ("rows,us\n8\n", "line 2: got 1 values, allowed: rows, us"),
        ("rows,us\n0,1\n", "line 2: rows: got '0', allowed: 1 to"),
        ("rows,us\nx,1\n", "line 2: rows: got 'x', allowed: 1 to"),
        ("rows,us\n1,nan\n", "line 2: us: got 'nan', allowed: a number of microseconds above 0"),
        ("rows,us\n1,-3\n", "line 2: us: got '-3', allowed"),
        ("rows,us\n1,inf\n", "line 2: us: got 'inf', allowed"),
        ("batch,prefill_len,decode_count,us\n1,-1,1,3\n", "line 2: prefill_len: got '-1', allowed: 0 to"),
        ("\udcff", "not a CSV file"),
    ],
)
def test_a_bad_table_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "odd.csv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=rf"odd\.csv: {message}"):
        read_costs(path, STEP)


@pytest.mark.parametrize("scope", ["step", "attention"])
def test_costs_of_a_configuration(tmp_path: Path, scope: Scope) -> None:
    costs = costs_of(BUILD, DEVICE, scope)
    assert costs.scope == scope
    path = tmp_path / "rows.csv"
    path.write_text("rows,us\n64,9.5\n")
    assert costs_of(BUILD, DEVICE, scope, path).scope == scope
    with pytest.raises(ConfigError, match=r"none\.csv: cannot be read"):
        costs_of(BUILD, DEVICE, scope, tmp_path / "none.csv")


def test_scope_step_needs_the_model() -> None:
    bare = dataclasses.replace(BUILD, model=None)
    with pytest.raises(ConfigError, match="model: missing; scope step needs num_layers"):
        costs_of(bare, DEVICE, "step")
    costs = costs_of(bare, DEVICE, "attention")
    assert isinstance(costs, AttentionCosts)
    assert costs.num_layers == 1


def test_memory_counts_what_is_shared_once() -> None:
    buckets = [Bucket(256, 2048, 0), Bucket(256, 0, 256)]
    memory = memory_of(SPECS, buckets, DEVICE, "attention", 32)
    assert memory.dedicated_bytes == 589_522
    assert memory.total(10) - memory.total(4) == 6 * 589_522
    assert memory.total(10, shared=True) - memory.total(4, shared=True) == 6 * 8_150
    assert memory.total(0) == memory.once_bytes > memory.image_bytes > 0
    whole = memory_of(SPECS, buckets, DEVICE, "step", 32)
    assert whole.dedicated_bytes == whole.shared_bytes == 32 * 13 * 1536
    both = memory_of(SPECS * 2, buckets, DEVICE, "attention", 32)
    assert both.once_bytes == 2 * memory.once_bytes


def test_memory_of_a_catalog_is_what_it_holds() -> None:
    catalog = store.read(ROOT / "tests" / "data" / "llama3-8b-h200.podcat")
    memory = memory_of_catalog(catalog, DEVICE)
    assert memory.image_bytes == sum(map(len, catalog.images.values()))
    assert memory.region_bytes == sum(r.size for entry in catalog.specs.values() for r in entry.regions)
    assert not memory.modelled


LISTED = b"""\
specs: {tiny: {num_qo_heads: 4, num_kv_heads: 1, head_dim: 128, page_size: 16}}
buckets: %s
workspace: {max_pages: 64, max_kv_len: 512}
"""


def test_buckets_may_be_listed() -> None:
    build = parse_config(LISTED % b"{list: [[2, 8, 0], [4, 0, 4], [3, 16, 1]]}", "a.yaml")
    assert build.buckets == (Bucket(4, 0, 4), Bucket(3, 16, 1), Bucket(2, 8, 0))
    assert not build.dropped


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ("{list: [[2, 8, 0], [2, 8, 0]]}", r"buckets.list\[1\]: the same bucket as buckets.list\[0\]; drop one"),
        ("{list: [[2, 8, 4]]}", r"buckets.list\[0\]: no batch needs it, got \[2, 8, 4\]: decode_count > batch"),
        ("{list: [[2, 8]]}", r"buckets.list\[0\]: must be three integers, got \[2, 8\], allowed: \[batch, "),
        ("{list: [[2, 8, true]]}", r"buckets.list\[0\]: must be three integers, got \[2, 8, True\]"),
        ("{list: [[2, -8, 0]]}", r"buckets.list\[0\]: out of range, got \[2, -8, 0\]"),
        ("{list: []}", "buckets.list: must not be empty"),
        ("{list: 3}", r"buckets.list: must be a list, got 3, allowed: a list of \[batch, prefill_len, decode_count\]"),
        ("{lst: [[2, 8, 0]]}", "buckets.lst: unknown key; did you mean 'list'"),
        ("{list: [[2, 8, 0]], batch: [3]}", "buckets.list: stands alone, got batch too; keep the list, or the axes"),
        ("{list: [[2, 8, 0]], families: [mixed]}", "buckets.list: stands alone, got families too"),
    ],
)
def test_a_bad_list_is_one_line(buckets: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"a\.yaml: {message}"):
        parse_config(LISTED % buckets.encode(), "a.yaml")
