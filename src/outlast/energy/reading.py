"""An amount of energy that says how it was found. What cannot be had is `Unavailable`, never 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from outlast.hardware.figure import Unavailable

Kind: TypeAlias = Literal["measured", "modelled", "replayed", "simulated"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Joules, with the interval in which the truth lies and what made them.

    Attributes:
        joules: Best estimate.
        low_joules: Lower end of the 95 % interval; `joules` where the error is not known.
        high_joules: Upper end of it.
        kind: "measured" (a meter), "modelled" (computed from other measurements), "replayed" (from
            a measured table) or "simulated" (an analytic device).
        source: The meter or model, in words that let a reader find it.
        flags: What a reader must know before trusting the figure, one sentence each.
    """

    joules: float
    low_joules: float
    high_joules: float
    kind: Kind
    source: str
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.joules:,.4g} J ({self.kind}: {self.source})"


@dataclass(frozen=True, slots=True)
class Still(Unavailable):
    """A counter did not move in the window: its joules are in the next figure, if one comes."""


Reading: TypeAlias = Energy | Unavailable
