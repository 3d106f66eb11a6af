"""What the guard costs, covers and finds: single layers and products, and a zoo of models.

python benchmarks/guard.py [--quick] [--only PART ...] [--json FILE]

With `--only`, the rows of those parts take the place of the same rows of FILE.
"""

from __future__ import annotations

import warnings

import torch
from harness import run_parts

PARTS = {
    "linear": "guard_costs.linear_bars",
    "step": "guard_costs.step_bars",
    "flips": "guard_costs.detection_bars",
    "alarms": "guard_costs.alarm_bars",
    "recovery": "guard_costs.recovery_bars",
    "coverage": "guard_zoo.coverage_bars",
    "harm": "guard_zoo.harm_bars",
    "healthy": "guard_zoo.healthy_bars",
    "unknown": "guard_zoo.unknown_bars",
}
"""Of each part, the function that gives its bars."""

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Of modules without a check, which the levels that are measured leave out.
    warnings.simplefilter("ignore", UserWarning)
    run_parts("guard", str(__doc__), PARTS)
