"""A run's energy as kWh, money, carbon, joules per token and joules to a loss, with intervals."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

from outlast.energy.account.prices import Provider, carbon, intensity, yearly_average
from outlast.energy.cost import JOULES_PER_KWH, checked_pue
from outlast.energy.window import Energy
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from outlast.energy.account.prices import Tariff
    from outlast.energy.window import Kind, Reading


PARTS = ("gpu", "cpu", "memory", "node")
"""Parts of a node that may be metered; "node" is all of it."""


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
class Run:
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
        figures = ("joules", "electricity", "cost", "carbon", "joules_per_token", "joules_to_loss")
        return {
            **{name: _plain(getattr(self, name)) for name in figures},
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
        rows = [
            ("energy", self.joules),
            ("electricity", self.electricity),
            ("cost", self.cost),
            ("carbon", self.carbon),
            ("per token", self.joules_per_token),
            ("to the loss", self.joules_to_loss),
        ]
        lines = [f"{name:<12} {value}" for name, value in rows]
        if isinstance(self.joules, Energy) and self.joules.joules > 0.0:
            for purpose, energy in self.by_purpose.items():
                share = energy.joules / self.joules.joules
                lines.append(f"  {purpose:<12} {energy.joules:,.4g} J  {share:.1%}")
        lines.append(f"{'PUE':<12} {self.pue}")
        return lines + [f"note: {note}" for note in self.notes]


def account(split: Split, run: Run, rates: Rates | None = None) -> EnergyReport:
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
    low, high = _interval(total)
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


def _notes(split: Split, run: Run) -> tuple[str, ...]:
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


def _interval(total: Energy) -> tuple[float, float]:
    if total.joules <= 0.0:
        return 1.0, 1.0
    return total.low_joules / total.joules, total.high_joules / total.joules


def _amount(total: Reading, factor: float, unit: str, source: str) -> Figure:
    """Joules times a factor; a negative one (a price below 0) turns the interval round."""
    if isinstance(total, Unavailable):
        return total
    ends = sorted((total.low_joules * factor, total.high_joules * factor))
    return Amount(
        value=total.joules * factor,
        low=ends[0],
        high=ends[1],
        unit=unit,
        kind=total.kind,
        source=source,
    )


def _plain(value: Energy | Amount | Unavailable) -> dict[str, Any]:
    if isinstance(value, Unavailable):
        return {"unavailable": value.reason}
    if isinstance(value, Energy):
        return {
            "value": value.joules,
            "low": value.low_joules,
            "high": value.high_joules,
            "unit": "J",
            "kind": value.kind,
            "source": value.source,
        }
    return {
        "value": value.value,
        "low": value.low,
        "high": value.high,
        "unit": value.unit,
        "kind": value.kind,
        "source": value.source,
    }


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


WAITING: tuple[Purpose, ...] = ("blocked", "straggler")


SHARING_ERROR = 0.15
"""Half-width of the interval of a share that comes from time alone: power differs among parts."""


WAITING_ERROR = 0.1
"""The same where a known waiting power prices it."""


_CERTAINTY: tuple[Kind, ...] = ("measured", "replayed", "modelled", "simulated")


@dataclass(frozen=True, slots=True)
class Window:
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

    def share(self, purpose: Purpose) -> float | Unavailable:
        """Of the total."""
        if isinstance(self.total, Unavailable):
            return self.total
        part = self.by_purpose.get(purpose)
        if part is None or self.total.joules == 0.0:
            return 0.0
        return part.joules / self.total.joules


def split(
    windows: Sequence[Window],
    *,
    idle_watts: float | None = None,
    blocking_watts: float | None = None,
) -> Split:
    """Splits the joules of windows by purpose.

    Intervals of the windows add up, as errors of one meter go the same way; to these every part
    adds the error of sharing by time, which moves joules between purposes but not the total.

    Args:
        windows: That do not overlap.
        idle_watts: Of an idle device, if known.
        blocking_watts: Of a waiting device, if known.

    Raises:
        EnergyError: For no windows, or powers below 0.
    """
    if not windows:
        raise EnergyError("there is no window to split: meter at least one")
    known: dict[Purpose, float] = {}
    if idle_watts is not None:
        known["idle"] = _checked("idle_watts", idle_watts)
    if blocking_watts is not None:
        known |= dict.fromkeys(WAITING, _checked("blocking_watts", blocking_watts))
    metered = [(window, window.joules) for window in windows]
    readings = [(window, joules) for window, joules in metered if isinstance(joules, Energy)]
    missing = [(window, joules) for window, joules in metered if isinstance(joules, Unavailable)]
    unmetered = math.fsum(window.seconds for window, _ in missing)
    reasons = tuple(dict.fromkeys(joules.reason for _, joules in missing))
    if not readings:
        reason = f"no window was metered: {reasons[0]}"
        return Split(Unavailable(reason), {}, unmetered, reasons)
    sums: dict[Purpose, list[tuple[float, float, float]]] = {}
    for window, energy in readings:
        parts = _shares(window, energy.joules, known)
        alone = len(parts) == 1
        for purpose, joules in parts.items():
            error = 0.0 if alone else WAITING_ERROR if purpose in known else SHARING_ERROR
            low, high = _bounds(energy)
            bounds = (joules * low * (1.0 - error), joules * high * (1.0 + error))
            sums.setdefault(purpose, []).append((joules, *bounds))
    total = _total([energy for _, energy in readings])
    amounts = {purpose: math.fsum(row[0] for row in rows) for purpose, rows in sums.items()}
    _close(amounts, total.joules)
    by_purpose = {}
    for purpose in PURPOSES:
        if purpose in sums:
            low = math.fsum(row[1] for row in sums[purpose])
            high = math.fsum(row[2] for row in sums[purpose])
            amount = amounts[purpose]
            by_purpose[purpose] = Energy(
                joules=amount,
                low_joules=min(low, amount),
                high_joules=max(amount, min(high, max(total.high_joules, amount))),
                kind=total.kind if amount == total.joules else "modelled",
                source=f"{total.source}, split by time",
            )
    return Split(total, by_purpose, unmetered, reasons)


def _shares(window: Window, joules: float, known: Mapping[Purpose, float]) -> dict[Purpose, float]:
    """Joules of a window per purpose."""
    spent = {purpose: s for purpose, s in window.spent_seconds.items() if s > 0.0}
    rest = window.seconds - math.fsum(spent.values())
    if rest > 1e-9 * window.seconds:
        spent["unattributed"] = spent.get("unattributed", 0.0) + rest
    priced = {purpose: known[purpose] * s for purpose, s in spent.items() if purpose in known}
    working = math.fsum(s for purpose, s in spent.items() if purpose not in known)
    waiting = math.fsum(priced.values())
    # A meter that saw less than the known powers, or a window of waiting only: the meter is right.
    if waiting > joules or working == 0.0:
        factor = joules / waiting if waiting > 0.0 else 0.0
        if factor == 0.0:
            return {purpose: joules * s / window.seconds for purpose, s in spent.items()}
        shared = {purpose: amount * factor for purpose, amount in priced.items()}
        return shared | {purpose: 0.0 for purpose in spent if purpose not in priced}
    rate = (joules - waiting) / working
    return {purpose: priced.get(purpose, rate * s) for purpose, s in spent.items()}


def _bounds(energy: Energy) -> tuple[float, float]:
    """The interval relative to the estimate."""
    if energy.joules <= 0.0:
        return 1.0, 1.0
    return energy.low_joules / energy.joules, energy.high_joules / energy.joules


def _total(readings: Sequence[Energy]) -> Energy:
    return Energy(
        joules=math.fsum(energy.joules for energy in readings),
        low_joules=math.fsum(energy.low_joules for energy in readings),
        high_joules=math.fsum(energy.high_joules for energy in readings),
        kind=max((energy.kind for energy in readings), key=_CERTAINTY.index),
        source=", ".join(dict.fromkeys(energy.source for energy in readings)),
        flags=tuple(dict.fromkeys(flag for energy in readings for flag in energy.flags)),
    )


def _close(amounts: dict[Purpose, float], total: float) -> None:
    """Moves the rounding error to the largest amount, so that the exact sum rounds to the total."""
    largest = max(amounts, key=lambda purpose: amounts[purpose])
    others = [amount for purpose, amount in amounts.items() if purpose != largest]
    amounts[largest] = math.fsum([total, *(-amount for amount in others)])


def _checked(name: str, watts: float) -> float:
    if not (math.isfinite(watts) and watts >= 0.0):
        raise EnergyError(f"{name} = {watts} is not a power of at least 0")
    return watts
