"""Joules of a piece of a program, per device, by the meters of this machine.

with EnergyMeter() as meter:
    for batch in data:
        train(batch)
        print(meter.lap().total("gpu"))   # Energy with its interval, or Unavailable with its reason
print(meter.joules, meter.seconds)
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

from outlast.energy.sources import Interval, PowerIntegral, asked, available_sources, state_of
from outlast.energy.window import NO_METER, Energy, States, Still, Window, no_meter
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from outlast.energy.sources import Part, Snapshot, Source
    from outlast.energy.window import DeviceState, Reading

UPDATES_OF_A_LONG_WINDOW = 10
"""A window of fewer updates of its counter is flagged: one update is over 10 % of it."""
POWER_CHECK_SAMPLES = 25
POWER_CHECK_TOLERANCE = 0.1
"""Integrated power of so many samples may differ so much from the counter without a flag."""
IMPLAUSIBLE_WATTS = 1e6
"""More than any rack draws."""


class Count(NamedTuple):
    """Reading of a source's counter.

    Attributes:
        interval: Joules since the source's beginning.
        breaks: How often it had lost count by then: counts of unequal `breaks` have no difference.
    """

    interval: Interval
    breaks: int


class Track:
    """Reads one source, from any thread, and sees when its counter fell or lost count.

    Args:
        source: What is read.

    Attributes:
        source: What is read.
        why: The last break.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.why = Unavailable(f"the counter of {source.name} lost count")
        self._interval: Callable[[], Interval | Unavailable] | None = getattr(
            source, "interval", None
        )
        # Held over the read: two threads that note in another order than they read see a fall.
        self._lock = threading.Lock()
        self._last: float | None = None
        self._falls = 0
        self._lost = self._losses()

    def count(self) -> Count | Unavailable:
        """The counter now."""
        with self._lock:
            found = asked(self.source.name, self._read)
            if isinstance(found, Unavailable) and self._losses() != self._lost:
                # It began anew: its next count is the first of those that can be compared.
                self.why, self._lost = found, self._losses()
                found = asked(self.source.name, self._read)
            if isinstance(found, Unavailable):
                return found
            if self._last is not None and found.joules < self._last:
                self._falls += 1
                self.why = Unavailable(
                    f"the counter of {self.source.name} fell: it was reset", "measure again"
                )
            self._last = found.joules
            return Count(found, self._falls + self._losses())

    def flags(self) -> tuple[str, ...]:
        """Notes of the source for the reader."""
        found: tuple[str, ...] | Unavailable = asked(
            self.source.name, lambda: tuple(getattr(self.source, "flags", ()))
        )
        return (found.reason,) if isinstance(found, Unavailable) else found

    def _losses(self) -> int:
        return getattr(self.source, "losses", 0)

    def _read(self) -> Interval | Unavailable:
        if self._interval is not None:
            found = self._interval()
        else:
            joules = self.source.joules()
            if isinstance(joules, Unavailable):
                return joules
            found = Interval(joules, joules, joules)
        if isinstance(found, Unavailable) or all(math.isfinite(joules) for joules in found):
            return found
        return Unavailable(f"{self.source.name} says {found.joules} J")


