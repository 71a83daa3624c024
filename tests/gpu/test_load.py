"""Loading that fails: refused with a reason, nothing half-loaded, nothing leaked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from podgraph import driver
from podgraph.catalog import static
from podgraph.dispatch.runtime import OpenCatalog
from podgraph.dispatch.runtime import open as open_catalog
from podgraph.errors import CatalogError, CudaError, FingerprintMismatch, PodgraphError

TIMES = 100


def fails(catalog: OpenCatalog, error: type[PodgraphError], match: str) -> None:
    """Binds a hundred times; what was free before is free afterwards."""
    with pytest.raises(error, match=match):  # what the driver keeps for itself is allocated once
        catalog.bind()
    before = driver.free_memory()
    for _ in range(TIMES):
        with pytest.raises(error, match=match):
            catalog.bind()
    assert driver.free_memory() == before


@pytest.fixture
def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catalogs are bound without the checks that would refuse them before the driver sees anything."""
    monkeypatch.setattr(static, "prove", lambda content: {})


def test_a_forged_template(catalog: OpenCatalog) -> None:
    """Refused before anything is loaded."""
    template = catalog.content.templates[-1]
    nodes = (*template.nodes[:-1], replace(template.nodes[-1], shared_bytes=1024))
    templates = (*catalog.content.templates[:-1], replace(template, nodes=nodes))
    bad = OpenCatalog(catalog.path, replace(catalog.content, templates=templates))
    fails(bad, CatalogError, r"nodes\[[0-9]\]\.shared_bytes: got 1024, expected ")


def test_a_kernel_that_is_not_there(catalog: OpenCatalog, unproven: None) -> None:
    """The last graph's last kernel: regions and other images are loaded by then."""
    template = catalog.content.templates[-1]
    nodes = (*template.nodes[:-1], replace(template.nodes[-1], function="podgraph_other"))
    templates = (*catalog.content.templates[:-1], replace(template, nodes=nodes))
    bad = OpenCatalog(catalog.path, replace(catalog.content, templates=templates))
    fails(bad, CudaError, "cuLibraryGetKernel")


@pytest.mark.parametrize("keep", [0, 100, 4096], ids=str)
def test_an_image_that_is_cut(catalog: OpenCatalog, keep: int) -> None:
    """The driver would read beyond its end, and crash."""
    images = {digest: data[:keep] for digest, data in catalog.content.images.items()}
    fails(OpenCatalog(catalog.path, replace(catalog.content, images=images)), CatalogError, "a damaged cubin")


def test_parameters_of_another_size(catalog: OpenCatalog, unproven: None) -> None:
    """The driver would read beyond a struct that is too short."""
    template = catalog.content.templates[-1]
    nodes = tuple(replace(node, params=node.params + bytes(8)) for node in template.nodes)
    templates = (*catalog.content.templates[:-1], replace(template, nodes=nodes))
    bad = OpenCatalog(catalog.path, replace(catalog.content, templates=templates))
    fails(bad, CudaError, "takes parameters of .* allowed: one of [0-9]+ bytes")


@pytest.fixture
def full_device() -> Iterator[None]:
    """A GPU with almost no free memory."""
    held = []
    for size in (1 << 30, 64 << 20, 2 << 20):
        while True:
            try:
                held.append(driver.Memory(size))
            except CudaError:
                break
    yield
    for memory in held:
        memory.close()


def test_not_enough_device_memory(catalog_path: Path, full_device: None, unproven: None) -> None:
    catalog = open_catalog(catalog_path)
    # what the regions of a catalog for very long steps would need
    big = OpenCatalog(catalog_path, replace(catalog.content, max_pages=1 << 24))
    fails(big, CudaError, r"regions need [0-9,]+ bytes of device memory, [0-9,]+ are free")


@pytest.mark.parametrize(
    ("field", "value"), [("compute_capability", "8.0"), ("sm_count", 7), ("driver_min", 99_000)], ids=str
)
def test_another_machine(catalog: OpenCatalog, field: str, value: object) -> None:
    fingerprint = replace(catalog.content.fingerprint, **{field: value})
    bad = OpenCatalog(catalog.path, replace(catalog.content, fingerprint=fingerprint))
    fails(bad, FingerprintMismatch, f"{field}: the catalog")


def test_a_bind_after_failures_serves(catalog: OpenCatalog) -> None:
    with catalog.bind() as dispatcher:
        spec = dispatcher.spec
        dispatcher.plan([0, 1], [0, 1], [0], [5])
        q = torch.randn(1, spec.num_qo_heads, spec.head_dim, device="cuda").bfloat16()
        cache = torch.randn(1, 2, spec.page_size, spec.num_kv_heads, spec.head_dim, device="cuda").bfloat16()
        out = dispatcher.run(q, cache)
        assert bool(out.isfinite().all())
