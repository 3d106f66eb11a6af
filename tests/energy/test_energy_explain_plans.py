"""The energy of plans that were not measured, from those that were, as the benchmark fits it."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest

from outlast.energy import DeviceConstants, one_f_one_b
from outlast.errors import EnergyError

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from energy_fit import EffectiveClock, MeteredStep, fit_plan_energy

SCHEDULE = one_f_one_b(3, 6)
DEVICE = DeviceConstants(
    name="a test device",
    top_clock_mhz=1410.0,
    static_watts=60.0,
    knee_mhz=1100.0,
    knee_per_ghz=0.7,
    power_limit_watts=300.0,
    blocking_watts=80.0,
)
LIMIT_MHZ = 1230.0
"""Where the made device throttles."""


def executed(count: int, *, noise: float = 0.0, alike: bool = False) -> list[MeteredStep]:
    """Steps at random clocks on devices that obey the law, with other powers than the prior's."""
    draw = random.Random(2)
    powers = {"forward": 130.0, "backward": 170.0}
    steps = []
    for _ in range(count):
        clocks = [float(draw.choice(range(900, 1411, 15))) for _ in SCHEDULE.operations]
        if alike:
            clocks = [1200.0] * len(clocks)
        in_force = [min(clock, LIMIT_MHZ) for clock in clocks]
        base = {"forward": (0.02, 60.0), "backward": (0.03, 150.0)}
        seconds = [
            base[o.phase][0] + base[o.phase][1] / f
            for o, f in zip(SCHEDULE.operations, in_force, strict=True)
        ]
        whole = SCHEDULE.makespan(seconds) + draw.uniform(0.0, 0.5)
        joules = [72.0 * whole] * 3
        for o, f, own in zip(SCHEDULE.operations, in_force, seconds, strict=True):
            switching = powers[o.phase] * f / 1000 * DEVICE.voltage(f) ** 2
            joules[o.device] += own * (switching + 50.0 - 72.0)
        joules = [each * (1 + draw.gauss(0, noise)) for each in joules]
        steps.append(MeteredStep(tuple(seconds), whole, tuple(clocks), tuple(joules)))
    return steps


def test_unseen_plans_are_predicted_and_the_interval_says_how_well():
    steps = executed(40, noise=0.003)
    model = fit_plan_energy(SCHEDULE, steps[:20], DEVICE)
    inside = 0
    for step in steps[20:]:
        predicted, truth = model.predict(step), sum(step.joules)
        assert predicted.joules == pytest.approx(truth, rel=0.01)
        assert predicted.kind == "modelled"
        inside += predicted.low_joules <= truth <= predicted.high_joules
    assert inside >= 16


def test_a_throttled_device_is_not_charged_for_clocks_that_it_did_not_reach():
    steps = executed(24)
    model = fit_plan_energy(SCHEDULE, steps, DEVICE)
    assert model.error < 0.005
    for clock in model.clocks.values():
        assert clock.reached_mhz == pytest.approx(LIMIT_MHZ, abs=15.0)
    fastest = MeteredStep(
        tuple(
            {"forward": 0.02 + 60 / LIMIT_MHZ, "backward": 0.03 + 150 / LIMIT_MHZ}[o.phase]
            for o in SCHEDULE.operations
        ),
        4.0,
        (1410.0,) * len(SCHEDULE.operations),
    )
    believed = MeteredStep(fastest.operation_seconds, 4.0, (LIMIT_MHZ,) * len(SCHEDULE.operations))
    assert model.predict(fastest).joules == pytest.approx(model.predict(believed).joules, rel=1e-3)


def test_each_device_is_predicted_and_waiting_costs_less_than_working():
    steps = executed(20)
    model = fit_plan_energy(SCHEDULE, steps, DEVICE)
    for predicted, truth in zip(model.device_joules(steps[0]), steps[0].joules, strict=True):
        assert predicted == pytest.approx(truth, rel=0.01)
    later = MeteredStep(
        steps[0].operation_seconds, steps[0].step_seconds + 1.0, steps[0].clocks_mhz
    )
    waiting = model.predict(later).joules - model.predict(steps[0]).joules
    assert waiting == pytest.approx(3 * 72.0, rel=0.05)


def test_terms_that_the_steps_cannot_tell_apart_are_flagged():
    draw = random.Random(3)
    steps = [
        # Forwards and backwards always change together, and by little.
        MeteredStep(
            tuple((0.1 if o.phase == "forward" else 0.2) / clock for o in SCHEDULE.operations),
            4.0 / clock,
            (1000.0 * clock,) * len(SCHEDULE.operations),
            (500.0 * clock,) * 3,
        )
        for clock in (draw.uniform(1.0, 1.01) for _ in range(8))
    ]
    model = fit_plan_energy(SCHEDULE, steps, DEVICE)
    assert not model.identifiable
    assert "do not tell" in model.predict(steps[0]).flags[0]


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (executed(5), "5 measured steps are too few"),
        (executed(8, alike=True), "same clocks"),
        ([MeteredStep(s.operation_seconds, 9.0, s.clocks_mhz) for s in executed(6)], "no energy"),
        ([MeteredStep(s.operation_seconds, 9.0) for s in executed(6)], "no clocks_mhz"),
    ],
)
def test_too_little_to_fit_is_refused(steps: list[MeteredStep], words: str):
    with pytest.raises(EnergyError, match=words):
        fit_plan_energy(SCHEDULE, steps, DEVICE)


def test_the_clock_in_force_follows_from_the_time():
    clocks = np.arange(900.0, 1411.0, 15.0)
    seconds = 0.02 + 60.0 / np.minimum(clocks, LIMIT_MHZ)
    found = EffectiveClock.fitted(clocks, seconds)
    assert found.of(clocks, seconds) == pytest.approx(np.minimum(clocks, LIMIT_MHZ), rel=0.01)
    alone = EffectiveClock.fitted(np.array([1200.0]), np.array([0.1]))
    assert alone.of(np.array([1300.0]), np.array([0.1])) == pytest.approx([1300.0])
