"""Which of several places a state is restored from: the one after which the run is soonest back.

Restoring ``size`` bytes at ``bytes_per_s`` takes ``size / bytes_per_s`` seconds; steps that the
state has not done are done again. The sum is compared, so a slower place with a newer state can
win, and equal states come from the fastest place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

BYTES_PER_S = {
    "peer": 4e9,
    "parity": 1e9,
    "memory": 3e9,
    "disk": 6e8,
    "shared": 3e8,
}
"""Of a process, where nothing is measured: assumed, in the order peer copy > memory > parity >
node's disk > shared file system. A peer's state lies in its own live memory, on the same step."""


@dataclass(frozen=True)
class Candidate:
    """A state that could be restored.

    Attributes:
        source: ``peer``, ``parity``, ``memory``, ``disk`` or ``shared``.
        step: Steps that it has done.
        size: Bytes that a process reads.
        bytes_per_s: Measured rate of a process; None: the assumed one of the source.
    """

    source: str
    step: int
    size: int
    bytes_per_s: float | None = None

    @property
    def seconds(self) -> float:
        """Of restoring it."""
        return self.size / (self.bytes_per_s or BYTES_PER_S[self.source])


def cheapest(candidates: Iterable[Candidate], step_seconds: float) -> Candidate | None:
    """The candidate after which the run is soonest where it was; None where there is none.

    Args:
        candidates: In any order; of equals the first.
        step_seconds: Of a training step.
    """
    found = list(candidates)
    newest = max((candidate.step for candidate in found), default=0)

    def seconds(each: Candidate) -> float:
        return each.seconds + (newest - each.step) * step_seconds

    return min(found, key=seconds, default=None)
