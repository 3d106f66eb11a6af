"""The engine of a run: everything beside its loop.

A driver (the trainer, `outlast.Run`, an adapter in `outlast.integrations`, `outlast run`) makes one
`Runtime`, gives it the parts that were asked for, and calls its phases, in this order:

| phase | what the runtime does |
|---|---|
| `restore` | fills the state from memory or the newest intact version, and says which |
| `go_back` | fills the state with one from before a memory fault that the guard has found |
| `begin` | first step: records the set-up, opens the windows of energy, lets ranks agree |
| `attempts`, `micro_batch` | repeats the passes of a step that the guard finds wrong |
| `before_update` | waits until what is being copied out of the tensors is copied |
| `after_update` | a step is done: `agree`, `keep` and `record`, where all have one place |
| `agree` | stop, save, resize: the same decision on all ranks |
| `keep` | begins to keep the state in memory |
| `record` | writes down what is due: steps, findings of the guard, energy, peak memory, copies |
| `evaluating` | tells time apart that is no part of a step |
| `save` | looks whether the state is what the last step has left, and begins a save of it |
| `evaluated` | takes in a metric, by which the best versions are kept |
| `stop` | the run is to end after this step and its save: makes the guard's last checks |
| `end_steps` | the last step is done: meets the other ranks, makes the guard's last checks |
| `finish` | the last save, awaited: here a failure must not be passed over |
| `leave` | ends the program before its last step, saved and to be continued |
| `abandon` | ends an attempt whose loop begins anew in this process |
| `close` | gives everything back in order, also after an error |

A framework that decides itself when and where to save calls `save` then; one that writes files of
its own tells `save_ended`. What is not asked for is None, and its phases do nothing.

Ranks agree in one of two ways: `StepConsensus` in the trainer, whose ranks sum the loss up anyway,
and `PeriodicConsensus` in a loop that is not ours.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

import torch.distributed as dist

from outlast.distributed.group import gather_objects
from outlast.errors import (
    EXIT_TO_BE_CONTINUED,
    CheckpointError,
    DataCorruptionError,
    RecoverError,
)
from outlast.records import (
    CheckpointInterval,
    CheckpointRestored,
    StateRecovered,
    StopRequested,
    Warned,
)
from outlast.recover.phase_page import EnterPhase, ignore_phase
from outlast.recover.resize import RESIZE
from outlast.runtime.agreement import BoundaryAgreement, StepAgreement, StepMessage
from outlast.runtime.cadence import StepClock
from outlast.runtime.guarding import RunGuard
from outlast.runtime.recording import Recording, StepRecords
from outlast.runtime.saves import RunSaves
from outlast.runtime.stop import JobChain, Stop, StopFlag

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import nn
    from torch.optim import Optimizer

    from outlast.checkpoint import CheckpointStore, SaveHandle, SaveResult
    from outlast.distributed.ranks import Ranks
    from outlast.job import GuardSection, LoopJob
    from outlast.records import Event, Predicted, TrainingStarted
    from outlast.runtime.cadence import SaveCadence
    from outlast.runtime.memory import MemoryCheckpoint
    from outlast.runtime.recording import LoopFacts
    from outlast.runtime.watching import CommunicationWait, SlownessWatch
    from outlast.state.live import State

_EARLY_EVENTS = 1000
"""So many are kept for records that may never be opened."""

_TELL_SECONDS = 1.0
"""One process records what its guard has checked at most this often."""

GOES_ON = "the same command continues from there"


@dataclass
class StepResult:
    """One step of a loop.

    Attributes:
        step: Steps done with it.
        loss: In nats; of the trainer, this rank's share, until the ranks have agreed.
        gradient_norm: Before clipping.
        learning_rate: As applied.
        metrics: Other figures by name; their means are recorded.
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
    """A way for the ranks of a run to agree.

    Attributes:
        every_step: Whether they exchange a message at every step.
    """

    every_step: ClassVar[bool]

    def begin(self, step: int) -> None:
        """The first step begins, after `step` steps; all ranks together."""

    def decide(self, runtime: Runtime, result: StepResult) -> Decision:
        """Decide on a step, alike on all ranks; may make its loss that of all ranks."""

    def observe_save(self, seconds: float) -> None:
        """Take in a save that took `seconds` until it was published."""

    def end(self, step: int) -> None:
        """Meet all ranks after their last step, and agree no more."""


