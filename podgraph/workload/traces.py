"""Reads logs: request logs into a trace, step logs into a histogram, and says which a file is."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from podgraph.errors import TraceError
from podgraph.workload import benchmark_outputs
from podgraph.workload.bad_rows import BadRows
from podgraph.workload.clock import Clock
from podgraph.workload.layouts import LAYOUTS, STEP_LAYOUT, Layout, parse_columns
from podgraph.workload.log_files import PARQUET_MAGIC, open_log, seekable
from podgraph.workload.parquet_rows import read_parquet
from podgraph.workload.requests import Trace, at_rate
from podgraph.workload.steps import StepHistogram, merge, summed
from podgraph.workload.text_rows import Batch, read_text

__all__ = ["BadRows", "Trace", "at_rate", "read_log", "read_steps", "read_trace"]

# Three arrays of eight bytes a request: 24 GB, and more than any log that was published.
MAX_REQUESTS = 10**9
# Rows of a step log that are held before they are summed.
_STEPS_HELD = 1 << 20

LogPath = str | os.PathLike[str]
LogPaths = LogPath | Sequence[LogPath]


def read_log(paths: LogPaths, columns: str | None = None, bad: BadRows | None = None) -> Trace | StepHistogram:
    """Reads request logs or step logs, whichever the columns of the first file say.

    CSV with a header, JSONL or Parquet, plain or compressed by gzip or zstd, are known by their content, and layouts by
    their columns (`layouts.LAYOUTS`, `layouts.STEP_LAYOUT`); so are the outputs of vLLM's and SGLang's serving
    benchmarks. Several files make one log, in the order given: where times go on from file to file, on one clock, else
    each file follows on the end of the one before.

    A row is bad where a count is missing, not a whole number or out of range, where the time is missing, negative or
    before that of the last good row, where a CSV row has not as many fields as the header, or where the line is not
    UTF-8 or above 1 MiB. Blank lines are not rows.

    Args:
        paths: the files.
        columns: ``arrival=A,input_len=B,output_len=C,time_unit=ms`` instead of a known layout.
        bad: says whether bad rows are skipped, and is filled; None skips them.

    Raises:
        TraceError: a file cannot be read, is no log, is damaged, of another kind than the first, or out of order; there
            is no good row; a row is bad, and bad rows are fatal.
    """
    bad = BadRows() if bad is None else bad
    names = _names(paths)
    batches = _batches(names, columns, bad)
    # The first good row decides.
    first = next((item for item in batches if len(item[1].places)), None)
    if first is None:
        raise _nothing(names, bad)
    batches = chain([first], batches)
    return _steps(batches, names) if first[1].layout.is_steps else _trace(batches, names, bad, None)


def read_trace(
    paths: LogPaths, limit: int | None = None, columns: str | None = None, bad: BadRows | None = None
) -> Trace:
    """Reads request logs as `read_log` does.

    Args:
        paths: the files.
        limit: stop reading after this many good rows; None reads all of them.
        columns, bad: as in `read_log`.

    Returns:
        The trace, its arrays read-only and its ``source`` the paths as given.

    Raises:
        TraceError: as `read_log`; a file is a step log; ``limit`` < 1.
    """
    bad = BadRows() if bad is None else bad
    names = _names(paths)
    if limit is not None and limit < 1:
        raise TraceError(f"{names[0]}: limit: must be > 0, got {limit}; leave it out to read every row")
    return _trace(_batches(names, columns, bad, limit), names, bad, limit)


def read_steps(paths: LogPaths, bad: BadRows | None = None) -> StepHistogram:
    """Reads step logs or histogram files, which are one format, and adds them up.

    Columns are ``prefill_len``, ``prefill_requests``, ``decode_count``, and, where they are there, ``steps`` (1 unless
    given) and sums over those steps: ``decode_kv_tokens``, ``prefill_kv_tokens``, ``prefill_pairs`` (0 unless given).

    Args:
        paths, bad: as in `read_log`.

    Raises:
        TraceError: as `read_log`; a file is a request log.
    """
    bad = BadRows() if bad is None else bad
    names = _names(paths)
    batches = _batches(names, None, bad)
    first = next((item for item in batches if len(item[1].places)), None)
    if first is None:
        raise _nothing(names, bad)
    return _steps(chain([first], batches), names)


def _names(paths: LogPaths) -> list[str]:
    names = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    if not names:
        raise TraceError("no log: got an empty list of files; name at least one")
    return names


def _source(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def _nothing(names: Sequence[str], bad: BadRows) -> TraceError:
    reason = bad.first[0][1] if bad.first else "nothing follows the header"
    return TraceError(f"{_source(names)}: no good row in {bad.count} read; {reason}")


def _batches(
    names: Sequence[str], columns: str | None, bad: BadRows, limit: int | None = None
) -> Iterator[tuple[str, Batch]]:
    layouts = (*LAYOUTS, STEP_LAYOUT) if columns is None else (parse_columns(columns),)
    for name in names:
        with open_log(Path(name), name) as (head, file):
            for batch in _read(head, file, name, layouts, bad, limit):
                yield name, batch


def _read(
    head: bytes, file: io.BufferedReader, name: str, layouts: Sequence[Layout], bad: BadRows, limit: int | None
) -> Iterator[Batch]:
    if head.startswith(PARQUET_MAGIC):
        with seekable(file, Path(name), name) as path:
            yield from read_parquet(path, name, layouts, bad)
    elif len(layouts) > 1 and head.lstrip().startswith(b"{") and benchmark_outputs.MARK in head:
        yield from benchmark_outputs.read_benchmark(file, name, bad)
    else:
        # One line at a time, so that nothing behind the last row is judged.
        yield from read_text(file, name, layouts, bad, None if limit is None else 1)


def _steps(batches: Iterator[tuple[str, Batch]], names: Sequence[str]) -> StepHistogram:
    source = _source(names)
    held: list[StepHistogram] = []
    for name, batch in batches:
        if not batch.layout.is_steps:
            raise TraceError(f"{name}: a request log ({batch.layout.name}), not a step log; simulate it first")
        columns = dict(zip((count.role for count in batch.layout.counts), batch.counts, strict=True))
        held.append(summed({role: np.ascontiguousarray(values) for role, values in columns.items()}, source))
        if sum(map(len, held)) > _STEPS_HELD:
            held = [merge(held, source)]
    return merge(held, source)


def _trace(batches: Iterator[tuple[str, Batch]], names: Sequence[str], bad: BadRows, limit: int | None) -> Trace:
    clock = Clock()
    lengths: list[npt.NDArray[np.int64]] = []
    arrivals: list[npt.NDArray[np.float64]] = []
    count = 0
    for name, batch in batches:
        if batch.layout.is_steps:
            raise TraceError(f"{name}: a step log, not a request log; it needs no simulation")
        arrival_s, kept = clock.read(batch, name, bad)
        arrivals.append(arrival_s[: None if limit is None else limit - count])
        lengths.append(batch.counts[:, kept][:, : arrivals[-1].size])
        count += arrivals[-1].size
        if count == limit:
            break
        if count > MAX_REQUESTS:
            raise TraceError(f"{name}: more than {MAX_REQUESTS} requests; cut the log in parts, merge their histograms")
    if not count:
        raise _nothing(names, bad)
    input_len, output_len = (np.concatenate([values[row] for values in lengths]) for row in (0, 1))
    trace = Trace(
        np.concatenate(arrivals),
        input_len,
        output_len,
        source=_source(names),
        skipped=bad.count,
        has_arrivals=clock.has_arrivals,
        bad_rows=bad.shown,
    )
    for values in (trace.arrival_s, trace.input_len, trace.output_len):
        values.setflags(write=False)
    return trace
