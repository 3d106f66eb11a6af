"""All of Outlast inside Hugging Face's `Trainer`, and inside those derived from it, such as TRL's.

trainer = Trainer(model, arguments, train_dataset=data)
add_outlast(trainer, "job.toml")       # or one by one: add_checkpoints, add_guard, add_stop, ...
trainer.train(resume_from_checkpoint=True)
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outlast import cluster
from outlast.errors import IntegrationError
from outlast.integrations import in_folder, loop_job_of, require, unfollowed, with_section
from outlast.job import CheckpointSection, tiers_of
from outlast.job.section import toml_value
from outlast.runtime.energy import TrainingEnergy
from outlast.runtime.engine import GOES_ON, PeriodicConsensus, Runtime, StepResult
from outlast.runtime.place import device_of, ranks_here
from outlast.runtime.recording import LoopFacts

require("transformers", "5.23", "6")
require("accelerate", "1.15", "2")

import transformers  # noqa: E402
from packaging.version import Version  # noqa: E402
from transformers import Trainer, TrainerCallback  # noqa: E402

from outlast.integrations.hf_checkpoints import Saving  # noqa: E402

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from transformers import TrainerControl, TrainerState, TrainingArguments

    from outlast.autosave.libraries import HandedOver
    from outlast.energy.sources import Source
    from outlast.job import GuardSection, LoopJob
    from outlast.records import Predicted

_NEEDED = (
    "train",
    "training_step",
    "save_model",
    "_finalize_training",
    "_get_grad_norm",
    "evaluate",
    "get_batch_samples",
    "_save_checkpoint",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",
    "_load_best_model",
)
"""Methods of `Trainer` that are replaced or called."""


_TESTED = Version("5.23")


_DECIDED_BY_ARGUMENTS = {
    "every_steps": "save_strategy and save_steps say when to save",
    "keep": "save_total_limit says how many are kept",
    "keep_every": "save_total_limit says how many are kept",
    "keep_best": "metric_for_best_model and load_best_model_at_end say which is kept as the best",
    "mtbf_hours": "save_strategy and save_steps say when to save",
    "slowdown_budget": "save_strategy and save_steps say when to save",
    "longest_minutes": "save_strategy and save_steps say when to save",
    "when_busy": "save_strategy asks for a folder, which waits for the version before",
}
"""Keys of [checkpoint] -> whose business they are in a `Trainer`."""

_FOLLOWED = {*CheckpointSection.model_fields} - {*_DECIDED_BY_ARGUMENTS}


def check_trainer(trainer: Trainer) -> None:
    """Refuse a `Trainer` of another make.

    Raises:
        IntegrationError: When methods are missing that this version of transformers should have.
    """
    missing = [name for name in _NEEDED if not hasattr(trainer, name)]
    if not missing:
        return
    found = Version(transformers.__version__)
    if found.release[:2] == _TESTED.release[:2]:
        raise IntegrationError(
            f"a {type(trainer).__name__} has no {missing[0]}(): it is no transformers.Trainer"
        )
    age = "old" if found < _TESTED else "new"
    raise IntegrationError(
        f"transformers {found} is too {age}: its Trainer has no {missing[0]}(); Outlast works with "
        f"transformers {_TESTED}: pip install 'transformers~={_TESTED}.0'"
    )


def check_checkpoints(trainer: Trainer, settings: CheckpointSection) -> None:
    """Refuse what a store cannot keep the meaning of.

    Raises:
        IntegrationError: With the setting, its value and the remedy.
    """
    arguments = trainer.args
    if trainer.is_deepspeed_enabled:
        raise IntegrationError(
            "add_checkpoints cannot save what DeepSpeed holds: use the checkpoint engine of "
            "outlast.integrations.deepspeed in its configuration"
        )
    if trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version == 1:
        raise IntegrationError(
            "TrainingArguments.fsdp is FSDP1, which hides the parameters; set fsdp_config = "
            "{'version': 2}"
        )
    if arguments.push_to_hub and arguments.hub_strategy != "end":
        raise IntegrationError(
            f"TrainingArguments.hub_strategy = {arguments.hub_strategy.value!r} would push "
            "checkpoints, which are in a store that the hub cannot read; set hub_strategy='end'"
        )
    if arguments.save_on_each_node:
        raise IntegrationError(
            "TrainingArguments.save_on_each_node = True has no meaning for a store that all nodes "
            "write to together; leave it False, and for nodes' own disks set checkpoint.fast and "
            "checkpoint.fast_private"
        )
    for name, value in unfollowed(settings, _FOLLOWED):
        raise IntegrationError(
            f"checkpoint.{name} = {toml_value(value)} has no effect in a Trainer: "
            f"TrainingArguments.{_DECIDED_BY_ARGUMENTS[name]}; remove it"
        )


def check_stop(trainer: Trainer) -> None:
    """Refuse to stop in two ways at once, or where nothing could continue afterwards.

    Raises:
        IntegrationError: With the setting, its value and the remedy.
    """
    if trainer.args.enable_jit_checkpoint:
        raise IntegrationError(
            "TrainingArguments.enable_jit_checkpoint = True handles SIGTERM, and so does add_stop; "
            "set it to False"
        )
    if trainer.args.save_only_model:
        raise IntegrationError(
            "TrainingArguments.save_only_model = True saves nothing that a stopped training could "
            "continue from; set it to False, or leave add_stop out"
        )


class LogFigures(TrainerCallback):  # type: ignore[misc]
    """Adds figures to a log, before other callbacks send it on.

    Args:
        take: Gives the figures of a log after so many steps.
    """

    def __init__(self, take: Callable[[int], dict[str, float]]) -> None:
        self._take = take

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Add the figures to this log and to the trainer's history."""
        if logs is None:
            return
        found = self._take(state.global_step)
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)


