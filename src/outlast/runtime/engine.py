"""The engine of a run: everything beside its loop.

A driver (the trainer, `outlast.Run`) calls the phases of one `Runtime`, in this order:

| phase | what the runtime does |
|---|---|
| `restore` | fills the state from memory or the newest intact version, and says which |
| `begin` | first step: records the set-up, opens the windows of energy |
| `attempts` | repeats the passes of a step that the guard finds wrong |
| `before_update` | waits until what is being copied out of the tensors is copied |
| `agree` | stop, save, resize: the same decision on all ranks; keeps the state in memory |
| `record` | writes down the steps that are due, findings of the guard, energy, peak memory |
| `save` | begins a save where that was decided, and sees how earlier ones went |
| `evaluated` | takes in a metric, by which the best versions are kept |
| `finish` | the last save, awaited: here a failure must not be passed over |
| `close` | gives back memory and store, also after an error |

Ranks agree in one of two ways: `EveryStep` in the trainer, whose ranks sum the loss up anyway, and
`NowAndThen` in a loop that is not ours.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from outlast.distributed.group import raise_together
from outlast.errors import CheckpointError
from outlast.records import CheckpointRestored, StateRecovered, StopRequested
from outlast.recover.phase_page import EnterPhase, ignore_phase
from outlast.recover.resize import RESIZE
from outlast.runtime.agreement import StepAgreement, StepMessage
from outlast.runtime.cadence import job_cadence
from outlast.runtime.memory import MemoryCheckpoint
from outlast.runtime.saves import RunSaves, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from outlast.checkpoint import SaveResult
    from outlast.distributed.ranks import Ranks
    from outlast.job import LoopJob
    from outlast.records import Event, Stopwatch, TrainingStarted
    from outlast.runtime.cadence import SaveCadence
    from outlast.runtime.communication import CommunicationWait
    from outlast.runtime.guarding import RunGuard
    from outlast.runtime.recording import Recording, StepRecords
    from outlast.runtime.stop import JobChain, StopFlag, Stopping
    from outlast.runtime.watching import SlownessWatch
    from outlast.state.live import State


@dataclass
class StepResult:
    """One step of a loop.

    Attributes:
        step: Steps done with it.
        loss: In nats; of the trainer, this rank's share, until the ranks have agreed.
        gradient_norm: Before clipping.
        learning_rate: As applied.
        metrics: Other figures by name.
        seconds: That it took; None: measured from record to record.
        updated: Whether an optimizer has done its step: nothing is saved before.
    """

    step: int
    loss: torch.Tensor | float | None = None
    gradient_norm: torch.Tensor | float = math.nan
    learning_rate: torch.Tensor | float = math.nan
    metrics: Mapping[str, torch.Tensor | float] | None = None
    seconds: float | None = None
    updated: bool = True


@dataclass(frozen=True)
class Decision:
    """The decision of all ranks after a step.

    Attributes:
        stop: Why to stop; empty: continue.
        save: Save now.
        resizing: Stop in order to continue with a different number of processes.
        findings: Ranks have findings of the guard to record.
        memory_grown: Peak memory is worth a record.
        plan_memory: Plan anew what is kept in memory; None: ask the ranks when it is due.
        messages: To be recorded.
    """

    stop: str = ""
    save: bool = False
    resizing: bool = False
    findings: bool = False
    memory_grown: bool = False
    plan_memory: bool | None = None
    messages: tuple[Event, ...] = ()


class Consensus(Protocol):
    """A way for the ranks of a run to agree."""

    def decide(self, runtime: Runtime, result: StepResult) -> Decision:
        """Decide on a step, alike on all ranks; may make its loss that of all ranks."""

    def keep(self, runtime: Runtime, step: int, decision: Decision) -> None:
        """Keep the state in memory where that is due."""


def _always() -> bool:
    return True


@dataclass
class EveryStep:
    """Agreement at every step, in the all-reduce that sums the loss up.

    Attributes:
        agreement: Of the ranks.
        stop: Set by signals.
        waits: Measures what this rank waits for others.
        stop_when: Gives a reason to stop, or an empty text; asked on every rank.
        resize_wanted: Asked on rank 0.
        writes: Whether the saves are up to this process and its ranks.
        slowness: Compares the ranks' own time.
        spikes: Warns of a loss that jumps.
    """

    agreement: StepAgreement
    stop: StopFlag
    waits: CommunicationWait
    stop_when: Callable[[], str] | None = None
    resize_wanted: Callable[[], bool] | None = None
    writes: Callable[[], bool] = _always
    slowness: SlownessWatch | None = None
    spikes: Callable[[int, float], Event | None] | None = None

    def decide(self, runtime: Runtime, result: StepResult) -> Decision:
        """Exchange a `StepMessage`; the result gets the loss of all ranks."""
        step, slowness = result.step, self.slowness
        if self.stop_when is not None:
            self.stop.reason = self.stop.reason or self.stop_when() or None
        due = runtime.records.is_due(step)
        with runtime.watch("communication"):
            message = StepMessage(
                stop=bool(self.stop.reason),
                resize=self.resize_wanted is not None and self.resize_wanted(),
                save=runtime.saves.cadence.wants(step, writes=self.writes()),
                findings=runtime.guard is not None and runtime.guard.found > 0,
                memory_grown=due and runtime.records.memory.grown(),
                plan_memory=runtime.memory.look(step),
                step_seconds=slowness.share() if slowness is not None and due else [],
            )
            agreed = self.agreement.exchange(result.loss, message)  # type: ignore[arg-type]
            self.waits.take()
        result.loss = agreed.loss
        messages = [self.spikes(step, agreed.loss)] if self.spikes is not None else []
        if slowness is not None and agreed.step_seconds:
            messages.append(slowness.observe(agreed.step_seconds))
        why = RESIZE if agreed.resizing else self.stop.reason or "another rank"
        return Decision(
            stop=why if agreed.stopping else "",
            save=agreed.save,
            resizing=agreed.resizing,
            findings=agreed.findings,
            memory_grown=agreed.memory_grown,
            plan_memory=agreed.plan_memory,
            messages=tuple(message for message in messages if message is not None),
        )

    def keep(self, runtime: Runtime, step: int, decision: Decision) -> None:
        """Keep the state, also of the last step: those that continue may take it from memory."""
        if runtime.memory.is_on:
            runtime.mark("memory")
            runtime.records.write(runtime.memory.keep(step, plan=bool(decision.plan_memory)))


@dataclass
class NowAndThen:
    """Agreement about once a second, for a loop that is not ours."""

    stopping: Stopping

    def decide(self, runtime: Runtime, result: StepResult) -> Decision:
        """Exchange a `BoundaryMessage` where that is due."""
        cadence = runtime.saves.cadence
        save = cadence.due(result.step)
        stop, save = self.stopping.decide(result.step, save=save, common=cadence.is_common)
        return Decision(stop, save)

    def keep(self, runtime: Runtime, step: int, decision: Decision) -> None:
        """Keep the state, but of the last step, which is saved at once."""
        if not decision.stop:
            runtime.records.write(runtime.memory.keep(step, self.stopping.agreement))


@dataclass
class Runtime:
    """Everything that a run does beside its loop, on this rank; see the module for its phases.

    Attributes:
        ranks: This process among the others.
        records: Of this attempt.
        saves: Of this attempt.
        memory: The in-memory checkpoint.
        consensus: How the ranks agree.
        guard: None where nothing is guarded.
        mark: Told in which phase of a step this process is.
        must_restore: The model has no first weights.
        resizing: The run stops to continue with a different number of processes.
    """

    ranks: Ranks
    records: StepRecords
    saves: RunSaves
    memory: MemoryCheckpoint
    consensus: Consensus
    guard: RunGuard | None = None
    mark: EnterPhase = ignore_phase
    must_restore: bool = False
    resizing: bool = False
    _handed_over: bool = field(default=False, init=False)

    @property
    def watch(self) -> Stopwatch:
        """Time by purpose."""
        return self.records.watch

    @property
    def cadence(self) -> SaveCadence:
        """The cadence of saves."""
        return self.saves.cadence

    def restore(self) -> tuple[int, list[Event]]:
        """Restore the newest state: the steps that it has done, and the events.

        Raises:
            CheckpointError: When nothing intact can be restored, or nothing was restored and the
                model has no first weights.
        """
        self.mark("heal")
        step, events = self.memory.restore()
        found = any(isinstance(event, (CheckpointRestored, StateRecovered)) for event in events)
        if self.must_restore and not found:
            raise CheckpointError(
                "the checkpoint that was there when this start began has gone, and the model has "
                "no first weights; run the same command again"
            )
        self.mark("idle", step)
        if self.guard is not None:
            self.guard.restart(step)
        return step, events

    def begin(self, ready: TrainingStarted) -> None:
        """Record that the first step begins, after ``ready.step`` steps."""
        self.records.begin(ready, self.guard)

    def attempts(self) -> Iterator[int]:
        """Yield once, and again where the guard finds numbers that it cannot put right by itself.

        Raises:
            WrongNumbersError: When they stay wrong.
        """
        if self.guard is None or self.guard.inside:
            yield 0
        else:
            yield from self.guard.attempts()

    def before_update(self) -> None:
        """Wait until what is copied out of the tensors is copied, before an optimizer's step."""
        self.memory.settle(self.mark)

    def agree(self, result: StepResult) -> Decision:
        """Decide with all ranks what to do after a step, and keep its state in memory.

        Raises:
            IntegrationError: When a rank of a loop that is not ours does not come to this step.
        """
        self.mark("agree")
        decision = self.consensus.decide(self, result)
        if decision.findings:
            assert self.guard is not None
            self.records.found(self.guard)
        for message in decision.messages:
            self.records.write(message)
        self.consensus.keep(self, result.step, decision)
        return decision

    def record(self, result: StepResult, *, now: bool = False) -> bool:
        """Take in a step, and record those since the last record where that is due.

        Args:
            result: Of the step.
            now: Record it in any case.

        Returns:
            Whether they were recorded.
        """
        due = self.records.step(
            result.step,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            learning_rate=result.learning_rate,
            metrics=result.metrics,
            seconds=result.seconds,
        )
        if due or now:
            self.records.record_steps()
        return due or now

    def record_guard(self, step: int) -> None:
        """Record what the guard has checked up to `step`."""
        if self.guard is not None and self.records.writes:
            self.records.write(self.guard.summary(step))

    def observe(self, seconds: float) -> None:
        """Take in how long a step took, without what a save blocked, and see how saves went."""
        self.saves.cadence.observe_step(seconds, saving=self.saves.under_way)
        self.saves.collect(wait=False)

    def stop(self, step: int, decision: Decision) -> None:
        """Record that the run stops after `step` steps."""
        self.resizing = decision.resizing
        self.records.write(StopRequested(step, decision.stop))

    def save(self, step: int, decision: Decision) -> None:
        """Begin a save of `step` where that was decided, and see how earlier ones went."""
        if decision.save:
            self.saves.begin(step)
        self.saves.collect(wait=False)

    def evaluated(self, metrics: dict[str, float]) -> None:
        """Take in figures of the state that is saved next, by which the best are kept."""
        self.saves.metrics = metrics

    def check_state(self, *, last: bool = False) -> None:
        """Refuse to save weights or moments that have changed in memory since the last step.

        Raises:
            WrongNumbersError: When they have.
        """
        if self.guard is None:
            return
        try:
            if last:
                self.guard.finish()
            else:
                self.guard.before_save()
        finally:
            self.records.found(self.guard)

    def leave(self) -> None:
        """End without a save: nothing newer than the last one can be resumed from."""
        self.saves.collect(wait=True)
        self.memory.close(forget=True)

    def finish(self, step: int, *, made: bool = True) -> None:
        """Save where the run ends and wait for it: here a failure must not be passed over.

        Args:
            step: The last one.
            made: Whether the state of `step` is for this process to save, if it has not.

        Raises:
            CheckpointError: When the newest state is not on disk.
        """
        if self.resizing:
            self.saves.collect(wait=True)
            # Those that continue take it from memory.
            self._handed_over = self.memory.holds(step)
        if not self._handed_over:
            self.saves.end(step, made=made)
        self.memory.close(forget=not self._handed_over)

    def forget(self) -> None:
        """Forget what is kept in memory, which may be wrong: a restart reads a checkpoint."""
        self.memory.close(forget=True)
        if self.guard is not None:
            # Another run may follow in this process.
            self.guard.guard.remove()

    def close(self, *, failed: bool = False, forget: bool = False) -> None:
        """Give up the store and the memory, which is kept for a restart.

        Args:
            failed: Other ranks may wait for this one elsewhere: they are not waited for.
            forget: What is in memory may be wrong: a restart must read a checkpoint.
        """
        self.memory.close(forget=forget)
        self.saves.store.close(drain=not failed, failed=failed)


