"""Figures that are no curve: step times, time by purpose, and the events on the wall clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from outlast.report import palette, text, timeline
from outlast.report.curves import Figure, View, layout, said
from outlast.report.series import histogram, histogram_edges, percentiles, thin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.report.overview import Overview

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
                notes.append(_percentile_note(f"{name} {text.duration(seconds)}", at["x0"], row))
    return shapes, notes


def _percentile_note(words: str, x: float, row: int) -> dict[str, Any]:
    # One below the other, since the three are often close together.
    return {
        "x": x,
        "yref": "paper",
        "y": 1 - 0.09 * row,
        "yanchor": "top",
        "xanchor": "left",
        "text": f" {words}",
        "showarrow": False,
        "font": {"size": 11.5},
        "bgcolor": "var(--panel)",
        "opacity": 0.9,
    }


def time_split_figure(overviews: Sequence[Overview]) -> Figure:
    """Wall time by purpose: one stacked bar per run, in seconds or per cent."""
    longest_seconds = max(overview.split.wall_seconds for overview in overviews)
    unit, unit_seconds = text.clock_unit(longest_seconds)
    labels = [text.escape(overview.label) for overview in overviews]
    traces, absolute, shares = [], [], []
    for purpose in purposes(overviews):
        seconds = [overview.split.seconds.get(purpose, 0.0) for overview in overviews]
        traces.append(_purpose_trace(purpose, labels, seconds))
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


def _purpose_trace(purpose: str, labels: list[str], seconds: list[float]) -> dict[str, Any]:
    words = PURPOSE_WORDS.get(purpose, purpose)
    return {
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
    spans, found = timeline.attempt_spans(overview), timeline.marks(overview)
    lanes = [lane for lane in timeline.LANES if any(mark.lane == lane for mark in found)]
    traces = [*_attempt_traces(spans), *_gap_traces(timeline.gaps(overview))]
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


def _attempt_traces(spans: list[timeline.Span]) -> list[dict[str, Any]]:
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
    return traces


def _gap_traces(gaps: list[timeline.Span]) -> list[dict[str, Any]]:
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


def _lane_trace(lane: str, marks: list[timeline.Mark]) -> dict[str, Any]:
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
