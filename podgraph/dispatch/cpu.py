"""The CPU backend: work lists run by the interpreter. For laptops, CI and tests of the planner's meaning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from podgraph.batch import Batch
from podgraph.catalog.model import Catalog, Record
from podgraph.dispatch.calls import Call
from podgraph.dispatch.tensors import Cache
from podgraph.planner import Layout, Policy, plan, prefill_tile
from podgraph.planner.interpreter import Interpreter
from podgraph.shapes import AttentionSpec


class CpuBackend:
    """Runs each part of a planned batch through the interpreter."""

    device = torch.device("cpu")

    def __init__(self, catalog: Catalog, spec_name: str, layout: Layout, policy: Policy) -> None:
        self.spec: AttentionSpec = catalog.specs[spec_name].attention
        self.layout, self.policy = layout, policy
        self._parts: list[Interpreter] = []

    def plan(self, parts: list[tuple[Record, Batch]], rows: int) -> None:
        self._parts = []
        planned = []
        for record, batch in parts:
            step = np.zeros(self.layout.step_bytes // 4, np.int32)
            plan(batch, record.bucket, self.spec, self.policy, record.variant).pack(self.layout, step)
            tile = prefill_tile(record.bucket, self.spec)
            planned.append(Interpreter(self.spec, self.layout, step, batch.kv_indices, tile))
        self._parts = planned

    def run(
        self,
        call: Call,
        cache: Cache,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        layer: int | None,
        came: bool,
        eager: bool,
    ) -> tuple[str, None]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # items are small: more threads wait for one another, up to 20 times slower
        try:
            for part in self._parts:
                part.run(q, cache.k, cache.v, out, lse)
        finally:
            torch.set_num_threads(threads)
        return "interpreter", None

    def describe(self, cache: Cache) -> int:
        return 0

    def raise_refusal(self) -> None:
        """The host finds everything."""

    def synchronize(self) -> None:
        """Everything is done when a call returns."""

    def prewarm(self, records: Sequence[Record], layers: Sequence[int | None]) -> None:
        """There is nothing to warm."""

    def dedicate(self, records: Sequence[Record]) -> None:
        """There is nothing to warm."""

    def reset(self) -> None:
        """Nothing is kept between runs."""

    def memory(self) -> dict[str, int]:
        return {"regions": 0, "pinned": 0, "execs": 0}

    def close(self) -> None:
        self._parts = []
