"""Recovery without a checkpoint: restart, replica groups, resizing, parity.

python benchmarks/recover.py [--quick] [--only PART ...] [--json FILE]

With `--only`, the rows of those parts take the place of the same rows of FILE.
"""

from __future__ import annotations

from harness import run_parts

PARTS = {
    "restart": "recover_restart.bars",
    "goodput": "recover_restart.goodput_bars",
    "live": "recover_live.live_bars",
    "resize": "recover_resize.bars",
    "parity": "recover_parity.bars",
}
"""Of each part, the function that gives its bars."""

if __name__ == "__main__":
    run_parts("recover", str(__doc__), PARTS)
