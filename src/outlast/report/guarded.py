"""The guard in the report: what was checked, how finely, and what was found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.records import WrongNumbers, guard_totals
from outlast.report import text
from outlast.report.tables import Cell, digits, table, words

if TYPE_CHECKING:
    from outlast.records import GuardTotals
    from outlast.report.overview import Overview

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
    """What no check has watched in the last step, and apart from it what is checked at rest."""
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
    found = overview.run.of(WrongNumbers)
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
