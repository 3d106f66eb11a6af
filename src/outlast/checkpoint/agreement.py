"""How ranks agree: by collectives while training waits, by words in a store while it does not.

In the background the words go through the key-value store of the process group, so no collective
runs beside the training's own, and a rank that waits does so with a deadline.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.25
_FAREWELL_SECONDS = 10.0


class Signals(Protocol):
    """Agreement on the outcome of a save."""

    def gather(self, key: str, problem: str) -> list[str]:
        """On rank 0: what every rank said under `key`, empty texts for success."""

    def tell(self, key: str, problem: str) -> None:
        """On rank 0: the outcome for all."""

    def hear(self, key: str, problem: str) -> str:
        """On the other ranks: say what happened here, and wait for the outcome."""

    def close(self) -> None:
        """See that the others have heard."""

    def give_up(self) -> None:
        """End all waits."""


class NoSignals:
    """One process alone."""

    def gather(self, key: str, problem: str) -> list[str]:
        """What this process says."""
        return [problem]

    def tell(self, key: str, problem: str) -> None:
        """Nobody listens."""

    def hear(self, key: str, problem: str) -> str:
        """What this process says."""
        return problem

    def close(self) -> None:
        """Nobody listens."""

    def give_up(self) -> None:
        """Nothing is waited for."""


class StoreSignals:
    """All ranks of the default process group.

    Args:
        prefix: Tells this checkpoint store from others of the same processes.
        timeout_seconds: Longest wait for another rank.
    """

    def __init__(self, prefix: str, timeout_seconds: float) -> None:
        self._store: Store = dist.PrefixStore(prefix, _get_default_store())
        self._timeout_seconds = timeout_seconds
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
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
        try:
            self._store.set(f"{key}/outcome", problem or " ")
        except RuntimeError as error:
            raise CheckpointError(f"the other ranks cannot be told: {error}") from None
        with self._telling:
            self._told.append(key)
            self._forget()

    def hear(self, key: str, problem: str) -> str:
        """On the other ranks: say what happened here, and wait for the outcome."""
        try:
            self._store.set(f"{key}/{self._rank}", problem or " ")
        except RuntimeError as error:
            raise CheckpointError(f"rank 0 cannot be reached: {error}") from None
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
                with contextlib.suppress(CheckpointError):
                    self._wait(f"{key}/heard/{rank}", deadline, rank)

    def give_up(self) -> None:
        """End all waits: this rank has failed and the others may never come."""
        self._given_up.set()

    def _forget(self) -> None:
        """Delete the words of earlier saves that all have heard."""
        others = range(1, self._world_size)
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
        try:
            # A blocking get would hold the store's connection, which the training needs too.
            while not self._store.check([key]):
                if self._given_up.is_set():
                    raise CheckpointError(f"the wait for rank {rank} was given up")
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"rank {rank} did not report on the save within "
                        f"{self._timeout_seconds:g} s (timeout_seconds)"
                    )
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            text: str = self._store.get(key).decode().strip()
            return text
        except RuntimeError as error:
            raise CheckpointError(f"rank {rank} cannot be reached: {error}") from None
