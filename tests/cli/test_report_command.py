"""``podgraph report`` on the command line."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from podgraph.cli import main

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "tests" / "data" / "azure_conv_slice.csv"
GOLDEN = ROOT / "tests" / "data" / "llama3-8b-h200.podcat"
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def run(*arguments: object, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["report", *map(str, arguments)])
    assert result.exit_code == exit_code, result.output
    return result


def test_every_output_at_once(tmp_path: Path) -> None:
    page, table, picture = tmp_path / "r.html", tmp_path / "r.csv", tmp_path / "r.png"
    printed = run(GOLDEN, "--trace", TRACE, "--rate", 40, "-o", page, "--csv", table, "--png", picture).stdout
    assert "best for these steps" in printed
    assert "scope attention, " in printed
    for path in (page, table, picture):
        assert f"{path}: written" in printed
    assert page.read_text().startswith("<!doctype html>")
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 12
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1.0)
    assert all(float(row["replay_us"]) > 0 for row in rows)


def test_json_and_a_step_log(tmp_path: Path) -> None:
    steps = tmp_path / "steps.csv"
    steps.write_text("prefill_len,prefill_requests,decode_count,steps\n0,0,4,90\n5000,1,0,10\n")
    document = json.loads(run(QUICKSTART, "--trace", steps, "--json").stdout)
    assert document["coverage"]["penalty"]["hits"] == 90
    assert document["coverage"]["penalty"]["splits"] == 10
    assert sum(document["coverage"]["penalty"]["reasons"].values()) == 10
    assert document["written"] == []
    assert document["memory"]["file_bytes"] == 0


def test_scope_step_is_the_default_with_a_model(tmp_path: Path) -> None:
    config = ROOT / "configs" / "llama3-8b.yaml"
    assert "scope step, " in run(config, "--trace", TRACE, "--rate", 20).stdout
    assert "scope attention, " in run(config, "--trace", TRACE, "--rate", 20, "--scope", "attention").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([QUICKSTART, "--trace", TRACE, "--scope", "step"], "model: missing; scope step needs"),
        ([QUICKSTART, "--trace", "none.csv"], "none.csv: cannot be read"),
        (["none.yaml", "--trace", TRACE], "none.yaml"),
        (["none.podcat", "--trace", TRACE], "none.podcat: cannot be read"),
        ([QUICKSTART, "--trace", TRACE, "--device", "h999"], "h999"),
    ],
    ids=["no model", "no trace", "no config", "no catalog", "no device"],
)
def test_failures_are_one_line(arguments: list[object], message: str) -> None:
    result = run(*arguments, exit_code=1)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_place_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    for option in ("-o", "--csv", "--png"):
        result = run(GOLDEN, "--trace", TRACE, "--rate", 40, option, tmp_path / "no" / "x", exit_code=1)
        assert "cannot be written" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_usage() -> None:
    assert run(QUICKSTART, exit_code=2).stderr.count("--trace") >= 1
