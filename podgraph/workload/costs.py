"""What a step costs in a bucket, and without one. Two scopes, never mixed.

Every cost is the sum of what the step takes whatever serves it (its attention, its logits) and of what depends on the
bucket: a number per bucket, from a formula or a table. Only the second part is optimised; both make up a step's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from podgraph.shapes import AttentionSpec, Bucket, ModelShape
from podgraph.workload.profile import DeviceProfile
from podgraph.workload.steps import StepHistogram

Scope = Literal["attention", "step"]
Eager = Literal["penalty", "hidden"]
EAGERS: tuple[Eager, ...] = ("penalty", "hidden")

Floats: TypeAlias = npt.NDArray[np.float64]
Counts: TypeAlias = npt.NDArray[np.int64]


def shapes_of(buckets: Iterable[Bucket]) -> Counts:
    """``[n, 3]``: batch, prefill_len, decode_count of each bucket."""
    return np.array([(b.batch, b.prefill_len, b.decode_count) for b in buckets], dtype=np.int64).reshape(-1, 3)


def rows_of(steps: StepHistogram) -> Counts:
    """Query rows of each distinct step, ``[n]``: prefill rows, and one for each decode."""
    return steps.prefill_len + steps.decode_count


def tight_shapes(steps: StepHistogram) -> Counts:
    """``[n, 3]``: the bucket that each distinct step fills completely."""
    return np.stack([steps.prefill_requests + steps.decode_count, steps.prefill_len, steps.decode_count], axis=1)


class Costs(Protocol):
    """All times in microseconds.

    Attributes:
        scope: ``step`` for an engine that captures the whole model, ``attention`` for podgraph's graphs alone.
        source: where the numbers are from, and whether they are measured or modelled, for the report.
        host_us: host time of a step that is served eagerly.
        by_rows: whether a bucket's cost depends on its rows only. Otherwise, and without ``choices``, it never falls as
            a bucket grows.
        choices: the buckets that can be had, ``[n, 3]``; None is all of them.
        last_rows: the row count beyond which costs never fall.
    """

    @property
    def scope(self) -> Scope: ...
    @property
    def source(self) -> str: ...
    @property
    def host_us(self) -> float: ...
    @property
    def by_rows(self) -> bool: ...
    @property
    def choices(self) -> Counts | None: ...
    @property
    def last_rows(self) -> int: ...

    def bucket_us(self, shapes: Counts) -> Floats:
        """What depends on the bucket, ``[n, 3]`` -> ``[n]``; infinite for a bucket that cannot be had."""

    def own_us(self, steps: StepHistogram) -> Floats:
        """What each distinct step costs in any bucket, and eagerly, ``[n]``."""

    def exact_us(self, steps: StepHistogram) -> Floats:
        """The bucket's part in a graph without padding, ``[n]``."""

    def best_us(self, steps: StepHistogram) -> Floats:
        """The bucket's part in the cheapest of all buckets that hold the step, ``[n]``.

        Less than `exact_us` where a table falls: there a padded graph is faster than one without padding.
        """

    def split_us(self, steps: StepHistogram) -> Floats:
        """The bucket's part at least, where a step is cut and served by two replays or more, ``[n]``.

        Infinite where a graph computes more than attention: such a step cannot be cut.
        """


def eager_us(costs: Costs, steps: StepHistogram, eager: Eager) -> Floats:
    """The bucket's part of a step without a graph, ``[n]``, so that it compares with `Costs.bucket_us`.

    ``penalty``: the kernels of the exact step, then the host's time on top. ``hidden``: the host works while the GPU
    does, and the step takes the longer of the two.
    """
    return eager_part(costs.exact_us(steps), costs.own_us(steps), costs.host_us, eager)


def eager_part(exact_us: Floats, own_us: Floats, host_us: float, eager: Eager) -> Floats:
    """`eager_us` from what a step costs on the GPU without padding: the bucket's part, and its own."""
    if eager == "penalty":
        return exact_us + host_us
    return np.maximum(own_us + exact_us, host_us) - own_us


