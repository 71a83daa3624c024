"""The kernels of one specification, loaded, and captured bucket by bucket."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from collections.abc import Iterator
from typing import Any

from podgraph import driver
from podgraph.capture.template import Function, make_template
from podgraph.catalog.model import Template
from podgraph.planner import Layout, Policy
from podgraph.planner.args import RUN_POINTERS, Args, fill
from podgraph.providers import flashinfer, nvcc, pod_sm90
from podgraph.shapes import AttentionSpec, Bucket

POD_BLOCK, MERGE_BLOCK = 128, 256
CAPTURE_BYTES = 4096  # size of the caller's regions while capturing: they only have to be apart


class Kit:
    """The loaded kernels of one specification, ready to be captured."""

    def __init__(
        self,
        spec: AttentionSpec,
        layout: Layout,
        policy: Policy,
        sm_count: int,
        arch: str,
        compiled: dict[nvcc.Source, nvcc.Compiled],
        images: dict[str, bytes],
        stack: contextlib.ExitStack,
    ) -> None:
        self.spec, self.layout, self.policy, self.sm_count, self.arch = spec, layout, policy, sm_count, arch
        self._compiled, self._images, self._stack = compiled, images, stack
        self._loaded: dict[nvcc.Source, tuple[driver.Image, str]] = {}

    def _image(self, source: nvcc.Source) -> tuple[driver.Image, str]:
        if source not in self._loaded:
            cubin = self._compiled[source].cubin
            digest = hashlib.sha256(cubin).hexdigest()
            self._images[digest] = cubin
            image = driver.Image(cubin)
            self._stack.callback(image.close)
            self._loaded[source] = image, digest
        return self._loaded[source]

    def _function(self, source: nvcc.Source, name: str, shared_bytes: int) -> Function:
        image, digest = self._image(source)
        return Function(image.function(name, shared_bytes, ctypes.sizeof(Args)), digest, name)

    def captures(self, bucket: Bucket) -> Iterator[tuple[str, Template]]:
        """Every way to compute a bucket that the build chooses from: (variant, template)."""
        if self.policy.kernels == "sm90":
            for setting in pod_sm90.settings_of(self.spec):
                yield pod_sm90.variant_of(setting), self._capture_sm90(setting)
        else:
            variant = flashinfer.PodVariant.of(bucket, self.spec)
            yield variant.name, self._capture_flashinfer(variant)

    def _capture_sm90(self, setting: str) -> Template:
        """One kernel on a persistent grid; it merges partial results itself."""
        source = pod_sm90.source(self.spec, setting)
        return self._capture([(source, "podgraph_pod_sm90", self.policy.ctas, pod_sm90.THREADS)])

    def _capture_flashinfer(self, variant: flashinfer.PodVariant) -> Template:
        """The attention kernel on a persistent grid, then the merge."""
        return self._capture(
            [
                (flashinfer.pod_source(self.spec, variant, self.arch), "podgraph_pod", self.policy.ctas, POD_BLOCK),
                (flashinfer.merge_source(self.spec), "podgraph_merge", self.sm_count, MERGE_BLOCK),
            ]
        )

    def _capture(self, kernels: list[tuple[nvcc.Source, str, int, int]]) -> Template:
        """The template of some kernels, one after the other: (source, function, grid, block)."""
        functions, shapes = [], []
        for source, name, grid, block in kernels:
            shared_bytes = self._image(source)[0].read_uint32("podgraph_smem_bytes")
            functions.append(self._function(source, name, shared_bytes))
            shapes.append(((grid, 1, 1), (block, 1, 1), shared_bytes))

        def launches(bases: Any, strides: Any) -> list[driver.Launch]:
            params = bytes(fill(self.spec, self.layout, bases, strides))
            return [driver.Launch(f.handle, *shape, params) for f, shape in zip(functions, shapes, strict=True)]

        external = dict.fromkeys((*RUN_POINTERS, "kv_indices"), CAPTURE_BYTES)
        return make_template(launches, functions, {**external, **self.layout.sizes})
