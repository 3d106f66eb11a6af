"""Carbon of electricity: the shipped table and providers."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from outlast.energy.prices import carbon, intensity, table
from outlast.errors import EnergyError

BEGIN = datetime(2026, 1, 5, 12, tzinfo=UTC)
EUROPEAN_UNION = {
    "AT",
    "BE",
    "BG",
    "HR",
    "CY",
    "CZ",
    "DK",
    "EE",
    "FI",
    "FR",
    "DE",
    "GR",
    "HU",
    "IE",
    "IT",
    "LV",
    "LT",
    "LU",
    "MT",
    "NL",
    "PL",
    "PT",
    "RO",
    "SK",
    "SI",
    "ES",
    "SE",
}


def test_table_covers_the_union_and_says_that_it_is_unverified() -> None:
    known = table()
    assert len(known) >= 60
    assert set(known) > EUROPEAN_UNION
    for each in known.values():
        assert 10.0 <= each.grams_per_kwh <= 1000.0
        assert (each.kind, each.year) == ("unverified", 2023)
        assert "unverified" in each.source


def test_yearly_average_by_default() -> None:
    assert carbon(3.6e6, BEGIN, 3600.0, "pl") == pytest.approx(intensity("PL").grams_per_kwh)
    assert intensity("SE").grams_per_kwh < intensity("PL").grams_per_kwh


def test_a_provider_is_averaged_over_the_run() -> None:
    asked = []

    def rising(moment: datetime, region: str) -> float:
        asked.append((moment, region))
        return 100.0 if moment.hour < 13 else 300.0

    assert carbon(3.6e6, BEGIN, 7200.0, "own", rising) == pytest.approx(200.0)
    assert len(asked) == 8
    assert {region for _, region in asked} == {"own"}


def test_unknown_regions_and_bad_providers_are_refused() -> None:
    with pytest.raises(EnergyError, match=r'region = "germny" .* did you mean DE'):
        intensity("germny")
    with pytest.raises(EnergyError, match=r"gave -1\.0 g/kWh for X"):
        carbon(1.0, BEGIN, 1.0, "X", lambda moment, region: -1.0)
