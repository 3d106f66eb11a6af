"""One line each: what can be added to an `Accelerator`, after its `prepare`."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerate
from accelerate.tracking import GeneralTracker
from torch import nn

from outlast import cluster
from outlast.distributed.group import raise_together
from outlast.errors import EXIT_TO_BE_CONTINUED, IntegrationError
from outlast.integrations.accelerate.checkpoints import Remembering, Saving
from outlast.integrations.given import loop_job_of, with_section
from outlast.integrations.progress import number_in
from outlast.job import LoopJob
from outlast.job.section import toml_value
from outlast.records import RunDirectory
from outlast.runtime.energy import StepEnergy
from outlast.runtime.guarding import RunGuard
from outlast.runtime.place import device_of, ranks_here, unwrapped
from outlast.runtime.recording import LoopFacts, Recording, directory_of
from outlast.runtime.stop import Stopping

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from accelerate import Accelerator

    from outlast.checkpoint import SaveResult
    from outlast.energy.sources import Source
    from outlast.records import Predicted


_NAMES = {
    "loss": ("train_loss", "loss"),
    "gradient_norm": ("gradient_norm", "grad_norm"),
    "learning_rate": ("lr", "learning_rate"),
}


"""Figures of a step, and what scripts call them."""


class OutlastTracker(GeneralTracker):  # type: ignore[misc]
    """Records every optimizer step; the figures are those that `Accelerator.log` was given.

    All processes make it after `Accelerator.prepare`. A step takes the figures that are logged
    after it: ``loss``, ``grad_norm``, ``lr`` or ``learning_rate``, and other numbers by their own
    names.

    Args:
        accelerator: Whose optimizers are counted.
        job: The settings; where they lead, the run directory is made.
        steps: Optimizer steps of the whole run; 0: not known.
        tokens_per_step: Over all processes; 0: not known.
        guard: Whose findings are recorded.
        saving: Whose saves and loads are recorded.
        prediction: What the run is expected to need.
    """

    name = "outlast"
    requires_logging_directory = False
    main_process_only = False

    def __init__(
        self,
        accelerator: Accelerator,
        job: LoopJob,
        *,
        steps: int = 0,
        tokens_per_step: int = 0,
        guard: RunGuard | None = None,
        saving: Saving | None = None,
        prediction: Predicted | None = None,
    ) -> None:
        super().__init__()
        if not accelerator._optimizers:
            raise IntegrationError(
                "add_records counts the steps of a prepared optimizer, and there is none; call it "
                "after accelerator.prepare(...)"
            )
        self._guard = guard
        self._saving = saving
        self._closed = self._due = False
        self._step = 0 if saving is None else saving.steps
        models = accelerator._models
        parameters = {
            id(parameter): parameter for model in models for parameter in model.parameters()
        }
        facts = LoopFacts(
            framework="accelerate",
            steps=steps,
            tokens_per_step=tokens_per_step,
            parameters=sum(parameter.numel() for parameter in parameters.values()),
            versions={"accelerate": accelerate.__version__},
        )
        self._recording = Recording(
            job, ranks_here(), device_of(models), facts, prediction=prediction, chain=cluster
        )
        if saving is not None:
            saving.on_result = self._saved
            saving.watch = self._recording.watch
        self._recording.ready(self._step, [] if saving is None else saving.events, guard)
        self._optimizer = accelerator._optimizers[0].optimizer
        self._hook = self._optimizer.register_step_post_hook(self._stepped)

    @property
    def tracker(self) -> Path:
        """The run's directory."""
        return self._recording.directory.path

    @property
    def step(self) -> int:
        """Optimizer steps done in the run."""
        return self._step

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Figures of the step that was done last."""
        found = {
            figure: float(values[name])
            for figure, names in _NAMES.items()
            for name in names
            if name in values
        }
        known = {name for names in _NAMES.values() for name in names}
        # Scripts log texts and pictures, too, for trackers that show them.
        metrics = {
            name: number
            for name, value in values.items()
            if name not in known and (number := number_in(value)) is not None
        }
        self._recording.amend(**found, metrics=metrics)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """A run's settings are in its job.toml; the script's own are not recorded."""

    def finish(self) -> None:
        """The training is complete; all processes call it together, by `end_training`."""
        self.close("completed")

    def close(self, outcome: str, reason: str = "") -> None:
        """The training ends; all processes together, but for one that has failed."""
        if self._closed:
            return
        self._closed = True
        self._hook.remove()
        if self._saving is not None:
            self._saving.watch = lambda _: contextlib.nullcontext()
        if outcome != "failed":
            self._tell_findings()
        self._recording.close(outcome, reason)

    def _stepped(self, *_: Any) -> None:
        if self._due:
            # Scripts log after the step: only now its figures are complete.
            self._recording.record_steps()
            self._tell_findings()
        self._step += 1
        self._due = self._recording.step(self._step)
        if self._saving is not None:
            self._saving.collect()

    def _saved(self, result: SaveResult) -> None:
        self._recording.saved(result)

    def _tell_findings(self) -> None:
        if self._guard is not None:
            self._recording.checked(self._guard, self._step)


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
    accelerator: Accelerator, saving: Saving, job: str | os.PathLike[str] | LoopJob | None = None
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
    raise_together(lambda: directory.create() if ranks_here().is_first else None)
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
        self._stopping = Stopping(limit_seconds, ranks_here(), cluster)
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
        """Return whether to stop after this step, on all processes the same; asked after each.

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
