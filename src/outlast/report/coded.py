"""Gradient coding in the report: what every step took, who was slow, and what is not exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from outlast.records import coding_totals
from outlast.report import palette, text
from outlast.report.curves import Figure, layout
from outlast.report.series import downsample, thin
from outlast.report.tables import digits, table, words

if TYPE_CHECKING:
    from outlast.records import CodedStep, CodingTotals
    from outlast.report.overview import Overview

_MOST_STEPS = 100
_MOST_MARKS = 1000


def coding_figure(overview: Overview) -> Figure | None:
    """Every step's gradient: the time that it took, and what waiting would have taken.

    Where nobody was slow, both are the same.
    """
    totals = coding_totals(overview.run)
    if totals is None:
        return None
    steps = totals.steps
    scale, unit = _unit(steps)
    taken = scale * np.array([step.seconds for step in steps])
    waiting = scale * np.array([_waiting_seconds(step) for step in steps])
    number = np.array([step.step for step in steps])
    kept = np.union1d(downsample(taken), downsample(waiting))
    marked = thin([step for step in steps if step.stragglers], _MOST_MARKS)
    traces = [
        _line("waiting for all, at least", number[kept], waiting[kept], 1, "dot"),
        _line("taken", number[kept], taken[kept], 0, "solid"),
    ]
    if marked:
        traces.append(_marks(marked, scale))
    figure_layout = layout(320, "steps done", f"time of the gradient in {unit}")
    figure_layout["yaxis"]["rangemode"] = "tozero"
    return Figure(f"coding-{overview.label}", _alt(totals), traces, figure_layout)


def _unit(steps: tuple[CodedStep, ...]) -> tuple[float, str]:
    longest = max(max(step.seconds, step.waiting_seconds) for step in steps)
    return (1e3, "milliseconds") if longest < 1 else (1.0, "seconds")


def _waiting_seconds(step: CodedStep) -> float:
    # A lower bound below what was taken says nothing.
    return max(step.waiting_seconds, step.seconds) if step.stragglers else step.seconds


def _line(name: str, x: Any, y: Any, series: int, dash: str) -> dict[str, Any]:
    colour = palette.series_colour(series)
    return {
        "type": "scatter",
        "mode": "lines" if len(x) > 1 else "markers",
        "name": name,
        "x": x.tolist(),
        "y": [float(f"{value:.6g}") for value in y.tolist()],
        "line": {"color": colour, "dash": dash, "width": 1.8},
        "marker": {"color": colour},
        "hovertemplate": "%{y:.4~g}",
    }


def _marks(steps: list[CodedStep], scale: float) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "straggler",
        "x": [step.step for step in steps],
        "y": [float(f"{scale * step.seconds:.6g}") for step in steps],
        "text": [_who(step) for step in steps],
        "marker": {
            "color": "var(--bad)",
            "symbol": "triangle-up",
            "size": 7 if len(steps) > _MOST_STEPS else 9,
            "line": {"color": "var(--panel)", "width": 1},
        },
        "hovertemplate": "%{text}",
    }


def _who(step: CodedStep) -> str:
    numbers = ", ".join(map(str, step.stragglers))
    return f"replica{'' if len(step.stragglers) == 1 else 's'} {numbers}"


def _alt(totals: CodingTotals) -> str:
    return (
        f"{text.plural(len(totals.steps), 'step')}, {len(totals.slow_steps):,} with a straggler; "
        f"the gradients took {text.duration(totals.coded_seconds)} in all, and with waiting for "
        f"all replicas at least {text.duration(totals.waiting_seconds)}."
    )


def coding_part(overview: Overview, plot: str) -> str:
    """What was done, `plot` (the figure as HTML), who was slow, and inexact steps."""
    totals = coding_totals(overview.run)
    if totals is None:
        return '<p class="about">The run used no gradient coding.</p>'
    return plot + _done(totals) + _replicas(totals) + _inexact(totals)


def _done(totals: CodingTotals) -> str:
    done = (
        f"{totals.scheme} over {text.plural(totals.replicas, 'replica')}: "
        f"{text.plural(totals.claims, 'chunk')} taken over, {totals.duplicates:,} computed twice; "
        f"saved at least {text.duration(totals.saved_seconds)}."
    )
    advice = totals.advice or ""
    said = [done, advice[:1].upper() + advice[1:]] if advice else [done]
    return "".join(f'<p class="about">{text.escape(number)}</p>' for number in said)


def _replicas(totals: CodingTotals) -> str:
    rows = [
        [
            digits(replica),
            digits(f"{item.slow_steps:,}"),
            digits(f"{100 * item.share:.1f}"),
            digits("unknown" if item.persistence is None else f"{100 * item.persistence:.0f}"),
        ]
        for replica, item in totals.by_replica.items()
    ]
    heads = [digits("replica"), digits("slow steps"), digits("% of its steps")]
    heads.append(digits("slow again in the next step, %"))
    return table(heads, rows, "How often each replica was slow")


def _inexact(totals: CodingTotals) -> str:
    found = totals.inexact
    if not found:
        return '<p class="about">Every gradient was exact.</p>'
    rows = [
        [
            digits(f"{step.step:,}"),
            digits(f"{step.lost:,}"),
            digits(text.number(step.error)),
            words(", ".join(map(str, step.stragglers))),
        ]
        for step in found[:_MOST_STEPS]
    ]
    heads = [digits("step"), digits("lost chunks"), digits("certified error"), words("stragglers")]
    caption = "Steps with an inexact gradient"
    if len(found) > _MOST_STEPS:
        caption += f" (the first {_MOST_STEPS} of {len(found):,})"
    about = (
        f"{text.plural(len(found), 'gradient')} not exact: certified error at worst "
        f"{text.number(totals.worst_error)}, on average over all steps "
        f"{text.number(totals.mean_error)}."
    )
    return f'<p class="about">{text.escape(about)}</p>{table(heads, rows, caption)}'
