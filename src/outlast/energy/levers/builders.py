"""Levers from a device model and plain numbers; no mechanism is imported."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outlast.energy.cost import cap_effect, clock_effect, roofline
from outlast.energy.levers.lever import Lever, LeverKind
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from outlast.energy.levers.cap import CapChoice
    from outlast.energy.model.constants import DeviceConstants
    from outlast.energy.model.work import Work
    from outlast.energy.profile import Curve

MODEL_INTERVAL = (0.95, 1.05)
"""What a fitted device model is worth where nothing better is known."""


def clock_lever(
    constants: DeviceConstants, activity: float, clock_mhz: float, *, compute_share: float = 1.0
) -> Lever:
    """A lower clock, by the device model (`cost.clock_effect`)."""
    seconds, joules = clock_effect(constants, activity, clock_mhz, compute_share=compute_share)
    return Lever(
        name=f"clock {clock_mhz:g} MHz",
        seconds_factor=seconds,
        joules_factor=joules,
        interval=MODEL_INTERVAL,
        source=f"P(f) of {constants.name}",
    )


def curve_lever(curve: Curve, clock_mhz: int, *, kind: LeverKind = "replayed") -> Lever:
    """A lower clock, from a measured curve."""
    point, top = curve.at(clock_mhz), curve.top
    return Lever(
        name=f"clock {clock_mhz} MHz",
        seconds_factor=point.seconds / top.seconds,
        joules_factor=point.joules / top.joules,
        kind=kind,
        source="clock profile",
    )


def cap_lever(
    constants: DeviceConstants, activity: float, cap_watts: float, *, compute_share: float = 1.0
) -> Lever:
    """A lower power limit, by the device model."""
    seconds, joules = cap_effect(constants, activity, cap_watts, compute_share=compute_share)
    return Lever(
        name=f"cap {cap_watts:g} W",
        seconds_factor=seconds,
        joules_factor=joules,
        interval=MODEL_INTERVAL,
        source=f"P(f) of {constants.name}",
    )


def probed_cap_lever(choice: CapChoice, *, kind: LeverKind = "measured") -> Lever:
    """A power limit that was probed (`search_cap`)."""
    probed = ", ".join(f"{point.cap_watts:g}" for point in choice.points)
    return Lever(
        name=f"cap {choice.point.cap_watts:g} W",
        seconds_factor=choice.seconds_factor,
        joules_factor=choice.joules_factor,
        kind=kind,
        source=f"probed at {probed} W",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The device and the work of a step, for levers that change the work.

    Attributes:
        constants: Of the device, with its rate and bandwidth.
        work: Of a step as it is.
        compute_watts: What arithmetic draws at full rate, above static power.
        memory_watts: What memory draws at full bandwidth, above static power.
    """

    constants: DeviceConstants
    work: Work
    compute_watts: float
    memory_watts: float

    def effect(
        self,
        *,
        flops_factor: float = 1.0,
        bytes_factor: float = 1.0,
        rate_factor: float = 1.0,
    ) -> tuple[float, float]:
        """Time and energy of changed work, relative to the work as it is."""
        changed = replace(
            self.work,
            flops=self.work.flops * flops_factor,
            memory_bytes=self.work.memory_bytes * bytes_factor,
        )
        watts = {"compute_watts": self.compute_watts, "memory_watts": self.memory_watts}
        before = roofline(self.constants, self.work, **watts)
        after = roofline(self.constants, changed, rate_factor=rate_factor, **watts)
        return after[0] / before[0], after[1] / before[1]


def precision_lever(
    name: str,
    site: Site,
    *,
    rate_factor: float,
    bytes_factor: float,
    progress_factor: float = 1.0,
) -> Lever:
    """Fewer bits: a higher rate and fewer bytes, perhaps less progress.

    Args:
        name: Of the precision.
        site: Device and work.
        rate_factor: Of the arithmetic: 2 from BF16 to FP8.
        bytes_factor: Of the traffic: 0.5 from BF16 to FP8 where all of it shrinks.
        progress_factor: Tokens of equal effect; below 1 where the loss falls more slowly.
    """
    seconds, joules = site.effect(rate_factor=rate_factor, bytes_factor=bytes_factor)
    return Lever(
        name=name,
        seconds_factor=seconds,
        joules_factor=joules,
        progress_factor=progress_factor,
        interval=MODEL_INTERVAL,
        source="roofline",
    )


def rank_lever(
    name: str,
    site: Site,
    *,
    flops_factor: float,
    bytes_factor: float,
    progress_factor: float,
) -> Lever:
    """Fewer parameters: fewer operations and bytes, and usually less progress.

    Progress has no default: a smaller rank that is as good must be shown, not assumed.
    """
    seconds, joules = site.effect(flops_factor=flops_factor, bytes_factor=bytes_factor)
    return Lever(
        name=name,
        seconds_factor=seconds,
        joules_factor=joules,
        progress_factor=progress_factor,
        interval=MODEL_INTERVAL,
        source="roofline",
    )


