"""Energy: plans against their bound and against Perseus, models against measurements, the meter.

    python benchmarks/energy.py [--data DIR] [--quick] [--json FILE]

DIR holds the public files that docs/energy.md names (artefacts of Perseus, Zeus); without it, the
rows that need them are left out. Perseus' solver takes part where `lowtime` is installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from energy_frontier import frontier_bars
from energy_gpu import gpu_bars
from energy_measured import iteration_time_bars, plan_energy_bars
from energy_meter import meter_bars
from energy_model import model_bars
from energy_switches import noise_bars, priced, print_prices, straggler_bars, switch_bars
from harness import Bar, publish


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small cases only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the bars to FILE")
    parser.add_argument("--data", type=Path, metavar="DIR", help="public measurements")
    options = parser.parse_args()
    bars = [*frontier_bars(options.quick, options.data), *_budget_bars(options.quick)]
    if options.data is not None:
        bars += _data_bars(options.data, options.quick)
    bars += [*meter_bars(), *gpu_bars()]
    publish("energy", bars, options.json)


def _budget_bars(quick: bool) -> Iterator[Bar]:
    counts = (12,) if quick else (12, 24, 48, 96)
    found = priced(("a100",) if quick else ("a100", "a40"), counts)
    print_prices(found)
    yield from switch_bars(found)
    yield from noise_bars(3 if quick else 20)
    yield from straggler_bars(counts[-1])


def _data_bars(data: Path, quick: bool) -> Iterator[Bar]:
    yield from iteration_time_bars(data)
    yield from plan_energy_bars(data)
    yield from model_bars(data, quick)


if __name__ == "__main__":
    main()
