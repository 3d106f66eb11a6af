"""Bidirectional slack reclamation with checksums, simulated. No claim about any hardware.

Devices of one step finish at different times. Slack reclamation slows those that finish early. The
bidirectional form (BSR, PPoPP'23) also speeds up the critical device by a share of the slack, at a
voltage below its guard band, where faults become likely; checksums (ABFT) correct them. The fault
model here is an assumption, and voltage cannot be set on data-centre GPUs: use the result to see
how rare faults and how cheap checksums must be, not to predict a saving.

The critical and the other device of BSR are the two-device case of the planner's linear program.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outlast.energy.reading import Energy
from outlast.errors import EnergyError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

POWER_EXPONENT = 2.4
"""Dynamic power grows with this power of the clock (BSR, PPoPP'23)."""
UNDERVOLTS = (0.0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12)
HIGHEST_EXPONENT = 500.0
"""Of the growth of faults: above it, their product with time and energy is no finite number."""
SOURCE = "slack reclamation with an assumed fault model; no hardware claim"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A device's part of a step at the nominal clock.

    Attributes:
        seconds: Time; inversely proportional to the clock.
        dynamic_watts: Power that switching takes.
        static_watts: Power that it draws besides.
    """

    seconds: float
    dynamic_watts: float
    static_watts: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The devices of a step.

    Attributes:
        phases: One per device; the longest is critical.
        wait_watts: Power of a device that waits for the others.
        lowest_clock: Relative to nominal.
        highest_clock: Relative to nominal.
        highest_undervolt: Relative voltage below the guard band at which the critical device stops
            instead of erring, so that checksums no longer help. An assumption.
    """

    phases: tuple[Phase, ...]
    wait_watts: float
    lowest_clock: float = 0.5
    highest_clock: float = 1.2
    highest_undervolt: float = 0.12

    def __post_init__(self) -> None:
        if len(self.phases) < 2:
            raise EnergyError(f"{len(self.phases)} device has no slack: give two phases or more")
        for phase in self.phases:
            for name in ("seconds", "dynamic_watts", "static_watts"):
                value = getattr(phase, name)
                if not (math.isfinite(value) and value > 0.0):
                    raise EnergyError(f"{name} = {value} of a phase is not above 0")
        if not (math.isfinite(self.wait_watts) and self.wait_watts >= 0.0):
            raise EnergyError(f"wait_watts = {self.wait_watts} is below 0")
        if not 0.0 < self.lowest_clock <= 1.0 <= self.highest_clock:
            raise EnergyError(
                f"clocks {self.lowest_clock} to {self.highest_clock} do not contain 1, the nominal"
            )

    @property
    def ordered(self) -> tuple[Phase, ...]:
        """The critical one first."""
        return tuple(sorted(self.phases, key=lambda phase: -phase.seconds))

    @property
    def slack_seconds(self) -> float:
        """Between the critical device and the next."""
        first, second = self.ordered[:2]
        return first.seconds - second.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Abft:
    """A level of checksums.

    Attributes:
        name: "none", "single" or "full".
        overhead: Added work, relative.
        coverage: Share of faults that it corrects.
    """

    name: str
    overhead: float
    coverage: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.overhead < math.inf:
            raise EnergyError(
                f"overhead = {self.overhead} of level {self.name} must be finite and 0 or more"
            )
        if not 0.0 <= self.coverage <= 1.0:
            raise EnergyError(f"coverage = {self.coverage} of level {self.name} is not in [0, 1]")


LEVELS = (
    Abft(name="none", overhead=0.0, coverage=0.0),
    Abft(name="single", overhead=0.02, coverage=0.9),
    Abft(name="full", overhead=0.05, coverage=0.999),
)
"""Levels of BSR with assumed overheads and coverages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often results are wrong beyond the guard band, and what that costs. An assumption.

    ``lambda(f, V) = rate exp(per_clock max(0, f - 1) + per_undervolt u)`` per second of the
    critical device, with f relative to nominal and u the relative voltage below the guard band.

    Attributes:
        rate_per_second: At the edge of the guard band.
        per_clock: Growth with the relative clock above nominal.
        per_undervolt: Growth with relative undervolting.
        correct_seconds: Time to recompute what a checksum found wrong.
        rollback_seconds: Time that a missed fault costs.
    """

    rate_per_second: float = 1e-7
    per_clock: float = 20.0
    per_undervolt: float = 60.0
    correct_seconds: float = 0.05
    rollback_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0.0 <= getattr(self, name) < math.inf:
                raise EnergyError(
                    f"{name} = {getattr(self, name)} of the faults must be finite and 0 or more"
                )

    def rate(self, clock: float, undervolt: float) -> float:
        """Faults per second; none inside the guard band, at no more than nominal clock.

        Raises:
            EnergyError: Where faults are too frequent for a number.
        """
        if undervolt <= 0.0 and clock <= 1.0:
            return 0.0
        exponent = self.per_clock * max(0.0, clock - 1.0) + self.per_undervolt * undervolt
        if exponent > HIGHEST_EXPONENT:
            raise EnergyError(
                f"per_clock = {self.per_clock} and per_undervolt = {self.per_undervolt} of the "
                f"faults give e^{exponent:.3g} times as many at clock {clock:g} and undervolt "
                f"{undervolt:g}: choose lower ones"
            )
        return self.rate_per_second * math.exp(exponent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is set.

    Attributes:
        ratio: Share of the slack by which the critical device is sped up, in [0, 1].
        undervolt: Relative voltage below the guard band, on the critical device.
        abft: Checksums on the critical device.
    """

    ratio: float
    undervolt: float = 0.0
    abft: Abft = LEVELS[0]

    def __post_init__(self) -> None:
        if not 0.0 <= self.ratio <= 1.0:
            raise EnergyError(f"ratio = {self.ratio} is not in [0, 1]")
        if not 0.0 <= self.undervolt < 0.5:
            raise EnergyError(f"undervolt = {self.undervolt} is not in [0, 0.5)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A simulated step under a policy.

    Attributes:
        policy: What was set.
        seconds: Expected time, recovery included.
        joules: Expected energy of all devices, recovery included.
        critical_clock: Of the critical device, relative to nominal.
        faults_per_step: Expected.
        fault_joules: Expected cost of one fault.
        clean_joules: Energy without any fault.
        slack_only_joules: Of slowing the early devices alone, at nominal voltage.
        nominal_joules: Of nominal clocks.
        nominal_seconds: Time of nominal clocks and of slack reclamation alone.
    """

    policy: Policy
    seconds: float
    joules: float
    critical_clock: float
    faults_per_step: float
    fault_joules: float
    clean_joules: float
    slack_only_joules: float
    nominal_joules: float
    nominal_seconds: float

    @property
    def saving(self) -> float:
        """Share of the energy of slack reclamation alone; negative for a loss."""
        return 1.0 - self.joules / self.slack_only_joules

    @property
    def energy(self) -> Energy:
        """As an `Energy` that says it is simulated."""
        return Energy(
            joules=self.joules,
            low_joules=self.joules,
            high_joules=self.joules,
            kind="simulated",
            source=SOURCE,
        )

    def __str__(self) -> str:
        return (
            f"simulated: {self.policy.abft.name} checksums, ratio {self.policy.ratio:g}, "
            f"undervolt {self.policy.undervolt:.1%}: {self.saving:+.2%} saved beyond slack "
            f"reclamation alone, time {self.seconds / self.nominal_seconds - 1:+.2%}; "
            "no hardware claim"
        )


def slowed_joules(phase: Phase, span_seconds: float, devices: Devices) -> float:
    """Least energy of a device that has this long, waiting included.

    ``E(f) = D t f^1.4 + S t / f + W (T - t / f)`` has its minimum at
    ``f^2.4 = (S - W) / (1.4 D)``, which is clipped to the clocks that fit.
    """
    lowest = max(phase.seconds / span_seconds, devices.lowest_clock)
    excess = max(0.0, phase.static_watts - devices.wait_watts)
    best = math.pow(excess / ((POWER_EXPONENT - 1.0) * phase.dynamic_watts), 1.0 / POWER_EXPONENT)
    clock = max(lowest, min(1.0, best))
    busy = phase.seconds / clock
    watts = phase.dynamic_watts * math.pow(clock, POWER_EXPONENT) + phase.static_watts
    return watts * busy + devices.wait_watts * max(0.0, span_seconds - busy)


def simulate(devices: Devices, policy: Policy, faults: Faults) -> Outcome:
    """Expected time and energy of a step in closed form.

    Faults during recovery are neglected: the expected number per step must be small for that.

    Raises:
        EnergyError: When the critical device would need more than its highest clock, or runs below
            the voltage at which it stops.
    """
    if policy.undervolt > devices.highest_undervolt:
        raise EnergyError(
            f"undervolt = {policy.undervolt} is above highest_undervolt = "
            f"{devices.highest_undervolt}: the device would stop"
        )
    critical, *others = devices.ordered
    span = critical.seconds - policy.ratio * devices.slack_seconds
    clock = critical.seconds * (1.0 + policy.abft.overhead) / span
    if clock > devices.highest_clock:
        raise EnergyError(
            f"ratio = {policy.ratio} with {policy.abft.name} checksums needs clock {clock:.3f} of "
            f"nominal, above {devices.highest_clock}: choose a smaller ratio"
        )
    dynamic = (
        critical.dynamic_watts * (1.0 - policy.undervolt) ** 2 * math.pow(clock, POWER_EXPONENT)
    )
    watts = dynamic + critical.static_watts
    early = math.fsum(slowed_joules(phase, span, devices) for phase in others)
    clean = watts * span + early
    # While the critical device recovers, the others wait.
    recovering = watts + devices.wait_watts * len(others)
    missed = 1.0 - policy.abft.coverage
    lost = policy.abft.coverage * faults.correct_seconds + missed * faults.rollback_seconds
    expected = faults.rate(clock, policy.undervolt) * span
    nominal = critical.seconds
    plain = (critical.dynamic_watts + critical.static_watts) * nominal
    return Outcome(
        policy=policy,
        seconds=span + expected * lost,
        joules=clean + expected * lost * recovering,
        critical_clock=clock,
        faults_per_step=expected,
        fault_joules=lost * recovering,
        clean_joules=clean,
        slack_only_joules=plain
        + math.fsum(slowed_joules(phase, nominal, devices) for phase in others),
        nominal_joules=plain
        + math.fsum(
            (phase.dynamic_watts + phase.static_watts) * phase.seconds
            + devices.wait_watts * (nominal - phase.seconds)
            for phase in others
        ),
        nominal_seconds=nominal,
    )


def best_policy(
    devices: Devices,
    faults: Faults,
    *,
    levels: Sequence[Abft] = LEVELS,
    ratios: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    undervolts: Sequence[float] = UNDERVOLTS,
) -> Outcome:
    """The policy of least expected energy that is no slower than nominal.

    The choice may be to do nothing beyond slack reclamation.
    """
    best = simulate(devices, Policy(ratio=0.0), faults)
    for abft in levels:
        for ratio in ratios:
            for undervolt in undervolts:
                policy = Policy(ratio=ratio, undervolt=undervolt, abft=abft)
                try:
                    outcome = simulate(devices, policy, faults)
                except EnergyError:
                    continue
                if outcome.seconds <= outcome.nominal_seconds and outcome.joules < best.joules:
                    best = outcome
    return best


def break_even_faults_per_second(outcome: Outcome) -> float | Unavailable:
    """Fault rate at which a policy saves nothing: what it saves without faults, per fault.

    Returns:
        Faults per second of the critical device; unavailable where nothing is saved without faults.
    """
    saved = outcome.slack_only_joules - outcome.clean_joules
    if saved <= 0.0:
        return Unavailable("the policy saves nothing even without faults")
    span = outcome.nominal_seconds * (1.0 + outcome.policy.abft.overhead) / outcome.critical_clock
    return saved / (span * outcome.fault_joules) if outcome.fault_joules > 0.0 else math.inf


def break_even_overhead(devices: Devices, policy: Policy, faults: Faults) -> float | Unavailable:
    """Relative ABFT overhead at which a policy saves nothing, its coverage unchanged.

    Returns:
        The overhead, or that at which the critical device reaches its highest clock, if lower;
        unavailable where nothing is saved with free checksums.

    Raises:
        EnergyError: When the critical device would need more than its highest clock even with free
            checksums, or runs below the voltage at which it stops (see `simulate`).
    """

    def saving(overhead: float) -> float:
        abft = replace(policy.abft, overhead=overhead)
        return simulate(devices, replace(policy, abft=abft), faults).saving

    if saving(0.0) <= 0.0:
        return Unavailable("the policy saves nothing even with free checksums")
    seconds = devices.ordered[0].seconds
    span = seconds - policy.ratio * devices.slack_seconds
    low, high = 0.0, devices.highest_clock * span / seconds * (1.0 - 1e-12) - 1.0
    if saving(high) > 0.0:
        return high
    for _ in range(60):
        middle = (low + high) / 2.0
        if saving(middle) > 0.0:
            low = middle
        else:
            high = middle
    return low


def monte_carlo(
    devices: Devices, policy: Policy, faults: Faults, *, steps: int, seed: int = 0
) -> Energy:
    """Mean energy of a step over drawn faults, with its 95 % interval; checks `simulate`.

    Args:
        devices: Of a step.
        policy: What is set.
        faults: Model of the faults.
        steps: To draw; at least 2.
        seed: Of the draws.
    """
    import numpy as np

    if steps < 2:
        raise EnergyError(f"steps = {steps} is below 2: an interval needs at least two")
    outcome = simulate(devices, policy, faults)
    generator = np.random.default_rng(seed)
    struck = generator.poisson(outcome.faults_per_step, steps)
    corrected = generator.binomial(struck, policy.abft.coverage)
    lost = corrected * faults.correct_seconds + (struck - corrected) * faults.rollback_seconds
    mean_lost = (
        policy.abft.coverage * faults.correct_seconds
        + (1.0 - policy.abft.coverage) * faults.rollback_seconds
    )
    watts = outcome.fault_joules / mean_lost if mean_lost > 0.0 else 0.0
    joules = outcome.clean_joules + lost * watts
    mean = float(joules.mean())
    error = 1.96 * float(joules.std(ddof=1)) / math.sqrt(steps)
    return Energy(
        joules=mean,
        low_joules=mean - error,
        high_joules=mean + error,
        kind="simulated",
        source=SOURCE,
    )
