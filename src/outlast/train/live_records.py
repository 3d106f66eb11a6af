"""Records of several live groups as one run, and the place of each group in it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.records import AttemptEnded, Event, RecordWriter, StepsDone, read_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.records import RunDirectory, Sink
    from outlast.recover.live import LiveGroups

_KEPT_RECORDS = 8


@dataclass(frozen=True)
class Post:
    """A group's place in the run.

    Attributes:
        number: Of the group.
        groups: How many there are to be.
        lighthouse: ``host:port``.
        attempt: Of the run, from 1.
        returning: Whether the group has been started again.
        known: Steps that the run is known to have done.
    """

    number: int
    groups: int
    lighthouse: str
    attempt: int
    returning: bool = False
    known: int = 0

    @property
    def speaks_first(self) -> bool:
        """True if this group writes while the groups have not met; others may be at the end."""
        return self.number == 0 and not self.returning


def known_steps(directory: RunDirectory) -> int:
    """Steps that the records say the run has done."""
    done = read_run(directory.path).of(StepsDone) if directory.exists() else []
    return done[-1][1].step if done else 0


def has_ended(directory: RunDirectory, attempt: int) -> bool:
    """Return whether the end of this attempt is recorded."""
    ended = read_run(directory.path).of(AttemptEnded)
    return any(record.attempt == attempt for record, _ in ended)


class GroupRecords(RecordWriter):
    """The run's event log as one of several groups sees it.

    Until the first round nobody knows who writes, so events wait for it. Who writes may die between
    a step and its record, so every group keeps its last ones, for when it is the one that writes.

    Args:
        directory: Of the run.
        post: Of this group.
        sinks: Makes the other places that want the events.
    """

    def __init__(
        self, directory: RunDirectory, post: Post, sinks: Callable[[], list[Sink]]
    ) -> None:
        super().__init__(directory.path, 0, post.attempt)
        self._directory = directory
        self._post = post
        self._other_places: Callable[[], list[Sink]] | None = sinks
        self._waiting: list[Event] = []
        self._kept: deque[StepsDone] = deque(maxlen=_KEPT_RECORDS)
        self._own: RecordWriter | None = None
        self.groups: LiveGroups | None = None

    def write(self, event: Event) -> None:
        """Append `event`, if this is the first live group."""
        if self.groups is None or not self.groups.met:
            self._waiting.append(event)
            return
        # What a group says at its start is said by the first of those that start the run.
        waiting = [] if self._post.returning else self._waiting
        self._waiting = []
        if not self.groups.writes:
            if isinstance(event, StepsDone):
                self._kept.append(event)
            return
        if self._other_places is not None:
            self._sinks, self._other_places = self._other_places(), None
        for item in (*waiting, *self._missing(), event):
            super().write(item)

    def _missing(self) -> list[StepsDone]:
        """Steps that the group that wrote before this one has done and not recorded."""
        if not self._kept:
            return []
        kept, found = list(self._kept), read_run(self._directory.path).of(StepsDone)
        known = max((e.step for record, e in found if record.attempt == self.attempt), default=0)
        self._kept.clear()
        return [name for name in kept if name.step > known]

    def tell(self, event: Event) -> None:
        """Write what concerns this group alone, whoever writes the run's events."""
        if self.groups is not None and self.groups.writes:
            self.write(event)
            return
        if self._own is None:
            self._own = RecordWriter(self._directory.path, self._post.number, self.attempt)
        self._own.write(event)

    def close(self) -> None:
        """Close the files."""
        if self.groups is None and self._post.speaks_first:
            # There was no step to do, so that the groups never met.
            for event in self._waiting:
                super().write(event)
        super().close()
        if self._own is not None:
            self._own.close()
