"""What one lap of the meter costs: our own code and the kernel's files, without any driver."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from harness import Bar

from outlast.energy import EnergyMeter
from outlast.energy.sources import FileSource

STEP_SECONDS = 0.05
"""Of a short training step; a lap at each is the worst case."""
LARGEST_SHARE = 0.005
COUNTERS, LAPS, REPEATS = 8, 400, 9


def lap_seconds() -> float:
    """CPU seconds of one lap over real counter files, median of several repeats."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"energy{number}" for number in range(COUNTERS)]
        for path in paths:
            path.write_text("1000000")
        with EnergyMeter("laps", [FileSource(path) for path in paths]) as meter:
            times = []
            for _ in range(REPEATS):
                begun = time.process_time()
                for _ in range(LAPS):
                    meter.lap()
                times.append((time.process_time() - begun) / LAPS)
    return statistics.median(times)


def meter_bars() -> Iterator[Bar]:
    """The share of a step of 50 ms."""
    share = lap_seconds() / STEP_SECONDS
    yield Bar(
        f"a lap of {COUNTERS} counter files / a step of {STEP_SECONDS:g} s, CPU time",
        round(share, 6),
        "",
        f"<= {LARGEST_SHARE:g}",
        share <= LARGEST_SHARE,
        "no meter",
    )
