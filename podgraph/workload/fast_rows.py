"""Many rows at once through polars: those that are plainly good. All others are left to `fields.parse_row`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from podgraph.workload.layouts import Layout
from podgraph.workload.log_files import MAX_LINE_BYTES, Line

if TYPE_CHECKING:
    import polars as pl

# Fewer lines than this are not worth the start of a query.
_WORTHWHILE = 64
_WHOLE = r"^\s*([0-9]{1,18})(?:\.0*)?\s*$"
_DECIMAL = r"^\s*([0-9]{1,15}(?:\.[0-9]*)?)\s*$"
_DATE = r"^\s*([0-9]{4}-[0-9]{2}-[0-9]{2})[ T]([0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,9}))?(?:Z|[+]00:00)?\s*$"
# A float64 holds every whole number up to here, so that comparing times as floats is exact.
_EXACT = 2**53


@dataclass(frozen=True)
class Fast:
    """What a block holds; rows that are not ``good`` hold anything.

    Attributes:
        counts: ``[columns, n]``, int64.
        times: ``[n]``, int64 where every good time is whole, else float64.
        good: ``[n]``, bool.
    """

    counts: npt.NDArray[np.int64]
    times: npt.NDArray[np.int64] | npt.NDArray[np.float64]
    good: npt.NDArray[np.bool_]


def from_csv(block: list[Line], layout: Layout, columns: Sequence[str]) -> Fast | None:
    """The good rows of CSV lines with these columns; None where the block must be read line by line."""
    if len(block) < _WORTHWHILE:
        return None
    import polars as pl

    # Bytes that are no UTF-8 become U+FFFD, which sends their line to the slow way.
    lines = b"\n".join(line for _, line in block).decode("utf-8", "replace").split("\n")
    line = pl.col("line")
    plain = (
        (line.str.count_matches(",", literal=True) == len(columns) - 1)
        & ~line.str.contains('["\0\ufeff\ufffd]')
        & (line.str.len_bytes() < MAX_LINE_BYTES)
    )
    fields = line.str.split_exact(",", max(1, len(columns) - 1))
    texts = {column: fields.struct.field(f"field_{index}") for index, column in enumerate(columns)}
    return _judge(pl.DataFrame({"line": lines}), layout, texts, plain)


def from_json(block: list[Line], layout: Layout) -> Fast | None:
    """The good rows of JSONL; None where the block must be read line by line, as any line in it is odd."""
    if len(block) < _WORTHWHILE:
        return None
    import polars as pl

    try:
        text = b"\n".join(line for _, line in block).decode()
    except UnicodeDecodeError:
        return None
    lines = text.split("\n")
    # Each line alone must look like one object: polars puts all of them into one array before it parses.
    if not all(line[0] == "{" and line.rstrip()[-1] == "}" and "},{" not in line for line in lines):
        return None
    # A column that no line has keeps its default; one that only some have is for the slow way.
    counts = {c.column for c in layout.counts if c.default is None or f'"{c.column}"' in text}
    wanted = counts | ({layout.arrival} if layout.arrival else set())
    try:
        parsed = pl.Series(lines).str.json_decode(pl.Struct(dict.fromkeys(sorted(wanted), pl.String())))
    except pl.exceptions.PolarsError:
        return None
    if len(parsed) != len(lines):
        return None
    if any(
        parsed.struct.field(c.column).has_nulls() for c in layout.counts if c.default is not None and c.column in counts
    ):
        return None
    return _judge(parsed.struct.unnest(), layout, {column: pl.col(column) for column in wanted}, pl.lit(True))


def _judge(frame: pl.DataFrame, layout: Layout, texts: dict[str, pl.Expr], plain: pl.Expr) -> Fast | None:
    import polars as pl

    counts: list[pl.Expr] = []
    good = [plain]
    for count in layout.counts:
        if count.column in texts:
            value = texts[count.column].str.extract(_WHOLE, 1).cast(pl.Int64)
            good.append(value.is_between(count.least, count.most))
        else:
            value = pl.lit(count.default, pl.Int64)
        counts.append(value.alias(count.role))
    if layout.is_steps:
        rows, requests, decodes = counts[:3]
        good.append((requests <= rows) & ((rows == 0) | (requests > 0)) & ((rows > 0) | (decodes > 0)))
    whole, decimal = pl.lit(0, pl.Int64), pl.lit(0.0, pl.Float64)
    if layout.arrival is not None:
        text = texts[layout.arrival]
        whole = _date_ns(text) if layout.time_unit == "date" else text.str.extract(_WHOLE, 1).cast(pl.Int64)
        decimal = text.str.extract(_DECIMAL, 1).cast(pl.Float64) if layout.time_unit != "date" else pl.lit(None)
    judged = (
        frame.lazy()
        .select(
            *counts,
            whole.alias("time"),
            decimal.cast(pl.Float64).alias("decimal"),
            reduce(lambda a, b: a & b, good).fill_null(False).alias("good"),
        )
        .collect()
    )
    fine = judged["good"].to_numpy().copy()
    time, as_float = judged["time"], judged["decimal"].fill_null(np.nan).to_numpy()
    timed = time.is_not_null().to_numpy()
    times: npt.NDArray[np.int64] | npt.NDArray[np.float64]
    if timed[fine].all() or layout.time_unit == "date":
        fine &= timed
        times = time.fill_null(0).to_numpy()
    else:
        fine &= as_float < _EXACT
        times = as_float
    values = np.array([judged[count.role].fill_null(0).to_numpy() for count in layout.counts], dtype=np.int64)
    return Fast(values, times, fine)


def _date_ns(text: pl.Expr) -> pl.Expr:
    import polars as pl

    found = text.str.extract_groups(_DATE)
    day_and_clock = pl.concat_str(found.struct.field("1"), pl.lit(" "), found.struct.field("2"))
    since_1970 = day_and_clock.str.to_datetime("%Y-%m-%d %H:%M:%S", time_unit="us", strict=False).dt.epoch("s")
    decimals = found.struct.field("3").fill_null("0").str.pad_end(9, "0").cast(pl.Int64)
    at = since_1970 * 10**9 + decimals
    # Years whose nanoseconds do not fit int64, or lie before 1970, go the slow way.
    return pl.when(since_1970.is_between(0, 2**63 // 10**9 - 1)).then(at)
