"""Outlast inside Lightning's `Trainer`: record, guard, measure, resume exactly, stop.

trainer = Trainer(max_steps=1000, **with_outlast("job.toml"))
trainer.fit(model, loader, ckpt_path="last")
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import math
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS

from outlast import cluster
from outlast.autosave.position import Position
from outlast.checkpoint import CheckpointStore
from outlast.distributed.group import gather_objects, raise_together
from outlast.distributed.ranks import ranks_from
from outlast.errors import EXIT_TO_BE_CONTINUED, AutosaveError, IntegrationError
from outlast.integrations import loop_job_of, require
from outlast.integrations.entries import Entry
from outlast.integrations.fabric import StoreCheckpointIO
from outlast.integrations.files import KEY, plain, restored
from outlast.job import load_loop_job
from outlast.records import CheckpointRestored, Warned, replace_file
from outlast.runtime.cadence import UNASKED_SECONDS
from outlast.runtime.energy import TrainingEnergy
from outlast.runtime.engine import Decision, PeriodicConsensus, Runtime, StepResult
from outlast.runtime.memory import (
    MemoryCheckpoint,
    is_kept,
    only_settled,
    places_of,
    settled,
)
from outlast.runtime.place import parameters_in, ranks_here
from outlast.runtime.recording import LoopFacts, directory_of

require("lightning", "2.6", "2.7")

import lightning  # noqa: E402
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO  # noqa: E402
from lightning.pytorch import Callback, Trainer  # noqa: E402
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins.environments import (  # noqa: E402
    LightningEnvironment,
    SLURMEnvironment,
)
from lightning.pytorch.strategies import (  # noqa: E402
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402
from lightning.pytorch.utilities.exceptions import SIGTERMException  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lightning.pytorch import LightningModule
    from torch import nn
    from torch.optim import Optimizer

    from outlast.autosave.libraries import HandedOver
    from outlast.integrations.files import CheckpointFiles
    from outlast.job import LoopJob
    from outlast.records import Predicted, RunDirectory
    from outlast.runtime.cadence import Every


_CHECKPOINT, _PLACE = "lightning.checkpoint", "lightning.place"

_OWN_FILES = (ModelParallelStrategy, FSDPStrategy, DeepSpeedStrategy)

_NAME = "last.ckpt"

_MODEL = "model.json"


def closures_first(trainer: Trainer) -> Callable[[], None]:
    """Let the trainer call ``closure()`` and then ``optimizer.step()``, as the guard needs it.

    Lightning calls ``optimizer.step(closure)``, in which an optimizer computes the gradients first,
    with the same result; only LBFGS does it several times. A gradient scaler does so already.

    Returns:
        Undoes it.
    """
    precision = trainer.precision_plugin
    if getattr(precision, "scaler", None) is not None:
        return lambda: None
    within = precision.optimizer_step

    def step(optimizer: Any, model: Any, closure: Callable[[], Any], **more: Any) -> Any:
        if isinstance(optimizer, LBFGS):
            return within(optimizer, model, closure, **more)
        result = precision._wrap_closure(model, optimizer, closure)
        optimizer.step(**more)
        return result

    precision.optimizer_step = step
    return lambda: vars(precision).pop("optimizer_step", None)


class EnergyCallback(TrainingEnergy, Callback):  # type: ignore[misc]
    """Logs joules per step, joules since the start and mean watts as often as the trainer logs.

    The figures are those of the meters that the first process reads, by default all of its node.
    Where nothing can be read, a warning says why and nothing is logged.

    Args:
        sources: What is read. Default: all meters of this machine.

    Attributes:
        joules: Of the last training, or of this one until its last log.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to measure, on the process that logs."""
        self.close()
        if trainer.is_global_zero:
            self.begin(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the figures since the last log."""
        if trainer.global_step % trainer.log_every_n_steps == 0:
            self._log(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what came after the last log, and stop to measure."""
        self._log(trainer)
        self.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop to measure: a training that raised has no end."""
        self.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop to measure."""
        self.close()

    def _log(self, trainer: Trainer) -> None:
        found = {f"energy/{k}": v for k, v in self.take(trainer.global_step).items()}
        for logger in trainer.loggers if found else ():
            logger.log_metrics(found, step=trainer.global_step)


class Place:
    """Position of a process in a loader.

    Args:
        loader: The loader.
        resumed: What `noted` gave on each rank of the run that continues; None for a new one.
        rank: This rank.
        ranks: How many go through the loader now.
    """

    def __init__(
        self, loader: Any, resumed: Sequence[dict[str, Any]] | None, rank: int, ranks: int
    ) -> None:
        self._loader = loader
        self._resumed = resumed
        self._rank = rank
        self._ranks = ranks
        self._position = Position()
        self._iterator: Iterator[Any] | None = None
        self._count = 0

    def iterate(self) -> Iterator[Any]:
        """An iterator from the first batch, or once from where the run stood.

        What is resumed is resumed with the first batch, not before: until then, others may draw
        random numbers for the set-up.
        """
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            self._iterator, self._count = self._position.begin(self._loader), 0
        return self._batches(resumed)

    def noted(self, *, finished: bool, ahead: int) -> dict[str, Any]:
        """Note the position of the loop now.

        Args:
            finished: Whether the epoch's last batch is done.
            ahead: Batches that were fetched and not used yet.
        """
        if finished:
            self._position.pause(0)
        else:
            self._position.note(
                0, self._count - ahead, self._loader, self._iterator, ahead=ahead > 0
            )
        return {**self._position.state_dict(), "count": self._position.count}

    def _batches(self, resumed: Sequence[dict[str, Any]] | None) -> Iterator[Any]:
        if resumed is not None:
            if len(resumed) == self._ranks:
                state = resumed[self._rank]
                self._position.load_state_dict(state)
                self._iterator = self._position.resume(self._loader)
            else:
                state = resumed[0]
                self._iterator = self._position.skip(self._loader, state["count"])
            self._count = state["count"]
        assert self._iterator is not None
        for batch in self._iterator:
            self._count += 1
            yield batch


class PlacedLoader:
    """A loader with a `Place`; all else is that of the loader.

    Args:
        loader: The loader.
        place: Where this process stands in it.
    """

    def __init__(self, loader: Any, place: Place) -> None:
        vars(self)["outlast_place"] = place
        vars(self)["outlast_loader"] = loader

    def __iter__(self) -> Iterator[Any]:
        place: Place = self.outlast_place
        return place.iterate()

    def __len__(self) -> int:
        return len(self.outlast_loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["outlast_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.outlast_loader, name, value)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: it tells Lightning that the loader can be resumed; a callback has the state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing, as `state_dict`."""


class OutlastCallback(Callback):  # type: ignore[misc]
    """Part of `with_outlast`.

    Args:
        job: The settings.
        files: Those of the trainer's `StoreCheckpointIO`.
        tokens_per_step: Of one optimizer step, over all processes; 0: not known.
        prediction: What the run is expected to need.
        keeps: Whether each step is kept in memory for a restart.
    """

    def __init__(
        self,
        job: LoopJob,
        files: CheckpointFiles,
        *,
        tokens_per_step: int = 0,
        prediction: Predicted | None = None,
        keeps: bool = False,
    ) -> None:
        super().__init__()
        self._job = job
        self._files = files
        self._tokens_per_step = tokens_per_step
        self._prediction = prediction
        self._keeps = keeps
        self._trainer: Trainer | None = None
        self._runtime: Runtime | None = None
        self._undo = contextlib.ExitStack()
        self._places: list[list[dict[str, Any]]] | None = None
        self._result = StepResult(0)
        self._checkpoint, self._place = Entry(may_be_missing=True), Entry(may_be_missing=True)
        self._kept_step, self._left_out = -1, 0
        self._is_keeping = self._told = False

    @property
    def guard(self) -> Any:
        """The `Guard` of the training under way; None with ``guard.policy = "off"``."""
        guard = None if self._runtime is None else self._runtime.guard
        return None if guard is None else guard.guard

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Before anything is restored: have the loaders placed, and leave Slurm's requeue alone.

        Raises:
            IntegrationError: For a strategy that writes its checkpoints by itself.
        """
        if stage != "fit":
            return
        if isinstance(trainer.strategy, _OWN_FILES):
            raise IntegrationError(
                f"strategy = {type(trainer.strategy).__name__} writes its checkpoints by itself "
                "and asks no CheckpointIO; use DDP or one device here, or FSDP2 in Fabric with "
                "outlast.integrations.fabric"
            )
        if isinstance(environment := _environment(trainer), SLURMEnvironment):
            environment.auto_requeue = False
        self._trainer = trainer
        if "process_dataloader" not in vars(trainer.strategy):
            process = trainer.strategy.process_dataloader
            trainer.strategy.process_dataloader = lambda loader: self._placed(process(loader))
        self._runtime = Runtime(
            ranks_here(), PeriodicConsensus(chain=cluster), cluster, keeps_later=True
        )
        self._kept_step, self._left_out = -1, 0
        if not self._keeps:
            return
        # Let this fit begin with what is in memory, where that is newer than its file.
        connector = trainer._checkpoint_connector
        from_file = connector.resume_start

        def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
            found = self._found(trainer, checkpoint_path)
            if found is None:
                from_file(checkpoint_path, weights_only=weights_only)
            else:
                connector._loaded_checkpoint = found

        connector.resume_start = resume_start
        self._undo.callback(lambda: vars(connector).pop("resume_start", None))

    def places_here(self) -> list[dict[str, Any]]:
        """Positions of this rank in each loader of the training data."""
        assert self._trainer is not None
        loop = self._trainer.fit_loop
        progress = loop.epoch_loop.batch_progress
        finished = progress.is_last_batch or progress.current.ready >= loop.max_batches
        ahead = len(getattr(loop._data_fetcher, "batches", ()))
        return [
            item.outlast_place.noted(finished=finished, ahead=ahead)
            for item in loop._combined_loader.flattened
            if isinstance(item, PlacedLoader)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Positions of every rank in the training data; all ranks call it together."""
        has_data = self._trainer is not None and self._trainer.fit_loop._combined_loader is not None
        # In memory each rank keeps its own.
        if not has_data or self._is_keeping:
            return {}
        return {"places": gather_objects(self.places_here())}

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Look whether the checkpoint is of what the last step has left.

        Raises:
            DataCorruptionError: On all ranks, when it is not.
        """
        if self._runtime is not None and not self._is_keeping:
            self._runtime.check_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over where the ranks stood."""
        self._places = state_dict["places"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """All is restored: begin to record, guard and measure.

        Raises:
            SystemExit: When the training is to stop already.
        """
        runtime, job = self._runtime, self._job
        assert runtime is not None
        # Lightning's own handlers work within the signal; these wait for the end of the step.
        runtime.take_signals()
        if any(gather_objects(trainer.received_sigterm)):
            # It came to Lightning during the set-up: there is nothing to save.
            raise SystemExit(EXIT_TO_BE_CONTINUED)
        step, self._result = trainer.global_step, StepResult(0)
        steps = trainer.estimated_stepping_batches
        batch = getattr(trainer.fit_loop._combined_loader.flattened[0], "batch_size", None) or 0
        facts = LoopFacts(
            framework="lightning",
            steps=int(steps) if 0 < steps < math.inf else 0,
            samples_per_step=batch * trainer.accumulate_grad_batches * trainer.world_size,
            tokens_per_step=self._tokens_per_step,
            parameters=parameters_in([pl_module]),
            versions={"lightning": lightning.__version__},
        )
        device = trainer.strategy.root_device
        recording = runtime.open_records(job, device, facts, prediction=self._prediction)
        # Failures it has told of itself.
        self._files.listener = runtime.save_ended
        if runtime.install_guard(job.guard, job.run.seed, trainer.model, trainer.optimizers):
            self._undo.callback(closures_first(trainer))
        if self._keeps:
            self._begin_to_keep(runtime, trainer, recording.directory)
        loaded, self._files.loaded = self._files.loaded, None
        runtime.begin(step, () if loaded is None else [CheckpointRestored(step, *loaded)])

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Note the rate of this step, before a scheduler sets the next."""
        assert self._runtime is not None
        self._result.learning_rate = optimizer.param_groups[0]["lr"]
        self._runtime.before_update()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the step, and stop where that is due.

        Raises:
            SystemExit: When the training is stopped and saved.
        """
        runtime, result = self._runtime, self._result
        assert runtime is not None
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor):
            # Lightning has divided it by the number of batches that are accumulated.
            result.loss = loss if result.loss is None else result.loss + loss
        if trainer.global_step == runtime.step:
            return
        result.step, self._result = trainer.global_step, StepResult(0)
        decision = runtime.after_update(result)
        if decision.stop:
            self._end(trainer, decision)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last step is done.

        Raises:
            IntegrationError: On all ranks, when others did another number of steps.
        """
        assert self._runtime is not None
        self._runtime.end_steps(self._runtime.step)
        # Before Lightning puts back the handlers that it has found, which are under these.
        self._runtime.give_back_signals()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """All is saved: the run is complete."""
        if stage != "fit" or self._runtime is None:
            return
        memory = self._runtime.memory
        # Where all steps were done before, what was in memory may be on no disk.
        if self._runtime.records is not None or memory is None or not memory.unsaved:
            self._runtime.finish()
        self._close(None)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """The training has ended before its time."""
        if isinstance(exception, SIGTERMException):
            # Lightning ends with 0 when it was told to stop in a sanity check.
            exception.code = EXIT_TO_BE_CONTINUED
        self._close(exception)

    def keep(self) -> None:
        """All callbacks have done their part of a batch: begin to keep the state behind a step."""
        runtime, trainer = self._runtime, self._trainer
        assert runtime is not None
        assert trainer is not None
        step, memory = trainer.global_step, runtime.memory
        if memory is None or step == self._kept_step or not memory.due(step):
            return
        self._kept_step = step
        if not self._is_followed(trainer):
            self._left_out = 0
            runtime.keep(step)
            return
        self._left_out += 1
        if self._left_out == 2 and memory.is_on and not self._told:
            self._told = True
            runtime.write(
                Warned(
                    f"step {step}, and the one before after which the state would be kept in "
                    "memory, are followed by a validation or the end of an epoch, where it is not: "
                    "a restart may go back to the newest checkpoint"
                )
            )

    def _close(self, error: BaseException | None) -> None:
        runtime, self._runtime = self._runtime, None
        self._files.listener = None
        with self._undo:
            if runtime is not None:
                runtime.close(error)

    def _placed(self, loader: Any) -> Any:
        """A training loader with its place; others, and those that know it themselves, as is."""
        assert self._trainer is not None
        if not self._trainer.training or hasattr(loader, "load_state_dict"):
            return loader
        resumed = None
        if self._places is not None:
            resumed = [of_rank.pop(0) for of_rank in self._places if of_rank] or None
        ranks = ranks_here()
        return PlacedLoader(loader, Place(loader, resumed, ranks.rank, ranks.world_size))

    def _end(self, trainer: Trainer, decision: Decision) -> None:
        """Save under the last name, and end the program."""
        runtime = self._runtime
        assert runtime is not None
        runtime.stop(decision)
        self._save_last(trainer)
        raise_together(self._files.wait)
        # Lightning kills all when a process that it has started ends with another code than 0.
        started = isinstance(_environment(trainer), LightningEnvironment) and trainer.local_rank > 0
        runtime.leave(code=0 if started else EXIT_TO_BE_CONTINUED)

    def _save_last(self, trainer: Trainer) -> None:
        saving = next(
            callback
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint) and callback.save_last
        )
        # Where it is a link to another checkpoint, there may be none of this step.
        kind, saving.save_last = saving.save_last, True
        saving._save_last_checkpoint(trainer, saving._monitor_candidates(trainer))
        saving.save_last = kind

    def _begin_to_keep(self, runtime: Runtime, trainer: Trainer, directory: RunDirectory) -> None:
        """Keep each step of the training from now on."""
        self._kept_step = trainer.global_step
        if runtime.memory is None:
            # Of a training that this one does not continue from; nor must a restart of this one.
            self._open_memory(runtime, directory).forget_earlier()
        if not trainer.lightning_module.automatic_optimization:
            # The step of an optimizer without Lightning's wrapper calls no callback.
            for optimizer in trainer.optimizers:
                hook = optimizer.register_step_pre_hook(lambda *_: runtime.before_update())
                self._undo.callback(hook.remove)

    def _is_followed(self, trainer: Trainer) -> bool:
        """Return whether a validation or the epoch's end comes before the next batch.

        A checkpoint is resumed behind them, so that they would be left out; from the step before
        they are done.
        """
        fit = trainer.fit_loop
        if fit.epoch_loop._is_training_done:
            return True
        if getattr(trainer, "_val_check_time_interval", None) is not None:
            # Each rank goes by its own clock, and all must keep the same steps.
            return False
        return bool(fit.epoch_loop._should_check_val_fx(fit._data_fetcher))

    def _found(self, trainer: Trainer, path: Any) -> dict[str, Any] | None:
        """The checkpoint in memory, where it counts and is newer; None without one."""
        runtime, directory = self._runtime, directory_of(self._job)
        assert runtime is not None
        # A script that torchrun has started again names what it named at first. One that was
        # started by hand continues where it asks for the last checkpoint.
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        asks_for_last = str(path) in _last_files(trainer)
        counts = directory.exists() and (restarted or asks_for_last)
        if trainer.state.fn != TrainerFn.FITTING or not gather_objects(counts)[0]:
            return None
        otherwise = ""
        if not asks_for_last:
            does = f"continues from {path}" if path else "begins anew"
            otherwise = f'the training {does}, as the script says (ckpt_path="last" continues)'
        memory = self._open_memory(runtime, directory, otherwise)
        is_taken = memory.find() is not None and memory.take()
        for event in memory.events:
            runtime.write(event)
        if not is_taken:
            return None
        content, self._checkpoint.content = self._checkpoint.content, {}
        found: dict[str, Any] = restored(content[KEY], unpickle=True)
        # Of another number of ranks, the place of the first is that of all; a new rank has none.
        told: list[list[dict[str, Any]]] = gather_objects(self._place.content.get("loaders", []))
        self._place.content = {}
        if len(told) != content["ranks"]:
            told = [[*told[0]] for _ in range(content["ranks"])]
        found.setdefault("callbacks", {})[self.state_key] = {"places": told}
        return found

    def _open_memory(
        self, runtime: Runtime, directory: RunDirectory, otherwise: str = ""
    ) -> MemoryCheckpoint:
        store = CheckpointStore(directory.checkpoints, collective=False)
        self._undo.callback(store.close)
        state = {_CHECKPOINT: self._checkpoint, f"{_PLACE}{runtime.ranks.rank}": self._place}
        memory = runtime.memory = MemoryCheckpoint(
            self._job,
            runtime.ranks,
            directory,
            store,
            state,
            note=self._note,
            otherwise=otherwise,
        )
        return memory

    def _note(self) -> None:
        """Bring what is kept up to date."""
        trainer, runtime = self._trainer, self._runtime
        assert trainer is not None
        assert runtime is not None
        self._is_keeping = True
        try:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        finally:
            self._is_keeping = False
        places = places_of([trainer.lightning_module], trainer.optimizers)
        found = settled(plain(checkpoint), places)
        if runtime.ranks.local_rank > 0:
            # Beside parameters, which are equal, a node keeps what its first rank has.
            found = only_settled(found)
        self._checkpoint.content = {KEY: found, "ranks": runtime.ranks.world_size}
        self._place.content = {"loaders": self.places_here()}


def _environment(trainer: Trainer) -> Any:
    return trainer._accelerator_connector.cluster_environment


class KeepLast(Checkpoint):  # type: ignore[misc]
    """Part of `with_outlast`: a checkpoint callback, and so behind all that are none.

    Args:
        outlast: Keeps each step.
    """

    def __init__(self, outlast: OutlastCallback) -> None:
        super().__init__()
        self._outlast = outlast

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin to keep the state, when an optimizer has done a step."""
        self._outlast.keep()


def _last_files(trainer: Trainer) -> list[str]:
    """The files of which ``ckpt_path="last"`` means the newest."""
    return [
        str(found)
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint)
        for found in callback._find_last_checkpoints(trainer)
    ]


