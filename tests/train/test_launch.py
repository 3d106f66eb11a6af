"""Four ways to start a run give the same run: alone, --nproc, torchrun and srun."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import start_process
from tiny import losses, tiny_job

from outlast.distributed.ranks import ALONE
from outlast.errors import EXIT_DONE, EXIT_TO_BE_CONTINUED, CheckpointError, OutlastError
from outlast.job import Job, to_toml
from outlast.records import AttemptStarted, RunDirectory, StepsDone, read_run
from outlast.train import launch
from outlast.train import run as train_run
from outlast.train.export import load_trained
from outlast.train.loop import Trainer
from outlast.train.run import Start, run_directory, work

# Training loss (nats) between one and two processes; measured: see docs/train.md.
TOLERANCE = 2e-5
SLURM_SCRIPT = Path(__file__).parents[1] / "tools" / "slurm_local.sh"
OUTLAST = [sys.executable, "-m", "outlast", "train"]


def job_file(job: Job, folder: Path) -> str:
    file = folder / f"{job.run.name}.toml"
    file.write_text(to_toml(job))
    return str(file)


def run(command: list[str], environment: dict[str, str] | None = None) -> int:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=environment
    )
    print(done.stdout, done.stderr)
    return done.returncode


def launched_by(job: Job) -> tuple[str, int]:
    [(_, event)] = read_run(run_directory(job).path).of(AttemptStarted)
    return event.launch, event.world_size


def final_weights(job: Job) -> dict[str, torch.Tensor]:
    model, _ = load_trained(job, run_directory(job))
    return dict(model.state_dict())


@pytest.fixture(scope="module")
def nproc_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Job]:
    """The run that all others are compared with: two processes by --nproc."""
    folder = tmp_path_factory.mktemp("launch")
    job = tiny_job(folder, "nproc")
    assert run([*OUTLAST, job_file(job, folder), "--nproc", "2"]) == EXIT_DONE
    assert launched_by(job) == ("nproc", 2)
    return folder, job


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A real Slurm with two virtual nodes on this machine."""
    missing = [name for name in ("slurmctld", "slurmd", "srun", "munged") if not shutil.which(name)]
    if missing:
        pytest.skip(f"Slurm is not installed ({', '.join(missing)}); .ci/run installs it")
    if os.geteuid() != 0:
        pytest.skip("the test's own Slurm must be started by root")
    root = Path("/tmp") / f"outlast-slurm-{os.getpid()}"
    environment = {"SLURM_LOCAL_ROOT": str(root), "BASEPORT": "17400", "GPUS": "0"}
    command = [str(SLURM_SCRIPT), "up", "2"]
    subprocess.run(command, env={**os.environ, **environment}, check=True, timeout=60)
    try:
        yield {"SLURM_CONF": str(root / "slurm.conf")}
    finally:
        down = [str(SLURM_SCRIPT), "down"]
        subprocess.run(down, env={**os.environ, **environment}, check=False, timeout=60)
        shutil.rmtree(root, ignore_errors=True)


def assert_same_run(job: Job, other: Job) -> None:
    assert losses(job) == losses(other)
    weights, expected = final_weights(job), final_weights(other)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.distributed
def test_alone_gives_the_same_run(nproc_run: tuple[Path, Job]) -> None:
    folder, reference = nproc_run
    job = tiny_job(folder, "alone")
    assert run([*OUTLAST, job_file(job, folder)]) == EXIT_DONE
    assert launched_by(job) == ("alone", 1)
    assert losses(job) == pytest.approx(losses(reference), abs=TOLERANCE)


@pytest.mark.distributed
def test_torchrun_gives_the_same_run(nproc_run: tuple[Path, Job]) -> None:
    folder, reference = nproc_run
    job = tiny_job(folder, "torchrun")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    assert run([*torchrun, "-m", "outlast", "train", job_file(job, folder)]) == EXIT_DONE
    assert launched_by(job) == ("torchrun", 2)
    assert_same_run(job, reference)


@pytest.mark.slurm
def test_srun_gives_the_same_run(nproc_run: tuple[Path, Job], slurm: dict[str, str]) -> None:
    folder, reference = nproc_run
    job = tiny_job(folder, "srun")
    # Another working directory must not change the run either.
    srun = ["srun", "--nodes=2", "--ntasks=2", f"--chdir={folder}"]
    assert run([*srun, *OUTLAST, job_file(job, folder)], slurm) == EXIT_DONE
    assert launched_by(job) == ("srun", 2)
    assert_same_run(job, reference)


