"""The guard of a run: from [guard] to a `Guard`, and from its findings to the run's records."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from outlast.distributed.group import gather_on_first
from outlast.errors import DataCorruptionError
from outlast.guard import Guard, Policy, guard
from outlast.guard.findings import HARMFUL, LASTING
from outlast.guard.policy import collapsed
from outlast.records import CorruptionDetected, CoverageWarned, Guarded, MemberLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from torch.optim import Optimizer

    from outlast.job import GuardSection


_MOST_GAPS = 40


class RunGuard:
    """The guard of a run, for a training loop.

    Args:
        settings: The section [guard].
        seed: Of the slices that are checked.
        model: The model or its DDP or FSDP2 wrapper.
        optimizers: Its optimizers.

    Attributes:
        warnings: What the guard had to say when it was installed.
        told: Findings of all ranks that `news` has given; on rank 0.
        inside: Whether the engine makes the attempts itself, before it sums over other processes.
        records_warnings: Whether `news` has what the guard says of its coverage in a step; else it
            is a warning of Python's.
        may_go_back: Whether the loop goes back where memory was wrong; see `Runtime.go_back`.
    """

    def __init__(
        self, settings: GuardSection, seed: int, model: nn.Module, optimizers: list[Optimizer]
    ) -> None:
        self._reported = self.told = 0
        self._gave_up = False
        self._passes: list[Callable[[bool], torch.Tensor]] = []
        self._losses: list[torch.Tensor] = []
        self._attempts: Iterator[int] = iter(())
        # Steps of the loop and of the optimizer, where from then on both go up together.
        self._counts: list[tuple[int, int]] = [(0, 0)]
        self.inside = self.may_go_back = self.records_warnings = False
        self._said: list[tuple[int, str]] = []
        policy = Policy(
            level=settings.policy,
            modules=settings.modules,
            correct=settings.correct,
            persistent=settings.persistent,
            seed=seed,
            audit=settings.audit_share,
            audit_steps=settings.audit != "auto",
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.guard: Guard = guard(model, optimizers, policy)
        self.warnings = [str(item.message) for item in caught]
        self.guard.on_warning = self._say

    def _say(self, message: str) -> None:
        if self.records_warnings:
            self._said.append((self.guard.watch.step + 1, message))
        else:
            warnings.warn(message, stacklevel=4)

    def attempts(self) -> Iterator[int]:
        """See `Guard.attempts`."""
        with self._noting_what_stays_wrong():
            yield from self.guard.attempts()

    def micro_batch(
        self, passes: Callable[[bool], torch.Tensor], *, last: bool, begin_again: Callable[[], None]
    ) -> torch.Tensor:
        """Forward and backward passes of one of a step's micro-batches, or of all of them again.

        Args:
            passes: Does those of this one and returns its loss; told whether to leave gradients
                unsummed, as a repeated micro-batch does that is not the last.
            last: Whether gradients are complete with it.
            begin_again: Puts the gradients back to zero.

        Returns:
            The micro-batch's loss, with what repeated passes of those before have changed in
            theirs.

        Raises:
            DataCorruptionError: On all ranks, when numbers stay wrong.
        """
        if not self._passes:
            self._attempts = self.attempts()
            next(self._attempts)
        self._passes.append(passes)
        self._losses.append(passes(False))
        loss = self._losses[-1]
        if not last:
            return loss
        for _ in self._attempts:
            begin_again()
            *others, final = self._passes
            losses = [*(repeat(True) for repeat in others), final(False)]
            # Repeated without a fault, those before have not changed: the loss keeps its bits.
            pairs = zip(losses[:-1], self._losses[:-1], strict=True)
            loss = losses[-1] + sum(now - before for now, before in pairs)
        self._passes, self._losses = [], []
        return loss

    def audit(
        self, reload: Callable[[Any], Any], passes: Callable[[Any], torch.Tensor], batch: Any
    ) -> torch.Tensor:
        """See `Guard.audit`; `reload` reads a batch again."""
        return self.guard.audit(passes, batch, reload=lambda: reload(batch))

    def repeat_steps(self) -> None:
        """Let audits repeat a step's passes; the loop does nothing else in its attempts."""
        if self.guard.replays is not None:
            self.guard.replays.repeats_steps = True

    def refuse_audits(self, why: str) -> None:
        """Audit no passes, since they cannot be repeated."""
        if self.guard.replays is not None:
            self.guard.replays.refuse(why)
            self.warnings.append(f"guard.audit: passes are not audited: {why}")

    def restart(self, step: int) -> None:
        """Weights were loaded, or are first ones: `step` steps are done; see `Guard.restart`."""
        self._counts = [(step, step)]
        self._passes, self._losses = [], []
        self.guard.restart(step)

    def go_back(self, step: int) -> None:
        """The state is that of an earlier step, from before what was found; see `Guard.go_back`."""
        findings = self.guard.ledger.findings
        for number in range(self._reported, len(findings)):
            if findings[number].outcome in HARMFUL:
                findings[number] = replace(findings[number], outcome="restored")
        self._passes, self._losses = [], []
        own = self._own_steps(step)
        self._counts = [pair for pair in self._counts if pair[0] <= step]
        self.guard.go_back(own)

    def stepped(self, step: int) -> None:
        """`step` steps of the loop are done, of which not every one may have updated weights."""
        own = self.guard.watch.step
        if self._own_steps(step) != own:
            self._counts.append((step, own))

    def has_left(self, step: int) -> bool:
        """Return whether the state may be that after `step` steps of the loop."""
        return self.guard.has_left(self._own_steps(step)) is not False

    def _own_steps(self, step: int) -> int:
        pairs = (pair for pair in reversed(self._counts) if pair[0] <= step)
        loop, own = next(pairs, (step, step))
        return own + step - loop

    def give_up(self) -> None:
        """Count ranks whose numbers stay wrong as lost."""
        self._gave_up = True

    def memory_faults(self) -> tuple[int | None, str]:
        """`Guard.intact_step` in steps of the loop, and what was found on this rank."""
        news = self.guard.ledger.findings[self._reported :]
        found = next((item for item in news if item.operation in LASTING), None)
        what = f"{found.operation} of {found.module}" if found is not None else ""
        own = self.guard.intact_step
        if own is None:
            return None, what
        # Before the first, the state is none of this attempt's.
        pairs = (pair for pair in reversed(self._counts) if pair[1] <= own)
        loop, counted = next(pairs, (own, own))
        return loop + own - counted, what

    def follow(self, model: nn.Module, optimizers: list[Optimizer]) -> None:
        """Guard another model from now on, in the place of this one; the counts continue.

        `restart` must follow.
        """
        before = self.guard
        before.remove()
        self.guard = guard(model, optimizers, before.policy)
        self.guard.on_warning = self._say
        if self.guard.replays is not None and before.replays is not None:
            self.guard.replays.follow(before.replays)
        self.guard.watch.seconds = before.seconds or 0.0
        self.guard.ledger.findings += before.ledger.findings
        for (module, operation), site in before.ledger.sites.items():
            # Its last check was one of another watch.
            vars(self.guard.ledger.site(module, operation)).update(vars(site), last=-1)

    def check_state(self, *, last: bool) -> None:
        """See `Guard.before_save`, and after the last step `Guard.finish`."""
        with self._noting_what_stays_wrong():
            (self.guard.finish if last else self.guard.before_save)()

    @contextlib.contextmanager
    def _noting_what_stays_wrong(self) -> Iterator[None]:
        try:
            yield
        except DataCorruptionError:
            self._gave_up = not self.may_go_back
            raise

    @property
    def found(self) -> int:
        """Findings and warnings of this process that are not recorded yet."""
        return len(self.guard.ledger.findings) - self._reported + len(self._said)

    def news(self) -> list[CorruptionDetected | CoverageWarned | MemberLost]:
        """All ranks' findings and warnings since the last call; all ranks call it together.

        Where the attempts have ended with wrong values, their ranks count as lost.

        Returns:
            Events on rank 0, nothing on the others.
        """
        mine = self.guard.ledger.findings[self._reported :]
        self._reported += len(mine)
        said, self._said = self._said, []
        everyone = gather_on_first((mine, said))
        # All ranks mostly say the same.
        warned = {
            message: CoverageWarned(step, rank, message)
            for rank, (_, texts) in reversed([*enumerate(everyone)])
            for step, message in texts
        }
        events = [
            CorruptionDetected(
                step=finding.step,
                module=finding.module,
                operation=finding.operation,
                device=finding.device,
                found_on=finding.rank,
                rows=finding.rows,
                magnitude=finding.magnitude,
                outcome=finding.outcome,
            )
            for findings, _ in everyone
            for finding in findings
        ]
        self.told += len(events)
        if not self._gave_up:
            return [*events, *warned.values()]
        corrupt = {event.found_on: event for event in events if event.outcome in HARMFUL}
        lost = [
            MemberLost(
                wrong.step,
                f"rank {wrong.found_on}",
                "corrupt",
                0.0,
                f"{wrong.operation} of {wrong.module} stays wrong on {wrong.device}",
            )
            for wrong in corrupt.values()
        ]
        return [*events, *warned.values(), *lost]

    def summary(self, step: int) -> Guarded:
        """Summarise the checks of this attempt so far."""
        coverage = self.guard.coverage()
        kinds = Counter(item.kind for item in coverage if not item.operations)
        uncovered = self.guard.uncovered()
        calls = {name: f"{count}x" for name, count in sorted(uncovered.operations.items())}
        gaps = [*collapsed(uncovered.parameters).items(), *collapsed(calls).items()]
        parameters, at_rest = self.guard.at_rest()
        audits = self.guard.audits()
        return Guarded(
            step=step,
            policy=self.guard.policy.level,
            checks=self.guard.ledger.checks,
            seconds=self.guard.seconds,
            operations={name: asdict(item) for name, item in self.guard.certificate().items()},
            modules=len(coverage),
            uncovered=dict(kinds),
            parameters=parameters,
            at_rest=at_rest,
            trained=uncovered.elements,
            unwatched=uncovered.unwatched,
            flops=uncovered.flops,
            gaps=dict(gaps[:_MOST_GAPS]),
            coverage="" if coverage.step is None else str(coverage.step),
            audits={} if audits is None else {**asdict(audits), "share": audits.share},
        )
