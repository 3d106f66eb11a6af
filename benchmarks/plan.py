"""The efficiency model: errors on runs that no fit has seen, intervals, decisions, speed.

    python benchmarks/plan.py [--data DIR] [--quick] [--json FILE] [--keep DIR] [--part PART]

DIR holds the published table `throughput.csv` and the folder `energy` that docs/plan.md names;
without it, the rows that need them are left out. `--keep` holds runs and fits made on this machine,
so that a second call does not repeat them. `--part` runs one part (published, elsewhere, speed,
reliability, here) and puts its rows in the place of the same rows of FILE: `here` wants a quiet
machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import plan_energy
import plan_memory
import plan_reliability
from harness import Bar, publish
from plan_here import here_bars
from plan_search import regret_bars, speed_bars
from plan_time import elsewhere_bars, time_bars

PARTS = ("published", "elsewhere", "speed", "reliability", "here")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small cases only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the bars to FILE")
    parser.add_argument("--data", type=Path, metavar="DIR", help="published measurements")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="runs made on this machine")
    parser.add_argument("--part", choices=PARTS, help="one part only")
    options = parser.parse_args()
    parts = [options.part] if options.part else PARTS
    bars = []
    if "published" in parts:
        bars += _published(options.data, options.quick)
    if "elsewhere" in parts and options.data is not None:
        bars += elsewhere_bars(options.data / "throughput.csv", options.quick, options.keep)
    if "speed" in parts:
        bars += speed_bars()
    if "reliability" in parts:
        bars += [Bar(**row) for row in plan_reliability.rows(options.quick)]
    if "here" in parts and not (options.quick and not options.part):
        bars += here_bars(options.quick, options.keep)
    publish("plan", bars, options.json, part=options.part is not None)


def _published(data: Path | None, quick: bool) -> Iterator[Bar]:
    table = None if data is None else data / "throughput.csv"
    if table is not None:
        yield from time_bars(table, quick)
        yield from regret_bars(table, quick)
    yield from plan_memory.rows(quick, table)
    yield from plan_energy.rows(quick, None if data is None else data / "energy")


if __name__ == "__main__":
    main()