class Watch:
    """One thread for all sources of a meter; none if nothing needs it.

    The thread holds no reference to it while it waits, and ends when the meter is closed or
    dropped.

    Args:
        tracks: Those of the meter.
        check_seconds: How often to sample power and throttle reasons; None for never.
        clock: Monotonic seconds, of the samples.

    Attributes:
        integrals: Integrated power by source, where it is sampled.
        tasks: Pairs of a period in seconds and what is done so often; it must not raise.

    Raises:
        EnergyError: `check_seconds` is shorter than power readings are renewed.
    """

    def __init__(
        self, tracks: Sequence[Track], check_seconds: float | None, clock: Callable[[], float]
    ) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # When a source last showed a throttle reason, by both.
        self._last_seen: dict[tuple[str, str], float] = {}
        self.integrals: dict[str, PowerIntegral] = {}
        self.tasks: list[tuple[float, Callable[[], object]]] = []
        for track in tracks:
            source = track.source
            name = source.name
            polled: float | None = getattr(source, "poll_seconds", None)
            watts = getattr(source, "watts", None)
            reasons = getattr(source, "throttle_reasons", None)
            if polled is not None:
                self.tasks.append((polled, track.count))
            if check_seconds is not None and watts is not None:
                integral = self.integrals[name] = PowerIntegral(
                    name, source.part, watts, period_seconds=check_seconds, clock=clock
                )
                self.tasks.append((check_seconds, integral.joules))
                if polled is None:
                    # A reset between two marks is seen only by counts in between.
                    self.tasks.append((check_seconds, track.count))
            if check_seconds is not None and reasons is not None:
                # No reference to self: a dropped watch must go at once, without a garbage
                # collection.
                note = partial(_note_throttling, self._last_seen, clock, name, reasons)
                self.tasks.append((check_seconds, note))

    def open(self) -> None:
        """Take the first samples and start the thread."""
        if self.tasks:
            self.poll()
            weakref.finalize(self, self._stop.set).atexit = False
            self._thread = threading.Thread(
                target=_run,
                args=(weakref.ref(self), self._stop),
                name="outlast-energy",
                daemon=True,
            )
            self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread is not None:
            # A hanging driver must not hang the program: the thread is a daemon.
            self._thread.join(timeout=5)

    def poll(self) -> None:
        """Take every sample once, now."""
        for _, run in self.tasks:
            run()

    def throttled_since(self, name: str, begin_seconds: float) -> tuple[str, ...]:
        """Throttle reasons of a source that were sampled since then."""
        seen = list(self._last_seen.items())
        return tuple(why for (whose, why), when in seen if whose == name and when >= begin_seconds)


def _note_throttling(
    seen: dict[tuple[str, str], float],
    clock: Callable[[], float],
    name: str,
    read: Callable[[], tuple[str, ...] | Unavailable],
) -> None:
    reasons = asked(name, read)
    if not isinstance(reasons, Unavailable):
        now = clock()
        seen.update({(name, reason): now for reason in reasons})


def _run(watch: weakref.ref[Watch], stop: threading.Event) -> None:
    """Do what is due until there is no watch any more, or it stops."""
    # Real time, not the clock of the samples: the thread must wake where tests stop that one.
    due: list[float] = []
    while (alive := watch()) is not None:
        due = due or [time.monotonic() + period for period, _ in alive.tasks]
        for i, (period, run) in enumerate(alive.tasks):
            now = time.monotonic()
            if now >= due[i]:
                run()
                due[i] = now + period
        del alive
        if stop.wait(max(0.0, min(due) - time.monotonic())):
            return


class _Mark(NamedTuple):
    seconds: float
    counts: tuple[Count | Unavailable, ...]
    sampled: tuple[Snapshot | None, ...]


