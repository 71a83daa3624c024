"""One run of `podgraph tune`: limits, the search, what comes out on the steps it was for and on others."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from podgraph.config import BuildSpec
from podgraph.errors import ConfigError
from podgraph.shapes import Bucket
from podgraph.workload.costs import EAGERS, Costs, Eager
from podgraph.workload.coverage import Coverage, coverage
from podgraph.workload.engine_lists import engine_lists
from podgraph.workload.memory import Memory, memory_of
from podgraph.workload.optimise import Limits, Tuned, tune
from podgraph.workload.profile import DeviceProfile
from podgraph.workload.samples import Samples


@dataclass(frozen=True)
class Tuning:
    """What a run found.

    Attributes:
        tuned: the set, and what is proven about it.
        eager: how eager steps were priced in the search.
        train: what the set does for the steps that it was chosen for, by the price of eager steps.
        heldout: the same for those that were held out; empty where none were.
        lists: what engines' default lists do for the first, by name, at the search's price of eager steps.
        memory: bytes that the set needs, once and for each bucket.
        tune_seconds: of the search.
    """

    tuned: Tuned
    eager: Eager
    train: dict[Eager, Coverage]
    heldout: dict[Eager, Coverage]
    lists: dict[str, Coverage]
    memory: Memory
    tune_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        now = self.train[self.eager]
        return {
            "scope": now.scope,
            "source": now.source,
            "eager": self.eager,
            "method": self.tuned.method,
            "buckets": [asdict(bucket) for bucket in self.tuned.buckets],
            "expected_us": self.tuned.expected_us,
            "bound_us": self.tuned.bound_us,
            "gap": self.tuned.gap,
            "train": {name: _figures(found) for name, found in self.train.items()},
            "heldout": {name: _figures(found) for name, found in self.heldout.items()},
            "lists": {name: {"buckets": len(c.uses), **_figures(c)} for name, c in self.lists.items()},
            "memory": {**asdict(self.memory), "total_bytes": self.memory.total(len(self.tuned.buckets))},
            "tune_seconds": self.tune_seconds,
        }


def _figures(found: Coverage) -> dict[str, Any]:
    figures = asdict(found)
    del figures["uses"]
    return figures


def run_tuning(
    build: BuildSpec,
    device: DeviceProfile,
    costs: Costs,
    samples: Samples,
    eager: Eager,
    *,
    max_buckets: int,
    memory_budget: int | None = None,
    token_budget: int | None = None,
    max_running: int | None = None,
) -> Tuning:
    """Chooses buckets for a workload, and says what they do.

    Args:
        build: the configuration whose specifications they are for.
        device: profile of the GPU, for memory.
        costs: what buckets cost.
        samples: the workload.
        eager: how the search prices eager steps; results have both.
        max_buckets: of the set.
        memory_budget: bytes for everything: a graph exec for each bucket, regions and kernels once.
        token_budget, max_running: limits of the engine; None is the largest step of the workload.

    Raises:
        ConfigError: no set keeps within the bounds.
    """
    train = samples.train
    if not len(train):
        raise ConfigError(f"{train.source}: no step to tune for; give a trace that has some")
    requests = int((train.prefill_requests + train.decode_count).max())
    budget = token_budget or int((train.prefill_len + train.decode_count).max())
    running = max_running or requests
    layers = 1 if build.model is None else build.model.num_layers
    largest = [Bucket(running, budget, 0), Bucket(running, 0, running)]
    memory = memory_of(tuple(build.specs.values()), largest, device, costs.scope, layers)
    room = None if memory_budget is None else memory_budget - memory.once_bytes
    if room is not None and room < memory.dedicated_bytes:
        raise ConfigError(
            f"memory budget: got {memory_budget:,} bytes, allowed: at least {memory.total(1):,}, for one bucket of "
            f"{memory.dedicated_bytes:,} and {memory.once_bytes:,} that all share"
        )
    limits = Limits(budget, running, max_buckets, memory.dedicated_bytes, room)
    begin = time.perf_counter()
    tuned = tune(train, costs, eager, limits)
    seconds = time.perf_counter() - begin
    if not tuned.buckets:
        raise ConfigError(
            f"{train.source}: no bucket is of use: none holds a step, or steps without a graph cost less; "
            f"check the costs, {costs.source}"
        )
    heldout = samples.heldout
    return Tuning(
        tuned=tuned,
        eager=eager,
        train={name: coverage(train, tuned.buckets, costs, name) for name in EAGERS},
        heldout={} if heldout is None else {name: coverage(heldout, tuned.buckets, costs, name) for name in EAGERS},
        lists={name: coverage(train, list_, costs, eager) for name, list_ in engine_lists(budget, running).items()},
        memory=memory,
        tune_seconds=seconds,
    )
