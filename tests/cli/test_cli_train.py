"""`outlast train` as a person runs it: directories of earlier runs, locks, full disks."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import run_ranks
from tiny import losses, tiny_job

from outlast.checkpoint import list_versions, storage_of
from outlast.cli.main import main
from outlast.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_TO_BE_CONTINUED
from outlast.job import to_toml
from outlast.records import read_run
from outlast.train.run import run_directory

pytestmark = pytest.mark.distributed

HOLD = """
import sys
from pathlib import Path
from outlast.records import RunDirectory
RunDirectory(Path(sys.argv[1])).lock().acquire()
print("held", flush=True)
sys.stdin.read()
"""


def _outlast(arguments):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    sys.argv = ["outlast", *arguments]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    return code, out.getvalue(), err.getvalue()


def outlast(*arguments):
    """Run the program in a forked process; gives code, stdout and stderr."""
    [said] = run_ranks(1, _outlast, [str(each) for each in arguments])
    return said


def train(job, folder, *arguments):
    file = folder / f"{job.run.name}.toml"
    file.write_text(to_toml(job))
    return outlast("train", file, *arguments)


def refused(job, folder, *arguments):
    """The one sentence (or list) with which the job is refused."""
    code, _, err = train(job, folder, *arguments)
    assert code == EXIT_BAD_INPUT, err
    assert err.startswith("outlast: ")
    assert "Traceback" not in err
    return err.removeprefix("outlast: ")


def content(directory):
    return {
        str(file.relative_to(directory)): file.read_bytes()
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


@pytest.fixture
def stopped(tmp_path):
    """A job that was stopped after two of six steps."""
    job = tiny_job(tmp_path, "stopped", "train.stop_after_steps=2")
    code, out, err = train(job, tmp_path)
    assert code == EXIT_TO_BE_CONTINUED, err
    assert "saved at step 2; the same command continues from there" in out
    return job


@pytest.mark.smoke
def test_the_same_command_goes_on_and_shows_what_was_done(stopped, tmp_path):
    code, out, _ = train(stopped, tmp_path, "train.stop_after_steps=0")
    assert code == EXIT_DONE
    assert "restored the checkpoint of step 2" in out
    for shown in (
        "stopped: completed",
        "validation loss",
        "bits per byte",
        "6 of 6",
        "tokens/s within steps",
        "in 2 attempts",
    ):
        assert shown in out
    assert str(run_directory(stopped).report) in out.replace("\n", "").replace(" ", "")
    assert run_directory(stopped).report.exists()
    assert len(losses(stopped)) == 6


def test_a_finished_run_stays_finished(stopped, tmp_path):
    assert train(stopped, tmp_path, "train.stop_after_steps=0")[0] == EXIT_DONE
    before = losses(stopped)
    code, out, _ = train(stopped, tmp_path)
    assert code == EXIT_DONE
    assert "stopped: completed" in out
    assert losses(stopped) == before


def test_export_of_a_stopped_run(stopped, tmp_path):
    code, out, _ = outlast("export", run_directory(stopped).path, "-o", tmp_path / "exported")
    assert code == EXIT_DONE
    # Where DeepSpeed is installed, importing transformers may print a line of its own.
    assert out.splitlines()[-1] == f"wrote the model of step 2 to {tmp_path / 'exported'}"
    assert (tmp_path / "exported" / "model.safetensors").exists()
    assert outlast("export", run_directory(stopped).path)[0] == EXIT_DONE
    assert (run_directory(stopped).model / "config.json").exists()


def test_another_jobs_directory_is_refused_with_the_difference(stopped, tmp_path):
    before = content(run_directory(stopped).path)
    sentence = refused(stopped, tmp_path, "optimizer.beta1=0.5", "run.seed=6")
    assert "belongs to another job; these settings differ" in sentence
    assert "optimizer.beta1" in sentence
    assert "0.5" in sentence
    assert "run.seed" in sentence
    assert "a run may change in the middle: train.steps, train.batch_size" in sentence
    assert "--fresh" in sentence
    assert content(run_directory(stopped).path) == before


def test_fresh_moves_the_old_run_aside_and_loses_nothing(stopped, tmp_path):
    directory = run_directory(stopped).path
    before = content(directory)
    changed = ("optimizer.learning_rate=0.5", "train.stop_after_steps=1", "--fresh")
    assert train(stopped, tmp_path, *changed)[0] == EXIT_TO_BE_CONTINUED
    assert content(directory.with_name("stopped.old1")) == before
    assert [step for step, _ in read_run(directory).losses()] == [1]
    assert train(stopped, tmp_path, *changed)[0] == EXIT_TO_BE_CONTINUED
    assert content(directory.with_name("stopped.old1")) == before
    assert directory.with_name("stopped.old2").is_dir()


def test_a_job_file_in_the_run_that_cannot_be_read_is_refused(stopped, tmp_path):
    run_directory(stopped).job_file.write_text("[train\n")
    assert "cannot be read" in refused(stopped, tmp_path)


@contextlib.contextmanager
def held(directory):
    """Another live process that holds the run's lock; gives its pid."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "held\n"
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def test_a_run_in_use_by_a_live_process_is_left_alone(stopped, tmp_path):
    directory = run_directory(stopped).path
    with held(directory) as pid:
        before = content(directory)
        for more in ([], ["--fresh"]):
            sentence = refused(stopped, tmp_path, *more)
            assert f"is in use by process {pid} on host" in sentence
        assert content(directory) == before
        assert sorted(each.name for each in directory.parent.iterdir()) == [".report", "stopped"]
    # The process was killed: its lock is stale and is broken.
    assert (directory / "lock").exists()
    assert train(stopped, tmp_path, "train.stop_after_steps=0")[0] == EXIT_DONE
    assert not (directory / "lock").exists()


