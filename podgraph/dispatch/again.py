"""Runs of bound layers that need no more than one launch: what ran before at the same addresses, or a lone kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from podgraph.catalog.model import Record
from podgraph.dispatch.calls import Call
from podgraph.dispatch.counters import Counters

# What is planned, with each bucket as counters name it.
Planned = tuple[tuple[Record, str], ...]


class Repeat(NamedTuple):
    """How a layer runs again under any plan of the same template.

    Attributes:
        held: `Call.key` of what the layer's graph holds.
        replay: replays that graph, and returns the driver's status; None where there is no graph yet.
        alone: launches the template's only kernel by itself for another call; None where it has several.
    """

    held: tuple[int, ...]
    replay: Callable[[], int] | None
    alone: Callable[[Call], int] | None


class RunsAgain:
    """What may run again, by template and layer: each of these has a graph of its own.

    Attributes:
        layers: those of the template that is planned.
        replays, lone: how many ran again, ever, by their graph or as a lone kernel. They are counted only when somebody
            looks, or another plan comes.
    """

    def __init__(self) -> None:
        self.layers: dict[int, Repeat] = {}
        self.replays = self.lone = 0
        self._by_template: dict[int, dict[int, Repeat]] = {}
        self._counted = [0, 0]
        self._lock = threading.Lock()

    def plan(self, planned: Planned, allowed: bool) -> None:
        """From now on another plan is in force; a batch that was cut never runs again."""
        if not allowed or len(planned) != 1:
            self.layers = {}
            return
        template = planned[0][0].template
        layers = self._by_template.get(template)
        if layers is None:
            layers = self._by_template[template] = {}
        self.layers = layers

    def count(self, counters: Counters, planned: Planned | None) -> None:
        """Adds what ran again under a plan to the counters."""
        if self._counted == [self.replays, self.lone] or not planned:
            return
        with self._lock:  # whoever scrapes may be another thread
            replays, lone = self.replays - self._counted[0], self.lone - self._counted[1]
            self._counted = [self._counted[0] + replays, self._counted[1] + lone]
            counters.runs += replays + lone
            counters.replays[planned[0][1]] += replays + lone
            for mode, count in (("graph", replays), ("eager", lone)):
                if count:
                    counters.replays_by_mode[mode] += count

    def clear(self) -> None:
        """Nothing may run again: graphs are gone, or have other uses now."""
        self.layers, self._by_template = {}, {}
