"""Reading of request traces: every layout, and every way a file can be wrong."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podgraph.errors import TraceError
from podgraph.workload.layouts import LAYOUTS, MAX_TOKENS, STEP_LAYOUT, find_layout
from podgraph.workload.log_files import MAX_LINE_BYTES
from podgraph.workload.requests import Trace
from podgraph.workload.text_rows import MAX_UNKNOWN_ROWS
from podgraph.workload.traces import read_trace

AZURE_SLICE = Path(__file__).parents[1] / "data" / "azure_conv_slice.csv"

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:04.0781490,110,27
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 1000, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]}
{"timestamp": 3250, "input_length": 7236, "output_length": 794, "hash_ids": []}
"""
POD = """num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio
7564.0,192.0,7756.0,39.395833333333336
7050.0,222.0,7272.0,31.756756756756758
"""
SHAREGPT = """arrival_time_ns,input_toks,output_toks
46926808,2358,531
347938951,1034,769
"""


def write(directory: Path, content: str | bytes, name: str = "trace.txt") -> Path:
    path = directory / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(directory: Path, content: str | bytes, limit: int | None = None) -> Trace:
    return read_trace(write(directory, content), limit)


def refusal(directory: Path, content: str | bytes) -> str:
    with pytest.raises(TraceError) as caught:
        read(directory, content)
    message = str(caught.value)
    assert message.startswith(str(directory / "trace.txt"))
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("content", "arrival_s", "input_len", "output_len"),
    [
        pytest.param(AZURE, [0.0, 0.052, 0.098189], [4808, 3180, 110], [10, 8, 27], id="azure"),
        pytest.param(MOONCAKE, [0.0, 0.0, 2.25], [6758, 7322, 7236], [500, 490, 794], id="mooncake"),
        pytest.param(POD, [0.0, 0.0], [7564, 7050], [192, 222], id="pod"),
        pytest.param(SHAREGPT, [0.0, 0.301012143], [2358, 1034], [531, 769], id="sharegpt"),
    ],
)
@pytest.mark.parametrize("name", ["trace.csv", "trace.jsonl", "trace"])
def test_layouts(
    tmp_path: Path, content: str, arrival_s: list[float], input_len: list[int], output_len: list[int], name: str
) -> None:
    trace = read_trace(write(tmp_path, content, name))
    assert trace.arrival_s.tolist() == arrival_s
    assert trace.input_len.tolist() == input_len
    assert trace.output_len.tolist() == output_len
    assert [values.dtype.name for values in (trace.arrival_s, trace.input_len, trace.output_len)] == [
        "float64",
        "int64",
        "int64",
    ]
    assert trace.source == str(tmp_path / name)
    assert trace.skipped == 0
    assert trace.has_arrivals == (content is not POD)
    assert len(trace) == len(input_len)


def test_azure_slice() -> None:
    trace = read_trace(AZURE_SLICE)
    assert len(trace) == 200
    assert trace.skipped == 0
    assert int(trace.input_len.sum()) == 180_695
    assert int(trace.output_len.sum()) == 47_050
    assert trace.arrival_s[0] == 0.0
    assert trace.arrival_s[-1] == 61.263537
    assert (np.diff(trace.arrival_s) >= 0).all()


def test_columns_are_found_in_any_order_and_in_jsonl(tmp_path: Path) -> None:
    reordered = "note, GeneratedTokens ,TIMESTAMP,ContextTokens\nx,8,2024-05-10 00:00:00.5+00:00,3\n"
    trace = read(tmp_path, reordered)
    assert (trace.input_len.tolist(), trace.output_len.tolist()) == ([3], [8])
    as_json = '{"arrival_time_ns": 5, "input_toks": 3.0, "output_toks": "8"}'
    trace = read(tmp_path, as_json)
    assert (trace.input_len.tolist(), trace.output_len.tolist()) == ([3], [8])


@pytest.mark.parametrize("content", [AZURE, MOONCAKE, POD, SHAREGPT], ids=["azure", "mooncake", "pod", "sharegpt"])
def test_line_ends_bom_and_blank_lines_change_nothing(tmp_path: Path, content: str) -> None:
    plain = read(tmp_path, content)
    dressed = read(tmp_path, b"\xef\xbb\xbf" + content.strip().replace("\n", "\r\n\r\n").encode() + b"\r\n \r\n")
    assert dressed.arrival_s.tolist() == plain.arrival_s.tolist()
    assert dressed.input_len.tolist() == plain.input_len.tolist()
    assert dressed.skipped == 0


