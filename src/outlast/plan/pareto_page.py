"""The Pareto front as one interactive HTML file that loads nothing from anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from importlib import resources
from typing import Any

import numpy as np

from outlast.errors import PlanError
from outlast.hardware import Unavailable
from outlast.plan.configuration import layout_words, settings_words
from outlast.plan.objectives import COVERAGE, FIGURES, ends
from outlast.plan.objectives import limits as limits_of
from outlast.plan.pareto import Front, finite_json, kept, rounded, why_none

SHOWN = 500
"""Most points of a page: a picture with more tells no more."""

_LADDERS: dict[str, tuple[tuple[float, str, float], ...]] = {
    "hours": ((96.0, "days", 1 / 24), (0.5, "h", 1.0), (0.0, "min", 60.0)),
    "lost_hours": ((96.0, "days", 1 / 24), (0.5, "h", 1.0), (0.0, "min", 60.0)),
    "kwh": ((2e6, "GWh", 1e-6), (2e3, "MWh", 1e-3), (0.0, "kWh", 1.0)),
    "device_hours": ((2e6, "million GPU h", 1e-6), (2e4, "kGPU h", 1e-3), (0.0, "GPU h", 1.0)),
    "money": ((2e6, "M", 1e-6), (2e4, "k", 1e-3), (0.0, "", 1.0)),
    "grams_co2": ((2e6, "tCO2", 1e-6), (2e3, "kgCO2", 1e-3), (0.0, "gCO2", 1.0)),
    "headroom_bytes": ((-np.inf, "GiB", 2.0**-30),),
    "miss_probability": ((-np.inf, "%", 100.0),),
}
"""By figure: least median, unit in which it reads well, and factor to it, the largest first."""


def page(
    front: Front,
    *,
    title: str = "Pareto front",
    within: Iterable[str] | str = (),
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
        within: First limits, such as "40 h".
        minimise: What the choice minimises at first.
        start: When the run starts, for deadlines.

    Raises:
        PlanError: The front is empty, or what `objectives.limits` raises.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    if not len(front):
        raise PlanError("an empty front makes no page: search with a looser budget")
    if minimise not in FIGURES:
        raise PlanError(f"minimise = {minimise!r} is none of {', '.join(FIGURES)}")
    bounds = limits_of(within, start=start, currency=front.currency)
    front = front.ordered()
    objectives = front.objectives
    known = {name: bounds[name] for name in objectives.available(bounds)}
    inside = kept(objectives, known)
    chosen = []
    if inside.any() and minimise in objectives.available([minimise]):
        chosen = [front.best(minimise, inside)]
    shown, epsilon = front, 0.0
    while len(shown) > SHOWN and epsilon < 1.0:
        epsilon = 2.0 * epsilon or 0.0025
        shown = front.thinned(epsilon, chosen)
    names = shown.objectives.available(FIGURES)
    figures = [_figure(shown, name) for name in names]
    columns = [ends(shown.objectives, name) for name in names]
    points = [_point(shown, point, columns) for point in range(len(shown))]
    content = {
        "figures": figures,
        "axes": list(shown.axes),
        "points": points,
        "knee": shown.knee,
        "limits": known,
        "minimise": minimise if minimise in names else names[0],
        "coverage": round(100 * COVERAGE),
    }
    environment = Environment(
        loader=PackageLoader("outlast.plan", "assets"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=True,
    )
    folder = resources.files("outlast.plan") / "assets"
    # No content can break out of a script element.
    embedded = finite_json(content, separators=(",", ":")).replace("<", "\\u003c")
    return environment.get_template("pareto.html.j2").render(
        title=title,
        facts=_facts(front, len(shown), epsilon),
        refused=[*_refused(shown, bounds), *_beyond(points)],
        content=content,
        rows=[_row(point, figures) for point in points],
        embedded=Markup(embedded),
        plotly=Markup(get_plotlyjs()),
        asset=lambda name: Markup((folder / name).read_text(encoding="utf-8")),
    )


def _figure(front: Front, name: str) -> dict[str, Any]:
    """A figure of the page, in the unit in which its median reads well."""
    figure, values = FIGURES[name], np.asarray(front.objectives.known(name))
    unit, factor, middle = front.unit(name), 1.0, float(np.median(values))
    for least, word, share in reversed(_LADDERS.get(name, ())):
        if middle >= least:
            unit, factor = f"{word}{front.currency}" if name == "money" else word, share
    return {
        "name": name,
        "words": figure.words,
        "unit": unit,
        "factor": factor,
        "log": figure.scale == "log" and bool((values > 0).all()),
        "more": figure.more,
    }


def _point(
    front: Front, point: int, columns: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]
) -> dict[str, Any]:
    candidate = front.candidate(point)
    run, settings = candidate.configuration, candidate.settings
    return {
        "figures": [[float(end[point]) for end in ends_of] for ends_of in columns],
        "cluster": candidate.cluster,
        "precision": run.precision,
        "layout": layout_words(run),
        "mechanisms": settings_words(settings),
        "configuration": asdict(run),
        # How a run goes on without a checkpoint is shown as its user gives it.
        "settings": {**asdict(settings), "recovery": str(settings.recovery)},
        "extrapolated": list(front.objectives.extrapolated(point) or ()),
    }


def _row(point: Mapping[str, Any], figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A row of the table: of each figure its middle, and its ends where they differ."""
    cells = []
    for values, figure in zip(point["figures"], figures, strict=True):
        digits = 3 if FIGURES[figure["name"]].scale == "log" else 2
        low, middle, high = (value * figure["factor"] for value in values)
        between = "" if low == high else f"{rounded(low, digits)} to {rounded(high, digits)}"
        cells.append((rounded(middle, digits + 1), between))
    return {**point, "figures": cells, "extrapolated": "; ".join(point["extrapolated"])}


