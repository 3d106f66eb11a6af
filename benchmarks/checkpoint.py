"""Checkpoints: what saves and restores cost beside others, very many ranks, random faults.

python benchmarks/checkpoint.py [--quick] [--only PART ...] [--json FILE]

With `--only`, the rows of those parts take the place of the same rows of FILE.
"""

from __future__ import annotations

from harness import run_parts

PARTS = {
    "costs": "checkpoint_costs.bars",
    "scale": "checkpoint_scale.bars",
    "faults": "checkpoint_faults.bars",
}
"""Of each part, the function that gives its bars."""

if __name__ == "__main__":
    run_parts("checkpoint", str(__doc__), PARTS)
