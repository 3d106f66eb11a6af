"""Totals of gradient coding, guard and recovery over all attempts of a run."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Any

from outlast.records.events import (
    CorruptionDetected,
    GradientsCoded,
    Guarded,
    MemberLost,
    MembershipChanged,
    StateRecovered,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.records.log import Record, Run


DUPLICATE = "coding.duplicate"
"""`CorruptionDetected.operation` where two processes have computed one chunk."""
_MOSTLY_SLOW = 0.5
_FEWEST_STEPS = 5


@dataclass(frozen=True)
class CodedStep:
    """One optimizer step.

    Attributes:
        step: Steps done after it.
        scheme: As in coding.scheme.
        replicas: Number of data-parallel replicas.
        stragglers: Those that were not waited for.
        claims: Chunks computed by another replica than their owner.
        duplicates: Chunks computed twice.
        lost: Chunks that the gradient lacks.
        error: Certified error, 0 where the gradient is exact.
        seconds: Time that the gradient took.
        waiting_seconds: What waiting for every replica would have taken at least.
        protocol: As in coding.protocol.
    """

    step: int
    scheme: str
    replicas: int
    stragglers: tuple[int, ...]
    claims: int
    duplicates: int
    lost: int
    error: float
    seconds: float
    waiting_seconds: float
    protocol: str = "all_reduce"


@dataclass(frozen=True)
class Slowness:
    """Share of steps in which a replica was slow.

    Attributes:
        steps: Steps in which it took part.
        slow_steps: Those in which it was a straggler.
        persistence: Share of its slow steps among the steps that follow a slow one of its own;
            None where no step follows one.
    """

    steps: int
    slow_steps: int
    persistence: float | None

    @property
    def share(self) -> float:
        """Share of its steps in which it was slow."""
        return self.slow_steps / self.steps


@dataclass(frozen=True)
class CodingTotals:
    """All steps that count, each as it was done the last time.

    Attributes:
        steps: In order.
        disagreements: Chunks that two processes have computed with different results, of all
            attempts.
    """

    steps: tuple[CodedStep, ...]
    disagreements: tuple[CorruptionDetected, ...] = ()

    @property
    def scheme(self) -> str:
        """The code of the last step."""
        return self.steps[-1].scheme

    @property
    def description(self) -> str:
        """The code of the last step, and the way of its sum where that is no all-reduce."""
        protocol = self.steps[-1].protocol
        return self.scheme if protocol == "all_reduce" else f"{self.scheme} ({protocol})"

    @property
    def replicas(self) -> int:
        """Number of replicas of the last step."""
        return self.steps[-1].replicas

    @cached_property
    def slow_steps(self) -> tuple[CodedStep, ...]:
        """Steps with a straggler."""
        return tuple(step for step in self.steps if step.stragglers)

    @cached_property
    def inexact(self) -> tuple[CodedStep, ...]:
        """Steps whose gradient is not exact."""
        return tuple(step for step in self.steps if step.lost or step.error > 0)

    @property
    def claims(self) -> int:
        """Chunks computed by another replica than their owner."""
        return sum(step.claims for step in self.steps)

    @property
    def duplicates(self) -> int:
        """Chunks computed twice."""
        return sum(step.duplicates for step in self.steps)

    @property
    def lost(self) -> int:
        """Chunks that are in no gradient."""
        return sum(step.lost for step in self.steps)

    @property
    def worst_error(self) -> float:
        """Largest certified error of a step."""
        return max(step.error for step in self.steps)

    @property
    def mean_error(self) -> float:
        """Certified error, mean over all steps."""
        return math.fsum(step.error for step in self.steps) / len(self.steps)

    @property
    def coded_seconds(self) -> float:
        """Time that the gradients took."""
        return math.fsum(step.seconds for step in self.steps)

    @property
    def waiting_seconds(self) -> float:
        """Time that waiting for every replica would have taken at least.

        Where nobody was slow, coding waits as any training does, and takes what it took.
        """
        return self.coded_seconds + self._difference_seconds

    @property
    def saved_seconds(self) -> float:
        """Time saved against waiting at least; 0 where no gain is certain.

        Both times are measured: for a fixed code waiting is that for all replicas under the same
        code, whose larger load is not held against it.
        """
        return max(self._difference_seconds, 0.0)

    @property
    def _difference_seconds(self) -> float:
        # Steps are chosen by who was slow, not by how they went, or noise would add up to a gain.
        return math.fsum(step.waiting_seconds - step.seconds for step in self.slow_steps)

    @cached_property
    def by_replica(self) -> dict[int, Slowness]:
        """Number of slow steps of each replica, by its number."""
        found = {}
        for replica in range(max(step.replicas for step in self.steps)):
            there = [step for step in self.steps if replica < step.replicas]
            slow = {step.step for step in there if replica in step.stragglers}
            followers = [step.step for step in there if step.step - 1 in slow]
            again = sum(step in slow for step in followers)
            persistence = again / len(followers) if followers else None
            found[replica] = Slowness(len(there), len(slow), persistence)
        return found

    @property
    def advice(self) -> str | None:
        """Recommended changes, in a sentence for each reason; None where all is well."""
        said = []
        if self.disagreements:
            count, last = len(self.disagreements), self.disagreements[-1]
            times = "once" if count == 1 else f"{count:,} times"
            said.append(
                f"{times} two processes have got different gradients of a chunk, last "
                f"{last.device} in step {last.step + 1:,}: one of them computes wrong values, "
                'which guard.policy = "linear" would find and correct.'
            )
        if len(self.steps) >= _FEWEST_STEPS:
            for replica, item in self.by_replica.items():
                if replica < self.replicas and item.share > _MOSTLY_SLOW:
                    said.append(
                        f"replica {replica} was slow in {100 * item.share:.0f} % of the steps: "
                        "give it less work or replace it, coding hides it but does not remove it."
                    )
            if not self.slow_steps and self.scheme == "coverage":
                said.append(
                    "no replica was slow: coverage has cost next to nothing and saved nothing, and "
                    'coding.scheme = "off" would do as well.'
                )
            elif not self.slow_steps:
                said.append(
                    f"no replica was slow, while {self.scheme} lets every replica compute several "
                    'shares: take coding.scheme = "coverage", which does that only when it pays, '
                    'or "off".'
                )
            elif not self.saved_seconds:
                said.append(
                    "coding saved no time against waiting for all, as far as can be said: with "
                    'such short delays coding.scheme = "off" does as well.'
                )
        if count := len(self.inexact):
            said.append(
                f"{count:,} step{' was' if count == 1 else 's were'} made with an inexact "
                f"gradient, with a certified error of up to {self.worst_error:.3g}: allow more "
                "time (coding.deadline_seconds) or more copies (coding.copies) if the loss suffers."
            )
        return " ".join(said) or None


def coding_totals(run: Run) -> CodingTotals | None:
    """Gradient coding in `run`, or None where nothing of it is recorded.

    An attempt that was killed counts up to its last record. Steps that a later attempt has done
    again, or has still to do, count as in `Run.steps`: not as the earlier one did them.
    """
    steps: dict[int, CodedStep] = {}
    for record, event in run.of(GradientsCoded):
        rows = zip(
            event.stragglers,
            event.claims,
            event.duplicates,
            event.lost,
            event.errors,
            event.coded_seconds,
            event.waiting_seconds,
            repeat(event.protocol),
            strict=False,
        )
        first = event.step - len(event.errors) + 1
        for step, (stragglers, *counts) in enumerate(rows, start=first):
            if step <= run.kept_until[record.attempt]:
                slow = tuple(stragglers)
                steps[step] = CodedStep(step, event.scheme, event.replicas, slow, *counts)
    if not steps:
        return None
    disagreements = tuple(
        event for _, event in run.of(CorruptionDetected) if event.operation == DUPLICATE
    )
    return CodingTotals(tuple(steps[step] for step in sorted(steps)), disagreements)


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
        audits: Audits of all attempts in one sentence; empty where none are made.
    """

    policy: str
    operations: dict[str, OperationChecks]
    seconds: float | None
    modules: int
    uncovered: dict[str, int]
    last: Guarded
    findings: list[CorruptionDetected]
    audits: str = ""

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
        """Number of findings by outcome."""
        return dict(Counter(finding.outcome for finding in self.findings))


