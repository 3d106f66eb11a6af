"""Key-value store of all processes, in the process group's store.

torch's TCPStore answers in about 0.1 ms. It is all that the protocols need to agree: the first
writer of a key wins (compare-and-set), counters count, and a wait ends at a deadline.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import queue
import threading
import time
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from outlast.coding.protocol.gradients import key as key_of
from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.distributed import ProcessGroup, Store


_RETRY_SECONDS = 0.1
_numbers = itertools.count()
_LONGEST_WAIT_SECONDS = 24 * 3600.0


def store_name(use: str, group: ProcessGroup | None) -> str:
    """A name for a new store; all processes of the group call this in equal order.

    Args:
        use: What for; equal on all processes.
        group: The processes; all if None.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return f"{use}/{next(_numbers)}/{key_of(*ranks)}"


class StoreLostError(CodingError):
    """The store does not answer any more."""


class KeyValueStore:
    """Keys under a name of their own.

    Args:
        name: Equal on all processes, different for every user of the store.
        store: Where the keys live; the default process group's store if None. The store opens its
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

    def connect(self) -> KeyValueStore:
        """The same key-value store over another connection, for another thread."""
        return KeyValueStore(self.name, self.below)

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
        """Return whether all keys are written."""
        with _noticing_loss():
            return self._store.check(list(keys))

    def read(self, key: str, seconds: float, awaited: str) -> str:
        """Wait for `key` and return its text.

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
        """Texts of these keys, which are known to be written, in one exchange."""
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


class KeyWatcher:
    """Tells when a key is written, without asking the store.

    It also removes keys, which nobody needs to wait for.

    Args:
        key_values: The store; the thread opens its own connection to it.
    """

    def __init__(self, key_values: KeyValueStore) -> None:
        self._key_values = key_values
        self._orders: queue.SimpleQueue[tuple[str, Iterable[str], int] | None] = queue.SimpleQueue()
        self._written = threading.Event()
        self._lock = threading.Lock()
        self._turn = 0
        self._value = ""
        self._thread: threading.Thread | None = None

    def watch(self, key: str, obsolete: Iterable[str] = ()) -> None:
        """Wait for `key` from now on, after removing the `obsolete` keys."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="outlast-coding", daemon=True)
            self._thread.start()
        with self._lock:
            self._turn += 1
            self._value = ""
            self._written.clear()
        self._orders.put((key, obsolete, self._turn))

    def tell(self, value: str) -> None:
        """Take over what is known to be written under the watched key."""
        with self._lock:
            self._turn += 1
            self._value = value
            self._written.set()

    @property
    def value(self) -> str:
        """Text of the watched key, empty until it is written."""
        return self._value

    def wait(self, seconds: float) -> bool:
        """Wait so long at most for the key; whether it is written."""
        return self._written.wait(seconds)

    def _run(self) -> None:
        key_values = None
        while (order := self._orders.get()) is not None:
            key, obsolete, turn = order
            # A lost store, or an end of the process: whoever computes finds out by itself.
            with contextlib.suppress(StoreLostError, CodingError, RuntimeError):
                key_values = key_values or self._key_values.connect()
                key_values.remove(obsolete)
                value = key_values.read(key, _LONGEST_WAIT_SECONDS, "the end of a round")
                with self._lock:
                    if turn == self._turn:
                        self._value = value
                        self._written.set()
                continue
            key_values = None

    def stop(self) -> None:
        """Let the thread end once the key that it waits for is written."""
        self._orders.put(None)
