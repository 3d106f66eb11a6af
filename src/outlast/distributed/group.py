"""Agreement between ranks: gather objects, fail together, let the first decide.

All ranks of a group call the same method at the same place. `gather_objects` and `raise_together`
are those of the default process group. Where ranks agree without a collective, beside a training
that uses them, see `outlast.distributed.agreement`.
"""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from outlast.errors import OutlastError
from outlast.records.process import boot_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")


class Group:
    """Ranks that agree by collectives, or this process alone where there is no process group.

    Args:
        process_group: Its timeout bounds every wait. Objects and flags travel in host memory where
            it has a backend for that. None for the default group.
        alone: Whether this process decides for itself although there are others.
        error: What is raised where a rank has failed, whatever it failed by, or does not come. By
            default `OutlastError`, and on the rank itself its own exception.
        purpose: For which ranks come here, as in "to save within timeout_seconds".
        node: What processes with one memory have in common; empty: this boot of this machine.

    Attributes:
        rank: Of this process in the group.
        size: Number of ranks.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        alone: bool = False,
        error: type[OutlastError] | None = None,
        purpose: str = "in time",
        node: str = "",
    ) -> None:
        self.process_group = process_group
        alone = alone or not _is_initialized()
        self.rank = 0 if alone else dist.get_rank(process_group)
        self.size = 1 if alone else dist.get_world_size(process_group)
        self._error = error
        self._purpose = purpose
        self._node = node

    @classmethod
    def new(
        cls,
        timeout_seconds: float,
        *,
        alone: bool = False,
        error: type[OutlastError] | None = None,
        purpose: str = "in time",
    ) -> Group:
        """All ranks in a group of its own for host memory; all ranks make it together.

        Its collectives cannot be mistaken for those of others, and have a deadline of their own.

        Args:
            timeout_seconds: Longest wait for another rank.
            alone: See the class.
            error: See the class.
            purpose: See the class.
        """
        if alone or not _is_initialized() or dist.get_world_size() == 1:
            return cls(alone=True, error=error, purpose=purpose)
        made = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        assert isinstance(made, dist.ProcessGroup)
        return cls(made, error=error, purpose=purpose)

    @property
    def node(self) -> str:
        """The node of this process, as given or found."""
        return self._node or boot_identity() or f"{socket.gethostname()}-{os.getuid()}"

    def gather(self, value: T) -> list[T]:
        """Values of all ranks, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with self._reached():
            dist.all_gather_object(found, value, group=self.process_group)
        return found

    def any(self, flag: bool) -> bool:
        """Return whether any rank set `flag`."""
        return self.any_of(flag)[0]

    def any_of(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each of the flags whether any rank set it."""
        if self.size == 1:
            return flags
        sums = torch.tensor(flags, dtype=torch.int32)
        with self._reached():
            dist.all_reduce(sums, group=self.process_group)
        return tuple(bool(count) for count in sums)

    def first_problem(self, problem: str) -> str:
        """The first rank's problem that is not empty."""
        return next((found for found in self.gather(problem) if found), "")

    def raise_together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; where it fails on one, all raise its sentence.

        That is how an input that one rank finds wrong ends the whole run with one sentence, and
        nobody waits for a rank that has gone.

        Args:
            work: What this rank does; it must not wait for other ranks itself.

        Raises:
            OutlastError: The first sentence of any rank, as the group's `error`.
            Exception: What `work` raised here, if it is no `OutlastError` and the group has no
                `error` of its own.
        """
        result, problem, unexpected = None, "", None
        try:
            result = work()
        except OutlastError as error:
            problem = str(error) or type(error).__name__
        except Exception as error:
            problem, unexpected = f"{type(error).__name__}: {error}", error
        first = self.first_problem(problem)
        if unexpected is not None and self._error is None:
            raise unexpected
        if first:
            raise (self._error or OutlastError)(first) from unexpected
        return cast("T", result)

    def from_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0; every rank gets its result, or raises its error.

        Raises:
            OutlastError: As `raise_together`.
        """
        outcome: list[Any] = [None, ""]
        if self.rank == 0:
            try:
                outcome[0] = work()
            except (OutlastError, OSError) as error:
                outcome[1] = str(error) or type(error).__name__
        if self.size > 1:
            with self._reached():
                dist.broadcast_object_list(outcome, group=self.process_group, group_src=0)
        result, problem = outcome
        if problem:
            raise (self._error or OutlastError)(problem)
        return cast("T", result)

    def send(self, content: torch.Tensor, to: int) -> None:
        """Give `content`, in host memory, to the process of rank `to`."""
        dist.send(content, group=self.process_group, group_dst=to)

    def receive(self, content: torch.Tensor, source: int) -> None:
        """Fill `content`, in host memory, with what the process of rank `source` sends."""
        dist.recv(content, group=self.process_group, group_src=source)

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """A rank that is gone or too late, as a sentence where the group has its own error."""
        try:
            yield
        except RuntimeError as error:
            if self._error is None:
                raise
            raise self._error(
                f"another rank did not come {self._purpose}, or is gone: "
                f"{str(error).splitlines()[0]}"
            ) from None


def gather_objects(value: T) -> list[T]:
    """Values of all ranks of the default process group, by rank."""
    return Group().gather(value)


def gather_on_first(value: T) -> list[T]:
    """Values of all ranks of the default process group on rank 0, and nothing on the others."""
    group = Group()
    found = group.gather(value)
    return found if group.rank == 0 else []


def raise_together(work: Callable[[], T]) -> T:
    """Run `work` on every rank; where it fails on one, all raise; see `Group.raise_together`."""
    return Group().raise_together(work)


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
