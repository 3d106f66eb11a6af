"""The main job's kind of run on a real Slurm: malleable links, killed nodes, changed limits."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from chains import ending, files_of, job_file, noted, outlast, wait
from local_slurm import LocalSlurm

from outlast.cluster.chain import status_of
from outlast.cluster.chain_files import ChainFiles, run_log
from outlast.cluster.slurm import state_now
from outlast.records import AttemptStarted, StepsDone, StopRequested, read_run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

STEPS_OF_A_LINK = 12
LINKS = 6
# Training loss (nats) of 72 steps between one process and links of 4, 2 and 3 processes, which add
# gradients in another order; measured 4.8e-7.
TOLERANCE = 2e-5


def losses(folder: Path, name: str) -> dict[int, float]:
    """Loss by step, of every step record that was ever written: a step done twice fails here."""
    done = read_run(folder / "runs" / name).of(StepsDone)
    assert len({event.step for _, event in done}) == len(done)
    assert all(event.steps == 1 for _, event in done)
    return {event.step: event.loss for _, event in done}


def started(files: ChainFiles) -> str:
    return str(wait(lambda: noted(files, "started"), files)[-1]["job"])


def test_six_malleable_links_are_the_uninterrupted_run(tmp_path: Path, slurm: LocalSlurm) -> None:
    steps = f"train.steps={STEPS_OF_A_LINK * LINKS}"
    chained = job_file(
        tmp_path,
        "chained",
        steps,
        f"train.stop_after_steps={STEPS_OF_A_LINK}",
        "checkpoint.every_steps=0",
        "slurm.nodes=[4, 2, 3]",
        "slurm.wall_time=10min",
    )
    script = outlast("submit", chained, "--dry-run")
    assert "#SBATCH --nodes=4\n" in script
    assert "#SBATCH --no-requeue\n" in script
    assert not files_of(tmp_path, "chained").path.exists()
    outlast("submit", chained)
    files = files_of(tmp_path, "chained")
    outlast("train", job_file(tmp_path, "alone", steps))
    assert wait(lambda: ending(files), files, 300.0)["outcome"] == "done"
    run = read_run(tmp_path / "runs" / "chained")
    sizes = [event.world_size for _, event in run.of(AttemptStarted)]
    assert sizes == [4, 2, 3, 3, 3, 3]
    # Every step, and so every sample, exactly once: none lost, none again.
    found, expected = losses(tmp_path, "chained"), losses(tmp_path, "alone")
    assert sorted(found) == list(range(1, STEPS_OF_A_LINK * LINKS + 1))
    assert found == pytest.approx(expected, abs=TOLERANCE)
    status = status_of(files)
    assert [each.last_step - each.first_step for each in status.links] == [STEPS_OF_A_LINK] * LINKS
    assert len(status.gaps_seconds) == LINKS - 1
    assert max(status.gaps_seconds) <= 3.5, status.gaps_seconds
    print("largest difference", max(abs(found[each] - expected[each]) for each in found))
    print("gaps", status.gaps_seconds)
    shown = outlast("cluster", "status", tmp_path / "runs" / "chained")
    assert "done" in shown
    assert "saved up to step 72 of 72 (100.0%)" in shown


def test_a_killed_node_loses_at_most_one_checkpoint_period(
    tmp_path: Path, slurm: LocalSlurm
) -> None:
    """The node that the link's own process runs on: nobody is left to say a word."""
    period = 100
    job = job_file(
        tmp_path,
        "killed",
        "train.steps=100000",
        f"checkpoint.every_steps={period}",
        "slurm.nodes=[2]",
        "slurm.wall_time=10min",
    )
    outlast("submit", job)
    files = files_of(tmp_path, "killed")
    started(files)
    wait(lambda: run_log(files).step >= 2 * period, files)
    host = noted(files, "started")[0]["hosts"][0]
    slurm.kill_node(host)
    reached = max(losses_so_far(tmp_path))
    saved = run_log(files).step
    wait(lambda: len(noted(files, "started")) == 2, files, 120.0)
    second = noted(files, "started")[1]
    slurm.start_node(host)
    assert [each["state"] for each in noted(files, "lost")] == ["NODE_FAIL"]
    assert second["step"] == saved
    assert 0 <= reached - second["step"] <= period
    # It continues by itself, on whatever nodes there are.
    wait(lambda: run_log(files).step > saved, files, 60.0)
    outlast("cluster", "stop", tmp_path / "runs" / "killed")


def losses_so_far(folder: Path) -> list[int]:
    return [event.step for _, event in read_run(folder / "runs" / "killed").of(StepsDone)]


def test_a_lowered_limit_and_many_signals_lose_no_step(tmp_path: Path, slurm: LocalSlurm) -> None:
    """A signal to one of two ranks; USR1 and TERM together and TERM again; a limit of a minute."""
    # Slurm warns some 16 s before the end, here. The link's own clock acts before that, unless the
    # limit was lowered so late that the warning is how it finds out.
    job = job_file(
        tmp_path,
        "limit",
        "slurm.lead_seconds=25.0",
        "train.steps=1000000",
        "checkpoint.every_steps=0",
        "slurm.links=3",
        "slurm.nodes=[2, 1]",
        "slurm.wall_time=30min",
    )
    outlast("submit", job)
    files = files_of(tmp_path, "limit")
    started(files)
    wait(lambda: (tmp_path / "runs/limit/events.jsonl").exists() and _steps(tmp_path) > 3, files)
    slurm.signal_ranks(noted(files, "started")[0]["hosts"][1], signal.SIGUSR1)
    wait(lambda: len(noted(files, "started")) == 2, files, 60.0)
    reached = _steps(tmp_path)
    second = noted(files, "started")[1]
    assert second["step"] == reached, "one rank has told the other"
    wait(lambda: _steps(tmp_path) > reached + 3, files)
    for arguments in (["--signal=USR1", "--batch"], ["--signal=TERM"], ["--signal=TERM"]):
        slurm.run("scancel", *arguments, second["job"])
    wait(lambda: len(noted(files, "started")) == 3, files, 60.0)
    third = noted(files, "started")[2]
    assert third["step"] == _steps(tmp_path), "no step was lost"
    begun = time.monotonic()
    slurm.run("scontrol", "update", f"JobId={third['job']}", "TimeLimit=1")
    end = wait(lambda: ending(files), files, 100.0)
    assert end["outcome"] == "stopped", "slurm.links are used up"
    assert time.monotonic() - begun < 62.0
    wait(lambda: state_now(third["job"]) not in ("RUNNING", "COMPLETING"), files, 20.0)
    assert state_now(third["job"]) == "FAILED", "ended by itself with 3, not by Slurm (TIMEOUT)"
    assert run_log(files).step == _steps(tmp_path) > third["step"]
    stops = [event.reason for _, event in read_run(files.run).of(StopRequested)]
    assert stops[-1] in ("the link's end", "SIGUSR1")


def _steps(folder: Path) -> int:
    done = read_run(folder / "runs" / "limit").of(StepsDone)
    return done[-1][1].step if done else 0
