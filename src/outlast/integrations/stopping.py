"""When a framework's loop is to stop before its end: a signal, a limit, the end of a Slurm job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.integrations.agreement import Agreement
from outlast.integrations.clock import StepClock
from outlast.integrations.place import ranks_here
from outlast.integrations.stop import Stop

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Stopping:
    """Asks all ranks at step boundaries whether to stop.

    Args:
        limit_seconds: How long a training may take; None: as long as it needs.

    Attributes:
        agreement: Of the ranks, between `begin` and `end`; None elsewhere, and for one rank.
    """

    def __init__(self, limit_seconds: float | None) -> None:
        self.agreement: Agreement | None = None
        self._limit_seconds = limit_seconds
        self._ranks = ranks_here()
        self._stop = Stop(limit_seconds)
        self._clock = StepClock()

    def signals(self) -> AbstractContextManager[Stop]:
        """The context of a training, in which the signals ask for a stop."""
        self._stop = Stop(self._limit_seconds)
        return self._stop

    def begin(self, step: int) -> None:
        """The first step begins, after `step` steps; all ranks together."""
        self.agreement = Agreement(step) if self._ranks.world_size > 1 else None
        self._stop.training_begins()
        self._clock = StepClock()

    def observe_save(self, seconds: float) -> None:
        """A save took `seconds` until it was published."""
        self._stop.observe_save(seconds)

    def why(self, step: int) -> str:
        """Why to stop after `step` steps, the same answer on all ranks; empty to go on.

        Raises:
            IntegrationError: When a rank does not come to this step, because it has fewer or is
                gone.
        """
        self._stop.observe_step(self._clock.step())
        if self.agreement is None:
            return self._stop()
        if not self.agreement.is_due(step):
            return ""
        why = self._stop() if self._ranks.is_first else self._stop.signalled
        agreed = self.agreement.exchange(step, bool(why), False, self._clock.mean_seconds)
        return (why or "a signal to another rank") if agreed.stop else ""

    def ended(self, step: int) -> None:
        """This rank has done `step` steps and does no more; others that wait for it give up."""
        if self.agreement is not None:
            self.agreement.ended(step)

    def end(self, step: int) -> None:
        """This rank has come to the end of its loop after `step` steps; all ranks meet there.

        Raises:
            IntegrationError: On all ranks, when others did another number of steps.
        """
        agreement, self.agreement = self.agreement, None
        if agreement is not None:
            agreement.meet(step)
