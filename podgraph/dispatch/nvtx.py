"""Ranges around plan and run in Nsight Systems' time line, for a dispatcher that is bound with ``nvtx=True``.

A dispatcher without them is of a class that does not know of them: off, they cost nothing, not even a test. On, and
without a profiler that listens, they cost a function call each. The library is NVIDIA's own nvtx, which works without a
GPU and has domains; torch.cuda.nvtx has neither.
"""

from __future__ import annotations

from typing import Any

import torch

from podgraph.catalog.model import Record
from podgraph.dispatch.dispatcher import Dispatcher
from podgraph.errors import ConfigError

try:
    import nvtx
except ImportError as e:
    raise ConfigError("nvtx=True: nvtx is not installed; pip install 'podgraph[nvtx]'") from e

DOMAIN = "podgraph"


class TracedDispatcher(Dispatcher):
    """A dispatcher whose calls are ranges of the domain ``podgraph``.

    ``plan`` is one by that name. ``run`` names what it replays: the bucket, or the number of parts of a batch that was
    cut. The ranges are of the host's time; the profiler finds the kernels that belong to them.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._domain = nvtx.get_domain(DOMAIN)
        self._ranges: dict[str, Any] = {}  # messages are registered once
        self._plan_range, self._run_range = self._range("plan"), self._range("run")

    def plan(self, *arguments: Any, **options: Any) -> list[Record]:
        """As `Dispatcher.plan`, in a range."""
        self._domain.push_range(self._plan_range)
        try:
            records = super().plan(*arguments, **options)
            self._run_range = self._range(message_of(records))
        finally:
            self._domain.pop_range()
        return records

    def plan_into(self, record: Record, *arguments: Any, **options: Any) -> None:
        """As `Dispatcher.plan_into`, in a range."""
        self._domain.push_range(self._plan_range)
        try:
            super().plan_into(record, *arguments, **options)
            self._run_range = self._range(message_of([record]))
        finally:
            self._domain.pop_range()

    def run(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """As `Dispatcher.run`, in a range."""
        self._domain.push_range(self._run_range)
        try:
            return super().run(*arguments, **options)
        finally:
            self._domain.pop_range()

    def _range(self, message: str) -> Any:
        if message not in self._ranges:
            self._ranges[message] = self._domain.get_event_attributes(message=message)
        return self._ranges[message]


def message_of(records: list[Record]) -> str:
    """What a run of these records is called: few messages in all, as a profiler keeps each one."""
    if len(records) > 1:
        return f"run in {len(records)} parts"
    return f"run {records[0].bucket}" if records else "run"
