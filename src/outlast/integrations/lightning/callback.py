"""The adapter of Lightning's `Trainer`: record, guard, measure, resume exactly, stop."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.optim import LBFGS

from outlast import cluster
from outlast.autosave.position import Position
from outlast.checkpoint import CheckpointStore
from outlast.distributed.group import gather_objects, raise_together
from outlast.distributed.ranks import ranks_from
from outlast.errors import EXIT_TO_BE_CONTINUED, IntegrationError, WrongNumbersError
from outlast.hardware.figure import Unavailable
from outlast.integrations.content import KEY, plain, restored
from outlast.integrations.fabric import StoreCheckpointIO
from outlast.integrations.given import loop_job_of
from outlast.records import CheckpointRestored, StopRequested, Warned
from outlast.runtime.energy import StepEnergy
from outlast.runtime.guarding import RunGuard
from outlast.runtime.memory import MemoryCheckpoint, is_kept, only_settled, places_of, settled
from outlast.runtime.place import ranks_here
from outlast.runtime.recording import LoopFacts, Recording, directory_of
from outlast.runtime.stop import Stopping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from lightning.pytorch import LightningModule, Trainer
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from outlast.checkpoint import SaveResult
    from outlast.energy.sources import Source
    from outlast.energy.window import Reading
    from outlast.integrations.fabric import CheckpointFiles
    from outlast.job import LoopJob
    from outlast.records import Event, Predicted, RunDirectory


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


class EnergyCallback(Callback):  # type: ignore[misc]
    """Logs joules per step, joules since the start and mean watts as often as the trainer logs.

    The figures are those of the meters that the first process reads, by default all of its node.
    Where nothing can be read, a warning says why and nothing is logged.

    Args:
        sources: What is read. Default: all meters of this machine.

    Attributes:
        joules: Of the last training, or of this one until its last log.
    """

    def __init__(self, sources: Sequence[Source] | None = None) -> None:
        super().__init__()
        self.joules: Reading = Unavailable("the training has not begun")
        self._sources = sources
        self._energy: StepEnergy | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to measure, on the process that logs."""
        self._close()
        if not trainer.is_global_zero:
            return
        self._energy = StepEnergy(self._sources, trainer.global_step)
        if (warning := self._energy.warning()) is not None:
            warnings.warn(warning, stacklevel=2)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the figures since the last log."""
        if trainer.global_step % trainer.log_every_n_steps == 0:
            self._log(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what came after the last log, and stop to measure."""
        self._log(trainer)
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop to measure: a training that raised has no end."""
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop to measure."""
        self._close()

    def _close(self) -> None:
        energy, self._energy = self._energy, None
        if energy is not None:
            self.joules = energy.close()

    def _log(self, trainer: Trainer) -> None:
        if self._energy is None:
            return
        found = {f"energy/{k}": v for k, v in self._energy.take(trainer.global_step).items()}
        self.joules = self._energy.joules
        for logger in trainer.loggers if found else ():
            logger.log_metrics(found, step=trainer.global_step)