def guard_totals(run: Run) -> GuardTotals | None:
    """The guard's work in `run`, or None where nothing of it is recorded.

    An attempt that was killed counts up to its last record.
    """
    last = {record.attempt: event for record, event in run.of(Guarded)}
    findings = [event for _, event in run.of(CorruptionDetected)]
    if not last:
        return None
    newest = last[max(last)]
    times = [event.seconds for event in last.values()]
    operations = {}
    for name in sorted({name for event in last.values() for name in event.operations}):
        parts = [event.operations.get(name, {}) for event in last.values()]
        parts = [part for part in parts if part.get("checks")]
        checks = sum(int(part["checks"]) for part in parts)
        squares = math.fsum(part["checks"] * float(part["spread"]) ** 2 for part in parts)
        points = (float(part["detection_point"]) for part in parts if part.get("detection_point"))
        operations[name] = OperationChecks(
            checks,
            math.sqrt(squares / checks) if checks else 0.0,
            max((float(part["worst"]) for part in parts), default=0.0),
            max(points, default=None),
        )
    return GuardTotals(
        policy=newest.policy,
        operations=operations,
        seconds=None if None in times else math.fsum(time for time in times if time is not None),
        modules=newest.modules,
        uncovered=newest.uncovered,
        last=newest,
        findings=findings,
        audits=_audits([event.audits for event in last.values() if event.audits]),
    )


