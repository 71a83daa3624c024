"""Request traces: when each request arrived, and how many tokens it had.

A layout is known by its columns, CSV or JSONL by the first line, never by the suffix: the same columns come in files of
any name.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from podgraph.errors import TraceError

# A longer line is a bad row: no known trace has one (the longest hash_ids list is a few KiB), and a binary file or a
# JSON array on one line must not be read into memory.
MAX_LINE_BYTES = 1 << 20
# qo_indptr and the KV lengths are int32.
MAX_TOKENS = 2**31 - 1
# JSONL has no header, so a first row with a missing key does not decide; a file of something else soon does.
MAX_UNKNOWN_ROWS = 1000

TimeUnit = Literal["date", "s", "ms", "us", "ns"]
_UNITS_PER_S: dict[TimeUnit, int] = {"date": 10**9, "s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


@dataclass(frozen=True)
class Layout:
    """The columns of one kind of trace.

    Attributes:
        name: what an error calls it.
        input_len: column of the prompt tokens.
        output_len: column of the generated tokens.
        arrival: column of the arrival time, or None where the trace has none.
        time_unit: of ``arrival``; ``date`` is ``YYYY-MM-DD HH:MM:SS`` with up to 9 decimals and perhaps a UTC offset.
    """

    name: str
    input_len: str
    output_len: str
    arrival: str | None = None
    time_unit: TimeUnit = "s"

    @property
    def columns(self) -> tuple[str, ...]:
        lengths = (self.input_len, self.output_len)
        return lengths if self.arrival is None else (self.arrival, *lengths)

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.columns)})"


# The first layout whose columns are all there is taken.
LAYOUTS = (
    Layout("Azure", "ContextTokens", "GeneratedTokens", "TIMESTAMP", "date"),
    Layout("Mooncake", "input_length", "output_length", "timestamp", "ms"),
    Layout("ShareGPT", "input_toks", "output_toks", "arrival_time_ns", "ns"),
    Layout("POD", "num_prefill_tokens", "num_decode_tokens"),
)


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order they arrived.

    Attributes:
        arrival_s: ``[n]``, float64, seconds from the first request, nondecreasing.
        input_len: ``[n]``, int64, prompt tokens, at least 1.
        output_len: ``[n]``, int64, generated tokens, at least 0.
        source: the file it was read from, or another name for error messages.
        skipped: bad rows that were left out.
        has_arrivals: False where the source had no arrival times and ``arrival_s`` is all zero.

    Raises:
        TraceError: an array has another dtype, shape or range.
    """

    arrival_s: npt.NDArray[np.float64]
    input_len: npt.NDArray[np.int64]
    output_len: npt.NDArray[np.int64]
    source: str
    skipped: int
    has_arrivals: bool

    def __post_init__(self) -> None:
        # Checked here although a reader checks its rows: arrivals that were drawn come in by dataclasses.replace.
        n = self.input_len.size
        for name, dtype in (("arrival_s", np.float64), ("input_len", np.int64), ("output_len", np.int64)):
            values = getattr(self, name)
            if values.dtype != dtype or values.shape != (n,):
                allowed = f"{np.dtype(dtype)} of shape ({n},), as input_len has {n} values"
                raise TraceError(
                    f"{self.source}: {name}: must be {allowed}, got {values.dtype} of shape {values.shape}"
                )
        in_range = {
            "arrival_s": (np.isfinite(self.arrival_s) & (self.arrival_s >= 0), "finite and >= 0"),
            "input_len": ((self.input_len >= 1) & (self.input_len <= MAX_TOKENS), f"in 1..{MAX_TOKENS}"),
            "output_len": ((self.output_len >= 0) & (self.output_len <= MAX_TOKENS), f"in 0..{MAX_TOKENS}"),
        }
        for name, (good, allowed) in in_range.items():
            if not good.all():
                index = int(np.argmin(good))
                got = getattr(self, name)[index]
                raise TraceError(f"{self.source}: {name}[{index}]: must be {allowed}, got {got}")
        if (np.diff(self.arrival_s) < 0).any():
            index = int(np.argmax(np.diff(self.arrival_s) < 0)) + 1
            raise TraceError(
                f"{self.source}: arrival_s[{index}]: must be at least the one before, {self.arrival_s[index - 1]}, "
                f"got {self.arrival_s[index]}; sort the requests by arrival"
            )

    def __len__(self) -> int:
        return self.input_len.size

    def keep(self, chosen: npt.NDArray[np.bool_]) -> Trace:
        """The requests where ``chosen``, ``[n]``, is true; arrivals stay as they are."""
        arrays = {name: getattr(self, name)[chosen] for name in ("arrival_s", "input_len", "output_len")}
        return dataclasses.replace(self, **arrays)


