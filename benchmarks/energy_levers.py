"""Figures of the levers: regret of a power cap chosen from three probes, and slack reclamation.

The traces are those of Zeus (NSDI'23, Apache-2.0), `zeus_nsdi23/summary_power_{a40,v100}.csv`:
time and average power of an epoch at every cap. Regret is the cost of the chosen cap above that of
the best one of the whole sweep. Where the work never draws as much as the lowest cap, the caps
differ only by noise; so the figure is also given without these workloads. The two shares that
place the second probe were chosen on these traces, so the sweeps of five pipelines
(`zeus_power_limit`, A100 and A40), which had no part in that, are judged too.
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from harness import Bar, at_most

from outlast.energy.levers import CapGoal, CapPoint, search_cap
from outlast.energy.reclamation import (
    Devices,
    Faults,
    Phase,
    best_policy,
    break_even_faults_per_second,
    break_even_overhead,
    monte_carlo,
)
from outlast.hardware.figure import Unavailable

GOALS = {"eta 0.5": CapGoal(0.5), "+3 % time": CapGoal(1.0, 1.03)}
Sweep = dict[float, CapPoint]


def traces(path: Path) -> list[Sweep]:
    """Sweeps of all workloads of a file, by cap."""
    sweeps: dict[tuple[str, ...], Sweep] = defaultdict(dict)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            key = (row["dataset"], row["network"], row["batch_size"], row["optimizer"])
            cap = float(row["power_limit"])
            point = CapPoint(cap, float(row["time_per_epoch"]), float(row["average_power"]))
            sweeps[key][cap] = point
    return list(sweeps.values())


def regret(sweep: Sweep, goal: CapGoal) -> float:
    """Cost of the chosen cap above the cheapest, relative."""
    choice = search_cap(sweep.__getitem__, sorted(sweep), goal)
    top = sweep[max(sweep)]
    best = min(goal.cost(point, top) for point in sweep.values())
    return goal.cost(choice.point, top) / best - 1.0


def cap_bars(folder: Path) -> Iterator[Bar]:
    """Mean regret per device and goal, with a bar of 2 %."""
    for device in ("a40", "v100"):
        path = folder / f"summary_power_{device}.csv"
        if not path.is_file():
            continue
        sweeps = traces(path)
        biting = [sweep for sweep in sweeps if sweep[max(sweep)].watts > min(sweep)]
        for name, goal in GOALS.items():
            for what, group in (("all", sweeps), ("caps bite", biting)):
                found = [100.0 * regret(sweep, goal) for sweep in group]
                case = f"Zeus traces {device}, {name}, {what} ({len(group)})"
                title = f"cap from 3 probes, {case}: mean regret"
                yield at_most(title, statistics.fmean(found), "%", 2.0, "full sweep")
                share = sum(value <= 2.0 for value in found) / len(found)
                yield Bar(
                    title.replace("mean regret", "workloads within 2 %"), round(100 * share, 1),
                    "%", "reported", True, "full sweep", "measured",
                )  # fmt: skip


def pipelines(path: Path) -> list[Sweep]:
    """Sweeps of pipelines with one cap on all devices; the draw is the average of a device."""
    sweeps: dict[str, Sweep] = defaultdict(dict)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            devices = int(row["dp"]) * int(row["tp"]) * int(row["pp"])
            cap, seconds = float(row["power_limit_0"]), float(row["time"])
            watts = float(row["energy"]) / seconds / devices
            sweeps[row["model_name"]][cap] = CapPoint(cap, seconds, watts)
    return list(sweeps.values())


def pipeline_bars(folder: Path) -> Iterator[Bar]:
    """Worst regret on sweeps that had no part in choosing where to probe."""
    paths = [folder / f"{device}_zeus_global.csv" for device in ("A100", "A40")]
    sweeps = [sweep for path in paths if path.is_file() for sweep in pipelines(path)]
    for name, goal in GOALS.items() if sweeps else ():
        worst = max(100.0 * regret(sweep, goal) for sweep in sweeps)
        title = f"unseen pipelines ({len(sweeps)}), cap from 3 probes, {name}: worst regret"
        yield at_most(title, worst, "%", 2.0, "full sweep")


def reclamation_bars() -> Iterator[Bar]:
    """Saving of guarded operation beyond the guard band, and where it ends. Simulated.

    Two devices with a fifth of slack, power like that of the A100-SXM profile; faults, overheads
    and coverages of checksums are the assumed defaults.
    """
    devices = Devices(
        phases=(
            Phase(seconds=1.0, dynamic_watts=240.0, static_watts=58.0),
            Phase(seconds=0.8, dynamic_watts=240.0, static_watts=58.0),
        ),
        wait_watts=83.64,
    )
    faults = Faults()
    best = best_policy(devices, faults)
    nominal = 100.0 * (1.0 - best.slack_only_joules / best.nominal_joules)
    rate = break_even_faults_per_second(best)
    overhead = break_even_overhead(devices, best.policy, faults)
    what = (
        f"slack reclamation, {best.policy.abft.name} checksums, ratio {best.policy.ratio:g}, "
        f"undervolt {100 * best.policy.undervolt:g} %"
    )
    drawn = monte_carlo(devices, best.policy, faults, steps=200_000)
    rows: list[tuple[str, float | Unavailable, str]] = [
        ("slack only: saving over nominal clocks", nominal, "%"),
        (f"{what}: saving beyond slack only", 100.0 * best.saving, "%"),
        (f"{what}: break-even fault rate", rate, "1/s"),
        (f"{what}: its fault rate", faults.rate(best.critical_clock, best.policy.undervolt), "1/s"),
        (f"{what}: break-even checksum overhead", overhead, "of the work"),
        (f"{what}: drawn energy over closed form", drawn.joules / best.joules, "ratio"),
    ]
    for name, figure, unit in rows:
        if isinstance(figure, Unavailable):
            yield Bar(name, None, unit, "reported", True, figure.reason, "simulated")
        else:
            yield Bar(name, float(f"{figure:.6g}"), unit, "reported", True,
                      "BSR, no hardware claim", "simulated")  # fmt: skip
