"""Single values of a catalog: how large they may be, and the checks that name what they refuse.

Every failure reads ``where: got X, allowed: Y``.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from podgraph.errors import CatalogError

MAX_COUNT = 1 << 24  # heads, rows, pages, tokens: the same bound as in a config
MAX_SPECS = 64
MAX_REGIONS = 64  # of one specification
MAX_TEMPLATES = 1 << 16
MAX_NODES = 1 << 16  # of one template
MAX_SLOTS = 1 << 16  # of one template
MAX_ROWS = 1 << 20  # of one table: relocations, edges or records
MAX_NAME = 256  # characters
MAX_BUILT_WITH = 256
MAX_BUILT_WITH_TEXT = 4096  # characters
MAX_IMAGE_BYTES = 1 << 28
MAX_REGION_BYTES = 1 << 40
MAX_SHARED_BYTES = 1 << 18

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" and "__global__ Function Parameters".
MAX_GRID = (2**31 - 1, 65_535, 65_535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024
MAX_PARAMS_BYTES = 32_764

WORD_BYTES = 8

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


def shown(value: object) -> str:
    """A value in a message; shortened, since a damaged file can put megabytes there."""
    return _SHORT.repr(value)


def refuse(where: str, got: object, allowed: str) -> CatalogError:
    """The error to raise."""
    return CatalogError(f"{where}: got {shown(got)}, allowed: {allowed}")


def integer(value: object, where: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:  # a bool is no integer here
        raise refuse(where, value, f"an integer from {low} to {high}")
    return value


def number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise refuse(where, value, "a finite number, 0 or more")
    return float(value)


def text(value: object, where: str, longest: int = MAX_NAME) -> str:
    """Printable only: names and versions end up on terminals."""
    if type(value) is not str or not 0 < len(value) <= longest or not value.isprintable():
        raise refuse(where, value, f"1 to {longest} printable characters")
    return value


def matching(value: object, where: str, pattern: re.Pattern[str], allowed: str) -> str:
    if type(value) is not str or not pattern.fullmatch(value):
        raise refuse(where, value, allowed)
    return value


def sequence(value: object, where: str, most: int, least: int = 0) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise refuse(where, value, "a list")
    integer(len(value), f"length of {where}", least, most)
    return value


def mapping(value: object, where: str, most: int) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise refuse(where, value, "a mapping")
    integer(len(value), f"length of {where}", 0, most)
    return value
