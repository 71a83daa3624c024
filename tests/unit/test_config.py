"""Configurations: what is read, what is resolved, and one line for everything that is wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from podgraph.config import MAX_BUCKETS, MAX_CONFIG_BYTES, BuildSpec, Workspace, load_config
from podgraph.errors import ConfigError
from podgraph.shapes import AttentionSpec, Bucket

CONFIGS = Path(__file__).parents[2] / "configs"

GOOD = """\
specs:
  small:
    num_qo_heads: 32
    num_kv_heads: 8
    head_dim: 128
    page_size: 16
buckets:
  batch: [4, 2, 4]
  prefill_len: [0, 32]
  decode_count: [2, 0]
workspace:
  max_pages: 64
  max_kv_len: 1024
"""


def load(folder: Path, text: str | bytes) -> BuildSpec:
    path = folder / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(path)


def problem(folder: Path, text: str | bytes) -> str:
    """The one line that is said, without the path that it starts with."""
    with pytest.raises(ConfigError) as raised:
        load(folder, text)
    message, path = str(raised.value), str(folder / "c.yaml")
    assert "\n" not in message
    assert message.startswith(path)
    return message[len(path) :]


def edited(old: str, new: str) -> str:
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new)


def test_everything_that_a_file_says(tmp_path: Path) -> None:
    spec = load(tmp_path, GOOD + "backend: cpu\n")
    assert dict(spec.specs) == {"small": AttentionSpec(32, 8, 128, 16)}
    assert dataclasses.astuple(spec.space) == ((2, 4), (0, 32), (0, 2))
    assert spec.buckets == (Bucket(4, 32, 2), Bucket(4, 32, 0), Bucket(2, 32, 0), Bucket(2, 0, 2))
    assert dict(spec.dropped) == {
        "prefill slots without prefill rows": 3,
        "prefill rows without a prefill slot": 1,
    }
    assert spec.workspace == Workspace(max_pages=64, max_kv_len=1024)
    assert (spec.backend, spec.source) == ("cpu", str(tmp_path / "c.yaml"))


def test_defaults(tmp_path: Path) -> None:
    spec = load(tmp_path, GOOD)
    attention = spec.specs["small"]
    assert spec.backend == "auto"
    assert attention.sm_scale == pytest.approx(128**-0.5)
    assert (attention.dtype, attention.kv_layout, attention.window_left, attention.decode_rows) == (
        "bfloat16",
        "NHD",
        -1,
        1,
    )


def test_several_specifications_share_the_buckets(tmp_path: Path) -> None:
    second = "  other: {num_qo_heads: 8, num_kv_heads: 8, head_dim: 128, page_size: 16, sm_scale: 0.25}\nbuckets:"
    spec = load(tmp_path, edited("buckets:", second))
    assert list(spec.specs) == ["small", "other"]
    assert spec.specs["other"].sm_scale == 0.25


def test_what_was_read_cannot_be_changed(tmp_path: Path) -> None:
    spec = load(tmp_path, GOOD)
    with pytest.raises(TypeError):
        spec.specs["more"] = spec.specs["small"]  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.backend = "cuda"  # type: ignore[misc]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_load(path: Path) -> None:
    spec = load_config(path)
    families = {bucket.family for bucket in spec.buckets}
    assert families == {"decode", "prefill", "mixed"}
    assert spec.backend == "auto"
    for attention in spec.specs.values():
        assert list(attention.limits()) == []


def test_the_shipped_configurations_are_there() -> None:
    assert {"quickstart", "llama3-8b"} <= {path.stem for path in CONFIGS.glob("*.yaml")}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        pytest.param(
            "workspace:", "backends: cpu\nworkspace:", ": backends: unknown key; did you mean 'backend'?", id="top key"
        ),
        pytest.param(
            "head_dim: 128",
            "head_dim: 128\n    head_dimm: 128",
            ": specs.small.head_dimm: unknown key; did you mean 'head_dim'?",
            id="spec key",
        ),
        pytest.param(
            "decode_count: [2, 0]",
            "decode_count: [2, 0]\n  decode_counts: [2]",
            ": buckets.decode_counts: unknown key; did you mean 'decode_count'?",
            id="axis",
        ),
        pytest.param(
            "max_pages: 64",
            "max_pages: 64\n  max_page: 1",
            ": workspace.max_page: unknown key; did you mean 'max_pages'?",
            id="workspace key",
        ),
        pytest.param(
            "max_pages: 64",
            "max_pages: 64\n  zzz: 1",
            ": workspace.zzz: unknown key; allowed: max_pages, max_kv_len",
            id="key like no other",
        ),
        pytest.param("  max_kv_len: 1024\n", "", ": workspace.max_kv_len: missing", id="missing key"),
        pytest.param("    page_size: 16\n", "", ": specs.small.page_size: missing", id="missing spec key"),
        pytest.param(
            "head_dim: 128",
            "head_dim: 'wide'",
            ": specs.small.head_dim: must be a valid integer, got 'wide'",
            id="text",
        ),
        pytest.param(
            "head_dim: 128",
            "head_dim: '128'",
            ": specs.small.head_dim: must be a valid integer, got '128'",
            id="digits",
        ),
        pytest.param(
            "head_dim: 128", "head_dim: 128.0", ": specs.small.head_dim: must be a valid integer, got 128.0", id="float"
        ),
        pytest.param(
            "head_dim: 128", "head_dim: null", ": specs.small.head_dim: must be a valid integer, got None", id="null"
        ),
        pytest.param(
            "batch: [4, 2, 4]", "batch: [4, true]", ": buckets.batch[1]: must be a valid integer, got True", id="bool"
        ),
        pytest.param(
            "batch: [4, 2, 4]", "batch: 4", ": buckets.batch: must be a valid list, got 4", id="number for axis"
        ),
        pytest.param(
            "batch: [4, 2, 4]",
            "batch: {4: 2}",
            ": buckets.batch: must be a valid list, got {4: 2}",
            id="mapping for axis",
        ),
        pytest.param(
            "batch: [4, 2, 4]", "batch: []", ": buckets.batch: list should have at least 1 item", id="empty axis"
        ),
        pytest.param(
            "batch: [4, 2, 4]", "batch: [4, 0]", ": buckets.batch[1]: must be greater than 0, got 0", id="zero batch"
        ),
        pytest.param(
            "decode_count: [2, 0]",
            "decode_count: [2, 0, -4]",
            ": buckets.decode_count[2]: must be greater than or equal to 0, got -4",
            id="negative",
        ),
        pytest.param(
            "prefill_len: [0, 32]",
            "prefill_len: [0, 99999999]",
            ": buckets.prefill_len[1]: must be less than or equal to 16777216, got 99999999",
            id="huge",
        ),
        pytest.param(
            "num_kv_heads: 8",
            "num_kv_heads: 5",
            ": specs.small.num_kv_heads: got 5, allowed: a divisor of num_qo_heads=32",
            id="32 over 5",
        ),
        pytest.param(
            "num_kv_heads: 8",
            "num_kv_heads: 1",
            ": specs.small.num_kv_heads: got 1, allowed: num_qo_heads / num_kv_heads",
            id="group of 32",
        ),
        pytest.param(
            "head_dim: 128",
            "head_dim: 96",
            ": specs.small.head_dim: got 96, allowed: 64 or 128 or 256",
            id="head_dim",
        ),
        pytest.param(
            "page_size: 16", "page_size: 129", ": specs.small.page_size: got 129, allowed: 1 to 128", id="page_size"
        ),
        pytest.param(
            "page_size: 16",
            "page_size: 16\n    dtype: float32",
            ": specs.small.dtype: must be 'bfloat16' or 'float16', got 'float32'",
            id="dtype",
        ),
        pytest.param(
            "page_size: 16",
            "page_size: 16\n    kv_layout: HNDN",
            ": specs.small.kv_layout: must be 'NHD' or 'HND', got 'HNDN'",
            id="layout",
        ),
        pytest.param(
            "page_size: 16",
            "page_size: 16\n    kv_dtype: float16",
            ": specs.small.kv_dtype: got 'float16', allowed: the dtype (bfloat16) or float8_e4m3fn",
            id="kv_dtype",
        ),
        pytest.param(
            "page_size: 16",
            "page_size: 16\n    k_scale: 0.5",
            ": specs.small.k_scale: got 0.5, allowed: 1 (only float8_e4m3fn caches are scaled)",
            id="k_scale",
        ),
        pytest.param(
            "page_size: 16",
            "page_size: 16\n    window_left: -2",
            ": specs.small.window_left: must be greater than or equal to -1, got -2",
            id="window below -1",
        ),
        pytest.param(
            "page_size: 16",
            "page_size: 16\n    logits_soft_cap: -30.0",
            ": specs.small.logits_soft_cap: must be greater than or equal to 0, got -30.0",
            id="soft cap",
        ),
        pytest.param(
            "page_size: 16",
            "page_size: 16\n    sm_scale: -0.1",
            ": specs.small.sm_scale: got -0.1, allowed: a positive number",
            id="scale",
        ),
        pytest.param(
            "page_size: 16",
            "page_size: 16\n    sm_scale: .nan",
            ": specs.small.sm_scale: must be a finite number, got nan",
            id="scale NaN",
        ),
        pytest.param(
            "page_size: 16",
            "page_size: 16\n    decode_rows: 5",
            ": specs.small.num_kv_heads: got 8, allowed: num_qo_heads / num_kv_heads * decode_rows <= 16",
            id="decode_rows",
        ),
        pytest.param(
            "max_kv_len: 1024",
            "max_kv_len: 1025",
            ": workspace.max_kv_len: got 1025, allowed: at most max_pages * page_size = 1024",
            id="KV beyond the pages",
        ),
        pytest.param(
            "max_pages: 64\n  max_kv_len: 1024",
            "max_pages: 5\n  max_kv_len: 16",
            ": workspace.max_pages: got 5, allowed: at least 6",
            id="too few pages",
        ),
        pytest.param(
            "max_pages: 64", "max_pages: 0", ": workspace.max_pages: must be greater than 0, got 0", id="no page"
        ),
        pytest.param(
            "workspace:",
            "backend: gpu\nworkspace:",
            ": backend: must be 'auto', 'cuda' or 'cpu', got 'gpu'",
            id="backend",
        ),
        pytest.param(
            "  decode_count: [2, 0]",
            "  decode_count: [9]",
            ": buckets: no combination of batch, prefill_len and decode_count is reachable",
            id="nothing reachable",
        ),
        pytest.param(
            "  batch: [4, 2, 4]",
            "  batch: [4]\n  batch: [2]",
            ":9:3: not valid YAML: duplicate key 'batch'",
            id="duplicate key",
        ),
        pytest.param(
            "prefill_len: [0, 32]",
            "prefill_len: &x [0, 32]\n  more: *x",
            ":10:9: not valid YAML: anchors and aliases are not supported",
            id="alias",
        ),
        pytest.param(
            "workspace:",
            "<<: {max_pages: 3}\nworkspace:",
            ":11:1: not valid YAML: could not determine a constructor",
            id="merge key",
        ),
        pytest.param(
            "workspace:", "[1, 2]: 3\nworkspace:", ":11:1: not valid YAML: a key must be a plain word", id="list as key"
        ),
        pytest.param(
            "workspace:",
            "backend: !!python/name:os.system\nworkspace:",
            ":11:10: not valid YAML: could not determine a constructor",
            id="python tag",
        ),
        pytest.param(
            "workspace:", "backend: 2001-99-99\nworkspace:", ": not valid YAML: ValueError", id="impossible date"
        ),
        pytest.param("batch: [4, 2, 4]", "batch: [4", ":9:14: not valid YAML: ", id="bracket"),
        pytest.param("specs:", "specs: x\nspecs2:", ": specs: must be a valid dictionary, got 'x'", id="specs is text"),
        pytest.param("workspace:", "1: 2\nworkspace:", ": [1]: keys should be strings, got 1", id="number as key"),
    ],
)
def test_says_where_and_what(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert problem(tmp_path, edited(old, new)).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": expected a mapping with keys specs, buckets, workspace, backend, got None"),
        ("hello", ": expected a mapping with keys specs, buckets, workspace, backend, got 'hello'"),
        ("- 1\n- 2\n", ": expected a mapping with keys specs, buckets, workspace, backend, got [1, 2]"),
        ("{}", ": specs: missing"),
        ("--- 1\n--- 2", ":2:1: not valid YAML: "),
        ("a: b: c", ":1:5: not valid YAML: mapping values are not allowed here"),
        (b"[" * 5000, ": not valid YAML: RecursionError"),
        (b"x: " + b"9" * 5000, ": not valid YAML: ValueError"),
        (b"#" * (MAX_CONFIG_BYTES + 1), f": {MAX_CONFIG_BYTES + 1} bytes, at most {MAX_CONFIG_BYTES} are read"),
    ],
    ids=[
        "empty",
        "text",
        "list",
        "no keys",
        "two documents",
        "not YAML",
        "nested",
        "a number of 5000 digits",
        "too long",
    ],
)
def test_refuses_files_of_something_else(tmp_path: Path, text: str | bytes, message: str) -> None:
    assert problem(tmp_path, text).startswith(message)


def test_a_long_value_is_cut(tmp_path: Path) -> None:
    assert len(problem(tmp_path, "x" * 5000)) < 200
    assert len(problem(tmp_path, edited("head_dim: 128", f"head_dim: {'x' * 5000}"))) < 200


def test_too_many_buckets_are_counted_before_they_are_made(tmp_path: Path) -> None:
    text = edited("batch: [4, 2, 4]", f"batch: {list(range(1, 1025))}")
    text = text.replace("prefill_len: [0, 32]", f"prefill_len: {list(range(1024))}")
    combinations = 1024 * 1024 * 2
    assert problem(tmp_path, text) == f": buckets: {combinations} combinations, at most {MAX_BUCKETS} are enumerated"


def test_too_long_an_axis(tmp_path: Path) -> None:
    message = problem(tmp_path, edited("batch: [4, 2, 4]", f"batch: {list(range(1, 1026))}"))
    assert message.startswith(": buckets.batch: list should have at most 1024 items")


def test_too_many_specifications(tmp_path: Path) -> None:
    more = "".join(f"  s{i}: {{num_qo_heads: 8, num_kv_heads: 8, head_dim: 128, page_size: 16}}\n" for i in range(16))
    message = problem(tmp_path, edited("buckets:", f"{more}buckets:"))
    assert message.startswith(": specs: dictionary should have at most 16 items")


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "none.yaml")
    assert str(raised.value) == f"{tmp_path / 'none.yaml'}: cannot be read: No such file or directory"
    with pytest.raises(ConfigError) as raised:
        load_config(str(tmp_path))
    assert str(raised.value) == f"{tmp_path}: cannot be read: Is a directory"
