"""The training loop: one step after the other, with time measured by purpose."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from outlast.errors import WrongNumbersError
from outlast.records import (
    StopRequested,
    Stopwatch,
    TrainingStarted,
    Warned,
)
from outlast.recover.phase_page import EnterPhase, ignore_phase
from outlast.recover.resize import RESIZE
from outlast.train.boundary import Agreed, Interval, Outcome, StateMovedError
from outlast.train.gradients import clip, global_norm
from outlast.train.optimizer import set_learning_rate
from outlast.train.saves import Saves, restored
from outlast.train.schedule import learning_rate_factor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from torch.distributed import ProcessGroup

    from outlast.checkpoint import CheckpointStore, ReplayLog
    from outlast.data import BatchLoader, MicroBatch
    from outlast.job import Job
    from outlast.records import RecordWriter
    from outlast.state.live import State
    from outlast.train.agreement import Agreement
    from outlast.train.coding import CodingNotes
    from outlast.train.engine import Engine
    from outlast.train.evaluate import Evaluation
    from outlast.train.guarding import RunGuard
    from outlast.train.memory import MemoryWatch
    from outlast.train.metering import RunMeter
    from outlast.train.recovering import RunMemory
    from outlast.train.saving import SaveCadence
    from outlast.train.signals import StopFlag
    from outlast.train.slowness import SlownessWatch
    from outlast.train.tensorizing import SpikeWatch
    from outlast.train.waits import CommunicationWait


def _always() -> bool:
    return True


@dataclass
class Trainer:
    """All parts of a run on this rank, put together by `outlast.train.build`.

    `records` is None on ranks other than 0. `before_step` is called with the number of steps done
    (a drill lets processes die there). `stop_when` is asked after every step; it gives a reason to
    stop, or an empty text. `writes` says whether the last save is up to this process and its ranks.
    `resize_wanted` is asked on rank 0. `mark` is told in which phase of a step this process is.
    `must_restore`: the model has no first weights.
    """

    job: Job
    device: torch.device
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    engine: Engine
    loader: BatchLoader
    evaluation: Evaluation | None
    agreement: Agreement
    waits: CommunicationWait
    pipeline_group: ProcessGroup | None
    store: CheckpointStore
    replay: ReplayLog | None
    coding: CodingNotes | None
    guard: RunGuard | None
    cadence: SaveCadence
    stop: StopFlag
    records: RecordWriter | None
    memory: MemoryWatch
    must_restore: bool = False
    spikes: SpikeWatch | None = None
    energy: RunMeter | None = None
    before_step: Callable[[int], None] | None = None
    stop_when: Callable[[], str] | None = None
    writes: Callable[[], bool] = _always
    recovery: RunMemory | None = None
    resize_wanted: Callable[[], bool] | None = None
    mark: EnterPhase = ignore_phase
    slowness: SlownessWatch | None = None
    watch: Stopwatch = field(default_factory=Stopwatch)
    _resizing: bool = False
    _handed_over: bool = False

    def __post_init__(self) -> None:
        self.saves = Saves(
            store=self.store,
            state=self._state,
            cadence=self.cadence,
            records=self.records,
            watch=self.watch,
            waits=self.waits,
            mark=self.mark,
            begins=self._record_guard,
        )

    def run(self, started: float, parts: dict[str, float]) -> Outcome:
        """Restore, train to the last step or until a stop is agreed on, save.

        Args:
            started: Wall clock when this process (or its launcher) began, seconds since the epoch.
            parts: Seconds of the set-up so far, by phase; completed here and recorded.

        Raises:
            CheckpointError: When nothing intact can be restored, or the last save fails.
        """
        begun = time.perf_counter()
        self.mark("heal")
        first_step = self._restore()
        self.mark("idle", first_step)
        parts["restore"] = time.perf_counter() - begun
        if self.guard is not None:
            self.guard.restart(first_step)
        self._record(TrainingStarted(first_step, time.time() - started, parts))
        if self.energy is not None:
            self._record(self.energy.begin(first_step))
            for message in self.energy.warnings:
                self._record(Warned(message))
        self.watch.lap()
        with self.waits.in_collectives(), self._forgetting_wrong_numbers():
            if self.replay is not None and first_step < self.job.train.steps:
                # Logs lead on from a version of this attempt.
                self.saves.begin(first_step)
            last_step, first_step = self._train(first_step)
            completed = last_step >= self.job.train.steps
            if completed and self._made(last_step, first_step):
                self._evaluate(last_step)
            self._check_state(last=True)
            self._save_last(last_step, first_step)
            if self.recovery is not None:
                self.recovery.close(forget=not self._handed_over)
            self.cadence.close()
            self._record_guard(last_step)
        self.mark("idle")
        if self.energy is not None:
            self._record(self.energy.finish(last_step, self.watch.so_far()))
        self._record(self.memory.measured(last_step))
        return Outcome(last_step, completed, "" if completed else self._stop_reason)

    @property
    def _stop_reason(self) -> str:
        # A signal may come after all have agreed to resize; the launcher has it, too.
        return RESIZE if self._resizing else self.stop.reason or "another rank"

    @contextlib.contextmanager
    def _forgetting_wrong_numbers(self) -> Iterator[None]:
        """What is kept in memory may be what is wrong: a restart must read a checkpoint."""
        try:
            yield
        except WrongNumbersError:
            if self.recovery is not None:
                self.recovery.close(forget=True)
            if self.guard is not None:
                # Another trainer may follow in this process.
                self.guard.guard.remove()
            raise

    def _restore(self) -> int:
        step, events = restored(
            self.recovery, self.store, self._state, must_restore=self.must_restore
        )
        for event in events:
            self._record(event)
        return step

    def _train(self, first_step: int) -> tuple[int, int]:
        """The steps done in the end, and those of the state from which this process got there."""
        while True:
            try:
                return self.train_from(first_step), first_step
            except StateMovedError as moved:
                first_step = moved.step
                if self.guard is not None:
                    self.guard.restart(first_step)

    def train_from(self, first_step: int) -> int:
        """Train from `first_step` until all steps are done or a stop is agreed on.

        Returns:
            The number of steps done in the run.
        """
        steps, interval = self.job.train.steps, Interval()
        self.cadence.begin(first_step)
        batches = self.loader.prefetching(first_step, steps)
        last_stop = self.job.train.stop_after_steps
        done = first_step
        try:
            while done < steps:
                self.mark("data", done)
                if self.before_step is not None:
                    self.before_step(done)
                begun = time.perf_counter()
                with self.watch("data"):
                    step, parts = next(batches)
                norm, learning_rate, loss = self.step(step, parts)
                done = step + 1
                if last_stop and done - first_step >= last_stop:
                    self.stop.reason = self.stop.reason or "train.stop_after_steps"
                if self.stop_when is not None:
                    self.stop.reason = self.stop.reason or self.stop_when() or None
                agreed = self._agree(loss, interval, done)
                if self.recovery is not None:
                    self.mark("memory")
                    self._record(self.recovery.keep(done, plan=agreed.planning))
                interval.step_seconds.append(time.perf_counter() - begun)
                self.cadence.observe_step(interval.step_seconds[-1], saving=self.saves.under_way)
                if self._logs(done) or agreed.stopping:
                    self._record_steps(done, interval, norm, learning_rate)
                    self._record_coding(done)
                    if agreed.grown:
                        self._record(self.memory.measured(done))
                    interval = Interval()
                if agreed.stopping and done < steps:
                    self._resizing = agreed.resizing
                    self._record(StopRequested(done, self._stop_reason))
                    break
                self._between_steps(done, steps, saving=agreed.saving)
        finally:
            self.mark("idle", done)
            batches.close()
        return done

    def step(self, step: int, parts: list[MicroBatch]) -> tuple[torch.Tensor, float, torch.Tensor]:
        """Gradients and update; returns gradient norm, learning rate, this rank's loss share."""
        begun = time.perf_counter()
        with self.watch("compute"):
            loss = self._gradients(step, parts)
            self.mark("vote")
            parameters = list(self.model.parameters())
            norm = global_norm(parameters, self.pipeline_group)
            if self.job.train.gradient_clip:
                clip(parameters, norm, self.job.train.gradient_clip)
            factor = learning_rate_factor(step, self.job.train.steps, self.job.schedule)
            learning_rate = set_learning_rate(self.optimizers, factor)
            if self.recovery is not None:
                self.recovery.settle(self.mark)
            self.mark("optimizer")
            if self.replay is not None:
                self.replay.step(step + 1)
            else:
                for optimizer in self.optimizers:
                    optimizer.step()
            self._zero_gradients()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            waited = self.waits.take()
            self.watch.move(waited, to="communication")
        if self.slowness is not None:
            self.slowness.add(time.perf_counter() - begun - waited)
        return norm, learning_rate, loss

    def _gradients(self, step: int, parts: list[MicroBatch]) -> torch.Tensor:
        """Both passes, again where the guard finds numbers that it cannot put right by itself."""
        if self.guard is None or self.guard.inside:
            return self.engine.forward_backward(parts, step, self._tokens_per_step)
        try:
            for attempt in self.guard.attempts():
                if attempt:
                    self._zero_gradients()
                loss = self.engine.forward_backward(parts, step, self._tokens_per_step)
        except WrongNumbersError:
            self._record_findings()
            raise
        return loss

    def _agree(self, loss: torch.Tensor, interval: Interval, done: int) -> Agreed:
        """What any rank wants; the loss is summed up on the way."""
        self.mark("agree")
        with self.watch("communication"):
            wants_stop = 1.0 if self.stop.reason else 0.0
            wants_size = 1.0 if self.resize_wanted is not None and self.resize_wanted() else 0.0
            wants_save = 1.0 if self.cadence.wants(done, writes=self.writes()) else 0.0
            wants_plan = 1.0 if self.recovery is not None and self.recovery.look(done) else 0.0
            found = 0.0 if self.guard is None else float(self.guard.found)
            grown = 1.0 if self._logs(done) and self.memory.grown() else 0.0
            own = self.slowness.share() if self.slowness is not None and self._logs(done) else []
            mean_loss, stops, sizes, saves, found, grown, plans, *shares = self.agreement.sum(
                loss, wants_stop, wants_size, wants_save, found, grown, wants_plan, *own
            )
            self.waits.take()
        if found:
            self._record_findings()
        interval.losses.append(mean_loss)
        if self.spikes is not None and (warning := self.spikes.observe(done, mean_loss)):
            self._record(warning)
        if self.slowness is not None and shares:
            self._record(self.slowness.observe(shares))
        return Agreed(stops + sizes > 0, sizes > 0 and stops == 0, saves > 0, grown > 0, plans > 0)

    def _logs(self, done: int) -> bool:
        """Whether the job wants a record of this step, stop or no stop."""
        return done % self.job.log.every_steps == 0 or done == self.job.train.steps

    def _record_guard(self, step: int) -> None:
        if self.guard is not None and self.records is not None:
            self._record(self.guard.summary(step))

    def _record_coding(self, done: int) -> None:
        for event in self.coding.take(done) if self.coding is not None else ():
            self._record(event)

    def _check_state(self, *, last: bool = False) -> None:
        """Do not save weights or moments that have changed in memory since the last step."""
        if self.guard is None:
            return
        try:
            if last:
                self.guard.finish()
            else:
                self.guard.before_save()
        finally:
            self._record_findings()

    def _record_findings(self) -> None:
        assert self.guard is not None
        for event in self.guard.news():
            self._record(event)

    def _between_steps(self, done: int, steps: int, *, saving: bool) -> None:
        """Evaluate where the job says so and save if agreed, except at the end, with its own."""
        if done == steps:
            return
        evaluate = self.job.evaluate.every_steps
        if evaluate and done % evaluate == 0:
            self._evaluate(done)
        if saving:
            self._check_state()
            self.saves.begin(done)
        self.saves.collect(wait=False)
        self.saves.record_copies()

    def _evaluate(self, step: int) -> None:
        if self.evaluation is None:
            return
        begun = time.perf_counter()
        self.mark("evaluate")
        with self.watch("evaluation"):
            loss = self.evaluation.measure(self.model, self.engine, self.agreement)
            self.waits.take()
        self.saves.metrics = {"validation_loss": loss}
        self._record(self.evaluation.measured(step, loss, time.perf_counter() - begun))

    def _made(self, step: int, first_step: int) -> bool:
        """Whether the state of `step` is on no disk because it is this attempt's, or was kept."""
        return step > first_step or (self.recovery is not None and self.recovery.unsaved)

    def _save_last(self, step: int, first_step: int) -> None:
        """Save where the run ends and wait for it: here a failure must not be passed over."""
        with self.watch("checkpoint"):
            error = self.saves.collect(wait=True)
            if self._resizing and self.recovery is not None and self.recovery.holds(step):
                # Those that go on take it from memory.
                self._handed_over = True
                return
        self.saves.end(step, error, made=self._made(step, first_step) and self.writes())

    def _record_steps(
        self, done: int, interval: Interval, norm: torch.Tensor, learning_rate: float
    ) -> None:
        seconds = self.watch.lap()
        self._record(
            interval.record(
                done,
                gradient_norm=float(norm),
                learning_rate=learning_rate,
                tokens=done * self._tokens_per_step,
                seconds=seconds,
            )
        )
        if self.energy is not None:
            self._record(self.energy.steps_done(done, len(interval.losses), seconds))

    def _record(self, event: object | None) -> None:
        if self.records is not None and event is not None:
            self.records.write(event)  # type: ignore[arg-type]

    def _zero_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    @property
    def _state(self) -> State:
        return {"model": self.model, "optimizer": self.optimizers}

    @property
    def _tokens_per_step(self) -> int:
        return self.job.train.batch_size * self.job.data.sequence_length
