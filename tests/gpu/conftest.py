"""Tests that need a GPU and compiled kernels; the others run anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from podgraph import driver
from podgraph.build import build, choose_backend
from podgraph.config import load_config
from podgraph.dispatch.runtime import OpenCatalog
from podgraph.dispatch.runtime import open as open_catalog
from podgraph.errors import PodgraphError

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "build" / "kernels"  # kept between runs, and where kernels compiled elsewhere are looked for


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        driver.open_device()
    except PodgraphError as e:
        for item in items:
            if "gpu" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason=f"no GPU: {e}"))


@pytest.fixture(scope="session")
def catalog_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart catalog, built and verified on this GPU."""
    assert choose_backend("cuda")[0] == "cuda"
    path = tmp_path_factory.mktemp("catalog") / "quickstart.podcat"
    build(load_config(ROOT / "configs" / "quickstart.yaml"), path, kernels=KERNELS, backend="cuda")
    return path


@pytest.fixture(scope="session")
def catalog(catalog_path: Path) -> OpenCatalog:
    return open_catalog(catalog_path)
