"""What a histogram file says about where its steps came from, so that shards can be merged and others cannot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from podgraph.errors import TraceError

FORMAT = 1
Setting: TypeAlias = str | int | float | None
Settings: TypeAlias = dict[str, Setting]


@dataclass(frozen=True, order=True)
class Part:
    """One simulated piece of a trace.

    Attributes:
        trace: SHA-256 over the trace's arrays, so that it is known on another machine under another name.
        shard: which piece, from 1, of ``shards``.
        shards: pieces that the trace was cut into.
        name: what the trace was called.
        rate: requests per second that its arrivals were scaled to; None where they are the trace's own.
        skipped: bad rows of the whole trace.
        requests, finished, dropped, preempted: of this piece.
        simulated_us: how long the simulated engine took.
    """

    trace: str
    shard: int
    shards: int
    name: str
    rate: float | None
    skipped: int
    requests: int
    finished: int
    dropped: int
    preempted: int
    simulated_us: int


@dataclass(frozen=True)
class Provenance:
    """Settings of the simulated engine by name, and the pieces that it served."""

    settings: Settings
    parts: tuple[Part, ...]

    def to_json(self) -> str:
        """One line, the same for the same provenance."""
        document = {"format": FORMAT, "settings": self.settings, "parts": [asdict(part) for part in self.parts]}
        return json.dumps(document, sort_keys=True, separators=(",", ":"))

    def total(self, field: str) -> int:
        """The sum of one count over the parts."""
        return sum(getattr(part, field) for part in self.parts)


def from_json(text: str, source: str) -> Provenance:
    """Reads what `Provenance.to_json` wrote.

    Raises:
        TraceError: it is something else, or of another format.
    """
    try:
        document: Any = json.loads(text)
        if document["format"] != FORMAT:
            raise TraceError(
                f"{source}: histogram format {document['format']!r:.40}, allowed: {FORMAT}; simulate it again"
            )
        settings = dict(document["settings"].items())
        if wrong := [v for v in settings.values() if not isinstance(v, (str, int, float, type(None)))]:
            raise ValueError(f"settings={wrong[0]!r:.40}")
        return Provenance(settings, tuple(_part(part) for part in document["parts"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TraceError(f"{source}: its metadata is damaged ({error!r:.200}); simulate it again") from None


def _part(fields: dict[str, Any]) -> Part:
    part = Part(**fields)
    for name, kind in Part.__annotations__.items():
        value = fields[name]
        allowed = {"str": str, "int": int}.get(kind, (int, float, type(None)))
        if not isinstance(value, allowed) or isinstance(value, bool):
            raise ValueError(f"{name}={value!r:.40}")
    return part


def merged(provenances: Sequence[Provenance], names: Sequence[str]) -> Provenance:
    """The provenance of the sum of several files.

    Raises:
        TraceError: they were simulated with other settings, or hold a piece twice.
    """
    first, seen = provenances[0], dict.fromkeys(provenances[0].parts, names[0])
    for provenance, name in zip(provenances[1:], names[1:], strict=True):
        keys = sorted(first.settings.keys() | provenance.settings.keys())
        differing = [
            f"{key} {first.settings.get(key)} against {provenance.settings.get(key)}"
            for key in keys
            if first.settings.get(key) != provenance.settings.get(key)
        ]
        if differing:
            raise TraceError(
                f"{name}: not simulated as {names[0]} was: {', '.join(differing)}; simulate both with the same settings"
            )
        for part in provenance.parts:
            for other, owner in seen.items():
                _compare(part, name, other, owner)
            seen[part] = name
    return Provenance(first.settings, tuple(sorted(seen)))


def _compare(part: Part, name: str, other: Part, owner: str) -> None:
    if part.trace != other.trace:
        return
    if part.shards != other.shards:
        raise TraceError(
            f"{name}: cuts {part.name} into {part.shards} shards, {owner} into {other.shards}; cut it the same way"
        )
    if part.rate != other.rate:
        raise TraceError(f"{name}: {part.name} at {part.rate} requests/s, in {owner} at {other.rate}; use one rate")
    if part.shard == other.shard:
        raise TraceError(
            f"{name}: shard {part.shard}/{part.shards} of {part.name} is in {owner} already; merge each shard once"
        )
