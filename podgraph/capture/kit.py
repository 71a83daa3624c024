"""The kernels of one specification, loaded, and captured bucket by bucket."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from podgraph import driver
from podgraph.capture.template import Function, make_template
from podgraph.catalog.model import Template
from podgraph.planner import Layout, Policy
from podgraph.planner.args import PLAN, PLAN_THREADS, RUN, ParamStruct, fill, fill_plan
from podgraph.providers import flashinfer, nvcc, planner, pod_sm90
from podgraph.shapes import AttentionSpec, Bucket

POD_BLOCK, MERGE_BLOCK = 128, 256
CAPTURE_BYTES = 4096  # size of the caller's regions while capturing: they only have to be apart


@dataclass(frozen=True)
class _Kernel:
    """One launch of a template: grid and block in x, dynamic shared memory in bytes."""

    source: nvcc.Source
    function: str
    grid: int
    block: int
    shared_bytes: int


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

    def captures(self, bucket: Bucket) -> Iterator[tuple[str, Template]]:
        """Every way to compute a bucket that the build chooses from: (variant, template)."""
        if self.policy.kernels == "sm90":
            for setting in pod_sm90.settings_of(self.spec):
                yield pod_sm90.variant_of(setting), self._capture_sm90(setting)
        else:
            variant = flashinfer.PodVariant.of(bucket, self.spec)
            yield variant.name, self._capture_flashinfer(variant)

    def planner(self, max_pages: int, max_kv_len: int) -> Template:
        """The check of page numbers and the planner, of which the runtime launches one or both.

        Args:
            max_pages, max_kv_len: limits of the catalog.
        """
        source = planner.plan_source(self.policy.kernels)
        per_request = self._image(source)[0].read_uint32("podgraph_smem_bytes_per_request")
        shared_bytes = per_request * (self.layout.capacity.requests + 1)
        kernels = [
            _Kernel(planner.check_source(), planner.CHECK_FUNCTION, planner.CHECK_CTAS, planner.CHECK_THREADS, 0),
            _Kernel(source, planner.plan_function(self.policy.kernels), 1, max(PLAN_THREADS), shared_bytes),
        ]

        def params(bases: Mapping[str, int], scalars: Mapping[str, int]) -> ctypes.Structure:
            return fill_plan(self.spec, self.layout, self.policy, (max_pages, max_kv_len), bases, scalars)

        own = {name: self.layout.sizes[name] for name in ("meta", "plan")}
        return self._capture(kernels, PLAN, params, own)

    def _capture_sm90(self, setting: str) -> Template:
        """One kernel on a persistent grid; it merges partial results itself."""
        source = pod_sm90.source(self.spec, setting)
        return self._capture_run([(source, "podgraph_pod_sm90", self.policy.ctas, pod_sm90.THREADS)])

    def _capture_flashinfer(self, variant: flashinfer.PodVariant) -> Template:
        """The attention kernel on a persistent grid, then the merge."""
        return self._capture_run(
            [
                (flashinfer.pod_source(self.spec, variant, self.arch), "podgraph_pod", self.policy.ctas, POD_BLOCK),
                (flashinfer.merge_source(self.spec), "podgraph_merge", self.sm_count, MERGE_BLOCK),
            ]
        )

    def _capture_run(self, kernels: list[tuple[nvcc.Source, str, int, int]]) -> Template:
        """The template of some attention kernels, one after the other: (source, function, grid, block)."""
        sized = [_Kernel(*k, self._image(k[0])[0].read_uint32("podgraph_smem_bytes")) for k in kernels]

        def params(bases: Mapping[str, int], scalars: Mapping[str, int]) -> ctypes.Structure:
            return fill(self.spec, self.layout, bases, scalars)

        return self._capture(sized, RUN, params, self.layout.sizes)

    def _capture(
        self,
        kernels: list[_Kernel],
        takes: ParamStruct,
        params: Callable[[Mapping[str, int], Mapping[str, int]], ctypes.Structure],
        own: Mapping[str, int],
    ) -> Template:
        functions = []
        for kernel in kernels:
            image, digest = self._image(kernel.source)
            handle = image.function(kernel.function, kernel.shared_bytes, takes.size)
            functions.append(Function(handle, digest, kernel.function))

        def launches(bases: Mapping[str, int], scalars: Mapping[str, int]) -> list[driver.Launch]:
            filled = bytes(params(bases, scalars))
            return [
                driver.Launch(f.handle, (k.grid, 1, 1), (k.block, 1, 1), k.shared_bytes, filled)
                for f, k in zip(functions, kernels, strict=True)
            ]

        return make_template(launches, functions, takes, {**dict.fromkeys(takes.pointers, CAPTURE_BYTES), **own})
