"""Everything that the report says, as plain data: no figure, no page, no text for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from podgraph.errors import ConfigError
from podgraph.planner import Layout
from podgraph.report.cells import Cell, cells_of
from podgraph.report.changes import Change, additions, removals, unused
from podgraph.report.source import Source, Workload
from podgraph.shapes import Bucket
from podgraph.workload.cost_tables import RowCosts, TableCosts
from podgraph.workload.costs import EAGERS, Costs, Eager
from podgraph.workload.coverage import Coverage, assign, coverage, summarise
from podgraph.workload.engine_lists import engine_lists
from podgraph.workload.memory import Memory, memory_of, memory_of_catalog
from podgraph.workload.optimise import Limits, Tuned, frontier
from podgraph.workload.profile import DeviceProfile

SIZES = (1, 2, 4, 8, 16, 32, 64)  # of the best sets on the frontier

# How a time was found: by a model of the device, or from the user's table, with the rest of a step modelled.
Timed = Literal["modelled", "table"]


@dataclass(frozen=True)
class Point:
    """One set of buckets on the frontier or beside it.

    Attributes:
        name: ``this``, ``best`` (for these steps, of that many buckets) or an engine's list.
        buckets: how many.
        dedicated_bytes, shared_bytes: device memory with a graph exec for each bucket, and where buckets share them.
        modelled: whether these are estimates, as of every set that is not built.
        covered: share of steps that one replay serves.
        expected_us: mean time of a step.
        waste: see `Coverage`.
        other_us, other_waste: the same with eager steps at the other price.
        gap: proven distance to the best set of that many buckets, as a share of time; None where nothing is proven.
    """

    name: str
    buckets: int
    dedicated_bytes: int
    shared_bytes: int
    modelled: bool
    covered: float
    expected_us: float
    waste: float
    other_us: float
    other_waste: float
    gap: float | None = None


@dataclass(frozen=True)
class Report:
    """The whole content.

    Attributes:
        source: the set.
        workload: the steps.
        eager: how eager steps are priced wherever one price is shown.
        timed: how the times were found.
        device: what the GPU is called.
        now: what the set does, by price of eager steps.
        memory: of the set.
        points: this set first, the best ones by size, then engines' lists.
        add, drop: what to change first, one after the other.
        unused: buckets that serve no step.
        unused_bytes: device memory that they take, with a graph exec for each bucket.
        cells: steps by prefill rows and decodes.
        replay_us: of each bucket as the build measured it; empty for a configuration.
    """

    source: Source
    workload: Workload
    eager: Eager
    timed: Timed
    device: str
    now: dict[Eager, Coverage]
    memory: Memory
    points: tuple[Point, ...]
    add: tuple[Change, ...]
    drop: tuple[Change, ...]
    unused: tuple[Bucket, ...]
    unused_bytes: int
    cells: tuple[Cell, ...]
    replay_us: dict[Bucket, float]

    @property
    def other(self) -> Eager:
        """The price of eager steps that is shown beside the chosen one."""
        return "hidden" if self.eager == "penalty" else "penalty"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; ``kinds`` says how each part was found."""
        now, count = self.now[self.eager], len(self.source.build.buckets)
        memory = {
            **asdict(self.memory),
            "dedicated_total_bytes": self.memory.total(count),
            "shared_total_bytes": self.memory.total(count, shared=True),
        }
        return {
            "source": self.source.name,
            "workload": {
                "name": self.workload.name,
                "steps": now.steps,
                "token_budget": self.workload.token_budget,
                "max_running": self.workload.max_running,
            },
            "scope": now.scope,
            "costs": now.source,
            "eager": self.eager,
            "kinds": {
                "steps": self.workload.counted,
                "times": self.timed,
                "memory_graphs": "modelled" if self.memory.modelled else "measured",
                "replay_us": "measured",
                "file": "measured",
            },
            "coverage": {name: _plain(found) for name, found in self.now.items()},
            "memory": memory,
            "file": {"bytes": self.source.file_bytes or None, "build_seconds": dict(self.source.build_seconds) or None},
            "points": [asdict(point) for point in self.points],
            "add": [asdict(change) for change in self.add],
            "drop": [asdict(change) for change in self.drop],
            "unused": [asdict(bucket) for bucket in self.unused],
            "unused_bytes": self.unused_bytes,
            "cells": [asdict(cell) for cell in self.cells],
            "replay_us": [{**asdict(bucket), "us": us} for bucket, us in self.replay_us.items()],
        }


