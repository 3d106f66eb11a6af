"""How the ranks of a loop that is not ours agree at which step boundary to save or to stop.

A signal comes to one rank, and clocks differ, but all ranks must save at the same boundary. They
add up flags there, in a small all-reduce, about once a second: as often as every step would cost
what it costs, and a stop has a second's time. Rank 0 says when the next is.
"""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

_LOOK_SECONDS = 1.0
_TIMEOUT = timedelta(minutes=30)


class Agreed(NamedTuple):
    """What the ranks do at a boundary."""

    stop: bool
    save: bool


class Agreement:
    """The ranks of the default process group, in a group of their own, over gloo.

    All ranks make it at the same boundary.
    """

    def __init__(self, step: int) -> None:
        self.rank = dist.get_rank()
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        self._next = step
        self._gap = 1

    def is_due(self, step: int) -> bool:
        """Whether the ranks look at each other's flags at this boundary."""
        return step >= self._next

    def exchange(self, step: int, stop: bool, save: bool, step_seconds: float) -> Agreed:
        """What to do at this boundary, the same on all ranks.

        Args:
            step: Steps done.
            stop: Whether this rank is to stop.
            save: Whether this rank wants to save; rank 0's wish counts.
            step_seconds: What a step takes on this rank; rank 0's figure counts.
        """
        first = self.rank == 0
        gap = min(2 * self._gap, max(1, int(_LOOK_SECONDS / max(step_seconds, 1e-6))))
        flags = torch.tensor([stop, save and first, gap if first else 0], device="cpu")
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        stops, saves, self._gap = map(int, flags)
        self._next = step + self._gap
        return Agreed(bool(stops), bool(saves))

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank; all ask at the same boundary."""
        flags = torch.tensor([flag], device="cpu", dtype=torch.int32)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        return bool(flags)
