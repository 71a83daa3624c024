"""Catalog files: written whole or not at all, and read as if a stranger had made them."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from podgraph import whole_file
from podgraph.catalog.canonical_json import MAX_DOCUMENT_BYTES, check_canonical, load_json
from podgraph.catalog.format import decode, encode
from podgraph.catalog.model import Catalog
from podgraph.catalog.values import refuse
from podgraph.errors import CatalogError

SUFFIX = ".podcat"
"""What a catalog's file name ends in, by convention; neither function insists on it."""

METADATA_KEY = "podgraph"
MAX_FILE_BYTES = 1 << 30
MAX_HEADER_BYTES = MAX_DOCUMENT_BYTES

_LENGTH_BYTES = 8  # a safetensors file starts with the length of its JSON header, little-endian


def write(path: str | Path, catalog: Catalog) -> int:
    """Writes a catalog and returns the file's size in bytes.

    The file appears complete, in the place of an older one, or not at all. Equal catalogs give equal bytes.

    Raises:
        CatalogError: the catalog breaks the format's limits, or the file cannot be written.
    """
    path = Path(path)
    if not path.name:
        raise CatalogError(f"{path}: cannot be written: not a file name; name a file such as NAME{SUFFIX}")
    try:
        tensors, document = encode(catalog)
        data = safetensors.numpy.save(tensors, metadata={METADATA_KEY: document})
        _check_size(len(data))
        _header_length(data, len(data))
    except CatalogError as e:
        raise CatalogError(f"{path}: cannot be written: {e}") from e
    whole_file.write(path, data, CatalogError)
    return len(data)


def read(path: str | Path) -> Catalog:
    """Reads a catalog, checking everything in it; touches no GPU.

    Raises:
        CatalogError: the file is missing, damaged, of another format version, or holds something not allowed. The
            message starts with the path.
    """
    path = Path(path)
    try:
        data = _load(path)
        header = _header(data)
        fields = load_json(header, "header")
        catalog = decode(_tensors(data), _document(fields))
        # After the format version: a later one may write its header in another way.
        check_canonical(fields, header, "header", sort_keys=False)
        return catalog
    except CatalogError as e:
        raise CatalogError(f"{path}: {e}") from e
    except OSError as e:
        raise CatalogError(f"{path}: cannot be read: {e.strerror or e}") from e


def _load(path: Path) -> bytes:
    """The bytes of a file that may be a catalog. Read, not mapped: a file cut while it is mapped kills the process."""
    with open(path, "rb", opener=_open_without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise CatalogError("not a regular file; name a catalog file")
        _check_size(status.st_size)
        start = file.read(_LENGTH_BYTES)
        _header_length(start, status.st_size)
        data = start + file.read(status.st_size - len(start))
    if len(data) != status.st_size:
        raise CatalogError(f"got {len(data)} of {status.st_size} bytes: the file changed while it was read; try again")
    return data


def _open_without_waiting(path: str, flags: int) -> int:
    # A named pipe would wait for its writer.
    return os.open(path, flags | os.O_NONBLOCK)


def _check_size(size: int) -> None:
    if not _LENGTH_BYTES <= size <= MAX_FILE_BYTES:
        raise CatalogError(f"size: got {size} bytes, allowed: from {_LENGTH_BYTES} to {MAX_FILE_BYTES}")


def _header_length(start: bytes, size: int) -> int:
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    most = min(size - _LENGTH_BYTES, MAX_HEADER_BYTES)
    if length > most:
        raise CatalogError(
            f"header length: got {length}, allowed: at most {most} of {size} bytes; "
            "the file is cut or not a catalog, copy it again"
        )
    return length


def _header(data: bytes) -> str:
    """The JSON header, without the blanks that align what follows."""
    header = data[_LENGTH_BYTES : _LENGTH_BYTES + _header_length(data, len(data))]
    try:
        return header.rstrip(b" ").decode()
    except UnicodeDecodeError as e:
        raise CatalogError("header: not UTF-8; the file is damaged or not a catalog, copy it again") from e


def _document(fields: Mapping[str, object]) -> str:
    metadata = fields.get("__metadata__")
    if isinstance(metadata, dict) and list(metadata) == [METADATA_KEY]:
        document = metadata[METADATA_KEY]
        if isinstance(document, str):
            return document
    raise refuse("header.__metadata__", metadata, f"one string, {METADATA_KEY!r}; not a catalog, or damaged")


def _tensors(data: bytes) -> dict[str, npt.NDArray[Any]]:
    try:
        tensors: dict[str, npt.NDArray[np.generic]] = safetensors.numpy.load(data)
    except Exception as e:
        # SafetensorError, but also KeyError, ValueError and others that its conversion to numpy lets through.
        raise CatalogError(f"not a safetensors file: {str(e) or type(e).__name__!r:.200}; copy it again") from e
    return tensors
