"""What runs cost, and that nothing is free where no price is given."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.energy.cost import carbon_grams, money
from outlast.errors import EnergyError, PlanError
from outlast.hardware.figure import Unavailable
from outlast.plan.cluster import Prices
from outlast.plan.energy import bill, with_region
from outlast.plan.estimate import Source

OWN = Prices(currency="EUR", per_kwh=0.22, grams_per_kwh=380.0)
UNKNOWN = Unavailable("what the devices draw is not known")
amounts = st.floats(0.0, 1e12)


@given(amounts, amounts, st.floats(0.0, 1e3), st.floats(0.0, 1e3))
def test_it_is_what_the_cost_functions_say_and_doubles_with_the_amount(hours, joules, price, grams):
    prices = Prices(per_kwh=price, grams_per_kwh=grams)
    once, twice = bill(prices, hours, joules), bill(prices, 2 * hours, 2 * joules)
    assert once.money[0] == pytest.approx(money(joules, price))
    assert once.carbon_grams[0] == pytest.approx(carbon_grams(joules, grams))
    assert twice.money[0] == pytest.approx(2 * once.money[0])
    assert twice.carbon_grams[0] == pytest.approx(2 * once.carbon_grams[0])
    assert once.money[0] >= 0.0
    assert math.isfinite(once.money[0])


@given(amounts, st.floats(0.0, 100.0))
def test_a_price_in_another_currency_changes_the_unit_and_nothing_else(hours, price):
    dollars = bill(Prices(per_device_hour=price), hours, UNKNOWN)
    cents = bill(Prices(currency="cent", per_device_hour=100 * price), hours, UNKNOWN)
    assert cents.money[0] == pytest.approx(100 * dollars.money[0])


def test_what_has_no_price_is_unavailable_and_names_the_setting():
    found = bill(Prices(), 10.0, 3.6e6)
    assert not isinstance(found.device_hours, Unavailable)
    for amount, setting in (
        (found.rent, "per_device_hour"),
        (found.energy, "per_kwh"),
        (found.carbon_grams, "grams_per_kwh"),
        (found.money, "per_device_hour or per_kwh"),
        (found.total(), "per_device_hour or per_kwh"),
    ):
        assert isinstance(amount, Unavailable)
        assert setting in amount.remedy


def test_unknown_joules_leave_the_rent_known():
    rented = bill(replace(OWN, per_device_hour=2.5), [8.0, 16.0], UNKNOWN)
    assert np.array_equal(rented.money, [20.0, 40.0])
    assert rented.energy is UNKNOWN
    assert rented.carbon_grams is UNKNOWN
    own = bill(OWN, 8.0, UNKNOWN)
    assert own.money is UNKNOWN
    assert own.total() is UNKNOWN


def test_rent_includes_energy_which_is_still_shown():
    both = bill(replace(OWN, per_device_hour=2.0), 100.0, 3.6e8)
    assert both.money[0] == 200.0
    assert both.energy[0] == pytest.approx(22.0)
    total = both.total()
    assert (total.unit, total.terms[0].name, total.figure.middle) == ("EUR", "rent", 200.0)


def test_the_term_shows_amount_and_price_and_the_interval_follows_the_joules():
    sources = {"prices.per_kwh": Source(0.22, "EUR per kWh", "datasheet", "the contract")}
    total = bill(OWN, 1.0, [3.6e6, 7.2e6], sources).total(1, low=0.9, high=1.2)
    term = total.terms[0]
    assert term.inputs["kWh"] == pytest.approx(2.0)
    assert term.constants["price"].text == "the contract"
    assert bill(OWN, 1.0, 3.6e6).total().terms[0].constants["price"].unit == "EUR per kWh"
    assert (total.figure.low, total.figure.high) == pytest.approx((0.44 * 0.9, 0.44 * 1.2))
    negative = bill(replace(OWN, per_kwh=-0.05), 1.0, 3.6e6).total(low=0.9, high=1.2)
    assert negative.figure.low < negative.figure.middle < negative.figure.high < 0.0


def test_one_price_of_energy_for_many_cases_of_hours():
    found = bill(OWN, [1.0, 2.0, 3.0], 3.6e6)
    assert found.total(2).figure.middle == pytest.approx(0.22)


def test_a_region_fills_in_what_is_not_given_only():
    clean, dirty = (with_region(Prices(), region).grams_per_kwh for region in ("FR", "PL"))
    assert 0.0 < clean < dirty
    assert with_region(OWN, "FR").grams_per_kwh == 380.0
    with pytest.raises(EnergyError, match="not in the carbon table"):
        with_region(Prices(), "XX")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"per_device_hour": -1.0}, "per_device_hour = -1"),
        ({"grams_per_kwh": -1.0}, "grams_per_kwh = -1"),
        ({"per_kwh": math.inf}, "per_kwh = inf"),
    ],
)
def test_wrong_prices_are_refused_by_name(changes, said):
    with pytest.raises(PlanError, match=said):
        bill(replace(OWN, **changes), 1.0, 1.0)


def test_wrong_amounts_are_refused_by_name():
    with pytest.raises(PlanError, match="device_hours = -1"):
        bill(OWN, -1.0, 1.0)
    with pytest.raises(PlanError, match="joules = nan"):
        bill(OWN, 1.0, math.nan)
