"""`outlast train recover.mode=live`: replica groups that die and return while the run continues."""

import os
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from runs import Forked, finish, load_torchft, start_process
from tiny import evaluations, losses, tiny_job, train

from outlast.cli.train import run_job
from outlast.errors import RecoverError
from outlast.job import Job
from outlast.records import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    MemberLost,
    MembershipChanged,
    StateRecovered,
    StepsDone,
    read_run,
)
from outlast.recover.live import require_torchft
from outlast.train.run import run_directory

DEADLINE_SECONDS = 150.0
LIVE = (
    'recover.mode="live"',
    "launch.nproc=2",
    "launch.timeout_seconds=60",
    # A loaded machine lets heartbeats wait; who was wrongly dropped would only heal.
    "recover.heartbeat_seconds=4",
)


@pytest.fixture(autouse=True)
def _torchft() -> None:
    load_torchft()


def _wait(process: Forked, done: Callable[[], bool], story: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not done():
        assert time.monotonic() < deadline, f"it takes too long: {story()}"
        if process.poll() is not None:
            assert done(), f"ended early:\n{process.said()}"
            return
        time.sleep(0.05)


def _step(job: Job) -> int:
    try:
        return read_run(run_directory(job).path).of(StepsDone)[-1][1].step
    except Exception:  # nothing is there yet
        return 0


def _groups(process: Forked) -> list[psutil.Process]:
    """The processes of the groups, in the order in which they were started."""
    launcher = psutil.Process(process.pid)
    forked = [each for each in launcher.children() if each.cmdline() == launcher.cmdline()]
    return sorted(forked, key=lambda each: (each.create_time(), each.pid))


def _assert_like_reference(folder: Path, job: Job) -> None:
    """Every step of the run is recorded once, with the loss of an undisturbed run."""
    recorded = read_run(run_directory(job).path).of(StepsDone)
    steps = [event.step for _, event in recorded]
    assert steps == list(range(1, len(steps) + 1))
    plain = job.model_dump()["train"]["steps"]
    settings = [f"train.steps={plain}", f"train.stop_after_steps={len(steps)}"]
    reference = tiny_job(folder, "reference", *settings, "checkpoint.every_steps=100000")
    train(reference, 1)
    assert losses(job) == pytest.approx(losses(reference), rel=1e-4)


@pytest.mark.smoke
@pytest.mark.distributed
def test_groups_train_as_one_process_does(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "live", *LIVE)
    assert finish(start_process(job, tmp_path))[0] == 0
    reference = tiny_job(tmp_path, "reference")
    train(reference, 1)
    assert losses(job) == pytest.approx(losses(reference), rel=1e-4)
    assert evaluations(job) == pytest.approx(evaluations(reference), rel=1e-4)
    run = read_run(run_directory(job).path)
    ((_, started),) = run.of(AttemptStarted)
    assert (started.world_size, started.parallel["replicate"]) == (2, 2)
    saved = [event.step for _, event in run.of(CheckpointSaved)]
    assert saved == [2, 4, 6]


@pytest.mark.distributed
def test_a_run_that_died_after_its_last_step_is_brought_to_its_end(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "live", *LIVE)
    assert finish(start_process(job, tmp_path))[0] == 0
    log = run_directory(job).path / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if '"attempt_ended"' not in line))
    assert finish(start_process(job, tmp_path))[0] == 0
    ((record, ended),) = read_run(run_directory(job).path).of(AttemptEnded)
    assert (record.attempt, ended.step, ended.outcome) == (2, 6, "completed")


