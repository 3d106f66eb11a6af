"""The reference training loop: one step after the other, with time measured by purpose."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outlast.errors import WrongNumbersError
from outlast.records import Stopwatch, TrainingStarted
from outlast.recover.resize import RESIZE
from outlast.runtime.engine import EveryStep, Runtime, StepResult
from outlast.runtime.recording import Outcome
from outlast.train.gradients import clip, global_norm
from outlast.train.optimizer import set_learning_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from torch.distributed import ProcessGroup

    from outlast.checkpoint import CheckpointStore, ReplayLog
    from outlast.data import BatchLoader, MicroBatch
    from outlast.job import Job, ScheduleSection
    from outlast.runtime.guarding import RunGuard
    from outlast.train.adapt_rank import RankAdaptation
    from outlast.train.coding import CodingNotes
    from outlast.train.engine import Engine
    from outlast.train.evaluate import Evaluation


def learning_rate_factor(step: int, steps: int, schedule: ScheduleSection) -> float:
    """The share of the peak learning rate for one step.

    Args:
        step: Steps already done, 0 <= step < steps.
        steps: Steps in the whole run.
        schedule: Kind and constants. Cosine: Loshchilov & Hutter 2017, eq. 5, without restarts.
            WSD (warm-up, stable, linear decay): Hu et al. 2024 (MiniCPM), section 4.

    Returns:
        A factor in (0, 1] (0 only where `final_fraction` is 0, after the last step).
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    final = schedule.final_fraction
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "cosine":
        progress = (step - schedule.warmup_steps) / max(steps - schedule.warmup_steps, 1)
        return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))
    decay_steps = round(schedule.decay_fraction * steps)
    until_end = steps - step
    if until_end >= decay_steps:
        return 1.0
    return final + (1.0 - final) * until_end / decay_steps


