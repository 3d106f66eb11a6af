"""`outlast train` on storage that is away at the first save, and comes back or does not."""

import os
from pathlib import Path

import pytest
from runs import start_process
from tiny import tiny_job

from outlast.checkpoint import list_versions, storage_of
from outlast.errors import CheckpointError
from outlast.job import Job
from outlast.records import CheckpointFailed, CheckpointSaved, Event, RecordWriter, read_run
from outlast.report import write_report
from outlast.train.run import Start, run_directory, work_alone


def on_first_failure(patch: pytest.MonkeyPatch, what: object) -> None:
    """Do something when a failed save is recorded for the first time."""
    pending, write = [what], RecordWriter.write

    def record(self: RecordWriter, event: Event) -> None:
        write(self, event)
        if isinstance(event, CheckpointFailed) and pending:
            pending.pop()()  # type: ignore[operator]

    patch.setattr(RecordWriter, "write", record)


def steps(job: Job, kind: type[CheckpointFailed] | type[CheckpointSaved]) -> list[int]:
    return [event.step for _, event in read_run(run_directory(job).path).of(kind)]


def test_storage_that_stays_away_is_an_error_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "mount").write_text("no directory")
    job = tiny_job(tmp_path, "away", f'checkpoint.fast="{tmp_path}/mount/fast"')
    process = start_process(job, tmp_path)
    said, _ = process.communicate(timeout=120)
    assert process.returncode not in (0, 3), said
    run = read_run(run_directory(job).path)
    assert len(run.losses()) == job.train.steps
    assert steps(job, CheckpointFailed) == [2, 4, 6]
    assert "warning: the checkpoint of step 2" in said
    assert "cannot be made" in said
    assert "no save of this start has succeeded" in said
    assert "Traceback" not in said
    page = tmp_path / "report.html"
    write_report([run_directory(job).path], page)
    assert "the checkpoint of step 2" in page.read_text()


def test_storage_that_comes_back_is_saved_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = tmp_path / "mount"
    mount.write_text("no directory")
    job = tiny_job(tmp_path, "back", f'checkpoint.fast="{mount}/fast"')
    on_first_failure(monkeypatch, mount.unlink)
    with pytest.warns(UserWarning, match="the checkpoint of step 2 .*training continues"):
        assert work_alone(Start(job)) == 0
    assert steps(job, CheckpointFailed) == [2]
    assert steps(job, CheckpointSaved) == [4, 6]
    kept = list_versions(storage_of(run_directory(job).checkpoints))
    assert [version.step for version in kept] == [6]


def test_a_run_that_has_saved_before_says_from_where_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tiny_job(tmp_path, "later")
    write, place = RecordWriter.write, run_directory(job).checkpoints

    def record(self: RecordWriter, event: Event) -> None:
        write(self, event)
        if isinstance(event, CheckpointSaved) and event.step == 2:
            place.rename(place.with_name("gone"))
            place.write_text("in the way")

    monkeypatch.setattr(RecordWriter, "write", record)
    with pytest.raises(CheckpointError, match="the run can continue from its checkpoint of step 2"):
        work_alone(Start(job))


@pytest.mark.slow
def test_an_object_store_that_refuses_connections_is_saved_to_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    from contextlib import ExitStack

    from s3_server import s3_server

    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with ExitStack() as server:
        place = server.enter_context(s3_server("trained"))
        endpoint = os.environ["AWS_ENDPOINT_URL"]
        job = tiny_job(tmp_path, "s3", f'checkpoint.fast="{place}/fast"')
        write, port = RecordWriter.write, int(endpoint.rpartition(":")[2])
        told = []

        def record(self: RecordWriter, event: Event) -> None:
            write(self, event)
            told.append(type(event).__name__)
            if told.count("StepsDone") == 1 and told[-1] == "StepsDone":
                server.close()
            elif told.count("CheckpointFailed") == 1 and told[-1] == "CheckpointFailed":
                server.enter_context(s3_server("trained", port))

        monkeypatch.setattr(RecordWriter, "write", record)
        with pytest.warns(UserWarning, match="the checkpoint of step 2 .*training continues"):
            assert work_alone(Start(job)) == 0
        assert steps(job, CheckpointFailed) == [2]
        assert steps(job, CheckpointSaved) == [4, 6]
    assert not Path("s3:").exists()
