"""``podgraph trace``: what each command prints and writes, and how each fails."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from podgraph.cli import main

TRACE = Path(__file__).parents[1] / "data" / "azure_conv_slice.csv"
LIMITS = ["--token-budget", "512", "--max-running", "64", "--max-pages", "4000", "--page-size", "16"]


def run(*arguments: object, exit_code: int = 0) -> Result:
    """One command; nothing but the exit code that is expected, and never a traceback."""
    result = CliRunner().invoke(main, ["trace", *(str(argument) for argument in arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == exit_code, result.output
    return result


def error(*arguments: object) -> str:
    """The one line of a command that fails."""
    result = run(*arguments, exit_code=1)
    assert result.stdout == ""
    assert re.fullmatch(r"podgraph: [^\n]+\n", result.stderr), result.stderr
    return result.stderr.removeprefix("podgraph: ").removesuffix("\n")


def document(*arguments: object) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


def simulate(output: Path, *arguments: object) -> Any:
    return document("simulate", TRACE, "-o", output, *LIMITS, *arguments)


def test_simulate_then_show(tmp_path: Path) -> None:
    output = tmp_path / "steps.parquet"
    said = simulate(output, "--load", "0.85")
    assert said["path"] == str(output)
    assert said["simulate_seconds"] >= 0
    assert said["skipped_rows"] == 0
    assert said["simulation"]["finished"] == 200
    assert said["simulation"]["settings"]["load"] == 0.85
    assert sum(said["shares"].values()) == pytest.approx(1)
    shown = document("show", output)
    for name in ("steps", "distinct", "shares", "percentiles", "top", "simulation"):
        assert shown[name] == said[name]
    assert shown["top"][0]["steps"] == max(step["steps"] for step in shown["top"])
    assert shown["percentiles"]["rows"]["p100"] == 512
    text = run("show", output).stdout
    assert re.search(r"[\d,]+ steps, [\d,]+ distinct: [\d.]+% decode, [\d.]+% mixed, [\d.]+% prefill", text)
    assert "200 requests" in text


def test_simulate_in_words(tmp_path: Path) -> None:
    output = tmp_path / "steps.csv"
    text = run("simulate", TRACE, "-o", output, *LIMITS, "--rate", "40", "--policy", "prefill-first").stdout
    assert "200 requests, 40 a second: 200 finished, 0 dropped" in text
    assert f"{output}: {output.stat().st_size:,} bytes, simulated in " in text
    assert output.read_text().startswith("prefill_len,prefill_requests,decode_count,steps,decode_kv_tokens,")
    # CSV has no place for the settings.
    assert document("show", output)["simulation"] is None


def test_steps_timed_on_a_device(tmp_path: Path) -> None:
    config = Path(__file__).parents[2] / "configs" / "llama3-8b.yaml"
    said = simulate(tmp_path / "steps.parquet", "--device", "h200", "--config", config, "--load", "0.85", "--shards", 2)
    assert "H200" in said["simulation"]["settings"]["step_cost"]
    assert "llama3-8b.yaml" in said["simulation"]["settings"]["step_cost"]
    assert "nothing.yaml" in error(
        "simulate", TRACE, "-o", tmp_path / "x", *LIMITS, "--device", "h200", "--config", tmp_path / "nothing.yaml"
    )


def test_shards_merge_to_the_same_file(tmp_path: Path) -> None:
    whole, merged = tmp_path / "whole.parquet", tmp_path / "merged.parquet"
    simulate(whole, "--load", "0.85", "--shards", "3")
    parts = [tmp_path / f"{number}.parquet" for number in (1, 2, 3)]
    for number, part in enumerate(parts, 1):
        assert simulate(part, "--load", "0.85", "--shard", f"{number}/3")["simulation"]["shards"] == [f"{number}/3"]
    said = document("merge", parts[2], parts[0], parts[1], "-o", merged)
    assert said["simulation"]["shards"] == ["1/3", "2/3", "3/3"]
    assert merged.read_bytes() == whole.read_bytes()
    assert "the sum of 3 files" in run("merge", *parts, "-o", merged).stdout
    assert "shard 1/3 of" in error("merge", parts[0], parts[0], "-o", tmp_path / "x.parquet")
    simulate(parts[1], "--load", "0.85", "--shard", "2/3", "--chunk", "64")
    assert "chunk None against 64" in error("merge", *parts, "-o", tmp_path / "x.parquet")


def test_several_logs_with_bad_rows(tmp_path: Path) -> None:
    later = tmp_path / "later.csv.gz"
    rows = "oops\n2024-01-01 00:00:00,5,5\n2024-01-01 00:00:01,6,0\n2023-01-01 00:00:01,6,0\n"
    later.write_bytes(gzip.compress(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}".encode()))
    output = tmp_path / "steps.parquet"
    result = run("simulate", TRACE, later, "-o", output, *LIMITS, "--rate", "40")
    assert "202 requests" in result.stdout
    assert f"podgraph: skipped {later}: line 2: must have 3 fields" in result.stderr
    assert f"podgraph: skipped {later}: line 5: TIMESTAMP: must not go back" in result.stderr
    line = error("simulate", TRACE, later, "-o", tmp_path / "x.parquet", *LIMITS, "--bad-rows", "fail")
    assert "line 2: must have 3 fields" in line
    assert not (tmp_path / "x.parquet").exists()


def test_show_a_request_log() -> None:
    said = document("show", TRACE)
    assert (said["kind"], said["requests"], said["input_tokens"]) == ("requests", 200, 180_695)
    text = run("show", TRACE).stdout
    assert (
        "200 requests, over 61.3 s, 3.25 a second; 180,695 input tokens, 47,050 output tokens; 0 rows skipped" in text
    )


def test_show_a_log_of_own_columns_without_times(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("in,out\n5,6\nx,7\n")
    result = run("show", log, "--columns", "input_len=in,output_len=out")
    assert "1 requests, no arrival times" in result.stdout
    assert f"skipped {log}: line 3: in: must be a whole number" in result.stderr
    said = document("show", log, "--columns", "input_len=in,output_len=out")
    assert (said["skipped_rows"], said["rate"]) == (1, None)
    line = error("simulate", log, "-o", tmp_path / "x", *LIMITS, "--columns", "input_len=in,output_len=out")
    assert "has no arrival times; give a rate or a load" in line


def test_show_what_an_engine_logged(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("prefill_len,prefill_requests,decode_count\n0,0,4\n512,1,3\n")
    assert document("show", log)["shares"] == {"decode": 0.5, "mixed": 0.5, "prefill": 0.0}
    assert "step log, not a request log" in error("simulate", log, "-o", tmp_path / "x", *LIMITS)
    assert "a request log (Azure), not a step log" in error("merge", TRACE, "-o", tmp_path / "x")


def test_failures_are_one_line(tmp_path: Path) -> None:
    assert "nowhere.csv: cannot be read" in error("show", tmp_path / "nowhere.csv")
    (tmp_path / "zeros").write_bytes(bytes(100))
    assert "line 1: not text" in error("show", tmp_path / "zeros")
    output = tmp_path / "no" / "x.parquet"
    assert "cannot be written" in error("simulate", TRACE, "-o", output, *LIMITS)
    few = [*LIMITS[:5], "1", *LIMITS[6:]]
    assert "no request fits the engine" in error("simulate", TRACE, "-o", tmp_path / "x", *few)
    assert "max_running: must be <= token_budget=8" in error(
        "simulate", TRACE, "-o", tmp_path / "x", "--token-budget", "8", *LIMITS[2:]
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rate", "1", "--load", "1"], "--rate and --load exclude each other"),
        (["--shard", "5/4"], "'5/4' is not I/N"),
        (["--shard", "0/4"], "'0/4' is not I/N"),
        (["--shard", "x"], "'x' is not I/N"),
        (["--shard", "1/4", "--shards", "3"], "disagree"),
        (["--load", "0"], "0"),
        (["--device", "h200"], "--device and --config go together"),
        (["--device", "h200", "--config", "x", "--step-us", "5"], "without --step-us"),
        (["--policy", "fifo"], "fifo"),
    ],
)
def test_wrong_usage(tmp_path: Path, arguments: list[str], said: str) -> None:
    result = run("simulate", TRACE, "-o", tmp_path / "x", *LIMITS, *arguments, exit_code=2)
    assert said in result.stderr
    assert not (tmp_path / "x").exists()
