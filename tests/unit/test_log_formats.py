"""Request logs in every format and compression, several at once, of mapped columns; and hostile files."""

from __future__ import annotations

import gzip
import io
import json
import os
import tracemalloc
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from podgraph.errors import TraceError
from podgraph.workload import benchmark_outputs, fast_rows
from podgraph.workload.bad_rows import SHOWN, BadRows
from podgraph.workload.layouts import parse_columns
from podgraph.workload.log_files import MAX_LINE_BYTES
from podgraph.workload.requests import Trace
from podgraph.workload.traces import read_log, read_trace

Pack = Callable[[bytes], bytes]


def plain(data: bytes) -> bytes:
    return data


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def gzip_members(data: bytes) -> bytes:
    """Two members, as when one log is appended to another."""
    half = data.index(b"\n", len(data) // 2) + 1
    return gzip.compress(data[:half]) + gzip.compress(data[half:])


PACKS = pytest.mark.parametrize("pack", [plain, gzip.compress, gzip_members, zstd])

# Long enough for the fast way, with times in every form.
N = 300
TIMES_MS = [7 * index for index in range(N)]
INPUT = [1 + index * 37 % 5000 for index in range(N)]
OUTPUT = [index * 11 % 700 for index in range(N)]


def csv_log() -> bytes:
    return b"arrival_time_ns,input_toks,output_toks\n" + b"".join(
        b"%d,%d,%d\n" % (t * 10**6, i, o) for t, i, o in zip(TIMES_MS, INPUT, OUTPUT, strict=True)
    )


def azure_log() -> bytes:
    rows = zip(TIMES_MS, INPUT, OUTPUT, strict=True)
    lines = (f"{datetime.fromtimestamp(1.7e9 + t / 1e3, timezone.utc)},{i},{o}\n" for t, i, o in rows)
    return ("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines)).encode()


def jsonl_log() -> bytes:
    rows = zip(TIMES_MS, INPUT, OUTPUT, strict=True)
    return b"".join(
        json.dumps({"timestamp": t, "input_length": i, "output_length": o, "hash_ids": [1, 2]}).encode() + b"\n"
        for t, i, o in rows
    )


def burst_log() -> bytes:
    head = b"Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    rows = zip(TIMES_MS, INPUT, OUTPUT, strict=True)
    return head + b"".join(b"%.3f,s,1,GPT-4,%d,%d,%d,API log\n" % (t / 1e3, i, o, i + o) for t, i, o in rows)


def parquet(**columns: Any) -> bytes:
    buffer = io.BytesIO()
    pl.DataFrame(columns).write_parquet(buffer)
    return buffer.getvalue()


def parquet_log() -> bytes:
    return parquet(timestamp=TIMES_MS, input_length=INPUT, output_length=[float(o) for o in OUTPUT], note=["x"] * N)


def write(directory: Path, data: bytes | str, name: str = "log") -> Path:
    path = directory / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def same(trace: Trace) -> None:
    np.testing.assert_allclose(trace.arrival_s, np.array(TIMES_MS) / 1e3, rtol=0, atol=1e-12)
    assert trace.input_len.tolist() == INPUT
    assert trace.output_len.tolist() == OUTPUT
    assert (trace.skipped, trace.has_arrivals) == (0, True)


@PACKS
@pytest.mark.parametrize("log", [csv_log, azure_log, jsonl_log, burst_log])
def test_text_logs_however_they_are_packed(tmp_path: Path, log: Callable[[], bytes], pack: Pack) -> None:
    same(read_trace(write(tmp_path, pack(log()))))


@pytest.mark.parametrize("pack", [plain, gzip.compress, zstd])
def test_parquet_however_it_is_packed(tmp_path: Path, pack: Pack) -> None:
    same(read_trace(write(tmp_path, pack(parquet_log()), "log.csv")))


@pytest.mark.parametrize("log", [csv_log, azure_log, jsonl_log, burst_log])
def test_the_fast_way_takes_every_row_of_a_good_log(
    tmp_path: Path, log: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object) -> None:
        raise AssertionError("a row went the slow way")

    monkeypatch.setattr("podgraph.workload.text_rows.parse_row", refused)
    same(read_trace(write(tmp_path, log())))


def test_parquet_with_dates_and_texts(tmp_path: Path) -> None:
    when = pl.Series([1_700_000_000_000_000 + 7000 * i for i in range(3)]).cast(pl.Datetime("us"))
    data = parquet(TIMESTAMP=when, ContextTokens=["5", "x", "7"], GeneratedTokens=[1, 2, 3])
    trace = read_trace(write(tmp_path, data))
    assert trace.input_len.tolist() == [5, 7]
    assert trace.arrival_s.tolist() == pytest.approx([0, 0.014])
    (said,) = trace.bad_rows
    assert said.endswith("row 2: ContextTokens: must be a whole number in 1..2147483647, got 'x'")


@pytest.mark.parametrize(
    ("columns", "when"),
    [
        ("arrival_time_ns", [10**18 + 1, 10**18 + 1 + 10**9, None, -5, 10**18 + 1 + 2 * 10**9]),
        ("arrival_time_ns", pl.Series([0, 10**9, None, 2**63 + 5, 2 * 10**9], dtype=pl.UInt64)),
        ("timestamp", [0.5, 1000.5, float("nan"), -0.5, 2000.5]),
        ("timestamp", [1e300, 1e300, 0.0, 1000.0, 2000.0]),
        ("timestamp", ["0.5", "1000.5", "x", "", "2000.5"]),
        ("TIMESTAMP", pl.Series([0, 10**9, None, -1, 2 * 10**9]).cast(pl.Datetime("ns"))),
        ("TIMESTAMP", pl.Series([0, 10**3, None, -1, 2 * 10**3]).cast(pl.Datetime("ms"))),
        ("TIMESTAMP", pl.Series([0, 10**6, 2**62, -1, 2 * 10**6]).cast(pl.Datetime("us", "UTC"))),
        ("TIMESTAMP", ["2024-01-01 00:00:00", "2024-01-01 00:00:01Z", None, "x", "2024-01-01 00:00:02"]),
    ],
)
def test_times_of_parquet(tmp_path: Path, columns: str, when: Any) -> None:
    frame = pl.DataFrame({"when": when, "in": [1] * 5, "out": [1] * 5})
    frame.write_parquet(tmp_path / "log")
    unit = {"arrival_time_ns": "ns", "timestamp": "ms", "TIMESTAMP": "date"}[columns]
    trace = read_trace(tmp_path / "log", columns=f"arrival=when,input_len=in,output_len=out,time_unit={unit}")
    assert trace.arrival_s.tolist() == [0.0, 1.0, 2.0]
    assert trace.skipped == 2


def test_a_long_parquet_comes_in_batches(tmp_path: Path) -> None:
    n = 600_000
    frame = pl.DataFrame({"input_toks": np.full(n, 7), "output_toks": [1] * n, "arrival_time_ns": np.arange(n)})
    frame.with_columns(input_toks=pl.when(pl.int_range(n) == n - 2).then(0).otherwise("input_toks")).write_parquet(
        tmp_path / "log"
    )
    trace = read_trace(tmp_path / "log")
    assert (len(trace), trace.skipped) == (n - 1, 1)
    assert f"row {n - 1}: input_toks" in trace.bad_rows[0]
    with pytest.raises(TraceError, match=f"row {n - 1}: input_toks"):
        read_trace(tmp_path / "log", bad=BadRows("fail"))
    assert len(read_trace(tmp_path / "log", limit=10)) == 10


@pytest.mark.parametrize(
    "values",
    [[1, None, 3], [1.0, float("nan"), 3.0], [1.0, 2.5, 3.0], [1.0, float("inf"), 3.0], [1, 0, 3], [1, -5, 3]],
    ids=["null", "nan", "fraction", "inf", "zero", "negative"],
)
def test_bad_rows_of_parquet(tmp_path: Path, values: list[Any]) -> None:
    trace = read_trace(write(tmp_path, parquet(input_toks=values, output_toks=[1] * 3, arrival_time_ns=[1, 2, 3])))
    assert trace.input_len.tolist() == [1, 3]
    assert trace.skipped == 1


def test_benchmark_of_vllm(tmp_path: Path) -> None:
    run = {
        "backend": "vllm",
        "input_lens": [10, 20, 30, 0],
        "output_lens": [1, 2, 3, 0],
        "generated_texts": ['says "input_lens": [1, 2]', "]", "[", ""],
        "itls": [[0.1], [], [0.2, 0.3], []],
        "start_times": [100.5, 101.5, 101.0, 102.0],
    }
    for text in (json.dumps(run), json.dumps(run, indent=2)):
        trace = read_trace(write(tmp_path, text))
        # Requests are listed as they were made; not all start in that order.
        assert trace.input_len.tolist() == [10, 30, 20]
        assert trace.arrival_s.tolist() == [0.0, 0.5, 1.0]
        assert trace.bad_rows[0].endswith(
            "run 1, request 4: input_lens: must be a whole number in 1..2147483647, got 0"
        )


def test_benchmark_of_sglang(tmp_path: Path) -> None:
    runs = [{"input_lens": [1, 2], "output_lens": [3, 4], "x": 1}, {"output_lens": [5], "input_lens": [6]}]
    trace = read_trace(write(tmp_path, "".join(json.dumps(run) + "\n" for run in runs)))
    assert (trace.input_len.tolist(), trace.output_len.tolist()) == ([1, 2, 6], [3, 4, 5])
    assert not trace.has_arrivals


@pytest.mark.parametrize(
    "text",
    ['{"input_lens": [1, 2], "output_lens": [3]}', '{"input_lens": [1, 2]}', '{"input_lens": {"a": 1}}'],
    ids=["lengths", "alone", "no-array"],
)
def test_benchmarks_that_do_not_agree(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match="run 1: must have input_lens and output_lens of one length"):
        read_trace(write(tmp_path, text))


def test_benchmarks_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, '{"input_lens": [1, 2], "output_lens": [3, 4]}')
    monkeypatch.setattr(benchmark_outputs, "MAX_ARRAY_BYTES", 5)
    with pytest.raises(TraceError, match="input_lens: an array above 5 bytes"):
        read_trace(path)
    monkeypatch.setattr(benchmark_outputs, "MAX_BYTES", 20)
    with pytest.raises(TraceError, match="a benchmark's output above 20 bytes"):
        read_trace(path)


def test_columns_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, "when,in,out,TIMESTAMP\n1000,5,6,x\n2500,7,8,y\n")
    trace = read_trace(path, columns="arrival=when, input_len=in,output_len=out,time_unit=ms")
    assert (trace.arrival_s.tolist(), trace.input_len.tolist()) == ([0.0, 1.5], [5, 7])
    assert not read_trace(path, columns="input_len=out,output_len=in").has_arrivals
    with pytest.raises(TraceError, match=r"unknown columns: got \['when', 'in', 'out', 'TIMESTAMP'\]"):
        read_trace(path, columns="input_len=prompt,output_len=out")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("input_len=a", "output_len is missing"),
        ("input_len=a,output_len=b,input_len=c", "each once"),
        ("input_len=a,output_len", "got 'output_len'"),
        ("input=a,output_len=b", "got 'input=a'"),
        ("input_len=a,output_len=b,time_unit=ms", "beside an arrival"),
        ("input_len=a,output_len=b,arrival=c,time_unit=h", "time_unit: got 'h'"),
        ("", "got ''"),
    ],
)
def test_columns_that_are_no_layout(text: str, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        parse_columns(text)


MS = '{{"timestamp": {}, "input_length": {}, "output_length": 1}}\n'


def test_files_on_one_clock_go_on(tmp_path: Path) -> None:
    one = write(tmp_path, MS.format(1000, 1) + MS.format(2000, 2), "one")
    two = write(tmp_path, MS.format(5000, 3), "two")
    trace = read_trace([one, two])
    assert trace.arrival_s.tolist() == [0.0, 1.0, 4.0]
    assert trace.source == f"{one}, {two}"


def test_files_with_clocks_of_their_own_follow_on(tmp_path: Path) -> None:
    one = write(tmp_path, MS.format(1000, 1) + MS.format(3000, 2), "one")
    two = write(tmp_path, MS.format(10, 3) + MS.format(510, 4), "two")
    other = write(tmp_path, "arrival_time_ns,input_toks,output_toks\n5,6,7\n", "other")
    trace = read_trace([one, two, other])
    assert trace.arrival_s.tolist() == [0.0, 2.0, 2.0, 2.5, 2.5]
    assert trace.skipped == 0


def test_dated_files_out_of_order_are_refused(tmp_path: Path) -> None:
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    one = write(tmp_path, head + "2024-05-10 00:00:00,1,1\n", "one")
    two = write(tmp_path, head + "2024-05-11 00:00:00,2,1\n", "two")
    assert read_trace([one, two]).arrival_s.tolist() == [0.0, 86400.0]
    with pytest.raises(TraceError, match="one: begins before the file ahead of it ends"):
        read_trace([two, one])


def test_files_that_do_not_go_together(tmp_path: Path) -> None:
    timed = write(tmp_path, MS.format(0, 1), "timed")
    untimed = write(tmp_path, "num_prefill_tokens,num_decode_tokens\n1,1\n", "untimed")
    steps = write(tmp_path, "prefill_len,prefill_requests,decode_count\n0,0,1\n", "steps")
    with pytest.raises(TraceError, match="untimed: has no arrival times"):
        read_trace([timed, untimed])
    with pytest.raises(TraceError, match="timed: has arrival times"):
        read_trace([untimed, timed])
    with pytest.raises(TraceError, match="steps: a step log, not a request log"):
        read_log([timed, steps])
    with pytest.raises(TraceError, match="timed: a request log"):
        read_log([steps, timed])
    with pytest.raises(TraceError, match="empty list"):
        read_log([])


def test_bad_rows_are_shown_or_fatal(tmp_path: Path) -> None:
    lines = csv_log().splitlines(keepends=True)
    for index in range(SHOWN + 3):
        lines[20 + index * 30] = b"oops\n"
    path = write(tmp_path, b"".join(lines))
    bad = BadRows()
    trace = read_trace(path, bad=bad)
    assert (trace.skipped, bad.count, len(trace)) == (SHOWN + 3, SHOWN + 3, N - SHOWN - 3)
    assert len(trace.bad_rows) == SHOWN
    assert trace.bad_rows[0] == f"{path}: line 21: must have 3 fields as the header has, got 1"
    with pytest.raises(TraceError, match=r"line 21: must have 3 fields .*; mend the row, or skip bad rows"):
        read_trace(path, bad=BadRows("fail"))


def test_a_time_going_back_says_by_how_much(tmp_path: Path) -> None:
    lines = csv_log().splitlines(keepends=True)
    lines[250] = b"0,1,1\n"
    trace = read_trace(write(tmp_path, b"".join(lines)))
    assert trace.bad_rows == (
        f"{tmp_path}/log: line 251: arrival_time_ns: must not go back, got 1.736 s before a row ahead of it",
    )


def test_a_time_going_back_in_parquet(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, parquet(arrival_time_ns=[5, 4, 6], input_toks=[1, 2, 3], output_toks=[1] * 3)))
    assert trace.input_len.tolist() == [1, 3]
    assert "row 2: arrival_time_ns: must not go back" in trace.bad_rows[0]


