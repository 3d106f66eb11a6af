"""When a framework's loop is to stop before its end: a signal, a limit, the end of a Slurm job."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from outlast.integrations.agreement import Agreement
from outlast.integrations.place import ranks_here
from outlast.integrations.stop import Stop

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_STEP_WEIGHT = 0.1


class Stopping:
    """Asks all ranks at step boundaries whether to stop.

    Args:
        limit_seconds: How long a training may take; None: as long as it needs.
    """

    def __init__(self, limit_seconds: float | None) -> None:
        self._limit_seconds = limit_seconds
        self._ranks = ranks_here()
        self._stop = Stop(limit_seconds)
        self._agreement: Agreement | None = None
        self._boundary = self._step_seconds = 0.0

    def signals(self) -> AbstractContextManager[Stop]:
        """The context of a training, in which the signals ask for a stop."""
        self._stop = Stop(self._limit_seconds)
        return self._stop

    def begin(self, step: int) -> None:
        """The first step begins, after `step` steps; all ranks together."""
        self._agreement = Agreement(step) if self._ranks.world_size > 1 else None
        self._stop.training_begins()
        self._boundary, self._step_seconds = time.monotonic(), 0.0

    def observe_save(self, seconds: float) -> None:
        """A save took `seconds` until it was published."""
        self._stop.observe_save(seconds)

    def why(self, step: int) -> str:
        """Why to stop after `step` steps, the same answer on all ranks; empty to go on."""
        now = time.monotonic()
        seconds, self._boundary = now - self._boundary, now
        weight = _STEP_WEIGHT if self._step_seconds else 1.0
        self._step_seconds += weight * (seconds - self._step_seconds)
        self._stop.observe_step(seconds)
        if self._agreement is None:
            return self._stop()
        if not self._agreement.is_due(step):
            return ""
        why = self._stop() if self._ranks.is_first else self._stop.signalled
        agreed = self._agreement.exchange(step, bool(why), False, self._step_seconds)
        return (why or "a signal to another rank") if agreed.stop else ""