@pytest.mark.distributed
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_group_returns_while_the_other_goes_on(victim: int, tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "live", *LIVE, "train.steps=100000", "checkpoint.every_steps=20")
    process = start_process(job, tmp_path)
    _wait(process, lambda: _step(job) >= 5)
    survivor = _groups(process)[1 - victim].pid
    _groups(process)[victim].kill()
    path = run_directory(job).path

    def returned() -> bool:
        changes = read_run(path).of(MembershipChanged)
        return [each.reason for _, each in changes][:2] == ["lost", "joined"]

    _wait(process, returned, lambda: str(read_run(path).records[-8:]))
    assert survivor in [each.pid for each in _groups(process)]
    step = _step(job)
    _wait(process, lambda: _step(job) >= step + 5)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 3, output
    run = read_run(path)
    (_, lost), *_ = run.of(MemberLost)
    assert lost.member == f"group {victim}"
    healed, *_ = [
        record.event for record in run.records if isinstance(record.event, StateRecovered)
    ]
    assert (healed.source, healed.lost_steps) == ("peer", 0)
    ((_, ended),) = run.of(AttemptEnded)
    assert run.of(CheckpointSaved)[-1][1].step == ended.step == _step(job)
    _assert_like_reference(tmp_path, job)


@pytest.mark.distributed
def test_only_the_group_that_writes_takes_turns_at_saving(tmp_path: Path) -> None:
    folder = tmp_path / "turns"
    turns = (f'checkpoint.turns="{folder}"', "checkpoint.turn_seconds=100000")
    job = tiny_job(tmp_path, "live", *LIVE, *turns, "train.steps=100000")
    process = start_process(job, tmp_path)
    path = run_directory(job).path

    def saves() -> int:
        return len(read_run(path).of(CheckpointSaved))

    try:
        # A turn that the other group had got would be kept for good.
        _wait(process, lambda: _step(job) >= 2)
        _wait(process, lambda: saves() >= 4)
        _groups(process)[0].kill()
        _wait(process, lambda: "joined" in str(read_run(path).of(MembershipChanged)))
        before = saves()
        _wait(process, lambda: saves() >= before + 4)
        process.send_signal(signal.SIGTERM)
        code, output = finish(process)
        assert code == 3, output
    finally:
        process.kill()
    assert not list(folder.glob("ticket-*"))


@pytest.mark.distributed
def test_when_all_groups_die_they_go_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "live", *LIVE, "train.steps=100000", "checkpoint.every_steps=4")
    process = start_process(job, tmp_path)
    path = run_directory(job).path
    _wait(process, lambda: _step(job) >= 9)
    for each in _groups(process):
        each.kill()
    killed_at = _step(job)
    _wait(process, lambda: _step(job) >= killed_at + 5)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 3, output
    steps = [event.step for _, event in read_run(path).of(StepsDone)]
    # Who dies right after a save loses no step.
    assert all(after % 4 == 1 for before, after in pairwise(steps) if after <= before)


@pytest.mark.distributed
def test_a_killed_launcher_leaves_no_process_behind(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "live", *LIVE, "train.steps=100000")
    process = start_process(job, tmp_path)
    _wait(process, lambda: _step(job) >= 3)
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=DEADLINE_SECONDS)
    assert alive == []
    process.communicate()


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("launch.nproc=1", "needs at least two groups"),
        ("parallel.shard=2", "parallel.shard = 2"),
        ("staging.directory=/dev/shm", "whose groups read the tokens in place"),
        ("coding.scheme=fractional_repetition", "sums over the replicas in its own way"),
        ("recover.groups=13", "gives no sample to some of the 13 groups"),
    ],
)
def test_what_live_groups_cannot_do_is_a_sentence(
    setting: str, sentence: str, tmp_path: Path
) -> None:
    require_torchft()
    job = tiny_job(tmp_path, "live", *LIVE, setting)
    with pytest.raises(RecoverError, match=sentence):
        run_job(job, fresh=False)


def test_groups_without_a_part_of_a_batch_in_fixed_order_are_refused(tmp_path: Path) -> None:
    require_torchft()
    settings = ("recover.fixed_order=true", "recover.groups=7", "train.micro_batch_size=2")
    job = tiny_job(tmp_path, "live", *LIVE, *settings)
    with pytest.raises(RecoverError, match="cuts each batch into 6 micro-batches"):
        run_job(job, fresh=False)


def test_live_groups_start_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecoverError, match="without torchrun or srun"):
        run_job(tiny_job(tmp_path, "live", *LIVE), fresh=False)
