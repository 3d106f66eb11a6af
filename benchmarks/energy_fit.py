"""Energy of steps of one schedule, fitted to measured steps: one power per phase and device.

`benchmarks/energy_measured.py` judges it on steps that it has not seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from outlast.energy import DeviceConstants, Energy, Key, Schedule
from outlast.energy.schedule import ExecutedStep
from outlast.errors import EnergyError

Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class MeteredStep(ExecutedStep):
    """A measured step with its clocks and energy.

    Attributes:
        clocks_mhz: (operations,) clocks asked for; 0 for operations without one.
        joules: (devices,) energy of the step; empty where it is asked for.
    """

    clocks_mhz: tuple[float, ...] = ()
    joules: tuple[float, ...] = ()

    def check(self, schedule: Schedule, name: str) -> None:
        super().check(schedule, name)
        for what, values, count in (
            ("clocks_mhz", self.clocks_mhz, len(schedule.operations)),
            ("joules", self.joules, schedule.devices),
        ):
            if values and len(values) != count:
                raise EnergyError(f"{name} has {len(values)} {what}, but its schedule has {count}")
            if not all(math.isfinite(value) and value >= 0 for value in values):
                raise EnergyError(f"{name} has {what} that are not finite; measure it again")
        if not self.clocks_mhz:
            raise EnergyError(f"{name} has no clocks_mhz; give the clock of each operation")


STEP_MHZ = 15.0
"""Distance of candidates for the highest clock reached: that of NVIDIA's clock steps."""


_LOWEST_SHARE = 0.8  # Of the highest clock reached: a slower time than that is no clock's doing.


@dataclass(frozen=True)
class EffectiveClock:
    """Of one stage and phase.

    Attributes:
        fixed_seconds: a, the time that no clock changes.
        cycles_millions: b, millions of clock cycles.
        reached_mhz: Clock above which a higher one makes nothing faster.
    """

    fixed_seconds: float
    cycles_millions: float
    reached_mhz: float

    @staticmethod
    def fitted(clocks_mhz: Array, seconds: Array) -> EffectiveClock:
        """Fit by least squares of relative errors.

        Args:
            clocks_mhz: (samples,) asked for.
            seconds: (samples,) measured.

        Returns:
            One that believes every clock where only one clock was measured.
        """
        lowest, highest = float(clocks_mhz.min()), float(clocks_mhz.max())
        best = EffectiveClock(0.0, 0.0, float("inf"))
        best_error = float("inf")
        # The highest comes first, and a lower one must be better, so that noise throttles nothing.
        for reached in np.arange(highest, lowest, -STEP_MHZ):
            slowness = 1.0 / np.minimum(clocks_mhz, reached)
            terms = np.stack([np.ones_like(slowness), slowness], axis=1) / seconds[:, None]
            (fixed, cycles), norm = nnls(terms, np.ones_like(seconds))
            if norm < best_error * (1 - 1e-9):
                best, best_error = EffectiveClock(fixed, cycles, float(reached)), norm
        return best

    def of(self, clocks_mhz: Array, seconds: Array) -> Array:
        """(samples,) clocks in force, in MHz: at most those that were asked for."""
        computing = np.maximum(seconds - self.fixed_seconds, 1e-12)
        lowest = _LOWEST_SHARE * min(self.reached_mhz, float(clocks_mhz.max(initial=0.0)))
        found = np.clip(self.cycles_millions / computing, lowest, None)
        in_force: Array = np.where(
            clocks_mhz > self.reached_mhz, np.minimum(found, clocks_mhz), clocks_mhz
        )
        return in_force


FEWEST_STEPS_OF_A_FIT = 6
"""Measured steps below which nothing is fitted: two halves must be fitted for the interval."""


# How far off a prior power may be, times this, weighs as much as the same share of each step.
_PRIOR_WEIGHT = 0.01


# Ratio of the largest to the smallest singular value of the scaled terms: noise of 0.1 % in the
# energy of steps is then noise of 10 % and more in a single power.
_LARGEST_CONDITION = 100.0


@dataclass(frozen=True)
class PlanEnergy:
    """A fitted model of the energy of steps of one schedule.

    Attributes:
        schedule: Whose steps were measured.
        device: Constants of its devices.
        clocks: How far clocks were in force, by stage and phase.
        phases: Phases that devices run, in the order of `watts`.
        watts: (devices, phases + 2) switching power at 1 GHz and relative voltage 1 for each phase,
            static power while busy, power while idle.
        condition: Per device, how badly the steps tell these powers apart; 1 is best.
        error: Root mean square relative error of the total energy of steps that were not used for
            the fit that predicted them (two halves, each predicted from the other).
        steps: How many were used.
    """

    schedule: Schedule
    device: DeviceConstants
    clocks: Mapping[Key, EffectiveClock]
    phases: tuple[str, ...]
    watts: tuple[tuple[float, ...], ...]
    condition: tuple[float, ...]
    error: float
    steps: int

    @property
    def identifiable(self) -> bool:
        """True if single powers mean something; totals of similar steps do in any case."""
        return max(self.condition) <= _LARGEST_CONDITION

    def device_joules(self, step: MeteredStep) -> tuple[float, ...]:
        """Predicted energy of each device.

        Args:
            step: Its clocks and seconds, measured or planned; its joules are not read.

        Raises:
            EnergyError: When it does not fit the schedule.
        """
        step.check(self.schedule, "the step")
        terms = _terms(self.schedule, [step], self)[0]
        return tuple(float(x) for x in (terms * np.array(self.watts)).sum(axis=1))

    def predict(self, step: MeteredStep) -> Energy:
        """Predicted energy of all devices with its 95 % interval.

        Raises:
            EnergyError: When it does not fit the schedule.
        """
        joules = sum(self.device_joules(step))
        unlike = (
            "the measured steps do not tell phases, static and idle power apart (condition "
            f"{max(self.condition):,.0f}): do not use it for steps unlike them"
        )
        return Energy(
            joules=joules,
            low_joules=joules * (1 - 1.96 * self.error),
            high_joules=joules * (1 + 1.96 * self.error),
            kind="modelled",
            source=f"plan energy of {self.device.name} fitted to {self.steps} measured steps",
            flags=() if self.identifiable else (unlike,),
        )


