"""What Outlast does in a `Trainer` beside saving: record, guard, measure, resume exactly, stop."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import lightning
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException

from outlast.distributed.group import gather_objects, raise_together
from outlast.errors import EXIT_TO_BE_CONTINUED, IntegrationError, WrongNumbersError
from outlast.integrations.lightning.closures import closures_first
from outlast.integrations.lightning.loader import Place, PlacedLoader
from outlast.integrations.place import ranks_here
from outlast.integrations.recording import LoopFacts, Recording
from outlast.integrations.stopping import Stopping
from outlast.records import CheckpointRestored, StopRequested, Warned
from outlast.train.guarding import RunGuard

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch.optim import Optimizer

    from outlast.checkpoint import SaveResult
    from outlast.integrations.files import CheckpointFiles
    from outlast.integrations.lightning.memory import TrainerMemory
    from outlast.job import LoopJob
    from outlast.records import Event, Predicted

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
        """Where this rank stands in each loader of the training data."""
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
        """Where every rank stands in the training data; all ranks call it together."""
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
        self._stopping = Stopping(None)
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
