"""JSON in one spelling: what is written, and what is taken from strangers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from podgraph.catalog.values import refuse
from podgraph.errors import CatalogError

MAX_DOCUMENT_BYTES = 1 << 26


def dump_json(value: object, sort_keys: bool = True) -> str:
    return json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False)


def load_json(document: str, where: str) -> dict[str, Any]:
    """Parses a JSON mapping.

    Raises:
        CatalogError: also for absurd sizes, nesting and numbers.
    """
    if len(document) > MAX_DOCUMENT_BYTES:
        raise refuse(f"size of the {where}", len(document), f"at most {MAX_DOCUMENT_BYTES} characters")
    try:
        fields = json.loads(document, parse_int=_parse_int)
    except (ValueError, RecursionError) as e:
        reason = "too deeply nested" if isinstance(e, RecursionError) else str(e)
        raise CatalogError(f"{where}: not valid JSON: {reason:.200}; the file is damaged, copy it again") from e
    if not isinstance(fields, dict):
        raise refuse(where, fields, "a mapping")
    return fields


def check_canonical(fields: Mapping[str, object], document: str, where: str, sort_keys: bool = True) -> None:
    """Refuses JSON that `dump_json` would write otherwise: damage could hide in another spelling or a repeated key."""
    try:
        canonical = dump_json(fields, sort_keys)
    except (ValueError, RecursionError) as e:  # infinite numbers; nesting that only the parser endures
        raise CatalogError(f"{where}: cannot be canonical JSON: {e}; the file is damaged, copy it again") from e
    if canonical != document:
        keys = "sorted keys" if sort_keys else "each key once"
        raise refuse(where, document, f"canonical JSON (ASCII, {keys}, no blanks); the file is damaged, copy it again")


def _parse_int(digits: str) -> int:
    # 64-bit words have up to 20 characters; parsing time grows with the square of the digits.
    if len(digits) > 20:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)