def with_outlast(
    job: str | os.PathLike[str] | LoopJob | None = None,
    *,
    callbacks: Callback | Sequence[Callback] = (),
    plugins: Sequence[Any] = (),
    settings: Sequence[str] = (),
    tokens_per_step: int = 0,
    prediction: Predicted | None = None,
) -> dict[str, Any]:
    """Arguments of a `Trainer`: ``Trainer(max_steps=1000, **with_outlast("job.toml"))``.

    Checkpoints go through a store, in the background; a resumed training continues with the next
    sample and the same random numbers; what happens is recorded in the run's directory, and what
    the job asks for is guarded and measured. At a signal or the end of a Slurm job's time the
    training saves after the step and ends the program with exit code 3. Give `Trainer.fit`
    ``ckpt_path="last"``, and the same command continues from there. Under torchrun with
    ``--max-restarts`` each step is kept in memory, and a restart continues from that.

    Args:
        job: A TOML file with the sections of `LoopJob`, or the settings themselves; None: defaults.
        callbacks: Your own. A `ModelCheckpoint` among them says when to save and what to keep, and
            one needs ``save_last=True``; without any, ``last.ckpt`` in the run's directory is
            saved every `checkpoint.every_steps`.
        plugins: Your own.
        settings: Overrides of the form ``"section.key=value"``.
        tokens_per_step: Of one optimizer step, over all processes; 0: not known.
        prediction: What the run is expected to need, to be shown beside what it needed.

    Returns:
        ``callbacks`` and ``plugins``.

    Raises:
        JobError: When a setting is wrong, or is one that the script decides.
        IntegrationError: When a setting cannot be followed here.
    """
    job = loop_job_of(job, settings)
    own = [callbacks] if isinstance(callbacks, Callback) else [*callbacks]
    directory = directory_of(job)
    # How often to save, ModelCheckpoint is told.
    default = type(job.checkpoint).model_fields["every_steps"].default
    store = job.checkpoint.model_copy(update={"every_steps": default})
    checkpoint_io = StoreCheckpointIO(directory.checkpoints, store)
    keeps = is_kept(job, ranks_from(os.environ))
    outlast = OutlastCallback(
        job,
        checkpoint_io.files,
        tokens_per_step=tokens_per_step,
        prediction=prediction,
        keeps=keeps,
    )
    saving = [callback for callback in own if isinstance(callback, ModelCheckpoint)]
    every = job.checkpoint.every_steps
    if not saving:
        if every == "auto":
            raise IntegrationError(
                'checkpoint.every_steps = "auto" cannot be followed here, since it is '
                "ModelCheckpoint that counts the steps; give a number"
            )
        place = directory.path / "lightning"
        own.append(ModelCheckpoint(place, save_last=True, save_top_k=0, every_n_train_steps=every))
    elif not any(checkpoint.save_last for checkpoint in saving):
        raise IntegrationError(
            "no ModelCheckpoint has save_last=True: a training that is stopped saves under that "
            'name, and ckpt_path="last" continues from it; add save_last=True to one of them'
        )
    elif every != default:
        raise IntegrationError(
            f"checkpoint.every_steps = {every!r} and a ModelCheckpoint both say when to save; "
            "remove the setting, and give ModelCheckpoint every_n_train_steps"
        )
    if keeps:
        own.append(KeepLast(outlast))
    return {"callbacks": [outlast, *own], "plugins": [checkpoint_io, *plugins]}


