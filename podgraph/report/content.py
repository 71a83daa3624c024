"""Everything that the report says, as plain data: no figure, no page, no text for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from podgraph.buckets import BucketSpace
from podgraph.catalog.model import Catalog
from podgraph.config import BuildSpec, Workspace
from podgraph.shapes import Bucket
from podgraph.workload.costs import EAGERS, Costs, Eager
from podgraph.workload.coverage import Coverage, coverage
from podgraph.workload.engine_lists import engine_lists
from podgraph.workload.memory import Memory, memory_of, memory_of_catalog
from podgraph.workload.optimise import Limits, frontier
from podgraph.workload.profile import DeviceProfile
from podgraph.workload.steps import StepHistogram

SIZES = (1, 2, 4, 8, 16, 32, 64)  # of the best sets on the frontier
ADDITIONS, REMOVALS = 3, 5  # buckets to add or drop that are named


@dataclass(frozen=True)
class Source:
    """What the report is about.

    Attributes:
        name: the file.
        build: its specifications, buckets and model.
        catalog: where it is a built one.
        file_bytes: of the catalog; 0 for a configuration.
    """

    name: str
    build: BuildSpec
    catalog: Catalog | None = None
    file_bytes: int = 0


@dataclass(frozen=True)
class Point:
    """One set of buckets on the frontier or beside it.

    Attributes:
        name: what it is: ``this``, ``best`` or an engine's list.
        buckets: how many.
        dedicated_bytes, shared_bytes: device memory with an exec for each bucket, and where buckets share them.
        covered: share of steps that one replay serves.
        expected_us: mean time of a step.
        waste: see `Coverage`.
        gap: proven distance to the best set of that size; None where nothing is proven.
    """

    name: str
    buckets: int
    dedicated_bytes: int
    shared_bytes: int
    covered: float
    expected_us: float
    waste: float
    gap: float | None = None


@dataclass(frozen=True)
class Change:
    """A bucket to add or to drop, and what the mean step would gain, in microseconds; negative is a loss."""

    bucket: Bucket
    gain_us: float


@dataclass(frozen=True)
class Report:
    """The whole content.

    Attributes:
        source: what it is about.
        steps: the workload.
        eager: how eager steps are priced wherever one price is shown.
        now: what the set does, by price of eager steps.
        memory: of the set.
        points: this set, the best ones of several sizes, and engines' lists.
        add: what to add next, each after the ones before it.
        drop: what can be dropped with the least loss, each by itself.
        measured: replay time of each bucket as the build measured it, microseconds; empty for a configuration.
    """

    source: Source
    steps: StepHistogram
    eager: Eager
    now: dict[Eager, Coverage]
    memory: Memory
    points: tuple[Point, ...]
    add: tuple[Change, ...]
    drop: tuple[Change, ...]
    measured: dict[Bucket, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "source": self.source.name,
            "workload": self.steps.source,
            "scope": self.now[self.eager].scope,
            "costs": self.now[self.eager].source,
            "eager": self.eager,
            "coverage": {name: asdict(found) for name, found in self.now.items()},
            "memory": {
                **asdict(self.memory),
                "dedicated_total_bytes": self.memory.total(len(self.source.build.buckets)),
                "shared_total_bytes": self.memory.total(len(self.source.build.buckets), shared=True),
                "file_bytes": self.source.file_bytes,
            },
            "points": [asdict(point) for point in self.points],
            "add": [asdict(change) for change in self.add],
            "drop": [asdict(change) for change in self.drop],
            "measured_replay_us": [{**asdict(b), "us": us} for b, us in self.measured.items()],
        }


def source_of_catalog(path: Path, catalog: Catalog) -> Source:
    """The buckets and specifications of a built catalog; it knows no model, so only attention can be priced."""
    build = BuildSpec(
        specs=MappingProxyType({name: entry.attention for name, entry in catalog.specs.items()}),
        space=BucketSpace(),
        buckets=tuple(dict.fromkeys(record.bucket for record in catalog.records)),
        dropped=MappingProxyType({}),
        workspace=Workspace(catalog.max_pages, catalog.max_kv_len),
        backend="auto",
        source=path.name,
    )
    return Source(path.name, build, catalog, path.stat().st_size)


def engine_limits(build: BuildSpec) -> tuple[int, int]:
    """(token budget, requests) of an engine that keeps to the largest buckets, where nobody says."""
    running = max(b.batch for b in build.buckets)
    return max(running, *(b.prefill_len for b in build.buckets)), running


def make_report(source: Source, steps: StepHistogram, costs: Costs, device: DeviceProfile, eager: Eager) -> Report:
    """Looks at a set of buckets from every side.

    Args:
        steps: the workload.
        costs: what buckets cost, in one scope.
        device: profile of the GPU, for memory.
        eager: how eager steps are priced where one price is shown.

    Raises:
        ConfigError: the workload is empty.
    """
    build = source.build
    layers = 1 if build.model is None else build.model.num_layers
    if source.catalog is not None and costs.scope == "attention" and source.catalog.images:
        memory = memory_of_catalog(source.catalog, device)
    else:
        memory = memory_of(tuple(build.specs.values()), build.buckets, device, costs.scope, layers)
    now: dict[Eager, Coverage] = {name: coverage(steps, build.buckets, costs, name) for name in EAGERS}
    points = [_point("this", now[eager], memory)]
    budget = int((steps.prefill_len + steps.decode_count).max(initial=1))
    running = int((steps.prefill_requests + steps.decode_count).max(initial=1))
    best = frontier(steps, costs, eager, Limits(budget, running, max(SIZES)), list(SIZES))
    for tuned in {len(tuned.buckets): tuned for tuned in best}.values():
        point = _point("best", coverage(steps, tuned.buckets, costs, eager), memory)
        points.append(dataclasses.replace(point, gap=tuned.gap))
    for name, buckets in engine_lists(budget, running).items():
        points.append(_point(name, coverage(steps, buckets, costs, eager), memory))
    candidates = {b for tuned in best for b in tuned.buckets} - set(build.buckets)
    return Report(
        source=source,
        steps=steps,
        eager=eager,
        now=now,
        memory=memory,
        points=tuple(points),
        add=_additions(steps, costs, eager, build.buckets, now[eager].expected_us, sorted(candidates)),
        drop=_removals(steps, costs, eager, build.buckets, now[eager].expected_us),
        measured={}
        if source.catalog is None
        else {r.bucket: r.replay_us for r in source.catalog.records if r.replay_us},
    )


def _point(name: str, found: Coverage, memory: Memory) -> Point:
    count = len(found.uses)
    return Point(
        name,
        count,
        memory.total(count),
        memory.total(count, shared=True),
        found.hits / max(1, found.steps),
        found.expected_us,
        found.waste,
    )


def _additions(
    steps: StepHistogram, costs: Costs, eager: Eager, buckets: Sequence[Bucket], now_us: float, candidates: list[Bucket]
) -> tuple[Change, ...]:
    """What helps most, then what helps most beside it, and so on."""
    changes: list[Change] = []
    while len(changes) < ADDITIONS and candidates:
        have = [*buckets, *(change.bucket for change in changes)]
        gains = [now_us - coverage(steps, [*have, b], costs, eager).expected_us for b in candidates]
        best = max(range(len(candidates)), key=gains.__getitem__)
        if gains[best] <= 0:
            break
        now_us -= gains[best]
        changes.append(Change(candidates.pop(best), gains[best]))
    return tuple(changes)


def _removals(
    steps: StepHistogram, costs: Costs, eager: Eager, buckets: Sequence[Bucket], now_us: float
) -> tuple[Change, ...]:
    """What hurts least, each by itself; none where there is only one bucket."""
    changes = [
        Change(b, now_us - coverage(steps, [x for x in buckets if x != b], costs, eager).expected_us) for b in buckets
    ]
    return tuple(sorted(changes, key=lambda c: (-c.gain_us, c.bucket))[:REMOVALS]) if len(buckets) > 1 else ()
