"""Never silently wrong: one staged case for each way in which work was lost or a claim untrue.

    python benchmarks/never.py [--only NUMBER ...] [--json FILE]

Each case stages its failure on the real part (a Slurm on this machine, an S3 server, a killed
process), and counts what went wrong: the bar is 0. A case takes under a minute. A case whose
means this machine lacks (Slurm, an extra) is a row that says so. With `--only`, the rows of those
numbers take the place of the same rows of FILE.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from harness import Bar, publish

MODULES = (
    "never_cluster",
    "never_guard",
    "never_coverage",
    "never_tensorize",
    "never_checkpoint",
    "never_plan",
    "never_autosave",
    "never_front_door",
)
"""Each has `CASES`: of each case's number, a function that stages it and returns its row."""

Case = Callable[[], Bar]


def cases() -> dict[int, Case]:
    """All cases by number."""
    found: dict[int, Case] = {}
    for name in MODULES:
        found |= importlib.import_module(name).CASES
    return dict(sorted(found.items()))


def main() -> None:
    known = cases()
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the same: every case is quick")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    parser.add_argument("--only", nargs="*", type=int, choices=known, default=[*known])
    options = parser.parse_args()
    rows = [_staged(number, known[number]) for number in options.only]
    publish("never", rows, options.json, part=set(options.only) != set(known))


def _staged(number: int, case: Case) -> Bar:
    """The row of one case, with its number and how long it took."""
    begun = time.monotonic()
    row = case()
    seconds = time.monotonic() - begun
    return replace(row, name=f"{number:02} {row.name}", peer=f"{row.peer} ({seconds:.0f} s)")


if __name__ == "__main__":
    main()
