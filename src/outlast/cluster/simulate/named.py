"""Conservative backfill with named nodes, step by step as Slurm's sched/backfill does it.

Follows `_attempt_backfill` of the backfill plugin and the will-run test of select/cons_tres in
Slurm 22.05 for one partition of equal nodes that jobs hold alone: reservations of pending jobs are
sets of nodes in a table over time, running jobs are none of them; a job is tried at each change of
the table, on the nodes that no reservation takes before its end; when those will be free is told
from the running jobs' limits in batches; and of free nodes the tightest run of consecutive ones is
taken, lowest first. So a job may be planned later than the numbers of free nodes alone would allow.
"""

from __future__ import annotations

from bisect import bisect_left

from outlast.cluster.simulate.book import NEVER, Book
from outlast.cluster.simulate.conservative import ConservativeBackfill
from outlast.cluster.simulate.easy import start_in_order
from outlast.cluster.simulate.placement import best_fit


class NamedBackfill(ConservativeBackfill):
    """Plans every pending job anew in each pass."""

    def starts(self, book: Book, arrived: list[int]) -> list[int]:
        """Jobs that start now, in order; they leave the queue and hold their nodes."""
        started = start_in_order(book)
        table = Table(book.now, book.all_nodes)
        # What is reserved behind the last job that could start now decides nothing.
        last = min(len(book.pending), book.scheduler.backfill_jobs) - 1
        while last > 0 and book.need[book.pending[last][3]] > book.free:
            last -= 1
        chosen = []
        for place in range(last + 1 if last > 0 else 0):
            job = book.pending[place][3]
            nodes = _plan(book, table, job)
            if nodes:
                book.begin(job, nodes)
                chosen.append(place)
        jobs = [book.pending[place][3] for place in chosen]
        for place in reversed(chosen):
            del book.pending[place]
        return started + jobs


class Table:
    """Nodes that no pending job has reserved: `nodes[k]` from `times[k]` up to `times[k + 1]`."""

    def __init__(self, now: float, nodes: int) -> None:
        self.times = [now]
        self.nodes = [nodes]

    def open(self, start: float, end: float) -> tuple[int, float | None]:
        """Nodes free of reservations from `start` to `end`, and when the table changes next."""
        found, change = -1, None
        for place, nodes in enumerate(self.nodes):
            until = self.times[place + 1] if place + 1 < len(self.times) else NEVER
            if until <= start:
                continue
            if change is None and until < NEVER:
                change = until
            if self.times[place] > end:
                break
            found &= nodes
        return found, change

    def reserve(self, start: float, end: float, nodes: int) -> bool:
        """Take nodes out of a span; False, and nothing taken, where one of them is not open.

        As in Slurm, a reservation that begins at the span's very end is in its way.
        """
        first, last = self._step_at(max(start, self.times[0])), self._step_at(end)
        if any(nodes & ~self.nodes[place] for place in range(first, last + 1)):
            return False
        for place in range(first, last):
            self.nodes[place] &= ~nodes
        return True

    def _step_at(self, time: float) -> int:
        place = bisect_left(self.times, time)
        if place == len(self.times) or self.times[place] != time:
            self.times.insert(place, time)
            self.nodes.insert(place, self.nodes[place - 1])
        return place


def _plan(book: Book, table: Table, job: int) -> int:
    """Nodes on which a job starts now; 0 if it is planned for later or not at all."""
    need, limit, now = book.need[job], book.limit[job], book.now
    scheduler = book.scheduler
    step = scheduler.backfill_resolution_seconds
    at: float | None = now
    while at is not None:
        tried = at
        open_nodes, at = table.open(tried, tried + limit)
        if open_nodes.bit_count() < need:
            continue
        start, nodes = _will_run(book, open_nodes, need)
        if not nodes:
            return 0
        start = max(start, tried)
        if start <= now:
            return nodes
        if at is not None and start > at:
            continue
        if start > now + scheduler.backfill_window_seconds:
            return 0
        end = start + limit
        if step:
            reserved = table.reserve(start // step * step, end // step * step, nodes)
        else:
            reserved = table.reserve(start, end, nodes)
        if reserved:
            return 0
        at = start if start > tried else at
    return 0


def _will_run(book: Book, open_nodes: int, need: int) -> tuple[float, int]:
    """When so many of the open nodes are free by the running jobs' limits, and which ones."""
    free = open_nodes & book.free_nodes
    if free.bit_count() >= need:
        return book.now, best_fit(free, need)
    window = book.scheduler.end_window_seconds
    running = [(end, book.held[job]) for end, job in book.running if book.held[job] & open_nodes]
    place = 0
    while place < len(running):
        last = running[place][0] + window
        while place < len(running) and running[place][0] <= last:
            end, nodes = running[place]
            free |= nodes & open_nodes
            place += 1
        window *= 2
        if free.bit_count() >= need:
            return end, best_fit(free, need)
    return NEVER, 0
