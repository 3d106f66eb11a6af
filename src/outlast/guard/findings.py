"""Findings of the checks, their ledger, and the places where faults are injected.

A `Site` is one check of one module. Its counts are kept here; a check that exceeds its threshold
becomes a `Finding` with an outcome.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor


Outcome = Literal[
    "corrected", "check", "rounding", "not_finite", "repeated", "restored", "persistent", "detected"
]
"""How a finding ended.

corrected: a second computation gave other bits and passed; its numbers were put in place.
check: the numbers were computed again to the same bits, and now pass: the check itself was wrong.
rounding: the same bits again, and no further from an fp64 computation than rounding can ever be: a
    false alarm.
not_finite: the same bits again, with infinities or NaN among them: the data's own, no fault.
repeated: it could not be corrected by itself, but the step was run again and came out right.
restored: the run went back to a state from before it, and did the steps since again.
persistent: the same device has failed two exact replays of its own: its numbers are beyond any
    rounding of an fp64 computation, or are others in every replay.
detected: wrong, and nothing can be put right from here: it was used before, what it would be
    computed from has changed, or only another attempt at the step tells it from rounding.
"""

HARMFUL: frozenset[Outcome] = frozenset({"persistent", "detected"})
"""Outcomes that leave wrong values in the step."""

LASTING = frozenset(
    {
        *("weight", "weight.range", "rest", "replicas"),
        *("optimizer.moments", "optimizer.update", "optimizer.finite", "audit.update"),
    }
)
"""Checks of what outlives a step's passes, and so is not cured by running them again."""


@dataclass
class Site:
    """One check of one module, and what it has seen so far.

    Attributes:
        module: Its name in the model, or ``optimizer`` and the like.
        operation: A key of `outlast.guard.policy.OPERATIONS`.
        checks: Comparisons made.
        worst: Largest difference in a check that passed, in standard deviations.
        total: Sum of squared differences, in standard deviations, of checks that passed.
        detection_point: Largest error that could have passed a check, as a share of the norm of
            what was checked; None before the first check, and where the check is exact.
        last: The period in which it was last made; see `Watch.period`.
    """

    module: str
    operation: str
    checks: int = 0
    exceeded: int = 0
    worst: float = 0.0
    total: float = 0.0
    detection_point: float | None = None
    last: int = -1

    def add(self, checks: int, worst: float, total: float, widest: float) -> None:
        """Count `checks` comparisons that passed; see `outlast.guard.residual.ResidualTest`."""
        self.checks += checks
        self.total += total
        if math.isfinite(worst):
            self.worst = max(self.worst, worst)
        if math.isfinite(widest) and widest > 0:
            # The threshold applies to error and clean difference together, which may cancel.
            self.detection_point = max(self.detection_point or 0.0, 2.0 * widest)

    @property
    def spread(self) -> float:
        """Root mean square of the differences, in standard deviations; 1 fits the model."""
        return math.sqrt(self.total / self.checks) if self.checks else 0.0


@dataclass(frozen=True)
class Finding:
    """A check that exceeded its threshold.

    Attributes:
        step: Optimizer steps done before.
        module: As in `Site`.
        operation: As in `Site`.
        device: Where the numbers were computed, e.g. ``cpu`` or ``cuda:3``.
        rank: The process.
        rows: How many rows (or other units) of the check exceeded.
        magnitude: Largest difference, in standard deviations; infinity for exact checks.
        outcome: How it ended.
    """

    step: int
    module: str
    operation: str
    device: str
    rank: int
    rows: int
    magnitude: float
    outcome: Outcome

    def __str__(self) -> str:
        size = f"{self.magnitude:.3g} sigma" if math.isfinite(self.magnitude) else "exact check"
        return (
            f"{self.operation} of {self.module} at step {self.step} on rank {self.rank} "
            f"({self.device}): {self.rows} row{'s' if self.rows != 1 else ''}, {size}: "
            f"{self.outcome}"
        )


@dataclass
class Ledger:
    """All sites of a guard and all findings of this process."""

    sites: dict[tuple[str, str], Site] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def site(self, module: str, operation: str) -> Site:
        """The site of this check, made at the first call."""
        key = (module, operation)
        if key not in self.sites:
            self.sites[key] = Site(module, operation)
        return self.sites[key]

    def repeated(self, step: int) -> None:
        """The passes of `step` were run again and came out right: its findings did no harm."""
        for index, finding in enumerate(self.findings):
            if finding.step == step and finding.outcome in HARMFUL:
                self.findings[index] = replace(finding, outcome="repeated")

    @property
    def checks(self) -> int:
        """Comparisons made so far, over all sites."""
        return sum(site.checks for site in self.sites.values())


@dataclass(frozen=True)
class Certificate:
    """Evidence of one kind of check, over all modules.

    Attributes:
        checks: Comparisons made.
        exceeded: Those beyond the threshold.
        spread: Root mean square of the differences of the others, in standard deviations of the
            rounding model; 1 fits the model, below 1 the threshold is wider than it need be.
        worst: Largest of them, in standard deviations.
        detection_point: Any error in one row or unit that is larger than this share of its norm was
            surely found; None for checks that are exact or bounds.
    """

    checks: int
    exceeded: int
    spread: float
    worst: float
    detection_point: float | None


def certificates(ledger: Ledger) -> dict[str, Certificate]:
    """The certificate of every operation that was checked, by its name."""
    found = {}
    for operation in sorted({site.operation for site in ledger.sites.values() if site.checks}):
        sites = [site for site in ledger.sites.values() if site.operation == operation]
        checks = sum(site.checks for site in sites)
        points = [site.detection_point for site in sites if site.detection_point is not None]
        found[operation] = Certificate(
            checks,
            sum(site.exceeded for site in sites),
            math.sqrt(sum(site.total for site in sites) / checks),
            max(site.worst for site in sites),
            max(points, default=None),
        )
    return found


ANYWHERE = "operations"
"""The module under which checks are counted of an operation, which does not know its own."""
SITES = (
    "linear.operand",  # x as the unit reads it; a copy, so that only this product sees the fault
    "linear.output",  # y before its check
    "linear.saved",  # x as kept for the backward pass
    "linear.dy",  # the incoming gradient
    "linear.dx",
    "linear.dw",
    "linear.check",  # sums of the check itself
    "weight",  # a parameter at rest, in the step
    "attention.output",
    "attention.dq",
    "attention.dk",
    "attention.dv",
    "norm.output",
    "norm.dx",
    "norm.dw",
    "loss.output",
    "loss.dlogits",
    "embedding.output",
    "embedding.dw",
    "weight.rest",  # a parameter at rest, between steps
    "optimizer.state",  # a moment at rest, between steps
    "bucket.before",  # a gradient bucket before its reduction
    "bucket.during",  # another rank's part of it
    "bucket.after",
    "gather.during",  # an own shard on its way to the other ranks
    "gather.after",  # gathered parameters
)


class FaultHook(Protocol):
    """Called with the numbers of a site, where they may go wrong; may change them in place.

    Training has none: `Watch.fault_hook` is None. `outlast.guard.inject` sets one to put faults
    where the hardware would, between a computation and its check, also when the computation is done
    again.
    """

    def __call__(self, site: str, module: str, numbers: Tensor) -> None:
        """`numbers`: of any shape, about to be used by whatever follows the site."""
