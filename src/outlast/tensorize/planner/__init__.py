"""Which of a layer's routes is the fastest, from what the machine's operations cost.

`calibrate` measures those; `tune.tune_model` times whole plans (its module imports torch).
"""

from outlast.tensorize.planner.choose import calibrate, plan_for, predicted_speedup
from outlast.tensorize.planner.explain import explain

__all__ = ["calibrate", "explain", "plan_for", "predicted_speedup"]
