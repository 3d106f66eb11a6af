"""The messages by which ranks agree at a step boundary, and how often they exchange them.

A message is a dataclass. Each field names the rule by which the ranks' values become one, and all
fields travel in one tensor and one all-reduce: a new flag is one field.

The trainer, which sums the loss up anyway, exchanges a `StepMessage` at every step.

The ranks of a loop that is not ours exchange a `BoundaryMessage` about once a second: as often as
every step would cost what it costs, and a stop has a second's time. Rank 0 says when the next is. A
signal comes to one rank, and clocks differ, but all ranks must save at the same boundary.

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
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, default_pg_timeout

from outlast.errors import IntegrationError

if TYPE_CHECKING:
    from collections.abc import Sequence

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

_SUM, _ANY, _MAX, _EQUAL, _BY_RANK = "sum", "any", "max", "equal", "by rank"


class Message:
    """Message of one rank to the others; a dataclass whose fields are made by `reduced_by`."""

    def packed(self) -> list[float]:
        """All fields as numbers, in order."""
        numbers: list[float] = []
        for item in fields(self):  # type: ignore[arg-type]
            value, rule = getattr(self, item.name), item.metadata["rule"]
            numbers += [*value] if rule == _BY_RANK else [value]
            if rule == _EQUAL:
                # The smallest, where the largest of each number is taken.
                numbers.append(-value)
        return numbers

    @classmethod
    def unpacked(cls, numbers: Sequence[float]) -> Self:
        """The message of all ranks, from their numbers reduced."""
        rest, found = [*numbers], dict[str, Any]()
        for item in fields(cls):  # type: ignore[arg-type]
            rule = item.metadata["rule"]
            if rule == _BY_RANK:
                found[item.name], rest = rest, []
                continue
            value = rest.pop(0)
            found[item.name] = value > 0 if rule == _ANY else value
            if rule == _EQUAL and value != -rest.pop(0):
                raise _DifferError
        return cls(**found)


class _DifferError(Exception):
    """A field that must be equal on all ranks is not."""


def reduced_by(rule: str, default: Any) -> Any:
    """A field of a message.

    Args:
        rule: ``sum``; ``any``, for flags; ``max``; ``equal``, for numbers in which all ranks must
            agree; or ``by rank``, for a list in which each rank fills its own place (the last
            field). One message is reduced by sums or by maxima, so it has no ``sum`` beside a
            ``max`` or ``equal``.
        default: Of a rank that has nothing to say.
    """
    return field(default=default, metadata={"rule": rule})


@dataclass
class StepMessage(Message):
    """Message of a rank at the end of a step of `outlast train`; reduced by sums.

    Attributes:
        loss: This rank's share of the step's loss.
        stop: Stop now.
        resize: Stop to continue with a different number of processes.
        save: Save now.
        findings: The guard of a rank has findings that are not recorded yet.
        memory_grown: The peak memory of a rank has grown.
        plan_memory: Plan anew what is kept in memory.
        step_seconds: Each rank's own time since the last record, where it is compared.
    """

    loss: float = reduced_by(_SUM, 0.0)
    stop: bool = reduced_by(_ANY, False)
    resize: bool = reduced_by(_ANY, False)
    save: bool = reduced_by(_ANY, False)
    findings: bool = reduced_by(_ANY, False)
    memory_grown: bool = reduced_by(_ANY, False)
    plan_memory: bool = reduced_by(_ANY, False)
    step_seconds: list[float] = field(default_factory=list, metadata={"rule": _BY_RANK})

    @property
    def stopping(self) -> bool:
        """Return whether the run is to stop, for whatever reason."""
        return self.stop or self.resize

    @property
    def resizing(self) -> bool:
        """Return whether the run is to stop only in order to continue with other processes."""
        return self.resize and not self.stop


@dataclass
class BoundaryMessage(Message):
    """Message of a rank of a loop that is not ours, at a step boundary; reduced by maxima.

    Attributes:
        stop: Stop now.
        save: Save now.
        gap: Steps until the next exchange, as rank 0 says.
        step: Steps done.
    """

    stop: bool = reduced_by(_ANY, False)
    save: bool = reduced_by(_ANY, False)
    gap: int = reduced_by(_MAX, 0)
    step: int = reduced_by(_EQUAL, 0)


class StepAgreement:
    """One small all-reduce a step.

    Args:
        alone: Whether there is no other rank.
        counts: Whether this rank's loss is summed: tensor-parallel and pipeline peers do not count
            twice.
        device: Where the reduction runs.
    """

    def __init__(self, device: torch.device, *, alone: bool, counts: bool = True) -> None:
        self.device = device
        self._alone = alone
        self._counts = counts

    def exchange(self, loss: torch.Tensor, message: StepMessage) -> StepMessage:
        """The message of all ranks, to which this one adds `message` and its share of the loss."""
        # The loss stays on its device until it is summed.
        return StepMessage.unpacked(self._sums(loss, message.packed()[1:]))

    def sum(self, value: torch.Tensor) -> float:
        """The sum over ranks of `value`, counted once per sample."""
        return self._sums(value, [])[0]

    def _sums(self, value: torch.Tensor, others: list[float]) -> list[float]:
        own = value.detach().float().reshape(1)
        if self._alone:
            return [float(own), *others]
        if not self._counts:
            own = torch.zeros_like(own)
        numbers = torch.tensor([float(number) for number in others], device=self.device)
        shared = torch.cat([own, numbers])
        dist.all_reduce(shared)
        return [float(item) for item in shared.tolist()]


class BoundaryAgreement:
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
        """Return whether the ranks look at each other's flags at this boundary."""
        return step >= self._next

    def exchange(self, step: int, stop: bool, save: bool, step_seconds: float) -> BoundaryMessage:
        """Agree on what to do at this boundary, the same on all ranks.

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
        agreed = self._reduce(
            BoundaryMessage(stop, save and first, gap=gap if first else 0, step=step)
        )
        self._gap = agreed.gap
        self._next = step + self._gap
        return agreed

    def meet(self, step: int) -> None:
        """This rank has come to the end of its steps; all ranks meet there.

        Raises:
            IntegrationError: On all ranks, when others did another number of steps.
        """
        self._reduce(BoundaryMessage(step=step))

    def any(self, step: int, flag: bool) -> bool:
        """True if `flag` is set on any rank; all ask at the same boundary, after `step` steps.

        Raises:
            IntegrationError: As `exchange`.
        """
        # The same message as elsewhere: another rank may be at its end, and meets this one there.
        return self._reduce(BoundaryMessage(stop=flag, step=step)).stop

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

    def _reduce(self, message: BoundaryMessage) -> BoundaryMessage:
        """The message of all ranks, which must be at the same step.

        Raises:
            IntegrationError: On all ranks, when they are not.
        """
        step = message.step
        found = torch.tensor(message.packed(), device="cpu", dtype=torch.int64)
        self._said = False
        begun = time.monotonic()
        work = dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group, async_op=True)
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
        numbers = [int(number) for number in found]
        try:
            return BoundaryMessage.unpacked(numbers)
        except _DifferError:
            raise IntegrationError(
                f"rank {self.rank} did {step} steps, where the ranks did from {-numbers[-1]} to "
                f"{numbers[-2]}: {_REMEDY}"
            ) from None

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
        """Return the last word of another rank."""
        try:
            return str(self._board.get(str(rank)).decode())
        except RuntimeError:
            return _HERE


def _what(word: str) -> str:
    """Describe the state of a rank that has told `word`."""
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
    """Return the longest time that a collective of the default process group may take."""
    group = dist.group.WORLD
    assert group is not None
    options = (group._get_backend(type_).options for type_ in group._device_types)
    return max((option._timeout for option in options), default=default_pg_timeout)
