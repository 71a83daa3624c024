"""Dense attention of a uniform batch, row by row and head by head, in float64: what every result is compared with.

It shares no code with podgraph: it reads plain attributes of a batch and of a specification, and nothing else.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]


def attention(batch: Any, spec: Any, q: Any, k: Any, v: Any) -> tuple[Float64, Float64]:
    """Attention of every row that the batch owns; NaN in the rows of q that it does not own.

    Args:
        batch: with ``qo_indptr``, ``kv_indptr``, ``kv_indices`` and ``kv_last_page_len``.
        spec: with ``num_qo_heads``, ``num_kv_heads``, ``page_size``, ``kv_layout``, ``sm_scale``, ``k_scale``,
            ``v_scale``, ``window_left`` and ``logits_soft_cap``.
        q: ``[rows, num_qo_heads, head_dim]``, a torch tensor or an array.
        k, v: ``[pages, page_size, num_kv_heads, head_dim]`` (NHD) or with the middle two swapped (HND).

    Returns:
        out ``[rows, num_qo_heads, head_dim]`` and its base-2 log-sum-exp ``[rows, num_qo_heads]``.
    """
    queries, keys, values = float64(q), float64(k), float64(v)
    out = np.full(queries.shape, np.nan)
    lse = np.full(queries.shape[:2], np.nan)
    for request in range(len(batch.kv_last_page_len)):
        first_row, end_row = int(batch.qo_indptr[request]), int(batch.qo_indptr[request + 1])
        own_keys = tokens(batch, spec, keys, request) * spec.k_scale
        own_values = tokens(batch, spec, values, request) * spec.v_scale
        kv_len = len(own_keys)
        for row in range(first_row, end_row):
            # causal: the last row sees all of KV, each row before it one token less
            end = kv_len - (end_row - 1 - row)
            begin = 0 if spec.window_left < 0 else max(0, end - 1 - spec.window_left)
            for head in range(spec.num_qo_heads):
                kv_head = head * spec.num_kv_heads // spec.num_qo_heads
                out[row, head], lse[row, head] = _one_row(
                    spec, queries[row, head], own_keys[begin:end, kv_head], own_values[begin:end, kv_head]
                )
    return out, lse


def tokens(batch: Any, spec: Any, cache: Float64, request: int) -> Float64:
    """A request's KV out of its pages, ``[kv_len, num_kv_heads, head_dim]``."""
    pages = batch.kv_indices[int(batch.kv_indptr[request]) : int(batch.kv_indptr[request + 1])]
    gathered = []
    for i, page in enumerate(pages):
        page_len = int(batch.kv_last_page_len[request]) if i == len(pages) - 1 else spec.page_size
        for slot in range(page_len):
            gathered.append(cache[page, slot] if spec.kv_layout == "NHD" else cache[page, :, slot])
    return np.array(gathered).reshape(-1, spec.num_kv_heads, cache.shape[-1])


def float64(tensor: Any) -> Float64:
    """A torch tensor or an array as float64; exact for every narrower dtype."""
    return tensor.double().cpu().numpy() if hasattr(tensor, "double") else np.asarray(tensor, np.float64)


def _one_row(spec: Any, query: Float64, keys: Float64, values: Float64) -> tuple[Float64 | float, float]:
    if len(keys) == 0:
        return 0.0, -math.inf
    logits = keys @ query * spec.sm_scale
    if spec.logits_soft_cap:
        logits = spec.logits_soft_cap * np.tanh(logits / spec.logits_soft_cap)
    top = float(logits.max())
    weights = np.exp(logits - top)
    total = float(weights.sum())
    return weights @ values / total, (top + math.log(total)) / math.log(2)
