"""Simulated slack reclamation beyond the guard band."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.energy.reclamation import (
    LEVELS,
    Abft,
    Devices,
    Faults,
    Phase,
    Policy,
    best_policy,
    break_even_faults_per_second,
    break_even_overhead,
    monte_carlo,
    simulate,
    slowed_joules,
)
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable


def phase(seconds: float) -> Phase:
    return Phase(seconds=seconds, dynamic_watts=240.0, static_watts=58.0)


TWO = Devices(phases=(phase(0.8), phase(1.0)), wait_watts=84.0)
NEVER = Faults(rate_per_second=0.0)
FREE = Abft(name="none", overhead=0.0, coverage=0.0)
LOW = Policy(ratio=0.25, undervolt=0.1, abft=LEVELS[1])


def test_without_any_setting_it_is_slack_reclamation() -> None:
    outcome = simulate(TWO, Policy(ratio=0.0), Faults())
    assert outcome.joules == outcome.slack_only_joules < outcome.nominal_joules
    assert (outcome.faults_per_step, outcome.seconds) == (0.0, 1.0)
    assert outcome.energy.kind == "simulated"
    assert "no hardware claim" in str(outcome)


def test_full_reclamation_takes_the_time_of_the_other_device() -> None:
    outcome = simulate(replace(TWO, highest_clock=1.3), Policy(ratio=1.0), NEVER)
    assert outcome.seconds == pytest.approx(0.8)
    assert outcome.critical_clock == pytest.approx(1.25)
    with pytest.raises(EnergyError, match=r"needs clock 1\.250 of nominal, above 1\.2"):
        simulate(TWO, Policy(ratio=1.0), NEVER)


@given(st.floats(0.05, 2.0), st.floats(1.0, 500.0), st.floats(1.0, 200.0), st.floats(0.0, 200.0))
def test_slowed_device_takes_the_least_energy(span, dynamic, static, wait) -> None:
    devices = replace(TWO, wait_watts=wait)
    each = Phase(seconds=0.05, dynamic_watts=dynamic, static_watts=static)
    best = slowed_joules(each, span, devices)
    for clock in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        busy = each.seconds / clock
        if busy <= span:
            joules = (dynamic * clock**2.4 + static) * busy + wait * (span - busy)
            assert best <= joules * (1.0 + 1e-9)


@pytest.mark.parametrize("abft", LEVELS)
def test_drawn_faults_agree_with_the_closed_form(abft: Abft) -> None:
    policy = replace(LOW, abft=abft)
    faults = Faults(rate_per_second=1e-4, rollback_seconds=20.0)
    drawn = monte_carlo(TWO, policy, faults, steps=20_000, seed=3)
    closed = simulate(TWO, policy, faults).joules
    # 4.5 standard errors: the interval is 1.96 of them.
    width = (drawn.high_joules - drawn.joules) / 1.96 * 4.5
    assert drawn.joules == pytest.approx(closed, abs=width)
    assert drawn.kind == "simulated"


@settings(max_examples=30)
@given(st.floats(0.0, 0.5), st.floats(0.02, 0.12), st.floats(0.0, 1.0))
def test_at_the_break_even_rate_nothing_is_saved(ratio, undervolt, coverage) -> None:
    abft = Abft(name="any", overhead=0.02, coverage=coverage)
    policy = Policy(ratio=ratio, undervolt=undervolt, abft=abft)
    clean = simulate(TWO, policy, NEVER)
    rate = break_even_faults_per_second(clean)
    if isinstance(rate, Unavailable):
        assert clean.saving <= 0.0
        return
    flat = Faults(rate_per_second=rate, per_clock=0.0, per_undervolt=0.0)
    assert simulate(TWO, policy, flat).saving == pytest.approx(0.0, abs=1e-9)
    half = replace(flat, rate_per_second=rate / 2)
    assert simulate(TWO, policy, half).saving > 0.0


def test_at_the_break_even_overhead_nothing_is_saved() -> None:
    overhead = break_even_overhead(TWO, LOW, Faults())
    assert isinstance(overhead, float)
    abft = replace(LOW.abft, overhead=overhead)
    assert simulate(TWO, replace(LOW, abft=abft), Faults()).saving == pytest.approx(0.0, abs=1e-9)
    assert overhead > LOW.abft.overhead


def test_no_break_even_where_nothing_is_saved() -> None:
    dear = replace(LOW, undervolt=0.0, abft=LEVELS[2])
    assert isinstance(break_even_faults_per_second(simulate(TWO, dear, NEVER)), Unavailable)
    assert isinstance(break_even_overhead(TWO, dear, NEVER), Unavailable)
    assert (
        break_even_faults_per_second(
            simulate(TWO, LOW, Faults(rollback_seconds=0.0, correct_seconds=0.0))
        )
        == math.inf
    )


def test_checksums_pay_only_where_faults_are_frequent() -> None:
    assert best_policy(TWO, NEVER).policy.abft.name == "none"
    default = best_policy(TWO, Faults())
    assert default.policy.abft.name == "single"
    assert default.saving > 0.0
    hostile = best_policy(TWO, Faults(rate_per_second=10.0))
    assert hostile.policy == Policy(ratio=0.0)
    assert hostile.saving == 0.0


def test_faults_begin_at_the_guard_band() -> None:
    faults = Faults(rate_per_second=1e-3)
    assert faults.rate(1.0, 0.0) == 0.0
    assert faults.rate(1.0, 0.05) < faults.rate(1.1, 0.05) < faults.rate(1.1, 0.06)


def test_faults_beyond_all_numbers_are_refused_and_never_chosen() -> None:
    faults = Faults(per_undervolt=1e6)
    with pytest.raises(EnergyError, match=r"per_undervolt = 1000000\.0 of the faults give e\^"):
        faults.rate(1.0, 0.02)
    assert best_policy(TWO, faults).policy.undervolt == 0.0


def test_more_devices_wait_while_one_recovers() -> None:
    many = Devices(phases=(*TWO.phases, phase(0.5), phase(0.3)), wait_watts=84.0)
    few, more = simulate(TWO, LOW, Faults()), simulate(many, LOW, Faults())
    assert more.fault_joules > few.fault_joules
    assert more.critical_clock == few.critical_clock


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(EnergyError, match="1 device has no slack"):
        Devices(phases=(phase(1.0),), wait_watts=84.0)
    with pytest.raises(EnergyError, match=r"ratio = 1\.5 is not in"):
        Policy(ratio=1.5)
    with pytest.raises(EnergyError, match="coverage = 2"):
        Abft(name="full", overhead=0.1, coverage=2.0)
    with pytest.raises(EnergyError, match="rollback_seconds = inf of the faults must be finite"):
        Faults(rollback_seconds=math.inf)
    with pytest.raises(EnergyError, match="overhead = inf of level full"):
        Abft(name="full", overhead=math.inf, coverage=0.9)
    with pytest.raises(EnergyError, match="the device would stop"):
        simulate(TWO, Policy(ratio=0.0, undervolt=0.2), NEVER)
