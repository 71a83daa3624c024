"""What a dispatcher counts while it serves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counters:
    """Plain numbers since bind.

    Attributes:
        plans: calls of plan().
        runs: calls of run().
        replays: graph replays by bucket.
        splits: batches that took several replays, by reason.
        padded_rows, padded_slots: prefill rows and request slots of the chosen buckets that the batches left empty.
        over_padding_cap: replays of buckets with more empty rows than ``padding_cap`` allows, for want of a better one.
        exec_updates: replays that had to change addresses first.
    """

    plans: int = 0
    runs: int = 0
    replays: Counter[str] = field(default_factory=Counter)
    splits: Counter[str] = field(default_factory=Counter)
    padded_rows: int = 0
    padded_slots: int = 0
    over_padding_cap: int = 0
    exec_updates: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "plans": self.plans,
            "runs": self.runs,
            "replays": dict(self.replays),
            "splits": dict(self.splits),
            "padded_rows": self.padded_rows,
            "padded_slots": self.padded_slots,
            "over_padding_cap": self.over_padding_cap,
            "exec_updates": self.exec_updates,
        }
