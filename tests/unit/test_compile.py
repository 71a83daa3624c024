"""The kernels compile, without a GPU, and agree with Python on their parameter struct."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import pytest

from podgraph.build import compile_kernels
from podgraph.catalog import cubin
from podgraph.config import load_config
from podgraph.errors import CompileError, ConfigError
from podgraph.planner import args
from podgraph.planner.policy import SM90_SETTINGS
from podgraph.providers import flashinfer, nvcc, planner, pod_sm90
from podgraph.shapes import AttentionSpec

ROOT = Path(__file__).resolve().parents[2]
SPEC = AttentionSpec(8, 2, 128, 16)
CHANGES: tuple[dict[str, Any], ...] = (
    {"head_dim": 64},
    {"page_size": 32},
    {"num_kv_heads": 8},
    {"dtype": "float16", "kv_dtype": "float16"},
    {"window_left": 100},
    {"logits_soft_cap": 30.0},
    {"decode_rows": 2},
)
KERNEL_OF = {
    "pod_sm90.cu": "podgraph_pod_sm90",
    "pod_flashinfer.cu": "podgraph_pod",
    "merge.cu": "podgraph_merge",
    "plan_sm90.cu": "podgraph_plan_sm90",
    "plan_flashinfer.cu": "podgraph_plan_flashinfer",
    "check_pages.cu": "podgraph_check_pages",
}
MESSAGE = "\nptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized"
MAX_SPILL_BYTES = 128  # more would be a kernel that no longer fits its registers


@pytest.fixture(scope="module")
def compiler() -> None:
    if nvcc.find_nvcc() is None:
        pytest.skip("no nvcc")
    try:
        flashinfer.header_folder()
    except CompileError as e:
        pytest.skip(str(e))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_every_kernel_of_quickstart(compiler: None, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed, one-sided and merge kernels; a folder of cubins then serves where there is no compiler."""
    config = load_config(ROOT / "configs" / "quickstart.yaml")
    compiled = compile_kernels(config, arch, tmp_path)
    files = [source.file for source in compiled]
    if arch == "sm_90a":
        assert files == ["check_pages.cu", "plan_sm90.cu", *["pod_sm90.cu"] * len(SM90_SETTINGS)]
    else:
        assert sorted(files) == ["check_pages.cu", "merge.cu", "plan_flashinfer.cu", *["pod_flashinfer.cu"] * 3]
    for source, kernel in compiled.items():
        sm, kernels = cubin.kernels(kernel.cubin)
        assert sm == int(arch[3:5])
        name = KERNEL_OF[source.file]
        assert kernels == {name: args.params_of(name).size}
        assert cubin.read(kernel.cubin).text(nvcc.IDENTITY) == source.identity
        assert 0 < kernel.registers <= 255
        assert kernel.spill_bytes <= MAX_SPILL_BYTES
    monkeypatch.setattr(nvcc, "find_nvcc", lambda: None)
    assert compile_kernels(config, arch, tmp_path) == compiled
    next(tmp_path.glob("*.cubin")).write_bytes(b"damaged")
    with pytest.raises(CompileError, match=r"no compiled kernel in .* and no nvcc"):
        compile_kernels(config, arch, tmp_path)


def test_what_pod_sm90_does_not_serve_is_compiled_from_flashinfer(compiler: None, tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / "head64-page1.yaml")
    config = dataclasses.replace(config, buckets=config.buckets[-1:])
    files = {source.file for source in compile_kernels(config, "sm_90a", tmp_path)}
    assert files == {"check_pages.cu", "plan_flashinfer.cu", "pod_flashinfer.cu", "merge.cu"}


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(28, 4, 128, 64, dtype="float16", kv_layout="HND", window_left=200),
        AttentionSpec(40, 8, 128, 32, logits_soft_cap=30.0),
        AttentionSpec(8, 8, 64, 128),
        AttentionSpec(64, 8, 128, 16),
    ],
    ids=["group 7, window", "group 5, soft cap", "head_dim 64", "group 8"],
)
def test_pod_sm90_keeps_to_its_registers(compiler: None, spec: AttentionSpec, tmp_path: Path) -> None:
    """No spills, and no message that wgmma was serialised, in every setting of a specification."""
    sources = [pod_sm90.source(spec, setting) for setting in pod_sm90.settings_of(spec)]
    for source, kernel in nvcc.compile_all(sources, "sm_90a", tmp_path).items():
        assert kernel.spill_bytes == 0, source
        assert cubin.kernels(kernel.cubin)[1] == {"podgraph_pod_sm90": args.RUN.size}


