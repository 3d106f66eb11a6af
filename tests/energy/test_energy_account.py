"""Joules by purpose, and what they cost."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outlast.energy.account import (
    PURPOSES,
    AccountedRun,
    AccountedWindow,
    LossPoint,
    Rates,
    Split,
    account,
    split,
)
from outlast.energy.prices import Tariff
from outlast.energy.window import Energy
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

BEGIN = datetime(2026, 1, 5, 12, tzinfo=UTC)
NOTHING = Unavailable("no NVML")


def measured(joules: float, error: float = 0.01) -> Energy:
    return Energy(
        joules=joules,
        low_joules=joules * (1 - error),
        high_joules=joules * (1 + error),
        kind="measured",
        source="NVML counter",
    )


windows = st.lists(
    st.tuples(
        st.floats(0.0, 1e9),
        st.floats(0.0, 0.5),
        st.dictionaries(st.sampled_from(PURPOSES), st.floats(0.0, 1e4), max_size=10),
        st.floats(1e-3, 1e4),
    ),
    min_size=1,
    max_size=6,
)


@given(windows)
@example([(4.7865042228608704e-281, 0.0, {"useful": 0.5}, 1.0)])
def test_shares_sum_to_the_total_exactly(drawn) -> None:
    made = [
        AccountedWindow(measured(joules, error), math.fsum(spent.values()) + rest, spent)
        for joules, error, spent, rest in drawn
    ]
    result = split(made)
    assert isinstance(result.total, Energy)
    parts = result.by_purpose.values()
    assert math.fsum(part.joules for part in parts) == result.total.joules
    assert all(part.low_joules <= part.joules <= part.high_joules for part in parts)
    assert all(part.joules >= -1e-9 * result.total.joules for part in parts)


def test_joules_are_shared_by_time_and_called_modelled() -> None:
    spent = {"useful": 6.0, "guard": 2.0, "blocked": 2.0}
    parts = split([AccountedWindow(measured(3000.0), 10.0, spent)]).by_purpose
    assert parts["useful"].joules == pytest.approx(1800.0)
    assert parts["guard"].joules == pytest.approx(600.0)
    assert parts["guard"].kind == "modelled"


def test_unknown_time_is_unattributed_and_not_useful() -> None:
    result = split([AccountedWindow(measured(100.0), 10.0, {"useful": 4.0})])
    assert result.by_purpose["unattributed"].joules == pytest.approx(60.0)
    assert "redone" not in result.by_purpose


def test_a_window_of_one_purpose_stays_measured() -> None:
    part = split([AccountedWindow(measured(100.0), 10.0, {"useful": 10.0})]).by_purpose["useful"]
    assert part.kind == "measured"
    assert (part.low_joules, part.high_joules) == (99.0, 101.0)


def test_windows_without_a_meter_are_not_counted_as_zero() -> None:
    windows = [AccountedWindow(NOTHING, 5.0, {"useful": 5.0})]
    nothing = split(windows)
    assert isinstance(nothing.total, Unavailable)
    assert nothing.by_purpose == {}
    partly = split([*windows, AccountedWindow(measured(10.0), 5.0, {"useful": 5.0})])
    notes = account(partly, AccountedRun(begin=BEGIN, seconds=10.0)).notes
    assert "5 device-seconds were not metered: no NVML" in notes


def test_times_that_overlap_are_refused() -> None:
    with pytest.raises(EnergyError, match="took 12 s, more than its 10 s"):
        AccountedWindow(measured(1.0), 10.0, {"useful": 8.0, "guard": 4.0})
    with pytest.raises(EnergyError, match="none of useful"):
        AccountedWindow(measured(1.0), 10.0, {"fun": 1.0})  # type: ignore[dict-item]


def whole(joules: float = 7.2e6) -> Split:
    return split([AccountedWindow(measured(joules), 100.0, {"useful": 100.0})])


def test_report_of_a_run() -> None:
    run = AccountedRun(begin=BEGIN, seconds=3600.0, tokens=1e6)
    rates = Rates(tariff=Tariff("EUR", 0.3), region="FR", pue=1.2)
    report = account(whole(), run, rates)
    assert report.electricity.value == pytest.approx(2.4)
    assert report.cost.value == pytest.approx(0.72)
    assert report.carbon.value == pytest.approx(2.4 * 56)
    assert report.joules_per_token.value == pytest.approx(7.2)
    assert report.joules_per_token.low == pytest.approx(7.2 * 0.99)
    assert "unverified" in report.carbon.source
    plain = json.loads(report.to_json())
    assert plain["cost"]["unit"] == "EUR"
    assert plain["pue"] == "1.2, as given"
    assert plain["joules_to_loss"] == {"unavailable": "no loss target is set"}
    assert plain["notes"] == [
        "the joules are of gpu only; cpu, memory, network and fans were not metered"
    ]


def test_nothing_is_assumed_by_default() -> None:
    report = account(whole(), AccountedRun(begin=BEGIN, seconds=1.0))
    for figure in (report.cost, report.carbon, report.joules_per_token, report.joules_to_loss):
        assert isinstance(figure, Unavailable)
    assert report.pue == "1, not applied"
    assert report.electricity.value == pytest.approx(2.0)
    assert any("no tariff is set" in line for line in report.lines())


CURVE = (LossPoint(0, 4.0, 0.0), LossPoint(10, 3.0, 100.0), LossPoint(20, 2.0, 300.0))


def to_loss(target: float, curve=CURVE):
    run = AccountedRun(begin=BEGIN, seconds=1.0, losses=curve, loss_target=target)
    return account(whole(), run).joules_to_loss


def test_joules_to_a_loss_lie_between_the_points_around_it() -> None:
    found = to_loss(2.5)
    assert found.value == pytest.approx(200.0)
    assert (found.low, found.high) == (pytest.approx(99.0), pytest.approx(303.0))
    assert to_loss(4.5).value == 0.0
    assert to_loss(2.0).value == 300.0


def test_a_loss_that_was_not_reached_has_no_joules() -> None:
    found = to_loss(1.0)
    assert isinstance(found, Unavailable)
    assert found.reason == "loss 1 was not reached; the lowest was 2 at step 20"
    with pytest.raises(EnergyError, match="goes back at step 5"):
        to_loss(1.0, (*CURVE, LossPoint(5, 3.0, 400.0)))


@given(st.floats(1.0, 1e12), st.floats(1e-3, 1e3), st.floats(1.0, 2.0))
def test_cost_and_carbon_are_linear_in_joules(joules: float, factor: float, pue: float) -> None:
    run = AccountedRun(begin=BEGIN, seconds=1000.0)
    rates = Rates(tariff=Tariff("EUR", 0.2), region="DE", pue=pue)
    one, other = account(whole(joules), run, rates), account(whole(joules * factor), run, rates)
    assert other.cost.value == pytest.approx(factor * one.cost.value)
    assert other.carbon.value == pytest.approx(factor * one.carbon.value)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(EnergyError, match=r"pue = 0\.9 is below 1"):
        Rates(pue=0.9)
    with pytest.raises(EnergyError, match="has no time zone"):
        AccountedRun(begin=datetime(2026, 1, 1), seconds=1.0)
    with pytest.raises(EnergyError, match="must be some of gpu"):
        AccountedRun(begin=BEGIN, seconds=1.0, metered=("fan",))
