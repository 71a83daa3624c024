"""``podgraph tune``: from a log to a configuration that builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from podgraph.cli import main
from podgraph.config import load_config
from podgraph.shapes import Bucket, Demand
from podgraph.workload.step_files import write_steps
from tests.steps_made import histogram

ROOT = Path(__file__).parents[2]
SLICE = ROOT / "tests" / "data" / "azure_conv_slice.csv"
CONFIG = ROOT / "configs" / "llama3-8b.yaml"
ENGINE = ["--token-budget", "256", "--max-running", "32", "--load", "0.85"]


def run(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(main, ["tune", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    path = tmp_path / "steps.parquet"
    counted = histogram((0, 0, 30, 900), (100, 1, 20, 60), (220, 3, 36, 5), (256, 1, 0, 40), (7, 2, 3, 8))
    write_steps(counted, path)
    return path


def test_a_request_log_becomes_buckets(tmp_path: Path) -> None:
    out = tmp_path / "tuned.yaml"
    arguments = ["-c", CONFIG, "--trace", SLICE, *ENGINE, "--holdout", "0.5", "--max-buckets", "6", "-o", out]
    facts = json.loads(run(*arguments, "--json"))
    build, before = load_config(out), load_config(CONFIG)
    assert set(build.buckets) == {Bucket(**bucket) for bucket in facts["buckets"]}
    assert len(build.buckets) == 6
    assert (build.specs, build.workspace, build.model) == (before.specs, before.workspace, before.model)
    assert build.backend == before.backend
    assert any(bucket.fits(Demand(4, 224, 32)) or bucket.fits(Demand(1, 256, 0)) for bucket in build.buckets)
    assert facts["scope"] == "step"
    assert facts["gap"] < 0.02
    assert set(facts["train"]) == set(facts["heldout"]) == {"penalty", "hidden"}
    assert facts["train"]["penalty"]["expected_us"] == pytest.approx(facts["expected_us"])
    assert facts["expected_us"] >= facts["bound_us"]
    assert set(facts["lists"]) == {"vllm", "sglang", "tensorrt_llm", "megatron", "pow2"}
    text = out.read_text()
    assert "NVIDIA H200" in text
    assert max(map(len, text.splitlines())) <= 120
    printed = run(*arguments)
    assert out.read_text() == text  # the same set, written the same way
    for word in ("waste", "held out, hidden", "vllm, penalty", "proven: no set of as many buckets", "device memory"):
        assert word in printed


@pytest.mark.parametrize("scope", ["step", "attention"])
def test_counted_steps_need_no_engine(tmp_path: Path, steps: Path, scope: str) -> None:
    out = tmp_path / "tuned.yaml"
    facts = json.loads(run("-c", CONFIG, "--trace", steps, "--scope", scope, "--max-buckets", 3, "-o", out, "--json"))
    assert facts["scope"] == scope
    assert 1 <= len(load_config(out).buckets) <= 3
    assert facts["train"]["penalty"]["steps"] == 1013
    assert facts["train"]["penalty"]["misses"] == 0
    assert ("graph of the whole model" in out.read_text()) == (scope == "step")


def test_several_files_are_one_log(tmp_path: Path, steps: Path) -> None:
    out = tmp_path / "tuned.yaml"
    facts = json.loads(run("-c", CONFIG, "--trace", steps, "--trace", steps, "-o", out, "--json"))
    assert facts["train"]["penalty"]["steps"] == 2026


def test_a_memory_budget_limits_the_set(tmp_path: Path, steps: Path) -> None:
    out = tmp_path / "tuned.yaml"
    facts = json.loads(run("-c", CONFIG, "--trace", steps, "--memory-budget", "12 MiB", "-o", out, "--json"))
    memory = facts["memory"]
    assert memory["total_bytes"] <= 12 << 20
    assert (
        memory["total_bytes"]
        == memory["region_bytes"] + memory["image_bytes"] + len(facts["buckets"]) * memory["dedicated_bytes"]
    )
    error = run("-c", CONFIG, "--trace", steps, "--memory-budget", "1MiB", "-o", out, code=1)
    assert "memory budget: got 1,048,576 bytes, allowed: at least " in error
    assert "is no size such as 64MiB" in run(
        "-c", CONFIG, "--trace", steps, "--memory-budget", "lots", "-o", out, code=2
    )


def test_costs_of_ones_own(tmp_path: Path, steps: Path) -> None:
    out, table = tmp_path / "tuned.yaml", tmp_path / "mine.csv"
    table.write_text("batch,prefill_len,decode_count,us\n40,0,40,9\n40,256,36,300\n64,512,40,200\n")
    facts = json.loads(run("-c", CONFIG, "--trace", steps, "--costs", table, "--max-buckets", "2", "-o", out, "--json"))
    assert facts["buckets"] == [
        {"batch": 40, "prefill_len": 0, "decode_count": 40},
        {"batch": 64, "prefill_len": 512, "decode_count": 40},
    ]
    assert "mine.csv" in facts["source"]
    assert facts["gap"] == pytest.approx(0, abs=1e-6)
    table.write_text("rows,us\n64,9\n512,200\n256,300\n")
    facts = json.loads(run("-c", CONFIG, "--trace", steps, "--costs", table, "-o", out, "--json"))
    assert [bucket["prefill_len"] for bucket in facts["buckets"]] == [64, 512]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", SLICE], "is a request log, and the engine is not known; give token_budget and max_running"),
        (["--trace", "none.csv"], "none.csv: cannot be read"),
        (["--trace", SLICE, *ENGINE, "--device", "h300"], "device profile: got 'h300', allowed: h200"),
        (["--trace", SLICE, *ENGINE, "--costs", "none.csv"], "none.csv: cannot be read"),
        (["--trace", SLICE, "--token-budget", "8", "--max-running", "9"], "max_running: must be <= token_budget=8"),
        (["--trace", SLICE, *ENGINE, "--rate", "3"], "rate, load: got both"),
        (["--trace", SLICE, *ENGINE, "--max-pages", "1"], "no request fits"),
    ],
)
def test_what_cannot_be_tuned_is_one_line(tmp_path: Path, arguments: list[Any], message: str) -> None:
    out = tmp_path / "tuned.yaml"
    printed = run("-c", CONFIG, *arguments, "-o", out, code=1)
    assert message in printed
    assert printed.startswith("podgraph: ")
    assert printed.count("\n") == 1
    assert not out.exists()


def test_counted_steps_cannot_be_held_out(tmp_path: Path, steps: Path) -> None:
    printed = run("-c", CONFIG, "--trace", steps, "--holdout", "0.3", "-o", tmp_path / "a.yaml", code=1)
    assert "holdout: counted steps have no order" in printed


def test_scope_step_needs_a_model(tmp_path: Path, steps: Path) -> None:
    config = tmp_path / "bare.yaml"
    config.write_text(CONFIG.read_text().split("\nmodel:")[0] + "\n")
    printed = run("-c", config, "--trace", steps, "-o", tmp_path / "a.yaml", code=1)
    assert "bare.yaml: model: missing" in printed
    run("-c", config, "--trace", steps, "--scope", "attention", "--max-buckets", "2", "-o", tmp_path / "a.yaml")
    # without a model every simulated step takes the same time
    arguments = [*ENGINE, "--scope", "attention", "--max-buckets", "2", "-o", tmp_path / "b.yaml"]
    run("-c", config, "--trace", SLICE, *arguments)
    assert load_config(tmp_path / "b.yaml").model is None


def test_a_workspace_that_is_too_small_is_named(tmp_path: Path, steps: Path) -> None:
    config, out = tmp_path / "small.yaml", tmp_path / "tuned.yaml"
    text = (
        CONFIG.read_text().replace("max_pages: 65536", "max_pages: 40").replace("max_kv_len: 131072", "max_kv_len: 512")
    )
    text = text.replace("[16, 72]", "[4]").replace("[256, 1024]", "[64]").replace("[8, 64]", "[2]")
    config.write_text(text)
    printed = run("-c", config, "--trace", steps, "-o", out, code=1)
    assert "small.yaml, tuned: workspace.max_pages: got 40, allowed: at least" in printed
    assert not out.exists()


def test_every_field_of_a_specification_is_kept(tmp_path: Path, steps: Path) -> None:
    config, out = tmp_path / "odd.yaml", tmp_path / "tuned.yaml"
    config.write_text(
        """\
