"""What the planner promises whatever the budget: deadlines, bounds and words."""

from dataclasses import replace

import pytest

from outlast.energy import example
from outlast.energy.frontier.planner import EnergyPlanner
from outlast.energy.profile import Curve, Key, Point, Profile
from outlast.energy.schedule.dag import Operation, Schedule
from outlast.energy.schedule.pipelines import one_f_one_b
from outlast.errors import EnergyError

PROFILE = example.profile("a100")
SCHEDULE = one_f_one_b(4, 4)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"deadline": 0.2}, "at the fastest clocks the step takes"),
        ({"deadline": "soon"}, 'say e.g. 3.2 or "+2%"'),
        ({"deadline": -1.0}, "is not a time"),
        ({"deadline": float("nan")}, "is not a time"),
        ({"switches": "per_stages"}, "did you mean per_stage?"),
        ({"switch_seconds": -0.1}, "switch_seconds = -0.1 must be finite"),
        ({"margin": 1.0}, "margin = 1 must be below 1"),
        ({"deadline": "+1%", "margin": 0.05}, "shortest feasible deadline is"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(setting, words: str) -> None:
    with pytest.raises(EnergyError) as caught:
        EnergyPlanner(PROFILE).plan(SCHEDULE, **setting)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_or_circular_schedule_is_refused() -> None:
    with pytest.raises(EnergyError, match="no operations"):
        EnergyPlanner(PROFILE).plan(Schedule((), (), 1))
    two = tuple(Operation(0, 0, phase, 0) for phase in ("forward", "backward"))
    with pytest.raises(EnergyError, match="circle"):
        EnergyPlanner(PROFILE).plan(Schedule(two, ((0, 1), (1, 0)), 1))


def test_a_margin_ends_the_step_earlier_and_costs_energy() -> None:
    plain = EnergyPlanner(PROFILE).plan(SCHEDULE, "+5%")
    careful = EnergyPlanner(PROFILE).plan(SCHEDULE, "+5%", margin=0.02)
    assert careful.seconds <= careful.deadline_seconds * 0.98 * (1 + 1e-9)
    assert careful.deadline_seconds == plain.deadline_seconds
    assert careful.joules > plain.joules
    assert careful.bound_joules == pytest.approx(plain.bound_joules)


def test_different_devices_in_one_pipeline_are_planned_together() -> None:
    fast, slow = example.profile("a100"), example.profile("a40")
    curves = {key: (slow if key.stage else fast).curve(key) for key in fast.curves}
    plan = EnergyPlanner(Profile(curves, 80)).plan(one_f_one_b(2, 3), "+5%")
    assert 0 <= plan.gap < 0.05
    assert plan.saving > 0.1


def test_operations_without_a_clock_keep_their_time() -> None:
    work, link = Operation(0, 0, "forward", 0), Operation(-1, 0, "transfer", 0)
    curves = {Key(0, "forward"): PROFILE.curve(Key(0, "forward"))}
    curves[Key(0, "transfer")] = Curve((Point(0, 0.5, 0.0),))
    profile = replace(PROFILE, curves=curves)
    for switches in ("none", "per_stage", "free"):
        plan = EnergyPlanner(profile).plan(
            Schedule((work, link), ((0, 1),), 1), "+3%", switches=switches
        )
        assert plan.clocks_mhz[1] == 0
        assert plan.seconds <= plan.deadline_seconds


def test_a_frontier_can_end_where_slowing_down_no_longer_pays() -> None:
    frontier = EnergyPlanner(PROFILE).frontier(SCHEDULE, points=4, longest="least energy")
    assert frontier.plans[-1].deadline_seconds == pytest.approx(frontier.longest_useful_seconds)
    assert frontier.plans[-1].gap == pytest.approx(0, abs=1e-6)
    with pytest.raises(EnergyError, match="points = 0"):
        EnergyPlanner(PROFILE).frontier(SCHEDULE, points=0)
    with pytest.raises(EnergyError, match="below the shortest deadline"):
        EnergyPlanner(PROFILE).frontier(SCHEDULE, longest=0.1)
