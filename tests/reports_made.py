"""Reports that tests make of shipped files and a made-up workload."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np

from podgraph.report.content import Report, make_report
from podgraph.report.source import Counted, Workload, read_source
from podgraph.workload.cost_files import costs_of
from podgraph.workload.costs import Eager, Scope
from podgraph.workload.profile import load_profile
from podgraph.workload.steps import StepHistogram

ROOT = Path(__file__).resolve().parents[1]
CATALOG = ROOT / "tests" / "data" / "llama3-8b-h200.podcat"
CONFIG = ROOT / "configs" / "llama3-8b.yaml"


def steps_of_an_engine() -> StepHistogram:
    """A hundred kinds of steps, of which ``configs/llama3-8b.yaml`` holds the most."""
    rng = np.random.default_rng(1)
    shapes = {(0, 0, int(n)) for n in rng.integers(1, 64, 40)}
    shapes |= {(int(p), int(r), int(d)) for p, r, d in rng.integers((2, 1, 0), (1500, 3, 60), (60, 3)) if p > r}
    rows = np.array(sorted(shapes), np.int64)
    steps = rng.integers(1, 100, len(rows))
    sums = dict.fromkeys(("decode_kv_tokens", "prefill_kv_tokens", "prefill_pairs"), steps * 1000)
    return StepHistogram(rows[:, 0], rows[:, 1], rows[:, 2], steps, **sums, source="made up")


def made(
    scope: Scope = "step",
    *,
    path: Path = CONFIG,
    name: str | None = None,
    steps: StepHistogram | None = None,
    trace: str = "steps.csv",
    counted: Counted = "logged",
    eager: Eager = "penalty",
    buckets: int | None = None,
    again: bool = False,
) -> Report:
    """The report of a file's buckets, or of the first of them; made once, or ``again``."""
    make = _made.__wrapped__ if again else _made
    return make(scope, path, name, steps, trace, counted, eager, buckets)


@functools.cache
def _made(
    scope: Scope,
    path: Path,
    name: str | None,
    steps: StepHistogram | None,
    trace: str,
    counted: Counted,
    eager: Eager,
    buckets: int | None,
) -> Report:
    source = read_source(path)
    source = dataclasses.replace(source, name=name or source.name)
    if buckets is not None:
        build = dataclasses.replace(source.build, buckets=source.build.buckets[:buckets])
        source = dataclasses.replace(source, build=build)
    profile = load_profile("h200")
    workload = Workload(steps_of_an_engine() if steps is None else steps, trace, counted, 1600, 72)
    return make_report(source, workload, costs_of(source.build, profile, scope), profile, eager)
