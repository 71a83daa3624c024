"""What a dispatcher counts while it serves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

# How a replay may run, and why a batch may be cut or refused.
MODES = ("graph", "eager", "captured", "interpreter")
NO_BUCKET = "no bucket holds the batch"
TOO_MANY_PAGES = "more pages than workspace.max_pages"
OVER_PADDING_CAP = "every bucket that holds the batch is beyond padding_cap"
CAPTURED_TEMPLATE = "no bucket of the captured template holds the batch"
SPLIT_REASONS = (NO_BUCKET, TOO_MANY_PAGES)
MISS_REASONS = (NO_BUCKET, TOO_MANY_PAGES, OVER_PADDING_CAP, CAPTURED_TEMPLATE)


@dataclass(slots=True)
class Counters:
    """Plain numbers since bind; they only grow. One thread counts, any thread may read `to_dict`.

    Attributes:
        plans: calls of plan().
        runs: calls of run().
        replays: replays by bucket; a run of a batch that was cut is several.
        replays_by_mode: the same replays by how they ran: ``graph``, ``eager`` (the kernels one by one), ``captured``
            (enqueued while somebody else's graph was captured: that graph's own replays are not seen here), or
            ``interpreter`` on the CPU.
        splits: batches that took several replays, by reason.
        misses: batches that plan() refused with `BucketMiss`, by reason.
        planner_errors: steps whose metadata the planner on the GPU refused, by what was wrong.
        padded_rows, padded_slots: prefill rows and request slots of the chosen buckets that the batches left empty.
        over_padding_cap: replays of buckets with more empty rows than ``padding_cap`` allows, for want of a better one.
        exec_updates: replays that had to change addresses first.
        exec_instantiations: executable graphs made, those at bind and by prewarm() too.
        exec_evictions: executable graphs given up, so that there was memory for another one.
    """

    plans: int = 0
    runs: int = 0
    replays: Counter[str] = field(default_factory=Counter)
    replays_by_mode: Counter[str] = field(default_factory=Counter)
    splits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    planner_errors: Counter[str] = field(default_factory=Counter)
    padded_rows: int = 0
    padded_slots: int = 0
    over_padding_cap: int = 0
    exec_updates: int = 0
    exec_instantiations: int = 0
    exec_evictions: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Everything as it is now, as ints and dicts of their own."""
        # dict() of a Counter is one step of the interpreter: another thread may count meanwhile
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values}