@pytest.mark.slurm
def test_a_batch_job_that_is_warned_goes_on_in_the_next(
    tmp_path: Path, slurm: dict[str, str]
) -> None:
    """Slurm sends SIGUSR1 to the step; the batch script sees exit code 3, the next job resumes."""
    long = ("train.steps=100000", "checkpoint.every_steps=0")
    job = tiny_job(tmp_path, "batch", *long)
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash\n"
        f"srun --ntasks=2 {' '.join(OUTLAST)} {job_file(job, tmp_path)}\n"
        f"echo $? > {tmp_path}/code\n"
    )
    environment = {**os.environ, **slurm, "OMP_NUM_THREADS": "1"}
    submit = ["sbatch", "--parsable", "--nodes=2", "--ntasks=2", f"--output={tmp_path}/log", script]
    for _ in range(2):
        (tmp_path / "code").unlink(missing_ok=True)
        before = _last_step(job)
        identity = subprocess.run(
            submit, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()
        _wait(lambda before=before: _last_step(job) >= before + 5, tmp_path)
        cancel = ["scancel", "--signal=USR1", identity]
        subprocess.run(cancel, env=environment, check=True)
        _wait(lambda: (tmp_path / "code").exists(), tmp_path)
        assert int((tmp_path / "code").read_text()) == EXIT_TO_BE_CONTINUED
    first, second = read_run(run_directory(job).path).attempts
    assert first.outcome == second.outcome == "to_be_continued"
    assert second.first_step is not None
    assert second.first_step >= 5


def _last_step(job: Job) -> int:
    try:
        done = read_run(run_directory(job).path).of(StepsDone)
    except Exception:  # the run has not begun
        return 0
    return done[-1][1].step if done else 0


def _wait(condition: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + 120.0
    while not condition():
        log = folder / "log"
        said = log.read_text() if log.exists() else ""
        assert time.monotonic() < deadline, f"not in 120 s; the job said:\n{said}"
        time.sleep(0.1)


@pytest.mark.distributed
def test_the_launcher_hands_signals_on(tmp_path: Path) -> None:
    long = ("train.steps=100000", "checkpoint.every_steps=0")
    job = tiny_job(tmp_path, "handed", *long)
    process = start_process(job, tmp_path, "--nproc", "2")
    _wait(lambda: _last_step(job) >= 5, tmp_path)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == EXIT_TO_BE_CONTINUED, output
    assert read_run(run_directory(job).path).attempts[-1].outcome == "to_be_continued"


@pytest.mark.distributed
def test_what_another_rank_finds_wrong_is_the_group_s_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Trainer.run

    def fails(trainer: Trainer, *arguments: Any) -> Any:
        outcome = run(trainer, *arguments)
        if trainer.runtime.ranks.rank == 1:
            raise CheckpointError("its part could not be saved")
        return outcome

    monkeypatch.setattr(Trainer, "run", fails)
    job = tiny_job(tmp_path, "parts", "train.steps=2", "launch.nproc=2", "export.huggingface=false")
    process = start_process(job, tmp_path)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert "its part could not be saved" in output


@pytest.mark.distributed
def test_a_directory_without_a_run_is_deleted_under_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []
    remove = train_run.remove_unused

    def watched(directory: RunDirectory, *, with_parent: bool) -> None:
        held.append(directory.lock().is_held())
        remove(directory, with_parent=with_parent)

    monkeypatch.setattr(train_run, "remove_unused", watched)
    settings = ("data.sequence_length=30000", "model.settings.max_position_embeddings=40000")
    job = tiny_job(tmp_path, "late", *settings)
    with pytest.raises(OutlastError, match="too few for one sample"):
        work(Start(job), ALONE)
    assert held == [True]
    folder = run_directory(job).path
    assert not [*folder.parent.glob("*late*")]


@pytest.mark.distributed
def test_a_wrong_input_that_rank_0_finds_late_ends_all_ranks_with_its_sentence(
    tmp_path: Path,
) -> None:
    settings = ("data.sequence_length=30000", "model.settings.max_position_embeddings=40000")
    job = tiny_job(tmp_path, "late", *settings)
    begun = time.monotonic()
    process = start_process(job, tmp_path, "--nproc", "2")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert "too few for one sample of data.sequence_length = 30000" in output
    assert "Traceback" not in output
    assert time.monotonic() - begun < 60


def test_a_process_that_dies_is_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    with launch._failures_told(tmp_path / "failures.log"):
        logger.warning("Sending process 4711 closing signal SIGTERM")
        try:
            raise RuntimeError("Connection closed by peer")
        except RuntimeError:
            logger.exception("failed (exitcode: 1) local_rank: 0")
    said = capsys.readouterr().err
    assert "closing signal" not in said
    assert said.count("\n") == 1
    assert "a process failed: RuntimeError: Connection closed by peer (all of it: " in said
    kept = (tmp_path / "failures.log").read_text()
    assert "Traceback" in kept
    assert "local_rank: 0" in kept


def test_what_cannot_be_kept_is_left_to_torch(tmp_path: Path) -> None:
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    with launch._failures_told(tmp_path / "missing" / "failures.log"):
        [told] = logger.filters
        assert told(logging.makeLogRecord({"levelno": logging.ERROR, "msg": "failed"}))
    assert not logger.filters
