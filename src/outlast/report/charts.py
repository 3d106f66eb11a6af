"""Figures that are no curve: step times, time by purpose, and the events on the wall clock."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from outlast.records import (
    CheckpointCopied,
    CheckpointFailed,
    CheckpointRestored,
    CheckpointSaved,
    Evaluated,
    MemberLost,
    MembershipChanged,
    SettingsChanged,
    StateRecovered,
    StepsDone,
    StopRequested,
    Warned,
    recovery_words,
)
from outlast.report import palette, text
from outlast.report.overview import (
    OUTCOME_WORDS,
    downsample,
    flops_of,
    histogram,
    histogram_edges,
    percentiles,
    smooth,
    smoothing_window,
    thin,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from outlast.records import Record
    from outlast.report.overview import Floats, Integers, Overview, Training, Validation


_RAW_RUNS = 3


_LABELLED_RESTARTS = 6


@dataclass(frozen=True)
class View:
    """One choice of x-axis.

    Attributes:
        label: Text of its button.
        title: Title of the axis.
        x: Positions of every trace's points, by trace.
    """

    label: str
    title: str
    x: list[list[Any]]


@dataclass(frozen=True)
class Figure:
    """One picture: traces without x (the first view supplies it) or with their own.

    Attributes:
        alt: The picture in one sentence, for those who cannot see it.
        log_scale: Whether the reader may switch the y-axis to a logarithmic one.
        keyed_below: Whether a table below shows the colours, so that a narrow screen needs no
            legend.
    """

    name: str
    alt: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    views: tuple[View, ...] = ()
    log_scale: bool = False
    keyed_below: bool = False

    def payload(self) -> dict[str, Any]:
        """Data for the page's script, without NaN and infinities, which JSON lacks."""
        views = [{"title": view.title, "x": view.x} for view in self.views]
        found: dict[str, Any] = _jsonable(
            {
                "data": self.data,
                "layout": self.layout,
                "views": views,
                "keyedBelow": self.keyed_below,
            }
        )
        return found


def layout(height: int, x_title: str, y_title: str, **more: Any) -> dict[str, Any]:
    """The layout that all figures share; `height` in pixels."""
    axis = {
        "gridcolor": "var(--grid)",
        "zerolinecolor": "var(--grid)",
        "linecolor": "var(--line)",
        "automargin": True,
    }
    return {
        "height": height,
        "autosize": True,
        "margin": {"l": 54, "r": 16, "t": 14, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "var(--text)", "size": 12.5},
        "hovermode": "x unified",
        "hoverlabel": {
            "bgcolor": "var(--panel)",
            "bordercolor": "var(--line)",
            "font": {"color": "var(--text)"},
        },
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "modebar": {
            "bgcolor": "rgba(0,0,0,0)",
            "color": "var(--muted)",
            "activecolor": "var(--text)",
        },
        "uirevision": "kept",
        "xaxis": {**axis, "title": {"text": x_title}},
        "yaxis": {**axis, "title": {"text": y_title}},
        **more,
    }


def loss_figure(overviews: Sequence[Overview]) -> Figure:
    """Training loss (raw and smoothed) and validation loss of all runs."""
    unit, unit_seconds = text.clock_unit(max(overview.split.wall_seconds for overview in overviews))
    traces: list[dict[str, Any]] = []
    x: list[list[list[Any]]] = [[], [], [], []]
    single = len(overviews) == 1
    for index, overview in enumerate(overviews):
        for trace, curve, kept in _loss_traces(overview, index, single):
            traces.append(trace)
            x[0].append(curve.step[kept].tolist())
            x[1].append(curve.tokens[kept].tolist() if curve.tokens.any() else [None] * len(kept))
            x[2].append(_rounded(curve.seconds[kept] / unit_seconds))
            flops = flops_of(overview, curve.tokens[kept])
            x[3].append([None] * len(kept) if flops is None else _rounded(flops))
    titles = (
        "steps done",
        "tokens trained on",
        f"running time in {unit}, without gaps",
        "FLOPs of the model",
    )
    views = tuple(
        View(label, title, positions)
        for label, title, positions in zip(
            ("step", "tokens", "time", "FLOPs"), titles, x, strict=True
        )
        if any(value is not None for position in positions for value in position)
    )
    hidden = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
    figure_layout = layout(430, titles[0], "loss in nats per token", yaxis2=hidden)
    sentences = []
    for item in overviews:
        finite = item.training.loss[np.isfinite(item.training.loss)]
        if len(finite):
            first, last = text.number(float(finite[0])), text.number(float(finite[-1]))
            steps = text.plural(int(item.training.step[-1]), "step")
            words = f"training loss from {first} to {last} nats per token over {steps}"
        else:
            words = "no training loss is recorded"
        sentences.append(said(item, len(overviews) == 1, words))
    return Figure(
        "loss", ("; ".join(sentences) + "."), traces, figure_layout, views, log_scale=True
    )


