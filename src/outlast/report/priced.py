"""The account of a run's energy: its purposes, what it costs, and the carbon of its making."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from outlast.energy.account.carbon import carbon
from outlast.energy.account.purposes import Window, split
from outlast.energy.account.report import Amount, LossPoint, Rates, Run, account
from outlast.energy.account.tariff import Tariff
from outlast.energy.reading import Energy
from outlast.errors import EnergyError, JobError
from outlast.hardware.figure import Unavailable
from outlast.job import EnergySection, job_from_text
from outlast.records import energy_totals

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.energy.account.purposes import Purpose
    from outlast.energy.account.report import EnergyReport
    from outlast.records import EnergyTotals, EnergyWindow
    from outlast.records import Run as RecordedRun

_PURPOSES: dict[str, Purpose] = {
    "compute": "useful",
    "data": "idle",
    "communication": "blocked",
    "checkpoint": "checkpoint",
    "guard": "guard",
    "evaluation": "evaluation",
    "startup": "setup",
    "restart": "setup",
    "redone": "redone",
}
"""Purposes of the records' time as those of the account; the rest is unattributed."""


def account_of(
    run: RecordedRun,
    *,
    loss_target: float | None = None,
    settings: EnergySection | None = None,
) -> EnergyReport | Unavailable:
    """The account of all energy that the run's meters have read, if they have read any.

    Cost and carbon are summed window by window, so that prices by the time of day are those of
    the time at which the energy was drawn.

    Args:
        run: Its records.
        loss_target: Training loss to which joules are counted too, nats per token.
        settings: Tariff, region and PUE; those of the run's job by default.
    """
    totals = energy_totals(run)
    if totals is None or totals.joules is None:
        return Unavailable("the run has no figure of energy")
    settings = settings or settings_of(run)
    found = account(
        split([window for each in totals.windows for window in _windows(each)]),
        Run(
            begin=_begin(totals.read[0]),
            seconds=max(totals.seconds, 1e-9),
            tokens=totals.tokens or None,
            losses=_losses(run, totals),
            loss_target=loss_target,
            metered=tuple(sorted({each.part for each in totals.devices if each.counted})),
        ),
        Rates(pue=settings.pue),
    )
    return replace(found, cost=_cost(settings, totals), carbon=_carbon(settings, totals))


def settings_of(run: RecordedRun) -> EnergySection:
    """The [energy] section of the run's job; the defaults where the job cannot be read."""
    try:
        return job_from_text(run.job_text).energy
    except JobError:
        return EnergySection()


def _windows(window: EnergyWindow) -> list[Window]:
    """One window for each device whose joules count, in device-seconds."""
    return [found for each in window.event.counted if (found := _window(window, each)) is not None]


def _window(window: EnergyWindow, device: dict[str, Any]) -> Window | None:
    joules = float(device["joules"])
    spent: dict[Purpose, float] = {}
    for name, seconds in window.seconds_of(device).items():
        purpose = _PURPOSES.get(name, "unattributed")
        spent[purpose] = spent.get(purpose, 0.0) + seconds
    # A rank's purposes may take a little longer than the window of the rank that records.
    seconds = max(window.event.seconds, math.fsum(spent.values()))
    if seconds <= 0.0:
        return None
    energy = Energy(
        joules=joules,
        low_joules=float(device.get("low_joules", joules)),
        high_joules=float(device.get("high_joules", joules)),
        kind=device.get("kind", "measured"),
        source=str(device.get("source", device.get("name"))),
        flags=tuple(str(each) for each in device.get("flags", [])),
    )
    return Window(energy, seconds, spent)


def _begin(window: EnergyWindow) -> datetime:
    return datetime.fromtimestamp(window.record.time - max(window.event.seconds, 0.0), UTC)


def _losses(run: RecordedRun, totals: EnergyTotals) -> list[LossPoint]:
    """The loss of each record, with all joules up to its time, linear within a window."""
    times = [_begin(totals.read[0]).timestamp()]
    joules = [0.0]
    for each in totals.read:
        times.append(each.record.time)
        joules.append(joules[-1] + (each.event.joules or 0.0))
    steps = run.steps()
    found = np.interp([record.time for record, _ in steps], times, joules)
    return [
        LossPoint(event.step, event.loss, float(each))
        for (_, event), each in zip(steps, found, strict=True)
    ]


def _cost(settings: EnergySection, totals: EnergyTotals) -> Amount | Unavailable:
    if not settings.tariff:
        return Unavailable("energy.tariff names no file")
    try:
        tariff = Tariff.read(settings.tariff)
    except EnergyError as error:
        return Unavailable(str(error))
    return _priced(settings, totals, tariff.cost, tariff.currency, f"tariff {settings.tariff}")


def _carbon(settings: EnergySection, totals: EnergyTotals) -> Amount | Unavailable:
    if not settings.region:
        return Unavailable("energy.region is not set")

    def grams(joules: float, begin: datetime, seconds: float) -> float:
        return carbon(joules, begin, seconds, settings.region)

    source = f"yearly average of {settings.region}"
    try:
        return _priced(settings, totals, grams, "gCO2e", source)
    except EnergyError as error:
        return Unavailable(str(error))


def _priced(
    settings: EnergySection,
    totals: EnergyTotals,
    price: Callable[[float, datetime, float], float],
    unit: str,
    source: str,
) -> Amount:
    """The price of all windows, with the relative interval of the joules."""
    value = settings.pue * math.fsum(
        price(each.event.joules or 0.0, _begin(each), max(each.event.seconds, 0.0))
        for each in totals.read
    )
    whole = totals.joules or 1.0
    ends = [value * (end or 0.0) / whole for end in (totals.low_joules, totals.high_joules)]
    return Amount(
        value=value,
        low=min(ends),
        high=max(ends),
        unit=unit,
        kind=cast("Any", totals.kind),
        source=source,
    )
