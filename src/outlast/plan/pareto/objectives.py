"""Objectives of candidates: one array per figure, with half-widths where they are known.

A space has millions of candidates and a front some hundreds, and a phrase is made row by row. So a
block of candidates carries a question, and the rows that stay carry it on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from outlast.errors import PlanError
from outlast.hardware import Unavailable
from outlast.plan.estimate import Interval
from outlast.plan.pareto.front import Floats, Integers, Mask, Scale, Uncertain

Flags: TypeAlias = Callable[[int], tuple[str, ...] | None]
"""From a row to why its figures are beyond what was calibrated, a phrase each; empty within.

None where nobody knows.
"""


@dataclass(frozen=True, slots=True)
class RowFlags:
    """The question for some rows.

    Attributes:
        flags: For all rows.
        rows: (candidates,) which of them.
    """

    flags: Flags
    rows: Integers

    def __call__(self, row: int) -> tuple[str, ...] | None:
        """Phrases of a row of those that were taken."""
        return self.flags(int(self.rows[row]))


@dataclass(frozen=True, slots=True)
class Joined:
    """The question for the rows of several parts, one after the other.

    Attributes:
        parts: For each part; None for one that cannot be asked.
        ends: (parts,) rows up to the end of each.
    """

    parts: tuple[Flags | None, ...]
    ends: Integers

    def __call__(self, row: int) -> tuple[str, ...] | None:
        """Phrases of a row of the whole."""
        at = int(np.searchsorted(self.ends, row, side="right"))
        part = self.parts[at]
        return None if part is None else part(row - (int(self.ends[at - 1]) if at else 0))


def joined_flags(parts: Sequence[Flags | None], sizes: Sequence[int]) -> Flags | None:
    """The question for several parts; None where none of them can be asked.

    Args:
        parts: One question each.
        sizes: Rows of each.
    """
    if all(part is None for part in parts):
        return None
    return Joined(tuple(parts), np.cumsum(np.asarray(sizes, dtype=np.int64)))


Column: TypeAlias = Floats | Unavailable


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a candidate, less of which is better unless `more`.

    Attributes:
        name: Field or property of `Objectives`.
        words: For people.
        unit: Its unit.
        scale: Whether its half-width and its distances are ratios or differences.
        more: More of it is better.
    """

    name: str
    words: str
    unit: str
    scale: Scale = "log"
    more: bool = False


FIGURES = {
    figure.name: figure
    for figure in (
        Figure("hours", "time to finish", "h"),
        Figure("kwh", "energy", "kWh"),
        Figure("lost_hours", "expected lost time", "h"),
        Figure("miss_probability", "probability to miss the deadline", "", "linear"),
        Figure("loss_difference", "loss against the reference", "nats", "linear"),
        Figure("device_hours", "device hours", "GPU h"),
        Figure("money", "money", ""),
        Figure("grams_co2", "carbon dioxide", "g"),
        Figure("headroom_bytes", "free memory", "B", "linear", more=True),
    )
}
"""All figures that can be an axis or a limit, by name."""

