"""What an open meter does beside counting: keeps polled sources alive and samples power."""

from __future__ import annotations

import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from outlast.energy.sources.integral import PowerIntegral
from outlast.energy.sources.optional import Polled, WithPower, WithState
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outlast.energy.sources.track import Track

_Seen = dict[tuple[str, str], float]


class Task(NamedTuple):
    """Something to do again and again; it must not raise."""

    period_seconds: float
    run: Callable[[], object]


class Watch:
    """One thread for all sources of a meter and of the meters inside it; none if nothing needs it.

    The thread holds no reference to it while it waits, and ends when the last meter that uses it
    is closed or dropped.

    Args:
        tracks: Those of the meter.
        check_seconds: How often to sample power and throttle reasons; None for never.
        clock: Monotonic seconds, of the samples.

    Raises:
        EnergyError: `check_seconds` is shorter than power readings are renewed.
    """

    def __init__(
        self,
        tracks: Sequence[Track],
        check_seconds: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._users = 0
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None
        self._last_seen: _Seen = {}
        self._integrals: dict[str, PowerIntegral] = {}
        self.tasks: list[Task] = []
        for track in tracks:
            if isinstance(track.source, Polled):
                self.tasks.append(Task(track.source.poll_seconds, track.count))
            if check_seconds is not None:
                self._check(track, check_seconds)

    def _check(self, track: Track, period_seconds: float) -> None:
        source = track.source
        if isinstance(source, WithPower):
            integral = PowerIntegral(
                source.name,
                source.part,
                track.watts,
                period_seconds=period_seconds,
                clock=self._clock,
            )
            self._integrals[source.name] = integral
            self.tasks.append(Task(period_seconds, integral.joules))
            if not isinstance(source, Polled):
                # A reset between two marks is seen only by counts in between.
                self.tasks.append(Task(period_seconds, track.count))
        if isinstance(source, WithState):
            # No reference to self: a dropped watch must go at once, without a garbage collection.
            note = partial(_note_throttling, self._last_seen, self._clock, track)
            self.tasks.append(Task(period_seconds, note))

    def open(self) -> None:
        """Takes the first samples and starts the thread, unless it runs already."""
        with self._lock:
            self._users += 1
            if self._users == 1 and self.tasks:
                self.poll()
                self._stop = threading.Event()
                weakref.finalize(self, self._stop.set).atexit = False
                self._thread = threading.Thread(
                    target=_run,
                    args=(weakref.ref(self), self._stop),
                    name="outlast-energy",
                    daemon=True,
                )
                self._thread.start()

    def close(self) -> None:
        """Stops the thread when the last user leaves."""
        with self._lock:
            self._users -= 1
            if self._users or self._thread is None or self._stop is None:
                return
            thread, self._thread = self._thread, None
            self._stop.set()
        # A hanging driver must not hang the program: the thread is a daemon.
        thread.join(timeout=5)

    def poll(self) -> None:
        """Takes every sample once, now."""
        for task in self.tasks:
            task.run()

    def integral(self, name: str) -> PowerIntegral | None:
        """Integrated power of a source, where it is sampled."""
        return self._integrals.get(name)

    def throttled_since(self, name: str, begin_seconds: float) -> tuple[str, ...]:
        """Throttle reasons of a source that were sampled since then."""
        seen = list(self._last_seen.items())
        return tuple(why for (whose, why), when in seen if whose == name and when >= begin_seconds)


def _note_throttling(seen: _Seen, clock: Callable[[], float], track: Track) -> None:
    reasons = track.throttle_reasons()
    if not isinstance(reasons, Unavailable):
        now = clock()
        seen.update({(track.source.name, reason): now for reason in reasons})


def _run(watch: weakref.ref[Watch], stop: threading.Event) -> None:
    # Real time, not the clock of the samples: the thread must wake where tests stop that one.
    due: list[float] = []
    while (wait_seconds := _run_due(watch(), due)) is not None and not stop.wait(wait_seconds):
        pass


def _run_due(watch: Watch | None, due: list[float]) -> float | None:
    """Does what is due; seconds until the next is, or None once there is no watch."""
    if watch is None:
        return None
    if not due:
        due += [time.monotonic() + task.period_seconds for task in watch.tasks]
    for i, task in enumerate(watch.tasks):
        now = time.monotonic()
        if now >= due[i]:
            task.run()
            due[i] = now + task.period_seconds
    return max(0.0, min(due) - time.monotonic())
