"""What a dispatcher asks of the place where work lists run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from podgraph.batch import Batch
from podgraph.catalog.model import Record
from podgraph.dispatch.again import Repeat
from podgraph.dispatch.calls import Call
from podgraph.dispatch.planning import Addresses
from podgraph.dispatch.tensors import Cache


class Backend(Protocol):
    """A place where work lists run."""

    device: torch.device

    def plan(self, parts: list[tuple[Record, Batch]], rows: int) -> None: ...
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
    ) -> tuple[str, Repeat | None]: ...
    def describe(self, cache: Cache) -> int: ...
    def raise_refusal(self) -> None: ...
    def synchronize(self) -> None: ...
    def prewarm(self, records: Sequence[Record], layers: Sequence[int | None]) -> None: ...
    def dedicate(self, records: Sequence[Record]) -> None: ...
    def reset(self) -> None: ...
    def memory(self) -> dict[str, int]: ...
    def close(self) -> None: ...


@runtime_checkable
class DeviceBackend(Backend, Protocol):
    """A backend that also plans from metadata on its device.

    Attributes:
        stream: that everything goes to.
        capturing: whether that stream is being captured.
        report: not 0 at the start where the GPU refused a step.
        enter_thread: makes the device's context current in the calling thread.
    """

    stream: int
    capturing: Callable[[], bool]
    report: Sequence[int]

    def plan_in_place(
        self,
        record: Record,
        arrays: Sequence[Any],
        addresses: Addresses,
        num_requests: int,
        num_indices: int,
        rows: int,
        num_pages: int,
        prefill_len: int,
        decode_count: int,
    ) -> None: ...
    def capture_id(self) -> int: ...
    def enter_thread(self) -> None: ...
