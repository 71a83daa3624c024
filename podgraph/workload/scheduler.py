"""From requests to engine steps: continuous batching with chunked prefill, decodes first (Sarathi-Serve, OSDI'24).

Requests are admitted in arrival order and never overtake each other, so a prefill is always younger than every decode.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from podgraph.errors import ConfigError
from podgraph.workload.traces import Trace


@dataclass(frozen=True)
class SchedulerConfig:
    """What the simulated engine may use in one step.

    Attributes:
        token_budget: query rows of one step, prefills and decodes together.
        max_running: requests that hold KV pages at a time; at most ``token_budget``, so that each can decode a step.
        max_pages: KV pages in all.
        page_size: tokens per KV page.
        step_s: seconds that one step takes, whatever it holds.

    Raises:
        ConfigError: a value is out of range.
    """

    token_budget: int
    max_running: int
    max_pages: int
    page_size: int
    step_s: float = 0.02

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_running", "max_pages", "page_size"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}: must be > 0, got {value}")
        if not (math.isfinite(self.step_s) and self.step_s > 0):
            raise ConfigError(f"step_s: must be > 0, got {self.step_s}")
        if self.max_running > self.token_budget:
            raise ConfigError(
                f"max_running: must be <= token_budget={self.token_budget}, got {self.max_running}: "
                "each running request decodes one row a step; lower it, or raise token_budget"
            )


class Chunk(NamedTuple):
    """What one request does in one step.

    Attributes:
        request: index into the trace.
        qo_len: query rows.
        kv_len: tokens in the KV cache after the step, these rows included.
    """

    request: int
    qo_len: int
    kv_len: int


@dataclass(frozen=True)
class Step:
    """One batch of the engine.

    Attributes:
        requests: in the order they were admitted, never empty.
        decode_count: how many of them are past their prefill, and so have one query row. The last row of a prefill may
            come alone: here it is a prefill, although a kernel cannot tell it from a decode.
        start_s: when the step starts, seconds from the first request of the trace.
    """

    requests: tuple[Chunk, ...]
    decode_count: int
    start_s: float

    @property
    def prefill_count(self) -> int:
        """Requests that prefill."""
        return len(self.requests) - self.decode_count

    @property
    def prefill_len(self) -> int:
        """Query rows of prefill in total."""
        return sum(chunk.qo_len for chunk in self.requests) - self.decode_count


@dataclass
class SimulationStats:
    """What happened to the requests, up to the step that was last taken from the simulation.

    Attributes:
        finished: requests that got all their tokens.
        dropped: requests too large for ``max_pages`` even alone; they appear in no step.
        preempted: times that a request lost its pages and began again.
    """

    finished: int = 0
    dropped: int = 0
    preempted: int = 0


def simulate(trace: Trace, config: SchedulerConfig, stats: SimulationStats | None = None) -> Iterator[Step]:
    """Yields the steps of an engine that serves a trace; the same arguments always give the same steps.

    In each step every running request past its prefill decodes one row; the rows that are left go to prefills in
    arrival order, in chunks. A request is admitted when pages are free for its whole input and one token more, and
    keeps them. Where a decode finds no free page, the youngest running request gives its pages back, waits in front of
    the queue and begins again with the first row of its prefill; that step admits nobody. The step that ends a prefill
    gives the first output token, so ``output_len - 1`` decodes follow (none for 0).

    Args:
        trace: the requests; where it has no arrivals all of them wait from the start.
        config: the engine's limits.
        stats: counted up while the steps are taken.

    Returns:
        An iterator in time order. The clock advances ``step_s`` a step, and jumps to the next arrival when idle.
    """
    stats = SimulationStats() if stats is None else stats
    engine = _Engine(trace, config, stats)
    arrival_s = trace.arrival_s.tolist()
    next_arrival = 0
    clock_s = 0.0
    while True:
        if not engine.busy:
            if next_arrival == len(arrival_s):
                return
            clock_s = max(clock_s, arrival_s[next_arrival])
        while next_arrival < len(arrival_s) and arrival_s[next_arrival] <= clock_s:
            engine.arrive(next_arrival)
            next_arrival += 1
        if engine.busy:
            yield engine.step(clock_s)
            clock_s += config.step_s


class _Running:
    """A request that holds pages."""

    __slots__ = ("capacity", "input_len", "kv_len", "last_kv_len", "request")

    def __init__(self, request: int, input_len: int, output_len: int, capacity: int) -> None:
        self.request = request
        self.input_len = input_len
        self.kv_len = 0
        # The last token that is generated never gets into the cache.
        self.last_kv_len = input_len + max(output_len, 1) - 1
        # Tokens that its pages hold.
        self.capacity = capacity


class _Engine:
    def __init__(self, trace: Trace, config: SchedulerConfig, stats: SimulationStats) -> None:
        self._config = config
        self._stats = stats
        # Lists, as an element of an array costs an object each time.
        self._input_len: list[int] = trace.input_len.tolist()
        self._output_len: list[int] = trace.output_len.tolist()
        self._waiting: deque[int] = deque()
        # In admission order. All but the last are past their prefill: prefills take rows in this order, and a request
        # is admitted only while rows are left.
        self._running: list[_Running] = []
        self._free_pages = config.max_pages

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    def arrive(self, request: int) -> None:
        # Also what admission asks for, not only the largest KV cache: else it would block the queue forever.
        tokens = self._input_len[request] + max(self._output_len[request] - 1, 1)
        if self._pages(tokens) > self._config.max_pages:
            self._stats.dropped += 1
        else:
            self._waiting.append(request)

    def step(self, start_s: float) -> Step:
        preempted = self._stats.preempted
        chunks = self._decode()
        decode_count = len(chunks)
        rows_left = self._config.token_budget - decode_count
        if self._running and self._running[-1].kv_len < self._running[-1].input_len:
            rows_left -= self._prefill(self._running[-1], rows_left, chunks)
        # Not after a preemption: the victim would take back the pages it just gave up.
        if self._stats.preempted == preempted:
            self._admit(rows_left, chunks)
        assert chunks, "the oldest running request always advances"
        self._retire()
        return Step(tuple(chunks), decode_count, start_s)

    def _decode(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        # Preemption pops from the end of the list while it is iterated; a list's iterator then just ends earlier.
        for running in self._running:
            kv_len = running.kv_len
            if kv_len < running.input_len or (kv_len == running.capacity and not self._grow(running)):
                break
            running.kv_len = kv_len = kv_len + 1
            chunks.append(Chunk(running.request, 1, kv_len))
        return chunks

    def _grow(self, running: _Running) -> bool:
        """Gives a request one page more; False where it was itself the youngest, and is preempted."""
        while not self._free_pages:
            victim = self._running.pop()
            self._release(victim)
            self._waiting.appendleft(victim.request)
            self._stats.preempted += 1
            if victim is running:
                return False
        self._free_pages -= 1
        running.capacity += self._config.page_size
        return True

    def _prefill(self, running: _Running, rows_left: int, chunks: list[Chunk]) -> int:
        """Prefills what fits; returns the rows that it took."""
        qo_len = min(rows_left, running.input_len - running.kv_len)
        running.kv_len += qo_len
        chunks.append(Chunk(running.request, qo_len, running.kv_len))
        return qo_len

    def _admit(self, rows_left: int, chunks: list[Chunk]) -> None:
        while rows_left and self._waiting and len(self._running) < self._config.max_running:
            request = self._waiting[0]
            input_len = self._input_len[request]
            pages = self._pages(input_len + 1)
            if pages > self._free_pages:
                return
            self._waiting.popleft()
            self._free_pages -= pages
            running = _Running(request, input_len, self._output_len[request], pages * self._config.page_size)
            self._running.append(running)
            rows_left -= self._prefill(running, rows_left, chunks)

    def _retire(self) -> None:
        """Frees the pages of the requests that ended, after the step: its rows still read them."""
        finished = [running for running in self._running if running.kv_len == running.last_kv_len]
        if finished:
            self._stats.finished += len(finished)
            for running in finished:
                self._release(running)
            self._running = [running for running in self._running if running.kv_len != running.last_kv_len]

    def _release(self, running: _Running) -> None:
        self._free_pages += running.capacity // self._config.page_size

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._config.page_size)
