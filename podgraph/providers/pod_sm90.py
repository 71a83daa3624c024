"""podgraph's own kernel for Hopper: what it serves, in which settings, and how it is compiled."""

from __future__ import annotations

from podgraph.planner.policy import SM90, SM90_SETTINGS
from podgraph.providers.nvcc import Source
from podgraph.shapes import AttentionSpec

ARCH = "sm_90a"
THREADS = 512  # of a CTA: kThreads in kernels/pod_sm90_memory.h
HEAD_DIMS = (64, 128)
PAGE_SIZES = (16, 32, 64, 128)
GROUP_SIZES = (*range(1, 9), 16)
MOST_COLUMNS = 16  # of decode's products: the group's heads of each row, padded to 8 or 16
C_TYPES = {"bfloat16": ("nv_bfloat16", '"bf16"'), "float16": ("half", '"f16"')}


def refusal(spec: AttentionSpec, arch: str) -> str:
    """Why the kernel does not serve a specification; empty where it does."""
    if arch != ARCH:
        return f"{arch}: it is made of {ARCH} instructions"
    for what, got, allowed in (
        ("head_dim", spec.head_dim, HEAD_DIMS),
        ("page_size", spec.page_size, PAGE_SIZES),
        ("num_qo_heads / num_kv_heads", spec.group_size, GROUP_SIZES),
        ("num_qo_heads / num_kv_heads * decode_rows", spec.group_size * spec.decode_rows, range(1, MOST_COLUMNS + 1)),
        ("kv_dtype", spec.kv_dtype, (spec.dtype,)),
    ):
        if got not in allowed:
            return f"{what} {got}"
    return ""


def settings_of(spec: AttentionSpec) -> tuple[str, ...]:
    """Names of the settings to choose from.

    The wide one has no registers left for a window or a soft cap; nor, at head dim 128, for several rows a decode that
    fill more than 8 columns.
    """
    few = spec.decode_rows == 1 or spec.head_dim == 64 or spec.group_size * spec.decode_rows <= 8
    wide = spec.window_left < 0 and spec.logits_soft_cap == 0 and few
    return tuple(name for name, setting in SM90_SETTINGS.items() if wide or setting.kv_block < 128)


def variant_of(setting: str) -> str:
    return SM90 + setting


def source(spec: AttentionSpec, setting: str) -> Source:
    """kernels/pod_sm90.cu with the spec's constants and a setting's."""
    chosen = SM90_SETTINGS[setting]
    c_type, ptx_type = C_TYPES[spec.dtype]
    return Source(
        file="pod_sm90.cu",
        defines=(
            ("PODGRAPH_DTYPE", c_type),
            ("PODGRAPH_PTX_TYPE", ptx_type),
            ("PODGRAPH_HEAD_DIM", spec.head_dim),
            ("PODGRAPH_GROUP_SIZE", spec.group_size),
            ("PODGRAPH_DECODE_ROWS", spec.decode_rows),
            ("PODGRAPH_PAGE_SIZE", spec.page_size),
            ("PODGRAPH_WINDOW", int(spec.window_left >= 0)),
            ("PODGRAPH_SOFT_CAP", int(spec.logits_soft_cap > 0)),
            ("PODGRAPH_KV_BLOCK", chosen.kv_block),
            ("PODGRAPH_STAGES", chosen.stages),
            ("PODGRAPH_DECODE_SLOTS", chosen.slots),
        ),
    )