class Place:
    """Position of a process in a loader.

    Args:
        loader: The loader.
        resumed: What `noted` gave on each rank of the run that goes on; None for a new one.
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


_OWN_FILES = (ModelParallelStrategy, FSDPStrategy, DeepSpeedStrategy)


class OutlastCallback(Callback):  # type: ignore[misc]
    """Part of `with_outlast`.

    Args:
        job: The settings.
        files: Those of the trainer's `StoreCheckpointIO`.
        tokens_per_step: Of one optimizer step, over all processes; 0: not known.
        prediction: What the run is expected to need.
        memory: Keeps each step for a restart; None: nothing is kept.
    """

    def __init__(
        self,
        job: LoopJob,
        files: CheckpointFiles,
        *,
        tokens_per_step: int = 0,
        prediction: Predicted | None = None,
        memory: TrainerMemory | None = None,
    ) -> None:
        super().__init__()
        self._job = job
        self._files = files
        self._tokens_per_step = tokens_per_step
        self._prediction = prediction
        self._memory = memory
        self._trainer: Trainer | None = None
        self._places: list[list[dict[str, Any]]] | None = None
        self._recording: Recording | None = None
        self._guard: RunGuard | None = None
        self._stopping: Stopping | None = None
        self._signals = contextlib.ExitStack()
        self._guarding = contextlib.ExitStack()
        self._step = 0
        self._loss: torch.Tensor | None = None
        self._rate: torch.Tensor | float = math.nan

    @property
    def guard(self) -> Any:
        """The `Guard` of the training under way; None with ``guard.policy = "off"``."""
        return None if self._guard is None else self._guard.guard

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
        if self._memory is not None:
            self._memory.watch(trainer, self)

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
        if self._trainer is None or self._trainer.fit_loop._combined_loader is None:
            return {}
        if self._memory is not None and self._memory.taking:
            # Each rank keeps its own.
            return {}
        return {"places": gather_objects(self.places_here())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over where the ranks stood."""
        self._places = state_dict["places"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """All is restored: begin to record, guard and measure.

        Raises:
            SystemExit: When the training is to stop already.
        """
        self._stopping = Stopping(None, ranks_here(), cluster)
        # Lightning's own handlers work within the signal; these wait for the end of the step.
        self._signals.enter_context(self._stopping.signals())
        if any(gather_objects(trainer.received_sigterm)):
            # It came to Lightning during the set-up: there is nothing to save.
            raise SystemExit(EXIT_TO_BE_CONTINUED)
        self._step, self._loss = trainer.global_step, None
        recording = self._recording = Recording(
            self._job,
            ranks_here(),
            trainer.strategy.root_device,
            self._facts(trainer, pl_module),
            prediction=self._prediction,
            chain=cluster,
        )
        self._files.listener = self._saved
        if self._job.guard.policy != "off":
            settings, seed = self._job.guard, self._job.run.seed
            self._guard = RunGuard(settings, seed, trainer.model, trainer.optimizers)
            self._guarding.callback(self._guard.guard.remove)
            self._guarding.callback(closures_first(trainer))
            self._guard.restart(self._step)
            for message in self._guard.warnings:
                recording.write(Warned(message))
        loaded, self._files.loaded = self._files.loaded, None
        events: list[Event] = []
        if self._memory is not None:
            self._memory.begin(recording)
            events += self._memory.events
        if loaded is not None:
            events.append(CheckpointRestored(self._step, *loaded))
        recording.ready(self._step, events, self._guard)
        self._stopping.begin(self._step)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Note the rate of this step, before a scheduler sets the next."""
        self._rate = optimizer.param_groups[0]["lr"]
        if self._memory is not None:
            self._memory.settle()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the step, and stop where that is due.

        Raises:
            SystemExit: When the training is stopped and saved.
        """
        assert self._recording is not None
        assert self._stopping is not None
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor):
            # Lightning has divided it by the number of batches that are accumulated.
            self._loss = loss if self._loss is None else self._loss + loss
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if self._recording.step(self._step, loss=self._loss, learning_rate=self._rate):
            self._recording.record_steps()
            self._tell_findings()
        self._loss = None
        if why := self._stopping.why(self._step):
            self._end(trainer, why)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last step is done.

        Raises:
            IntegrationError: On all ranks, when others did another number of steps.
        """
        assert self._stopping is not None
        self._stopping.end(self._step)
        if self._guard is not None:
            self._guard.finish()
        self._tell_findings()
        self._signals.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """All is saved: the run is complete."""
        if stage == "fit" and self._recording is not None:
            self._recording.close("completed")
            self._close(forget=True)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """The training has ended before its time."""
        if isinstance(exception, SIGTERMException):
            # Lightning ends with 0 when it was told to stop in a sanity check.
            exception.code = EXIT_TO_BE_CONTINUED
        if self._recording is not None:
            if isinstance(exception, WrongNumbersError) or trainer.world_size == 1:
                # Wrong numbers are an error on all ranks.
                self._tell_findings()
            self._recording.close("failed", f"{type(exception).__name__}: {exception}")
        self._signals.close()
        self._close(forget=isinstance(exception, WrongNumbersError))

    def _close(self, *, forget: bool) -> None:
        if self._memory is not None:
            self._memory.close(forget=forget)
        self._files.listener = None
        self._guarding.close()
        self._recording = self._guard = self._stopping = None

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

    def _facts(self, trainer: Trainer, pl_module: LightningModule) -> LoopFacts:
        steps = trainer.estimated_stepping_batches
        batch = getattr(trainer.fit_loop._combined_loader.flattened[0], "batch_size", None) or 0
        return LoopFacts(
            framework="lightning",
            steps=int(steps) if 0 < steps < math.inf else 0,
            samples_per_step=batch * trainer.accumulate_grad_batches * trainer.world_size,
            tokens_per_step=self._tokens_per_step,
            parameters=sum(parameter.numel() for parameter in pl_module.parameters()),
            versions={"lightning": lightning.__version__},
        )

    def _saved(self, result: SaveResult) -> None:
        if self._recording is not None:
            self._recording.saved(result)
        if self._stopping is not None and result.error is None:
            self._stopping.observe_save(result.seconds)

    def _end(self, trainer: Trainer, why: str) -> None:
        """Save under the last name, and end the program."""
        assert self._recording is not None
        self._recording.write(StopRequested(self._step, why))
        saving = next(
            callback
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint) and callback.save_last
        )
        # Where it is a link to another checkpoint, there may be none of this step.
        kind, saving.save_last = saving.save_last, True
        saving._save_last_checkpoint(trainer, saving._monitor_candidates(trainer))
        saving.save_last = kind
        raise_together(self._files.wait)
        if self._memory is not None:
            self._memory.close(forget=True)
        self._tell_findings()
        self._recording.close("to_be_continued", why)
        if trainer.is_global_zero:
            print(
                f"outlast: stopped after step {self._step} ({why}); the same command goes on from "
                "there",
                flush=True,
            )
        # Lightning kills all when a process that it has started ends with another code than 0.
        started = isinstance(_environment(trainer), LightningEnvironment) and trainer.local_rank > 0
        raise SystemExit(0 if started else EXIT_TO_BE_CONTINUED)

    def _tell_findings(self) -> None:
        if self._guard is not None and self._recording is not None:
            self._recording.checked(self._guard, self._step)


def _environment(trainer: Trainer) -> Any:
    return trainer._accelerator_connector.cluster_environment


_CHECKPOINT, _PLACE = "lightning.checkpoint", "lightning.place"


class TrainerMemory:
    """Keeps what a checkpoint of a trainer holds after each step, and restores it.

    All ranks call its methods together, but for `settle` and `close`.

    Args:
        job: The settings; [recover] counts here.

    Attributes:
        events: What restoring had to say.
        taking: Whether a checkpoint is made for memory, where each rank keeps its own place in the
            data.
    """

    def __init__(self, job: LoopJob) -> None:
        self.events: list[Event] = []
        self.taking = False
        self._job = job
        self._trainer: Trainer
        self._is_watching = False
        self._memory: MemoryCheckpoint | None = None
        self._store: CheckpointStore | None = None
        self._recording: Recording | None = None
        self._checkpoint, self._place = _Entry(), _Entry()
        self._step = -1
        self._left_out = 0
        self._told = False
        self._hooks: list[RemovableHandle] = []

    def watch(self, trainer: Trainer, outlast: OutlastCallback) -> None:
        """From now on a fit begins with what is in memory, where that is newer than its file."""
        self._trainer, self._outlast, self._is_watching = trainer, outlast, True
        self._step, self._left_out, self.events = -1, 0, []
        connector = trainer._checkpoint_connector
        vars(connector).pop("resume_start", None)
        from_file = connector.resume_start

        def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
            found = self._found(checkpoint_path)
            if found is None:
                from_file(checkpoint_path, weights_only=weights_only)
            else:
                connector._loaded_checkpoint = found

        connector.resume_start = resume_start

    def begin(self, recording: Recording) -> None:
        """The training begins, with what was restored; `recording` has its directory."""
        self._recording = recording
        self._step = self._trainer.global_step
        if self._memory is None:
            self._memory = self._opened(recording.directory)
            # Of a training that this one does not go on from; nor must a restart of this one.
            self._memory.forget_earlier()
        if not self._trainer.lightning_module.automatic_optimization:
            # The step of an optimizer without Lightning's wrapper calls no callback.
            self._hooks = [
                optimizer.register_step_pre_hook(lambda *_: self.settle())
                for optimizer in self._trainer.optimizers
            ]

    def settle(self) -> None:
        """To be called before an optimizer's step: what was being copied is copied."""
        if self._memory is not None:
            self._memory.settle()

    def after_batch(self) -> None:
        """All callbacks have done their part of a batch: begin to keep the state behind a step."""
        step = self._trainer.global_step
        if self._memory is None or step == self._step or step % self._job.recover.every_steps:
            return
        self._step = step
        assert self._recording is not None
        if not self._is_followed():
            self._left_out = 0
            self._recording.write(self._memory.keep(step))
            return
        self._left_out += 1
        if self._left_out == 2 and self._memory.is_on and not self._told:
            self._told = True
            self._recording.write(
                Warned(
                    f"step {step}, and the one before after which the state would be kept in "
                    "memory, are followed by a validation or the end of an epoch, where it is not: "
                    "a restart may go back to the newest checkpoint"
                )
            )

    def close(self, *, forget: bool) -> None:
        """The training is over.

        Args:
            forget: Give the memory back: all is on disk, or may be wrong. Otherwise it is kept
                for a restart.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        memory, self._memory = self._memory, None
        store, self._store = self._store, None
        if memory is not None:
            memory.close(forget=forget)
        if store is not None:
            store.close()
        self._recording = None
        if self._is_watching:
            vars(self._trainer._checkpoint_connector).pop("resume_start", None)

    def _is_followed(self) -> bool:
        """Return whether a validation or the epoch's end comes before the next batch.

        A checkpoint is resumed behind them, so that they would be left out; from the step before
        they are done.
        """
        fit = self._trainer.fit_loop
        if fit.epoch_loop._is_training_done:
            return True
        if getattr(self._trainer, "_val_check_time_interval", None) is not None:
            # Each rank goes by its own clock, and all must keep the same steps.
            return False
        return bool(fit.epoch_loop._should_check_val_fx(fit._data_fetcher))

    def _found(self, path: Any) -> dict[str, Any] | None:
        """The checkpoint in memory, where it counts and is newer; None without one."""
        directory = directory_of(self._job)
        if self._trainer.state.fn != TrainerFn.FITTING or not _counts(
            self._trainer, path, directory
        ):
            return None
        otherwise = ""
        if str(path) not in _last_files(self._trainer):
            does = f"goes on from {path}" if path else "begins anew"
            otherwise = f'the training {does}, as the script says (ckpt_path="last" goes on)'
        memory = self._memory = self._opened(directory, otherwise)
        is_taken = memory.find() is not None and memory.take()
        self.events = memory.events
        if not is_taken:
            return None
        content, self._checkpoint.content = self._checkpoint.content, {}
        found: dict[str, Any] = restored(content[KEY], unpickle=True)
        places = {"places": self._places(content["ranks"])}
        found.setdefault("callbacks", {})[self._outlast.state_key] = places
        return found

    def _places(self, ranks_before: int) -> list[list[dict[str, Any]]]:
        """Positions of each rank in each loader; of another number of ranks, those of the first."""
        # A rank that there was not has none.
        told: list[list[dict[str, Any]]] = gather_objects(self._place.content.get("loaders", []))
        self._place.content = {}
        if len(told) == ranks_before:
            return told
        return [[*told[0]] for _ in range(ranks_before)]

    def _opened(self, directory: RunDirectory, otherwise: str = "") -> MemoryCheckpoint:
        ranks = ranks_here()
        self._store = CheckpointStore(directory.checkpoints, collective=False)
        state = {_CHECKPOINT: self._checkpoint, f"{_PLACE}{ranks.rank}": self._place}
        return MemoryCheckpoint(
            self._job, ranks, directory, self._store, state, note=self._note, otherwise=otherwise
        )

    def _note(self) -> None:
        """Bring what is kept up to date."""
        trainer, ranks = self._trainer, ranks_here()
        self.taking = True
        try:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        finally:
            self.taking = False
        places = places_of([trainer.lightning_module], trainer.optimizers)
        found = settled(plain(checkpoint), places)
        if ranks.local_rank > 0:
            # Beside parameters, which are equal, a node keeps what its first rank has.
            found = only_settled(found)
        self._checkpoint.content = {KEY: found, "ranks": ranks.world_size}
        self._place.content = {"loaders": self._outlast.places_here()}


class KeepLast(Checkpoint):  # type: ignore[misc]
    """Part of `with_outlast`: a checkpoint callback, and so behind all that are none.

    Args:
        memory: Where each step is kept.
    """

    def __init__(self, memory: TrainerMemory) -> None:
        super().__init__()
        self._memory = memory

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin to keep the state, when an optimizer has done a step."""
        self._memory.after_batch()


