"""One line each: what can be added to a `Trainer`, before its `train()`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outlast.errors import IntegrationError
from outlast.integrations.given import loop_job_of, with_section
from outlast.integrations.hf_trainer.adapter import Adapter, adapter_of
from outlast.integrations.hf_trainer.checks import (
    check_checkpoints,
    check_stop,
    check_trainer,
)
from outlast.integrations.hf_trainer.guarding import Guarding
from outlast.integrations.hf_trainer.recorder import Recorder, in_output_directory
from outlast.integrations.hf_trainer.remembering import Remembering
from outlast.integrations.hf_trainer.saving import Saving
from outlast.integrations.stopping import Stopping

if TYPE_CHECKING:
    import os

    from transformers import Trainer

    from outlast.job import LoopJob
    from outlast.records import Predicted


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
    adapter.stopping = Stopping(limit_seconds)
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
