"""Pages that say where a process is, also after it was killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outlast.errors import RecoverError
from outlast.records import RunDirectory
from outlast.recover.phase_page import (
    PHASES,
    PhasePage,
    arm,
    disarm,
    pages_folder,
    read_pages,
    remove_dead_pages,
    remove_old_pages,
)

WORKER = """
import sys, time
from pathlib import Path
from outlast.recover.phase_page import PhasePage
beacon = PhasePage(Path(sys.argv[1]), rank=3)
print("ready", flush=True)
sys.stdin.readline()
beacon.mark("heal")
for step in range(100):
    for phase in ("data", "forward", "backward", "optimizer"):
        beacon.mark(phase, step if phase == "data" else None)
print("done", flush=True)
beacon.close()
"""


def worker(directory: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def test_a_page_says_how_many_updates_were_made(tmp_path: Path) -> None:
    beacon = PhasePage(tmp_path / "pages", rank=0)
    told = []
    for phase, step in (
        ("idle", 7),
        ("data", 7),
        ("optimizer", None),
        ("agree", None),
        ("save", None),
        ("data", 8),
        ("idle", 8),
        ("evaluate", None),
    ):
        beacon.mark(phase, step)
        told.append(beacon.read().done)
    assert told == [7, 7, 7, 8, 8, 8, 8, 8]
    beacon.close()


def test_who_is_killed_again_before_it_has_a_state_leaves_the_steps_done_before(
    tmp_path: Path,
) -> None:
    pages, told = tmp_path / "pages", []
    for phase, number in (("backward", 5), ("heal", 0)):
        process = worker(pages)
        arm(pages, 3, phase, step=number)
        go(process)
        assert process.wait(timeout=60) == -signal.SIGKILL
        [found] = read_pages(pages)
        told.append((found.step, found.phase, found.done))
    assert told == [(5, "backward", 5), (0, "heal", 5)]
    beacon = PhasePage(pages, rank=3)
    assert beacon.read().done == 5
    beacon.mark("heal")
    beacon.mark("idle", 4)
    assert beacon.read().done == 4
    beacon.close()


def test_a_process_that_is_armed_for_its_first_mark_leaves_the_steps_done_before(
    tmp_path: Path,
) -> None:
    process = worker(tmp_path)
    arm(tmp_path, 3, "optimizer", step=2)
    go(process)
    assert process.wait(timeout=60) == -signal.SIGKILL
    arm(tmp_path, 3, "idle")
    again = [sys.executable, "-c", WORKER, str(tmp_path)]
    ended = subprocess.run(again, stdin=subprocess.DEVNULL, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    [found] = read_pages(tmp_path)
    assert (found.phase, found.done, found.state) == ("idle", 2, "dead")


def test_a_page_says_where_its_process_is(tmp_path: Path) -> None:
    beacon = PhasePage(tmp_path / "pages", rank=2)
    before = time.monotonic()
    beacon.mark("data", 7)
    beacon.mark("forward")
    beacon.alive(12.5, answers=True)
    [found] = read_pages(tmp_path / "pages")
    assert (found.rank, found.pid, found.step, found.phase) == (2, os.getpid(), 7, "forward")
    assert before <= found.began <= found.marked <= found.alive <= time.monotonic()
    assert abs(found.wall - time.time()) < 60.0
    assert (found.deadline_seconds, found.answers, found.state) == (12.5, True, "running")
    beacon.close()
    assert not (tmp_path / "pages").exists()


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_can_be_read_back(tmp_path: Path, phase: str) -> None:
    beacon = PhasePage(tmp_path, rank=0)
    beacon.mark(phase)
    assert beacon.read().phase == phase


def test_an_armed_process_dies_in_its_phase_and_its_page_says_so(tmp_path: Path) -> None:
    process = worker(tmp_path)
    arm(tmp_path, 3, "backward", step=5)
    go(process)
    assert process.wait(timeout=60) == -signal.SIGKILL
    [found] = read_pages(tmp_path)
    assert (found.step, found.phase, found.state) == (5, "backward", "dead")
    assert found.fired >= found.marked > 0.0


def test_it_is_armed_once_also_for_the_process_that_comes_after(tmp_path: Path) -> None:
    first = worker(tmp_path)
    arm(tmp_path, 3, "optimizer")
    first.kill()
    first.wait(timeout=60)
    for expected in (-signal.SIGKILL, 0):
        process = worker(tmp_path)
        go(process)
        assert process.wait(timeout=60) == expected


def test_a_stopped_process_is_seen_and_goes_on(tmp_path: Path) -> None:
    process = worker(tmp_path)
    arm(tmp_path, 3, "forward", step=2, number=signal.SIGSTOP)
    go(process)
    deadline = time.monotonic() + 60.0
    while read_pages(tmp_path)[0].state != "stopped":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGCONT)
    assert process.wait(timeout=60) == 0
    assert read_pages(tmp_path) == []


def test_a_process_with_the_number_of_a_dead_one_is_another(tmp_path: Path) -> None:
    beacon = PhasePage(tmp_path, rank=0)
    beacon._fields[2] -= 100
    assert beacon.read().state == "dead"


def test_what_cannot_be_armed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecoverError, match=r"phase = 'lunch' is none of idle, heal"):
        arm(tmp_path, 0, "lunch")
    with pytest.raises(RecoverError, match="rank 4 has no page"):
        arm(tmp_path, 4, "data")


def test_a_page_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecoverError, match=r"set recover\.memory"):
        PhasePage(tmp_path / "file", rank=0)


def test_files_that_are_no_pages_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "rank-1").write_bytes(b"")
    (tmp_path / "rank-2").write_bytes(bytes(4096))
    assert read_pages(tmp_path) == []


def test_pages_lie_in_memory_and_else_in_the_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create("")
    inside = pages_folder(str(tmp_path), run)
    assert inside.parent == tmp_path
    assert run.identifier in inside.name
    assert pages_folder(str(tmp_path / "nowhere"), run) == run.path / "beacons"


def test_what_is_disarmed_does_not_fire(tmp_path: Path) -> None:
    process = worker(tmp_path)
    arm(tmp_path, 3, "backward", step=5)
    disarm(tmp_path, 3)
    disarm(tmp_path, 4)
    go(process)
    assert process.wait(timeout=60) == 0


def test_pages_of_dead_processes_are_taken_away_and_others_stay(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    process = worker(pages)
    (pages / "stacks-3.txt").write_text("")
    beacon = PhasePage(pages, rank=0)
    process.kill()
    process.wait(timeout=60)
    remove_dead_pages(pages)
    assert [each.rank for each in read_pages(pages)] == [0]
    beacon.close()
    assert not pages.exists()


@pytest.mark.parametrize(
    ("days", "lives", "stays"), [(2, False, False), (2, True, True), (0, False, True)]
)
def test_what_dead_runs_have_left_for_a_day_is_removed(
    days: int, lives: bool, stays: bool, tmp_path: Path
) -> None:
    pages = tmp_path / f"outlast-{os.getuid()}-0123abcd-beacons"
    other = tmp_path / "outlast-1-x"
    other.mkdir()
    beacon = PhasePage(pages, rank=0)
    beacon._fields[6] -= days * 86400 * 10**9
    if not lives:
        beacon._fields[2] -= 100
    remove_old_pages(str(tmp_path))
    assert pages.exists() == stays
    assert other.exists()
