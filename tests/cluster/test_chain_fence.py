"""One link writes a run at a time."""

import fcntl
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from slurm_programs import accounted, put_command, shown, slurm_commands

from outlast.cluster.chain_files import ChainFiles, ChainPlan
from outlast.cluster.fence import Fence, FenceHeldError, Holder, read_holder, this_process
from outlast.cluster.link import Link
from outlast.cluster.slurm import SlurmUnreachableError, state_now
from outlast.cluster.verdict import wait_for_lock
from outlast.errors import LeaseLostError
from outlast.records.lease import check_lease, leave_without_lease
from outlast.records.lock import OwnerLock


def unknown(job: str) -> None:
    return None


def at_once(holder: Holder) -> float:
    return 0.0


def first_ended(job: str) -> str:
    return "COMPLETED" if job == "1" else "RUNNING"


def put(path: Path, holder: Holder) -> None:
    import json

    path.write_text(json.dumps(holder.__dict__))


def elsewhere(job: str) -> Holder:
    return replace(this_process(job), host="another-host", boot="another-boot", token="other")


def test_a_fence_is_held_until_it_is_given_back(tmp_path: Path) -> None:
    path = tmp_path / "fence.json"
    first = Fence(path, "1", unknown)
    assert first.acquire() is None
    assert first.held()
    assert read_holder(path) == first.holder
    with pytest.raises(FenceHeldError, match=r"job 1 .* is writing this run") as caught:
        Fence(path, "2", unknown, wait_seconds=at_once).acquire()
    assert caught.value.holder == first.holder
    first.release()
    assert Fence(path, "2", unknown).acquire() is None
    first.release()
    assert read_holder(path) is not None, "another's fence is not given back"


def test_a_dead_process_of_this_host_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "fence.json"
    code = (
        "import sys; from pathlib import Path; from outlast.cluster.fence import Fence;"
        "Fence(Path(sys.argv[1]), '1', lambda job: 'RUNNING').acquire()"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=30)
    dead = Fence(path, "2", lambda job: "RUNNING", wait_seconds=at_once).acquire()
    assert dead is not None
    assert dead.job == "1"


@pytest.mark.parametrize("state", ["COMPLETED", "NODE_FAIL", "PENDING"])
def test_a_job_that_has_ended_holds_nothing(tmp_path: Path, state: str) -> None:
    path = tmp_path / "fence.json"
    put(path, elsewhere("1"))
    assert Fence(path, "2", lambda job: state, wait_seconds=at_once).acquire() is not None


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING", "SUSPENDED"])
def test_a_job_that_may_have_processes_keeps_it(tmp_path: Path, state: str) -> None:
    path = tmp_path / "fence.json"
    put(path, elsewhere("1"))
    with pytest.raises(FenceHeldError):
        Fence(path, "2", lambda job: state, wait_seconds=at_once).acquire()


def test_an_earlier_start_of_the_same_job_is_dead(tmp_path: Path) -> None:
    path = tmp_path / "fence.json"
    put(path, elsewhere("7"))
    assert Fence(path, "7", lambda job: "RUNNING", wait_seconds=at_once).acquire() is not None


@pytest.mark.slow
def test_where_slurm_is_silent_the_heartbeat_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outlast.cluster.fence.STALE_SECONDS", 1.5)
    path = tmp_path / "fence.json"
    put(path, elsewhere("1"))
    # The other host's clock is a day ahead: only changes count, by this process's own clock.
    tomorrow = time.time() + 86400.0
    os.utime(path, (tomorrow, tomorrow))

    def down(job: str) -> str:
        raise SlurmUnreachableError("down")

    begun = time.monotonic()
    fence = Fence(path, "2", down, wait_seconds=lambda holder: 20.0)
    assert fence.acquire() is not None
    assert 1.5 <= time.monotonic() - begun < 6.0


def test_a_holder_that_was_taken_for_dead_finds_out(tmp_path: Path) -> None:
    path = tmp_path / "fence.json"
    first = Fence(path, "1", unknown)
    first.acquire()
    put(path, elsewhere("2"))
    first._beaten = -1e9
    assert not first.held()


def test_who_has_lost_the_fence_shows_no_life_in_the_others_name(tmp_path: Path) -> None:
    path = tmp_path / "fence.json"
    first = Fence(path, "1", unknown)
    first.acquire()
    put(path, elsewhere("2"))
    os.utime(path, (7.0, 7.0))
    assert not first.held(at_once=True)
    assert path.stat().st_mtime == 7.0
    put(path, first.holder)
    os.utime(path, (7.0, 7.0))
    assert first.held(at_once=True)
    assert path.stat().st_mtime > 7.0


def test_the_lease_is_of_one_job_also_where_others_inherit_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training script has submitted an evaluation; then its link ends."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    fence = Fence(tmp_path / "fence.json", "5_2", unknown)
    fence.acquire()
    for name, value in fence.lease.items():
        monkeypatch.setenv(name, value)
    fence.release()
    with pytest.raises(LeaseLostError):
        check_lease()
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    check_lease()
    watching: set[int] = set()
    monkeypatch.setattr("outlast.records.lease._watching", watching)
    leave_without_lease()
    assert not watching, "it would end this process"


