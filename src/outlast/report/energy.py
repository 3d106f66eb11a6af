"""Energy in the report: power over time by purpose, joules by device, or why there are none."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from outlast.energy import Energy
from outlast.energy.account import (
    PURPOSES,
    AccountedRun,
    AccountedWindow,
    Amount,
    LossPoint,
    Rates,
    account,
    split,
)
from outlast.energy.prices import Tariff, carbon
from outlast.errors import EnergyError, JobError
from outlast.hardware.figure import Unavailable
from outlast.job import EnergySection, settings_from_text
from outlast.records import energy_totals
from outlast.report import palette, text
from outlast.report.charts import HATCH, HATCHES, Figure, layout
from outlast.report.overview import running_clock
from outlast.report.tables import digits, table, words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outlast.energy.account import EnergyReport, Purpose
    from outlast.records import DeviceEnergy, EnergyTotals, EnergyWindow, Run
    from outlast.report.overview import Overview


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
    run: Run, *, loss_target: float | None = None, settings: EnergySection | None = None
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
    # The loss of each record, with all joules up to it, linear in the steps of a window.
    curves = _curves(totals)
    losses = []
    spent = 0.0
    for record, event in run.steps():
        steps, joules = curves.get(record.attempt, ([], []))
        if steps:
            spent = float(np.interp(event.step, steps, joules))
        losses.append(LossPoint(event.step, event.loss, spent))
    found = account(
        split([window for item in totals.windows for window in _windows(item)]),
        AccountedRun(
            begin=_begin(totals.read[0]),
            seconds=max(totals.seconds, 1e-9),
            tokens=totals.tokens or None,
            losses=losses,
            loss_target=(
                settings.loss_target
                or min((loss.loss for loss in losses if math.isfinite(loss.loss)), default=None)
            )
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
    """Meters that could not be read, and why."""
    found = dict(totals.unavailable)
    found |= {device.name: device.missing[-1] for device in totals.devices if device.missing}
    return _by_reason(found)


def _by_reason(found: dict[str, str]) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, reason in found.items():
        by_reason.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())


def killed_note(totals: EnergyTotals) -> str:
    """Note on the energy that attempts lack that were killed; empty where none was."""
    if not totals.killed:
        return ""
    return (
        f"at least the last {totals.killed_seconds:.3g} s of killed attempts (without a recorded "
        "end) were not metered"
    )


def _gaps(totals: EnergyTotals) -> tuple[str, ...]:
    """Parts missing from the sum, beside windows without a figure, which the account names."""
    absent = _by_reason(totals.unavailable)
    notes = (absent and f"not metered: {absent}", killed_note(totals))
    return tuple(note for note in notes if note)


def settings_of(run: Run) -> EnergySection:
    """The [energy] section of the run's job; the defaults where the job cannot be read."""
    try:
        return settings_from_text(run.job_text).energy
    except JobError:
        return EnergySection()


def _windows(window: EnergyWindow) -> list[AccountedWindow]:
    """One window for each device whose joules count or are missing, in device-seconds."""
    found = [each for row in window.counted if (each := _window(window, row)) is not None]
    if window.event.seconds > 0:
        found += [
            AccountedWindow(Unavailable(str(row.get("unavailable"))), window.event.seconds)
            for row in window.lacking
        ]
    return found


def _window(window: EnergyWindow, device: dict[str, Any]) -> AccountedWindow | None:
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
    return AccountedWindow(energy, seconds, spent)


def _begin(window: EnergyWindow) -> datetime:
    return datetime.fromtimestamp(window.record.time - max(window.event.seconds, 0.0), UTC)


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


_PARTS = {"gpu": "GPU", "cpu": "CPU", "memory": "memory", "node": "node"}


def energy_amount(joules: float) -> str:
    """Joules in the unit that reads well: J, Wh from 1 Wh on, kWh from 1 kWh on."""
    for joules_per_unit, unit in ((3.6e6, "kWh"), (3600.0, "Wh")):
        if joules >= joules_per_unit:
            return f"{text.number(joules / joules_per_unit)} {unit}"
    return f"{text.number(joules)} J"


def missing_energy(run: Run) -> str | None:
    """Why `run` has no figure of energy, in words; None where it has one."""
    totals = energy_totals(run)
    if totals is None:
        return _never_measured(run)
    if totals.joules is not None:
        return None
    return f"unavailable: {missing_meters(totals) or 'no window is recorded'}"


