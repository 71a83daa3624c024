"""Counters and memory of dispatchers for Prometheus, read when they are scraped: serving pays nothing for it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from podgraph.dispatch.counters import MISS_REASONS, MODES, SPLIT_REASONS, Counters
from podgraph.errors import ConfigError


class Figure(NamedTuple):
    """How one field of `Counters` is exported.

    Attributes:
        text: what Prometheus shows beside it.
        label: what tells the numbers of a field with several apart; None for a plain number.
        known: label values that are there from the start, at 0: an increase from nothing to 1 is none to Prometheus.
    """

    text: str
    label: str | None = None
    known: tuple[str, ...] = ()


FIGURES = {
    "plans": Figure("Calls of plan()."),
    "runs": Figure("Calls of run()."),
    "replays": Figure("Replays by bucket.", "bucket"),
    "replays_by_mode": Figure("Replays by how they ran.", "mode", MODES),
    "splits": Figure("Batches that took several replays, by reason.", "reason", SPLIT_REASONS),
    "misses": Figure("Batches that plan() refused for want of a bucket, by reason.", "reason", MISS_REASONS),
    "planner_errors": Figure("Steps that the planner on the GPU refused, by what was wrong.", "kind"),
    "padded_rows": Figure("Prefill rows of the chosen buckets that stayed empty."),
    "padded_slots": Figure("Request slots of the chosen buckets that stayed empty."),
    "over_padding_cap": Figure("Replays of buckets with more empty rows than padding_cap allows."),
    "exec_updates": Figure("Replays that had to change addresses first."),
    "exec_instantiations": Figure("Executable graphs made."),
    "exec_evictions": Figure("Executable graphs given up, so that there was memory for another one."),
}
MEMORY = "podgraph_memory_bytes"
MEMORY_TEXT = "Bytes that the runtime holds, by kind; pinned ones on the host, the others on the device."
OWN_LABELS = {"kind"} | {figure.label for figure in FIGURES.values() if figure.label}


class Observed(Protocol):
    """What is asked of a dispatcher, from whichever thread the scrape comes."""

    @property
    def counters(self) -> Counters: ...
    def memory(self) -> dict[str, int]: ...


class DispatcherCollector(Collector):
    """Dispatchers as a collector of prometheus-client: ``REGISTRY.register(DispatcherCollector(pod))``.

    A registry takes each metric from one collector only, so several dispatchers go into one, told apart by labels::

        collector = DispatcherCollector(full, {"spec": "full"})
        collector.add(windowed, {"spec": "windowed"})
        REGISTRY.register(collector)

    A dispatcher is held until it is removed: remove it when it is closed.

    Args:
        dispatcher: the first one.
        labels: put on each of its samples, name -> value.

    Raises:
        ConfigError: a label that Prometheus does not allow, or that podgraph's metrics use themselves.
    """

    def __init__(self, dispatcher: Observed, labels: Mapping[str, str] | None = None) -> None:
        own = dict(labels or {})
        for name in own:
            if not re.fullmatch(r"(?!__)[A-Za-z_][A-Za-z0-9_]*", name) or name in OWN_LABELS:
                raise ConfigError(
                    f"labels: got {name!r}, allowed: letters, digits and _, no digit or __ in front, other than "
                    f"{', '.join(sorted(OWN_LABELS))}"
                )
        self._names = tuple(own)
        self._observed: dict[tuple[str, ...], Observed] = {tuple(own.values()): dispatcher}

    def add(self, dispatcher: Observed, labels: Mapping[str, str]) -> None:
        """Exports another dispatcher too.

        Args:
            labels: of the same names as the first one's, with other values.

        Raises:
            ConfigError: they are not.
        """
        if set(labels) != set(self._names):
            raise ConfigError(f"labels: got {sorted(labels)}, allowed: exactly {sorted(self._names)}")
        values = tuple(labels[name] for name in self._names)
        if values in self._observed:
            raise ConfigError(f"labels: got {dict(labels)}, which another dispatcher of this collector has")
        self._observed = {**self._observed, values: dispatcher}  # anew: a scrape may be walking the old one

    def remove(self, dispatcher: Observed) -> None:
        """Exports a dispatcher no longer; one that is not exported is no error."""
        self._observed = {values: other for values, other in self._observed.items() if other is not dispatcher}

    def describe(self) -> Iterator[Metric]:
        """Every metric without its samples: what a registry tells collisions by."""
        return _families(self._names, {})

    def collect(self) -> Iterator[Metric]:
        """Every metric as it is now."""
        seen = {values: (each.counters.to_dict(), each.memory()) for values, each in self._observed.items()}
        return _families(self._names, seen)


def text(counters: Counters, memory: Mapping[str, int]) -> str:
    """What a dispatcher had counted and held, in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Seen({(): (counters.to_dict(), memory)}))
    return generate_latest(registry).decode()


# Counters.to_dict() and memory() by the values of the labels that tell dispatchers apart
Seen = Mapping[tuple[str, ...], tuple[Mapping[str, Any], Mapping[str, int]]]


class _Seen(Collector):
    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def collect(self) -> Iterator[Metric]:
        return _families((), self._seen)


def _families(names: tuple[str, ...], seen: Seen) -> Iterator[Metric]:
    """Every metric, with the labels ``names`` and its own."""
    for field, figure in FIGURES.items():
        own = () if figure.label is None else (figure.label,)
        counter = CounterMetricFamily(f"podgraph_{field}", figure.text, labels=(*names, *own))
        for values, (counters, _) in seen.items():
            count = counters[field]
            if isinstance(count, Mapping):
                for key, number in {**dict.fromkeys(figure.known, 0), **count}.items():
                    counter.add_metric((*values, key), number)
            else:
                counter.add_metric(values, count)
        yield counter
    gauge = GaugeMetricFamily(MEMORY, MEMORY_TEXT, labels=(*names, "kind"))
    for values, (_, memory) in seen.items():
        for kind, size in memory.items():
            gauge.add_metric((*values, kind), size)
    yield gauge
