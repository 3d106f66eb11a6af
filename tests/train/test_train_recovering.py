"""A dead worker costs no checkpoint: a run resumes from memory, on as many processes as wished."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from runs import Forked, finish, start, start_process, wait_for_step
from tiny import assert_equal_bits, losses, tiny_job, weights

from outlast.checkpoint import CheckpointStore
from outlast.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_TO_BE_CONTINUED, RecoverError
from outlast.job import Job
from outlast.records import (
    CheckpointRestored,
    CheckpointSaved,
    MembershipChanged,
    StateRecovered,
    StepsDone,
    Warned,
    read_run,
)
from outlast.recover.phase_page import PhaseReading, arm, pages_folder, read_pages
from outlast.recover.resize import ask, is_wanted, met, wish
from outlast.recover.slot import run_folder
from outlast.runtime.memory import from_disk, kept_run
from outlast.train.run import run_directory

pytestmark = pytest.mark.distributed

NEVER_SAVES = ("train.steps=60", "checkpoint.every_steps=0")
# Training loss (nats) across numbers of processes over some hundred steps.
TOLERANCE = 1e-4


def memory_of(tmp_path: Path) -> str:
    return f'recover.memory="{tmp_path}/memory"'


KILL = ("--process-fault", "kill:step=20:rank=1")


LAYOUTS = {
    # Three and more are summed in an order that has to be settled.
    "replicas": ("launch.nproc=3", "parallel.replicate=3"),
    "shards of replicas": ("launch.nproc=4", "parallel.replicate=2", "parallel.shard=2"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_worker_costs_at_most_one_step_and_no_checkpoint(
    tmp_path: Path, layout: str
) -> None:
    settings = (*NEVER_SAVES, *LAYOUTS[layout], memory_of(tmp_path))
    whole = tiny_job(tmp_path, "whole", *settings)
    assert finish(start_process(whole, tmp_path))[0] == EXIT_DONE
    job = tiny_job(tmp_path, "killed", *settings)
    code, output = finish(start_process(job, tmp_path, *KILL))
    assert code == EXIT_DONE, output
    run = read_run(run_directory(job).path)
    [(record, recovered)] = run.of(StateRecovered)
    assert (record.attempt, recovered.source) == (2, "memory")
    # Of the last step the copy may have been under way.
    assert recovered.step in (19, 20)
    assert recovered.lost_steps == 20 - recovered.step
    assert not run.of(CheckpointRestored)
    assert_equal_bits(weights(job), weights(whole))
    # What was kept is given back.
    assert list((tmp_path / "memory").rglob("rank-*")) == []


def test_steps_that_are_done_again_are_counted_though_none_is_on_record(tmp_path: Path) -> None:
    # Pages lie in the memory, as in that of a node.
    (tmp_path / "memory").mkdir()
    rare = ("recover.every_steps=8", "log.every_steps=50", memory_of(tmp_path))
    job = tiny_job(tmp_path, "rare", *NEVER_SAVES, "launch.nproc=2", *rare)
    stop = ("--process-fault", "stop:step=10:rank=1:seconds=60")
    process = start_process(job, tmp_path, *stop, *KILL)
    try:
        stopped = wait_until_stopped(job, 1)
        # Who comes after the killed process is killed, too, before it has a state.
        arm(pages_folder(job.recover.memory, run_directory(job)), 1, "heal")
        os.kill(stopped.pid, signal.SIGCONT)
        code, output = finish(process)
    finally:
        process.kill()
    assert code == EXIT_DONE, output
    [(record, recovered)] = read_run(run_directory(job).path).of(StateRecovered)
    assert (record.attempt, recovered.step, recovered.lost_steps) == (3, 16, 4)


def wait_until_stopped(job: Job, rank: int) -> PhaseReading:
    """The page of this rank, as soon as its process is stopped."""
    directory, deadline = run_directory(job), time.monotonic() + 240.0
    while time.monotonic() < deadline:
        if (directory.path / "id").exists():
            for each in read_pages(pages_folder(job.recover.memory, directory)):
                if each.rank == rank and each.state == "stopped":
                    return each
        time.sleep(0.01)
    raise AssertionError(f"rank {rank} was not stopped in 240 s")


def test_a_rank_that_loses_its_memory_too_is_rebuilt_from_parity(tmp_path: Path) -> None:
    parity = ("recover.parity=1", 'recover.domain="process"')
    settings = (*NEVER_SAVES, "launch.nproc=3", "parallel.shard=3", memory_of(tmp_path), *parity)
    whole = tiny_job(tmp_path, "whole", *settings)
    assert finish(start_process(whole, tmp_path))[0] == EXIT_DONE
    job = tiny_job(tmp_path, "lost", *settings)
    process = start_process(job, tmp_path, "--process-fault", "stop:step=20:rank=0:seconds=60")
    wait_for_fault(job)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    (generation,) = (tmp_path / "memory").rglob("generation-*")
    for path in (*generation.glob("rank-1.*"), *generation.glob("*.1.*")):
        path.unlink()
    code, output = finish(start_process(job, tmp_path))
    assert code == EXIT_DONE, output
    run = read_run(run_directory(job).path)
    [(_, recovered)] = run.of(StateRecovered)
    assert recovered.source == "parity"
    assert recovered.step in (19, 20)
    assert_equal_bits(weights(job), weights(whole))


def test_where_nothing_is_left_the_remedy_is_one_that_every_loop_has(tmp_path: Path) -> None:
    with (
        CheckpointStore(tmp_path) as store,
        pytest.raises(RecoverError, match=r"^half is lost; .*, or anew in another directory$"),
    ):
        from_disk(store, {}, ["half is lost"])


def wait_for_fault(job: Job) -> None:
    """Wait until the first fault of a process has happened."""
    deadline = time.monotonic() + 240.0
    while not (run_directory(job).path / "faults").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_without_recovery_a_restart_goes_back_to_the_checkpoint(tmp_path: Path) -> None:
    settings = ("train.steps=60", "checkpoint.every_steps=15", "launch.nproc=2")
    job = tiny_job(tmp_path, "off", *settings, 'recover.mode="off"', memory_of(tmp_path))
    code, output = finish(start_process(job, tmp_path, *KILL))
    assert code == EXIT_DONE, output
    run = read_run(run_directory(job).path)
    assert not run.of(StateRecovered)
    assert [event.step for _, event in run.of(CheckpointRestored)] == [15]
    assert not (tmp_path / "memory").exists()


def test_a_run_that_died_after_its_last_step_is_saved_after_all(tmp_path: Path) -> None:
    settings = ("train.steps=20", "checkpoint.every_steps=0", "launch.nproc=2")
    job = tiny_job(tmp_path, "last", *settings, memory_of(tmp_path))
    first = tiny_job(tmp_path, "last", *settings, memory_of(tmp_path), "launch.restarts=0")
    # The first attempt cannot save: its checkpoints would lie below a file.
    run_directory(first).path.mkdir(parents=True)
    run_directory(first).checkpoints.write_text("in the way")
    code, output = finish(start_process(first, tmp_path))
    assert code != EXIT_DONE
    assert "checkpoints" in output
    run_directory(first).checkpoints.unlink()
    code, output = finish(start_process(job, tmp_path))
    assert code == EXIT_DONE, output
    assert [event.step for _, event in read_run(run_directory(job).path).of(CheckpointSaved)] == [
        20
    ]


def test_where_memory_is_short_training_goes_on_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path / "memory")],
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("only the superuser can mount a small tmpfs")
    try:
        job = tiny_job(tmp_path, "short", "launch.nproc=2", memory_of(tmp_path))
        code, output = finish(start_process(job, tmp_path))
        assert code == EXIT_DONE, output
    finally:
        subprocess.run(["umount", str(tmp_path / "memory")], check=True)
    warnings = [event.message for _, event in read_run(run_directory(job).path).of(Warned)]
    [found] = [each for each in warnings if "recover.memory" in each]
    assert re.search(r"two copies of the state take \d+\.\d MB .* continues from the newest", found)


def resize(run: Path, folder: Path, processes: int) -> tuple[int | None, str]:
    """What `outlast resize` ends with and says."""
    return finish(start(folder, "resize", str(run), "--nproc", str(processes)))


@pytest.mark.smoke
def test_a_run_shrinks_and_grows_without_losing_a_step(tmp_path: Path) -> None:
    # At small steps the noise of sums in another order does not grow.
    slow = ("optimizer.learning_rate=0.0001", "train.batch_size=96")
    long = ("train.steps=100000", "checkpoint.every_steps=0", *slow, memory_of(tmp_path))
    job = tiny_job(tmp_path, "resized", *long, "launch.nproc=3")
    path = run_directory(job).path
    process = start_process(job, tmp_path)
    try:
        wait_for_step(job, 3, process)
        for number, size in ((2, 1), (3, 2), (4, 4)):
            ask(path, size)
            wait_for_attempt(job, number, process)
        process.send_signal(signal.SIGTERM)
        code, output = finish(process)
    finally:
        process.kill()
    assert code == EXIT_TO_BE_CONTINUED, output
    run = read_run(path)
    assert [attempt.world_size for attempt in run.attempts] == [3, 1, 2, 4]
    changes = [event for _, event in run.of(MembershipChanged)]
    assert [(each.before, each.after, each.reason) for each in changes] == [
        (3, 1, "resized"),
        (1, 2, "resized"),
        (2, 4, "resized"),
    ]
    assert len(run.of(StateRecovered)) == 3
    assert not run.of(CheckpointRestored)
    steps = [step for step, _ in run.losses()]
    assert steps == list(range(1, steps[-1] + 1))
    seen = min(changes[-1].step + 5, steps[-1])
    whole = tiny_job(tmp_path, "whole", *long, f"train.stop_after_steps={seen}")
    assert finish(start_process(whole, tmp_path))[0] == EXIT_TO_BE_CONTINUED
    assert losses(job)[:seen] == pytest.approx(losses(whole), abs=TOLERANCE)


def wait_for_attempt(job: Job, number: int, process: Forked) -> None:
    """Wait until the attempt has done a step."""
    deadline = time.monotonic() + 240.0
    while time.monotonic() < deadline:
        done = read_run(run_directory(job).path).of(StepsDone)
        if any(record.attempt == number for record, _ in done):
            return
        assert process.poll() is None, f"ended early:\n{process.said()}"
        time.sleep(0.05)
    raise AssertionError(f"attempt {number} has done no step in 240 s")


def test_the_command_says_from_which_step_how_many_go_on(tmp_path: Path) -> None:
    long = ("train.steps=100000", "checkpoint.every_steps=0", memory_of(tmp_path))
    # What memory does not hold at the boundary is saved.
    job = tiny_job(tmp_path, "asked", *long, "launch.nproc=2", "recover.every_steps=1000")
    process = start_process(job, tmp_path)
    try:
        wait_for_step(job, 2, process)
        code, told = resize(run_directory(job).path, tmp_path, 1)
        assert code == EXIT_DONE, told
        again = finish(start(tmp_path, "resize", str(run_directory(job).path), "-n", "1", "--json"))
        process.send_signal(signal.SIGTERM)
        code, output = finish(process)
    finally:
        process.kill()
    assert code == EXIT_TO_BE_CONTINUED, output
    said = re.search(r"continues from step (\d+) with 1 processes", told)
    assert said is not None, told
    assert again[0] == EXIT_DONE
    document = json.loads(again[1])
    assert (document["processes"], document["state"]) == (1, "unchanged")
    run = read_run(run_directory(job).path)
    assert run.attempts[1].first_step == int(said[1])
    steps = [step for step, _ in run.losses()]
    assert steps == list(range(1, steps[-1] + 1))


def test_a_stop_and_a_wish_at_one_moment_lose_nothing(tmp_path: Path) -> None:
    long = ("train.steps=100000", "checkpoint.every_steps=0", memory_of(tmp_path))
    job = tiny_job(tmp_path, "both", *long, "launch.nproc=2")
    path = run_directory(job).path
    process = start_process(job, tmp_path, "--process-fault", "stop:step=10:rank=0:seconds=5")
    try:
        wait_for_fault(job)
        ask(path, 1)
        process.send_signal(signal.SIGTERM)
        code, output = finish(process)
    finally:
        process.kill()
    assert code == EXIT_TO_BE_CONTINUED, output
    run = read_run(path)
    last = run.losses()[-1][0]
    assert last >= 10
    assert [event.step for _, event in run.of(CheckpointSaved)] == [last]
    assert list((tmp_path / "memory").rglob("rank-*")) == []


def test_what_cannot_be_resized_is_refused_in_a_sentence(tmp_path: Path) -> None:
    code, told = finish(start(tmp_path, "resize", str(tmp_path / "none"), "-n", "2"))
    assert code == EXIT_BAD_INPUT
    assert "is no run directory" in told
    ended = tiny_job(tmp_path, "ended")
    assert finish(start_process(ended, tmp_path))[0] == EXIT_DONE
    code, told = resize(run_directory(ended).path, tmp_path, 2)
    assert code == EXIT_BAD_INPUT
    assert "has ended (completed); there is nothing to resize" in told
    long = ("train.steps=100000", "checkpoint.every_steps=0", memory_of(tmp_path))
    for name, settings, processes, sentence in (
        ("alone", (), 2, "was started by outlast train without --nproc"),
        ("layout", ("launch.nproc=2", "parallel.shard=2"), 3, "parallel.shard = 2"),
    ):
        job = tiny_job(tmp_path, name, *long, *settings)
        process = start_process(job, tmp_path)
        try:
            wait_for_step(job, 1, process)
            code, told = resize(run_directory(job).path, tmp_path, processes)
            assert code == EXIT_BAD_INPUT
            assert sentence in told
            assert not is_wanted(run_directory(job).path)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def test_the_newest_wish_counts_and_is_met_once(tmp_path: Path) -> None:
    assert wish(tmp_path) is None
    ask(tmp_path, 3)
    first = wish(tmp_path)
    assert first is not None
    assert first.processes == 3
    ask(tmp_path, 5)
    # The first wish was met, but another one has come since.
    met(tmp_path, first)
    second = wish(tmp_path)
    assert second is not None
    assert second.processes == 5
    met(tmp_path, second)
    assert wish(tmp_path) is None


def test_each_run_keeps_its_states_apart(tmp_path: Path) -> None:
    jobs = [tiny_job(tmp_path, name) for name in ("one", "two")]
    for job in jobs:
        run_directory(job).create("")
    folders = {run_folder(tmp_path, kept_run(run_directory(job))) for job in jobs}
    assert len(folders) == 2
