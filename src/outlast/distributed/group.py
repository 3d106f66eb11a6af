"""Agreement between ranks: gather objects, fail together, let the first decide.

All ranks of a group call the same method at the same place. `gather_objects` and `raise_together`
are those of the default process group. `StoreAgreement` is for ranks that agree in the background,
beside a training that uses collectives: through the process group's key-value store, without any
collective, and with a deadline for every wait.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from outlast.errors import OutlastError
from outlast.records.process import boot_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.distributed import Store

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
        with cls(error=error, purpose=purpose)._reached():
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


_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.25
_FAREWELL_SECONDS = 10.0
# Shares of the time limit: a rank that is not there is named by whoever asks it first.
_PASSED_ON = 0.75
_HEARD = 1.5


class StoreAgreement:
    """All ranks of the default process group, or this process alone.

    Args:
        prefix: Tells this agreement from others of the same processes; None: nobody else takes
            part, and nothing is sent.
        timeout_seconds: Longest wait for another rank.
        error: What is raised where a rank cannot be reached.
        subject: What ranks report on.
        ranks: Rank and number of the processes that take part, where these are not those of the
            default process group.
    """

    def __init__(
        self,
        prefix: str | None = None,
        timeout_seconds: float = 0.0,
        *,
        error: type[OutlastError] = OutlastError,
        subject: str = "the outcome",
        ranks: tuple[int, int] | None = None,
    ) -> None:
        self._store: Store | None = None
        self._rank, self._world_size = 0, 1
        if prefix is not None:
            from torch.distributed.distributed_c10d import _get_default_store

            self._store = dist.PrefixStore(prefix, _get_default_store())
            self._rank, self._world_size = ranks or (dist.get_rank(), dist.get_world_size())
        self._timeout_seconds = timeout_seconds
        self._error = error
        self._subject = subject
        self._told: list[str] = []
        # Threads of several tiers tell and forget beside the one that saves.
        self._telling = threading.Lock()
        self._given_up = threading.Event()

    def gather(
        self,
        key: str,
        problem: str,
        ranks: Iterable[int] | None = None,
        *,
        passed_on: bool = False,
        begun: float | None = None,
    ) -> list[str]:
        """On rank 0: what every rank said under `key`, empty texts for success.

        Args:
            key: Of what is agreed on.
            problem: What this rank says.
            ranks: Other ranks that are asked, by this one which then speaks for them; None: all.
            passed_on: Whether rank 0, which waits all the time limit, has to hear of a rank that
                does not come: then this one waits three quarters of it.
            begun: When the wait began, by `time.monotonic`; None: now.
        """
        begun = time.monotonic() if begun is None else begun
        seconds = self._timeout_seconds * (_PASSED_ON if passed_on else 1.0)
        others = range(1, self._world_size) if ranks is None else ranks
        return [problem] + [self._wait(f"{key}/{rank}", begun, seconds, rank) for rank in others]

    def tell(self, key: str, problem: str) -> None:
        """On rank 0: the outcome for all."""
        if self._store is None:
            return
        try:
            self._store.set(f"{key}/outcome", problem or " ")
        except RuntimeError as error:
            raise self._error(f"the other ranks cannot be told: {error}") from None
        with self._telling:
            self._told.append(key)
            self._forget()

    def hear(self, key: str, problem: str) -> str:
        """On the other ranks: say what happened here, and wait for the outcome."""
        if self._store is None:
            return problem
        try:
            self._store.set(f"{key}/{self._rank}", problem or " ")
        except RuntimeError as error:
            raise self._error(f"rank 0 cannot be reached: {error}") from None
        # Rank 0 itself waits for the slowest rank before it speaks.
        seconds = _HEARD * self._timeout_seconds
        outcome = self._wait(f"{key}/outcome", time.monotonic(), seconds, 0)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{key}/heard/{self._rank}", " ")
        return outcome

    def close(self) -> None:
        """On rank 0, which may host the store: see that all have heard what was told last."""
        begun, seconds = time.monotonic(), min(self._timeout_seconds, _FAREWELL_SECONDS)
        with self._telling:
            last = self._told[-1:]
        for key in last:
            for rank in range(1, self._world_size):
                with contextlib.suppress(self._error):
                    self._wait(f"{key}/heard/{rank}", begun, seconds, rank)

    def give_up(self) -> None:
        """End all waits: this rank has failed and the others may never come."""
        self._given_up.set()

    def _forget(self) -> None:
        """Delete the words of earlier saves that all have heard."""
        others = range(1, self._world_size)
        assert self._store is not None
        with contextlib.suppress(RuntimeError):
            for key in self._told[:-1]:
                if self._store.check([f"{key}/heard/{rank}" for rank in others]):
                    self._told.remove(key)
                    for rank in others:
                        self._store.delete_key(f"{key}/{rank}")
                        self._store.delete_key(f"{key}/heard/{rank}")
                    self._store.delete_key(f"{key}/outcome")

    def _wait(self, key: str, begun: float, seconds: float, rank: int) -> str:
        pause = _FIRST_PAUSE_SECONDS
        assert self._store is not None
        try:
            # A blocking get would hold the store's connection, which the training needs too.
            while not self._store.check([key]):
                if self._given_up.is_set():
                    raise self._error(f"the wait for rank {rank} was given up")
                if time.monotonic() > begun + seconds:
                    raise self._error(
                        f"rank {rank} did not report on {self._subject} within {seconds:g} s "
                        f"(timeout_seconds = {self._timeout_seconds:g})"
                    )
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            text: str = self._store.get(key).decode().strip()
            return text
        except RuntimeError as error:
            raise self._error(f"rank {rank} cannot be reached: {error}") from None
