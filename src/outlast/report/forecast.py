"""Predicted and measured, side by side: intervals as bars, what came true as marks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from outlast.records import forecast_of
from outlast.report import text
from outlast.report.charts import Figure, layout
from outlast.report.tables import Cell, digits, table, words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.records import Compared, Forecast
    from outlast.report.overview import Overview

_ROW_PIXELS = 44
_WIDE = 8.0
_MANY_DECADES = 3
_GRADES = {True: "good", False: "caution"}


def forecast_figure(overview: Overview) -> Figure | None:
    """Every figure as a share of what was predicted; None where nothing was."""
    found = forecast_of(overview.run)
    if found is None:
        return None
    rows = [compared for compared in found.compared() if compared.predicted > 0]
    traces = [*_intervals(rows, found.prediction.coverage), *_marks(rows)]
    figure_layout = layout(
        120 + _ROW_PIXELS * len(rows), "% of the prediction", "", hovermode="closest"
    )
    figure_layout["legend"]["traceorder"] = "normal"
    figure_layout["barmode"] = "overlay"
    figure_layout["xaxis"].update(_scale(rows))
    figure_layout["yaxis"].update(
        type="category",
        categoryorder="array",
        categoryarray=[row.name for row in rows],
        range=[len(rows) - 0.5, -0.5],
        fixedrange=True,
        title=None,
        ticksuffix=" ",
        showgrid=False,
    )
    alt = f"Measured as a share of the prediction: {'; '.join(map(_ratio_words, rows))}."
    return Figure(f"forecast-{overview.label}", alt, traces, figure_layout)


def _ratio_words(row: Compared) -> str:
    if row.ratio is None:
        return f"{row.name} unavailable"
    verdict = f" ({row.verdict})" if row.verdict else ""
    return f"{row.name} {text.number(100 * row.ratio, 3)} %{verdict}"


def _scale(rows: Sequence[Compared]) -> dict[str, Any]:
    """From a little below the least share to a little above the largest one."""
    shares = [
        _share(row, value)
        for row in rows
        for value in (row.predicted, row.low, row.high, row.measured)
        if value is not None
    ]
    shares = [share for share in shares if math.isfinite(share)]
    low, high = min(shares), max(shares)
    shown: dict[str, Any] = {"tickangle": 0}
    if low > 0 and high > _WIDE * low:
        ends = math.log10(low), math.log10(high)
        room = 0.06 * (ends[1] - ends[0])
        # Ticks of a logarithmic axis over these powers of ten, few enough for a narrow screen.
        first = math.floor(ends[0])
        last = math.ceil(ends[1])
        steps = (1,) if last - first > _MANY_DECADES else (1, 3)
        values = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        ticks = {"tickvals": values, "ticktext": [f"{value:,.4g}" for value in values]}
        return {"type": "log", "range": [ends[0] - room, ends[1] + room], **shown, **ticks}
    room = 0.06 * max(high - low, 10.0)
    return {"range": [max(low - room, 0.0), high + room], "nticks": 7, **shown}


def _share(row: Compared, value: float) -> float:
    return 100 * value / row.predicted


def _intervals(rows: Sequence[Compared], coverage: float) -> list[dict[str, Any]]:
    known = [row for row in rows if row.low is not None and row.high is not None]
    if not known:
        return []
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": f"predicted interval, {100 * coverage:.3g} %",
            "y": [compared.name for compared in known],
            "base": [_share(compared, compared.low or 0.0) for compared in known],
            "x": [
                _share(compared, (compared.high or 0.0) - (compared.low or 0.0))
                for compared in known
            ],
            "width": 0.5,
            "text": [text.escape(compared.interval_words()) for compared in known],
            "textposition": "none",
            "marker": {"color": "var(--series-6)", "opacity": 0.55, "line": {"width": 0}},
            "hovertemplate": "%{y}: %{text}<extra></extra>",
        }
    ]


def _marks(rows: Sequence[Compared]) -> list[dict[str, Any]]:
    traces = [
        _scatter(
            "predicted",
            [(row, row.predicted) for row in rows],
            {"symbol": "line-ns-open", "size": 24, "line": {"width": 2}},
            "var(--text)",
        )
    ]
    for inside, name, symbol, colour in (
        (True, "measured, inside", "diamond", "good"),
        (False, "measured, outside", "x", "bad"),
        (None, "measured", "diamond", "muted"),
    ):
        some = [
            (row, row.measured) for row in rows if row.measured is not None and row.inside is inside
        ]
        if some:
            marker = {"symbol": symbol, "size": 12, "line": {"color": "var(--panel)", "width": 1}}
            traces.append(_scatter(name, some, marker, f"var(--{colour})"))
    return traces


def _scatter(
    name: str, points: Sequence[tuple[Compared, float]], marker: dict[str, Any], colour: str
) -> dict[str, Any]:
    kind = name.partition(",")[0]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [_share(row, value) for row, value in points],
        "y": [row.name for row, _ in points],
        "text": [text.escape(row.words(value)) for row, value in points],
        "cliponaxis": False,
        "marker": {**marker, "color": colour},
        "hovertemplate": f"%{{y}}: %{{text}} {kind} (%{{x:.1f}} %)<extra></extra>",
    }


def forecast_part(overview: Overview, picture: str) -> str:
    """Origin of the figures, the picture, and the tables."""
    found = forecast_of(overview.run)
    if found is None:
        return '<p class="about">Nothing was predicted of this run.</p>'
    return _about(found, overview) + picture + _compared(found) + _terms(found)


def _about(found: Forecast, overview: Overview) -> str:
    said = found.prediction
    parts = []
    if len(overview.run.attempts) > 1:
        parts.append(f"Of attempt {found.measured.attempt}.")
    if said.calibration:
        parts.append(f"Calibration: {said.calibration}.")
    if steps := found.measured.steps:
        parts.append(f"The measured step time is the median of {text.plural(steps, 'step')}.")
    if (memory := found.measured.memory) is not None:
        most = memory.most(said.memory_of)
        which = f"is {most[0]}, " if most is not None else "is "
        parts.append(f"Memory {which}of the process with the most; read from {memory.what}.")
    beyond = (
        f'<p class="about"><span class="outcome caution">extrapolated</span> '
        f"{text.escape('; '.join(said.extrapolated))}</p>"
        if said.extrapolated
        else ""
    )
    return f'{beyond}<p class="about">{text.escape(" ".join(parts))}</p>'


def _compared(found: Forecast) -> str:
    rows = [
        [
            words(compared.name),
            digits(compared.words(compared.predicted)),
            digits(compared.interval_words() or "none"),
            digits(
                "unavailable" if compared.measured is None else compared.words(compared.measured)
            ),
            digits("" if compared.ratio is None else f"{compared.ratio:.3f}"),
            _verdict(compared),
        ]
        for compared in found.compared()
    ]
    interval = f"interval, {100 * found.prediction.coverage:.3g} %"
    heads = [words("figure"), digits("predicted"), digits(interval), digits("measured")]
    heads += [digits("measured / predicted"), words("measured is")]
    return table(heads, rows, "Predicted and measured figures")


def _verdict(row: Compared) -> Cell:
    if row.measured is None:
        return Cell(f'<span class="missing">{text.escape(row.missing)}</span>')
    if row.inside is None:
        return words("")
    grade = _GRADES[row.inside]
    return Cell(f'<span class="outcome {grade}">{text.escape(row.verdict)}</span>')


def _terms(found: Forecast) -> str:
    terms, whole = found.prediction.terms, found.prediction.step_seconds
    if not terms or whole <= 0:
        return ""
    rows = [
        [words(name), digits(text.duration(value)), digits(f"{100 * value / whole:.1f}")]
        for name, value in sorted(terms.items(), key=lambda term: -term[1])
    ]
    total = math.fsum(terms.values())
    rows.append([words("sum"), digits(text.duration(total)), digits(f"{100 * total / whole:.1f}")])
    heads = [words("term"), digits("predicted"), digits("per cent of a step")]
    inner = table(heads, rows, "Terms of the predicted step time")
    return f"<details><summary>What the predicted step is made of</summary>{inner}</details>"