def test_both_ways_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = [b'"1",2,3', b" 4 , 5.0 ,6", b"7,8,9 ", b"+1,2,3", b"1e3,2,3", b"1.5,2,3", b"x,1,1", b"1,,2", b"1,2,3,4"]
    odd += [
        b"\xff,1,1",
        b"1,2,\xef\xbf\xbd",
        b"2000-01-01,1,1",
        b"99999999999999999999,1,1",
        b"1,2,3\r",
        b"",
        b"5,1.,2.",
    ]
    lines = csv_log().splitlines()
    for index, row in enumerate(odd):
        number, *_ = lines[(index + 1) * 15].split(b",")
        lines[(index + 1) * 15] = row.replace(b"1,", number + b",", 1) if row[:2] == b"1," else row
    path = write(tmp_path, b"\n".join(lines))
    fast = read_trace(path)
    monkeypatch.setattr(fast_rows, "_WORTHWHILE", 10**9)
    slow = read_trace(path)
    for name in ("arrival_s", "input_len", "output_len"):
        assert getattr(fast, name).tolist() == getattr(slow, name).tolist()
    assert (fast.skipped, fast.bad_rows) == (slow.skipped, slow.bad_rows)
    assert fast.skipped > 5


_field = st.one_of(
    st.integers(-5, 2**65).map(str), st.floats().map(repr), st.text("0123456789.eE+- \t\"'x\u00e9", max_size=6)
)
_json_value = st.one_of(
    st.integers(-5, 2**65), st.floats(), st.none(), st.booleans(), st.text(max_size=4), st.integers(1, 99).map(str)
)