def _always() -> bool:
    return True


@dataclass
class StepConsensus:
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

    every_step: ClassVar[bool] = True

    agreement: StepAgreement
    stop: StopFlag
    waits: CommunicationWait
    stop_when: Callable[[], str] | None = None
    resize_wanted: Callable[[], bool] | None = None
    writes: Callable[[], bool] = _always
    slowness: SlownessWatch | None = None
    spikes: Callable[[int, float], Event | None] | None = None

    def begin(self, step: int) -> None:
        """Nothing: the ranks agree from the first step on."""

    def decide(self, runtime: Runtime, result: StepResult) -> Decision:
        """Exchange a `StepMessage`; the result gets the loss of all ranks, and its seconds."""
        assert runtime.records is not None
        step, slowness, memory = result.step, self.slowness, runtime.memory
        if self.stop_when is not None:
            self.stop.reason = self.stop.reason or self.stop_when() or None
        due = runtime.records.is_due(step)
        with runtime.watch("communication"):
            message = StepMessage(
                stop=bool(self.stop.reason),
                resize=self.resize_wanted is not None and self.resize_wanted(),
                save=runtime.cadence.wants(step, writes=self.writes()),
                findings=runtime.guard is not None and runtime.guard.found > 0,
                memory_grown=due and runtime.records.memory.grown(),
                plan_memory=memory is not None and memory.look(step),
                step_seconds=slowness.share() if slowness is not None and due else [],
            )
            agreed = self.agreement.exchange(result.loss, message)  # type: ignore[arg-type]
            self.waits.take()
        result.loss = agreed.loss
        messages = [self.spikes(step, agreed.loss)] if self.spikes is not None else []
        if slowness is not None and agreed.step_seconds:
            messages.append(slowness.observe(agreed.step_seconds))
        # A signal may come after all have agreed to resize; the launcher has it, too.
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

    def observe_save(self, seconds: float) -> None:
        """Nothing: it is the launcher's or the chain's to stop in time."""

    def end(self, step: int) -> None:
        """Nothing: every step was agreed on."""


