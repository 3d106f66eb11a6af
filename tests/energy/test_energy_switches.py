"""Plans with few changes of clock: the best of their budget, and true to their latency."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.energy import example
from outlast.energy.operations import SwitchDelays
from outlast.energy.planner import EnergyPlanner
from outlast.energy.profile import Curve, Key, Point, Profile, effective
from outlast.energy.schedule import one_f_one_b
from outlast.errors import EnergyError

SCHEDULE = one_f_one_b(3, 4)
PROFILE = example.profile("a100")
CLOCKS = (855, 1080, 1230, 1410)
SMALL = Profile(
    {
        key: Curve(tuple(point for point in curve.points if point.clock_mhz in CLOCKS))
        for key, curve in PROFILE.curves.items()
    },
    PROFILE.blocking_watts,
)


def points_of(clocks, schedule=SCHEDULE, profile=SMALL):
    return [
        profile.curve(each.key).at(clock)
        for each, clock in zip(schedule.operations, clocks, strict=True)
    ]


@pytest.mark.parametrize("deadline", [1.02, 1.05, 1.1, 1.2])
def test_one_clock_per_stage_is_the_best_of_all_combinations(deadline: float) -> None:
    top = EnergyPlanner(SMALL).plan(SCHEDULE).deadline_seconds
    plan = EnergyPlanner(SMALL).plan(SCHEDULE, top * deadline, switches="per_stage")
    watts = SMALL.blocking_watts
    best = float("inf")
    for choice in itertools.product(CLOCKS, repeat=3):
        points = points_of([choice[each.device] for each in SCHEDULE.operations])
        if SCHEDULE.makespan([point.seconds for point in points]) <= top * deadline:
            best = min(best, sum(effective(point, watts) for point in points))
    assert plan.joules == pytest.approx(best + 3 * watts * top * deadline, rel=1e-3)
    assert plan.budget_bound_joules <= plan.joules * (1 + 1e-9)
    assert plan.switches == 0


@settings(max_examples=8, deadline=None)
@given(share=st.floats(1.0, 1.2))
def test_more_switches_never_cost_energy_and_no_plan_is_late(share: float) -> None:
    planner = EnergyPlanner(SMALL)
    deadline = planner.plan(SCHEDULE).deadline_seconds * share
    none, stage, phase = (
        planner.plan(SCHEDULE, deadline, switches=each)
        for each in ("none", "per_stage", "per_phase")
    )
    assert stage.joules <= none.joules * 1.001
    assert phase.joules <= stage.joules * 1.001
    for plan in (none, stage, phase):
        takes = SCHEDULE.makespan([point.seconds for point in points_of(plan.clocks_mhz)])
        assert takes <= deadline * (1 + 1e-9)
        assert plan.joules >= plan.bound_joules * (1 - 1e-9)
    assert len(set(none.clocks_mhz)) == 1


@pytest.mark.parametrize("switches", ["per_phase", "free"])
@pytest.mark.parametrize("switch_seconds", [0.0005, 0.02])
def test_the_deadline_holds_with_the_time_that_changes_take(switches, switch_seconds) -> None:
    planner = EnergyPlanner(SMALL)
    plan = planner.plan(SCHEDULE, "+8%", switches=switches, switch_seconds=switch_seconds)
    seconds, changes = [], 0
    last = {}
    for device in range(3):
        own = [i for i in SCHEDULE.order if SCHEDULE.operations[i].device == device]
        last[device] = plan.clocks_mhz[own[-1]]
    for index, point in enumerate(points_of(plan.clocks_mhz)):
        device = SCHEDULE.operations[index].device
        changed = last[device] != point.clock_mhz
        last[device] = point.clock_mhz
        changes += changed
        seconds.append(point.seconds + switch_seconds * changed)
    assert plan.switches == changes
    assert plan.seconds == pytest.approx(SCHEDULE.makespan(seconds))
    assert plan.seconds <= plan.deadline_seconds * (1 + 1e-9)


def test_changes_that_take_long_are_merged_away() -> None:
    planner = EnergyPlanner(PROFILE)
    often = planner.plan(SCHEDULE, "+5%")
    seldom = planner.plan(SCHEDULE, "+5%", switch_seconds=0.05)
    assert seldom.switches < often.switches
    one_each = planner.plan(SCHEDULE, "+5%", switches="per_stage")
    assert seldom.joules <= one_each.joules * 1.001


def test_the_way_back_to_the_first_clock_counts() -> None:
    schedule = one_f_one_b(1, 1)
    points = [Point(1000, 1, 100), Point(1400, 1, 200)]
    assert SwitchDelays(schedule, 0.1).changes(points) == [True, True]
    assert SwitchDelays(schedule, 0.1).seconds(points) == [1.1, 1.1]


def test_an_impossible_budget_says_the_shortest_deadline() -> None:
    curves = {
        Key(0, "forward"): Curve((Point(1000, 1.0, 100), Point(1400, 0.9, 150))),
        Key(0, "backward"): Curve((Point(1000, 1.9, 190), Point(1400, 2.0, 300))),
    }
    profile = Profile(curves, 50)
    schedule = one_f_one_b(1, 1)
    with pytest.raises(EnergyError, match=r"shortest feasible deadline is 2\.9 s"):
        EnergyPlanner(profile).plan(schedule, 2.85, switches="none")
    assert EnergyPlanner(profile).plan(schedule, 2.85).seconds == pytest.approx(2.8)


def test_devices_without_a_common_clock_cannot_share_one() -> None:
    curves = {
        Key(stage, phase): Curve((Point(clock, 1.0, 100), Point(clock + 300, 0.9, 150)))
        for stage, clock in ((0, 1000), (1, 1010))
        for phase in ("forward", "backward")
    }
    planner = EnergyPlanner(Profile(curves, 50))
    with pytest.raises(EnergyError, match="measure them at the same clocks"):
        planner.plan(one_f_one_b(2, 2), switches="none")
    assert planner.plan(one_f_one_b(2, 2), switches="per_stage").switches == 0


@pytest.mark.parametrize("late", [1e-6, 1e-7, 1e-8])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_clock_that_is_late_by_a_hair_is_not_taken(late: float, scale: float) -> None:
    curve = Curve(
        (Point(1000, scale * (1 + late), scale * 100.0), Point(1400, scale, scale * 150.0))
    )
    profile = Profile({Key(0, phase): curve for phase in ("forward", "backward")}, 50)
    plan = EnergyPlanner(profile).plan(one_f_one_b(1, 1), 2 * scale, switches="none")
    assert set(plan.clocks_mhz) == {1400}
    assert plan.seconds <= plan.deadline_seconds * (1 + 1e-9)