def _never_measured(run: Run) -> str:
    if settings_of(run).measure:
        return "unavailable: nothing about energy is recorded"
    return "not measured: energy.measure = false"


def metered(totals: EnergyTotals) -> str:
    """Devices that the sum covers, e.g. ``2 GPUs and 1 CPU``."""
    counts: dict[str, int] = {}
    for device in totals.devices:
        if device.counted:
            counts[device.part] = counts.get(device.part, 0) + 1
    said = [
        f"{count} {_PARTS.get(part, part)}{'s' if count > 1 and part != 'memory' else ''}"
        for part, count in counts.items()
    ]
    return " and ".join(said)


def gaps(totals: EnergyTotals) -> list[str]:
    """Reasons why the sum is too low."""
    said = []
    if totals.lacking_seconds:
        length = text.duration(totals.lacking_seconds)
        said.append(f"some windows unavailable, so the sum is too low ({length} in all)")
    if note := killed_note(totals):
        said.append(note)
    return said


_MOST_BARS = 300


_COLOURS: dict[str, str] = {
    "useful": "compute",
    "idle": "data",
    "blocked": "communication",
    "straggler": "restart",
    "setup": "startup",
    "unattributed": "other",
}
"""Colours of the account's purposes, as those of the time that they are made of."""


def energy_sentence(run: Run) -> str:
    """The energy of `run` in one line, or why it is not known."""
    missing = missing_energy(run)
    totals = energy_totals(run)
    if missing is not None or totals is None or totals.joules is None:
        return missing or ""
    said = [f"{energy_amount(totals.joules)} {totals.kind} on {metered(totals)}"]
    if totals.joules_per_token is not None:
        said.append(f"{text.number(totals.joules_per_token)} J/token")
    if redone := totals.purposes.get("redone", 0.0):
        said.append(f"{energy_amount(redone)} of it redone")
    found = account_of(run)
    if not isinstance(found, Unavailable):
        said += [
            f"{text.number(figure.value)} {figure.unit}"
            for figure in (found.cost, found.carbon)
            if not isinstance(figure, Unavailable)
        ]
    said += gaps(totals)
    return ", ".join(said)


def energy_to_loss(run: Run) -> str | None:
    """The joules until the loss of energy.loss_target, or the best one, was reached."""
    found = account_of(run)
    if isinstance(found, Unavailable):
        return None
    figure = found.joules_to_loss
    if isinstance(figure, Unavailable):
        return f"unavailable: {figure.reason}"
    return f"{energy_amount(figure.value)}: {figure.source}"


def energy_figure(overview: Overview) -> Figure | None:
    """Mean power of every window over the running time; a colour's area is its energy."""
    totals = energy_totals(overview.run)
    if totals is None or totals.joules is None:
        return None
    bars = _bars(overview, totals.read)
    unit, unit_seconds = text.clock_unit(max(bar.end_seconds for bar in bars))
    names = {name for bar in bars for name in bar.joules}
    traces = [_trace(name, bars, unit_seconds) for name in PURPOSES if name in names]
    figure_layout = layout(
        320, f"running time in {unit}, without gaps", "power in watts", barmode="stack", bargap=0
    )
    figure_layout["legend"]["traceorder"] = "normal"
    figure_layout["yaxis"]["rangemode"] = "tozero"
    alt = f"{energy_sentence(overview.run)}; by purpose in the table below."
    return Figure(
        f"energy-{overview.label}",
        alt[:1].upper() + alt[1:],
        traces,
        figure_layout,
        keyed_below=True,
    )


@dataclass
class _Bar:
    """One window, or several neighbours of a long run together."""

    end_seconds: float
    seconds: float
    joules: dict[str, float]


