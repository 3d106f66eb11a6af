"""Agreement of ranks in the background, through the process group's key-value store.

No collective runs beside the training's own, and a rank that waits does so with a deadline.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from outlast.errors import OutlastError

if TYPE_CHECKING:
    from torch.distributed import Store


_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.25
_FAREWELL_SECONDS = 10.0


class StoreAgreement:
    """All ranks of the default process group, or this process alone.

    Args:
        prefix: Tells this agreement from others of the same processes; None: nobody else takes
            part, and nothing is sent.
        timeout_seconds: Longest wait for another rank.
        error: What is raised where a rank cannot be reached.
        subject: What ranks report on.
    """

    def __init__(
        self,
        prefix: str | None = None,
        timeout_seconds: float = 0.0,
        *,
        error: type[OutlastError] = OutlastError,
        subject: str = "the outcome",
    ) -> None:
        self._store: Store | None = None
        self._rank, self._world_size = 0, 1
        if prefix is not None:
            self._store = dist.PrefixStore(prefix, _get_default_store())
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._timeout_seconds = timeout_seconds
        self._error = error
        self._subject = subject
        self._told: list[str] = []
        # Threads of several tiers tell and forget beside the one that saves.
        self._telling = threading.Lock()
        self._given_up = threading.Event()

    def gather(self, key: str, problem: str) -> list[str]:
        """On rank 0: what every rank said under `key`, empty texts for success."""
        deadline = time.monotonic() + self._timeout_seconds
        return [problem] + [
            self._wait(f"{key}/{rank}", deadline, rank) for rank in range(1, self._world_size)
        ]

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
        outcome = self._wait(f"{key}/outcome", time.monotonic() + 1.5 * self._timeout_seconds, 0)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{key}/heard/{self._rank}", " ")
        return outcome

    def close(self) -> None:
        """On rank 0, which may host the store: see that all have heard what was told last."""
        deadline = time.monotonic() + min(self._timeout_seconds, _FAREWELL_SECONDS)
        with self._telling:
            last = self._told[-1:]
        for key in last:
            for rank in range(1, self._world_size):
                with contextlib.suppress(self._error):
                    self._wait(f"{key}/heard/{rank}", deadline, rank)

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

    def _wait(self, key: str, deadline: float, rank: int) -> str:
        pause = _FIRST_PAUSE_SECONDS
        assert self._store is not None
        try:
            # A blocking get would hold the store's connection, which the training needs too.
            while not self._store.check([key]):
                if self._given_up.is_set():
                    raise self._error(f"the wait for rank {rank} was given up")
                if time.monotonic() > deadline:
                    raise self._error(
                        f"rank {rank} did not report on {self._subject} within "
                        f"{self._timeout_seconds:g} s (timeout_seconds)"
                    )
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            text: str = self._store.get(key).decode().strip()
            return text
        except RuntimeError as error:
            raise self._error(f"rank {rank} cannot be reached: {error}") from None
