"""The command line: what each command prints, as text and as JSON, and how each fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from made_catalog import make_catalog

import podgraph
from podgraph import build, evidence
from podgraph.catalog import store
from podgraph.catalog.model import Catalog
from podgraph.cli import main

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "tests" / "data" / "azure_conv_slice.csv"
Shape = tuple[int, int, int]  # batch, prefill_len, decode_count
Install = Callable[[Callable[[Shape], bool]], None]

COMMANDS = ["buckets", "build", "compile", "inspect", "replay", "stats", "trace", "verify"]

CONFIG = """\
specs:
  tiny: {num_qo_heads: 4, num_kv_heads: 1, head_dim: 128, page_size: 16}
buckets:
  batch: [2, 4]
  prefill_len: [0, 64]
  decode_count: [0, 2]
workspace:
  max_pages: 512
  max_kv_len: 8192
"""
BUCKETS = [(4, 64, 2), (4, 64, 0), (2, 64, 0), (2, 0, 2)]
DROPPED = {"prefill slots without prefill rows": 3, "prefill rows without a prefill slot": 1}


# a verifying process that dies in the third bucket
DYING = """\
import os, sys
from podgraph import verify
run, left = verify._verify_bucket, [2]
def some(*arguments):
    left[0] -= 1
    return run(*arguments) if left[0] >= 0 else os._exit(9)
verify._verify_bucket = some
verify.main(sys.argv[1:])
"""


def run(*arguments: object, exit_code: int = 0) -> Result:
    """One command; nothing but the exit code that is expected, and never a traceback."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == exit_code, result.output
    return result


def error(*arguments: object) -> str:
    """The one line of a command that fails."""
    result = run(*arguments, exit_code=1)
    assert result.stdout == ""
    assert re.fullmatch(r"podgraph: [^\n]+\n", result.stderr), result.stderr
    return result.stderr.removeprefix("podgraph: ").removesuffix("\n")


