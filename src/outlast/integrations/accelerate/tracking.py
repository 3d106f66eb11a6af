"""A tracker for `Accelerator.log` that writes Outlast's records."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import accelerate
from accelerate.tracking import GeneralTracker

from outlast.errors import IntegrationError
from outlast.integrations.place import device_of, ranks_here
from outlast.integrations.progress import number_in
from outlast.integrations.recording import LoopFacts, Recording

if TYPE_CHECKING:
    from pathlib import Path

    from accelerate import Accelerator

    from outlast.checkpoint import SaveResult
    from outlast.integrations.accelerate.saving import Saving
    from outlast.job import LoopJob
    from outlast.records import Predicted
    from outlast.train.guarding import RunGuard


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
            job, ranks_here(), device_of(models), facts, prediction=prediction
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