class GoOnFrom(ModelCheckpoint):  # type: ignore[misc]
    """Saves what the next start continues from, beside what the script's own callbacks save.

    Args:
        folder: Of its file.
        every: How often.
    """

    def __init__(self, folder: Path, every: Every) -> None:
        seconds = every.seconds or UNASKED_SECONDS
        super().__init__(
            dirpath=folder,
            save_last=True,
            save_top_k=0,
            every_n_train_steps=every.steps,
            train_time_interval=None if every.steps else timedelta(seconds=seconds),
        )


class _StopsForAnyScript(OutlastCallback):
    """Stops with the file that the next start resumes from, whatever the script calls its last."""

    def _save_last(self, trainer: Trainer) -> None:
        last = [
            callback
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint) and callback.save_last
        ]
        if not isinstance(last[0], GoOnFrom):
            own = next(number for number in last if isinstance(number, GoOnFrom))
            trainer.save_checkpoint(Path(own.dirpath) / _NAME)
        super()._save_last(trainer)


class _OwnStore(CheckpointIO):  # type: ignore[misc]
    """Keeps the files of one folder in a store, and all others as the script has them.

    Args:
        folder: Of the files.
        store: Keeps them.
        others: Writes and reads the others.
    """

    def __init__(self, folder: Path, store: StoreCheckpointIO, others: CheckpointIO) -> None:
        self._folder = folder
        self._store = store
        self._others = others

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save to a path."""
        self._of(path).save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: str | os.PathLike[str], *arguments: Any, **more: Any) -> Any:
        """Load a path."""
        return self._of(path).load_checkpoint(path, *arguments, **more)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a path."""
        self._of(path).remove_checkpoint(path)

    def teardown(self) -> None:
        """Wait for the save under way."""
        self._store.teardown()
        self._others.teardown()

    def _of(self, path: str | os.PathLike[str]) -> CheckpointIO:
        return self._store if Path(path).parent == self._folder else self._others


