"""``podgraph stats``: what a serving process would have counted, in three forms."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from prometheus_client.parser import text_string_to_metric_families

from podgraph.build import build
from podgraph.cli import main
from podgraph.config import load_config
from podgraph.dispatch.counters import Counters

CONFIG = """\
specs:
  tiny: {num_qo_heads: 4, num_kv_heads: 1, head_dim: 64, page_size: 16}
buckets: {list: [[4, 64, 2], [2, 64, 0], [2, 0, 2]]}
workspace: {max_pages: 512, max_kv_len: 8192}
backend: cpu
"""
PREFILL, DECODE = (
    "(batch=2, prefill_len=64, decode_count=0)",
    "(batch=2, prefill_len=0, decode_count=2)",
)


def run(*arguments: object, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == exit_code, result.output
    return result


def document(*arguments: object, exit_code: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", exit_code=exit_code).stdout)


def samples(text: str) -> dict[str, Any]:
    """Name without podgraph_ and _total -> number, or label value -> number."""
    found: dict[str, Any] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("podgraph_").removesuffix("_total")
            if sample.labels:
                (value,) = sample.labels.values()
                found.setdefault(name, {})[value] = sample.value
            else:
                found[name] = sample.value
    return found


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stats")
    (folder / "tiny.yaml").write_text(CONFIG)
    build(load_config(folder / "tiny.yaml"), folder / "tiny.podcat", kernels=folder, backend="cpu")
    return folder / "tiny.podcat"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One request: 10 rows of prefill, which make the first of its 4 tokens, then three decodes."""
    path = tmp_path_factory.mktemp("trace") / "one.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,10,4\n")
    return path


def test_the_numbers_of_one_request(catalog: Path, one: Path) -> None:
    got = document("stats", catalog, "--trace", one)
    counters = got.pop("counters")
    memory = got.pop("memory")
    assert got == {"path": str(catalog), "trace": str(one), "skipped_rows": 0, "steps": 4, "failures": 0}
    assert counters == Counters().to_dict() | {
        "plans": 4,
        "runs": 4,
        "replays": {PREFILL: 1, DECODE: 3},
        "replays_by_mode": {"interpreter": 4},
        "padded_rows": 54,
        "padded_slots": 4,
    }
    assert memory["regions"] == 0
    assert document("stats", catalog, "--trace", one, "--limit", 2)["counters"]["replays"] == {PREFILL: 1, DECODE: 1}


def test_the_table_has_every_number(catalog: Path, one: Path) -> None:
    lines = run("stats", catalog, "--trace", one).stdout.splitlines()
    rows = [tuple(cell.strip() for cell in line.strip("│").split("│")) for line in lines if line.startswith("│")]
    assert rows[:5] == [
        ("plans", "", "4"),
        ("runs", "", "4"),
        ("replays", DECODE, "3"),
        ("replays", PREFILL, "1"),
        ("replays_by_mode", "interpreter", "4"),
    ]
    assert ("padded_rows", "", "54") in rows
    assert ("memory", "regions", "0 bytes") in rows
    plain = {name for name, count in Counters().to_dict().items() if count == 0}
    assert plain <= {name for name, _, _ in rows}


def test_prometheus_text_has_the_numbers_of_the_document(catalog: Path, one: Path) -> None:
    options = (catalog, "--trace", one)
    printed, want = run("stats", *options, "--prometheus").stdout, document("stats", *options)
    got = samples(printed)
    assert got.pop("memory_bytes") == want["memory"]
    assert got["replays"] == {PREFILL: 1, DECODE: 3}
    assert got["replays_by_mode"] == {"graph": 0, "eager": 0, "captured": 0, "interpreter": 4}
    happened = {
        name: {key: count for key, count in value.items() if count} if isinstance(value, dict) else value
        for name, value in got.items()
    }
    counted = {name: value for name, value in want["counters"].items() if value != {}}
    assert {name: value for name, value in happened.items() if value != {}} == counted
    assert printed.endswith("\n")
    assert not printed.endswith("\n\n")


def test_a_trace_is_replayed_as_by_replay(catalog: Path, tmp_path: Path) -> None:
    trace = tmp_path / "some.csv"
    rows = "".join(f"2023-11-16 18:15:46.{i},{20 + i},{3 + i}\n" for i in range(6))
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    options = (catalog, "--trace", trace, "--rate", "40", "--limit", "6", "--seed", "3")
    counters, replay = document("stats", *options)["counters"], document("replay", *options)
    for name in ("replays", "splits", "padded_rows", "padded_slots"):
        assert counters[name] == replay[name], name
    assert counters["plans"] == counters["runs"] == replay["steps"] == 6
    assert sum(counters["replays"].values()) == sum(counters["replays_by_mode"].values()) == replay["replays_total"]
    assert len(counters["replays"]) > 1, "a trace that one bucket serves says little"


def test_a_step_beyond_its_bound_fails(catalog: Path, one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podgraph.replay._run_step", lambda *_: (0.5, 0.01))
    for form in ([], ["--json"], ["--prometheus"]):
        result = run("stats", catalog, "--trace", one, *form, exit_code=1)
        assert result.stderr == "podgraph: 4 of 4 steps are beyond their error bound\n"
        assert result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.podcat", "--trace", "{one}"], "none.podcat: cannot be read: No such file or directory"),
        (["{one}", "--trace", "{one}"], "{one}: "),
        (["{catalog}", "--trace", "none.csv"], "none.csv: "),
        (["{catalog}", "--trace", "{catalog}"], "{catalog}: "),
        (["{catalog}", "--trace", "{one}", "--spec", "big"], "{catalog}: spec: got 'big', allowed: tiny; name one"),
        (["{catalog}", "--trace", "{long}"], "{long}: no request fits the catalog (max_kv_len 8192)"),
    ],
    ids=["no catalog", "not a catalog", "no trace", "not a trace", "another spec", "too long"],
)
@pytest.mark.parametrize("form", [[], ["--json"], ["--prometheus"]], ids=["text", "json", "prometheus"])
def test_bad_input_is_one_line(
    arguments: list[str], message: str, form: list[str], catalog: Path, one: Path, tmp_path: Path
) -> None:
    long = tmp_path / "long.csv"
    long.write_text(one.read_text().replace(",10,4", ",9000,4"))
    paths = {"catalog": catalog, "one": one, "long": long}
    result = run("stats", *(argument.format(**paths) for argument in arguments), *form, exit_code=1)
    assert result.stdout == ""
    assert re.fullmatch(r"podgraph: [^\n]+\n", result.stderr), result.stderr
    assert result.stderr.startswith(f"podgraph: {message.format(**paths)}")


@pytest.mark.parametrize(
    "arguments",
    [
        ["a"],
        ["a", "--trace", "t", "--limit", "0"],
        ["a", "--trace", "t", "--rate", "0"],
        ["a", "--trace", "t", "--json", "--prometheus"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    result = run("stats", *arguments, exit_code=2)
    assert result.stdout == ""
    assert re.search(r"^Error: [^\n]+\n\Z", result.stderr, re.MULTILINE)
