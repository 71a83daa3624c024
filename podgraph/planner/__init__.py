"""From one batch to the work list that the attention kernels read."""

from podgraph.planner.layout import UNSPLIT, Layout
from podgraph.planner.plan import WorkList, plan
from podgraph.planner.policy import Capacity, Policy, kernels_of, prefill_tile
from podgraph.planner.sm90 import Sm90WorkList, preferred_setting

__all__ = [
    "UNSPLIT",
    "AnyWorkList",
    "Capacity",
    "Layout",
    "Policy",
    "Sm90WorkList",
    "WorkList",
    "kernels_of",
    "plan",
    "preferred_setting",
    "prefill_tile",
]

AnyWorkList = WorkList | Sm90WorkList
