"""The kernels compile, without a GPU, and agree with Python on their parameter struct."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from podgraph.build import compile_kernels
from podgraph.catalog import cubin
from podgraph.config import load_config
from podgraph.errors import CompileError, ConfigError
from podgraph.planner import args
from podgraph.providers import flashinfer, nvcc
from podgraph.shapes import AttentionSpec

ROOT = Path(__file__).resolve().parents[2]
SPEC = AttentionSpec(8, 2, 128, 16)
KERNEL_OF = {"pod_flashinfer.cu": "podgraph_pod", "merge.cu": "podgraph_merge"}
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
    assert {source.file for source in compiled} == {"pod_flashinfer.cu", "merge.cu"}
    assert len(compiled) == 4
    for source, kernel in compiled.items():
        sm, kernels = cubin.kernels(kernel.cubin)
        assert sm == int(arch[3:5])
        assert kernels == {KERNEL_OF[source.file]: ctypes.sizeof(args.Args)}
        assert 0 < kernel.registers <= 255
        assert kernel.spill_bytes <= MAX_SPILL_BYTES
    monkeypatch.setattr(nvcc, "find_nvcc", lambda: None)
    assert compile_kernels(config, arch, tmp_path) == compiled
    next(tmp_path.glob("*.cubin")).write_bytes(b"damaged")
    with pytest.raises(CompileError, match=r"no compiled kernel in .* and no nvcc"):
        compile_kernels(config, arch, tmp_path)


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


def test_the_digest_covers_source_defines_and_architecture() -> None:
    merge = flashinfer.merge_source(SPEC)
    half = flashinfer.merge_source(AttentionSpec(8, 2, 128, 16, dtype="float16"))
    assert len({merge.digest("sm_90a"), merge.digest("sm_80"), half.digest("sm_90a")}) == 3
