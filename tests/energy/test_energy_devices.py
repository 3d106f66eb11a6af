"""Devices without hardware: what they draw, when their clocks change, and plans carried out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.energy import EnergyPlanner, example
from outlast.energy.plan import ClockPlan, replay_profile
from outlast.energy.profile import Curve, Key, Point, Profile
from outlast.energy.schedule import Operation, Schedule, one_f_one_b
from outlast.errors import EnergyError

FORWARD = Key(0, "forward")
BACKWARD = Key(0, "backward")
# 1 s at 100 W, or 2 s at 40 W.
SMALL = Profile(
    {
        FORWARD: Curve((Point(500, 2.0, 80.0), Point(1000, 1.0, 100.0))),
        BACKWARD: Curve((Point(500, 4.0, 160.0), Point(1000, 2.0, 200.0))),
    },
    blocking_watts=20.0,
    device="a small device",
)


def plan_of(clocks, deadline_seconds):
    return ClockPlan(
        clocks_mhz=tuple(clocks),
        seconds=deadline_seconds,
        deadline_seconds=deadline_seconds,
        joules=1.0,
        bound_joules=1.0,
        fastest_joules=1.0,
        switches=0,
        kind="measured",
    )


@pytest.mark.parametrize("name", ["a100", "a40"])
@pytest.mark.parametrize("deadline", ["+0%", "+8%"])
def test_a_replayed_plan_takes_the_time_and_energy_that_were_planned(name, deadline):
    profile = example.profile(name)
    schedule = one_f_one_b(8, 4)
    plan = EnergyPlanner(profile).plan(schedule, deadline=deadline)
    run = replay_profile(plan, schedule, profile)
    assert run.seconds == pytest.approx(plan.seconds, rel=1e-9)
    assert run.joules == pytest.approx(plan.joules, rel=1e-9)
    assert run.on_time
    assert run.kind == "replayed"
    assert len(run.device_joules) == 8


def test_a_plan_that_reckons_with_switch_latency_is_on_time_with_it():
    profile = example.profile("a100")
    schedule = one_f_one_b(8, 2)
    plan = EnergyPlanner(profile).plan(schedule, deadline="+5%", switch_seconds=0.002)
    run = replay_profile(plan, schedule, profile, switch_seconds=0.002)
    # The old clock continues during a switch, where the plan reckons with standing still.
    assert run.seconds <= plan.seconds * (1 + 1e-9)
    assert run.on_time
    assert run.switches == plan.switches > 0


def test_switch_latency_shows_in_a_replay_and_a_late_step_says_so():
    schedule = Schedule(
        (Operation(0, 0, "forward", 0), Operation(0, 0, "backward", 0)), ((0, 1),), devices=1
    )
    # The forward begins at 500 MHz, left from the step before, for 0.2 s: a tenth of its work.
    plan = plan_of([1000, 500], deadline_seconds=5.0)
    assert replay_profile(plan, schedule, SMALL).seconds == pytest.approx(1.0 + 4.0)
    late = replay_profile(plan, schedule, SMALL, switch_seconds=0.2)
    assert late.seconds == pytest.approx(0.2 + 0.9 * 1.0 + 0.2 + 0.9 * 4.0)
    assert late.on_time
    assert late.switches == 2
    tight = replay_profile(plan_of([1000, 500], 4.8), schedule, SMALL, switch_seconds=0.2)
    assert not tight.on_time


def test_waiting_devices_draw_blocking_power_until_the_deadline():
    schedule = Schedule(
        (Operation(0, 0, "forward", 0), Operation(1, 0, "forward", 0)), ((0, 1),), devices=2
    )
    run = replay_profile(plan_of([1000, 500], 4.0), schedule, SMALL)
    assert run.seconds == pytest.approx(3.0)
    assert run.device_joules == pytest.approx((100.0 + 3 * 20.0, 20.0 + 80.0 + 20.0))


def test_transfers_take_time_and_no_energy_and_need_a_duration():
    schedule = Schedule(
        (
            Operation(0, 0, "forward", 0),
            Operation(-1, 0, "transfer", 0),
            Operation(1, 0, "forward", 0),
        ),
        ((0, 1), (1, 2)),
        devices=2,
    )
    plan = plan_of([1000, 0, 1000], 3.0)
    transfer = {Key(0, "transfer"): Curve((Point(0, 0.5, 3.0),))}
    run = replay_profile(plan, schedule, replace(SMALL, curves={**SMALL.curves, **transfer}))
    assert run.seconds == pytest.approx(2.5)
    assert run.joules == pytest.approx(2 * (100.0 + 2 * 20.0))
    with pytest.raises(EnergyError, match="has no stage 0 transfer"):
        replay_profile(plan, schedule, SMALL)


def test_a_plan_of_another_schedule_or_other_clocks_is_refused():
    schedule = one_f_one_b(2, 2)
    with pytest.raises(EnergyError, match="clocks for 3 operations, but the schedule has 8"):
        replay_profile(plan_of([1000] * 3, 1.0), schedule, SMALL)
    one = Schedule((Operation(0, 0, "forward", 0),), (), devices=1)
    with pytest.raises(EnergyError, match="clock = 700 MHz is not in the profile"):
        replay_profile(plan_of([700], 1.0), one, SMALL)
    with pytest.raises(EnergyError, match="switch_seconds = -1"):
        replay_profile(plan_of([500], 1.0), one, SMALL, switch_seconds=-1)
    with pytest.raises(EnergyError, match="has no stage 3 forward"):
        replay_profile(
            plan_of([500], 1.0), Schedule((Operation(0, 3, "forward", 0),), (), 1), SMALL
        )


@given(latency=st.floats(0.0, 3.0), work=st.lists(st.sampled_from([500, 1000]), min_size=1))
def test_replay_shares_an_operation_between_the_clocks_that_ran_it(latency, work):
    operations = tuple(Operation(0, 0, "forward", batch) for batch in range(len(work)))
    schedule = Schedule(operations, tuple((i, i + 1) for i in range(len(work) - 1)), devices=1)
    run = replay_profile(plan_of(work, 0.1), schedule, SMALL, switch_seconds=latency)
    assert len(work) - 1e-9 <= run.seconds <= 2.0 * len(work) + 1e-9
    # What is done at 500 MHz takes 2 s and 80 J per operation, the rest 1 s and 100 J.
    assert run.joules == pytest.approx(100.0 * len(work) - 20.0 * (run.seconds - len(work)))
