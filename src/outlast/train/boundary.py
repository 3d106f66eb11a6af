"""What is known between two steps: those since the last record, and what the ranks agreed on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from outlast.records import AttemptEnded, StepsDone


class StateMovedError(Exception):
    """The state has become that of another step: a group that was behind has taken a peer's.

    Attributes:
        step: Steps that it has done.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"the state is that of step {step} now")
        self.step = step


@dataclass
class Interval:
    """What has happened since the last step record."""

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)

    def record(
        self,
        step: int,
        *,
        gradient_norm: float,
        learning_rate: float,
        tokens: int,
        seconds: dict[str, float],
    ) -> StepsDone:
        """The event of these steps, of which `step` is the last; see there."""
        return StepsDone(
            step=step,
            steps=len(self.losses),
            loss=sum(self.losses) / len(self.losses),
            gradient_norm=gradient_norm,
            learning_rate=learning_rate,
            tokens=tokens,
            step_seconds=[round(second, 6) for second in self.step_seconds],
            seconds=seconds,
        )


class Agreed(NamedTuple):
    """What any rank wants at the end of a step.

    Attributes:
        stopping: To stop.
        resizing: To stop because the run shall go on with another number of processes.
        saving: To save.
        grown: To say more of its memory.
        planning: To plan anew what is kept in memory.
    """

    stopping: bool
    resizing: bool
    saving: bool
    grown: bool
    planning: bool


@dataclass(frozen=True)
class Outcome:
    """How an attempt went.

    Attributes:
        last_step: Steps done in the run when it ended.
        completed: Whether these are all steps of the job.
        reason: What asked for the stop, or an empty text.
    """

    last_step: int
    completed: bool
    reason: str

    def ended(self, seconds: dict[str, float]) -> AttemptEnded:
        """The event that closes the attempt; `seconds` are those since the last step record."""
        outcome = "completed" if self.completed else "to_be_continued"
        return AttemptEnded(self.last_step, outcome, self.reason, seconds)
