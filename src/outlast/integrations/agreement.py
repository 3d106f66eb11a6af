"""How the ranks of a loop that is not ours agree at which step boundary to save or to stop.

A signal comes to one rank, and clocks differ, but all ranks must save at the same boundary. They
add up flags there, in a small all-reduce, about once a second: as often as every step would cost
what it costs, and a stop has a second's time. Rank 0 says when the next is.

A rank that has fewer steps than others never comes there. Where it has told so when it left its
loop, the others, which would wait for a long time, say whom they wait for and then give up. Where
it meets them at its end instead, all see that their steps differ. Neither helps a rank that waits
within a step, for DistributedDataParallel or the guard: there the process group's timeout counts.
"""

from __future__ import annotations

import contextlib
import sys
import time
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from outlast.errors import IntegrationError

_LOOK_SECONDS = 1.0
_TIMEOUT = timedelta(minutes=30)

_FIRST_PAUSE_SECONDS = 1e-5
_LONGEST_PAUSE_SECONDS = 0.05
"""While waiting for other ranks, between two looks at whether they have come."""

_TELL_SECONDS = 5.0
"""After so long a rank looks and says whom it waits for."""

_AWAY_SECONDS = 60.0
"""So long a rank that has left its loop may be away, as in an evaluation of its own."""

_HERE, _ENDED = "here", "ended"

_REMEDY = (
    "all ranks must do the same number of steps; give each as many batches, e.g. by a "
    "DistributedSampler or drop_last=True"
)


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
        self._size = dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        # A connection of its own: on the group's, another thread may wait.
        below = _get_default_store().clone()  # type: ignore[attr-defined]
        self._board = dist.PrefixStore("outlast/agreement", below)
        self._away = False
        self._next = step
        self._gap = 1
        self._tell(_HERE)

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

        Raises:
            IntegrationError: When a rank does not come to this boundary, because it has fewer
                steps or is gone.
        """
        first = self.rank == 0
        gap = min(2 * self._gap, max(1, int(_LOOK_SECONDS / max(step_seconds, 1e-6))))
        stops, saves, self._gap = self._together(step, stop, save and first, gap if first else 0)
        self._next = step + self._gap
        return Agreed(bool(stops), bool(saves))

    def meet(self, step: int) -> None:
        """This rank has come to the end of its steps; all ranks meet there.

        Raises:
            IntegrationError: On all ranks, when others did another number of steps.
        """
        self._together(step, False, False, 0)

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank; all ask at the same boundary."""
        flags = torch.tensor([flag], device="cpu", dtype=torch.int32)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        return bool(flags)

    def left(self, step: int) -> None:
        """This rank has left a loop after `step` steps; it may come to another one."""
        self._away = True
        self._tell(str(step))

    def back(self) -> None:
        """This rank is at a step boundary; to be called at each."""
        if self._away:
            self._away = False
            self._tell(_HERE)

    def ended(self, step: int) -> None:
        """This rank has come to its end after `step` steps."""
        self._tell(f"{_ENDED} {step}")

    def _tell(self, text: str) -> None:
        # Where rank 0 is gone, so may the store be; then nobody waits for a word.
        with contextlib.suppress(RuntimeError):
            self._board.set(str(self.rank), text)

    def _together(self, step: int, *flags: int) -> list[int]:
        """The largest of each flag over all ranks, which must be at the same step.

        Raises:
            IntegrationError: On all ranks, when they are not.
        """
        found = torch.tensor([*flags, step, -step], device="cpu", dtype=torch.int64)
        self._reduce(found, step)
        *largest, most, fewest = map(int, found)
        if most != -fewest:
            raise IntegrationError(
                f"rank {self.rank} did {step} steps, where the ranks did from {-fewest} to {most}: "
                f"{_REMEDY}"
            )
        return largest

    def _reduce(self, flags: torch.Tensor, step: int) -> None:
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True)
        begun = time.monotonic()
        pause, look = _FIRST_PAUSE_SECONDS, _TELL_SECONDS
        while not work.is_completed():
            waited = time.monotonic() - begun
            if waited > look:
                self._look(step, waited, tell=look == _TELL_SECONDS)
                look = waited + 1.0
            time.sleep(pause)
            pause = min(2.0 * pause, _LONGEST_PAUSE_SECONDS)
        try:
            work.wait()
        except RuntimeError as error:
            self._look(step, _AWAY_SECONDS, tell=False)
            raise IntegrationError(
                f"another rank is gone, or did not come to step {step} within "
                f"{_TIMEOUT.total_seconds():g} s: {str(error).splitlines()[0]}"
            ) from None

    def _look(self, step: int, waited: float, *, tell: bool) -> None:
        """Say which ranks are away, when this one has waited for them.

        Raises:
            IntegrationError: When one of them will not come.
        """
        for rank in range(self._size):
            word = self._word_of(rank)
            if word == _HERE:
                continue
            done = word.removeprefix(f"{_ENDED} ")
            what = "has ended" if word != done else "left its training loop"
            sentence = f"rank {rank} {what} after {done} steps, and rank {self.rank} did {step}"
            if word != done or waited >= _AWAY_SECONDS:
                raise IntegrationError(f"{sentence}: {_REMEDY}")
            if tell:
                print(
                    f"outlast: {sentence}; it is waited for {_AWAY_SECONDS:g} s",
                    file=sys.stderr,
                    flush=True,
                )

    def _word_of(self, rank: int) -> str:
        """What a rank has told last."""
        if rank == self.rank:
            return _HERE
        try:
            return str(self._board.get(str(rank)).decode())
        except RuntimeError:
            return _HERE
