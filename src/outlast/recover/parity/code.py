"""How a lost stripe of a row follows from those that are left.

P is the sum of a row's data stripes, Q the sum of 2^i times the stripe of member i, over GF(2^8)
(Anvin, "The mathematics of RAID-6", 2004, equations 1 to 10). Any two lost stripes of a row,
data or parity, are linear combinations of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from outlast.recover.parity.gf256 import invert, multiply, power
from outlast.recover.parity.layout import Layout


class Stripe(NamedTuple):
    """One stripe of a row: a member's data, or the parity that a member keeps.

    Attributes:
        member: Whose memory holds it.
        parity: None for data, 0 for P, 1 for Q.
    """

    member: int
    parity: int | None = None


Combination = Mapping[Stripe, int]
"""A sum of stripes, each times a byte of GF(2^8) that is not 0."""


def weight(parity: int, member: int) -> int:
    """What a member's data are multiplied by in P (0) or Q (1)."""
    return power(member) if parity else 1


def stripes_of(layout: Layout, row: int) -> tuple[Stripe, ...]:
    """All stripes of a row, the data first."""
    data = tuple(Stripe(member) for member in layout.contributors(row))
    return data + tuple(Stripe(member, which) for which, member in enumerate(layout.holders(row)))


def rebuilding(stripes: Collection[Stripe], lost: Collection[Stripe]) -> dict[Stripe, Combination]:
    """How each lost stripe of a row is made of the others.

    Args:
        stripes: All of the row.
        lost: Those of them that are gone, not more than there are stripes of parity.
    """
    data = [stripe for stripe in stripes if stripe.parity is None]
    missing = [datum for datum in data if datum in lost]
    parities = [stripe for stripe in stripes if stripe.parity is not None and stripe not in lost]
    used = parities[: len(missing)]
    found: dict[Stripe, Combination] = {datum: {datum: 1} for datum in data if datum not in lost}
    if missing:
        known = [_sum([(1, {parity: 1}), *_parts(parity, found)]) for parity in used]
        mixed = invert(
            [[weight(_which(parity), stripe.member) for stripe in missing] for parity in used]
        )
        found.update(
            (item, _sum(zip(row, known, strict=True)))
            for item, row in zip(missing, mixed, strict=True)
        )
    for stripe in lost:
        if stripe.parity is not None:
            found[stripe] = _sum(_parts(stripe, found))
    return {stripe: found[stripe] for stripe in lost}


def _which(stripe: Stripe) -> int:
    assert stripe.parity is not None
    return stripe.parity


def _parts(parity: Stripe, data: Mapping[Stripe, Combination]) -> list[tuple[int, Combination]]:
    """What stripes of data add to one of parity."""
    return [
        (weight(_which(parity), key.member), made)
        for key, made in data.items()
        if key.parity is None
    ]


def _sum(parts: Iterable[tuple[int, Combination]]) -> Combination:
    total: dict[Stripe, int] = {}
    for factor, combination in parts:
        for stripe, constant in combination.items():
            total[stripe] = total.get(stripe, 0) ^ multiply(factor, constant)
    return {stripe: constant for stripe, constant in total.items() if constant}
