"""The saves of a framework's adapter that has a store of its own: how each of them went."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from outlast.cluster import report_progress
from outlast.errors import CheckpointError
from outlast.records import Warned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from outlast.checkpoint import SaveHandle, SaveResult
    from outlast.distributed.ranks import Ranks
    from outlast.records import Event


_failed_at_exit: list[str] = []


@atexit.register
def _end_as_failed() -> None:
    """End with code 1 where a save has failed that nobody waited for.

    Python takes no exit code from what runs at exit. This was registered before any save, so that
    it runs after most of the rest; it does what is known to come behind it.
    """
    if not _failed_at_exit:
        return
    for child in multiprocessing.active_children():
        if child.daemon:
            child.terminate()
        child.join()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(1)


def close_at_exit(close: Callable[[], None]) -> None:
    """Close what saves when the program ends without a word to it; a failure ends it with code 1.

    To be called by what runs at exit.
    """
    try:
        close()
    except CheckpointError as error:
        print(f"outlast: {error}", file=sys.stderr)
        _failed_at_exit.append(str(error))


class Saves:
    """One save at a time, which is waited for when it has to be.

    Args:
        ranks: This process among the others.

    Attributes:
        events: What restoring had to say.
        results: Of the saves that have ended.
        on_result: Called with each result.
        watch: Makes contexts whose time counts for a purpose.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.events: list[Event] = []
        self.results: list[SaveResult] = []
        self.on_result: Callable[[SaveResult], None] = lambda _: None
        self.watch: Callable[[str], contextlib.AbstractContextManager[Any]] = lambda _: (
            contextlib.nullcontext()
        )
        self._ranks = ranks
        self._handle: SaveHandle | None = None
        self._number = -1
        """Of the newest version that was begun, and has not failed."""

    def collect(self, *, wait: bool = False) -> None:
        """See how the save under way went, if it is done.

        Args:
            wait: Wait for it.
        """
        if self._handle is None or not (wait or self._handle.done()):
            return
        with self.watch("checkpoint"):
            result = self._handle.result()
        # Of a save that could not begin, the store has told.
        told, self._handle = self._handle.version is None, None
        self.results.append(result)
        self.on_result(result)
        if result.error is not None:
            self._number = -1
            if not told:
                warnings.warn(f"{result.error}; training goes on", stacklevel=2)
        elif not result.skipped and self._ranks.is_first:
            report_progress(result.step, save_seconds=result.seconds)

    def finish(self) -> None:
        """Wait for the save under way: where training ends, a failure must not be passed over.

        Raises:
            CheckpointError: When the last save has failed.
        """
        self.collect(wait=True)
        if self.results and self.results[-1].error is not None:
            raise CheckpointError(self.results[-1].error)

    def _tell_all(self, events: Iterable[Event]) -> None:
        """Take over what another part of restoring had to say."""
        for event in events:
            if isinstance(event, Warned):
                self._tell(event.message)
            else:
                self.events.append(event)

    def _tell(self, sentence: str) -> None:
        self.events.append(Warned(sentence))
        if self._ranks.is_first:
            warnings.warn(sentence, stacklevel=2)
