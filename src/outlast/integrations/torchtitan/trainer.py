"""torchtitan's trainer with Outlast beside it: `OutlastTrainer`.

It does what torchtitan's own `Trainer` does. Around its loop stands `Beside`: the guard, and the
records with energy and memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.trainer import Trainer

from outlast import cluster
from outlast.errors import IntegrationError, WrongNumbersError
from outlast.integrations.torchtitan.manager import OutlastCheckpointManager
from outlast.job import LoopJob, load_loop_job
from outlast.job.section import toml_value
from outlast.job.sections import RunSection
from outlast.records import Warned
from outlast.runtime.guarding import RunGuard
from outlast.runtime.place import ranks_here
from outlast.runtime.recording import LoopFacts, Recording

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from torch import Tensor

    from outlast.job import GuardSection


class Guarding:
    """The guard of one training.

    Args:
        trainer: Whose model, optimizers and passes are guarded.
        settings: Of the guard.
        seed: Of the slices that are checked.
        step: Steps that are done.

    Attributes:
        run: The guard.
    """

    def __init__(self, trainer: Trainer, settings: GuardSection, seed: int, step: int) -> None:
        self.run = RunGuard(settings, seed, trainer.model_parts[0], [*trainer.optimizers])
        self.run.restart(step)
        self._trainer = trainer
        self._attempts: Iterator[int] = iter(())
        self._parts: list[dict[str, Any]] = []
        self._losses: list[torch.Tensor] = []
        self._tokens_before = 0

    def part(self, own: Callable[..., torch.Tensor], **part: Any) -> torch.Tensor:
        """The passes of one of a step's parts, and of all of them again where it must be.

        Args:
            own: The trainer's own `forward_backward_step`.
            part: As it is given.

        Returns:
            The part's loss, with what repeated passes of the parts before have changed in theirs.

        Raises:
            WrongNumbersError: On all ranks, when numbers stay wrong.
        """
        trainer = self._trainer
        if not self._parts:
            self._tokens_before = trainer.ntokens_seen
            self._attempts = self.run.attempts()
            next(self._attempts)
        self._parts.append(part)
        # A CUDA graph writes the next loss over this one.
        self._losses.append(own(**part).detach().clone())
        if len(self._parts) < trainer.gradient_accumulation_steps:
            return self._losses[-1]
        loss, told = self._losses[-1], self._losses[:-1]
        for _ in self._attempts:
            # Where CUDA graphs replay the passes, the gradients must stay where they are.
            trainer.optimizers.zero_grad(set_to_none=trainer.config.training.disable_cuda_graphs)
            trainer.ntokens_seen = self._tokens_before
            again = [own(**part).detach().clone() for part in self._parts]
            loss = torch.stack(again).sum() - sum(told)
        self._parts, self._losses = [], []
        return loss


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
        self._recording = Recording(self._job, self._ranks, trainer.device, facts, chain=cluster)
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
                # The loop has come to its end; what the guard's last checks find is told.
                try:
                    if self._guarding is not None:
                        self._guarding.run.finish()
                    self._trainer.checkpointer.maybe_wait_for_saving()
                    self._tell()
                except BaseException as late:
                    self._recording.close("failed", f"{type(late).__name__}: {late}")
                    raise
                self._recording.close("completed")
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


def job_of(config: OutlastTrainer.Config) -> LoopJob:
    """The settings of what Outlast does beside a training, with its dump folder as the run's.

    Raises:
        JobError: When a setting is wrong.
        IntegrationError: When one has no effect, or does not go with the recipe.
    """
    path = Path(config.outlast_job) if config.outlast_job else None
    job = load_loop_job(path, config.outlast_settings)
    plain = LoopJob().checkpoint
    for name in type(plain).model_fields:
        if (value := getattr(job.checkpoint, name)) != getattr(plain, name):
            raise IntegrationError(
                f"checkpoint.{name} = {toml_value(value)} in a job has no effect in torchtitan: "
                "the recipe's own checkpoint settings count; remove it"
            )
    _check_guard(config, job)
    return _in_dump_folder(job, config.dump_folder)


def _check_guard(config: OutlastTrainer.Config, job: LoopJob) -> None:
    """Refuse a guard where its checks would not run.

    Raises:
        IntegrationError: With the setting, its value and the remedy.
    """
    policy = job.guard.policy
    if policy == "off":
        return
    if (stages := config.parallelism.pipeline_parallel_degree) > 1:
        raise IntegrationError(
            f"parallelism.pipeline_parallel_degree = {stages} does not go with guard.policy = "
            f'"{policy}": in torchtitan the guard knows no pipelines; set it to "off"'
        )
    if policy == "light" and not job.guard.modules:
        return
    what = f'policy = "{policy}"' if policy != "light" else "modules"
    if isinstance(config.activation_checkpoint, SelectiveAC.Config):
        raise IntegrationError(
            f"guard.{what} does not go with activation_checkpoint = SelectiveAC: torch counts the "
            "operations of both passes there, and the checks are among them; set it to "
            "FullAC.Config() or None"
        )
    if not config.training.disable_cuda_graphs:
        raise IntegrationError(
            f"guard.{what} needs training.disable_cuda_graphs = True: passes that are replayed "
            "from a CUDA graph run without their checks"
        )


def _in_dump_folder(job: LoopJob, dump_folder: str) -> LoopJob:
    """`job` with a recipe's dump folder as its run directory.

    Raises:
        IntegrationError: When the job names another, or the folder's name does not do.
    """
    plain = RunSection()
    if (job.run.name, job.run.directory) != (plain.name, plain.directory):
        raise IntegrationError(
            f'run.name = "{job.run.name}" and run.directory = "{job.run.directory}" have no effect '
            "in torchtitan: its run lives in the recipe's dump_folder; remove them"
        )
    path = Path(dump_folder).absolute()
    try:
        run = RunSection(
            **{**job.run.model_dump(), "name": path.name, "directory": str(path.parent)}
        )
    except ValueError:
        raise IntegrationError(
            f"dump_folder = {dump_folder!r} cannot hold a run's records: its last part must "
            "consist of letters, digits, dots, dashes and underscores, with a letter or a digit "
            "first"
        ) from None
    return job.model_copy(update={"run": run})


class OutlastTrainer(Trainer):  # type: ignore[misc]
    """A `Trainer` whose steps are guarded, recorded and metered; `use_outlast` gives one.

    A trainer of one's own derives from it in place of `Trainer`.

    Raises:
        JobError: When a setting of the job is wrong.
        IntegrationError: When one does not go with the recipe.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        """A recipe, and where the settings of what Outlast does beside it are."""

        outlast_job: str = ""
        """A TOML file with the sections [guard], [recover], [energy] and [log]; empty: defaults."""

        outlast_settings: list[str] = field(default_factory=list)
        """Overrides of the form "section.key=value"."""

    def __init__(self, config: Config) -> None:
        # A wrong setting ends it before anything is built.
        self._job = job_of(config)
        self._beside: Beside | None = None
        super().__init__(config)

    def train(self) -> None:
        """Train to the last step; see `Trainer.train`."""
        with Beside(self, self._job) as self._beside:
            super().train()

    def should_continue_training(self) -> bool:
        """True if a step is to follow; asked before each, the first time with everything loaded."""
        if self._beside is not None:
            self._beside.begin()
        return bool(super().should_continue_training())

    def batch_generator(self, data_iterable: Iterable[Any]) -> Iterator[Any]:
        """The batches; waiting for them is told apart in the records."""
        batches = super().batch_generator(data_iterable)
        while True:
            if self._beside is None:
                batch = next(batches)
            else:
                with self._beside.watch("data"):
                    batch = next(batches)
            yield batch

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """One step, guarded and recorded."""
        beside = self._beside
        if beside is None:
            super().train_step(data_iterator)
            return
        beside.observe_rate(self.optimizers.optimizers[0].param_groups[0]["lr"])
        with beside.watch("compute"):
            super().train_step(data_iterator)
        beside.step()

    def forward_backward_step(self, **part: Any) -> Tensor:
        """The passes of one of a step's parts, and again where their numbers are wrong."""
        own = super().forward_backward_step
        loss: Tensor = own(**part) if self._beside is None else self._beside.part(own, **part)
        return loss


