"""The Pareto front as one interactive HTML file that loads nothing from anywhere."""

from __future__ import annotations

import html
import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from importlib import resources
from typing import Any

import numpy as np

from outlast.errors import PlanError
from outlast.hardware import Unavailable
from outlast.plan.pareto.budget import limits as limits_of
from outlast.plan.pareto.formatting import display, layout_words, settings_words
from outlast.plan.pareto.objectives import FIGURES, ends
from outlast.plan.pareto.search import Front, Wanted, best, kept, rounded, why_none
from outlast.plan.pareto.settings import Settings

SHOWN = 500
"""Most points of a page: a picture with more tells no more."""


def page(
    front: Front,
    *,
    title: str = "Pareto front",
    within: Wanted = (),
    minimise: str = "hours",
    start: datetime | None = None,
) -> str:
    """The page.

    Time against energy, coloured by reliability, larger where the loss is less; with the knee, the
    best choice within limits that the reader can move, all figures' intervals, and a table.

    Args:
        front: At least one point; where there are more than `SHOWN`, a thinned front is drawn, and
            the page says so.
        title: For people.
        within: First limits, as for `best`.
        minimise: What the choice minimises at first.
        start: When the run starts, for deadlines.

    Raises:
        PlanError: The front is empty, or what `limits` raises.
    """
    from plotly.offline import get_plotlyjs

    if not len(front):
        raise PlanError("an empty front makes no page: search with a looser budget")
    if minimise not in FIGURES:
        raise PlanError(f"minimise = {minimise!r} is none of {', '.join(FIGURES)}")
    bounds = limits_of(within, start=start, currency=front.currency)
    front = front.ordered()
    known = {name: bounds[name] for name in front.objectives.available(tuple(bounds))}
    chosen = []
    if kept(front.objectives, known).any() and minimise in front.objectives.available([minimise]):
        chosen = [best(front, minimise=minimise, within=known).point]
    shown, epsilon = _shown(front, chosen)
    names = shown.objectives.available(tuple(FIGURES))
    content = {
        "figures": [_figure(shown, name) for name in names],
        "axes": list(shown.axes),
        "points": [_point(shown, point, names) for point in range(len(shown))],
        "knee": shown.knee,
        "limits": known,
        "minimise": minimise if minimise in names else names[0],
        "coverage": round(100 * shown.objectives.coverage),
    }
    return string.Template(_asset("pareto.html")).substitute(
        title=html.escape(title),
        facts=_facts(front, len(shown), epsilon),
        refused=_refused(shown, bounds) + _beyond(shown),
        head=_table_head(shown, names),
        body=_table_body(shown, names),
        style=_asset("pareto.css"),
        content=_embedded(content),
        plotly=get_plotlyjs(),
        questions=_asset("pareto_content.js"),
        picture=_asset("pareto_picture.js"),
        script=_asset("pareto.js"),
    )


def _asset(name: str) -> str:
    return (resources.files("outlast.plan.pareto") / "assets" / name).read_text(encoding="utf-8")


