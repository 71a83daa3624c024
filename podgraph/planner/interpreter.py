"""Runs a packed work list in torch, item by item, as the kernels do: the CPU backend.

It reads the very arrays that a GPU kernel would read, so that a test on a laptop tests the planner's meaning. It is
made for laptops and tests, not for speed.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from podgraph.planner.layout import UNSPLIT, Layout
from podgraph.shapes import DECODE_TILE, AttentionSpec

LOG2_E = math.log2(math.e)


class Interpreter:
    """One replay of one packed step.

    Args:
        spec: the specification.
        layout: where the arrays lie in ``step``.
        step: int32, ``layout.step_bytes`` bytes, as written by `WorkList.pack`.
        kv_indices: ``[pages]`` int32.
        prefill_tile: packed rows of a prefill tile; 0 where the bucket has none.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        layout: Layout,
        step: npt.NDArray[np.int32],
        kv_indices: npt.NDArray[np.int32],
        prefill_tile: int,
    ) -> None:
        self.spec, self.layout, self.prefill_tile = spec, layout, prefill_tile
        self.arrays = layout.views(step)
        self.kv_indices = torch.from_numpy(kv_indices.astype(np.int64))

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """Writes ``out`` (and ``lse``) for every row that the work list covers; other rows stay as they are.

        Args:
            q: ``[rows, num_qo_heads, head_dim]``.
            k, v: paged caches in the spec's layout, ``[pages, page_size, num_kv_heads, head_dim]`` for NHD.
            out: like q.
            lse: ``[rows, num_qo_heads]`` float32, base 2, or None.
        """
        spec, a = self.spec, self.arrays
        if spec.kv_layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        rows = self.layout.capacity.partial_rows
        partial_out = torch.full((rows, spec.num_qo_heads, spec.head_dim), math.nan)
        partial_lse = torch.full((rows, spec.num_qo_heads), math.nan)
        _, prefill_items, decode_items, merge_rows, _ = a["counts"].tolist()
        for side, count, tile in (("prefill", prefill_items, self.prefill_tile), ("decode", decode_items, DECODE_TILE)):
            for i in range(count):
                request = int(a[f"{side}_request_indices"][i])
                qo_tile, kv_tile = int(a[f"{side}_qo_tile_indices"][i]), int(a[f"{side}_kv_tile_indices"][i])
                row, head, result, result_lse = self._attend(request, qo_tile, kv_tile, tile, q, k, v)
                chunk = int(a["kv_chunk_size"][request])
                if chunk == UNSPLIT:
                    at = row + int(a["qo_indptr"][request])
                    out[at, head] = result.to(out.dtype)
                    if lse is not None:
                        lse[at, head] = result_lse
                else:
                    at = int(a["o_indptr"][request]) + row * self._chunks(request, tile, chunk) + kv_tile
                    partial_out[at, head] = result
                    partial_lse[at, head] = result_lse
        for i in range(merge_rows):
            first, parts = int(a["merge_first"][i]), int(a["merge_count"][i])
            row_lse = torch.logsumexp(partial_lse[first : first + parts] / LOG2_E, 0) * LOG2_E
            weight = torch.exp2(partial_lse[first : first + parts] - row_lse)
            target = int(a["merge_rows"][i])
            out[target] = (weight[:, :, None] * partial_out[first : first + parts]).sum(0).to(out.dtype)
            if lse is not None:
                lse[target] = row_lse

    def _kv_len(self, request: int) -> int:
        begin, end = self.arrays["kv_indptr"][request : request + 2].tolist()
        if begin == end:
            return 0
        return int((end - begin - 1) * self.spec.page_size + self.arrays["kv_last_page_len"][request])

    def _chunks(self, request: int, tile: int, chunk: int) -> int:
        span = max(self._kv_len(request), 1)
        if self.spec.window_left >= 0:
            span = min(span, self.spec.window_left + tile)
        return -(-span // chunk)

    def _attend(
        self, request: int, qo_tile: int, kv_tile: int, tile: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """One item, all KV heads: rows and heads ``[kv_heads, packed]``, out ``[kv_heads, packed, d]``, lse."""
        spec, a = self.spec, self.arrays
        group, page_size = spec.group_size, spec.page_size
        qo_begin, qo_end = a["qo_indptr"][request : request + 2].tolist()
        qo_len, kv_len = qo_end - qo_begin, self._kv_len(request)
        packed = torch.arange(qo_tile * tile, min((qo_tile + 1) * tile, qo_len * group))
        row = packed // group
        head = packed % group + group * torch.arange(spec.num_kv_heads)[:, None]
        start = 0
        if spec.window_left >= 0:
            start = max(0, kv_len + qo_tile * tile // group - qo_len - spec.window_left)
        chunk = int(a["kv_chunk_size"][request])
        begin = start if chunk == UNSPLIT else min(start + kv_tile * chunk, kv_len)
        end = kv_len if chunk == UNSPLIT else min(start + (kv_tile + 1) * chunk, kv_len)
        position = torch.arange(begin, end)
        page = self.kv_indices[int(a["kv_indptr"][request]) + position // page_size]
        # [kv_heads, kv, d]
        keys = _gather(k, page, position % page_size).transpose(0, 1) * spec.k_scale
        values = _gather(v, page, position % page_size).transpose(0, 1) * spec.v_scale
        logits = q[qo_begin + row, head].float() @ keys.transpose(1, 2) * spec.sm_scale
        if spec.logits_soft_cap:
            logits = spec.logits_soft_cap * torch.tanh(logits / spec.logits_soft_cap)
        limit = kv_len - qo_len + row[:, None]  # the last position that a row sees
        visible = position <= limit
        if spec.window_left >= 0:
            visible &= position >= limit - spec.window_left
        logits = logits.masked_fill(~visible, -math.inf)
        row_lse = torch.logsumexp(logits, -1) if end > begin else torch.full(head.shape, -math.inf)
        weight = torch.exp(logits - row_lse.clamp(min=-1e30)[..., None])
        return row.expand_as(head), head, weight @ values, row_lse * LOG2_E


def _gather(cache: torch.Tensor, page: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """Tokens of a cache in float32; torch indexes fp8 tensors as bytes only."""
    raw = cache.view(torch.uint8) if cache.element_size() == 1 else cache
    return raw[page, slot].view(cache.dtype).float()