@dataclass(frozen=True)
class StepCosts:
    """Scope ``step``: every linear layer computes the bucket's rows, so padding costs time of matrix products.

    A bucket costs a graph launch and, for each layer, its matrix products and what stands between them on
    ``prefill_len + decode_count`` rows. The step's own part is attention on the real rows (work lists cover nothing
    else), and the logits of the requests' last rows: engines compute these outside of the graph, or gather the rows
    first, so they are not padded. Communication of tensor parallelism is left out.

    Attributes:
        device: profile of the GPU.
        model: what is computed beside attention.
        specs: attention specifications; layers are shared out evenly among them.
    """

    device: DeviceProfile
    model: ModelShape
    specs: tuple[AttentionSpec, ...]

    scope: Scope = "step"
    by_rows: bool = True
    choices: None = None

    @property
    def source(self) -> str:
        return f"modelled from the profile of {self.device.name} ({self.device.source})"

    @property
    def host_us(self) -> float:
        layer = self.device.layer_host_us + self.device.attention_host_us
        return self.device.plan_host_us * len(self.specs) + self.model.num_layers * layer

    def bucket_us(self, shapes: Counts) -> Floats:
        return self._rows_us(shapes[:, 1] + shapes[:, 2])

    def own_us(self, steps: StepHistogram) -> Floats:
        return self._logits_us(steps) + self.model.num_layers * attention_us(self.device, self.specs, steps)

    def exact_us(self, steps: StepHistogram) -> Floats:
        return self._rows_us(rows_of(steps))

    def best_us(self, steps: StepHistogram) -> Floats:
        return least_beyond(self._rows_us, rows_of(steps), self.last_rows)

    def split_us(self, steps: StepHistogram) -> Floats:
        return np.full(len(steps), np.inf)

    def _rows_us(self, rows: Counts) -> Floats:
        return self.device.launch_us + self.model.num_layers * self._layer_us(rows)

    @property
    def last_rows(self) -> int:
        return max((table.rows[-1] for table in self.device.products.values()), default=0)

    def _layer_us(self, rows: Counts) -> Floats:
        """One layer without attention; the mean over specifications where they differ."""
        hidden, inner = self.model.hidden_size, self.model.intermediate_size
        total = np.zeros(rows.shape)
        for spec in self.specs:
            heads = spec.num_qo_heads * spec.head_dim
            kv_heads = spec.num_kv_heads * spec.head_dim
            sizes = {
                "qkv": (hidden, heads + 2 * kv_heads),
                "o": (heads, hidden),
                "gate_up": (hidden, 2 * inner),
                "down": (inner, hidden),
            }
            total += sum(self.device.product_us(name, *size, rows) for name, size in sizes.items())
            # two norms with residuals, rotation of q and k, activation: as in benchmarks/bench_device.py
            total += self._elementwise_us(10 * hidden + 2 * (heads + kv_heads) + 2 * inner, rows)
        mean: Floats = total / len(self.specs)
        return mean

    def _elementwise_us(self, row_elements: int, rows: Counts) -> Floats:
        table = self.device.elementwise
        if table is None:
            formula: Floats = rows.astype(np.float64) * (2e6 * row_elements / self.device.bandwidth)
            return formula
        least = table.us[0]  # launching the kernels: not a matter of size
        us: Floats = least + (table.line_us(rows) - least) * (row_elements / table.size)
        return us

    def _logits_us(self, steps: StepHistogram) -> Floats:
        requests = steps.prefill_requests + steps.decode_count
        size = self.model.hidden_size * self.model.vocab_size
        table = self.device.logits
        if table is None:
            return self.device.roofline_us(self.model.hidden_size, self.model.vocab_size, requests)
        scaled: Floats = table.line_us(requests) * (size / table.size)
        return scaled