def _loss_traces(
    overview: Overview, index: int, single: bool
) -> list[tuple[dict[str, Any], Training | Validation, Integers]]:
    training, validation = overview.training, overview.validation
    prefix = "" if single else f"{text.escape(overview.label)}: "
    colour, dash = palette.series_colour(index), palette.series_dash(index)
    found: list[tuple[dict[str, Any], Training | Validation, Integers]] = []
    if len(training.loss):
        raw, smoothed = _raw_and_smooth(training.loss)
        light = _line(training.loss[raw], f"{prefix}training", colour, "solid", 1)
        light |= {"opacity": 0.35, "hoverinfo": "skip", "showlegend": single}
        light |= {"visible": True if index < _RAW_RUNS else "legendonly"}
        means = smooth(training.loss, smoothing_window(len(training.loss)))
        name = f"{prefix}training, smoothed"
        found.append((light, training, raw))
        found.append((_line(means[smoothed], name, colour, dash, 2.2), training, smoothed))
        bad = np.flatnonzero(~np.isfinite(training.loss))[:1000]
        # Where no loss is finite, none was told.
        if 0 < len(bad) < len(training.loss):
            found.append(
                (
                    {
                        "type": "scatter",
                        "mode": "markers",
                        "name": f"{prefix}loss not finite",
                        "y": [0.03] * len(bad),
                        "yaxis": "y2",
                        "marker": {"symbol": "x", "size": 9, "color": "var(--bad)"},
                        "text": [
                            f"{training.loss[at]} at step {training.step[at]:,}" for at in bad
                        ],
                        "hovertemplate": "loss is %{text}<extra></extra>",
                    },
                    training,
                    bad,
                )
            )
        if single:
            found += _ends_and_resumes(overview, means)
    if len(validation.loss):
        points = _line(
            validation.loss,
            f"{prefix}validation",
            palette.series_colour(1) if single else colour,
            "dot",
            1.5,
        )
        points |= {"mode": "lines+markers", "marker": {"size": 7, "symbol": "diamond"}}
        found.append((points, validation, np.arange(len(validation.loss))))
    return found


def _ends_and_resumes(
    overview: Overview, means: Floats
) -> list[tuple[dict[str, Any], Training | Validation, Integers]]:
    """Marks on the curve: where starts of the run failed or were killed, and others resumed."""
    training, attempts = overview.training, overview.run.attempts
    reached = {record.attempt: event.step for record, event in overview.run.of(StepsDone)}
    places: dict[str, list[tuple[int, str]]] = {"ended early": [], "resumed": []}
    for attempt in attempts:
        last = reached.get(attempt.number)
        if attempt.outcome != "completed" and last is not None and attempt is not attempts[-1]:
            ended = OUTCOME_WORDS.get(attempt.outcome, attempt.outcome)
            places["ended early"].append((last, f"attempt {attempt.number}: {ended}"))
        if attempt.first_step:
            words = text.plural(attempt.world_size, "process")
            resumed = f"attempt {attempt.number} resumed at step {attempt.first_step:,} on {words}"
            places["resumed"].append((attempt.first_step, resumed))
    styles = {"ended early": ("x", "var(--bad)"), "resumed": ("triangle-up", "var(--good)")}
    found: list[tuple[dict[str, Any], Training | Validation, Integers]] = []
    for name, marked in places.items():
        steps = np.array([step for step, _ in marked], dtype=np.int64)
        at = np.minimum(np.searchsorted(training.step, steps), len(training.step) - 1)
        symbol, colour = styles[name]
        trace = {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "y": _rounded(means[at]) if len(at) else [],
            "marker": {"symbol": symbol, "size": 10, "color": colour},
            "text": [text.escape(words) for _, words in marked],
            "hovertemplate": "%{text}<extra></extra>",
        }
        if marked:
            found.append((trace, training, at))
    return found


