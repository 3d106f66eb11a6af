"""One member's part in an update: send what changed, sum up what arrives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from outlast.recover.parity.change import Change, How
from outlast.recover.parity.code import weight
from outlast.recover.parity.combine import Bytes, combine
from outlast.recover.parity.digest import hash_stripe
from outlast.recover.parity.store import ParityFile
from outlast.recover.parity.wire import RowWork


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
        """What to do for one row."""
        change = self.change.row(row)
        if change.how is How.STAYS:
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
        if change.how is How.DELTA:
            data = self._difference(stripe, sizes[self.member])
        return RowWork(sends=[(holder, data) for holder in holders])

    def _summing(
        self, row: int, how: How, receives: list[tuple[int, int]]
    ) -> Callable[[list[Bytes]], None]:
        layout = self.change.layout
        stripe = layout.parity_stripe(self.member, row)
        parity = layout.holders(row).index(self.member)
        weights = [weight(parity, peer) for peer, _ in receives]

        def finish(got: list[Bytes]) -> None:
            terms = list(zip(weights, got, strict=True))
            if how is How.DELTA:
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