def test_a_damaged_fence_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "fence.json"
    path.write_text("{")
    assert Fence(path, "2", unknown, wait_seconds=at_once).acquire() is None
    assert [each.name for each in tmp_path.iterdir()] == ["fence.json"], "nothing is left behind"


def _contend(path: str, number: int, barrier: Any, results: Any) -> None:
    fence = Fence(Path(path), str(number), first_ended, wait_seconds=lambda holder: 0.5)
    barrier.wait()
    try:
        fence.acquire()
        time.sleep(1.5)
        # Not from memory.
        fence._beaten = -1e9
        results.put((number, fence.held()))
    except FenceHeldError:
        results.put((number, None))


@pytest.mark.slow
def test_of_many_that_find_a_dead_holder_one_gets_it(tmp_path: Path) -> None:
    path = tmp_path / "fence.json"
    put(path, elsewhere("1"))
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(6), context.Queue()
    children = [
        context.Process(target=_contend, args=(str(path), number, barrier, results))
        for number in range(10, 16)
    ]
    for child in children:
        child.start()
    outcomes = [results.get(timeout=30) for _ in children]
    for child in children:
        child.join(timeout=10)
    assert [held for _, held in outcomes if held is not None] == [True]


@pytest.mark.parametrize("state", ["NODE_FAIL", "COMPLETED"])
def test_a_process_whose_job_has_ended_loses_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Its node was lost and it lives, on this very host: it saves no more."""
    path = tmp_path / "fence.json"
    orphan = Fence(path, "1", unknown)
    orphan.acquire()
    for name, value in orphan.lease.items():
        monkeypatch.setenv(name, value)
    check_lease()
    successor = Fence(path, "2", lambda job: state, wait_seconds=at_once)
    assert successor.acquire() == orphan.holder
    with pytest.raises(LeaseLostError, match=r"job 2 on host .* has taken over this run"):
        check_lease()
    assert not orphan.held(at_once=True)
    orphan.release()
    assert successor.held(at_once=True)
    successor.release()
    with pytest.raises(LeaseLostError, match=r"is gone, so the job .* has ended"):
        check_lease()


def test_a_later_start_of_the_same_job_takes_over_from_a_live_process(tmp_path: Path) -> None:
    """The job was requeued, and an earlier start lives on, where Slurm cannot reach it."""
    path = tmp_path / "fence.json"
    orphan, later = Fence(path, "7", unknown), Fence(path, "7", lambda job: "RUNNING")
    orphan.acquire()
    assert later.acquire() == orphan.holder
    assert not orphan.held(at_once=True)


def test_a_newer_fence_is_not_touched_by_who_saw_the_dead_one(tmp_path: Path) -> None:
    """While one judges the dead holder another takes the fence; a third must find no gap."""
    path = tmp_path / "fence.json"
    put(path, elsewhere("1"))
    quicker = Fence(path, "3", first_ended)
    changed: list[int] = []

    def slowly(job: str) -> str:
        if not changed:
            quicker.acquire()
            changed.append(path.stat().st_ctime_ns)
            time.sleep(0.02)
        return first_ended(job)

    with pytest.raises(FenceHeldError, match="job 3"):
        Fence(path, "2", slowly, wait_seconds=at_once).acquire()
    assert path.stat().st_ctime_ns == changed[0], "it was renamed, linked or written"
    assert quicker.held()


def test_a_dead_fence_that_another_is_removing_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "fence.json"
    put(path, elsewhere("1"))
    fence = Fence(path, "2", lambda job: "COMPLETED")
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not fence._remove(elsewhere("1"))
        assert path.exists()
    assert fence.acquire() is not None


def test_a_job_that_is_being_taken_down_keeps_its_fence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Slurm says it: COMPLETING in the queue, and already CANCELLED in accounting."""
    slurm_commands(tmp_path, monkeypatch, squeue=shown("7", "COMPLETING"))
    put_command(tmp_path, "sacct", f"echo '{accounted('7', 'CANCELLED by 0')}'")
    assert state_now("7") == "CANCELLED"
    path = tmp_path / "fence.json"
    put(path, elsewhere("7"))
    plan = ChainPlan("c", "n", "dependent", (1,), 1, 60.0, "/", "python")
    link = Link(ChainFiles(tmp_path), plan, 2, "8")
    with pytest.raises(FenceHeldError):
        Fence(path, "8", link._job_state, wait_seconds=at_once).acquire()


def lock(path: Path, host: str) -> None:
    path.write_text(f'{{"host": "{host}", "boot": "b", "pid": 1, "started": 1.0}}')


def test_the_lock_of_a_dead_jobs_host_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert wait_for_lock(path) < 1.0, "there is none"
    lock(path, "gpu7.cluster")
    assert wait_for_lock(path, dead_hosts=["gpu7", "gpu8"]) < 1.0
    assert not path.exists()


@pytest.mark.slow
def test_a_lock_of_this_host_before_it_was_booted_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock(path, socket.gethostname())
    young = time.time() - OwnerLock.stale_after_seconds + 0.5
    os.utime(path, (young, young))
    assert wait_for_lock(path) > 0.4, "the trainer would refuse it"


def test_an_old_lock_is_left_to_the_trainer(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock(path, "elsewhere")
    old = time.time() - 1000.0
    os.utime(path, (old, old))
    assert wait_for_lock(path) < 1.0
    assert path.exists()
