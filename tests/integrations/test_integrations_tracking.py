"""All trackers get the same curves and notes, and can be read back from their own files."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from outlast.errors import OutlastError
from outlast.job import LoopJob, job_from_text, loop_job_from_text
from outlast.records import (
    AttemptEnded,
    AttemptStarted,
    CheckpointFailed,
    CheckpointRestored,
    CheckpointSaved,
    CorruptionDetected,
    EnergyMeasured,
    GradientsCoded,
    Guarded,
    MemberLost,
    MembershipChanged,
    RecordWriter,
    RunDirectory,
    StateRecovered,
    StepsDone,
    StopRequested,
    TrainingStarted,
    open_sinks,
)

BLOCK_BYTES, WHOLE, LAST = 32768, 1, 4

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from outlast.records import Event

DEVICE = {"name": "cpu", "part": "cpu", "host": "h", "joules": 60.0}
FIRST: list[Event] = [
    AttemptStarted("f00d", 4, "torchrun", {}, {}, {}, 40, 8, 64, 100, 600.0),
    TrainingStarted(0, 3.5, {"imports": 3.0}),
    StepsDone(10, 10, 2.5, 0.75, 1e-3, 640, [0.1] * 10, {"compute": 1.0}),
    EnergyMeasured(10, 10, 640, 3.0, [DEVICE], {}),
    CheckpointSaved(10, 0.1, 0.2, 1000),
    CheckpointFailed(12, "the disk is full"),
    CorruptionDetected(13, "layers.0", "linear.forward", "cpu", 2, 1, 40.0, "corrected"),
    CorruptionDetected(14, "layers.1", "weight", "cpu", 1, 1, float("inf"), "persistent"),
    Guarded(14, "linear", 500, 0.25, {}, 4, {}),
    GradientsCoded(15, "cyclic", 4, [[1], []], [0, 0], [0, 0], [1, 0], [0.5, 0.0], [0.1], [0.2]),
    MemberLost(16, "rank 3", "dead", 1.0),
    StateRecovered(16, "peer", 0.5, 1, 4096),
    MembershipChanged(17, 4, 3, "lost", 0.75),
    StopRequested(20, "SIGTERM"),
    AttemptEnded(20, "to_be_continued", "SIGTERM", {}),
]
SECOND: list[Event] = [
    CheckpointRestored(20, 0.3, []),
    # Done again, at a smaller step than the last one.
    CorruptionDetected(13, "layers.0", "linear.forward", "cpu", 2, 1, 41.0, "repeated"),
    StepsDone(30, 10, 2.0, 0.5, 1e-3, 1920, [0.1] * 10, {"compute": 1.0}),
    AttemptEnded(30, "completed", "", {}),
]
POINTS = {
    ("train/loss_nats", 10): 2.5,
    ("train/loss_nats", 30): 2.0,
    ("time/until_ready_seconds", 0): 3.5,
    ("energy/joules", 10): 60.0,
    ("energy/watts", 10): 20.0,
    ("energy/joules_per_token", 10): 0.09375,
    ("checkpoint/bytes", 10): 1000.0,
    ("checkpoint/restore_seconds", 20): 0.3,
    ("faults/failed_checkpoints", 12): 1.0,
    ("faults/wrong_numbers_sigmas", 13): 40.0,
    ("faults/wrong_numbers", 14): 2.0,
    ("faults/not_put_right", 14): 1.0,
    ("guard/checks", 14): 500.0,
    ("certificate/error", 15): 0.5,
    ("certificate/lost_chunks", 15): 1.0,
    ("certificate/stragglers", 15): 1.0,
    ("faults/members_lost", 16): 1.0,
    ("faults/restarts", 16): 1.0,
    ("faults/restarts", 20): 2.0,
    ("recovery/lost_steps", 16): 1.0,
    ("recovery/members", 17): 3.0,
}
"""Some of the points; of a curve with several at one step, the first."""
AGAIN = ("faults/wrong_numbers", 13)
"""Has points of both attempts: 1, then 3."""
NOTES = {
    "outlast/processes": "4",
    "outlast/outcome": "completed",
    "outlast/stop": "step 20: SIGTERM",
    "outlast/wrong_numbers": "step 13: linear.forward of layers.0 on rank 2: repeated",
    "outlast/member_lost": "step 16: rank 3 dead",
    "outlast/membership_changed": "step 17: 3 in the place of 4 (lost), 0.75 s without a step",
}


def record(folder: Path, setting: str) -> RunDirectory:
    """Both attempts of a run, recorded as a loop's recording does it."""
    directory = RunDirectory(folder / "run")
    job = loop_job_from_text(f'[run]\nname = "run"\n[log]\n{setting}\n')
    for events in (FIRST, SECOND):
        directory.path.mkdir(exist_ok=True)
        directory.create("")
        sinks = open_sinks(job.log, directory, "run-f00d", job.model_dump())
        (sink,) = sinks
        writer = RecordWriter(directory.path, 0, directory.next_attempt(), sinks)
        for event in events:
            writer.write(event)
        assert sink in writer._sinks, "the tracker has failed and was left out"
        writer.close()
    text = (directory.path / "events.jsonl").read_text()
    assert '"warned"' not in text, text
    return directory


def assert_points(points: dict[tuple[str, int], list[float]]) -> None:
    assert {key: points[key][0] for key in POINTS} == pytest.approx(POINTS)
    assert points[AGAIN] == [1.0, 3.0]
    assert ("faults/wrong_numbers_sigmas", 14) not in points, "an exact check has no size"


