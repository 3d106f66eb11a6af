"""Unmodified scripts: are they resumed exactly, and what does it cost?

    python benchmarks/autosave.py [--quick] [--only PART ...] [--json FILE]

With `--only`, the rows of those parts take the place of the same rows of FILE. The programs are
those of `tests/autosave/programs`.
"""

from __future__ import annotations

from harness import run_parts

PARTS = {
    "programs": "autosave_programs.bars",
    "windows": "autosave_windows.bars",
    "overhead": "autosave_overhead.bars",
}
"""Of each part, the function that gives its bars."""

if __name__ == "__main__":
    run_parts("autosave", str(__doc__), PARTS)
