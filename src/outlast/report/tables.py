"""Tables of the report as HTML, and its parts on predictions and each mechanism.

Time, attempts, warnings and settings; predicted beside measured; gradient coding, guard, recovery
and tensorized layers.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from outlast.errors import JobError
from outlast.job import identity, settings_from_text
from outlast.records import (
    CorruptionDetected,
    CoverageWarned,
    MemberLost,
    RanksChanged,
    Warned,
    coding_totals,
    forecast_of,
    guard_totals,
    recovery_totals,
    recovery_words,
)
from outlast.report import palette, text
from outlast.report.charts import PURPOSE_WORDS, Figure, layout, purposes
from outlast.report.overview import OUTCOME_WORDS, downsample, thin

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outlast.job import Job, LoopJob
    from outlast.records import CodingTotals, Compared, Forecast, GuardTotals
    from outlast.report.overview import Overview


MOST_WARNINGS = 200


_LONG_TABLE = 30


_NO_SETTING = "the script's"


_OUTCOME_GRADES = {"completed": "good", "failed": "bad", "died": "bad"}


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Attributes:
        html: Its content, escaped where it came from a user.
        numeric: Set in figures of equal width, to the right.
    """

    html: str
    numeric: bool = False


def words(content: object) -> Cell:
    """A cell that holds `content` as text."""
    return Cell(text.escape(content))


def digits(content: object) -> Cell:
    """A cell that holds `content` as a number."""
    return Cell(text.escape(content), numeric=True)