def test_a_lock_whose_owner_died_before_a_restart_is_broken(stopped, tmp_path):
    lock = run_directory(stopped).path / "lock"
    owner = {"host": "gone", "boot": "old", "pid": 1, "started": 0.0}
    lock.write_text(json.dumps(owner))
    assert "in use by process 1 on host gone" in refused(stopped, tmp_path)
    long_ago = time.time() - 3600
    os.utime(lock, (long_ago, long_ago))
    assert train(stopped, tmp_path, "train.stop_after_steps=0")[0] == EXIT_DONE


def test_an_empty_corpus(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    job = tiny_job(tmp_path, "empty", f'data.train=["{tmp_path}/empty.txt"]')
    assert "the corpus is empty" in refused(job, tmp_path)
    # Once there is text the same command works.
    shutil.copy(tmp_path / "corpus" / "file0.txt", tmp_path / "empty.txt")
    assert train(job, tmp_path, "train.stop_after_steps=1")[0] == EXIT_TO_BE_CONTINUED


def test_a_corpus_too_short_for_one_sample(tmp_path):
    (tmp_path / "short.txt").write_text("short\n")
    job = tiny_job(
        tmp_path, "short", f'data.train=["{tmp_path}/short.txt"]', "data.validation_fraction=0.0"
    )
    assert "too few for one sample of data.sequence_length = 16" in refused(job, tmp_path)


def test_a_module_with_wrong_arguments(tmp_path):
    job = tiny_job(tmp_path, "wrong", "model.settings={}", "model.module=collections:OrderedDict")
    assert "returned a OrderedDict, not an nn.Module" in refused(job, tmp_path)


@pytest.mark.parametrize("wrong", ["file", "below a file"])
def test_a_run_directory_that_cannot_be_made(tmp_path, wrong):
    (tmp_path / "runs").write_text("a file")
    place = tmp_path / "runs" if wrong == "file" else tmp_path / "runs" / "deeper"
    job = tiny_job(tmp_path, "impossible", f'run.directory="{place}"')
    assert "cannot be made" in refused(job, tmp_path)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 12 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(place)]
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("a small file system needs root and mount")
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(place: Path, leave_bytes: int) -> Path:
    """Fill the file system but for `leave_bytes`; gives the file that does it."""
    filler = place / "filler"
    free = os.statvfs(place)
    with filler.open("wb") as file:
        file.write(bytes(max(free.f_bavail * free.f_frsize - leave_bytes, 0)))
    return filler