class Adapter(TrainerCallback):  # type: ignore[misc]
    """Drives the runtime of each training of one trainer, with the parts that were added.

    Args:
        trainer: Whose methods are wrapped.

    Attributes:
        parts: Names of those that were added.
        runtime: Of the training under way, or of the last one.
        saving: Its store; None without.
        guarded: Settings and seed of the guard; None without.
        recorded: Settings of the records, tokens of a step and the prediction; None: there are
            no records.
        stops: Whether it stops in time.
        limit_seconds: How long a training may take; None: as long as it needs.
        handed: Told how far it is, under `outlast run`.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.parts: set[str] = set()
        self.runtime = Runtime(ranks_here())
        self.saving: Saving | None = None
        self.guarded: tuple[GuardSection, int] | None = None
        self.recorded: tuple[LoopJob, int, Predicted | None] | None = None
        self.stops = False
        self.limit_seconds: float | None = None
        self.handed: HandedOver | None = None
        self._trainer = trainer
        self._result = StepResult(0)
        self._losses: list[torch.Tensor] = []
        self._pending = 0
        self._logged: dict[str, float] = {}
        # Before the callbacks that send logs to others, and behind the one that says what is due.
        trainer.callback_handler.callbacks.insert(0, LogFigures(self._figures))
        trainer.add_callback(self)
        for name, wrapped in (
            ("train", self._train),
            ("training_step", self._training_step),
            ("_finalize_training", self._finalize_training),
            ("_get_grad_norm", self._get_grad_norm),
            ("get_batch_samples", self._get_batch_samples),
            ("evaluate", self._evaluate),
        ):
            setattr(trainer, name, functools.partial(wrapped, getattr(trainer, name)))

    def _train(
        self,
        own: Any,
        resume_from_checkpoint: str | bool | None = None,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        """The trainer's own `train` within all that was added."""
        runtime = self.runtime = Runtime(ranks_here(), chain=cluster, keeps_later=True)
        with runtime:
            if self.stops:
                runtime.consensus = PeriodicConsensus(self.limit_seconds, cluster)
                runtime.take_signals()
            if self.saving is None:
                return own(resume_from_checkpoint, *arguments, **options)
            return self.saving.train(
                runtime, lambda place: own(place, *arguments, **options), resume_from_checkpoint
            )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The Trainer has made or restored everything; the first step comes.

        With ``auto_find_batch_size`` it comes again after a batch that did not fit.
        """
        trainer, runtime = self._trainer, self.runtime
        runtime.abandon("the Trainer begins anew with smaller batches")
        self._result, self._losses, self._pending = StepResult(0), [], 0
        if self.guarded is not None:
            optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
            runtime.install_guard(*self.guarded, trainer.model_wrapped, [optimizer])
        if self.recorded is not None:
            job, tokens_per_step, prediction = self.recorded
            facts = LoopFacts(
                framework="transformers",
                steps=state.max_steps,
                samples_per_step=trainer.get_total_train_batch_size(args),
                tokens_per_step=tokens_per_step,
                parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
                versions={"transformers": transformers.__version__},
            )
            device = device_of([trainer.model])
            runtime.open_records(job, device, facts, prediction=prediction)
        runtime.begin(state.global_step)
        if self.saving is not None:
            self.saving.begin()
        if self.handed is not None:
            self.handed.step = state.global_step

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """All that belongs to the last step of the epoch before is done."""
        self._keep()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Gradients are complete."""
        self.runtime.before_update()
        self._result.learning_rate = float(self._trainer.optimizer.param_groups[0]["lr"])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """A step has been done: record, and see whether to save or to stop."""
        runtime, step = self.runtime, state.global_step
        result, self._result = self._result, StepResult(0)
        losses, self._losses = self._losses, []
        result.step, result.loss = step, torch.stack(losses).sum() if losses else None
        decision = runtime.after_update(result)
        self._pending = step
        if self.handed is not None:
            self.handed.step = step
        if decision.stop and step < state.max_steps:
            runtime.stop(decision)
            control.should_save = control.should_log = True
        elif step >= state.max_steps:
            # The Trainer saves before it says that the training is at its end.
            runtime.check_state(last=True)
        elif decision.save:
            control.should_save = True
        if runtime.guard is not None and control.should_log:
            runtime.gather_findings()
            self._logged = {
                "guard_findings": float(runtime.guard.told),
                "guard_checks": float(runtime.guard.guard.ledger.checks),
            }

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The Trainer has saved: the place to stop.

        Raises:
            SystemExit: When the training is to stop, and all is on disk.
            CheckpointError: When it is to stop and could not be saved.
        """
        if self.runtime.stopped:
            self.runtime.leave(f"{GOES_ON} with resume_from_checkpoint=True")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """All steps are done."""
        self.runtime.finish()

    def _training_step(
        self, own: Any, model: torch.nn.Module, *arguments: Any, **options: Any
    ) -> torch.Tensor:
        """The trainer's own `training_step`, guarded; its loss is recorded."""
        accelerator = self._trainer.accelerator

        def passes(unsummed: bool) -> torch.Tensor:
            summing = accelerator.no_sync(model=model) if unsummed else contextlib.nullcontext()
            with summing:
                loss: torch.Tensor = own(model, *arguments, **options)
            return loss

        with self.runtime.watch("compute"):
            loss = self.runtime.micro_batch(
                passes, last=accelerator.sync_gradients, begin_again=model.zero_grad
            )
        self._losses.append(loss.detach())
        return loss

    def _finalize_training(self, own: Any, *arguments: Any, **options: Any) -> Any:
        """The last step is done, and other weights may come: the guard ends here."""
        try:
            self.runtime.end_steps(self._trainer.state.global_step)
        finally:
            self.runtime.remove_guard()
        return own(*arguments, **options)

    def _get_grad_norm(self, own: Any, *arguments: Any, **options: Any) -> Any:
        norm = own(*arguments, **options)
        if norm is not None:
            self._result.gradient_norm = norm
        return norm

    def _get_batch_samples(self, own: Any, *arguments: Any, **options: Any) -> Any:
        self._keep()
        with self.runtime.watch("data"):
            return own(*arguments, **options)

    def _evaluate(self, own: Any, *arguments: Any, **options: Any) -> Any:
        with self.runtime.evaluating():
            return own(*arguments, **options)

    def _figures(self, _: int) -> dict[str, float]:
        """The figures of the guard, for the log after the step that they are of."""
        found, self._logged = self._logged, {}
        return found

    def _keep(self) -> None:
        """Keep the state of the last step in memory, if that is not done yet."""
        step, self._pending = self._pending, 0
        if step:
            self.runtime.keep(step)


