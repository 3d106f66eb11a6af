"""One source as a meter reads it: nothing that it raises gets through, no fall is forgotten."""

from __future__ import annotations

import math
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from outlast.energy.replay import DeviceState
from outlast.energy.sources.protocol import (
    Flagged,
    Interruptible,
    Interval,
    Polled,
    WithInterval,
    WithPower,
    WithState,
)
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outlast.energy.sources.protocol import Part, Source
    from outlast.energy.window import Kind


SHORTEST_PERIOD_SECONDS = 0.1


"""NVML renews its power reading no faster; asking more often costs and tells nothing."""


# nvml.h, nvmlDeviceGetPowerUsage: +-5 % on older GPUs; it states none for newer ones.
_SENSOR_ERROR = 0.05


class Snapshot(NamedTuple):
    """Sums of an integral at one moment.

    Attributes:
        joules: Without those of the gaps around failed samples.
        seconds: Likewise.
        samples: Those that gave a power.
        failures: Those that gave none.
    """

    joules: float
    seconds: float
    samples: int
    failures: int


class PowerIntegral:
    """The trapezoid rule over power samples; one sample at each read.

    Its interval takes the lower and the higher of two neighbouring samples over each gap, and the
    sensor's error. What the power does between two samples is not seen. A failed sample leaves a
    gap that is not counted; `losses` says how many gaps there are.

    Args:
        name: Unique in a meter.
        part: What it measures.
        watts: Gives the power now.
        period_seconds: How often it wants to be read.
        clock: Monotonic seconds.

    Raises:
        EnergyError: The period is shorter than power readings are renewed.
    """

    kind: Kind = "modelled"

    def __init__(
        self,
        name: str,
        part: Part,
        watts: Callable[[], float | Unavailable],
        *,
        period_seconds: float = SHORTEST_PERIOD_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not period_seconds >= SHORTEST_PERIOD_SECONDS:
            raise EnergyError(
                f"a power sampling period of {period_seconds} s is too short: take at least "
                f"{SHORTEST_PERIOD_SECONDS} s"
            )
        self.name = name
        self.part: Part = part
        self.update_seconds = self.poll_seconds = period_seconds
        self._watts = watts
        self._clock = clock
        self._lock = threading.Lock()
        self._last: tuple[float, float] | None = None
        self._sum = Interval(0.0, 0.0, 0.0)
        self._longest_gap_seconds = 0.0
        self.sampled_seconds = 0.0
        self.samples = 0
        self.losses = 0
        self.failures = 0
        self.failure: Unavailable | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """Notes on the origin of the figure, and gaps between samples."""
        made: tuple[str, ...] = ("power integrated over time: no energy counter",)
        if self.failures:
            made = (*made, f"{self.failures} power samples failed")
        if self._longest_gap_seconds <= 10 * self.poll_seconds:
            return made
        return (*made, f"no power sample for up to {self._longest_gap_seconds:.1f} s")

    def joules(self) -> float | Unavailable:
        """Takes a sample; joules since the first one."""
        interval = self.interval()
        return interval if isinstance(interval, Unavailable) else interval.joules

    def interval(self) -> Interval | Unavailable:
        """Takes a sample; joules since the first one with their interval.

        A failed sample is Unavailable: the power around it is not known, and counting goes on with
        the next one that succeeds.
        """
        # Outside the lock, so that nobody waits for the driver in `snapshot`.
        watts = asked(self.name, self._checked_watts)
        with self._lock:
            now = self._clock()
            if isinstance(watts, Unavailable):
                if self._last is not None:
                    self.losses += 1
                self._last, self.failure = None, watts
                self.failures += 1
                return watts
            if self._last is not None:
                self._add(*self._last, now, watts)
            self._last = (now, watts)
            self.samples += 1
            return self._sum

    def _checked_watts(self) -> float | Unavailable:
        watts = self._watts()
        if isinstance(watts, Unavailable) or 0 <= watts < math.inf:
            return watts
        return Unavailable(f"the power of {self.name} reads {watts} W")

    def _add(self, before: float, before_watts: float, now: float, now_watts: float) -> None:
        gap = now - before
        low, high = min(before_watts, now_watts), max(before_watts, now_watts)
        self._sum = Interval(
            self._sum.low_joules + low * (1 - _SENSOR_ERROR) * gap,
            self._sum.joules + (before_watts + now_watts) / 2 * gap,
            self._sum.high_joules + high * (1 + _SENSOR_ERROR) * gap,
        )
        self.sampled_seconds += gap
        self._longest_gap_seconds = max(self._longest_gap_seconds, gap)

    def snapshot(self) -> Snapshot:
        """Sums so far, without a new sample."""
        with self._lock:
            return Snapshot(self._sum.joules, self.sampled_seconds, self.samples, self.failures)


Value = TypeVar("Value")


class Count(NamedTuple):
    """Reading of a source's counter.

    Attributes:
        interval: Joules since the source's beginning.
        breaks: How often it had lost count by then: counts of unequal `breaks` have no difference.
    """

    interval: Interval
    breaks: int


def asked(name: str, read: Callable[[], Value | Unavailable]) -> Value | Unavailable:
    """Result of `read`; whatever it raises becomes the reason, so that the program continues."""
    try:
        return read()
    except Exception as error:  # a meter must never end what it measures
        return Unavailable(f"{name} cannot be read ({type(error).__name__}: {error})")


def state_of(source: Source) -> DeviceState | None:
    """The state of a source's device, with reasons where it fails; None where it shows none."""
    if not isinstance(source, WithState):
        return None
    state: DeviceState | Unavailable = asked(source.name, source.state)
    if not isinstance(state, Unavailable):
        return state
    return DeviceState(
        joules=state,
        watts=state,
        sm_clock_mhz=state,
        memory_clock_mhz=state,
        celsius=state,
        throttle_reasons=state,
    )


def shown_state(source: Source) -> DeviceState:
    """State for an exporter: of a source's device, or of a bare counter its joules."""
    state = state_of(source)
    if state is not None:
        return state
    joules: float | Unavailable = asked(source.name, source.joules)
    none = Unavailable(f"{source.name} is a counter of joules only")
    return DeviceState(
        joules=joules,
        watts=none,
        sm_clock_mhz=none,
        memory_clock_mhz=none,
        celsius=none,
        throttle_reasons=none,
    )


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
        # Asked once: isinstance with a protocol takes longer than reading a counter.
        self._read = source.interval if isinstance(source, WithInterval) else self._exact
        self._flagged = source if isinstance(source, Flagged) else None
        self._interruptible = source if isinstance(source, Interruptible) else None
        self._power = source if isinstance(source, WithPower) else None
        self._state = source if isinstance(source, WithState) else None
        # Held over the read: two threads that note in another order than they read see a fall.
        self._lock = threading.Lock()
        self._last: float | None = None
        self._falls = 0
        self._lost = self._losses()

    def count(self) -> Count | Unavailable:
        """The counter now."""
        with self._lock:
            found = asked(self.source.name, self._checked)
            if isinstance(found, Unavailable) and self._losses() != self._lost:
                # It began anew: its next count is the first of those that can be compared.
                self.why, self._lost = found, self._losses()
                found = asked(self.source.name, self._checked)
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
        if self._flagged is None:
            return ()
        source = self._flagged
        found = asked(self.source.name, lambda: tuple(source.flags))
        return (found.reason,) if isinstance(found, Unavailable) else found

    def watts(self) -> float | Unavailable:
        """Power now."""
        if self._power is None:
            return Unavailable(f"{self.source.name} shows no power")
        return asked(self.source.name, self._power.watts)

    def throttle_reasons(self) -> tuple[str, ...] | Unavailable:
        """Why the clock is below the one asked for."""
        if self._state is None:
            return Unavailable(f"{self.source.name} shows no state")
        return asked(self.source.name, self._state.throttle_reasons)

    def _losses(self) -> int:
        return 0 if self._interruptible is None else self._interruptible.losses

    def _exact(self) -> Interval | Unavailable:
        joules = self.source.joules()
        return joules if isinstance(joules, Unavailable) else Interval(joules, joules, joules)

    def _checked(self) -> Interval | Unavailable:
        found = self._read()
        if isinstance(found, Unavailable) or all(math.isfinite(joules) for joules in found):
            return found
        return Unavailable(f"{self.source.name} says {found.joules} J")


POWER_CHECK_SAMPLES = 25


POWER_CHECK_TOLERANCE = 0.1


"""Integrated power of so many samples may differ so much from the counter without a flag."""


IMPLAUSIBLE_WATTS = 1e6


"""More than any rack draws."""


class Check(NamedTuple):
    """Judgement of a counter by the power samples of a window.

    Attributes:
        watts: Mean of the samples; None where it agrees with the counter or too few tell.
        flags: What a reader must know.
    """

    watts: float | None
    flags: tuple[str, ...]


def power_check(begin: Snapshot | None, end: Snapshot | None, watts: float) -> Check:
    """Compares a counter's mean power with that of the samples in its window.

    Args:
        begin: Samples before the window; None where none are taken.
        end: Samples at its end.
        watts: Mean power by the counter.
    """
    if begin is None or end is None:
        return Check(None, ())
    failed, samples = end.failures - begin.failures, end.samples - begin.samples
    flags: tuple[str, ...] = ()
    if failed:
        flags = (f"power check stopped: {failed} of {failed + samples} samples failed",)
    seconds = end.seconds - begin.seconds
    if samples < POWER_CHECK_SAMPLES or seconds <= 0:
        return Check(None, flags)
    sampled = (end.joules - begin.joules) / seconds
    if abs(sampled - watts) <= POWER_CHECK_TOLERANCE * watts:
        return Check(None, flags)
    disagreement = (
        f"{samples} power samples give {sampled:.4g} W, "
        f"{sampled / watts - 1:+.0%} against {watts:.4g} W of the counter "
        "(on A100 and H100 the power reading sees only 25 % of the time)"
    )
    return Check(sampled, (*flags, disagreement))


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