def take_over(handed: HandedOver) -> Callable[[], None]:
    """Have all trainers that are made from now on save to a store, resume from it and stop in time.

    Args:
        handed: What to tell them.

    Returns:
        A function that leaves those alone that are made afterwards.

    Raises:
        IntegrationError: When there is a time limit, which the trainer is not told.
    """
    if handed.limit_seconds is not None:
        raise IntegrationError(
            f"--time-limit {handed.limit_seconds:g}s has no effect on Lightning's Trainer; leave "
            "it out: the end of a Slurm job's time and SIGTERM stop it in time"
        )
    own_init, own_fit = Trainer.__init__, Trainer.fit
    numbers = itertools.count()

    @functools.wraps(own_init)
    def made(trainer: Trainer, *arguments: Any, **options: Any) -> None:
        folder = handed.stores.parent / f"trainer{next(numbers)}"
        options |= _options(handed, folder, options)
        own_init(trainer, *arguments, **options)
        trainer._outlast_folder = folder

    @functools.wraps(own_fit)
    def fit(trainer: Trainer, *arguments: Any, **options: Any) -> Any:
        environment = getattr(trainer.strategy, "cluster_environment", None)
        count = trainer.num_devices * trainer.num_nodes
        if count > 1 and not getattr(environment, "creates_processes_externally", False):
            raise IntegrationError(
                f"Lightning would start the other {count - 1} of {count} processes itself, without "
                f"outlast run: start all of them with `outlast run --nproc {count}` or "
                "`torchrun -m outlast run`"
            )
        folder = trainer._outlast_folder
        given = inspect.signature(own_fit).bind(trainer, *arguments, **options)
        found = handed.begins(folder / "checkpoints") and (folder / _NAME).exists()
        _note_model(folder, given.arguments["model"], resumes=found)
        if found:
            # What the script names is where the run begins, not where each of its starts does.
            given.arguments |= {"ckpt_path": str(folder / _NAME), "weights_only": None}
        try:
            return own_fit(*given.args, **given.kwargs)
        finally:
            handed.step = trainer.global_step

    def undo() -> None:
        Trainer.__init__, Trainer.fit = own_init, own_fit

    Trainer.__init__ = made
    Trainer.fit = fit
    return undo


