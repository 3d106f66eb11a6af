from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pytest
from plan_runs import NODE, SHORT, TINY

from outlast.errors import PlanError
from outlast.hardware import Unavailable
from outlast.plan.configuration import Mechanisms
from outlast.plan.objectives import Objectives, limits, parse
from outlast.plan.pareto import Front, kept, search
from outlast.plan.space import Axes, Block, Space, space

HOURS = np.array([10.0, 20.0, 40.0, 80.0])
KWH = np.array([400.0, 300.0, 200.0, 150.0])
FREE = np.array([2.0, 30.0, 10.0, 20.0]) * 2.0**30
CLOCKS = (2000.0, 1600.0, 1200.0, 800.0)


def four() -> Space:
    """One layout at four clocks."""
    return space(
        TINY,
        SHORT,
        NODE,
        Axes(
            devices=(8,),
            tensor=(1,),
            pipeline=(1,),
            context=(1,),
            sharding=("none",),
            recompute=("none",),
            micro_batch=(1,),
        ),
        Mechanisms(clock_mhz=CLOCKS),
    )


def evaluate(block: Block) -> Objectives:
    return Objectives(
        hours=HOURS,
        kwh=KWH,
        device_hours=8.0 * HOURS,
        money=KWH * 0.2,
        grams_co2=KWH * 300.0,
        lost_hours=HOURS * 0.05,
        memory_bytes=80.0 * 2.0**30 - FREE,
        capacity_bytes=np.array([80.0 * 2.0**30]),
        fits=np.ones(4, dtype=bool),
        cliff=np.zeros(4, dtype=bool),
        half_widths={"hours": np.array([0.1]), "kwh": np.array([0.2])},
    )


@pytest.fixture
def front() -> Front:
    return search(four(), evaluate)


@pytest.mark.parametrize(
    ("text", "figure", "value"),
    [
        ("40 h", "hours", 40.0),
        ("90min", "hours", 1.5),
        ("3 days", "hours", 72.0),
        ("1 week", "hours", 168.0),
        ("3 MWh", "kwh", 3000.0),
        ("3.6 GJ", "kwh", 1000.0),
        ("2,500 kWh", "kwh", 2500.0),
        ("20 kEUR", "money", 20_000.0),
        ("$1.5M", "money", 1_500_000.0),
        ("20 k€", "money", 20_000.0),
        ("1.5 tCO2", "grams_co2", 1_500_000.0),
        ("1.5 t CO2e", "grams_co2", 1_500_000.0),
        ("800 kgCO₂", "grams_co2", 800_000.0),
        ("10000 GPUh", "device_hours", 10_000.0),
        ("10 kGPU h", "device_hours", 10_000.0),
        ("8 GiB", "headroom_bytes", 8.0 * 2**30),
        ("5 %", "miss_probability", 0.05),
        ("0.01 nats", "loss_difference", 0.01),
        ("1e3 kWh", "kwh", 1000.0),
    ],
)
def test_budgets_as_people_write_them(text: str, figure: str, value: float) -> None:
    budget = parse(text)
    assert budget.figure == figure
    assert budget.value == pytest.approx(value)


def test_a_deadline_counts_from_the_start() -> None:
    start = datetime(2027, 1, 30, 12, 0, tzinfo=UTC)
    assert parse("2027-01-31", start).value == pytest.approx(36.0)
    assert parse("2027-01-31T18:00", start).value == pytest.approx(30.0)
    assert parse("2027-01-31T18:00+02:00", start).value == pytest.approx(28.0)
    assert parse("2027-01-31", datetime(2027, 1, 30, 12, 0)).value == pytest.approx(36.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("40", "'40' has no unit: known are h, d, min"),
        ("forty hours", "'forty hours' is no number with a unit"),
        ("40 parsec", "unknown unit 'parsec'"),
        ("3 mwh", "did you mean MWh"),
        ("0 h", "not above 0"),
        ("-3 h", "no number with a unit"),
        ("1,5 tCO2", "decimal point"),
        ("$3 billion", "after an amount"),
        ("2027-01-31", "say when the run starts"),
        ("2027-02-31", "is no date"),
    ],
)
def test_budgets_that_say_nothing_are_refused(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words.replace("(", r"\(")):
        parse(text)