def at_rate(trace: Trace, rate: float, seed: int = 0) -> Trace:
    """The trace at another mean load: its arrivals stretched, or Poisson arrivals where it has none.

    Args:
        rate: requests per second.
        seed: of the Poisson arrivals.
    """
    if trace.has_arrivals:
        mean_gap_s = trace.arrival_s[-1] / max(1, len(trace) - 1)
        arrival_s = trace.arrival_s * (1 / rate / mean_gap_s) if mean_gap_s > 0 else trace.arrival_s
    else:
        gaps = np.random.default_rng(seed).exponential(1 / rate, len(trace))
        arrival_s = np.cumsum(gaps) - gaps[0]
    return dataclasses.replace(trace, arrival_s=arrival_s, has_arrivals=True)


def read_trace(path: str | os.PathLike[str], limit: int | None = None) -> Trace:
    """Reads a CSV or JSONL trace of any layout in ``LAYOUTS``, line by line.

    A row is bad, and only counted in ``skipped``, where a length is missing, not a whole number, negative or above
    int32, where ``input_len`` is 0, where the time is missing, negative or before that of the last good row, where a
    CSV row has not as many fields as the header, or where the line is not UTF-8 or above 1 MiB. Blank lines are not
    rows.

    Args:
        path: the file.
        limit: stop reading after this many good rows; None reads all of them.

    Returns:
        The trace, its arrays read-only and its ``source`` the path as given.

    Raises:
        TraceError: the file cannot be read, is empty, is not text, has unknown columns or no good row; ``limit`` < 1.
    """
    source = os.fspath(path)
    if limit is not None and limit < 1:
        raise TraceError(f"{source}: limit: must be > 0, got {limit}; leave it out to read every row")
    try:
        with Path(path).open("rb") as file:
            return _read(file, source, limit)
    except OSError as error:
        raise TraceError(f"{source}: cannot be read: {error.strerror or error}; name a CSV or JSONL file") from error


class _BadRowError(Exception):
    """Why one row is left out."""


def _read(file: BinaryIO, source: str, limit: int | None) -> Trace:
    lines = ((number, line) for number, line in _lines(file) if not line.isspace())
    parse, layout, rows = _recognise(lines, source)
    arrival_s, input_len, output_len = array("d"), array("q"), array("q")
    first_time: int | float = 0
    last_time: int | float = -math.inf
    skipped = 0
    first_bad = ""
    for number, line in rows:
        try:
            record = parse(_decode(line))
            if layout is None:
                layout = _find_layout(record)
            time, prompt, generated = _row(record, layout)
            if time < last_time:
                raise _BadRowError(f"{layout.arrival}: must not go back, got {_short(record[layout.arrival or ''])}")
        except _BadRowError as reason:
            skipped += 1
            first_bad = first_bad or f"line {number}: {reason}"
            if layout is None and skipped == MAX_UNKNOWN_ROWS:
                break
            continue
        if not input_len:
            first_time = time
        last_time = time
        arrival_s.append((time - first_time) / _UNITS_PER_S[layout.time_unit])
        input_len.append(prompt)
        output_len.append(generated)
        if len(input_len) == limit:
            break
    if layout is None or not input_len:
        raise TraceError(f"{source}: no good row in {skipped} read; {first_bad or 'nothing follows the header'}")
    trace = Trace(
        arrival_s=np.array(arrival_s, dtype=np.float64),
        input_len=np.array(input_len, dtype=np.int64),
        output_len=np.array(output_len, dtype=np.int64),
        source=source,
        skipped=skipped,
        has_arrivals=layout.arrival is not None,
    )
    for values in (trace.arrival_s, trace.input_len, trace.output_len):
        values.setflags(write=False)
    return trace


_Record = Mapping[str, object]
_Line = tuple[int, bytes]


