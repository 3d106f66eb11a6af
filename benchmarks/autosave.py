"""Unmodified scripts: are they resumed exactly, and what does it cost?

    python benchmarks/autosave.py [--quick] [--only PART ...] [--json FILE]

With `--only`, the rows of those parts take the place of the same rows of FILE. The programs are
those of `tests/autosave/programs`.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from harness import Bar, publish

PARTS = ("programs", "windows", "overhead")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small cases only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the bars to FILE")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=[*PARTS], help="these parts")
    options = parser.parse_args()
    bars: list[Bar] = []
    for part in options.only:
        bars += importlib.import_module(f"autosave_{part}").bars(options.quick)
    publish("autosave", bars, options.json, part=set(options.only) != set(PARTS))


if __name__ == "__main__":
    main()