def test_serialised_wgmma_is_an_error(compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run

    def run(*arguments: Any, **options: Any) -> Any:
        done = real(*arguments, **options)
        return subprocess.CompletedProcess(done.args, 0, done.stdout, done.stderr + MESSAGE)

    monkeypatch.setattr(nvcc.subprocess, "run", run)
    with pytest.raises(CompileError, match=r"merge\.cu: ptxas serialises wgmma for sm_90a: .*C7515"):
        nvcc.compile_all([flashinfer.merge_source(SPEC)], "sm_90a", tmp_path)


def test_a_struct_that_differs_from_python_does_not_compile(
    compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = args.layout_asserts().replace("lse) == 32", "lse) == 40")
    assert wrong != args.layout_asserts()
    monkeypatch.setattr(nvcc, "layout_asserts", lambda: wrong)
    with pytest.raises(CompileError, match=r"merge\.cu: nvcc failed for sm_90a: .*lse"):
        nvcc.compile_all([flashinfer.merge_source(SPEC)], "sm_90a", tmp_path)
    assert not list(tmp_path.iterdir())


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="arch: got 'sm_70', allowed: sm_80, sm_90a"):
        compile_kernels(load_config(ROOT / "configs" / "quickstart.yaml"), "sm_70", tmp_path)


def test_what_a_kernel_is_compiled_from_tells_it_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [SPEC, *(dataclasses.replace(SPEC, **change) for change in CHANGES)]
    sources = [pod_sm90.source(spec, setting) for spec in specs for setting in SM90_SETTINGS]
    sources += [flashinfer.pod_source(spec, flashinfer.PodVariant(128, 16), "sm_90a") for spec in specs]
    sources += [planner.plan_source("sm90"), planner.plan_source("flashinfer"), planner.check_source()]
    identities = {source.identity for source in sources}
    assert len(identities) == len(sources)
    assert all(source.identity in source.text for source in sources)
    monkeypatch.setattr(nvcc, "layout_asserts", lambda: "// another layout of the same size\n")
    assert not identities & {source.identity for source in sources}


def test_the_digest_covers_what_a_cubin_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    before = planner.check_source().digest("sm_90a")
    monkeypatch.setattr(nvcc, "IDENTITY", "podgraph_other")
    assert planner.check_source().digest("sm_90a") != before


def test_the_digest_covers_source_defines_and_architecture() -> None:
    merge = flashinfer.merge_source(SPEC)
    half = flashinfer.merge_source(AttentionSpec(8, 2, 128, 16, dtype="float16"))
    assert len({merge.digest("sm_90a"), merge.digest("sm_80"), half.digest("sm_90a")}) == 3


def test_the_digest_covers_the_headers_that_a_source_includes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in nvcc.kernel_folder().iterdir():
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(nvcc, "kernel_folder", lambda: tmp_path)
    sources = {"attention": pod_sm90.source(SPEC, "w64"), "planner": planner.plan_source("sm90")}
    before = {name: source.digest("sm_90a") for name, source in sources.items()}
    for header, changed in (("plan.h", {"planner"}), ("sm90.h", {"attention"}), ("args.h", {"attention", "planner"})):
        text = (tmp_path / header).read_text()
        (tmp_path / header).write_text(text + "// more\n")
        assert {name for name, source in sources.items() if source.digest("sm_90a") != before[name]} == changed
        (tmp_path / header).write_text(text)