def _lines(file: BinaryIO) -> Iterator[_Line]:
    """Yields (line number from 1, line with its end); of a line that is too long, MAX_LINE_BYTES + 1 bytes."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        # Yielded before the rest is passed over: a header without an end is then refused at once.
        yield number, line
        if len(line) > MAX_LINE_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)


def _recognise(lines: Iterator[_Line], source: str) -> tuple[Callable[[str], _Record], Layout | None, Iterable[_Line]]:
    """The parser of a line, the layout where a header decides it, and the lines that hold rows."""
    number, line = next(lines, (0, b""))
    if not number:
        raise TraceError(f"{source}: line 1: empty; a trace is CSV with a header, or JSONL; {_known_layouts()}")
    if line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return _json_record, None, chain([(number, line)], lines)
    try:
        if b"\0" in line:
            raise _BadRowError("not text, a NUL byte is in it; decompress the file, or export it as CSV or JSONL")
        columns = _csv_fields(_decode(line))
        layout = _find_layout(dict.fromkeys(columns))
    except _BadRowError as reason:
        raise TraceError(f"{source}: line {number}: {reason}") from None

    def csv_record(text: str) -> _Record:
        fields = _csv_fields(text)
        if len(fields) != len(columns):
            raise _BadRowError(f"must have {len(columns)} fields as the header has, got {len(fields)}")
        return dict(zip(columns, fields, strict=True))

    return csv_record, layout, lines


def _decode(line: bytes) -> str:
    if len(line) > MAX_LINE_BYTES:
        raise _BadRowError(f"longer than {MAX_LINE_BYTES} bytes; a trace is CSV with a header, or JSONL")
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _BadRowError("not UTF-8 text; decompress the file, or export it as CSV or JSONL") from None


def _csv_fields(text: str) -> list[str]:
    # One line at a time: an unclosed quote then costs one row, not the rest of the file.
    try:
        return [field.strip() for field in next(csv.reader([text]))]
    except csv.Error as error:
        raise _BadRowError(f"not CSV: {error}") from None


def _json_record(text: str) -> _Record:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _BadRowError(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise _BadRowError(f"must be a JSON object, got {_short(record)}")
    return record


def _known_layouts() -> str:
    return f"known layouts: {'; '.join(map(str, LAYOUTS))}"


def _find_layout(record: _Record) -> Layout:
    for layout in LAYOUTS:
        if all(column in record for column in layout.columns):
            return layout
    raise _BadRowError(f"unknown columns: got {_short(list(record))}, {_known_layouts()}; rename the columns")


def _row(record: _Record, layout: Layout) -> tuple[int | float, int, int]:
    """(arrival in units of the layout, or 0; input_len; output_len) of one row."""
    input_len = _tokens(record, layout.input_len, smallest=1)
    output_len = _tokens(record, layout.output_len, smallest=0)
    if layout.arrival is None:
        return 0, input_len, output_len
    parse_time = _date_ns if layout.time_unit == "date" else _number
    time = parse_time(record.get(layout.arrival))
    # Above int64 is no time in any unit, and an int that no float holds would overflow in the division.
    if time is None or not 0 <= time < 2**63:
        allowed = "a date" if layout.time_unit == "date" else f"a time in {layout.time_unit}, >= 0"
        raise _BadRowError(f"{layout.arrival}: must be {allowed}, got {_short(record.get(layout.arrival))}")
    return time, input_len, output_len


def _tokens(record: _Record, column: str, smallest: int) -> int:
    number = _number(record.get(column))
    if not isinstance(number, int) or not smallest <= number <= MAX_TOKENS:
        got = _short(record.get(column))
        raise _BadRowError(f"{column}: must be a whole number in {smallest}..{MAX_TOKENS}, got {got}")
    return number


# Narrower than int() and float(), which also take 1_000, "nan" and other scripts' digits. 40 characters hold any time.
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?")


def _number(value: object) -> int | float | None:
    """The number that a CSV field or JSON value holds, an int where it is whole, or None."""
    if isinstance(value, str):
        found = _NUMBER.fullmatch(value) if len(value) <= 40 else None
        if found is None:
            return None
        # An int keeps all 19 digits of a time in ns since 1970.
        value = int(value) if found.lastindex is None else float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # Whole floats are ints too: a data frame writes an integer column with a gap in it as 7564.0.
    return int(value) if isinstance(value, float) and value.is_integer() else value


_DATE = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2})[ T]([0-9:]{8})(?:\.([0-9]{1,9}))?(Z|[+-][0-9]{2}:[0-9]{2})?")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def _date_ns(value: object) -> int | None:
    """Nanoseconds since 1970, or None; a date without an offset counts as UTC."""
    found = _DATE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    day, clock, decimals, offset = found.groups()
    try:
        # The decimals apart: datetime holds 6 of them, and fromisoformat refuses 7 before Python 3.11.
        date = datetime.fromisoformat(f"{day}T{clock}{'+00:00' if offset in (None, 'Z') else offset}")
    except ValueError:
        return None
    since = date - _EPOCH
    return (since.days * 86400 + since.seconds) * 10**9 + int((decimals or "").ljust(9, "0"))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
