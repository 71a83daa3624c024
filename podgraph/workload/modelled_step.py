"""A simulated step's time from a device profile: `costs.StepCosts`, asked step by step."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from podgraph.config import load_config
from podgraph.errors import ConfigError
from podgraph.workload.costs import StepCosts
from podgraph.workload.profile import load_profile
from podgraph.workload.scheduler import StepShape
from podgraph.workload.steps import COLUMNS, StepHistogram

# Where sliding windows make time no linear function of KV tokens, these are rounded to 64 levels an octave: to 1 %.
_LEVELS = 64
_PROBE_TOKENS = 10**9


class ModelledStep:
    """A `StepCost`: microseconds of a whole step in a graph without padding.

    Array functions answer for one step in a tenth of a millisecond, so they are asked once for each kind of step; what
    KV tokens add to it is linear, but for sliding windows.

    Args:
        costs: the model.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._known: dict[tuple[int, ...], float] = {}
        self._linear = all(spec.window_left < 0 for spec in costs.specs)
        key = (2, 1, 1)
        base = self._ask(*key, 0, 0, 0)
        # Attention is the only part that sees KV tokens, and a sum over them.
        self._slopes = tuple(
            (self._ask(*key, *(_PROBE_TOKENS * (n == axis) for n in range(3))) - base) / _PROBE_TOKENS
            for axis in range(3)
        )

    def __call__(self, shape: StepShape, /) -> float:
        if self._linear:
            key = shape[:3]
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = self._ask(*key, 0, 0, 0)
            decode_us, prefill_us, pair_us = self._slopes
            return known + decode_us * shape[3] + prefill_us * shape[4] + pair_us * shape[5]
        levels = (*shape[:3], *(round(_LEVELS * math.log2(tokens + 1)) for tokens in shape[3:]))
        known = self._known.get(levels)
        if known is None:
            tokens = [round(2.0 ** (level / _LEVELS)) - 1 for level in levels[3:]]
            known = self._known[levels] = self._ask(*shape[:3], *tokens)
        return known

    def __getstate__(self) -> dict[str, Any]:
        # For workers. A read-only mapping cannot be pickled, and what is known here is soon known there.
        device = self._costs.device
        device = replace(device, products=dict(device.products), shapes=dict(device.shapes))
        return self.__dict__ | {"_costs": replace(self._costs, device=device), "_known": {}}

    def _ask(self, prefill_len: int, prefill_requests: int, decode_count: int, *tokens: int) -> float:
        row = (prefill_len, prefill_requests, decode_count, 1, *tokens)
        columns = {name: np.array([value], dtype=np.int64) for name, value in zip(COLUMNS, row, strict=True)}
        step = StepHistogram(**columns, source="one step")
        return float(self._costs.own_us(step)[0] + self._costs.exact_us(step)[0])


def modelled_step(device: str | Path, config: str | Path) -> tuple[ModelledStep, str]:
    """The cost of a configuration's model on a device, and what to call it.

    Args:
        device: a shipped profile's name, or the path of another.
        config: a YAML build configuration with a ``model`` section.

    Raises:
        ConfigError: either cannot be read, or the configuration has no model.
    """
    build = load_config(config)
    if build.model is None:
        raise ConfigError(
            f"{config}: model: is missing, and a step's time depends on it; "
            "write it with `podgraph config --for-model`, or give every step one time"
        )
    costs = StepCosts(load_profile(device), build.model, tuple(build.specs.values()))
    return ModelledStep(costs), f"{costs.source}; model of {Path(config).name}"
