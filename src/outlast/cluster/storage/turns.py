"""A turn to write to a file system that several jobs share.

    with turn("/scratch/project/.turns", size_bytes, nodes=8, deadline_seconds=120) as mine:
        write()                          # mine.granted, mine.waited_seconds, mine.why

    request = ask("/scratch/project/.turns", size_bytes, nodes=8, mtbf_seconds=90_000)
    while not request.ready():           # one look at some files; goes on training meanwhile
        train_one_step()
    with request:
        write()

It is advice: nobody is kept from writing. When the deadline has passed, or the directory cannot be
used, the saver writes without a turn and `why` says so. It never raises for the directory's sake.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.cluster.storage.orders import (
    Order,
    checked,
    priority,
    set_of,
    waiting_cost,
)
from outlast.cluster.storage.tickets import Board, Ticket
from outlast.errors import ClusterError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from types import TracebackType

    from outlast.cluster.storage.identity import Owner

HEARTBEAT_SECONDS = 10.0
STALE_AFTER_SECONDS = 90.0
"""Longer than NFS keeps the times of files in its cache (`acregmax`, 60 s)."""

_SHORTEST_LOOK_SECONDS = 0.01
_LONGEST_LOOK_SECONDS = 1.0


class Request:
    """A request for a turn, which is put up when it is made.

    Use `ask` or `turn`. It is a context manager: on entry it takes the turn if it is free, without
    waiting, and at the end gives it back.

    Attributes:
        granted: Whether this process has the turn.
        why: Why it has it not, or empty: "waiting", "deadline", or what is wrong.
        waited_seconds: From the request to the turn, or to giving up.
    """

    def __init__(
        self,
        directory: Path,
        order: Order,
        about: dict[str, float],
        set_number: int,
        *,
        stale_after_seconds: float,
        heartbeat_seconds: float,
        ask_alive: Callable[[Owner], bool | None] | None,
    ) -> None:
        self.granted = False
        self.why = "waiting"
        self.waited_seconds = 0.0
        self._order = order
        self._begun = time.monotonic()
        self._generation = 0
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._board: Board | None = None
        self._ticket: Ticket | None = None
        try:
            self._board = Board(directory, stale_after_seconds, ask_alive)
            self._ticket = self._board.ask(set_number=set_number, **about)
        except OSError as error:
            self._give_up(f"{directory} cannot be used: {error.strerror or error}")
            return
        self._heartbeat_seconds = heartbeat_seconds
        threading.Thread(target=self._beat, name="turn", daemon=True).start()

    def ready(self) -> bool:
        """Whether the saver may write now: it has the turn, or there is none to be had.

        Takes the turn if it is free and nobody is before this request.
        """
        if self.granted or self.why != "waiting":
            return True
        assert self._board is not None
        assert self._ticket is not None
        try:
            with self._lock:
                self._try(self._board, self._ticket)
        except OSError as error:
            self._give_up(f"the directory of turns cannot be used: {error.strerror or error}")
        return self.granted or self.why != "waiting"

    def wait(self, deadline_seconds: float) -> bool:
        """Wait for the turn, at most until the deadline; returns whether it was granted."""
        end = self._begun + deadline_seconds
        look = _SHORTEST_LOOK_SECONDS
        while not self.ready():
            left = end - time.monotonic()
            if left <= 0:
                self._give_up("deadline")
                break
            # Not all at the same moment, and not often while the wait is long.
            time.sleep(min(look * random.uniform(0.5, 1.0), left))
            look = min(1.5 * look, _LONGEST_LOOK_SECONDS)
        return self.granted

    def release(self) -> None:
        """Give the turn back, or withdraw the request; may be called twice."""
        self._ended.set()
        with self._lock, contextlib.suppress(OSError):
            if self._board is not None and self._ticket is not None:
                if self._generation:
                    self._board.give_back(self._ticket, self._generation)
                else:
                    self._board.withdraw(self._ticket)
        self._ticket = None
        self._generation = 0
        self.granted = False

    def __enter__(self) -> Request:
        self.ready()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def _try(self, board: Board, ticket: Ticket) -> None:
        try:
            now = board.beat(ticket)
        except FileNotFoundError:
            # Somebody took this process for dead, e.g. while it was suspended.
            self._give_up("the request was removed by others")
            return
        held = board.held(now).get(ticket.set_number)
        if held is not None and held.ticket is not None:
            return
        rivals = [item for item in board.waiting(now) if item.set_number == ticket.set_number]
        mine = self._key(ticket, now)
        if any(self._key(rival, now) < mine for rival in rivals):
            return
        generation = held.generation if held is not None else 0
        if board.take(ticket, generation):
            self._generation = generation + 1
            self.granted, self.why = True, ""
            self.waited_seconds = time.monotonic() - self._begun

    def _key(self, ticket: Ticket, now: float) -> tuple[float, float, str]:
        unsaved = ticket.unsaved_seconds + max(now - ticket.asked_seconds, 0.0)
        cost = waiting_cost(ticket.nodes, unsaved, ticket.mtbf_seconds)
        key = priority(
            self._order,
            asked_seconds=ticket.asked_seconds,
            size_bytes=ticket.size_bytes,
            cost_per_second=cost,
        )
        return key, ticket.asked_seconds, ticket.name

    def _give_up(self, why: str) -> None:
        self.waited_seconds = time.monotonic() - self._begun
        self.why = why
        self._ended.set()
        if self._board is not None and self._ticket is not None:
            with contextlib.suppress(OSError):
                self._board.withdraw(self._ticket)
        self._ticket = None

    def _beat(self) -> None:
        """Say until the end that this process lives, also while it writes."""
        while not self._ended.wait(self._heartbeat_seconds):
            board, ticket = self._board, self._ticket
            if board is not None and ticket is not None:
                with self._lock, contextlib.suppress(OSError):
                    board.beat(ticket, self._generation)


def ask(
    directory: str | os.PathLike[str],
    size_bytes: float,
    *,
    nodes: float = 1.0,
    order: str = "least-waste",
    period_seconds: float = math.inf,
    unsaved_seconds: float = 0.0,
    mtbf_seconds: float = 0.0,
    stale_after_seconds: float = STALE_AFTER_SECONDS,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ask_alive: Callable[[Owner], bool | None] | None = None,
) -> Request:
    """Ask for a turn without waiting for it. One process of a job asks, not every rank.

    Args:
        directory: Of the turns; all who share one file system and trust each other use the same.
        size_bytes: What is to be written.
        nodes: Of the job, which wait meanwhile.
        order: One of `outlast.cluster.storage.orders.ORDERS`; the same for all.
        period_seconds: From one save to the next; needed by set-10.
        unsaved_seconds: Work since the last save.
        mtbf_seconds: Of a job that computes until it is its turn: its mean time between failures.
            0: it stands still.
        stale_after_seconds: Owners on other nodes without a heartbeat for so long count as dead.
        heartbeat_seconds: How often this one says that it lives.
        ask_alive: Whether an owner lives, e.g. by asking Slurm; None for what is not known.

    Raises:
        ClusterError: For a setting that has no meaning; never for the directory.
    """
    for name, value in (("size_bytes", size_bytes), ("nodes", nodes)):
        if not (value > 0 and math.isfinite(value)):
            raise ClusterError(f"{name} = {value} of a turn: give a finite number above 0")
    if not 0 < heartbeat_seconds < stale_after_seconds:
        raise ClusterError(
            f"heartbeat_seconds = {heartbeat_seconds} and stale_after_seconds = "
            f"{stale_after_seconds}: the first must be above 0 and below the second"
        )
    known = checked(order)
    about = {
        "size_bytes": float(size_bytes),
        "nodes": float(nodes),
        "unsaved_seconds": float(unsaved_seconds),
        "mtbf_seconds": float(mtbf_seconds),
    }
    return Request(
        Path(directory),
        known,
        about,
        set_of(known, period_seconds),
        stale_after_seconds=stale_after_seconds,
        heartbeat_seconds=heartbeat_seconds,
        ask_alive=ask_alive,
    )


@contextlib.contextmanager
def turn(
    directory: str | os.PathLike[str],
    size_bytes: float,
    *,
    deadline_seconds: float = 60.0,
    nodes: float = 1.0,
    order: str = "least-waste",
    period_seconds: float = math.inf,
    stale_after_seconds: float = STALE_AFTER_SECONDS,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ask_alive: Callable[[Owner], bool | None] | None = None,
) -> Iterator[Request]:
    """Wait for a turn, at most until the deadline, and give it back at the end.

    The body runs in any case: with the turn, or without it when the wait was too long or the
    directory cannot be used (`Request.granted`, `Request.why`).

    Args:
        directory: As for `ask`.
        size_bytes: What is to be written.
        deadline_seconds: Longest wait.
        nodes: Of the job, which stand still meanwhile.
        order: As for `ask`.
        period_seconds: As for `ask`.
        stale_after_seconds: As for `ask`.
        heartbeat_seconds: As for `ask`.
        ask_alive: As for `ask`.

    Raises:
        ClusterError: For a setting that has no meaning; never for the directory.
    """
    if not deadline_seconds >= 0:
        raise ClusterError(f"deadline_seconds = {deadline_seconds} of a turn: give 0 or more")
    request = ask(
        directory,
        size_bytes,
        nodes=nodes,
        order=order,
        period_seconds=period_seconds,
        stale_after_seconds=stale_after_seconds,
        heartbeat_seconds=heartbeat_seconds,
        ask_alive=ask_alive,
    )
    try:
        request.wait(deadline_seconds)
        yield request
    finally:
        request.release()
