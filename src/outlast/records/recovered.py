"""Losses and recoveries of a run, in words and added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.records.events import MemberLost, MembershipChanged, StateRecovered

if TYPE_CHECKING:
    from outlast.records.reader import Record, Run

Recovery = StateRecovered | MemberLost | MembershipChanged
"""The events of recovery."""

_SOURCES = {
    "peer": "a peer",
    "parity": "parity",
    "memory": "memory",
    "disk": "this node's disk",
    "shared": "the shared file system",
    "approximate": "the stages beside it, approximately",
}


def recovery_words(event: Recovery) -> str:
    """`event` as one line."""
    match event:
        case StateRecovered():
            source = _SOURCES.get(event.source, event.source)
            words = f"step {event.step}: state taken from {source} in {event.seconds:.2f} s"
            if event.lost_steps > 0:
                words += f", {event.lost_steps} step{'s' if event.lost_steps > 1 else ''} again"
            return words + "".join(f"; {name}" for name in event.passed_over)
        case MemberLost():
            note = f": {event.note}" if event.note else ""
            return f"step {event.step}: {event.member} {event.cause}{note}"
        case MembershipChanged():
            return (
                f"step {event.step}: {event.after} in the place of {event.before} "
                f"({event.reason}), {event.seconds:.2f} s without a step"
            )


@dataclass(frozen=True)
class RecoveryTotals:
    """What a run has lost and got back.

    Attributes:
        events: In order, of all ranks.
        causes: Number of losses by cause.
        sources: Number of recoveries by source.
        lost_steps: Steps that are done again, as far as is known.
    """

    events: list[tuple[Record, Recovery]]
    causes: dict[str, int]
    sources: dict[str, int]
    lost_steps: int

    def sentence(self) -> str:
        """All in a few words."""
        parts = []
        if self.causes:
            parts.append(_counted(self.causes))
        if self.sources:
            parts.append(f"state from {_counted(self.sources)}")
        if self.lost_steps:
            parts.append(f"steps done again: {self.lost_steps}")
        return "; ".join(parts) or "nothing was lost"


def recovery_totals(run: Run) -> RecoveryTotals | None:
    """The losses and recoveries of all ranks; None for a run without any."""
    events: list[tuple[Record, Recovery]] = [
        (record, record.event) for record in run.records if isinstance(record.event, Recovery)
    ]
    if not events:
        return None
    causes: dict[str, int] = {}
    sources: dict[str, int] = {}
    lost = 0
    for _, event in events:
        if isinstance(event, MemberLost):
            causes[event.cause] = causes.get(event.cause, 0) + 1
        elif isinstance(event, StateRecovered):
            sources[event.source] = sources.get(event.source, 0) + 1
            lost += max(event.lost_steps, 0)
    return RecoveryTotals(events, causes, sources, lost)


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(
        f"{name} {count} time{'s' if count > 1 else ''}" for name, count in counts.items()
    )
