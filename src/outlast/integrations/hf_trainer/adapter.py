"""The adapter of one Hugging Face `Trainer`: guard, records, energy, stop in time."""

from __future__ import annotations

import contextlib
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from packaging.version import Version
from transformers import TrainerCallback

from outlast import cluster
from outlast.errors import EXIT_TO_BE_CONTINUED, IntegrationError, WrongNumbersError
from outlast.hardware.figure import Unavailable
from outlast.integrations.given import loop_job_of, with_section
from outlast.integrations.hf_trainer.checkpoints import Remembering, Saving
from outlast.job.section import toml_value
from outlast.job.sections import RunSection
from outlast.plan import Configuration, Training, cluster_of, predict, transformer_of
from outlast.plan.cluster_file import this_cluster
from outlast.plan.prediction import as_record
from outlast.records import StopRequested, Warned
from outlast.runtime.energy import StepEnergy
from outlast.runtime.guarding import RunGuard
from outlast.runtime.place import device_of, ranks_here
from outlast.runtime.recording import LoopFacts, Recording
from outlast.runtime.stop import Stopping

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

    from outlast.checkpoint import SaveResult
    from outlast.energy.sources import Source
    from outlast.energy.window import Reading
    from outlast.job import CheckpointSection, GuardSection, LoopJob
    from outlast.records import CorruptionDetected, Event, Guarded, MemberLost, Predicted


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
    for name, reason in _DECIDED_BY_ARGUMENTS.items():
        value = getattr(settings, name)
        if value != type(settings).model_fields[name].default:
            raise IntegrationError(
                f"checkpoint.{name} = {toml_value(value)} has no effect in a Trainer: "
                f"TrainingArguments.{reason}; remove it"
            )


def check_stop(trainer: Trainer) -> None:
    """Refuse to stop in two ways at once, or where nothing could go on afterwards.

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
            "go on from; set it to False, or leave add_stop out"
        )


class LogFigures(TrainerCallback):  # type: ignore[misc]
    """Adds figures to the next log, before other callbacks send it on.

    Attributes:
        figures: To be added.
    """

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Add the figures to this log and to the trainer's history."""
        if logs is None or not self.figures:
            return
        logs.update(self.figures)
        if state.log_history:
            state.log_history[-1].update(self.figures)
        self.figures = {}


