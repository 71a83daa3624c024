"""Files that appear complete, in the place of an older one, or not at all: every file that podgraph writes."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from podgraph.errors import PodgraphError


def write(path: str | os.PathLike[str], data: bytes, error: type[PodgraphError]) -> None:
    """Writes a file beside its destination, makes it durable, and renames it.

    Args:
        error: what to raise where that cannot be done, one line that names the path.

    Raises:
        PodgraphError: it cannot be written, or is a device, a pipe or a folder; an older file stays as it was.
    """
    try:
        _write(Path(path), data)
    except OSError as e:
        raise error(f"{path}: cannot be written: {e.strerror or e}") from e


def _write(path: Path, data: bytes) -> None:
    if not path.name:
        raise OSError(0, "not a file name; name a file in a folder")
    if path.exists() and not path.is_file() and not path.is_dir():  # to replace /dev/null would break the machine
        raise OSError(0, "not a regular file")
    # Not tempfile: its files are private (0600), and this one should get the permissions of any new file.
    temporary = path.with_name(f".podgraph-{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # The new name is durable once the folder is.
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
