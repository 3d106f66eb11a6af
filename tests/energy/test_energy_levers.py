"""Levers on energy, and the choice of a power cap."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.energy.cost import cap_effect, power_at
from outlast.energy.example import profile
from outlast.energy.levers import (
    Baseline,
    CapGoal,
    CapPoint,
    Lever,
    choose_cap,
    compare,
    next_cap,
    search_cap,
)
from outlast.energy.levers.builders import (
    Failures,
    Site,
    batch_lever,
    cap_lever,
    checkpoint_lever,
    clock_lever,
    curve_lever,
    guard_lever,
    precision_lever,
    probed_cap_lever,
    rank_lever,
)
from outlast.energy.model.constants import DeviceConstants
from outlast.energy.model.work import Work
from outlast.energy.profile import Key
from outlast.errors import EnergyError

A40 = DeviceConstants(
    name="A40",
    top_clock_mhz=1740.0,
    static_watts=90.0,
    knee_mhz=1139.0,
    knee_per_ghz=0.44,
    power_limit_watts=300.0,
    blocking_watts=70.38,
    peak_flop_per_s=1.2e14,
    memory_bytes_per_s=6e11,
)
BASE = Baseline(seconds=2.0, joules=600.0, progress=1000.0)
ACTIVITY = 0.12


def lever(name: str, joules: float, progress: float = 1.0, spread: float = 0.0) -> Lever:
    return Lever(
        name=name,
        seconds_factor=1.0,
        joules_factor=joules,
        progress_factor=progress,
        interval=(1.0 - spread, 1.0 + spread),
    )


def test_levers_are_ranked_by_joules_per_progress_not_per_step() -> None:
    table = compare([lever("half the energy", 0.5, 0.4), lever("a tenth less", 0.9)], BASE)
    assert [row.lever.name for row in table.rows] == [
        "a tenth less",
        "as it is",
        "half the energy",
    ]
    assert table.rows[0].joules_per_progress == pytest.approx(0.54)
    assert table.rows[2].saving == pytest.approx(-0.25)
    assert table.advice == "a tenth less saves 10.0% of the joules per token (modelled)"
    assert "half the energy" in str(table)


def test_overlapping_intervals_are_not_told_apart() -> None:
    table = compare([lever("a", 0.8, spread=0.05), lever("b", 0.82, spread=0.05)], BASE)
    assert table.ties == (("a", "b"),)
    assert table.advice.endswith("not told apart from b")
    weak = compare([lever("c", 0.97, spread=0.05)], BASE)
    assert not weak.rows[0].told_apart
    assert "not told apart from leaving it as it is" in weak.advice
    assert compare([lever("d", 1.1)], BASE).advice.startswith("no lever saves")


factors = st.floats(0.1, 10.0)


@given(st.lists(st.tuples(factors, factors, factors), max_size=6), st.randoms())
def test_order_of_the_levers_does_not_matter(drawn, shuffler: random.Random) -> None:
    levers = [
        Lever(name=f"lever {i}", seconds_factor=a, joules_factor=b, progress_factor=c)
        for i, (a, b, c) in enumerate(drawn)
    ]
    shuffled = levers.copy()
    shuffler.shuffle(shuffled)
    table = compare(levers, BASE)
    assert compare(shuffled, BASE) == table
    costs = [row.joules_per_progress for row in table.rows]
    assert costs == sorted(costs)


def test_wrong_levers_are_refused() -> None:
    with pytest.raises(EnergyError, match="lever a occurs twice"):
        compare([lever("a", 0.5), lever("a", 0.6)], BASE)
    with pytest.raises(EnergyError, match=r"joules_factor = nan of lever a"):
        lever("a", math.nan)
    with pytest.raises(EnergyError, match="does not contain 1"):
        Lever(name="a", seconds_factor=1.0, joules_factor=1.0, interval=(1.1, 1.2))


def test_a_lower_clock_saves_energy_and_costs_time_on_the_measured_curve() -> None:
    curve = profile("a40").curve(Key(0, "forward"))
    slow = curve_lever(curve, 1200)
    assert slow.seconds_factor > 1.0
    assert slow.joules_factor < 0.9
    with pytest.raises(EnergyError, match="not in the profile"):
        curve_lever(curve, 1)


def test_clock_and_cap_levers_follow_the_device_model() -> None:
    slow = clock_lever(A40, ACTIVITY, 1100.0)
    assert slow.seconds_factor > 1.1
    assert slow.joules_factor < 0.96
    assert cap_lever(A40, ACTIVITY, 300.0).joules_factor == pytest.approx(1.0)
    bound = clock_lever(A40, ACTIVITY, 1100.0, compute_share=0.0)
    assert bound.seconds_factor == 1.0
    assert bound.joules_factor < slow.joules_factor


def test_precision_and_rank_change_the_roofline() -> None:
    site = Site(
        constants=A40,
        work=Work(flops=1.2e13, memory_bytes=6e9),
        compute_watts=150.0,
        memory_watts=40.0,
    )
    fast = precision_lever("fp8", site, rate_factor=2.0, bytes_factor=0.5)
    assert fast.seconds_factor == pytest.approx(0.5)
    assert fast.joules_factor == pytest.approx(0.5)
    same = rank_lever("rank 64", site, flops_factor=0.5, bytes_factor=1.0, progress_factor=0.5)
    table = compare([fast, same], BASE)
    assert table.rows[0].lever.name == "fp8"
    assert table.rows[-1].lever.name == "rank 64"


def test_a_batch_far_above_the_critical_one_wastes_energy() -> None:
    small = batch_lever(2000, 1000, 1e9, fixed_joules_share=0.1)
    large = batch_lever(2000, 1000, 500.0, fixed_joules_share=0.1)
    table = compare([small], BASE)
    assert table.rows[0].lever is small
    assert table.rows[0].saving == pytest.approx(0.05, abs=1e-3)
    assert large.joules_factor / large.progress_factor > 1.5


def test_checkpoints_are_cheapest_at_youngs_interval() -> None:
    failures = Failures(save_seconds=20.0, restart_seconds=60.0, mean_seconds=36000.0)
    best = math.sqrt(2 * 20.0 * 36000.0)
    for other in (best / 2, best * 2):
        assert checkpoint_lever(other, best, failures).joules_factor > 1.0
    cheap = replace(failures, save_watts_factor=0.3)
    assert cheap.waste(best)[1] < failures.waste(best)[1]


def test_a_guard_costs_energy_unless_faults_are_frequent() -> None:
    rare = guard_lever("guard", seconds_overhead=0.03, joules_overhead=0.04)
    assert compare([rare], BASE).rows[0].lever.name == "as it is"
    often = guard_lever(
        "guard",
        seconds_overhead=0.03,
        joules_overhead=0.04,
        faults_per_step=1e-3,
        redone_steps=100.0,
        coverage=0.99,
    )
    assert compare([often], BASE).rows[0].lever.name == "guard"


CAPS = tuple(float(cap) for cap in range(125, 325, 25))


def modelled(activity: float):
    def probe(cap: float) -> CapPoint:
        seconds, joules = cap_effect(A40, activity, cap, compute_share=0.9)
        uncapped = min(300.0, power_at(A40, activity, 1740.0))
        return CapPoint(cap, 100.0 * seconds, uncapped * joules / seconds)

    return probe


@pytest.mark.parametrize("activity", [0.1, 0.05, 0.02])
@pytest.mark.parametrize("goal", [CapGoal(0.5), CapGoal(1.0, 1.03)])
def test_three_probes_find_a_cap_within_two_percent_of_the_sweep(
    activity: float, goal: CapGoal
) -> None:
    probe = modelled(activity)
    asked = []
    choice = search_cap(lambda cap: asked.append(cap) or probe(cap), CAPS, goal)
    assert len(asked) <= 3
    assert asked[0] == 300.0
    top = probe(300.0)
    sweep = min(goal.cost(probe(cap), top) for cap in CAPS)
    assert goal.cost(choice.point, top) <= 1.02 * sweep


def test_choice_respects_the_time_limit_and_says_what_it_costs() -> None:
    points = [CapPoint(300, 10.0, 290), CapPoint(250, 10.2, 245), CapPoint(200, 11.0, 198)]
    free, limited = choose_cap(points, CapGoal(1.0)), choose_cap(points, CapGoal(1.0, 1.03))
    assert free.point.cap_watts == 200
    assert limited.point.cap_watts == 250
    assert limited.seconds_factor == pytest.approx(1.02)
    row = compare([probed_cap_lever(limited)], BASE).rows[0]
    assert (row.lever.name, row.lever.kind) == ("cap 250 W", "measured")
    assert row.saving == pytest.approx(1 - 245 * 10.2 / 2900)
    assert str(limited) == "250 W: -13.8% energy, +2.0% time (probed 200, 250, 300 W)"


def test_a_cap_above_the_draw_is_said_not_to_bite() -> None:
    choice = search_cap(lambda cap: CapPoint(cap, 10.0, 90.0), CAPS)
    assert not choice.bites
    assert str(choice).startswith("no cap bites: the work draws 90 W")


def test_the_highest_cap_comes_first_and_known_caps_are_not_probed_again() -> None:
    goal = CapGoal()
    assert next_cap([], CAPS, goal) == 300.0
    with pytest.raises(EnergyError, match="probe 300 W first"):
        next_cap([CapPoint(200, 1.0, 190)], CAPS, goal)
    pair = [CapPoint(300, 1.0, 290), CapPoint(200, 1.1, 199)]
    assert next_cap(pair, (300, 200), goal) is None
    with pytest.raises(EnergyError, match="probed twice"):
        choose_cap([pair[0], pair[0]])
    with pytest.raises(EnergyError, match=r"slowdown = 0\.97 is below 1"):
        CapGoal(slowdown=0.97)
