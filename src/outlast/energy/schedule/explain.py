"""Whether a schedule explains how long steps really took: without that, no plan can be trusted.

Profilers time forwards and backwards. What lies between (transfers) and after them (the tail:
optimizer step, synchronisation) is fitted to measured steps: one duration for all transfers, one
for all tails. A fit may not explain too much away: a step that mostly waits for its links is
communication-bound, and slowing its computing down costs other time than the graph says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from outlast.energy.profile import Curve, Point
from outlast.energy.schedule.additions import LINK, link_keys, with_tail, with_transfers
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from outlast.energy.profile import Profile
    from outlast.energy.schedule.dag import Schedule
    from outlast.energy.schedule.executed import ExecutedStep

    Array: TypeAlias = npt.NDArray[np.float64]

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