def _embedded(value: object) -> str:
    """`value` as JSON that no content can break out of a script element."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise PlanError(
            "a figure of the front is not finite: leave out what the model cannot say"
        ) from error
    return text.replace("<", "\\u003c")


def _shown(front: Front, keep: Sequence[int]) -> tuple[Front, float]:
    """The front, thinned until it reads well, and by how much."""
    epsilon = 0.0
    shown = front
    while len(shown) > SHOWN and epsilon < 1.0:
        epsilon = 2.0 * epsilon or 0.0025
        shown = front.thinned(epsilon, keep)
    return shown, epsilon


def _figure(front: Front, name: str) -> dict[str, Any]:
    figure, shown = FIGURES[name], display(front, name)
    return {
        "name": name,
        "words": figure.words,
        "unit": shown.unit,
        "factor": shown.factor,
        "log": figure.scale == "log"
        and bool((np.asarray(front.objectives.column(name)) > 0).all()),
        "more": figure.more,
    }


def _point(front: Front, point: int, names: tuple[str, ...]) -> dict[str, Any]:
    candidate = front.candidate(point)
    figures = [[float(end[point]) for end in ends(front.objectives, name)] for name in names]
    return {
        "figures": figures,
        "cluster": candidate.cluster,
        "precision": candidate.configuration.precision,
        "layout": layout_words(candidate.configuration),
        "mechanisms": settings_words(candidate.settings),
        "configuration": asdict(candidate.configuration),
        "settings": _settings(candidate.settings),
        "extrapolated": list(front.objectives.extrapolated(point) or ()),
    }


def _settings(chosen: Settings) -> dict[str, Any]:
    """Mechanisms as plain values; how a run goes on without a checkpoint as its user gives it."""
    return {**asdict(chosen), "recovery": str(chosen.recovery)}


def _facts(front: Front, shown: int, epsilon: float) -> str:
    axes = " \N{MULTIPLICATION SIGN} ".join(FIGURES[name].words for name in front.axes)
    parts = [
        f"{front.searched:,} candidates searched",
        f"{front.allowed:,} fit in memory with headroom",
    ]
    if front.limits:
        parts.append(f"{front.within:,} of them keep to the budget")
    named = sorted({space.framework for space in front.spaces} - {"any"})
    parts.append(
        f"layouts of {html.escape(' and '.join(named))}" if named else "no framework named"
    )
    parts.append(f"{len(front):,} on the exact front over {html.escape(axes)}")
    words = "; ".join(parts) + "."
    if shown < len(front):
        words += (
            f" Shown are {shown:,}: each point that is left out is at most {100 * epsilon:.3g} % "
            "better, on any axis, than one that is shown."
        )
    words += f" All figures are predicted; intervals cover {100 * front.objectives.coverage:.0f} %."
    for name, why in front.left_out.items():
        words += f" No {FIGURES[name].words}: {html.escape(why.reason)}."
    return words


def _refused(front: Front, bounds: Mapping[str, float]) -> str:
    """Limits on what is not known, in a sentence."""
    lacking = [
        f"{FIGURES[name].words} is not known ({column.reason}), so that its limit is not applied"
        for name in bounds
        if isinstance(column := front.objectives.column(name), Unavailable)
    ]
    known = {name: bounds[name] for name in front.objectives.available(tuple(bounds))}
    if not kept(front.objectives, known).any():
        lacking.append(why_none(front.objectives, known, currency=front.currency))
    return "".join(f'<p class="refused">{html.escape(text)}.</p>' for text in lacking)


def _beyond(front: Front) -> str:
    """Number of extrapolated points, and the reason, where all have the same."""
    each = [front.objectives.extrapolated(point) or () for point in range(len(front))]
    count = sum(map(bool, each))
    if not count:
        return ""
    which = "All points" if count == len(each) else f"{count:,} of {len(each):,} points"
    shared = [phrase for phrase in each[0] if all(phrase in other for other in each)]
    reasons = f": {'; '.join(shared)}" if shared else "; each of them says why"
    return (
        f'<p class="refused">{which} are extrapolated{html.escape(reasons)}. '
        "How often intervals hold beyond what was calibrated is not tested.</p>"
    )


def _table_head(front: Front, names: tuple[str, ...]) -> str:
    cells = []
    for index, name in enumerate(names):
        unit = display(front, name).unit
        words = html.escape(FIGURES[name].words) + (
            f" <small>{html.escape(unit)}</small>" if unit else ""
        )
        cells.append(
            f'<th scope="col" class="numeric"><button type="button" data-sort="{index}">{words}'
            "</button></th>"
        )
    return "".join(cells)


def _table_body(front: Front, names: tuple[str, ...]) -> str:
    shown = [
        (
            display(front, name).factor,
            3 if FIGURES[name].scale == "log" else 2,
            ends(front.objectives, name),
        )
        for name in names
    ]
    several = len({space.cluster.name for space in front.spaces}) > 1
    rows = []
    for point in range(len(front)):
        cells = [
            f'<th scope="row"><button type="button" data-point="{point}">{point + 1}</button></th>'
        ]
        for factor, digits, three in shown:
            low, middle, high = (float(end[point]) * factor for end in three)
            ends_words = f"{rounded(low, digits)} to {rounded(high, digits)}"
            between = "" if low == high else f"<small>{ends_words}</small>"
            cells.append(f'<td class="numeric">{rounded(middle, digits + 1)}{between}</td>')
        candidate = front.candidate(point)
        where = f"{candidate.cluster} · " if several else ""
        phrases = front.objectives.extrapolated(point)
        beyond = (
            f"<small>extrapolated: {html.escape('; '.join(phrases))}</small>" if phrases else ""
        )
        cells.append(
            f"<td>{html.escape(where + layout_words(candidate.configuration))}"
            f"<small>{html.escape(settings_words(candidate.settings))}</small>{beyond}</td>"
        )
        rows.append(f'<tr data-point="{point}">{"".join(cells)}</tr>')
    return "\n".join(rows)
