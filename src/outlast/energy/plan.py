"""Solved plans, a clock for every operation with the gap to the bound: files, frontiers, pictures.

When one of several data-parallel pipelines is slower, the others wait for it at the end of the
step. Each then takes `ClockPlan.joules_until(T')`, so the best one for the straggler's time T' is
the plan for min(T', T*), where T* is the time beyond which slowing down does not pay (Perseus,
SOSP'24, section 3.2). A `Frontier` gives it without solving.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard, get_args

from outlast.energy.window import KINDS
from outlast.errors import EnergyError
from outlast.extras import require
from outlast.paths import read_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outlast.energy.profile import Key, Profile
    from outlast.energy.schedule import Schedule
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
        publish(Path(path), {"format": _PLAN, "version": VERSION, **asdict(self)})

    @classmethod
    def load(cls, path: Path | str, schedule: Schedule | None = None) -> ClockPlan:
        """Read what `save` wrote.

        Args:
            path: The file.
            schedule: The step it is for; None leaves that unchecked.

        Raises:
            EnergyError: When the file is no plan, is damaged or is for another schedule.
        """
        plan = plan_of(read(Path(path), _PLAN), str(path))
        if schedule is not None:
            matches(plan, schedule, str(path))
        return plan


@dataclass(frozen=True)
class Answer:
    """Plan for the time in which another pipeline is slower.

    Attributes:
        plan: The clocks.
        joules: Energy of this pipeline's step until T', the end of the slowest pipeline's step,
            waiting included.
        fastest_joules: Top clocks, and waiting until T'.
        unused_seconds: How much longer than the longest plan of the frontier could still pay; above
            0 only for a frontier that ends before T*.
    """

    plan: ClockPlan
    joules: float
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
        waiting_seconds = straggler_seconds - plan.deadline_seconds
        waited = plan.devices * plan.blocking_watts * waiting_seconds
        useful = min(straggler_seconds, self.longest_useful_seconds)
        return Answer(
            plan=plan,
            joules=plan.joules_until(straggler_seconds),
            fastest_joules=plan.fastest_joules + waited,
            unused_seconds=max(useful - max(plan.deadline_seconds for plan in self.plans), 0.0),
        )

    def save(self, path: Path | str) -> None:
        """Write it as JSON; a reader sees all of the file or none.

        Raises:
            EnergyError: When the place cannot be written.
        """
        content = {
            "format": _FRONTIER,
            "version": VERSION,
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
        content = read(Path(path), _FRONTIER)
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
        for number, (before, plan) in enumerate(pairwise(found), start=2):
            if plan.deadline_seconds < before.deadline_seconds:
                raise EnergyError(
                    f"{path}, plan {number}: deadline_seconds = {plan.deadline_seconds:g} is below "
                    f"that of the plan before it ({before.deadline_seconds:g}), and plans go by "
                    "rising deadline: write the frontier again"
                )
            for name in _SHARED:
                if getattr(plan, name) != getattr(before, name):
                    raise EnergyError(
                        f"{path}, plan {number}: {name} = {getattr(plan, name)} differs from that "
                        f"of the plan before it ({getattr(before, name)}), so they are of two "
                        "frontiers: write the frontier again"
                    )
        return cls(found, float(useful))


VERSION = 1
"""Of the files; a reader refuses others."""
_PLAN, _FRONTIER = "outlast clock plan", "outlast frontier"
_COUNTS = ("switches", "devices")
_WORDS = {"kind": KINDS, "budget": SWITCHES, "device": (), "schedule": ()}
# These must be positive; the other numbers may also be 0.
_POSITIVE = ("seconds", "deadline_seconds", "joules", "bound_joules", "fastest_joules")
# In these all plans of a frontier are alike.
_SHARED = (
    *("budget", "switch_seconds", "margin", "blocking_watts"),
    *("devices", "device", "kind", "schedule"),
)


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
    from outlast.records import replace_file

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
    except OSError as error:
        raise EnergyError(
            f"{path} cannot be written ({error.strerror}): give another place"
        ) from error


def read(path: Path, expected: str) -> dict[str, Any]:
    """The object in a JSON file of this version and format.

    Raises:
        EnergyError: When the file cannot be read, is no JSON or has another format or version.
    """

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not a number")

    try:
        content = json.loads(read_text(path), parse_constant=refuse)
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


_WORDS_OF_BUDGETS = {
    "none": "one clock for all devices",
    "per_stage": "one clock per device",
    "per_phase": "one clock per device and phase",
    "free": "a clock for every operation",
}


def save_picture(
    frontiers: Mapping[str, Frontier] | Frontier, path: Path | str, title: str = ""
) -> None:
    """Write `frontier_svg` to a file that ends with .svg or .html.

    Raises:
        EnergyError: For another ending, for nothing to draw, or when the place cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() not in (".svg", ".html"):
        raise EnergyError(f"{path} ends with neither .svg nor .html: choose one of them")
    publish_text(path, frontier_svg(frontiers, title, page=path.suffix.lower() == ".html"))