class Adapter(TrainerCallback):  # type: ignore[misc]
    """Runs the mechanisms of one trainer in the order in which they need each other.

    Args:
        trainer: Whose `train`, `training_step` and `_finalize_training` are wrapped.

    Attributes:
        saving: Its store; None without.
        remembering: What keeps each step for a restart; None without.
        guarding: Its guard; None without.
        recorder: Its records; None without.
        stopping: When it is to stop; None without.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.saving: Saving | None = None
        self.remembering: Remembering | None = None
        self.guarding: Guarding | None = None
        self.recorder: Recorder | None = None
        self.stopping: Stopping | None = None
        self._trainer = trainer
        self._why = ""
        self._logged = LogFigures()
        # Before the callbacks that send logs to others, and behind the one that says what is due.
        trainer.callback_handler.callbacks.insert(0, self._logged)
        trainer.add_callback(self)
        self._wrap(trainer)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The Trainer has made or restored everything; the first step comes."""
        step = state.global_step
        if self.guarding is not None:
            self.guarding.begin(step)
        if self.recorder is not None:
            events = [] if self.saving is None else self.saving.events
            self.recorder.begin(step, events, self.guarding)
        if self.stopping is not None:
            self.stopping.begin(step)
        if self.remembering is not None:
            assert self.saving is not None
            self.remembering.agreement = None if self.stopping is None else self.stopping.agreement
            self.remembering.begin(self.saving.objects())

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """All that belongs to the last step of the epoch before is done."""
        if self.remembering is not None:
            self.remembering.keep()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Gradients are complete."""
        if self.remembering is not None:
            self.remembering.settle()
        if self.recorder is not None:
            self.recorder.observe_rate(float(self._trainer.optimizer.param_groups[0]["lr"]))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """A step has been done: record, and see whether to stop."""
        step = state.global_step
        if self.saving is not None:
            self.saving.collect()
        if self.recorder is not None:
            self.recorder.step(step, self.guarding)
        if self.remembering is not None:
            remembering = self.remembering
            events, remembering.events = remembering.events, []
            for event in events:
                if self.recorder is not None and self.recorder.recording is not None:
                    self.recorder.recording.write(event)
                if isinstance(event, Warned) and ranks_here().is_first:
                    warnings.warn(event.message, stacklevel=2)
            self.remembering.step_done(step)
        if (
            self.stopping is not None
            and (why := self.stopping.why(step))
            and step < state.max_steps
        ):
            self._why = why
            control.should_save = control.should_log = True
        if self.guarding is not None and control.should_log:
            self.guarding.gather()
            self._logged.figures = self.guarding.figures(step)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The Trainer has saved: the place to stop.

        Raises:
            SystemExit: When the training is to stop, and all is on disk.
            CheckpointError: When it is to stop and could not be saved.
        """
        if not self._why:
            return
        step = state.global_step
        if self.recorder is not None and self.recorder.recording is not None:
            self.recorder.recording.write(StopRequested(step, self._why))
        if self.saving is not None:
            self.saving.finish()
        self._forget()
        if self.recorder is not None:
            self.recorder.tell(self.guarding, step)
            self.recorder.close("to_be_continued", self._why)
        if ranks_here().is_first:
            print(
                f"outlast: stopped after step {step} ({self._why}); the same command goes on from "
                "there with resume_from_checkpoint=True",
                flush=True,
            )
        raise SystemExit(EXIT_TO_BE_CONTINUED)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """All steps are done."""
        if self.saving is not None:
            self.saving.finish()
        self._forget()
        if self.recorder is not None:
            self.recorder.close("completed")

    def _forget(self) -> None:
        """Give the memory back: what it holds is on disk, or the training is over."""
        if self.remembering is not None:
            self.remembering.close(forget=True)

    def _train(self, own: Any, resume: str | bool | None, *arguments: Any, **options: Any) -> Any:
        """The trainer's own `train` within all that was added."""
        self._why = ""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._closed())
            if self.stopping is not None:
                stack.enter_context(self.stopping.signals())
            if self.saving is None:
                return own(resume, *arguments, **options)
            self.saving.on_result = self._saved
            if self.recorder is not None:
                self.saving.watch = self.recorder.watch
            return self.saving.train(lambda place: own(place, *arguments, **options), resume)

    @contextlib.contextmanager
    def _closed(self) -> Iterator[None]:
        """Leave the trainer as it was, whatever happens."""
        try:
            yield
        except BaseException as error:
            if self.remembering is not None:
                # A restart must not go on from what may be wrong.
                self.remembering.close(forget=isinstance(error, WrongNumbersError))
            if self.recorder is not None:
                self.recorder.close("failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            if self.guarding is not None:
                self.guarding.remove()

    def _saved(self, result: SaveResult) -> None:
        if self.recorder is not None:
            self.recorder.saved(result)
        if self.stopping is not None and result.error is None:
            self.stopping.observe_save(result.seconds)

    def _step(self, own: Any, model: torch.nn.Module, *rest: Any, **options: Any) -> torch.Tensor:
        """The trainer's own `training_step`, guarded; its loss is recorded."""
        loss: torch.Tensor
        with self._watch("compute"):
            if self.guarding is None:
                loss = own(model, *rest, **options)
            else:
                loss = self.guarding.part(own, model, *rest, **options)
        if self.recorder is not None:
            self.recorder.observe_part(loss)
        return loss

    def _watch(self, purpose: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.recorder is None else self.recorder.watch(purpose)

    def _finalize(self, own: Any, *arguments: Any, **options: Any) -> Any:
        """The last step is done, and other weights may come: the guard ends here."""
        if self.stopping is not None:
            self.stopping.end(self._trainer.state.global_step)
        if self.remembering is not None:
            self.remembering.settle()
        if self.guarding is not None:
            try:
                self.guarding.finish()
            finally:
                if self.recorder is not None:
                    self.recorder.tell(self.guarding, self._trainer.state.global_step)
                self.guarding.remove()
        return own(*arguments, **options)

    def _wrap(self, trainer: Trainer) -> None:
        train, step, finalize = trainer.train, trainer.training_step, trainer._finalize_training

        def wrapped_train(
            resume_from_checkpoint: str | bool | None = None, *arguments: Any, **options: Any
        ) -> Any:
            return self._train(train, resume_from_checkpoint, *arguments, **options)

        def training_step(model: torch.nn.Module, *arguments: Any, **options: Any) -> torch.Tensor:
            return self._step(step, model, *arguments, **options)

        def finalize_training(*arguments: Any, **options: Any) -> Any:
            return self._finalize(finalize, *arguments, **options)

        trainer.train = wrapped_train
        trainer.training_step = training_step
        trainer._finalize_training = finalize_training


def adapter_of(trainer: Trainer, wanted: str) -> Adapter:
    """The adapter of a trainer, made when it is asked for first.

    Args:
        trainer: A `Trainer`.
        wanted: Which of its mechanisms is about to be added.

    Raises:
        IntegrationError: When it has that already, or trains, or is no `Trainer`.
    """
    check_trainer(trainer)
    found: Adapter | None = getattr(trainer, "_outlast", None)
    if found is None:
        found = trainer._outlast = Adapter(trainer)
    if getattr(found, wanted) is not None:
        raise IntegrationError(
            f"this trainer has its {wanted} already: add each part of Outlast once"
        )
    if trainer.is_in_train:
        raise IntegrationError("add parts of Outlast before trainer.train(), not within it")
    return found


class EnergyCallback(TrainerCallback):  # type: ignore[misc]
    """Adds joules per step, joules since the start and mean watts to every log.

    The figures are those of the meters that the logging process reads, by default all of its node.
    Where nothing can be read, a warning says why and the logs stay as they are. `Trainer` tells no
    callback that a training raised: its meter is closed by the next training, or with the callback.

    Args:
        sources: What is read. Default: all meters of this machine.

    Attributes:
        joules: Of the last training, or of this one until its last log.
    """

    def __init__(self, sources: Sequence[Source] | None = None) -> None:
        self.joules: Reading = Unavailable("the training has not begun")
        self._sources = sources
        self._energy: StepEnergy | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Start to measure, on the process that logs."""
        # A training that raised has no end: its meter is still open.
        self._close()
        if not state.is_world_process_zero:
            return
        self._energy = StepEnergy(self._sources, state.global_step)
        if (warning := self._energy.warning()) is not None:
            warnings.warn(warning, stacklevel=2)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Add the figures since the last log to this one and to the trainer's history."""
        if self._energy is None or logs is None:
            return
        found = {f"energy_{k}": v for k, v in self._energy.take(state.global_step).items()}
        self.joules = self._energy.joules
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Stop to measure."""
        self._close()

    def _close(self) -> None:
        energy, self._energy = self._energy, None
        if energy is not None:
            self.joules = energy.close()


def add_energy(trainer: Trainer, sources: Sequence[Source] | None = None) -> EnergyCallback:
    """Give `trainer` an `EnergyCallback`, before the callbacks that send logs to others.

    `Trainer.add_callback` would put it behind them, and TensorBoard would miss the figures.
    """
    callback = EnergyCallback(sources)
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback


class Guarding:
    """The guard of one trainer, from the beginning of each training to its end.

    Args:
        trainer: Whose steps are guarded.
        settings: Of the guard.
        seed: Of the slices that are checked.

    Attributes:
        run: The guard while a training runs; None otherwise.
        findings: Of all ranks in this training, as far as they are gathered.
    """

    def __init__(self, trainer: Trainer, settings: GuardSection, seed: int) -> None:
        self.run: RunGuard | None = None
        self.findings: list[CorruptionDetected | MemberLost] = []
        self._trainer = trainer
        self._settings = settings
        self._seed = seed
        self._attempts: Iterator[int] | None = None
        self._parts: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._losses: list[torch.Tensor] = []

    def begin(self, step: int) -> None:
        """Install it in what the Trainer has prepared; `step` steps are done."""
        optimizer = self._trainer.optimizer
        self.findings = []
        self._forget()
        self.run = RunGuard(
            self._settings,
            self._seed,
            self._trainer.model_wrapped,
            [getattr(optimizer, "optimizer", optimizer)],
        )
        for message in self.run.warnings:
            warnings.warn(message, stacklevel=2)
        self.run.restart(step)

    def part(
        self,
        own: Callable[..., torch.Tensor],
        model: torch.nn.Module,
        *arguments: Any,
        **options: Any,
    ) -> torch.Tensor:
        """Forward and backward pass of one of a step's parts, and of all again where it must be.

        Args:
            own: The trainer's own `training_step`.
            model: As it is given.
            arguments: As they are given.
            options: As they are given.

        Returns:
            The part's loss, with what repeated passes of the parts before have changed in theirs.

        Raises:
            WrongNumbersError: On all ranks, when numbers stay wrong.
        """
        if self.run is None:
            return own(model, *arguments, **options)
        if self._attempts is None:
            self._attempts = self.run.attempts()
            next(self._attempts)
        self._parts.append((arguments, options))
        self._losses.append(own(model, *arguments, **options))
        accelerator = self._trainer.accelerator
        if not accelerator.sync_gradients:
            return self._losses[-1]
        told = torch.stack(self._losses[:-1]).sum() if self._losses[1:] else 0.0
        for _ in self._attempts:
            model.zero_grad()
            self._losses = []
            for number, (given, named) in enumerate(self._parts, 1):
                if number < len(self._parts):
                    with accelerator.no_sync(model=model):
                        self._losses.append(own(model, *given, **named))
                else:
                    self._losses.append(own(model, *given, **named))
        total = torch.stack(self._losses).sum()
        self._forget()
        return total - told

    def gather(self) -> None:
        """Bring the findings of all ranks to rank 0; all ranks call it together."""
        if self.run is not None:
            self.findings += self.run.news()

    def summary(self, step: int) -> Guarded | None:
        """Summarise the checks of this training so far."""
        return None if self.run is None else self.run.summary(step)

    def figures(self, step: int) -> dict[str, float]:
        """For the logs: what has been found on all ranks, and checked on this one."""
        summary = self.summary(step)
        checks = {} if summary is None else {"guard_checks": float(summary.checks)}
        return {"guard_findings": float(len(self.findings)), **checks}

    def finish(self) -> None:
        """Make the last checks; all ranks together, after the last step."""
        if self.run is not None:
            self.run.finish()

    def remove(self) -> None:
        """Give the model back as it was."""
        run, self.run = self.run, None
        self._forget()
        if run is not None:
            run.guard.remove()

    def _forget(self) -> None:
        self._attempts, self._parts, self._losses = None, [], []


def predicted(trainer: Trainer, sequence: int, cluster: str | None = None) -> Predicted:
    """The prediction, for ``add_records(trainer, prediction=predicted(trainer, 2048))``.

    Args:
        trainer: Of a decoder-only language model, data parallel or FSDP2.
        sequence: Tokens of one sample.
        cluster: Name or file of a cluster; None: this machine.

    Raises:
        PlanError: When the model or the machine is not known.
    """
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
            chain=cluster,
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


def add_checkpoints(trainer: Trainer, **settings: Any) -> Saving:
    """Save to a store and resume from it, in place of the trainer's own files.

    When to save, what is the best checkpoint and how many are kept, `TrainingArguments` says as
    before; `train(resume_from_checkpoint=...)` takes the same values, and the folders that
    the Trainer itself has written. The versions lie in ``<output_dir>/checkpoints``.

    Args:
        trainer: A `Trainer`, or one derived from it.
        settings: Keys of [checkpoint], such as ``delta_chain=8``.

    Raises:
        JobError: When a setting is wrong.
        IntegrationError: When something in `TrainingArguments` cannot be kept.
    """
    check_trainer(trainer)
    section = with_section("checkpoint", settings).checkpoint
    check_checkpoints(trainer, section)
    adapter = adapter_of(trainer, "saving")
    adapter.saving = Saving(trainer, section)
    return adapter.saving


def add_recover(trainer: Trainer, **settings: Any) -> Remembering:
    """Keep the state of each step in memory outside of the processes, and go on from it.

    Under torchrun with ``--max-restarts`` a killed process costs one step at most. It goes behind
    ``add_checkpoints``, and `Saving.has_checkpoint` knows of the memory, too.

    Args:
        trainer: A `Trainer`, or one derived from it.
        settings: Keys of [recover], such as ``memory="/dev/shm"``.

    Raises:
        JobError: When a setting is wrong.
        IntegrationError: When there is no store.
    """
    check_trainer(trainer)
    job = with_section("recover", settings)
    if job.recover.mode == "off":
        raise IntegrationError('add_recover with mode = "off" does nothing; leave it out')
    adapter = adapter_of(trainer, "remembering")
    if adapter.saving is None:
        raise IntegrationError(
            "add_recover keeps in memory what add_checkpoints saves to disk: call "
            "add_checkpoints(trainer) before"
        )
    return _remember(adapter, trainer, job)


def add_guard(
    trainer: Trainer, policy: str = "light", *, seed: int = 0, **settings: Any
) -> Guarding:
    """Check the numbers of each step, and do steps again whose numbers are wrong.

    Every log has ``guard_findings`` and ``guard_checks``.

    Args:
        trainer: A `Trainer`, or one derived from it.
        policy: ``light``, ``linear`` or ``full``.
        seed: Of the slices that are checked.
        settings: Other keys of [guard].

    Raises:
        JobError: When a setting is wrong.
    """
    section = with_section("guard", {"policy": policy, **settings}).guard
    adapter = adapter_of(trainer, "guarding")
    adapter.guarding = Guarding(trainer, section, seed)
    return adapter.guarding


def add_records(
    trainer: Trainer,
    job: str | os.PathLike[str] | LoopJob | None = None,
    *,
    tokens_per_step: int = 0,
    prediction: Predicted | None = None,
) -> Recorder:
    """Write the run down in the output directory: ``outlast report OUTPUT_DIR`` shows it.

    Args:
        trainer: A `Trainer`, or one derived from it.
        job: A TOML file or settings; [energy] and [log] count here. None: defaults.
        tokens_per_step: Over all processes; 0: not known.
        prediction: What the run is expected to need, to be shown beside what it needed.

    Raises:
        JobError: When a setting is wrong.
        IntegrationError: When the job names another run directory.
    """
    check_trainer(trainer)
    settings = in_output_directory(loop_job_of(job), trainer.args.output_dir)
    adapter = adapter_of(trainer, "recorder")
    adapter.recorder = Recorder(trainer, settings, tokens_per_step, prediction)
    return adapter.recorder


def add_stop(trainer: Trainer, limit_seconds: float | None = None) -> Stopping:
    """Save and end the program with exit code 3, to be continued, when it has to stop.

    That is at SIGTERM, SIGUSR1 or SIGINT, when a Slurm job's time is nearly up, and `limit_seconds`
    after the training began.

    Args:
        trainer: A `Trainer`, or one derived from it.
        limit_seconds: How long a training may take; None: as long as it needs.

    Raises:
        IntegrationError: When something in `TrainingArguments` contradicts.
    """
    check_trainer(trainer)
    check_stop(trainer)
    adapter = adapter_of(trainer, "stopping")
    adapter.stopping = Stopping(limit_seconds, ranks_here(), cluster)
    return adapter.stopping


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
    in_output_directory(settings, trainer.args.output_dir)
    check_checkpoints(trainer, settings.checkpoint)
    check_stop(trainer)
    add_records(trainer, settings, tokens_per_step=tokens_per_step, prediction=prediction)
    adapter = adapter_of(trainer, "saving")
    adapter.saving = Saving(trainer, settings.checkpoint)
    if settings.recover.mode == "restart":
        _remember(adapter, trainer, settings)
    if settings.guard.policy != "off":
        adapter.guarding = Guarding(trainer, settings.guard, settings.run.seed)
    add_stop(trainer)
    return adapter.saving


def _remember(adapter: Adapter, trainer: Trainer, job: LoopJob) -> Remembering:
    assert adapter.saving is not None
    adapter.remembering = adapter.saving.memory = Remembering(trainer, job)
    return adapter.remembering
