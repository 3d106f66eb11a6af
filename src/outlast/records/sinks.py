"""Other places that want a run's numbers: TensorBoard, Weights & Biases, MLflow and trackio.

A sink gets every event that rank 0 writes. `Curves` says which numbers of an event are worth a
point, `notes` which words are worth keeping; the sinks only pass these on.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

from outlast.errors import OutlastError
from outlast.records.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCopied,
    CheckpointFailed,
    CheckpointRestored,
    CheckpointSaved,
    CorruptionDetected,
    EnergyMeasured,
    Evaluated,
    GradientsCoded,
    Guarded,
    MemberLost,
    MembershipChanged,
    StateRecovered,
    StepsDone,
    StopRequested,
    TrainingStarted,
)
from outlast.records.forecast import MemoryMeasured
from outlast.records.log import read_run
from outlast.records.totals import recovery_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from outlast.records.directory import RunDirectory
    from outlast.records.events import Event


class Sink(Protocol):
    """Receives events as they are written."""

    def write(self, event: Event) -> None:
        """Take one event."""

    def close(self) -> None:
        """Write what is left."""


class Curves:
    """The points that one attempt adds to the curves of its run, counts of faults among them.

    Args:
        counts: What earlier attempts have counted, by name; brought up to date.
    """

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self._counts = Counter(counts or {})

    def points(self, event: Event) -> dict[str, float]:
        """Points that `event` adds, as ``{name: value}``; counts are those of the run so far."""
        counted = counted_in([event])
        self._counts.update(counted)
        return scalars(event) | {name: float(self._counts[name]) for name in counted}


def counted_in(events: Iterable[Event]) -> Counter[str]:
    """Number of faults of each kind among `events`, by their curve."""
    counts: Counter[str] = Counter()
    for event in events:
        match event:
            case CorruptionDetected(outcome="persistent" | "detected"):
                counts.update(("faults/wrong_numbers", "faults/not_put_right"))
            case CorruptionDetected():
                counts["faults/wrong_numbers"] += 1
            case MemberLost():
                counts["faults/members_lost"] += 1
            case StateRecovered() | CheckpointRestored():
                counts["faults/restarts"] += 1
            case CheckpointFailed():
                counts["faults/failed_checkpoints"] += 1
            case _:
                pass
    return counts


def scalars(event: Event) -> dict[str, float]:
    """The curves to which `event` alone adds a point, as ``{name: value}``."""
    match event:
        case StepsDone():
            wall_seconds = sum(event.step_seconds)
            return {
                "train/loss_nats": event.loss,
                "train/gradient_norm": event.gradient_norm,
                "train/learning_rate": event.learning_rate,
                "train/step_seconds": wall_seconds / max(event.steps, 1),
                **{f"time/{name}_seconds": value for name, value in event.seconds.items()},
                **{f"metrics/{name}": value for name, value in event.metrics.items()},
            }
        case Evaluated():
            found = {"validation/loss_nats": event.loss}
            if event.bits_per_byte is not None:
                found["validation/bits_per_byte"] = event.bits_per_byte
            return found
        case EnergyMeasured(joules=float(joules)):
            found = {"energy/joules": joules}
            if event.seconds > 0:
                found["energy/watts"] = joules / event.seconds
            if event.tokens:
                found["energy/joules_per_token"] = joules / event.tokens
            return found
        case MemoryMeasured():
            names = ("allocated", "reserved", "resident")
            peaks = [most for name in names if (most := event.most(name)) is not None]
            return {f"memory/{name}_bytes": float(peak) for name, peak in peaks}
        case _:
            return _of_reliability(event)


def _of_reliability(event: Event) -> dict[str, float]:
    """Points of checkpoints, checks, certificates and recoveries."""
    match event:
        case CheckpointSaved():
            return {
                "checkpoint/blocked_seconds": event.blocked_seconds,
                "checkpoint/seconds": event.seconds,
                "checkpoint/bytes": float(event.bytes),
            }
        case CheckpointCopied():
            size = float(event.bytes)
            return {"checkpoint/copy_seconds": event.seconds, "checkpoint/copied_bytes": size}
        case CheckpointRestored():
            return {"checkpoint/restore_seconds": event.seconds}
        case TrainingStarted():
            return {"time/until_ready_seconds": event.seconds}
        case Guarded():
            found = {"guard/checks": float(event.checks)}
            if event.seconds is not None:
                found["guard/seconds"] = event.seconds
            return found
        case CorruptionDetected():
            # Exact checks have no size: they are wrong or not.
            finite = math.isfinite(event.magnitude)
            return {"faults/wrong_numbers_sigmas": event.magnitude} if finite else {}
        case StateRecovered():
            found = {"recovery/seconds": event.seconds}
            if event.lost_steps >= 0:
                found["recovery/lost_steps"] = float(event.lost_steps)
            return found
        case MembershipChanged():
            return {"recovery/members": float(event.after)}
        case GradientsCoded():
            return {
                "certificate/error": max(event.errors, default=0.0),
                "certificate/lost_chunks": float(sum(event.lost)),
                "certificate/stragglers": float(sum(map(len, event.stragglers))),
            }
        case _:
            return {}


def notes(event: Event) -> dict[str, str]:
    """Texts of `event` for a person to read, as ``{name: text}``; the last one counts."""
    match event:
        case AttemptStarted():
            processes = str(event.world_size)
            return {"outlast/processes": processes, "outlast/fingerprint": event.fingerprint}
        case AttemptEnded():
            reason = f" ({event.reason})" if event.reason else ""
            return {"outlast/outcome": event.outcome + reason}
        case StopRequested():
            return {"outlast/stop": f"step {event.step}: {event.reason}"}
        case CorruptionDetected():
            where = f"{event.operation} of {event.module} on rank {event.found_on}"
            return {"outlast/wrong_numbers": f"step {event.step}: {where}: {event.outcome}"}
        case MemberLost() | StateRecovered() | MembershipChanged():
            return {f"outlast/{event.kind}": recovery_words(event)}
        case CheckpointFailed():
            return {"outlast/failed_checkpoint": f"step {event.step}: {event.reason}"}
        case _:
            return {}


_NAME_TAG = "outlast.run"
_LONGEST_TEXT = 500
_STATUS = {
    "completed": "FINISHED",
    "left": "FINISHED",
    "failed": "FAILED",
    "to_be_continued": "SCHEDULED",
}


@contextlib.contextmanager
def _package(setting: str, extra: str, otherwise: str) -> Iterator[None]:
    """Raise OutlastError where an import fails: `setting` needs the `extra` of this package."""
    try:
        yield
    except ImportError as error:
        raise OutlastError(
            f"{setting} needs a package that is missing ({error}); "
            f"pip install 'outlast[{extra}]', or {otherwise}"
        ) from None


class MlflowSink:
    """Sends curves, settings and notes to an MLflow experiment (extra ``mlflow``).

    Args:
        experiment: Its name; made if there is none.
        uri: Where MLflow keeps it: a server's URL, ``sqlite:///FILE`` or a folder; None: what
            MLFLOW_TRACKING_URI says, or MLflow's own default.
        name: Of the run; attempts with one name continue with one MLflow run.
        config: The settings, by section.
        counts: Faults of earlier attempts; see `Curves`.

    Raises:
        OutlastError: When MLflow is missing or its store cannot be reached.
    """

    def __init__(
        self,
        experiment: str,
        uri: str | None,
        name: str,
        config: Mapping[str, Any],
        counts: Mapping[str, int] | None = None,
    ) -> None:
        setting = f'log.mlflow_experiment = "{experiment}"'
        with _package(setting, "mlflow", "remove log.mlflow_experiment"):
            from mlflow.entities import Metric, Param, RunTag
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        self._metric, self._tag = Metric, RunTag
        self._curves = Curves(counts)
        try:
            self._client: Any = MlflowClient(tracking_uri=uri)
            if found := self._client.get_experiment_by_name(experiment):
                number = str(found.experiment_id)
            else:
                number = str(self._client.create_experiment(experiment))
            earlier = self._client.search_runs([number], f"tags.`{_NAME_TAG}` = '{name}'")
            if earlier:
                self._run = earlier[0].info.run_id
                self._client.set_terminated(self._run, "RUNNING")
                return
            tags = {_NAME_TAG: name}
            self._run = self._client.create_run(number, tags=tags, run_name=name).info.run_id
            settings = [
                Param(f"{section}.{key}", str(value)[:_LONGEST_TEXT])
                for section, values in config.items()
                if isinstance(values, dict)
                for key, value in values.items()
                if value is not None
            ]
            self._client.log_batch(self._run, params=settings)
        except (MlflowException, OSError) as error:
            raise OutlastError(
                f'{setting} does not work with log.mlflow_uri = "{uri or ""}" ({error}); give the '
                "URL of a server that runs or sqlite:///FILE, or remove log.mlflow_experiment"
            ) from None

    def write(self, event: Event) -> None:
        """Log the curves and notes of the event at its step."""
        now, step = int(1000 * time.time()), getattr(event, "step", 0)
        points = [
            # Names of a loop's own figures may hold what MLflow takes in none.
            self._metric(re.sub(r"[^\w\-. :/]", "_", name), value, now, step)
            for name, value in self._curves.points(event).items()
        ]
        words = [self._tag(name, text[:_LONGEST_TEXT]) for name, text in notes(event).items()]
        if points or words:
            self._client.log_batch(self._run, metrics=points, tags=words)
        if isinstance(event, AttemptEnded):
            self._client.set_terminated(self._run, _STATUS.get(event.outcome, "FAILED"))

    def close(self) -> None:
        """All is written already."""


class TensorBoardSink:
    """Writes curves and notes as TensorBoard event files (extra ``tensorboard``)."""

    def __init__(self, directory: Path, counts: Mapping[str, int] | None = None) -> None:
        with _package("log.tensorboard = true", "tensorboard", "set log.tensorboard = false"):
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.plugins.text.summary_v2 import text_pb
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        self._event, self._summary, self._text = event_pb2.Event, summary_pb2.Summary, text_pb
        self._writer = EventFileWriter(str(directory))
        self._curves = Curves(counts)

    def write(self, event: Event) -> None:
        """Add one point to every curve of the event, and its words as text."""
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in self._curves.points(event).items()
        ]
        for name, words in notes(event).items():
            values += self._text(name, words).value
        if values:
            summary = self._summary(value=values)
            step = getattr(event, "step", 0)
            self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class TrackioSink:
    """Sends the curves to a trackio project (extra ``trackio``).

    trackio keeps it below TRACKIO_DIR, or its own default folder.
    """

    def __init__(
        self,
        project: str,
        name: str,
        config: Mapping[str, Any],
        counts: Mapping[str, int] | None = None,
    ) -> None:
        setting = f'log.trackio_project = "{project}"'
        with _package(setting, "trackio", "remove log.trackio_project"):
            import trackio
        settings = dict(config)
        # With one name, all attempts of a run are one curve.
        try:
            self._run: Any = trackio.init(
                project=project, name=name, config=settings, resume="allow"
            )
        except Exception as error:  # of the network, the disk, or trackio's own kinds
            raise OutlastError(
                f"{setting} does not work ({error}); set TRACKIO_DIR to a folder that can be "
                "written, or remove log.trackio_project"
            ) from None
        self._curves = Curves(counts)

    def write(self, event: Event) -> None:
        """Log the curves and notes of the event at its step."""
        if found := {**self._curves.points(event), **notes(event)}:
            self._run.log(found, step=getattr(event, "step", 0))

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()


class WandbSink:
    """Sends the curves to a Weights & Biases project (extra ``wandb``); notes are its summary."""

    def __init__(
        self,
        project: str,
        name: str,
        config: Mapping[str, Any],
        directory: Path,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        setting = f'log.wandb_project = "{project}"'
        with _package(setting, "wandb", "remove log.wandb_project"):
            import wandb
        # The same id on every start makes one curve out of all attempts of a run.
        run: dict[str, Any] = {"project": project, "name": name, "id": name, "config": dict(config)}
        try:
            self._run = wandb.init(**run, resume="allow", dir=str(directory))
        except wandb.Error as error:
            raise OutlastError(
                f"{setting} does not work ({error}); run `wandb login`, set the environment "
                "variable WANDB_MODE=offline, or remove log.wandb_project"
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


class SinkSettings(Protocol):
    """Settings of sinks in [log].

    Attributes:
        tensorboard: Whether to write TensorBoard files.
        wandb_project: Project of Weights & Biases; None: none.
        mlflow_experiment: Experiment of MLflow; None: none.
        mlflow_uri: MLflow's tracking URI; None: MLflow's own default.
        trackio_project: Project of trackio; None: none.
    """

    tensorboard: bool
    wandb_project: str | None
    mlflow_experiment: str | None
    mlflow_uri: str | None
    trackio_project: str | None


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
    trackers = settings.wandb_project, settings.mlflow_experiment, settings.trackio_project
    if not (settings.tensorboard or any(trackers)):
        return []
    counts = counted_in(record.event for record in read_run(directory.path).records)
    sinks: list[Sink] = []
    if settings.tensorboard:
        sinks.append(TensorBoardSink(directory.tensorboard, counts))
    if project := settings.wandb_project:
        sinks.append(WandbSink(project, name, config, directory.path, counts))
    if experiment := settings.mlflow_experiment:
        sinks.append(MlflowSink(experiment, settings.mlflow_uri, name, config, counts))
    if project := settings.trackio_project:
        sinks.append(TrackioSink(project, name, config, counts))
    return sinks
