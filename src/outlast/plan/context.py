"""Context of a prediction, shared by all its candidates."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outlast.errors import PlanError
from outlast.plan.calibration.fit import Belonging
from outlast.plan.constraints import CALIBRATED_AS, KEYS
from outlast.plan.reliability.recovery import Restart

if TYPE_CHECKING:
    from outlast.coding.delays import DelayModel
    from outlast.energy.model import DeviceConstants
    from outlast.plan.calibration.memory_fit import MemoryFit
    from outlast.plan.calibration.step_model import StepModel
    from outlast.plan.cluster import Cluster
    from outlast.plan.configuration import Configuration
    from outlast.plan.transformer import Transformer


def calibrated_as(framework: str) -> str:
    """The name under which runs of a framework are calibrated: an unknown one's own."""
    key = KEYS.get(framework.casefold(), framework)
    return CALIBRATED_AS.get(key, key)


@dataclass(frozen=True, kw_only=True)
class Context:
    """The job, the machines, and what is known of both.

    Attributes:
        model: What is trained.
        cluster: On what.
        step: The calibration.
        tokens: Of the whole training.
        baseline: The run whose steps are counted and whose precision losses are compared with, at
            equal data; its division of the work does not count.
        framework: Software that trains.
        timed_as: Name under which the time of such runs was calibrated; empty for that of the
            framework.
        unique_tokens: Different ones in the data; infinite where nothing repeats.
        deadline_seconds: Wall time within which the run should be finished; None without one.
        restart: The way back after a stop; spares are the cluster's.
        delays: How late workers are; None where nobody knows, so that coding gains nothing.
        clocks: Power and time constants of the device; None where nobody fitted them.
        memory: Fitted constants of the memory model; None for the priors.
        memory_elsewhere: They are of published runs on other clusters.
        busy_watts: What a busy device was measured to draw; None for the prior.
        commits_without: A gradient code commits a step without the chunks that were lost; else
            they are computed again and the gradient is exact.
        unmapped: What of a job is no part of the prediction, a sentence each.
    """

    model: Transformer
    cluster: Cluster
    step: StepModel
    tokens: float
    baseline: Configuration
    framework: str = "outlast"
    timed_as: str = ""
    unique_tokens: float = math.inf
    deadline_seconds: float | None = None
    restart: Restart = field(default_factory=lambda: Restart(replace_seconds=300.0))
    delays: DelayModel | None = None
    clocks: DeviceConstants | None = None
    memory: MemoryFit | None = None
    memory_elsewhere: bool = False
    busy_watts: float | None = None
    commits_without: bool = False
    unmapped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 < self.tokens < math.inf:
            raise PlanError(f"tokens = {self.tokens:g}: give a finite number above 0")
        if not self.unique_tokens > 0.0:
            raise PlanError(f"unique_tokens = {self.unique_tokens:g}: give a number above 0")
        if self.deadline_seconds is not None and not self.deadline_seconds > 0.0:
            raise PlanError(f"deadline_seconds = {self.deadline_seconds:g}: give more than 0")

    @property
    def whose(self) -> Belonging:
        """Whose runs these are, as calibrations count."""
        framework = self.timed_as or calibrated_as(self.framework)
        return Belonging(self.cluster.device, self.cluster.name, framework)

    @property
    def steps(self) -> int:
        """Optimizer steps of the training."""
        return max(math.ceil(self.tokens / self.baseline.tokens), 1)
