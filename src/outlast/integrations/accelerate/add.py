"""One line each: what can be added to an `Accelerator`, after its `prepare`."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from outlast.distributed.group import raise_together
from outlast.errors import EXIT_TO_BE_CONTINUED, IntegrationError
from outlast.integrations.accelerate.remembering import Remembering
from outlast.integrations.accelerate.saving import Saving
from outlast.integrations.accelerate.tracking import OutlastTracker
from outlast.integrations.given import loop_job_of, with_section
from outlast.integrations.place import ranks_here, unwrapped
from outlast.integrations.recording import directory_of
from outlast.integrations.step_energy import StepEnergy
from outlast.integrations.stopping import Stopping
from outlast.job import LoopJob
from outlast.job.section import toml_value
from outlast.records import RunDirectory
from outlast.train.guarding import RunGuard

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from accelerate import Accelerator

    from outlast.energy.sources.protocol import Source
    from outlast.records import Predicted

_FOLLOWED = ("asynchronous", "compression", "delta_chain", "timeout_seconds", "writer")


def add_checkpoints(
    accelerator: Accelerator, directory: str | os.PathLike[str], **settings: Any
) -> Saving:
    """Let `save_state` and `load_state` use a store.

    Args:
        accelerator: After `prepare`.
        directory: Of the store.
        settings: ``asynchronous``, ``compression``, ``delta_chain``, ``timeout_seconds`` and
            ``writer`` of [checkpoint]. With ``automatic_checkpoint_naming``,
            ``ProjectConfiguration.total_limit`` says how many states are kept; else all are.

    Raises:
        JobError: When a setting is wrong.
        IntegrationError: When a setting has no effect, or the accelerator cannot be saved so.
    """
    section = with_section("checkpoint", settings).checkpoint
    plain = LoopJob().checkpoint
    for name in settings:
        if name not in _FOLLOWED and getattr(section, name) != getattr(plain, name):
            raise IntegrationError(
                f"checkpoint.{name} = {toml_value(getattr(section, name))} has no effect on an "
                "Accelerator: the script decides when and where save_state saves, and with "
                "automatic_checkpoint_naming ProjectConfiguration.total_limit how many states are "
                f"kept; remove it (what has an effect: {', '.join(_FOLLOWED)})"
            )
    return Saving(accelerator, Path(directory), section)


def add_recover(
    accelerator: Accelerator,
    saving: Saving,
    job: str | os.PathLike[str] | LoopJob | None = None,
) -> Remembering:
    """Keep the state of each step in memory outside of the processes, and go on from it.

    Under torchrun or ``accelerate launch`` with restarts a killed process costs one step at most.
    From then on `Saving.newest` and `load_state` know of the memory, too. It is used so::

        memory = add_recover(accelerator, saving)
        if saving.newest() is not None:
            accelerator.load_state()
        for batch in loader:
            ...
            memory.keep()           # where save_state could stand

    Args:
        accelerator: After `prepare`, and before `load_state`.
        saving: What `add_checkpoints` gave.
        job: A TOML file or settings; [recover] counts here, and [run] as for `add_records`. None:
            defaults, for the run of the store.

    Raises:
        JobError: When a setting is wrong.
        RecoverError: When the parity that is asked for is not possible.
    """
    settings = loop_job_of(job)
    directory = RunDirectory(saving.directory) if job is None else directory_of(settings)
    raise_together(lambda: directory.identify() if ranks_here().is_first else None)
    return Remembering(accelerator, saving, settings, directory)


def add_guard(
    accelerator: Accelerator, policy: str = "light", *, seed: int = 0, **settings: Any
) -> RunGuard:
    """Check the numbers of each step of the first prepared model.

    What can be put right in place is; other wrong numbers raise `WrongNumbersError` before the
    optimizer uses them.

    Args:
        accelerator: After `prepare`.
        policy: ``light``, ``linear`` or ``full``.
        seed: Of the slices that are checked.
        settings: Other keys of [guard].

    Raises:
        JobError: When a setting is wrong.
        GuardError: When a model cannot be guarded.
    """
    section = with_section("guard", {"policy": policy, **settings}).guard
    models = accelerator._models
    model = models[0] if len(models) == 1 else nn.ModuleList([unwrapped(model) for model in models])
    optimizers = [optimizer.optimizer for optimizer in accelerator._optimizers]
    guard = RunGuard(section, seed, model, optimizers)
    for message in guard.warnings:
        warnings.warn(message, stacklevel=2)
    return guard


def add_records(
    accelerator: Accelerator,
    job: str | os.PathLike[str] | LoopJob | None = None,
    *,
    steps: int = 0,
    tokens_per_step: int = 0,
    guard: RunGuard | None = None,
    saving: Saving | None = None,
    prediction: Predicted | None = None,
) -> OutlastTracker:
    """Write the run down, with its energy: ``outlast report`` shows it.

    `Accelerator.log` gives it the figures, and `Accelerator.end_training` closes it.

    Args:
        accelerator: After `prepare`, and after `load_state` where the run goes on.
        job: A TOML file or settings; [run], [energy] and [log] count here. None: defaults.
        steps: Optimizer steps of the whole run; 0: not known.
        tokens_per_step: Over all processes; 0: not known.
        guard: What `add_guard` gave.
        saving: What `add_checkpoints` gave.
        prediction: What the run is expected to need, to be shown beside what it needed.

    Raises:
        JobError: When a setting is wrong.
        OutlastError: When the run directory is in use or belongs to another run.
    """
    tracker = OutlastTracker(
        accelerator,
        loop_job_of(job),
        steps=steps,
        tokens_per_step=tokens_per_step,
        guard=guard,
        saving=saving,
        prediction=prediction,
    )
    accelerator.trackers.append(tracker)
    return tracker


def add_energy(accelerator: Accelerator, sources: Sequence[Source] | None = None) -> StepEnergy:
    """A meter for scripts that log energy themselves: ``accelerator.log(energy.take(step))``.

    Args:
        accelerator: Whose main process logs.
        sources: What is read. Default: all meters of this machine.
    """
    energy = StepEnergy(sources, 0)
    if accelerator.is_main_process and (warning := energy.warning()) is not None:
        warnings.warn(warning, stacklevel=2)
    return energy


class AskStop:
    """Asked after each step whether to leave the loop; see `add_stop`.

    Args:
        accelerator: Whose processes ask together.
        limit_seconds: How long the program may run from now on; None: as long as it needs.
        saving: Whose save is waited for.
        tracker: That is closed.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        limit_seconds: float | None,
        saving: Saving | None,
        tracker: OutlastTracker | None,
    ) -> None:
        self._accelerator = accelerator
        self._stopping = Stopping(limit_seconds)
        self._saving = saving
        self._tracker = tracker
        self._why = ""
        self._calls = 0
        self._handlers = contextlib.ExitStack()
        self._handlers.enter_context(self._stopping.signals())
        self._stopping.begin(0)
        own_end = accelerator.end_training

        def end_training() -> None:
            with self._handlers:
                self._stopping.ended(self._calls)
                own_end()

        accelerator.end_training = end_training

    def __call__(self, step: int | None = None) -> bool:
        """Whether to stop after this step, on all processes the same; asked after each.

        Args:
            step: Whatever the loop calls the step. It may begin anew in each epoch, so the calls
                are counted in its place.
        """
        self._calls += 1
        self._why = self._why or self._stopping.why(self._calls)
        return bool(self._why)

    def leave(self) -> None:
        """End the program, to be continued; the state was saved by `save_state`.

        Raises:
            SystemExit: With exit code 3.
            CheckpointError: When the state could not be saved.
        """
        with self._handlers:
            if self._saving is not None:
                self._saving.finish()
            if self._tracker is not None:
                self._tracker.close("to_be_continued", self._why)
            if ranks_here().is_first:
                print(f"outlast: stopped ({self._why}); the same command goes on", flush=True)
            self._accelerator.end_training()
        raise SystemExit(EXIT_TO_BE_CONTINUED)


def add_stop(
    accelerator: Accelerator,
    limit_seconds: float | None = None,
    *,
    saving: Saving | None = None,
    tracker: OutlastTracker | None = None,
) -> AskStop:
    """Let a loop stop at SIGTERM, SIGUSR1, SIGINT, or when its time is nearly up.

    The signals do again what they did before when the loop leaves, or with `end_training`.

    It is used so::

        stop = add_stop(accelerator, saving=saving)
        for step, batch in enumerate(loader, 1):
            ...
            if stop(step):
                accelerator.save_state("state")
                stop.leave()

    Args:
        accelerator: After `prepare`; all processes call it together.
        limit_seconds: How long the program may run from now on; None: as long as it needs.
        saving: What `add_checkpoints` gave: its save is waited for.
        tracker: What `add_records` gave.
    """
    return AskStop(accelerator, limit_seconds, saving, tracker)
