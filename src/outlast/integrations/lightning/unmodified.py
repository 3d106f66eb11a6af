"""The `Trainer` of a script that knows nothing of Outlast, under `outlast run`."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.parameter import is_lazy

from outlast.errors import AutosaveError, IntegrationError
from outlast.integrations.fabric import StoreCheckpointIO
from outlast.integrations.lightning.callback import OutlastCallback
from outlast.job import load_loop_job
from outlast.records import replace_file
from outlast.runtime.handover import UNASKED_SECONDS
from outlast.runtime.recording import directory_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from outlast.runtime.cadence import Every
    from outlast.runtime.handover import HandedOver

_NAME = "last.ckpt"
_MODEL = "model.json"


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
            callback
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint) and callback.save_last
        ]
        if not isinstance(last[0], GoOnFrom):
            own = next(number for number in last if isinstance(number, GoOnFrom))
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


def take_over(handed: HandedOver) -> Callable[[], None]:
    """Have all trainers that are made from now on save to a store, resume from it and stop in time.

    Args:
        handed: What to tell them.

    Returns:
        What leaves those alone that are made afterwards.

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
    mine = {
        "class": type(model).__qualname__,
        "parameters": {
            name: None if is_lazy(parameter) else [*parameter.shape]
            for name, parameter in model.named_parameters()
        },
    }
    file = folder / _MODEL
    if resumes and file.exists():
        saved = json.loads(file.read_text(encoding="utf-8"))
        if saved != mine:
            raise AutosaveError(
                f"{folder / _NAME} holds a {saved['class']}, {_unlike(saved, mine)}; trainers "
                "are told apart by the order in which the script makes them: make as many as "
                "before, in the same order, or begin anew with --fresh"
            )
    elif os.environ.get("RANK", "0") == "0":
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(mine).encode())


def _unlike(saved: dict[str, Any], mine: dict[str, Any]) -> str:
    """Describe how two models differ."""
    if saved["class"] != mine["class"]:
        return f"but this trainer is given a {mine['class']}"
    old, new = saved["parameters"], mine["parameters"]
    name = next(result for result in [*old, *new] if old.get(result, ()) != new.get(result, ()))
    return f"whose parameter {name} is {old.get(name, 'missing')}, here {new.get(name, 'missing')}"


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
    checkpoints = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    if not checkpoints and options.get("enable_checkpointing", True):
        # As the trainer does where it is given none.
        callbacks.append(ModelCheckpoint())
    others = next(
        (plugin for plugin in plugins if isinstance(plugin, CheckpointIO)), TorchCheckpointIO()
    )
    kept = [plugin for plugin in plugins if plugin is not others]
    return {
        "callbacks": [_Outlast(job, store.files), *callbacks, GoOnFrom(folder, handed.every)],
        "enable_checkpointing": True,
        "plugins": [_OwnStore(folder, store, others), *kept],
    }


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return [*value] if isinstance(value, (list, tuple)) else [value]
