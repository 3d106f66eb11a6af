"""The records of a `Trainer`'s run, in its output directory, for `outlast report` and the sinks."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from outlast.errors import IntegrationError
from outlast.integrations.place import device_of, ranks_here
from outlast.integrations.recording import LoopFacts, Recording
from outlast.job.sections import RunSection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import Trainer

    from outlast.checkpoint import SaveResult
    from outlast.integrations.hf_trainer.guarding import Guarding
    from outlast.job import LoopJob
    from outlast.records import Event, Predicted


class Recorder:
    """Writes what each training of one trainer does into its output directory.

    Args:
        trainer: Whose run it is.
        job: The settings, as `in_output_directory` gives them.
        tokens_per_step: Over all processes; 0: not known.
        prediction: What the run is expected to need.

    Attributes:
        recording: While a training runs; None otherwise.
    """

    def __init__(
        self, trainer: Trainer, job: LoopJob, tokens_per_step: int, prediction: Predicted | None
    ) -> None:
        self.recording: Recording | None = None
        self._trainer = trainer
        self._job = job
        self._tokens_per_step = tokens_per_step
        self._prediction = prediction
        self._losses: list[torch.Tensor] = []
        self._norm: torch.Tensor | float = math.nan
        self._rate = math.nan
        self._told = 0
        own_norm, own_batches = trainer._get_grad_norm, trainer.get_batch_samples
        own_evaluate = trainer.evaluate

        def get_grad_norm(*arguments: Any, **options: Any) -> Any:
            norm = own_norm(*arguments, **options)
            self._norm = math.nan if norm is None else norm
            return norm

        def get_batch_samples(*arguments: Any, **options: Any) -> Any:
            with self.watch("data"):
                return own_batches(*arguments, **options)

        def evaluate(*arguments: Any, **options: Any) -> Any:
            with self.watch("evaluation"):
                return own_evaluate(*arguments, **options)

        trainer._get_grad_norm = get_grad_norm
        trainer.get_batch_samples = get_batch_samples
        trainer.evaluate = evaluate

    def watch(self, purpose: str) -> contextlib.AbstractContextManager[Any]:
        """A context whose time counts for `purpose`."""
        return contextlib.nullcontext() if self.recording is None else self.recording.watch(purpose)

    def begin(self, step: int, events: Sequence[Event], guarding: Guarding | None) -> None:
        """The first step begins, after `step` steps; all ranks together."""
        trainer = self._trainer
        facts = LoopFacts(
            framework="transformers",
            steps=trainer.state.max_steps,
            samples_per_step=trainer.get_total_train_batch_size(trainer.args),
            tokens_per_step=self._tokens_per_step,
            parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
            versions={"transformers": transformers.__version__},
        )
        self._losses, self._norm, self._rate = [], math.nan, math.nan
        self._told = 0
        self.recording = Recording(
            self._job,
            ranks_here(),
            device_of([trainer.model]),
            facts,
            prediction=self._prediction,
        )
        self.recording.ready(step, events, None if guarding is None else guarding.run)

    def observe_part(self, loss: torch.Tensor) -> None:
        """The loss of one of a step's parts on this process."""
        self._losses.append(loss.detach())

    def observe_rate(self, learning_rate: float) -> None:
        """The learning rate of the step that is about to be done."""
        self._rate = learning_rate

    def step(self, step: int, guarding: Guarding | None) -> None:
        """A step has been done; all ranks together."""
        assert self.recording is not None
        loss = torch.stack(self._losses).sum() if self._losses else None
        due = self.recording.step(
            step, loss=loss, gradient_norm=self._norm, learning_rate=self._rate
        )
        self._losses, self._norm = [], math.nan
        if due:
            self.recording.record_steps()
            self.tell(guarding, step)

    def saved(self, result: SaveResult) -> None:
        """A save has ended, well or not."""
        if self.recording is not None:
            self.recording.saved(result)

    def tell(self, guarding: Guarding | None, step: int) -> None:
        """Write down what the guards of all ranks have found and checked; all ranks together."""
        if guarding is None or self.recording is None:
            return
        guarding.gather()
        for event in guarding.findings[self._told :]:
            self.recording.write(event)
        self._told = len(guarding.findings)
        self.recording.write(guarding.summary(step))

    def close(self, outcome: str, reason: str = "") -> None:
        """The training ends; all ranks together, but for one that has failed."""
        recording, self.recording = self.recording, None
        if recording is not None:
            recording.close(outcome, reason)


def in_output_directory(job: LoopJob, output_dir: str) -> LoopJob:
    """`job` with a trainer's output directory as its run directory.

    Raises:
        IntegrationError: When the job names another, or the directory's name does not do.
    """
    plain = RunSection()
    if (job.run.name, job.run.directory) != (plain.name, plain.directory):
        raise IntegrationError(
            f'run.name = "{job.run.name}" and run.directory = "{job.run.directory}" have no effect '
            f"in a Trainer: its run lives in TrainingArguments.output_dir; remove them"
        )
    path = Path(output_dir).absolute()
    try:
        run = RunSection(
            **{**job.run.model_dump(), "name": path.name, "directory": str(path.parent)}
        )
    except ValueError:
        raise IntegrationError(
            f"TrainingArguments.output_dir = {output_dir!r} cannot hold a run's records: its last "
            "part must consist of letters, digits, dots, dashes and underscores, with a letter or "
            "a digit first"
        ) from None
    return job.model_copy(update={"run": run})
