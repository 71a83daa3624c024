"""What a report is about: a catalog or a configuration, and the steps that it is held against."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from podgraph.buckets import BucketSpace
from podgraph.catalog import store
from podgraph.catalog.model import Catalog
from podgraph.config import BuildSpec, Workspace, load_config
from podgraph.errors import ConfigError
from podgraph.shapes import Bucket
from podgraph.workload.requests import Trace
from podgraph.workload.step_files import read_provenance
from podgraph.workload.steps import StepHistogram

MAX_BUILD_LOG_BYTES = 1 << 20

# Who says that there were these steps: a simulated engine, or an engine's own log.
Counted = Literal["simulated", "logged"]


@dataclass(frozen=True)
class Source:
    """The set of buckets.

    Attributes:
        name: of the file, without its folder.
        build: its specifications, buckets and model.
        catalog: where it is a built one.
        file_bytes: of the catalog; 0 for a configuration.
        build_seconds: what each stage of the catalog's build took; empty where it is not known.
    """

    name: str
    build: BuildSpec
    catalog: Catalog | None = None
    file_bytes: int = 0
    build_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def on_gpu(self) -> Catalog | None:
        """The catalog, where it holds graphs of a GPU."""
        return self.catalog if self.catalog is not None and self.catalog.images else None

    @property
    def replay_us(self) -> dict[Bucket, float]:
        """Measured replay of a full batch, microseconds of one layer, the mean over specifications; maybe empty."""
        times: dict[Bucket, list[float]] = {}
        for record in () if self.catalog is None else self.catalog.records:
            if record.replay_us:
                times.setdefault(record.bucket, []).append(record.replay_us)
        return {bucket: sum(us) / len(us) for bucket, us in times.items()}


@dataclass(frozen=True)
class Workload:
    """The steps.

    Attributes:
        steps: the histogram.
        name: the logs' names, without their folders.
        counted: whether a simulated engine made the steps, or an engine counted its own.
        token_budget, max_running: limits of the engine; the largest step's where they are not known.
    """

    steps: StepHistogram
    name: str
    counted: Counted
    token_budget: int
    max_running: int


def read_source(path: Path, model: Path | None = None, build_log: Path | None = None) -> Source:
    """Reads a catalog or a configuration, whichever the file is.

    Args:
        path: either.
        model: a configuration whose ``model`` section holds for a catalog, which has none.
        build_log: what ``podgraph build --json`` printed when it wrote the catalog.

    Raises:
        ConfigError, CatalogError: a file cannot be read, or is something else.
    """
    if not _is_catalog(path):
        if build_log is not None or model is not None:
            what = "a build's time" if build_log is not None else "a model beside its own"
            raise ConfigError(f"{path}: is a configuration, and has no use for {what}; name a catalog, or leave it out")
        return Source(_name(path), load_config(path))
    source = source_of_catalog(path, store.read(path))
    if model is not None:
        shape = load_config(model).model
        if shape is None:
            raise ConfigError(f"{model}: model: is missing; add it (`podgraph config --for-model` writes it)")
        source = replace(source, build=replace(source.build, model=shape))
    return source if build_log is None else replace(source, build_seconds=_build_seconds(build_log))


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
    return Source(_name(path), build, catalog, path.stat().st_size)


def engine_limits(build: BuildSpec, token_budget: int | None = None, max_running: int | None = None) -> tuple[int, int]:
    """(token budget, requests) of the engine: as given, else those of one that keeps to the largest buckets."""
    running = max_running or min(max(b.batch for b in build.buckets), token_budget or 1 << 62)
    return token_budget or max(running, *(b.prefill_len for b in build.buckets)), running


def workload_of(
    log: Trace | StepHistogram, paths: Sequence[Path], steps: StepHistogram, limits: tuple[int, int] | None
) -> Workload:
    """Names the steps, and says who counted them.

    Args:
        log: what the files held.
        paths: the files.
        steps: the log itself, or what a simulated engine made of it.
        limits: (token budget, requests) of the engine; None is the largest step's.
    """
    simulated = isinstance(log, Trace) or all(read_provenance(path) is not None for path in paths)
    budget = int((steps.prefill_len + steps.decode_count).max(initial=1))
    running = int((steps.prefill_requests + steps.decode_count).max(initial=1))
    if limits is not None:
        budget, running = max(budget, limits[0]), max(running, limits[1])
    return Workload(steps, ", ".join(map(_name, paths)), "simulated" if simulated else "logged", budget, running)


def _is_catalog(path: Path) -> bool:
    """By its name, or by the length that a catalog starts with: no text has eight such bytes."""
    if path.suffix == store.SUFFIX:
        return True
    try:
        with path.open("rb") as file:
            return b"\0" in file.read(8)
    except OSError:
        return False


def _name(path: Path) -> str:
    """As a page can hold it: without characters that no font draws."""
    return "".join(c if c.isprintable() else "?" for c in path.name)


def _build_seconds(path: Path) -> dict[str, float]:
    allowed = "allowed: what `podgraph build --json` printed"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BUILD_LOG_BYTES + 1)
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}; name what `podgraph build --json` printed") from e
    try:
        document = json.loads(data[:MAX_BUILD_LOG_BYTES])
        seconds = {str(stage): float(value) for stage, value in document["seconds"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise ConfigError(f"{path}: no log of a build ({type(e).__name__}), {allowed}") from None
    if bad := [s for s, value in seconds.items() if not 0 <= value < math.inf or not s.isprintable() or len(s) > 40]:
        raise ConfigError(f"{path}: seconds: got {seconds[bad[0]]} for {bad[0]!r:.60}, {allowed}")
    return seconds
