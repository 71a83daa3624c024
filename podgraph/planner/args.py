"""The parameter struct of every podgraph kernel, field for field as `Args` in kernels/args.h.

Compiling emits a ``static_assert`` for each offset (`layout_asserts`), so that the two cannot drift apart.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from podgraph.planner.layout import Layout
from podgraph.shapes import AttentionSpec

# fields that one call of run() sets, by name: addresses of the caller's tensors and of the caches' tensor maps, and
# strides in elements
RUN_POINTERS = ("q", "k", "v", "out", "lse", "kv_maps")
RUN_STRIDES = (
    "q_stride_n",
    "q_stride_h",
    "k_stride_page",
    "k_stride_n",
    "k_stride_h",
    "v_stride_page",
    "v_stride_n",
    "v_stride_h",
)


class Args(ctypes.Structure):
    """See kernels/args.h for shapes and meaning."""

    _fields_ = [
        ("q", ctypes.c_uint64),
        ("k", ctypes.c_uint64),
        ("v", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("lse", ctypes.c_uint64),
        ("kv_maps", ctypes.c_uint64),
        ("qo_indptr", ctypes.c_uint64),
        ("kv_indptr", ctypes.c_uint64),
        ("kv_last_page_len", ctypes.c_uint64),
        ("kv_indices", ctypes.c_uint64),
        ("counts", ctypes.c_uint64),
        ("prefill_request_indices", ctypes.c_uint64),
        ("prefill_qo_tile_indices", ctypes.c_uint64),
        ("prefill_kv_tile_indices", ctypes.c_uint64),
        ("decode_request_indices", ctypes.c_uint64),
        ("decode_qo_tile_indices", ctypes.c_uint64),
        ("decode_kv_tile_indices", ctypes.c_uint64),
        ("kv_chunk_size", ctypes.c_uint64),
        ("o_indptr", ctypes.c_uint64),
        ("merge_rows", ctypes.c_uint64),
        ("merge_first", ctypes.c_uint64),
        ("merge_count", ctypes.c_uint64),
        ("tiles", ctypes.c_uint64),
        ("units", ctypes.c_uint64),
        ("empty_rows", ctypes.c_uint64),
        ("partial_out", ctypes.c_uint64),
        ("partial_lse", ctypes.c_uint64),
        ("counters", ctypes.c_uint64),
        ("q_stride_n", ctypes.c_int32),
        ("q_stride_h", ctypes.c_int32),
        ("k_stride_page", ctypes.c_uint32),
        ("k_stride_n", ctypes.c_uint32),
        ("k_stride_h", ctypes.c_uint32),
        ("v_stride_page", ctypes.c_uint32),
        ("v_stride_n", ctypes.c_uint32),
        ("v_stride_h", ctypes.c_uint32),
        ("num_qo_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("window_left", ctypes.c_int32),
        ("logits_soft_cap", ctypes.c_float),
        ("sm_scale", ctypes.c_float),
        ("v_scale", ctypes.c_float),
    ]


def offset_of(field: str) -> int:
    """Byte offset of a field in `Args`."""
    return int(getattr(Args, field).offset)


def size_of(field: str) -> int:
    """Bytes of a field in `Args`."""
    return int(getattr(Args, field).size)


def fill(spec: AttentionSpec, layout: Layout, bases: Mapping[str, int], strides: Mapping[str, int]) -> Args:
    """The parameters for regions at the given addresses.

    Args:
        bases: address of every region: those of ``RUN_POINTERS``, ``kv_indices``, ``meta``, ``plan``, ``partials``,
            ``counters``.
        strides: every name of ``RUN_STRIDES``, in elements.
    """
    args = Args(
        num_qo_heads=spec.num_qo_heads,
        num_kv_heads=spec.num_kv_heads,
        window_left=spec.window_left,
        logits_soft_cap=spec.logits_soft_cap,
        sm_scale=spec.sm_scale * spec.k_scale,
        v_scale=spec.v_scale,
        kv_indices=bases["kv_indices"],
        partial_out=bases["partials"],
        partial_lse=bases["partials"] + layout.partial_lse_offset,
        counters=bases["counters"],
    )
    for name in RUN_POINTERS:
        setattr(args, name, bases[name])
    for name in RUN_STRIDES:
        setattr(args, name, strides[name])
    for array in layout.arrays.values():
        setattr(args, array.name, bases[array.region] + array.offset)
    return args


def layout_asserts() -> str:
    """C++ that fails to compile where `Args` in kernels/args.h differs from this file."""
    lines = [
        f'static_assert(offsetof(podgraph::Args, {field[0]}) == {offset_of(field[0])}, "{field[0]}");'
        for field in Args._fields_
    ]
    lines.append(f'static_assert(sizeof(podgraph::Args) == {ctypes.sizeof(Args)}, "size");')
    return "\n".join(lines) + "\n"