def said(overview: Overview, single: bool, words: str) -> str:
    """`words` for a caption, with the run's name where there are several."""
    return words[:1].upper() + words[1:] if single else f"{overview.label}: {words}"


def throughput_figure(overviews: Sequence[Overview]) -> Figure:
    """Tokens per second over the steps; a single run shows where later attempts began."""
    values = [overview.training.tokens_per_second for overview in overviews]
    figure = _over_steps(
        "throughput", "tokens per second", overviews, values, {"rangemode": "tozero"}
    )
    if len(overviews) == 1:
        later = [
            attempt for attempt in overviews[0].run.attempts[1:] if attempt.first_step is not None
        ]
        line = {"color": "var(--muted)", "width": 1, "dash": "dot"}
        shapes = [
            {
                "type": "line",
                "x0": attempt.first_step,
                "x1": attempt.first_step,
                "yref": "paper",
                "y0": 0,
                "y1": 1,
                "line": line,
            }
            for attempt in later
        ]
        notes = [
            {
                "x": item.first_step,
                "yref": "paper",
                "y": 0.02 + 0.08 * (index % 3),
                "yanchor": "bottom",
                "xanchor": "left",
                "text": f" attempt {item.number}: world size {item.world_size}",
                "showarrow": False,
                "font": {"size": 11, "color": "var(--muted)"},
            }
            for index, item in enumerate(later)
        ]
        figure.layout.update(
            shapes=shapes, annotations=notes if len(notes) <= _LABELLED_RESTARTS else []
        )
    return figure


def gradient_figure(overviews: Sequence[Overview]) -> Figure:
    """Global gradient norm before clipping, over the steps."""
    values = [overview.training.gradient_norm for overview in overviews]
    return _over_steps("gradient", "gradient norm", overviews, values, {"type": "log"})


def learning_rate_figure(overviews: Sequence[Overview]) -> Figure:
    """Learning rate over the steps."""
    values = [overview.training.learning_rate for overview in overviews]
    return _over_steps(
        "rate", "learning rate", overviews, values, {"rangemode": "tozero"}, raw=False
    )


def metric_figures(overviews: Sequence[Overview]) -> list[Figure]:
    """Figures of the metrics that loops logged beside the loss, one for each name."""
    names = dict.fromkeys(name for overview in overviews for name in overview.training.metrics)
    return [
        _over_steps(
            f"metric-{number}",
            name,
            overviews,
            [
                overview.training.metrics.get(name, np.full(len(overview.training.step), np.nan))
                for overview in overviews
            ],
            {},
        )
        for number, name in enumerate(names)
    ]


def _over_steps(
    name: str,
    y_title: str,
    overviews: Sequence[Overview],
    values: Sequence[Floats],
    axis: dict[str, Any],
    *,
    raw: bool = True,
) -> Figure:
    traces, sentences = [], []
    single = len(overviews) == 1
    for index, (item, curve) in enumerate(zip(overviews, values, strict=True)):
        finite = curve[np.isfinite(curve)]
        if not len(finite):
            sentences.append(said(item, single, f"no {y_title} is recorded"))
            continue
        colour, dash = palette.series_colour(index), palette.series_dash(index)
        every, smoothed = _raw_and_smooth(curve)
        steps = item.training.step
        if raw and index < _RAW_RUNS:
            light = _line(curve[every], text.escape(item.label), colour, "solid", 1)
            light |= {"opacity": 0.35, "hoverinfo": "skip", "showlegend": False}
            traces.append({**light, "x": steps[every].tolist()})
        means = smooth(curve, smoothing_window(len(curve))) if raw else curve
        line = _line(means[smoothed], text.escape(item.label), colour, dash, 2)
        traces.append({**line, "x": steps[smoothed].tolist()})
        median = text.number(float(np.median(finite)))
        sentences.append(said(item, single, f"median {y_title} {median}"))
    figure_layout = layout(320, "steps done", y_title, showlegend=not single)
    figure_layout["yaxis"].update(axis)
    return Figure(name, "; ".join(sentences) + ".", traces, figure_layout)


