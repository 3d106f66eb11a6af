"""How the ranks of a loop that is not ours agree at which step boundary to save or to stop.

A signal comes to one rank, and clocks differ, but all ranks must save at the same boundary. They
add up flags there, in a small all-reduce, about once a second: as often as every step would cost
what it costs, and a stop has a second's time. Rank 0 says when the next is.

A rank that has fewer steps than others never comes there. Where it has told that it has ended, the
others, which would wait for a long time, say so and give up. One that has left its loop may come to
another one, after an evaluation of its own for example: it is alive as long as its connections are,
and is waited for as long as the process group's own timeout says; after a minute the others say
whom they wait for. Where a rank meets them at its end instead, all see that their steps differ.
Nothing of this helps a rank that waits within a step, for DistributedDataParallel or the guard:
there the process group's timeout counts.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, default_pg_timeout

from outlast.errors import IntegrationError

_LOOK_SECONDS = 1.0

_WAIT_SECONDS = 0.5
"""A wait for other ranks is as long, before this one sees whether there is something to say."""

_TELL_SECONDS = 5.0
"""After so long a rank tells that it waits, and looks what the others have told."""

_AWAY_SECONDS = 60.0
"""After so long it says whom it waits for."""

_host_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]]
_host_groups = weakref.WeakKeyDictionary()
"""Of each default process group the one for host memory; torch keeps both."""

_HERE, _WAITS, _ENDED = "here", "waits", "ended"
_NAMED = 4

_REMEDY = (
    "all ranks must do the same number of steps; give each as many batches, e.g. by a "
    "DistributedSampler or drop_last=True"
)


class Agreed(NamedTuple):
    """What the ranks do at a boundary."""

    stop: bool
    save: bool


class Agreement:
    """The ranks of the default process group, in `host_group`.

    All ranks make it at the same boundary.

    Attributes:
        rank: In the default group.
    """

    def __init__(self, step: int) -> None:
        self.rank = dist.get_rank()
        self._size = dist.get_world_size()
        self._timeout = _timeout()
        self._group = host_group()
        # A connection of its own: on the group's, another thread may wait.
        below = _get_default_store().clone()  # type: ignore[attr-defined]
        self._board = dist.PrefixStore("outlast/agreement", below)
        self._next = step
        self._gap = 1
        self._said = False
        self._told = ""
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

    def any(self, step: int, flag: bool) -> bool:
        """Whether `flag` is set on any rank; all ask at the same boundary, after `step` steps.

        Raises:
            IntegrationError: As `exchange`.
        """
        # As many flags as elsewhere: another rank may be at its end, and meets this one there.
        return bool(self._together(step, flag, False, 0)[0])

    def left(self, step: int) -> None:
        """This rank has left a loop after `step` steps; it may come to another one."""
        self._tell(str(step))

    def back(self) -> None:
        """This rank is at a step boundary; to be called at each."""
        if self._told != _HERE:
            self._tell(_HERE)

    def ended(self, step: int) -> None:
        """This rank has come to its end after `step` steps."""
        self._tell(f"{_ENDED} {step}")

    def _tell(self, text: str) -> None:
        self._told = text
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
        self._said = False
        begun = time.monotonic()
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True)
        try:
            while not _is_done(work, min(_WAIT_SECONDS, _TELL_SECONDS)):
                waited = time.monotonic() - begun
                if waited >= _TELL_SECONDS:
                    self._look(step, waited)
        except RuntimeError as error:
            self._look(step, time.monotonic() - begun, over=True)
            raise IntegrationError(
                f"another rank is gone, or did not come to step {step} within "
                f"{self._timeout.total_seconds():g} s: {str(error).splitlines()[0]}"
            ) from None
        if self._told == _WAITS:
            self._tell(_HERE)

    def _look(self, step: int, waited: float, *, over: bool = False) -> None:
        """See what the ranks that are waited for have told.

        Args:
            step: At which this one waits.
            waited: Since when, in seconds.
            over: Whether nobody can be waited for any longer.

        Raises:
            IntegrationError: When one of them will not come.
        """
        if self._told == _HERE:
            self._tell(_WAITS)
        words = {index: self._word_of(index) for index in range(self._size) if index != self.rank}
        for rank, word in words.items():
            if word.startswith(_ENDED) or (over and word not in (_HERE, _WAITS)):
                raise IntegrationError(
                    f"rank {rank} {_what(word)}, and rank {self.rank} did {step}: {_REMEDY}"
                )
        waiting = [rank for rank, word in words.items() if word == _WAITS]
        if waited < _AWAY_SECONDS or self._said or self.rank > min(waiting, default=self.rank):
            return
        self._said = True
        away = [f"rank {key}, which {_what(word)}" for key, word in words.items() if word != _WAITS]
        more = f", and {len(away) - _NAMED} more" if len(away) > _NAMED else ""
        print(
            f"outlast: rank {self.rank} has waited for {waited:.0f} s at step {step} for "
            f"{', for '.join(away[:_NAMED])}{more}; it waits for "
            f"{self._timeout.total_seconds():g} s at most, the process group's timeout",
            file=sys.stderr,
            flush=True,
        )

    def _word_of(self, rank: int) -> str:
        """What another rank has told last."""
        try:
            return str(self._board.get(str(rank)).decode())
        except RuntimeError:
            return _HERE


def _what(word: str) -> str:
    """What a rank does that has told `word`."""
    if word == _HERE:
        return "is within a step"
    done = word.removeprefix(f"{_ENDED} ")
    return f"{'has ended' if word != done else 'left its training loop'} after {done} steps"


def _is_done(work: dist.Work, seconds: float) -> bool:
    """Wait for a collective for at most `seconds`.

    Raises:
        RuntimeError: When it has failed.
    """
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        # It may have ended well since: only this says whether it has failed.
        work.wait()
    return True


def host_group() -> dist.ProcessGroup:
    """All ranks of the default process group, for tensors in host memory.

    The same one each time, since groups stay until the end: all ranks ask for it together, and use
    it in one thread each. With another default group it is another one.
    """
    world = dist.group.WORLD
    assert world is not None
    group = _host_groups.get(world, lambda: None)()
    if group is None:
        group = dist.new_group(backend="gloo", timeout=_timeout())
        _host_groups[world] = weakref.ref(group)
    return group


def _timeout() -> timedelta:
    """How long a collective of the default process group may take, as its maker has said."""
    group = dist.group.WORLD
    assert group is not None
    options = (group._get_backend(type_).options for type_ in group._device_types)
    return max((option._timeout for option in options), default=default_pg_timeout)
