"""What a solved plan is: a clock for every operation, and how far from the best it can be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.energy.reading import Kind
    from outlast.energy.schedule.dag import Schedule

Switches: TypeAlias = Literal["none", "per_stage", "per_phase", "free"]
"""How often clocks may change: one clock for all devices, one per device, one per device and
phase, or one per operation."""
SWITCHES: tuple[str, ...] = get_args(Switches)


@dataclass(frozen=True)
class ClockPlan:
    """A clock for every operation of a step.

    All joules are of one step on all devices, from its beginning to the deadline, with what devices
    draw while they wait (blocking power). They are predictions from the profile.

    Attributes:
        clocks_mhz: (operations,) in the schedule's order; 0 for operations without a clock.
        seconds: How long the step takes with these clocks, changes of clocks included.
        deadline_seconds: What it was planned for; the step waits for it if it ends earlier.
        joules: Predicted energy of the plan.
        bound_joules: No assignment of the profile's clocks meets the deadline with less (optimum of
            the linear programme over the convex hulls).
        fastest_joules: All operations at the top clock, and the same deadline; at a lower one
            where the step is faster there (see `baseline`).
        switches: How often devices change their clock in a step that is followed by the same step,
            so the way back to the first clock counts.
        kind: How the profile was found.
        budget: How often clocks were allowed to change.
        budget_bound_joules: No assignment with this budget meets the deadline with less; equal to
            `bound_joules` where nothing better is known.
        switch_seconds: What one change of a clock takes.
        margin: Share of the deadline that was kept free for the profile's error.
        blocking_watts: Power of a waiting device.
        devices: Number of devices.
        device: Name of the profile's device.
        schedule: Fingerprint of the schedule, see `fingerprint`.
    """

    clocks_mhz: tuple[int, ...]
    seconds: float
    deadline_seconds: float
    joules: float
    bound_joules: float
    fastest_joules: float
    switches: int
    kind: Kind
    budget: Switches = "free"
    budget_bound_joules: float = 0.0
    switch_seconds: float = 0.0
    margin: float = 0.0
    blocking_watts: float = 0.0
    devices: int = 0
    device: str = "unknown device"
    schedule: str = ""

    @property
    def gap(self) -> float:
        """By what share the plan's energy is above the bound at most, e.g. 0.001."""
        return self.joules / self.bound_joules - 1.0

    @property
    def budget_gap(self) -> float:
        """The same above the bound for plans that change clocks no more freely than this one."""
        return self.joules / max(self.budget_bound_joules, self.bound_joules) - 1.0

    @property
    def saving(self) -> float:
        """What share of the energy of top clocks is saved."""
        return 1.0 - self.joules / self.fastest_joules

    def joules_until(self, seconds: float) -> float:
        """Energy of all devices if the next step cannot begin before `seconds`.

        All of them wait at blocking power after their last operation (Perseus, SOSP'24, equation
        2: N * P_block * (T' - T)).

        Args:
            seconds: Not below `self.seconds`.
        """
        return self.joules + self.devices * self.blocking_watts * (seconds - self.deadline_seconds)

    def save(self, path: Path | str) -> None:
        """Write it as JSON; a reader sees all of the file or none.

        Raises:
            EnergyError: When the place cannot be written.
        """
        from outlast.energy.frontier.plan_file import save_plan

        save_plan(self, path)

    @classmethod
    def load(cls, path: Path | str, schedule: Schedule | None = None) -> ClockPlan:
        """Read what `save` wrote.

        Args:
            path: The file.
            schedule: The step it is for; None leaves that unchecked.

        Raises:
            EnergyError: When the file is no plan, is damaged or is for another schedule.
        """
        from outlast.energy.frontier.plan_file import load_plan

        return load_plan(path, schedule)