def frontier_svg(
    frontiers: Mapping[str, Frontier] | Frontier, title: str = "", *, page: bool = False
) -> str:
    """A picture of one frontier, or of those of several budgets of switches.

    Seconds against kilojoules, in a document that needs nothing else, on light and dark ground.

    Args:
        frontiers: By their name in the legend; names such as "per_stage" are put in words.
        title: What was planned, e.g. the model and the device.
        page: Whether the document is an HTML page around the picture.

    Returns:
        An SVG document. It shows the plans, the energy of top clocks, and the bound below which no
        plan is.

    Raises:
        EnergyError: When there is no plan to show.
    """
    require("energy", "the picture of a frontier", "jinja2")
    from jinja2 import Environment, PackageLoader, StrictUndefined

    if isinstance(frontiers, Frontier):
        frontiers = {frontiers.plans[0].budget if frontiers.plans else "free": frontiers}
    plans = [plan for frontier in frontiers.values() for plan in frontier.plans]
    if not plans:
        raise EnergyError("there is no plan to draw: give a frontier with one plan or more")
    levels = [(plan.joules, plan.bound_joules, plan.fastest_joules) for plan in plans]
    environment = Environment(
        loader=PackageLoader("outlast.energy", ""),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("frontier.svg.j2").render(
        page=page,
        title=title or "Time-energy frontier",
        kind=", ".join(sorted({plan.kind for plan in plans})),
        across=_ticks([plan.deadline_seconds for plan in plans]),
        up=_ticks([joules / 1e3 for level in levels for joules in level]),
        longest=max(frontiers.values(), key=lambda frontier: len(frontier.plans)).plans,
        frontiers=[(_WORDS_OF_BUDGETS.get(k, k), found.plans) for k, found in frontiers.items()],
    )


def _ticks(values: Sequence[float]) -> list[float]:
    """Round numbers that enclose all values, 5 to 12 of them."""
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    raw = span / 6
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw)
    first, last = math.floor(low / step), math.ceil(high / step)
    if first == last:
        first, last = first - 1, last + 1
    return [round(step * number, 12) for number in range(first, last + 1)]


@dataclass(frozen=True)
class PlanRun:
    """Time and energy of one step of a plan on virtual devices.

    Attributes:
        seconds: From the beginning to the end of the last operation.
        deadline_seconds: What the plan was made for.
        device_joules: (devices,) energy of each from the beginning to the deadline, or to the end
            of a step that is late; waiting included.
        switches: Clock changes on all devices in the step.
        kind: Never "measured".
    """

    seconds: float
    deadline_seconds: float
    device_joules: tuple[float, ...]
    switches: int
    kind: Kind = "replayed"

    @property
    def joules(self) -> float:
        """Energy of all devices."""
        return math.fsum(self.device_joules)

    @property
    def on_time(self) -> bool:
        """True if the step met its deadline, but for rounding."""
        return self.seconds <= self.deadline_seconds * (1 + 1e-9)


def replay_profile(
    plan: ClockPlan, schedule: Schedule, profile: Profile, *, switch_seconds: float = 0.0
) -> PlanRun:
    """Run a plan on devices that repeat one profile: what ``outlast energy replay`` shows.

    A device waits at its blocking power until all predecessors of its next operation have ended,
    then asks for that operation's clock if it differs from the one asked for last, and runs it: the
    old clock stays in force for the switch latency. Steps begin together. The second step counts,
    which begins at the clocks that the first one has left.

    Args:
        plan: A clock for every operation of the schedule.
        schedule: The operations.
        profile: Of every stage; it gives the durations of links too, which draw nothing.
        switch_seconds: How long a newly asked clock takes to come into force.

    Raises:
        EnergyError: When plan, schedule and profile do not fit each other, or for a negative
            latency.
    """
    if len(plan.clocks_mhz) != len(schedule.operations):
        raise EnergyError(
            f"the plan has clocks for {len(plan.clocks_mhz)} operations, but the schedule has "
            f"{len(schedule.operations)}: replay it with the schedule that it was made for"
        )
    if not switch_seconds >= 0.0:
        raise EnergyError(f"switch_seconds = {switch_seconds} is negative")
    points = [point for curve in profile.curves.values() for point in curve.points]
    clocks = sorted({point.clock_mhz for point in points} - {0})
    if not clocks:
        raise EnergyError("the profile has no operation with a clock: there is none to replay")
    for clock_mhz in sorted(set(plan.clocks_mhz) - {0, *clocks}):
        raise EnergyError(
            f"clock = {clock_mhz} MHz is not in the profile of {profile.device}, which has "
            f"{len(clocks)} clocks from {clocks[0]} to {clocks[-1]} MHz"
        )
    devices = [_VirtualDevice(profile, clocks[-1], switch_seconds) for _ in range(schedule.devices)]
    _run_step(plan, schedule, devices)
    return _run_step(plan, schedule, devices)