@given(rows=st.lists(st.tuples(_field, _field, _field), min_size=1, max_size=8))
@settings(deadline=None, max_examples=60)
def test_both_ways_read_any_csv_alike(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, str]]
) -> None:
    good = [f"{10**18},{i},{o}" for i, o in zip(INPUT[:80], OUTPUT, strict=False)]
    text = "\n".join(["arrival_time_ns,input_toks,output_toks", *(",".join(row) for row in rows), *good])
    _compare(write(tmp_path_factory.getbasetemp(), text, "any.csv"))


@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {}, optional=dict.fromkeys(("timestamp", "input_length", "output_length", "x"), _json_value)
        ),
        max_size=8,
    )
)
@settings(deadline=None, max_examples=60)
def test_both_ways_read_any_jsonl_alike(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    good = [{"timestamp": 10**18, "input_length": i, "output_length": 1} for i in INPUT[:80]]
    text = "\n".join(json.dumps(row) for row in [good[0], *rows, *good])
    _compare(write(tmp_path_factory.getbasetemp(), text, "any.jsonl"))


def _compare(path: Path) -> None:
    traces = []
    for worthwhile in (1, 10**9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fast_rows, "_WORTHWHILE", worthwhile)
            traces.append(read_trace(path))
    fast, slow = traces
    for name in ("arrival_s", "input_len", "output_len"):
        assert getattr(fast, name).tolist() == getattr(slow, name).tolist()
    assert (fast.skipped, fast.bad_rows) == (slow.skipped, slow.bad_rows)


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
@pytest.mark.parametrize("keep", [5, 20, 0.5, 0.99])
def test_cut_compressed_files(tmp_path: Path, pack: Pack, keep: float) -> None:
    data = pack(csv_log())
    path = write(tmp_path, data[: keep if isinstance(keep, int) else int(keep * len(data))])
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)