def _raw_and_smooth(values: Floats) -> tuple[Integers, Integers]:
    kept = downsample(values)
    evenly = downsample(np.zeros(len(values)), 1000)
    return kept, evenly


def _line(y: Floats, name: str, colour: str, dash: str, width: float) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines" if len(y) > 1 else "markers",
        "name": name,
        "y": _rounded(y),
        "line": {"color": colour, "dash": dash, "width": width},
        "marker": {"color": colour},
        "hovertemplate": "%{y:.4~g}",
        "connectgaps": False,
    }


def _rounded(values: Floats) -> list[float | None]:
    """Six significant digits: as many as a picture shows, in a third of the bytes."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


LANES = (
    *("checkpoint", "restore", "membership", "settings", "evaluation", "stop request", "warning"),
    "failure",
)


_LANE_OF = {
    SettingsChanged: "settings",
    StateRecovered: "restore",
    MembershipChanged: "membership",
}


_SHORTEST_GAP_SECONDS = 0.05


@dataclass(frozen=True)
class Span:
    """A stretch of wall clock.

    Attributes:
        start_time: Seconds since the epoch.
        end_time: Seconds since the epoch.
        world_size: Processes at work; 0 in a gap.
        outcome: As in `Attempt`; empty for a gap.
        words: What the reader sees when pointing at it.
    """

    start_time: float
    end_time: float
    world_size: int
    outcome: str
    words: str


@dataclass(frozen=True)
class Mark:
    """One event at one moment.

    Attributes:
        lane: One of `LANES`.
        time: Seconds since the epoch.
        words: What the reader sees when pointing at it.
    """

    lane: str
    time: float
    words: str


def attempt_spans(overview: Overview) -> list[Span]:
    """One span per attempt, oldest first."""
    return [
        Span(
            attempt.start_time,
            max(attempt.end_time, attempt.start_time),
            attempt.world_size,
            attempt.outcome,
            f"attempt {attempt.number}: world size {attempt.world_size}, "
            f"{text.duration(attempt.end_time - attempt.start_time)}, "
            f"{OUTCOME_WORDS.get(attempt.outcome, attempt.outcome)}",
        )
        for attempt in overview.run.attempts
    ]


def gaps(overview: Overview) -> list[Span]:
    """The stretches between attempts in which nothing ran."""
    attempts = overview.run.attempts
    return [
        Span(
            before.end_time,
            after.start_time,
            0,
            "",
            f"gap of {text.duration(after.start_time - before.end_time)} "
            f"before attempt {after.number}",
        )
        for before, after in itertools.pairwise(attempts)
        if after.start_time - before.end_time > _SHORTEST_GAP_SECONDS
    ]


def marks(overview: Overview) -> list[Mark]:
    """Every event that is worth a mark, in the order of the log."""
    found = [mark for record in overview.run.records for mark in _of_record(record)]
    return sorted([*found, *_failures(overview)], key=lambda mark: mark.time)


def _of_record(record: Record) -> Iterator[Mark]:
    match record.event:
        case Warned(message=message):
            origin = f"rank {record.rank}: " if record.rank else ""
            yield Mark("warning", record.time, origin + message)
        case MemberLost() as lost:
            # Whoever notices writes it.
            yield Mark("failure", record.time, recovery_words(lost))
        case _ if record.rank:
            return
        case SettingsChanged() | StateRecovered() | MembershipChanged() as event:
            lane = _LANE_OF[type(event)]
            words = event.words() if isinstance(event, SettingsChanged) else recovery_words(event)
            yield Mark(lane, record.time, words)
        case CheckpointSaved() as saved:
            words = (
                f"checkpoint of step {saved.step:,} on disk after {text.duration(saved.seconds)} "
                f"({text.data_size(saved.bytes)}; training waited "
                f"{text.duration(saved.blocked_seconds)})"
            )
            yield Mark("checkpoint", record.time, words)
        case CheckpointCopied(step=step, place=place) as copied:
            words = (
                f"checkpoint of step {step:,} copied on to {place} in "
                f"{text.duration(copied.seconds)} ({text.data_size(copied.bytes)})"
            )
            yield Mark("checkpoint", record.time, words)
        case CheckpointFailed(step=step, reason=reason):
            yield Mark("failure", record.time, f"checkpoint of step {step:,} failed: {reason}")
        case CheckpointRestored() as restored:
            words = f"restored step {restored.step:,} in {text.duration(restored.seconds)}"
            words += restored.words()
            if restored.skipped:
                words += f"; passed over {', '.join(map(str, restored.skipped))}"
            yield Mark("restore", record.time, words)
        case Evaluated(step=step, loss=loss):
            words = f"validation loss {text.number(loss)} nats per token at step {step:,}"
            yield Mark("evaluation", record.time, words)
        case StopRequested(step=step, reason=reason):
            yield Mark("stop request", record.time, f"stop at step {step:,}: {reason}")
        case _:
            return


def _failures(overview: Overview) -> Iterator[Mark]:
    """Attempts that failed or died, and where the loss begins to be NaN or infinite.

    Of every such stretch it is the first step record, in a run where any loss is finite.
    """
    was_finite = any(math.isfinite(item) for item in overview.training.loss)
    for record, event in overview.run.of(StepsDone):
        finite = math.isfinite(float(event.loss))
        if was_finite and not finite:
            yield Mark(
                "failure", record.time, f"training loss is {event.loss} at step {event.step:,}"
            )
        was_finite = finite
    last = overview.run.attempts[-1].number if overview.run.attempts else 0
    ends = overview.ends
    for attempt in overview.run.attempts:
        if attempt.outcome == "failed":
            reason = ends[attempt.number].reason
            yield Mark("failure", attempt.end_time, f"attempt {attempt.number} failed: {reason}")
        elif attempt.outcome == "died" and attempt.number != last:
            words = f"attempt {attempt.number} died: no end is recorded"
            yield Mark("failure", attempt.end_time, words)


PURPOSE_WORDS = {
    "compute": "compute",
    "data": "data",
    "communication": "communication wait",
    "checkpoint": "checkpoint",
    "guard": "guard",
    "evaluation": "evaluation",
    "startup": "start-up",
    "restart": "restart",
    "lost": "lost work",
    "redone": "redone work",
    "other": "other",
    "unrecorded": "not recorded",
}


MARKS_PER_LANE = 1000


_CROWDED_LANE = 150


HATCHES = {"lost": "/", "redone": "/", "unrecorded": "."}
"""Pattern of the purposes that are not told apart by colour alone."""


HATCH = {"fillmode": "overlay", "fgcolor": "var(--panel)", "solidity": 0.25}


_LANE_STYLES = {
    "checkpoint": ("checkpoint", "circle"),
    "restore": ("restart", "triangle-left"),
    "membership": ("restart", "star"),
    "settings": ("data", "hexagon"),
    "evaluation": ("evaluation", "diamond"),
    "stop request": ("data", "square"),
    "warning": ("caution", "triangle-up"),
    "failure": ("bad", "x"),
}


def step_time_figure(overviews: Sequence[Overview]) -> Figure:
    """Distribution of the steps' wall times, with median, p90 and p99 marked."""
    every = np.concatenate([overview.step_seconds for overview in overviews])
    edges = histogram_edges(every)
    unit, scale = ("milliseconds", 1e3) if edges[-1] < 1 else ("seconds", 1.0)
    single = len(overviews) == 1
    centres = ((edges[:-1] + edges[1:]) / 2 * scale).tolist()
    traces, sentences = [], []
    for index, overview in enumerate(overviews):
        found = histogram(overview.step_seconds, edges)
        sentences.append(
            said(overview, single, _step_time_words(overview, found.above, found.highest))
        )
        if not len(overview.step_seconds):
            continue
        total = max(int(np.isfinite(overview.step_seconds).sum()), 1)
        traces.append(
            {
                "type": "bar",
                "name": text.escape(overview.label),
                "x": centres,
                "y": (100 * found.counts / total).tolist(),
                "width": float(edges[1] - edges[0]) * scale,
                "customdata": found.counts.tolist(),
                "opacity": 1 if single else 0.55,
                "marker": {"color": palette.series_colour(index), "line": {"width": 0}},
                "hovertemplate": "%{customdata} steps (%{y:.1f} %)",
            }
        )
    figure_layout = layout(
        320,
        f"step time in {unit}",
        "share of the steps in %",
        barmode="overlay",
        bargap=0,
        showlegend=not single,
    )
    shapes, notes = _percentile_lines(overviews, scale)
    figure_layout.update(shapes=shapes, annotations=notes)
    return Figure("step-time", "; ".join(sentences) + ".", traces, figure_layout)


