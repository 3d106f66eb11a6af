"""What of all members' data changed between two epochs, and how each row's parity follows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from outlast.recover.parity.combine import Bytes, same
from outlast.recover.parity.layout import Layout

Flags = NDArray[np.bool_]


class How(Enum):
    """How the parity of a row is brought up to date."""

    STAYS = "nothing in the row changed"
    WHOLE = "the sum of all its data, sent as they are now"
    DELTA = "the old parity and the sum of the differences old ^ new of those that changed"


@dataclass(frozen=True)
class RowChange:
    """One row.

    Attributes:
        senders: Who send their stripe or its difference, and how many bytes.
    """

    how: How
    senders: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Change:
    """What changed.

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
        """How many rows the new data reach, or the old ones did."""
        rows = self.layout.rows(self.after)
        return rows if self.whole else max(rows, self.layout.rows(self.before))

    def row(self, row: int) -> RowChange:
        """How one row is brought up to date."""
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
            return RowChange(How.STAYS)
        if self.whole or {member for member, _ in reaching} <= {member for member, _ in changed}:
            return RowChange(How.WHOLE, tuple(reaching))
        return RowChange(How.DELTA, tuple(changed))

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
                How.WHOLE,
                tuple((contributor, size) for contributor in self.layout.contributors(row)),
            )
            for row in range(self.layout.members)
        ]

    def _bytes(self, lengths: tuple[int, ...], member: int, stripe: int) -> int:
        begin, end = self.layout.span(lengths[member], stripe)
        return end - begin


def changed_stripes(layout: Layout, old: Bytes | None, new: Bytes) -> Flags:
    """Which stripes of one member's data differ; all without old data."""
    before = 0 if old is None else old.nbytes
    count = max(layout.stripes(before), layout.stripes(new.nbytes))
    flags = np.ones(count, np.bool_)
    if old is not None:
        for stripe in range(count):
            (a, b), (c, d) = layout.span(before, stripe), layout.span(new.nbytes, stripe)
            flags[stripe] = not same(old[a:b], new[c:d])
    return flags
