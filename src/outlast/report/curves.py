"""Figures over the length of a run: loss, throughput, gradient norm, learning rate.

A figure is plain data for plotly.js: ``data`` (traces), ``layout``, and ``views``, the x-axes
between which the reader switches. Colours are ``var(--name)``, see `outlast.report.palette`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from outlast.report import palette, text
from outlast.report.overview import flops_of
from outlast.report.series import downsample, smooth, smoothing_window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.report.overview import Overview, Training, Validation
    from outlast.report.series import Floats, Integers

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
        """What the page's script needs, without NaN and infinities, which JSON lacks."""
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
    return Figure("loss", _loss_alt(overviews), traces, figure_layout, views, log_scale=True)


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
            found.append((_not_finite(training, bad, prefix), training, bad))
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


def _not_finite(training: Training, bad: Integers, prefix: str) -> dict[str, Any]:
    """Marks along the bottom, on an axis of their own: NaN has no place on the loss axis."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{prefix}loss not finite",
        "y": [0.03] * len(bad),
        "yaxis": "y2",
        "marker": {"symbol": "x", "size": 9, "color": "var(--bad)"},
        "text": [f"{training.loss[at]} at step {training.step[at]:,}" for at in bad],
        "hovertemplate": "loss is %{text}<extra></extra>",
    }


def _loss_alt(overviews: Sequence[Overview]) -> str:
    sentences = []
    for overview in overviews:
        finite = overview.training.loss[np.isfinite(overview.training.loss)]
        if len(finite):
            first, last = text.number(float(finite[0])), text.number(float(finite[-1]))
            steps = text.plural(int(overview.training.step[-1]), "step")
            words = f"training loss from {first} to {last} nats per token over {steps}"
        else:
            words = "no training loss is recorded"
        sentences.append(said(overview, len(overviews) == 1, words))
    return "; ".join(sentences) + "."


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
        shapes, notes = _restarts(overviews[0])
        figure.layout.update(shapes=shapes, annotations=notes)
    return figure


def _restarts(overview: Overview) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    later = [attempt for attempt in overview.run.attempts[1:] if attempt.first_step is not None]
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
    return shapes, notes if len(notes) <= _LABELLED_RESTARTS else []


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
    """What loops told of their steps beside the loss, a figure for each name, over the steps."""
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
