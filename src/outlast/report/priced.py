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
from outlast.job import EnergySection, settings_from_text
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
    "straggler": "straggler",
    "checkpoint": "checkpoint",
    "guard": "guard",
    "evaluation": "evaluation",
    "startup": "setup",
    "restart": "setup",
    "redone": "redone",
}
"""Purposes of the records' time as those of the account; the rest is unattributed."""


def account_purpose(name: str) -> Purpose:
    """The account's word for a purpose of the records."""
    return _PURPOSES.get(name, "unattributed")


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
        loss_target: Training loss to which joules are counted too, nats per token; that of the
            job by default, or the best of the run.
        settings: Tariff, region and PUE; those of the run's job by default.
    """
    totals = energy_totals(run)
    if totals is None or totals.joules is None:
        return Unavailable("the run has no figure of energy")
    job_settings = settings_of(run)
    settings = settings or job_settings
    losses = _losses(run, totals)
    found = account(
        split([window for item in totals.windows for window in _windows(item)]),
        Run(
            begin=_begin(totals.read[0]),
            seconds=max(totals.seconds, 1e-9),
            tokens=totals.tokens or None,
            losses=losses,
            loss_target=(settings.loss_target or _best(losses))
            if loss_target is None
            else loss_target,
            metered=tuple(sorted({device.part for device in totals.devices if device.counted})),
        ),
        Rates(pue=settings.pue),
    )
    # The file may have changed or gone since: the run has kept what it said when it began.
    kept = totals.tariff if settings.tariff == job_settings.tariff else ""
    return replace(
        found,
        cost=_cost(settings, totals, kept),
        carbon=_carbon(settings, totals),
        joules_per_token=_per_token(found, totals),
        notes=(*found.notes, *_gaps(totals)),
    )


def _per_token(found: EnergyReport, totals: EnergyTotals) -> Amount | Unavailable:
    """Over the windows that all meters cover, where some do not."""
    figure, per_token = found.joules_per_token, totals.joules_per_token
    if isinstance(figure, Unavailable) or per_token is None or not figure.value:
        return figure
    factor = per_token / figure.value
    return replace(figure, value=per_token, low=figure.low * factor, high=figure.high * factor)


def missing_meters(totals: EnergyTotals) -> str:
    """What could not be read, and why."""
    found = dict(totals.unavailable)
    found |= {device.name: device.missing[-1] for device in totals.devices if device.missing}
    return _by_reason(found)


def _by_reason(found: dict[str, str]) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, reason in found.items():
        by_reason.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())


def killed_note(totals: EnergyTotals) -> str:
    """What is missing of attempts that were killed; empty where none was."""
    if not totals.killed:
        return ""
    return (
        f"at least the last {totals.killed_seconds:.3g} s of killed attempts (without a recorded "
        "end) were not metered"
    )


def _gaps(totals: EnergyTotals) -> tuple[str, ...]:
    """What the sum lacks beside windows without a figure, which the account names by itself."""
    absent = _by_reason(totals.unavailable)
    notes = (absent and f"not metered: {absent}", killed_note(totals))
    return tuple(note for note in notes if note)


def _best(losses: list[LossPoint]) -> float | None:
    """The lowest loss of the record."""
    return min((loss.loss for loss in losses if math.isfinite(loss.loss)), default=None)


def settings_of(run: RecordedRun) -> EnergySection:
    """The [energy] section of the run's job; the defaults where the job cannot be read."""
    try:
        return settings_from_text(run.job_text).energy
    except JobError:
        return EnergySection()


def _windows(window: EnergyWindow) -> list[Window]:
    """One window for each device whose joules count or are missing, in device-seconds."""
    found = [each for row in window.counted if (each := _window(window, row)) is not None]
    if window.event.seconds > 0:
        found += [
            Window(Unavailable(str(row.get("unavailable"))), window.event.seconds)
            for row in window.lacking
        ]
    return found


def _window(window: EnergyWindow, device: dict[str, Any]) -> Window | None:
    joules = float(device["joules"])
    spent: dict[Purpose, float] = {}
    for name, seconds in window.seconds_of(device).items():
        purpose = account_purpose(name)
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
        flags=tuple(str(item) for item in device.get("flags", [])),
    )
    return Window(energy, seconds, spent)


def _begin(window: EnergyWindow) -> datetime:
    return datetime.fromtimestamp(window.record.time - max(window.event.seconds, 0.0), UTC)


def _losses(run: RecordedRun, totals: EnergyTotals) -> list[LossPoint]:
    """The loss of each record, with all joules up to it, linear in the steps of a window.

    By steps and not by the clock, which may be set while a run goes on, and differs among nodes.
    """
    curves = _curves(totals)
    found = []
    spent = 0.0
    for record, event in run.steps():
        steps, joules = curves.get(record.attempt, ([], []))
        if steps:
            spent = float(np.interp(event.step, steps, joules))
        found.append(LossPoint(event.step, event.loss, spent))
    return found


def _curves(totals: EnergyTotals) -> dict[int, tuple[list[float], list[float]]]:
    """By attempt: steps done, and all joules up to there, those of attempts before too."""
    curves: dict[int, tuple[list[float], list[float]]] = {}
    whole = 0.0
    # A window whose counter stood belongs to the next figure.
    carried: tuple[int, int] | None = None
    for window in totals.windows:
        event, attempt = window.event, window.record.attempt
        begin = event.step - event.steps
        if carried is not None and carried[0] == attempt:
            begin = carried[1]
        if not window.counted:
            carried = (attempt, begin) if window.carried else None
            continue
        carried = None
        before, whole = whole, whole + window.joules
        if event.step > begin:
            steps, joules = curves.setdefault(attempt, ([], []))
            steps += [begin, event.step]
            joules += [before, whole]
    return curves


def _cost(settings: EnergySection, totals: EnergyTotals, kept: str) -> Amount | Unavailable:
    if not settings.tariff:
        return Unavailable("energy.tariff names no file")
    try:
        tariff = Tariff.parse(kept, settings.tariff) if kept else Tariff.read(settings.tariff)
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
        price(window.joules, _begin(window), max(window.event.seconds, 0.0))
        for window in totals.read
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