def test_tensorboard_has_all_curves_and_notes(tmp_path: Path) -> None:
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    directory = record(tmp_path, "tensorboard = true")
    accumulator = module.EventAccumulator(str(directory.tensorboard), purge_orphaned_data=False)
    accumulator.Reload()
    points: dict[tuple[str, int], list[float]] = {}
    for name in accumulator.Tags()["scalars"]:
        for each in accumulator.Scalars(name):
            points.setdefault((name, each.step), []).append(each.value)
    assert_points(points)
    texts = {
        name: accumulator.Tensors(name)[-1].tensor_proto.string_val[0].decode() for name in NOTES
    }
    assert texts == NOTES


def test_mlflow_has_all_curves_notes_and_settings_in_one_run(tmp_path: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking", reason="mlflow is not installed")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    record(tmp_path, f'mlflow_experiment = "experiment"\nmlflow_uri = "{uri}"')
    client = tracking.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("experiment")
    (run,) = client.search_runs([experiment.experiment_id])
    points: dict[tuple[str, int], list[float]] = {}
    for name in run.data.metrics:
        for each in sorted(client.get_metric_history(run.info.run_id, name), key=_when):
            points.setdefault((name, each.step), []).append(each.value)
    assert_points(points)
    assert {name: run.data.tags[name] for name in NOTES} == NOTES
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run-f00d"
    assert run.data.params["log.every_steps"] == "10"
    assert "checkpoint.keep" in run.data.params


def _when(point: Any) -> tuple[int, float]:
    return point.timestamp, point.value


def test_trackio_has_all_curves_and_notes_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="trackio is not installed")
    from trackio.sqlite_storage import SQLiteStorage

    record(tmp_path, 'trackio_project = "project"')
    assert SQLiteStorage.get_runs("project") == ["run-f00d"]
    points: dict[tuple[str, int], list[float]] = {}
    words: dict[str, str] = {}
    for log in SQLiteStorage.get_logs("project", "run-f00d"):
        for name, value in log.items():
            if isinstance(value, int | float) and name not in ("step", "timestamp"):
                points.setdefault((name, log["step"]), []).append(float(value))
            elif name.startswith("outlast/"):
                words[name] = value
    assert_points(points)
    assert {name: words[name] for name in NOTES} == NOTES


@pytest.mark.slow
def test_wandb_has_all_curves_and_notes_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    directory = record(tmp_path, 'wandb_project = "project"')
    # Its own process writes the files, and has done so when it has ended.
    wandb.teardown()
    points: dict[tuple[str, int], list[float]] = {}
    words: dict[str, str] = {}
    files = sorted(directory.path.glob("wandb/offline-run-*/run-run-f00d.wandb"))
    assert files
    for file in files:
        for data in wandb_records(file.read_bytes()):
            content = wandb_internal_pb2.Record()
            content.ParseFromString(data)
            row = {
                "/".join(each.nested_key) or each.key: json.loads(each.value_json)
                for each in content.history.item
            }
            for name, value in row.items():
                points.setdefault((name, row.get("step", -1)), []).append(value)
            words |= {each.key: json.loads(each.value_json) for each in content.summary.update}
    assert_points(points)
    assert {name: words[name] for name in NOTES} == NOTES


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records of an offline run: LevelDB's log format, behind a header of seven bytes."""
    position, whole = 7, b""
    while position + 7 <= len(content):
        if (left := BLOCK_BYTES - position % BLOCK_BYTES) < 7:
            position += left
            continue
        length = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        whole += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (WHOLE, LAST):
            yield whole
            whole = b""


@pytest.mark.parametrize(
    ("setting", "package", "extra"),
    [
        ('mlflow_experiment = "e"', "mlflow", "outlast[mlflow]"),
        ('trackio_project = "p"', "trackio", "outlast[trackio]"),
    ],
)
def test_a_missing_tracker_is_said_with_the_remedy(
    setting: str, package: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [each for each in sys.modules if each.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    directory = RunDirectory(tmp_path)
    directory.create("")
    job = loop_job_from_text(f"[log]\n{setting}\n")
    with pytest.raises(OutlastError, match="needs a package that is missing") as caught:
        open_sinks(job.log, directory, "run", job.model_dump())
    assert f"pip install '{extra}'" in str(caught.value)


def test_an_mlflow_store_that_cannot_be_opened_is_refused_with_the_setting(tmp_path: Path) -> None:
    pytest.importorskip("mlflow.tracking", reason="mlflow is not installed")
    directory = RunDirectory(tmp_path)
    directory.create("")
    job = loop_job_from_text('[log]\nmlflow_experiment = "e"\nmlflow_uri = "nonsense://there"\n')
    with pytest.raises(OutlastError, match=r'log\.mlflow_uri = "nonsense://there"'):
        open_sinks(job.log, directory, "run", job.model_dump())


def test_no_tracker_is_asked_for_by_default(tmp_path: Path) -> None:
    assert open_sinks(LoopJob().log, RunDirectory(tmp_path), "run", {}) == []


def test_outlast_train_and_loops_have_the_same_settings() -> None:
    text = '[log]\nmlflow_experiment = "e"\nmlflow_uri = "sqlite:///f"\ntrackio_project = "p"\n'
    whole = job_from_text(f'{text}[model]\nconfig = "config.json"\n')
    assert whole.log == loop_job_from_text(text).log