def _audits(reports: Sequence[dict[str, Any]]) -> str:
    """Number of audits, what they have compared, and what they took."""
    if not reports:
        return ""

    def total(name: str) -> float:
        return math.fsum(report[name] for report in reports)

    newest = reports[-1]
    replays, steps = int(total("replays")), int(total("steps"))
    said = (
        f"{replays:,} audits of passes and {int(total('updates')):,} of updates in {steps:,} steps"
    )
    if replays:
        where = "on another rank" if newest["elsewhere"] else "on the same device"
        how = "bit for bit"
        if newest["exact"] is False:
            how = f"within {newest['tolerance']:.2g} of a tensor's norm in the median"
        said += f", repeated {where} and compared {how} ({int(total('compared')):,} tensors)"
    if newest["why_not"]:
        said += f"; passes are not audited: {newest['why_not']}"
    elif newest["share"]:
        said += f"; one {newest['unit'] or 'micro-batch'} of {round(1 / newest['share']):,} now"
    if newest["updates_why_not"]:
        said += f"; updates are not audited: {newest['updates_why_not']}"
    seconds, of = total("seconds"), total("steps_seconds")
    cost = f"{seconds:.2f} s ({seconds / of:.2%} of the steps' time)" if of else f"{seconds:.2f} s"
    return f"{said}; {cost}"


Recovery = StateRecovered | MemberLost | MembershipChanged
"""The events of recovery."""
_SOURCES = {
    "peer": "a peer",
    "parity": "peers' parity",
    "memory": "memory",
    "disk": "this node's disk",
    "shared": "the shared file system",
    "approximate": "the stages beside it, approximately",
}


def recovery_words(event: Recovery) -> str:
    """`event` as one line."""
    match event:
        case StateRecovered():
            source = _SOURCES.get(event.source, event.source)
            words = f"step {event.step}: state taken from {source} in {event.seconds:.2f} s"
            if event.lost_steps > 0:
                words += f", {event.lost_steps} step{'s' if event.lost_steps > 1 else ''} again"
            cause = f" after {event.cause}" if event.cause else ""
            return words + cause + "".join(f"; {name}" for name in event.passed_over)
        case MemberLost():
            note = f": {event.note}" if event.note else ""
            return f"step {event.step}: {event.member} {event.cause}{note}"
        case MembershipChanged():
            return (
                f"step {event.step}: {event.after} in the place of {event.before} "
                f"({event.reason}), {event.seconds:.2f} s without a step"
            )


@dataclass(frozen=True)
class RecoveryTotals:
    """Losses and recoveries of a run.

    Attributes:
        events: In order, of all ranks.
        causes: Number of losses by cause.
        sources: Number of recoveries by source.
        lost_steps: Steps that are done again, as far as is known.
    """

    events: list[tuple[Record, Recovery]]
    causes: dict[str, int]
    sources: dict[str, int]
    lost_steps: int

    def sentence(self) -> str:
        """All in a few words."""
        causes, sources = (
            ", ".join(
                f"{name} {count} time{'s' if count > 1 else ''}" for name, count in found.items()
            )
            for found in (self.causes, self.sources)
        )
        again = f"steps done again: {self.lost_steps}" if self.lost_steps else ""
        said = [causes, f"state from {sources}" if sources else "", again]
        return "; ".join(filter(None, said)) or "nothing was lost"


def recovery_totals(run: Run) -> RecoveryTotals | None:
    """The losses and recoveries of all ranks; None for a run without any."""
    events: list[tuple[Record, Recovery]] = [
        (record, record.event) for record in run.records if isinstance(record.event, Recovery)
    ]
    if not events:
        return None
    causes = Counter(event.cause for _, event in events if isinstance(event, MemberLost))
    recovered = [event for _, event in events if isinstance(event, StateRecovered)]
    sources = Counter(event.source for event in recovered)
    lost_steps = sum(max(event.lost_steps, 0) for event in recovered)
    return RecoveryTotals(events, dict(causes), dict(sources), lost_steps)
