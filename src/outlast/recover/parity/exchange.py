"""One member's part in an update of parity, and in a rebuild."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outlast.recover.parity.code import (
    Bytes,
    Combination,
    Layout,
    Stripe,
    combine,
    hash_stripe,
    rebuilding,
    same,
    stripes_of,
    weight,
)
from outlast.recover.parity.store import ParityFile, ParityMark
from outlast.recover.parity.transport import RowWork

Flags = NDArray[np.bool_]
_rebuilding = functools.lru_cache(maxsize=1024)(rebuilding)


class RowMethod(Enum):
    """Method by which the parity of a row is brought up to date."""

    STAYS = "nothing in the row changed"
    WHOLE = "the sum of all its data, sent as they are now"
    DELTA = "the old parity and the sum of the differences old ^ new of those that changed"


@dataclass(frozen=True)
class RowChange:
    """One row.

    Attributes:
        senders: Who send their stripe or its difference, and how many bytes.
    """

    how: RowMethod
    senders: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Change:
    """Changes between two epochs.

    Where every stripe of a row changed, as under any optimizer that touches all its state, the
    stripes are sent as they are: that saves reading the old data and writing their difference.

    Attributes:
        before: Bytes of each member's data in the old epoch.
        after: The same in the new one.
        changed: Of each member's stripes, in whichever epoch there are more.
        whole: There is no common old epoch, so all data are sent.
    """

    layout: Layout
    before: tuple[int, ...]
    after: tuple[int, ...]
    changed: tuple[Flags, ...]
    whole: bool

    @cached_property
    def rows(self) -> int:
        """Number of rows that the new data reach, or the old ones did."""
        rows = self.layout.rows(self.after)
        return rows if self.whole else max(rows, self.layout.rows(self.before))

    def row(self, row: int) -> RowChange:
        """Update of one row."""
        if row < self._plain_rows:
            return self._plain[row % self.layout.members]
        reaching, changed = [], []
        for member in self.layout.contributors(row):
            stripe = self.layout.data_stripe(member, row)
            now = self._bytes(self.after, member, stripe)
            then = self._bytes(self.before, member, stripe)
            if now:
                reaching.append((member, now))
            if max(now, then) and (self.whole or self.changed[member][stripe]):
                changed.append((member, max(now, then)))
        if not changed and not self.whole:
            return RowChange(RowMethod.STAYS)
        if self.whole or {member for member, _ in reaching} <= {member for member, _ in changed}:
            return RowChange(RowMethod.WHOLE, tuple(reaching))
        return RowChange(RowMethod.DELTA, tuple(changed))

    @cached_property
    def _plain_rows(self) -> int:
        """The rows before this one are full of data that all changed: by far the most common."""
        if not (self.whole or all(bool(flags.all()) for flags in self.changed)):
            return 0
        layout = self.layout
        full = [nbytes // layout.stripe_bytes for nbytes in self.after]
        # The first row that a member does not fill.
        return min(layout.row_of_data(member, stripes) for member, stripes in enumerate(full))

    @cached_property
    def _plain(self) -> list[RowChange]:
        size = self.layout.stripe_bytes
        return [
            RowChange(
                RowMethod.WHOLE,
                tuple((contributor, size) for contributor in self.layout.contributors(row)),
            )
            for row in range(self.layout.members)
        ]

    def _bytes(self, lengths: tuple[int, ...], member: int, stripe: int) -> int:
        begin, end = self.layout.span(lengths[member], stripe)
        return end - begin


def changed_stripes(layout: Layout, old: Bytes | None, new: Bytes) -> Flags:
    """Flags of the stripes of one member's data that differ; all without old data."""
    before = 0 if old is None else old.nbytes
    count = max(layout.stripes(before), layout.stripes(new.nbytes))
    flags = np.ones(count, np.bool_)
    if old is not None:
        for stripe in range(count):
            (a, b), (c, d) = layout.span(before, stripe), layout.span(new.nbytes, stripe)
            flags[stripe] = not same(old[a:b], new[c:d])
    return flags


