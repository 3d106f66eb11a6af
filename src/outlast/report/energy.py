"""Energy in the report: power over time by purpose, joules by device, or why there are none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outlast.energy.account.purposes import PURPOSES
from outlast.hardware.figure import Unavailable
from outlast.records import energy_totals
from outlast.report import palette, text
from outlast.report.charts import HATCH, HATCHES
from outlast.report.curves import Figure, layout
from outlast.report.joules import energy_amount, gaps, metered, missing_energy
from outlast.report.overview import running_clock
from outlast.report.priced import account_of, account_purpose, missing_meters
from outlast.report.tables import digits, table, words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.records import DeviceEnergy, EnergyTotals, EnergyWindow, Run
    from outlast.report.overview import Overview

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
        320,
        f"running time in {unit}, without gaps",
        "power in watts",
        barmode="stack",
        bargap=0,
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
        said = f"Energy is {missing}."
        return f'<p class="missing">{text.escape(said)}</p>{_devices(totals)}'
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
