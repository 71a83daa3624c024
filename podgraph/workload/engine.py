"""The simulated engine: continuous batching with chunked prefill, one step at a time.

All requests past their prefill decode together, so a step of any number of decodes costs a few additions: the engine
counts decodes by the step in which they need a page or end, and walks over them only when pages run out.
"""

from __future__ import annotations

from collections import deque

from podgraph.workload.requests import Trace
from podgraph.workload.scheduler import Chunk, SchedulerConfig, SimulationStats, StepShape


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
