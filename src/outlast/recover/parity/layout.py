"""Which member keeps which stripe of data and of parity: RAID-6's rotating placement.

Every member's bytes are cut into stripes. A row takes at most one stripe of each member: of
``losses`` members, which rotate from row to row, a stripe of parity, and of all others their next
stripe of data. So no member keeps parity of its own data, whoever is lost takes at most one
stripe of every row with it, and the parity of B bytes of data takes B losses / (members - losses)
bytes at each member.

A stripe's place depends neither on the length of the data nor on that of other members' data: data
that grow add rows. Behind a member's end its data count as zeros.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from outlast.errors import RecoverError

MOST_MEMBERS = 255
STRIPE_BYTES = 1 << 21


@dataclass(frozen=True)
class Layout:
    """The placement of one group.

    Args:
        members: Who share parity, numbered from 0.
        losses: How many of them may be lost together: 1 (P) or 2 (P and Q).
        stripe_bytes: Bytes of a stripe, a multiple of 64.

    Raises:
        RecoverError: Where no such group can be.
    """

    members: int
    losses: int = 1
    stripe_bytes: int = STRIPE_BYTES

    def __post_init__(self) -> None:
        if self.losses not in (1, 2):
            raise RecoverError(f"losses = {self.losses} is not 1 or 2: parity survives no others")
        if not self.losses < self.members <= MOST_MEMBERS:
            raise RecoverError(
                f"{self.members} members cannot share parity for {self.losses} losses: it takes "
                f"{self.losses + 1} to {MOST_MEMBERS}"
            )
        if self.stripe_bytes <= 0 or self.stripe_bytes % 64:
            raise RecoverError(
                f"stripe_bytes = {self.stripe_bytes} is not a positive multiple of 64"
            )

    @property
    def data_per_cycle(self) -> int:
        """Stripes of data that a member has in as many rows as there are members."""
        return self.members - self.losses

    def holders(self, row: int) -> tuple[int, ...]:
        """Who keep P (and Q) of a row."""
        first = self.members - 1 - row % self.members
        return tuple((first - which) % self.members for which in range(self.losses))

    def contributors(self, row: int) -> tuple[int, ...]:
        """Whose data are in a row, whether or not they reach that far; ascending."""
        holders = self.holders(row)
        return tuple(member for member in range(self.members) if member not in holders)

    def row_of_data(self, member: int, stripe: int) -> int:
        """The row of a member's data stripe."""
        cycle, place = divmod(stripe, self.data_per_cycle)
        for held in self._places(member):
            place += place >= held
        return cycle * self.members + place

    def data_stripe(self, member: int, row: int) -> int:
        """The number among a contributor's stripes of the one in a row."""
        cycle, place = divmod(row, self.members)
        return cycle * self.data_per_cycle + place - self._held_before(member, place)

    def parity_stripe(self, member: int, row: int) -> int:
        """The number among a holder's parity stripes of the one in a row."""
        cycle, place = divmod(row, self.members)
        return cycle * self.losses + self._held_before(member, place)

    def stripes(self, nbytes: int) -> int:
        """Into how many stripes data are cut, the last one perhaps short."""
        return -(-nbytes // self.stripe_bytes)

    def rows(self, lengths: Collection[int]) -> int:
        """How many rows the members' data of `lengths` bytes reach, in order of members."""
        return max(
            (
                self.row_of_data(member, self.stripes(nbytes) - 1) + 1
                for member, nbytes in enumerate(lengths)
                if nbytes
            ),
            default=0,
        )

    def parity_stripes(self, member: int, rows: int) -> int:
        """How many stripes of parity a member keeps for so many rows."""
        return self.parity_stripe(member, rows)

    def span(self, nbytes: int, stripe: int) -> tuple[int, int]:
        """Where a stripe of data of `nbytes` bytes begins and ends; empty behind their end."""
        begin = min(stripe * self.stripe_bytes, nbytes)
        return begin, min(begin + self.stripe_bytes, nbytes)

    def survives(self, lost_data: Collection[int], lost_parity: Collection[int]) -> bool:
        """Whether every row can be made whole without some members' data and others' parity."""
        return all(
            sum(member in lost_data for member in self.contributors(row))
            + sum(member in lost_parity for member in self.holders(row))
            <= self.losses
            for row in range(self.members)
        )

    def _places(self, member: int) -> list[int]:
        """The rows of a cycle whose parity a member keeps, ascending."""
        last = self.members - 1 - member
        return sorted((last - which) % self.members for which in range(self.losses))

    def _held_before(self, member: int, place: int) -> int:
        return sum(held < place for held in self._places(member))