def _step_time_words(overview: Overview, above: int, highest: float) -> str:
    found = percentiles(overview.step_seconds)
    if found is None:
        return "no step is recorded"
    words = (
        f"{text.plural(len(overview.step_seconds), 'step')}, median "
        f"{text.duration(found.median)}, p90 {text.duration(found.p90)}, "
        f"p99 {text.duration(found.p99)}"
    )
    if above:
        longer = text.plural(above, "longer step")
        words += f"; {longer} not drawn, up to {text.duration(highest)}"
    return words


def _percentile_lines(
    overviews: Sequence[Overview], scale: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    shapes: list[dict[str, Any]] = []
    notes: list[dict[str, Any]] = []
    single = len(overviews) == 1
    for index, overview in enumerate(overviews):
        found = percentiles(overview.step_seconds)
        if found is None:
            continue
        values = {"median": found.median, "p90": found.p90, "p99": found.p99}
        for row, (name, seconds) in enumerate(values.items() if single else [*values.items()][:1]):
            colour = "var(--text)" if single else palette.series_colour(index)
            line = {"color": colour, "width": 1.5, "dash": ("solid", "dash", "dot")[row]}
            at = {"x0": seconds * scale, "x1": seconds * scale, "y0": 0, "y1": 1}
            shapes.append({"type": "line", "yref": "paper", **at, "line": line})
            if single:
                # One below the other, since the three are often close together.
                notes.append(
                    {
                        "x": at["x0"],
                        "yref": "paper",
                        "y": 1 - 0.09 * row,
                        "yanchor": "top",
                        "xanchor": "left",
                        "text": f" {name} {text.duration(seconds)}",
                        "showarrow": False,
                        "font": {"size": 11.5},
                        "bgcolor": "var(--panel)",
                        "opacity": 0.9,
                    }
                )
    return shapes, notes


def time_split_figure(overviews: Sequence[Overview]) -> Figure:
    """Wall time by purpose: one stacked bar per run, in seconds or per cent."""
    longest_seconds = max(overview.split.wall_seconds for overview in overviews)
    unit, unit_seconds = text.clock_unit(longest_seconds)
    labels = [text.escape(overview.label) for overview in overviews]
    traces, absolute, shares = [], [], []
    for purpose in purposes(overviews):
        seconds = [overview.split.seconds.get(purpose, 0.0) for overview in overviews]
        words = PURPOSE_WORDS.get(purpose, purpose)
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": words,
                "y": labels,
                "text": [text.duration(value) for value in seconds],
                "textposition": "none",
                "marker": {
                    "color": palette.purpose_colour(purpose),
                    "line": {"color": "var(--panel)", "width": 1},
                    "pattern": {"shape": HATCHES.get(purpose, ""), **HATCH, "size": 6},
                },
                "hovertemplate": f"%{{y}}<br>{text.escape(words)}: %{{text}}<extra></extra>",
            }
        )
        absolute.append([value / unit_seconds for value in seconds])
        shares.append(
            [
                100 * value / overview.split.wall_seconds
                if overview.split.wall_seconds > 0
                else 0.0
                for value, overview in zip(seconds, overviews, strict=True)
            ]
        )
    titles = (f"wall time in {unit}", "share of the wall time in %")
    views = (View(unit, titles[0], absolute), View("per cent", titles[1], shares))
    figure_layout = layout(
        150 + 44 * len(overviews), titles[0], "", barmode="stack", hovermode="closest"
    )
    figure_layout["legend"]["traceorder"] = "normal"
    figure_layout["yaxis"].update(autorange="reversed", type="category", title=None, ticksuffix=" ")
    figure_layout["yaxis"]["showticklabels"] = len(overviews) > 1
    sentences = [
        said(
            overview,
            len(overviews) == 1,
            f"{text.duration(overview.split.wall_seconds)} of wall time",
        )
        for overview in overviews
        if overview.run.attempts
    ]
    if not sentences:
        return Figure("time-split", "No attempt is recorded.", [], figure_layout)
    alt = "; ".join(sentences) + ". The table below holds the numbers."
    return Figure("time-split", alt, traces, figure_layout, views, keyed_below=True)


