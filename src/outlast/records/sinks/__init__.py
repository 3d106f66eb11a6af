"""Other places that want a run's numbers: TensorBoard, Weights & Biases, MLflow and trackio.

A sink gets every event that rank 0 writes. `Curves` says which numbers of an event are worth a
point, `notes` which words are worth keeping; the sinks only pass these on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from outlast.records.reader import read_run
from outlast.records.sinks.curves import Curves, Sink, counted_in, notes, scalars
from outlast.records.sinks.mlflow import MlflowSink
from outlast.records.sinks.tensorboard import TensorBoardSink
from outlast.records.sinks.trackio import TrackioSink
from outlast.records.sinks.wandb import WandbSink

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outlast.records.directory import RunDirectory

__all__ = [
    "Curves",
    "MlflowSink",
    "Sink",
    "SinkSettings",
    "TensorBoardSink",
    "TrackioSink",
    "WandbSink",
    "counted_in",
    "notes",
    "open_sinks",
    "scalars",
]


class SinkSettings(Protocol):
    """What [log] says about sinks."""

    @property
    def tensorboard(self) -> bool:
        """Whether to write TensorBoard files."""

    @property
    def wandb_project(self) -> str | None:
        """Project of Weights & Biases; None: none."""

    @property
    def mlflow_experiment(self) -> str | None:
        """Experiment of MLflow; None: none."""

    @property
    def mlflow_uri(self) -> str | None:
        """Where MLflow keeps it; None: where MLflow itself would."""

    @property
    def trackio_project(self) -> str | None:
        """Project of trackio; None: none."""


def open_sinks(
    settings: SinkSettings, directory: RunDirectory, name: str, config: Mapping[str, Any]
) -> list[Sink]:
    """The sinks that [log] asks for, for the next attempt of a run.

    Args:
        settings: The section [log].
        directory: Of the run.
        name: Unique to the run, the same for all of its attempts, which make one curve.
        config: All settings of the job, by section.

    Raises:
        OutlastError: When a package is missing or a tracker cannot be reached.
    """
    wanted = (
        settings.tensorboard,
        settings.wandb_project,
        settings.mlflow_experiment,
        settings.trackio_project,
    )
    if not any(wanted):
        return []
    counts = counted_in(record.event for record in read_run(directory.path).records)
    sinks: list[Sink] = []
    if settings.tensorboard:
        sinks.append(TensorBoardSink(directory.tensorboard, counts))
    if project := settings.wandb_project:
        sinks.append(WandbSink(project, name, dict(config), directory.path, counts))
    if experiment := settings.mlflow_experiment:
        sinks.append(MlflowSink(experiment, settings.mlflow_uri, name, config, counts))
    if project := settings.trackio_project:
        sinks.append(TrackioSink(project, name, config, counts))
    return sinks
