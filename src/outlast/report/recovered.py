"""Recovery in the report: who was lost, where the state came from, who went on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.records import MemberLost, recovery_totals, recovery_words
from outlast.report import text
from outlast.report.tables import Cell, digits, table, words

if TYPE_CHECKING:
    from outlast.report.overview import Overview

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