def batch_lever(
    batch: float,
    baseline_batch: float,
    critical_batch: float,
    *,
    fixed_seconds_share: float = 0.0,
    fixed_joules_share: float = 0.0,
) -> Lever:
    """Another batch: a step makes progress in proportion to ``B / (1 + B / B_crit)``.

    McCandlish et al. (2018, equation 2.11): examples to a loss grow with 1 + B / B_crit.

    Args:
        batch: New global batch, in the unit of the others.
        baseline_batch: As it is.
        critical_batch: B_crit, the gradient noise scale.
        fixed_seconds_share: Share of the step's time that the batch does not change.
        fixed_joules_share: The same for energy.
    """
    sizes = {"batch": batch, "baseline_batch": baseline_batch, "critical_batch": critical_batch}
    for field, value in sizes.items():
        if not value > 0.0:
            raise EnergyError(f"{field} = {value} is not above 0")
    _shares(fixed_seconds_share=fixed_seconds_share, fixed_joules_share=fixed_joules_share)
    ratio = batch / baseline_batch
    worth = (1.0 + baseline_batch / critical_batch) / (1.0 + batch / critical_batch)
    return Lever(
        name=f"batch {batch:g}",
        seconds_factor=fixed_seconds_share + (1.0 - fixed_seconds_share) * ratio,
        joules_factor=fixed_joules_share + (1.0 - fixed_joules_share) * ratio,
        progress_factor=ratio * worth,
        interval=MODEL_INTERVAL,
        source="critical batch",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """What checkpoints cost and what they save.

    Attributes:
        save_seconds: For which a save blocks training.
        restart_seconds: To begin again after a failure.
        mean_seconds: Between failures; infinite for none.
        save_watts_factor: Power during a save over that of training.
    """

    save_seconds: float
    restart_seconds: float
    mean_seconds: float
    save_watts_factor: float = 1.0

    def waste(self, interval_seconds: float) -> tuple[float, float]:
        """Time and energy lost per second of training.

        Saves, half an interval redone per failure, and restarts (Young 1974, first order).
        """
        if not interval_seconds > 0.0:
            raise EnergyError(f"interval_seconds = {interval_seconds} is not above 0")
        saving = self.save_seconds / interval_seconds
        redone = (interval_seconds / 2.0 + self.restart_seconds) / self.mean_seconds
        return saving + redone, saving * self.save_watts_factor + redone


def checkpoint_lever(
    interval_seconds: float, baseline_interval_seconds: float, failures: Failures
) -> Lever:
    """Another time between checkpoints."""
    if not failures.mean_seconds > 0.0:
        raise EnergyError(f"mean_seconds = {failures.mean_seconds} is not above 0")
    seconds, joules = failures.waste(interval_seconds)
    before_seconds, before_joules = failures.waste(baseline_interval_seconds)
    return Lever(
        name=f"checkpoint every {interval_seconds:g} s",
        seconds_factor=(1.0 + seconds) / (1.0 + before_seconds),
        joules_factor=(1.0 + joules) / (1.0 + before_joules),
        source="Young (1974), first order",
    )


def guard_lever(
    name: str,
    *,
    seconds_overhead: float,
    joules_overhead: float,
    faults_per_step: float = 0.0,
    redone_steps: float = 0.0,
    coverage: float = 0.0,
) -> Lever:
    """A guard level: it costs energy always and saves that of steps that need not be redone.

    Args:
        name: Of the level.
        seconds_overhead: Added time, relative to a step.
        joules_overhead: Added energy, relative to a step.
        faults_per_step: Wrong results that would spoil training.
        redone_steps: Steps lost to each of them without a guard.
        coverage: Share that the level corrects.
    """
    _shares(coverage=coverage)
    for field, value in (("faults_per_step", faults_per_step), ("redone_steps", redone_steps)):
        if not (math.isfinite(value) and value >= 0.0):
            raise EnergyError(f"{field} = {value} is not at least 0")
    lost = faults_per_step * redone_steps
    return Lever(
        name=name,
        seconds_factor=1.0 + seconds_overhead,
        joules_factor=1.0 + joules_overhead,
        progress_factor=(1.0 + lost) / (1.0 + lost * (1.0 - coverage)),
        source="overhead and redone steps",
    )


def _shares(**shares: float) -> None:
    for name, value in shares.items():
        if not 0.0 <= value <= 1.0:
            raise EnergyError(f"{name} = {value} is not in [0, 1]")