@pytest.mark.parametrize(
    ("first", "second", "seconds"),
    [
        pytest.param("2023-11-16 23:59:59.9999999", "2023-11-17 00:00:00", 1e-7, id="midnight"),
        pytest.param("2024-02-28T12:00:00Z", "2024-03-01 12:00:00.25", 2 * 86400.25 - 0.25, id="leap-day"),
        pytest.param("2024-05-10 00:00:00.009930+00:00", "2024-05-10 02:00:00.009930+01:00", 3600.0, id="offsets"),
    ],
)
def test_dates(tmp_path: Path, first: str, second: str, seconds: float) -> None:
    trace = read(tmp_path, f"TIMESTAMP,ContextTokens,GeneratedTokens\n{first},1,1\n{second},1,1\n")
    assert trace.arrival_s.tolist() == [0.0, seconds]


def test_nanoseconds_since_1970_keep_their_last_digit(tmp_path: Path) -> None:
    trace = read(tmp_path, "arrival_time_ns,input_toks,output_toks\n1700000000000000001,1,1\n1700000000000000002,1,1\n")
    assert trace.arrival_s.tolist() == [0.0, 1e-9]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param("2023-11-16 18:17:05,abc,10", id="not-a-number"),
        pytest.param("2023-11-16 18:17:05,,10", id="empty-field"),
        pytest.param("2023-11-16 18:17:05,10", id="missing-field"),
        pytest.param("2023-11-16 18:17:05,1,234,10", id="extra-field"),
        pytest.param("2023-11-16 18:17:05,-5,10", id="negative-input"),
        pytest.param("2023-11-16 18:17:05,5,-1", id="negative-output"),
        pytest.param("2023-11-16 18:17:05,0,10", id="zero-input"),
        pytest.param("2023-11-16 18:17:05,0.5,10", id="fraction"),
        pytest.param("2023-11-16 18:17:05,nan,10", id="nan"),
        pytest.param("2023-11-16 18:17:05,inf,10", id="inf"),
        pytest.param("2023-11-16 18:17:05,1e400,10", id="above-float"),
        pytest.param("2023-11-16 18:17:05,1_000,10", id="underscore"),
        pytest.param("2023-11-16 18:17:05,\u0663,10", id="other-digits"),
        pytest.param(f"2023-11-16 18:17:05,{MAX_TOKENS + 1},10", id="above-int32"),
        pytest.param("2023-11-16 18:17:05," + "9" * 100_000 + ",10", id="long-number"),
        pytest.param("2023-11-16 18:17:02,5,10", id="time-going-back"),
        pytest.param("2023-02-30 18:17:05,5,10", id="no-such-day"),
        pytest.param("2023-11-16 25:17:05,5,10", id="no-such-hour"),
        pytest.param("2023-11-16 18-17-05,5,10", id="not-a-time"),
        pytest.param("17,5,10", id="number-for-date"),
        pytest.param('"2023-11-16 18:17:05,5,10', id="unclosed-quote"),
        pytest.param("2023-11-16 18:17:05,5,1\x000", id="nul"),
        pytest.param(b"2023-11-16 18:17:05,\xff,10", id="not-utf-8"),
        pytest.param("2023-11-16 18:17:05,5,10" + " " * MAX_LINE_BYTES, id="long-line"),
        pytest.param('"' + "x" * 200_000 + '",5,10', id="long-field"),
    ],
)
def test_bad_csv_rows_are_counted(tmp_path: Path, row: str | bytes) -> None:
    first, rest = AZURE.encode().split(b"\n", 1)
    good = rest.split(b"\n")
    bad = row if isinstance(row, bytes) else row.encode()
    # The good rows are all earlier than most bad ones: a bad row must not become the last time.
    trace = read(tmp_path, b"\n".join([first, good[0], bad, *good[1:]]))
    assert trace.skipped == 1
    assert trace.input_len.tolist() == [4808, 3180, 110]
    assert trace.arrival_s.tolist() == [0.0, 0.052, 0.098189]


BAD_JSON = {
    "cut": '{"timestamp": 2000, "input_length": 5',
    "missing-key": '{"timestamp": 2000, "input_length": 5}',
    "null": '{"timestamp": 2000, "input_length": null, "output_length": 1}',
    "bool": '{"timestamp": 2000, "input_length": true, "output_length": 1}',
    "list": '{"timestamp": 2000, "input_length": [5], "output_length": 1}',
    "nan": '{"timestamp": 2000, "input_length": NaN, "output_length": 1}',
    "infinite-time": '{"timestamp": Infinity, "input_length": 5, "output_length": 1}',
    "negative-time": '{"timestamp": -1, "input_length": 5, "output_length": 1}',
    "huge-time": '{"timestamp": 1' + "0" * 400 + ', "input_length": 5, "output_length": 1}',
    "huge-int": '{"timestamp": 2000, "input_length": ' + "9" * 5000 + ', "output_length": 1}',
    "not-utf-8": b'{"timestamp": 2000, "input_length": 5, "output_length": 1, "\xff": 0}',
    "long-line": '{"timestamp": 2000, "input_length": 5, "output_length": 1}' + " " * MAX_LINE_BYTES,
}
# These cannot come first: the first line tells JSONL from CSV.
BAD_LATER_JSON = {"array": "[2000, 5, 1]", "number": "7", "deep": "[" * 100_000}