# A boundary that rounding puts a hair into the future has been reached.
_ROUNDING = 1e-9


class _VirtualDevice:
    """One device in virtual time; it begins at the profile's highest clock.

    While a newly asked clock is not in force, an operation continues at the old one: its work is
    shared in proportion to time.
    """

    def __init__(self, profile: Profile, clock_mhz: int, switch_seconds: float) -> None:
        self.profile = profile
        self.now_seconds = 0.0
        self.spent_joules = 0.0
        self.target_mhz = clock_mhz
        self._old_mhz = clock_mhz
        self._switch_at_seconds = 0.0
        self._switch_seconds = switch_seconds

    def wait_until(self, seconds: float) -> None:
        """Draw blocking power until then."""
        self._pass_time(max(0.0, seconds - self.now_seconds), self.profile.blocking_watts)

    def lock_clock(self, clock_mhz: int) -> None:
        """Ask for a clock. A later request replaces one that is not in force yet."""
        if self._until_switch() == math.inf:
            self._old_mhz = self.target_mhz
        self.target_mhz = clock_mhz
        self._switch_at_seconds = self.now_seconds + self._switch_seconds

    def run(self, key: Key) -> None:
        """Run one operation to its end."""
        curve, operations = self.profile.curve(key), 1.0
        while operations > 0.0:
            until = self._until_switch()
            clock_mhz = self.target_mhz if until == math.inf else self._old_mhz
            point = curve.top if curve.top.clock_mhz == 0 else curve.at(clock_mhz)
            if not point.seconds > 0.0:
                raise EnergyError(
                    f"stage {key.stage} {key.phase} takes {point.seconds} s at {point.clock_mhz} "
                    "MHz in the profile: an operation that is replayed must take time"
                )
            left = operations * point.seconds
            span = min(left, until)
            self._pass_time(span, point.joules / point.seconds)
            operations = 0.0 if span == left else operations - span / point.seconds

    def _until_switch(self) -> float:
        """Seconds for which the clock in force stays; infinite when no change is under way."""
        left = self._switch_at_seconds - self.now_seconds
        return left if left > _ROUNDING * max(1.0, self.now_seconds) else math.inf

    def _pass_time(self, seconds: float, watts: float) -> None:
        self.now_seconds += seconds
        self.spent_joules += seconds * watts


def _run_step(plan: ClockPlan, schedule: Schedule, devices: Sequence[_VirtualDevice]) -> PlanRun:
    begun_seconds = max(device.now_seconds for device in devices)
    for device in devices:
        device.wait_until(begun_seconds)
    begun_joules = [device.spent_joules for device in devices]
    ends_seconds = [0.0] * len(schedule.operations)
    switches = 0
    for index in schedule.order:
        operation = schedule.operations[index]
        ready_seconds = max(
            (ends_seconds[before] for before in schedule.predecessors[index]), default=begun_seconds
        )
        if operation.device < 0:
            link = devices[0].profile.curve(operation.key).top
            ends_seconds[index] = ready_seconds + link.seconds
            continue
        device = devices[operation.device]
        device.wait_until(ready_seconds)
        clock_mhz = plan.clocks_mhz[index]
        if clock_mhz and clock_mhz != device.target_mhz:
            device.lock_clock(clock_mhz)
            switches += 1
        device.run(operation.key)
        ends_seconds[index] = device.now_seconds
    seconds = max(ends_seconds, default=begun_seconds) - begun_seconds
    for device in devices:
        device.wait_until(begun_seconds + max(seconds, plan.deadline_seconds))
    return PlanRun(
        seconds=seconds,
        deadline_seconds=plan.deadline_seconds,
        device_joules=tuple(
            device.spent_joules - before
            for device, before in zip(devices, begun_joules, strict=True)
        ),
        switches=switches,
    )
