"""Which epochs can be made whole again from what the members still have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outlast.recover.parity.layout import Layout
from outlast.recover.parity.store import Mark


@dataclass(frozen=True)
class Report:
    """What one member still has.

    Attributes:
        slots: Of each epoch whose data it has: how many bytes, and their digest.
        marks: Of each epoch whose parity it has.
    """

    slots: Mapping[int, tuple[int, int]]
    marks: tuple[Mark, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain lists and numbers."""
        return {
            "slots": [(epoch, *content) for epoch, content in self.slots.items()],
            "marks": [asdict(mark) for mark in self.marks],
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Report:
        """What `to_json` was made of."""
        slots = {epoch: (nbytes, digest) for epoch, nbytes, digest in content["slots"]}
        return cls(slots, tuple(Mark.from_json(mark) for mark in content["marks"]))


@dataclass(frozen=True)
class Situation:
    """What is lost of one epoch.

    Attributes:
        mark: The epoch, and what its data are.
        lost_data: Members whose data are gone, or are not those that the parity is of.
        lost_parity: Members whose parity is gone, or is of other data.
    """

    mark: Mark
    lost_data: frozenset[int]
    lost_parity: frozenset[int]


def situations(layout: Layout, reports: Sequence[Report]) -> list[Situation]:
    """What can be made whole: at most one situation for each epoch, the newest first.

    Members may have stale files of an earlier history of the same epoch. What most have in common
    counts; it is told apart by the digests.
    """
    epochs = {epoch for report in reports for epoch in report.slots}
    epochs |= {mark.epoch for report in reports for mark in report.marks}
    best = (_best(layout, reports, epoch) for epoch in sorted(epochs, reverse=True))
    return [situation for situation in best if situation is not None]


def _best(layout: Layout, reports: Sequence[Report], epoch: int) -> Situation | None:
    marks = {mark for report in reports for mark in report.marks if mark.epoch == epoch}
    if all(epoch in report.slots for report in reports):
        lengths, digests = zip(*(report.slots[epoch] for report in reports), strict=True)
        marks.add(Mark(epoch, tuple(lengths), tuple(digests)))
    found = (_situation(reports, mark) for mark in marks)
    possible = [
        situation
        for situation in found
        if layout.survives(situation.lost_data, situation.lost_parity)
    ]
    return min(possible, key=_cost, default=None)


def _situation(reports: Sequence[Report], mark: Mark) -> Situation:
    expected = list(zip(mark.lengths, mark.digests, strict=True))
    lost_data = frozenset(
        member
        for member, report in enumerate(reports)
        if report.slots.get(mark.epoch) != expected[member]
    )
    lost_parity = frozenset(
        member for member, report in enumerate(reports) if mark not in report.marks
    )
    return Situation(mark, lost_data, lost_parity)


def _cost(situation: Situation) -> tuple[int, int, tuple[int, ...]]:
    lost = len(situation.lost_data) + len(situation.lost_parity)
    return lost, len(situation.lost_data), situation.mark.digests
