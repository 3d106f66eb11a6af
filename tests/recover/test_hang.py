"""Steps that hang: stacks of all threads, an event, the end of the process."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outlast.errors import EXIT_HUNG
from outlast.records import MemberLost, RunDirectory, read_run
from outlast.recover.hang import HangMonitor, StepDeadline
from outlast.recover.phase_page import PhasePage, read_pages

WORKER = """
import sys, threading, time
from pathlib import Path
from outlast.records import RunDirectory
from outlast.recover.phase_page import PhasePage
from outlast.recover.hang import StepDeadline
from outlast.recover.hang import HangMonitor

def waiting_in_a_collective():
    time.sleep(600)

def computing():
    if how == "python":
        while True:
            sum(range(1000))
    elif how == "holds the lock":
        import re
        re.match("(a+)+$", "a" * 80 + "b")   # takes years, and gives the lock to nobody
    else:
        time.sleep(600)

run, rank, phase, how, seconds = RunDirectory(Path(sys.argv[1])), int(sys.argv[2]), *sys.argv[3:6]
beacon = PhasePage(run.path / "beacons", rank)
deadline = StepDeadline(first_seconds=600.0, fixed_seconds=float(seconds))
excused = ("reduce",) if how == "excused" else ()
monitor = HangMonitor(beacon, deadline, run, rank, excused=excused)
monitor.start()
for step in range(3):
    for each in ("data", "forward", "reduce", "optimizer"):
        monitor.mark(each, step if each == "data" else None)
monitor.mark("idle", 3)
print("ready", flush=True)
sys.stdin.readline()
monitor.mark("data", 3)
monitor.mark(phase)
print("there", flush=True)
if how == "well":
    time.sleep(2.0)
    monitor.stop()
    beacon.close()
elif how == "outside":
    time.sleep(float(seconds) + 2.0)
    monitor.stop()
    beacon.close()
elif how == "excused":
    time.sleep(float(seconds) + 2.0)
    monitor.mark("vote")
    computing()
elif phase == "reduce":
    waiting_in_a_collective()
else:
    computing()
