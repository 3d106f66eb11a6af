"""Which settings of a family are run as probes: the most informative ones that the time pays for.

Every few probes the constants are fitted again and the next probes chosen from there, since what a
run teaches depends on where the constants are (sequential design: Chaloner & Verdinelli 1995,
section 5).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from outlast.errors import PlanError
from outlast.plan.calibration.fit import NOISE, Belonging, Fit, believed, fit
from outlast.plan.calibration.here import divided
from outlast.plan.calibration.probe_runs import Probe, kept_probe, run_probe, steps_for
from outlast.plan.calibration.probes import FEWEST, MOST, Budget, choose_probes
from outlast.plan.calibration.run_rows import FRAMEWORK
from outlast.plan.calibration.step_model import belonging
from outlast.plan.cases import Array, Cases, cases
from outlast.plan.memory.constants import memory_constants
from outlast.plan.memory.limits import fits
from outlast.plan.terms.step import step_seconds

if TYPE_CHECKING:
    from outlast.plan.calibration.family import Setting
    from outlast.plan.cluster import Cluster

SECONDS = 300.0
"""Wall time of all probes."""
AT_ONCE = 3
"""Probes that are chosen before the constants are fitted again."""
LONGEST_STEP_SECONDS = 1.2
SHORTEST_STEP_SECONDS = 0.015
FIRST_STEPS = 15
"""Of a probe while no more than two others are known."""
START_SECONDS = 9.0
"""Of a process until its first step and after its last, before any was seen."""
JITTER_SECONDS = 2e-3
"""Of a step, whatever its length: other programs, the clock of the processor."""
LEAST_HEADROOM = 0.3
"""Share of the memory that a probe must leave, since the memory model is not calibrated yet."""
MISSED = 0.08
"""Log standard deviation of what the formulas miss, per doubling of a size."""
_SIZES = ("hidden", "layers", "sequence", "micro_batch", "micro_batches")
_UNSURE = 1.5
_FAILURES = 3


@dataclass
class Probing:
    """Probes that are being run.

    Attributes:
        cluster: This machine, as `here.measured_cluster` gives it.
        settings: To choose from.
        folder: For jobs and run directories; what is there already is not run again.
        seconds: Wall time for all.
        say: Told in words what happens.
        runner: Runs one setting, as `run_probe` does.
        probes: Done so far.
        failures: Sentences about settings that did not run.
    """

    cluster: Cluster
    settings: Sequence[Setting]
    folder: Path
    seconds: float = SECONDS
    say: Callable[[str], None] = print
    runner: Callable[[Setting, Cluster, Path, int, float], Probe] = run_probe
    probes: list[Probe] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def run(self) -> list[Probe]:
        """Run probes until enough is known or the time is over.

        Raises:
            PlanError: So many fail or take so long that too few are left to fit.
        """
        self._read_kept()
        deadline = time.monotonic() + self.seconds
        left = [setting for setting in self.settings if setting.name not in self._names()]
        while left and len(self.probes) < MOST and len(self.failures) < _FAILURES:
            chosen = self._choose(left, deadline - time.monotonic())
            if not chosen:
                break
            for setting, seconds in chosen:
                remaining = deadline - time.monotonic()
                if self._cost(seconds) > remaining:
                    break
                self._one(setting, seconds, remaining)
            left = [item for item in left if item not in [setting for setting, _ in chosen]]
        if len(self.probes) < FEWEST:
            reasons = f" ({self.failures[-1]})" if self.failures else ""
            raise PlanError(
                f"{len(self.probes)} probes finished within {self.seconds:.0f} s, and {FEWEST} are "
                f"needed{reasons}: give more seconds or a smaller job"
            )
        return self.probes

    def _names(self) -> set[str]:
        return {probe.setting.name for probe in self.probes}

    def _read_kept(self) -> None:
        for setting in self.settings:
            kept = kept_probe(setting, self.cluster, self.folder)
            if kept is not None:
                self.probes.append(kept)
        if self.probes:
            self.say(f"{len(self.probes)} probes of an earlier time are read again")

    def _one(self, setting: Setting, seconds: float, remaining: float) -> None:
        steps = self._steps(seconds)
        longest = min(3.0 * self._cost(seconds) + 30.0, remaining)
        try:
            probe = self.runner(setting, self.cluster, self.folder, steps, longest)
        except PlanError as error:
            self.failures.append(str(error))
            self.say(str(error))
            return
        self.probes.append(probe)
        self.say(
            f"probe {len(self.probes)}: {setting.name}, {probe.row.step_seconds or 0.0:.3f} s per "
            f"step, {probe.seconds:.0f} s in all"
        )

    def _steps(self, step: float) -> int:
        """Few while nothing is known: the priors may be far off, and the time is limited."""
        wanted = steps_for(step)
        return wanted if len(self.probes) >= AT_ONCE else min(wanted, FIRST_STEPS)

    def _fit(self) -> Fit:
        if not self.probes:
            return believed([self._whose])
        rows = [probe.row for probe in self.probes]
        numbers = cases([(row.model, row.run, row.cluster) for row in rows])
        seconds = np.array([row.step_seconds for row in rows], dtype=np.float64)
        return fit(numbers, seconds, [belonging(row) for row in rows])

    @property
    def _whose(self) -> Belonging:
        return Belonging(self.cluster.device, self.cluster.name, FRAMEWORK)

    def _choose(self, left: Sequence[Setting], seconds: float) -> list[tuple[Setting, float]]:
        """The next probes and the seconds that a step of each should take."""
        found = self._fit()
        numbers, whose = numbers_of(left, self.cluster), [self._whose] * len(left)
        expected = step_seconds(numbers, found.constants(whose))
        within = (expected <= LONGEST_STEP_SECONDS) & (expected >= SHORTEST_STEP_SECONDS)
        costs = np.array([self._cost(item) for item in expected])
        room = fits(numbers, memory_constants(), LEAST_HEADROOM)
        possible = np.flatnonzero(within & room & (costs <= seconds))
        if not possible.size:
            return []
        design = self._design(found, numbers.taken(possible))
        chosen = choose_probes(
            design,
            np.ones(design.shape[1]),
            costs[possible],
            Budget(seconds=seconds, fewest=1, most=min(AT_ONCE, MOST - len(self.probes))),
            np.hypot(NOISE, JITTER_SECONDS / expected[possible]),
        )
        places = possible[chosen.rows]
        return [(left[int(place)], float(expected[place])) for place in places]

    def _design(self, found: Fit, numbers: Cases) -> Array:
        """(settings, unknowns) slopes of log seconds, in units of what is still unknown of each.

        Beside the constants these are what the formulas miss, as a straight line in each direction
        of the family: without it, the most informative settings crowd in a few of its corners.
        """
        constants = found.log_gradient(numbers, [self._whose] * len(numbers))
        missed = directions(numbers)
        known = np.eye(missed.shape[1]) / MISSED**2
        if self.probes:
            rows = [probe.row for probe in self.probes]
            done = directions(cases([(row.model, row.run, row.cluster) for row in rows]))
            known = known + done.T @ done / NOISE**2
        roots = np.linalg.cholesky(found.covariance), np.linalg.cholesky(np.linalg.inv(known))
        design: Array = np.concatenate([constants @ roots[0], missed @ roots[1]], axis=1)
        return design

    def _cost(self, step: float) -> float:
        """Wall seconds of a probe: starting, steps, ending."""
        started = [
            probe.seconds - probe.steps * (probe.row.step_seconds or 0.0)
            for probe in self.probes
            if probe.seconds
        ]
        start = float(np.median(started)) if started else START_SECONDS
        unsure = _UNSURE if len(started) < AT_ONCE else 1.1
        return max(start, 1.0) + unsure * self._steps(step) * step


def directions(numbers: Cases) -> Array:
    """(settings, directions): doublings of sizes, and which of two ways, of each setting."""
    columns = [np.log2(getattr(numbers, name)) for name in _SIZES]
    columns += [np.sign(getattr(numbers, name)) for name in ("half", "recompute", "sharding")]
    columns.append(np.minimum(numbers.devices - 1.0, 1.0))
    count = len(numbers)
    found: Array = np.stack([np.broadcast_to(column, (count,)) for column in columns], axis=1)
    return found


def numbers_of(settings: Sequence[Setting], cluster: Cluster) -> Cases:
    """The settings as the time model reads them.

    Args:
        settings: At least one.
        cluster: As `here.measured_cluster` gives it.
    """
    return cases(
        [
            (setting.model, setting.run, divided(cluster, setting.run.devices))
            for setting in settings
        ]
    )