def purposes(overviews: Sequence[Overview]) -> list[str]:
    """The purposes on which at least one run spent time, in a fixed order."""
    order = dict.fromkeys(
        [*PURPOSE_WORDS, *(n for overview in overviews for n in overview.split.seconds)]
    )
    return [
        name
        for name in order
        if any(overview.split.seconds.get(name, 0.0) > 0 for overview in overviews)
    ]


def timeline_figure(overview: Overview, name: str) -> Figure:
    """Attempts, gaps and events of one run on the wall clock."""
    spans, found = attempt_spans(overview), marks(overview)
    lanes = [lane for lane in LANES if any(mark.lane == lane for mark in found)]
    sizes = sorted({span.world_size for span in spans})
    traces = []
    for index, size in enumerate(sizes):
        some = [span for span in spans if span.world_size == size]
        bad = [span.outcome in ("died", "failed") for span in some]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": f"world size {size}",
                "y": ["attempts"] * len(some),
                "base": [text.plotly_time(span.start_time) for span in some],
                "x": [max((span.end_time - span.start_time) * 1000, 1.0) for span in some],
                "width": 0.62,
                "text": [text.escape(span.words) for span in some],
                "textposition": "none",
                "marker": {
                    "color": palette.series_colour(index),
                    "line": {"color": "var(--text)", "width": 1},
                    "pattern": {
                        "shape": ["/" if number else "" for number in bad],
                        **HATCH,
                        "size": 8,
                    },
                },
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    traces += _gap_traces(gaps(overview))
    traces += [_lane_trace(lane, [mark for mark in found if mark.lane == lane]) for lane in lanes]
    figure_layout = layout(
        140 + 34 * (len(lanes) + 1), "wall clock (UTC)", "", barmode="overlay", hovermode="closest"
    )
    figure_layout["xaxis"]["type"] = "date"
    order = ["attempts", *lanes]
    figure_layout["yaxis"].update(
        type="category",
        categoryorder="array",
        categoryarray=order,
        range=[len(order) - 0.5, -0.5],
        fixedrange=True,
        title=None,
        ticksuffix=" ",
    )
    counts = ", ".join(
        text.plural(sum(mark.lane == lane for mark in found), lane) for lane in lanes
    )
    alt = text.plural(len(spans), "attempt")
    return Figure(name, f"{alt}{', ' if counts else ''}{counts}.", traces, figure_layout)


