"""The kernels of one specification, loaded, and captured bucket by bucket."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping

from podgraph import driver
from podgraph.capture.template import Function, make_template
from podgraph.catalog import cubin, expected
from podgraph.catalog.cubin import Cubin
from podgraph.catalog.model import Template
from podgraph.errors import CaptureError
from podgraph.providers import nvcc
from podgraph.shapes import Bucket

CAPTURE_BYTES = 4096  # size of the caller's regions while capturing: they only have to be apart


class Kit:
    """The loaded kernels of one specification, ready to be captured."""

    def __init__(
        self,
        setup: expected.Setup,
        compiled: dict[nvcc.Source, nvcc.Compiled],
        images: dict[str, bytes],
        stack: contextlib.ExitStack,
    ) -> None:
        self.setup = setup
        self._compiled, self._images, self._stack = compiled, images, stack
        self._loaded: dict[nvcc.Source, tuple[driver.Image, str, Cubin]] = {}

    def _image(self, source: nvcc.Source) -> tuple[driver.Image, str, Cubin]:
        """A loaded image, its name in a catalog, and what it says of itself."""
        if source not in self._loaded:
            data = self._compiled[source].cubin
            digest = hashlib.sha256(data).hexdigest()
            self._images[digest] = data
            image = driver.Image(data)
            self._stack.callback(image.close)
            self._loaded[source] = image, digest, cubin.read(data)
        return self._loaded[source]

    def captures(self, bucket: Bucket) -> Iterator[tuple[str, Template]]:
        """Every way to compute a bucket that the build chooses from: (variant, template)."""
        setup = self.setup
        for variant in expected.variants_of(setup.spec, setup.policy.kernels, setup.arch, bucket):
            yield variant, self._capture(expected.attention_graph(setup, bucket, variant))

    def planner(self, max_pages: int, max_kv_len: int) -> Template:
        """The check of page numbers and the planner.

        Args:
            max_pages, max_kv_len: limits of the catalog.
        """
        return self._capture(expected.planner_graph(self.setup, max_pages, max_kv_len))

    def _capture(self, graph: expected.Graph) -> Template:
        """The template of a graph, captured.

        Raises:
            CaptureError: the captures do not explain themselves, or it is not what follows from the specification.
        """
        loaded = [self._image(kernel.source) for kernel in graph.kernels]
        wanted = expected.template_of(graph, [(digest, content) for _, digest, content in loaded])
        functions = [
            Function(image.function(node.function, node.shared_bytes, graph.takes.size), node.image, node.function)
            for (image, _, _), node in zip(loaded, wanted.nodes, strict=True)
        ]

        def launches(bases: Mapping[str, int], scalars: Mapping[str, int]) -> list[driver.Launch]:
            filled = bytes(graph.params(bases, scalars))
            return [
                driver.Launch(function.handle, node.grid, node.block, node.shared_bytes, filled)
                for function, node in zip(functions, wanted.nodes, strict=True)
            ]

        regions = {**dict.fromkeys(graph.takes.pointers, CAPTURE_BYTES), **graph.own}
        captured = make_template(launches, functions, graph.takes, regions)
        if wrong := expected.difference(captured, wanted):
            raise CaptureError(f"the captured graph: {wrong}")
        return captured