"""


pytestmark = pytest.mark.distributed


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create("")
    directory.next_attempt()
    return directory


def ready(
    run: RunDirectory, rank: int, phase: str, how: str, seconds: float = 1.0
) -> subprocess.Popen[str]:
    """A process between two steps, which continues to `phase` when told to."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(run.path), str(rank), phase, how, str(seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def worker(
    run: RunDirectory, rank: int, phase: str, how: str, seconds: float = 1.0
) -> subprocess.Popen[str]:
    """A process that is in `phase`."""
    process = ready(run, rank, phase, how, seconds)
    go(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    return process


def lost(run: RunDirectory, *ranks: int) -> list[MemberLost]:
    found = read_run(run.path)
    return [event for rank in ranks for _, event in found.of(MemberLost, rank)]


def stacks(run: RunDirectory, rank: int) -> str:
    folder = run.path / "stacks" / f"attempt-1.{socket.gethostname()}"
    return (folder / f"rank-{rank}.txt").read_text()


def test_a_process_that_computes_for_ever_ends_and_the_one_that_waits_for_it_is_not_blamed(
    run: RunDirectory,
) -> None:
    # Long enough for both to come where they stay.
    processes = [ready(run, 0, "reduce", "waits", 5.0), ready(run, 1, "forward", "python", 5.0)]
    try:
        for each in processes:
            go(each)
        assert [each.wait(timeout=60) for each in processes] == [EXIT_HUNG, EXIT_HUNG]
    finally:
        for each in processes:
            each.kill()
    [event] = lost(run, 0, 1)
    assert (event.step, event.member, event.cause) == (3, "rank 1", "hung")
    assert event.seconds > 0.0
    assert "rank 0 is in reduce" in event.note
    assert "waiting_in_a_collective" in stacks(run, 0)
    assert "computing" in stacks(run, 1)
    assert "_watch" in stacks(run, 1)
    # Ended processes of a hang leave no page: nobody is to find them dead as well.
    assert read_pages(run.path / "beacons") == []


def test_a_process_that_holds_pythons_lock_is_ended_by_its_peer_and_its_stack_is_there(
    run: RunDirectory,
) -> None:
    # Who holds the lock first, so that it has been silent for long enough.
    holder = worker(run, 1, "forward", "holds the lock")
    processes = [worker(run, 0, "reduce", "waits", 2.0), holder]
    try:
        assert processes[0].wait(timeout=60) == EXIT_HUNG
        assert processes[1].wait(timeout=60) == -signal.SIGKILL
    finally:
        for each in processes:
            each.kill()
    [event] = lost(run, 0, 1)
    assert (event.member, event.cause) == ("rank 1", "hung")
    assert "computing" in stacks(run, 1)


def test_a_stopped_process_is_named_and_killed_by_its_peer(run: RunDirectory) -> None:
    stopped = worker(run, 1, "forward", "sleeps", 600.0)
    stopped.send_signal(signal.SIGSTOP)
    processes = [worker(run, 0, "reduce", "waits"), stopped]
    try:
        assert processes[0].wait(timeout=60) == EXIT_HUNG
        assert processes[1].wait(timeout=60) == -signal.SIGKILL
    finally:
        for each in processes:
            each.kill()
    [event] = lost(run, 0, 1)
    assert (event.member, event.cause) == ("rank 1", "stopped")
    assert "rank 1 is stopped in forward" in event.note


def test_who_was_stopped_does_not_take_that_for_a_hang(run: RunDirectory) -> None:
    process = worker(run, 0, "forward", "well", 4.0)
    process.send_signal(signal.SIGSTOP)
    time.sleep(5.0)
    process.send_signal(signal.SIGCONT)
    assert process.wait(timeout=60) == 0
    assert not (run.path / "stacks").exists()


@pytest.mark.parametrize(
    ("phase", "how", "seconds"), [("forward", "well", 600.0), ("save", "outside", 1.0)]
)
def test_steps_in_time_and_phases_outside_of_steps_are_left_alone(
    run: RunDirectory, phase: str, how: str, seconds: float
) -> None:
    process = worker(run, 0, phase, how, seconds)
    assert process.wait(timeout=60) == 0
    assert not (run.path / "stacks").exists()
    assert not (run.path / "beacons").exists()


def test_a_phase_that_is_excused_takes_as_long_as_it_likes_and_the_next_one_does_not(
    run: RunDirectory,
) -> None:
    process = worker(run, 0, "reduce", "excused", 2.0)
    try:
        assert process.wait(timeout=60) == EXIT_HUNG
    finally:
        process.kill()
    [event] = lost(run, 0)
    assert "rank 0 is in vote" in event.note


def test_excused_time_is_no_part_of_a_measured_step(run: RunDirectory) -> None:
    told: list[float] = []

    class Deadline(StepDeadline):
        def observe(self, seconds: float) -> None:
            told.append(seconds)

    beacon = PhasePage(run.path / "beacons", 0)
    monitor = HangMonitor(beacon, Deadline(600.0), run, 0, excused=("reduce",))
    begun = time.monotonic()
    monitor.mark("data", 0)
    monitor.mark("reduce")
    waited = time.monotonic()
    time.sleep(0.5)
    monitor.mark("reduce")
    waited = time.monotonic() - waited
    monitor.mark("vote")
    monitor.mark("data", 1)
    whole = time.monotonic() - begun
    beacon.close()
    assert len(told) == 1
    assert 0.0 <= told[0] <= whole - waited


def test_a_hang_is_told_even_if_the_run_directory_cannot_be_written(run: RunDirectory) -> None:
    (run.path / "stacks").write_text("no directory")
    process = worker(run, 0, "forward", "python")
    assert process.wait(timeout=60) == EXIT_HUNG
    assert process.stderr is not None
    assert "rank 0 hung at step 3" in process.stderr.read()
    assert len(lost(run, 0)) == 1