class EnergyMeter:
    """Measures from entering its `with` statement to leaving it.

    Counters are only read, so that meters may stand inside and beside each other. The lengths are
    by a monotonic clock. Nothing waits for the GPU: synchronise before a window's ends where the
    work inside it must be complete. What a source raises while it is read makes its figure
    Unavailable and never reaches the program that is measured. A counter that was seen to fall
    makes every window Unavailable that spans the fall; it is looked at whenever a window or lap
    begins or ends, and by the thread where that runs for it.

    Args:
        name: Of the window.
        sources: What to read; those of `available_sources` by default, which a process of several
            on one node should restrict to its own GPU.
        power_check_seconds: How often a thread samples power and throttle reasons, to check the
            energy counters: at least 0.1 s; None for never.
        clock: Monotonic seconds.

    Raises:
        EnergyError: Two sources have one name, or the period is too short.
    """

    def __init__(
        self,
        name: str = "window",
        sources: Sequence[Source] | None = None,
        *,
        power_check_seconds: float | None = 0.2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.missing: tuple[Unavailable, ...] = ()
        if sources is None:
            sources, missing = available_sources(clock=clock)
            self.missing = tuple(missing)
        self.sources: tuple[Source, ...] = tuple(sources)
        names = [source.name for source in self.sources]
        for double in {one for one in names if names.count(one) > 1}:
            raise EnergyError(f'two sources are named "{double}": give each its own name')
        self._clock = clock
        self._tracks = tuple(map(Track, self.sources))
        self.watch = Watch(self._tracks, power_check_seconds, clock)
        self._begin: _Mark | None = None
        self._last: _Mark | None = None
        self._states: tuple[DeviceState | None, ...] = ()
        self._closed: Window | None = None

    def __enter__(self) -> Self:
        if self._begin is not None:
            raise EnergyError(f'the meter "{self.name}" was used before: make a new one')
        self._states = tuple(map(state_of, self.sources))
        self.watch.open()
        self._begin = self._last = self._mark()
        return self

    def __exit__(self, *_: object) -> None:
        end = self._mark()
        self.watch.close()
        self._closed = self._window(self.name, self._started(), end, self._states_until_now())

    def lap(self, name: str = "lap") -> Window:
        """Energy since the last lap, or since the beginning. Costs one read of each counter."""
        if self._last is None or self._closed is not None:
            raise EnergyError(f'the meter "{self.name}" has no laps outside its with statement')
        begin, self._last = self._last, self._mark()
        return self._window(name, begin, self._last, {})

    def read(self) -> Window:
        """Energy and states from the beginning until now, or until the end once it has ended."""
        if self._closed is not None:
            return self._closed
        begin = self._started()
        return self._window(self.name, begin, self._mark(), self._states_until_now())

    @property
    def joules(self) -> Mapping[str, Reading]:
        """Reading of each source so far. Never empty: without a source, one Unavailable."""
        return self._so_far().joules

    @property
    def seconds(self) -> float:
        """Length so far."""
        return self._so_far().seconds

    def total(self, part: Part | None = None) -> Reading:
        """The sum over the devices of a part so far: see `Window.total`."""
        return self._so_far().total(part)

    def _so_far(self) -> Window:
        """As `read`, without the states, which take longer."""
        return self._closed or self._window(self.name, self._started(), self._mark(), {})

    def _started(self) -> _Mark:
        if self._begin is None:
            raise EnergyError(f'the meter "{self.name}" is not open: use it in a with statement')
        return self._begin

    def _mark(self) -> _Mark:
        integrals = (self.watch.integrals.get(source.name) for source in self.sources)
        sampled = tuple(None if integral is None else integral.sums for integral in integrals)
        counts = tuple(track.count() for track in self._tracks)
        return _Mark(self._clock(), counts, sampled)

    def _states_until_now(self) -> dict[str, States]:
        found, since = {}, self._started().seconds
        for source, start in zip(self.sources, self._states, strict=True):
            end = state_of(source)
            if start is None or end is None:
                continue
            reasons = start.throttle_reasons
            if isinstance(end.throttle_reasons, Unavailable):
                reasons = reasons if isinstance(reasons, Unavailable) else end.throttle_reasons
            elif not isinstance(reasons, Unavailable):
                sampled = self.watch.throttled_since(source.name, since)
                reasons = tuple(dict.fromkeys([*reasons, *sampled, *end.throttle_reasons]))
            found[source.name] = States(start=start, end=end, throttle_reasons=reasons)
        return found

    def _window(self, name: str, begin: _Mark, end: _Mark, states: dict[str, States]) -> Window:
        joules: dict[str, Reading] = {
            source.name: self._reading(i, begin, end) for i, source in enumerate(self.sources)
        }
        return Window(
            name=name,
            seconds=end.seconds - begin.seconds,
            joules=joules or {NO_METER: no_meter("no energy meter", self.missing)},
            parts={source.name: source.part for source in self.sources},
            states=states,
            missing=self.missing,
        )

    def _reading(self, index: int, begin: _Mark, end: _Mark) -> Reading:
        source, track = self.sources[index], self._tracks[index]
        first, last = begin.counts[index], end.counts[index]
        seconds, update = end.seconds - begin.seconds, source.update_seconds
        if isinstance(first, Unavailable):
            return first
        if isinstance(last, Unavailable):
            return last
        if first.breaks != last.breaks:
            return track.why
        if first.interval.joules == last.interval.joules or seconds <= 0:
            return Still(
                f"the counter of {source.name} did not move in {seconds:.3g} s"
                + (f": it changes every {update:.3g} s" if update else ""),
                "measure a longer window, several steps at once",
            )
        low, joules, high = (e - b for b, e in zip(first.interval, last.interval, strict=True))
        flags = [*track.flags()]
        if seconds < UPDATES_OF_A_LONG_WINDOW * update:
            flags.append(f"{seconds:.3g} s is short for a counter that changes every {update:g} s")
        # The counter is up to one update behind at both ends: late at the end it lacks some joules,
        # late at the beginning it has too many. Assumes that the power there is about the mean.
        if source.kind == "measured":
            unsure = self._likely_watts(index, joules, seconds, end) * update
            low, high = low - unsure, high + unsure
        if low > IMPLAUSIBLE_WATTS * seconds:
            return Unavailable(
                f"{source.name} says {joules / seconds:.3g} W: no machine draws that",
                "give its unit: joules_per_unit = 1e-6 for a file in microjoules",
            )
        if joules > IMPLAUSIBLE_WATTS * seconds:
            flags.append(f"{joules / seconds:.3g} W is implausible: are these joules?")
        sampled, more = power_check(begin.sampled[index], end.sampled[index], joules / seconds)
        if sampled is not None:
            low, high = min(low, sampled * seconds), max(high, sampled * seconds)
        description = getattr(source, "description", "")
        return Energy(
            joules=joules,
            low_joules=max(0.0, low),
            high_joules=high,
            kind=source.kind,
            source=f"{source.name}, {description}" if description else source.name,
            flags=(*flags, *more),
        )

    def _likely_watts(self, index: int, joules: float, seconds: float, end: _Mark) -> float:
        """Mean power over the counter's updates in the window, or of all time if that is higher."""
        update = self.sources[index].update_seconds
        if not update:
            return joules / seconds
        # A window of 9.2 updates sees 9 or 10 of them: the fewer there were, the higher the power.
        watts = joules / (update * max(1, math.ceil(seconds / update) - 1))
        begin = self._started()
        first, last, whole = begin.counts[index], end.counts[index], end.seconds - begin.seconds
        if isinstance(first, Unavailable) or isinstance(last, Unavailable):
            return watts
        if first.breaks != last.breaks or whole < update:
            return watts
        return max(watts, (last.interval.joules - first.interval.joules) / whole)


def power_check(
    begin: Snapshot | None, end: Snapshot | None, watts: float
) -> tuple[float | None, tuple[str, ...]]:
    """Compare a counter's mean power with that of the samples in its window.

    Args:
        begin: Samples before the window; None where none are taken.
        end: Samples at its end.
        watts: Mean power by the counter.

    Returns:
        Mean watts of the samples, None where they agree with the counter or too few tell; and what
        a reader must know.
    """
    if begin is None or end is None:
        return None, ()
    failed, samples = end.failures - begin.failures, end.samples - begin.samples
    flags: tuple[str, ...] = ()
    if failed:
        flags = (f"power check stopped: {failed} of {failed + samples} samples failed",)
    seconds = end.seconds - begin.seconds
    if samples < POWER_CHECK_SAMPLES or seconds <= 0:
        return None, flags
    sampled = (end.interval.joules - begin.interval.joules) / seconds
    if abs(sampled - watts) <= POWER_CHECK_TOLERANCE * watts:
        return None, flags
    disagreement = (
        f"{samples} power samples give {sampled:.4g} W, "
        f"{sampled / watts - 1:+.0%} against {watts:.4g} W of the counter "
        "(on A100 and H100 the power reading sees only 25 % of the time)"
    )
    return sampled, (*flags, disagreement)
