"""Questions to a front or to all candidates: the best within a budget, and why nothing fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

import numpy as np

from outlast.errors import NothingAllowedError, PlanError
from outlast.hardware import Unavailable
from outlast.plan.pareto.budget import limits as limits_of
from outlast.plan.pareto.front import Mask
from outlast.plan.pareto.objectives import FIGURES, Objectives, ends
from outlast.plan.pareto.result import Front, rounded
from outlast.plan.pareto.space import Candidate

Wanted: TypeAlias = Mapping[str, float | str] | Iterable[str] | str


@dataclass(frozen=True, slots=True)
class Choice:
    """A point of a front.

    Attributes:
        point: Its index there.
        candidate: What it is.
    """

    point: int
    candidate: Candidate


def best(
    front: Front,
    *,
    minimise: str = "hours",
    within: Wanted = (),
    start: datetime | None = None,
    surely: bool = False,
) -> Choice:
    """The best point within limits.

    Exact for limits of the front's own axes, and for what rises with one of them; for others
    (free memory, device hours, money where devices are rented) a candidate behind the front may
    do better: give such limits to `search`.

    Args:
        front: What to choose from.
        minimise: A figure; of equal points the better in the front's axes, then the first. Free
            memory is maximised.
        within: Texts ("40 h", "3 MWh"), or by figure a number or a text: the most of each figure;
            of free memory the least.
        start: When the run starts, for deadlines.
        surely: The limits hold at the unfavourable end of the intervals, not only at the middle.

    Raises:
        NothingAllowedError: Nothing keeps to the limits: the text says what the least is.
        PlanError: A figure is unknown.
    """
    bounds = limits_of(within, start=start, currency=front.currency)
    inside = kept(front.objectives, bounds, surely=surely)
    if not inside.any():
        raise NothingAllowedError(
            why_none(front.objectives, bounds, surely=surely, currency=front.currency)
        )
    names = [minimise, *(name for name in front.axes if name != minimise)]
    keys = [_signed(front.objectives, name, "middle")[inside] for name in names]
    point = int(np.flatnonzero(inside)[np.lexsort(keys[::-1])[0]])
    return Choice(point, front.candidate(point))


def kept(objectives: Objectives, bounds: Mapping[str, float], *, surely: bool = False) -> Mask:
    """(candidates,) which may be recommended and keep to all limits.

    Raises:
        PlanError: A limited figure is unavailable.
    """
    inside = objectives.allowed.copy()
    for name, bound in bounds.items():
        inside &= _within(objectives, name, bound, surely)
    return inside


def _within(objectives: Objectives, name: str, bound: float, surely: bool) -> Mask:
    signed = _signed(objectives, name, "worst" if surely else "middle")
    return np.asarray(signed <= (-bound if FIGURES[name].more else bound))


def _signed(objectives: Objectives, name: str, end: Literal["middle", "worst"]) -> np.ndarray:
    """(candidates,) less of which is better."""
    low, middle, high = ends(objectives, name)
    if FIGURES[name].more:
        return -middle if end == "middle" else -low
    return middle if end == "middle" else high


def why_none(
    objectives: Objectives, bounds: Mapping[str, float], *, surely: bool = False, currency: str = ""
) -> str:
    """A sentence on why no candidate keeps to the limits: what the least is.

    Args:
        objectives: Of all candidates.
        bounds: By figure.
        surely: As `best` was asked.
        currency: Of money.
    """
    allowed = objectives.allowed
    if not allowed.any():
        return _too_large(objectives)
    end: Literal["middle", "worst"] = "worst" if surely else "middle"
    at_end = " at the unfavourable end of the interval" if surely else ""
    alone = {}
    for name, bound in bounds.items():
        values = _signed(objectives, name, end)
        alone[name] = float(values[allowed].min())
        if not (allowed & _within(objectives, name, bound, surely)).any():
            figure = FIGURES[name]
            return (
                f"nothing keeps to {_said(name, bound, currency)}: the "
                f"{'most' if figure.more else 'least'} is "
                f"{_amount(name, abs(alone[name]) if figure.more else alone[name], currency)}"
                f"{at_end}"
            )
    parts = []
    for name in bounds:
        others = {other: bound for other, bound in bounds.items() if other != name}
        rest = kept(objectives, others, surely=surely)
        if rest.any():
            least = float(_signed(objectives, name, end)[rest].min())
            more = FIGURES[name].more
            parts.append(
                f"{'the most' if more else 'the least'} {FIGURES[name].words} with the others kept "
                f"is {_amount(name, -least if more else least, currency)}"
            )
    said = " and ".join(_said(name, bound, currency) for name, bound in bounds.items())
    return (
        f"each limit can be kept alone{at_end}, but not {said} together: "
        f"{'; '.join(parts) or 'leave one out'}"
    )


def _too_large(objectives: Objectives) -> str:
    if not len(objectives):
        return "there is no candidate: give more choices to search"
    needed = np.broadcast_to(objectives.memory_bytes, (len(objectives),))
    least = int(np.argmin(np.where(np.isfinite(needed), needed, np.inf)))
    capacity = float(np.broadcast_to(objectives.capacity_bytes, needed.shape)[least])
    where = "in the memory cliff" if objectives.fits.any() else "out of memory"
    return (
        f"nothing fits: the least memory is {needed[least] / 2**30:,.1f} GiB of "
        f"{capacity / 2**30:,.1f} GiB per device, {where}; take more devices, or recompute, shard "
        "or divide more"
    )


def _said(name: str, bound: float, currency: str) -> str:
    most = "at least" if FIGURES[name].more else "at most"
    return f"{FIGURES[name].words} of {most} {_amount(name, bound, currency)}"


def _amount(name: str, value: float, currency: str) -> str:
    if name == "headroom_bytes":
        return f"{value / 2**30:,.2f} GiB"
    if name == "miss_probability":
        return f"{100 * value:.3g} %"
    unit = currency if name == "money" else FIGURES[name].unit
    return f"{rounded(value)} {unit}".strip()


def limited(objectives: Objectives, bounds: Mapping[str, float], currency: str = "") -> Mask:
    """(candidates,) within all limits.

    Raises:
        NothingAllowedError: None is; the text says what the least is.
        PlanError: A limited figure is unavailable.
    """
    for name in bounds:
        column = objectives.column(name)
        if isinstance(column, Unavailable):
            raise PlanError(
                f"a limit of {FIGURES[name].words} cannot be kept, since it is not known: "
                f"{column.reason}"
            )
    inside = kept(objectives, bounds)
    if not inside.any():
        raise NothingAllowedError(why_none(objectives, bounds, currency=currency))
    return inside
