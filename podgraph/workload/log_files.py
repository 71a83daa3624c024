"""Bytes of a log: gzip and zstd are undone, lines come in blocks, and none grows without bound."""

from __future__ import annotations

import gzip
import io
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import zstandard

from podgraph.errors import TraceError

# A longer line is a bad row: no known trace has one (the longest hash_ids list is a few KiB), and a binary file or a
# JSON array on one line must not be read into memory.
MAX_LINE_BYTES = 1 << 20
PARQUET_MAGIC = b"PAR1"
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BLOCK_BYTES = 2 << 20
# A frame may ask for a window of up to 2 TiB; zstd itself writes 128 MiB at most (--ultra --long).
_ZSTD_WINDOW_BYTES = 1 << 27
# Parquet needs the whole file at once. It is compressed already, so nothing honest shrinks much more.
_MAX_PARQUET_GROWTH = 100
_BUFFER_BYTES = 1 << 20

Line = tuple[int, bytes]
_File = io.BufferedReader


@contextmanager
def open_log(path: Path, source: str) -> Iterator[tuple[bytes, _File]]:
    """Up to 1 MiB of the start of a log, and its whole content, whatever it is compressed with.

    Raises:
        TraceError: the file cannot be read, or its compressed data is damaged.
    """
    try:
        with path.open("rb", buffering=_BUFFER_BYTES) as raw, _decompressed(cast("_File", raw)) as file:
            yield file.peek(_BUFFER_BYTES), file
    except (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as error:
        raise TraceError(f"{source}: compressed data is damaged or cut: {error}; copy the file again") from None
    except OSError as error:
        raise TraceError(f"{source}: cannot be read: {error.strerror or error}; name a log file") from error


@contextmanager
def _decompressed(raw: _File) -> Iterator[_File]:
    start = raw.peek(len(_ZSTD_MAGIC))
    unpacked: object
    if start.startswith(_GZIP_MAGIC):
        unpacked = gzip.GzipFile(fileobj=raw)
    elif start.startswith(_ZSTD_MAGIC):
        unpacker = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
        unpacked = unpacker.stream_reader(raw, read_across_frames=True)
    else:
        yield raw
        return
    with io.BufferedReader(cast("io.RawIOBase", unpacked), _BUFFER_BYTES) as file:
        yield cast("_File", file)


@contextmanager
def seekable(file: _File, path: Path, source: str) -> Iterator[Path]:
    """A path where the content lies uncompressed.

    Raises:
        TraceError: it is far larger than the file that it was compressed to.
    """
    if isinstance(file.raw, io.FileIO):
        yield path
        return
    left = _MAX_PARQUET_GROWTH * max(path.stat().st_size, _BUFFER_BYTES)
    with tempfile.NamedTemporaryFile(suffix=".parquet") as copy:
        while data := file.read(_BUFFER_BYTES):
            left -= len(data)
            if left < 0:
                raise TraceError(f"{source}: grows more than {_MAX_PARQUET_GROWTH}-fold; decompress it yourself")
            copy.write(data)
        copy.flush()
        yield Path(copy.name)


def blocks(file: _File, most: int | None = None) -> Iterator[list[Line]]:
    """Yields the lines that are not blank, with their numbers from 1 and without their ends, some at a time.

    ``most`` is how many at a time; None is as many as are read at once.

    Of a line that is too long the first ``MAX_LINE_BYTES`` come, and come at once, so that an endless one is seen; any
    other line is shorter. No more is read than was yielded, but for the last block: a pipe may stay open.
    """
    number = 0
    rest = b""
    passing_over = False
    while True:
        data = file.read1(_BLOCK_BYTES)
        text = rest + data
        lines = text.split(b"\n")
        # What follows the last end of a line is not complete yet.
        rest = lines.pop() if data else b""
        found: list[Line] = []
        for line in lines:
            if passing_over:
                passing_over = False
                continue
            number += 1
            # The end of the line counts too.
            if len(line) >= MAX_LINE_BYTES:
                found.append((number, line[:MAX_LINE_BYTES]))
            elif line and not line.isspace():
                found.append((number, line))
        if len(rest) >= MAX_LINE_BYTES:
            if not passing_over:
                passing_over = True
                number += 1
                found.append((number, rest[:MAX_LINE_BYTES]))
            rest = b""
        step = most or max(1, len(found))
        for start in range(0, len(found), step):
            yield found[start : start + step]
        if not data:
            return
