"""Random specifications, buckets and ragged batches, and poisoned tensors for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import oracle
import torch
from hypothesis import strategies as st

from podgraph.batch import Batch
from podgraph.planner import Policy
from podgraph.shapes import AttentionSpec, Bucket

SPARE_PAGES = 3  # pages of a cache that no request owns
SPARE_ROWS = 4  # rows of q, out and lse behind those of the batch
TOLERANCE = 3e-5  # float32 arithmetic on values near 1


@dataclass(frozen=True)
class Case:
    """A batch, a bucket that holds it, and a policy to split it by."""

    spec: AttentionSpec
    bucket: Bucket
    policy: Policy
    batch: Batch


@dataclass(frozen=True)
class Tensors:
    """One layer's tensors for a batch: NaN wherever nothing may be read, and wherever nothing was written yet."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def specs(*, plain: bool = False) -> st.SearchStrategy[AttentionSpec]:
    """Group sizes 1 to 16, every layout, mask and cache. ``plain``: no window, no soft cap, NHD, one dtype."""

    def spec(
        group: int, kv_heads: int, page_size: int, decode_rows: int, window: int, cap: float, layout: str, fp8: bool
    ) -> AttentionSpec:
        return AttentionSpec(
            num_qo_heads=group * kv_heads,
            num_kv_heads=kv_heads,
            head_dim=32,
            page_size=page_size,
            kv_layout=layout,
            window_left=window,
            logits_soft_cap=cap,
            decode_rows=min(decode_rows, 16 // group),
            kv_dtype="float8_e4m3fn" if fp8 else "",
            k_scale=0.5 if fp8 else 1.0,
            v_scale=1.25 if fp8 else 1.0,
        )

    windows = st.one_of(st.just(-1), st.just(-1), st.integers(0, 300))
    return st.builds(
        spec,
        group=st.integers(1, 16),
        kv_heads=st.integers(1, 3),
        page_size=st.sampled_from((1, 3, 16)),
        decode_rows=st.sampled_from((1, 1, 1, 3)),
        window=st.just(-1) if plain else windows,
        cap=st.just(0.0) if plain else st.sampled_from((0.0, 0.0, 2.5)),
        layout=st.just("NHD") if plain else st.sampled_from(("NHD", "HND")),
        fp8=st.just(False) if plain else st.sampled_from((False, False, True)),
    )


@st.composite
def buckets(draw: st.DrawFn, slots: int = 6, prefill_len: int = 40) -> Bucket:
    """Reachable buckets of every family."""
    decodes, prefills = draw(st.integers(0, slots)), draw(st.integers(0, slots))
    if decodes + prefills == 0:
        decodes = 1
    rows = draw(st.integers(1, prefill_len)) if prefills else 0
    return Bucket(decodes + prefills, rows, decodes)


def holds(bucket: Bucket, spec: AttentionSpec, qo_lens: Iterable[int]) -> bool:
    """The rule of what fits, said once more: each decode beyond ``decode_count`` prefills.

    Which of them these are is left open: they may have ``decode_rows`` rows each, and all decodes' rows together.
    """
    lens = list(qo_lens)
    decodes = [n for n in lens if 0 < n <= spec.decode_rows]
    prefills = [n for n in lens if n > spec.decode_rows]
    excess = max(0, len(decodes) - bucket.decode_count)
    return (
        len(lens) <= bucket.batch
        and len(prefills) + excess <= bucket.batch - bucket.decode_count
        and sum(prefills) + min(excess * spec.decode_rows, sum(decodes)) <= bucket.prefill_len
    )


@st.composite
def lengths_within(draw: st.DrawFn, bucket: Bucket, spec: AttentionSpec) -> list[int]:
    """Query rows of requests in any order that the bucket holds: idle ones, decodes in excess, prefills."""
    lens: list[int] = []
    for kind in draw(st.lists(st.sampled_from("dddppi"), min_size=bucket.batch // 2, max_size=bucket.batch + 2)):
        room = bucket.prefill_len - sum(n for n in lens if n > spec.decode_rows)
        bounds = {"i": (0, 0), "d": (1, spec.decode_rows), "p": (1, max(room, 1))}[kind]
        wish = draw(st.integers(*bounds))
        if holds(bucket, spec, [*lens, wish]):
            lens.append(wish)
    return lens


@st.composite
def batches(draw: st.DrawFn, qo_lens: Sequence[int], spec: AttentionSpec, kv_len: int = 900) -> Batch:
    """A batch with the given query rows, KV empty, just long enough, or up to ``kv_len`` tokens longer."""
    more = {
        "long": st.integers(kv_len // 4, kv_len),
        "short": st.integers(1, 20),
        "exact": st.just(0),
    }
    kinds = [draw(st.sampled_from(["long", "long", "long", "short", "exact", "none"])) for _ in qo_lens]
    kv_lens = [0 if kind == "none" else qo + draw(more[kind]) for qo, kind in zip(qo_lens, kinds, strict=True)]
    return make_batch(qo_lens, kv_lens, spec, seed=kv_len)


def policies() -> st.SearchStrategy[Policy]:
    """From no split at all to far more splits than requests."""
    return st.builds(Policy, ctas=st.one_of(st.integers(1, 30), st.integers(30, 300)))


@st.composite
def cases(draw: st.DrawFn, spec: st.SearchStrategy[AttentionSpec] | None = None, kv_len: int = 900) -> Case:
    """Everything that one plan is made of."""
    chosen = draw(specs() if spec is None else spec)
    bucket = draw(buckets())
    qo_lens = draw(lengths_within(bucket, chosen))
    return Case(chosen, bucket, draw(policies()), draw(batches(qo_lens, chosen, kv_len)))


def make_batch(
    qo_lens: Sequence[int], kv_lens: Sequence[int], spec: AttentionSpec, seed: int = 0, max_kv_len: int = 1 << 24
) -> Batch:
    """A batch of the given lengths over pages in random order."""
    pages = [-(-n // spec.page_size) for n in kv_lens]
    total = sum(pages)
    indices = np.random.default_rng(seed).permutation(total + SPARE_PAGES)[:total]
    last = [(n - 1) % spec.page_size + 1 if n else 0 for n in kv_lens]
    return Batch.of(
        np.cumsum([0, *qo_lens]),
        np.cumsum([0, *pages]),
        indices,
        last,
        page_size=spec.page_size,
        max_kv_len=max_kv_len,
    )


def make_tensors(batch: Batch, spec: AttentionSpec, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensors:
    """Random q, k and v; what no request owns is NaN, and so are out and lse. An fp8 cache stays one."""
    rng = np.random.default_rng([seed, batch.num_requests])
    pages = int(batch.kv_indices.max(initial=-1)) + 1 + SPARE_PAGES
    k, v = (np.full((pages, spec.page_size, spec.num_kv_heads, spec.head_dim), np.nan) for _ in range(2))
    for request, kv_len in enumerate(batch.kv_lens.tolist()):
        for i, page in enumerate(batch.kv_indices[batch.kv_indptr[request] : batch.kv_indptr[request + 1]]):
            used = min(spec.page_size, kv_len - i * spec.page_size)
            for cache in (k, v):
                cache[page, :used] = rng.standard_normal((used, *cache.shape[2:]))
    if spec.kv_layout == "HND":
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    rows = int(batch.qo_indptr[-1])
    q = np.full((rows + SPARE_ROWS, spec.num_qo_heads, spec.head_dim), np.nan)
    q[:rows] = rng.standard_normal((rows, *q.shape[1:]))
    kv_dtype = torch.float8_e4m3fn if spec.kv_dtype == "float8_e4m3fn" else dtype
    return Tensors(
        _tensor(q, dtype),
        _tensor(k, kv_dtype),
        _tensor(v, kv_dtype),
        torch.full(q.shape, math.nan, dtype=dtype),
        torch.full(q.shape[:2], math.nan),
    )


def assert_equals_oracle(batch: Batch, spec: AttentionSpec, tensors: Tensors, tolerance: float = TOLERANCE) -> None:
    """Every row of the batch is right, every other row of out and lse is still NaN."""
    want, want_lse = oracle.attention(batch, spec, tensors.q, tensors.k, tensors.v)
    np.testing.assert_allclose(oracle.float64(tensors.out), want, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(oracle.float64(tensors.lse), want_lse, rtol=tolerance, atol=tolerance)


def _tensor(array: npt.NDArray[np.float64], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
