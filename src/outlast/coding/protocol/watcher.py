"""A thread that waits for one key of the board at a time, so that computing can go on."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import TYPE_CHECKING

from outlast.coding.protocol.board import StoreLostError
from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outlast.coding.protocol.board import Board

_LONGEST_WAIT_SECONDS = 24 * 3600.0


class Watcher:
    """Tells when a key is written, without asking the store.

    It also removes keys, which nobody needs to wait for.

    Args:
        board: The board; the thread opens its own connection to it.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
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
        """What was written under the watched key, or an empty text."""
        return self._value

    def wait(self, seconds: float) -> bool:
        """Wait so long at most for the key; whether it is written."""
        return self._written.wait(seconds)

    def _run(self) -> None:
        board = None
        while (order := self._orders.get()) is not None:
            key, obsolete, turn = order
            # A lost store, or an end of the process: whoever computes finds out by itself.
            with contextlib.suppress(StoreLostError, CodingError, RuntimeError):
                board = board or self._board.connect()
                board.remove(obsolete)
                value = board.read(key, _LONGEST_WAIT_SECONDS, "the end of a round")
                with self._lock:
                    if turn == self._turn:
                        self._value = value
                        self._written.set()
                continue
            board = None

    def stop(self) -> None:
        """Let the thread end once the key that it waits for is written."""
        self._orders.put(None)
