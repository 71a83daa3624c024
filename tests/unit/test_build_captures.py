"""A build's captures from end to end, on a driver that gives back just what was launched."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pytest
from capturing_driver import CapturingDriver
from made_catalog import ARCH, BUCKETS, SM_COUNT, SPECS, make_image

from podgraph import build as building
from podgraph.buckets import BucketSpace
from podgraph.catalog import expected, static, store
from podgraph.config import BuildSpec, Workspace
from podgraph.planner import Layout, Policy, kernels_of
from podgraph.providers import nvcc
from podgraph.shapes import AttentionSpec


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
    gpu = CapturingDriver(monkeypatch, SM_COUNT)
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
    assert gpu.loaded == 0
    store.write(tmp_path / "built.podcat", candidate)
    assert len(static.prove(store.read(tmp_path / "built.podcat"))) == len(SPECS)
    families = {kernels_of(record.variant) for record in candidate.records}
    assert families == {"sm90", "flashinfer"}
    assert {record.bucket for record in candidate.records} == set(BUCKETS)
