"""Probing replayed and simulated devices."""

from __future__ import annotations

import math

import pytest

from outlast.energy.example import profile
from outlast.energy.model.equations import DeviceConstants
from outlast.energy.model.predict import choose_probes, measure_on, probe
from outlast.energy.profile import Key, Point
from outlast.energy.replay import ReplayDevice
from outlast.errors import EnergyError

FORWARD = Key(0, "forward")
CLOCKS = range(900, 1501, 15)
CONSTANTS = DeviceConstants(
    name="made",
    top_clock_mhz=1500,
    static_watts=75.0,
    knee_mhz=1100.0,
    knee_per_ghz=0.7,
    power_limit_watts=400.0,
    blocking_watts=80.0,
)


def test_known_devices_are_probed_at_the_top_and_at_the_knee() -> None:
    assert choose_probes(CLOCKS, CONSTANTS) == (1095, 1500)
    assert choose_probes(CLOCKS, CONSTANTS, 3) == (1095, 1305, 1500)
    assert choose_probes(CLOCKS, CONSTANTS, 1) == (1500,)


def test_unknown_devices_are_probed_over_their_range() -> None:
    assert choose_probes(CLOCKS, count=3) == (1020, 1260, 1500)
    with pytest.raises(EnergyError, match="count = 4"):
        choose_probes(CLOCKS, count=4)
    with pytest.raises(EnergyError, match="2 probes of 1 clocks"):
        choose_probes([1500])


def test_a_replayed_device_gives_its_profile_back() -> None:
    measured = profile("a100")
    device = ReplayDevice(measured, switch_seconds=0.02)
    measure = measure_on(device, lambda: device.run(FORWARD), lambda: device.now_seconds)

    points = probe(measure, [1095, 1410])

    for point in points:
        truth = measured.curve(FORWARD).at(point.clock_mhz)
        assert point.seconds == pytest.approx(truth.seconds, rel=1e-6)
        # The counter changes every 0.1 s in a window of 10 s.
        assert point.joules == pytest.approx(truth.joules, rel=0.02)
    assert device.target_clock_mhz == 1410


def test_the_clock_is_given_back_when_the_work_fails() -> None:
    device = ReplayDevice(profile("a100"))

    def broken() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        probe(measure_on(device, broken, lambda: device.now_seconds), [1095])

    assert device.target_clock_mhz == 1410


def test_a_clock_that_stands_still_is_noticed() -> None:
    device = ReplayDevice(profile("a100"))
    measure = measure_on(device, lambda: device.run(FORWARD), lambda: 0.0)

    with pytest.raises(EnergyError, match="took no time by the clock"):
        measure(1095)


@pytest.mark.parametrize("wrong", [Point(1410, 0.1, 1.0), Point(1095, math.nan, 1.0)])
def test_measurements_that_cannot_be_are_refused(wrong: Point) -> None:
    with pytest.raises(EnergyError, match="the probe at 1095 MHz"):
        probe(lambda _: wrong, [1095])
