"""Constants of devices from the example profiles and from devices whose constants are known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.energy.example import profile
from outlast.energy.model import (
    DeviceConstants,
    Response,
    calibrate,
    cap_clock_mhz,
    effective_clocks_mhz,
    evaluate,
)
from outlast.energy.profile import Curve, Key, Point, Profile
from outlast.errors import EnergyError

TRUTH = DeviceConstants(
    name="made",
    top_clock_mhz=1500,
    static_watts=75.0,
    knee_mhz=1100.0,
    knee_per_ghz=0.7,
    power_limit_watts=350.0,
    blocking_watts=80.0,
)
WORKS = {
    Key(0, "forward"): Response(
        fixed_seconds=0.01, clock_seconds=0.05, activity_watts_per_mhz=0.17
    ),
    Key(0, "backward"): Response(
        fixed_seconds=0.04, clock_seconds=0.06, activity_watts_per_mhz=0.12
    ),
}


def _made(clocks: range, constants: DeviceConstants = TRUTH, count: int = 2) -> Profile:
    curves = {}
    for key, work in list(WORKS.items())[:count]:
        seconds, joules = evaluate(work, constants, np.array(clocks, dtype=float))
        points = zip(clocks, seconds.tolist(), joules.tolist(), strict=True)
        curves[key] = Curve(tuple(Point(*each) for each in points))
    return Profile(curves, constants.blocking_watts, constants.name)


def test_constants_of_a_made_device_are_found_again() -> None:
    found = calibrate(_made(range(900, 1501, 15))).constants

    assert found.static_watts == pytest.approx(75, rel=0.05)
    assert found.knee_mhz == pytest.approx(1100, rel=0.01)
    assert found.knee_per_ghz == pytest.approx(0.7, rel=0.05)
    assert found.power_limit_watts == pytest.approx(350, rel=0.01)
    assert dict(found.standard_errors)["knee_mhz"] < 20


def test_a_device_that_never_reaches_its_cap_has_none() -> None:
    found = calibrate(
        _made(range(900, 1501, 15), replace(TRUTH, power_limit_watts=math.inf))
    ).constants

    assert found.power_limit_watts == math.inf
    assert "power_limit_watts" not in dict(found.standard_errors)


def test_clocks_on_one_side_of_the_knee_do_not_tell_the_voltage() -> None:
    with pytest.raises(EnergyError, match=r"cannot be determined from .*more clocks"):
        calibrate(_made(range(800, 1001, 15)))


def test_two_clocks_of_one_operation_determine_no_device() -> None:
    with pytest.raises(EnergyError, match="cannot be determined"):
        calibrate(_made(range(900, 1501, 600), count=1))


def test_what_data_do_not_tell_stays_at_its_prior_on_request() -> None:
    found = calibrate(_made(range(800, 1001, 15)), strict=False).constants

    assert found.static_watts == pytest.approx(TRUTH.blocking_watts, rel=0.3)
    assert dict(found.standard_errors)["static_watts"] > 15


def test_a_profile_without_clocks_is_refused() -> None:
    transfer = {Key(0, "transfer"): Curve((Point(0, 0.01, 1.0),))}

    with pytest.raises(EnergyError, match="no curve with 2 clocks"):
        calibrate(Profile(transfer, 80.0))


@pytest.mark.parametrize(("device", "knee", "limit"), [("a100", 1103, 486), ("a40", 1200, 297)])
def test_constants_of_real_devices_are_physical(device: str, knee: int, limit: int) -> None:
    measured = profile(device)

    found = calibrate(measured)

    assert found.constants.knee_mhz == pytest.approx(knee, rel=0.05)
    assert found.constants.power_limit_watts == pytest.approx(limit, rel=0.03)
    assert 30 < found.constants.static_watts < measured.blocking_watts
    # Seven of the eight stages are copies of one measurement.
    assert len(found.deviations) == 4


@given(activity=st.floats(0.001, 1.0), limit=st.floats(100, 1000), knee_per_ghz=st.floats(0.0, 3.0))
def test_the_cap_clock_draws_the_power_limit(
    activity: float, limit: float, knee_per_ghz: float
) -> None:
    constants = replace(TRUTH, power_limit_watts=limit, knee_per_ghz=knee_per_ghz)

    clock = cap_clock_mhz(constants, activity)

    watts = constants.static_watts + activity * clock * constants.voltage(clock) ** 2
    assert watts == pytest.approx(limit, rel=1e-6)


@settings(max_examples=50)
@given(clock=st.floats(300, 3000), activity=st.floats(0.001, 1.0))
def test_the_effective_clock_is_neither_above_the_asked_nor_the_cap_clock(
    clock: float, activity: float
) -> None:
    found = effective_clocks_mhz(TRUTH, activity, np.array([clock]))[0]

    assert found <= min(clock, cap_clock_mhz(TRUTH, activity)) * (1 + 1e-9)
    assert found >= min(clock, cap_clock_mhz(TRUTH, activity)) * 0.98
