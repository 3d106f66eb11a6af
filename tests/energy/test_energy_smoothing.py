"""Smoothing takes noise out of profiles, and the stated margin makes up for the rest."""

from dataclasses import replace

import numpy as np
import pytest

from outlast.energy import example
from outlast.energy.planner import EnergyPlanner
from outlast.energy.profile import Curve, Point, Profile, margin_for, noise_of, smoothed
from outlast.energy.schedule import one_f_one_b
from outlast.errors import EnergyError

SCHEDULE = one_f_one_b(8, 3)


def noisy(profile: Profile, noise: float, seed: int) -> Profile:
    source = np.random.default_rng(seed)

    def blurred(point: Point) -> Point:
        time, energy = np.exp(noise * source.standard_normal(2))
        return Point(point.clock_mhz, point.seconds * time, point.joules * energy)

    curves = {
        key: Curve(tuple(blurred(point) for point in curve.points))
        for key, curve in profile.curves.items()
    }
    return replace(profile, curves=curves)


def error(profile: Profile, truth: Profile) -> float:
    return float(
        np.sqrt(
            np.mean(
                [
                    np.log(point.seconds / truth.curves[key].at(point.clock_mhz).seconds) ** 2
                    for key, curve in profile.curves.items()
                    for point in curve.points
                ]
            )
        )
    )


@pytest.mark.parametrize("device", ["a100", "a40"])
@pytest.mark.parametrize("noise", [0.01, 0.02])
def test_noise_is_found_and_most_of_it_removed(device: str, noise: float) -> None:
    truth = example.profile(device)
    measured = noisy(truth, noise, seed=3)
    assert noise_of(measured) == pytest.approx(noise, rel=0.25)
    assert error(smoothed(measured), truth) < 0.6 * error(measured, truth)


@pytest.mark.parametrize("device", ["a100", "a40"])
def test_a_clean_profile_stays_as_it_is(device: str) -> None:
    truth = example.profile(device)
    assert error(smoothed(truth), truth) < 0.004


def test_plans_with_the_margin_meet_the_deadline_on_the_device() -> None:
    truth = example.profile("a100")
    top = SCHEDULE.makespan([truth.curve(each.key).top.seconds for each in SCHEDULE.operations])
    met = {"raw": 0, "margin": 0}
    for seed in range(4):
        measured = noisy(truth, 0.02, seed)
        for name, profile, margin in (
            ("raw", measured, 0.0),
            ("margin", smoothed(measured), margin_for(measured)),
        ):
            plan = EnergyPlanner(profile).plan(SCHEDULE, top * 1.08, margin=margin)
            points = [
                truth.curve(each.key).at(clock)
                for each, clock in zip(SCHEDULE.operations, plan.clocks_mhz, strict=True)
            ]
            met[name] += SCHEDULE.makespan([point.seconds for point in points]) <= top * 1.08
    assert met["margin"] == 4
    assert met["raw"] < 4


def test_too_few_clocks_ask_for_the_margin() -> None:
    truth = example.profile("a100")
    few = replace(
        truth, curves={key: Curve(curve.points[::15]) for key, curve in truth.curves.items()}
    )
    with pytest.raises(EnergyError, match="state the margin"):
        smoothed(few)
