"""The report's parts as HTML: head, key figures, pictures, and what hangs on them."""

from __future__ import annotations

import json
import math
import re
import string
from collections import Counter
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from outlast.energy.account import Amount
from outlast.records import (
    CheckpointFailed,
    CheckpointSaved,
    RanksChanged,
    StepsDone,
    coding_totals,
    energy_totals,
    guard_totals,
)
from outlast.report import charts, palette, text
from outlast.report.energy import (
    account_of,
    energy_amount,
    energy_figure,
    energy_part,
    gaps,
    metered,
    missing_energy,
)
from outlast.report.overview import OUTCOME_WORDS, flops_of, percentiles, smooth, smoothing_window
from outlast.report.tables import (
    Cell,
    attempts_table,
    coding_figure,
    coding_part,
    descriptions,
    digits,
    forecast_figure,
    forecast_part,
    guard_part,
    job_table,
    recovery_part,
    table,
    tensorized_part,
    time_table,
    warnings_list,
    words,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from outlast.report.charts import Figure
    from outlast.report.overview import Floats, Overview


Kind = Literal["measured", "modelled", "predicted", "replayed", "simulated", "published"]


_NO_STEP = "no step is recorded"


_NO_START = "the start of the run is not recorded"


_NO_TOKENS = "the tokens of a step are not known"


@dataclass(frozen=True)
class Unavailable:
    """Stands in the place of a figure that is not known."""

    reason: str


@dataclass(frozen=True)
class KeyFigure:
    """One figure of a run.

    Attributes:
        value: The number as text.
        unit: Its unit, or nothing for a bare count.
        note: What else to know, in a few words.
        kind: How it was found.
    """

    label: str
    value: str | Unavailable
    unit: str = ""
    note: str = ""
    kind: Kind = "measured"


def outcome(overview: Overview) -> tuple[str, str]:
    """End of the run: one of ``good``, ``caution``, ``bad``, and the words for it."""
    attempts = overview.run.attempts
    if not attempts:
        return "caution", "not started"
    last = attempts[-1]
    if last.outcome == "died":
        return "caution", "no end recorded: killed, or still running"
    end = overview.ends.get(last.number)
    words = OUTCOME_WORDS.get(last.outcome, last.outcome)
    grade = {"completed": "good", "failed": "bad"}.get(last.outcome, "caution")
    return grade, f"{words}: {end.reason}" if end and end.reason else words


def key_figures(overview: Overview) -> list[KeyFigure]:
    """The run's key figures; what is not known says why, and is never 0."""
    return [
        *_quality(overview),
        *_speed(overview),
        *_size_and_time(overview),
        *_mechanisms(overview),
    ]


def _quality(overview: Overview) -> Iterator[KeyFigure]:
    validation = overview.validation
    if not len(validation.loss):
        missing = Unavailable("no evaluation is recorded")
        yield KeyFigure("Validation loss", missing)
        yield KeyFigure("Bits per byte", missing)
    else:
        note = f"at step {validation.step[-1]:,}"
        if np.isfinite(validation.loss).any():
            best = int(
                np.nanargmin(np.where(np.isfinite(validation.loss), validation.loss, np.inf))
            )
            if best != len(validation.loss) - 1:
                lowest = text.number(validation.loss[best])
                note += f"; lowest {lowest} at step {validation.step[best]:,}"
        loss = text.number(validation.loss[-1])
        yield KeyFigure("Validation loss", loss, "nats/token", note)
        bits = float(validation.bits_per_byte[-1])
        unknown = Unavailable("the number of source bytes is not known")
        yield KeyFigure("Bits per byte", unknown if math.isnan(bits) else text.number(bits))
    training = overview.training
    if not len(training.loss):
        yield KeyFigure("Training loss", Unavailable(_NO_STEP))
        return
    if not np.isfinite(training.loss).any():
        yield KeyFigure("Training loss", Unavailable("no record holds a finite loss"))
        return
    window = smoothing_window(len(training.loss))
    tail = training.loss[-window:]
    tail = tail[np.isfinite(tail)]
    last = float(tail.mean()) if len(tail) else float("nan")
    note = f"mean of the last {text.plural(window, 'record')}"
    if bad := int((~np.isfinite(training.loss)).sum()):
        note += f"; {text.plural(bad, 'record')} not finite"
    yield KeyFigure("Training loss", text.number(last), "nats/token", note)


def _speed(overview: Overview) -> Iterator[KeyFigure]:
    training, wall_seconds = overview.training, overview.split.wall_seconds
    rates = training.tokens_per_second[np.isfinite(training.tokens_per_second)]
    if len(rates):
        note = "median over the step records"
        if wall_seconds > 0:
            end_to_end = text.number(float(training.tokens[-1]) / wall_seconds)
            note += f"; {end_to_end} over the whole wall time"
        yield KeyFigure("Throughput", text.number(float(np.median(rates))), "tokens/s", note)
    else:
        reason = (_NO_TOKENS if overview.starts else _NO_START) if len(training.step) else _NO_STEP
        yield KeyFigure("Throughput", Unavailable(reason))
    steps = percentiles(overview.step_seconds)
    if steps is None:
        yield KeyFigure("Step time", Unavailable(_NO_STEP))
    else:
        note = f"median; p90 {text.duration(steps.p90)}, p99 {text.duration(steps.p99)}"
        yield KeyFigure("Step time", text.duration(steps.median), note=note)
    share = utilization(overview)
    if share is not None:
        note = "measured tokens/s over the published peak"
        yield KeyFigure("Model FLOP utilization (MFU)", f"{100 * share:.1f}", "%", note)


def utilization(overview: Overview) -> float | None:
    """Model FLOPs done per FLOP that the devices could have done, or None when not known.

    Needs ``peak_flop_per_s``, the published peak of one process's device, in the machine
    description that every attempt wrote. MFU as in Chowdhery et al., "PaLM", appendix B.
    """
    starts, changes = overview.starts, overview.run.of(RanksChanged)
    done = possible = 0.0
    for record, event in overview.run.of(StepsDone):
        start = starts.get(record.attempt)
        peak = start.machine.get("peak_flop_per_s") if start else None
        if start is None or not isinstance(peak, int | float) or peak <= 0:
            return None
        flops = start.flops_per_token
        for changed, change in changes:
            if changed.attempt == record.attempt and change.step < event.step:
                flops = change.flops_per_token
        done += event.steps * start.tokens_per_step * flops
        possible += sum(event.step_seconds) * start.world_size * peak
    return done / possible if possible > 0 and done > 0 else None


def _size_and_time(overview: Overview) -> Iterator[KeyFigure]:
    training, starts = overview.training, overview.starts
    start = starts[max(starts)] if starts else None
    if len(training.step):
        note = f"of {start.total_steps:,}" if start and start.total_steps else ""
        yield KeyFigure("Steps", text.count(int(training.step[-1])), note=note)
        tokens = int(training.tokens[-1])
        yield KeyFigure("Tokens", text.count(tokens) if tokens else Unavailable(_NO_TOKENS))
    else:
        yield KeyFigure("Steps", Unavailable(_NO_STEP))
        yield KeyFigure("Tokens", Unavailable(_NO_STEP))
    known = start is not None and start.parameters > 0
    size = overview.run.ranks or start
    parameters = text.count(size.parameters) if size and known else Unavailable(_NO_START)
    tensorized = overview.run.tensorized
    note = ""
    if tensorized is not None:
        note = f"{tensorized.form}: {tensorized.parameter_share:.2f}x those of the dense model"
    yield KeyFigure("Parameters", parameters, note=note)
    if size is not None and size.flops_per_token > 0:
        note = "forward and backward"
        if tensorized is not None:
            note += f"; {tensorized.flops_share:.2f}x those of the dense model"
        flops = text.count(round(size.flops_per_token))
        yield KeyFigure("FLOPs per token", flops, note=note, kind="predicted")
    sizes = " → ".join(str(size) for size in overview.world_sizes)
    yield KeyFigure("Processes", sizes if starts else Unavailable(_NO_START))
    run, split = overview.run, overview.split
    if not run.attempts:
        for label in ("Wall time", "Time in compute", "Checkpoints", "Attempts"):
            yield KeyFigure(label, Unavailable("the run was not started"))
        return
    gaps_seconds = overview.elapsed_seconds - split.wall_seconds
    note = "all attempts"
    if gaps_seconds > 0.1:
        note += f"; {text.duration(overview.elapsed_seconds)} with the gaps between them"
    yield KeyFigure("Wall time", text.duration(split.wall_seconds), note=note)
    if split.seconds["compute"] > 0 and split.wall_seconds > 0:
        share = 100 * split.seconds["compute"] / split.wall_seconds
        yield KeyFigure("Time in compute", f"{share:.1f}", "%", "of the wall time")
    else:
        yield KeyFigure("Time in compute", Unavailable(_NO_STEP))
    saved, failed = run.of(CheckpointSaved), run.of(CheckpointFailed)
    waited_seconds = sum(event.blocked_seconds for _, event in saved)
    note = f"training waited {text.duration(waited_seconds)} for them" if saved else ""
    if saved:
        note += f"; the last holds {text.data_size(saved[-1][1].bytes)}"
    if failed:
        note += f"; {len(failed)} failed".removeprefix("" if note else "; ")
    yield KeyFigure("Checkpoints", f"{len(saved):,}", "saved", note)
    ended = Counter(
        OUTCOME_WORDS.get(attempt.outcome, attempt.outcome) for attempt in run.attempts[:-1]
    )
    note = ", ".join(f"{number} {words}" for words, number in ended.items())
    yield KeyFigure("Attempts", f"{len(run.attempts):,}", note=note and f"before the last: {note}")


def _mechanisms(overview: Overview) -> Iterator[KeyFigure]:
    if (guard := guard_totals(overview.run)) is not None:
        note = f"in {text.count(guard.checks)} checks; policy {guard.policy}"
        compute_seconds = overview.split.seconds["compute"]
        if guard.seconds is not None and compute_seconds > 0:
            note += f"; {100 * guard.seconds / compute_seconds:.2f} % of the compute time"
        yield KeyFigure("Silent data corruption", text.count(len(guard.findings)), "found", note)
    if (coding := coding_totals(overview.run)) is not None:
        exact = f"{len(coding.inexact):,} inexact" if coding.inexact else "all exact"
        note = f"{coding.scheme}; {exact}; saved at least {text.duration(coding.saved_seconds)}"
        slow = f"{len(coding.slow_steps):,} of {len(coding.steps):,}"
        yield KeyFigure("Steps with a straggler", slow, "steps", note)
    totals = energy_totals(overview.run)
    missing = missing_energy(overview.run)
    if missing is not None or totals is None or totals.joules is None:
        reason = (missing or "").removeprefix("unavailable: ")
        yield KeyFigure("Energy", Unavailable(reason))
        return
    value, _, unit = energy_amount(totals.joules).rpartition(" ")
    note = metered(totals)
    if redone := totals.purposes.get("redone", 0.0):
        note += f"; {energy_amount(redone)} of it redone work"
    note = "; ".join([note, *gaps(totals)])
    yield KeyFigure("Energy", value, unit, note, cast("Kind", totals.kind))
    if totals.joules_per_token is not None:
        note = "all energy over the tokens that count"
        per_token = text.number(totals.joules_per_token)
        yield KeyFigure("Energy per token", per_token, "J/token", note, cast("Kind", totals.kind))
    found = account_of(overview.run)
    to_loss = getattr(found, "joules_to_loss", None)
    if isinstance(to_loss, Amount):
        value, _, unit = energy_amount(to_loss.value).rpartition(" ")
        kind = cast("Kind", to_loss.kind)
        yield KeyFigure("Energy to the loss", value, unit, to_loss.source, kind)


def head(overviews: Sequence[Overview]) -> str:
    """Names, outcomes and key figures: cards for one run, a comparison table for several."""
    single = len(overviews) == 1
    lines = ""
    for index, overview in enumerate(overviews):
        grade, ended = outcome(overview)
        attempts = overview.run.attempts
        when = f"started {text.utc(attempts[0].start_time)} UTC" if attempts else ""
        swatch, tag = ("", "h1") if single else (_swatch(index), "h2")
        lines += (
            f'<div class="name">{swatch}<{tag}>{text.escape(overview.label)}</{tag}>'
            f'<span class="outcome {grade}">{text.escape(ended)}</span>'
            f'<span class="when">{when}</span></div>'
        )
    if single:
        found = key_figures(overviews[0])
        figures = _cards(headlines(found), "cards first")
        figures += f"<details><summary>All figures</summary>{_cards(found)}</details>"
    else:
        columns = [{figure.label: figure for figure in key_figures(item)} for item in overviews]
        rows = []
        for label in dict.fromkeys(label for column in columns for label in column):
            unknown = KeyFigure(label, Unavailable("not known for this run"))
            figures_of = [column.get(label, unknown) for column in columns]
            cells = (Cell(_figure(figure, _kind(figure))) for figure in figures_of)
            rows.append([words(label), *cells])
        names = [
            Cell(_swatch(index) + text.escape(overview.label))
            for index, overview in enumerate(overviews)
        ]
        caption = "Key figures of the runs side by side"
        figures = table([words("figure"), *names], rows, caption, css_class="comparison")
    return f'<section class="head" id="figures" aria-label="Key figures">{lines}{figures}</section>'


def headlines(figures: Sequence[KeyFigure]) -> list[KeyFigure]:
    """The six figures that a reader asks for first, of those that are known."""
    known = {item.label: item for item in figures if not isinstance(item.value, Unavailable)}
    found = [known[label] for label in _HEADLINES if label in known]
    if "Validation loss" in known:
        found = [item for item in found if item.label != "Training loss"]
    return found[:_MOST_HEADLINES]


_HEADLINES = (
    *("Validation loss", "Training loss", "Steps", "Throughput", "Wall time", "Attempts"),
    *("Silent data corruption", "Steps with a straggler", "Energy", "Checkpoints", "Parameters"),
)


_MOST_HEADLINES = 6


def _cards(figures: Sequence[KeyFigure], css_class: str = "cards") -> str:
    cards = "".join(
        f'<div class="card"><dt>{text.escape(figure.label)}</dt>'
        f"<dd>{_figure(figure)}{_kind(figure)}</dd></div>"
        for figure in figures
    )
    return f'<dl class="{css_class}">{cards}</dl>'


def _swatch(index: int) -> str:
    return f'<i class="swatch" style="background: {palette.series_colour(index)}"></i>'


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


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        name: By which links find it.
        link: Its name at the top of the page.
        content: Its HTML, below its title and note.
    """

    name: str
    link: str
    title: str
    note: str
    content: str

    @property
    def reason(self) -> str:
        """Why there is nothing to show; empty where there is."""
        without_runs = re.sub(r"<h3>.*?</h3>", "", self.content)
        missing = re.findall(r'<p class="missing">([^<]*)</p>', without_runs)
        if re.sub(r'<p class="missing">[^<]*</p>', "", without_runs):
            return ""
        return "; ".join(dict.fromkeys(reason.removeprefix("unavailable: ") for reason in missing))

    def html(self) -> str:
        """The section of the page."""
        about = f'<p class="about">{text.escape(self.note)}</p>' if self.note else ""
        return (
            f'<section class="panel" id="{self.name}" aria-labelledby="{self.name}-title">'
            f'<h2 id="{self.name}-title">{text.escape(self.title)}</h2>{about}{self.content}'
            "</section>"
        )


def body(sections: Sequence[Section]) -> str:
    """Everything below the head, with one list of what there was nothing to show of."""
    shown = [section.html() for section in sections if section.content and not section.reason]
    reasons = [
        f"<li>{text.escape(section.title)}: {section.reason}</li>"
        for section in sections
        if section.reason
    ]
    if reasons:
        listed = f'<ul class="warnings">{"".join(reasons)}</ul>'
        shown.append(Section("missing", "", "Not in this report", "", listed).html())
    return "\n".join(shown)


def sections_of(overviews: Sequence[Overview], figures: Sequence[Figure]) -> list[Section]:
    """The page's parts in reading order; those with nothing to show have a reason."""
    by_name = {figure.name: figure for figure in figures}

    def timeline(overview: Overview) -> str:
        figure = by_name.get(f"timeline-{overview.label}")
        if figure is None:
            return '<p class="missing">unavailable: no attempt is recorded</p>'
        return _plot(figure)

    def drawn(part: Callable[[Overview, str], str], kind: str) -> str:
        def with_plot(overview: Overview) -> str:
            figure = by_name.get(f"{kind}-{overview.label}")
            return part(overview, "" if figure is None else _plot(figure))

        return _each(overviews, with_plot)

    def job_text(overview: Overview) -> str:
        return (
            "<details><summary>job.toml</summary>"
            '<div class="copied"><button type="button" class="copy">copy</button>'
            f"<pre>{text.escape(overview.run.job_text)}</pre></div></details>"
        )

    def plots(*names: str) -> str:
        drawn = [_plot(by_name[name]) for name in names if by_name[name].data]
        return f'<div class="pair">{"".join(drawn)}</div>' if drawn else ""

    several = len(overviews) > 1
    metrics = [_plot(figure) for figure in figures if figure.name.startswith("metric-")]
    loops_own = f'<div class="pair">{"".join(metrics)}</div>' if metrics else ""
    forecasts = any(name.startswith("forecast-") for name in by_name)
    loss = _plot(by_name["loss"]) + plots("gradient", "rate")
    time_split = _plot(by_name["time-split"]) + time_table(overviews)
    speed = plots("throughput", "step-time") or _plot(by_name["throughput"])
    equal, predicted = comparison(overviews) if several else "", ""
    if forecasts:
        predicted = drawn(forecast_part, "forecast")
    layers, jobs = _each(overviews, tensorized_part), _each(overviews, job_text)
    machines, recovered = _each(overviews, descriptions), _each(overviews, recovery_part)
    return [
        Section("loss", "loss", "Loss", _LOSS_NOTE, loss),
        Section("comparison", "comparison", "Loss for equal effort", _COMPARISON_NOTE, equal),
        Section("metrics", "metrics", "Metrics of the loop", _METRICS_NOTE, loops_own),
        Section("time", "time", "Where the time went", _TIME_NOTE, time_split),
        Section("throughput", "speed", "Throughput and step time", _SPEED_NOTE, speed),
        Section("forecast", "forecast", "Predicted and measured", _FORECAST_NOTE, predicted),
        Section("events", "events", "Events", _EVENTS_NOTE, _each(overviews, timeline)),
        Section("attempts", "attempts", "Attempts", "", _each(overviews, attempts_table)),
        Section("warnings", "warnings", "Warnings", "", _each(overviews, warnings_list)),
        Section("recovery", "recovery", "Recovery", "", recovered),
        Section("guard", "guard", "Guard", _GUARD_NOTE, _each(overviews, guard_part)),
        Section("coding", "coding", "Gradient coding", _CODING_NOTE, drawn(coding_part, "coding")),
        Section("energy", "energy", "Energy", _ENERGY_NOTE, drawn(energy_part, "energy")),
        Section("tensorized", "layers", "Tensorized layers", _TENSORIZED_NOTE, layers),
        Section("sample", "sample", "Sample of the model", "", _each(overviews, _sample)),
        Section("machine", "machine", "Machine and versions", "", machines),
        Section("job", "job", "Job", "", job_table(overviews) + jobs),
    ]


_SPEED_NOTE = (
    "Measured. Throughput: light every record, strong moving mean. Step times: every step that was "
    "done, also those done again later."
)


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


_LOSS_NOTE = (
    "Measured; light: every record, strong: centred moving mean over 2 % of the records (five in a "
    "short run). Steps that were done again are shown once; crosses mark where starts ended early, "
    "triangles where the next one resumed. Below: gradient norm before clipping, learning rate."
)


_EVENTS_NOTE = "Point at a mark to read it. Hatched attempts failed or have no recorded end."


def _plot(figure: Figure) -> str:
    name = text.escape(figure.name)
    alt = text.escape(figure.alt)
    if not figure.data:
        return f'<p class="missing">unavailable: {alt}</p>'
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
    switches = f'<div class="switches">{"".join(groups)}</div>' if groups else ""
    return (
        f'<figure>{switches}<div class="plot" data-figure="{name}" '
        f'role="img" aria-label="{alt}" style="min-height: {figure.layout["height"]}px"></div>'
        f"<figcaption>{alt}</figcaption></figure>"
    )


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


def render(overviews: Sequence[Overview], library: str = "") -> str:
    """The report of these runs (at least one) as HTML.

    Args:
        overviews: The runs.
        library: Address of plotly beside the page; empty: the page holds it, and loads nothing.
    """
    figures = pictures(overviews)
    sections = sections_of(overviews, figures)
    links = [
        f'<a href="#{section.name}">{section.link}</a>'
        for section in sections
        if section.content and not section.reason
    ]
    names = ", ".join(overview.label for overview in overviews)
    return string.Template(_asset("page.html")).substitute(
        title=text.escape(f"{names} - Outlast report"),
        heading="" if len(overviews) == 1 else f"<h1>{len(overviews)} runs side by side</h1>",
        colours=palette.style_sheet(),
        style=_asset("page.css"),
        head=head(overviews),
        links="\n".join(links),
        body=body(sections),
        figures=embed({figure.name: figure.payload() for figure in figures}),
        scripts="'unsafe-inline' 'self' file:" if library else "'unsafe-inline'",
        library=_library_script(library),
        script=_asset("page.js"),
    )


def _library_script(library: str) -> str:
    if library:
        return f'<script src="{text.escape(library)}"></script>'
    # It takes a third of a second to import, which a page that shares the library need not spend.
    from plotly.offline import get_plotlyjs

    return f"<script>{get_plotlyjs()}</script>"


def embed(value: object) -> str:
    """`value` as JSON that no content can break out of a script element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (resources.files("outlast.report") / name).read_text(encoding="utf-8")


@dataclass(frozen=True, eq=False)
class Measure:
    """Effort that runs can have spent equally much of.

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
    tokens = [overview.training.tokens for overview in overviews]
    flops = [flops_of(overview, overview.training.tokens) for overview in overviews]
    return [
        Measure("steps", [overview.training.step.astype(float) for overview in overviews], "steps"),
        Measure(
            "tokens", [some.astype(float) if some.any() else None for some in tokens], "tokens"
        ),
        Measure("time in steps", [step_seconds_of(overview) for overview in overviews], "seconds"),
        Measure("FLOPs", flops, "flops"),
    ]


def step_seconds_of(overview: Overview) -> Floats:
    """Seconds in the steps that count, up to every step record: no start-up and no evaluation."""
    return np.cumsum([sum(event.step_seconds) for _, event in overview.run.steps()], dtype=float)


def comparison(overviews: Sequence[Overview]) -> str:
    """Tables of the losses where all runs have spent as much, and of what a loss has cost."""
    if len(overviews) < 2 or not all(len(overview.training.loss) for overview in overviews):
        return '<p class="missing">unavailable: not every run has recorded a loss</p>'
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
    return table(
        heads, rows, "Training loss (smoothed, nats per token) where all have spent alike"
    ) + _spent(overviews)


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
    """The effort spent when a loss first was at or below `target`, between records linearly."""
    below = np.flatnonzero(losses <= target)
    if not len(below):
        return None
    at = int(below[0])
    if at == 0 or not np.isfinite(losses[at - 1]):
        return float(spent[at])
    share = (losses[at - 1] - target) / (losses[at - 1] - losses[at])
    return float(spent[at - 1] + share * (spent[at] - spent[at - 1]))
