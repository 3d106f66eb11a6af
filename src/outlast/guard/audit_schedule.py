"""Schedule and budget of audits, and the report of what they found; needs no torch."""

from __future__ import annotations

import random
import statistics
from collections import deque
from dataclasses import dataclass
from time import perf_counter

from outlast.guard.cost import audit_period

FIRST_AUDIT = 10
"""Steps before the first audit: those of a training that still loads and compiles."""

_LONGEST_PERIOD = 100_000
_TIMES = 15


@dataclass(frozen=True)
class AuditReport:
    """Audits that a guard has made on this process.

    Attributes:
        budget: Share of the steps' time that they may take; 0: the period is given.
        period: Steps per audit, as it is now.
        steps: Steps that were done.
        replays: Audits of passes.
        unit: Of these, a ``micro-batch`` or all passes of a ``step``; empty before the first.
        microbatches: Micro-batches per step, one of which is audited; 1 where it is the step.
        elsewhere: Whether the second computation is another rank's.
        exact: Whether bits are compared; None before the first audit.
        tolerance: Else the median of the tensors' tolerances, as shares of their norms.
        updates: Audits of optimizers' steps.
        update_share: Share of the optimizers' numbers that one of them goes through.
        compared: Tensors compared.
        seconds: Time of all audits on this process.
        steps_seconds: Time of all steps, without audits.
        why_not: Why no passes are audited; empty where they are.
        updates_why_not: The same of the optimizers' steps.
    """

    budget: float
    period: int
    steps: int
    replays: int
    unit: str
    microbatches: int
    elsewhere: bool
    exact: bool | None
    tolerance: float
    updates: int
    update_share: float
    compared: int
    seconds: float
    steps_seconds: float
    why_not: str
    updates_why_not: str

    @property
    def share(self) -> float:
        """Share of a run's micro-batches that are audited; see `cost.detection_probability`."""
        if self.why_not or not self.period:
            return 0.0
        return 1.0 / (self.period * max(self.microbatches, 1))


class AuditSchedule:
    """The steps with an audit: one of each period, drawn from the seed; alike on all ranks.

    Args:
        seed: Of the draws.
        period: Steps per audit; 0: `advance` says.

    Attributes:
        period: Of the period that the next audit belongs to.
        at: Steps done before the next step with an audit.
    """

    def __init__(self, seed: int, period: int = 0) -> None:
        self._seed = seed
        self._fixed = period
        self.restart(0)

    def restart(self, step: int) -> None:
        """Begin with the step after `step`."""
        self._begin = step
        self.period = self._fixed or FIRST_AUDIT + 1
        self.at = self._drawn() if self._fixed else step + FIRST_AUDIT

    def due(self, step: int) -> bool:
        """Return whether the step after `step` has an audit."""
        return step >= self.at

    def advance(self, step: int, period: int) -> None:
        """Choose the next audit, after the one of this step.

        Args:
            step: Steps done, the audited one included.
            period: Of the next period, where it is not fixed.
        """
        self._begin = max(self._begin + self.period, step)
        self.period = self._fixed or period
        self.at = self._drawn()

    def draw(self, *of: int) -> int:
        """A number that is the same on all ranks, for so many whole numbers."""
        return random.Random(f"{self._seed} {of}").getrandbits(32)

    def _drawn(self) -> int:
        return self._begin + self.draw(1, self._begin) % self.period


class AuditBudget:
    """Time of audits and steps, and the period that follows from the budget.

    Args:
        budget: Share of the steps' time.

    Attributes:
        steps: Steps measured.
        seconds: Of all audits.
        steps_seconds: Of all steps, without audits.
    """

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._recent: deque[float] = deque(maxlen=_TIMES)
        self._audits: deque[float] = deque(maxlen=_TIMES)
        self._last: float | None = None
        self._in_step = 0.0
        self.steps = 0
        self.seconds = self.steps_seconds = 0.0

    def spend(self, seconds: float) -> None:
        """An audit took so long, in this step."""
        self._in_step += seconds
        self.seconds += seconds

    def pause(self) -> None:
        """Count the time that follows for no step, until the next one ends."""
        self._last = None
        self._in_step = 0.0

    def step(self) -> None:
        """A step has ended."""
        now = perf_counter()
        self.steps += 1
        if self._last is not None:
            seconds = max(now - self._last - self._in_step, 0.0)
            usual = statistics.median(self._recent) if self._recent else seconds
            # A pause between two steps, such as an evaluation, is none of a step's time.
            self.steps_seconds += min(seconds, 2.0 * usual)
            self._recent.append(seconds)
        if self._in_step:
            self._audits.append(self._in_step)
        self._last, self._in_step = now, 0.0

    def period(self) -> int:
        """Steps of the next period: what has been overdrawn is earned in it, too."""
        if not self._recent or not self._audits or not self._budget:
            return FIRST_AUDIT
        usual = max(statistics.median(self._recent), 1e-9)
        overdrawn = self.seconds - self._budget * self.steps_seconds
        # The next audit takes as long as others did; the first measures a tolerance, too.
        wanted = statistics.median(self._audits) + max(overdrawn, 0.0)
        return min(audit_period(wanted, usual, self._budget), _LONGEST_PERIOD)