@dataclass(frozen=True)
class Update:
    """One member's part.

    Attributes:
        member: Its number.
        old: Its data in the old epoch; None where all is sent.
        new: Its data in the new one.
        hashes: Of the new data's stripes; filled in for those that changed.
    """

    member: int
    change: Change
    file: ParityFile
    old: Bytes | None
    new: Bytes
    hashes: list[int]

    def plan(self, row: int) -> RowWork:
        """Sends and receives of one row."""
        change = self.change.row(row)
        if change.how is RowMethod.STAYS:
            return RowWork()
        layout = self.change.layout
        holders = layout.holders(row)
        if self.member in holders:
            receives = [(peer, size) for peer, size in change.senders if peer != self.member]
            return RowWork(receives=receives, finish=self._summing(row, change.how, receives))
        stripe = layout.data_stripe(self.member, row)
        sizes = dict(change.senders)
        begin, end = layout.span(self.new.nbytes, stripe)
        if end > begin and self.member in sizes:
            self.hashes[stripe] = hash_stripe(self.new[begin:end])
        if self.member not in sizes:
            return RowWork()
        data = self.new[begin:end]
        if change.how is RowMethod.DELTA:
            data = self._difference(stripe, sizes[self.member])
        return RowWork(sends=[(holder, data) for holder in holders])

    def _summing(
        self, row: int, how: RowMethod, receives: list[tuple[int, int]]
    ) -> Callable[[list[Bytes]], None]:
        layout = self.change.layout
        stripe = layout.parity_stripe(self.member, row)
        parity = layout.holders(row).index(self.member)
        weights = [weight(parity, peer) for peer, _ in receives]

        def finish(got: list[Bytes]) -> None:
            terms = list(zip(weights, got, strict=True))
            if how is RowMethod.DELTA:
                terms.append((1, self.file.current(stripe)))
            combine(self.file.place(stripe), terms)

        return finish

    def _difference(self, stripe: int, nbytes: int) -> Bytes:
        assert self.old is not None
        difference = np.empty(nbytes, np.uint8)
        layout = self.change.layout
        spans = ((data, layout.span(data.nbytes, stripe)) for data in (self.old, self.new))
        combine(difference, [(1, data[begin:end]) for data, (begin, end) in spans])
        return difference