specs:
  "null": {num_qo_heads: 8, num_kv_heads: 2, head_dim: 64, page_size: 1, dtype: float16, kv_layout: HND}
  'a b: c': {num_qo_heads: 8, num_kv_heads: 2, head_dim: 64, page_size: 8, sm_scale: 1e-5, window_left: 31,
    logits_soft_cap: 30.0, kv_dtype: float8_e4m3fn, k_scale: 0.5, v_scale: 2.0}
  plain: {num_qo_heads: 8, num_kv_heads: 8, head_dim: 128, page_size: 16, decode_rows: 2}
buckets: {list: [[1, 8, 0]]}
workspace: {max_pages: 4096, max_kv_len: 4096, max_bytes: 1 GiB}
model: {num_layers: 4, hidden_size: 512, intermediate_size: 1024, vocab_size: 1000}
backend: cpu
"""
    )
    run("-c", config, "--trace", steps, "--max-buckets", "2", "-o", out)
    before, after = load_config(config), load_config(out)
    assert after.specs == before.specs
    assert (after.workspace, after.model, after.backend) == (before.workspace, before.model, before.backend)


@pytest.mark.parametrize("scope", ["step", "attention"])
def test_a_step_of_any_size_is_refused_at_once(tmp_path: Path, scope: str) -> None:
    log, out = tmp_path / "steps.csv", tmp_path / "tuned.yaml"
    log.write_text("prefill_len,prefill_requests,decode_count,steps\n1000000000,1,4,5\n")
    printed = run("-c", CONFIG, "--trace", log, "--scope", scope, "-o", out, code=1)
    assert "steps.csv: the largest step: got 1,000,000,004 query rows, allowed: at most 262,144; " in printed
    assert printed.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("rows,us\n1,1e308\n1024,1e308\n", "mine.csv: line 2: us: got '1e308', allowed: a number of microsec"),
        ("batch,prefill_len,decode_count,us\n1,0,1,5\n", "no bucket is of use: none holds a step, or steps without"),
    ],
    ids=["overflow", "too small"],
)
def test_costs_that_leave_no_bucket_are_named(tmp_path: Path, steps: Path, table: str, message: str) -> None:
    costs, out = tmp_path / "mine.csv", tmp_path / "tuned.yaml"
    costs.write_text(table)
    printed = run("-c", CONFIG, "--trace", steps, "--costs", costs, "-o", out, code=1)
    assert message in printed
    assert printed.count("\n") == 1
    assert not out.exists()


def test_what_is_read_is_not_written_over(tmp_path: Path, steps: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.read_text())
    link = tmp_path / "link.yaml"
    link.symlink_to(config)
    for output in (config, link, steps):
        before = output.read_bytes()
        printed = run("-c", config, "--trace", steps, "-o", output, code=1)
        assert printed == f"podgraph: {output}: got the same file to read and to write; name another one to write\n"
        assert output.read_bytes() == before
