"""The scheduler simulation: literal schedules, and what must hold for any trace."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podgraph.errors import ConfigError
from podgraph.workload.scheduler import Chunk, SchedulerConfig, SimulationStats
from podgraph.workload.simulation import Step, simulate
from podgraph.workload.traces import Trace, read_trace

AZURE_SLICE = Path(__file__).parents[1] / "data" / "azure_conv_slice.csv"


def make_trace(*requests: tuple[float, int, int]) -> Trace:
    """A trace of (arrival_s, input_len, output_len)."""
    columns = np.array(requests, dtype=np.float64).reshape(-1, 3).T
    return Trace(columns[0], columns[1].astype(np.int64), columns[2].astype(np.int64), "test", 0, True)


def make_config(
    token_budget: int = 8, max_running: int = 8, max_pages: int = 100, page_size: int = 4, **more: Any
) -> SchedulerConfig:
    return SchedulerConfig(token_budget, max_running, max_pages, page_size, **more)


def chunks(trace: Trace, config: SchedulerConfig, stats: SimulationStats | None = None) -> list[list[Chunk]]:
    return [list(step.requests) for step in simulate(trace, config, 1e6, stats)]


def test_one_request() -> None:
    steps = list(simulate(make_trace((0, 10, 3)), make_config(), 1e6))
    assert [step.requests for step in steps] == [
        (Chunk(0, 8, 8),),
        (Chunk(0, 2, 10),),
        (Chunk(0, 1, 11),),
        (Chunk(0, 1, 12),),
    ]
    assert [step.prefill_len for step in steps] == [8, 2, 0, 0]
    assert [step.prefill_count for step in steps] == [1, 1, 0, 0]
    assert [step.decode_count for step in steps] == [0, 0, 1, 1]
    assert [step.start_s for step in steps] == [0.0, 1.0, 2.0, 3.0]


def test_decodes_come_first_and_prefills_share_what_is_left() -> None:
    assert chunks(make_trace((0, 3, 3), (0, 9, 1), (0, 4, 2)), make_config()) == [
        [(0, 3, 3), (1, 5, 5)],
        [(0, 1, 4), (1, 4, 9), (2, 3, 3)],
        [(0, 1, 5), (2, 1, 4)],
        [(2, 1, 5)],
    ]


def test_the_last_row_of_a_prefill_alone_is_no_decode() -> None:
    steps = list(simulate(make_trace((0, 9, 2)), make_config(), 1e6))
    assert steps[1] == Step((Chunk(0, 1, 9),), decode_count=0, start_s=1.0)
    assert (steps[1].prefill_count, steps[1].prefill_len) == (1, 1)
    assert steps[2] == Step((Chunk(0, 1, 10),), decode_count=1, start_s=2.0)


@pytest.mark.parametrize("output_len", [0, 1])
def test_at_most_one_output_token_needs_no_decode(output_len: int) -> None:
    assert chunks(make_trace((0, 5, output_len)), make_config()) == [[(0, 5, 5)]]


def test_the_clock_waits_for_arrivals_and_jumps_when_idle() -> None:
    trace = make_trace((0.5, 2, 2), (1.0, 2, 1), (1.6, 2, 1), (100.25, 2, 2))
    steps = list(simulate(trace, make_config(), 1e6))
    assert [step.start_s for step in steps] == [0.5, 1.5, 2.5, 100.25, 101.25]
    assert [[chunk.request for chunk in step.requests] for step in steps] == [[0], [0, 1], [2], [3], [3]]


def test_max_running_holds_requests_back() -> None:
    assert chunks(make_trace((0, 2, 2), (0, 2, 1)), make_config(max_running=1)) == [
        [(0, 2, 2)],
        [(0, 1, 3)],
        [(1, 2, 2)],
    ]


def test_admission_waits_for_pages_and_nobody_overtakes() -> None:
    # 3 pages of 4: request 0 holds 2, request 1 needs 2, request 2 would fit but waits behind it.
    trace = make_trace((0, 4, 2), (0, 4, 1), (0, 2, 1))
    assert chunks(trace, make_config(max_pages=3)) == [
        [(0, 4, 4)],
        [(0, 1, 5)],
        [(1, 4, 4), (2, 2, 2)],
    ]


def test_growth_preempts_the_youngest_which_begins_again() -> None:
    trace = make_trace((0, 3, 4), (0, 2, 3))
    stats = SimulationStats()
    assert chunks(trace, make_config(max_pages=2), stats) == [
        [(0, 3, 3), (1, 2, 2)],
        [(0, 1, 4), (1, 1, 3)],
        [(0, 1, 5)],
        [(0, 1, 6)],
        [(1, 2, 2)],
        [(1, 1, 3)],
        [(1, 1, 4)],
    ]
    assert stats == SimulationStats(finished=2, dropped=0, preempted=1)


def test_the_youngest_preempts_itself() -> None:
    # Request 1 grows first: its 3 input tokens and one more fill its page.
    trace = make_trace((0, 1, 4), (0, 3, 4))
    stats = SimulationStats()
    assert chunks(trace, make_config(max_pages=2), stats) == [
        [(0, 1, 1), (1, 3, 3)],
        [(0, 1, 2), (1, 1, 4)],
        [(0, 1, 3)],
        [(0, 1, 4), (1, 3, 3)],
        [(1, 1, 4)],
        [(1, 1, 5)],
        [(1, 1, 6)],
    ]
    assert stats.preempted == 1


@pytest.mark.parametrize(
    ("input_len", "output_len", "dropped"),
    [
        pytest.param(7, 1, 0, id="input-fits"),
        pytest.param(8, 1, 1, id="no-page-for-one-more"),
        pytest.param(4, 5, 0, id="last-token-needs-no-page"),
        pytest.param(4, 6, 1, id="output-too-long"),
        pytest.param(2**31 - 1, 2**31 - 1, 1, id="huge"),
    ],
)
def test_what_never_fits_is_dropped(input_len: int, output_len: int, dropped: int) -> None:
    stats = SimulationStats()
    steps = list(simulate(make_trace((0, input_len, output_len), (5, 1, 1)), make_config(max_pages=2), 1e6, stats))
    assert stats == SimulationStats(finished=2 - dropped, dropped=dropped, preempted=0)
    assert steps[-1].requests == (Chunk(1, 1, 1),)


def test_no_request_no_step() -> None:
    assert chunks(make_trace(), make_config()) == []


def test_steps_come_one_by_one() -> None:
    trace = make_trace(*((float(arrival), 2**31 - 1, 1) for arrival in range(3)))
    endless = simulate(trace, make_config(max_pages=2**31))
    assert len(list(itertools.islice(endless, 5))) == 5


@pytest.mark.parametrize("field", ["token_budget", "max_running", "max_pages", "page_size", "chunk", "max_prefills"])
@pytest.mark.parametrize("value", [0, -1])
def test_limits_must_be_positive(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: must be > 0, got {value}"):
        make_config(**{field: value})


def test_other_bad_limits() -> None:
    with pytest.raises(ConfigError, match="max_running: must be <= token_budget=4, got 5"):
        make_config(token_budget=4, max_running=5)


def check(trace: Trace, config: SchedulerConfig, step_us: float = 20_000.0) -> SimulationStats:
    """Replays a simulation with nothing but the chunks, and holds every promise that `simulate` makes."""
    input_len: list[int] = trace.input_len.tolist()
    output_len: list[int] = trace.output_len.tolist()
    page_size = config.page_size

    def pages(tokens: int) -> int:
        return -(-tokens // page_size)

    def peak(request: int) -> int:
        return input_len[request] + max(output_len[request] - 1, 1)

    fitting = [request for request in range(len(trace)) if pages(peak(request)) <= config.max_pages]
    kv_len = dict.fromkeys(range(len(trace)), 0)
    prefill_rows, decodes = dict(kv_len), dict(kv_len)
    last_step = dict(kv_len)
    restarts = 0
    earliest_s = 0.0
    stats = SimulationStats()
    steps = list(simulate(trace, config, step_us, stats))
    for number, step in enumerate(steps):
        assert step.requests
        assert step.start_s >= earliest_s
        earliest_s = step.start_s + step_us / 1e6
        indices = [chunk.request for chunk in step.requests]
        # Nobody overtakes, so the order of admission is the order of arrival.
        assert indices == sorted(set(indices))
        assert len(indices) <= config.max_running
        decode_count = prefill_len = 0
        for request, qo_len, chunk_kv_len in step.requests:
            assert trace.arrival_s[request] <= step.start_s
            assert qo_len >= 1
            if chunk_kv_len == qo_len:  # the first chunk of a request, or of its next try
                restarts += kv_len[request] > 0
                kv_len[request] = prefill_rows[request] = decodes[request] = 0
            else:
                assert last_step[request] == number - 1, "a running request takes part in every step"
            last_step[request] = number
            if kv_len[request] >= input_len[request]:
                assert qo_len == 1
                decodes[request] += 1
                decode_count += 1
            else:
                prefill_rows[request] += qo_len
                prefill_len += qo_len
            kv_len[request] += qo_len
            assert kv_len[request] == chunk_kv_len
            assert chunk_kv_len <= max(input_len[request], input_len[request] + output_len[request] - 1)
        assert (step.decode_count, step.prefill_len) == (decode_count, prefill_len)
        assert step.prefill_count == len(indices) - decode_count
        assert decode_count + prefill_len <= config.token_budget
        # All pages, as no running request is missing from a step.
        held = sum(pages(max(input_len[chunk.request] + 1, chunk.kv_len)) for chunk in step.requests)
        assert held <= config.max_pages
    assert [request for request in range(len(trace)) if kv_len[request]] == fitting
    for request in fitting:
        assert prefill_rows[request] == input_len[request]
        assert decodes[request] == max(output_len[request] - 1, 0)
    assert (stats.finished, stats.dropped) == (len(fitting), len(trace) - len(fitting))
    assert stats.preempted == restarts
    assert list(simulate(trace, config, step_us)) == steps
    return stats


_requests = st.lists(
    st.tuples(st.floats(0, 3, allow_nan=False), st.integers(1, 40), st.integers(0, 30)), min_size=0, max_size=12
)


@given(
    requests=_requests,
    token_budget=st.integers(1, 32),
    max_running=st.integers(1, 32),
    max_pages=st.integers(1, 30),
    page_size=st.integers(1, 8),
    step_us=st.sampled_from([1e4, 1e5, 1e6]),
)
@settings(deadline=None, max_examples=300)
def test_any_trace(
    requests: list[tuple[float, int, int]],
    token_budget: int,
    max_running: int,
    max_pages: int,
    page_size: int,
    step_us: float,
) -> None:
    config = SchedulerConfig(token_budget, min(max_running, token_budget), max_pages, page_size)
    check(make_trace(*sorted(requests)), config, step_us)


@pytest.mark.parametrize("max_pages", [4000, 700], ids=["ample", "scarce"])
def test_azure_slice(max_pages: int) -> None:
    stats = check(read_trace(AZURE_SLICE), SchedulerConfig(512, 64, max_pages, 16))
    assert stats.finished == 200
    assert (stats.preempted > 0) == (max_pages == 700)


def test_azure_slice_in_numbers() -> None:
    steps = list(simulate(read_trace(AZURE_SLICE), SchedulerConfig(512, 64, 4000, 16)))
    assert sum(step.prefill_len for step in steps) == 180_695
    assert sum(step.decode_count for step in steps) == 47_050 - 200
    assert max(step.prefill_len + step.decode_count for step in steps) == 512
