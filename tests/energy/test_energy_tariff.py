"""Electricity prices by time of use."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.energy.prices import Tariff
from outlast.errors import EnergyError

BERLIN = ZoneInfo("Europe/Berlin")
TEXT = """
currency = "EUR"
time_zone = "Europe/Berlin"
price_per_kwh = 0.2
[[bands]]
days = ["mon", "tue", "wed", "thu", "fri"]
from_hour = 8
to_hour = 20
price_per_kwh = 0.3
[[bands]]
days = ["sat"]
from_hour = 22
to_hour = 6
price_per_kwh = 0.1
"""
KWH = 3.6e6


def test_bands_apply_in_local_time(tmp_path) -> None:
    path = tmp_path / "tariff.toml"
    path.write_text(TEXT)
    tariff = Tariff.read(path)
    # Monday 07:30 UTC is 08:30 in Berlin in winter.
    assert tariff.price_at(datetime(2026, 1, 5, 7, 30, tzinfo=UTC)) == 0.3
    assert tariff.price_at(datetime(2026, 1, 5, 6, 30, tzinfo=UTC)) == 0.2
    assert tariff.price_at(datetime(2026, 1, 10, 23, tzinfo=BERLIN)) == 0.1
    # The night of Saturday continues into Sunday; that of Sunday has no band.
    assert tariff.price_at(datetime(2026, 1, 11, 5, 59, tzinfo=BERLIN)) == 0.1
    assert tariff.price_at(datetime(2026, 1, 11, 23, tzinfo=BERLIN)) == 0.2


def test_cost_of_a_run_across_bands() -> None:
    tariff = Tariff.parse(TEXT)
    begin = datetime(2026, 1, 5, 19, 0, tzinfo=BERLIN)
    assert tariff.cost(KWH, begin, 2 * 3600.0) == pytest.approx(0.25)
    assert tariff.cost(KWH, begin + timedelta(minutes=30), 3600.0) == pytest.approx(0.25)
    assert tariff.cost(KWH, begin, 0.0) == pytest.approx(0.3)


def night(time_zone: str = "Europe/Berlin") -> Tariff:
    return Tariff.parse(
        f'currency = "EUR"\ntime_zone = "{time_zone}"\nprice_per_kwh = 0.0\n'
        "[[bands]]\nfrom_hour = 0\nto_hour = 6\nprice_per_kwh = 1.0\n"
    )


@pytest.mark.parametrize(
    ("day", "hours", "length"),
    [((2026, 3, 29), 5, 23), ((2026, 10, 25), 7, 25), ((2026, 6, 1), 6, 24)],
)
def test_a_night_of_the_clock_change_is_an_hour_shorter_or_longer(day, hours, length) -> None:
    begin = datetime(*day, tzinfo=BERLIN)
    cost = night().cost(KWH * length, begin, length * 3600.0)
    assert cost == pytest.approx(hours)


@settings(max_examples=30)
@given(
    st.datetimes(datetime(2026, 3, 27), datetime(2026, 3, 31), timezones=st.just(UTC)),
    st.floats(60.0, 1e5),
    st.floats(0.05, 0.95),
)
def test_parts_of_a_run_cost_what_the_whole_costs(begin, seconds, part) -> None:
    tariff = Tariff.parse(TEXT)
    first = part * seconds
    joules = 1e6 * seconds
    parts = tariff.cost(1e6 * first, begin, first) + tariff.cost(
        joules - 1e6 * first, begin + timedelta(seconds=first), seconds - first
    )
    assert parts == pytest.approx(tariff.cost(joules, begin, seconds), rel=1e-6)


def test_half_hour_time_zones() -> None:
    tariff = night("Asia/Kolkata")
    assert tariff.price_at(datetime(2026, 1, 1, 0, 29, tzinfo=UTC)) == 1.0
    assert tariff.price_at(datetime(2026, 1, 1, 0, 30, tzinfo=UTC)) == 0.0


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"EUR"', '"euro"', "currency = 'euro' must be a code"),
        ("Europe/Berlin", "Europe/Bonn", 'time_zone = "Europe/Bonn" is not known'),
        ("Europe/Berlin", "../etc", r'time_zone = "\.\./etc" is not known'),
        ("price_per_kwh = 0.2", "", "price_per_kwh = None must be a number"),
        ("price_per_kwh = 0.2", "price_per_kwh = nan", "price_per_kwh = nan must be a number"),
        ("from_hour = 8", "from_hour = 24", "band 1: from_hour = 24 must be 0 to 23"),
        ("to_hour = 20", "to_hour = true", "band 1: to_hour = True must be 1 to 24"),
        ('"sat"', '"saturday"', "band 2: days"),
        ("price_per_kwh = 0.1", "price_per_kwh = 0.1\nprize = 1", "band 2: prize is not known"),
        ("[[bands]]", "[[bands", "is not TOML"),
    ],
)
def test_wrong_files_are_refused_with_the_key(old: str, new: str, sentence: str) -> None:
    with pytest.raises(EnergyError, match=sentence):
        Tariff.parse(TEXT.replace(old, new, 1))


def test_missing_file_and_naive_times_are_refused(tmp_path) -> None:
    with pytest.raises(EnergyError, match="cannot be read"):
        Tariff.read(tmp_path / "none.toml")
    with pytest.raises(EnergyError, match="has no time zone"):
        Tariff.parse(TEXT).cost(KWH, datetime(2026, 1, 1), 1.0)
