"""A clock plan carried out, operation by operation, on devices without hardware."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.energy.devices.replay import ReplayDevice
from outlast.energy.reading import Energy
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outlast.energy.devices.virtual import VirtualDevice
    from outlast.energy.frontier.plan import ClockPlan
    from outlast.energy.profile import Key, Profile
    from outlast.energy.reading import Kind
    from outlast.energy.schedule.dag import Schedule


@dataclass(frozen=True)
class PlanRun:
    """What one step of a plan took on virtual devices.

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
        """Whether the step met its deadline, but for rounding."""
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
            (ends_seconds[before] for before in schedule.predecessors[index]),
            default=begun_seconds,
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
