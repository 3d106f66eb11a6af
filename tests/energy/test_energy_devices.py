"""Devices without hardware: what they draw, when their clocks change, and plans carried out."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.energy import example
from outlast.energy.devices.analytic import POWER_CAP, AnalyticDevice, Heat, Load
from outlast.energy.devices.plan_replay import replay_plan, replay_profile
from outlast.energy.devices.replay import ReplayDevice
from outlast.energy.frontier.plan import ClockPlan
from outlast.energy.frontier.planner import EnergyPlanner
from outlast.energy.model.constants import DeviceConstants
from outlast.energy.profile import Curve, Key, Point, Profile
from outlast.energy.schedule.dag import Operation, Schedule
from outlast.energy.schedule.pipelines import one_f_one_b
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

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
CONSTANTS = DeviceConstants(
    name="Test GPU",
    top_clock_mhz=1500,
    static_watts=60.0,
    knee_mhz=1000.0,
    knee_per_ghz=0.5,
    power_limit_watts=math.inf,
    blocking_watts=70.0,
)
LOAD = Load(fixed_seconds=0.02, megacycles=100.0, watts_per_mhz=0.2)
NO_LEAKAGE = Heat(leakage_per_kelvin=0.0)


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


def analytic(**settings):
    settings = {"heat": NO_LEAKAGE, "clocks_mhz": (600, 900, 1200, 1500), **settings}
    return AnalyticDevice(settings.pop("constants", CONSTANTS), {FORWARD: LOAD}, **settings)


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
    assert run.energy.kind == "replayed"
    assert len(run.device_joules) == 8


def test_a_plan_that_reckons_with_switch_latency_is_on_time_with_it():
    profile = example.profile("a100")
    schedule = one_f_one_b(8, 2)
    plan = EnergyPlanner(profile).plan(schedule, deadline="+5%", switch_seconds=0.002)
    run = replay_profile(plan, schedule, profile, switch_seconds=0.002)
    # The old clock goes on during a switch, where the plan reckons with standing still.
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
    assert "too late" in tight.energy.flags[0]


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
    devices = [ReplayDevice(SMALL, uuid=f"replay-{index}") for index in range(2)]
    run = replay_plan(plan, schedule, devices, link_seconds={Key(0, "transfer"): 0.5})
    assert run.seconds == pytest.approx(2.5)
    assert run.joules == pytest.approx(2 * (100.0 + 2 * 20.0))
    with pytest.raises(EnergyError, match="stage 0 transfer"):
        replay_plan(plan, schedule, devices)


def test_a_plan_of_another_schedule_and_too_few_devices_are_refused():
    schedule = one_f_one_b(2, 2)
    with pytest.raises(EnergyError, match="clocks for 3 operations, but the schedule has 8"):
        replay_plan(plan_of([1000] * 3, 1.0), schedule, [ReplayDevice(SMALL)] * 2)
    with pytest.raises(EnergyError, match="needs 2 devices, but 1 are given"):
        replay_plan(plan_of([1000] * 8, 1.0), schedule, [ReplayDevice(SMALL)])


@given(latency=st.floats(0.0, 3.0), work=st.lists(st.sampled_from([500, 1000]), max_size=6))
def test_replay_shares_an_operation_between_the_clocks_that_ran_it(latency, work):
    device = ReplayDevice(SMALL, switch_seconds=latency)
    for clock_mhz in work:
        device.lock_clock(clock_mhz)
        ran = device.run(FORWARD)
        assert 1.0 - 1e-9 <= ran.seconds <= 2.0 + 1e-9
        # The share s done at 500 MHz takes 2 s and 80 J per operation, the rest 1 s and 100 J.
        assert ran.joules == pytest.approx(100.0 - 20.0 * (ran.seconds - 1.0))
    assert device.spent_joules == pytest.approx(
        sum(100.0 - 20.0 * (seconds - 1.0) for seconds in [device.now_seconds - len(work) + 1])
        + 100.0 * (len(work) - 1)
    )


@given(st.lists(st.floats(0.0, 0.7), max_size=20))
def test_the_counter_changes_every_100_ms_and_never_runs_ahead(pauses):
    device = ReplayDevice(SMALL)
    for seconds in pauses:
        device.advance(seconds)
        shown = device.read().joules
        assert shown == pytest.approx(20.0 * 0.1 * math.floor(device.now_seconds / 0.1 + 1e-9))
        assert shown <= device.spent_joules + 1e-9


def test_the_counter_interpolates_within_a_long_operation():
    device = ReplayDevice(SMALL)
    device.advance(0.05)
    device.run(FORWARD)  # 100 W up to 1.05 s
    assert device.read().joules == pytest.approx(0.05 * 20.0 + 0.95 * 100.0)


def test_a_replay_device_says_what_it_does_not_know_and_refuses_other_clocks():
    device = ReplayDevice(SMALL)
    state = device.read()
    assert isinstance(state.celsius, Unavailable)
    assert state.watts == 20.0
    assert "replayed" in device.name
    with pytest.raises(EnergyError, match="clock = 700 MHz is not in the profile"):
        device.lock_clock(700)
    with pytest.raises(EnergyError, match="power limit = 100 W cannot be replayed"):
        device.limit_power(100.0)
    with pytest.raises(EnergyError, match="has no stage 3 forward"):
        device.run(Key(3, "forward"))
    device.lock_clock(500)
    device.unlock()
    assert device.read().sm_clock_mhz == 1000


def test_time_cannot_go_back_or_stand_still_for_ever():
    for device in (ReplayDevice(SMALL), analytic()):
        for seconds in (-1.0, math.inf, math.nan):
            with pytest.raises(EnergyError, match="cannot pass"):
                device.advance(seconds)


@pytest.mark.parametrize("clock_mhz", [600, 900, 1200, 1500])
def test_analytic_time_and_power_follow_the_formulas(clock_mhz):
    device = analytic()
    device.lock_clock(clock_mhz)
    ran = device.run(FORWARD)
    voltage = 1.0 + 0.5 * max(0, clock_mhz - 1000) / 1000
    assert ran.seconds == pytest.approx(0.02 + 100.0 / clock_mhz)
    assert ran.joules / ran.seconds == pytest.approx(60.0 + 0.2 * clock_mhz * voltage**2)
    assert device.read().throttle_reasons == ()


def test_a_power_limit_lowers_the_effective_clock_and_is_named():
    device = analytic()
    device.limit_power(300.0)
    ran = device.run(FORWARD)
    state = device.read()
    assert ran.joules / ran.seconds == pytest.approx(300.0, rel=1e-3)
    assert 900 < state.sm_clock_mhz < 1500
    assert state.throttle_reasons == (POWER_CAP,)
    assert ran.seconds == pytest.approx(0.02 + 100.0 / state.sm_clock_mhz, rel=1e-3)
    # Above the cap, asking for more changes nothing: those clocks are free to drop.
    device.lock_clock(1200)
    assert device.run(FORWARD).seconds == pytest.approx(ran.seconds, rel=1e-6)
    device.unlock()
    assert device.run(FORWARD).seconds == pytest.approx(0.02 + 100.0 / 1500)
    with pytest.raises(EnergyError, match="power limit = 50 W is not above the 70 W"):
        device.limit_power(50.0)


def test_a_warm_device_leaks_more_and_cools_when_it_waits():
    heat = Heat(ambient_celsius=30.0, kelvin_per_watt=0.1, leakage_per_kelvin=0.01)
    device = analytic(heat=heat)
    cold = device.run(FORWARD)
    device.advance(200.0, FORWARD)
    warm = device.run(FORWARD)
    celsius = device.read().celsius
    assert celsius == pytest.approx(30.0 + 0.1 * warm.joules / warm.seconds, abs=0.1)
    assert warm.joules > cold.joules + 1.0
    assert warm.seconds == pytest.approx(cold.seconds)
    device.advance(200.0)
    assert device.read().celsius == pytest.approx(30.0 + 0.1 * 70.0, abs=0.1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("time_constant_seconds", 0.0),
        ("time_constant_seconds", float("nan")),
        ("kelvin_per_watt", -0.1),
        ("leakage_per_kelvin", float("inf")),
        ("ambient_celsius", float("nan")),
    ],
)
def test_heat_that_no_device_has_is_refused(name: str, value: float):
    with pytest.raises(EnergyError, match=f"{name} = {value} of the heat"):
        Heat(**{name: value})


def test_an_analytic_clock_comes_into_force_after_its_latency():
    device = analytic(switch_seconds=0.5)
    device.lock_clock(600)
    device.advance(0.4)
    assert device.read().sm_clock_mhz == 1500
    assert device.target_clock_mhz == 600
    device.advance(0.1)
    assert device.read().sm_clock_mhz == 600


def test_noise_belongs_to_the_seed_and_has_the_stated_size():
    def ratios(seed):
        device = analytic(noise=0.02, seed=seed)
        return [device.run(FORWARD).seconds / LOAD.seconds(1500) for _ in range(400)]

    one = ratios(1)
    assert one == ratios(1)
    assert one != ratios(2)
    deviation = math.sqrt(sum((ratio - 1) ** 2 for ratio in one) / len(one))
    assert 0.015 < deviation < 0.025


def test_an_analytic_plan_is_labelled_simulated():
    schedule = one_f_one_b(1, 2)
    loads = {FORWARD: LOAD, BACKWARD: LOAD}
    device = AnalyticDevice(CONSTANTS, loads, clocks_mhz=(600, 1500), heat=NO_LEAKAGE)
    run = replay_plan(plan_of([600] * 4, 1.0), schedule, [device])
    assert run.kind == "simulated"
    assert "simulated" in run.source
    assert run.seconds == pytest.approx(4 * LOAD.seconds(600))


def test_a_power_limit_below_what_the_lowest_clock_draws_is_exceeded_not_waited_for():
    device = analytic()
    device.limit_power(75.0)
    ran = device.run(FORWARD)
    assert device.read().sm_clock_mhz == 600
    assert ran.joules / ran.seconds == pytest.approx(60.0 + 0.2 * 600)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Load(fixed_seconds=0.0, megacycles=0.0, watts_per_mhz=1.0),
        lambda: Load(fixed_seconds=-1.0, megacycles=1.0, watts_per_mhz=1.0),
        lambda: Load(fixed_seconds=math.nan, megacycles=1.0, watts_per_mhz=1.0),
        lambda: analytic(clocks_mhz=(900, 600)),
        lambda: analytic(noise=-0.1),
        lambda: analytic(switch_seconds=-0.1),
        lambda: analytic(counter_seconds=0.0),
        lambda: analytic().run(BACKWARD),
        lambda: analytic().lock_clock(601),
        lambda: ReplayDevice(Profile({FORWARD: Curve((Point(0, 1.0, 1.0),))}, 20.0)),
    ],
)
def test_impossible_devices_are_refused(make):
    with pytest.raises(EnergyError):
        make()
