"""The knowledge-driven model against full clock sweeps: prediction, choice of clock, plans.

`folder` holds ``stage_profile/`` of the measured GPT-3 175B profiles (ml-energy/zeus, Perseus
SOSP'24). Each profile has four different curves: forward and backward of stages 0 and 7; stage 7
is stage 0 with the language-model head. What is predicted is never calibrated on, except by its
probes, and plans are judged on the measured sweep.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from harness import Bar, at_least, at_most

from outlast.energy.model import Calibration, DeviceConstants, calibrate, predicted_profile
from outlast.energy.planner import EnergyPlanner
from outlast.energy.profile import Curve, Key, Point, Profile, effective
from outlast.energy.schedule import Schedule, one_f_one_b

DEVICES = {
    "A100": ("gpt3-175b+a100_sxm_bf16.csv", 83.64),
    "A40": ("gpt3-175b+a40_bf16.csv", 70.38),
}
KEYS = [Key(stage, phase) for stage in (0, 7) for phase in ("forward", "backward")]
SPLITS: dict[str, Callable[[Key, Key], bool]] = {
    "one curve left out": lambda known, new: known != new,
    "one stage left out": lambda known, new: known.stage != new.stage,
    "one phase left out": lambda known, new: known.phase != new.phase,
}
SLOWDOWNS = (0.0, 0.01, 0.02, 0.05, 0.10, 0.20, 9.0)
"""Time constraints of a single clock's choice, above the top clock's time; the last is none."""
DEADLINES = (0.01, 0.02, 0.05, 0.10)


def measured_profile(folder: Path, device: str) -> Profile:
    """The full sweep of a device."""
    file, blocking_watts = DEVICES[device]
    points: dict[Key, list[Point]] = defaultdict(list)
    with (folder / "stage_profile" / file).open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            key = Key(int(row["stage"]), row["instruction"])
            point = Point(int(row["frequency"]), float(row["time"]), float(row["energy"]))
            points[key].append(point)
    curves = {key: Curve(tuple(sorted(found))) for key, found in points.items()}
    return Profile(curves, blocking_watts, device)


def choose_probes(
    clocks_mhz: list[int], constants: DeviceConstants | None = None, count: int = 2
) -> tuple[int, ...]:
    """Clocks that tell most about an operation, ascending.

    The top clock anchors deadlines and shows the cap. The voltage knee has no cap, is where energy
    is least, and lies far enough from the top to part fixed from clock-bound time. A third probe
    goes between the two. Nothing known of the device: shares of the top clock.
    """
    known = sorted(set(clocks_mhz))
    top = known[-1]
    wanted = [share * top for share in (1.0, 0.84, 0.68)]
    if constants is not None:
        knee = min(constants.knee_mhz, 0.95 * top)
        wanted = [top, knee, (top + knee) / 2]
    chosen: list[int] = []
    for clock in wanted[:count]:
        left = [number for number in known if number not in chosen]
        chosen.append(min(left, key=lambda name: abs(name - clock)))
    return tuple(sorted(chosen))


@dataclass(frozen=True)
class Score:
    """How well one curve was predicted.

    Attributes:
        time, energy: Mean absolute relative errors over all clocks.
        regrets: Of the clock chosen at each slowdown: energy above that of the best clock of the
            sweep that is no slower than allowed, or than the chosen one really is.
    """

    time: float
    energy: float
    regrets: tuple[float, ...]


def scored(measured: Curve, modelled: Curve) -> Score:
    """Compare a modelled curve with the measured one."""
    errors = np.abs(np.array(modelled.points) / np.array(measured.points) - 1).mean(axis=0)
    regrets = []
    for slowdown in SLOWDOWNS:
        longest = measured.top.seconds * (1 + slowdown)
        fast = [point for point in modelled.points if point.seconds <= longest]
        chosen = measured.at(min(fast, key=lambda point: point.joules).clock_mhz)
        allowed = max(longest, chosen.seconds)
        best = min(point.joules for point in measured.points if point.seconds <= allowed)
        regrets.append(chosen.joules / best - 1)
    return Score(float(errors[1]), float(errors[2]), tuple(regrets))


def scores(profile: Profile, split: str, probes: int = 2) -> list[Score]:
    """Each curve predicted from its probes and the other curves of a split."""
    found = []
    for key in KEYS:
        known = [each for each in KEYS if SPLITS[split](each, key)]
        modelled = _modelled(profile, [key], _calibration(profile, known), probes)
        found.append(scored(profile.curve(key), modelled[key]))
    return found


@dataclass(frozen=True)
class Judged:
    """A plan from a modelled profile, judged on the measured one.

    Attributes:
        share: Of the saving of the plan that knows the full sweep.
        late: Time beyond the deadline, relative to it; negative when early.
    """

    share: float
    late: float


def planned(profile: Profile, modelled: Profile, microbatches: int) -> list[Judged]:
    """Plans of the model at all deadlines."""
    schedule = one_f_one_b(8, microbatches)
    top = schedule.makespan([profile.curve(each.key).top.seconds for each in schedule.operations])
    informed, uninformed = EnergyPlanner(profile), EnergyPlanner(modelled)
    found = []
    for slowdown in DEADLINES:
        deadline = top * (1 + slowdown)
        best = informed.plan(schedule, deadline)
        clocks = uninformed.plan(schedule, deadline).clocks_mhz
        seconds, joules = _judge(profile, schedule, clocks, deadline)
        saving = 1 - joules / best.fastest_joules
        found.append(Judged(saving / best.saving, seconds / deadline - 1))
    return found


def from_other_stage(profile: Profile, probes: int = 3) -> Profile:
    """All operations from their probes; the device was calibrated on the other stage alone."""
    curves = {}
    for last in (True, False):
        known = [key for key in KEYS if (key.stage == 7) != last]
        wanted = [key for key in profile.curves if (key.stage == 7) == last]
        curves.update(_modelled(profile, wanted, _calibration(profile, known), probes))
    return Profile(curves, profile.blocking_watts, profile.device, "modelled")


def from_probes_alone(profile: Profile, probes: int = 3) -> Profile:
    """All operations from their probes, on a device of which nothing else is known."""
    clocks = choose_probes(_clocks(profile), count=probes)
    seen = {
        key: Curve(tuple(profile.curve(key).at(clock) for clock in clocks))
        for key in profile.curves
    }
    calibration = calibrate(Profile(seen, profile.blocking_watts, profile.device), strict=False)
    points = {key: curve.points for key, curve in seen.items()}
    return predicted_profile(points, calibration, _clocks(profile))


def model_bars(folder: Path, quick: bool) -> Iterator[Bar]:
    """All bars of the model.

    Args:
        folder: Of the measured profiles.
        quick: Fewer micro-batches.
    """
    for device in DEVICES:
        profile = measured_profile(folder, device)
        yield from _prediction_bars(device, profile)
        ways = {
            "3 clocks, calibrated on the other stage": from_other_stage(profile),
            "3 clocks, nothing else known": from_probes_alone(profile),
        }
        for way, modelled in ways.items():
            for microbatches in (12,) if quick else (12, 24, 48):
                yield from _plan_bars(
                    f"{device}, {microbatches} micro-batches, {way}",
                    planned(profile, modelled, microbatches),
                )


def _prediction_bars(device: str, profile: Profile) -> Iterator[Bar]:
    for split in SPLITS:
        found = scores(profile, split)
        peer = f"sweep of {len(_clocks(profile))} clocks, 4 curves"
        regrets = [regret for each in found for regret in each.regrets]
        figures = {
            "time MAPE, worst curve": (max(each.time for each in found), 2.0),
            "energy MAPE, worst curve": (max(each.energy for each in found), 2.0),
            "regret of the clock, mean of time limits": (float(np.mean(regrets)), 1.5),
            "regret of the clock, worst time limit": (max(regrets), 1.5),
        }
        for name, (figure, limit) in figures.items():
            title = f"{device}, 2 probes, {split}: {name}"
            yield _predicted(at_most(title, round(100 * figure, 3), "%", limit, peer))


def _plan_bars(title: str, found: list[Judged]) -> Iterator[Bar]:
    shares = ", ".join(f"{each.share:.3f}" for each in found)
    peer = f"plan from the full sweep; +1/2/5/10 %: {shares}"
    least = min(each.share for each in found)
    yield _predicted(at_least(f"{title}: saving, least", least, "of its saving", 0.95, peer))
    lateness = ", ".join(f"{each.late:+.2%}" for each in found)
    late = round(100 * max(each.late for each in found), 3)
    yield _predicted(at_most(f"{title}: beyond the deadline", late, "%", 0.5, lateness))


def _predicted(bar: Bar) -> Bar:
    return Bar(bar.name, bar.figure, bar.unit, bar.bar, bar.holds, bar.peer, "predicted")


def _calibration(profile: Profile, keys: list[Key]) -> Calibration:
    curves = {key: profile.curve(key) for key in keys}
    known = Profile(curves, profile.blocking_watts, profile.device)
    return calibrate(known, strict=False)


def _modelled(
    profile: Profile, keys: list[Key], calibration: Calibration, probes: int
) -> dict[Key, Curve]:
    clocks = choose_probes(_clocks(profile), calibration.constants, probes)
    points = {key: [profile.curve(key).at(clock) for clock in clocks] for key in keys}
    return dict(predicted_profile(points, calibration, _clocks(profile)).curves)


def _clocks(profile: Profile) -> list[int]:
    return [point.clock_mhz for point in profile.curve(KEYS[0]).points]


def _judge(
    profile: Profile, schedule: Schedule, clocks_mhz: tuple[int, ...], deadline: float
) -> tuple[float, float]:
    """Seconds and joules that a plan's clocks take in the measured profile."""
    pairs = zip(schedule.operations, clocks_mhz, strict=True)
    points = [profile.curve(each.key).at(clock) for each, clock in pairs]
    seconds = schedule.makespan([point.seconds for point in points])
    busy = sum(effective(point, profile.blocking_watts) for point in points)
    waiting = schedule.devices * profile.blocking_watts * max(seconds, deadline)
    return seconds, busy + waiting
