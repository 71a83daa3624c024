"""Step logs and histogram files, which are one format: a row per kind of step, Parquet or CSV."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path

from podgraph import whole_file
from podgraph.errors import TraceError
from podgraph.workload import provenance
from podgraph.workload.log_files import PARQUET_MAGIC
from podgraph.workload.parquet_rows import damaged
from podgraph.workload.provenance import Provenance
from podgraph.workload.steps import COLUMNS, StepHistogram
from podgraph.workload.traces import read_steps

METADATA_KEY = "podgraph"


def read_provenance(path: str | os.PathLike[str]) -> Provenance | None:
    """What a histogram file says about its simulation; None where it says nothing.

    Raises:
        TraceError: the file cannot be read, or what it says is damaged.
    """
    import polars as pl

    source = os.fspath(path)
    try:
        with Path(path).open("rb") as file:
            if file.read(len(PARQUET_MAGIC)) != PARQUET_MAGIC:
                return None
            text = pl.read_parquet_metadata(Path(path)).get(METADATA_KEY)
    except OSError as error:
        raise TraceError(f"{source}: cannot be read: {error.strerror or error}") from error
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise damaged(source, error) from None
    return None if text is None else provenance.from_json(text, source)


def write_steps(histogram: StepHistogram, path: str | os.PathLike[str], origin: Provenance | None = None) -> int:
    """Writes a histogram file, whole or not at all: Parquet where the name ends in ``.parquet``, else CSV.

    Args:
        histogram: what to write.
        path: the file, replaced where it exists.
        origin: kept in the metadata of Parquet; CSV has no place for it.

    Returns:
        The bytes written.

    Raises:
        TraceError: it cannot be written.
    """
    import polars as pl

    frame = pl.DataFrame({name: getattr(histogram, name) for name in COLUMNS})
    buffer = io.BytesIO()
    if Path(path).suffix == ".parquet":
        frame.write_parquet(buffer, metadata={} if origin is None else {METADATA_KEY: origin.to_json()})
    else:
        frame.write_csv(buffer)
    whole_file.write(path, buffer.getvalue(), TraceError)
    return buffer.getbuffer().nbytes


def merge_files(
    paths: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]
) -> tuple[StepHistogram, Provenance | None]:
    """Adds histogram files up into one.

    Where all of them say how they were simulated, so does the result.

    Raises:
        TraceError: a file cannot be read, they were not simulated alike, or the result cannot be written.
    """
    names = [os.fspath(path) for path in paths]
    origins = [read_provenance(path) for path in paths]
    known = [origin for origin in origins if origin is not None]
    told = [name for name, origin in zip(names, origins, strict=True) if origin is not None]
    origin = provenance.merged(known, told) if known else None
    if len(known) < len(paths):
        origin = None
    histogram = read_steps(paths)
    write_steps(histogram, output, origin)
    return histogram, origin
