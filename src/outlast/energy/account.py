"""A run's energy as kWh, money, carbon, joules per token and joules to a loss, with intervals."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

from outlast.energy.cost import JOULES_PER_KWH, checked_pue
from outlast.energy.prices import Provider, carbon, intensity, yearly_average
from outlast.energy.window import Energy
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from outlast.energy.prices import Tariff
    from outlast.energy.window import Kind, Reading


Purpose: TypeAlias = Literal[
    "useful",
    "idle",
    "blocked",
    "straggler",
    "guard",
    "checkpoint",
    "redone",
    "evaluation",
    "setup",
    "unattributed",
]


PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
"""blocked: waiting for devices of the same step; straggler: waiting for one that is slow."""
PARTS = ("gpu", "cpu", "memory", "node")
"""Parts of a node that may be metered; "node" is all of it."""
SHARING_ERROR = 0.15
"""Half-width of the interval of a share that comes from time alone: power differs among parts."""
_CERTAINTY: tuple[Kind, ...] = ("measured", "replayed", "modelled", "simulated")


@dataclass(frozen=True, slots=True)
class AccountedWindow:
    """Part of a run that one reading covers.

    Attributes:
        joules: Of all devices of the window, or why there is none.
        seconds: Its length, in device-seconds: two devices for a second are 2.
        spent_seconds: Device-seconds per purpose; what they leave of `seconds` is unattributed.
    """

    joules: Reading
    seconds: float
    spent_seconds: Mapping[Purpose, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0.0):
            raise EnergyError(f"seconds = {self.seconds} of a window is not above 0")
        for purpose, seconds in self.spent_seconds.items():
            if purpose not in PURPOSES:
                known = ", ".join(PURPOSES)
                raise EnergyError(f"purpose = {purpose} is none of {known}")
            if not (math.isfinite(seconds) and seconds >= 0.0):
                raise EnergyError(f"{purpose} took {seconds} s: seconds must be at least 0")
        spent = math.fsum(self.spent_seconds.values())
        if spent > self.seconds * (1.0 + 1e-6):
            raise EnergyError(
                f"the purposes of a window took {spent:g} s, more than its {self.seconds:g} s: "
                "count every second once, in device-seconds"
            )


@dataclass(frozen=True, slots=True)
class Split:
    """Joules by purpose.

    Attributes:
        total: Of all windows that were metered.
        by_purpose: Only purposes that took any; they sum to `total.joules` exactly.
        unmetered_seconds: Device-seconds of windows without a reading; their joules are unknown.
        reasons: Why they have none.
    """

    total: Reading
    by_purpose: Mapping[Purpose, Energy]
    unmetered_seconds: float
    reasons: tuple[str, ...]


def split(windows: Sequence[AccountedWindow]) -> Split:
    """Split the joules of windows by purpose, in proportion to time.

    Intervals of the windows add up, as errors of one meter go the same way; to these every part
    adds the error of sharing by time, which moves joules between purposes but not the total.

    Args:
        windows: That do not overlap.

    Raises:
        EnergyError: For no windows.
    """
    if not windows:
        raise EnergyError("there is no window to split: meter at least one")
    missing = [window for window in windows if isinstance(window.joules, Unavailable)]
    unmetered = math.fsum(window.seconds for window in missing)
    reasons = tuple(
        dict.fromkeys(why.reason for w in missing if isinstance(why := w.joules, Unavailable))
    )
    readings: list[Energy] = []
    sums: dict[Purpose, list[tuple[float, float, float]]] = {}
    for window in windows:
        energy = window.joules
        if isinstance(energy, Unavailable):
            continue
        readings.append(energy)
        spent = {purpose: s for purpose, s in window.spent_seconds.items() if s > 0.0}
        rest = window.seconds - math.fsum(spent.values())
        if rest > 1e-9 * window.seconds:
            spent["unattributed"] = spent.get("unattributed", 0.0) + rest
        rate = energy.joules / math.fsum(spent.values())
        low, high = _relative_interval(energy)
        error = 0.0 if len(spent) == 1 else SHARING_ERROR
        for purpose, seconds in spent.items():
            joules = rate * seconds
            bounds = joules * low * (1.0 - error), joules * high * (1.0 + error)
            sums.setdefault(purpose, []).append((joules, *bounds))
    if not readings:
        return Split(Unavailable(f"no window was metered: {reasons[0]}"), {}, unmetered, reasons)
    total = Energy(
        joules=math.fsum(energy.joules for energy in readings),
        low_joules=math.fsum(energy.low_joules for energy in readings),
        high_joules=math.fsum(energy.high_joules for energy in readings),
        kind=max((energy.kind for energy in readings), key=_CERTAINTY.index),
        source=", ".join(dict.fromkeys(energy.source for energy in readings)),
        flags=tuple(dict.fromkeys(flag for energy in readings for flag in energy.flags)),
    )
    amounts = {purpose: math.fsum(row[0] for row in rows) for purpose, rows in sums.items()}
    # The largest amount takes the rounding error, so that the exact sum rounds to the total.
    largest = max(amounts, key=lambda purpose: amounts[purpose])
    others = [amount for purpose, amount in amounts.items() if purpose != largest]
    amounts[largest] = math.fsum([total.joules, *(-amount for amount in others)])
    if (found := math.fsum(amounts.values())) != total.joules:
        # Half-way between two numbers, and rounded to the other one: a last bit decides it.
        smallest = min((p for p in amounts if amounts[p] > 0.0), key=lambda p: amounts[p])
        towards = math.inf if found < total.joules else 0.0
        amounts[smallest] = math.nextafter(amounts[smallest], towards)
    by_purpose = {}
    for purpose in PURPOSES:
        if purpose in sums:
            low, high = (math.fsum(row[end] for row in sums[purpose]) for end in (1, 2))
            amount = amounts[purpose]
            by_purpose[purpose] = Energy(
                joules=amount,
                low_joules=min(low, amount),
                high_joules=max(amount, min(high, max(total.high_joules, amount))),
                kind=total.kind if amount == total.joules else "modelled",
                source=f"{total.source}, split by time",
            )
    return Split(total, by_purpose, unmetered, reasons)


class LossPoint(NamedTuple):
    """A point of a run's loss curve.

    Attributes:
        step: Of training.
        loss: There.
        joules: Of the run up to it, restarts included.
    """

    step: int
    loss: float
    joules: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """A quantity that was derived from joules.

    Attributes:
        value: Best estimate.
        low: Lower end of the 95 % interval; it covers the meter, not the price or the grid.
        high: Upper end.
        unit: Of all three.
        kind: Of the joules.
        source: Of the factor.
    """

    value: float
    low: float
    high: float
    unit: str
    kind: Kind
    source: str

    def __str__(self) -> str:
        spread = f" [{self.low:.4g}, {self.high:.4g}]" if self.low < self.high else ""
        return f"{self.value:.4g}{spread} {self.unit} ({self.kind}: {self.source})"


Figure: TypeAlias = Amount | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountedRun:
    """Figures of a run as plain data.

    Attributes:
        begin: Its start, with a time zone.
        seconds: Its length.
        tokens: It trained on, if known; those of redone steps count once.
        losses: Its loss curve.
        loss_target: A loss to reach.
        metered: Parts of the node that the joules cover, of `PARTS`.
    """

    begin: datetime
    seconds: float
    tokens: float | None = None
    losses: Sequence[LossPoint] = ()
    loss_target: float | None = None
    metered: tuple[str, ...] = ("gpu",)

    def __post_init__(self) -> None:
        if self.begin.tzinfo is None:
            raise EnergyError(f"begin = {self.begin} has no time zone: pass one that has")
        if not (math.isfinite(self.seconds) and self.seconds > 0.0):
            raise EnergyError(f"seconds = {self.seconds} of the run is not above 0")
        if self.tokens is not None and not self.tokens > 0.0:
            raise EnergyError(f"tokens = {self.tokens} is not above 0: pass None if not known")
        unknown = [part for part in self.metered if part not in PARTS]
        if unknown or not self.metered:
            raise EnergyError(f"metered = {self.metered} must be some of {', '.join(PARTS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Price and carbon of a joule.

    Attributes:
        tariff: Price; None leaves the cost out.
        region: Of the grid; None leaves the carbon out.
        provider: Carbon intensity over time.
        pue: Energy of the building over that of its nodes; 1 does not apply any.
    """

    tariff: Tariff | None = None
    region: str | None = None
    provider: Provider = yearly_average
    pue: float = 1.0

    def __post_init__(self) -> None:
        checked_pue(self.pue)


