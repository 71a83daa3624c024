"""The parameter structs of podgraph's kernels, field for field as in kernels/args.h.

Compiling emits a ``static_assert`` for each offset (`layout_asserts`), so that the two cannot drift apart.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from podgraph.planner.layout import Layout
from podgraph.planner.policy import PARTITIONS, Policy, kernels_of, prefill_tile, sm90_setting
from podgraph.shapes import AttentionSpec, Bucket


class Args(ctypes.Structure):
    """What every attention kernel takes; see kernels/args.h for shapes and meaning."""

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
        ("counts", ctypes.c_uint64),
        ("kv_indices_at", ctypes.c_uint64),
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


class PlanArgs(ctypes.Structure):
    """What the planner's kernels take; see kernels/args.h for shapes and meaning."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("qo_indptr", "kv_indptr", "kv_last_page_len", "kv_indices", "status")),
        *((name, ctypes.c_uint64) for name in ("meta_qo_indptr", "meta_kv_indptr", "meta_kv_last_page_len")),
        *((name, ctypes.c_uint64) for name in ("counts", "kv_indices_at", "bad_page")),
        *((f"prefill_{name}", ctypes.c_uint64) for name in ("request_indices", "qo_tile_indices", "kv_tile_indices")),
        *((f"decode_{name}", ctypes.c_uint64) for name in ("request_indices", "qo_tile_indices", "kv_tile_indices")),
        *(
            (name, ctypes.c_uint64)
            for name in ("kv_chunk_size", "o_indptr", "merge_rows", "merge_first", "merge_count")
        ),
        *((name, ctypes.c_uint64) for name in ("tiles", "units", "empty_rows")),
        *((name, ctypes.c_int32) for name in ("plan_number", "first_row")),
        *((name, ctypes.c_int32) for name in ("num_requests", "num_indices", "num_pages", "rows")),
        *((name, ctypes.c_int32) for name in ("given_prefill_len", "given_decode_count")),
        *((name, ctypes.c_int32) for name in ("batch", "prefill_len", "decode_count", "prefill_tile")),
        *((name, ctypes.c_int32) for name in ("shares_tiles", "splits_tiles")),
        *((name, ctypes.c_int32) for name in ("page_size", "group_size", "num_kv_heads", "decode_rows", "window_left")),
        *((name, ctypes.c_int32) for name in ("ctas", "max_pages", "max_kv_len", "requests")),
        *((name, ctypes.c_int32) for name in ("prefill_items", "decode_items", "partial_rows", "merge_capacity")),
        ("partition", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class ParamStruct:
    """A parameter struct, and the fields of it that the runtime sets by name at each launch.

    Attributes:
        fields: the struct.
        pointers: 8 bytes each.
        scalars: 4 bytes each.
    """

    fields: type[ctypes.Structure]
    pointers: tuple[str, ...]
    scalars: tuple[str, ...]

    @property
    def size(self) -> int:
        return ctypes.sizeof(self.fields)

    def offset_of(self, field: str) -> int:
        return int(getattr(self.fields, field).offset)

    @property
    def slots(self) -> dict[str, tuple[int, int]]:
        """(offset, bytes) of every field that is set by name."""
        return {
            name: (self.offset_of(name), size)
            for names, size in ((self.pointers, 8), (self.scalars, 4))
            for name in names
        }


# what one call of run() sets: addresses of the caller's tensors and of the caches' tensor maps, strides in elements
RUN = ParamStruct(
    Args,
    ("q", "k", "v", "out", "lse", "kv_maps"),
    (
        "q_stride_n",
        "q_stride_h",
        "k_stride_page",
        "k_stride_n",
        "k_stride_h",
        "v_stride_page",
        "v_stride_n",
        "v_stride_h",
    ),
)

# what one call of plan() sets: the step's metadata, and what its bucket and setting are
PLAN = ParamStruct(
    PlanArgs,
    ("qo_indptr", "kv_indptr", "kv_last_page_len", "kv_indices", "status"),
    (
        "plan_number",
        "first_row",
        "num_requests",
        "num_indices",
        "num_pages",
        "rows",
        "given_prefill_len",
        "given_decode_count",
        "batch",
        "prefill_len",
        "decode_count",
        "prefill_tile",
        "shares_tiles",
        "splits_tiles",
    ),
)

PLAN_THREADS = (256, 512, 1024)  # of a planner's block: kLeastThreads to kMostThreads in kernels/plan.h


def plan_threads(num_requests: int) -> int:
    """How many threads plan a batch: every warp issues every instruction, so few requests want few warps."""
    return PLAN_THREADS[(num_requests > 256) + (num_requests > 1024)]


PLANNERS = ("podgraph_plan_sm90", "podgraph_plan_flashinfer", "podgraph_check_pages")


def params_of(function: str) -> ParamStruct:
    """The struct that a kernel takes, by its entry name."""
    return PLAN if function in PLANNERS else RUN


def fill(spec: AttentionSpec, layout: Layout, bases: Mapping[str, int], strides: Mapping[str, int]) -> Args:
    """An attention kernel's parameters for regions at the given addresses.

    Args:
        bases: address of every region: the pointers of `RUN`, ``meta``, ``plan``, ``partials``, ``counters``.
        strides: every scalar of `RUN`, in elements.
    """
    args = Args(
        num_qo_heads=spec.num_qo_heads,
        num_kv_heads=spec.num_kv_heads,
        window_left=spec.window_left,
        logits_soft_cap=spec.logits_soft_cap,
        sm_scale=spec.sm_scale * spec.k_scale,
        v_scale=spec.v_scale,
        partial_out=bases["partials"],
        partial_lse=bases["partials"] + layout.partial_lse_offset,
        counters=bases["counters"],
    )
    for name in RUN.pointers:
        setattr(args, name, bases[name])
    for name in RUN.scalars:
        setattr(args, name, strides[name])
    for array in layout.arrays.values():
        if hasattr(Args, array.name):
            setattr(args, array.name, bases[array.region] + array.offset)
    return args


def fill_plan(
    spec: AttentionSpec,
    layout: Layout,
    policy: Policy,
    limits: tuple[int, int],
    bases: Mapping[str, int],
    scalars: Mapping[str, int],
) -> PlanArgs:
    """A planner's parameters for regions at the given addresses.

    Args:
        limits: ``max_pages`` and ``max_kv_len`` of the catalog.
        bases: address of every region: the pointers of `PLAN`, ``meta``, ``plan``.
        scalars: every scalar of `PLAN`.
    """
    capacity = layout.capacity
    args = PlanArgs(
        page_size=spec.page_size,
        group_size=spec.group_size,
        num_kv_heads=spec.num_kv_heads,
        decode_rows=spec.decode_rows,
        window_left=spec.window_left,
        ctas=policy.ctas,
        max_pages=limits[0],
        max_kv_len=limits[1],
        requests=capacity.requests,
        prefill_items=capacity.prefill_items,
        decode_items=capacity.decode_items,
        partial_rows=capacity.partial_rows,
        merge_capacity=capacity.merge_rows,
        partition=PARTITIONS.index(policy.partition),
    )
    for name in PLAN.pointers:
        setattr(args, name, bases[name])
    for name in PLAN.scalars:
        setattr(args, name, scalars[name])
    for array in layout.arrays.values():
        field = f"meta_{array.name}" if array.region == "meta" else array.name
        setattr(args, field, bases[array.region] + array.offset)
    return args


def bucket_scalars(spec: AttentionSpec, bucket: Bucket, variant: str) -> dict[str, int]:
    """The scalars of `PLAN` that a bucket and the way it is computed decide."""
    setting = sm90_setting(variant) if kernels_of(variant) == "sm90" else None
    return {
        "batch": bucket.batch,
        "prefill_len": bucket.prefill_len,
        "decode_count": bucket.decode_count,
        "prefill_tile": prefill_tile(bucket, spec),
        "shares_tiles": int(setting is not None and setting.shares_tiles),
        "splits_tiles": int(setting is not None and setting.splits_tiles),
    }


def layout_asserts() -> str:
    """C++ that fails to compile where a struct in kernels/args.h differs from this file."""
    lines = []
    for params in (RUN, PLAN):
        name = params.fields.__name__
        lines += [
            f'static_assert(offsetof(podgraph::{name}, {field[0]}) == {params.offset_of(field[0])}, "{field[0]}");'
            for field in params.fields._fields_
        ]
        lines.append(f'static_assert(sizeof(podgraph::{name}) == {params.size}, "size");')
    return "\n".join(lines) + "\n"
