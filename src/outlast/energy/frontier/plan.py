"""Solved plans, a clock for every operation with the gap to the bound, and their JSON files."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard, get_args

from outlast.energy.window import KINDS
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outlast.energy.schedule.graph import Schedule
    from outlast.energy.window import Kind


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
        """Share of the energy of top clocks that is saved."""
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
        return load_plan(path, schedule)


VERSION = 1
"""Of the files; a reader refuses others."""


_COUNTS = ("switches", "devices")


_WORDS = {"kind": KINDS, "budget": SWITCHES, "device": (), "schedule": ()}


# These must be positive; the other numbers may also be 0.
_POSITIVE = ("seconds", "deadline_seconds", "joules", "bound_joules", "fastest_joules")


def fingerprint(schedule: Schedule) -> str:
    """16 hexadecimal digits that change with any operation, edge or the number of devices."""
    content = (
        schedule.devices,
        [
            [operation.device, operation.stage, operation.phase, operation.microbatch]
            for operation in schedule.operations
        ],
        sorted(schedule.edges),
    )
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def save_plan(plan: ClockPlan, path: Path | str) -> None:
    """Write a plan.

    Raises:
        EnergyError: When the place cannot be written.
    """
    publish(Path(path), {"format": "outlast clock plan", "version": VERSION, **asdict(plan)})


def load_plan(path: Path | str, schedule: Schedule | None = None) -> ClockPlan:
    """Read a plan.

    Raises:
        EnergyError: When the file is no plan, is damaged or is for another schedule.
    """
    content = read(Path(path), "outlast clock plan")
    plan = plan_of(content, str(path))
    if schedule is not None:
        matches(plan, schedule, str(path))
    return plan


def matches(plan: ClockPlan, schedule: Schedule, where: str) -> None:
    """Refuse a plan that was made for another schedule.

    Raises:
        EnergyError: With both fingerprints.
    """
    own = fingerprint(schedule)
    if plan.schedule != own or len(plan.clocks_mhz) != len(schedule.operations):
        raise EnergyError(
            f"{where} is a plan for another schedule ({len(plan.clocks_mhz)} operations, "
            f"fingerprint {plan.schedule or 'none'}) than this one ({len(schedule.operations)} "
            f"operations, fingerprint {own}): make a plan for this schedule"
        )


def plan_of(content: Mapping[str, Any], where: str) -> ClockPlan:
    """A plan from parsed JSON, all fields checked.

    Raises:
        EnergyError: Names the first field that is missing, unknown or has a wrong value.
    """
    names = {field.name for field in fields(ClockPlan)}
    given = {name: value for name, value in content.items() if name not in {"format", "version"}}
    for name in sorted(names - given.keys()):
        raise EnergyError(f'{where} has no "{name}": it is not a complete plan, so write it again')
    for name in sorted(given.keys() - names):
        raise EnergyError(f'{where} has an unknown field "{name}": it was not written by a planner')
    for name, value in given.items():
        problem = _problem(name, value)
        if problem:
            raise EnergyError(f"{where}: {name} = {json.dumps(value)[:60]} {problem}")
    plan = ClockPlan(**{**given, "clocks_mhz": tuple(given["clocks_mhz"])})
    if plan.seconds > plan.deadline_seconds * (1 + 1e-6):
        raise EnergyError(
            f"{where}: seconds = {plan.seconds:g} is above deadline_seconds = "
            f"{plan.deadline_seconds:g}, so the plan does not meet its own deadline"
        )
    if plan.margin >= 1:
        raise EnergyError(f"{where}: margin = {plan.margin:g} must be below 1")
    if plan.joules < plan.bound_joules * (1 - 1e-6):
        raise EnergyError(
            f"{where}: joules = {plan.joules:g} is below bound_joules = {plan.bound_joules:g}, "
            "which no plan can be: it was changed or damaged, so make the plan again"
        )
    return plan


def publish(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON under a temporary name, sync it, and give it the name `path`.

    Raises:
        EnergyError: When the place cannot be written; `path` is then as it was.
    """
    try:
        text = json.dumps(content, indent=1, allow_nan=False)
    except ValueError as error:
        raise EnergyError(f"{path} cannot be written with a value that is no number") from error
    publish_text(path, text + "\n")


def publish_text(path: Path, text: str) -> None:
    """Write a text under a temporary name, sync it, and give it the name `path`.

    Raises:
        EnergyError: When the place cannot be written; `path` is then as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp")
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("x", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise EnergyError(
            f"{path} cannot be written ({error.strerror}): give another place"
        ) from error


def read(path: Path, expected: str) -> dict[str, Any]:
    """The object in a JSON file of this version and format.

    Raises:
        EnergyError: When the file cannot be read, is no JSON or has another format or version.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except OSError as error:
        raise EnergyError(f"{path} cannot be read ({error.strerror}): give another file") from error
    except (ValueError, RecursionError) as error:
        raise EnergyError(f"{path} is no JSON file ({error}): give an {expected}") from error
    if not isinstance(content, dict) or content.get("format") != expected:
        raise EnergyError(f'{path} is no {expected}: it has no "format": "{expected}"')
    if content.get("version") != VERSION:
        raise EnergyError(
            f"{path} has version {json.dumps(content.get('version'))[:40]}, and this Outlast reads "
            f"version {VERSION}: write the file again"
        )
    return content


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a number")


def _problem(name: str, value: Any) -> str:
    """Fault of a field's value; empty if there is none."""
    if name == "clocks_mhz":
        valid = isinstance(value, list) and value and all(_is_count(item) for item in value)
        return "" if valid else "must be a list of whole MHz, one for each operation"
    if name in _WORDS:
        allowed = _WORDS[name]
        if not isinstance(value, str) or (allowed and value not in allowed):
            return f"must be {' or '.join(allowed)}" if allowed else "must be a text"
        return ""
    if name in _COUNTS:
        return "" if _is_count(value) else "must be a whole number, not below 0"
    if not is_number(value):
        return "must be a finite number"
    if value < 0 or (name in _POSITIVE and value == 0):
        return "must be above 0" if name in _POSITIVE else "must not be below 0"
    return ""


def is_number(value: Any) -> TypeGuard[float]:
    """True if parsed JSON is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # An integer may have any number of digits, of which a float holds 308.
    return abs(value) <= sys.float_info.max


def _is_count(value: Any) -> bool:
    return is_number(value) and isinstance(value, int) and value >= 0
