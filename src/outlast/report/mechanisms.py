"""Gradient coding in the report: what every step took, who was slow, and what is not exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from outlast.records import (
    CorruptionDetected,
    MemberLost,
    RanksChanged,
    coding_totals,
    guard_totals,
    recovery_totals,
    recovery_words,
)
from outlast.report import palette, text
from outlast.report.charts import Figure, layout
from outlast.report.overview import downsample, thin
from outlast.report.tables import Cell, digits, table, words

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outlast.records import CodedStep, CodingTotals, GuardTotals, Tensorized
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
    longest = max(max(step.seconds, step.waiting_seconds) for step in steps)
    scale, unit = (1e3, "milliseconds") if longest < 1 else (1.0, "seconds")
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
    return Figure(
        f"coding-{overview.label}",
        f"{text.plural(len(totals.steps), 'step')}, {len(totals.slow_steps):,} with a straggler; "
        f"the gradients took {text.duration(totals.coded_seconds)} in all, and with waiting for "
        f"all replicas at least {text.duration(totals.waiting_seconds)}.",
        traces,
        figure_layout,
    )


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


def coding_part(overview: Overview, plot: str) -> str:
    """Summary of coding, `plot` (the figure as HTML), slow processes, and inexact steps."""
    totals = coding_totals(overview.run)
    if totals is None:
        return '<p class="about">The run used no gradient coding.</p>'
    return plot + _done(totals) + _replicas(totals) + _inexact(totals)


def _done(totals: CodingTotals) -> str:
    done = (
        f"{totals.description} over {text.plural(totals.replicas, 'replica')}: "
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


_MOST_FINDINGS = 100


_GRADES = {
    **dict.fromkeys(("corrected", "check", "repeated"), "good"),
    **dict.fromkeys(("rounding", "not_finite"), "caution"),
}


def guard_part(overview: Overview) -> str:
    """Checks with their certificate, modules without a check, and findings."""
    totals = guard_totals(overview.run)
    if totals is None:
        return '<p class="about">The run was not guarded.</p>'
    return _checks(totals) + _uncovered(totals) + _gaps(totals) + _findings(overview)


def _checks(totals: GuardTotals) -> str:
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
    return table(heads, rows, "Checks and the largest error that could have passed them")


def _uncovered(totals: GuardTotals) -> str:
    if not totals.uncovered and not totals.last.gaps:
        return '<p class="about">Every module with parameters has a check.</p>'
    if not totals.uncovered:
        return ""
    kinds = ", ".join(f"{text.escape(kind)} ({n})" for kind, n in totals.uncovered.items())
    count = sum(totals.uncovered.values())
    return (
        f'<p class="about">{count} of {totals.modules} modules with parameters have no check '
        f"at this level: {kinds}.</p>"
    )


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
    rows = [[words(name), words(what)] for name, what in last.gaps.items()]
    heads = [words("parameter or operation"), words("why or how often")]
    listed = table(heads, rows, "Without a check in the last step") if rows else ""
    return f'<p class="about">{said}</p>{listed}'


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
    caption = "Wrong numbers that were found"
    if len(found) > _MOST_FINDINGS:
        caption += f" (the first {_MOST_FINDINGS} of {len(found):,})"
    return table(heads, rows, caption)


_MOST_EVENTS = 200


def recovery_part(overview: Overview) -> str:
    """All losses and recoveries, oldest first."""
    totals = recovery_totals(overview.run)
    if totals is None:
        return '<p class="about">Nobody was lost.</p>'
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
        return '<p class="about">The layers of the model are dense.</p>'
    return (
        f'<p class="about">{text.escape(_sentence(event))}</p>'
        + _layers(event.modules)
        + _changes(overview)
        + _kept({**event.kept, **event.left})
    )


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


def _sentence(event: Tensorized) -> str:
    return (
        f"{event.form}, rank {event.wanted_rank}: {text.plural(len(event.modules), 'layer')} "
        "replaced. "
        f"The model has {text.count(event.parameters)} of {text.count(event.dense_parameters)} "
        f"parameters ({event.parameter_share:.2f}x) and takes "
        f"{text.count(round(event.flops_per_token))} of "
        f"{text.count(round(event.dense_flops_per_token))} FLOPs per token "
        f"({event.flops_share:.2f}x)."
    )


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
            *_share(alike, "parameters", parameters),
            *_share(alike, "flops", flops),
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
            *_share(modules, "parameters", parameters),
            *_share(modules, "flops", flops),
        ]
    )
    heads = [words("layer"), digits("number"), words("form"), digits("rank"), digits("features")]
    for name in ("parameters", "FLOPs per token"):
        heads += [digits(name), digits("of dense"), digits("per cent")]
    return table(heads, rows, "Layers that were replaced; FLOPs of the forward pass")


def _share(alike: list[dict[str, Any]], what: str, whole: int) -> Iterable[Any]:
    """The sum over some layers, as a share of the dense ones, and of all replaced layers."""
    own, dense = _total(alike, what), _total(alike, f"dense_{what}")
    return (
        digits(text.count(own)),
        digits(f"{own / dense:.3f}x" if dense else ""),
        digits(f"{100 * own / whole:.1f}" if whole else ""),
    )


def _total(modules: list[dict[str, Any]], what: str) -> int:
    return sum(int(module[what]) for module in modules)


def _kept(kept: dict[str, str]) -> str:
    if not kept:
        return ""
    rows = [[words(name), words(reason)] for name, reason in list(kept.items())[:_MOST_KEPT]]
    caption = "What stays dense"
    if len(kept) > _MOST_KEPT:
        caption += f" (the first {_MOST_KEPT} of {len(kept):,})"
    return table([words("layer"), words("why")], rows, caption)
