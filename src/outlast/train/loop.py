"""The reference training loop: one step after the other, with time measured by purpose."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outlast.data import samples_until
from outlast.errors import DataCorruptionError
from outlast.records import AttemptEnded, TrainingStarted
from outlast.runtime.engine import Runtime, StepConsensus, StepResult
from outlast.train.gradients import clip, global_norm
from outlast.train.optimizer import build_optimizers, restore_constants, set_learning_rate
from outlast.train.tensorizing import factor_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.distributed import ProcessGroup

    from outlast.checkpoint import CheckpointStore, ReplayLog
    from outlast.data import BatchLoader, MicroBatch
    from outlast.job import Job, ScheduleSection
    from outlast.runtime.guarding import RunGuard
    from outlast.runtime.recording import StepRecords
    from outlast.train.adapt_rank import RankAdaptation
    from outlast.train.engine import CodingNotes, Engine, Evaluation


def warmup_steps_of(schedule: ScheduleSection, steps: int) -> int:
    """Steps of warm-up in a run of `steps`, of which it leaves the decay's and one at the peak."""
    decay_steps = round(schedule.decay_fraction * steps) if schedule.name == "wsd" else 0
    return min(schedule.warmup_steps, max(steps - max(decay_steps, 1), 0))


def warmup_note(schedule: ScheduleSection, steps: int) -> str:
    """A sentence where the warm-up is cut short, else empty."""
    left = warmup_steps_of(schedule, steps)
    if left == schedule.warmup_steps:
        return ""
    return (
        f"schedule.warmup_steps = {schedule.warmup_steps} does not fit into a run of {steps} steps "
        f"and its decay; the learning rate warms up in {left}"
    )


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
    warmup_steps = warmup_steps_of(schedule, steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    final = schedule.final_fraction
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "cosine":
        progress = (step - warmup_steps) / max(steps - warmup_steps, 1)
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


@dataclass(frozen=True)
class Outcome:
    """Outcome of an attempt.

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
    records: StepRecords
    consensus: StepConsensus
    evaluation: Evaluation | None = None
    pipeline_group: ProcessGroup | None = None
    replay: ReplayLog | None = None
    coding: CodingNotes | None = None
    adaptation: RankAdaptation | None = None
    earlier: Sequence[tuple[int, int]] = ()
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
        assert self.runtime.saves is not None
        return self.runtime.saves.store

    def run(self, started: float, parts: dict[str, float]) -> Outcome:
        """Restore, train to the last step or until a stop is agreed on, save, and close.

        Args:
            started: Wall clock when this process (or its launcher) began, seconds since the epoch.
            parts: Seconds of the set-up so far, by phase; completed here and recorded.

        Raises:
            CheckpointError: When nothing intact can be restored, or the last save fails.
        """
        with self.runtime as runtime:
            begun = time.perf_counter()
            first_step, events = runtime.restore()
            for event in events:
                runtime.write(event)
            self._continue_from(first_step)
            if self.adaptation is not None:
                self.adaptation.restored(first_step)
            parts["restore"] = time.perf_counter() - begun
            ready = TrainingStarted(first_step, time.time() - started, parts)
            runtime.begin(first_step, started=ready)
            self.records.watch.lap()
            with self.consensus.waits.in_collectives():
                outcome = self._train(first_step)
            runtime.mark("idle")
            self.records.finish(outcome.last_step)
        return outcome

    def _continue_from(self, first_step: int) -> None:
        """Let the job's settings hold, where those of earlier starts have shaped the state."""
        job, model = self.job, self.model
        built = build_optimizers(model, job.optimizer, factor_rules(model, job.tensorize))
        restore_constants(self.optimizers, built)
        if first_step and self.earlier:
            self.loader.continue_from(first_step, samples_until(first_step, self.earlier))
            self.records.token_offset = self.loader.offset * job.data.sequence_length

    def _train(self, first_step: int) -> Outcome:
        runtime, steps = self.runtime, self.job.train.steps
        if self.replay is not None and first_step < steps:
            # Logs lead on from a version of this attempt.
            runtime.save(first_step)
        assert runtime.memory is not None
        begun = first_step
        while True:
            try:
                last_step = self.train_from(first_step)
                # What is on no disk, because it is this attempt's or was kept in memory.
                made = last_step > begun or runtime.memory.unsaved
                completed = last_step >= steps
                if completed and made:
                    self._evaluate(last_step)
                runtime.end_steps(last_step)
                break
            except StateMovedError as moved:
                first_step = moved.step
                self.records.drop_steps()
                if self.guard is not None:
                    self.guard.restart(first_step)
            except DataCorruptionError as error:
                first_step = self.go_back(error)
        runtime.finish(last_step, made=made and self.consensus.writes())
        return Outcome(last_step, completed, "" if completed else runtime.stopped)

    def go_back(self, error: DataCorruptionError) -> int:
        """Go back to a state from before a memory fault; the steps that it has done.

        Raises:
            DataCorruptionError: See `Runtime.go_back`.
        """
        if self.guard is None or self.guard.inside:
            raise error
        self._zero_gradients()
        step = self.runtime.go_back(error)
        self.records.drop_steps()
        self._continue_from(step)
        if self.adaptation is not None:
            self.adaptation.restored(step)
        if self.replay is not None and step < self.job.train.steps:
            # Logs lead on from a version of these steps, too.
            self.runtime.save(step)
        return step

    def train_from(self, first_step: int) -> int:
        """Train from `first_step` until all steps are done or a stop is agreed on.

        Returns:
            The number of steps done in the run.
        """
        job, runtime, done = self.job, self.runtime, first_step
        runtime.cadence.start(first_step)
        batches = self.loader.prefetching(first_step, job.train.steps)
        try:
            while done < job.train.steps:
                runtime.mark("data", done)
                if self.before_step is not None:
                    self.before_step(done)
                runtime.clock.begin()
                with runtime.watch("data"):
                    step, micro_batches = next(batches)
                result = self.step(step, micro_batches)
                done = result.step
                if self.adaptation is not None:
                    runtime.clock.leave_out(self.adaptation.after_step(done))
                if 0 < job.train.stop_after_steps <= done - first_step:
                    self.consensus.stop.reason = (
                        self.consensus.stop.reason or "train.stop_after_steps"
                    )
                decision = runtime.after_update(result)
                if self.coding is not None and (self.records.is_due(done) or decision.stop):
                    for event in self.coding.take(done):
                        self.records.write(event)
                if done == job.train.steps:
                    break
                if decision.stop:
                    runtime.stop(decision)
                    break
                if job.evaluate.every_steps and done % job.evaluate.every_steps == 0:
                    self._evaluate(done)
                if decision.save:
                    self._save(done)
        finally:
            runtime.mark("idle", done)
            batches.close()
        return done

    def step(self, step: int, micro_batches: list[MicroBatch]) -> StepResult:
        """Gradients and update; the result has this rank's share of the loss."""
        job, runtime, waits = self.job, self.runtime, self.consensus.waits
        begun = time.perf_counter()
        with runtime.watch("compute"):
            loss = self._forward_backward(step, micro_batches)
            runtime.mark("vote")
            parameters = list(self.model.parameters())
            norm = global_norm(parameters, self.pipeline_group)
            if job.train.gradient_clip:
                clip(parameters, norm, job.train.gradient_clip)
            factor = learning_rate_factor(step, job.train.steps, job.schedule)
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
            self.records.watch.move(waited, to="communication")
        if self.consensus.slowness is not None:
            self.consensus.slowness.add(time.perf_counter() - begun - waited)
        return StepResult(step + 1, loss, norm, learning_rate)

    def _forward_backward(self, step: int, micro_batches: list[MicroBatch]) -> torch.Tensor:
        """Both passes, again where the guard finds numbers that it cannot correct by itself."""
        tokens = self.job.train.batch_size * self.job.data.sequence_length
        for attempt in self.runtime.attempts():
            if attempt:
                self._zero_gradients()
            loss = self.engine.forward_backward(micro_batches, step, tokens)
        return loss

    def _save(self, done: int) -> None:
        self.runtime.save(done)
        self.runtime.record_guard()
        # To wait for copies is no communication.
        self.consensus.waits.take()

    def _evaluate(self, step: int) -> None:
        if self.evaluation is None:
            return
        begun = time.perf_counter()
        with self.runtime.evaluating():
            loss = self.evaluation.measure(self.model, self.engine, self.consensus.agreement)
            self.consensus.waits.take()
        self.runtime.evaluated({"validation_loss": loss})
        seconds = time.perf_counter() - begun
        self.records.write(self.evaluation.measured(step, loss, seconds))

    def _zero_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
