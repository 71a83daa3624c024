"""The simulated engine: continuous batching with chunked prefill, one step at a time.

All requests past their prefill decode together, so a step of any number of decodes costs a few additions: the engine
counts decodes by the step in which they need a page or end, and walks over them only when pages run out.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from podgraph.errors import ConfigError
from podgraph.workload.requests import Trace

Policy = Literal["decode-first", "prefill-first"]
POLICIES: tuple[Policy, ...] = ("decode-first", "prefill-first")


@dataclass(frozen=True)
class SchedulerConfig:
    """What the simulated engine may use in one step, and who comes first.

    Attributes:
        token_budget: query rows of one step, prefills and decodes together.
        max_running: requests that hold KV pages at a time; at most ``token_budget``, so that each can decode a step.
        max_pages: KV pages in all.
        page_size: tokens per KV page.
        policy: ``decode-first`` (Sarathi-Serve, OSDI'24): every request past its prefill decodes in every step, and
            prefills take the rows that are left. ``prefill-first`` (vLLM's V0 scheduler): a step holds prefills only
            where any can advance or be admitted, and decodes only where none can.
        chunk: query rows of one request's prefill in one step at most; None is all that the budget leaves.
        max_prefills: requests that prefill in one step at most; None is no limit.

    Raises:
        ConfigError: a value is out of range.
    """

    token_budget: int
    max_running: int
    max_pages: int
    page_size: int
    policy: Policy = "decode-first"
    chunk: int | None = None
    max_prefills: int | None = None

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_running", "max_pages", "page_size", "chunk", "max_prefills"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: must be > 0, got {value}")
        if self.policy not in POLICIES:
            raise ConfigError(f"policy: must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.max_running > self.token_budget:
            raise ConfigError(
                f"max_running: must be <= token_budget={self.token_budget}, got {self.max_running}: "
                "each running request decodes one row a step; lower it, or raise token_budget"
            )


class StepShape(NamedTuple):
    """What kernels see of one step, whatever its requests: a request with one query row is a decode.

    Attributes:
        prefill_len: query rows of prefill, over all requests.
        prefill_requests: requests that prefill, two rows or more each.
        decode_count: requests with one row: past their prefill, or the last row of one that came alone.
        decode_kv_tokens: KV tokens that decodes read, over all requests, the rows of this step included.
        prefill_kv_tokens: KV tokens that prefills read.
        prefill_pairs: visible (query row, KV token) pairs of prefills.
    """

    prefill_len: int
    prefill_requests: int
    decode_count: int
    decode_kv_tokens: int
    prefill_kv_tokens: int
    prefill_pairs: int


class StepCost(Protocol):
    """How long one step takes, in microseconds, > 0. Called once a step: keep it cheap."""

    def __call__(self, shape: StepShape, /) -> float: ...


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


@dataclass
class SimulationStats:
    """What happened to the requests, up to the step that was last taken from the simulation.

    Attributes:
        finished: requests that got all their tokens.
        dropped: requests too large for ``max_pages`` even alone; they appear in no step.
        preempted: times that a request lost its pages and began again.
        end_s: when the last step ended, seconds from the first arrival.
    """

    finished: int = 0
    dropped: int = 0
    preempted: int = 0
    end_s: float = field(default=0.0, compare=False)


class _Running:
    """A request that holds pages."""

    __slots__ = ("base", "input_len", "kv_len", "last_kv_len", "request")

    def __init__(self, request: int, input_len: int, output_len: int) -> None:
        self.request = request
        self.input_len = input_len
        # The last token that is generated never gets into the cache.
        self.last_kv_len = input_len + max(output_len, 1) - 1
        # While it prefills; a decode's is the engine's tick plus its base.
        self.kv_len = 0
        self.base: int | None = None


class Engine:
    """The state between two steps.

    A request is admitted in arrival order, nobody overtakes, when pages are free for its whole input and one token
    more, and keeps them. Where a decode finds no free page, the youngest running request gives its pages back, waits in
    front of the queue and begins again with the first row of its prefill; that step admits nobody. The step that ends a
    prefill gives the first output token, so ``output_len - 1`` decodes follow (none for 0).

    Args:
        trace: the requests; they are known by their index.
        config: the engine's limits.
        stats: counted up step by step.
    """

    def __init__(self, trace: Trace, config: SchedulerConfig, stats: SimulationStats) -> None:
        self._config = config
        self._stats = stats
        # Lists, as an element of an array costs an object each time.
        self._input_len: list[int] = trace.input_len.tolist()
        self._output_len: list[int] = trace.output_len.tolist()
        self._chunk = config.token_budget if config.chunk is None else config.chunk
        self._max_prefills = config.token_budget if config.max_prefills is None else config.max_prefills
        self._waiting: deque[int] = deque()
        # By request, in the order of admission: a dict pops its youngest in constant time.
        self._running: dict[int, _Running] = {}
        self._prefilling: list[_Running] = []
        self._free_pages = config.max_pages
        # Decodes advance together: a tick is one row for each of them.
        self._tick = 0
        self._decoding = 0
        self._decode_kv_tokens = 0
        # Tick modulo page size -> decodes whose pages are full then. The first tick of a decode needs no page, as
        # admission took one for it: those that would be counted are in `_fresh`.
        self._growing: dict[int, int] = {}
        self._fresh = 0
        # Tick -> decodes that end with it; some may have been preempted since.
        self._ending: dict[int, list[_Running]] = {}
        # What the last step did: (request, its chunk) of prefills, and whether decodes took part.
        self._prefilled: list[tuple[_Running, int]] = []
        self._ticked = False

    @property
    def busy(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self._running or self._waiting)

    def arrive(self, request: int) -> None:
        """Puts a request at the end of the queue, or drops it where it can never fit."""
        # Also what admission asks for, not only the largest KV cache: else it would block the queue forever.
        tokens = self._input_len[request] + max(self._output_len[request] - 1, 1)
        if self._pages(tokens) > self._config.max_pages:
            self._stats.dropped += 1
        else:
            self._waiting.append(request)

    def plan(self) -> StepShape:
        """Does one step, but for its end: see `finish`. The engine must be busy."""
        self._prefilled = []
        self._ticked = False
        if self._config.policy == "decode-first":
            preempted = self._stats.preempted
            decodes = self._decode()
            # Not after a preemption: the victim would take back the pages it just gave up.
            self._prefill(self._config.token_budget - decodes, admit=self._stats.preempted == preempted)
        else:
            self._prefill(self._config.token_budget, admit=True)
            decodes = 0 if self._prefilled else self._decode()
        decode_kv_tokens = self._decode_kv_tokens if decodes else 0
        prefill_len = prefill_requests = prefill_kv_tokens = prefill_pairs = 0
        for running, qo_len in self._prefilled:
            kv_len = running.kv_len
            if qo_len == 1:
                decodes += 1
                decode_kv_tokens += kv_len
            else:
                prefill_requests += 1
                prefill_len += qo_len
                prefill_kv_tokens += kv_len
                prefill_pairs += qo_len * kv_len - qo_len * (qo_len - 1) // 2
        assert decodes or prefill_requests, "the oldest running request always advances"
        return StepShape(prefill_len, prefill_requests, decodes, decode_kv_tokens, prefill_kv_tokens, prefill_pairs)

    def chunks(self) -> tuple[list[Chunk], int]:
        """The requests of the planned step in the order of admission, and how many are past their prefill."""
        prefilled = {running.request: qo_len for running, qo_len in self._prefilled}
        chunks = []
        for request, running in self._running.items():
            if running.base is not None and self._ticked:
                chunks.append(Chunk(request, 1, self._tick + running.base))
            elif request in prefilled:
                chunks.append(Chunk(request, prefilled[request], running.kv_len))
        return chunks, len(chunks) - len(prefilled)

    def finish(self) -> None:
        """Ends the planned step: prefills become decodes, and requests that are done free their pages.

        Not before, as the rows of the step still read them.
        """
        if self._ticked:
            for running in self._ending.pop(self._tick, ()):
                if self._running.get(running.request) is running:
                    self._stop_decoding(running)
                    self._retire(running)
        for running, _ in self._prefilled:
            if running.kv_len == running.input_len:
                self._prefilling.remove(running)
                if running.kv_len == running.last_kv_len:
                    self._retire(running)
                else:
                    self._start_decoding(running)

    def _decode(self) -> int:
        """One row for every decode that keeps its pages; returns how many those are."""
        if not self._decoding:
            return 0
        needed = self._growing.get(self._tick % self._config.page_size, 0) - self._fresh
        if needed <= self._free_pages:
            self._free_pages -= needed
        else:
            self._grow_one_by_one()
        self._fresh = 0
        self._tick += 1
        self._decode_kv_tokens += self._decoding
        # None is left where the only one preempted itself.
        self._ticked = self._decoding > 0
        return self._decoding

    def _grow_one_by_one(self) -> None:
        """Gives each decode with full pages one more, the oldest first, from the youngest where none is free."""
        for running in list(self._running.values()):
            if running.base is None or running.request not in self._running:
                continue
            kv_len = self._tick + running.base
            if kv_len % self._config.page_size or kv_len == running.input_len:
                continue
            while not self._free_pages:
                _, victim = self._running.popitem()
                self._preempt(victim)
                if victim is running:
                    return
            self._free_pages -= 1

    def _preempt(self, victim: _Running) -> None:
        if victim.base is None:
            self._prefilling.remove(victim)
            self._free_pages += self._pages(victim.input_len + 1)
        else:
            self._free_pages += self._pages(max(victim.input_len + 1, self._tick + victim.base))
            self._stop_decoding(victim)
        self._waiting.appendleft(victim.request)
        self._stats.preempted += 1

    def _prefill(self, rows_left: int, admit: bool) -> None:
        """Prefills what fits: running requests first, then new ones."""
        for running in self._prefilling:
            if not rows_left or len(self._prefilled) == self._max_prefills:
                return
            rows_left -= self._take(running, rows_left)
        while (
            admit
            and rows_left
            and self._waiting
            and len(self._running) < self._config.max_running
            and len(self._prefilled) < self._max_prefills
        ):
            request = self._waiting[0]
            input_len = self._input_len[request]
            pages = self._pages(input_len + 1)
            if pages > self._free_pages:
                return
            self._waiting.popleft()
            self._free_pages -= pages
            running = self._running[request] = _Running(request, input_len, self._output_len[request])
            self._prefilling.append(running)
            rows_left -= self._take(running, rows_left)

    def _take(self, running: _Running, rows_left: int) -> int:
        qo_len = min(rows_left, self._chunk, running.input_len - running.kv_len)
        running.kv_len += qo_len
        self._prefilled.append((running, qo_len))
        return qo_len

    def _start_decoding(self, running: _Running) -> None:
        base = running.base = running.input_len - self._tick
        page_size = self._config.page_size
        self._decoding += 1
        self._decode_kv_tokens += running.input_len
        phase = -base % page_size
        self._growing[phase] = self._growing.get(phase, 0) + 1
        if running.input_len % page_size == 0:
            self._fresh += 1
        self._ending.setdefault(running.last_kv_len - base, []).append(running)

    def _stop_decoding(self, running: _Running) -> None:
        assert running.base is not None
        self._decoding -= 1
        self._decode_kv_tokens -= self._tick + running.base
        self._growing[-running.base % self._config.page_size] -= 1

    def _retire(self, running: _Running) -> None:
        del self._running[running.request]
        self._free_pages += self._pages(max(running.input_len + 1, running.last_kv_len))
        self._stats.finished += 1

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._config.page_size)


def constant_cost(step_us: float) -> StepCost:
    """The cost of an engine whose steps all take ``step_us`` microseconds.

    Raises:
        ConfigError: ``step_us`` is not finite and > 0.
    """
    if not (math.isfinite(step_us) and step_us > 0):
        raise ConfigError(f"step_us: must be > 0, got {step_us}")
    return lambda shape: step_us