class PeriodicConsensus:
    """Agreement about once a second, for a loop that is not ours.

    Args:
        limit_seconds: How long a training may take; None: as long as it needs.
        chain: Knows when the job ends; None: nobody does.
        stop: Asked instead of one of its own.

    Attributes:
        agreement: Of the ranks, between `begin` and `end`; None elsewhere, and for one rank.
    """

    every_step: ClassVar[bool] = False

    def __init__(
        self,
        limit_seconds: float | None = None,
        chain: JobChain | None = None,
        *,
        stop: Stop | None = None,
    ) -> None:
        self.agreement: BoundaryAgreement | None = None
        self._limit_seconds = limit_seconds
        self._chain = chain
        self._stop = stop or Stop(limit_seconds, chain=chain)

    def signals(self) -> AbstractContextManager[Stop]:
        """The context of a training, in which the signals ask for a stop."""
        self._stop = Stop(self._limit_seconds, chain=self._chain)
        return self._stop

    def begin(self, step: int) -> None:
        """Let the ranks of the default process group, if there is one, agree from `step` on."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.agreement = BoundaryAgreement(step) if several else None
        self._stop.training_begins()

    def decide(self, runtime: Runtime, result: StepResult) -> Decision:
        """Exchange a `BoundaryMessage` where that is due.

        Clocks and files are looked at on rank 0 alone.

        Raises:
            IntegrationError: When a rank does not come to this step, because it has fewer or is
                gone.
        """
        step = result.step
        cadence = None if runtime.saves is None else runtime.saves.cadence
        self._stop.observe_step(runtime.clock.step())
        save = cadence is not None and cadence.due(step)
        if self.agreement is None:
            return Decision(self._stop(), save)
        why = self._stop() if self.agreement.rank == 0 else self._stop.signalled
        common = save and cadence is not None and cadence.is_common
        self.agreement.back()
        # A save waits for all ranks, so they see first that all have come to this step.
        if not common and not self.agreement.is_due(step):
            return Decision()
        agreed = self.agreement.exchange(step, bool(why), save, runtime.clock.mean_seconds)
        stop = (why or "a signal to another rank") if agreed.stop else ""
        return Decision(stop, common or agreed.save)

    def observe_save(self, seconds: float) -> None:
        """Take in a save that took `seconds` until it was published."""
        self._stop.observe_save(seconds)

    def ended(self, step: int) -> None:
        """Tell that this rank ends after `step` steps; others that wait for it give up."""
        if self.agreement is not None:
            self.agreement.ended(step)

    def end(self, step: int) -> None:
        """Meet all ranks at the end of their loops, and agree no more.

        Raises:
            IntegrationError: On all ranks, when others did another number of steps.
        """
        agreement, self.agreement = self.agreement, None
        if agreement is not None:
            agreement.meet(step)


@dataclass
class Runtime:
    """Everything that a run does beside its loop, on this rank; see the module for its phases.

    Attributes:
        ranks: This process among the others.
        consensus: How the ranks agree; None: on nothing.
        chain: Told how the run stands; None: nobody is.
        records: Of this attempt; None: nothing is written down.
        saves: Of this attempt; None: nothing is saved, or by somebody else.
        memory: The in-memory checkpoint; None: there is none.
        guard: None where nothing is guarded.
        mark: Told in which phase of a step this process is.
        save_told: Told of each save that was made or has failed; None: a failure is a warning.
        must_restore: The model has no first weights.
        keeps_later: The driver calls `keep` itself, when all that belongs to a step is done.
        clock: Of the steps.
        step: The last step that was done.
        early: The newest events from before the records were open.
        stopped: Why the run has ended before its last step; empty: it has not.
        left: Whether the program has left its loop before the last step.
        resizing: The run stops to continue with a different number of processes.
        returns: How often `go_back` may come to the same step.
        is_right: Whether what memory and checkpoints hold is right, though an error ends the run.
    """

    ranks: Ranks
    consensus: Consensus | None = None
    chain: JobChain | None = None
    records: StepRecords | None = None
    saves: RunSaves | None = None
    memory: MemoryCheckpoint | None = None
    guard: RunGuard | None = None
    mark: EnterPhase = ignore_phase
    save_told: Callable[[SaveResult], None] | None = None
    must_restore: bool = False
    keeps_later: bool = False
    clock: StepClock = field(default_factory=StepClock)
    step: int = 0
    early: list[Event] = field(default_factory=list)
    stopped: str = ""
    left: bool = False
    resizing: bool = False
    returns: int = 0
    is_right: bool = False
    _returned: tuple[int, int] = field(default=(-1, 0), init=False)
    _told_step: int = field(default=0, init=False)
    _told_seconds: float = field(default=0.0, init=False)
    _signals: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self.close(error)

    # Its parts.

    def take_signals(self) -> None:
        """Let the stop signals ask for a stop, until `close`."""
        assert isinstance(self.consensus, PeriodicConsensus)
        self._signals.enter_context(self.consensus.signals())

    def open_records(
        self,
        job: LoopJob,
        device: torch.device,
        facts: LoopFacts,
        *,
        fresh: bool = False,
        prediction: Predicted | None = None,
        display: bool = False,
    ) -> Recording:
        """Record the run in its directory; see `Recording`."""
        found = self.records = Recording(
            job,
            self.ranks,
            device,
            facts,
            fresh=fresh,
            prediction=prediction,
            chain=self.chain,
            display=display,
        )
        return found

    def save_to(
        self,
        store: CheckpointStore,
        state: State | None = None,
        cadence: SaveCadence | None = None,
        *,
        note: Callable[[], None] | None = None,
        raises: bool = False,
    ) -> RunSaves:
        """Save to `store`; see `RunSaves`."""
        found = self.saves = RunSaves(
            store, self.save_ended, state, cadence, self.watch, note=note, raises=raises
        )
        return found

    def install_guard(
        self, settings: GuardSection, seed: int, model: nn.Module, optimizers: Sequence[Optimizer]
    ) -> RunGuard | None:
        """Guard the numbers of each step; None with ``policy = "off"``."""
        if settings.policy == "off":
            return None
        found = self.guard = RunGuard(settings, seed, model, [*optimizers])
        for message in found.warnings:
            if self.records is not None:
                self.write(Warned(message))
            else:
                warnings.warn(message, stacklevel=3)
        return found

    def watch(self, purpose: str) -> AbstractContextManager[Any]:
        """A context whose time counts for `purpose`, where time is recorded."""
        return contextlib.nullcontext() if self.records is None else self.records.watch(purpose)

    @property
    def cadence(self) -> SaveCadence:
        """The cadence of saves."""
        assert self.saves is not None
        assert self.saves.cadence is not None
        return self.saves.cadence

    def write(self, event: Event | None) -> None:
        """Record an event; what comes before the records are open is recorded in `begin`."""
        if self.records is not None:
            self.records.write(event)
        elif event is not None:
            self.early.append(event)
            del self.early[:-_EARLY_EVENTS]

    def tell(self, *said: Event | str | None) -> None:
        """Record events and warnings, and warn on rank 0."""
        for item in said:
            event = Warned(item) if isinstance(item, str) else item
            self.write(event)
            if isinstance(event, Warned) and self.ranks.is_first:
                warnings.warn(event.message, stacklevel=3)

    # Its phases.

    def restore(self) -> tuple[int, list[Event]]:
        """Restore the newest state: the steps that it has done, and the events.

        Raises:
            CheckpointError: When nothing intact can be restored, or nothing was restored and the
                model has no first weights.
        """
        assert self.memory is not None
        self.mark("heal")
        step, events = self.memory.restore()
        found = any(isinstance(event, (CheckpointRestored, StateRecovered)) for event in events)
        if self.must_restore and not found:
            raise CheckpointError(
                "the checkpoint that was there when this start began has gone, and the model has "
                "no first weights; run the same command again"
            )
        if self.saves is not None:
            self.saves.newest = -1 if self.memory.unsaved else step
        self.mark("idle", step)
        return step, events

    def go_back(self, error: DataCorruptionError) -> int:
        """Fill the state with the newest one from before a memory fault; all ranks together.

        Whatever was saved of later steps counts as older than the state that is filled in.

        Args:
            error: Raised by the guard, on all ranks.

        Returns:
            The steps that the state has done, from which the loop trains again.

        Raises:
            DataCorruptionError: When no memory was wrong, the fault has come back too often, or
                there is no state from before it.
        """
        guard, memory = self.guard, self.memory
        assert guard is not None
        found = gather_objects(guard.memory_faults())
        intact = [steps for steps, _ in found if steps is not None]
        if memory is None or not (guard.may_go_back and intact):
            raise self._given_up(error)
        furthest, times = self._returned
        self._returned = max(self.step, furthest), times + 1 if self.step <= furthest else 1
        if self._returned[1] > self.returns:
            raise self._given_up(error)
        rank, what = next((rank, said[1]) for rank, said in enumerate(found) if said[0] is not None)
        event = None
        try:
            self.before_update()
            cause = f"a memory fault ({what}, rank {rank})"
            event = memory.go_back(min(intact), guard.has_left, cause)
        except (CheckpointError, RecoverError) as problem:
            raise self._given_up(error, problem) from error
        if event is None:
            raise self._given_up(error)
        guard.go_back(event.step)
        self.gather_findings()
        lost = max(self.step - event.step, 0)
        self.write(replace(event, lost_steps=lost))
        self.step, self.stopped, self.resizing = event.step, "", False
        if self.saves is not None:
            self.saves.go_back(event.step)
        return event.step

    def _given_up(
        self, error: DataCorruptionError, problem: Exception | None = None
    ) -> DataCorruptionError:
        """The error with which the run ends, or its launcher starts it again; all ranks."""
        assert self.guard is not None
        self.guard.give_up()
        self.gather_findings()
        intact = [steps for steps, _ in gather_objects(self.guard.memory_faults())]
        if self.memory is None or all(steps is None for steps in intact):
            return error
        newest = self.memory.newest_saved()
        since = min(steps for steps in intact if steps is not None)
        if problem is None and newest <= since:
            return error
        why = problem or (
            f"all checkpoints, the newest of step {newest}, are from after step {since}, and may "
            "hold the fault; start anew with --fresh or in another directory"
        )
        return DataCorruptionError(f"{error}; {why}", in_versions=True)

    def begin(
        self, step: int, events: Iterable[Event] = (), started: TrainingStarted | None = None
    ) -> None:
        """The first step begins, after `step` steps; all ranks together.

        Args:
            step: Steps done.
            events: What restoring had to say.
            started: The event of this; None: made here.
        """
        self.step = self._told_step = step
        if self.guard is not None:
            self.guard.restart(step)
        early, self.early = self.early, []
        for event in (*early, *events):
            self.write(event)
        if self.records is not None:
            if started is None:
                assert isinstance(self.records, Recording)
                started = self.records.started(step)
            self.records.begin(started, self.guard)
        if self.saves is not None and self.saves.cadence is not None:
            self.saves.cadence.start(step)
        if self.consensus is not None:
            self.consensus.begin(step)
        self.clock = StepClock()

    def attempts(self) -> Iterator[int]:
        """Yield once, and again where the guard finds numbers that it cannot correct by itself.

        Raises:
            DataCorruptionError: When they stay wrong.
        """
        if self.guard is None or self.guard.inside:
            yield 0
        else:
            yield from self.guard.attempts()

    def micro_batch(
        self, passes: Callable[[bool], torch.Tensor], *, last: bool, begin_again: Callable[[], None]
    ) -> torch.Tensor:
        """Do the passes of one of a step's micro-batches; see `RunGuard.micro_batch`."""
        if self.guard is None:
            return passes(False)
        return self.guard.micro_batch(passes, last=last, begin_again=begin_again)

    def before_update(self) -> None:
        """Wait until what is copied out of the tensors is copied, before an optimizer's step."""
        if self.memory is not None:
            self.memory.settle(self.mark)
        if self.saves is not None:
            self.saves.copied()

    def after_update(self, result: StepResult) -> Decision:
        """A step is done: decide on it with all ranks, keep its state in memory, and record it.

        Raises:
            IntegrationError: When a rank of a loop that is not ours does not come to this step.
        """
        decision = self.agree(result)
        if result.updated and not self.keeps_later:
            self.keep(result.step, plan=decision.plan_memory)
        if self._every_step:
            # Waiting for other ranks is part of a step.
            result.seconds = self.clock.step()
        if self.saves is not None:
            if self.saves.cadence is not None:
                saving = self.saves.under_way
                self.saves.cadence.observe_step(self.clock.seconds, saving=saving)
            self.saves.collect(wait=False)
        self.record(result, now=bool(decision.stop))
        return decision

    def agree(self, result: StepResult) -> Decision:
        """Decide with all ranks what to do after a step.

        Raises:
            IntegrationError: As `after_update`.
        """
        self.mark("agree")
        self.step = result.step
        if self.consensus is None:
            return Decision()
        if not result.updated:
            # Nothing can be saved here.
            self.clock.step()
            return Decision()
        if self.guard is not None:
            self.guard.stepped(result.step)
        decision = self.consensus.decide(self, result)
        if decision.findings:
            self.gather_findings()
        if decision.memory_grown:
            assert self.records is not None
            self.write(self.records.memory.measured(result.step))
        for message in decision.messages:
            self.write(message)
        return decision

    def keep(self, step: int, *, plan: bool | None = None) -> None:
        """Begin to keep the state after `step` steps in memory, where that is due.

        Raises:
            IntegrationError: As `after_update`.
        """
        if self.memory is None or not self.memory.is_on:
            return
        agreement = (
            self.consensus.agreement if isinstance(self.consensus, PeriodicConsensus) else None
        )
        self.mark("memory")
        warned = self.memory.keep(step, agreement, plan=plan)
        if self.records is not None:
            self.write(warned)
        else:
            self.tell(warned)

    def record(self, result: StepResult, *, now: bool = False) -> bool:
        """Take in a step, and record those since the last record where that is due.

        Args:
            result: Of the step.
            now: Record it in any case.

        Returns:
            Whether they were recorded.
        """
        self.step = result.step
        if self.records is None:
            return False
        due = self.records.step(result) or now
        if due:
            self.record_steps()
        return due

    def record_steps(self) -> None:
        """Record the steps since the last record, and which checkpoints were copied on meanwhile.

        If it is time, also what the guards have found, and peak memory that has grown; the
        trainer's ranks tell each other of these at every step.
        """
        assert self.records is not None
        self.records.record_steps()
        self.record_copies()
        if self._every_step:
            return
        if self.ranks.world_size > 1:
            # Alike on all ranks.
            tells = self.step - self._told_step >= self.records.tell_every
        else:
            tells = time.monotonic() - self._told_seconds >= _TELL_SECONDS
        if tells:
            self.tell_findings()
            self.write(self.records.memory.grown_anywhere(self.step))

    def tell_findings(self) -> None:
        """Write down what the guards of all ranks have found, and checked; all ranks together."""
        self._told_step, self._told_seconds = self.step, time.monotonic()
        self.gather_findings()
        self.record_guard()

    def gather_findings(self) -> None:
        """Write down what the guards of all ranks have found; all ranks together."""
        if self.guard is not None:
            for event in self.guard.news():
                self.write(event)

    def record_guard(self) -> None:
        """Record what the guard has checked so far."""
        if self.guard is not None and self.records is not None and self.records.writes:
            self.write(self.guard.summary(self.step))

    def save(
        self,
        step: int,
        state: State | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        late: Collection[str] | Callable[[str], bool] = (),
    ) -> SaveHandle | None:
        """Begin a save of `step`, all ranks together; see `RunSaves.begin`.

        Raises:
            DataCorruptionError: As `check_state`.
        """
        assert self.saves is not None
        self.check_state()
        self.mark("save")
        handle = self.saves.begin(step, state, metrics=metrics, late=late)
        self.clock.begin()
        return handle

    def save_ended(self, result: SaveResult, told: bool = True) -> None:
        """Take in how a save went; of one that was not made there is nothing to say.

        Args:
            result: Of the save.
            told: Whether somebody has told of its failure.
        """
        if self.records is not None:
            self.records.saved(result)
        if result.error is not None:
            if self.save_told is not None:
                self.save_told(result)
            elif not told and self.ranks.is_first:
                warnings.warn(f"{result.error}; training continues", stacklevel=2)
        elif not result.skipped:
            if self.save_told is not None:
                self.save_told(result)
            if self.consensus is not None:
                self.consensus.observe_save(result.seconds)
            if self.ranks.is_first and self.chain is not None:
                self.chain.report_progress(result.step, save_seconds=result.seconds)
            cadence = None if self.saves is None else self.saves.cadence
            if cadence is not None and (news := cadence.news()) is not None:
                self.write(CheckpointInterval(result.step, *news))

    def record_copies(self) -> None:
        """Record which checkpoints were copied on to lower tiers meanwhile."""
        if self.saves is not None:
            for event in self.saves.copies():
                self.write(event)

    def evaluated(self, metrics: dict[str, float]) -> None:
        """Take in figures of the state that is saved next, by which the best are kept."""
        assert self.saves is not None
        self.saves.metrics = metrics

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context between two steps whose time counts for evaluation, and for no step."""
        self.mark("evaluate")
        begun = time.monotonic()
        try:
            with self.watch("evaluation"):
                yield
        finally:
            seconds = time.monotonic() - begun
            self.clock.leave_out(seconds)
            if self.records is not None:
                self.records.leave_out(seconds)

    def check_state(self, *, last: bool = False) -> None:
        """Refuse weights or moments that have changed in memory since the last step; all ranks.

        Args:
            last: Make the checks that wait for a next step, too.

        Raises:
            DataCorruptionError: On all ranks, when they have.
        """
        if self.guard is None:
            return
        try:
            self.guard.check_state(last=last)
        except DataCorruptionError:
            if not self.guard.may_go_back:
                self.gather_findings()
            raise
        self.gather_findings()

    def last_checks(self) -> None:
        """Make the guard's last checks, behind the last step; all ranks together.

        Raises:
            DataCorruptionError: On all ranks, when the last step's numbers are wrong.
        """
        self.before_update()
        try:
            self.check_state(last=True)
        finally:
            self.record_guard()

    def stop(self, decision: Decision) -> None:
        """The run stops after this step, and a save follows; all ranks together.

        Raises:
            DataCorruptionError: On all ranks, when the last step's numbers are wrong.
        """
        self.stopped, self.resizing = decision.stop, decision.resizing
        self.write(StopRequested(self.step, decision.stop))
        self.last_checks()

    def end_steps(self, step: int) -> None:
        """The last step is done: meet the other ranks, and make the guard's last checks.

        Raises:
            IntegrationError: On all ranks, when others did another number of steps.
            DataCorruptionError: On all ranks, when the last step's numbers are wrong.
        """
        self.step = step
        if self.consensus is not None:
            self.consensus.end(step)
        if not self.stopped:
            self.last_checks()

    def remove_guard(self) -> None:
        """Give the model back as it was."""
        guard, self.guard = self.guard, None
        if guard is not None:
            guard.guard.remove()

    def finish(self, step: int | None = None, *, made: bool = True) -> None:
        """Save where the run ends and wait for it: here a failure must not be passed over.

        Args:
            step: The last one; None: the framework has saved already.
            made: Whether the state of `step` is for this process to save, if it has not.

        Raises:
            CheckpointError: When the newest state is not on disk.
        """
        if step is None:
            if self.saves is not None:
                self.saves.wait()
        else:
            assert self.saves is not None
            if self.resizing and self.memory is not None:
                self.saves.collect(wait=True)
                if self.memory.holds(step):
                    # Those that continue take it from memory, whatever became of the last save.
                    self.saves.problem = ""
                    return
            if made and self.saves.newest < step:
                self.mark("save")
            self.saves.end(step, made=made)
        self.forget()

    def forget(self) -> None:
        """Give the memory back: what it holds is on disk, or may be wrong."""
        if self.memory is not None:
            self.memory.close(forget=True)

    def leave(self, remedy: str = GOES_ON, *, code: int = EXIT_TO_BE_CONTINUED) -> NoReturn:
        """End the program after this step, to be continued, when its save is on disk.

        The driver calls `close` on the way out, which drains the store and then ends the records.

        Args:
            remedy: How it is continued.
            code: The exit code.

        Raises:
            SystemExit: With this code.
            CheckpointError: When the state is not on disk.
        """
        if self.saves is not None:
            self.saves.wait()
        self.forget()
        self.tell_findings()
        if self.ranks.is_first:
            print(f"outlast: stopped after step {self.step} ({self.stopped}); {remedy}", flush=True)
        raise SystemExit(code)

    def abandon(self, reason: str) -> None:
        """End the attempt so far: the loop begins anew in this process, with `begin`.

        Args:
            reason: Why it does.
        """
        self.remove_guard()
        records, self.records = self.records, None
        if records is not None:
            records.close("failed", reason)
        if self.saves is not None:
            self.saves.begun = -1

    def give_back_signals(self) -> None:
        """Let signals do again what they did before `take_signals`."""
        self._signals.close()

    def close(self, error: BaseException | None = None) -> None:
        """Give everything back; a second call does nothing.

        In this order: copies settled, saves drained, memory forgotten or kept for a restart, store
        and guard given up, records closed and with them the lock, signals as before.

        Args:
            error: What has ended the run; None: nothing has. After an error nobody is waited for,
                but after a program's own `sys.exit` the save under way is.

        Raises:
            CheckpointError: When the last save has failed, and there is no other error.
        """
        # A run that is to stop ends by an exit; another error has come between.
        exits, wrong = isinstance(error, SystemExit), isinstance(error, DataCorruptionError)
        failed = error is not None and not (self.stopped and exits)
        reason = f"{type(error).__name__}: {error}" if failed else self.stopped
        with self._signals:
            try:
                # Wrong values are an error on all ranks.
                if failed and not self._every_step and (wrong or self.ranks.world_size == 1):
                    self.tell_findings()
                if self.memory is not None:
                    # A restart must not continue from what may be wrong.
                    self.memory.close(forget=wrong and not self.is_right)
                if self.saves is not None:
                    try:
                        self.saves.close(failed=failed and not exits)
                    except CheckpointError:
                        if not (failed and exits):
                            raise
                    finally:
                        self.record_copies()
            except BaseException as late:
                # Not the error itself, which would keep all that its frames hold.
                reason = reason if failed else f"{type(late).__name__}: {late}"
                failed = True
                raise
            finally:
                self.remove_guard()
                if self.records is not None:
                    ended = "left" if self.left else "completed"
                    ended = "to_be_continued" if self.stopped else ended
                    self.records.close("failed" if failed else ended, reason)

    @property
    def _every_step(self) -> bool:
        return self.consensus is not None and self.consensus.every_step
