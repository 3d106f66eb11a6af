"""What was measured of a training step that ran."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.errors import EnergyError

if TYPE_CHECKING:
    from outlast.energy.schedule.dag import Schedule


@dataclass(frozen=True)
class ExecutedStep:
    """A step, operation by operation.

    Attributes:
        operation_seconds: (operations,) in the schedule's order.
        step_seconds: Of the whole step, the end included.
        clocks_mhz: (operations,) clocks asked for; 0 for operations without one. Empty where only
            time matters.
        joules: (devices,) energy of the step; empty where only time matters.
    """

    operation_seconds: tuple[float, ...]
    step_seconds: float
    clocks_mhz: tuple[float, ...] = ()
    joules: tuple[float, ...] = ()

    def check(self, schedule: Schedule, name: str) -> None:
        """Refuse what cannot be the measurement of this schedule.

        Raises:
            EnergyError: For another number of operations or devices, negative or infinite figures
                and NaN.
        """
        for what, values, count in (
            ("operation_seconds", self.operation_seconds, len(schedule.operations)),
            ("clocks_mhz", self.clocks_mhz, len(schedule.operations)),
            ("joules", self.joules, schedule.devices),
        ):
            if values and len(values) != count:
                raise EnergyError(
                    f"{name} has {len(values)} {what}, but its schedule has {count}: they must be "
                    "measured on the same schedule"
                )
            for value in values:
                if not (math.isfinite(value) and value >= 0):
                    raise EnergyError(f"{name} has {what} = {value}; measure it again")
        if not (math.isfinite(self.step_seconds) and self.step_seconds > 0):
            raise EnergyError(f"{name} has step_seconds = {self.step_seconds}; measure it again")
        if len(self.operation_seconds) != len(schedule.operations):
            raise EnergyError(f"{name} has no operation_seconds; measure them")
