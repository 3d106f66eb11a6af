"""What a solved plan is: a clock for every operation, and how far from the best it can be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outlast.energy.reading import Kind


@dataclass(frozen=True)
class ClockPlan:
    """A clock for every operation of a step.

    All joules are of one step on all devices, from its beginning to the deadline, with what devices
    draw while they wait (blocking power). They are predictions from the profile.

    Attributes:
        clocks_mhz: (operations,) in the schedule's order; 0 for operations without a clock.
        seconds: How long the step takes with these clocks.
        deadline_seconds: What it was planned for; the step waits for it if it ends earlier.
        joules: Predicted energy of the plan.
        bound_joules: No assignment of the profile's clocks meets the deadline with less (optimum of
            the linear programme over the convex hulls).
        fastest_joules: All operations at the top clock, and the same deadline.
        switches: How often devices change their clock in a step.
        kind: How the profile was found.
    """

    clocks_mhz: tuple[int, ...]
    seconds: float
    deadline_seconds: float
    joules: float
    bound_joules: float
    fastest_joules: float
    switches: int
    kind: Kind

    @property
    def gap(self) -> float:
        """By what share the plan's energy is above the bound at most, e.g. 0.001."""
        return self.joules / self.bound_joules - 1.0

    @property
    def saving(self) -> float:
        """What share of the energy of top clocks is saved."""
        return 1.0 - self.joules / self.fastest_joules
