"""The copies of checkpoints to lower tiers: how fast they may be, and how they went."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from outlast.records import CheckpointCopied, Warned

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outlast.checkpoint import DrainResult
    from outlast.checkpoint.tiers import Pacing
    from outlast.records import Event

RUN, MIRROR = "run", "mirror"
"""Names of the tiers: the run's directory below checkpoint.fast, and checkpoint.mirror."""


class Transfers(Protocol):
    """Says how fast copies may be, besides the caps of their tiers; it travels to worker processes.

    See `outlast.cluster.transfers`.
    """

    def tiers(self) -> Mapping[str, Pacing]:
        """For `RUN` and `MIRROR`; copies to a tier that is left out have its cap alone."""


class CopyNotes:
    """Which copies have been written down."""

    def __init__(self) -> None:
        self._last: DrainResult | None = None

    def news(self, results: Sequence[DrainResult]) -> list[Event]:
        """Events of what has ended since the last call.

        A copy that was not made because a newer one came first is nothing that anybody misses.

        Args:
            results: All that are known, oldest first.
        """
        new: list[DrainResult] = []
        for result in reversed(results):
            if result is self._last:
                break
            new.append(result)
        self._last = results[-1] if results else self._last
        return [_event_of(result) for result in reversed(new) if not result.skipped]


def _event_of(result: DrainResult) -> Event:
    if result.error is not None:
        return Warned(result.error)
    return CheckpointCopied(result.step, result.place, result.seconds, result.bytes)