@pytest.mark.parametrize(
    ("row", "position"),
    [
        *(pytest.param(row, 0, id=f"{name}-first") for name, row in BAD_JSON.items()),
        *(pytest.param(row, 1, id=f"{name}-later") for name, row in (BAD_JSON | BAD_LATER_JSON).items()),
    ],
)
def test_bad_jsonl_rows_are_counted(tmp_path: Path, row: str | bytes, position: int) -> None:
    good = MOONCAKE.encode().splitlines()
    bad = row if isinstance(row, bytes) else row.encode()
    trace = read(tmp_path, b"\n".join([*good[:position], bad, *good[position:]]))
    assert trace.skipped == 1
    assert trace.input_len.tolist() == [6758, 7322, 7236]
    assert trace.arrival_s.tolist() == [0.0, 0.0, 2.25]


def test_zero_output_is_a_good_row(tmp_path: Path) -> None:
    assert read(tmp_path, SHAREGPT + "400000000,7,0\n").output_len.tolist() == [531, 769, 0]


def test_limit_stops_reading(tmp_path: Path) -> None:
    rows = SHAREGPT + "bad\n" + "500000000,1,1\n" * 3 + "bad\n" * 5
    trace = read(tmp_path, rows, limit=3)
    assert len(trace) == 3
    assert trace.skipped == 1
    assert len(read(tmp_path, rows, limit=100)) == 5
    with pytest.raises(TraceError, match="limit: must be > 0, got 0"):
        read(tmp_path, rows, limit=0)


def test_limit_reads_no_further_than_it_must() -> None:
    # A pipe that stays open: reading on would block.
    readable, writable = os.pipe()
    try:
        os.write(writable, AZURE.encode())
        assert len(read_trace(f"/dev/fd/{readable}", limit=2)) == 2
    finally:
        os.close(readable)
        os.close(writable)


@pytest.mark.parametrize(("excess_bytes", "skipped"), [(0, 0), (1, 1)], ids=["at-the-cap", "above"])
def test_the_cap_of_a_line(tmp_path: Path, excess_bytes: int, skipped: int) -> None:
    row = b'{"timestamp": 9000, "input_length": 7, "output_length": 9}'.ljust(MAX_LINE_BYTES - 1 + excess_bytes) + b"\n"
    trace = read(tmp_path, MOONCAKE.encode() + row + b'{"timestamp": 9000, "input_length": 8, "output_length": 9}')
    assert trace.skipped == skipped
    assert trace.input_len.tolist() == [6758, 7322, 7236, *([] if skipped else [7]), 8]


def test_arrays_are_read_only(tmp_path: Path) -> None:
    trace = read(tmp_path, AZURE)
    with pytest.raises(ValueError, match="read-only"):
        trace.arrival_s[0] = 1.0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(b"", ["line 1: empty"], id="empty"),
        pytest.param(b"\n  \r\n", ["line 1: empty"], id="blank"),
        pytest.param("a,b\n1,2\n", ["line 1: unknown columns: got ['a', 'b']", *map(str, LAYOUTS)], id="unknown-csv"),
        pytest.param(
            '{"a": 1}\n{"b": 2}\n', ["line 1: unknown columns: got ['a']", *map(str, LAYOUTS)], id="unknown-json"
        ),
        pytest.param('[{"timestamp": 0}]', ["line 1: unknown columns"], id="json-array"),
        pytest.param("\n\nTIMESTAMP,ContextTokens\n", ["line 3: unknown columns"], id="column-missing"),
        pytest.param("TIMESTAMP,ContextTokens,GeneratedTokens\n", ["no good row in 0", "header"], id="only-header"),
        pytest.param(
            "arrival_time_ns,input_toks,output_toks\n1,0,5\n2,x,5\n",
            ["no good row in 2", f"line 2: input_toks: must be a whole number in 1..{MAX_TOKENS}, got '0'"],
            id="no-good-row",
        ),
        pytest.param(
            '{"timestamp": 0,\n"input_length": 1}\n', ["no good row in 2", "line 1: not JSON"], id="pretty-json"
        ),
        pytest.param(b"\x1f\x8b\x08\x00\x00\n\x00\xff", ["compressed data is damaged or cut"], id="gzip"),
        pytest.param(b"\x89PNG\r\n\x1a\n", ["line 1: not UTF-8 text"], id="png"),
        pytest.param(AZURE.encode("utf-16"), ["line 1: not text"], id="utf-16"),
        pytest.param(b"\0" * 4096, ["line 1: not text"], id="zeros"),
        pytest.param(b"\x7fELF\x02\x01\x01\0\0\n", ["line 1: not text"], id="elf"),
        pytest.param("x" * (MAX_LINE_BYTES + 1), ["line 1: longer than 1048576 bytes"], id="long-header"),
    ],
)
def test_refused_files(tmp_path: Path, content: str | bytes, said: list[str]) -> None:
    message = refusal(tmp_path, content)
    assert len(message) < 1500
    for part in said:
        assert part in message


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere\.csv: cannot be read: No such file"):
        read_trace(tmp_path / "nowhere.csv")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)


