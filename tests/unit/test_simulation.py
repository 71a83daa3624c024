"""Policies, histograms and shards: against an engine that keeps a list of requests and does nothing clever."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podgraph.errors import ConfigError, TraceError
from podgraph.workload import shards
from podgraph.workload.requests import Trace, at_rate
from podgraph.workload.scheduler import POLICIES, SchedulerConfig, SimulationStats, StepShape
from podgraph.workload.shards import Job, run
from podgraph.workload.simulation import Step, simulate, simulate_histogram, sustained_rate
from podgraph.workload.steps import COLUMNS, KEY, StepHistogram
from podgraph.workload.traces import read_trace
from tests.plain_engine import plain_engine

AZURE_SLICE = Path(__file__).parents[1] / "data" / "azure_conv_slice.csv"
CONFIG = SchedulerConfig(512, 64, 4000, 16)


def make_trace(*requests: tuple[float, int, int], has_arrivals: bool = True) -> Trace:
    """A trace of (arrival_s, input_len, output_len)."""
    columns = np.array(requests, dtype=np.float64).reshape(-1, 3).T
    return Trace(columns[0], columns[1].astype(np.int64), columns[2].astype(np.int64), "test", 0, has_arrivals)


def steps_of(trace: Trace, **config: Any) -> list[list[tuple[int, int, int]]]:
    limits: dict[str, Any] = {"token_budget": 8, "max_running": 8, "max_pages": 100, "page_size": 4} | config
    return [[tuple(c) for c in step.requests] for step in simulate(trace, SchedulerConfig(**limits), 1e6)]


def test_prefill_first_lets_decodes_wait() -> None:
    # Request 1 arrives while 0 decodes: its two chunks have steps of their own.
    assert steps_of(make_trace((0, 3, 4), (0.5, 12, 2)), policy="prefill-first") == [
        [(0, 3, 3)],
        [(1, 8, 8)],
        [(1, 4, 12)],
        [(0, 1, 4), (1, 1, 13)],
        [(0, 1, 5)],
        [(0, 1, 6)],
    ]


def test_prefill_first_decodes_where_nothing_can_be_admitted() -> None:
    # 3 pages: request 0 holds 2, request 1 needs 2.
    assert steps_of(make_trace((0, 4, 3), (0, 4, 1)), policy="prefill-first", max_pages=3) == [
        [(0, 4, 4)],
        [(0, 1, 5)],
        [(0, 1, 6)],
        [(1, 4, 4)],
    ]


def test_a_chunk_leaves_rows_to_the_next_prefill() -> None:
    # The younger request ends its prefill first, and decodes beside the older one's prefill.
    assert steps_of(make_trace((0, 12, 1), (0, 3, 3)), chunk=4) == [
        [(0, 4, 4), (1, 3, 3)],
        [(0, 4, 8), (1, 1, 4)],
        [(0, 4, 12), (1, 1, 5)],
    ]


def test_max_prefills_holds_the_next_one_back() -> None:
    assert steps_of(make_trace((0, 3, 1), (0, 3, 1)), max_prefills=1) == [[(0, 3, 3)], [(1, 3, 3)]]


def test_the_policy_is_checked() -> None:
    with pytest.raises(ConfigError, match="policy: must be one of decode-first, prefill-first, got 'fifo'"):
        SchedulerConfig(8, 8, 8, 8, "fifo")  # type: ignore[arg-type]


def counted(steps: list[Step]) -> dict[tuple[int, ...], list[int]]:
    """The histogram of steps by the definition of each column."""
    counts: dict[tuple[int, ...], list[int]] = {}
    for step in steps:
        decodes = [c for c in step.requests if c[1] == 1]
        prefills = [c for c in step.requests if c[1] > 1]
        key = sum(c[1] for c in prefills), len(prefills), len(decodes)
        sums = counts.setdefault(key, [0, 0, 0, 0])
        pairs = sum(kv_len - qo_len + row + 1 for _, qo_len, kv_len in prefills for row in range(qo_len))
        for index, value in enumerate([1, sum(c[2] for c in decodes), sum(c[2] for c in prefills), pairs]):
            sums[index] += value
    return counts


def as_dict(histogram: StepHistogram) -> dict[tuple[int, ...], list[int]]:
    rows = zip(*(getattr(histogram, name).tolist() for name in COLUMNS), strict=True)
    return {row[: len(KEY)]: list(row[len(KEY) :]) for row in rows}


_requests = st.lists(
    st.tuples(st.floats(0, 3, allow_nan=False), st.integers(1, 40), st.integers(0, 30)), min_size=0, max_size=12
)


@given(
    requests=_requests,
    token_budget=st.integers(1, 32),
    max_running=st.integers(1, 32),
    max_pages=st.integers(1, 30),
    page_size=st.integers(1, 8),
    policy=st.sampled_from(POLICIES),
    chunk=st.none() | st.integers(1, 12),
    max_prefills=st.none() | st.integers(1, 3),
    step_s=st.sampled_from([0.01, 0.1, 1.0]),
)
@settings(deadline=None, max_examples=400)
def test_any_trace_under_any_policy(requests: list[tuple[float, int, int]], step_s: float, **limits: Any) -> None:
    limits["max_running"] = min(limits["max_running"], limits["token_budget"])
    config, trace = SchedulerConfig(**limits), make_trace(*sorted(requests))
    want, want_stats = plain_engine(trace, config, step_s)
    stats = SimulationStats()
    steps = list(simulate(trace, config, step_s * 1e6, stats))
    assert [step.requests for step in steps] == [step.requests for step in want]
    assert [step.decode_count for step in steps] == [step.decode_count for step in want]
    np.testing.assert_allclose([step.start_s for step in steps], [step.start_s for step in want])
    assert stats == want_stats
    histogram = simulate_histogram(trace, config, step_s * 1e6)
    assert as_dict(histogram) == counted(want)
    for step in steps:
        rows = [chunk.qo_len for chunk in step.requests]
        assert sum(rows) <= config.token_budget
        assert len(rows) <= config.max_running
        prefills = len(rows) - step.decode_count
        assert prefills <= (config.max_prefills or prefills)
        assert max(rows) <= (config.chunk or max(rows))
        if config.policy == "prefill-first":
            assert not (prefills and step.decode_count)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk", [None, 100])
def test_every_token_is_served_once(policy: Any, chunk: int | None) -> None:
    trace = read_trace(AZURE_SLICE)
    stats = SimulationStats()
    done: list[int] = []
    config = SchedulerConfig(512, 64, 16_000, 16, policy, chunk)
    histogram = simulate_histogram(trace, config, stats=stats, progress=done.append)
    assert stats == SimulationStats(finished=200)
    rows = int((histogram.steps * (histogram.prefill_len + histogram.decode_count)).sum())
    assert rows == int(trace.input_len.sum() + np.maximum(trace.output_len - 1, 0).sum())
    served: Counter[int] = Counter()
    for step in simulate(trace, config):
        for request, qo_len, _ in step.requests:
            served[request] += qo_len
    wanted = trace.input_len + np.maximum(trace.output_len - 1, 0)
    assert [served[request] for request in range(200)] == wanted.tolist()
    assert done == sorted(done)


def test_the_clock_follows_the_cost() -> None:
    trace = make_trace((0, 10, 3), (0, 2, 1))

    def cost(shape: StepShape) -> float:
        return 1000.0 * shape.prefill_len + 10.0 * shape.decode_count + shape.decode_kv_tokens

    steps = list(simulate(trace, SchedulerConfig(8, 8, 100, 4), cost))
    # 8 rows; 2 + 2 rows; then decodes that read 11 and 12 tokens.
    assert [step.start_s for step in steps] == pytest.approx([0.0, 0.008, 0.012, 0.012021])


@pytest.mark.parametrize("us", [0.0, -1.0, float("nan"), float("inf")])
def test_a_step_must_take_time(us: float) -> None:
    with pytest.raises(ConfigError, match="step_us: must be > 0"):
        list(simulate(make_trace((0, 1, 1)), CONFIG, us))
    with pytest.raises(ConfigError, match="step_us: a step must take > 0 us"):
        list(simulate(make_trace((0, 1, 1)), CONFIG, lambda shape: us))


def test_the_sustained_rate() -> None:
    # One after the other, 2 steps of 0.5 s each.
    trace = make_trace(*[(float(index), 4, 2) for index in range(10)])
    assert sustained_rate(trace, SchedulerConfig(8, 1, 100, 4), 5e5) == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="no request fits max_pages=1"):
        sustained_rate(trace, SchedulerConfig(8, 1, 1, 4))


def test_the_sustained_rate_of_a_long_log_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = make_trace(*[(float(index), 4, 2) for index in range(1000)])
    monkeypatch.setattr("podgraph.workload.simulation.SATURATION_REQUESTS", 100)
    assert sustained_rate(trace, SchedulerConfig(8, 1, 100, 4), 5e5) == pytest.approx(1.0)


def in_parts(trace: Trace, job: Job) -> list[StepHistogram]:
    return [run(trace, job, [number])[0] for number in range(1, job.shards + 1)]


@pytest.mark.parametrize("load", [{"load": 0.85}, {"rate": 30.0}, {}], ids=["load", "rate", "as-logged"])
def test_shards_are_the_same_however_they_run(load: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    trace = read_trace(AZURE_SLICE)
    job = Job(CONFIG, 10_000.0, "10 ms", **load, shards=3)
    in_processes, origin = run(trace, job)
    monkeypatch.setattr(shards, "_processors", lambda: 1)
    done: list[tuple[int, int]] = []
    in_turn, same_origin = run(trace, job, progress=lambda *n: done.append(n))
    assert as_dict(in_processes) == as_dict(in_turn)
    assert origin == same_origin
    assert done[-1] == (200, 200)
    parts = in_parts(trace, job)
    assert sum(part.total for part in parts) == in_turn.total
    assert origin.total("requests") == origin.total("finished") == 200
    # A shard begins with an empty engine, so cutting makes another histogram.
    assert as_dict(run(trace, Job(CONFIG, 10_000.0, "10 ms", **load))[0]) != as_dict(in_turn)


def test_poisson_arrivals_are_seeded() -> None:
    trace = make_trace(*[(0.0, 100, 10)] * 50, has_arrivals=False)
    with pytest.raises(TraceError, match="test: has no arrival times; give a rate or a load"):
        run(trace, Job(CONFIG, 1e4, "c"))
    histograms = [as_dict(run(trace, Job(CONFIG, 1e4, "c", rate=20.0, seed=seed))[0]) for seed in (1, 1, 2)]
    assert histograms[0] == histograms[1] != histograms[2]
    assert at_rate(trace, 20.0, 1).has_arrivals


@pytest.mark.parametrize(
    ("job", "chosen", "said"),
    [
        ({"rate": 1.0, "load": 1.0}, None, "rate, load: got both"),
        ({"load": 0.0}, None, "load: must be > 0"),
        ({"rate": float("nan")}, None, "rate: must be > 0"),
        ({"shards": 2}, [3], r"shard: must be in 1\.\.2, got 3"),
        ({"shards": 201}, None, "200 requests do not make 201 shards"),
        ({"config": SchedulerConfig(512, 64, 1, 16)}, None, "no request fits the engine"),
    ],
)
def test_jobs_that_cannot_run(job: dict[str, Any], chosen: list[int] | None, said: str) -> None:
    with pytest.raises((ConfigError, TraceError), match=said):
        run(read_trace(AZURE_SLICE), Job(**({"config": CONFIG, "step_us": 1e4, "cost": "c"} | job)), chosen)


def test_ray_gives_the_same_histogram(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    # Its own warnings are not ours, and its workers look at nothing of this process.
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    trace = read_trace(AZURE_SLICE)
    job = Job(CONFIG, 10_000.0, "10 ms", load=0.85, shards=4)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        done: list[tuple[int, int]] = []
        histogram, origin = run(trace, job, engine="ray", progress=lambda *n: done.append(n))
    finally:
        ray.shutdown()
    want, want_origin = run(trace, job)
    assert as_dict(histogram) == as_dict(want)
    assert origin == want_origin
    assert done[-1] == (200, 200)


def test_ray_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigError, match=r"engine ray: ray is not installed; pip install 'podgraph\[ray\]'"):
        run(read_trace(AZURE_SLICE), Job(CONFIG, 1e4, "c", shards=2), engine="ray")
