"""What the planner promises whatever the budget: deadlines, bounds and words."""

from dataclasses import replace

import pytest

from outlast.energy import example
from outlast.energy.linear_program import LinearProgram
from outlast.energy.plan import replay_profile
from outlast.energy.planner import EnergyPlanner
from outlast.energy.profile import Curve, Key, Point, Profile
from outlast.energy.schedule import (
    Operation,
    Schedule,
    one_f_one_b,
    sharded,
    with_tail,
    with_transfers,
)
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
        ({"deadline": None}, "is not a time"),
        ({"deadline": True}, "is not a time"),
        ({"deadline": [1.0]}, "is not a time"),
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


def with_links(
    profile: Profile, schedule: Schedule, seconds: float, joules: float = 0.0
) -> Profile:
    """The profile with equal operations on links, and tails that draw no more than waiting."""
    curves = dict(profile.curves)
    for each in schedule.operations:
        if each.device < 0:
            curves[each.key] = Curve((Point(0, seconds, joules),))
        elif each.phase == "tail":
            curves[each.key] = Curve((Point(0, 0.1, 0.1 * profile.blocking_watts),))
    return replace(profile, curves=curves)


@pytest.mark.parametrize(
    "schedule", [with_tail(with_transfers(SCHEDULE)), with_tail(sharded(4)), sharded(3, 2)]
)
@pytest.mark.parametrize("switches", ["free", "per_stage"])
def test_links_free_no_device_from_waiting(schedule: Schedule, switches) -> None:
    profile = with_links(PROFILE, schedule, 0.05)
    plan = EnergyPlanner(profile).plan(schedule, "+3%", switches=switches)
    run = replay_profile(plan, schedule, profile)
    assert plan.joules == pytest.approx(sum(run.device_joules), rel=1e-9)
    assert plan.seconds == pytest.approx(run.seconds)
    assert plan.bound_joules <= plan.joules
    # What a link itself takes comes on top, no more and no less.
    links = sum(each.device < 0 for each in schedule.operations)
    warm = EnergyPlanner(with_links(PROFILE, schedule, 0.05, 2.0)).plan(
        schedule, plan.deadline_seconds, switches=switches
    )
    assert warm.joules == pytest.approx(plan.joules + 2.0 * links)
    assert warm.fastest_joules == pytest.approx(plan.fastest_joules + 2.0 * links)


@pytest.mark.parametrize("switches", ["none", "per_stage", "per_phase", "free"])
@pytest.mark.parametrize("scale", [2.0**-10, 1e-3, 3e-3, 1e3])
def test_plans_do_not_depend_on_how_long_a_step_is(switches, scale: float) -> None:
    plan = EnergyPlanner(PROFILE).plan(SCHEDULE, "+3%", switches=switches)
    curves = {
        key: Curve(tuple(Point(p.clock_mhz, scale * p.seconds, scale * p.joules) for p in c.points))
        for key, c in PROFILE.curves.items()
    }
    scaled = EnergyPlanner(replace(PROFILE, curves=curves)).plan(SCHEDULE, "+3%", switches=switches)
    assert scaled.seconds <= scaled.deadline_seconds * (1 + 1e-9)
    assert scaled.bound_joules == pytest.approx(scale * plan.bound_joules, rel=1e-7)
    # The integer programme may stop anywhere within its gap.
    assert scaled.joules == pytest.approx(scale * plan.joules, rel=1e-3)
    if scale == 2.0**-10:
        # Nothing is rounded then.
        assert scaled.clocks_mhz == plan.clocks_mhz


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seconds": float("nan")}, "seconds = nan, which must be above 0"),
        ({"seconds": 0.0}, "seconds = 0, which must be above 0"),
        ({"joules": float("nan")}, "joules = nan, which must not be below 0"),
        ({"joules": float("inf")}, "joules = inf, which must not be below 0"),
        ({"joules": -1.0}, "joules = -1, which must not be below 0"),
    ],
)
def test_values_that_are_none_are_refused(change, words: str) -> None:
    key = Key(1, "backward")
    first, *others = PROFILE.curve(key).points
    curve = Curve((first._replace(**change), *others))
    profile = replace(PROFILE, curves={**PROFILE.curves, key: curve})
    with pytest.raises(EnergyError, match=f"stage 1 backward at {first.clock_mhz} MHz has {words}"):
        EnergyPlanner(profile).plan(SCHEDULE)


