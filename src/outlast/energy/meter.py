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

from outlast.energy.reading import Energy
from outlast.energy.sources.available import available_sources
from outlast.energy.sources.optional import Described, Flagged, Interval, WithInterval, WithState
from outlast.energy.sources.watch import Watch
from outlast.energy.window import NO_METER, States, Window, no_meter
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from outlast.energy.devices.protocol import DeviceState
    from outlast.energy.reading import Reading
    from outlast.energy.sources.protocol import Part, Source

UPDATES_OF_A_LONG_WINDOW = 10
"""A window of fewer updates of its counter is flagged: one update is over 10 % of it."""

POWER_CHECK_SAMPLES = 25
POWER_CHECK_TOLERANCE = 0.1
"""Integrated power of so many samples may differ so much from the counter without a flag."""


class _Sampled(NamedTuple):
    joules: float
    seconds: float
    samples: int


class _Mark(NamedTuple):
    seconds: float
    counts: tuple[Interval | Unavailable, ...]
    sampled: tuple[_Sampled | None, ...]


class EnergyMeter:
    """Measures from entering its `with` statement to leaving it.

    Counters are only read, so that meters may stand inside and beside each other. The lengths are
    by a monotonic clock. Nothing waits for the GPU: synchronise before a window's ends where the
    work inside it must be complete.

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
        # Asked once: isinstance with a protocol takes longer than reading a counter.
        self._counts = tuple(_counter(source) for source in self.sources)
        self._flagged = tuple(
            source if isinstance(source, Flagged) else None for source in self.sources
        )
        self._described = tuple(
            f"{source.name}, {source.description}" if isinstance(source, Described) else source.name
            for source in self.sources
        )
        self.watch = Watch(self.sources, power_check_seconds, clock)
        self._begin: _Mark | None = None
        self._last: _Mark | None = None
        self._states: tuple[DeviceState | None, ...] = ()
        self._closed: Window | None = None

    def inner(self, name: str) -> EnergyMeter:
        """A meter of a part of this one's window: the same counters and the same thread."""
        meter = EnergyMeter(name, self.sources, power_check_seconds=None, clock=self._clock)
        meter.missing, meter.watch = self.missing, self.watch
        return meter

    def __enter__(self) -> Self:
        if self._begin is not None:
            raise EnergyError(f'the meter "{self.name}" was used before: make a new one')
        self._states = self._read_states()
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
        sampled = tuple(None if one is None else _Sampled(*one.snapshot()) for one in integrals)
        counts = tuple(count() for count in self._counts)
        return _Mark(self._clock(), counts, sampled)

    def _read_states(self) -> tuple[DeviceState | None, ...]:
        return tuple(
            source.state() if isinstance(source, WithState) else None for source in self.sources
        )

    def _states_until_now(self) -> dict[str, States]:
        begin = self._started().seconds
        both = zip(self.sources, self._states, self._read_states(), strict=True)
        return {
            source.name: _states(start, end, self.watch.throttled_since(source.name, begin))
            for source, start, end in both
            if start is not None and end is not None
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
        used = _difference(source, begin.counts[index], end.counts[index], seconds)
        if isinstance(used, Unavailable):
            return used
        low, joules, high = used
        flagged = self._flagged[index]
        flags = () if flagged is None else flagged.flags
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
        check = _power_check(begin.sampled[index], end.sampled[index], joules / seconds)
        if check is not None:
            flags = (*flags, check.flag)
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
        if isinstance(first, Unavailable) or isinstance(last, Unavailable) or whole < update:
            return watts
        return max(watts, (last.joules - first.joules) / whole)


class _Check(NamedTuple):
    watts: float
    flag: str


def _counter(source: Source) -> Callable[[], Interval | Unavailable]:
    if isinstance(source, WithInterval):
        return source.interval

    def exact() -> Interval | Unavailable:
        joules = source.joules()
        return joules if isinstance(joules, Unavailable) else Interval(joules, joules, joules)

    return exact


def _difference(
    source: Source, begin: Interval | Unavailable, end: Interval | Unavailable, seconds: float
) -> Interval | Unavailable:
    if isinstance(begin, Unavailable):
        return begin
    if isinstance(end, Unavailable):
        return end
    if end.joules < begin.joules:
        return Unavailable(f"the counter of {source.name} fell: it was reset", "measure again")
    if end.joules == begin.joules or seconds <= 0:
        return Unavailable(
            f"the counter of {source.name} did not move in {seconds:.3g} s"
            + (f": it changes every {source.update_seconds:g} s" if source.update_seconds else ""),
            "measure a longer window, several steps at once",
        )
    return Interval(*(last - first for first, last in zip(begin, end, strict=True)))


def _power_check(begin: _Sampled | None, end: _Sampled | None, watts: float) -> _Check | None:
    """Compares the counter's mean power with that of the samples; None where they agree."""
    if begin is None or end is None or end.samples - begin.samples < POWER_CHECK_SAMPLES:
        return None
    sampled = (end.joules - begin.joules) / (end.seconds - begin.seconds)
    if abs(sampled - watts) <= POWER_CHECK_TOLERANCE * watts:
        return None
    return _Check(
        sampled,
        f"{end.samples - begin.samples} power samples give {sampled:.4g} W, "
        f"{sampled / watts - 1:+.0%} against {watts:.4g} W of the counter "
        "(on A100 and H100 the power reading sees only 25 % of the time)",
    )


def _states(start: DeviceState, end: DeviceState, sampled: tuple[str, ...]) -> States:
    ends = [start.throttle_reasons, end.throttle_reasons]
    missing = [reasons for reasons in ends if isinstance(reasons, Unavailable)]
    if missing:
        return States(start=start, end=end, throttle_reasons=missing[0])
    known = [reasons for reasons in ends if not isinstance(reasons, Unavailable)]
    every = dict.fromkeys([*known[0], *sampled, *known[-1]])
    return States(start=start, end=end, throttle_reasons=tuple(every))
