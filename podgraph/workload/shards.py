"""A whole log through the simulation: its load, its shards, and who runs them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields, replace
from multiprocessing import get_context
from typing import Literal

import numpy as np

from podgraph.errors import ConfigError, TraceError
from podgraph.workload.provenance import Part, Provenance, Settings
from podgraph.workload.requests import Trace, at_rate
from podgraph.workload.scheduler import SchedulerConfig, SimulationStats, StepCost
from podgraph.workload.simulation import simulate_histogram, sustained_rate
from podgraph.workload.steps import StepHistogram, merge

EngineName = Literal["process", "ray"]
Piece = tuple[Trace, SchedulerConfig, "StepCost | float"]
Result = tuple[StepHistogram, SimulationStats]


@dataclass(frozen=True)
class Job:
    """How a log is simulated.

    Attributes:
        config: the engine's limits and policy.
        step_us: microseconds that a step takes; picklable where shards run in other processes.
        cost: what ``step_us`` is called in messages and files.
        rate: requests per second that arrivals are scaled to.
        load: the same as a share of the rate that the engine sustains; not with ``rate``.
        seed: of Poisson arrivals, for a trace that has none.
        shards: contiguous pieces of the log, each served by a fresh engine.

    Raises:
        ConfigError: a value is out of range.
    """

    config: SchedulerConfig
    step_us: StepCost | float
    cost: str
    rate: float | None = None
    load: float | None = None
    seed: int = 0
    shards: int = 1

    def __post_init__(self) -> None:
        if self.rate is not None and self.load is not None:
            raise ConfigError(f"rate, load: got both, {self.rate} and {self.load}; give one")
        for name in ("rate", "load", "shards"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name}: must be > 0, got {value}")

    @property
    def settings(self) -> Settings:
        """What must be equal for histograms to be added up."""
        engine: Settings = {f.name: getattr(self.config, f.name) for f in fields(self.config)}
        return engine | {"step_cost": self.cost, "rate": self.rate, "load": self.load, "seed": self.seed}


def run(
    trace: Trace,
    job: Job,
    chosen: Sequence[int] | None = None,
    engine: EngineName = "process",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[StepHistogram, Provenance]:
    """Simulates a log, or some of its shards.

    The result is the same whichever engine runs the shards, and the same as that of merging runs of one shard each.

    Args:
        trace: the log.
        job: how.
        chosen: shards to run, from 1; None is all of them.
        engine: ``process`` uses the processors of this machine, ``ray`` a Ray cluster.
        progress: called with (requests done, requests in all).

    Returns:
        The histogram, and what a file of it says about its origin.

    Raises:
        ConfigError: a setting is out of range, or no request fits the engine.
        TraceError: the trace has no arrivals and the job gives no load, or fewer requests than shards.
    """
    numbers = range(1, job.shards + 1) if chosen is None else sorted(set(chosen))
    if wrong := [number for number in numbers if not 1 <= number <= job.shards]:
        raise ConfigError(f"shard: must be in 1..{job.shards}, got {wrong[0]}")
    if len(trace) < job.shards:
        raise TraceError(f"{trace.source}: {len(trace)} requests do not make {job.shards} shards; ask for fewer")
    rate = _rate(trace, job)
    digest = _digest(trace)
    arriving = trace if rate is None else at_rate(trace, rate, job.seed)
    pieces = [_piece(arriving, number, job.shards) for number in numbers]
    total = sum(map(len, pieces))
    tasks: list[Piece] = [(piece, job.config, job.step_us) for piece in pieces]
    results = _runner(engine, len(tasks))(tasks, lambda done: progress(done, total))
    parts = [
        Part(
            trace=digest,
            shard=number,
            shards=job.shards,
            name=trace.source,
            rate=rate,
            skipped=trace.skipped,
            requests=len(piece),
            finished=stats.finished,
            dropped=stats.dropped,
            preempted=stats.preempted,
            simulated_us=round(stats.end_s * 1e6),
        )
        for number, piece, (_, stats) in zip(numbers, pieces, results, strict=True)
    ]
    histogram = merge([histogram for histogram, _ in results], trace.source)
    if not len(histogram):
        raise ConfigError(f"{trace.source}: no request fits the engine; raise max_pages")
    return histogram, Provenance(job.settings, tuple(parts))


def run_piece(piece: Piece, progress: Callable[[int], None] = lambda done: None) -> Result:
    """Simulates one shard; what a worker runs."""
    trace, config, step_us = piece
    stats = SimulationStats()
    return simulate_histogram(trace, config, step_us, stats, progress), stats


def _rate(trace: Trace, job: Job) -> float | None:
    if job.load is not None:
        return job.load * sustained_rate(trace, job.config, job.step_us)
    if job.rate is None and not trace.has_arrivals:
        raise TraceError(f"{trace.source}: has no arrival times; give a rate or a load for Poisson arrivals")
    return job.rate


def _digest(trace: Trace) -> str:
    digest = hashlib.sha256()
    for values in (trace.arrival_s, trace.input_len, trace.output_len):
        digest.update(np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).data)
    return digest.hexdigest()


def _piece(trace: Trace, number: int, shards: int) -> Trace:
    start, stop = (len(trace) * edge // shards for edge in (number - 1, number))
    arrival_s = trace.arrival_s[start:stop]
    return replace(
        trace,
        arrival_s=arrival_s - arrival_s[0],
        input_len=trace.input_len[start:stop],
        output_len=trace.output_len[start:stop],
    )


Runner = Callable[[Sequence[Piece], Callable[[int], None]], list[Result]]


def _runner(engine: EngineName, pieces: int) -> Runner:
    if engine == "ray":
        from podgraph.workload.ray_engine import run_pieces

        return run_pieces
    return _in_processes if min(pieces, _processors()) > 1 else _in_turn


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_turn(pieces: Sequence[Piece], progress: Callable[[int], None]) -> list[Result]:
    def results() -> Iterator[Result]:
        done = 0
        for piece in pieces:
            yield run_piece(piece, lambda n, before=done: progress(before + n))  # type: ignore[misc]
            done += len(piece[0])
            progress(done)

    return list(results())


def _in_processes(pieces: Sequence[Piece], progress: Callable[[int], None]) -> list[Result]:
    workers = min(len(pieces), _processors())
    try:
        # Spawned: a fork would copy the locks of the threads that polars holds.
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            futures = {pool.submit(run_piece, piece): len(piece[0]) for piece in pieces}
            done = 0
            for future in as_completed(futures):
                future.result()
                done += futures[future]
                progress(done)
            return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise TraceError(
            f"{pieces[0][0].source}: a worker died: {error}; free memory, or ask for fewer shards"
        ) from error
