"""A run's energy in words: amounts, what was metered, and what was not and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.records import energy_totals
from outlast.report import text
from outlast.report.priced import killed_note, missing_meters, settings_of

if TYPE_CHECKING:
    from outlast.records import EnergyTotals, Run

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
    """What the sum covers, e.g. ``2 GPUs and 1 CPU``."""
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
    """What makes the sum too low."""
    said = []
    if totals.lacking_seconds:
        length = text.duration(totals.lacking_seconds)
        said.append(f"some windows unavailable, so the sum is too low ({length} in all)")
    if note := killed_note(totals):
        said.append(note)
    return said