@dataclass(frozen=True)
class MemberReport:
    """Data and parity that one member still has.

    Attributes:
        slots: Of each epoch whose data it has: how many bytes, and their digest.
        marks: Of each epoch whose parity it has.
    """

    slots: Mapping[int, tuple[int, int]]
    marks: tuple[ParityMark, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain lists and numbers."""
        return {
            "slots": [(epoch, *content) for epoch, content in self.slots.items()],
            "marks": [asdict(mark) for mark in self.marks],
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> MemberReport:
        """The inverse of `to_json`."""
        slots = {epoch: (nbytes, digest) for epoch, nbytes, digest in content["slots"]}
        return cls(slots, tuple(ParityMark.from_json(mark) for mark in content["marks"]))


@dataclass(frozen=True)
class RecoverableEpoch:
    """An epoch that can be made whole, and its losses.

    Attributes:
        mark: The epoch, and what its data are.
        lost_data: Members whose data are gone, or are not those that the parity is of.
        lost_parity: Members whose parity is gone, or is of other data.
    """

    mark: ParityMark
    lost_data: frozenset[int]
    lost_parity: frozenset[int]


def recoverable_epochs(layout: Layout, reports: Sequence[MemberReport]) -> list[RecoverableEpoch]:
    """Epochs that can be made whole, the newest first.

    Members may have stale files of an earlier history of the same epoch. What most have in common
    counts; it is told apart by the digests.
    """
    epochs = {epoch for report in reports for epoch in report.slots}
    epochs |= {mark.epoch for report in reports for mark in report.marks}
    best = (_best(layout, reports, epoch) for epoch in sorted(epochs, reverse=True))
    return [situation for situation in best if situation is not None]


def _best(layout: Layout, reports: Sequence[MemberReport], epoch: int) -> RecoverableEpoch | None:
    marks = {mark for report in reports for mark in report.marks if mark.epoch == epoch}
    if all(epoch in report.slots for report in reports):
        lengths, digests = zip(*(report.slots[epoch] for report in reports), strict=True)
        marks.add(ParityMark(epoch, tuple(lengths), tuple(digests)))
    possible = []
    for mark in marks:
        expected = zip(mark.lengths, mark.digests, strict=True)
        slots = [report.slots.get(epoch) for report in reports]
        lost_data = frozenset(
            member
            for member, pair in enumerate(zip(slots, expected, strict=True))
            if pair[0] != pair[1]
        )
        lost_parity = frozenset(
            member for member, report in enumerate(reports) if mark not in report.marks
        )
        if layout.survives(lost_data, lost_parity):
            possible.append(RecoverableEpoch(mark, lost_data, lost_parity))
    return min(
        possible,
        key=lambda found: (
            len(found.lost_data) + len(found.lost_parity),
            len(found.lost_data),
            found.mark.digests,
        ),
        default=None,
    )


@dataclass(frozen=True)
class Rebuild:
    """One member's part.

    Attributes:
        member: Its number.
        data: Its data of the epoch; where they are lost, the memory to fill.
    """

    layout: Layout
    situation: RecoverableEpoch
    member: int
    file: ParityFile
    data: Bytes

    @property
    def rows(self) -> range:
        """The rows to look at: all, or none where nothing is lost."""
        lost = self.situation.lost_data or self.situation.lost_parity
        return range(self.layout.rows(self.situation.mark.lengths) if lost else 0)

    def plan(self, row: int) -> RowWork:
        """Sends and receives of one row."""
        stripes = tuple(
            stripe for stripe in stripes_of(self.layout, row) if self._bytes(stripe, row)
        )
        lost_of = (self.situation.lost_data, self.situation.lost_parity)
        lost = tuple(
            stripe for stripe in stripes if stripe.member in lost_of[stripe.parity is not None]
        )
        sends: list[tuple[int, Bytes]] = []
        receives: list[tuple[int, int]] = []
        finish = None
        for missing, combination in _rebuilding(stripes, lost).items():
            most = self._bytes(missing, row)
            sends += [
                (missing.member, self._read(source, row)[:most])
                for source in combination
                if source.member == self.member
            ]
            if missing.member == self.member:
                receives = [
                    (source.member, min(most, self._bytes(source, row))) for source in combination
                ]
                finish = self._making(missing, row, combination)
        return RowWork(sends, receives, finish)

    def _bytes(self, stripe: Stripe, row: int) -> int:
        if stripe.parity is not None:
            return self.layout.stripe_bytes
        place = self.layout.data_stripe(stripe.member, row)
        begin, end = self.layout.span(self.situation.mark.lengths[stripe.member], place)
        return end - begin

    def _read(self, stripe: Stripe, row: int) -> Bytes:
        if stripe.parity is None:
            return self._own(row)
        place = self.layout.parity_stripe(self.member, row)
        return self.file.stripe(self.situation.mark, place)

    def _own(self, row: int) -> Bytes:
        begin, end = self.layout.span(self.data.nbytes, self.layout.data_stripe(self.member, row))
        return self.data[begin:end]

    def _making(
        self, stripe: Stripe, row: int, combination: Combination
    ) -> Callable[[list[Bytes]], None]:
        def finish(got: list[Bytes]) -> None:
            place = self.layout.parity_stripe(self.member, row)
            out = self._own(row) if stripe.parity is None else self.file.place(place)
            combine(out, list(zip(combination.values(), got, strict=True)))

        return finish
