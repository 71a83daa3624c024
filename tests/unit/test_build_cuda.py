"""A build for a GPU where there is none: real kernels, a driver that only remembers, results made up."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from capturing_driver import CapturingDriver
from forged import changes, check_refused, with_template

from podgraph import build as building
from podgraph import driver, evidence
from podgraph.build import build
from podgraph.catalog import static, store
from podgraph.catalog.model import Catalog
from podgraph.config import load_config
from podgraph.errors import CaptureError, CatalogError, CompileError, ConfigError, VerificationError
from podgraph.planner import packed
from podgraph.providers import flashinfer, nvcc

ROOT = Path(__file__).resolve().parents[2]
SM_COUNT = 132


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> CapturingDriver:
    if nvcc.find_nvcc() is None:
        pytest.skip("no nvcc")
    try:
        flashinfer.header_folder()
    except CompileError as e:
        pytest.skip(str(e))
    fake = CapturingDriver(monkeypatch, SM_COUNT)
    monkeypatch.setattr(building, "choose_backend", lambda wanted, device=0: ("cuda", "a Hopper"))
    return fake


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


class Child:
    """Stands in for the verifying process: a time for each setting, and what is wrong with some."""

    def __init__(self, broken: str = "") -> None:
        self.broken, self.seen = broken, 0

    def __call__(self, candidate: Catalog, out: Path, progress: Any) -> Iterator[dict[str, Any]]:
        static.check(candidate)
        for name in candidate.specs:
            if candidate.buckets(name):
                static.layout_of(candidate, name)  # as bind does
        for record in candidate.records:
            self.seen += 1
            problem = "wrong" if self.broken and f"{record.variant} {record.bucket}".startswith(self.broken) else ""
            fast = record.variant.endswith("w64" if record.bucket.family == "decode" else "w64d")
            yield {"problem": problem, "replay_us": 5.0 if fast else 9.0, "error": 0.001}


def test_a_hopper_catalog(gpu: CapturingDriver, kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, path = load_config(ROOT / "configs" / "quickstart.yaml"), tmp_path / "q.podcat"
    child = Child()
    monkeypatch.setattr(evidence, "verify_in_child", child)
    result = build(config, path, kernels=kernels)
    assert child.seen == 3 * len(config.buckets), "each bucket in each setting"
    content = store.read(path)
    assert [r.bucket for r in content.records] == list(config.buckets)
    assert set(content.settings("quickstart")) == {"pod_sm90_w64", "pod_sm90_w64d"}
    planner, *others = content.templates
    assert content.specs["quickstart"].planner == 0
    assert [n.function for n in planner.nodes] == ["podgraph_check_pages", "podgraph_plan_sm90"]
    requests = max(b.batch for b in config.buckets)
    assert [n.shared_bytes for n in planner.nodes] == [0, 40 * (requests + 1)]
    assert [n.function for t in others for n in t.nodes] == ["podgraph_pod_sm90"] * 2
    assert {n.grid for t in others for n in t.nodes} == {(SM_COUNT, 1, 1)}
    assert len(static.check(content)) == 3
    assert "flashinfer-python" not in content.built_with
    assert gpu.loaded == 0, "every image is let go"
    # again: nothing is verified, and the file keeps its bytes
    before, child.seen = path.read_bytes(), 0
    again = build(config, path, kernels=kernels)
    assert (child.seen, again.reused) == (0, len(config.buckets))
    assert path.read_bytes() == before
    assert result.catalog.records == again.catalog.records


def test_a_setting_that_fails(
    gpu: CapturingDriver, kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, path = load_config(ROOT / "configs" / "quickstart.yaml"), tmp_path / "q.podcat"
    monkeypatch.setattr(evidence, "verify_in_child", Child(f"pod_sm90_w64d {config.buckets[0]}"))
    with pytest.raises(VerificationError, match="1 of 42 buckets failed, nothing was written"):
        build(config, path, kernels=kernels)
    assert not path.exists()
    result = build(config, path, kernels=kernels, keep_going=True)
    assert len(result.failures) == 1
    content = store.read(path)
    assert "pod_sm90_w64d" not in content.settings("quickstart")
    assert [r.bucket for r in content.records] == list(config.buckets)


def test_two_families_in_one_catalog(
    gpu: CapturingDriver, kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What pod_sm90 does not serve takes the kernels over FlashInfer's headers, and their merge."""
    text = (ROOT / "configs" / "quickstart.yaml").read_text()
    config_path = tmp_path / "two.yaml"
    small = "  small: {num_qo_heads: 8, num_kv_heads: 2, head_dim: 64, page_size: 1}\n"
    config_path.write_text(text.replace("specs:\n", "specs:\n" + small, 1).replace("16384", "4096"))
    child = Child()
    monkeypatch.setattr(evidence, "verify_in_child", child)
    path = tmp_path / "two.podcat"
    content = build(load_config(config_path), path, kernels=kernels).catalog
    assert content.settings("small") == {}
    assert {r.variant.split("_p")[0] for r in content.buckets("small")} == {"pod_flashinfer"}
    for record in content.buckets("small"):
        nodes = content.templates[record.template].nodes
        assert [n.function for n in nodes] == ["podgraph_pod", "podgraph_merge"]
        assert [n.grid[0] for n in nodes] == [2 * SM_COUNT, SM_COUNT]
    assert "flashinfer-python" in content.built_with
    assert len(static.check(content)) == 3
    # a third specification: only its buckets are verified, beside two that have none left to verify
    third = "  third: {num_qo_heads: 4, num_kv_heads: 4, head_dim: 64, page_size: 32}\n"
    config_path.write_text(config_path.read_text().replace("specs:\n", "specs:\n" + third, 1))
    child.seen = 0
    more = build(load_config(config_path), path, kernels=kernels)
    assert child.seen == 3 * len(more.catalog.buckets("third"))
    assert more.reused == len(content.records)