def test_a_cut_of_any_length_is_no_shorter_log(tmp_path: Path) -> None:
    for pack in (gzip.compress, zstd):
        data = pack(csv_log())
        for size in range(4, len(data), 97):
            with pytest.raises(TraceError):
                read_trace(write(tmp_path, data[:size]))


@given(data=st.binary(max_size=200), cut=st.integers(0, 2000), flip=st.integers(0, 2000))
@settings(deadline=None, max_examples=60)
def test_damaged_parquet_ends_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, cut: int, flip: int
) -> None:
    whole = bytearray(parquet_log())
    at = flip % len(whole)
    whole[at : at + len(data)] = data
    for content in (bytes(whole), bytes(parquet_log()[:cut]), b"PAR1" + data):
        path = write(tmp_path_factory.getbasetemp(), content, "any.parquet")
        try:
            read_trace(path)
        except TraceError as error:
            assert "\n" not in str(error)


def test_bombs_stay_small(tmp_path: Path) -> None:
    zeros = gzip.compress(bytes(64 << 20))
    line = gzip.compress(csv_log() + b"1" * (64 << 20))
    blanks = gzip.compress(csv_log() + b"\n" * (3 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match=r"line 1: not text|line 1: longer"):
            read_trace(write(tmp_path, zeros))
        assert read_trace(write(tmp_path, line)).skipped == 1
        assert read_trace(write(tmp_path, blanks)).skipped == 0
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 48 * MAX_LINE_BYTES


def test_a_parquet_bomb_is_not_unpacked(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="grows more than 100-fold"):
        read_trace(write(tmp_path, gzip.compress(b"PAR1" + bytes(128 << 20))))


@pytest.mark.parametrize("magic", [b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"])
def test_nothing_but_a_magic(tmp_path: Path, magic: bytes) -> None:
    for tail in (b"", b"\0" * 50, os.urandom(200)):
        with pytest.raises(TraceError) as caught:
            read_trace(write(tmp_path, magic + tail))
        assert "\n" not in str(caught.value)


def test_a_column_that_comes_twice(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 1: column 'input_toks' comes twice"):
        read_trace(write(tmp_path, "arrival_time_ns,input_toks,output_toks,input_toks\n1,2,3,4\n"))