@pytest.mark.parametrize("saves", [0, 0.1, 1.2], ids=["none", "some", "one save"])
def test_a_full_disk_is_one_sentence_and_keeps_what_is_there(tmp_path, small_disk, saves):
    settings = (f'run.directory="{small_disk}"', "train.stop_after_steps=2", "checkpoint.keep=2")
    job = tiny_job(tmp_path, "full", *settings)
    assert train(job, tmp_path)[0] == EXIT_TO_BE_CONTINUED
    checkpoints = run_directory(job).checkpoints
    assert [version.step for version in list_versions(storage_of(checkpoints))] == [2]
    [version] = list_versions(storage_of(checkpoints))
    before = content(checkpoints / version.folder)
    run_directory(job).report.unlink()
    size = sum(file.stat().st_size for file in (checkpoints / version.folder).iterdir())
    filler = fill(small_disk, int(saves * size))
    sentence = refused(job, tmp_path, "train.stop_after_steps=0")
    assert len(sentence.strip().splitlines()) == 1
    assert "No space left on device" in sentence
    assert content(checkpoints / version.folder) == before
    filler.unlink()
    assert train(job, tmp_path, "train.stop_after_steps=0")[0] == EXIT_DONE
    assert losses(job)[-1] < losses(job)[0]
    assert len(losses(job)) == 6


def test_a_disk_that_is_too_full_for_the_report_or_the_export(tmp_path, small_disk):
    settings = (f'run.directory="{small_disk}"', "checkpoint.keep=1", "checkpoint.every_steps=0")
    job = tiny_job(tmp_path, "full", *settings)
    assert train(job, tmp_path)[0] == EXIT_DONE
    directory = run_directory(job)
    directory.report.unlink()
    fill(small_disk, 8_000)
    assert "No space left on device" in refused(job, tmp_path)
    assert read_run(directory.path).attempts[-1].outcome == "completed"
    code, _, err = outlast("export", directory.path)
    assert code == EXIT_BAD_INPUT
    assert "cannot be exported" in err
    assert len(err.strip().splitlines()) == 1
    assert not directory.model.exists()


def test_a_complete_run_only_shows_its_result(tmp_path, monkeypatch, capsys):
    from tiny import tiny_job

    from outlast.cli.train import run_job
    from outlast.records import read_run

    job = tiny_job(tmp_path, "complete")
    assert run_job(job, fresh=False) == 0
    attempts = len(read_run(tmp_path / "runs" / "complete").attempts)
    capsys.readouterr()
    assert run_job(job, fresh=False) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"runs/complete is complete: step {job.train.steps}, since 20" in said
    assert "anew: --fresh" in said
    assert f"longer: train.steps={2 * job.train.steps}" in said
    assert len(read_run(tmp_path / "runs" / "complete").attempts) == attempts == 1


def test_a_defect_of_the_report_does_not_make_the_run_fail(tmp_path, monkeypatch, capsys):
    from tiny import tiny_job

    from outlast import report
    from outlast.cli.train import run_job

    def broken(runs):
        raise TypeError("unhashable type")

    monkeypatch.setattr(report, "write_report", broken)
    assert run_job(tiny_job(tmp_path, "shown"), fresh=False) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "report not written, by a defect: TypeError: unhashable type" in said


def test_a_start_that_fails_in_set_up_leaves_nothing_of_its_own_and_all_of_the_users(tmp_path):
    (tmp_path / "mine").mkdir()
    for folder in ("mine", "new"):
        job = tiny_job(tmp_path, "failed", f'run.directory="{tmp_path / folder}"')
        wrong = ["data.sequence_length=100000000"]
        refused(job, tmp_path, *wrong)
    assert list((tmp_path / "mine").iterdir()) == []
    assert not (tmp_path / "new").exists()
