"""The cheapest way to save a joule: clock, cap, precision, rank, batch, checkpoints and guard."""

from outlast.energy.levers.cap import CapChoice, CapGoal, CapPoint, choose_cap, next_cap, search_cap
from outlast.energy.levers.lever import Baseline, Comparison, Lever, Row, compare

__all__ = [
    "Baseline",
    "CapChoice",
    "CapGoal",
    "CapPoint",
    "Comparison",
    "Lever",
    "Row",
    "choose_cap",
    "compare",
    "next_cap",
    "search_cap",
]