def test_unknown_jsonl_is_given_up(tmp_path: Path) -> None:
    message = refusal(tmp_path, '{"a": 1}\n' * (MAX_UNKNOWN_ROWS + 5) + MOONCAKE)
    assert f"no good row in {MAX_UNKNOWN_ROWS}" in message


def test_endless_first_line_is_refused_at_once() -> None:
    with pytest.raises(TraceError, match="line 1: not text"):
        read_trace("/dev/zero")


def test_long_lines_stay_out_of_memory(tmp_path: Path) -> None:
    path = write(tmp_path, SHAREGPT)
    with path.open("ab") as file:
        for _ in range(32):
            file.write(b"1" * MAX_LINE_BYTES)
        file.write(b"\n400000000,7,9\n")
    tracemalloc.start()
    try:
        trace = read_trace(path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert trace.input_len.tolist() == [2358, 1034, 7]
    assert trace.skipped == 1
    assert peak_bytes < 16 * MAX_LINE_BYTES


@given(content=st.binary(max_size=300))
@settings(deadline=None)
def test_any_bytes_give_a_trace_or_a_trace_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    for prefix in ("", "arrival_time_ns,input_toks,output_toks\n", MOONCAKE, '{"timestamp": '):
        path.write_bytes(prefix.encode() + content)
        try:
            trace = read_trace(path)
        except TraceError:
            continue
        assert len(trace) > 0


_times = st.one_of(st.integers(0, 2**63 - 1), st.floats(0, 2.0**62))


@given(times=st.lists(_times, min_size=1, max_size=20))
@settings(deadline=None)
def test_arrivals_never_go_back(tmp_path_factory: pytest.TempPathFactory, times: list[int | float]) -> None:
    path = tmp_path_factory.getbasetemp() / "times"
    rows = "".join(f"{time!r},1,1\n" for time in sorted(times))
    path.write_text("arrival_time_ns,input_toks,output_toks\n" + rows)
    trace = read_trace(path)
    assert trace.skipped == 0
    assert trace.arrival_s[0] == 0.0
    assert (np.diff(trace.arrival_s) >= 0).all()


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        pytest.param("arrival_s", np.array([0.0, 2.0, 1.0]), r"arrival_s\[2\]: must be at least", id="back"),
        pytest.param("arrival_s", np.array([0.0, np.nan, 1.0]), r"arrival_s\[1\]: must be finite", id="nan"),
        pytest.param("arrival_s", np.array([0.0, 1.0]), r"arrival_s: must be float64 of shape \(3,\)", id="length"),
        pytest.param("arrival_s", np.array([0, 1, 2]), r"arrival_s: must be float64 .* got int64", id="dtype"),
        pytest.param("input_len", np.array([1, 0, 1]), r"input_len\[1\]: must be in 1\.\.", id="zero-input"),
        pytest.param("output_len", np.array([1, 1, -1]), r"output_len\[2\]: must be in 0\.\.", id="negative-output"),
    ],
)
def test_a_trace_checks_replaced_arrays(tmp_path: Path, field: str, values: Any, message: str) -> None:
    trace = read(tmp_path, AZURE)
    with pytest.raises(TraceError, match=message):
        dataclasses.replace(trace, **{field: values})


def test_drawn_arrivals_can_be_put_in(tmp_path: Path) -> None:
    trace = read(tmp_path, POD)
    drawn = dataclasses.replace(trace, arrival_s=np.array([0.0, 0.7]), has_arrivals=True)
    assert drawn.arrival_s.tolist() == [0.0, 0.7]


def test_no_two_layouts_claim_the_same_columns() -> None:
    layouts = (*LAYOUTS, STEP_LAYOUT)
    for layout in layouts:
        assert find_layout(layout.columns, layouts) is layout


def test_workload_needs_no_torch() -> None:
    blocked = "import sys; sys.modules['torch'] = None; import podgraph.workload.traces, podgraph.workload.scheduler"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", blocked], check=True, cwd=root)
