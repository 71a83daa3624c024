"""What a simulated engine may do, what its steps look like, and what they cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from podgraph.errors import ConfigError

Policy = Literal["decode-first", "prefill-first"]
POLICIES: tuple[Policy, ...] = ("decode-first", "prefill-first")


@dataclass(frozen=True)
class SchedulerConfig:
    """What the simulated engine may use in one step, and who comes first.

    Attributes:
        token_budget: query rows of one step, prefills and decodes together.
        max_running: requests that hold KV pages at a time; at most ``token_budget``, so that each can decode a step.
        max_pages: KV pages in all.
        page_size: tokens per KV page.
        policy: ``decode-first`` (Sarathi-Serve, OSDI'24): every request past its prefill decodes in every step, and
            prefills take the rows that are left. ``prefill-first`` (vLLM's V0 scheduler): a step holds prefills only
            where any can advance or be admitted, and decodes only where none can.
        chunk: query rows of one request's prefill in one step at most; None is all that the budget leaves.
        max_prefills: requests that prefill in one step at most; None is no limit.

    Raises:
        ConfigError: a value is out of range.
    """

    token_budget: int
    max_running: int
    max_pages: int
    page_size: int
    policy: Policy = "decode-first"
    chunk: int | None = None
    max_prefills: int | None = None

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_running", "max_pages", "page_size", "chunk", "max_prefills"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: must be > 0, got {value}")
        if self.policy not in POLICIES:
            raise ConfigError(f"policy: must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.max_running > self.token_budget:
            raise ConfigError(
                f"max_running: must be <= token_budget={self.token_budget}, got {self.max_running}: "
                "each running request decodes one row a step; lower it, or raise token_budget"
            )


class StepShape(NamedTuple):
    """What kernels see of one step, whatever its requests: a request with one query row is a decode.

    Attributes:
        prefill_len: query rows of prefill, over all requests.
        prefill_requests: requests that prefill, two rows or more each.
        decode_count: requests with one row: past their prefill, or the last row of one that came alone.
        decode_kv_tokens: KV tokens that decodes read, over all requests, the rows of this step included.
        prefill_kv_tokens: KV tokens that prefills read.
        prefill_pairs: visible (query row, KV token) pairs of prefills.
    """

    prefill_len: int
    prefill_requests: int
    decode_count: int
    decode_kv_tokens: int
    prefill_kv_tokens: int
    prefill_pairs: int


class StepCost(Protocol):
    """How long one step takes, in microseconds, > 0. Called once a step: keep it cheap."""

    def __call__(self, shape: StepShape, /) -> float: ...


class Chunk(NamedTuple):
    """What one request does in one step.

    Attributes:
        request: index into the trace.
        qo_len: query rows.
        kv_len: tokens in the KV cache after the step, these rows included.
    """

    request: int
    qo_len: int
    kv_len: int


@dataclass
class SimulationStats:
    """What happened to the requests, up to the step that was last taken from the simulation.

    Attributes:
        finished: requests that got all their tokens.
        dropped: requests too large for ``max_pages`` even alone; they appear in no step.
        preempted: times that a request lost its pages and began again.
        end_s: when the last step ended, seconds from the first arrival.
    """

    finished: int = 0
    dropped: int = 0
    preempted: int = 0
    end_s: float = field(default=0.0, compare=False)


def constant_cost(step_us: float) -> StepCost:
    """The cost of an engine whose steps all take ``step_us`` microseconds.

    Raises:
        ConfigError: ``step_us`` is not finite and > 0.
    """
    if not (math.isfinite(step_us) and step_us > 0):
        raise ConfigError(f"step_us: must be > 0, got {step_us}")
    return lambda shape: step_us
