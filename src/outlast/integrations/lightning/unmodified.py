"""The `Trainer` of a script that knows nothing of Outlast, under `outlast run`."""

from __future__ import annotations

import functools
import itertools
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from outlast.errors import IntegrationError
from outlast.integrations.fabric import StoreCheckpointIO
from outlast.integrations.handed import UNASKED_SECONDS
from outlast.integrations.lightning.callback import OutlastCallback
from outlast.integrations.recording import directory_of
from outlast.job import load_loop_job

if TYPE_CHECKING:
    import os

    from outlast.integrations.handed import HandedOver
    from outlast.integrations.pace import Every

_NAME = "last.ckpt"


class GoOnFrom(ModelCheckpoint):  # type: ignore[misc]
    """Saves what the next start goes on from, beside what the script's own callbacks save.

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


class _Outlast(OutlastCallback):
    """Stops with the file that the next start goes on from, whatever the script calls its last."""

    def _end(self, trainer: Trainer, why: str) -> None:
        last = [
            each
            for each in trainer.checkpoint_callbacks
            if isinstance(each, ModelCheckpoint) and each.save_last
        ]
        if not isinstance(last[0], GoOnFrom):
            own = next(each for each in last if isinstance(each, GoOnFrom))
            trainer.save_checkpoint(Path(own.dirpath) / _NAME)
        super()._end(trainer, why)


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


def take_over(handed: HandedOver) -> None:
    """Have all trainers that are made from now on save to a store, resume from it and stop in time.

    Args:
        handed: What to tell them.

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
        _refuse_own_processes(trainer)
        folder = trainer._outlast_folder
        found = handed.begins(folder / "checkpoints")
        if found and (folder / _NAME).exists() and options.get("ckpt_path") is None:
            options["ckpt_path"] = str(folder / _NAME)
        try:
            return own_fit(trainer, *arguments, **options)
        finally:
            handed.step = trainer.global_step

    Trainer.__init__ = made
    Trainer.fit = fit


def _refuse_own_processes(trainer: Trainer) -> None:
    environment = getattr(trainer.strategy, "cluster_environment", None)
    count = trainer.num_devices * trainer.num_nodes
    if count > 1 and not getattr(environment, "creates_processes_externally", False):
        raise IntegrationError(
            f"Lightning would start the other {count - 1} of {count} processes itself, without "
            f"outlast run: start all of them with `outlast run --nproc {count}` or "
            "`torchrun -m outlast run`"
        )


def _options(handed: HandedOver, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The callbacks and plugins of a trainer, ours among them."""
    given = [f"run.directory={folder.parent}", f"run.name={folder.name}", "guard.policy=off"]
    job = load_loop_job(None, given)
    store = StoreCheckpointIO(directory_of(job).checkpoints, job.checkpoint)
    callbacks, plugins = _listed(options.get("callbacks")), _listed(options.get("plugins"))
    checkpoints = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    if not checkpoints and options.get("enable_checkpointing", True):
        # As the trainer does where it is given none.
        callbacks.append(ModelCheckpoint())
    others = next((each for each in plugins if isinstance(each, CheckpointIO)), TorchCheckpointIO())
    kept = [each for each in plugins if each is not others]
    return {
        "callbacks": [
            _Outlast(job, store.files),
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
