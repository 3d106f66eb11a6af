"""The simulator of a cluster's scheduler: how fast, how large, how close to a real Slurm."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import process_time

import numpy as np
from harness import Bar, arguments, at_most, publish

from outlast.cluster.simulate import Simulation
from outlast.cluster.workload import lublin

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "slurm"))

NODES = 10_000
LOADS = (0.8, 0.95)
WORKLOADS = 30
AT_ONCE = 10
"""Private Slurms beside each other; their daemons share the machine's cores."""


def bars(quick: bool) -> list[Bar]:
    found = [*speed_bars(quick), memory_bar()]
    return found if quick else [*found, *agreement_bars()]


def speed_bars(quick: bool) -> list[Bar]:
    """CPU seconds for 100,000 jobs; --quick times conservative backfill on fewer."""
    found = []
    for kind, limit, jobs in (
        ("easy", 5.0, 100_000),
        ("conservative", 60.0, 10_000 if quick else 100_000),
    ):
        slowest = max(_seconds(kind, jobs, load) for load in LOADS)
        found.append(
            at_most(
                f"simulator: {kind}, {jobs:,} jobs on {NODES:,} nodes",
                slowest,
                "s of CPU",
                limit,
                f"slower of loads {LOADS[0]} and {LOADS[1]}, generated workload",
            )
        )
    return found


def _seconds(kind: str, jobs: int, load: float) -> float:
    workload = lublin(jobs, NODES, load=load, seed=1)
    begun = process_time()
    simulation = Simulation(NODES, backfill=kind, workload=workload)  # type: ignore[arg-type]
    simulation.run()
    seconds = process_time() - begun
    assert np.all(np.isfinite(simulation.ends()))
    return seconds


_LARGEST = """
import resource
from outlast.cluster.simulate import Simulation
from outlast.cluster.workload import lublin
Simulation({nodes}, workload=lublin({jobs}, {nodes}, load=0.95, seed=1)).run()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def memory_bar() -> Bar:
    """The whole process, interpreter and NumPy included."""
    code = _LARGEST.format(jobs=100_000, nodes=NODES)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    gigabytes = int(done.stdout) * 1024 / 1e9
    return at_most("simulator: memory, 100,000 jobs", gigabytes, "GB", 1.0, "largest resident set")


def agreement_bars() -> list[Bar]:
    """Workloads of eight jobs of seconds on 6 virtual nodes each, run by a real Slurm: minutes."""
    from local_slurm import missing
    from scheduler_trace import (
        INTERVAL_SECONDS,
        clusters,
        differences,
        handover_seconds,
        telling_workloads,
    )

    name = "simulator against Slurm: workloads whose starts all agree"
    bar = ">= 1"
    reason = missing()
    if reason is not None:
        return [Bar(name, None, "of all", bar, False, reason)]
    workloads = telling_workloads(WORKLOADS, first_seed=10_000)
    with clusters(AT_ONCE) as slurms, ThreadPoolExecutor(AT_ONCE) as threads:
        handovers = list(threads.map(handover_seconds, slurms))

        def on(place: int) -> list[list[float]]:
            return [
                differences(slurms[place], each, handovers[place])
                for each in workloads[place::AT_ONCE]
            ]

        late = [each for found in threads.map(on, range(AT_ONCE)) for each in found]
    agreeing = [max(map(abs, each)) <= INTERVAL_SECONDS for each in late]
    every = np.abs([second for each in late for second in each])
    share = float(np.mean(agreeing))
    peer = f"{len(late)} workloads, Slurm's backfill every {INTERVAL_SECONDS:g} s"
    return [
        Bar(name, round(share, 4), "of all", bar, share >= 1, peer),
        at_most(
            "simulator against Slurm: median difference of a start",
            float(np.median(every)),
            "s",
            INTERVAL_SECONDS,
            f"{len(every)} jobs, {np.mean(every <= INTERVAL_SECONDS):.1%} within the interval",
        ),
    ]


if __name__ == "__main__":
    options = arguments("Speed, memory and truth of the scheduler's simulator.")
    publish("cluster_simulate", bars(options.quick), options.json)
