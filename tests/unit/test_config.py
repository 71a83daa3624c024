"""Configurations: what is read, what is resolved, and one line for everything that is wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podgraph.config import MAX_BUCKETS, BuildSpec, Workspace, load_config, parse_config
from podgraph.errors import ConfigError
from podgraph.shapes import AttentionSpec, Bucket, ModelShape
from podgraph.strict_yaml import MAX_BYTES

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
    assert (spec.space.batch, spec.space.prefill_len, spec.space.decode_count) == ((2, 4), (0, 32), (0, 2))
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


def test_the_shape_of_the_model(tmp_path: Path) -> None:
    model = "model: {num_layers: 32, hidden_size: 4096, intermediate_size: 14336, vocab_size: 128256}\n"
    assert load(tmp_path, GOOD + model).model == ModelShape(32, 4096, 14336, 128256)
    assert load(tmp_path, GOOD + "model: null\n").model is None
    assert load(tmp_path, GOOD).model is None


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


WRONG = {
    "top key": ("workspace:", "backends: cpu\nworkspace:", "backends: unknown key; did you mean 'backend'?"),
    "required top key": ("specs:", "spec:", "spec: unknown key; did you mean 'specs'?"),
    "spec key": ("head_dim: 128", "head_dimm: 128", "specs.small.head_dimm: unknown key; did you mean 'head_dim'?"),
    "axis": ("decode_count:", "decode_counts:", "buckets.decode_counts: unknown key; did you mean 'decode_count'?"),
    "workspace key": ("max_pages: 64", "max_page: 64", "workspace.max_page: unknown key; did you mean 'max_pages'?"),
    "key like no other": (
        "max_pages: 64",
        "max_pages: 64\n  zzz: 1",
        "workspace.zzz: unknown key, allowed: max_pages, max_kv_len, max_bytes",
    ),
    "key with a newline": (
        "workspace:",
        '"a\\nb": 1\nworkspace:',
        "'a\\nb': unknown key, allowed: specs, buckets, workspace, model, backend",
    ),
    "number as key": (
        "workspace:",
        "1: 2\nworkspace:",
        "1: unknown key, allowed: specs, buckets, workspace, model, backend",
    ),
    "merge key": (
        "workspace:",
        "<<: {max_pages: 3}\nworkspace:",
        "<<: unknown key, allowed: specs, buckets, workspace, model, backend",
    ),
    "missing key": ("  max_kv_len: 1024\n", "", "workspace.max_kv_len: missing"),
    "missing spec key": ("    page_size: 16\n", "", "specs.small.page_size: missing"),
    "missing axis": ("  batch: [4, 2, 4]\n", "", "buckets.batch: missing; buckets of the mixed family need it"),
    "text": (
        "head_dim: 128",
        "head_dim: wide",
        "specs.small.head_dim: must be an integer, got 'wide', allowed: 64 or 128 or 256",
    ),
    "digits": (
        "head_dim: 128",
        "head_dim: '128'",
        "specs.small.head_dim: must be an integer, got '128', allowed: 64 or 128 or 256",
    ),
    "float": (
        "head_dim: 128",
        "head_dim: 128.0",
        "specs.small.head_dim: must be an integer, got 128.0, allowed: 64 or 128 or 256",
    ),
    "null": (
        "head_dim: 128",
        "head_dim: null",
        "specs.small.head_dim: must be an integer, got null, allowed: 64 or 128 or 256",
    ),
    "bool": (
        "batch: [4, 2, 4]",
        "batch: [4, true]",
        "buckets.batch[1]: must be an integer, got true, allowed: 1 to 16777216",
    ),
    "scale is bool": (
        "page_size: 16",
        "page_size: 16\n    sm_scale: true",
        "specs.small.sm_scale: must be a number, got true, allowed: 1e-15 to 1e+15",
    ),
    "scale is text": (
        "page_size: 16",
        "page_size: 16\n    sm_scale: '0.5'",
        "specs.small.sm_scale: must be a number, got '0.5', allowed: 1e-15 to 1e+15",
    ),
    "number for axis": (
        "batch: [4, 2, 4]",
        "batch: 4",
        "buckets.batch: must be an axis, got 4, allowed: a list, {start, stop, step}, or {geometric: {",
    ),
    "mapping for axis": (
        "batch: [4, 2, 4]",
        "batch: {4: 2}",
        "buckets.batch.4: unknown key, allowed: start, stop, step",
    ),
    "empty axis": (
        "batch: [4, 2, 4]",
        "batch: []",
        "buckets.batch: must not be empty, got [], allowed: one value at least",
    ),
    "zero batch": (
        "batch: [4, 2, 4]",
        "batch: [4, 0]",
        "buckets.batch[1]: out of range, got 0, allowed: 1 to 16777216",
    ),
    "negative": (
        "decode_count: [2, 0]",
        "decode_count: [2, 0, -4]",
        "buckets.decode_count[2]: out of range, got -4, allowed: 0 to 16777216",
    ),
    "huge": (
        "prefill_len: [0, 32]",
        "prefill_len: [0, 99999999]",
        "buckets.prefill_len[1]: out of range, got 99999999, allowed: 0 to 16777216",
    ),
    "steps downwards": (
        "batch: [4, 2, 4]",
        "batch: {start: 4, stop: 2, step: 1}",
        "buckets.batch.start: larger than stop, got 4, allowed: at most 2",
    ),
    "too many steps": (
        "batch: [4, 2, 4]",
        "batch: {start: 1, stop: 5000, step: 1}",
        "buckets.batch.step: too small, got 1, allowed: at most 1024 values",
    ),
    "too small a ratio": (
        "batch: [4, 2, 4]",
        "batch: {geometric: {start: 1, stop: 64, ratio: 1.0001}}",
        "buckets.batch.geometric.ratio: too small, got 1.0001, allowed: at most 1024 values",
    ),
    "unknown family": (
        "decode_count: [2, 0]",
        "decode_count: [2, 0]\n  families: [decode, both]",
        "buckets.families[1]: unknown value, got 'both', allowed: decode or mixed or prefill",
    ),
    "32 over 5": (
        "num_kv_heads: 8",
        "num_kv_heads: 5",
        "specs.small.num_kv_heads: got 5, allowed: a divisor of num_qo_heads=32",
    ),
    "group of 32": (
        "num_kv_heads: 8",
        "num_kv_heads: 1",
        "specs.small.num_kv_heads: got 1, allowed: num_qo_heads / num_kv_heads * decode_rows <= 16",
    ),
    "head_dim": (
        "head_dim: 128",
        "head_dim: 96",
        "specs.small.head_dim: not supported, got 96, allowed: 64 or 128",
    ),
    "page_size": ("page_size: 16", "page_size: 129", "specs.small.page_size: out of range, got 129, allowed: 1 to 128"),
    "dtype": (
        "page_size: 16",
        "page_size: 16\n    dtype: float32",
        "specs.small.dtype: unknown value, got 'float32', allowed: bfloat16 or float16",
    ),
    "layout": (
        "page_size: 16",
        "page_size: 16\n    kv_layout: HNDN",
        "specs.small.kv_layout: unknown value, got 'HNDN', allowed: NHD or HND",
    ),
    "kv_dtype": (
        "page_size: 16",
        "page_size: 16\n    kv_dtype: float16",
        "specs.small.kv_dtype: got 'float16', allowed: the dtype (bfloat16) or float8_e4m3fn",
    ),
    "k_scale": (
        "page_size: 16",
        "page_size: 16\n    k_scale: 0.5",
        "specs.small.k_scale: got 0.5, allowed: 1 (only float8_e4m3fn caches are scaled)",
    ),
    "window": (
        "page_size: 16",
        "page_size: 16\n    window_left: -2",
        "specs.small.window_left: out of range, got -2, allowed: -1 to 16777216",
    ),
    "soft cap": (
        "page_size: 16",
        "page_size: 16\n    logits_soft_cap: -30.0",
        "specs.small.logits_soft_cap: out of range, got -30.0, allowed: 0 (none) or 1e-15 to 1e+15",
    ),
    "scale": (
        "page_size: 16",
        "page_size: 16\n    sm_scale: -0.1",
        "specs.small.sm_scale: out of range, got -0.1, allowed: 1e-15 to 1e+15",
    ),
    "scale NaN": (
        "page_size: 16",
        "page_size: 16\n    sm_scale: .nan",
        "specs.small.sm_scale: out of range, got nan, allowed: 1e-15 to 1e+15",
    ),
    "scale zero": (
        "page_size: 16",
        "page_size: 16\n    sm_scale: 0",
        "specs.small.sm_scale: out of range, got 0, allowed: 1e-15 to 1e+15",
    ),
    "decode_rows": (
        "page_size: 16",
        "page_size: 16\n    decode_rows: 5",
        "specs.small.num_kv_heads: got 8, allowed: num_qo_heads / num_kv_heads * decode_rows <= 16",
    ),
    "KV beyond the pages": (
        "max_kv_len: 1024",
        "max_kv_len: 1025",
        "workspace.max_kv_len: got 1025, allowed: at most max_pages * page_size = 1024 (specs.small)",
    ),
    "too few pages": (
        "max_pages: 64\n  max_kv_len: 1024",
        "max_pages: 5\n  max_kv_len: 16",
        "workspace.max_pages: got 5, allowed: at least 6",
    ),
    "prefill beyond the KV": (
        "max_kv_len: 1024",
        "max_kv_len: 4",
        "buckets.prefill_len: the largest value is beyond the workspace, got 32, allowed: at most 16",
    ),
    "no page": ("max_pages: 64", "max_pages: 0", "workspace.max_pages: out of range, got 0, allowed: 1 to 16777216"),
    "unknown unit": (
        "max_pages: 64",
        "max_pages: 64\n  max_bytes: 5 TB",
        "workspace.max_bytes: unknown unit, got '5 TB', allowed: a number of bytes, or such as 512 MiB",
    ),
    "backend": (
        "workspace:",
        "backend: gpu\nworkspace:",
        "backend: unknown value, got 'gpu', allowed: auto or cuda or cpu",
    ),
    "nothing reachable": (
        "decode_count: [2, 0]",
        "decode_count: [9]",
        "buckets.batch: no mixed bucket has a slot for prefill, got 4 at most",
    ),
    "duplicate key": ("  batch: [4, 2, 4]", "  batch: [4]\n  batch: [2]", "buckets.batch: duplicate key (line 9)"),
    "anchor": (
        "prefill_len: [0, 32]",
        "prefill_len: &x [0, 32]",
        "buckets.prefill_len: anchors and aliases are not supported (line 9)",
    ),
    "alias": (
        "prefill_len: [0, 32]",
        "prefill_len: *x",
        "buckets.prefill_len: anchors and aliases are not supported (line 9)",
    ),
    "list as key": ("workspace:", "[1, 2]: 3\nworkspace:", "a key must be a word (line 10)"),
    "tag": (
        "workspace:",
        "backend: !!bool foo\nworkspace:",
        "backend: tags are not supported, got 'tag:yaml.org,2002:bool' (line 11)",
    ),
    "python tag": (
        "workspace:",
        "backend: !!python/name:os.system\nworkspace:",
        "backend: tags are not supported, got 'tag:yaml.org,2002:python/name:os.system'",
    ),
    "impossible date": ("workspace:", "backend: 2001-99-99\nworkspace:", "backend: unknown value, got '2001-99-99'"),
    "bracket": ("batch: [4, 2, 4]", "batch: [4", "line 9, column 14: not valid YAML: "),
    "misspelt step": (
        "batch: [4, 2, 4]",
        "batch: {start: 1, stop: 4, setp: 1}",
        "buckets.batch.setp: unknown key; did you mean 'step'?",
    ),
    "misspelt form": (
        "batch: [4, 2, 4]",
        "batch: {geometrc: {start: 1, stop: 4, ratio: 2}}",
        "buckets.batch.geometrc: unknown key; did you mean 'geometric'?",
    ),
    "misspelt ratio": (
        "batch: [4, 2, 4]",
        "batch: {geometric: {start: 1, stop: 4, ration: 2}}",
        "buckets.batch.geometric.ration: unknown key; did you mean 'ratio'?",
    ),
    "two forms": (
        "batch: [4, 2, 4]",
        "batch: {geometric: {start: 1, stop: 4, ratio: 2}, step: 1}",
        "buckets.batch.step: unknown key, allowed: geometric",
    ),
    "ratio of 1": (
        "batch: [4, 2, 4]",
        "batch: {geometric: {start: 1, stop: 4, ratio: 1}}",
        "buckets.batch.geometric.ratio: out of range, got 1, allowed: a number above 1",
    ),
    "text for families": (
        "decode_count: [2, 0]",
        "decode_count: [2, 0]\n  families: mixed",
        "buckets.families: must be a list, got 'mixed', allowed: a list of decode, mixed, prefill",
    ),
    "no family": (
        "decode_count: [2, 0]",
        "decode_count: [2, 0]\n  families: []",
        "buckets.families: must not be empty, got [], allowed: one value at least",
    ),
    "capital letter": ("workspace:", "Workspace:", "Workspace: unknown key; did you mean 'workspace'?"),
    "dash in a key": (
        "max_pages: 64",
        "max-pages: 64",
        "workspace.max-pages: unknown key; did you mean 'max_pages'?",
    ),
    "spec is null": (
        "buckets:",
        "  other:\nbuckets:",
        "specs.other: must be a mapping, got null, allowed: num_qo_heads, num_kv_heads, ",
    ),
    "name of a spec": ("  small:", "  '':", "specs: not a name, got '', allowed: 1 to 256 characters, all printable"),
    "more heads than any model": (
        "num_qo_heads: 32",
        "num_qo_heads: 1025",
        "specs.small.num_qo_heads: out of range, got 1025, allowed: 1 to 1024",
    ),
    "more decode rows than a tile": (
        "page_size: 16",
        "page_size: 16\n    decode_rows: 17",
        "specs.small.decode_rows: out of range, got 17, allowed: 1 to 16",
    ),
    "scale that is 0 in float32": (
        "page_size: 16",
        "page_size: 16\n    sm_scale: 1e-60",
        "specs.small.sm_scale: out of range, got 1e-60, allowed: 1e-15 to 1e+15",
    ),
    "cap that is infinite in float32": (
        "page_size: 16",
        "page_size: 16\n    logits_soft_cap: 1e300",
        "specs.small.logits_soft_cap: out of range, got 1e+300, allowed: 0 (none) or 1e-15 to 1e+15",
    ),
    "digits that are no number": (
        "page_size: 16",
        f"page_size: 16\n    sm_scale: {'1' * 20_000}x",
        "specs.small.sm_scale: must be a number, got '1111",
    ),
    "batch beyond the pages": (
        "batch: [4, 2, 4]",
        "batch: [4, 2000]",
        "workspace.max_pages: got 64, allowed: at least 2002, so that every request of the largest bucket has a page",
    ),
    "unit without a number": (
        "max_pages: 64",
        "max_pages: 64\n  max_bytes: MiB",
        "workspace.max_bytes: must be a size, got 'MiB', allowed: a number of bytes, or such as 512 MiB",
    ),
    "more memory than any machine": (
        "max_pages: 64",
        "max_pages: 64\n  max_bytes: 999999999999999 GiB",
        "workspace.max_bytes: out of range, got '999999999999999 GiB', allowed: 1 B to 1048576 GiB",
    ),
    "merge key with an anchor": (
        "workspace:",
        "<<: *x\nworkspace:",
        "<<: anchors and aliases are not supported (line 11)",
    ),
    "anchor on a key": ("workspace:", "&x workspace:", "anchors and aliases are not supported (line 11)"),
    "alias for a key": ("workspace:", "*x : 1\nworkspace:", "a key must be a word (line 10)"),
    "duplicate top key": (
        "workspace:",
        "workspace: {max_pages: 1, max_kv_len: 1}\nworkspace:",
        "workspace: duplicate key (line 12)",
    ),
    "duplicate quoted key": ("max_pages: 64", "max_pages: 64\n  'max_pages': 65", "workspace.max_pages: duplicate key"),
    "terminal codes": (
        "page_size: 16",
        'page_size: "a\\nb\\e[31m"',
        "specs.small.page_size: must be an integer, got 'a\\nb\\x1b[31m', allowed: 1 to 128",
    ),
    "half a character": ("  small:", '  "\\ud800":', "specs: not a name, got '\\ud800'"),
    "no character": ("  small:", '  "\\U00110000":', "line 2: not valid YAML: an escape that is no character"),
    "a character of 32 bits": (
        "  small:",
        '  "\\UFFFFFFFF":',
        "line 2: not valid YAML: an escape that is no character",
    ),
    "NUL": ("  small:", "  # ä\n  sm\0ll:", "line 3: not valid YAML: special characters are not allowed"),
    "tab": (
        "    num_qo_heads: 32",
        "\tnum_qo_heads: 32",
        "line 3, column 1: not valid YAML: found character '\\t'",
    ),
    "model key": (
        "workspace:",
        "model: {num_layer: 32}\nworkspace:",
        "model.num_layer: unknown key; did you mean 'num_layers'?",
    ),
    "model size missing": (
        "workspace:",
        "model: {num_layers: 32, hidden_size: 4096, vocab_size: 32000}\nworkspace:",
        "model.intermediate_size: missing",
    ),
    "no layers": (
        "workspace:",
        "model: {num_layers: 0, hidden_size: 4096, intermediate_size: 1, vocab_size: 1}\nworkspace:",
        "model.num_layers: out of range, got 0, allowed: 1 to 16777216",
    ),
    "model is text": (
        "workspace:",
        "model: llama\nworkspace:",
        "model: must be a mapping, got 'llama', allowed: num_layers, hidden_size, intermediate_size, vocab_size",
    ),
    "specs is text": ("specs:\n  small:", "specs: x\nspec:\n  small:", "spec: unknown key, allowed: specs, buckets"),
}


@pytest.mark.parametrize(("old", "new", "message"), WRONG.values(), ids=WRONG)
def test_says_where_and_what(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert problem(tmp_path, edited(old, new)).startswith(f": {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a mapping, got null, allowed: specs, buckets, workspace, model, backend"),
        ("# nothing", "must be a mapping, got null, allowed: specs, buckets, workspace, model, backend"),
        ("hello", "must be a mapping, got 'hello', allowed: specs, buckets, workspace, model, backend"),
        ("- 1\n- 2\n", "must be a mapping, got [1, 2], allowed: specs, buckets, workspace, model, backend"),
        ("{}", "specs: missing"),
        ("--- 1\n--- 2", "a second document (line 1)"),
        ("a: b: c", "line 1, column 5: not valid YAML: mapping values are not allowed here"),
        ("a: *x", "a: anchors and aliases are not supported (line 1)"),
        (b"\x7fELF\x02\x01\x01\x00", "line 1: not valid YAML: special characters are not allowed"),
        (b"\x00\x01", "line 1: not valid YAML: special characters are not allowed"),
        (b"specs: \xff\xfe", "not UTF-8 text (byte 7)"),
        (GOOD.encode("utf-16"), "not UTF-8 text (byte 0)"),
        (
            f"%YAML 1.{'1' * 5000}\n---\n{GOOD}",
            "line 1: not valid YAML: an escape that is no character, or a number",
        ),
        (
            "!!python/object/apply:os.system ['ls']",
            "tags are not supported, got 'tag:yaml.org,2002:python/object",
        ),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "a: anchors and aliases are not supported (line 1)"),
        (b"- " * 9 + b"1", "[0][0]: nested too deeply, allowed: 8 levels (line 1)"),
        ("".join("  " * i + "a:\n" for i in range(100)), "a.a: nested too deeply, allowed: 8 levels (line 10)"),
        (b"[" * 5000, "line 1: nested too deeply, allowed: 8 levels"),
        (b"a: " + b"- " * 5000, "line 1, column 4: not valid YAML: sequence entries are not allowed here"),
        (b"x: " + b"9" * 5000, "x: too long a number, got 5000 digits, allowed: at most 18 (line 1)"),
        (b"x: [" + b"1," * 5000 + b"]", "x: too many values, allowed: at most 2048 in a file (line 1)"),
        (b"#" * (MAX_BYTES + 1), f"too long for a configuration, allowed: at most {MAX_BYTES} bytes"),
    ],
    ids=[
        "empty",
        "comment",
        "text",
        "list",
        "no keys",
        "two documents",
        "not YAML",
        "alias without anchor",
        "ELF",
        "zeros",
        "not UTF-8",
        "UTF-16",
        "version of 5000 digits",
        "code",
        "bomb",
        "dashes in a line",
        "steps",
        "brackets",
        "dashes",
        "a number of 5000 digits",
        "many values",
        "too long",
    ],
)
def test_refuses_files_of_something_else(tmp_path: Path, text: str | bytes, message: str) -> None:
    assert problem(tmp_path, text).startswith(f": {message}")


FRAGMENTS = st.sampled_from(
    [
        *"[]{}|>#!%'\"~\\\n\t\0\x85\u2028\ufeff",
        *(": ", "- ", "? ", "\n  ", "!!int ", "&a ", "*a", "<<: ", '"\\U00110000"', "---", "..."),
        *("0", "-1", "1e999", ".nan", "16777217", "9" * 30, "2001-01-01", "null"),
        *("batch", "geometric", "start", "families", "mixed", "specs", "model: "),
    ]
)


@settings(deadline=None, derandomize=True, max_examples=500)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_in_one_line(data: st.DataObject) -> None:
    text = GOOD
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, len(text)))
        end = data.draw(st.sampled_from([begin, begin + 1, begin + 9]))
        text = text[:begin] + data.draw(FRAGMENTS | st.text(max_size=3)) + text[end:]
    try:
        parse_config(text.encode("utf-8", "surrogatepass"), "damaged")
    except ConfigError as e:
        assert str(e).startswith("damaged: ")
        assert str(e).isprintable()
        assert len(str(e)) < 500


@settings(deadline=None, derandomize=True, max_examples=200)
@given(data=st.binary(max_size=64) | st.text(max_size=64).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_noise_is_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(data, "noise")
    assert str(raised.value).isprintable()


def test_a_long_value_is_cut(tmp_path: Path) -> None:
    assert len(problem(tmp_path, "x" * 5000)) < 200
    assert len(problem(tmp_path, edited("head_dim: 128", f"head_dim: {'x' * 5000}"))) < 200


def test_too_many_buckets_are_counted_before_they_are_made(tmp_path: Path) -> None:
    text = edited("batch: [4, 2, 4]", "batch: {start: 1, stop: 1000, step: 1}")
    text = text.replace("prefill_len: [0, 32]", "prefill_len: {start: 1, stop: 1000, step: 1}")
    message = problem(tmp_path, text)
    assert message.startswith(": buckets: too many combinations, got ")
    assert message.endswith(f"allowed: at most {MAX_BUCKETS}")


def test_too_long_an_axis(tmp_path: Path) -> None:
    message = problem(tmp_path, edited("batch: [4, 2, 4]", f"batch: {list(range(1, 1026))}"))
    assert message == ": buckets.batch: too many values, got 1025, allowed: at most 1024"


def test_too_many_specifications(tmp_path: Path) -> None:
    one = "{num_qo_heads: 8, num_kv_heads: 8, head_dim: 128, page_size: 16}"
    more = "".join(f"  s{i}: {one}\n" for i in range(16))
    message = problem(tmp_path, edited("buckets:", f"{more}buckets:"))
    assert message == ": specs: too many values, got 17, allowed: at most 16"


@pytest.mark.parametrize(
    ("form", "values"),
    [
        ("[7, 3, 7, 5]", (3, 5, 7)),
        ("{start: 2, stop: 8, step: 2}", (2, 4, 6, 8)),
        ("{start: 2, stop: 9, step: 3}", (2, 5, 8, 9)),
        ("{start: 4, stop: 4, step: 9}", (4,)),
        ("{geometric: {start: 2, stop: 16, ratio: 2}}", (2, 4, 8, 16)),
        ("{geometric: {start: 2, stop: 17, ratio: 2}}", (2, 4, 8, 16, 17)),
        ("{geometric: {start: 2, stop: 4, ratio: 1.25}}", (2, 3, 4)),
    ],
    ids=str,
)
def test_axes(tmp_path: Path, form: str, values: tuple[int, ...]) -> None:
    spec = load(tmp_path, edited("batch: [4, 2, 4]", f"batch: {form}"))
    assert spec.space.batch == values
    assert {bucket.batch for bucket in spec.buckets if bucket.prefill_len} == set(values)


@pytest.mark.parametrize("families", [["decode"], ["prefill"], ["mixed"], ["decode", "prefill"]], ids=" ".join)
def test_families(tmp_path: Path, families: list[str]) -> None:
    text = edited("  decode_count: [2, 0]", f"  decode_count: [2, 0]\n  families: [{', '.join(families)}]")
    assert {bucket.family for bucket in load(tmp_path, text).buckets} == set(families)


@pytest.mark.parametrize(
    ("written", "max_bytes"),
    [("123456789", 123456789), ("512 MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("null", None)],
    ids=["number", "MiB", "GB", "null"],
)
def test_memory_sizes(tmp_path: Path, written: str, max_bytes: int | None) -> None:
    text = edited("max_pages: 64", f"max_pages: 64\n  max_bytes: {written}")
    assert load(tmp_path, text).workspace.max_bytes == max_bytes


@pytest.mark.parametrize("word", ["no", "on", "1:30", "0x10", "2001-01-01", "1_0.0"], ids=str)
def test_words_that_other_readers_take_for_something_else(tmp_path: Path, word: str) -> None:
    message = problem(tmp_path, edited("head_dim: 128", f"head_dim: {word}"))
    assert message == f": specs.small.head_dim: must be an integer, got {word!r}, allowed: 64 or 128 or 256"
    assert list(load(tmp_path, edited("small:", f"{word!r}:")).specs) == [word]


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "none.yaml")
    assert str(raised.value) == f"{tmp_path / 'none.yaml'}: cannot be read: No such file or directory"
    with pytest.raises(ConfigError) as raised:
        load_config(str(tmp_path))
    assert str(raised.value) == f"{tmp_path}: cannot be read: Is a directory"
