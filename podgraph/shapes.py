"""Specifications and buckets: integers only, no torch, no GPU.

The words are FlashInfer's where it has one (``num_qo_heads``, ``page_size``, ``window_left``...).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

KV_LAYOUTS = ("NHD", "HND")
DTYPES = ("bfloat16", "float16")
FP8 = "float8_e4m3fn"  # of the KV cache only
HEAD_DIMS = (64, 128, 256)
MAX_PAGE_SIZE = 128
MAX_HEADS = 1024
# The kernels multiply scales as float32: neither one nor the product of two may become 0 or infinity there.
SCALES = (1e-15, 1e15)

# which axes' sizes make the buckets of a family
FAMILY_AXES = {
    "decode": ("decode_count",),
    "mixed": ("batch", "prefill_len", "decode_count"),
    "prefill": ("batch", "prefill_len"),
}

# FlashInfer's decode tile is 16 packed rows (row x head of the group); rows beyond it would silently not be computed.
DECODE_TILE = 16


@dataclass(frozen=True)
class AttentionSpec:
    """What one catalog is compiled for.

    Attributes:
        num_qo_heads: query heads on one GPU.
        num_kv_heads: KV heads on one GPU; divides ``num_qo_heads``.
        head_dim: elements of one head, for Q, K and V.
        page_size: tokens per KV page.
        dtype: of q and out, and of the KV cache unless ``kv_dtype`` says otherwise.
        kv_layout: ``NHD`` (pages of ``[page_size, num_kv_heads, head_dim]``) or ``HND``.
        sm_scale: factor on the logits, ``1/sqrt(head_dim)`` unless given.
        window_left: tokens of KV left of a row that it still sees besides its own position; -1 is all of them.
        logits_soft_cap: logits become ``cap * tanh(logits / cap)``; 0 is none.
        decode_rows: a request with at most this many query rows is a decode.
        kv_dtype: of the KV cache: ``dtype``, or ``float8_e4m3fn``.
        k_scale, v_scale: what a stored fp8 K or V element is multiplied with; 1 for other caches.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str = "bfloat16"
    kv_layout: str = "NHD"
    sm_scale: float = 0.0
    window_left: int = -1
    logits_soft_cap: float = 0.0
    decode_rows: int = 1
    kv_dtype: str = ""
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.sm_scale == 0.0:
            object.__setattr__(self, "sm_scale", 1.0 / math.sqrt(self.head_dim))
        if self.kv_dtype == "":
            object.__setattr__(self, "kv_dtype", self.dtype)

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def bytes_per_element(self) -> int:
        """Of q and out."""
        return 2

    @property
    def kv_bytes_per_element(self) -> int:
        return 1 if self.kv_dtype == FP8 else self.bytes_per_element

    @property
    def kv_scales(self) -> tuple[float, float]:
        return self.k_scale, self.v_scale

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, K and V together."""
        return 2 * self.page_size * self.num_kv_heads * self.head_dim * self.kv_bytes_per_element

    def to_dict(self) -> dict[str, int | float | str]:
        return dataclasses.asdict(self)

    def limits(self) -> Iterator[tuple[str, object, str]]:
        """Yields (field, got, allowed) for each field that no kernel of this version can serve."""
        if not 1 <= self.num_qo_heads <= MAX_HEADS:
            yield "num_qo_heads", self.num_qo_heads, f"1 to {MAX_HEADS}"
        if self.num_kv_heads < 1 or self.num_qo_heads % max(self.num_kv_heads, 1):
            yield "num_kv_heads", self.num_kv_heads, f"a divisor of num_qo_heads={self.num_qo_heads}"
        if self.head_dim not in HEAD_DIMS:
            yield "head_dim", self.head_dim, " or ".join(map(str, HEAD_DIMS))
        if not 1 <= self.page_size <= MAX_PAGE_SIZE:
            yield "page_size", self.page_size, f"1 to {MAX_PAGE_SIZE}"
        if self.dtype not in DTYPES:
            yield "dtype", self.dtype, " or ".join(DTYPES)
        if self.kv_dtype not in (self.dtype, FP8):
            yield "kv_dtype", self.kv_dtype, f"the dtype ({self.dtype}) or {FP8}"
        if self.kv_layout not in KV_LAYOUTS:
            yield "kv_layout", self.kv_layout, " or ".join(KV_LAYOUTS)
        for name in ("sm_scale", "k_scale", "v_scale"):
            scale = getattr(self, name)
            if not SCALES[0] <= scale <= SCALES[1]:
                yield name, scale, "{:g} to {:g}".format(*SCALES)
            elif name != "sm_scale" and scale != 1 and self.kv_dtype != FP8:
                yield name, scale, f"1 (only {FP8} caches are scaled)"
        if self.window_left < -1:
            yield "window_left", self.window_left, "-1 (no window) or more"
        if self.logits_soft_cap != 0 and not SCALES[0] <= self.logits_soft_cap <= SCALES[1]:
            yield "logits_soft_cap", self.logits_soft_cap, "0 (no soft cap) or {:g} to {:g}".format(*SCALES)
        if self.decode_rows < 1:
            yield "decode_rows", self.decode_rows, "1 or more"
        if self.num_kv_heads >= 1 and self.group_size * self.decode_rows > DECODE_TILE:
            yield (
                "num_kv_heads",
                self.num_kv_heads,
                f"num_qo_heads / num_kv_heads * decode_rows <= {DECODE_TILE} (FlashInfer's decode tile)",
            )


@dataclass(frozen=True)
class ModelShape:
    """What one GPU computes of a dense model beside attention: what a whole step costs is estimated from it.

    Attributes:
        num_layers: layers in all.
        hidden_size: elements of one token's hidden state, never divided.
        intermediate_size: elements between the matrices of an MLP, divided by tensor parallelism.
        vocab_size: rows of the output matrix, divided by tensor parallelism.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int


