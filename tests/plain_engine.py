"""The meaning of a simulation, request by request, with nothing clever."""

from __future__ import annotations

from dataclasses import dataclass

from podgraph.workload.requests import Trace
from podgraph.workload.scheduler import Chunk, SchedulerConfig, SimulationStats
from podgraph.workload.simulation import Step


@dataclass
class Running:
    request: int
    input_len: int
    last: int
    pages: int
    kv_len: int = 0

    @property
    def decodes(self) -> bool:
        return self.kv_len >= self.input_len


class PlainEngine:
    def __init__(self, trace: Trace, config: SchedulerConfig) -> None:
        self.config = config
        self.inputs: list[int] = trace.input_len.tolist()
        self.outputs: list[int] = trace.output_len.tolist()
        self.stats = SimulationStats()
        self.waiting: list[int] = []
        self.running: list[Running] = []

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)

    def free(self) -> int:
        return self.config.max_pages - sum(r.pages for r in self.running)

    def arrive(self, request: int) -> None:
        if self.pages(self.inputs[request] + max(self.outputs[request] - 1, 1)) > self.config.max_pages:
            self.stats.dropped += 1
        else:
            self.waiting.append(request)

    def step(self, clock_s: float) -> Step:
        self.rows = self.config.token_budget
        self.did: dict[int, int] = {}
        self.decode_count = self.prefills = 0
        if self.config.policy == "decode-first":
            preempted = self.stats.preempted
            self.decode()
            self.prefill(admit=preempted == self.stats.preempted)
        else:
            self.prefill(admit=True)
            if not self.prefills:
                self.decode()
        chunks = tuple(Chunk(r.request, self.did[r.request], r.kv_len) for r in self.running if r.request in self.did)
        left = [r for r in self.running if r.kv_len != r.last]
        self.stats.finished += len(self.running) - len(left)
        self.running = left
        return Step(chunks, self.decode_count, clock_s)

    def decode(self) -> None:
        for r in [r for r in self.running if r.decodes]:
            while r in self.running and self.pages(r.kv_len + 1) > r.pages:
                if self.free():
                    r.pages += 1
                else:
                    self.waiting.insert(0, self.running.pop().request)
                    self.stats.preempted += 1
            if r in self.running:
                r.kv_len += 1
                self.did[r.request] = 1
                self.decode_count += 1
                self.rows -= 1

    def may_prefill(self) -> bool:
        return self.rows > 0 and self.prefills != self.config.max_prefills

    def prefill(self, admit: bool) -> None:
        for r in self.running:
            if not r.decodes and self.may_prefill():
                self.take(r)
        while admit and self.waiting and self.may_prefill() and len(self.running) < self.config.max_running:
            request = self.waiting[0]
            pages = self.pages(self.inputs[request] + 1)
            if pages > self.free():
                break
            self.waiting.pop(0)
            last = self.inputs[request] + max(self.outputs[request], 1) - 1
            self.running.append(Running(request, self.inputs[request], last, pages))
            self.take(self.running[-1])

    def take(self, r: Running) -> None:
        qo_len = min(self.rows, r.input_len - r.kv_len, self.config.chunk or self.rows)
        r.kv_len += qo_len
        self.rows -= qo_len
        self.did[r.request] = qo_len
        self.prefills += 1


def plain_engine(trace: Trace, config: SchedulerConfig, step_s: float) -> tuple[list[Step], SimulationStats]:
    """What `simulate` must yield where each step takes ``step_s``."""
    engine = PlainEngine(trace, config)
    arrival_s: list[float] = trace.arrival_s.tolist()
    steps: list[Step] = []
    clock_s, upcoming = 0.0, 0
    while upcoming < len(arrival_s) or engine.waiting or engine.running:
        if not (engine.waiting or engine.running):
            clock_s = max(clock_s, arrival_s[upcoming])
        while upcoming < len(arrival_s) and arrival_s[upcoming] <= clock_s:
            engine.arrive(upcoming)
            upcoming += 1
        if engine.waiting or engine.running:
            steps.append(engine.step(clock_s))
            clock_s += step_s
    return steps, engine.stats
