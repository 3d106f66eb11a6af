"""Which numbers of a run's events are worth a curve, and which of their words worth a note."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from outlast.records.copied import CheckpointCopied
from outlast.records.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointFailed,
    CheckpointRestored,
    CheckpointSaved,
    EnergyMeasured,
    Evaluated,
    GradientsCoded,
    Guarded,
    MemberLost,
    MembershipChanged,
    Ready,
    StateRecovered,
    StepsDone,
    StopRequested,
    WrongNumbers,
)
from outlast.records.predicted import MemoryMeasured
from outlast.records.recovered import recovery_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from outlast.records.events import Event


class Sink(Protocol):
    """Receives events as they are written."""

    def write(self, event: Event) -> None:
        """Take one event."""

    def close(self) -> None:
        """Write what is left."""


class Curves:
    """The points that one attempt adds to the curves of its run, counts of faults among them.

    Args:
        counts: What earlier attempts have counted, by name.
    """

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self._counts = dict(counts or {})

    def points(self, event: Event) -> dict[str, float]:
        """What `event` adds, as ``{name: value}``; counts are those of the run so far."""
        found = scalars(event)
        for name in _counted(event):
            self._counts[name] = self._counts.get(name, 0) + 1
            found[name] = float(self._counts[name])
        return found


def counted_in(events: Iterable[Event]) -> dict[str, int]:
    """How often each kind of fault is among the events of earlier attempts, by its curve."""
    counts: dict[str, int] = {}
    for name in (name for event in events for name in _counted(event)):
        counts[name] = counts.get(name, 0) + 1
    return counts


def scalars(event: Event) -> dict[str, float]:
    """The curves to which `event` alone adds a point, as ``{name: value}``."""
    match event:
        case StepsDone():
            wall_seconds = sum(event.step_seconds)
            found = {
                "train/loss_nats": event.loss,
                "train/gradient_norm": event.gradient_norm,
                "train/learning_rate": event.learning_rate,
                "train/step_seconds": wall_seconds / max(event.steps, 1),
            }
            found |= {f"time/{name}_seconds": value for name, value in event.seconds.items()}
            found |= {f"metrics/{name}": value for name, value in event.metrics.items()}
            return found
        case Evaluated():
            found = {"validation/loss_nats": event.loss}
            if event.bits_per_byte is not None:
                found["validation/bits_per_byte"] = event.bits_per_byte
            return found
        case EnergyMeasured(joules=float(joules)):
            found = {"energy/joules": joules}
            if event.seconds > 0:
                found["energy/watts"] = joules / event.seconds
            if event.tokens:
                found["energy/joules_per_token"] = joules / event.tokens
            return found
        case MemoryMeasured():
            names = ("allocated", "reserved", "resident")
            peaks = [most for name in names if (most := event.most(name)) is not None]
            return {f"memory/{name}_bytes": float(peak) for name, peak in peaks}
        case _:
            return _of_reliability(event)


def _of_reliability(event: Event) -> dict[str, float]:
    """Points of checkpoints, checks, certificates and recoveries."""
    match event:
        case CheckpointSaved():
            return {
                "checkpoint/blocked_seconds": event.blocked_seconds,
                "checkpoint/seconds": event.seconds,
                "checkpoint/bytes": float(event.bytes),
            }
        case CheckpointCopied():
            return {
                "checkpoint/copy_seconds": event.seconds,
                "checkpoint/copied_bytes": float(event.bytes),
            }
        case CheckpointRestored():
            return {"checkpoint/restore_seconds": event.seconds}
        case Ready():
            return {"time/until_ready_seconds": event.seconds}
        case Guarded():
            found = {"guard/checks": float(event.checks)}
            if event.seconds is not None:
                found["guard/seconds"] = event.seconds
            return found
        case WrongNumbers():
            # Exact checks have no size: they are wrong or not.
            finite = math.isfinite(event.magnitude)
            return {"faults/wrong_numbers_sigmas": event.magnitude} if finite else {}
        case StateRecovered():
            found = {"recovery/seconds": event.seconds}
            if event.lost_steps >= 0:
                found["recovery/lost_steps"] = float(event.lost_steps)
            return found
        case MembershipChanged():
            return {"recovery/members": float(event.after)}
        case GradientsCoded():
            return {
                "certificate/error": max(event.errors, default=0.0),
                "certificate/lost_chunks": float(sum(event.lost)),
                "certificate/stragglers": float(sum(map(len, event.stragglers))),
            }
        case _:
            return {}


def _counted(event: Event) -> tuple[str, ...]:
    """Names of the counts to which `event` adds one."""
    match event:
        case WrongNumbers(outcome="persistent" | "detected"):
            return "faults/wrong_numbers", "faults/not_put_right"
        case WrongNumbers():
            return ("faults/wrong_numbers",)
        case MemberLost():
            return ("faults/members_lost",)
        case StateRecovered() | CheckpointRestored():
            return ("faults/restarts",)
        case CheckpointFailed():
            return ("faults/failed_checkpoints",)
        case _:
            return ()


def notes(event: Event) -> dict[str, str]:
    """What of `event` a person wants to read as words, as ``{name: text}``; the last one counts."""
    match event:
        case AttemptStarted():
            return {
                "outlast/processes": str(event.world_size),
                "outlast/fingerprint": event.fingerprint,
            }
        case AttemptEnded():
            reason = f" ({event.reason})" if event.reason else ""
            return {"outlast/outcome": event.outcome + reason}
        case StopRequested():
            return {"outlast/stop": f"step {event.step}: {event.reason}"}
        case WrongNumbers():
            where = f"{event.operation} of {event.module} on rank {event.found_on}"
            return {"outlast/wrong_numbers": f"step {event.step}: {where}: {event.outcome}"}
        case MemberLost() | StateRecovered() | MembershipChanged():
            return {f"outlast/{event.kind}": recovery_words(event)}
        case CheckpointFailed():
            return {"outlast/failed_checkpoint": f"step {event.step}: {event.reason}"}
        case _:
            return {}
