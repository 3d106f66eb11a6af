"""One member's part in a rebuild: send what others lack, make what it lacks itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from outlast.recover.parity.code import Combination, Stripe, rebuilding, stripes_of
from outlast.recover.parity.combine import Bytes, combine
from outlast.recover.parity.layout import Layout
from outlast.recover.parity.situation import Situation
from outlast.recover.parity.store import ParityFile
from outlast.recover.parity.wire import RowWork


@dataclass(frozen=True)
class Rebuild:
    """One member's part.

    Attributes:
        member: Its number.
        data: Its data of the epoch; where they are lost, the memory to fill.
    """

    layout: Layout
    situation: Situation
    member: int
    file: ParityFile
    data: Bytes

    @property
    def rows(self) -> range:
        """The rows to look at: all, or none where nothing is lost."""
        lost = self.situation.lost_data or self.situation.lost_parity
        return range(self.layout.rows(self.situation.mark.lengths) if lost else 0)

    def plan(self, row: int) -> RowWork:
        """What to do for one row."""
        stripes = tuple(
            stripe for stripe in stripes_of(self.layout, row) if self._bytes(stripe, row)
        )
        lost = tuple(stripe for stripe in stripes if self._lost(stripe))
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

    def _lost(self, stripe: Stripe) -> bool:
        lost = self.situation.lost_data if stripe.parity is None else self.situation.lost_parity
        return stripe.member in lost

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


@functools.lru_cache(maxsize=1024)
def _rebuilding(stripes: tuple[Stripe, ...], lost: tuple[Stripe, ...]) -> dict[Stripe, Combination]:
    return rebuilding(stripes, lost)