def loop_runtime(
    job: LoopJob,
    ranks: Ranks,
    recording: Recording,
    stopping: Stopping,
    state: State,
    *,
    note: Callable[[], None],
    chain: JobChain | None = None,
) -> Runtime:
    """The runtime of a loop that is not ours; all ranks make it together.

    Args:
        job: The settings.
        ranks: This process among the others.
        recording: Of the run.
        stopping: Asks the ranks.
        state: What is kept: name -> module, optimizer, or object with a ``state_dict``.
        note: Called before the state is looked at, to bring entries up to date.
        chain: Told of published saves; None: nobody is.
    """
    directory = recording.directory
    store = raise_together(lambda: open_store(job.checkpoint, directory))
    memory = MemoryCheckpoint(job, ranks, directory, store, state, note=note)

    def published(result: SaveResult) -> None:
        stopping.observe_save(result.seconds)
        if ranks.is_first and chain is not None:
            chain.report_progress(result.step, save_seconds=result.seconds)

    def failed(problem: str, told: bool) -> None:
        if ranks.is_first and not told:
            warnings.warn(f"{problem}; training goes on", stacklevel=2)

    saves = RunSaves(
        store,
        state,
        job_cadence(job.checkpoint, ranks, directory, "pace.json"),
        recording.write,
        recording.watch,
        before=lambda _: note(),
        published=published,
        failed=failed,
        one_at_a_time=False,
        names_step=True,
    )
    return Runtime(ranks, recording, saves, memory, NowAndThen(stopping))
