"""The planner's kernels: which sources, and how large a batch one thread block can plan."""

from __future__ import annotations

from podgraph.planner.packed import MAX_BATCH as MAX_BATCH
from podgraph.planner.policy import Kernels
from podgraph.providers.nvcc import Source

CHECK_THREADS, CHECK_CTAS = 256, 132  # of the check of page numbers


def plan_source(kernels: Kernels) -> Source:
    """The planner for one kind of attention kernels. It takes every specification's numbers as parameters."""
    return Source(file=f"plan_{kernels}.cu", defines=())


def plan_function(kernels: Kernels) -> str:
    return f"podgraph_plan_{kernels}"


def check_source() -> Source:
    """The check that every entry of kv_indices names a page of the cache."""
    return Source(file="check_pages.cu", defines=())


CHECK_FUNCTION = "podgraph_check_pages"
