"""From one batch to the work list that the attention kernels read."""

from podgraph.planner.layout import UNSPLIT, Layout
from podgraph.planner.plan import WorkList, plan
from podgraph.planner.policy import Capacity, Policy, prefill_tile

__all__ = ["UNSPLIT", "Capacity", "Layout", "Policy", "WorkList", "plan", "prefill_tile"]
