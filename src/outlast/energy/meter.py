"""Joules of a piece of a program, per device, by the meters of this machine.

with EnergyMeter() as meter:
    for batch in data:
        train(batch)
        print(meter.lap().total("gpu"))   # Energy with its interval, or Unavailable with its reason
print(meter.joules, meter.seconds)
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple, Self

from outlast.energy.sources.available import available_sources
from outlast.energy.sources.protocol import Described, Interval
from outlast.energy.sources.track import IMPLAUSIBLE_WATTS, Track, Watch, power_check, state_of
from outlast.energy.window import NO_METER, Energy, States, Still, Window, no_meter
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from outlast.energy.replay import DeviceState
    from outlast.energy.sources.protocol import Part, Source
    from outlast.energy.sources.track import Count, Snapshot
    from outlast.energy.window import Reading

UPDATES_OF_A_LONG_WINDOW = 10
"""A window of fewer updates of its counter is flagged: one update is over 10 % of it."""


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
        self._described = tuple(
            f"{source.name}, {source.description}" if isinstance(source, Described) else source.name
            for source in self.sources
        )
        self.watch = Watch(self._tracks, power_check_seconds, clock)
        self._begin: _Mark | None = None
        self._last: _Mark | None = None
        self._states: tuple[DeviceState | None, ...] = ()
        self._lap_states: tuple[DeviceState | None, ...] = ()
        self._lap_states_seconds = 0.0
        self._closed: Window | None = None

    def inner(self, name: str) -> EnergyMeter:
        """A meter of a part of this one's window: the same counters and the same thread."""
        meter = EnergyMeter(name, self.sources, power_check_seconds=None, clock=self._clock)
        meter.missing, meter.watch, meter._tracks = self.missing, self.watch, self._tracks
        return meter

    def __enter__(self) -> Self:
        if self._begin is not None:
            raise EnergyError(f'the meter "{self.name}" was used before: make a new one')
        self._states = self._lap_states = self._read_states()
        self.watch.open()
        self._begin = self._last = self._mark()
        self._lap_states_seconds = self._begin.seconds
        return self

    def __exit__(self, *_: object) -> None:
        end = self._mark()
        self.watch.close()
        self._closed = self._window(self.name, self._started(), end, self._states_until_now())

    def lap(self, name: str = "lap", *, states: bool = False) -> Window:
        """Energy since the last lap, or since the beginning. Costs one read of each counter.

        Args:
            name: Of the lap.
            states: Also read temperature, clocks and throttle reasons, since the last lap that did
                so or the beginning. Takes several times as long.
        """
        if self._last is None or self._closed is not None:
            raise EnergyError(f'the meter "{self.name}" has no laps outside its with statement')
        begin, self._last = self._last, self._mark()
        if not states:
            return self._window(name, begin, self._last, {})
        start, self._lap_states = self._lap_states, self._read_states()
        since, self._lap_states_seconds = self._lap_states_seconds, self._last.seconds
        found = self._states_between(start, self._lap_states, since)
        return self._window(name, begin, self._last, found)

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

    @property
    def states(self) -> Mapping[str, States]:
        """Temperature, clocks and throttle reasons at the beginning and now, or at the end."""
        return self.read().states

    def total(self, part: Part | None = None) -> Reading:
        """The sum over the devices of a part so far: see `Window.total`."""
        return self._so_far().total(part)

    def _so_far(self) -> Window:
        if self._closed is not None:
            return self._closed
        return self._window(self.name, self._started(), self._mark(), {})

    def _started(self) -> _Mark:
        if self._begin is None:
            raise EnergyError(f'the meter "{self.name}" is not open: use it in a with statement')
        return self._begin

    def _mark(self) -> _Mark:
        integrals = (self.watch.integral(source.name) for source in self.sources)
        sampled = tuple(None if one is None else one.snapshot() for one in integrals)
        counts = tuple(track.count() for track in self._tracks)
        return _Mark(self._clock(), counts, sampled)

    def _read_states(self) -> tuple[DeviceState | None, ...]:
        return tuple(map(state_of, self.sources))

    def _states_until_now(self) -> dict[str, States]:
        return self._states_between(self._states, self._read_states(), self._started().seconds)

    def _states_between(
        self,
        start: Sequence[DeviceState | None],
        end: Sequence[DeviceState | None],
        since_seconds: float,
    ) -> dict[str, States]:
        return {
            source.name: _states(
                first, last, self.watch.throttled_since(source.name, since_seconds)
            )
            for source, first, last in zip(self.sources, start, end, strict=True)
            if first is not None and last is not None
        }

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
        source = self.sources[index]
        seconds = end.seconds - begin.seconds
        used = _difference(self._tracks[index], begin.counts[index], end.counts[index], seconds)
        if isinstance(used, Unavailable):
            return used
        low, joules, high = used
        flags = self._tracks[index].flags()
        update = source.update_seconds
        if seconds < UPDATES_OF_A_LONG_WINDOW * update:
            flags = (
                *flags,
                f"{seconds:.3g} s is short for a counter that changes every {update:g} s",
            )
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
            flags = (*flags, f"{joules / seconds:.3g} W is implausible: are these joules?")
        check = power_check(begin.sampled[index], end.sampled[index], joules / seconds)
        flags = (*flags, *check.flags)
        if check.watts is not None:
            low, high = min(low, check.watts * seconds), max(high, check.watts * seconds)
        return Energy(
            joules=joules,
            low_joules=max(0.0, low),
            high_joules=high,
            kind=source.kind,
            source=self._described[index],
            flags=flags,
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


def _difference(
    track: Track, begin: Count | Unavailable, end: Count | Unavailable, seconds: float
) -> Interval | Unavailable:
    if isinstance(begin, Unavailable):
        return begin
    if isinstance(end, Unavailable):
        return end
    if end.breaks != begin.breaks:
        return track.why
    if end.interval.joules == begin.interval.joules or seconds <= 0:
        update = track.source.update_seconds
        return Still(
            f"the counter of {track.source.name} did not move in {seconds:.3g} s"
            + (f": it changes every {update:.3g} s" if update else ""),
            "measure a longer window, several steps at once",
        )
    return Interval(*(e - b for b, e in zip(begin.interval, end.interval, strict=True)))


def _states(start: DeviceState, end: DeviceState, sampled: tuple[str, ...]) -> States:
    ends = [start.throttle_reasons, end.throttle_reasons]
    missing = [reasons for reasons in ends if isinstance(reasons, Unavailable)]
    if missing:
        return States(start=start, end=end, throttle_reasons=missing[0])
    known = [reasons for reasons in ends if not isinstance(reasons, Unavailable)]
    every = dict.fromkeys([*known[0], *sampled, *known[-1]])
    return States(start=start, end=end, throttle_reasons=tuple(every))
