"""Plans and frontiers as JSON files, which are checked field by field and never evaluated."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from outlast.energy.frontier.plan import SWITCHES, ClockPlan
from outlast.energy.reading import KINDS
from outlast.errors import EnergyError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outlast.energy.schedule.dag import Schedule

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
    """What is wrong with a field's value; empty if nothing."""
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
    """Whether parsed JSON is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # An integer may have any number of digits, of which a float holds 308.
    return abs(value) <= sys.float_info.max


def _is_count(value: Any) -> bool:
    return is_number(value) and isinstance(value, int) and value >= 0
