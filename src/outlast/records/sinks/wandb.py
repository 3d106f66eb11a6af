"""Weights & Biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outlast.errors import OutlastError
from outlast.records.events import AttemptEnded
from outlast.records.sinks.curves import Curves, notes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from outlast.records.events import Event


class WandbSink:
    """Sends the curves to a Weights & Biases project (extra ``wandb``); notes are its summary."""

    def __init__(
        self,
        project: str,
        name: str,
        config: dict[str, Any],
        directory: Path,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise OutlastError(
                f'log.wandb_project = "{project}" needs a package that is missing ({error}); '
                "pip install 'outlast[wandb]', or remove log.wandb_project"
            ) from None
        # The same id on every start makes one curve out of all attempts of a run.
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                id=name,
                resume="allow",
                config=config,
                dir=str(directory),
            )
        except wandb.Error as error:
            raise OutlastError(
                f'log.wandb_project = "{project}" does not work ({error}); run `wandb login`, '
                "set the environment variable WANDB_MODE=offline, or remove log.wandb_project"
            ) from None
        # Steps that are done again, and findings of earlier steps, would be dropped if the step
        # were W&B's own, which only grows.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._curves = Curves(counts)
        self._failed = False

    def write(self, event: Event) -> None:
        """Log the curves of the event at its step."""
        if isinstance(event, AttemptEnded):
            self._failed = event.outcome == "failed"
        if points := self._curves.points(event):
            self._run.log({**points, "step": getattr(event, "step", 0)})
        if words := notes(event):
            self._run.summary.update(words)

    def close(self) -> None:
        """Finish the remote run."""
        self._run.finish(exit_code=int(self._failed))
