"""All tiers of a store, and the threads that copy versions downwards. Needs no torch.

A background thread for each lower tier copies every n-th version on. A tier copies from the tier
before it if that has the version, else from the first. Retention of a tier leaves what a lower tier
still waits for. A copy that fails is reported and not tried again: the next version that is due
takes its place. Beside those that are due, the newest version is copied when the store is closed,
and the newest one that the session before did not copy any more at the first save of the next.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from typing import TYPE_CHECKING

from outlast.checkpoint.format.owner import claimed
from outlast.checkpoint.format.storage import LocalStorage, within
from outlast.checkpoint.format.version import list_versions
from outlast.checkpoint.tiers.drain import Drain, Job, failed
from outlast.checkpoint.tiers.pace import Pace
from outlast.checkpoint.tiers.place import Place, words_of
from outlast.checkpoint.tiers.tier import DrainResult
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.checkpoint.agreement import Signals
    from outlast.checkpoint.format.version import Version
    from outlast.checkpoint.tiers.tier import Tier
    from outlast.distributed.group import Group

_RESULTS = 1000
_JOIN_SECONDS = 1.0


class Tiers:
    """All places of a store, nearest first, and the threads that copy versions downwards.

    At most one version waits for each tier, beside one that a tier before it is just being given.
    Ranks that coordinate copy the same versions: rank 0 says which are dropped, when a copy begins
    and whether all parts arrived.

    Args:
        first: Where the store saves.
        lower: The other tiers.
        ranks: This process among those that save together.
        timeout_seconds: Longest wait for the copies.

    Attributes:
        places: As given, the first one first.
        seen: The newest session that was in the object stores when this rank looked last, before
            it restored; None: not known.

    Raises:
        CheckpointError: When the tiers are in an order that cannot work, or two are the same.
    """

    def __init__(
        self, first: Place, lower: Sequence[Tier], ranks: Group, timeout_seconds: float
    ) -> None:
        self.places = [
            first,
            *(Place.of(tier.place, tier.keep, ranks, private=tier.private) for tier in lower),
        ]
        _check_order(self.places)
        count = len(self.places)
        self._ranks = ranks
        self._timeout_seconds = timeout_seconds
        self._every = [1, *(tier.every for tier in lower)]
        self._signals: Signals | None = None
        self._coordinated = False
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._lower = tuple(lower)
        self._waiting: list[list[Job]] = [[] for _ in range(count)]
        self._current: list[Job | None] = [None] * count
        # Copied, and not told yet: who waits for results waits for these too.
        self._telling = 0
        self._slots = [0] * count
        self._last: list[Version | None] = [None] * count
        self._threads: dict[int, threading.Thread] = {}
        self._results: deque[DrainResult] = deque(maxlen=_RESULTS)
        self.seen: int | None = None

    @property
    def first(self) -> Place:
        """Where the store saves."""
        return self.places[0]

    def listed(self) -> tuple[list[tuple[Place, Version]], dict[str, str]]:
        """All versions, complete or not: newest first, of equal ones the nearest first.

        All ranks call it together; those of private tiers are listed if any rank has them.

        Returns:
            The versions, and a sentence for the location of each tier that cannot be listed.

        Raises:
            CheckpointError: When the first tier cannot be listed.
        """
        mine: list[tuple[int, Version]] = []
        problems: dict[int, str] = {}
        for index, place in enumerate(self.places):
            if place.keeps_house:
                try:
                    there = within(
                        self._timeout_seconds,
                        functools.partial(list_versions, place.storage),
                        place.storage.location,
                    )
                    mine += [(index, version) for version in there]
                except Exception as error:  # clients of object stores raise what they like
                    problems[index] = (
                        f"{place.storage.location} cannot be listed: {words_of(error)}"
                    )
        found: set[tuple[int, Version]] = set()
        for versions, troubles in self._ranks.gather((mine, problems)):
            found.update(versions)
            problems = {**troubles, **problems}
        if 0 in problems:
            raise CheckpointError(problems[0])
        ordered = sorted(found, key=lambda pair: (pair[1], -pair[0]), reverse=True)
        return [(self.places[index], version) for index, version in ordered], {
            self.places[index].storage.location: problems[index] for index in sorted(problems)
        }

    def look(self) -> None:
        """Remember the newest session, now that this process takes the state from here."""
        self.seen = None
        # Who cannot tell now learns of another writer at its first save.
        with contextlib.suppress(Exception):
            sessions = [0]
            for place in self.places:
                if place.keeps_house and not isinstance(place.storage, LocalStorage):
                    sessions += self._claimed(place)
                    asks = functools.partial(list_versions, place.storage)
                    there = within(self._timeout_seconds, asks, place.storage.location)
                    sessions += [version.session for version in there]
            self.seen = max(sessions)

    def claimed(self) -> int:
        """The newest session that was claimed in a place that answers; 0: none."""
        newest = 0
        for place in self.places:
            if place.keeps_house:
                with contextlib.suppress(Exception):
                    newest = max(newest, *self._claimed(place))
        return newest

    def _claimed(self, place: Place) -> dict[int, str]:
        asks = functools.partial(claimed, place.storage)
        return within(self._timeout_seconds, asks, place.storage.location)

    def own(self, session: int) -> None:
        """Become the only one who writes to these places, as far as they answer.

        Raises:
            OwnedError: When another process does.
            OSError: When the first place fails.
        """
        for index, place in enumerate(self.places):
            if place.keeps_house:
                try:
                    place.own(session)
                except OSError:
                    if not index:
                        raise

    def disown(self) -> None:
        """Let others write to these places."""
        for place in self.places:
            place.disown()

    def newest(self) -> Version | None:
        """The newest complete version of the first tier and of those that answer."""
        found = [self.first.newest(), *map(_head, self.places[1:])]
        return max((pair for pair in found if pair is not None), default=None)

    def begin(self, signals: Signals, *, coordinated: bool) -> None:
        """Start a session; what the one before saved and did not copy any more is copied now.

        All ranks call it together, before the first version is offered.

        Args:
            signals: Words between the ranks.
            coordinated: Whether the ranks use them.
        """
        if self._signals is not None or len(self.places) == 1:
            return
        self._signals, self._coordinated = signals, coordinated
        mine = [_head(place) if place.keeps_house else None for place in self.places]
        everyone = self._ranks.gather(mine)
        heads = [
            (everyone[0][index] if len({said[index] for said in everyone}) == 1 else None)
            if place.private
            else everyone[0][index]
            for index, place in enumerate(self.places)
        ]
        with self._changed:
            self._last = [None, *heads[1:]]
            for index in range(1, len(self.places)):
                above = [(head, -n) for n, head in enumerate(heads[:index]) if head is not None]
                version, source = max(above, default=(None, 0))
                held = heads[index]
                if version is not None and (held is None or version > held):
                    self._put(index, Job(version, -source))

    def offer(self, version: Version, number: int) -> None:
        """A version of the first tier was published, by the store's save `number` (from 1).

        Rank 0 calls it before the others hear of the publication.
        """
        if self._signals is None:
            return
        key = f"{version.folder}/dropped"
        with self._changed:
            self._last[0] = version
            slots = [number // every for every in self._every]
            due = [n for n in range(1, len(slots)) if slots[n] > self._slots[n]]
            self._slots = [max(pair) for pair in zip(slots, self._slots, strict=True)]
            dropped = [name for n in due for name in self._make_room(n)] if self._leads else []
            # At once: a copy that began in between would wait for ranks that have dropped it.
            self._forget(dropped)
        if self._leads:
            with contextlib.suppress(CheckpointError):
                self._signals.tell(key, " ".join(dropped))
        else:
            with contextlib.suppress(CheckpointError):
                dropped = self._signals.hear(key, "").split()
        with self._changed:
            if not self._leads:
                self._forget(dropped)
            for index in due:
                self._put(index, Job(version, 0))

    def protected(self, index: int) -> set[Version]:
        """Versions in place `index` that lower tiers still need."""
        with self._changed:
            jobs = [*self._current, *(job for waiting in self._waiting for job in waiting)]
            return {job.version for job in jobs if job is not None and job.source == index}

    def prune(self, index: int = 0) -> None:
        """Delete what need not stay in a place and is not waited for."""
        self.places[index].prune(self.protected(index))

    def report(self, result: DrainResult) -> None:
        """Add to the results."""
        with self._changed:
            self._results.append(result)

    def results(self) -> list[DrainResult]:
        """The newest thousand results, oldest first."""
        with self._changed:
            return list(self._results)

    def settle(self) -> None:
        """Wait for the copies under way and waiting, at most the time limit."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy(), self._timeout_seconds)

    def close(self, *, drain: bool) -> None:
        """End the threads.

        Args:
            drain: Copy the newest version to all tiers that have it not, due or not, and wait;
                False: give up the copies under way.
        """
        if drain and self._signals is not None and not self._stop.is_set():
            with self._changed:
                for index in range(1, len(self.places)):
                    if self._last[0] is not None and self._last[index] != self._last[0]:
                        if self._leads:
                            self._forget(self._make_room(index))
                        self._put(index, Job(self._last[0], 0))
            self.settle()
        with self._changed:
            self._stop.set()
            left = [job.key(n) for n, waiting in enumerate(self._waiting) for job in waiting]
            self._forget(left, "the store was closed before")
            for index, job in enumerate(self._current):
                if drain and job is not None:
                    reason = f"it took longer than {self._timeout_seconds:g} s (timeout_seconds)"
                    self._results.append(failed(self.places[index], job.version, reason))
            self._changed.notify_all()
        for thread in self._threads.values():
            thread.join(_JOIN_SECONDS)

    @property
    def _leads(self) -> bool:
        return self._ranks.rank == 0 or not self._coordinated

    def _busy(self) -> bool:
        under_way = any(job is not None for job in self._current)
        return any(self._waiting) or under_way or self._telling > 0

    def _put(self, index: int, job: Job) -> None:
        """Queue a job and start the thread of its tier."""
        self._waiting[index].append(job)
        self._last[index] = job.version
        if index not in self._threads:
            thread = threading.Thread(
                target=self._serve, args=(index,), name=f"tier-{index}", daemon=True
            )
            self._threads[index] = thread
            thread.start()
        self._changed.notify_all()

    def _make_room(self, index: int) -> list[str]:
        """The keys of the waiting jobs that a newer one replaces; a tier before has begun none."""
        begun = {job.version for job in self._current[:index] if job is not None}
        return [job.key(index) for job in self._waiting[index] if job.version not in begun]

    def _forget(self, dropped: list[str], reason: str = "a newer one came first") -> None:
        """Take dropped jobs out of the queues; rank 0 tells those who already ask to begin."""
        for index, waiting in enumerate(self._waiting):
            for job in [node for node in waiting if node.key(index) in dropped]:
                waiting.remove(job)
                place = self.places[index].storage.location
                self._results.append(DrainResult(place, job.version.step, skipped=reason))
                if self._leads and self._signals is not None:
                    with contextlib.suppress(CheckpointError):
                        self._signals.tell(f"{job.key(index)}/start", reason)
        self._changed.notify_all()

    def _next(self, index: int) -> Job | None:
        """The job that may begin: a tier before this one copies the same version first."""
        if not self._waiting[index]:
            return None
        job = self._waiting[index][0]
        before = [*self._current[:index], *(item for w in self._waiting[:index] for item in w)]
        if any(number is not None and number.version == job.version for number in before):
            return None
        return self._waiting[index].pop(0)

    def _pace(self, index: int, job: Job) -> Pace:
        tier = self._lower[index - 1]
        rate = None if tier.pacing is None else tier.pacing(job.version.step)
        return Pace(tier.bytes_per_second, self._stop, rate)

    def _serve(self, index: int) -> None:
        """The thread of one tier."""
        assert self._signals is not None
        drain = Drain(self.places, self._signals, self._leads, self._coordinated)
        while True:
            with self._changed:
                while (job := self._next(index)) is None:
                    if self._stop.is_set():
                        return
                    self._changed.wait()
                self._current[index] = job
            try:
                result = drain.run(index, job, self._pace(index, job))
            except Exception as error:
                result = failed(self.places[index], job.version, words_of(error))
            done = result.error is None and not result.skipped
            with self._changed:
                if done:
                    for lower in self._waiting[index + 1 :]:
                        for item in lower:
                            item.source = index if item.version == job.version else item.source
                self._current[index] = None
                self._telling += 1
            if done:
                with contextlib.suppress(Exception):
                    self.prune(index)
            with self._changed:
                self._results.append(result)
                self._telling -= 1
                self._changed.notify_all()


def _check_order(places: list[Place]) -> None:
    locations = [place.storage.location for place in places]
    for number, place in enumerate(places):
        if locations[number] in locations[:number]:
            raise CheckpointError(f"two tiers have the place {locations[number]}")
        if number and place.private and not places[number - 1].private:
            raise CheckpointError(
                f"the private tier {locations[number]} comes after the shared tier "
                f"{locations[number - 1]}; give private tiers first"
            )


def _head(place: Place) -> Version | None:
    """The newest version of a place; None also when it cannot be reached."""
    with contextlib.suppress(Exception):
        return place.newest()
    return None