def test_a_deadline_before_the_start_is_refused() -> None:
    with pytest.raises(PlanError, match="lies before the start 2027-03-01"):
        parse("2027-01-31", datetime(2027, 3, 1, tzinfo=UTC))


def test_of_two_limits_of_one_figure_the_tighter_counts() -> None:
    assert limits(["40 h", "1 d"]) == {"hours": 24.0}
    assert limits(["8 GiB", "10 GiB"]) == {"headroom_bytes": 10.0 * 2**30}
    assert limits("40 h") == {"hours": 40.0}


def test_a_limit_in_another_currency_is_refused() -> None:
    with pytest.raises(PlanError, match="prices are in EUR"):
        limits(["20 USD"], currency="EUR")


@pytest.mark.parametrize(
    ("minimise", "within", "clock"),
    [
        ("hours", (), 2000.0),
        ("kwh", (), 800.0),
        ("hours", ["310 kWh"], 1600.0),
        ("kwh", ["1 d"], 1600.0),
        ("hours", ["50 EUR"], 1200.0),
        ("hours", ["100 kgCO2"], 1600.0),
        ("hours", ["200 GPUh"], 2000.0),
        ("kwh", ["25 GiB"], 1600.0),
        ("headroom_bytes", (), 1600.0),
        ("kwh", ["45 h", "0.35 MWh"], 1200.0),
    ],
)
def test_best_within_a_budget(front: Front, minimise: str, within: list, clock: float) -> None:
    # Device hours of 8 devices: 80 to 640.
    point = front.best(minimise, kept(front.objectives, limits(within)))
    assert front.candidate(point).settings.clock_mhz == clock


@pytest.mark.parametrize(
    ("within", "words"),
    [
        (["8 h"], "time to finish of at most 8.000 h: the least is 10.00 h"),
        (["25 EUR"], "money of at most 25.00 EUR: the least is 30.00 EUR"),
        (["64 GiB"], "free memory of at least 64.00 GiB: the most is 30.00 GiB"),
        (
            ["15 h", "350 kWh"],
            (
                "not time to finish of at most 15.00 h and energy of at most 350.0 kWh together: "
                "the least time to finish with the others kept is 20.00 h; the least energy with "
                "the others kept is 400.0 kWh"
            ),
        ),
    ],
)
def test_nothing_fits_and_the_least_is_named(within: list[str], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        search(four(), evaluate, within)


def test_a_limit_of_what_is_not_known_is_refused() -> None:
    def unpriced(block: Block) -> Objectives:
        usual = evaluate(block)
        return Objectives(
            hours=usual.hours,
            money=Unavailable("no price is given"),
            memory_bytes=usual.memory_bytes,
            capacity_bytes=usual.capacity_bytes,
            fits=usual.fits,
            cliff=usual.cliff,
        )

    with pytest.raises(PlanError, match="money cannot be kept, since it is not known: no price"):
        search(four(), unpriced, ["20 EUR"])


@pytest.mark.parametrize(("cliff", "where"), [(True, "in the memory cliff"), (False, "out of mem")])
def test_when_nothing_fits_the_least_memory_is_named(cliff: bool, where: str) -> None:
    def full(block: Block) -> Objectives:
        return Objectives(
            hours=HOURS,
            memory_bytes=np.array([90.0, 85.0, 99.0, 100.0]) * 2.0**30,
            capacity_bytes=np.array([80.0 * 2.0**30]),
            fits=np.full(4, cliff),
            cliff=np.full(4, cliff),
        )

    with pytest.raises(PlanError, match=rf"least memory is 85\.0 GiB of 80\.0 GiB .*{where}"):
        search(four(), full)