def table(
    heads: Sequence[Cell], rows: Sequence[Sequence[Cell]], caption: str, css_class: str = ""
) -> str:
    """A table that scrolls by itself where the screen is narrow; the first column is a heading."""
    top = "".join(_cell("th", cell, "col") for cell in heads)
    body = "".join(
        f"<tr>{_cell('th', row[0], 'row')}{''.join(_cell('td', cell) for cell in row[1:])}</tr>"
        for row in rows
    )
    label = text.escape(caption)
    scroll = "scroll long" if len(rows) > _LONG_TABLE else "scroll"
    return (
        f'<div class="{scroll}" role="region" aria-label="{label}" tabindex="0">'
        f'<table class="{css_class}"><caption>{label}</caption><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(tag: str, cell: Cell, scope: str = "") -> str:
    attributes = f' scope="{scope}"' if scope else ""
    if cell.numeric:
        attributes += ' class="numeric"'
    return f"<{tag}{attributes}>{cell.html}</{tag}>"


def time_table(overviews: Sequence[Overview]) -> str:
    """Seconds and per cent by purpose, their sum, and the wall time."""
    if not any(overview.run.attempts for overview in overviews):
        return ""
    heads = [words("purpose")]
    for overview in overviews:
        name = "" if len(overviews) == 1 else f"{overview.label}: "
        heads += [digits(f"{name}seconds"), digits("per cent")]
    rows = []
    for purpose in purposes(overviews):
        swatch = f'<i class="swatch" style="background: {palette.purpose_colour(purpose)}"></i>'
        row = [Cell(swatch + text.escape(PURPOSE_WORDS.get(purpose, purpose)))]
        for overview in overviews:
            row += _share(overview.split.seconds.get(purpose, 0.0), overview.split.wall_seconds)
        rows.append(row)
    total, wall = [words("sum")], [words("wall time of all attempts")]
    for overview in overviews:
        total += _share(sum(overview.split.seconds.values()), overview.split.wall_seconds)
        wall += _share(overview.split.wall_seconds, overview.split.wall_seconds)
    return table(heads, [*rows, total, wall], "Wall time by purpose", css_class="totals")


def _share(seconds: float, wall_seconds: float) -> list[Cell]:
    if wall_seconds <= 0:
        return [digits("unavailable"), digits("")]
    per_cent = f"{100 * seconds / wall_seconds:.2f}"
    return [digits(f"{seconds:,.2f}"), digits(per_cent)]


def attempts_table(overview: Overview) -> str:
    """Every start of the run: when, how long, how parallel, which steps, how it ended."""
    if not overview.run.attempts:
        return '<p class="missing">unavailable: the run was not started</p>'
    starts, ends = overview.starts, overview.ends
    from outlast.records import StepsDone

    last_steps = {record.attempt: f"{event.step:,}" for record, event in overview.run.of(StepsDone)}
    rows = []
    for attempt in overview.run.attempts:
        start, end = starts.get(attempt.number), ends.get(attempt.number)
        layout = "unavailable: no start is recorded"
        if start:
            used = [f"{name} {degree}" for name, degree in start.parallel.items() if degree != 1]
            layout = " x ".join(used) or "none"
        first = "never ready" if attempt.first_step is None else f"{attempt.first_step:,}"
        ended = OUTCOME_WORDS.get(attempt.outcome, attempt.outcome)
        if attempt.outcome == "died":
            ended = "no end recorded" if attempt is overview.run.attempts[-1] else "died"
        grade = _OUTCOME_GRADES.get(attempt.outcome, "caution")
        reason = f" {text.escape(end.reason)}" if end and end.reason else ""
        rows.append(
            [
                digits(attempt.number),
                words(text.utc(attempt.start_time)),
                digits(text.duration(attempt.end_time - attempt.start_time)),
                digits(attempt.world_size if start else "unknown"),
                words(layout),
                words(start.launch if start else ""),
                digits(first),
                digits(last_steps.get(attempt.number, "none")),
                Cell(f'<span class="outcome {grade}">{text.escape(ended)}</span>{reason}'),
            ]
        )
    names = ("#", "start (UTC)", "duration", "world size", "parallel layout", "launched by")
    numeric = ("#", "duration", "world size")
    heads = [digits(name) if name in numeric else words(name) for name in names]
    heads += [digits("from step"), digits("to step"), words("outcome")]
    return table(heads, rows, f"Attempts of {overview.label}")


def warnings_list(overview: Overview) -> str:
    """Every warning once, with how often it came and when first."""
    found = [record for record in overview.run.records if isinstance(record.event, Warned)]
    times: Counter[str] = Counter()
    first: dict[str, str] = {}
    for record in found:
        assert isinstance(record.event, Warned)
        message = record.event.message
        times[message] += 1
        first.setdefault(message, f"{text.utc(record.time)}, attempt {record.attempt}")
    if not first:
        return '<p class="missing">None is recorded.</p>'
    items = [
        f"<li>{text.escape(message)} <small>{first[message]}"
        f"{f', {number} times' if number > 1 else ''}</small></li>"
        for message, number in list(times.items())[:MOST_WARNINGS]
    ]
    if len(times) > MOST_WARNINGS:
        items.append(f"<li>{len(times) - MOST_WARNINGS:,} more are in events.jsonl</li>")
    return f'<ul class="warnings">{"".join(items)}</ul>'


def descriptions(overview: Overview) -> str:
    """Machine, versions and data of the attempts; equal ones are shown once."""
    groups: dict[str, list[int]] = {}
    for number, start in overview.starts.items():
        parts = (("Machine", start.machine), ("Versions", start.versions), ("Data", start.data))
        content = "".join(_facts(title, facts) for title, facts in parts if facts)
        groups.setdefault(content, []).append(number)
    if not groups:
        return '<p class="missing">unavailable: the start of the run is not recorded</p>'
    found = []
    for content, numbers in groups.items():
        which = ", ".join(map(str, numbers))
        head = f'<p class="about">Attempt {which}</p>' if len(groups) > 1 else ""
        found.append(f'{head}<div class="facts">{content}</div>')
    return "".join(found)


def _facts(title: str, facts: dict[str, Any]) -> str:
    known = {_words(name): _value(name, value) for name, value in facts.items()}
    # Free memory changes from start to start and would make every description its own.
    known.pop("memory available", None)
    rows = "".join(
        f"<div><dt>{text.escape(name)}</dt><dd>{text.escape(value)}</dd></div>"
        for name, value in known.items()
    )
    return f"<div><h4>{text.escape(title)}</h4><dl>{rows}</dl></div>"


def _words(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _value(name: str, value: Any) -> str:
    if isinstance(value, dict) and "unavailable" in value:
        return f"unavailable: {value['unavailable']}"
    if isinstance(value, dict):
        return ", ".join(f"{_words(str(k))} {_value(str(k), v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(_value(name, item) for item in value) or "none"
    if value is None:
        return "none"
    if name.endswith("_bytes") and isinstance(value, int | float):
        return text.data_size(float(value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def job_table(overviews: Sequence[Overview]) -> str:
    """The settings in which the runs' jobs differ; nothing for a single run.

    A training loop that is not ours has fewer settings.
    """
    if len(overviews) == 1:
        return ""
    jobs: list[Job | LoopJob] = []
    for overview in overviews:
        try:
            jobs.append(settings_from_text(overview.run.job_text, f"the job of {overview.label}"))
        except JobError as error:
            return f'<p class="missing">differences unavailable: {text.escape(error)}</p>'
    settings = [
        {
            f"{section}.{key}": repr(value)
            for section, fields in job.model_dump().items()
            for key, value in fields.items()
            if f"{section}.{key}" not in ("run.name", "run.directory")
        }
        for job in jobs
    ]
    deciding = {key for job in jobs for key in identity(job)}
    keys = dict.fromkeys(key for setting in settings for key in setting)
    rows = [
        [
            words(key),
            *(words(setting.get(key, _NO_SETTING)) for setting in settings),
            words("yes" if key in deciding else "no"),
        ]
        for key in keys
        if len({setting.get(key) for setting in settings}) > 1
    ]
    if not rows:
        return '<p class="about">The jobs of these runs are equal, but for their names.</p>'
    heads = [
        words("setting"),
        *(words(overview.label) for overview in overviews),
        words("changes the result"),
    ]
    return table(heads, rows, "Settings in which the jobs differ")


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
    longest = max(max(step.seconds, step.waiting_seconds) for step in steps)
    scale, unit = (1e3, "milliseconds") if longest < 1 else (1.0, "seconds")
    taken = scale * np.array([step.seconds for step in steps])
    # A lower bound below what was taken says nothing.
    waiting = scale * np.array(
        [
            max(step.waiting_seconds, step.seconds) if step.stragglers else step.seconds
            for step in steps
        ]
    )
    number = np.array([step.step for step in steps])
    kept = np.union1d(downsample(taken), downsample(waiting))
    marked = thin([step for step in steps if step.stragglers], _MOST_MARKS)
    traces = [
        _line("waiting for all, at least", number[kept], waiting[kept], 1, "dot"),
        _line("taken", number[kept], taken[kept], 0, "solid"),
    ]
    if marked:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "straggler",
                "x": [step.step for step in marked],
                "y": [float(f"{scale * step.seconds:.6g}") for step in marked],
                "text": [
                    f"replica{'' if len(step.stragglers) == 1 else 's'} "
                    f"{', '.join(map(str, step.stragglers))}"
                    for step in marked
                ],
                "marker": {
                    "color": "var(--bad)",
                    "symbol": "triangle-up",
                    "size": 7 if len(marked) > _MOST_STEPS else 9,
                    "line": {"color": "var(--panel)", "width": 1},
                },
                "hovertemplate": "%{text}",
            }
        )
    figure_layout = layout(320, "steps done", f"time of the gradient in {unit}")
    figure_layout["yaxis"]["rangemode"] = "tozero"
    return Figure(
        f"coding-{overview.label}",
        f"{text.plural(len(totals.steps), 'step')}, {len(totals.slow_steps):,} with a straggler; "
        f"the gradients took {text.duration(totals.coded_seconds)} in all, and with waiting for "
        f"all replicas at least {text.duration(totals.waiting_seconds)}.",
        traces,
        figure_layout,
    )


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


def coding_part(overview: Overview, plot: str) -> str:
    """Summary of coding, `plot` (the figure as HTML), slow processes, and inexact steps."""
    totals = coding_totals(overview.run)
    if totals is None:
        return '<p class="missing">The run used no gradient coding.</p>'
    done = (
        f"{totals.description} over {text.plural(totals.replicas, 'replica')}: "
        f"{text.plural(totals.claims, 'chunk')} taken over, {totals.duplicates:,} computed twice; "
        f"saved at least {text.duration(totals.saved_seconds)}."
    )
    advice = totals.advice or ""
    said = [done, advice[:1].upper() + advice[1:]] if advice else [done]
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
    return (
        plot
        + "".join(f'<p class="about">{text.escape(number)}</p>' for number in said)
        + table(heads, rows, "How often each replica was slow")
        + _inexact(totals)
    )


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


_MOST_FINDINGS = 100


_GRADES = {
    **dict.fromkeys(("corrected", "check", "repeated", "restored"), "good"),
    **dict.fromkeys(("rounding", "not_finite"), "caution"),
}


def guard_part(overview: Overview) -> str:
    """Checks with their certificate, modules without a check, and findings."""
    totals = guard_totals(overview.run)
    if totals is None:
        return '<p class="missing">The run was not guarded.</p>'
    rows = [
        [
            words(name),
            digits(text.count(operation.checks)),
            digits(f"{operation.spread:.2f}"),
            digits(f"{operation.worst:.2f}"),
            digits(
                "exact" if operation.detection_point is None else f"{operation.detection_point:.2g}"
            ),
        ]
        for name, operation in totals.operations.items()
    ]
    heads = [words("check")] + [
        digits(name) for name in ("made", "rms / sigma", "worst / sigma", "detection point")
    ]
    uncovered = ""
    if totals.uncovered:
        kinds = ", ".join(f"{text.escape(kind)} ({n})" for kind, n in totals.uncovered.items())
        uncovered = (
            f'<p class="about">{sum(totals.uncovered.values())} of {totals.modules} modules with '
            f"parameters have no check at this level: {kinds}.</p>"
        )
    elif not totals.last.gaps:
        uncovered = '<p class="about">Every module with parameters has a check.</p>'
    checks = table(heads, rows, "Checks and the largest error that could have passed them")
    audits = f'<p class="about">{text.escape(totals.audits)}.</p>' if totals.audits else ""
    return checks + uncovered + _gaps(totals) + audits + _lost(overview) + _findings(overview)


def _gaps(totals: GuardTotals) -> str:
    """Operations that no check watched in the last step, and apart from them those at rest."""
    share, last = totals.watched_share, totals.last
    if share is None:
        return ""
    flops = (
        ""
        if last.flops is None
        else f" and {100 * (1.0 - last.flops):.3g} % of its products' FLOPs"
    )
    said = (
        f"Checks watched {100 * share:.3g} % of the last step's gradient{flops}. Apart from that, "
        "checks of the optimizer and of weights at rest go through "
        f"{100 * last.at_rest / max(last.parameters, 1):.3g} % of the parameters; they do not see "
        "what a module computes."
    )
    if last.coverage:
        said += f" Of all operations: {text.escape(last.coverage)}."
    rows = [[words(name), words(what)] for name, what in last.gaps.items()]
    heads = [words("parameter or operation"), words("why or how often")]
    listed = table(heads, rows, "Without a check in the last step") if rows else ""
    return f'<p class="about">{said}</p>{listed}'


def _lost(overview: Overview) -> str:
    """Rows of the guard's coverage, from the steps that showed it."""
    warned = [event for _, event in overview.run.of(CoverageWarned)]
    rows = [[digits(f"{event.step:,}"), words(event.message)] for event in warned]
    heads = [digits("step"), words("what no check has watched, or watches no longer")]
    return table(heads, rows, "Warnings of coverage") if rows else ""


def _findings(overview: Overview) -> str:
    found = overview.run.of(CorruptionDetected)
    if not found:
        return '<p class="about">Nothing wrong was found.</p>'
    rows = [
        [
            digits(f"{event.step + 1:,}"),
            words(text.utc(record.time)),
            words(event.module),
            words(event.operation),
            words(f"{event.found_on} ({event.device})"),
            digits(text.count(event.rows)),
            digits(f"{event.magnitude:.3g}"),
            Cell(
                f'<span class="outcome {_GRADES.get(event.outcome, "bad")}">'
                f"{text.escape(event.outcome.replace('_', ' '))}</span>"
            ),
        ]
        for record, event in found[:_MOST_FINDINGS]
    ]
    names = ("step", "time (UTC)", "module", "check", "rank", "rows", "sigma", "outcome")
    numeric = ("step", "rows", "sigma")
    heads = [digits(name) if name in numeric else words(name) for name in names]
    caption = "Silent data corruption that was found"
    if len(found) > _MOST_FINDINGS:
        caption += f" (the first {_MOST_FINDINGS} of {len(found):,})"
    return table(heads, rows, caption)


_MOST_EVENTS = 200


def recovery_part(overview: Overview) -> str:
    """All losses and recoveries, oldest first."""
    totals = recovery_totals(overview.run)
    if totals is None:
        return '<p class="missing">Nobody was lost.</p>'
    rows = [
        [
            words(text.utc(record.time)),
            digits(f"{record.attempt}"),
            Cell(
                f'<span class="outcome {"bad" if isinstance(event, MemberLost) else "good"}">'
                f"{text.escape(event.kind.replace('_', ' '))}</span>"
            ),
            digits(f"{event.seconds:.2f}"),
            words(recovery_words(event)),
        ]
        for record, event in totals.events[:_MOST_EVENTS]
    ]
    heads = [words("time (UTC)"), digits("attempt"), words("event"), digits("seconds")]
    caption = f"Losses and recoveries: {totals.sentence()}"
    if len(totals.events) > _MOST_EVENTS:
        caption += f" (the first {_MOST_EVENTS} of {len(totals.events):,})"
    return table([*heads, words("what")], rows, caption)


_MOST_KEPT = 20


def tensorized_part(overview: Overview) -> str:
    """Layers of equal kind in one row each, those that stay dense, and changes of ranks."""
    event = overview.run.tensorized
    if event is None:
        return '<p class="missing">The layers of the model are dense.</p>'
    sentence = (
        f"{event.form}, rank {event.wanted_rank}: {text.plural(len(event.modules), 'layer')} "
        "replaced. "
        f"The model has {text.count(event.parameters)} of {text.count(event.dense_parameters)} "
        f"parameters ({event.parameter_share:.2f}x) and takes "
        f"{text.count(round(event.flops_per_token))} of "
        f"{text.count(round(event.dense_flops_per_token))} FLOPs per token "
        f"({event.flops_share:.2f}x)."
    )
    kept = {**event.kept, **event.left}
    dense = ""
    if kept:
        rows = [[words(name), words(reason)] for name, reason in list(kept.items())[:_MOST_KEPT]]
        caption = "What stays dense"
        if len(kept) > _MOST_KEPT:
            caption += f" (the first {_MOST_KEPT} of {len(kept):,})"
        dense = table([words("layer"), words("why")], rows, caption)
    about = f'<p class="about">{text.escape(sentence)}</p>'
    return about + _layers(event.modules) + _changes(overview) + dense


def _changes(overview: Overview) -> str:
    """The changes of ranks in one row for each step, oldest first."""
    found = overview.run.of(RanksChanged)
    if not found:
        return ""
    rows = []
    for record, event in found[:_MOST_EVENTS]:
        before, after = (
            sum(change[when] for change in event.changes) for when in ("before", "after")
        )
        errors = [change["error"] for change in event.changes if change["error"] is not None]
        rows.append(
            [
                digits(f"{record.attempt}"),
                digits(f"{event.step:,}"),
                digits(f"{len(event.changes):,}"),
                digits(f"{before / len(event.changes):.1f} → {after / len(event.changes):.1f}"),
                digits(f"{max(errors):.3g}" if errors else ""),
                digits(text.count(event.parameters)),
                digits(text.count(round(event.flops_per_token))),
                digits(f"{event.seconds:.2f}" if event.seconds else "restored"),
            ]
        )
    names = ("attempt", "after step", "ranks changed", "their mean", "largest change of a weight",
             "parameters", "FLOPs per token", "seconds")  # fmt: skip
    caption = "Ranks that followed the training; the layers above have those of the job"
    if len(found) > _MOST_EVENTS:
        caption += f" (the first {_MOST_EVENTS} of {len(found):,} changes)"
    return table([digits(name) for name in names], rows, caption)


def _layers(modules: list[dict[str, Any]]) -> str:
    kinds: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for module in modules:
        last = str(module["name"]).rpartition(".")[2]
        key = (last, module["form"], module["rank"], module["in_features"], module["out_features"])
        kinds.setdefault(key, []).append(module)
    parameters, flops = (_total(modules, name) for name in ("parameters", "flops"))
    rows = [
        [
            words(name),
            digits(f"{len(alike):,}"),
            words(form),
            digits(rank),
            digits(f"{into} → {out}"),
            *_layer_share(alike, "parameters", parameters),
            *_layer_share(alike, "flops", flops),
        ]
        for (name, form, rank, into, out), alike in kinds.items()
    ]
    rows.append(
        [
            words("sum"),
            digits(f"{len(modules):,}"),
            words(""),
            digits(""),
            digits(""),
            *_layer_share(modules, "parameters", parameters),
            *_layer_share(modules, "flops", flops),
        ]
    )
    heads = [words("layer"), digits("number"), words("form"), digits("rank"), digits("features")]
    for name in ("parameters", "FLOPs per token"):
        heads += [digits(name), digits("of dense"), digits("per cent")]
    return table(heads, rows, "Layers that were replaced; FLOPs of the forward pass")


def _layer_share(alike: list[dict[str, Any]], what: str, whole: int) -> Iterable[Any]:
    """The sum over some layers, as a share of the dense ones, and of all replaced layers."""
    own, dense = _total(alike, what), _total(alike, f"dense_{what}")
    return (
        digits(text.count(own)),
        digits(f"{own / dense:.3f}x" if dense else ""),
        digits(f"{100 * own / whole:.1f}" if whole else ""),
    )


def _total(modules: list[dict[str, Any]], what: str) -> int:
    return sum(int(module[what]) for module in modules)


_ROW_PIXELS = 44
_WIDE = 8.0
_MANY_DECADES = 3
_INSIDE_GRADES = {True: "good", False: "caution"}


def forecast_figure(overview: Overview) -> Figure | None:
    """Every figure as a share of what was predicted; None where nothing was."""
    found = forecast_of(overview.run)
    if found is None:
        return None
    rows = [compared for compared in found.compared() if compared.predicted > 0]
    traces: list[dict[str, Any]] = []
    if known := [row for row in rows if row.low is not None and row.high is not None]:
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": f"predicted interval, {100 * found.prediction.coverage:.3g} %",
                "y": [row.name for row in known],
                "base": [_per_cent(row, row.low or 0.0) for row in known],
                "x": [_per_cent(row, (row.high or 0.0) - (row.low or 0.0)) for row in known],
                "width": 0.5,
                "text": [text.escape(row.interval_words()) for row in known],
                "textposition": "none",
                "marker": {"color": "var(--series-6)", "opacity": 0.55, "line": {"width": 0}},
                "hovertemplate": "%{y}: %{text}<extra></extra>",
            }
        )
    traces.append(
        _scatter(
            "predicted",
            [(row, row.predicted) for row in rows],
            {"symbol": "line-ns-open", "size": 24, "line": {"width": 2}},
            "var(--text)",
        )
    )
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
    ratios = [
        f"{row.name} unavailable"
        if row.ratio is None
        else f"{row.name} {text.number(100 * row.ratio, 3)} %"
        + (f" ({row.verdict})" if row.verdict else "")
        for row in rows
    ]
    alt = f"Measured as a share of the prediction: {'; '.join(ratios)}."
    return Figure(f"forecast-{overview.label}", alt, traces, figure_layout)


def _scale(rows: Sequence[Compared]) -> dict[str, Any]:
    """From a little below the least share to a little above the largest one."""
    shares = [
        _per_cent(row, value)
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


def _per_cent(row: Compared, value: float) -> float:
    return 100 * value / row.predicted


def _scatter(
    name: str, points: Sequence[tuple[Compared, float]], marker: dict[str, Any], colour: str
) -> dict[str, Any]:
    kind = name.partition(",")[0]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [_per_cent(row, value) for row, value in points],
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
        return '<p class="missing">Nothing was predicted of this run.</p>'
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
    return (
        f'{beyond}<p class="about">{text.escape(" ".join(parts))}</p>'
        + picture
        + table(heads, rows, "Predicted and measured figures")
        + _terms(found)
    )


def _verdict(row: Compared) -> Cell:
    if row.measured is None:
        return Cell(f'<span class="missing">{text.escape(row.missing)}</span>')
    if row.inside is None:
        return words("")
    grade = _INSIDE_GRADES[row.inside]
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