def fit_plan_energy(
    schedule: Schedule, steps: Sequence[MeteredStep], device: DeviceConstants
) -> PlanEnergy:
    """Fit the energy of steps by non-negative least squares of relative errors.

    Args:
        schedule: Of the steps.
        steps: With clocks and joules, at different clocks.
        device: Its voltage curve, static and blocking power.

    Raises:
        EnergyError: For fewer than six steps, steps with the same clocks only, missing or malformed
            figures.
    """
    if len(steps) < FEWEST_STEPS_OF_A_FIT:
        raise EnergyError(
            f"{len(steps)} measured steps are too few to fit the energy of plans: measure at least "
            f"{FEWEST_STEPS_OF_A_FIT} with different clocks"
        )
    for number, step in enumerate(steps):
        name = f"measured step {number}"
        step.check(schedule, name)
        if not step.joules or min(step.joules) <= 0:
            raise EnergyError(f"{name} has no energy of every device; meter each device of it")
    if len({step.clocks_mhz for step in steps}) < 2:
        raise EnergyError(
            "all measured steps ran at the same clocks: their energy says nothing about others; "
            "measure steps with different clocks"
        )
    errors = []
    for fitted, unseen in ((steps[::2], steps[1::2]), (steps[1::2], steps[::2])):
        half = _fit(schedule, fitted, device)
        errors += [sum(half.device_joules(step)) / sum(step.joules) - 1 for step in unseen]
    return replace(_fit(schedule, steps, device), error=float(np.sqrt(np.mean(np.square(errors)))))


def _fit(schedule: Schedule, steps: Sequence[MeteredStep], device: DeviceConstants) -> PlanEnergy:
    phases = tuple(sorted({o.phase for o in schedule.operations if o.device >= 0}))
    model = PlanEnergy(
        schedule, device, _clocks(schedule, steps), phases, (), (), float("nan"), len(steps)
    )
    terms = _terms(schedule, steps, model)
    joules = np.array([step.joules for step in steps])
    watts, conditions = [], []
    for rank in range(schedule.devices):
        relative = terms[:, rank] / joules[:, rank, None]
        prior = _prior(terms[:, rank], joules[:, rank], device)
        scale = np.sqrt(np.mean(relative**2, axis=0))
        used = scale > 0
        weights = _PRIOR_WEIGHT * np.sqrt(len(steps)) * np.where(used, scale, 1.0)
        found, _ = nnls(
            np.vstack([relative, np.diag(weights)]),
            np.concatenate([np.ones(len(steps)), weights * prior]),
        )
        watts.append(tuple(float(x) for x in found))
        conditions.append(float(np.linalg.cond(relative[:, used] / scale[used])))
    return replace(model, watts=tuple(watts), condition=tuple(conditions))


def _prior(terms: Array, joules: Array, device: DeviceConstants) -> Array:
    """(phases + 2,) powers if all phases switched as much and the constants were right."""
    steady = terms[:, -2] * device.static_watts + terms[:, -1] * device.blocking_watts
    activity = max(0.0, float(np.median((joules - steady) / terms[:, :-2].sum(axis=1))))
    phases = terms.shape[1] - 2
    return np.array([*[activity] * phases, device.static_watts, device.blocking_watts])


def _clocks(schedule: Schedule, steps: Sequence[MeteredStep]) -> dict[Key, EffectiveClock]:
    clocks = np.array([step.clocks_mhz for step in steps])
    seconds = np.array([step.operation_seconds for step in steps])
    found = {}
    for key, indices in _by_key(schedule).items():
        asked, took = clocks[:, indices].ravel(), seconds[:, indices].ravel()
        real = (asked > 0) & (took > 0)
        if real.any():
            found[key] = EffectiveClock.fitted(asked[real], took[real])
    return found


def _by_key(schedule: Schedule) -> dict[Key, list[int]]:
    found: dict[Key, list[int]] = {}
    for index, operation in enumerate(schedule.operations):
        if operation.device >= 0:
            found.setdefault(operation.key, []).append(index)
    return found


def _terms(schedule: Schedule, steps: Sequence[MeteredStep], model: PlanEnergy) -> Array:
    """(steps, devices, phases + 2) what powers are multiplied with, in seconds."""
    terms = np.zeros((len(steps), schedule.devices, len(model.phases) + 2))
    clocks = np.array([step.clocks_mhz for step in steps], dtype=np.float64)
    seconds = np.array([step.operation_seconds for step in steps])
    for key, indices in _by_key(schedule).items():
        rank = schedule.operations[indices[0]].device
        asked, took = clocks[:, indices], seconds[:, indices]
        in_force = model.clocks[key].of(asked, took) if key in model.clocks else asked
        device = model.device
        voltage = 1 + device.knee_per_ghz / 1000 * np.maximum(0, in_force - device.knee_mhz)
        switching = (took * in_force / 1000 * voltage**2).sum(axis=1)
        terms[:, rank, model.phases.index(key.phase)] += switching
        terms[:, rank, -2] += took.sum(axis=1)
    whole = np.array([step.step_seconds for step in steps])
    terms[..., -1] = np.maximum(0.0, whole[:, None] - terms[..., -2])
    return terms
