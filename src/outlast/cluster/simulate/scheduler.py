"""When the queue is looked at, and in what order: main pass, backfill pass, preemption, ages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from outlast.cluster.simulate.book import NEVER, Book
from outlast.cluster.simulate.conservative import ConservativeBackfill
from outlast.cluster.simulate.easy import EasyBackfill, start_in_order
from outlast.cluster.simulate.named import NamedBackfill
from outlast.cluster.simulate.preemption import victims
from outlast.errors import ClusterError


class Scheduler:
    """Decides what starts, whenever something has changed.

    Args:
        book: What it knows and changes.
        backfill: Of which kind.
        preempt: Called for a running job that must give up its nodes at once.
        wake: Called with the time at which `wake_up` is to be called.
    """

    def __init__(
        self,
        book: Book,
        backfill: Literal["easy", "conservative"],
        preempt: Callable[[int], None],
        wake: Callable[[float], None],
    ) -> None:
        self._book = book
        self._planner = _planner(backfill, book.scheduler.named_nodes)
        self._preempt = preempt
        self._wake = wake
        self._interval = book.scheduler.backfill_interval_seconds
        self._next_backfill = -NEVER
        self._expected = self._due = False
        self._next_reading = -NEVER

    def wake_up(self) -> None:
        """The next backfill pass is due."""
        self._expected, self._due = False, True

    def hole_seconds(self, nodes: int) -> float:
        """Longest limit with which a job, put last into the queue, would start now; 0 if none."""
        return self._planner.hole_seconds(self._book, nodes)

    def starts(self, arrived: list[int], disturbed: bool) -> list[int]:
        """Jobs that start now, in order; they leave the queue and hold their nodes.

        Args:
            arrived: Jobs new in the queue since the last call.
            disturbed: Whether nodes, limits or the order changed since.
        """
        book, settings = self._book, self._book.scheduler
        if settings.age_weight and book.now >= self._next_reading:
            self._next_reading = book.now + settings.priority_seconds
            disturbed |= book.reorder()
        if not (arrived or disturbed) or not book.pending:
            if disturbed:
                self._planner.disturb()
            return []
        started = [] if settings.preemption == "off" else self._start_by_tier()
        if disturbed or started:
            self._planner.disturb()
        if not book.pending:
            return started
        if self._interval:
            return started + self._start_by_interval()
        return started + self._planner.starts(book, arrived)

    def _start_by_interval(self) -> list[int]:
        """Jobs at the front start at every event, others when the next backfill pass is due."""
        book, phase = self._book, self._book.scheduler.backfill_phase_seconds
        if self._due or (phase is None and book.now >= self._next_backfill):
            self._due = False
            self._next_backfill = book.now + self._interval
            self._planner.disturb()
            return self._planner.starts(book, [])
        started = start_in_order(book)
        if book.pending and not self._expected:
            self._expected = True
            if phase is not None:
                passed = math.ceil((book.now - phase) / self._interval)
                self._next_backfill = max(book.now, phase + self._interval * passed)
            self._wake(self._next_backfill)
        return started

    def _start_by_tier(self) -> list[int]:
        """Start jobs at the front, on the nodes of lower tiers where too few are free."""
        book = self._book
        started: list[int] = []
        while book.pending:
            job = book.pending[0][3]
            if book.need[job] > book.free:
                losers = victims(book, job)
                if not losers:
                    break
                for loser in losers:
                    self._preempt(loser)
            del book.pending[0]
            book.begin(job)
            started.append(job)
        return started


def _planner(backfill: str, named: bool) -> EasyBackfill | ConservativeBackfill:
    if backfill not in ("easy", "conservative"):
        raise ClusterError(f"backfill = {backfill!r} must be 'easy' or 'conservative'")
    if backfill == "easy":
        return EasyBackfill()
    return NamedBackfill() if named else ConservativeBackfill()