class _Entry:
    """A dictionary as an entry of what is kept."""

    may_be_missing = True

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.content = dict(state)


def _counts(trainer: Trainer, path: Any, directory: RunDirectory) -> bool:
    """True if a training goes on from memory, and not from what the script names, on all ranks.

    A script that torchrun has started again names what it named at first. One that was started by
    hand goes on where it asks for the last checkpoint.
    """
    counts = directory.exists()
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        counts = counts and str(path) in _last_files(trainer)
    return gather_objects(counts)[0]


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

    Checkpoints go through a store, in the background; a resumed training goes on with the next
    sample and the same random numbers; what happens is recorded in the run's directory, and what
    the job asks for is guarded and measured. At a signal or the end of a Slurm job's time the
    training saves after the step and ends the program with exit code 3. Give `Trainer.fit`
    ``ckpt_path="last"``, and the same command goes on from there. Under torchrun with
    ``--max-restarts`` each step is kept in memory, and a restart goes on from that.

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
    memory = TrainerMemory(job) if is_kept(job.recover, ranks_from(os.environ)) else None
    outlast = OutlastCallback(
        job,
        checkpoint_io.files,
        tokens_per_step=tokens_per_step,
        prediction=prediction,
        memory=memory,
    )
    saving = [callback for callback in own if isinstance(callback, ModelCheckpoint)]
    if not saving:
        own.append(_last_checkpoint(job, directory.path / "lightning"))
    else:
        _check_own(job, saving)
    if memory is not None:
        own.append(KeepLast(memory))
    return {"callbacks": [outlast, *own], "plugins": [checkpoint_io, *plugins]}


def _last_checkpoint(job: LoopJob, place: Path) -> ModelCheckpoint:
    every = job.checkpoint.every_steps
    if every == "auto":
        raise IntegrationError(
            'checkpoint.every_steps = "auto" cannot be followed here, since it is ModelCheckpoint '
            "that counts the steps; give a number"
        )
    return ModelCheckpoint(dirpath=place, save_last=True, save_top_k=0, every_n_train_steps=every)


def _check_own(job: LoopJob, saving: Sequence[ModelCheckpoint]) -> None:
    if not any(checkpoint.save_last for checkpoint in saving):
        raise IntegrationError(
            "no ModelCheckpoint has save_last=True: a training that is stopped saves under that "
            'name, and ckpt_path="last" goes on from it; add save_last=True to one of them'
        )
    default = type(job.checkpoint).model_fields["every_steps"].default
    if job.checkpoint.every_steps != default:
        raise IntegrationError(
            f"checkpoint.every_steps = {job.checkpoint.every_steps!r} and a ModelCheckpoint both "
            "say when to save; remove the setting, and give ModelCheckpoint every_n_train_steps"
        )
