"""EASY backfill: only the queue's head has a reservation.

Lifka, "The ANL/IBM SP scheduling system" (JSSPP 1995). The head gets a shadow time, the first
moment at which enough nodes are free if every running job uses its whole limit, and the nodes that
are left over then are extra. A later job may start now if it ends before the shadow or fits into
the extra nodes, so it cannot delay the head.
"""

from __future__ import annotations

from outlast.cluster.simulate.book import NEVER, Book


class EasyBackfill:
    """Decides which pending jobs start now; remembers what it need not look at again."""

    def __init__(self) -> None:
        self._settled = False
        self._shadow = NEVER
        self._extra = 0

    def disturb(self) -> None:
        """Nodes were freed or lost, or the order or limits changed: look at every job again."""
        self._settled = False

    def starts(self, book: Book, arrived: list[int]) -> list[int]:
        """Jobs that start now, in order; they leave the queue and hold their nodes.

        Where nothing but arrivals happened since the last call, no older job can start: time alone
        shortens the hole that it did not fit. Then only what `arrived` behind the head is tested.
        """
        deep = len(book.pending) > book.scheduler.backfill_jobs
        if not self._settled or deep or book.pending[0][3] in arrived:
            return self._look_at_all(book)
        started = []
        for job in arrived if len(arrived) == 1 else sorted(arrived, key=book.entry):
            if self._fits(book, job):
                book.withdraw(job)
                book.begin(job)
                started.append(job)
        return started

    def hole_seconds(self, book: Book, nodes: int) -> float:
        """Longest limit with which a job, put last into the queue, would start now; 0 if none."""
        if nodes > book.free:
            return 0.0
        shadow, extra = shadow_of(book)
        return NEVER if nodes <= extra else max(0.0, shadow - book.now)

    def _fits(self, book: Book, job: int) -> bool:
        nodes = book.need[job]
        if nodes > book.free:
            return False
        if book.now + book.limit[job] > self._shadow:
            if nodes > self._extra:
                return False
            self._extra -= nodes
        return True

    def _look_at_all(self, book: Book) -> list[int]:
        pending, need, limit = book.pending, book.need, book.limit
        started = start_in_order(book)
        # What lies too deep to be looked at may come within reach.
        self._settled = 0 < len(pending) <= book.scheduler.backfill_jobs
        if not pending:
            return started
        shadow, extra = shadow_of(book)
        free, now = book.free, book.now
        if free:
            depth = min(len(pending), book.scheduler.backfill_jobs)
            chosen = []
            for place in range(1, depth):
                job = pending[place][3]
                nodes = need[job]
                if nodes <= free:
                    if now + limit[job] > shadow:
                        if nodes > extra:
                            continue
                        extra -= nodes
                    free -= nodes
                    chosen.append(place)
                    if not free:
                        break
            started += [pending[place][3] for place in chosen]
            for place in reversed(chosen):
                del pending[place]
            for job in started[len(started) - len(chosen) :]:
                book.begin(job)
        self._shadow, self._extra = shadow, extra
        return started


def start_in_order(book: Book) -> list[int]:
    """Start jobs from the front of the queue until one does not fit."""
    pending, need = book.pending, book.need
    started: list[int] = []
    for entry in pending:
        job = entry[3]
        if need[job] > book.free:
            break
        book.begin(job)
        started.append(job)
    del pending[: len(started)]
    return started


def shadow_of(book: Book) -> tuple[float, int]:
    """When the head can start at the latest, and nodes that are left over then.

    (inf, free nodes) if nothing is pending, or while too few nodes are up for the head.
    """
    if not book.pending:
        return NEVER, book.free
    need = book.need
    missing = need[book.pending[0][3]] - book.free
    if missing <= 0:
        return book.now, -missing
    shadow = NEVER
    for release, job in book.running:
        if missing <= 0 and release > shadow:
            break
        missing -= need[job]
        shadow = release
    if missing > 0:
        return NEVER, book.free
    return shadow, -missing
