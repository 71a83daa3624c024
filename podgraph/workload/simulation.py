"""From a trace to engine steps: the clock around the simulated engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from podgraph.errors import ConfigError
from podgraph.workload.engine import Engine
from podgraph.workload.requests import Trace
from podgraph.workload.scheduler import Chunk, SchedulerConfig, SimulationStats, StepCost, StepShape, constant_cost
from podgraph.workload.steps import COLUMNS, StepHistogram

DEFAULT_STEP_US = 20_000.0
# The rate that an engine sustains is measured on at most this many requests, evenly spaced over the trace.
SATURATION_REQUESTS = 200_000
_STEPS_PER_REPORT = 4096


@dataclass(frozen=True)
class Step:
    """One batch of the engine.

    Attributes:
        requests: in the order they were admitted, never empty.
        decode_count: how many of them are past their prefill, and so have one query row. The last row of a prefill may
            come alone: here it is a prefill, although a kernel, and `StepShape`, cannot tell it from a decode.
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


def simulate(
    trace: Trace,
    config: SchedulerConfig,
    step_us: StepCost | float = DEFAULT_STEP_US,
    stats: SimulationStats | None = None,
) -> Iterator[Step]:
    """Yields the steps of an engine that serves a trace; the same arguments always give the same steps.

    Args:
        trace: the requests; where it has no arrivals all of them wait from the start.
        config: the engine's limits and policy.
        step_us: microseconds that a step takes: a cost, or one number for every step.
        stats: counted up while the steps are taken.

    Returns:
        An iterator in time order. The clock advances by the cost of each step, and jumps to the next arrival when idle.

    Raises:
        ConfigError: a step costs no time, or endless time.
    """
    stats = SimulationStats() if stats is None else stats
    engine = Engine(trace, config, stats)
    for start_s, _ in _steps(engine, trace, step_us, stats):
        chunks, decode_count = engine.chunks()
        yield Step(tuple(chunks), decode_count, start_s)


def simulate_histogram(
    trace: Trace,
    config: SchedulerConfig,
    step_us: StepCost | float = DEFAULT_STEP_US,
    stats: SimulationStats | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> StepHistogram:
    """Counts the steps that `simulate` would yield, as kernels see them (`StepShape`), without making them.

    Args:
        trace, config, step_us, stats: as in `simulate`.
        progress: called now and then with the number of requests that are done.

    Returns:
        The histogram, its source that of the trace; empty where no request fits the engine.

    Raises:
        ConfigError: a step costs no time, or endless time.
    """
    stats = SimulationStats() if stats is None else stats
    engine = Engine(trace, config, stats)
    counts: dict[tuple[int, ...], list[int]] = {}
    until_report = _STEPS_PER_REPORT
    for _, shape in _steps(engine, trace, step_us, stats):
        sums = counts.get(shape[:3])
        if sums is None:
            counts[shape[:3]] = [1, *shape[3:]]
        else:
            sums[0] += 1
            sums[1] += shape[3]
            sums[2] += shape[4]
            sums[3] += shape[5]
        until_report -= 1
        if not until_report:
            until_report = _STEPS_PER_REPORT
            progress(stats.finished + stats.dropped)
    rows = [(*key, *sums) for key, sums in sorted(counts.items())]
    columns = np.array(rows, dtype=np.int64).reshape(-1, len(COLUMNS)).T.copy()
    return StepHistogram(**dict(zip(COLUMNS, columns, strict=True)), source=trace.source)


def sustained_rate(trace: Trace, config: SchedulerConfig, step_us: StepCost | float = DEFAULT_STEP_US) -> float:
    """Requests per second that the engine finishes when all of them wait from the start.

    A trace of more than 200,000 requests is sampled evenly.

    Raises:
        ConfigError: no request fits the engine.
    """
    sample = trace.keep(np.arange(len(trace)) % -(-len(trace) // SATURATION_REQUESTS) == 0)
    stats = SimulationStats()
    engine = Engine(sample, config, stats)
    waiting = replace(sample, arrival_s=np.zeros(len(sample)))
    for _ in _steps(engine, waiting, step_us, stats):
        pass
    if not stats.finished:
        raise ConfigError(
            f"{trace.source}: no request fits max_pages={config.max_pages} of {config.page_size} tokens; "
            "raise max_pages"
        )
    return stats.finished / stats.end_s


def _steps(
    engine: Engine, trace: Trace, step_us: StepCost | float, stats: SimulationStats
) -> Iterator[tuple[float, StepShape]]:
    """Yields (start in seconds, shape) while the engine is between `plan` and `finish`."""
    cost = constant_cost(step_us) if isinstance(step_us, (int, float)) else step_us
    arrival_s: list[float] = trace.arrival_s.tolist()
    count = len(arrival_s)
    next_arrival = 0
    clock_s = 0.0
    while True:
        if not engine.busy:
            if next_arrival == count:
                return
            clock_s = max(clock_s, arrival_s[next_arrival])
        while next_arrival < count and arrival_s[next_arrival] <= clock_s:
            engine.arrive(next_arrival)
            next_arrival += 1
        if engine.busy:
            shape = engine.plan()
            yield clock_s, shape
            engine.finish()
            took_us = cost(shape)
            if not 0 < took_us < math.inf:
                raise ConfigError(f"step_us: a step must take > 0 us, got {took_us} for {shape}")
            clock_s += took_us / 1e6
            stats.end_s = clock_s
