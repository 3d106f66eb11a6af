"""Conservative backfill: every pending job has a reservation, in the order of the queue.

Mu'alem and Feitelson, "Utilization, predictability, workloads, and user runtime estimates in
scheduling the IBM SP2 with backfilling" (IEEE TPDS 12, 2001); Slurm's sched/backfill is of this
kind. Each pass makes all reservations anew: free nodes over time are a step function, and each job
takes the earliest span of its limit in which enough of them are free.
"""

from __future__ import annotations

from outlast.cluster.simulate.book import NEVER, Book
from outlast.cluster.simulate.easy import start_in_order
from outlast.cluster.simulate.profile import Profile


class ConservativeBackfill:
    """Decides which pending jobs start now; remembers what it need not look at again."""

    def __init__(self) -> None:
        self._profile: Profile | None = None

    def disturb(self) -> None:
        """Nodes were freed or lost, or the order or limits changed: look at every job again."""
        self._profile = None

    def starts(self, book: Book, arrived: list[int]) -> list[int]:
        """Jobs that start now, in order; they leave the queue and hold their nodes.

        Reservations serve one purpose: to find what they leave to jobs behind them. So a pass makes
        none behind the last job that is small enough for the free nodes; and where all were made
        and nothing but arrivals happened since, they stand and only what `arrived` is planned.
        """
        pending, need = book.pending, book.need
        depth = min(len(pending), book.scheduler.backfill_jobs)
        first = len(pending) - len(arrived)
        profile, started = self._profile, []
        behind = profile is not None and first > 0
        if behind and {entry[3] for entry in pending[first:]} == set(arrived):
            assert profile is not None
            profile.advance(book.now)
            places = range(first, depth)
        else:
            started = start_in_order(book)
            depth = min(len(pending), book.scheduler.backfill_jobs)
            last = depth - 1
            while last > 0 and need[pending[last][3]] > book.free:
                last -= 1
            self._profile = None
            if last <= 0:
                return started
            profile, places = profile_of(book), range(last + 1)
            if last == len(pending) - 1 and self._lasts(book):
                self._profile = profile
        chosen = [place for place in places if self._plan(book, profile, pending[place][3])]
        jobs = [pending[place][3] for place in chosen]
        for place in reversed(chosen):
            del pending[place]
        for job in jobs:
            book.begin(job)
        return started + jobs

    def hole_seconds(self, book: Book, nodes: int) -> float:
        """Longest limit with which a job, put last into the queue, would start now; 0 if none."""
        if nodes > book.free:
            return 0.0
        profile = profile_of(book)
        for entry in book.pending[: book.scheduler.backfill_jobs]:
            self._plan(book, profile, entry[3])
        return profile.hole_seconds(nodes)

    def _lasts(self, book: Book) -> bool:
        """Whether plans stay right while time passes and jobs start."""
        scheduler = book.scheduler
        return not scheduler.end_window_seconds and scheduler.backfill_window_seconds == NEVER

    def _plan(self, book: Book, profile: Profile, job: int) -> bool:
        """Reserve nodes for a job; whether it starts now."""
        nodes, limit = book.need[job], book.limit[job]
        start = profile.earliest(nodes, limit)
        scheduler = book.scheduler
        if start > book.now + scheduler.backfill_window_seconds:
            return False
        end, step = start + limit, scheduler.backfill_resolution_seconds
        if step and start > book.now:
            # Slurm rounds a reservation's start down too, but on nodes that are busy until then.
            end = max(start, end // step * step)
        profile.reserve(start, end, nodes)
        return start <= book.now


def profile_of(book: Book) -> Profile:
    """Nodes that will be free if every running job uses its whole limit and none starts."""
    need = book.need
    profile = Profile(book.now, book.free)
    window, end_of_batch, first = book.scheduler.end_window_seconds, NEVER, True
    if not window:
        for release, job in book.running:
            profile.free_from(release, need[job])
        return profile
    batch = 0
    latest = book.now
    for release, job in book.running:
        if first or release > end_of_batch:
            if batch:
                profile.free_from(latest, batch)
                window *= 2
            batch, first = 0, False
            end_of_batch = release + window
        batch += need[job]
        latest = release
    if batch:
        profile.free_from(latest, batch)
    return profile
