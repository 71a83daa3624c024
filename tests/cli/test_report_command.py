"""``podgraph report`` on the command line."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from podgraph.catalog import store
from podgraph.cli import main
from podgraph.workload.memory import memory_of_catalog
from podgraph.workload.profile import load_profile
from podgraph.workload.scheduler import SchedulerConfig
from podgraph.workload.shards import Job
from podgraph.workload.shards import run as simulate
from podgraph.workload.step_files import write_steps
from podgraph.workload.traces import read_trace

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "tests" / "data" / "azure_conv_slice.csv"
CATALOG = ROOT / "tests" / "data" / "llama3-8b-h200.podcat"
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
LLAMA = ROOT / "configs" / "llama3-8b.yaml"


def run(*arguments: object, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["report", *map(str, arguments)])
    assert result.exit_code == exit_code, result.output
    return result


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    path = tmp_path / "steps.csv"
    path.write_text("prefill_len,prefill_requests,decode_count,steps\n0,0,4,90\n5000,1,0,10\n")
    return path


def test_every_output_at_once(tmp_path: Path) -> None:
    page, table, picture = tmp_path / "r.html", tmp_path / "r.csv", tmp_path / "r.png"
    printed = run(CATALOG, "--trace", TRACE, "--rate", 40, "-o", page, "--csv", table, "--png", picture).stdout
    catalog = store.read(CATALOG)
    memory = memory_of_catalog(catalog, load_profile("h200")).total(len(catalog.records))
    for words in (
        "best of its size",
        "vllm",
        "host time hidden",
        "one replay, simulated",
        "waste, modelled",
        "then add",
        f"device memory (measured) {memory / (1 << 20):.1f} MiB",
        f"file {CATALOG.stat().st_size:,} bytes (measured)",
        "scope attention, modelled from",
    ):
        assert words in printed
    for path in (page, table, picture):
        assert f"{path}: written" in printed
    assert page.read_text().startswith("<!doctype html>")
    assert "an engine with\n1,024 rows and 72 requests" in page.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 12
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1.0)
    assert all(float(row["replay_us_measured"]) > 0 for row in rows)


def test_json_of_a_step_log(steps: Path) -> None:
    document = json.loads(run(QUICKSTART, "--trace", steps, "--json").stdout)
    assert (document["scope"], document["kinds"]["steps"], document["written"]) == ("attention", "logged", [])
    for found in document["coverage"].values():
        assert (found["hits"], found["splits"], found["misses"]) == (90, 10, 0)
        assert found["reasons"] == {"prefill_len > 256": 10}
    assert document["workload"] == {"name": "steps.csv", "steps": 100, "token_budget": 5000, "max_running": 4}
    assert document["points"][0]["covered"] == 0.9


def test_a_histogram_says_that_it_was_simulated(tmp_path: Path) -> None:
    path = tmp_path / "steps.parquet"
    job = Job(SchedulerConfig(256, 12, 4096, 16), 20_000.0, "20 ms", rate=40.0)
    write_steps(*[(found := simulate(read_trace(TRACE, limit=30), job))[0], path, found[1]])
    assert json.loads(run(QUICKSTART, "--trace", path, "--json").stdout)["kinds"]["steps"] == "simulated"


def test_scope_step_is_the_default_with_a_model() -> None:
    assert "scope step, " in run(LLAMA, "--trace", TRACE, "--rate", 20).stdout
    assert "scope attention, " in run(LLAMA, "--trace", TRACE, "--rate", 20, "--scope", "attention").stdout


def test_a_catalog_with_a_model_and_its_build(tmp_path: Path, steps: Path) -> None:
    log = tmp_path / "build.json"
    log.write_text(json.dumps({"path": "a.podcat", "seconds": {"capture": 1.5, "verify": 10.25}}))
    document = json.loads(
        run(CATALOG, "--trace", steps, "--model", LLAMA, "--build-log", log, "--eager", "hidden", "--json").stdout
    )
    assert (document["scope"], document["eager"]) == ("step", "hidden")
    assert document["file"] == {"bytes": CATALOG.stat().st_size, "build_seconds": {"capture": 1.5, "verify": 10.25}}
    page = tmp_path / "r.html"
    printed = run(CATALOG, "--trace", steps, "--build-log", log, "-o", page).stdout
    assert "built in 11.8 s (measured)" in printed
    assert "build: verify" in page.read_text()


def test_a_table_of_costs_is_said_to_be_one(tmp_path: Path, steps: Path) -> None:
    table, page = tmp_path / "costs.csv", tmp_path / "r.html"
    table.write_text("batch,prefill_len,decode_count,us\n4,0,4,10\n12,256,8,60\n")
    printed = run(QUICKSTART, "--trace", steps, "--costs", table, "-o", page, "--csv", tmp_path / "r.csv").stdout
    assert "us a step, table" in printed
    assert "from a table of costs that was given" in page.read_text()
    assert "bucket_us_table" in (tmp_path / "r.csv").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([QUICKSTART, "--trace", TRACE, "--scope", "step"], "model: missing; scope step needs"),
        ([CATALOG, "--trace", TRACE, "--scope", "step"], "model: missing; scope step needs"),
        ([QUICKSTART, "--trace", "none.csv"], "none.csv: cannot be read"),
        (["none.yaml", "--trace", TRACE], "none.yaml"),
        (["none.podcat", "--trace", TRACE], "none.podcat: cannot be read"),
        ([QUICKSTART, "--trace", TRACE, "--device", "h999"], "h999"),
        ([LLAMA, "--trace", TRACE, "--model", LLAMA], "is a configuration, and has no use for a model"),
        ([LLAMA, "--trace", TRACE, "--build-log", "b.json"], "is a configuration, and has no use for a build's time"),
        ([CATALOG, "--trace", TRACE, "--model", QUICKSTART], "quickstart.yaml: model: is missing"),
        ([CATALOG, "--trace", TRACE, "--build-log", "none.json"], "none.json: cannot be read"),
        ([CATALOG, "--trace", TRACE, "--build-log", TRACE], "no log of a build"),
        ([QUICKSTART, "--trace", TRACE, "--token-budget", 4, "--max-running", 8], "max_running: must be <="),
    ],
    ids=str,
)
def test_failures_are_one_line(arguments: list[object], message: str) -> None:
    result = run(*arguments, exit_code=1)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("seconds", ['{"a": -1}', '{"a": 1e999}', '{"a": "x"}', "[]", '{"a\\n": 1}', "3"])
def test_a_bad_build_log_is_one_line(tmp_path: Path, steps: Path, seconds: str) -> None:
    log = tmp_path / "build.json"
    log.write_text(f'{{"seconds": {seconds}}}')
    result = run(CATALOG, "--trace", steps, "--build-log", log, exit_code=1)
    assert "allowed: what `podgraph build --json` printed" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_place_that_cannot_be_written_leaves_nothing(tmp_path: Path, steps: Path) -> None:
    for option in ("-o", "--csv", "--png"):
        result = run(CATALOG, "--trace", steps, option, tmp_path / "no" / "x", exit_code=1)
        assert "cannot be written" in result.stderr
    same = tmp_path / "same"
    assert "name them apart" in run(CATALOG, "--trace", steps, "-o", same, "--png", same, exit_code=1).stderr
    assert list(tmp_path.iterdir()) == [steps]


@pytest.mark.parametrize("library", ["matplotlib", "jinja2"])
def test_a_library_that_is_missing_is_named(
    tmp_path: Path, steps: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, "podgraph.report.page", raising=False)
    result = run(QUICKSTART, "--trace", steps, "--csv", tmp_path / "r.csv", "-o", tmp_path / "r.html", exit_code=1)
    assert f"need {library}; pip install 'podgraph[report]'" in result.stderr
    assert list(tmp_path.iterdir()) == [steps], "all files are made before the first is written"
    # the summary and the CSV need neither
    run(QUICKSTART, "--trace", steps, "--csv", tmp_path / "r.csv")


def test_usage(steps: Path) -> None:
    assert run(QUICKSTART, exit_code=2).stderr.count("--trace") >= 1
    run("--trace", steps, exit_code=2)


def test_a_step_of_any_size_is_refused_at_once(tmp_path: Path) -> None:
    log, page = tmp_path / "steps.csv", tmp_path / "r.html"
    log.write_text("prefill_len,prefill_requests,decode_count,steps\n1000000000,1,4,5\n")
    result = run(QUICKSTART, "--trace", log, "-o", page, exit_code=1)
    assert "steps.csv: the largest step: got 1,000,000,004 query rows" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not page.exists()


def test_what_is_read_is_not_written_over(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_bytes(TRACE.read_bytes())
    for option in ("-o", "--csv", "--png"):
        result = run(QUICKSTART, "--trace", trace, "--rate", 40, option, trace, exit_code=1)
        assert "got the same file to read and to write" in result.stderr
    assert trace.read_bytes() == TRACE.read_bytes()