def _note_model(folder: Path, model: nn.Module, *, resumes: bool) -> None:
    """Write down what the trainer of a folder trains, and refuse to resume another model.

    Trainers are known by the order in which they are made, which a script may change.
    """
    mine: dict[str, Any] = {
        "class": type(model).__qualname__,
        "parameters": {
            name: None if is_lazy(parameter) else [*parameter.shape]
            for name, parameter in model.named_parameters()
        },
    }
    file = folder / _MODEL
    if resumes and file.exists():
        saved = json.loads(file.read_text(encoding="utf-8"))
        if saved == mine:
            return
        differs = f"but this trainer is given a {mine['class']}"
        if saved["class"] == mine["class"]:
            old, new = saved["parameters"], mine["parameters"]
            name = next(name for name in [*old, *new] if old.get(name, ()) != new.get(name, ()))
            here = new.get(name, "missing")
            differs = f"whose parameter {name} is {old.get(name, 'missing')}, here {here}"
        raise AutosaveError(
            f"{folder / _NAME} holds a {saved['class']}, {differs}; trainers are told apart by the "
            "order in which the script makes them: make as many as before, in the same order, or "
            "begin anew with --fresh"
        )
    if os.environ.get("RANK", "0") == "0":
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(mine).encode())


def _options(handed: HandedOver, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The callbacks and plugins of a trainer, ours among them."""
    given = [f"run.directory={folder.parent}", f"run.name={folder.name}", "guard.policy=off"]
    job = load_loop_job(None, given)
    store = StoreCheckpointIO(directory_of(job).checkpoints, job.checkpoint)
    callbacks, plugins = _listed(options.get("callbacks")), _listed(options.get("plugins"))
    checkpoints = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    if not checkpoints and options.get("enable_checkpointing", True):
        # As the trainer does where it is given none.
        callbacks.append(ModelCheckpoint())
    others = next(
        (plugin for plugin in plugins if isinstance(plugin, CheckpointIO)), TorchCheckpointIO()
    )
    kept = [plugin for plugin in plugins if plugin is not others]
    return {
        "callbacks": [
            _StopsForAnyScript(job, store.files),
            *callbacks,
            GoOnFrom(folder, handed.every),
        ],
        "enable_checkpointing": True,
        "plugins": [_OwnStore(folder, store, others), *kept],
    }


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return [*value] if isinstance(value, (list, tuple)) else [value]
