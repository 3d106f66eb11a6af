"""Plans for many deadlines, from which a slower pipeline gets its answer without solving.

When one of several data-parallel pipelines is slower, the others wait for it at the end of the
step. Each then takes `ClockPlan.joules_until(T')`, so the best one for the straggler's time T' is
the plan for min(T', T*), where T* is the time beyond which slowing down does not pay (Perseus,
SOSP'24, section 3.2).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.energy.frontier.plan import is_number, matches, plan_of, publish, read
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from outlast.energy.frontier.plan import ClockPlan
    from outlast.energy.schedule.graph import Schedule

_FORMAT = "outlast frontier"
_VERSION = 1
# In these all plans of a frontier are alike.
_SHARED = (
    "budget",
    "switch_seconds",
    "margin",
    "blocking_watts",
    "devices",
    "device",
    "kind",
    "schedule",
)


@dataclass(frozen=True)
class Answer:
    """Plan for the time in which another pipeline is slower.

    Attributes:
        plan: The clocks.
        straggler_seconds: T', the time of the slowest pipeline's step.
        joules: Energy of this pipeline's step until T', waiting included.
        waiting_joules: The part of it that is drawn between the plan's end and T'.
        fastest_joules: Top clocks, and waiting until T'.
        unused_seconds: How much longer than the longest plan of the frontier could still pay; above
            0 only for a frontier that ends before T*.
    """

    plan: ClockPlan
    straggler_seconds: float
    joules: float
    waiting_joules: float
    fastest_joules: float
    unused_seconds: float

    @property
    def saving(self) -> float:
        """Share of the energy of top clocks that is saved."""
        return 1.0 - self.joules / self.fastest_joules


@dataclass(frozen=True)
class Frontier:
    """Plans from the shortest to the longest deadline.

    Attributes:
        plans: By rising deadline.
        longest_useful_seconds: T*, beyond which slowing down does not pay; 0 if not known.
    """

    plans: tuple[ClockPlan, ...]
    longest_useful_seconds: float = 0.0

    def at(self, deadline_seconds: float) -> ClockPlan:
        """The plan that takes the least energy of those that meet a deadline. A look-up.

        A plan with a margin keeps the same share of this deadline free.

        Raises:
            EnergyError: When the deadline is shorter than that of any plan; names the shortest.
        """
        needed = [plan.seconds / (1 - plan.margin) for plan in self.plans]
        fitting = [
            plan
            for plan, seconds in zip(self.plans, needed, strict=True)
            if seconds <= deadline_seconds * (1 + 1e-9)
        ]
        if not fitting:
            raise EnergyError(
                f"deadline = {deadline_seconds:g} s cannot be met: the fastest plan of this "
                f"frontier takes {min(needed):.6g} s, its margin included"
            )
        return min(fitting, key=lambda plan: plan.joules_until(deadline_seconds))

    def with_straggler(self, straggler_seconds: float) -> Answer:
        """The plan to run while another pipeline takes so long, and its energies.

        Raises:
            EnergyError: When no plan is as fast; this pipeline is then the straggler.
        """
        plan = self.at(straggler_seconds)
        watts = plan.devices * plan.blocking_watts
        waited = watts * (straggler_seconds - plan.deadline_seconds)
        useful = min(straggler_seconds, self.longest_useful_seconds)
        return Answer(
            plan=plan,
            straggler_seconds=straggler_seconds,
            joules=plan.joules_until(straggler_seconds),
            waiting_joules=watts * (straggler_seconds - plan.seconds),
            fastest_joules=plan.fastest_joules + waited,
            unused_seconds=max(useful - max(plan.deadline_seconds for plan in self.plans), 0.0),
        )

    def save(self, path: Path | str) -> None:
        """Write it as JSON; a reader sees all of the file or none.

        Raises:
            EnergyError: When the place cannot be written.
        """
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "longest_useful_seconds": self.longest_useful_seconds,
            "plans": [asdict(plan) for plan in self.plans],
        }
        publish(Path(path), content)

    @classmethod
    def load(cls, path: Path | str, schedule: Schedule | None = None) -> Frontier:
        """Read what `save` wrote.

        Args:
            path: The file.
            schedule: The step it is for; None leaves that unchecked.

        Raises:
            EnergyError: When the file is no frontier, is damaged or is for another schedule.
        """
        content = read(Path(path), _FORMAT)
        plans, useful = content.get("plans"), content.get("longest_useful_seconds")
        if not isinstance(plans, list) or not all(isinstance(plan, dict) for plan in plans):
            raise EnergyError(f'{path} has no list "plans": write the frontier again')
        if not plans:
            raise EnergyError(f'{path}: "plans" is empty: write the frontier again')
        if not is_number(useful) or useful < 0:
            raise EnergyError(f"{path}: longest_useful_seconds must be a number, not below 0")
        found = tuple(
            plan_of(plan, f"{path}, plan {number}") for number, plan in enumerate(plans, start=1)
        )
        for number, plan in enumerate(found, start=1):
            if schedule is not None:
                matches(plan, schedule, f"{path}, plan {number}")
        _check_together(found, str(path))
        return cls(found, float(useful))


def _check_together(plans: tuple[ClockPlan, ...], where: str) -> None:
    """Refuse plans that are not of one frontier."""
    for number, (before, plan) in enumerate(pairwise(plans), start=2):
        if plan.deadline_seconds < before.deadline_seconds:
            raise EnergyError(
                f"{where}, plan {number}: deadline_seconds = {plan.deadline_seconds:g} is below "
                f"that of the plan before it ({before.deadline_seconds:g}), and plans go by rising "
                "deadline: write the frontier again"
            )
        for name in _SHARED:
            if getattr(plan, name) != getattr(before, name):
                raise EnergyError(
                    f"{where}, plan {number}: {name} = {getattr(plan, name)} differs from that of "
                    f"the plan before it ({getattr(before, name)}), so they are of two frontiers: "
                    "write the frontier again"
                )
