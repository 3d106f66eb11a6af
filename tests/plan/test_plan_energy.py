"""Joules by what they are spent on, and the laws that they keep."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.energy.cost import Watts, clock_effect, node_joules, step_joules
from outlast.energy.model import DeviceConstants
from outlast.errors import PlanError
from outlast.plan.cluster import Power
from outlast.plan.energy import (
    activity_at,
    busy_watts,
    clock_factors,
    measured_watts,
    step_energy,
)
from outlast.plan.estimate import Source

H100 = Power(limit_watts=700.0, blocked_watts=110.0, idle_watts=70.0, node_watts=2400.0, pue=1.3)
A100 = DeviceConstants(
    name="A100",
    top_clock_mhz=1410,
    static_watts=58.0,
    knee_mhz=1103.0,
    knee_per_ghz=0.73,
    power_limit_watts=400.0,
    blocking_watts=83.64,
)
times = st.floats(0.0, 1e3)
shares = st.floats(0.0, 1.0)


@st.composite
def powers(draw):
    limit = draw(st.floats(10.0, 2e3))
    idle = draw(shares) * limit
    return Power(
        limit_watts=limit,
        idle_watts=idle,
        blocked_watts=idle + draw(shares) * (limit - idle),
        node_watts=draw(st.floats(0.0, 5e3)),
        pue=draw(st.floats(1.0, 2.0)),
    )


def drawn(power, activity, seconds, **more):
    return step_energy(power, busy_watts(power, activity), seconds, **more)


@given(powers(), shares, st.tuples(times, times, times))
def test_terms_add_up_are_not_negative_and_are_at_least_idle_power(power, activity, seconds):
    found = drawn(power, activity, seconds, devices_per_node=8)
    total = found.total(devices=64.0)
    values = [term.value for term in total.terms]
    assert all(math.isfinite(value) and value >= 0.0 for value in values)
    assert math.fsum(values) == pytest.approx(64.0 * found.joules[0], rel=1e-9)
    assert total.figure.low <= total.figure.middle <= total.figure.high
    assert found.device_joules[0] >= power.idle_watts * sum(seconds) * (1.0 - 1e-12)


@given(powers(), shares, st.tuples(times, times, times))
def test_it_is_what_the_cost_functions_say_one_by_one(power, activity, seconds):
    draw = busy_watts(power, activity)
    found = drawn(power, activity, seconds, devices_per_node=4)
    watts = Watts(busy=draw.watts[0], blocked=power.blocked_watts, idle=power.idle_watts)
    device = step_joules(
        seconds[0], watts, blocked_seconds=seconds[1], idle_seconds=seconds[2]
    )  # fmt: skip
    node = node_joules(4 * device, sum(seconds), other_watts=power.node_watts, pue=power.pue)
    assert found.joules[0] == pytest.approx(node / 4, rel=1e-9)


@given(powers(), shares, st.tuples(times, times, times))
def test_doubling_power_or_time_doubles_energy(power, activity, seconds):
    twice = replace(
        power,
        **{f"{name}_watts": 2 * getattr(power, f"{name}_watts")
           for name in ("limit", "blocked", "idle", "node")},
    )  # fmt: skip
    once = drawn(power, activity, seconds).joules[0]
    assert drawn(twice, activity, seconds).joules[0] == pytest.approx(2 * once, rel=1e-9)
    longer = [2 * each for each in seconds]
    assert drawn(power, activity, longer).joules[0] == pytest.approx(2 * once, rel=1e-9)


@given(powers(), shares, shares, times)
def test_more_activity_never_draws_less_and_stays_below_the_limit(power, one, other, seconds):
    low, high = sorted((one, other))
    lazy, keen = (drawn(power, each, (seconds, 0.0, 0.0)).busy[0] for each in (low, high))
    assert lazy <= keen * (1.0 + 1e-12)
    assert keen <= power.limit_watts * seconds * (1.0 + 1e-12)


def test_node_and_building_stand_apart_from_the_device():
    seconds = (2.0, 0.5, 0.25)
    bare = drawn(replace(H100, node_watts=0.0, pue=1.0), 0.4, seconds, devices_per_node=8)
    full = drawn(H100, 0.4, seconds, devices_per_node=8)
    assert np.array_equal(bare.device_joules, full.device_joules)
    assert full.node[0] == pytest.approx(2400.0 / 8 * 2.75)
    assert full.building[0] == pytest.approx(0.3 * (full.device_joules + full.node)[0])
    assert bare.node[0] == bare.building[0] == 0.0
    assert any("node_watts" in flag for flag in bare.total().figure.extrapolated)
    assert any("pue" in flag for flag in bare.total().figure.extrapolated)
    assert full.total().figure.extrapolated == ()


def test_measured_watts_take_the_place_of_the_prior_and_narrow_the_interval():
    measured = step_energy(H100, measured_watts(640.0, "run 7"), (1.0, 0.0, 0.0))
    guessed = drawn(H100, 0.4, (1.0, 0.0, 0.0))
    assert measured.busy[0] == pytest.approx(640.0)
    assert measured.deviation[0] < 0.5 * guessed.deviation[0]
    term = measured.total().terms[0]
    assert term.constants["busy watts"].origin == "measured"
    assert "run 7" in term.constants["busy watts"].text
    assert guessed.total().terms[0].constants["scale"].origin == "prior"


@given(st.lists(st.tuples(st.sampled_from([705, 1005, 1410]), shares), min_size=1, max_size=6))
def test_clocks_of_many_cases_are_those_of_single_ones(cases):
    clocks, share = zip(*cases, strict=True)
    found = clock_factors(A100, 0.19, clocks, share)
    for row, (clock, part) in enumerate(cases):
        seconds, joules = clock_effect(A100, 0.19, clock, compute_share=part)
        assert found[0][row] == pytest.approx(seconds, rel=1e-12)
        assert found[0][row] * found[1][row] == pytest.approx(joules, rel=1e-12)


def test_a_lower_clock_saves_on_busy_time_and_leaves_waiting_alone():
    factors = clock_factors(A100, 0.19, [1005.0, 1410.0], 0.5)
    found = drawn(H100, 0.4, (1.0, 0.2, 0.1), clocks=factors)
    assert found.busy[0] < found.busy[1]
    assert found.seconds["busy"][0] > found.seconds["busy"][1] == 1.0
    assert found.blocked[0] == found.blocked[1]
    assert found.node[0] > found.node[1]
    term = found.total(0).terms[0]
    inputs = term.inputs
    assert term.value == pytest.approx(
        inputs["devices"] * inputs["busy seconds"] * inputs["busy watts"]
    )


def test_activity_follows_from_watts_below_the_limit():
    activity = activity_at(A100, 300.0, 1200.0)
    watts = A100.static_watts + activity * 1200.0 * A100.voltage(1200.0) ** 2
    assert watts == pytest.approx(300.0)
    with pytest.raises(PlanError, match="measure at a lower clock"):
        activity_at(A100, 400.0, 1410.0)


def test_terms_take_the_sources_that_are_given():
    sources = {
        "power.idle_watts": Source(70.0, "W", "measured", "a meter"),
        "power.node_watts": Source(2400.0, "W", "prior", "from the rating"),
    }
    total = drawn(H100, 0.4, (1.0, 0.1, 0.1), sources=sources).total()
    terms = {term.name: term for term in total.terms}
    assert total.unit == "J"
    assert terms["idle"].constants["idle watts"].text == "a meter"
    assert terms["building"].constants["PUE"].value == 1.3
    known = drawn(H100, 0.4, (1.0, 0.1, 0.1)).total()
    assert total.figure.middle == known.figure.middle
    assert total.figure.high > known.figure.high
    assert all(term.formula and term.source for term in total.terms)


def test_a_hundred_thousand_cases_broadcast():
    seconds = np.linspace(0.1, 5.0, 100_000)
    found = drawn(H100, np.linspace(0.0, 1.0, 100_000), (seconds, 0.1, 0.0))
    assert found.joules.shape == (100_000,)
    assert np.isfinite(found.joules).all()
    assert np.all(np.diff(found.joules) > 0.0)


def test_wrong_watts_are_refused_by_name():
    with pytest.raises(PlanError, match="watts = -1"):
        measured_watts(-1.0, "a meter")
