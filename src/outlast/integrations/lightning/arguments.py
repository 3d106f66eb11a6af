"""One line for all of Outlast in a `Trainer`: its plugins and callbacks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from outlast.distributed.ranks import ranks_from
from outlast.errors import IntegrationError
from outlast.integrations.fabric import StoreCheckpointIO
from outlast.integrations.given import loop_job_of
from outlast.integrations.lightning.callback import OutlastCallback
from outlast.integrations.lightning.memory import KeepLast, TrainerMemory
from outlast.integrations.recording import directory_of
from outlast.train.recovering import is_kept

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.job import LoopJob
    from outlast.records import Predicted


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
