"""What Outlast does beside a training of torchtitan, from before its load to after its loop."""

from __future__ import annotations

import contextlib
import math
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from outlast.errors import WrongNumbersError
from outlast.integrations.place import ranks_here
from outlast.integrations.recording import LoopFacts, Recording
from outlast.integrations.torchtitan.guarding import Guarding
from outlast.integrations.torchtitan.manager import OutlastCheckpointManager
from outlast.records import Warned

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import TracebackType

    from torch import Tensor
    from torchtitan.trainer import Trainer

    from outlast.job import LoopJob

_DEGREES = {
    "pipeline": "pp",
    "replicate": "dp_replicate",
    "shard": "dp_shard",
    "context": "cp",
    "tensor": "tp",
    "expert": "ep",
}
"""Name of an axis in the records -> in torchtitan's `ParallelDims`."""


class Beside:
    """A context around a trainer's `train`: its guard and its records, with energy and memory.

    All ranks enter and leave it together, but for one that has failed.

    Args:
        trainer: Ready to train, with nothing loaded.
        job: The settings.

    Raises:
        OutlastError: On all ranks, when the dump folder is in use, holds another run, or cannot be
            written.
    """

    def __init__(self, trainer: Trainer, job: LoopJob) -> None:
        self._trainer = trainer
        self._job = job
        self._ranks = ranks_here()
        self._guarding: Guarding | None = None
        self._begun = False
        self._step = 0
        self._loss: float | None = None
        self._norm = self._rate = math.nan
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Beside:
        trainer = self._trainer
        facts = _facts_of(trainer)
        self._recording = Recording(self._job, self._ranks, trainer.device, facts)
        if isinstance(trainer.checkpointer, OutlastCheckpointManager):
            trainer.checkpointer.attach(self._recording, self._job, self._ranks)
        self._time(trainer.checkpointer, "save", "checkpoint")
        if hasattr(trainer, "validator"):
            self._time(trainer.validator, "validate", "evaluation")
        self._replace(trainer.metrics_processor, "log", self._logged)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._undo:
            why = getattr(self._trainer.checkpointer, "stopped", "")
            if kind is None:
                self._complete()
            elif why:
                self._tell()
                self._recording.close("to_be_continued", why)
            else:
                # Wrong numbers are an error on all ranks.
                if issubclass(kind, WrongNumbersError) or self._ranks.world_size == 1:
                    self._tell()
                self._recording.close("failed", f"{kind.__name__}: {error}")

    def watch(self, purpose: str) -> AbstractContextManager[Any]:
        """A context whose time counts for `purpose`."""
        return self._recording.watch(purpose)

    def begin(self) -> None:
        """Everything is loaded, and the first step comes; later calls do nothing."""
        if self._begun:
            return
        self._begun = True
        step, settings = self._trainer.step, self._job.guard
        self._step = step
        if settings.policy != "off":
            self._guarding = Guarding(self._trainer, settings, self._job.run.seed, step)
            self._undo.callback(self._guarding.run.guard.remove)
            for message in self._guarding.run.warnings:
                self._recording.write(Warned(message))
        guard = None if self._guarding is None else self._guarding.run
        self._recording.ready(step, [], guard)

    def part(self, own: Callable[..., Tensor], **part: Any) -> Tensor:
        """Forward and backward passes of one of a step's parts; see `Guarding.part`."""
        if self._guarding is None:
            return own(**part)
        return self._guarding.part(own, **part)

    def observe_rate(self, learning_rate: float) -> None:
        """The learning rate of the step that begins."""
        self._rate = learning_rate

    def step(self) -> None:
        """One more step is done."""
        step = self._step = self._trainer.step
        due = self._recording.step(
            step, loss=self._loss, gradient_norm=self._norm, learning_rate=self._rate
        )
        self._loss, self._norm = None, math.nan
        if due:
            self._recording.record_steps()
            self._tell()

    def _complete(self) -> None:
        """The loop has come to its end; what the guard's last checks find is told."""
        try:
            if self._guarding is not None:
                self._guarding.run.finish()
            self._trainer.checkpointer.maybe_wait_for_saving()
            self._tell()
        except BaseException as late:
            self._recording.close("failed", f"{type(late).__name__}: {late}")
            raise
        self._recording.close("completed")

    def _tell(self) -> None:
        """Write down what the guards of all ranks have found, and checked; all ranks together."""
        if self._guarding is not None:
            # The trainer counts a step that the end of the data has cancelled, too.
            self._recording.checked(self._guarding.run, self._step)

    def _logged(
        self,
        own: Callable[..., None],
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        *more: Any,
        **options: Any,
    ) -> None:
        """The log of torchtitan itself of a step: its figures are those of all ranks."""
        own(step, global_avg_loss, global_max_loss, grad_norm, *more, **options)
        if not self._trainer.parallel_dims.pp_enabled:
            # The first stage of a pipeline, whose rank records, knows no loss.
            self._loss = global_avg_loss
        self._norm = grad_norm

    def _time(self, owner: Any, name: str, purpose: str) -> None:
        """Let the time in a method count for `purpose`."""

        def timed(own: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            with self.watch(purpose):
                return own(*arguments, **options)

        self._replace(owner, name, timed)

    def _replace(self, owner: Any, name: str, wrapped: Callable[..., Any]) -> None:
        """Let `wrapped`, which is given the method as its first argument, stand in for it."""
        own = getattr(owner, name)
        setattr(owner, name, lambda *arguments, **options: wrapped(own, *arguments, **options))
        self._undo.callback(delattr, owner, name)


def _facts_of(trainer: Trainer) -> LoopFacts:
    training, dims = trainer.config.training, trainer.parallel_dims
    replicas = dims.dp_replicate * dims.dp_shard
    samples = training.local_batch_size * replicas * trainer.gradient_accumulation_steps
    parameters = [parameter for part in trainer.model_parts for parameter in part.parameters()]
    return LoopFacts(
        framework="torchtitan",
        steps=training.steps,
        samples_per_step=samples,
        tokens_per_step=samples * training.seq_len,
        # A rank of a pipeline has a part of them.
        parameters=0 if dims.pp_enabled else sum(parameter.numel() for parameter in parameters),
        flops_per_token=float(trainer.metrics_processor.num_flops_per_token),
        parallel={name: getattr(dims, own) for name, own in _DEGREES.items()},
        versions={"torchtitan": version("torchtitan")},
    )
