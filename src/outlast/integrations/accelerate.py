"""All of Outlast in a loop on Hugging Face's `Accelerator`, which stays as it is.

model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
saving = add_checkpoints(accelerator, "runs/mine/store")    # save_state and load_state use a store
add_records(accelerator, "job.toml", saving=saving)         # accelerator.log writes records
memory = add_recover(accelerator, saving)                    # memory.keep() after each step
stop = add_stop(accelerator)                                # if stop(step): leave with exit code 3
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from outlast import cluster
from outlast.distributed.group import raise_together
from outlast.errors import EXIT_TO_BE_CONTINUED, IntegrationError
from outlast.integrations import loop_job_of, require, unfollowed, with_section
from outlast.integrations.accelerate_checkpoints import Saving, runtime_of
from outlast.integrations.run import number_in
from outlast.job import LoopJob
from outlast.job.section import toml_value
from outlast.records import RunDirectory
from outlast.runtime.energy import TrainingEnergy
from outlast.runtime.engine import PeriodicConsensus, Runtime, StepResult
from outlast.runtime.place import device_of, parameters_in, ranks_here, unwrapped
from outlast.runtime.recording import LoopFacts, Recording, directory_of

require("accelerate", "1.15", "2")

import accelerate  # noqa: E402
from accelerate.tracking import GeneralTracker  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelerate import Accelerator
    from torch.optim import Optimizer

    from outlast.energy.sources import Source
    from outlast.records import Predicted
    from outlast.runtime.guarding import RunGuard

_FOLLOWED = ("asynchronous", "compression", "timeout_seconds", "writer")

_FIGURES = {
    "train_loss": "loss",
    "loss": "loss",
    "gradient_norm": "gradient_norm",
    "grad_norm": "gradient_norm",
    "lr": "learning_rate",
    "learning_rate": "learning_rate",
}
"""What scripts call the figures of a step -> the figure."""


class OutlastTracker(GeneralTracker):  # type: ignore[misc]
    """Records every optimizer step; the figures are those that `Accelerator.log` was given.

    A step takes the figures that are logged after it: ``loss``, ``grad_norm``, ``lr`` or
    ``learning_rate``, and other numbers by their own names.

    Args:
        runtime: Of the accelerator.
        records: Of the run.
        optimizer: Whose steps are counted.
    """

    name = "outlast"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, runtime: Runtime, records: Recording, optimizer: Optimizer) -> None:
        super().__init__()
        self._runtime = runtime
        self._records = records
        self._due = False
        self._hook = optimizer.register_step_post_hook(self._stepped)

    @property
    def tracker(self) -> Path:
        """The run's directory."""
        return self._records.directory.path

    @property
    def step(self) -> int:
        """Optimizer steps done in the run."""
        return self._runtime.step

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Figures of the step that was done last."""
        # Scripts log texts and pictures, too, for trackers that show them.
        numbers = {
            name: number
            for name, value in values.items()
            if (number := number_in(value)) is not None
        }
        figures: dict[str, Any] = {
            figure: numbers.pop(name) for name, figure in _FIGURES.items() if name in numbers
        }
        self._records.amend(StepResult(self.step, **figures, metrics=numbers))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """A run's settings are in its job.toml; the script's own are not recorded."""

    def finish(self) -> None:
        """The training ends; all processes call it together, by `end_training`."""
        self._hook.remove()
        self._runtime.tell_findings()

    def _stepped(self, *_: Any) -> None:
        if self._due:
            # Scripts log after the step: only now its figures are complete.
            self._runtime.record_steps()
        self._runtime.step += 1
        self._due = self._records.step(StepResult(self._runtime.step))
        if self._runtime.saves is not None:
            self._runtime.saves.collect(wait=False)


class AskStop:
    """Asked after each step whether to leave the loop; see `add_stop`.

    Args:
        accelerator: Whose processes ask together.
        limit_seconds: How long the program may run from now on; None: as long as it needs.
    """

    def __init__(self, accelerator: Accelerator, limit_seconds: float | None) -> None:
        self._accelerator = accelerator
        self._runtime = runtime_of(accelerator)
        self._consensus = self._runtime.consensus = PeriodicConsensus(limit_seconds, cluster)
        self._calls = 0
        self._runtime.take_signals()
        self._consensus.begin(0)
        self._runtime.clock.begin()
        own_end = accelerator.end_training

        def end_training() -> None:
            self._consensus.ended(self._calls)
            own_end()

        accelerator.end_training = end_training

    def __call__(self, step: int | None = None) -> bool:
        """Return whether to stop after this step, on all processes the same; asked after each.

        Args:
            step: Whatever the loop calls the step. It may begin anew in each epoch, so the calls
                are counted in its place.

        Raises:
            DataCorruptionError: On all processes, when it is to stop and the last step's numbers
                are wrong.
        """
        self._calls += 1
        decision = self._consensus.decide(self._runtime, StepResult(self._calls))
        if decision.stop and not self._runtime.stopped:
            self._runtime.stop(decision)
        return bool(self._runtime.stopped)

    def leave(self) -> None:
        """End the program, to be continued; the state was saved by `save_state`.

        Raises:
            SystemExit: With exit code 3.
            CheckpointError: When the state could not be saved.
        """
        self._accelerator.end_training()
        if self._runtime.ranks.is_first:
            why = self._runtime.stopped
            print(f"outlast: stopped ({why}); the same command continues", flush=True)
        raise SystemExit(EXIT_TO_BE_CONTINUED)


def add_checkpoints(
    accelerator: Accelerator, directory: str | os.PathLike[str], **settings: Any
) -> Saving:
    """Let `save_state` and `load_state` use a store.

    Args:
        accelerator: After `prepare`.
        directory: Of the store.
        settings: ``asynchronous``, ``compression``, ``timeout_seconds`` and
            ``writer`` of [checkpoint]. With ``automatic_checkpoint_naming``,
            ``ProjectConfiguration.total_limit`` says how many states are kept; else all are.

    Returns:
        The store; its ``steps`` are those done in the run, ``newest`` says what can be loaded.

    Raises:
        JobError: When a setting is wrong.
        IntegrationError: When a setting has no effect, or the accelerator cannot be saved so.
    """
    section = with_section("checkpoint", settings).checkpoint
    for name, value in unfollowed(section, _FOLLOWED):
        raise IntegrationError(
            f"checkpoint.{name} = {toml_value(value)} has no effect on an Accelerator: the script "
            "decides when and where save_state saves, and with automatic_checkpoint_naming "
            "ProjectConfiguration.total_limit how many states are kept; remove it (what has an "
            f"effect: {', '.join(_FOLLOWED)})"
        )
    return Saving(accelerator, Path(directory), section)


def add_recover(
    accelerator: Accelerator, saving: Saving, job: str | os.PathLike[str] | LoopJob | None = None
) -> Saving:
    """Keep the state of each step in memory outside of the processes, and continue from it.

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

    Returns:
        `saving`, whose `keep` keeps a step.

    Raises:
        JobError: When a setting is wrong.
        RecoverError: When the parity that is asked for is not possible.
    """
    settings = loop_job_of(job)
    directory = RunDirectory(saving.directory) if job is None else directory_of(settings)
    raise_together(lambda: directory.create() if ranks_here().is_first else None)
    saving.remember(settings, directory)
    return saving


def add_guard(
    accelerator: Accelerator, policy: str = "light", *, seed: int = 0, **settings: Any
) -> RunGuard | None:
    """Check the numbers of each step of the first prepared model.

    What can be corrected in place is; other wrong values raise `DataCorruptionError` before the
    optimizer uses them.

    Args:
        accelerator: After `prepare`.
        policy: ``light``, ``linear``, ``full``, or ``off``.
        seed: Of the slices that are checked.
        settings: Other keys of [guard].

    Returns:
        The guard of the run, whose ``guard`` is the `Guard` itself; None with ``off``.

    Raises:
        JobError: When a setting is wrong.
        GuardError: When a model cannot be guarded.
    """
    section = with_section("guard", {"policy": policy, **settings}).guard
    models = accelerator._models
    model = models[0] if len(models) == 1 else nn.ModuleList([unwrapped(model) for model in models])
    optimizers = [optimizer.optimizer for optimizer in accelerator._optimizers]
    return runtime_of(accelerator).install_guard(section, seed, model, optimizers)


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
        accelerator: After `prepare`, and after `load_state` where the run continues.
        job: A TOML file or settings; [run], [energy] and [log] count here. None: defaults.
        steps: Optimizer steps of the whole run; 0: not known.
        tokens_per_step: Over all processes; 0: not known.
        guard: What `add_guard` gave; its findings are recorded in any case.
        saving: What `add_checkpoints` gave.
        prediction: What the run is expected to need, to be shown beside what it needed.

    Returns:
        The tracker, which is among those of the accelerator.

    Raises:
        JobError: When a setting is wrong.
        IntegrationError: When no optimizer is prepared.
        OutlastError: When the run directory is in use or belongs to another run.
    """
    if not accelerator._optimizers:
        raise IntegrationError(
            "add_records counts the steps of a prepared optimizer, and there is none; call it "
            "after accelerator.prepare(...)"
        )
    models, runtime = accelerator._models, runtime_of(accelerator)
    facts = LoopFacts(
        framework="accelerate",
        steps=steps,
        tokens_per_step=tokens_per_step,
        parameters=parameters_in(models),
        versions={"accelerate": accelerate.__version__},
    )
    settings = loop_job_of(job)
    records = runtime.open_records(settings, device_of(models), facts, prediction=prediction)
    # What `add_stop` has begun counts calls, not the run's steps.
    consensus, runtime.consensus = runtime.consensus, None
    runtime.begin(0 if saving is None else saving.steps)
    runtime.consensus = consensus
    tracker = OutlastTracker(runtime, records, accelerator._optimizers[0].optimizer)
    accelerator.trackers.append(tracker)
    return tracker


def add_energy(accelerator: Accelerator, sources: Sequence[Source] | None = None) -> TrainingEnergy:
    """A meter for scripts that log energy themselves: ``accelerator.log(energy.take(step))``.

    Args:
        accelerator: Whose main process logs.
        sources: What is read. Default: all meters of this machine.
    """
    energy = TrainingEnergy(sources)
    if accelerator.is_main_process:
        energy.begin(0)
    return energy


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
        saving: What `add_checkpoints` gave; its save is waited for in any case.
        tracker: What `add_records` gave; it is closed in any case.

    Returns:
        What is asked after each step.
    """
    return AskStop(accelerator, limit_seconds)
