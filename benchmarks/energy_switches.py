"""Few changes of clock, noisy profiles and stragglers: what each costs on GPT-3 175B's profiles.

`benchmarks/energy.py` composes these. All joules are predicted from measured profiles. The table of
budgets is printed by `print_prices`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
from harness import Bar, at_least, at_most
from rich.console import Console
from rich.table import Table

from outlast.energy import example
from outlast.energy.plan import SWITCHES, ClockPlan
from outlast.energy.planner import EnergyPlanner
from outlast.energy.profile import (
    MARGIN_PER_NOISE,
    Curve,
    Point,
    Profile,
    effective,
    margin_for,
    smoothed,
)
from outlast.energy.schedule import Schedule, one_f_one_b
from outlast.errors import EnergyError

SAVINGS = {1.02: 0.12, 1.05: 0.18, 1.10: 0.23}
"""Time above that of top clocks, and what one clock per stage should save."""

# Perseus, SOSP'24, artefact: savings of executed plans with such a straggler. Other models than
# ours, so they say what is usual and are no bar.
_MEASURED = {
    "a100": "Perseus measured 0.160 on gpt3-xl, 0.169 on bert-huge",
    "a40": "Perseus measured 0.260 on gpt3-2.7b, 0.226 on bert-huge",
}
UNSEEN = 1000
"""First of the seeds that had no part in finding the margin."""


@dataclass(frozen=True)
class Priced:
    """A plan and the case that it is for."""

    device: str
    microbatches: int
    slower: float
    switch_seconds: float
    plan: ClockPlan


def priced(devices: tuple[str, ...], microbatches: tuple[int, ...]) -> list[Priced]:
    """Plans for every budget; free ones with a latency of 10 ms too."""
    found = []
    for device in devices:
        planner = EnergyPlanner(example.profile(device))
        for count in microbatches:
            schedule = one_f_one_b(8, count)
            top = _top_seconds(schedule, planner.profile)
            for slower in SAVINGS:
                for budget in (*SWITCHES, "free after 10 ms"):
                    name, _, late = budget.partition(" after ")
                    wait = 0.01 if late else 0.0
                    plan = planner.plan(schedule, top * slower, switches=name, switch_seconds=wait)
                    found.append(Priced(device, count, slower, wait, plan))
    return found


def print_prices(found: list[Priced]) -> None:
    """The price of every budget of switches as a table."""
    table = Table(title="Saving of energy by budget of switches", title_justify="left")
    for column in ("device", "micro-batches", "time", "switches allowed", "latency", "saving"):
        table.add_column(column)
    for column in ("above the bound of all plans", "above the bound of the budget", "changes"):
        table.add_column(column)
    for each in found:
        plan = each.plan
        budget_gap = "same" if plan.budget == "free" else f"{plan.budget_gap:.3%}"
        table.add_row(
            each.device,
            str(each.microbatches),
            f"+{each.slower - 1:.0%}",
            plan.budget,
            f"{each.switch_seconds * 1e3:g} ms",
            f"{plan.saving:.2%}",
            f"{plan.gap:.2%}",
            budget_gap,
            str(plan.switches),
        )
    Console(width=150).print(table)


def switch_bars(found: list[Priced]) -> list[Bar]:
    """Saving with one clock per stage on A100; beside it what no such plan can exceed."""
    bars = []
    for each in found:
        if each.plan.budget != "per_stage" or each.device != "a100":
            continue
        best = 1 - each.plan.budget_bound_joules / each.plan.fastest_joules
        name = f"saving, one clock per stage, +{each.slower - 1:.0%}, {each.microbatches} batches"
        peer = f"no plan with one clock per stage can exceed {best:.4f}"
        bar = at_least(name, each.plan.saving, "share", SAVINGS[each.slower], peer)
        bars.append(replace(bar, kind="predicted"))
    return bars


def noise_bars(seeds: int, slower: tuple[float, ...] = (1.02, 1.05, 1.1)) -> list[Bar]:
    """Deadlines met on the clean profile by plans from noisy ones, and what the margin costs.

    Seeds are others than those by which the margin was found. A deadline that the margin leaves no
    room for is refused; refusals are counted apart.
    """
    bars = []
    schedule = one_f_one_b(8, 12)
    for device in ("a100", "a40"):
        truth = example.profile(device)
        top = _top_seconds(schedule, truth)
        clean = {each: EnergyPlanner(truth).plan(schedule, top * each) for each in slower}
        for noise in (0.01, 0.02):
            met, paid, refused = [], [], 0
            for seed in range(UNSEEN, UNSEEN + seeds):
                measured = _noisy(truth, noise, seed)
                planner, margin = EnergyPlanner(smoothed(measured)), margin_for(measured)
                for each, best in clean.items():
                    try:
                        plan = planner.plan(schedule, top * each, margin=margin)
                    except EnergyError:
                        refused += 1
                        continue
                    takes, joules = _on(truth, schedule, plan)
                    met.append(takes <= top * each * (1 + 1e-9))
                    paid.append(joules / best.joules - 1)
            where = f"{device}, {noise:.0%} noise, {seeds} seeds"
            stated = f"{refused} of {seeds * len(slower)} refused, "
            stated += f"margin about {MARGIN_PER_NOISE * noise:.2%}"
            peer = f"plans without margin from the clean profile; {stated}"
            bars += [
                replace(
                    at_least(f"deadline met, {where}", float(np.mean(met)), "share", 0.95, peer),
                    kind="simulated",
                ),
                Bar(
                    f"energy paid for the margin, {where}",
                    round(float(np.mean(paid)), 5),
                    "share",
                    "none",
                    True,
                    peer,
                    "simulated",
                ),
            ]
    return bars


def straggler_bars(microbatches: int) -> list[Bar]:
    """Time of an answer from a cached frontier, and the saving beside a straggler."""
    bars = []
    schedule = one_f_one_b(8, microbatches)
    for device in ("a100", "a40"):
        frontier = EnergyPlanner(example.profile(device)).frontier(
            schedule, points=20, longest="least energy"
        )
        late = frontier.plans[0].seconds * 1.1
        took = []
        for _ in range(20):
            began = time.perf_counter()
            answer = frontier.with_straggler(late)
            took.append(time.perf_counter() - began)
        where = f"{device}, {microbatches} batches"
        bars += [
            at_most(f"answer for a straggler, {where}", max(took), "s", 0.1, "cached frontier"),
            Bar(
                f"saving beside a 1.1x straggler, {where}",
                round(answer.saving, 4),
                "share",
                "reported",
                True,
                _MEASURED[device],
                "predicted",
            ),
        ]
    return bars


def _top_seconds(schedule: Schedule, profile: Profile) -> float:
    return schedule.makespan([profile.curve(each.key).top.seconds for each in schedule.operations])


def _on(profile: Profile, schedule: Schedule, plan: ClockPlan) -> tuple[float, float]:
    """Seconds and joules that a plan takes on another profile than its own."""
    points = [
        profile.curve(each.key).at(clock)
        for each, clock in zip(schedule.operations, plan.clocks_mhz, strict=True)
    ]
    watts = profile.blocking_watts
    joules = sum(effective(point, watts) for point in points)
    waiting = schedule.devices * watts * plan.deadline_seconds
    return schedule.makespan([point.seconds for point in points]), joules + waiting


def _noisy(profile: Profile, noise: float, seed: int) -> Profile:
    source = np.random.default_rng(seed)
    curves = {}
    for key, curve in profile.curves.items():
        factors = np.exp(noise * source.standard_normal((len(curve.points), 2)))
        curves[key] = Curve(
            tuple(
                Point(point.clock_mhz, point.seconds * float(time), point.joules * float(energy))
                for point, (time, energy) in zip(curve.points, factors, strict=True)
            )
        )
    return replace(profile, curves=curves)
