"""The event of a checkpoint that was copied on to a lower tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outlast.records.events import Event


@dataclass(frozen=True)
class CheckpointCopied(Event):
    """A checkpoint is complete in a slower, safer place as well.

    Attributes:
        place: The tier.
        seconds: Time of the copy, without the wait before it.
        bytes: What rank 0 has written there.
    """

    kind: ClassVar[str] = "checkpoint_copied"
    step: int
    place: str
    seconds: float
    bytes: int
