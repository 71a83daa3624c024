"""Rows that are left out: counted, the first few kept with their place and reason, or fatal by choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from podgraph.errors import TraceError

OnBadRow = Literal["skip", "fail"]
SHOWN = 5


@dataclass
class BadRows:
    """What was left out of some files.

    Attributes:
        on_bad_row: ``skip`` counts bad rows, ``fail`` raises at the first.
        count: how many there were.
        first: the first few, as (file, ``line 7: REASON``).
    """

    on_bad_row: OnBadRow = "skip"
    count: int = 0
    first: list[tuple[str, str]] = field(default_factory=list)

    def add(self, source: str, place: str, reason: object) -> None:
        """Notes one.

        Raises:
            TraceError: bad rows are fatal.
        """
        if self.on_bad_row == "fail":
            raise TraceError(f"{source}: {place}: {reason}; mend the row, or skip bad rows")
        self.count += 1
        if len(self.first) < SHOWN:
            self.first.append((source, f"{place}: {reason}"))

    @property
    def shown(self) -> tuple[str, ...]:
        """The first few, a line each."""
        return tuple(f"{source}: {reason}" for source, reason in self.first)
