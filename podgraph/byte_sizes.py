"""Sizes as people write them, in YAML and on the command line: ``512 MiB``."""

from __future__ import annotations

import re

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?([A-Za-z]+)")


def parse(text: str) -> int:
    """The bytes of a number with one of ``UNITS``, rounded.

    Raises:
        ValueError: the text is no such size; the message is the problem alone.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError("must be a size")
    if match[2] not in UNITS:
        raise ValueError("unknown unit")
    return round(float(match[1]) * UNITS[match[2]])
