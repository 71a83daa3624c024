"""Random batches of a bucket, and dense references for them: what verification and measurement replay.

Everything follows from the bucket and a seed, so that two processes on the same machine make the same batches and data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from podgraph.batch import Batch
from podgraph.shapes import AttentionSpec, Bucket

LOG2_E = math.log2(math.e)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn}
SPARE_PAGES = 3  # pages of the cache that no request owns


@dataclass(frozen=True)
class Inputs:
    """Tensors for one batch; every KV slot that no request owns is NaN.

    Attributes:
        q: ``[rows, num_qo_heads, head_dim]``.
        k, v: ``[pages, page_size, num_kv_heads, head_dim]`` (NHD) or with the middle two swapped (HND).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def sample_batches(
    bucket: Bucket, spec: AttentionSpec, kv_len: int, max_pages: int, seed: int, max_kv_len: int = 1 << 24
) -> dict[str, Batch]:
    """Batches that the bucket holds: ``full``, ``ragged`` (order, lengths and KV at random) and ``sparse``.

    For a bucket of both sides also ``overflow``: more decodes than its decode slots, computed in prefill slots.

    Args:
        kv_len: KV tokens that a request has at most, beyond its own rows.
        max_pages: KV pages of a batch.
        max_kv_len: KV tokens that a request has at most, its own rows included.
    """
    rng = np.random.default_rng([seed, bucket.batch, bucket.prefill_len, bucket.decode_count])
    kv_len = max(1, min(kv_len, max_pages * spec.page_size // bucket.batch - bucket.prefill_len - spec.page_size))
    slots, rows = bucket.prefill_slots, bucket.prefill_len
    even = [rows // slots + (i < rows % slots) for i in range(slots)] if slots else []
    full = even + [spec.decode_rows] * bucket.decode_count
    some = int(rng.integers(0, slots + 1)) if slots else 0
    cuts = np.sort(rng.integers(0, rows + 1, some - 1)) if some > 1 else np.zeros(0, int)
    ragged = np.diff([0, *cuts, int(rng.integers(0, rows + 1)) if some == 1 else rows]).tolist() if some else []
    ragged += rng.integers(0, spec.decode_rows + 1, int(rng.integers(0, bucket.decode_count + 1))).tolist()
    sparse = [min(rows, 5)] if (slots and rng.random() < 0.5) or not bucket.decode_count else [spec.decode_rows]
    lengths = {"full": full, "ragged": ragged or [1], "sparse": sparse}
    if slots and bucket.decode_count and rows >= spec.decode_rows:
        lengths["overflow"] = _overflow(bucket, spec)
    batches = {}
    for name, rows_of in lengths.items():
        qo = [min(n, max_kv_len) for n in rows_of]
        batch = _batch(rng, qo, kv_len, max_kv_len, spec, name == "ragged")
        if batch.num_pages > max_pages:  # a workspace that holds little more than the new tokens
            batch = _batch(rng, qo, 0, max_kv_len, spec, name == "ragged")
        while not bucket.fits(batch.demand(spec)):  # very short prefills decode: there may be too many of them
            batch = batch.part(0, batch.num_requests - 1)
        batches[name] = batch
    return batches


def _overflow(bucket: Bucket, spec: AttentionSpec) -> list[int]:
    """Rows of each request: as many decodes as half of the prefill slots take too, and prefills in the other half."""
    taken = min(-(-bucket.prefill_slots // 2), bucket.prefill_len // spec.decode_rows)
    left = bucket.prefill_len - taken * spec.decode_rows
    prefills = min(bucket.prefill_slots - taken, left // (spec.decode_rows + 1))
    even = [left // prefills + (i < left % prefills) for i in range(prefills)] if prefills else []
    return even + [spec.decode_rows] * (bucket.decode_count + taken)


def _batch(
    rng: np.random.Generator, qo_lens: list[int], kv_len: int, max_kv_len: int, spec: AttentionSpec, empty_kv: bool
) -> Batch:
    qo = rng.permutation(np.array(qo_lens, np.int64))
    kv = np.minimum(qo + rng.integers(kv_len // 2, kv_len + 1, len(qo)), max_kv_len)
    if empty_kv:
        kv[rng.random(len(kv)) < 0.1] = 0
    pages = -(-kv // spec.page_size)
    total = int(pages.sum())
    indices = rng.permutation(total + SPARE_PAGES)[:total]
    last = np.where(kv > 0, (kv - 1) % spec.page_size + 1, 0)
    return Batch.of(
        _indptr(qo), _indptr(pages), indices, last, page_size=spec.page_size, max_kv_len=int(kv.max(initial=1))
    )


def _indptr(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def make_inputs(batch: Batch, spec: AttentionSpec, device: torch.device, seed: int) -> Inputs:
    """Normal random q, k and v for a batch, with NaN wherever nothing may be read."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = DTYPES[spec.dtype]
    pages = batch.num_pages + SPARE_PAGES
    owned = np.zeros((pages, spec.page_size), bool)
    for i, kv_len in enumerate(batch.kv_lens):
        position = np.arange(kv_len)
        owned[batch.kv_indices[batch.kv_indptr[i] + position // spec.page_size], position % spec.page_size] = True
    mask = torch.from_numpy(owned).to(device)[:, :, None, None]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    q = normal(int(batch.qo_indptr[-1]), spec.num_qo_heads, spec.head_dim)
    shape = (pages, spec.page_size, spec.num_kv_heads, spec.head_dim)
    k, v = (normal(*shape).div(scale).where(mask, math.nan).to(DTYPES[spec.kv_dtype]) for scale in spec.kv_scales)
    if spec.kv_layout == "HND":
        k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    return Inputs(q, k, v)


def reference(
    batch: Batch, spec: AttentionSpec, inputs: Inputs, *, round_to: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention, request by request, in float32.

    Args:
        round_to: round the attention weights and the output to this dtype: the error that any kernel of that precision
            makes, which bounds are derived from.

    Returns:
        out ``[rows, num_qo_heads, head_dim]`` float32, lse ``[rows, num_qo_heads]`` float32, base 2.
    """
    k, v = (inputs.k, inputs.v) if spec.kv_layout == "NHD" else (inputs.k.transpose(1, 2), inputs.v.transpose(1, 2))
    device = inputs.q.device
    out = torch.zeros(inputs.q.shape, device=device)
    lse = torch.full(inputs.q.shape[:2], -math.inf, device=device)
    for i, (qo_len, kv_len) in enumerate(zip(batch.qo_lens.tolist(), batch.kv_lens.tolist(), strict=True)):
        if not qo_len or not kv_len:
            continue
        rows = slice(int(batch.qo_indptr[i]), int(batch.qo_indptr[i + 1]))
        pages = torch.from_numpy(batch.kv_indices[batch.kv_indptr[i] : batch.kv_indptr[i + 1]].astype(np.int64)).to(
            device
        )
        keys, values = (
            take_pages(c, pages)[:kv_len].float().mul(scale).transpose(0, 1)
            for c, scale in zip((k, v), spec.kv_scales, strict=True)
        )  # [kv_heads, kv, d]
        queries = inputs.q[rows].float().reshape(qo_len, spec.num_kv_heads, -1, spec.head_dim).permute(1, 2, 0, 3)
        logits = queries @ keys[:, None].transpose(-1, -2) * spec.sm_scale  # [kv_heads, group, rows, kv]
        if spec.logits_soft_cap:
            logits = spec.logits_soft_cap * torch.tanh(logits / spec.logits_soft_cap)
        position = torch.arange(kv_len, device=device)
        limit = torch.arange(kv_len - qo_len, kv_len, device=device)[:, None]
        visible = position <= limit
        if spec.window_left >= 0:
            visible &= position >= limit - spec.window_left
        logits = logits.masked_fill(~visible, -math.inf)
        row_lse = torch.logsumexp(logits, -1)
        if round_to is None:
            result = torch.softmax(logits, -1) @ values[:, None]
        else:
            # kernels round exp(logit - max), sum what they rounded, and round the quotient
            weight = torch.exp(logits - logits.amax(-1, keepdim=True)).to(round_to).float()
            result = (weight @ values[:, None] / weight.sum(-1, keepdim=True)).to(round_to).float()
        out[rows] = result.permute(2, 0, 1, 3).flatten(1, 2)
        lse[rows] = (row_lse * LOG2_E).permute(2, 0, 1).flatten(1, 2)
    return out, lse


def take_pages(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Tokens of some pages in order, ``[tokens, num_kv_heads, head_dim]``, from ``[pages, page_size, ...]``."""
    # torch indexes no fp8 tensors on every device: as bytes they are like any other
    raw = cache.view(torch.uint8) if cache.element_size() == 1 else cache
    return raw[pages].view(cache.dtype).flatten(0, 1)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """``|got - want| / |want|`` in the Frobenius norm; infinite where got has a NaN; 0 for nothing."""
    if want.numel() == 0:
        return 0.0
    if not bool(torch.isfinite(got).all()):
        return math.inf
    norm = float(want.norm())
    difference = float((got.float() - want).norm())
    return difference / norm if norm else difference
