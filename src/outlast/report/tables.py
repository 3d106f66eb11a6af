"""Tables and lists of the report as HTML."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outlast.errors import JobError
from outlast.job import identity, settings_from_text
from outlast.records import Warned
from outlast.report import palette, text
from outlast.report.charts import PURPOSE_WORDS, purposes
from outlast.report.overview import OUTCOME_WORDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.job import Job, LoopJob
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
        layout = _layout(start.parallel) if start else "unavailable: no start is recorded"
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


def _layout(parallel: dict[str, int]) -> str:
    used = [f"{name} {degree}" for name, degree in parallel.items() if degree != 1]
    return " x ".join(used) or "none"


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
        return '<p class="about">None is recorded.</p>'
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
    settings = [_settings(job) for job in jobs]
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


def _settings(job: Job | LoopJob) -> dict[str, str]:
    return {
        f"{section}.{key}": repr(value)
        for section, fields in job.model_dump().items()
        for key, value in fields.items()
        if f"{section}.{key}" not in ("run.name", "run.directory")
    }
