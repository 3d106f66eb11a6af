"""What runs cost, and that nothing is free where no price is given."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.energy.cost import carbon_grams, money
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable
from outlast.plan.cluster import Prices
from outlast.plan.energy import bill, with_region

OWN = Prices(currency="EUR", per_kwh=0.22, grams_per_kwh=380.0)
UNKNOWN = Unavailable("what the devices draw is not known")
ONE = np.ones(1)
amounts = st.floats(0.0, 1e12)


@given(amounts, amounts, st.floats(0.0, 1e3), st.floats(0.0, 1e3))
def test_it_is_what_the_cost_functions_say_and_doubles_with_the_amount(hours, joules, price, grams):
    prices = Prices(per_kwh=price, grams_per_kwh=grams)
    once, twice = (bill(prices, n * hours * ONE, n * joules * ONE) for n in (1, 2))
    assert once.money[0] == pytest.approx(money(joules, price))
    assert once.carbon_grams[0] == pytest.approx(carbon_grams(joules, grams))
    assert twice.money[0] == pytest.approx(2 * once.money[0])
    assert twice.carbon_grams[0] == pytest.approx(2 * once.carbon_grams[0])
    assert once.money[0] >= 0.0
    assert math.isfinite(once.money[0])


@given(amounts, st.floats(0.0, 100.0))
def test_a_price_in_another_currency_changes_the_unit_and_nothing_else(hours, price):
    dollars = bill(Prices(per_device_hour=price), hours * ONE, UNKNOWN)
    cents = bill(Prices(currency="cent", per_device_hour=100 * price), hours * ONE, UNKNOWN)
    assert cents.money[0] == pytest.approx(100 * dollars.money[0])


def test_what_has_no_price_is_unavailable_and_names_the_setting():
    found = bill(Prices(), ONE, 3.6e6 * ONE)
    for amount, setting in (
        (found.money, "per_device_hour or per_kwh"),
        (found.carbon_grams, "grams_per_kwh"),
    ):
        assert isinstance(amount, Unavailable)
        assert setting in amount.remedy


def test_unknown_joules_leave_the_rent_known():
    rented = bill(replace(OWN, per_device_hour=2.5), np.array([8.0, 16.0]), UNKNOWN)
    assert np.array_equal(rented.money, [20.0, 40.0])
    assert rented.carbon_grams is UNKNOWN
    assert bill(OWN, ONE, UNKNOWN).money is UNKNOWN


def test_rent_includes_energy():
    both, own = (bill(replace(OWN, per_device_hour=rent), ONE, 3.6e8 * ONE) for rent in (2.0, None))
    assert (both.money[0], both.rented) == (2.0, True)
    assert (own.money[0], own.rented) == (pytest.approx(22.0), False)


def test_a_region_fills_in_what_is_not_given_only():
    clean, dirty = (with_region(Prices(), region).grams_per_kwh for region in ("FR", "PL"))
    assert 0.0 < clean < dirty
    assert with_region(OWN, "FR").grams_per_kwh == 380.0
    with pytest.raises(EnergyError, match="not in the carbon table"):
        with_region(Prices(), "XX")
