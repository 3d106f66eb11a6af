"""Tensorized layers: speed, memory, plans, bytes between ranks, decoding, and quality.

    python benchmarks/tensorize.py [--quick] [--json FILE] [--trainings DIR]

Layers are timed in CPU seconds of one thread, best of several interleaved repeats
(`tensorize_layers`); the small GPTs of `tensorize_quality` train in two processes of one thread and
leave their results in DIR, so that a benchmark that was killed continues where it stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from harness import publish
from tensorize_decode import decode_bars
from tensorize_layers import keep_memory, library_bars, saved_bars, speed_bars
from tensorize_parallel import parallel_bars
from tensorize_planner import planner_bars
from tensorize_quality import quality_bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few minutes' worth, tiny models")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the bars to FILE")
    parser.add_argument("--trainings", type=Path, metavar="DIR", help="keeps trainings' results")
    options = parser.parse_args()
    quick = options.quick
    # Trainings first: they are other processes, and calibrate the planner when it was not.
    bars = list(quality_bars(quick=quick, directory=options.trainings))
    keep_memory()
    parts = (
        speed_bars(quick),
        saved_bars(),
        library_bars(quick),
        planner_bars(quick),
        decode_bars(quick),
        parallel_bars(quick),
    )
    bars += [bar for part in parts for bar in part]
    publish("tensorize", bars, options.json)


if __name__ == "__main__":
    main()
