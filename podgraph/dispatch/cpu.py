"""The CPU backend: work lists run by the interpreter. For laptops, CI and tests of the planner's meaning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from podgraph.catalog.model import Catalog, Record
from podgraph.dispatch.counters import Counters
from podgraph.dispatch.tensors import Call
from podgraph.planner import AnyWorkList, Layout, prefill_tile
from podgraph.planner.interpreter import Interpreter
from podgraph.shapes import AttentionSpec


class CpuBackend:
    """Runs each part of a planned batch through the interpreter."""

    device = torch.device("cpu")

    def __init__(self, catalog: Catalog, spec_name: str, layout: Layout) -> None:
        self.spec: AttentionSpec = catalog.specs[spec_name].attention
        self.layout = layout
        self._parts: list[Interpreter] = []

    def plan(self, parts: list[tuple[Record, AnyWorkList]]) -> None:
        self._parts = []
        for record, work in parts:
            step = np.zeros(self.layout.step_bytes // 4, np.int32)
            work.pack(self.layout, step)
            tile = prefill_tile(record.bucket, self.spec)
            self._parts.append(Interpreter(self.spec, self.layout, step, work.batch.kv_indices, tile))

    def run(self, call: Call, counters: Counters, eager: bool) -> bool:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # items are small: more threads wait for one another, up to 20 times slower
        try:
            for part in self._parts:
                part.run(call.q, call.k, call.v, call.out, call.lse)
        finally:
            torch.set_num_threads(threads)
        return False

    def prewarm(self, records: Sequence[Record]) -> None:
        """There is nothing to warm."""

    def reset(self) -> None:
        """Nothing is kept between runs."""

    def memory(self) -> dict[str, int]:
        return {"regions": 0, "images": 0, "execs": 0}

    def close(self) -> None:
        self._parts = []
