"""What an open meter does beside counting: keeps polled sources alive and samples power."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from outlast.energy.sources.integral import PowerIntegral
from outlast.energy.sources.optional import Polled, WithPower, WithState
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outlast.energy.sources.protocol import Source


class Task(NamedTuple):
    """Something to do again and again."""

    period_seconds: float
    run: Callable[[], object]


class Watch:
    """One thread for all sources of a meter and of the meters inside it; none if nothing needs it.

    Args:
        sources: Those of the meter.
        check_seconds: How often to sample power and throttle reasons; None for never.
        clock: Monotonic seconds, of the samples.

    Raises:
        EnergyError: `check_seconds` is shorter than power readings are renewed.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        check_seconds: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._users = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._last_seen: dict[tuple[str, str], float] = {}
        self._integrals: dict[str, PowerIntegral] = {}
        self._tasks: list[Task] = []
        for source in sources:
            if isinstance(source, Polled):
                self._tasks.append(Task(source.poll_seconds, source.joules))
            if check_seconds is not None:
                self._check(source, check_seconds)

    def _check(self, source: Source, period_seconds: float) -> None:
        if isinstance(source, WithPower):
            integral = PowerIntegral(
                source.name,
                source.part,
                source.watts,
                period_seconds=period_seconds,
                clock=self._clock,
            )
            self._integrals[source.name] = integral
            self._tasks.append(Task(period_seconds, integral.joules))
        if isinstance(source, WithState):
            self._tasks.append(Task(period_seconds, lambda: self._note_throttling(source)))

    def _note_throttling(self, source: Source) -> None:
        reasons = source.throttle_reasons() if isinstance(source, WithState) else ()
        if not isinstance(reasons, Unavailable):
            now = self._clock()
            self._last_seen.update({(source.name, reason): now for reason in reasons})

    def open(self) -> None:
        """Takes the first samples and starts the thread, unless it runs already."""
        with self._lock:
            self._users += 1
            if self._users == 1 and self._tasks:
                self.poll()
                self._stop.clear()
                self._thread = threading.Thread(
                    target=self._run, name="outlast-energy", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Stops the thread when the last user leaves."""
        with self._lock:
            self._users -= 1
            thread, self._thread = (
                (self._thread, None) if self._users == 0 else (None, self._thread)
            )
        if thread is not None:
            self._stop.set()
            # A hanging driver must not hang the program: the thread is a daemon.
            thread.join(timeout=5)

    def poll(self) -> None:
        """Takes every sample once, now."""
        for task in self._tasks:
            task.run()

    def integral(self, name: str) -> PowerIntegral | None:
        """Integrated power of a source, where it is sampled."""
        return self._integrals.get(name)

    def throttled_since(self, name: str, begin_seconds: float) -> tuple[str, ...]:
        """Throttle reasons of a source that were sampled since then."""
        seen = list(self._last_seen.items())
        return tuple(why for (whose, why), when in seen if whose == name and when >= begin_seconds)

    def _run(self) -> None:
        # Real time, not the clock of the samples: the thread must wake where tests stop that one.
        due = [time.monotonic() + task.period_seconds for task in self._tasks]
        while not self._stop.wait(max(0.0, min(due) - time.monotonic())):
            for i, task in enumerate(self._tasks):
                now = time.monotonic()
                if now >= due[i]:
                    task.run()
                    due[i] = now + task.period_seconds