def _facts(front: Front, shown: int, epsilon: float) -> str:
    axes = " \N{MULTIPLICATION SIGN} ".join(FIGURES[name].words for name in front.axes)
    parts = [
        f"{front.searched:,} candidates searched",
        f"{front.allowed:,} fit in memory with headroom",
    ]
    if front.limits:
        parts.append(f"{front.within:,} of them keep to the budget")
    framework = front.space.framework
    parts.append("no framework named" if framework == "any" else f"layouts of {framework}")
    parts.append(f"{len(front):,} on the exact front over {axes}")
    words = "; ".join(parts) + "."
    if shown < len(front):
        words += (
            f" Shown are {shown:,}: each point that is left out is at most {100 * epsilon:.3g} % "
            "better, on any axis, than one that is shown."
        )
    words += f" All figures are predicted; intervals cover {100 * COVERAGE:.0f} %."
    for name, why in front.left_out.items():
        words += f" No {FIGURES[name].words}: {why.reason}."
    return words


def _refused(front: Front, bounds: Mapping[str, float]) -> list[str]:
    """Sentences on limits of what is not known, and on those that nothing keeps to."""
    lacking = [
        f"{FIGURES[name].words} is not known ({column.reason}), so that its limit is not applied"
        for name in bounds
        if isinstance(column := front.objectives.column(name), Unavailable)
    ]
    known = {name: bounds[name] for name in front.objectives.available(bounds)}
    if not kept(front.objectives, known).any():
        lacking.append(why_none(front.objectives, known, front.currency))
    return lacking


def _beyond(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Number of extrapolated points, and the reason, where all have the same."""
    phrases = [point["extrapolated"] for point in points]
    count = sum(map(bool, phrases))
    if not count:
        return []
    which = "All points" if count == len(points) else f"{count:,} of {len(points):,} points"
    shared = [phrase for phrase in phrases[0] if all(phrase in other for other in phrases)]
    reasons = f": {'; '.join(shared)}" if shared else "; each of them says why"
    untested = "How often intervals hold beyond what was calibrated is not tested"
    return [f"{which} are extrapolated{reasons}. {untested}"]
