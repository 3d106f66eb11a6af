"""The report's parts as HTML: head, pictures, and what hangs on them."""

from __future__ import annotations

import json
import string
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

from outlast.report import charts, palette, text
from outlast.report.energy import energy_figure, energy_part
from outlast.report.forecast import forecast_figure, forecast_part
from outlast.report.mechanisms import (
    coding_figure,
    coding_part,
    guard_part,
    recovery_part,
    tensorized_part,
)
from outlast.report.overview import flops_of, smooth, smoothing_window
from outlast.report.summary import KeyFigure, Unavailable, key_figures, outcome
from outlast.report.tables import (
    Cell,
    attempts_table,
    descriptions,
    digits,
    job_table,
    table,
    time_table,
    warnings_list,
    words,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outlast.report.charts import Figure
    from outlast.report.overview import Floats, Overview


def head(overviews: Sequence[Overview]) -> str:
    """Names, outcomes and key figures: cards for one run, a comparison table for several."""
    single = len(overviews) == 1
    lines = "".join(_name_line(overview, index, single) for index, overview in enumerate(overviews))
    figures = _cards(overviews[0]) if single else _comparison(overviews)
    return f'<section class="head" id="figures" aria-label="Key figures">{lines}{figures}</section>'


def _name_line(overview: Overview, index: int, single: bool) -> str:
    grade, ended = outcome(overview)
    attempts = overview.run.attempts
    when = f"started {text.utc(attempts[0].start_time)} UTC" if attempts else ""
    swatch = "" if single else _swatch(index)
    tag = "h1" if single else "h2"
    return (
        f'<div class="name">{swatch}<{tag}>{text.escape(overview.label)}</{tag}>'
        f'<span class="outcome {grade}">{text.escape(ended)}</span>'
        f'<span class="when">{when}</span></div>'
    )


def _swatch(index: int) -> str:
    return f'<i class="swatch" style="background: {palette.series_colour(index)}"></i>'


def _cards(overview: Overview) -> str:
    cards = "".join(
        f'<div class="card"><dt>{text.escape(figure.label)}</dt>'
        f"<dd>{_figure(figure)}{_kind(figure)}</dd></div>"
        for figure in key_figures(overview)
    )
    return f'<dl class="cards">{cards}</dl>'


def _comparison(overviews: Sequence[Overview]) -> str:
    columns = [{figure.label: figure for figure in key_figures(overview)} for overview in overviews]
    labels = dict.fromkeys(label for column in columns for label in column)
    unknown = Unavailable("not known for this run")
    rows = [
        [
            words(label),
            *(_compared(column.get(label, KeyFigure(label, unknown))) for column in columns),
        ]
        for label in labels
    ]
    heads = [
        words("figure"),
        *(
            Cell(_swatch(index) + text.escape(overview.label))
            for index, overview in enumerate(overviews)
        ),
    ]
    return table(heads, rows, "Key figures of the runs side by side", css_class="comparison")


def _compared(figure: KeyFigure) -> Cell:
    return Cell(_figure(figure, _kind(figure)))


def _figure(figure: KeyFigure, kind: str = "") -> str:
    if isinstance(figure.value, Unavailable):
        return f'<span class="missing">unavailable: {text.escape(figure.value.reason)}</span>'
    unit = f' <span class="unit">{text.escape(figure.unit)}</span>' if figure.unit else ""
    note = f'<span class="note">{text.escape(figure.note)}</span>' if figure.note else ""
    value = f'<span class="value">{text.escape(figure.value)}</span>{unit}'
    return f"<span>{value} {kind}</span>{note}"


def _kind(figure: KeyFigure) -> str:
    return (
        "" if isinstance(figure.value, Unavailable) else f'<span class="kind">{figure.kind}</span>'
    )


def pictures(overviews: Sequence[Overview]) -> list[Figure]:
    """All figures of the report, in reading order."""
    return [
        charts.loss_figure(overviews),
        charts.throughput_figure(overviews),
        charts.step_time_figure(overviews),
        charts.time_split_figure(overviews),
        *(
            charts.timeline_figure(overview, f"timeline-{overview.label}")
            for overview in overviews
            if overview.run.attempts
        ),
        *(figure for overview in overviews if (figure := forecast_figure(overview)) is not None),
        *(figure for overview in overviews if (figure := coding_figure(overview)) is not None),
        *(figure for overview in overviews if (figure := energy_figure(overview)) is not None),
        charts.gradient_figure(overviews),
        charts.learning_rate_figure(overviews),
        *charts.metric_figures(overviews),
    ]


def body(overviews: Sequence[Overview], figures: Sequence[Figure]) -> str:
    """Everything below the head."""
    by_name = {figure.name: figure for figure in figures}

    def timeline(overview: Overview) -> str:
        figure = by_name.get(f"timeline-{overview.label}")
        if figure is None:
            return '<p class="missing">unavailable: no attempt is recorded</p>'
        return _plot(figure)

    def coding(overview: Overview) -> str:
        figure = by_name.get(f"coding-{overview.label}")
        return coding_part(overview, "" if figure is None else _plot(figure))

    def forecast(overview: Overview) -> str:
        figure = by_name.get(f"forecast-{overview.label}")
        return forecast_part(overview, "" if figure is None else _plot(figure))

    def energy(overview: Overview) -> str:
        figure = by_name.get(f"energy-{overview.label}")
        return energy_part(overview, "" if figure is None else _plot(figure))

    parts = [
        _section("loss", "Loss", _loss_note(), _plot(by_name["loss"])),
        _compared_runs(overviews),
        '<div class="pair">',
        _section("throughput", "Throughput", _THROUGHPUT_NOTE, _plot(by_name["throughput"])),
        _section("step-time", "Step time", _STEP_TIME_NOTE, _plot(by_name["step-time"])),
        "</div>",
        _section(
            "time", "Where the time went", _TIME_NOTE, _plot(by_name["time-split"]),
            time_table(overviews),
        ),
        _section("forecast", "Predicted and measured", _FORECAST_NOTE, _each(overviews, forecast))
        if any(name.startswith("forecast-") for name in by_name)
        else "",
        _section("energy", "Energy", _ENERGY_NOTE, _each(overviews, energy)),
        _section("events", "Events", _EVENTS_NOTE, _each(overviews, timeline)),
        _section("attempts", "Attempts", "", _each(overviews, attempts_table)),
        _section(
            "tensorized", "Tensorized layers", _TENSORIZED_NOTE, _each(overviews, tensorized_part)
        ),
        _section("guard", "Guard", _GUARD_NOTE, _each(overviews, guard_part)),
        _section("recovery", "Recovery", "", _each(overviews, recovery_part)),
        _section("coding", "Gradient coding", _CODING_NOTE, _each(overviews, coding)),
        _section("warnings", "Warnings", "", _each(overviews, warnings_list)),
        '<div class="pair">',
        _section("gradient", "Gradient norm", "Before clipping.", _plot(by_name["gradient"])),
        _section("rate", "Learning rate", "", _plot(by_name["rate"])),
        "</div>",
        _section("metrics", "Other figures of the loop", _METRICS_NOTE, *map(_plot, metrics))
        if (metrics := [figure for figure in figures if figure.name.startswith("metric-")])
        else "",
        _section("sample", "What the model writes", "", _each(overviews, _sample)),
        _section("machine", "Machine and versions", "", _each(overviews, descriptions)),
        _section("job", "Job", "", job_table(overviews), _each(overviews, _job_text)),
    ]  # fmt: skip
    return "\n".join(parts)


def _compared_runs(overviews: Sequence[Overview]) -> str:
    if len(overviews) == 1:
        return ""
    title = "Loss for equal effort"
    return _section("comparison", title, _COMPARISON_NOTE, comparison(overviews))


_THROUGHPUT_NOTE = "Measured; light: every record, strong: moving mean."


_STEP_TIME_NOTE = "Measured, every step that was done, also those done again later."


_TIME_NOTE = (
    "Measured on rank 0. Lost work is the time of steps that a later attempt did again; not "
    "recorded is the time after the last step record of an attempt that was killed."
)


_FORECAST_NOTE = (
    "Predicted before the first step and measured in the same attempt. The step time leaves out "
    "the first five steps or the first tenth, whichever is more, but never more than half."
)


_ENERGY_NOTE = (
    "From the meters of each device, for all of the machine's programs. What each purpose took is "
    "the devices' energy shared out by time, as if power were the same within a window. Useful "
    "is computing, idle waiting for data, blocked waiting that all ranks have in common, straggler "
    "waiting for a slow one; redone are steps that a later attempt did again."
)


_COMPARISON_NOTE = (
    "Measured; FLOPs are those that the models need, computed from their layers. Time in steps "
    "leaves out start-up, evaluations and checkpoints. A run in the middle of its schedule looks "
    "worse than one of that length would: compare runs that are complete."
)


_TENSORIZED_NOTE = (
    "Computed from the layers: what every token is multiplied with, by the way with the fewest "
    "operations."
)


_GUARD_NOTE = (
    "Measured on rank 0; findings of all ranks. Sigma is the standard deviation that rounding "
    "alone gives a difference: the rms is near or below 1 where the model fits, and 5.75 is the "
    "threshold. The detection point is a share of the norm of what was checked."
)


_CODING_NOTE = (
    "Measured. Waiting is what the slowest replica would have taken at least for its own share, "
    "from its own micro-batches (with a fixed code: for its coded share). A straggler was not "
    "waited for, and takes more than 1.2 times as long as the median replica. The error is "
    "certified: the gradient is off by at most its square root times the spectral norm of the "
    "matrix of chunk gradients."
)


_METRICS_NOTE = "As the loop gave them to Run.log; light: every record, strong: moving mean."


_EVENTS_NOTE = "Point at a mark to read it. Hatched attempts failed or have no recorded end."


def _loss_note() -> str:
    return (
        "Measured; light: every record, strong: centred moving mean over 2 % of the records "
        "(five in a short run). "
        "Steps that were done again are shown once."
    )


def _section(name: str, title: str, note: str, *content: str) -> str:
    about = f'<p class="about">{text.escape(note)}</p>' if note else ""
    return (
        f'<section class="panel" id="{name}" aria-labelledby="{name}-title">'
        f'<h2 id="{name}-title">{text.escape(title)}</h2>{about}{"".join(content)}</section>'
    )


def _plot(figure: Figure) -> str:
    name = text.escape(figure.name)
    alt = text.escape(figure.alt)
    if not figure.data:
        return f'<p class="missing">unavailable: {alt}</p>'
    return (
        f'<figure>{_switches(figure)}<div class="plot" data-figure="{name}" '
        f'role="img" aria-label="{alt}" style="min-height: {figure.layout["height"]}px"></div>'
        f"<figcaption>{alt}</figcaption></figure>"
    )


def _switches(figure: Figure) -> str:
    groups = []
    if len(figure.views) > 1:
        buttons = "".join(
            f'<button type="button" data-view="{index}" aria-pressed="{_truth(index == 0)}">'
            f"{text.escape(view.label)}</button>"
            for index, view in enumerate(figure.views)
        )
        groups.append(f'<span class="switch" role="group" aria-label="x-axis">{buttons}</span>')
    if figure.log_scale:
        buttons = "".join(
            f'<button type="button" data-scale="{scale}" aria-pressed="{_truth(index == 0)}">'
            f"{scale}</button>"
            for index, scale in enumerate(("linear", "log"))
        )
        groups.append(f'<span class="switch" role="group" aria-label="y-axis">{buttons}</span>')
    return f'<div class="switches">{"".join(groups)}</div>' if groups else ""


def _truth(value: bool) -> str:
    return "true" if value else "false"


def _each(overviews: Sequence[Overview], part: Callable[[Overview], str]) -> str:
    if len(overviews) == 1:
        return part(overviews[0])
    return "".join(
        f"<h3>{_swatch(index)}{text.escape(overview.label)}</h3>{part(overview)}"
        for index, overview in enumerate(overviews)
    )


def _sample(overview: Overview) -> str:
    from outlast.records import Sampled

    found = overview.run.of(Sampled)
    if not found:
        return '<p class="missing">unavailable: no sample is recorded</p>'
    event = found[-1][1]
    continuation = event.text.removeprefix(event.prompt) if event.prompt else event.text
    return (
        f'<p class="about">At step {event.step:,}; the prompt is marked.</p>'
        f'<pre class="sample"><mark>{text.escape(event.prompt)}</mark>'
        f"{text.escape(continuation)}</pre>"
    )


def _job_text(overview: Overview) -> str:
    return (
        "<details><summary>job.toml</summary>"
        '<div class="copied"><button type="button" class="copy">copy</button>'
        f"<pre>{text.escape(overview.run.job_text)}</pre></div></details>"
    )


def render(overviews: Sequence[Overview]) -> str:
    """The report of these runs (at least one) as HTML that loads nothing from anywhere."""
    from plotly.offline import get_plotlyjs

    figures = pictures(overviews)
    names = ", ".join(overview.label for overview in overviews)
    return string.Template(_asset("page.html")).substitute(
        title=text.escape(f"{names} - Outlast report"),
        heading="" if len(overviews) == 1 else f"<h1>{len(overviews)} runs side by side</h1>",
        colours=palette.style_sheet(),
        style=_asset("page.css"),
        head=head(overviews),
        body=body(overviews, figures),
        figures=embed({figure.name: figure.payload() for figure in figures}),
        plotly=get_plotlyjs(),
        script=_asset("page.js"),
    )


def embed(value: object) -> str:
    """`value` as JSON that no content can break out of a script element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (resources.files("outlast.report") / name).read_text(encoding="utf-8")


@dataclass(frozen=True, eq=False)
class Measure:
    """What runs can have spent equally much of.

    Attributes:
        name: In words.
        spent: Of each run, what was spent at every step record; None where it is not known.
        kind: ``steps``, ``tokens``, ``seconds`` or ``flops``, which says how amounts are written.
    """

    name: str
    spent: list[Floats | None]
    kind: str

    def shown(self, amount: float) -> str:
        """An amount for people."""
        if self.kind == "seconds":
            return text.duration(amount)
        return text.number(amount) if self.kind == "flops" else text.count(round(amount))


def measures(overviews: Sequence[Overview]) -> list[Measure]:
    """Steps, tokens, time in steps and FLOPs."""
    return [
        Measure("steps", [overview.training.step.astype(float) for overview in overviews], "steps"),
        Measure("tokens", [_tokens_of(overview) for overview in overviews], "tokens"),
        Measure("time in steps", [step_seconds_of(overview) for overview in overviews], "seconds"),
        Measure(
            "FLOPs",
            [flops_of(overview, overview.training.tokens) for overview in overviews],
            "flops",
        ),
    ]


def _tokens_of(overview: Overview) -> Floats | None:
    tokens = overview.training.tokens
    return tokens.astype(float) if tokens.any() else None


def step_seconds_of(overview: Overview) -> Floats:
    """Seconds in the steps that count, up to every step record: no start-up and no evaluation."""
    return np.cumsum([sum(event.step_seconds) for _, event in overview.run.steps()], dtype=float)


def comparison(overviews: Sequence[Overview]) -> str:
    """Tables of the losses where all runs have spent as much, and of what a loss has cost."""
    if len(overviews) < 2 or not all(len(overview.training.loss) for overview in overviews):
        return '<p class="missing">unavailable: not every run has recorded a loss</p>'
    return _equal(overviews) + _spent(overviews)


def _equal(overviews: Sequence[Overview]) -> str:
    rows = []
    for measure in measures(overviews):
        known = [floats for floats in measure.spent if floats is not None and len(floats)]
        if len(known) < len(overviews):
            continue
        most = min(float(floats[-1]) for floats in known)
        losses = [
            float(np.interp(most, spent, smoothed(overview)))
            for overview, spent in zip(overviews, known, strict=True)
        ]
        row = [words(measure.name), digits(measure.shown(most))]
        row += [digits(text.number(loss)) for loss in losses]
        rows.append(row + [digits(f"{loss - losses[0]:+.4f}") for loss in losses[1:]])
    heads = [words("after equal"), digits("amount"), *_names(overviews)]
    heads += [
        Cell(f"{text.escape(overview.label)} - {text.escape(overviews[0].label)}", numeric=True)
        for overview in overviews[1:]
    ]
    return table(heads, rows, "Training loss (smoothed, nats per token) where all have spent alike")


def _spent(overviews: Sequence[Overview]) -> str:
    curves = [smoothed(overview) for overview in overviews]
    finite = [curve[np.isfinite(curve)] for curve in curves]
    if not all(len(item) for item in finite):
        return ""
    # What every run has reached, so that all can be asked for the way there.
    target = max(float(item.min()) for item in finite)
    rows = []
    for measure in measures(overviews):
        amounts = [
            None if spent is None else _reached(spent, curve, target)
            for spent, curve in zip(measure.spent, curves, strict=True)
        ]
        row = [words(measure.name)]
        row += [
            words("not known") if amount is None else digits(measure.shown(amount))
            for amount in amounts
        ]
        first = amounts[0]
        for amount in amounts[1:]:
            known = amount is not None and first is not None and first > 0
            row.append(digits(f"{amount / first:.3f}x") if known else words("not known"))  # type: ignore[operator]
        rows.append(row)
    heads = [words("spent"), *_names(overviews)]
    heads += [
        Cell(f"{text.escape(overview.label)} / {text.escape(overviews[0].label)}", numeric=True)
        for overview in overviews[1:]
    ]
    return table(
        heads, rows, f"What it took to a smoothed training loss of {text.number(target)}, the "
        "lowest that all have reached"
    )  # fmt: skip


def _names(overviews: Sequence[Overview]) -> list[Cell]:
    return [digits(overview.label) for overview in overviews]


def smoothed(overview: Overview) -> Floats:
    """The training loss as a moving mean, as the picture of the losses draws it."""
    losses = overview.training.loss
    return smooth(losses, smoothing_window(len(losses)))


def _reached(spent: Floats, losses: Floats, target: float) -> float | None:
    """What was spent when a loss first was at or below `target`, between records linearly."""
    below = np.flatnonzero(losses <= target)
    if not len(below):
        return None
    at = int(below[0])
    if at == 0 or not np.isfinite(losses[at - 1]):
        return float(spent[at])
    share = (losses[at - 1] - target) / (losses[at - 1] - losses[at])
    return float(spent[at - 1] + share * (spent[at] - spent[at - 1]))
