"""How messages quote values and keys of files: on one line, whatever is in them."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


def shown(value: object) -> str:
    """A value as a message quotes it: in YAML's words, on one line, not too long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return _SHORT.repr(value)


def key_path(parts: Sequence[int | str]) -> str:
    """``specs.small.head_dim``, ``buckets.batch[1]``; a name that is too strange for a terminal is quoted."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            plain = part.isprintable() and 0 < len(part) <= 64
            path += ("." if path else "") + (part if plain else _SHORT.repr(part))
    return path
