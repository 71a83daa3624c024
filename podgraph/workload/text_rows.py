"""Rows of CSV and JSONL, a block of lines at a time.

A line is judged by `fields.parse_row` alone. Blocks go through polars first, which takes the rows that are plainly good
and leaves the others, so that a long log costs no Python object a field.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from podgraph.errors import TraceError
from podgraph.workload import fast_rows
from podgraph.workload.bad_rows import BadRows
from podgraph.workload.fields import BadRowError, Record, Time, parse_row, short
from podgraph.workload.layouts import Layout, find_layout
from podgraph.workload.log_files import MAX_LINE_BYTES, Line, blocks

# JSONL has no header, so a first row with a missing key does not decide; a file of something else soon does.
MAX_UNKNOWN_ROWS = 1000


@dataclass(frozen=True)
class Batch:
    """Good rows of a log, in its order.

    Attributes:
        layout: what the columns mean.
        counts: ``[columns, n]``, int64, in the order of the layout's counts.
        times: ``[n]``, int64 or float64, in the layout's unit; all zero where it has no arrivals.
        places: ``[n]``, int64, the line or row of the file.
        segment: another one within a file has a clock of its own.
        unit: what a place is called.
    """

    layout: Layout
    counts: npt.NDArray[np.int64]
    times: npt.NDArray[np.int64] | npt.NDArray[np.float64] | list[Time]
    places: npt.NDArray[np.int64]
    segment: int = 0
    unit: str = "line"


def read_text(
    file: io.BufferedReader, source: str, layouts: Sequence[Layout], bad: BadRows, most: int | None = None
) -> Iterator[Batch]:
    """Yields the good rows of a CSV or JSONL log, from ``most`` lines at a time.

    Raises:
        TraceError: it is empty, no text, or of unknown columns; a row is bad, and bad rows are fatal.
    """
    pieces = blocks(file, most)
    first = next(pieces, [])
    if not first:
        raise TraceError(f"{source}: line 1: empty; a log is CSV with a header, JSONL or Parquet; {known(layouts)}")
    number, line = first[0]
    if line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        yield from _json(chain([first], pieces), source, layouts, bad)
        return
    try:
        if b"\0" in line:
            raise BadRowError("not text, a NUL byte is in it; decompress the file, or export it as CSV or JSONL")
        columns = _csv_fields(_decode(line))
        layout = find_layout(columns, layouts)
        if layout is None:
            raise _unknown(columns, layouts)
        if twice := [name for name in layout.columns if columns.count(name) > 1]:
            raise BadRowError(f"column {twice[0]!r} comes twice; rename one")
    except BadRowError as reason:
        raise TraceError(f"{source}: line {number}: {reason}") from None

    def record(text: str) -> Record:
        fields = _csv_fields(text)
        if len(fields) != len(columns):
            raise BadRowError(f"must have {len(columns)} fields as the header has, got {len(fields)}")
        return dict(zip(columns, fields, strict=True))

    for block in chain([first[1:]], pieces):
        yield _rows(block, layout, record, fast_rows.from_csv(block, layout, columns), source, bad)


def known(layouts: Sequence[Layout]) -> str:
    """The layouts, for an error."""
    return f"known layouts: {'; '.join(map(str, layouts))}"


def _unknown(columns: Sequence[str], layouts: Sequence[Layout]) -> BadRowError:
    return BadRowError(f"unknown columns: got {short(list(columns))}, {known(layouts)}; rename or map the columns")


def _json(pieces: Iterator[list[Line]], source: str, layouts: Sequence[Layout], bad: BadRows) -> Iterator[Batch]:
    layout: Layout | None = None
    unknown = 0
    reason: object = ""
    for block in pieces:
        start = 0
        while layout is None and start < len(block):
            number, line = block[start]
            try:
                columns = list(_json_record(_decode(line)))
                layout = find_layout(columns, layouts)
                if layout is None:
                    raise _unknown(columns, layouts)
            except BadRowError as error:
                start += 1
                unknown += 1
                reason = reason or f"line {number}: {error}"
                if unknown == MAX_UNKNOWN_ROWS:
                    raise TraceError(f"{source}: no good row in {unknown} read; {reason}") from None
                bad.add(source, f"line {number}", error)
        if layout is not None:
            rest = block[start:]
            yield _rows(rest, layout, _json_record, fast_rows.from_json(rest, layout), source, bad)
    if layout is None:
        raise TraceError(f"{source}: no good row in {unknown} read; {reason}")


def _rows(
    block: list[Line],
    layout: Layout,
    record: Callable[[str], Record],
    fast: fast_rows.Fast | None,
    source: str,
    bad: BadRows,
) -> Batch:
    places = np.array([number for number, _ in block], dtype=np.int64)
    if fast is not None and fast.good.all():
        return Batch(layout, fast.counts, fast.times, places)
    doubtful = range(len(block)) if fast is None else np.flatnonzero(~fast.good).tolist()
    parsed: dict[int, tuple[Time, list[int]]] = {}
    for index in doubtful:
        number, line = block[index]
        try:
            parsed[index] = parse_row(record(_decode(line)), layout)
        except BadRowError as reason:
            bad.add(source, f"line {number}", reason)
    if fast is None:
        counts = np.array([counts for _, counts in parsed.values()], dtype=np.int64).reshape(-1, len(layout.counts)).T
        return Batch(layout, counts, [time for time, _ in parsed.values()], places[list(parsed)])
    good = fast.good.copy()
    times: list[Time] = fast.times.tolist()
    for index, (time, values) in parsed.items():
        good[index] = True
        times[index] = time
        fast.counts[:, index] = values
    kept = [time for time, keep in zip(times, good.tolist(), strict=True) if keep]
    return Batch(layout, fast.counts[:, good], kept, places[good])


def _decode(line: bytes) -> str:
    if len(line) >= MAX_LINE_BYTES:
        raise BadRowError(f"longer than {MAX_LINE_BYTES} bytes; a log is CSV with a header, JSONL or Parquet")
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadRowError("not UTF-8 text; decompress the file, or export it as CSV or JSONL") from None


def _csv_fields(text: str) -> list[str]:
    # One line at a time: an unclosed quote then costs one row, not the rest of the file.
    try:
        return [field.strip() for field in next(csv.reader([text]))]
    except csv.Error as error:
        raise BadRowError(f"not CSV: {error}") from None


def _json_record(text: str) -> Record:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise BadRowError(f"must be a JSON object, got {short(record)}")
    return record