def test_what_was_built_cannot_be_forged(
    gpu: CapturingDriver, kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real images: every field of each template, and images of another specification or setting."""
    config = load_config(ROOT / "configs" / "quickstart.yaml")
    monkeypatch.setattr(evidence, "verify_in_child", Child())
    content = build(config, tmp_path / "q.podcat", kernels=kernels).catalog
    for index in range(len(content.templates)):
        for field, template in changes(content, index):
            check_refused(with_template(content, index, template), f"templates[{index}].{field}")
    (name,) = config.specs
    (other,) = config.specs.values()
    for changed in (
        dataclasses.replace(other, page_size=4 * other.page_size),
        dataclasses.replace(other, num_qo_heads=2 * other.num_qo_heads),
        dataclasses.replace(other, dtype="float16", kv_dtype="float16"),
        dataclasses.replace(other, logits_soft_cap=30.0),
    ):
        spec = dataclasses.replace(content.specs[name], attention=changed)
        with pytest.raises(
            CatalogError, match=r"templates\[\d\]\.nodes\[0\]\.image: got one compiled from |region|variant"
        ):
            static.prove(dataclasses.replace(content, specs={name: spec}))


def test_a_capture_that_is_not_what_it_must_be(
    gpu: CapturingDriver, kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = driver.Launch

    def launch(function: Any, grid: Any, block: Any, shared_bytes: int, params: bytes) -> driver.Launch:
        return real(function, (grid[0] + 1, 1, 1), block, shared_bytes, params)

    monkeypatch.setattr(driver, "Launch", launch)
    config = load_config(ROOT / "configs" / "quickstart.yaml")
    with pytest.raises(
        CaptureError, match=r"the captured graph: nodes\[0\]\.grid: got \(133, 1, 1\), expected \(132, 1, 1\)"
    ):
        build(config, tmp_path / "q.podcat", kernels=kernels)
    assert gpu.loaded == 0


def test_lists_that_kernels_cannot_pack_are_refused_by_name(
    gpu: CapturingDriver, kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "MAX_INDEX", 100)
    config = load_config(ROOT / "configs" / "quickstart.yaml")
    with pytest.raises(
        ConfigError, match=r"specs\.quickstart: prefill_items of its work lists: got \d+, allowed: at most "
    ):
        build(config, tmp_path / "q.podcat", kernels=kernels)
