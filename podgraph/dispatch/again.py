"""Runs of bound layers that come again just as they were: one launch each, with nothing to check but that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from podgraph.catalog.model import Record
from podgraph.dispatch.counters import Counters
from podgraph.dispatch.tensors import Call

# What is planned, with each bucket as counters name it.
Planned = tuple[tuple[Record, str], ...]


class Again(NamedTuple):
    """A call, and what replays it as long as its graph holds the same addresses."""

    call: Call
    launch: Callable[[], int]


class RunsAgain:
    """What may come again, by template and layer: each of these has a graph of its own.

    Attributes:
        layers: those of the template that is planned.
        runs: how many came again, ever. They are counted only when somebody looks, or another plan comes.
    """

    def __init__(self) -> None:
        self.layers: dict[int, Again] = {}
        self.runs = 0
        self._by_template: dict[int, dict[int, Again]] = {}
        self._counted = 0
        self._lock = threading.Lock()

    def plan(self, planned: Planned, allowed: bool) -> None:
        """From now on another plan is in force; a batch that was cut never comes again."""
        if not allowed or len(planned) != 1:
            self.layers = {}
            return
        template = planned[0][0].template
        layers = self._by_template.get(template)
        if layers is None:
            layers = self._by_template[template] = {}
        self.layers = layers

    def count(self, counters: Counters, planned: Planned | None) -> None:
        """Adds what came again under a plan to the counters."""
        if self.runs == self._counted:
            return
        with self._lock:  # whoever scrapes may be another thread
            runs = self.runs - self._counted
            if runs and planned:
                self._counted += runs
                counters.runs += runs
                counters.replays_by_mode["graph"] += runs
                counters.replays[planned[0][1]] += runs

    def clear(self) -> None:
        """Nothing may come again: graphs are gone, or have other uses now."""
        self.layers, self._by_template = {}, {}
