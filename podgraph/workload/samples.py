"""Steps to tune for, and steps to check on: from a log, whichever kind it is."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from podgraph.errors import ConfigError, TraceError
from podgraph.workload.requests import Trace, at_rate
from podgraph.workload.shards import Job
from podgraph.workload.simulation import simulate_histogram, sustained_rate
from podgraph.workload.steps import StepHistogram, merge

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Samples:
    """Two histograms of the same engine.

    Attributes:
        train: what a set is chosen for.
        heldout: what came later; None where nothing was held out.
    """

    train: StepHistogram
    heldout: StepHistogram | None = None

    @property
    def whole(self) -> StepHistogram:
        """Both together."""
        return self.train if self.heldout is None else merge([self.train, self.heldout], self.train.source)


def samples_of(
    log: Trace | StepHistogram,
    job: Job | None,
    holdout: float = 0.0,
    progress: Progress = lambda done, total: None,
) -> Samples:
    """The steps of a log: as it counts them, or as a simulated engine makes them.

    Args:
        log: requests, or steps that were counted.
        job: how requests are simulated; None where the log holds steps. Its shards are not used.
        holdout: share of the requests, the last ones, whose steps are kept apart: an engine of its own serves them.
        progress: called with (requests done, requests in all).

    Raises:
        ConfigError: a request log without a job, or a held-out part of steps that have no order.
        TraceError: the log has too few requests, or no arrivals and the job gives no load.
    """
    if not 0 <= holdout < 1:
        raise ConfigError(f"holdout: must be in [0, 1), got {holdout}")
    if isinstance(log, StepHistogram):
        if holdout:
            raise ConfigError(
                f"{log.source}: holdout: counted steps have no order; give the request log, or leave it out"
            )
        return Samples(log)
    if job is None:
        raise ConfigError(
            f"{log.source}: is a request log, and the engine is not known; give token_budget and max_running, "
            "or a histogram of `podgraph trace simulate`"
        )
    arriving = _arriving(log, job)
    cut = len(arriving) - round(holdout * len(arriving))
    if not cut or (holdout and cut == len(arriving)):
        raise TraceError(f"{log.source}: {len(log)} requests do not make two parts at holdout={holdout}")
    position = np.arange(len(arriving))
    parts = [arriving.keep(position < cut)] + ([arriving.keep(position >= cut)] if holdout else [])
    histograms, done = [], 0
    for part in parts:
        moved = dataclasses.replace(part, arrival_s=part.arrival_s - part.arrival_s[0])
        report = functools.partial(_report, progress, done, len(arriving))
        histogram = simulate_histogram(moved, job.config, job.step_us, progress=report)
        if not len(histogram):
            raise ConfigError(f"{log.source}: no request fits the engine; raise max_pages")
        histograms.append(histogram)
        done += len(part)
        progress(done, len(arriving))
    return Samples(*histograms)


def _report(progress: Progress, before: int, total: int, done: int) -> None:
    progress(before + done, total)


def _arriving(log: Trace, job: Job) -> Trace:
    rate = job.rate
    if job.load is not None:
        rate = job.load * sustained_rate(log, job.config, job.step_us)
    if rate is None and not log.has_arrivals:
        raise TraceError(f"{log.source}: has no arrival times; give a rate or a load for Poisson arrivals")
    return log if rate is None else at_rate(log, rate, job.seed)