AXES = ("hours", "kwh", "lost_hours", "miss_probability", "loss_difference")
"""Axes of a front where nobody says others; those that are unavailable are left out."""
_NOT_GIVEN = Unavailable("the evaluation gave none")
_NO_DEADLINE = Unavailable("no deadline was given")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Figures of candidates, each (candidates,) or (1,) where all agree.

    Rows that do not fit, and rows in the memory cliff, may hold anything: they never enter a front.

    Attributes:
        hours: Expected wall time until the run is finished, failures included.
        kwh: Energy of devices, nodes and building together.
        lost_hours: Expected time lost to failures: work done twice, waits, restarts, checkpoints.
        miss_probability: Of finishing after the deadline; unavailable without one.
        loss_difference: Loss in nats per token over that of the reference at equal data, >= 0 or
            below it.
        memory_bytes: Reserved on the fullest device.
        capacity_bytes: Of a device.
        fits: It does not run out of memory.
        cliff: It runs, but so close to the limit that the allocator slows it down.
        device_hours: Devices times hours.
        money: In the cluster's currency.
        grams_co2: CO2 equivalent.
        half_widths: By the name of a figure: half the interval, in natural logarithms for figures
            on a log scale (`FIGURES`), else in the figure's unit.
        coverage: Of the intervals.
        flags: From a candidate's row to why its figures are extrapolated, a phrase each; asked only
            of candidates that are read. None where nobody knows.
    """

    hours: Floats
    memory_bytes: Floats
    capacity_bytes: Floats
    fits: Mask
    cliff: Mask
    kwh: Column = _NOT_GIVEN
    lost_hours: Column = _NOT_GIVEN
    miss_probability: Column = _NO_DEADLINE
    loss_difference: Column = _NOT_GIVEN
    device_hours: Column = _NOT_GIVEN
    money: Column = _NOT_GIVEN
    grams_co2: Column = _NOT_GIVEN
    half_widths: Mapping[str, Floats] = field(default_factory=dict)
    coverage: float = 0.9
    flags: Flags | None = None

    def __post_init__(self) -> None:
        unknown = set(self.half_widths) - set(FIGURES)
        if unknown:
            raise PlanError(
                f"half_widths of {', '.join(sorted(unknown))} belong to no figure: the figures are "
                f"{', '.join(FIGURES)}"
            )
        sizes = {column.size for column in self._columns().values()} - {1}
        if len(sizes) > 1:
            raise PlanError(
                f"the figures have {' and '.join(map(str, sorted(sizes)))} rows: give one of each "
                "for every candidate"
            )

    def __len__(self) -> int:
        sizes = {column.size for column in self._columns().values()}
        return next(iter(sizes - {1}), 1)

    def _columns(self) -> dict[str, NDArray[np.generic]]:
        named = {item.name: getattr(self, item.name) for item in fields(self)}
        own = {name: value for name, value in named.items() if isinstance(value, np.ndarray)}
        return own | {f"half_widths {name}": value for name, value in self.half_widths.items()}

    @property
    def headroom_bytes(self) -> Floats:
        """Memory of the fullest device that stays free."""
        return np.asarray(self.capacity_bytes - self.memory_bytes)

    @property
    def allowed(self) -> Mask:
        """(candidates,), true where a candidate may be recommended."""
        return np.broadcast_to(self.fits & ~self.cliff, (len(self),))

    def column(self, name: str) -> Column:
        """(candidates,) of a figure, or why it is not there.

        Raises:
            PlanError: No figure has this name.
        """
        if name not in FIGURES:
            raise PlanError(f"figure {name!r} is none of {', '.join(FIGURES)}")
        found: Column = getattr(self, name)
        return found if isinstance(found, Unavailable) else np.broadcast_to(found, (len(self),))

    def available(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of `names` that every candidate has."""
        return tuple(n for n in names if not isinstance(self.column(n), Unavailable))

    def half_width(self, name: str) -> Floats:
        """(candidates,) half the interval of a figure; 0 where the model gives none."""
        return np.broadcast_to(self.half_widths.get(name, np.zeros(1)), (len(self),))

    def interval(self, name: str, row: int) -> Interval | Unavailable:
        """A figure of one candidate; without a half-width its ends are its middle."""
        column = self.column(name)
        if isinstance(column, Unavailable):
            return column
        low, middle, high = (float(end[row]) for end in ends(self, name))
        return Interval(low, middle, high, self.coverage)

    def extrapolated(self, row: int) -> tuple[str, ...] | None:
        """Why the figures of one candidate are beyond what was calibrated; None: nobody knows."""
        return None if self.flags is None else self.flags(row)

    def taken(self, rows: NDArray[np.intp] | Mask) -> Objectives:
        """The candidates of some rows."""
        count = len(self)

        def some(value: object) -> object:
            if not isinstance(value, np.ndarray):
                return value
            return np.broadcast_to(value, (count,))[rows]

        named = {item.name: some(getattr(self, item.name)) for item in fields(self)}
        named["half_widths"] = {name: some(value) for name, value in self.half_widths.items()}
        if self.flags is not None:
            named["flags"] = RowFlags(self.flags, np.arange(count)[rows])
        return Objectives(**named)  # type: ignore[arg-type]


def ends(objectives: Objectives, name: str) -> tuple[Floats, Floats, Floats]:
    """Low end, middle and high end of a figure, each (candidates,).

    Raises:
        PlanError: The figure is unavailable.
    """
    middle = _middle(objectives, name)
    half = objectives.half_width(name)
    if FIGURES[name].scale == "log":
        return middle * np.exp(-half), middle, middle * np.exp(half)
    low, high = middle - half, middle + half
    if name == "miss_probability":
        low, high = np.clip(low, 0.0, middle), np.clip(high, middle, 1.0)
    return low, middle, high


def _middle(objectives: Objectives, name: str) -> Floats:
    middle = objectives.column(name)
    if isinstance(middle, Unavailable):
        raise PlanError(f"{FIGURES[name].words} is not known: {middle.reason}")
    return middle


def minimised(objectives: Objectives, axes: Sequence[str]) -> Floats:
    """(candidates, axes) of what is to be as small as possible.

    Raises:
        PlanError: An axis is unavailable.
    """
    columns = []
    for name in axes:
        middle = _middle(objectives, name)
        columns.append(-middle if FIGURES[name].more else middle)
    return np.column_stack(columns)


def uncertain(objectives: Objectives, axes: Sequence[str], correlation: float = 0.5) -> Uncertain:
    """The candidates as points with intervals, for `probability_of_dominance` and `undecided`."""
    return Uncertain(
        values=minimised(objectives, axes),
        half_widths=np.column_stack([objectives.half_width(name) for name in axes]),
        scales=tuple(FIGURES[name].scale for name in axes),
        coverage=objectives.coverage,
        correlation=correlation,
    )


def joined(parts: Sequence[Objectives]) -> Objectives:
    """The candidates of several parts, one after the other.

    A figure that one part lacks is lacking in the whole, with that part's reason; half-widths that
    one part lacks are 0 there.

    Raises:
        PlanError: There is no part, or the parts' intervals differ in coverage.
    """
    if not parts:
        raise PlanError("there is nothing to join: give at least one part")
    if len({part.coverage for part in parts}) > 1:
        raise PlanError("parts with intervals of different coverage cannot be joined")
    named: dict[str, object] = {"coverage": parts[0].coverage}
    for item in fields(Objectives):
        if item.name in ("coverage", "half_widths", "flags"):
            continue
        values = [getattr(part, item.name) for part in parts]
        lacking = next((v for v in values if isinstance(v, Unavailable)), None)
        if lacking is not None:
            named[item.name] = lacking
            continue
        named[item.name] = np.concatenate(
            [np.broadcast_to(v, (len(p),)) for v, p in zip(values, parts, strict=True)]
        )
    names = dict.fromkeys(name for part in parts for name in part.half_widths)
    named["half_widths"] = {
        name: np.concatenate([part.half_width(name) for part in parts]) for name in names
    }
    named["flags"] = joined_flags([part.flags for part in parts], [len(part) for part in parts])
    return Objectives(**named)  # type: ignore[arg-type]