@dataclass(frozen=True, order=True)
class Bucket:
    """One shape that a catalog holds a graph for.

    Attributes:
        batch: request slots in all.
        prefill_len: query rows of prefill in total.
        decode_count: how many of the slots decode; the rest prefill.
    """

    batch: int
    prefill_len: int
    decode_count: int

    @property
    def prefill_slots(self) -> int:
        return self.batch - self.decode_count

    @property
    def family(self) -> str:
        """``decode``, ``prefill`` or ``mixed``."""
        if self.prefill_len == 0:
            return "decode"
        return "mixed" if self.decode_count else "prefill"

    @property
    def unreachable(self) -> str | None:
        """Why no batch needs this combination of axis values, or None."""
        if self.decode_count > self.batch:
            return "decode_count > batch"
        if self.batch == 0:
            return "no request"
        if self.prefill_len == 0 and self.prefill_slots:
            return "prefill slots without prefill rows"
        if self.prefill_len and not self.prefill_slots:
            return "prefill rows without a prefill slot"
        return None

    def fits(self, demand: Demand) -> bool:
        """Whether a batch fits: decodes beyond ``decode_count`` take prefill slots, a row (or more) each."""
        overflow = max(0, demand.decodes - self.decode_count)
        return (
            demand.requests <= self.batch
            and demand.prefills + overflow <= self.prefill_slots
            and demand.prefill_rows + demand.rows_of(overflow) <= self.prefill_len
        )

    def rows(self, spec: AttentionSpec) -> int:
        """Query rows of q and out that a batch of this bucket has at most."""
        return self.prefill_len + self.decode_count * spec.decode_rows

    def __str__(self) -> str:
        return f"(batch={self.batch}, prefill_len={self.prefill_len}, decode_count={self.decode_count})"


@dataclass(frozen=True)
class Demand:
    """What a batch asks of a bucket: the only numbers that the choice of a bucket looks at.

    Attributes:
        prefills: requests with more query rows than a decode has.
        prefill_rows: their query rows in total.
        decodes: requests with fewer, but some.
        idle: requests without query rows: they take a slot and no work.
        rows_per_decode: query rows that a decode has at most.
        decode_rows: query rows of all decodes together; -1 is ``decodes * rows_per_decode``.
    """

    prefills: int
    prefill_rows: int
    decodes: int
    idle: int = 0
    rows_per_decode: int = 1
    decode_rows: int = -1

    def rows_of(self, decodes: int) -> int:
        """Query rows that some of the decodes have at most."""
        most = decodes * self.rows_per_decode
        return most if self.decode_rows < 0 else min(most, self.decode_rows)

    @property
    def requests(self) -> int:
        return self.prefills + self.decodes + self.idle


def count_families(buckets: Iterable[Bucket]) -> dict[str, int]:
    counts = dict.fromkeys(FAMILY_AXES, 0)
    for bucket in buckets:
        counts[bucket.family] += 1
    return counts
