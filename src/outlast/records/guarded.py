"""What the guard did over all attempts of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outlast.records.events import Guarded, WrongNumbers

if TYPE_CHECKING:
    from outlast.records.reader import Run


@dataclass(frozen=True)
class OperationChecks:
    """One kind of check.

    Attributes:
        checks: Comparisons made.
        spread: Root mean square of the differences, in standard deviations of the rounding model.
        worst: Largest difference that passed, in standard deviations.
        detection_point: Largest error that could have passed, as a share of the norm of what was
            checked; None for exact checks.
    """

    checks: int
    spread: float
    worst: float
    detection_point: float | None


@dataclass(frozen=True)
class GuardTotals:
    """The guard of rank 0, and the findings of all ranks.

    Attributes:
        policy: The last attempt's level.
        operations: By name of the check.
        seconds: Time that the checks took; None where that cannot be known.
        modules: Modules with parameters.
        uncovered: Those in which no check was made in the last step, by class.
        last: The last record, for what else it says of coverage; see `Guarded`.
        findings: Everything that was found, oldest first.
    """

    policy: str
    operations: dict[str, OperationChecks]
    seconds: float | None
    modules: int
    uncovered: dict[str, int]
    last: Guarded
    findings: list[WrongNumbers]

    @property
    def checks(self) -> int:
        """Comparisons made, of all kinds."""
        return sum(operation.checks for operation in self.operations.values())

    @property
    def watched_share(self) -> float | None:
        """Share of the trained elements whose gradient a check watched; None: not recorded."""
        trained = self.last.trained
        return 1.0 - self.last.unwatched / trained if trained else None

    def outcomes(self) -> dict[str, int]:
        """How many findings ended in which way."""
        counted: dict[str, int] = {}
        for finding in self.findings:
            counted[finding.outcome] = counted.get(finding.outcome, 0) + 1
        return counted


def guard_totals(run: Run) -> GuardTotals | None:
    """The guard's work in `run`, or None where nothing of it is recorded.

    An attempt that was killed counts up to its last record.
    """
    last = {record.attempt: event for record, event in run.of(Guarded)}
    findings = [event for _, event in run.of(WrongNumbers)]
    if not last:
        return None
    newest = last[max(last)]
    times = [value.seconds for value in last.values()]
    names = sorted({name for value in last.values() for name in value.operations})
    return GuardTotals(
        policy=newest.policy,
        operations={
            name: _merged([value.operations.get(name, {}) for value in last.values()])
            for name in names
        },
        seconds=None if None in times else math.fsum(time for time in times if time is not None),
        modules=newest.modules,
        uncovered=newest.uncovered,
        last=newest,
        findings=findings,
    )


def _merged(parts: list[dict[str, Any]]) -> OperationChecks:
    parts = [part for part in parts if part.get("checks")]
    checks = sum(int(part["checks"]) for part in parts)
    squares = math.fsum(part["checks"] * float(part["spread"]) ** 2 for part in parts)
    points = [float(part["detection_point"]) for part in parts if part.get("detection_point")]
    return OperationChecks(
        checks,
        math.sqrt(squares / checks) if checks else 0.0,
        max((float(part["worst"]) for part in parts), default=0.0),
        max(points, default=None),
    )
