"""Step logs and histogram files, which are one format: a row per kind of step, Parquet or CSV."""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from podgraph.errors import TraceError
from podgraph.workload import provenance
from podgraph.workload.provenance import Provenance
from podgraph.workload.steps import COLUMNS, KEY, StepHistogram, merge, summed

METADATA_KEY = "podgraph"
_PARQUET_MAGIC = b"PAR1"


def read_steps(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> StepHistogram:
    """Reads step logs or histogram files, and adds them up.

    Columns are ``prefill_len``, ``prefill_requests``, ``decode_count``, and, where they are there, ``steps`` (1 unless
    given) and sums over those steps: ``decode_kv_tokens``, ``prefill_kv_tokens``, ``prefill_pairs`` (0 unless given).

    Raises:
        TraceError: a file cannot be read, or is no step log.
    """
    import polars as pl

    files = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    histograms = []
    for path in files:
        source = os.fspath(path)
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise TraceError(f"{source}: cannot be read: {error.strerror or error}") from error
        frame = pl.read_parquet(data) if data.startswith(_PARQUET_MAGIC) else pl.read_csv(data)
        if missing := [name for name in KEY if name not in frame.columns]:
            raise TraceError(f"{source}: no step log: column {missing[0]} is missing")
        defaults = {name: int(name == "steps") for name in COLUMNS}
        columns = {
            name: frame[name].cast(pl.Int64).to_numpy()
            if name in frame.columns
            else np.full(len(frame), defaults[name], dtype=np.int64)
            for name in COLUMNS
        }
        histograms.append(summed(columns, source))
    return merge(histograms, ", ".join(h.source for h in histograms))


def read_provenance(path: str | os.PathLike[str]) -> Provenance | None:
    """What a histogram file says about its simulation; None where it says nothing.

    Raises:
        TraceError: the file cannot be read, or what it says is damaged.
    """
    import polars as pl

    source = os.fspath(path)
    try:
        with Path(path).open("rb") as file:
            if file.read(len(_PARQUET_MAGIC)) != _PARQUET_MAGIC:
                return None
            text = pl.read_parquet_metadata(Path(path)).get(METADATA_KEY)
    except OSError as error:
        raise TraceError(f"{source}: cannot be read: {error.strerror or error}") from error
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
    _replace(Path(path), buffer.getvalue())
    return buffer.getbuffer().nbytes


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".podgraph-{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise TraceError(f"{path}: cannot be written: {error.strerror or error}; name a file in a folder") from error


def merge_files(paths: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]) -> StepHistogram:
    """Adds histogram files up into one.

    Where all of them say how they were simulated, so does the result.

    Raises:
        TraceError: a file cannot be read, they were not simulated alike, or the result cannot be written.
    """
    names = [os.fspath(path) for path in paths]
    origins = [read_provenance(path) for path in paths]
    known = [origin for origin in origins if origin is not None]
    origin = provenance.merged(known, names) if len(known) == len(paths) else None
    histogram = read_steps(paths)
    write_steps(histogram, output, origin)
    return histogram
