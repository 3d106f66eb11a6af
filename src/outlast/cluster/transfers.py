"""How fast the copies of a run's checkpoints may be, as its job file says; for the trainer.

The trainer knows neither file systems nor other jobs; it is handed what `transfers_for` makes.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.cluster.storage.backoff import Backoff, GentlePace

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from outlast.job import Job

_LEAST_BYTES_PER_S = 1e6
_LEAST_SHARE = 0.1


@dataclass(frozen=True)
class GentleCopies:
    """Copies that make way for strangers; travels to worker processes.

    Attributes:
        most_bytes_per_s: What a process gets when it is alone, by tier.
    """

    most_bytes_per_s: dict[str, float]

    def tier(self, name: str) -> GentlePacing | None:
        """The pacing of a tier; None where it has no copies."""
        most = self.most_bytes_per_s.get(name, 0.0)
        return GentlePacing(gentle_pace(most)) if most else None


@dataclass(frozen=True)
class GentlePacing:
    """One rate for all copies of a process to a tier: what one has learnt, the next one knows."""

    pace: GentlePace

    def __call__(self, step: int) -> AbstractContextManager[GentlePace]:
        """The pace of the copy of a step."""
        return contextlib.nullcontext(self.pace)


def gentle_pace(most_bytes_per_s: float) -> GentlePace:
    """A pace that finds its rate below a limit, and never stops."""
    least = min(_LEAST_BYTES_PER_S, _LEAST_SHARE * most_bytes_per_s)
    return GentlePace(Backoff(most_bytes_per_s, least_bytes_per_s=least))


def transfers_for(job: Job) -> GentleCopies | None:
    """What [checkpoint] asks for; None where copies only have the caps of their tiers."""
    settings = job.checkpoint
    if not settings.back_off:
        return None
    rates = {
        "run": 1e6 * settings.drain_megabytes_per_s if settings.fast else 0.0,
        "mirror": 1e6 * settings.mirror_megabytes_per_s if settings.mirror else 0.0,
    }
    return GentleCopies(rates)
