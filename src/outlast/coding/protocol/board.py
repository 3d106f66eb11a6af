"""A notice board that all processes read and write: keys in the process group's store.

torch's TCPStore answers in about 0.1 ms. It is all that the protocols need to agree: the first
writer of a key wins (compare-and-set), counters count, and a wait ends at a deadline.
"""

from __future__ import annotations

import datetime
import time
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import Store


class Board:
    """Keys under a name of their own.

    Args:
        name: Equal on all processes, different for every user of the store.
        store: Where the keys live; the default process group's store if None. The board opens its
            own connection to it, so that its waits do not hold up others.

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
        self._store = dist.PrefixStore(f"outlast/{name}", store.clone())  # type: ignore[attr-defined]

    def connect(self) -> Board:
        """The same board over another connection, for another thread."""
        other = object.__new__(Board)
        other.name, other._store = self.name, self._store.clone()  # type: ignore[attr-defined]
        return other

    def publish(self, key: str, value: str) -> str:
        """Write `value` unless the key is written already; returns what is there."""
        return self._store.compare_set(key, "", value).decode()

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter, which begins at 0; returns it. ``add(key, 0)`` reads it."""
        return self._store.add(key, amount)

    def has(self, *keys: str) -> bool:
        """Whether all keys are written."""
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
        begun = time.monotonic()
        try:
            self._store.wait([key], datetime.timedelta(seconds=seconds))
        except dist.DistStoreError:
            if time.monotonic() - begun < seconds / 2:
                raise
            raise CodingError(f"waited {seconds:g} s in vain for {awaited}") from None
        return self._store.get(key).decode()

    def remove(self, keys: Iterable[str]) -> None:
        """Forget keys that nobody reads any more."""
        for key in keys:
            self._store.delete_key(key)
