"""All that a calibration says: of the time of a step, and of the memory of each framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outlast.plan.calibration.calibrated import Calibration
from outlast.plan.calibration.device_memory import device_memory_of
from outlast.plan.calibration.step_model import StepModel
from outlast.plan.calibration.stored import step_model_of
from outlast.plan.memory.fit import MemoryFit

OUTLAST = "outlast"
COMPILED = "outlast compiled"
"""Names of our own runs, as calibrations count: compiled steps take less time and memory."""


@dataclass(frozen=True)
class Known:
    """A calibration as the model uses it.

    Attributes:
        step: Of the time.
        memory: Constants of the memory of devices, by framework.
    """

    step: StepModel
    memory: Mapping[str, MemoryFit] = field(default_factory=dict)

    def times(self, framework: str) -> bool:
        """Whether runs of a framework have taught its time."""
        columns = self.step.constants.columns
        return any(column.level == "framework" and column.group == framework for column in columns)


def known_of(calibration: Calibration) -> Known:
    """What a calibration file says.

    Raises:
        PlanError: It has constants that this version does not know, or lacks some.
    """
    return Known(step_model_of(calibration), device_memory_of(calibration))
