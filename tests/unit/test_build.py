"""Builds on the CPU backend: what is left behind, what is reused, and what a build refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import podgraph
from podgraph import build, evidence
from podgraph.catalog import store
from podgraph.cli import main
from podgraph.config import BuildSpec, load_config
from podgraph.errors import CatalogError, ConfigError, VerificationError

CONFIG = """\
specs:
  tiny: {num_qo_heads: 4, num_kv_heads: 1, head_dim: 128, page_size: 16}
buckets: {batch: [2, 4], prefill_len: [64], decode_count: [2]}
workspace: {max_pages: 512, max_kv_len: 8192}
backend: cpu
"""


def config(tmp_path: Path, text: str = CONFIG) -> BuildSpec:
    path = tmp_path / "tiny.yaml"
    path.write_text(text)
    return load_config(path)


def test_keep_going_without_the_largest_bucket_can_be_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(candidate, out, progress):
        largest = candidate.records[0].bucket
        return [
            {"problem": "made up" if r.bucket == largest else "", "error": 0.001, "replay_us": 0.0}
            for r in candidate.records
        ]

    monkeypatch.setattr(evidence, "verify_in_child", verify)
    result = build.build(config(tmp_path), tmp_path / "part.podcat", kernels=tmp_path, keep_going=True)
    assert len(result.failures) == 1
    podgraph.open(tmp_path / "part.podcat").bind()


def test_a_chatty_verifying_process_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More on standard error than a pipe holds."""
    chatty = "import sys; sys.stderr.write('warning\\n' * 20_000); " + evidence.CHILD.removeprefix("import sys; ")
    monkeypatch.setattr(evidence, "CHILD", chatty)
    build.build(config(tmp_path), tmp_path / "x.podcat", kernels=tmp_path)


def test_a_verifying_process_that_cannot_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "CHILD", """print('{"error": "no device"}')""")
    spec = config(tmp_path)
    with pytest.raises(VerificationError, match="verification could not start: no device"):
        build.build(spec, tmp_path / "new.podcat", kernels=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_a_verifying_process_that_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "CHILD", "import sys; sys.stderr.write('killed'); sys.exit(9)")
    with pytest.raises(VerificationError, match=r"ended with 9 after 0 of \d+ buckets, nothing was written: killed"):
        build.build(config(tmp_path), tmp_path / "new.podcat", kernels=tmp_path)


def test_an_output_below_a_file_is_one_line(tmp_path: Path) -> None:
    config(tmp_path)
    path = tmp_path / "tiny.yaml"
    result = CliRunner().invoke(main, ["build", "-c", str(path), "-o", str(path / "x.podcat")])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"podgraph: {path / 'x.podcat'}: its folder cannot be made")


def test_a_journal_of_garbage_is_ignored(tmp_path: Path) -> None:
    (tmp_path / ".x.podcat.journal").write_bytes(b"\xff\xfe\x00\n")
    assert build.build(config(tmp_path), tmp_path / "x.podcat", kernels=tmp_path).reused == 0


def test_an_interrupted_build_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first build dies after two buckets; the second verifies the others only."""
    original = evidence.verify_in_child

    def dies(candidate, out, progress):
        for done, result in enumerate(original(candidate, out, progress)):
            if done == 2:
                raise KeyboardInterrupt
            yield result

    spec, out = config(tmp_path), tmp_path / "x.podcat"
    with monkeypatch.context() as patch:
        patch.setattr(evidence, "verify_in_child", dies)
        with pytest.raises(KeyboardInterrupt):
            build.build(spec, out, kernels=tmp_path)
    assert not out.exists()
    result = build.build(spec, out, kernels=tmp_path)
    assert result.reused == 2
    assert build.build(spec, out, kernels=tmp_path).reused == len(spec.buckets)
    assert build.build(spec, out, kernels=tmp_path, fresh=True).reused == 0


def test_another_podgraph_reuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, out = config(tmp_path), tmp_path / "x.podcat"
    build.build(spec, out, kernels=tmp_path)
    catalog = store.read(out)
    catalog.built_with["source"] = "0" * 64
    store.write(out, catalog)
    result = build.build(spec, out, kernels=tmp_path)
    assert result.reused == 0
    assert "podgraph itself" in result.note


def test_max_bytes_is_kept_to(tmp_path: Path) -> None:
    spec = config(tmp_path, CONFIG.replace("max_pages: 512", "max_pages: 512, max_bytes: 1 kB"))
    with pytest.raises(ConfigError, match=r"workspace.max_bytes: got 1000, allowed: at least \d+"):
        build.build(spec, tmp_path / "x.podcat", kernels=tmp_path)


def test_bind_refuses_a_gpu_for_a_cpu_catalog(tmp_path: Path) -> None:
    build.build(config(tmp_path), tmp_path / "x.podcat", kernels=tmp_path)
    with pytest.raises(CatalogError, match="device: got cuda:7, allowed: cpu"):
        podgraph.open(tmp_path / "x.podcat").bind(device="cuda:7")


def test_the_smallest_workspace_that_loads_can_be_built(tmp_path: Path) -> None:
    text = CONFIG.replace("page_size: 16", "page_size: 1").replace("[64], decode_count: [2]", "[32], decode_count: [4]")
    text = text.replace("batch: [2, 4]", "batch: [8], families: [mixed]").replace("512", "40").replace("8192", "40")
    assert build.build(config(tmp_path, text), tmp_path / "x.podcat", kernels=tmp_path).catalog.max_pages == 40
