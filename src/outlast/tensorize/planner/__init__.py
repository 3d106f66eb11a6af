"""Which of a layer's routes is the fastest, from what the machine's operations cost."""

from outlast.tensorize.planner.choose import calibrate, plan_for, predicted_speedup
from outlast.tensorize.planner.explain import explain

__all__ = ["calibrate", "explain", "plan_for", "predicted_speedup"]