def document(*arguments: object, exit_code: int = 0) -> Any:
    """What a command prints with --json: one document and nothing else."""
    return json.loads(run(*arguments, "--json", exit_code=exit_code).stdout)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def catalog(config: Path) -> Path:
    """Built once, by the command."""
    path = config.with_name("tiny.podcat")
    result = run("build", "--config", config, "--backend", "cpu", "--output", path)
    lines = result.stdout.splitlines()
    assert lines[0] == "backend cpu: asked for"
    assert re.fullmatch(
        rf"{re.escape(str(path))}: 4 buckets in 0 graphs, {path.stat().st_size:,} bytes, "
        r"every bucket verified \(worst relative error \d\.\de-0\d\)",
        lines[1],
    )
    assert len(lines) == 2
    return path


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes verification find a problem in the buckets for which a condition holds."""

    def install(fails: Callable[[Shape], bool]) -> None:
        def verify(candidate: Catalog, out: Path, progress: build.Progress) -> list[dict[str, Any]]:
            results = []
            for record in candidate.records:
                b = record.bucket
                problem = "full batch: rows beyond the batch were written"
                found = problem if fails((b.batch, b.prefill_len, b.decode_count)) else ""
                results.append({"problem": found, "error": 0.001, "replay_us": 0.0})
            return results

        monkeypatch.setattr(evidence, "verify_in_child", verify)

    return install


def test_every_command_is_known_and_says_what_it_does() -> None:
    assert set(COMMANDS) <= set(main.commands)
    listed = run("--help").stdout
    for name, command in main.commands.items():
        assert re.search(rf"^  {name} +[A-Z]", listed, re.MULTILINE), name
        helped = run(name, "--help").stdout
        assert helped.startswith(f"Usage: main {name} ")
        assert command.help
        assert run(name, "-h").stdout == helped
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{name} {parameter.name}"


def test_version() -> None:
    assert run("--version").stdout == f"podgraph, version {podgraph.__version__}\n"


@pytest.mark.parametrize("command", [["-m", "podgraph"], ["cli.py"]], ids=["module", "launcher"])
def test_runs_from_a_checkout(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *command, "--version"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"podgraph, version {podgraph.__version__}\n", "")


def test_a_launched_process_exits_with_1(tmp_path: Path) -> None:
    command = [sys.executable, "cli.py", "inspect", str(tmp_path / "none.podcat")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"podgraph: {tmp_path / 'none.podcat'}: cannot be read: No such file or directory\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["--nothing"],
        ["buckets"],
        ["buckets", "--config"],
        ["build", "--config", "c.yaml", "--backend", "tpu"],
        ["build", "--config", "c.yaml", "--device", "-1"],
        ["build", "--config", "c.yaml", "--output", "."],
        ["compile", "--config", "c.yaml"],
        ["inspect"],
        ["inspect", "a", "b"],
        ["verify"],
        ["verify", "a", "--seed", "x"],
        ["replay", "a"],
        ["replay", "a", "--trace", "t", "--limit", "0"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    result = run(*arguments, exit_code=2)
    assert result.stdout == ""
    assert re.search(r"^Error: [^\n]+\n\Z", result.stderr, re.MULTILINE)


def test_buckets(config: Path) -> None:
    lines = run("buckets", "--config", config).stdout.splitlines()
    rows = [tuple(re.findall(r"\w+", line)) for line in lines if line.startswith("│")]
    families = ["mixed", "prefill", "prefill", "decode"]
    assert rows == [(*map(str, bucket), family) for bucket, family in zip(BUCKETS, families, strict=True)]
    assert lines[-3:] == [
        "4 buckets: 1 decode, 1 mixed, 2 prefill",
        "dropped 3 combinations: prefill slots without prefill rows",
        "dropped 1 combinations: prefill rows without a prefill slot",
    ]


def test_buckets_as_json(config: Path) -> None:
    got = document("buckets", "-c", config)
    assert got == {
        "buckets": [dict(zip(("batch", "prefill_len", "decode_count"), bucket, strict=True)) for bucket in BUCKETS],
        "families": {"decode": 1, "mixed": 1, "prefill": 2},
        "dropped": DROPPED,
    }


def test_build_as_json_beside_the_working_directory(
    config: Path, catalog: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    got = document("build", "--config", config, "--backend", "cpu")
    assert got.pop("seconds").keys() == {"verify"}
    assert 0 < got.pop("max_error") < 0.01
    assert got == {
        "path": "tiny.podcat",
        "backend": "cpu",
        "reason": "asked for",
        "catalog_bytes": (tmp_path / "tiny.podcat").stat().st_size,
        "buckets": 4,
        "templates": 0,
        "images": 0,
        "reused": 0,
        "note": "",
        "failures": [],
    }
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.podcat"], "something was left behind"
    assert (tmp_path / "tiny.podcat").read_bytes() == catalog.read_bytes(), "two builds differ"


def test_a_catalog_opens_and_serves(catalog: Path) -> None:
    with podgraph.open(catalog).bind() as dispatcher:
        assert dispatcher.plan([0, 1], [0, 1], [0], [1])[0].bucket.decode_count == 2


def test_inspect(catalog: Path) -> None:
    lines = run("inspect", catalog).stdout.splitlines()
    assert lines[0] == f"{catalog}: {catalog.stat().st_size:,} bytes, backend cpu"
    assert lines[1].startswith("spec tiny: 4/1 heads, head_dim 128, page_size 16, bfloat16, NHD")
    rows = [tuple(re.findall(r"[\w.-]+", line)) for line in lines if line.startswith("│")]
    assert [row[:7] for row in rows] == [
        ("tiny", *map(str, bucket), family, "interpreter", "-")
        for bucket, family in zip(BUCKETS, ["mixed", "prefill", "prefill", "decode"], strict=True)
    ]
    assert lines[-1] == "4 buckets: 1 decode, 1 mixed, 2 prefill"


def test_inspect_as_json(catalog: Path) -> None:
    got = document("inspect", catalog)
    content = store.read(catalog)
    assert got["path"] == str(catalog)
    assert got["catalog_bytes"] == catalog.stat().st_size
    assert got["fingerprint"] == {"backend": "cpu", "compute_capability": "", "sm_count": 0, "driver_min": 0}
    assert got["built_with"]["podgraph"] == podgraph.__version__
    assert (got["max_pages"], got["max_kv_len"]) == (512, 8192)
    assert got["families"] == {"decode": 1, "mixed": 1, "prefill": 2}
    assert (got["templates"], got["images"]) == ([], {})
    assert got["specs"]["tiny"]["attention"] == content.specs["tiny"].attention.to_dict()
    assert got["specs"]["tiny"]["regions"] == {region.name: region.size for region in content.specs["tiny"].regions}
    assert [(r["batch"], r["prefill_len"], r["decode_count"]) for r in got["records"]] == BUCKETS
    for record in got["records"]:
        assert (record["spec"], record["variant"], record["template"]) == ("tiny", "interpreter", -1)
        assert 0 < record["max_error"] < 0.01


def test_verify_static(catalog: Path, tmp_path: Path) -> None:
    assert run("verify", "--static", catalog).stdout.splitlines() == [
        "1 specifications: regions and capacities are those that this podgraph plans for",
        f"{catalog}: holds together; nothing was replayed",
    ]
    for_a_gpu = tmp_path / "gpu.podcat"
    store.write(for_a_gpu, make_catalog())
    proven = document("verify", "--static", for_a_gpu)
    assert proven["path"] == str(for_a_gpu)
    assert len(proven["proven"]) == 3


def test_verify(catalog: Path) -> None:
    printed = run("verify", catalog).stdout
    assert re.fullmatch(
        rf"{re.escape(str(catalog))}: 4 of 4 buckets verified, worst relative error \d\.\de-\d\d\n", printed
    )


def test_verify_as_json(catalog: Path) -> None:
    got = document("verify", catalog, "--seed", "7")
    assert (got["path"], got["verified"]) == (str(catalog), 4)
    assert [(b["batch"], b["prefill_len"], b["decode_count"]) for b in got["buckets"]] == BUCKETS
    for bucket in got["buckets"]:
        assert 0 < bucket["error"] <= bucket["bound"] < 0.02
        assert bucket["problem"] == ""
    assert [b["error"] for b in document("verify", catalog, "--seed", "8")["buckets"]] != [
        b["error"] for b in got["buckets"]
    ]


def test_verify_fails_where_a_result_is_wrong(catalog: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from podgraph.planner.interpreter import Interpreter

    right = Interpreter.run

    def wrong(self: Interpreter, q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
        right(self, q, k, v, out, lse)
        if self.prefill_tile == 0:  # the decode-only bucket
            out[0, 0, 0] += 10

    monkeypatch.setattr(Interpreter, "run", wrong)
    result = run("verify", catalog, exit_code=1)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("FAILED tiny (batch=2, prefill_len=0, decode_count=2): full batch: relative error ")
    assert f"{catalog}: 3 of 4 buckets verified" in lines[1]
    got = document("verify", catalog, exit_code=1)
    assert got["verified"] == 3
    assert [bool(b["problem"]) for b in got["buckets"]] == [False, False, False, True]


def test_replay(catalog: Path) -> None:
    printed = run("replay", catalog, "--trace", TRACE, "--limit", "5").stdout
    lines = printed.splitlines()
    counts = [int(re.findall(r"│ +(\d+) +│", line)[0]) for line in lines if line.startswith("│")]
    assert sum(counts) >= 5
    assert re.search(
        r"^5 steps of \d+ requests, [\d,]+ query rows: \d steps in one replay each, \d split$", printed, re.M
    )
    assert re.search(r"^padding: \d+\.\d% of prefill rows and \d+\.\d% of request slots were empty", printed, re.M)
    assert re.match(r"worst relative error \d\.\de-\d\d \(allowed .*\): every step within its bound$", lines[-1])


def test_replay_as_json(catalog: Path) -> None:
    got = document("replay", catalog, "--trace", TRACE, "--limit", "5", "--seed", "3")
    assert (got["path"], got["trace"], got["skipped_rows"]) == (str(catalog), str(TRACE), 0)
    assert (got["steps"], got["failures"]) == (5, 0)
    assert 0 < got["worst_error"] <= got["bound"] < 0.02
    assert got["replays_total"] == sum(got["replays"].values())
    assert got["steps_in_one_replay"] == 5 - sum(got["splits"].values())
    shapes = {f"(batch={b}, prefill_len={p}, decode_count={d})" for b, p, d in BUCKETS}
    assert set(got["replays"]) <= shapes
    assert got == document("replay", catalog, "--trace", TRACE, "--limit", "5", "--seed", "3")


def test_replay_at_another_rate(catalog: Path) -> None:
    slow, fast = (
        document("replay", catalog, "--trace", TRACE, "--limit", "12", "--rate", rate) for rate in ("0.01", "1000")
    )
    assert fast["requests"] > slow["requests"]


def test_replay_fails_where_a_step_is_wrong(catalog: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from podgraph import replay

    monkeypatch.setattr(replay, "_run_step", lambda *_: (0.5, 0.01))
    printed = run("replay", catalog, "--trace", TRACE, "--limit", "2", exit_code=1).stdout
    assert "worst relative error 5.0e-01 (allowed 1.0e-02): 2 steps beyond their bound" in printed
    assert document("replay", catalog, "--trace", TRACE, "--limit", "2", exit_code=1)["failures"] == 2


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["replay", "--trace", TRACE]], ids=lambda c: c[0])
@pytest.mark.parametrize("damage", ["missing", "folder", "empty", "cut", "flipped", "not a catalog"])
def test_a_damaged_catalog_is_one_line(command: list[Any], damage: str, catalog: Path, tmp_path: Path) -> None:
    path, good = tmp_path / "bad.podcat", catalog.read_bytes()
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        flipped = bytearray(good)
        flipped[len(good) // 2] ^= 0xFF
        path.write_bytes(
            {"empty": b"", "cut": good[:-1], "flipped": bytes(flipped), "not a catalog": TRACE.read_bytes()}[damage]
        )
    assert error(command[0], path, *command[1:]).startswith(f"{path}: ")


@pytest.mark.parametrize("command", ["buckets", "build", "compile"])
def test_a_wrong_configuration_is_one_line(command: str, tmp_path: Path) -> None:
    path, output = tmp_path / "bad.yaml", tmp_path / "out"
    path.write_text(CONFIG.replace("num_kv_heads: 1", "num_kv_heads: 3"))
    arguments = [] if command == "buckets" else ["--output", output]
    message = error(command, "--config", path, *arguments)
    assert message == f"{path}: specs.tiny.num_kv_heads: got 3, allowed: a divisor of num_qo_heads=4"
    assert not output.exists()


def test_an_unknown_architecture_is_one_line(config: Path, tmp_path: Path) -> None:
    message = error("compile", "--config", config, "--arch", "sm_42", "--output", tmp_path / "kernels")
    assert message == "arch: got 'sm_42', allowed: sm_80, sm_90a"
    assert not (tmp_path / "kernels").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "none.csv"], "none.csv: "),
        (["--trace", TRACE, "--spec", "other"], "{catalog}: spec: got 'other', allowed: tiny; name one of them"),
    ],
    ids=["trace", "spec"],
)
def test_replay_says_what_is_wrong(catalog: Path, arguments: list[Any], message: str) -> None:
    assert error("replay", catalog, *arguments).startswith(message.format(catalog=catalog))


def test_a_failed_build_writes_nothing(config: Path, tmp_path: Path, failing: Install) -> None:
    failing(lambda bucket: bucket == (2, 64, 0))
    out = tmp_path / "new.podcat"
    message = error("build", "--config", config, "--backend", "cpu", "--output", out)
    assert message == (
        "1 of 4 buckets failed, nothing was written; "
        "tiny (batch=2, prefill_len=64, decode_count=0): full batch: rows beyond the batch were written"
    )
    assert [path.name for path in tmp_path.iterdir()] == [".new.podcat.journal"]


def test_a_failed_build_leaves_the_old_catalog(
    config: Path,
    catalog: Path,
    tmp_path: Path,
    failing: Install,
) -> None:
    out = tmp_path / "old.podcat"
    out.write_bytes(catalog.read_bytes())
    failing(lambda bucket: True)
    for arguments in (["--fresh"], ["--fresh", "--keep-going"]):
        assert "nothing was written" in error(
            "build", "--config", config, "--backend", "cpu", "--output", out, *arguments
        )
        assert out.read_bytes() == catalog.read_bytes()


@pytest.mark.parametrize("failed", BUCKETS[:3], ids=str)
def test_keep_going_writes_what_verified_and_exits_with_1(
    failed: Shape, config: Path, tmp_path: Path, failing: Install
) -> None:
    failing(lambda bucket: bucket == failed)
    out = tmp_path / "part.podcat"
    arguments = ("build", "--config", config, "--backend", "cpu", "--output", out, "--keep-going")
    result = run(*arguments, exit_code=1)
    shape = "(batch={}, prefill_len={}, decode_count={})".format(*failed)
    assert result.stderr == f"left out: tiny {shape}: full batch: rows beyond the batch were written\n"
    assert f"{out}: 3 buckets in 0 graphs" in result.stdout
    kept = [(r.bucket.batch, r.bucket.prefill_len, r.bucket.decode_count) for r in store.read(out).records]
    assert kept == [bucket for bucket in BUCKETS if bucket != failed]
    # what is left serves, whichever bucket is missing
    with podgraph.open(out).bind() as dispatcher:
        assert len(dispatcher.plan([0, 1], [0, 1], [0], [1])) == 1
    got = document(*arguments, exit_code=1)
    assert (got["buckets"], len(got["failures"])) == (3, 1)


def test_a_verifying_process_that_dies_writes_nothing(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "CHILD", "import sys; print('segmentation fault', file=sys.stderr); sys.exit(139)")
    message = error("build", "--config", config, "--backend", "cpu", "--output", tmp_path / "new.podcat")
    assert message == (
        "the verifying process ended with 139 after 0 of 4 buckets, nothing was written: segmentation fault"
    )
    assert list(tmp_path.iterdir()) == []


def test_an_unchanged_build_starts_no_process(
    config: Path, catalog: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "same.podcat"
    out.write_bytes(catalog.read_bytes())
    monkeypatch.setattr(evidence, "CHILD", "import sys; sys.exit(139)")
    arguments = ("build", "--config", config, "--backend", "cpu", "--output", out)
    assert "4 buckets are unchanged and were verified before (--fresh does them again)" in run(*arguments).stdout
    assert document(*arguments)["reused"] == 4
    assert out.read_bytes() == catalog.read_bytes()
    assert "the verifying process ended with 139 after 0 of 4 buckets" in error(*arguments, "--fresh")


def test_a_changed_configuration_is_verified_anew(
    config: Path, catalog: Path, tmp_path: Path, failing: Install
) -> None:
    out, changed = tmp_path / "tiny.podcat", tmp_path / "changed.yaml"
    out.write_bytes(catalog.read_bytes())
    failing(lambda bucket: False)
    changed.write_text(CONFIG.replace("batch: [2, 4]", "batch: [2, 4, 5]").replace("[0, 2]", "[0, 2, 3]"))
    # other buckets make other lists, which every bucket's addresses depend on
    assert document("build", "--config", changed, "--backend", "cpu", "--output", out)["reused"] == 0
    changed.write_text(CONFIG.replace("8192", "4096"))
    assert document("build", "--config", changed, "--backend", "cpu", "--output", out)["reused"] == 0
    changed.write_text(CONFIG.replace("tiny", "other"))
    assert {r.spec for r in store.read(out).records} == {"tiny"}
    run("build", "--config", changed, "--backend", "cpu", "--output", out)
    assert {r.spec for r in store.read(out).records} == {"other"}


def test_an_interrupted_build_goes_on_where_it_stopped(
    config: Path, catalog: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "tiny.podcat"
    arguments = ("build", "--config", config, "--backend", "cpu", "--output", out)
    whole = evidence.CHILD
    monkeypatch.setattr(evidence, "CHILD", DYING)
    assert "the verifying process ended with 9 after 2 of 4 buckets, nothing was written" in error(*arguments)
    assert not out.exists()
    # what a build writes when it dies in the middle of a line
    journal = tmp_path / ".tiny.podcat.journal"
    journal.write_text(journal.read_text() + '{"key": "unfinished')
    monkeypatch.setattr(evidence, "CHILD", whole)
    assert document(*arguments)["reused"] == 2
    assert out.read_bytes() == catalog.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.podcat"]


def test_a_damaged_catalog_is_replaced_and_said(config: Path, tmp_path: Path, failing: Install) -> None:
    out = tmp_path / "tiny.podcat"
    out.write_bytes(b"not a catalog")
    failing(lambda bucket: False)
    got = document("build", "--config", config, "--backend", "cpu", "--output", out)
    assert got["note"].startswith(f"the catalog there cannot be read ({out}: ")
    assert got["reused"] == 0
    assert len(store.read(out).records) == 4
