"""Rows of a Parquet log, some hundred thousand at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from podgraph.errors import TraceError
from podgraph.workload.bad_rows import BadRows
from podgraph.workload.fields import BadRowError, check_step, date_ns, number, short
from podgraph.workload.layouts import Layout, find_layout
from podgraph.workload.text_rows import Batch, known

if TYPE_CHECKING:
    import polars as pl

_ROWS = 1 << 18


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
    while True:
        try:
            frame = scan.select(wanted).slice(start, _ROWS).collect(engine="streaming")
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, OverflowError) as error:
            raise damaged(source, error) from None
        if frame.is_empty():
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
            reasons[index] = f"{count.column}: must be {allowed}, got {short(column[index])}"
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
    times = np.zeros(len(frame), dtype=np.int64)
    if layout.arrival is not None:
        column = frame[layout.arrival]
        times, fine = _times(column, layout)
        for index in np.flatnonzero(good & ~fine).tolist():
            allowed = "a date" if layout.time_unit == "date" else f"a time in {layout.time_unit}, >= 0"
            reasons[index] = f"{layout.arrival}: must be {allowed}, got {short(column[index])}"
        good &= fine
    for index, reason in sorted(reasons.items()):
        bad.add(source, f"row {start + index + 1}", reason)
    places = np.arange(start + 1, start + 1 + len(frame), dtype=np.int64)
    return Batch(layout, counts[:, good], times[good], places[good])


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


def _times(column: pl.Series, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """(arrivals in the layout's unit, whether each is one)."""
    import polars as pl

    if layout.time_unit == "date" and column.dtype == pl.Datetime:
        found = column.dt.epoch("us").to_list()
        parsed: list[int | float | None] = [None if us is None else us * 1000 for us in found]
        if column.dtype.time_unit == "ns":  # type: ignore[attr-defined]
            parsed = column.dt.epoch("ns").to_list()
    elif layout.time_unit == "date":
        parsed = [date_ns(value) for value in column.to_list()]
    else:
        parsed = [number(value) for value in column.to_list()]
    fine = np.array([time is not None and 0 <= time < 2**63 for time in parsed], dtype=np.bool_)
    whole = all(isinstance(time, int) for time, keep in zip(parsed, fine.tolist(), strict=True) if keep)
    values = [time if keep else 0 for time, keep in zip(parsed, fine.tolist(), strict=True)]
    return np.array(values, dtype=np.int64 if whole else np.float64), fine
