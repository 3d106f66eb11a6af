"""Devices without hardware: a protocol, virtual time, and the replay of profiles and plans."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from outlast.energy.window import DeviceState, Energy
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outlast.energy.frontier.plan import ClockPlan
    from outlast.energy.profile import Key, Point, Profile
    from outlast.energy.schedule.graph import Schedule
    from outlast.energy.window import Kind


class Device(Protocol):
    """A device that can be read: a real or a replayed one.

    Attributes:
        name: Model, in words.
        uuid: Identifier that survives reordering.
        kind: How its energies come about: "measured", "replayed" or "simulated".
        counter_seconds: How often the energy counter changes.
    """

    name: str
    uuid: str
    kind: Kind
    counter_seconds: float

    def read(self) -> DeviceState:
        """The state now. Never waits, never sets anything."""


class ClockedDevice(Device, Protocol):
    """A device whose clocks can be set. Only `outlast.energy.control` calls these."""

    def clocks_mhz(self) -> tuple[int, ...] | Unavailable:
        """Clocks that it supports, ascending."""

    def lock_clock(self, clock_mhz: int) -> None:
        """Run at this clock from now on (after the device's switch latency)."""

    def limit_power(self, watts: float) -> None:
        """Do not draw more than this from now on."""

    def unlock(self) -> None:
        """Give clock and power limit back to the driver's defaults."""


# A boundary that rounding puts a hair into the future has been reached.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Ran:
    """Time and energy of a stretch of virtual time.

    Attributes:
        seconds: Virtual time that passed.
        joules: Energy that the device drew in it.
    """

    seconds: float
    joules: float


class VirtualDevice(ClockedDevice, Protocol):
    """A clocked device with a virtual clock of its own.

    Attributes:
        now_seconds: Virtual time since the device was made.
        spent_joules: Energy since then, exact: not what its counter shows.
    """

    @property
    def now_seconds(self) -> float:
        """Virtual time since the device was made."""

    @property
    def spent_joules(self) -> float:
        """Energy since the device was made, not quantised as its counter is."""

    @property
    def target_clock_mhz(self) -> int:
        """The clock last asked for, whether or not it has come into force."""

    def run(self, key: Key) -> Ran:
        """Run one operation to its end."""

    def advance(self, seconds: float, key: Key | None = None) -> Ran:
        """Let time pass: waiting, or repeating an operation."""


class Timeline:
    """Virtual time, the energy spent in it, and a clock that changes with latency.

    Args:
        clock_mhz: In force at the beginning.
        switch_seconds: How long a newly asked clock takes to come into force.
        counter_seconds: How often the energy counter changes.

    Raises:
        EnergyError: For a negative latency or a counter that never changes.
    """

    def __init__(self, clock_mhz: int, switch_seconds: float, counter_seconds: float) -> None:
        if not switch_seconds >= 0.0:
            raise EnergyError(f"switch_seconds = {switch_seconds} is negative")
        if not counter_seconds > 0.0:
            raise EnergyError(f"counter_seconds = {counter_seconds} must be above 0")
        self.now_seconds = 0.0
        self.spent_joules = 0.0
        self.counter_joules = 0.0
        self.watts = 0.0
        self.target_clock_mhz = clock_mhz
        self._clock_mhz = clock_mhz
        self._switch_at_seconds = 0.0
        self._switch_seconds = switch_seconds
        self._counter_seconds = counter_seconds

    @property
    def clock_mhz(self) -> int:
        """The clock in force now."""
        changing = self.until_switch_seconds < math.inf
        return self._clock_mhz if changing else self.target_clock_mhz

    @property
    def until_switch_seconds(self) -> float:
        """Seconds for which the clock in force stays; infinite when no change is under way."""
        left = self._switch_at_seconds - self.now_seconds
        return left if left > _ROUNDING * max(1.0, self.now_seconds) else math.inf

    def lock(self, clock_mhz: int) -> None:
        """Ask for a clock. A later request replaces one that is not in force yet."""
        if clock_mhz == self.target_clock_mhz:
            return
        self._clock_mhz = self.clock_mhz
        self.target_clock_mhz = clock_mhz
        self._switch_at_seconds = self.now_seconds + self._switch_seconds

    def pass_time(self, seconds: float, watts: float) -> None:
        """Spend time at constant power.

        The counter shows the energy at its last update, as NVML's does: a device of today updates
        it about every 100 ms.
        """
        self.now_seconds += seconds
        self.spent_joules += seconds * watts
        if seconds > 0.0:
            self.watts = watts
        updates = math.floor(self.now_seconds / self._counter_seconds * (1.0 + _ROUNDING))
        since_seconds = max(0.0, self.now_seconds - updates * self._counter_seconds)
        if since_seconds <= seconds:
            self.counter_joules = self.spent_joules - since_seconds * watts


def checked_seconds(seconds: float) -> float:
    """A stretch of time that can pass.

    Raises:
        EnergyError: When it is negative or no finite number.
    """
    if not 0.0 <= seconds < math.inf:
        raise EnergyError(f"seconds = {seconds} cannot pass on a device; give 0 or more")
    return seconds


_NOT_PROFILED = Unavailable("a replayed profile holds only clocks, times and energies")


class ReplayDevice:
    """Runs operations in virtual time with the seconds and joules that a profile measured.

    It begins at the profile's highest clock. While a newly asked clock is not in force, an
    operation goes on at the old one: its work is shared in proportion to time.

    Args:
        profile: Time and energy of operations; also the power while the device waits.
        uuid: Identifier.
        switch_seconds: How long a newly asked clock takes to come into force.
        counter_seconds: How often the energy counter changes.

    Attributes:
        name: The profile's device.
        kind: "replayed".
    """

    kind: Kind = "replayed"

    def __init__(
        self,
        profile: Profile,
        *,
        uuid: str = "replay-0",
        switch_seconds: float = 0.0,
        counter_seconds: float = 0.1,
    ) -> None:
        clocks = {point.clock_mhz for curve in profile.curves.values() for point in curve.points}
        self._clocks_mhz = tuple(sorted(clocks - {0}))
        if not self._clocks_mhz:
            raise EnergyError("the profile has no operation with a clock: there is none to replay")
        self._profile = profile
        self.name = f"{profile.device} (replayed profile)"
        self.uuid = uuid
        self.counter_seconds = counter_seconds
        self._timeline = Timeline(self._clocks_mhz[-1], switch_seconds, counter_seconds)
        self._timeline.watts = profile.blocking_watts

    @property
    def now_seconds(self) -> float:
        """Virtual time since the device was made."""
        return self._timeline.now_seconds

    @property
    def spent_joules(self) -> float:
        """Energy since the device was made, not quantised as its counter is."""
        return self._timeline.spent_joules

    @property
    def target_clock_mhz(self) -> int:
        """The clock last asked for, whether or not it has come into force."""
        return self._timeline.target_clock_mhz

    def read(self) -> DeviceState:
        """Counter, power and clock; a profile knows nothing else."""
        return DeviceState(
            joules=self._timeline.counter_joules,
            watts=self._timeline.watts,
            sm_clock_mhz=self._timeline.clock_mhz,
            memory_clock_mhz=_NOT_PROFILED,
            celsius=_NOT_PROFILED,
            throttle_reasons=_NOT_PROFILED,
        )

    def clocks_mhz(self) -> tuple[int, ...]:
        """Clocks at which an operation was measured, ascending."""
        return self._clocks_mhz

    def lock_clock(self, clock_mhz: int) -> None:
        """Run at this clock after the switch latency.

        Raises:
            EnergyError: When the profile has no such clock; names the range that it has.
        """
        if clock_mhz not in self._clocks_mhz:
            raise EnergyError(
                f"clock = {clock_mhz} MHz is not in the profile of {self.name}, which has "
                f"{len(self._clocks_mhz)} clocks from {self._clocks_mhz[0]} to "
                f"{self._clocks_mhz[-1]} MHz"
            )
        self._timeline.lock(clock_mhz)

    def limit_power(self, watts: float) -> None:
        """Not possible.

        Raises:
            EnergyError: Always: a profile was measured under one power limit.
        """
        raise EnergyError(
            f"power limit = {watts:g} W cannot be replayed: "
            "the profile was measured under one limit"
        )

    def unlock(self) -> None:
        """Go back to the highest clock."""
        self._timeline.lock(self._clocks_mhz[-1])

    def run(self, key: Key) -> Ran:
        """Run one operation to its end.

        Raises:
            EnergyError: When the profile lacks it, or lacks it at the clock in force.
        """
        return self._work(key, operations=1.0, seconds=float("inf"))

    def advance(self, seconds: float, key: Key | None = None) -> Ran:
        """Let time pass: waiting at the blocking power, or repeating an operation.

        Raises:
            EnergyError: For a negative time, or an operation that the profile lacks.
        """
        seconds = checked_seconds(seconds)
        if key is not None:
            return self._work(key, operations=float("inf"), seconds=seconds)
        self._timeline.pass_time(seconds, self._profile.blocking_watts)
        return Ran(seconds, seconds * self._profile.blocking_watts)

    def _work(self, key: Key, *, operations: float, seconds: float) -> Ran:
        """Until so many operations are done, or so much time has passed."""
        begun_seconds, begun_joules = self.now_seconds, self.spent_joules
        while operations > 0.0 and seconds > 0.0:
            point = self._point(key)
            left = operations * point.seconds
            span = min(left, seconds, self._timeline.until_switch_seconds)
            self._timeline.pass_time(span, point.joules / point.seconds)
            operations = 0.0 if span == left else operations - span / point.seconds
            seconds -= span
        return Ran(self.now_seconds - begun_seconds, self.spent_joules - begun_joules)

    def _point(self, key: Key) -> Point:
        curve = self._profile.curve(key)
        point = curve.top if curve.top.clock_mhz == 0 else curve.at(self._timeline.clock_mhz)
        if not point.seconds > 0.0:
            raise EnergyError(
                f"stage {key.stage} {key.phase} takes {point.seconds} s at {point.clock_mhz} MHz "
                "in the profile: an operation that is replayed must take time"
            )
        return point


@dataclass(frozen=True)
class PlanRun:
    """Time and energy of one step of a plan on virtual devices.

    Attributes:
        seconds: From the beginning to the end of the last operation.
        deadline_seconds: What the plan was made for.
        device_joules: (devices,) energy of each from the beginning to the deadline, or to the end
            of a step that is late; waiting included.
        switches: Clock changes on all devices in the step.
        kind: "replayed" or "simulated": never measured.
        source: The devices, in words.
    """

    seconds: float
    deadline_seconds: float
    device_joules: tuple[float, ...]
    switches: int
    kind: Kind
    source: str

    @property
    def joules(self) -> float:
        """Energy of all devices."""
        return math.fsum(self.device_joules)

    @property
    def on_time(self) -> bool:
        """True if the step met its deadline, but for rounding."""
        return self.seconds <= self.deadline_seconds * (1 + 1e-9)

    @property
    def energy(self) -> Energy:
        """As a reading with its kind; the interval is that of one run."""
        late = () if self.on_time else (f"{self.seconds - self.deadline_seconds:.3g} s too late",)
        return Energy(
            joules=self.joules,
            low_joules=self.joules,
            high_joules=self.joules,
            kind=self.kind,
            source=self.source,
            flags=late,
        )


def replay_plan(
    plan: ClockPlan,
    schedule: Schedule,
    devices: Sequence[VirtualDevice],
    *,
    link_seconds: Mapping[Key, float] | None = None,
    steps: int = 2,
) -> PlanRun:
    """Run steps of a plan one after the other and return the last one.

    A device waits at its blocking power until all predecessors of its next operation have ended,
    then asks for that operation's clock if it differs from the one asked for last, and runs it: the
    old clock stays in force for the switch latency. Steps begin together.

    Args:
        plan: A clock for every operation of the schedule.
        schedule: The operations.
        devices: One for each of the schedule's.
        link_seconds: Durations of the operations on links (device -1), which draw nothing.
        steps: How many to run; the ones before the last leave clocks and heat as in a long run.

    Raises:
        EnergyError: When plan, schedule and devices do not fit each other, or a duration is
            missing.
    """
    _check(plan, schedule, devices, steps)
    for _ in range(steps):
        result = _step(plan, schedule, devices, link_seconds or {})
    return result


def replay_profile(
    plan: ClockPlan, schedule: Schedule, profile: Profile, *, switch_seconds: float = 0.0
) -> PlanRun:
    """Run a plan on devices that repeat one profile: what ``outlast energy replay`` shows.

    Args:
        plan: A clock for every operation of the schedule.
        schedule: The operations.
        profile: Of every stage; it gives the durations of links too.
        switch_seconds: How long a newly asked clock takes to come into force.

    Raises:
        EnergyError: As for `replay_plan`.
    """
    devices = [
        ReplayDevice(profile, uuid=f"replay-{index}", switch_seconds=switch_seconds)
        for index in range(schedule.devices)
    ]
    links = {operation.key for operation in schedule.operations if operation.device < 0}
    seconds = {key: profile.curve(key).top.seconds for key in links}
    return replay_plan(plan, schedule, devices, link_seconds=seconds)


def _step(
    plan: ClockPlan,
    schedule: Schedule,
    devices: Sequence[VirtualDevice],
    link_seconds: Mapping[Key, float],
) -> PlanRun:
    begun_seconds = max(device.now_seconds for device in devices)
    for device in devices:
        device.advance(begun_seconds - device.now_seconds)
    begun_joules = [device.spent_joules for device in devices]
    ends_seconds = [0.0] * len(schedule.operations)
    switches = 0
    for index in schedule.order:
        operation = schedule.operations[index]
        ready_seconds = max(
            (ends_seconds[before] for before in schedule.predecessors[index]), default=begun_seconds
        )
        if operation.device < 0:
            ends_seconds[index] = ready_seconds + _link(operation.key, link_seconds)
            continue
        device = devices[operation.device]
        device.advance(max(0.0, ready_seconds - device.now_seconds))
        clock_mhz = plan.clocks_mhz[index]
        if clock_mhz and clock_mhz != device.target_clock_mhz:
            device.lock_clock(clock_mhz)
            switches += 1
        device.run(operation.key)
        ends_seconds[index] = device.now_seconds
    seconds = max(ends_seconds, default=begun_seconds) - begun_seconds
    for device in devices:
        left = begun_seconds + max(seconds, plan.deadline_seconds) - device.now_seconds
        device.advance(max(0.0, left))
    return PlanRun(
        seconds=seconds,
        deadline_seconds=plan.deadline_seconds,
        device_joules=tuple(
            device.spent_joules - before
            for device, before in zip(devices, begun_joules, strict=True)
        ),
        switches=switches,
        kind="simulated" if any(device.kind == "simulated" for device in devices) else "replayed",
        source="clock plan on " + ", ".join(sorted({device.name for device in devices})),
    )


def _link(key: Key, link_seconds: Mapping[Key, float]) -> float:
    if key not in link_seconds:
        raise EnergyError(
            f"link_seconds has no stage {key.stage} {key.phase}, which the schedule sends over a "
            "link: give its duration"
        )
    return link_seconds[key]


def _check(
    plan: ClockPlan, schedule: Schedule, devices: Sequence[VirtualDevice], steps: int
) -> None:
    if len(plan.clocks_mhz) != len(schedule.operations):
        raise EnergyError(
            f"the plan has clocks for {len(plan.clocks_mhz)} operations, but the schedule has "
            f"{len(schedule.operations)}: replay it with the schedule that it was made for"
        )
    if len(devices) != schedule.devices or not devices:
        raise EnergyError(
            f"the schedule needs {schedule.devices} devices, but {len(devices)} are given"
        )
    if steps < 1:
        raise EnergyError(f"steps = {steps} is below 1")