def make_report(
    source: Source,
    workload: Workload,
    costs: Costs,
    device: DeviceProfile,
    eager: Eager,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Looks at a set of buckets from every side.

    Args:
        source: the set.
        workload: the steps.
        costs: what buckets cost, in one scope.
        device: profile of the GPU, for memory.
        eager: how eager steps are priced where one price is shown.
        progress: called with (searches done, searches in all), which take the most time.

    Raises:
        ConfigError: the workload is empty.
    """
    steps, buckets = workload.steps, source.build.buckets
    if not len(steps):
        raise ConfigError(f"{workload.name}: no step to report on; give a trace that has some")
    # before anything else: the search refuses steps that are too large to be looked at
    limits = Limits(workload.token_budget, workload.max_running, max(SIZES))
    best: dict[int, Tuned] = {}
    # one search gives all sizes where only rows matter
    searches = [list(SIZES)] if costs.by_rows else [[size] for size in SIZES]
    for index, sizes in enumerate(searches):
        best |= {len(tuned.buckets): tuned for tuned in frontier(steps, costs, eager, limits, sizes)}
        progress(index + 1, len(searches))
    found = {name: assign(steps, buckets, costs, name) for name in EAGERS}
    now = {name: summarise(steps, found[name], costs, name) for name in EAGERS}
    sets: list[tuple[str, Sequence[Bucket], float | None]] = [("this", buckets, None)]
    sets += [("best", tuned.buckets, tuned.gap) for tuned in best.values() if tuned.buckets]
    lists = engine_lists(workload.token_budget, workload.max_running)
    sets += [(name, list_, None) for name, list_ in lists.items()]
    points = []
    for name, chosen, gap in sets:
        pair = now if name == "this" else {name: coverage(steps, chosen, costs, name) for name in EAGERS}
        points.append(_point(name, pair, eager, _memory(source, chosen, device, costs), gap))
    idle = unused(found[eager])
    left = [bucket for bucket in buckets if bucket not in set(idle)] or list(buckets[:1])
    memory = _memory(source, buckets, device, costs)
    return Report(
        source=source,
        workload=workload,
        eager=eager,
        timed="table" if isinstance(costs, RowCosts | TableCosts) else "modelled",
        device=device.name,
        now=now,
        memory=memory,
        points=tuple(points),
        add=additions(steps, costs, eager, buckets, {b for tuned in best.values() for b in tuned.buckets}),
        drop=removals(steps, costs, eager, buckets),
        unused=idle,
        unused_bytes=memory.total(len(buckets)) - _memory(source, left, device, costs).total(len(left)),
        cells=cells_of(steps, found[eager]),
        replay_us=source.replay_us,
    )


def _plain(found: Coverage) -> dict[str, Any]:
    """JSON has no infinity: a bucket that a table of costs does not list has no cost."""
    document = asdict(found)
    for use in document["uses"]:
        use["us"] = use["us"] if math.isfinite(use["us"]) else None
    return document


def _memory(source: Source, buckets: Sequence[Bucket], device: DeviceProfile, costs: Costs) -> Memory:
    """Of any set for the source's specifications; as the file says where it is the catalog's own."""
    build = source.build
    if costs.scope == "attention" and source.on_gpu and tuple(buckets) == build.buckets:
        return memory_of_catalog(source.on_gpu, device)
    layers = 1 if build.model is None else build.model.num_layers
    memory = memory_of(tuple(build.specs.values()), buckets, device, costs.scope, layers)
    if catalog := source.on_gpu:
        # what a build with the same kernels would take
        layouts = (Layout.of(spec, buckets, catalog.policy(name)) for name, spec in build.specs.items())
        regions = sum(sum(layout.sizes.values()) for layout in layouts)
        memory = replace(memory, region_bytes=regions, image_bytes=sum(map(len, catalog.images.values())))
    return memory


def _point(name: str, pair: dict[Eager, Coverage], eager: Eager, memory: Memory, gap: float | None) -> Point:
    (found,), (other,) = ([c for e, c in pair.items() if (e == eager) is same] for same in (True, False))
    count = len(found.uses)
    return Point(
        name=name,
        buckets=count,
        dedicated_bytes=memory.total(count),
        shared_bytes=memory.total(count, shared=True),
        modelled=memory.modelled,
        covered=found.hits / max(1, found.steps),
        expected_us=found.expected_us,
        waste=found.waste,
        other_us=other.expected_us,
        other_waste=other.waste,
        gap=gap,
    )
