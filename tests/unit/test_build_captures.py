"""A build's captures from end to end, on a driver that gives back just what was launched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

import pytest
from made_catalog import ARCH, BUCKETS, SM_COUNT, SPECS, make_image

from podgraph import build as building
from podgraph import driver
from podgraph.buckets import BucketSpace
from podgraph.catalog import expected, static, store
from podgraph.config import BuildSpec, Workspace
from podgraph.planner import Layout, Policy, kernels_of
from podgraph.providers import nvcc
from podgraph.shapes import AttentionSpec

BASE = 0x7F << 40


class Driver:
    """Loads, allocates and captures; remembers which function is which."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        functions: list[str] = []
        memory: list[int] = []

        class Image:
            def __init__(self, cubin: bytes) -> None:
                pass

            def function(self, name: str, shared_bytes: int, params_bytes: int) -> int:
                functions.append(name)
                return len(functions)

            def close(self) -> None:
                pass

        class Memory:
            address = BASE

            def __init__(self, size: int) -> None:
                memory[:] = [size]

            def close(self) -> None:
                pass

        class Graph:
            def __init__(self, launches: Sequence[driver.Launch]) -> None:
                self._launches = launches

            @classmethod
            def capture(cls, launches: Sequence[driver.Launch]) -> Graph:
                return cls(launches)

            def describe(self) -> tuple[list[driver.NodeInfo], list[tuple[int, int, bytes]]]:
                nodes = [
                    driver.NodeInfo(
                        driver.GRAPH_KERNEL_NODE,
                        n.function,
                        functions[n.function - 1],
                        n.grid,
                        n.block,
                        n.shared_bytes,
                        (n.params,),
                    )
                    for n in self._launches
                ]
                return nodes, [(i, i + 1, bytes(8)) for i in range(len(nodes) - 1)]

            def close(self) -> None:
                pass

        for made in (Image, Memory, Graph):
            monkeypatch.setattr(driver, made.__name__, made)
        monkeypatch.setattr(driver, "is_device_address", lambda word: BASE <= word < BASE + memory[0])
        device = driver.Device(0, "a GPU", "9.0", SM_COUNT, 13000)
        monkeypatch.setattr(driver, "open_device", lambda ordinal: device)


def compiled(spec: AttentionSpec) -> dict[nvcc.Source, nvcc.Compiled]:
    """What a specification's kernels are compiled to, without code in it."""
    found = {}
    kernels = building._kernels(spec, ARCH)
    policy = Policy.for_sms(SM_COUNT, kernels)
    setup = expected.Setup(spec, Layout.of(spec, BUCKETS, policy), policy, SM_COUNT, ARCH)
    graphs = [expected.planner_graph(setup, 4096, 65_536)]
    for bucket in BUCKETS:
        for variant in expected.variants_of(spec, kernels, ARCH, bucket):
            graphs.append(expected.attention_graph(setup, bucket, variant))
    for graph in graphs:
        for kernel in graph.kernels:
            found[kernel.source] = nvcc.Compiled(make_image(kernel), 0, 0)
    return found


def test_what_a_build_captures_is_what_follows_from_the_specification(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every word of every parameter struct is proven to be an address, a scalar or a constant, and a reader agrees."""
    Driver(monkeypatch)
    images = {source: image for spec in SPECS.values() for source, image in compiled(spec).items()}
    monkeypatch.setattr(building, "compile_kernels", lambda *_: images)
    spec = BuildSpec(
        specs=MappingProxyType(SPECS),
        space=BucketSpace(),
        buckets=BUCKETS,
        dropped=MappingProxyType({}),
        workspace=Workspace(4096, 65_536),
        backend="cuda",
        source="test",
    )
    candidate = building._cuda_candidate(spec, tmp_path, 0, lambda *_: None, {})
    store.write(tmp_path / "built.podcat", candidate)
    assert len(static.prove(store.read(tmp_path / "built.podcat"))) == len(SPECS)
    families = {kernels_of(record.variant) for record in candidate.records}
    assert families == {"sm90", "flashinfer"}
    assert {record.bucket for record in candidate.records} == set(BUCKETS)
