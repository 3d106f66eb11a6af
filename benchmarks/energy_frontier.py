"""Clock plans against the linear bound and against Perseus: gaps, energies and times.

The bars of `benchmarks/energy.py` for `outlast.energy.planner`: GPT-3 175B's stages on A100-SXM
and A40 (measured profiles that ship with the package), 8 stages, 1F1B, 20 deadlines from the time
of top clocks to 1.1 times of it. All energies are predictions from the profile.

Perseus' solver (lowtime) runs on the same profile where it is installed. Its plans are judged like
ours: true durations of the clocks that it chose. The frontiers that Perseus' authors published
give planned times, whose operations are rounded down to a grid: true times are longer, by the
shares in `ROUNDED_DOWN`.
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import statistics
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import Bar, at_most

from outlast.energy.example import profile
from outlast.energy.plan import ClockPlan
from outlast.energy.planner import EnergyPlanner
from outlast.energy.profile import Profile, effective
from outlast.energy.schedule import Schedule, one_f_one_b

STAGES, POINTS = 8, 20
DEVICES = ("a100", "a40")
MICROBATCHES = (12, 24, 48, 96)
MEAN_GAP, LARGEST_GAP = 0.15, 0.5
"""Per cent above the bound."""
SECONDS = {12: 8.0, 96: 20.0}
"""For a whole frontier, by micro-batches."""
ROUNDED_DOWN = {"a100": 0.006, "a40": 0.0003}
"""By what share published times are below the true ones, at least: the shortest times of the
frontiers against the same clocks without rounding."""
GRID_SECONDS = {"a100": 1e-3, "a40": 1e-3}
"""Lowtime's unit of time. The published A40 frontiers have 0.1 ms, which takes ten times longer."""


@dataclass(frozen=True)
class Course:
    """A frontier of one case.

    Attributes:
        plans: By rising deadline.
        seconds: How long planning took, on one core.
    """

    device: str
    microbatches: int
    plans: tuple[ClockPlan, ...]
    seconds: float

    @property
    def gaps(self) -> list[float]:
        """Per cent above the bound."""
        return [100 * plan.gap for plan in self.plans]

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.device.upper()}, {self.microbatches} micro-batches"


@dataclass(frozen=True)
class Rival:
    """A plan of Perseus: true time of a step, and its joules up to that time."""

    seconds: float
    joules: float


def course(device: str, microbatches: int, points: int = POINTS) -> Course:
    """Plan one frontier."""
    schedule = one_f_one_b(STAGES, microbatches)
    planner = EnergyPlanner(profile(device))
    began = time.process_time()
    plans = planner.frontier(schedule, points=points).plans
    return Course(device, microbatches, plans, time.process_time() - began)


def excess(plans: Sequence[ClockPlan], rivals: Sequence[Rival], watts: float) -> list[float]:
    """Per cent by which plans need more than the best rival that meets the same deadline.

    Negative is better. Both wait for the deadline; deadlines that no rival meets are left out.
    """
    ordered = sorted(rivals, key=lambda rival: rival.seconds)
    times = [rival.seconds for rival in ordered]
    # What a rival needs but for waiting; the least so far.
    least: list[float] = []
    for rival in ordered:
        own = rival.joules - STAGES * watts * rival.seconds
        least.append(min(own, least[-1]) if least else own)
    found = []
    for plan in plans:
        place = bisect_right(times, plan.deadline_seconds * (1 + 1e-9))
        if place:
            theirs = least[place - 1] + STAGES * watts * plan.deadline_seconds
            found.append(100 * (plan.joules / theirs - 1))
    return found


def published(device: str, microbatches: int, folder: Path) -> list[Rival]:
    """A published frontier, at true times; empty where the file is not at hand.

    Args:
        device: "a100" or "a40".
        microbatches: 12, 24, 48 or 96.
        folder: sosp24_data/emulation/iteration_time_energy, file names prefixed by the device.
    """
    chip = {"a100": "a100_sxm", "a40": "a40"}[device]
    for file in folder.glob(f"{chip}_gpt3-175b_bf16_mb{microbatches}.csv*"):
        content = file.read_bytes()
        text = (gzip.decompress(content) if file.suffix == ".gz" else content).decode()
        rows = [(float(r["time"]), float(r["energy"])) for r in csv.DictReader(text.splitlines())]
        # The devices wait for the time that the plan takes longer than it says.
        waiting = STAGES * profile(device).blocking_watts * ROUNDED_DOWN[device]
        late = 1 + ROUNDED_DOWN[device]
        return [Rival(seconds * late, joules + waiting * seconds) for seconds, joules in rows]
    return []


