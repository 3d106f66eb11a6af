"""A plan with a clock per operation, played while the step runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.energy.frontier.plan import ClockPlan
    from outlast.energy.schedule.dag import Schedule


class Clock(Protocol):
    """What a playback needs: a controller, or better the handle of `applied`, which gives back."""

    def lock_clock(self, clock_mhz: int, /) -> object:
        """Run at this clock from now on."""


class ClockPlayback:
    """Sets the clock of one device when an operation begins, if it is not the one in force.

    It never synchronises with the device: that would change what it controls. The host runs ahead
    of the device, so a clock comes into force some kernels early.

    Lowering the clock soon after another change is held back, since it costs a switch and saves
    little; raising it never is, since the deadline may depend on it. Every operation thus runs at
    its planned clock or above.

    Args:
        plan: A clock for every operation.
        schedule: The operations.
        clock: Sets the clock.
        device: Which of the schedule's devices this is.
        dwell_seconds: How long a clock stays before it is lowered.
        now: Seconds on a clock that never goes back.

    Attributes:
        switches: How often the clock was set.
        held_back: How often it was not lowered because of the dwell.

    Raises:
        EnergyError: When the plan is not of this schedule, or has no clock for the device.
    """

    def __init__(
        self,
        plan: ClockPlan,
        schedule: Schedule,
        clock: Clock,
        device: int,
        *,
        dwell_seconds: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if len(plan.clocks_mhz) != len(schedule.operations):
            raise EnergyError(
                f"the plan has clocks for {len(plan.clocks_mhz)} operations, but the schedule has "
                f"{len(schedule.operations)}: play it with the schedule that it was made for"
            )
        self._clocks_mhz = {
            (operation.stage, operation.phase, operation.microbatch): clock_mhz
            for operation, clock_mhz in zip(schedule.operations, plan.clocks_mhz, strict=True)
            if operation.device == device
        }
        if not any(self._clocks_mhz.values()):
            raise EnergyError(f"device = {device} has no operation with a clock in the plan")
        self._stages = sorted({stage for stage, _, _ in self._clocks_mhz})
        self._device = device
        self._clock = clock
        self._dwell_seconds = dwell_seconds
        self._now = now
        self._in_force_mhz: int | None = None
        self._changed_at_seconds = 0.0
        self.switches = 0
        self.held_back = 0

    def on_operation(self, phase: str, microbatch: int, stage: int | None = None) -> None:
        """To be called just before an operation is launched.

        Args:
            phase: As in the schedule.
            microbatch: From 0; -1 for what happens once per step.
            stage: Needed only where the device has several (interleaved schedules).

        Raises:
            EnergyError: When the plan has no such operation on this device.
        """
        if stage is None:
            if len(self._stages) > 1:
                raise EnergyError(
                    f"device {self._device} has stages {self._stages}: say which one begins"
                )
            stage = self._stages[0]
        clock_mhz = self._clocks_mhz.get((stage, phase, microbatch))
        if clock_mhz is None:
            raise EnergyError(
                f"the plan has no {phase} of microbatch {microbatch} in stage {stage} on device "
                f"{self._device}: it was made for another schedule"
            )
        if clock_mhz and clock_mhz != self._in_force_mhz:
            self._change(clock_mhz)

    def _change(self, clock_mhz: int) -> None:
        now_seconds = self._now()
        lowered = self._in_force_mhz is not None and clock_mhz < self._in_force_mhz
        if lowered and now_seconds - self._changed_at_seconds < self._dwell_seconds:
            self.held_back += 1
            return
        self._clock.lock_clock(clock_mhz)
        self._in_force_mhz = clock_mhz
        self._changed_at_seconds = now_seconds
        self.switches += 1