def _gap_traces(gaps: list[Span]) -> list[dict[str, Any]]:
    if not gaps:
        return []
    x: list[str | None] = []
    words: list[str] = []
    for gap in gaps:
        middle = (gap.start_time + gap.end_time) / 2
        x += [text.plotly_time(at) for at in (gap.start_time, middle, gap.end_time)] + [None]
        words += [text.escape(gap.words)] * 3 + [""]
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "gap",
            "x": x,
            "y": [None if at is None else "attempts" for at in x],
            "text": words,
            "line": {"color": "var(--muted)", "width": 1.5, "dash": "dot"},
            "hovertemplate": "%{text}<extra></extra>",
        }
    ]


def _lane_trace(lane: str, marks: list[Mark]) -> dict[str, Any]:
    colour, symbol = _LANE_STYLES[lane]
    shown = thin(marks, MARKS_PER_LANE)
    crowded = len(shown) > _CROWDED_LANE
    return {
        "type": "scatter",
        "mode": "markers",
        "name": lane,
        "showlegend": False,
        "x": [text.plotly_time(mark.time) for mark in shown],
        "y": [lane] * len(shown),
        "text": [text.hover(mark.words) for mark in shown],
        "marker": {
            "color": f"var(--{colour})",
            "symbol": symbol,
            "size": 7 if crowded else 10,
            "line": {"color": "var(--panel)", "width": 0 if crowded else 1},
        },
        "hovertemplate": "%{text}<br>%{x|%Y-%m-%d %H:%M:%S}<extra></extra>",
    }