def _bars(overview: Overview, windows: Sequence[EnergyWindow]) -> list[_Bar]:
    clock = running_clock(overview.run)
    together = -(-len(windows) // _MOST_BARS)
    found: list[_Bar] = []
    for index, window in enumerate(windows):
        if index % together == 0:
            found.append(_Bar(0.0, 0.0, {}))
        bar = found[-1]
        bar.end_seconds = clock(window.record)
        bar.seconds += window.event.seconds
        for name, joules in window.purposes():
            purpose = account_purpose(name)
            bar.joules[purpose] = bar.joules.get(purpose, 0.0) + joules
    return found


def _trace(purpose: str, bars: list[_Bar], unit_seconds: float) -> dict[str, Any]:
    shown = [bar for bar in bars if bar.seconds > 0]
    watts = [bar.joules.get(purpose, 0.0) / bar.seconds for bar in shown]
    return {
        "type": "bar",
        "name": purpose,
        "x": [_rounded((bar.end_seconds - bar.seconds / 2) / unit_seconds) for bar in shown],
        "width": [_rounded(bar.seconds / unit_seconds) for bar in shown],
        "y": [_rounded(value) for value in watts],
        "text": [energy_amount(bar.joules.get(purpose, 0.0)) for bar in shown],
        "textposition": "none",
        "marker": {
            "color": palette.purpose_colour(_COLOURS.get(purpose, purpose)),
            "line": {"width": 0},
            "pattern": {"shape": HATCHES.get(purpose, ""), **HATCH, "size": 6},
        },
        "hovertemplate": "%{y:.4~g} W, %{text}",
    }


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def energy_part(overview: Overview, plot: str) -> str:
    """`plot` (the figure as HTML), energy by purpose and by device; or the plain reason."""
    missing = missing_energy(overview.run)
    totals = energy_totals(overview.run)
    if missing is not None or totals is None:
        return f'<p class="missing">{text.escape(missing or "")}</p>{_devices(totals)}'
    return plot + _sums(overview.run, totals) + _purposes(totals) + _devices(totals)


def _sums(run: Run, totals: EnergyTotals) -> str:
    assert totals.joules is not None
    low, high = totals.low_joules, totals.high_joules
    amount, span = energy_amount(totals.joules), text.duration(totals.seconds)
    said = [f"{amount} in {span}, {totals.kind}: {metered(totals)}."]
    if low is not None and high is not None and low < high:
        said.append(f"With the meters' errors: {energy_amount(low)} to {energy_amount(high)}.")
    if reasons := missing_meters(totals):
        said.append(f"Not in the sum, unavailable: {reasons}.")
    said += [*map(_sentence, gaps(totals)), *_prices(run)]
    return "".join(f'<p class="about">{text.escape(number)}</p>' for number in said)


def _prices(run: Run) -> list[str]:
    """Cost and carbon, or why they are not known."""
    found = account_of(run)
    if isinstance(found, Unavailable):
        return []
    return [
        f"Cost: {found.cost}.",
        f"Carbon: {found.carbon}.",
        f"Energy to a loss: {found.joules_to_loss}.",
        f"PUE of cost and carbon: {found.pue}.",
        *map(_sentence, found.notes),
    ]


def _sentence(note: str) -> str:
    return f"{note[:1].upper()}{note[1:]}."


def _purposes(totals: EnergyTotals) -> str:
    whole = totals.joules or 0.0
    sums: dict[str, float] = {}
    for name, joules in totals.purposes.items():
        purpose = account_purpose(name)
        sums[purpose] = sums.get(purpose, 0.0) + joules
    rows = [
        [
            words(purpose),
            digits(energy_amount(joules)),
            digits(f"{100 * joules / whole:.1f}" if whole else ""),
        ]
        for purpose, joules in sorted(sums.items(), key=lambda part: -part[1])
    ]
    heads = [words("purpose"), digits("energy"), digits("per cent")]
    return table(heads, rows, "Energy by purpose, shared out by the time of each")


def _devices(totals: EnergyTotals | None) -> str:
    if totals is None or not totals.devices:
        return ""
    heads = [words("device"), words("host"), digits("energy"), digits("mean power")]
    heads += [digits("hottest"), digits("clock"), words("to know")]
    return table(heads, [_row(device) for device in totals.devices], "Meters that were read")


def _row(device: DeviceEnergy) -> list[Any]:
    unknown = "unavailable"
    clocks = device.clocks_mhz
    return [
        words(device.name),
        words(device.host),
        digits(unknown if device.joules is None else energy_amount(device.joules)),
        digits(unknown if device.watts is None else f"{text.number(device.watts)} W"),
        digits(unknown if device.hottest_celsius is None else f"{device.hottest_celsius:.0f} °C"),
        digits(unknown if clocks is None else "-".join(map(str, dict.fromkeys(clocks))) + " MHz"),
        words("; ".join(_to_know(device))),
    ]


def _to_know(device: DeviceEnergy) -> list[str]:
    said = [] if device.counted or device.joules is None else ["in its node's figure already"]
    if device.joules is not None and device.kind != "measured":
        said.append(device.kind)
    said += [
        f"{reason} at the end of {text.plural(count, 'window')}"
        for reason, count in device.throttled.items()
    ]
    return [*said, *device.flags, *device.missing]