def adapter_of(trainer: Trainer, part: str) -> Adapter:
    """The adapter of a trainer, made when it is asked for first.

    Args:
        trainer: A `Trainer`.
        part: Which of its parts is about to be added.

    Raises:
        IntegrationError: When it has that already, or trains, or is no `Trainer`.
    """
    check_trainer(trainer)
    found: Adapter | None = getattr(trainer, "_outlast", None)
    if found is None:
        found = trainer._outlast = Adapter(trainer)
    if part in found.parts:
        raise IntegrationError(
            f"this trainer has its {part} already: add each part of Outlast once"
        )
    if trainer.is_in_train:
        raise IntegrationError("add parts of Outlast before trainer.train(), not within it")
    found.parts.add(part)
    return found


class EnergyCallback(TrainingEnergy, LogFigures):
    """Adds joules per step, joules since the start and mean watts to every log.

    The figures are those of the meters that the logging process reads, by default all of its node.
    Where nothing can be read, a warning says why and the logs stay as they are. `Trainer` tells no
    callback that a training raised: its meter is closed by the next training, or with the callback.

    Args:
        sources: What is read. Default: all meters of this machine.

    Attributes:
        joules: Of the last training, or of this one until its last log.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Start to measure, on the process that logs."""
        # A training that raised has no end: its meter is still open.
        self.close()
        if state.is_world_process_zero:
            self.begin(state.global_step)

    def _take(self, step: int) -> dict[str, float]:
        return {f"energy_{name}": figure for name, figure in self.take(step).items()}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Stop to measure."""
        self.close()


def add_energy(trainer: Trainer, sources: Sequence[Source] | None = None) -> EnergyCallback:
    """Give `trainer` an `EnergyCallback`, before the callbacks that send logs to others.

    `Trainer.add_callback` would put it behind them, and TensorBoard would miss the figures.
    """
    callback = EnergyCallback(sources)
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback


def predicted(trainer: Trainer, sequence: int, cluster: str | None = None) -> Predicted:
    """The prediction, for ``add_records(trainer, prediction=predicted(trainer, 2048))``.

    Args:
        trainer: Of a decoder-only language model, data parallel or FSDP2.
        sequence: Tokens of one sample.
        cluster: Name or file of a cluster; None: this machine.

    Raises:
        MissingExtraError: Without what `outlast plan` needs.
        PlanError: When the model or the machine is not known.
    """
    from outlast.plan import Configuration, Training, cluster_of, predict, transformer_of
    from outlast.plan.cluster_file import this_cluster
    from outlast.plan.prediction import as_record

    arguments = trainer.args
    ranks = max(1, arguments.world_size)
    batch = trainer.get_total_train_batch_size(arguments)
    run = Configuration(
        data=ranks,
        sharding="parameters" if trainer.is_fsdp_enabled else "none",
        sequence=sequence,
        micro_batch=arguments.per_device_train_batch_size,
        batch=batch,
        recompute="full" if arguments.activation_checkpointing else "none",
        precision="bf16" if arguments.bf16 else "fp16" if arguments.fp16 else "fp32",
    )
    training = Training(
        model=transformer_of(trainer.model.config.to_dict()),
        run=run,
        tokens=float(max(trainer.args.max_steps, 1) * batch * sequence),
    )
    place = this_cluster(ranks) if cluster is None else cluster_of(cluster)
    return as_record(predict(training, place), "published runs")


def add_checkpoints(trainer: Trainer, **settings: Any) -> Saving:
    """Save to a store and resume from it, in place of the trainer's own files.

    When to save, what is the best checkpoint and how many are kept, `TrainingArguments` says as
    before; `train(resume_from_checkpoint=...)` takes the same values, and the folders that
    the Trainer itself has written. The versions lie in ``<output_dir>/checkpoints``.

    Args:
        trainer: A `Trainer`, or one derived from it.
        settings: Keys of [checkpoint], such as ``compression="lz4"``.

    Returns:
        The store; its ``has_checkpoint`` says whether there is something to resume from.

    Raises:
        JobError: When a setting is wrong.
        IntegrationError: When something in `TrainingArguments` cannot be kept.
    """
    check_trainer(trainer)
    section = with_section("checkpoint", settings).checkpoint
    check_checkpoints(trainer, section)
    saving = adapter_of(trainer, "saving").saving = Saving(trainer, section)
    return saving


def add_recover(trainer: Trainer, **settings: Any) -> Saving:
    """Keep the state of each step in memory outside of the processes, and continue from it.

    Under torchrun with ``--max-restarts`` a killed process costs one step at most. It goes behind
    ``add_checkpoints``, and `Saving.has_checkpoint` knows of the memory, too.

    Args:
        trainer: A `Trainer`, or one derived from it.
        settings: Keys of [recover], such as ``memory="/dev/shm"``.

    Returns:
        The store.

    Raises:
        JobError: When a setting is wrong.
        IntegrationError: When there is no store.
    """
    check_trainer(trainer)
    job = with_section("recover", settings)
    if job.recover.mode == "off":
        raise IntegrationError('add_recover with mode = "off" does nothing; leave it out')
    saving = getattr(getattr(trainer, "_outlast", None), "saving", None)
    if not isinstance(saving, Saving):
        raise IntegrationError(
            "add_recover keeps in memory what add_checkpoints saves to disk: call "
            "add_checkpoints(trainer) before"
        )
    adapter_of(trainer, "remembering")
    saving.kept = job
    return saving


def add_guard(
    trainer: Trainer, policy: str = "light", *, seed: int = 0, **settings: Any
) -> Adapter:
    """Check the numbers of each step, and do steps again whose numbers are wrong.

    Every log has ``guard_findings`` and ``guard_checks``.

    Args:
        trainer: A `Trainer`, or one derived from it.
        policy: ``light``, ``linear``, ``full``, or ``off``.
        seed: Of the slices that are checked.
        settings: Other keys of [guard].

    Returns:
        What drives the trainer, the same for each part; its ``runtime`` is that of the training
        under way, or of the last one.

    Raises:
        JobError: When a setting is wrong.
    """
    section = with_section("guard", {"policy": policy, **settings}).guard
    adapter = adapter_of(trainer, "guarding")
    adapter.guarded = section, seed
    return adapter


def add_records(
    trainer: Trainer,
    job: str | os.PathLike[str] | LoopJob | None = None,
    *,
    tokens_per_step: int = 0,
    prediction: Predicted | None = None,
) -> Adapter:
    """Write the run down in the output directory: ``outlast report OUTPUT_DIR`` shows it.

    Args:
        trainer: A `Trainer`, or one derived from it.
        job: A TOML file or settings; [energy] and [log] count here. None: defaults.
        tokens_per_step: Over all processes; 0: not known.
        prediction: What the run is expected to need, to be shown beside what it needed.

    Returns:
        What drives the trainer, the same for each part; its ``runtime`` is that of the training
        under way, or of the last one.

    Raises:
        JobError: When a setting is wrong.
        IntegrationError: When the job names another run directory.
    """
    check_trainer(trainer)
    settings = in_output_directory(loop_job_of(job), trainer)
    adapter = adapter_of(trainer, "recorder")
    adapter.recorded = settings, tokens_per_step, prediction
    return adapter


def add_stop(trainer: Trainer, limit_seconds: float | None = None) -> Adapter:
    """Save and end the program with exit code 3, to be continued, when it has to stop.

    That is at SIGTERM, SIGUSR1 or SIGINT, when a Slurm job's time is nearly up, and `limit_seconds`
    after the training began.

    Args:
        trainer: A `Trainer`, or one derived from it.
        limit_seconds: How long a training may take; None: as long as it needs.

    Returns:
        What drives the trainer, the same for each part; its ``runtime`` is that of the training
        under way, or of the last one.

    Raises:
        IntegrationError: When something in `TrainingArguments` contradicts.
    """
    check_trainer(trainer)
    check_stop(trainer)
    adapter = adapter_of(trainer, "stopping")
    adapter.stops, adapter.limit_seconds = True, limit_seconds
    return adapter


def add_outlast(
    trainer: Trainer,
    job: str | os.PathLike[str] | LoopJob | None = None,
    *,
    tokens_per_step: int = 0,
    prediction: Predicted | None = None,
) -> Saving:
    """All of it: checkpoints, restarts from memory, guard, records with energy, stopping in time.

    Args:
        trainer: A `Trainer`, or one derived from it.
        job: A TOML file with the sections of `LoopJob`, or the settings themselves.
        tokens_per_step: Over all processes; 0: not known.
        prediction: What the run is expected to need.

    Returns:
        The store; ``train(resume_from_checkpoint=saving.has_checkpoint())`` begins the run, or goes
        on with it.

    Raises:
        JobError: When a setting is wrong.
        IntegrationError: When something in `TrainingArguments` or in the job does not go with it.
    """
    check_trainer(trainer)
    settings = loop_job_of(job)
    in_output_directory(settings, trainer)
    check_checkpoints(trainer, settings.checkpoint)
    check_stop(trainer)
    add_records(trainer, settings, tokens_per_step=tokens_per_step, prediction=prediction)
    adapter = adapter_of(trainer, "saving")
    saving = adapter.saving = Saving(trainer, settings.checkpoint)
    if "memory" in tiers_of(settings.checkpoint, settings.recover):
        adapter.parts.add("remembering")
        saving.kept = settings
    if settings.guard.policy != "off":
        adapter.parts.add("guarding")
        adapter.guarded = settings.guard, settings.run.seed
    add_stop(trainer)
    return saving


def in_output_directory(job: LoopJob, trainer: Trainer) -> LoopJob:
    """`job` with a trainer's output directory as its run directory.

    Raises:
        IntegrationError: When the job names another, or the directory's name does not do.
    """
    setting = "TrainingArguments.output_dir"
    return in_folder(job, trainer.args.output_dir, setting=setting, framework="a Trainer")


def take_over(handed: HandedOver) -> Callable[[], None]:
    """Have all trainers that are made from now on save to a store, resume from it and stop in time.

    For scripts that know nothing of Outlast, under `outlast run`.

    Args:
        handed: What to tell them.

    Returns:
        A function that leaves those alone that are made afterwards.
    """
    own = Trainer.__init__

    @functools.wraps(own)
    def made(trainer: Trainer, *arguments: Any, **options: Any) -> None:
        own(trainer, *arguments, **options)
        # A script that adds parts of Outlast itself does so behind this, and is told.
        saving, adapter = add_checkpoints(trainer), add_stop(trainer)
        by_itself = trainer.args.save_strategy != "no"
        saving.cadence, adapter.handed = handed.pace(saves_by_itself=by_itself), handed
        train = trainer.train

        def resumed(resume_from_checkpoint: Any = None, *rest: Any, **more: Any) -> Any:
            store = Path(trainer.args.output_dir) / "checkpoints"
            # What the script names is where the run begins, not where each of its starts does.
            resume = str(store) if handed.begins(store) else resume_from_checkpoint
            # The limit is the program's, of which a part is gone by now.
            adapter.limit_seconds = handed.seconds_left()
            return train(resume, *rest, **more)

        trainer.train = resumed

    def undo() -> None:
        Trainer.__init__ = own

    Trainer.__init__ = made
    return undo
