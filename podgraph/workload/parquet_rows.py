"""Rows of a Parquet log, some hundred thousand at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from podgraph.errors import TraceError
from podgraph.workload.bad_rows import BadRows
from podgraph.workload.fields import BadRowError, check_step, date_ns, number, short
from podgraph.workload.layouts import Layout, find_layout
from podgraph.workload.text_rows import Batch, known

if TYPE_CHECKING:
    import polars as pl

_ROWS = 1 << 18

Times: TypeAlias = npt.NDArray[np.int64] | npt.NDArray[np.float64]


def read_parquet(path: Path, source: str, layouts: Sequence[Layout], bad: BadRows) -> Iterator[Batch]:
    """Yields the good rows of a Parquet file; columns may hold numbers or texts, and dates may be of a date type.

    Raises:
        TraceError: it is damaged, or of unknown columns; a row is bad, and bad rows are fatal.
    """
    import polars as pl

    try:
        scan = pl.scan_parquet(path)
        columns = scan.collect_schema()
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise damaged(source, error) from None
    layout = find_layout(columns, layouts)
    if layout is None:
        raise TraceError(
            f"{source}: unknown columns: got {short(list(columns))}, {known(layouts)}; rename or map the columns"
        )
    wanted = [name for name in (layout.arrival, *(count.column for count in layout.counts)) if name in columns]
    start = 0
    batches = iter(scan.select(wanted).collect_batches(chunk_size=_ROWS, maintain_order=True))
    while True:
        try:
            frame = next(batches, None)
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, OverflowError) as error:
            raise damaged(source, error) from None
        if frame is None:
            return
        yield _batch(frame, start, layout, source, bad)
        start += len(frame)


def damaged(source: str, error: BaseException) -> TraceError:
    """What to raise where polars cannot read a file."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return TraceError(f"{source}: not readable as Parquet: {reason:.200}; copy or export the file again")


def _batch(frame: pl.DataFrame, start: int, layout: Layout, source: str, bad: BadRows) -> Batch:
    counts = np.empty((len(layout.counts), len(frame)), dtype=np.int64)
    good = np.ones(len(frame), dtype=np.bool_)
    reasons: dict[int, str] = {}
    for row, count in zip(counts, layout.counts, strict=True):
        if count.column not in frame.columns:
            row[:] = count.default or 0
            continue
        column = frame[count.column]
        numbers = _whole(column)
        fine = numbers.is_between(count.least, count.most).fill_null(False).to_numpy()
        row[:] = numbers.fill_null(0).to_numpy()
        for index in np.flatnonzero(good & ~fine).tolist():
            allowed = f"a whole number in {count.least}..{count.most}"
            reasons[index] = f"{count.column}: must be {allowed}, got {_quoted(column, index)}"
        good &= fine
    if layout.is_steps:
        rows, requests, decodes = counts[:3]
        odd = (requests > rows) | ((rows > 0) & (requests == 0)) | ((rows == 0) & (decodes == 0))
        for index in np.flatnonzero(good & odd).tolist():
            try:
                check_step(*counts[:3, index].tolist())
            except BadRowError as error:
                reasons[index] = str(error)
        good &= ~odd
    times: Times = np.zeros(len(frame), dtype=np.int64)
    if layout.arrival is not None:
        column = frame[layout.arrival]
        times, fine = _times(column, layout)
        for index in np.flatnonzero(good & ~fine).tolist():
            allowed = "a date" if layout.time_unit == "date" else f"a time in {layout.time_unit}, >= 0"
            reasons[index] = f"{layout.arrival}: must be {allowed}, got {_quoted(column, index)}"
        good &= fine
    for index, reason in sorted(reasons.items()):
        bad.add(source, f"row {start + index + 1}", reason)
    places = np.arange(start + 1, start + 1 + len(frame), dtype=np.int64)
    return Batch(layout, counts[:, good], times[good], places[good], unit="row")


def _quoted(column: pl.Series, index: int) -> str:
    try:
        return short(column[index])
    except (OverflowError, ValueError):
        return "a value beyond Python's dates"


def _whole(column: pl.Series) -> pl.Series:
    """Whole numbers, null where a value is none."""
    import polars as pl

    whole: pl.Series
    if column.dtype.is_float():
        # Above 2**62 nothing is allowed anyway, and the cast would fail.
        small = column.is_finite() & (column.abs() < 2.0**62) & (column.floor() == column)
        whole = column.set(~small.fill_null(False), None).cast(pl.Int64)
    elif column.dtype.is_integer() or column.dtype.is_decimal():
        whole = column.cast(pl.Int64, strict=False)
        whole = whole.set((whole != column).fill_null(False), None)
    else:
        found = [number(value) for value in column.to_list()]
        whole = pl.Series([n if isinstance(n, int) and abs(n) < 2**62 else None for n in found], dtype=pl.Int64)
    return whole


def _times(column: pl.Series, layout: Layout) -> tuple[Times, npt.NDArray[np.bool_]]:
    """(arrivals in the layout's unit, whether each is one)."""
    import polars as pl

    dtype = column.dtype
    if layout.time_unit == "date" and isinstance(dtype, pl.Datetime):
        per_us = 1 if dtype.time_unit == "ns" else 1000
        column = column.dt.epoch("ns" if per_us == 1 else "us")
        column = column.set((column < 0) | (column > (2**63 - 1) // per_us), None) * per_us
        return _filled(column)
    if layout.time_unit == "date" or not dtype.is_numeric():
        parse = date_ns if layout.time_unit == "date" else number
        parsed = [parse(value) for value in column.to_list()]
        fine = np.array([time is not None and 0 <= time < 2**63 for time in parsed], dtype=np.bool_)
        values = [time if keep else 0 for time, keep in zip(parsed, fine.tolist(), strict=True)]
        times: Times = np.array(values, dtype=np.float64)
        if all(isinstance(time, int) for time in values):
            times = np.array(values, dtype=np.int64)
        return times, fine
    if dtype.is_integer():
        return _filled(column.cast(pl.Int64, strict=False))
    floats = column.cast(pl.Float64).fill_null(np.nan).to_numpy()
    fine = (floats >= 0) & (floats < 2.0**63)
    return np.where(fine, floats, 0.0), fine


def _filled(column: pl.Series) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    fine = (column.is_not_null() & (column >= 0)).fill_null(False).to_numpy()
    return column.fill_null(0).to_numpy().astype(np.int64), fine
