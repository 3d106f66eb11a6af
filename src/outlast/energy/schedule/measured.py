"""Schedules judged by, and energies fitted to, training steps that were measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outlast.energy.profile import Curve, Point
from outlast.energy.schedule.graph import LINK
from outlast.energy.schedule.pipelines import link_keys, with_tail, with_transfers
from outlast.energy.window import Energy
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outlast.energy.model import DeviceConstants
    from outlast.energy.profile import Key, Profile
    from outlast.energy.schedule.graph import Schedule


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


Array: TypeAlias = NDArray[np.float64]


FEWEST_STEPS = 4
"""Below this, nothing is fitted: two durations would explain anything."""


@dataclass(frozen=True)
class Explanation:
    """A schedule with transfers and tails, and how well it explains measured steps.

    Attributes:
        profiled: The schedule without them.
        schedule: The same with those that take time; its operations begin with those of
            `profiled`.
        transfer_seconds: Fitted duration of each transfer.
        tail_seconds: Fitted duration of each device's tail.
        residual: Largest relative error of the step time, over steps not used for the fit that
            predicted them (two halves, each predicted from the other).
        fitted_share: Largest share of a step's time that only the fitted durations explain.
    """

    profiled: Schedule
    schedule: Schedule
    transfer_seconds: float
    tail_seconds: float
    residual: float
    fitted_share: float

    def operation_seconds(self, profiled_seconds: Sequence[float]) -> list[float]:
        """Durations of all operations, from those of the profiled ones."""
        added = self.schedule.operations[len(self.profiled.operations) :]
        fitted = [self.transfer_seconds if o.device == LINK else self.tail_seconds for o in added]
        return [*profiled_seconds, *fitted]

    def step_seconds(self, profiled_seconds: Sequence[float]) -> float:
        """Predicted duration of a step, from those of the profiled operations."""
        return self.schedule.makespan(self.operation_seconds(profiled_seconds))

    def extended(self, profile: Profile) -> Profile:
        """A profile that knows transfers and tails too, for plans of `schedule`.

        No clock changes them. A tail is given blocking power, so that it favours no clock.
        """
        added = self.schedule.operations[len(self.profiled.operations) :]
        links = link_keys(self.schedule)
        curves = dict(profile.curves)
        for key in {name.key for name in added}:
            seconds = self.transfer_seconds if key in links else self.tail_seconds
            joules = 0.0 if key in links else profile.blocking_watts * seconds
            curves[key] = Curve((Point(0, seconds, joules),))
        return replace(profile, curves=curves)


def explained(
    schedule: Schedule,
    steps: Sequence[ExecutedStep],
    tolerance: float = 0.02,
    fitted_limit: float = 0.05,
) -> Explanation:
    """Fit transfers and tails to measured steps, or refuse.

    Args:
        schedule: Of the operations that were timed. Transfers or tails that were timed are in it.
        steps: That ran with it; at least four, with different clocks, for a fit. With fewer, the
            timed operations alone must explain the time.
        tolerance: Largest residual.
        fitted_limit: Largest share of the time that fitted durations may stand for.

    Raises:
        EnergyError: When the schedule does not explain the times: names residual and limit, and
            what is probably missing. Also for malformed steps.
    """
    if not steps:
        raise EnergyError("no measured step: a plan needs at least one to be checked against")
    for number, step in enumerate(steps):
        step.check(schedule, f"measured step {number}")
    whole = with_tail(with_transfers(schedule))
    timing = _Timing(
        whole,
        np.array([step.operation_seconds for step in steps]).T,
        np.array([step.step_seconds for step in steps]),
    )
    alone = timing.spans(0.0)
    fitted_share = float(np.max(1 - alone / timing.measured))
    longer = float(np.median(alone / timing.measured)) - 1
    if longer > tolerance:
        raise EnergyError(
            f"the timed operations alone would take {longer:.1%} "
            f"longer than the measured step (limit {tolerance:.1%}): another schedule ran, or "
            "their times include waiting"
        )
    if len(steps) < FEWEST_STEPS:
        transfer = tail = 0.0
        errors = alone / timing.measured - 1
    else:
        transfer, tail = timing.fit()
        odd, even = timing.some(slice(1, None, 2)), timing.some(slice(0, None, 2))
        errors = np.concatenate([odd.errors(*even.fit()), even.errors(*odd.fit())])
    residual = float(np.max(np.abs(errors)))
    worst = f"{residual:.1%} of the measured step time (limit {tolerance:.1%})"
    if residual > tolerance and len(steps) < FEWEST_STEPS:
        raise EnergyError(
            f"the schedule leaves {worst} unexplained: time transfers and the end of the step too, "
            f"or measure at least {FEWEST_STEPS} steps with different clocks to fit them"
        )
    if residual > tolerance:
        raise EnergyError(
            f"the schedule leaves {worst} unexplained, even with fitted transfers and tail: "
            "something that changes from step to step is missing (input loading, stragglers, other "
            "jobs), or another schedule ran"
        )
    if len(steps) >= FEWEST_STEPS and fitted_share > fitted_limit:
        raise EnergyError(
            f"{fitted_share:.1%} of the measured step time passes outside the timed operations "
            f"(limit {fitted_limit:.1%}; fitted transfers and tail leave {residual:.1%}): the step "
            "is probably communication-bound, so time transfers and tail and give them as "
            "operations of the schedule, or accept fitted ones with a higher fitted_limit"
        )
    # What takes no time is left out: a profile may not hold operations of 0 s.
    kept = with_transfers(schedule) if transfer else schedule
    kept = with_tail(kept) if tail else kept
    return Explanation(schedule, kept, transfer, tail, residual, fitted_share)


@dataclass(frozen=True)
class _Timing:
    """Measured steps against a schedule in which only the first operations were timed.

    Attributes:
        schedule: With transfers and tails.
        seconds: (timed operations, steps).
        measured: (steps,) seconds.
    """

    schedule: Schedule
    seconds: Array
    measured: Array

    def some(self, which: slice) -> _Timing:
        """A part of the steps."""
        return _Timing(self.schedule, self.seconds[:, which], self.measured[which])

    @cached_property
    def _added_transfers(self) -> Array:
        """(operations, 1): 1 for each transfer that was not timed."""
        timed = len(self.seconds)
        added = [i >= timed and o.device == LINK for i, o in enumerate(self.schedule.operations)]
        return np.array(added, dtype=np.float64)[:, None]

    def spans(self, transfer_seconds: float) -> Array:
        """(steps,) time from the first start to the last end, without the tail."""
        seconds = self._added_transfers * transfer_seconds + np.zeros(len(self.measured))
        seconds[: len(self.seconds)] = self.seconds
        ends = np.zeros_like(seconds)
        for index in self.schedule.order:
            before = self.schedule.predecessors[index]
            start = ends[before].max(axis=0) if before else 0.0
            ends[index] = start + seconds[index]
        found: Array = ends.max(axis=0)
        return found

    def tail(self, spans: Array) -> float:
        """The duration of the tail that leaves least squares of relative errors."""
        weights = self.measured**-2.0
        return max(0.0, float(np.sum((self.measured - spans) * weights) / np.sum(weights)))

    def errors(self, transfer_seconds: float, tail_seconds: float) -> Array:
        """(steps,) relative errors of the step time."""
        found: Array = (self.spans(transfer_seconds) + tail_seconds) / self.measured - 1
        return found

    def fit(self) -> tuple[float, float]:
        """Durations of a transfer and of the tail, in seconds, by least squares."""
        from scipy.optimize import minimize_scalar

        alone = self.spans(0.0)
        gap = self.tail(alone)
        if not gap or not self._added_transfers.any():
            return 0.0, gap

        def loss(transfer_seconds: float) -> float:
            spans = self.spans(transfer_seconds)
            return float(np.sum(((spans + self.tail(spans)) / self.measured - 1) ** 2))

        # Transfers can explain the whole gap at most. Time on the path rises with each of them, so
        # one that takes `gap` is more than enough; halving it finds the range where they matter.
        most = gap
        while self.tail(self.spans(most / 2)) <= 0 and most > gap * 1e-6:
            most /= 2
        found = minimize_scalar(
            loss, bounds=(0.0, most), method="bounded", options={"xatol": most * 1e-3}
        )
        # A flat optimum is a coin toss: without evidence for it, there is no transfer time.
        transfer = float(found.x) if found.fun < loss(0.0) * (1 - 1e-6) else 0.0
        return transfer, self.tail(self.spans(transfer))


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
        from scipy.optimize import nnls

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

    def device_joules(self, step: ExecutedStep) -> tuple[float, ...]:
        """Predicted energy of each device.

        Args:
            step: Its clocks and seconds, measured or planned; its joules are not read.

        Raises:
            EnergyError: When it does not fit the schedule.
        """
        _check(step, self.schedule, "the step")
        terms = _terms(self.schedule, [step], self)[0]
        return tuple(float(x) for x in (terms * np.array(self.watts)).sum(axis=1))

    def predict(self, step: ExecutedStep) -> Energy:
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
    schedule: Schedule, steps: Sequence[ExecutedStep], device: DeviceConstants
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
        _check(step, schedule, name)
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


def _fit(schedule: Schedule, steps: Sequence[ExecutedStep], device: DeviceConstants) -> PlanEnergy:
    from scipy.optimize import nnls

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


def _clocks(schedule: Schedule, steps: Sequence[ExecutedStep]) -> dict[Key, EffectiveClock]:
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


def _terms(schedule: Schedule, steps: Sequence[ExecutedStep], model: PlanEnergy) -> Array:
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


def _check(step: ExecutedStep, schedule: Schedule, name: str) -> None:
    step.check(schedule, name)
    if not step.clocks_mhz:
        raise EnergyError(f"{name} has no clocks_mhz; give the clock of each operation")
