"""Which of a layer's routes is the fastest, from what the machine's operations cost."""

from outlast.tensorize.planner.choose import explain, plan_for

__all__ = ["explain", "plan_for"]
