"""What a real graph holds, and what a catalog refuses."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from podgraph import driver
from podgraph.build import build
from podgraph.capture.template import Function, make_template
from podgraph.catalog import static
from podgraph.dispatch.runtime import OpenCatalog
from podgraph.errors import CaptureError, CudaError, FingerprintMismatch
from podgraph.planner import Layout
from podgraph.planner.args import PLAN, RUN, Args, fill
from tests.gpu.conftest import KERNELS
from tests.gpu.test_specs import SPECS, all_specs


def test_buckets_share_a_graph_for_each_variant(catalog: OpenCatalog) -> None:
    content = catalog.content
    assert {r.bucket.family for r in content.records} == {"decode", "mixed", "prefill"}
    (entry,) = content.specs.values()
    layout = Layout.for_capacity(entry.attention, entry.capacity, "sm90")
    planner = content.templates[entry.planner]
    assert [n.function for n in planner.nodes] == ["podgraph_check_pages", "podgraph_plan_sm90"]
    # every pointer that a kernel takes is relocated, and nothing else
    assert len(planner.relocations) == 2 * (len(PLAN.pointers) + len(layout.arrays))
    attention = [content.templates[i] for i in sorted({r.template for r in content.records})]
    assert len(attention) == len(content.templates) - 1 == len({r.variant for r in content.records})
    for template in attention:
        assert [n.function for n in template.nodes] == ["podgraph_pod_sm90"]
        assert template.edges == ()
        arrays = [name for name in layout.arrays if hasattr(Args, name)]
        assert len(template.relocations) == len(RUN.pointers) + len(arrays) + 3  # partials and counters


def test_two_nodes_and_their_edge(tmp_path: Path) -> None:
    """The kernels over FlashInfer's headers: attention, then the merge."""
    name = "soft cap, page_size 7"
    spec = dataclasses.replace(all_specs(), specs=MappingProxyType({name: SPECS[name]}))
    content = build(spec, tmp_path / "page7.podcat", kernels=KERNELS).catalog
    attention = [content.templates[i] for i in sorted({r.template for r in content.records})]
    assert len(attention) == 4  # tiles of 128 rows mixed and alone, of 16 alone, and decodes alone
    for template in attention:
        assert [n.function for n in template.nodes] == ["podgraph_pod", "podgraph_merge"]
        assert [(e.source, e.target) for e in template.edges] == [(0, 1)]


@pytest.fixture
def kit(catalog: OpenCatalog):
    """One of the catalog's kernels, loaded, with a launch of it."""
    content = catalog.content
    (entry,) = content.specs.values()
    layout = Layout.for_capacity(entry.attention, entry.capacity, "sm90")
    node = content.templates[content.records[0].template].nodes[0]
    image = driver.Image(content.images[node.image])
    function = Function(image.function(node.function, 0, ctypes.sizeof(Args)), node.image, node.function)

    def launch(bases, strides):
        params = bytes(fill(entry.attention, layout, bases, strides))
        return driver.Launch(function.handle, (1, 1, 1), (32, 1, 1), 0, params)

    sizes = {**dict.fromkeys(RUN.pointers, 4096), **layout.sizes}
    yield function, launch, sizes
    image.close()


def test_hidden_device_address_is_refused(kit) -> None:
    """An address of memory that is no region: the captures agree on it, and the driver knows it."""
    function, launch, sizes = kit
    stranger = torch.zeros(1, device="cuda")

    def launches(bases, strides):
        good = launch(bases, strides)
        args = Args.from_buffer_copy(good.params)
        args.counters = stranger.data_ptr()
        return [dataclasses.replace(good, params=bytes(args))]

    with pytest.raises(
        CaptureError, match=r"node 0 \(podgraph_pod_sm90\), parameter offset 216: .* belongs to no region"
    ):
        make_template(launches, [function], RUN, sizes)


def test_foreign_kernel_is_refused(kit) -> None:
    function, launch, sizes = kit
    other = dataclasses.replace(function, handle=0)
    with pytest.raises(CaptureError, match="podgraph_pod_sm90 comes from no image"):
        make_template(lambda b, s: [launch(b, s)], [other], RUN, sizes)


def test_memset_node_is_refused(kit) -> None:
    function, launch, sizes = kit
    memory = driver.Memory(64)

    class Memset:
        def enqueue(self, stream: int) -> None:
            memory.fill(0, stream)

    with pytest.raises(CaptureError, match="CU_GRAPH_NODE_TYPE_MEMSET cannot be stored"):
        make_template(lambda b, s: [launch(b, s), Memset()], [function], RUN, sizes)
    memory.close()


def test_wrong_parameter_size_is_refused(catalog: OpenCatalog) -> None:
    node = catalog.content.templates[catalog.content.records[0].template].nodes[0]
    image = driver.Image(catalog.content.images[node.image])
    with pytest.raises(CudaError, match="takes parameters of"):
        image.function(node.function, node.shared_bytes, 128)
    image.close()


@pytest.mark.parametrize(
    ("field", "value"), [("compute_capability", "8.0"), ("sm_count", 108), ("driver_min", 99_000)], ids=str
)
def test_another_machine_is_refused_by_field(catalog: OpenCatalog, field: str, value: object) -> None:
    content = dataclasses.replace(
        catalog.content, fingerprint=dataclasses.replace(catalog.content.fingerprint, **{field: value})
    )
    before = driver.free_memory()
    with pytest.raises(FingerprintMismatch, match=field):
        OpenCatalog(catalog.path, content).bind()
    assert driver.free_memory() == before


def test_damaged_image_leaves_nothing_allocated(catalog: OpenCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
    content = catalog.content
    broken = dataclasses.replace(content, images={k: v[:200] + bytes(len(v) - 200) for k, v in content.images.items()})
    catalog.bind().close()
    monkeypatch.setattr(static, "prove", lambda content: {})  # which would refuse it first
    before = driver.free_memory()
    for _ in range(5):
        with pytest.raises(CudaError):
            OpenCatalog(Path("broken"), broken).bind()
    assert driver.free_memory() == before