_FIGURES = {
    "joules": "energy",
    "electricity": "electricity",
    "cost": "cost",
    "carbon": "carbon",
    "joules_per_token": "per token",
    "joules_to_loss": "to the loss",
}
"""Figures of a report and their names for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyReport:
    """Energy of a run.

    Attributes:
        joules: Of the metered parts, PUE not applied.
        by_purpose: Sum to `joules`.
        electricity: kWh, PUE applied.
        cost: Of `electricity`.
        carbon: Of `electricity`.
        joules_per_token: Of the metered parts, PUE not applied.
        joules_to_loss: The same, up to the first time that the loss target was met.
        pue: In words.
        metered: Parts of the node that the joules cover.
        notes: What a reader must know, one sentence each.
    """

    joules: Reading
    by_purpose: Mapping[Purpose, Energy]
    electricity: Figure
    cost: Figure
    carbon: Figure
    joules_per_token: Figure
    joules_to_loss: Figure
    pue: str
    metered: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """As plain values; what is not known says why."""
        return {
            **{name: _plain(getattr(self, name)) for name in _FIGURES},
            "by_purpose": {name: _plain(energy) for name, energy in self.by_purpose.items()},
            "pue": self.pue,
            "metered": list(self.metered),
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def lines(self) -> list[str]:
        """For a terminal."""
        lines = [f"{words:<12} {getattr(self, name)}" for name, words in _FIGURES.items()]
        if isinstance(self.joules, Energy) and self.joules.joules > 0.0:
            for purpose, energy in self.by_purpose.items():
                share = energy.joules / self.joules.joules
                lines.append(f"  {purpose:<12} {energy.joules:,.4g} J  {share:.1%}")
        lines.append(f"{'PUE':<12} {self.pue}")
        return lines + [f"note: {note}" for note in self.notes]


def account(split: Split, run: AccountedRun, rates: Rates | None = None) -> EnergyReport:
    """The account of a run.

    Args:
        split: Its joules by purpose.
        run: What it did.
        rates: What a joule costs; without them cost and carbon are unavailable.

    Raises:
        EnergyError: For an unknown region, or a loss curve whose joules fall.
    """
    rates = rates or Rates()
    total = split.total
    where = {"begin": run.begin, "seconds": run.seconds}
    applied = rates.pue > 1.0
    return EnergyReport(
        joules=total,
        by_purpose=split.by_purpose,
        electricity=_amount(
            total, rates.pue / JOULES_PER_KWH, "kWh", "PUE applied" if applied else "no PUE"
        ),
        cost=_cost(total, rates, where),
        carbon=_carbon(total, rates, where),
        joules_per_token=Unavailable("the number of tokens is not known")
        if run.tokens is None
        else _amount(total, 1.0 / run.tokens, "J/token", "tokens of the run"),
        joules_to_loss=joules_to_loss(run.losses, run.loss_target, total),
        pue=f"{rates.pue:g}, as given" if applied else "1, not applied",
        metered=run.metered,
        notes=_notes(split, run),
    )


def joules_to_loss(losses: Sequence[LossPoint], target: float | None, total: Reading) -> Figure:
    """Joules until the loss first was at most the target.

    Between two points of the curve energy is interpolated by the loss. The interval goes from the
    point before to the point after, each with the relative interval of the meter.

    Args:
        losses: The curve, by ascending step.
        target: To reach.
        total: Of the run, for kind, source and interval.

    Raises:
        EnergyError: When joules fall along the curve.
    """
    if isinstance(total, Unavailable):
        return total
    if target is None:
        return Unavailable("no loss target is set")
    points = [point for point in losses if math.isfinite(point.loss)]
    if not points:
        return Unavailable("no loss is known")
    for before, after in itertools.pairwise(points):
        if after.joules < before.joules or after.step <= before.step:
            raise EnergyError(
                f"the loss curve goes back at step {after.step}: order it by step, with the "
                "joules of all steps so far"
            )
    reached = next((i for i, point in enumerate(points) if point.loss <= target), None)
    if reached is None:
        best = min(points, key=lambda point: point.loss)
        return Unavailable(
            f"loss {target:g} was not reached; the lowest was {best.loss:g} at step {best.step}"
        )
    after = points[reached]
    before = points[reached - 1] if reached else after
    fall = before.loss - after.loss
    part = (before.loss - target) / fall if fall > 0.0 else 1.0
    low, high = _relative_interval(total)
    return Amount(
        value=before.joules + part * (after.joules - before.joules),
        low=before.joules * low if reached else after.joules * low,
        high=after.joules * high,
        unit="J",
        kind=total.kind,
        source=f"first loss of at most {target:g}, at step {after.step}",
    )


def _cost(total: Reading, rates: Rates, where: Mapping[str, Any]) -> Figure:
    if rates.tariff is None:
        return Unavailable("no tariff is set", "pass a tariff file")
    price = rates.tariff.cost(JOULES_PER_KWH, **where)
    source = f"{price:.4g} {rates.tariff.currency}/kWh on average"
    return _amount(total, rates.pue * price / JOULES_PER_KWH, rates.tariff.currency, source)


def _carbon(total: Reading, rates: Rates, where: Mapping[str, Any]) -> Figure:
    if rates.region is None:
        return Unavailable("no grid region is set", "pass a country code")
    grams = carbon(JOULES_PER_KWH, region=rates.region, provider=rates.provider, **where)
    source = f"{grams:.4g} g/kWh in {rates.region}"
    if rates.provider is yearly_average:
        known = intensity(rates.region)
        source += f", {known.year}: {known.source}"
    return _amount(total, rates.pue * grams / JOULES_PER_KWH, "gCO2e", source)


def _notes(split: Split, run: AccountedRun) -> tuple[str, ...]:
    notes = []
    if "node" not in run.metered:
        rest = ", ".join(part for part in PARTS if part not in {*run.metered, "node"})
        covered = " and ".join(run.metered)
        others = f"{rest}, network and fans" if rest else "network and fans"
        notes.append(f"the joules are of {covered} only; {others} were not metered")
    if split.unmetered_seconds > 0.0:
        why = "; ".join(split.reasons)
        notes.append(f"{split.unmetered_seconds:g} device-seconds were not metered: {why}")
    if isinstance(split.total, Energy):
        notes += split.total.flags
    return tuple(notes)


def _relative_interval(energy: Energy) -> tuple[float, float]:
    """The interval relative to the estimate."""
    if energy.joules <= 0.0:
        return 1.0, 1.0
    return energy.low_joules / energy.joules, energy.high_joules / energy.joules


def _amount(total: Reading, factor: float, unit: str, source: str) -> Figure:
    """Joules times a factor; a negative one (a price below 0) turns the interval round."""
    if isinstance(total, Unavailable):
        return total
    low, high = sorted((total.low_joules * factor, total.high_joules * factor))
    value = total.joules * factor
    return Amount(value=value, low=low, high=high, unit=unit, kind=total.kind, source=source)


def _plain(value: Energy | Amount | Unavailable) -> dict[str, Any]:
    if isinstance(value, Unavailable):
        return {"unavailable": value.reason}
    if isinstance(value, Energy):
        low, high = value.low_joules, value.high_joules
        value = Amount(
            value=value.joules, low=low, high=high, unit="J", kind=value.kind, source=value.source
        )
    return asdict(value)
