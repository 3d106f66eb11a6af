"""Curves of unseen operations from one to three clocks, on the example profiles."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from outlast.energy.example import profile
from outlast.energy.model import (
    Calibration,
    DeviceConstants,
    Prediction,
    Response,
    Work,
    calibrate,
    fit_response,
    margin_of,
    predict,
    predicted_profile,
    predictions,
    roofline_response,
    roofline_seconds,
)
from outlast.energy.planner import EnergyPlanner
from outlast.energy.profile import Key, Point, Profile
from outlast.energy.schedule import one_f_one_b
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

CONSTANTS = DeviceConstants(
    name="made",
    top_clock_mhz=1500,
    static_watts=75.0,
    knee_mhz=1100.0,
    knee_per_ghz=0.7,
    power_limit_watts=400.0,
    blocking_watts=80.0,
    peak_flop_per_s=200e12,
    memory_bytes_per_s=2e12,
)


@cache
def _calibrated(device: str, stage: int) -> Calibration:
    """On one stage alone."""
    whole = profile(device)
    curves = {key: curve for key, curve in whole.curves.items() if key.stage == stage}
    return calibrate(Profile(curves, whole.blocking_watts, whole.device), strict=False)


def _clocks(device: str) -> list[int]:
    return [point.clock_mhz for point in profile(device).curves[Key(0, "forward")].points]


def _probes(device: str, constants: DeviceConstants) -> tuple[int, int]:
    """The clock nearest to the knee, where energy is least, and the top clock."""
    clocks = _clocks(device)
    return min(clocks, key=lambda clock: abs(clock - constants.knee_mhz)), clocks[-1]


def _predicted(device: str, key: Key, probes: tuple[int, ...] = ()) -> Prediction:
    calibration = _calibrated(device, 0 if key.stage == 7 else 7)
    probes = probes or _probes(device, calibration.constants)
    points = [profile(device).curve(key).at(clock) for clock in probes]
    response = fit_response(points, calibration, key)
    assert isinstance(response, Response)
    found = predict(response, calibration.constants, _clocks(device))
    assert isinstance(found, Prediction)
    return found


@pytest.mark.parametrize("device", ["a100", "a40"])
@pytest.mark.parametrize("stage", [0, 7])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_two_probes_predict_an_unseen_stage(device: str, stage: int, phase: str) -> None:
    key = Key(stage, phase)

    found = _predicted(device, key)

    measured = np.array(profile(device).curve(key).points)
    modelled = np.array(found.curve.points)
    assert np.abs(modelled / measured - 1).mean(axis=0)[1:].max() < 0.015
    inside = (measured[:, 1] >= found.low_seconds) & (measured[:, 1] <= found.high_seconds)
    assert inside.mean() > 0.9
    inside = (measured[:, 2] >= found.low_joules) & (measured[:, 2] <= found.high_joules)
    assert inside.mean() > 0.9


def test_predicted_times_pass_through_the_probes() -> None:
    key = Key(7, "forward")

    found = _predicted("a40", key, (1140, 1740))

    for clock in (1140, 1740):
        measured = profile("a40").curve(key).at(clock)
        assert found.curve.at(clock).seconds == pytest.approx(measured.seconds)
        assert found.curve.at(clock).joules == pytest.approx(measured.joules, rel=0.02)


def test_intervals_widen_away_from_probes() -> None:
    found = _predicted("a100", Key(0, "forward"), (1095, 1410))

    widths = np.array(found.high_seconds) / np.array(found.low_seconds)
    clocks = [point.clock_mhz for point in found.curve.points]
    assert widths[clocks.index(1095)] < widths[clocks.index(1245)]
    assert widths[clocks.index(1095)] < widths[clocks.index(855)]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["a100", "a40"])
def test_three_probed_clocks_are_enough_to_plan_a_pipeline(device: str) -> None:
    measured, schedule = profile(device), one_f_one_b(8, 12)
    curves = {}
    for key in measured.curves:
        calibration = _calibrated(device, 0 if key.stage == 7 else 7)
        knee, top = _probes(device, calibration.constants)
        between = min(_clocks(device), key=lambda clock: abs(clock - (knee + top) / 2))
        clocks = (knee, between, top)
        points = {key: [measured.curve(key).at(clock) for clock in clocks]}
        curves[key] = predicted_profile(points, calibration, _clocks(device)).curves[key]
    modelled = Profile(curves, measured.blocking_watts, kind="modelled")
    full = EnergyPlanner(measured).plan(schedule, "+2%")

    plan = EnergyPlanner(modelled).plan(schedule, full.deadline_seconds)

    pairs = zip(schedule.operations, plan.clocks_mhz, strict=True)
    real = [measured.curve(each.key).at(clock) for each, clock in pairs]
    seconds = schedule.makespan([point.seconds for point in real])
    busy = sum(p.joules - measured.blocking_watts * p.seconds for p in real)
    joules = busy + 8 * measured.blocking_watts * max(seconds, full.deadline_seconds)
    assert plan.kind == "modelled"
    assert seconds < 1.005 * full.deadline_seconds
    assert 1 - joules / full.fastest_joules > 0.95 * full.saving


def test_one_probe_says_what_it_assumes() -> None:
    found = _predicted("a100", Key(0, "forward"), (1410,))

    assert any("one probe" in flag and "assumed" in flag for flag in found.flags)
    assert any("extrapolated" in flag for flag in found.flags)


def test_a_phase_that_was_never_measured_is_flagged_and_less_certain() -> None:
    whole = profile("a100")
    curves = {key: curve for key, curve in whole.curves.items() if key.phase == "forward"}
    calibration = calibrate(Profile(curves, whole.blocking_watts), strict=False)
    points = [whole.curve(Key(0, "backward")).at(clock) for clock in (1095, 1410)]

    response = fit_response(points, calibration, Key(0, "backward"))

    assert isinstance(response, Response)
    assert any("not calibrated on an operation of this phase" in flag for flag in response.flags)
    assert response.time_spread > 0.01


def test_probes_that_contradict_the_device_are_refused() -> None:
    # Twice the time at the higher clock: no clock law of any device.
    points = [Point(1095, 0.05, 15.0), Point(1410, 0.10, 30.0)]

    found = fit_response(points, _calibrated("a100", 0), Key(7, "forward"))

    assert isinstance(found, Unavailable)
    assert "full sweep" in found.remedy
    with pytest.raises(EnergyError, match="stage 7 forward cannot be predicted"):
        predicted_profile({Key(7, "forward"): points}, _calibrated("a100", 0), [1095, 1410])


def test_clocks_far_below_the_top_are_not_predicted() -> None:
    response = Response(fixed_seconds=0.1, clock_seconds=0.1, activity_watts_per_mhz=0.1)

    some = predict(response, CONSTANTS, [300, 600, 900, 1500])
    none = predict(response, CONSTANTS, [300, 600])

    assert isinstance(some, Prediction)
    assert [point.clock_mhz for point in some.curve.points] == [900, 1500]
    assert any("left out" in flag for flag in some.flags)
    assert isinstance(none, Unavailable)


def test_a_modelled_profile_says_what_its_predictions_say() -> None:
    calibration = _calibrated("a100", 0)
    whole = profile("a100")
    probes = {
        Key(7, phase): [whole.curve(Key(7, phase)).at(1410)] for phase in ("forward", "backward")
    }
    clocks = [300, *_clocks("a100")]

    predicted = predictions(probes, calibration, clocks)
    found = predicted_profile(probes, calibration, clocks)

    assert {key: each.curve for key, each in predicted.items()} == dict(found.curves)
    for flag in predicted[Key(7, "forward")].flags:
        assert any(flag in each and "stage 7 forward" in each for each in found.flags)
    assert any("one probe" in each for each in found.flags)
    margin = margin_of(predicted)
    assert f"{margin:.1%}" in found.flags[-1]
    for each in predicted.values():
        for point, low, high in zip(
            each.curve.points, each.low_seconds, each.high_seconds, strict=True
        ):
            assert high - low <= 2 * margin * point.seconds * (1 + 1e-9)
    assert 0.005 < margin < 0.2
    assert margin_of({}) == 0.0


def test_transfers_are_taken_over_as_measured() -> None:
    transfer = Point(0, 0.002, 0.1)

    found = predicted_profile({Key(0, "transfer"): [transfer]}, Calibration(CONSTANTS), [1500])

    assert found.curve(Key(0, "transfer")).points == (transfer,)


def test_probes_without_energy_are_refused() -> None:
    with pytest.raises(EnergyError, match="positive time and energy"):
        fit_response([Point(1500, 0.1, 0.0)], Calibration(CONSTANTS))


def test_the_roofline_has_two_sides() -> None:
    clocks = np.array([750.0, 1500.0])

    compute = roofline_seconds(Work(flops=2e12, memory_bytes=1e6), CONSTANTS, clocks)
    memory = roofline_seconds(Work(flops=1e6, memory_bytes=2e10), CONSTANTS, clocks)

    assert compute == pytest.approx([0.02, 0.01], rel=1e-3)
    assert memory == pytest.approx([0.01, 0.01], rel=1e-3)


def test_launches_and_links_add_to_the_roofline() -> None:
    work = Work(flops=0.0, memory_bytes=0.0, link_bytes=1e9, launches=1000)
    linked = replace(CONSTANTS, link_bytes_per_s=1e11)

    assert roofline_seconds(work, linked, np.array([1500.0])) == pytest.approx([0.015])
    missing = roofline_seconds(work, CONSTANTS, np.array([1500.0]))
    assert isinstance(missing, Unavailable)
    assert "link_bytes_per_s" in missing.reason


def test_unmeasured_work_is_predicted_with_a_wide_interval_and_a_flag() -> None:
    response = roofline_response(Work(flops=2e12, memory_bytes=1e9), CONSTANTS)
    assert isinstance(response, Response)

    found = predict(response, CONSTANTS, [1200, 1500])

    assert isinstance(found, Prediction)
    assert found.high_joules[0] > 1.4 * found.curve.points[0].joules
    assert any("nothing of this work was measured" in flag for flag in found.flags)
    # Products at full speed reach the cap.
    watts = found.curve.top.joules / found.curve.top.seconds
    assert watts == pytest.approx(CONSTANTS.power_limit_watts, rel=0.05)