def lowtime(device: str, microbatches: int) -> tuple[list[Rival], float]:
    """All plans of Perseus' solver, and the seconds that it took."""
    import networkx
    from lowtime.cost_model import ExponentialModel
    from lowtime.operation import (
        CandidateExecutionOptions,
        DummyOperation,
        ExecutionOption,
        Operation,
        OperationSpec,
    )
    from lowtime.solver import PhillipsDessouky

    own, schedule = profile(device), one_f_one_b(STAGES, microbatches)
    began = time.process_time()
    specs = {}
    for key, curve in own.curves.items():
        options = CandidateExecutionOptions(
            options=[
                ExecutionOption(
                    real_time=point.seconds,
                    unit_time=GRID_SECONDS[device],
                    cost=effective(point, own.blocking_watts),
                    knob=point.clock_mhz,
                )
                for point in curve.points
            ]
        )
        model = ExponentialModel(options, search_strategy="best")
        specs[key] = OperationSpec(options=options, cost_model=model)
    count = len(schedule.operations)
    graph = networkx.DiGraph()
    operations = [Operation(spec=specs[each.key]) for each in schedule.operations]
    for index, operation in enumerate(operations):
        graph.add_node(index, op=operation)
    graph.add_node(count, op=DummyOperation())
    graph.add_node(count + 1, op=DummyOperation())
    graph.add_edges_from(schedule.edges)
    graph.add_edges_from((count, i) for i in range(count) if not schedule.predecessors[i])
    graph.add_edges_from((i, count + 1) for i in range(count) if not schedule.successors[i])
    graph.graph["source_node"], graph.graph["sink_node"] = count, count + 1
    spent, rivals = 0.0, []
    for _ in PhillipsDessouky(graph).run():
        spent += time.process_time() - began
        rivals.append(_judged(own, schedule, [each.assigned_knob for each in operations]))
        began = time.process_time()
    return rivals, spent


def _judged(own: Profile, schedule: Schedule, clocks: Sequence[int]) -> Rival:
    points = [
        own.curve(each.key).at(clock)
        for each, clock in zip(schedule.operations, clocks, strict=True)
    ]
    seconds = schedule.makespan([point.seconds for point in points])
    joules = sum(effective(point, own.blocking_watts) for point in points)
    return Rival(seconds, joules + STAGES * own.blocking_watts * seconds)


def _case_bars(found: Course, data: Path | None) -> Iterator[Bar]:
    bound = "linear bound"
    name = f"energy above the bound, {found.name}"
    yield _predicted(at_most(f"{name}, mean", statistics.mean(found.gaps), "%", MEAN_GAP, bound))
    yield _predicted(at_most(f"{name}, largest", max(found.gaps), "%", LARGEST_GAP, bound))
    if found.microbatches in SECONDS and len(found.plans) == POINTS:
        limit = SECONDS[found.microbatches]
        peer = "lowtime: 27 to 83 s at 12, unfinished after 2800 s at 96"
        yield at_most(f"whole frontier, {found.name}", found.seconds, "s", limit, peer)
    if data is None:
        return
    rivals = published(found.device, found.microbatches, data / "perseus_frontier")
    name = f"energy above Perseus' plan, {found.name}, largest"
    watts = profile(found.device).blocking_watts
    over = excess(found.plans, rivals, watts)
    peer = f"published frontier, {len(over)} of {len(found.plans)} deadlines that it meets"
    yield _predicted(at_most(name, max(over), "%", 0.0, peer))


def _lowtime_bars(found: Course) -> Iterator[Bar]:
    name = f"energy above lowtime's plan, {found.name}, largest"
    if not importlib.util.find_spec("lowtime"):
        yield Bar(name, None, "%", "<= 0", False, "lowtime is not installed", "predicted")
        return
    rivals, seconds = lowtime(found.device, found.microbatches)
    over = excess(found.plans, rivals, profile(found.device).blocking_watts)
    peer = f"lowtime in steps of 1 ms, {seconds:.0f} s, {len(over)} of {len(found.plans)} deadlines"
    yield _predicted(at_most(name, max(over), "%", 0.0, peer))
    name = f"energy above lowtime's plan, {found.name}, mean"
    yield _predicted(at_most(name, statistics.mean(over), "%", 0.0, peer))


def _predicted(bar: Bar) -> Bar:
    return replace(bar, kind="predicted")


def frontier_bars(quick: bool, data: Path | None) -> Iterator[Bar]:
    """Gaps, times and comparisons of all cases; with `quick`, of a few deadlines of the small ones.

    Yields:
        Of each case mean and largest gap, planning time, and energies against Perseus; then the
        mean over all cases.
    """
    gaps: list[float] = []
    for device in DEVICES:
        for microbatches in MICROBATCHES[:1] if quick else MICROBATCHES:
            found = course(device, microbatches, 7 if quick else POINTS)
            gaps += found.gaps
            yield from _case_bars(found, data)
            if microbatches == MICROBATCHES[0] and not quick:
                yield from _lowtime_bars(found)
    name = "energy above the bound, mean over all cases"
    yield _predicted(at_most(name, statistics.mean(gaps), "%", MEAN_GAP, "linear bound"))