def test_profiles_and_schedules_without_sense_are_refused() -> None:
    key = Key(0, "forward")
    empty = replace(PROFILE, curves={**PROFILE.curves, key: Curve(())})
    with pytest.raises(EnergyError, match="stage 0 forward has no points"):
        EnergyPlanner(empty).plan(SCHEDULE)
    with pytest.raises(EnergyError, match="blocking_watts = nan"):
        EnergyPlanner(replace(PROFILE, blocking_watts=float("nan"))).plan(SCHEDULE)
    link = Profile({Key(0, "send_forward"): Curve((Point(0, 0.1, 0.0),))}, 80.0)
    alone = Schedule((Operation(-1, 0, "send_forward", 0),), (), 1)
    with pytest.raises(EnergyError, match="nothing to plan for links alone"):
        EnergyPlanner(link).plan(alone)
    idle = Profile({Key(0, "tail"): Curve((Point(0, 0.1, 0.0),))}, 0.0)
    with pytest.raises(EnergyError, match="nothing to save"):
        EnergyPlanner(idle).plan(Schedule((Operation(0, 0, "tail", -1),), (), 1))
    two = tuple(Operation(0, 0, "forward", batch) for batch in range(2))
    with pytest.raises(EnergyError):
        EnergyPlanner(PROFILE).plan(Schedule(two, (), 1))
    with pytest.raises(EnergyError):
        EnergyPlanner(PROFILE).plan(Schedule(two, ((0, 5),), 1))


def test_a_throttled_top_clock_does_not_flatter_plans() -> None:
    curves = {
        key: Curve((*curve.points[:-1], Point(curve.top.clock_mhz, 1.05 * curve.top.seconds, 1e3)))
        for key, curve in PROFILE.curves.items()
    }
    below = {key: Curve(curve.points[:-1]) for key, curve in PROFILE.curves.items()}
    schedule = one_f_one_b(2, 2)
    for switches in ("none", "free"):
        throttled, honest = (
            EnergyPlanner(replace(PROFILE, curves=each)).plan(schedule, "+2%", switches=switches)
            for each in (curves, below)
        )
        assert throttled.deadline_seconds == pytest.approx(honest.deadline_seconds)
        assert throttled.fastest_joules == pytest.approx(honest.fastest_joules)
    # A top clock that is slower by less than is noticed stays the baseline.
    top = {
        key: Curve((*c.points[:-1], c.top._replace(seconds=c.points[-2].seconds * 1.0005)))
        for key, c in PROFILE.curves.items()
    }
    plan = EnergyPlanner(replace(PROFILE, curves=top)).plan(schedule)
    seconds = schedule.makespan([top[each.key].top.seconds for each in schedule.operations])
    assert plan.deadline_seconds == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("switches", "deadline", "shortest"), [("none", 2.85, 2.9), ("free", 2.5, 2.8)]
)
def test_the_shortest_deadline_that_is_named_includes_the_margin(
    switches, deadline: float, shortest: float
) -> None:
    curves = {
        Key(0, "forward"): Curve((Point(1000, 1.0, 100), Point(1400, 0.9, 150))),
        Key(0, "backward"): Curve((Point(1000, 1.9, 190), Point(1400, 2.0, 300))),
    }
    planner, schedule = EnergyPlanner(Profile(curves, 50)), one_f_one_b(1, 1)
    with pytest.raises(EnergyError) as caught:
        planner.plan(schedule, deadline / 0.9, switches=switches, margin=0.1)
    assert f"shortest feasible deadline is {shortest / 0.9:.6g} s" in str(caught.value)
    plan = planner.plan(schedule, shortest / 0.9 + 1e-6, switches=switches, margin=0.1)
    assert plan.seconds <= 0.9 * plan.deadline_seconds


def test_a_solver_that_fails_is_not_taken_for_a_short_deadline(monkeypatch) -> None:
    def fails(self, deadline: float):
        raise EnergyError("the linear programme ended as Unknown")

    monkeypatch.setattr(LinearProgram, "solve", fails)
    with pytest.raises(EnergyError, match="ended as Unknown"):
        EnergyPlanner(PROFILE).plan(SCHEDULE, "+5%", margin=0.01)
