"""``podgraph buckets`` and ``podgraph config``: what is printed, what is written, how each fails."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from podgraph.cli import main
from podgraph.config import load_config, parse_config
from podgraph.shapes import ModelShape

CONFIG = """\
specs:
  tiny: {num_qo_heads: 4, num_kv_heads: 1, head_dim: 128, page_size: 16}
buckets:
  batch: [2, 4]
  prefill_len: [0, 64]
  decode_count: [0, 2]
  families: [decode, mixed]
workspace: {max_pages: 512, max_kv_len: 8192}
"""
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


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


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL))
    return path


def test_buckets_are_listed_counted_and_their_absence_explained(config: Path) -> None:
    lines = run("buckets", "--config", config).stdout.splitlines()
    assert [re.findall(r"\w+", line) for line in lines if line.startswith("│")] == [
        ["4", "64", "2", "mixed"],
        ["2", "0", "2", "decode"],
    ]
    assert lines[-4:] == [
        "2 buckets: 1 decode, 1 mixed, 0 prefill",
        "dropped 3 combinations: prefill slots without prefill rows",
        "dropped 2 combinations: no prefill in families",
        "dropped 1 combinations: prefill rows without a prefill slot",
    ]


def test_buckets_as_json_say_the_same(config: Path) -> None:
    assert json.loads(run("buckets", "--config", config, "--json").stdout) == {
        "buckets": [
            {"batch": 4, "prefill_len": 64, "decode_count": 2},
            {"batch": 2, "prefill_len": 0, "decode_count": 2},
        ],
        "families": {"decode": 1, "mixed": 1, "prefill": 0},
        "dropped": {
            "prefill slots without prefill rows": 3,
            "no prefill in families": 2,
            "prefill rows without a prefill slot": 1,
        },
    }


def test_ten_thousand_buckets(tmp_path: Path) -> None:
    path = tmp_path / "many.yaml"
    axes = "{batch: {start: 101, stop: 200, step: 1}, prefill_len: {start: 1, stop: 100, step: 1}, decode_count: [1]"
    path.write_text(re.sub(r"buckets:\n(  .+\n)+", f"buckets: {axes}, families: [mixed]}}\n", CONFIG))
    lines = run("buckets", "--config", path).stdout.splitlines()
    assert sum(line.startswith("│") for line in lines) == 10_000
    assert lines[-1] == "10000 buckets: 0 decode, 10000 mixed, 0 prefill"
    document = json.loads(run("buckets", "--config", path, "--json").stdout)
    assert len({tuple(bucket.values()) for bucket in document["buckets"]}) == 10_000
    assert document["families"] == {"decode": 0, "mixed": 10_000, "prefill": 0}
    assert document["dropped"] == {}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("head_dim", "head_dimm", "specs.tiny.head_dimm: unknown key; did you mean 'head_dim'?"),
        ("num_kv_heads: 1", "num_kv_heads: 3", "specs.tiny.num_kv_heads: got 3, allowed: a divisor of num_qo_heads=4"),
        (
            "max_pages: 512",
            "max_pages: 4",
            "workspace.max_kv_len: got 8192, allowed: at most max_pages * page_size = 64",
        ),
        ("specs:", "specs: [", "line 3, column "),
    ],
    ids=["key", "heads", "workspace", "YAML"],
)
@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
def test_a_wrong_configuration_is_one_line(config: Path, old: str, new: str, message: str, as_json: list[str]) -> None:
    config.write_text(CONFIG.replace(old, new, 1))
    assert error("buckets", "--config", config, *as_json).startswith(f"{config}: {message}")


def test_a_configuration_that_cannot_be_read(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none", "No such file or directory"), (tmp_path, "Is a directory")):
        assert error("buckets", "--config", path) == f"{path}: cannot be read: {reason}"


def test_a_model_is_written_to_the_standard_output(model: Path) -> None:
    spec = parse_config(run("config", "--for-model", model).stdout.encode(), "stdout")
    assert [(name, s.num_qo_heads, s.num_kv_heads, s.head_dim) for name, s in spec.specs.items()] == [
        ("full", 32, 8, 128)
    ]
    assert spec.model == ModelShape(32, 4096, 14336, 128256)
    assert spec.workspace.max_kv_len == 131072


def test_a_model_is_written_to_a_file(model: Path, tmp_path: Path) -> None:
    text = run("config", "--for-model", model).stdout
    path = tmp_path / "model.yaml"
    path.write_text("before")
    said = run("config", "--for-model", model, "--output", path).stdout
    assert said == f"{path}: written; list its buckets with `podgraph buckets --config {path}`\n"
    assert path.read_text() == text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.yaml"]
    assert "14 buckets: 2 decode, 6 mixed, 6 prefill" in run("buckets", "--config", path).stdout.splitlines()


def test_a_model_as_json(model: Path, tmp_path: Path) -> None:
    text = run("config", "--for-model", model).stdout
    assert json.loads(run("config", "--for-model", model, "--json").stdout) == {"path": None, "config": text}
    path = tmp_path / "model.yaml"
    said = run("config", "--for-model", model, "-o", path, "--json").stdout
    assert json.loads(said) == {"path": str(path), "config": text}
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("tp", "heads", "shape"),
    [
        (1, (32, 8), ModelShape(32, 4096, 14336, 128256)),
        (2, (16, 4), ModelShape(32, 4096, 7168, 64128)),
        (8, (4, 1), ModelShape(32, 4096, 1792, 16032)),
        (32, (1, 1), ModelShape(32, 4096, 448, 4008)),
    ],
    ids=str,
)
def test_tensor_parallelism(model: Path, tmp_path: Path, tp: int, heads: tuple[int, int], shape: ModelShape) -> None:
    path = tmp_path / "rank.yaml"
    run("config", "--for-model", model, "--tp", tp, "-o", path)
    spec = load_config(path)
    assert (spec.specs["full"].num_qo_heads, spec.specs["full"].num_kv_heads) == heads
    assert spec.model == shape
    assert (f"One of {tp} tensor-parallel ranks" in path.read_text()) == (tp > 1)
    assert ("Every rank holds one of the 8 KV heads" in path.read_text()) == (tp > 8)


@pytest.mark.parametrize(
    ("tp", "allowed"),
    [(3, "a divisor of num_attention_heads = 32"), (64, "a divisor of num_attention_heads = 32")],
    ids=str,
)
def test_heads_that_cannot_be_shared(model: Path, tmp_path: Path, tp: int, allowed: str) -> None:
    path = tmp_path / "rank.yaml"
    assert error("config", "--for-model", model, "--tp", tp, "-o", path) == f"{model}: tp: got {tp}, allowed: {allowed}"
    assert not path.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON: "),
        ("[]", "got [], allowed: a model's config.json, an object with num_attention_heads"),
        ("{}", "num_attention_heads: missing; add it from the model's documentation"),
        (json.dumps(MODEL | {"kv_lora_rank": 512}), "kv_lora_rank: multi-head latent attention (MLA) is not supported"),
        (json.dumps(MODEL | {"head_dim": 80}), "head_dim: no kernel serves it, got 80, allowed: 64 or 128 or 256"),
    ],
    ids=["no JSON", "list", "no heads", "latent attention", "head_dim"],
)
def test_a_model_that_is_refused_leaves_the_file_as_it_was(tmp_path: Path, text: str, message: str) -> None:
    model, path = tmp_path / "config.json", tmp_path / "model.yaml"
    model.write_text(text)
    path.write_text("before")
    assert error("config", "--for-model", model, "-o", path).startswith(f"{model}: {message}")
    assert path.read_text() == "before"


def test_a_model_that_cannot_be_read(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none.json", "No such file or directory"), (tmp_path, "Is a directory")):
        assert error("config", "--for-model", path) == f"{path}: cannot be read: {reason}"


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_file_is_written_whole_or_not_at_all(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "model.yaml"
    path.write_text("before")
    monkeypatch.setattr(os, step, full)
    message = error("config", "--for-model", model, "-o", path)
    assert message == f"{path}: cannot be written: No space left on device"
    assert path.read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.yaml"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none/model.yaml", "No such file or directory"),
        ("config.json/model.yaml", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("pipe", "not a regular file"),
        ("", "not a file name; name a file in a folder"),
    ],
    ids=["no folder", "below a file", "long name", "pipe", "no name"],
)
def test_places_that_cannot_be_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    assert error("config", "--for-model", model, "-o", name) == f"{Path(name)}: cannot be written: {reason}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "pipe"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["buckets"],
        ["buckets", "c.yaml"],
        ["buckets", "--config"],
        ["buckets", "--config", "c.yaml", "--tp", "2"],
        ["config"],
        ["config", "config.json"],
        ["config", "--for-model", "c.json", "--tp", "0"],
        ["config", "--for-model", "c.json", "--tp", "two"],
        ["config", "--for-model", "c.json", "--output", "."],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    result = run(*arguments, exit_code=2)
    assert result.stdout == ""
    assert re.search(r"^Error: [^\n]+\n\Z", result.stderr, re.MULTILINE)