def use_outlast(
    config: Any,
    job: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    **settings: Any,
) -> Any:
    """Let a recipe's checkpoints go into a store; its settings of them keep their meaning.

    With a job or overrides its steps are guarded, metered and recorded, too.

    Args:
        config: A `Trainer.Config`.
        job: A TOML file with the sections [guard], [recover], [energy] and [log], each of which may
            be missing.
        overrides: Of the job's settings, or of the defaults: "section.key=value". A recipe that has
            a job or overrides already keeps what is not given.
        settings: Of `OutlastCheckpointManager.Config`, instead of the recipe's own; for example
            ``enable=True``, which most recipes leave to the command line.

    Returns:
        The recipe: the same `config`, or an `OutlastTrainer.Config` in its place.

    Raises:
        IntegrationError: When a setting is unknown, the recipe's manager has one that a store
            cannot follow, or its trainer has steps of its own.
    """
    known = {field.name for field in dataclasses.fields(OutlastCheckpointManager.Config)}
    if unknown := sorted(settings.keys() - known):
        raise IntegrationError(
            f"{unknown[0]} = {settings[unknown[0]]!r} is no setting of OutlastCheckpointManager; "
            f"there are {', '.join(sorted(known))}"
        )
    if job is not None or overrides:
        # The same recipe for an OutlastTrainer; what is not given stays as it is.
        ours: OutlastTrainer.Config = config
        if not isinstance(config, OutlastTrainer.Config):
            ours = _of_our_trainer(config)
        if job is not None:
            ours.outlast_job = str(job)
        if overrides:
            ours.outlast_settings = [*overrides]
        config = ours
    before = config.checkpoint
    given = {}
    for setting in dataclasses.fields(before):
        value = getattr(before, setting.name)
        if setting.name in known:
            given[setting.name] = value
        elif value != _default(setting):
            raise IntegrationError(
                f"checkpoint.{setting.name} = {value!r} of {type(before).__qualname__} has no "
                "counterpart in a store; leave it at its default"
            )
    config.checkpoint = OutlastCheckpointManager.Config(**given | settings)
    return config


def _of_our_trainer(config: Any) -> OutlastTrainer.Config:
    if type(config) is not Trainer.Config:
        raise IntegrationError(
            f"the recipe is a {type(config).__qualname__}, whose trainer has steps of its own; "
            "derive that trainer and its Config from OutlastTrainer, or leave out job and overrides"
        )
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return OutlastTrainer.Config(**given)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
