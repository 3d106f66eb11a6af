"""A notice board that all processes read and write: keys in the process group's store.

torch's TCPStore answers in about 0.1 ms. It is all that the protocols need to agree: the first
writer of a key wins (compare-and-set), counters count, and a wait ends at a deadline.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import time
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from outlast.coding.protocol.randomness import key as key_of
from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.distributed import ProcessGroup, Store

_RETRY_SECONDS = 0.1
_numbers = itertools.count()


def board_name(use: str, group: ProcessGroup | None) -> str:
    """A name for a new board of a process group, all of whose processes call this in equal order.

    Args:
        use: What for; equal on all processes.
        group: The processes; all if None.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return f"{use}/{next(_numbers)}/{key_of(*ranks)}"


class StoreLostError(CodingError):
    """The store does not answer any more."""


class Board:
    """Keys under a name of their own.

    Args:
        name: Equal on all processes, different for every user of the store.
        store: Where the keys live; the default process group's store if None. The board opens its
            own connection to it, so that its waits do not hold up others.

    Attributes:
        below: The store itself.

    Raises:
        CodingError: When there is no store and no process group.
    """

    def __init__(self, name: str, store: Store | None = None) -> None:
        if store is None:
            if not dist.is_initialized():
                raise CodingError(
                    "there is no process group yet: call torch.distributed.init_process_group "
                    "first, or pass a store"
                )
            store = _get_default_store()
        self.name = name
        self.below = store
        self._store = self._open()

    def connect(self) -> Board:
        """The same board over another connection, for another thread."""
        return Board(self.name, self.below)

    def reopen(self, seconds: float) -> None:
        """Connect again to a store that was restarted at the same place, and has lost its keys.

        Raises:
            CodingError: When there is none within `seconds`.
        """
        deadline = time.monotonic() + seconds
        usual: datetime.timedelta = self.below.timeout  # type: ignore[attr-defined]
        # Opening a connection takes as long as the store's own timeout where nobody answers.
        self.below.set_timeout(datetime.timedelta(seconds=seconds))
        try:
            while True:
                try:
                    self._store = self._open()
                    self._store.add("reopened", 1)
                except RuntimeError as error:
                    if time.monotonic() > deadline:
                        raise CodingError(
                            f"the store of the process group has been gone for {seconds:g} s: "
                            f"{error}"
                        ) from None
                    time.sleep(_RETRY_SECONDS)
                else:
                    self._store.set_timeout(usual)
                    return
        finally:
            self.below.set_timeout(usual)

    def _open(self) -> Store:
        return dist.PrefixStore(f"outlast/{self.name}", self.below.clone())  # type: ignore[attr-defined]

    def publish(self, key: str, value: str) -> str:
        """Write `value` unless the key is written already; returns what is there."""
        with _noticing_loss():
            return self._store.compare_set(key, "", value).decode()

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter, which begins at 0; returns it. ``add(key, 0)`` reads it."""
        with _noticing_loss():
            return self._store.add(key, amount)

    def has(self, *keys: str) -> bool:
        """Whether all keys are written."""
        with _noticing_loss():
            return self._store.check(list(keys))

    def read(self, key: str, seconds: float, awaited: str) -> str:
        """What is written under `key`, once it is.

        Args:
            key: The key.
            seconds: Longest wait.
            awaited: What the wait is for, for the error's text.

        Raises:
            CodingError: When the time is over.
        """
        deadline = time.monotonic() + seconds
        with _noticing_loss():
            try:
                self._store.wait([key], datetime.timedelta(seconds=seconds))
            except RuntimeError:
                if time.monotonic() < deadline - _RETRY_SECONDS:
                    raise
                raise CodingError(f"waited {seconds:g} s in vain for {awaited}") from None
            return self._store.get(key).decode()

    def read_all(self, keys: Sequence[str]) -> list[str]:
        """What is written under these keys, which are known to be written, in one exchange."""
        with _noticing_loss():
            return [item.decode() for item in self._store.multi_get(list(keys))]

    def remove(self, keys: Iterable[str]) -> None:
        """Forget keys that nobody reads any more."""
        with _noticing_loss():
            for key in keys:
                self._store.delete_key(key)


@contextlib.contextmanager
def _noticing_loss() -> Iterator[None]:
    try:
        yield
    except dist.DistNetworkError as error:
        raise StoreLostError(f"the store of the process group does not answer: {error}") from None