@dataclass(frozen=True)
class AttentionCosts:
    """Scope ``attention``: podgraph's graphs alone, one replay a layer.

    A bucket costs a launch and a little for each of its rows and slots, as the grid is sized for them; the rest is the
    step's own attention. Modelled; `TableCosts` takes measured times.

    Attributes:
        device: profile of the GPU.
        specs: attention specifications; layers are shared out evenly among them.
        num_layers: layers of the model; 1 where it is not known, and all times are those of one layer.
    """

    device: DeviceProfile
    specs: tuple[AttentionSpec, ...]
    num_layers: int = 1

    scope: Scope = "attention"
    by_rows: bool = False
    choices: None = None
    last_rows: int = 0

    @property
    def source(self) -> str:
        return f"modelled from the profile of {self.device.name} ({self.device.source})"

    @property
    def host_us(self) -> float:
        return self.device.plan_host_us * len(self.specs) + self.num_layers * self.device.attention_host_us

    def bucket_us(self, shapes: Counts) -> Floats:
        idle = self.device.idle_slot_us * shapes[:, 0] + self.device.idle_row_us * shapes[:, 1]
        return self.num_layers * (self.device.launch_us + idle)

    def own_us(self, steps: StepHistogram) -> Floats:
        # The slots that are filled are no idle ones, but have the same price here: only the padding differs.
        return self.num_layers * attention_us(self.device, self.specs, steps)

    def exact_us(self, steps: StepHistogram) -> Floats:
        return self.bucket_us(tight_shapes(steps))

    def best_us(self, steps: StepHistogram) -> Floats:
        return self.exact_us(steps)

    def split_us(self, steps: StepHistogram) -> Floats:
        # The parts have all of the step's slots and rows together, and a launch each.
        return self.exact_us(steps) + self.num_layers * self.device.launch_us


def attention_us(device: DeviceProfile, specs: Sequence[AttentionSpec], steps: StepHistogram) -> Floats:
    """Modelled microseconds of one layer's attention of each distinct step, ``[n]``: its mean over the steps.

    A fixed part, the KV cache read at the device's rate, and prefill's products at its rate, one after the other: on
    Hopper that is within 25 % of the best of all ways on the six shapes of DESIGN. A decode reads its KV once;
    ``4 * num_qo_heads * head_dim`` operations for each visible pair of a prefill's row and a KV token. Windows cut the
    mean length of a request.
    """
    count = steps.steps.astype(np.float64)
    decodes, prefills = np.maximum(steps.decode_count, 1), np.maximum(steps.prefill_requests, 1)
    decode_kv, prefill_kv = steps.decode_kv_tokens / count, steps.prefill_kv_tokens / count
    pairs = steps.prefill_pairs / count
    total = np.zeros(len(steps))
    for spec in specs:
        read, visible = decode_kv + prefill_kv, pairs
        if spec.window_left >= 0:
            window = spec.window_left + 1
            rows = steps.prefill_len / prefills
            read = np.minimum(decode_kv, decodes * window) + np.minimum(prefill_kv, prefills * (window + rows))
            visible = np.minimum(pairs, steps.prefill_len * float(window))
        token_bytes = spec.page_bytes / spec.page_size
        total += device.attention_fixed_us + 1e6 * read * token_bytes / device.attention_bandwidth
        total += 4e6 * visible * spec.num_qo_heads * spec.head_dim / device.attention_flops
    return total / len(specs)


def least_beyond(rows_us: Callable[[Counts], Floats], rows: Counts, last: int) -> Floats:
    """The least cost of that many rows or more, ``[n]`` -> ``[n]``; beyond ``last`` costs must not fall."""
    top = max(last, int(rows.max(initial=1)))
    everything = rows_us(np.arange(1, top + 1))
    best = np.minimum.accumulate(everything[::-1])[::-1]
    result: Floats = best[np.maximum(rows, 1) - 1]
    return result