class StateMovedError(Exception):
    """The state has become that of another step: a group that was behind has taken a peer's.

    Attributes:
        step: Steps that it has done.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"the state is that of step {step} now")
        self.step = step


@dataclass
class Trainer:
    """A model's training on this rank, put together by `outlast.train.build`; a loop on a runtime.

    `consensus` is the runtime's. `before_step` is called with the number of steps done (a drill
    lets processes die there).
    """

    job: Job
    device: torch.device
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    engine: Engine
    loader: BatchLoader
    runtime: Runtime
    consensus: EveryStep
    evaluation: Evaluation | None = None
    pipeline_group: ProcessGroup | None = None
    replay: ReplayLog | None = None
    coding: CodingNotes | None = None
    adaptation: RankAdaptation | None = None
    before_step: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        if self.adaptation is not None:
            self.adaptation.trainer = self

    @property
    def guard(self) -> RunGuard | None:
        """The guard of the run."""
        return self.runtime.guard

    @property
    def store(self) -> CheckpointStore:
        """The run's checkpoints."""
        return self.runtime.saves.store

    @property
    def watch(self) -> Stopwatch:
        """Time by purpose."""
        return self.runtime.watch

    def run(self, started: float, parts: dict[str, float]) -> Outcome:
        """Restore, train to the last step or until a stop is agreed on, save.

        Args:
            started: Wall clock when this process (or its launcher) began, seconds since the epoch.
            parts: Seconds of the set-up so far, by phase; completed here and recorded.

        Raises:
            CheckpointError: When nothing intact can be restored, or the last save fails.
        """
        runtime, begun = self.runtime, time.perf_counter()
        first_step, events = runtime.restore()
        for event in events:
            runtime.records.write(event)
        if self.adaptation is not None:
            self.adaptation.restored(first_step)
        parts["restore"] = time.perf_counter() - begun
        runtime.begin(TrainingStarted(first_step, time.time() - started, parts))
        self.watch.lap()
        with self.consensus.waits.in_collectives(), self._forgetting_wrong_numbers():
            if self.replay is not None and first_step < self.job.train.steps:
                # Logs lead on from a version of this attempt.
                runtime.saves.begin(first_step)
            last_step, first_step = self._train(first_step)
            # What is on no disk, because it is this attempt's or was kept in memory.
            made = last_step > first_step or runtime.memory.unsaved
            completed = last_step >= self.job.train.steps
            if completed and made:
                self._evaluate(last_step)
            runtime.check_state(last=True)
            runtime.finish(last_step, made=made and self.consensus.writes())
            runtime.cadence.close()
            runtime.record_guard(last_step)
        runtime.mark("idle")
        runtime.records.finish(last_step)
        return Outcome(last_step, completed, "" if completed else self._stopped)

    def _train(self, first_step: int) -> tuple[int, int]:
        """The steps done in the end, and those of the state from which this process got there."""
        while True:
            try:
                return self.train_from(first_step), first_step
            except StateMovedError as moved:
                first_step = moved.step
                self.runtime.records.drop_steps()
                if self.guard is not None:
                    self.guard.restart(first_step)

    def train_from(self, first_step: int) -> int:
        """Train from `first_step` until all steps are done or a stop is agreed on.

        Returns:
            The number of steps done in the run.
        """
        runtime, steps, done = self.runtime, self.job.train.steps, first_step
        runtime.cadence.start(first_step)
        batches = self.loader.prefetching(first_step, steps)
        try:
            while done < steps:
                runtime.mark("data", done)
                if self.before_step is not None:
                    self.before_step(done)
                begun = time.perf_counter()
                with self.watch("data"):
                    step, parts = next(batches)
                result = self.step(step, parts)
                done = result.step
                if self.adaptation is not None:
                    begun += self.adaptation.after_step(done)
                if 0 < self.job.train.stop_after_steps <= done - first_step:
                    self.consensus.stop.reason = (
                        self.consensus.stop.reason or "train.stop_after_steps"
                    )
                decision = runtime.agree(result)
                result.seconds = time.perf_counter() - begun
                runtime.observe(result.seconds)
                if runtime.record(result, now=bool(decision.stop)):
                    for event in self.coding.take(done) if self.coding is not None else ():
                        self.runtime.records.write(event)
                    if decision.memory_grown:
                        runtime.records.write(runtime.records.memory.measured(done))
                if done == steps:
                    break
                if decision.stop:
                    runtime.stop(done, decision)
                    break
                if self.job.evaluate.every_steps and done % self.job.evaluate.every_steps == 0:
                    self._evaluate(done)
                if decision.save:
                    runtime.check_state()
                runtime.save(done, decision)
                runtime.saves.record_copies()
        finally:
            runtime.mark("idle", done)
            batches.close()
        return done

    def step(self, step: int, parts: list[MicroBatch]) -> StepResult:
        """Gradients and update; the result has this rank's share of the loss."""
        runtime, waits = self.runtime, self.consensus.waits
        begun = time.perf_counter()
        with self.watch("compute"):
            loss = self._gradients(step, parts)
            runtime.mark("vote")
            parameters = list(self.model.parameters())
            norm = global_norm(parameters, self.pipeline_group)
            if self.job.train.gradient_clip:
                clip(parameters, norm, self.job.train.gradient_clip)
            factor = learning_rate_factor(step, self.job.train.steps, self.job.schedule)
            learning_rate = set_learning_rate(self.optimizers, factor)
            runtime.before_update()
            runtime.mark("optimizer")
            if self.replay is not None:
                self.replay.step(step + 1)
            else:
                for optimizer in self.optimizers:
                    optimizer.step()
            self._zero_gradients()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            waited = waits.take()
            self.watch.move(waited, to="communication")
        if self.consensus.slowness is not None:
            self.consensus.slowness.add(time.perf_counter() - begun - waited)
        return StepResult(step + 1, loss, norm, learning_rate)

    def _gradients(self, step: int, parts: list[MicroBatch]) -> torch.Tensor:
        """Both passes, again where the guard finds numbers that it cannot put right by itself."""
        tokens = self.job.train.batch_size * self.job.data.sequence_length
        try:
            for attempt in self.runtime.attempts():
                if attempt:
                    self._zero_gradients()
                loss = self.engine.forward_backward(parts, step, tokens)
        except WrongNumbersError:
            if self.guard is not None and not self.guard.inside:
                self.runtime.records.found(self.guard)
            raise
        return loss

    def _evaluate(self, step: int) -> None:
        if self.evaluation is None:
            return
        begun = time.perf_counter()
        self.runtime.mark("evaluate")
        with self.watch("evaluation"):
            loss = self.evaluation.measure(self.model, self.engine, self.consensus.agreement)
            self.consensus.waits.take()
        self.runtime.evaluated({"validation_loss": loss})
        seconds = time.perf_counter() - begun
        self.runtime.records.write(self.evaluation.measured(step, loss, seconds))

    @contextlib.contextmanager
    def _forgetting_wrong_numbers(self) -> Iterator[None]:
        """Forget what is kept in memory when it may be wrong: a restart must read a checkpoint."""
        try:
            yield
        except WrongNumbersError:
            self.runtime.forget()
            raise

    @property
    def _stopped(self) -> str:
        # A signal may come after all have agreed to resize; the launcher has it, too.
        return RESIZE if self.runtime.resizing else self.consensus.stop.reason or "another rank"

    def _zero_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
