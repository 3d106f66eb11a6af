"""One live process per run directory; dead owners do not keep it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from outlast.errors import EXIT_CRASHED, LeaseLostError, RunError
from outlast.records import OwnerLock, RunDirectory
from outlast.records.lease import LEASE_FILE, LEASE_TOKEN, Lease, check_lease, leave_without_lease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

HOLD = """
import sys
from pathlib import Path
from outlast.records import RunDirectory
RunDirectory(Path(sys.argv[1])).lock().acquire()
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def lock_of(path: Path) -> OwnerLock:
    return RunDirectory(path).lock()


def edit(path: Path, **changes: Any) -> None:
    """Change what the lock file says about its owner."""
    file = path / "lock"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def assert_is_ours(path: Path) -> None:
    assert json.loads((path / "lock").read_text())["pid"] == os.getpid()


def test_released_lock_can_be_taken_again(tmp_path: Path) -> None:
    lock = lock_of(tmp_path)
    for _ in range(2):
        lock.acquire()
        assert_is_ours(tmp_path)
        lock.release()
        assert list(tmp_path.iterdir()) == []
    lock.release()


def test_lock_file_names_host_pid_and_start(tmp_path: Path) -> None:
    lock_of(tmp_path).acquire()
    owner = json.loads((tmp_path / "lock").read_text())
    assert owner.keys() == {"host", "boot", "pid", "started"}
    assert (owner["host"], owner["pid"]) == (socket.gethostname(), os.getpid())


@pytest.mark.alone
def test_live_owner_is_respected_and_named_and_a_killed_one_is_not(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        begun = time.monotonic()
        with pytest.raises(RunError) as caught:
            lock_of(tmp_path).acquire()
        assert time.monotonic() - begun < 1.0
        said = str(caught.value)
        assert f"is in use by process {process.pid} on host {socket.gethostname()}" in said
        assert "run.name=" in said

        process.send_signal(signal.SIGKILL)
        # Not yet waited for, the owner is a zombie, which is dead too.
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        lock_of(tmp_path).acquire()
        assert_is_ours(tmp_path)


def test_owner_that_is_gone_is_broken(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.kill()
        process.wait()
        assert (tmp_path / "lock").exists()
        lock_of(tmp_path).acquire()
        assert_is_ours(tmp_path)


def test_reused_pid_is_not_the_owner(tmp_path: Path) -> None:
    lock_of(tmp_path).acquire()
    started = json.loads((tmp_path / "lock").read_text())["started"]
    edit(tmp_path, started=started - 0.05)
    lock_of(tmp_path).acquire()
    assert json.loads((tmp_path / "lock").read_text())["started"] == started


def test_owner_stays_alive_when_the_clock_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_of(tmp_path).acquire()
    create_time, boot_time = psutil.Process.create_time, psutil.boot_time
    # Setting the clock by an hour moves the boot time, and with it what psutil says of a process.
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: create_time(process) + 3600)
    monkeypatch.setattr(psutil, "boot_time", lambda: boot_time() + 3600)
    with pytest.raises(RunError, match="is in use"):
        lock_of(tmp_path).acquire()


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"boot": "another boot"}])
def test_owner_that_cannot_be_examined_lives_by_its_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str]
) -> None:
    lock_of(tmp_path).acquire()
    edit(tmp_path, **change, pid=1)
    host = change.get("host", socket.gethostname())
    with pytest.raises(RunError, match=f"in use by process 1 on host {host}"):
        lock_of(tmp_path).acquire()
    old = time.time() - OwnerLock.stale_after_seconds - 1
    os.utime(tmp_path / "lock", (old, old))
    monkeypatch.setattr(OwnerLock, "watch_seconds", 0.2)
    lock_of(tmp_path).acquire()
    assert_is_ours(tmp_path)


@pytest.mark.slow
def test_owner_whose_clock_is_behind_lives_by_a_heartbeat_that_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats look hours old to a host whose clock is ahead."""
    lock_of(tmp_path).acquire()
    edit(tmp_path, host="elsewhere", pid=1)
    hours_ago = time.time() - 10_000.0
    os.utime(tmp_path / "lock", (hours_ago, hours_ago))
    monkeypatch.setattr(OwnerLock, "watch_seconds", 20.0)
    beat = threading.Timer(0.5, os.utime, (tmp_path / "lock", (hours_ago + 20.0,) * 2))
    beat.start()
    with pytest.raises(RunError, match="in use by process 1 on host elsewhere"):
        lock_of(tmp_path).acquire()
    beat.join()


def test_lock_that_was_taken_over_lets_its_first_owner_commit_nothing(tmp_path: Path) -> None:
    lock = lock_of(tmp_path)
    lock.check()
    lock.acquire()
    lock.check()
    edit(tmp_path, host="elsewhere", pid=7)
    with pytest.raises(LeaseLostError, match="was taken over by process 7 on host elsewhere"):
        lock.check()
    # Whoever took it over has ended since.
    (tmp_path / "lock").unlink()
    with pytest.raises(LeaseLostError, match=r"lost its lock .* another process took over"):
        lock.check()


def test_lock_that_went_with_its_directory_is_taken_anew(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lock = lock_of(tmp_path / "run")
    lock.acquire()
    shutil.rmtree(tmp_path / "run")
    lock.check()
    assert lock.is_held()
    lock.release()


def leased(monkeypatch: pytest.MonkeyPatch, file: Path, token: str) -> None:
    monkeypatch.setenv(LEASE_FILE, str(file))
    monkeypatch.setenv(LEASE_TOKEN, token)


def give(file: Path, token: str) -> None:
    file.write_text(json.dumps({"job": "8", "host": "gpu8", "token": token}))


def test_live_owner_of_a_lost_lease_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job's node was lost; it lives, on this host or on one that cannot be asked."""
    fence = tmp_path / "fence.json"
    for change in ({}, {"host": "elsewhere"}):
        give(fence, "first")
        leased(monkeypatch, fence, "first")
        first = lock_of(tmp_path)
        first.acquire()
        edit(tmp_path, **change)
        leased(monkeypatch, fence, "second")
        with pytest.raises(RunError, match="is in use"):
            lock_of(tmp_path).acquire()
        give(fence, "second")
        second = lock_of(tmp_path)
        second.acquire()
        with pytest.raises(LeaseLostError):
            first.check()
        second.check()
        second.release()


def test_a_lease_of_another_run_breaks_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        give(tmp_path / name, name)
    leased(monkeypatch, tmp_path / "one", "one")
    lock_of(tmp_path).acquire()
    leased(monkeypatch, tmp_path / "two", "two")
    with pytest.raises(RunError, match="is in use"):
        lock_of(tmp_path).acquire()


WATCHED = """
import sys, time
from outlast.records import lease
lease._LEASE_LOOK_SECONDS, lease.LEASE_SILENT_SECONDS = 0.05, float(sys.argv[1])
lease.leave_without_lease()
print("began", flush=True)
time.sleep(60)
"""


def watched(file: Path, token: str, silent_seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WATCHED, str(silent_seconds)],
        env={**os.environ, LEASE_FILE: str(file), LEASE_TOKEN: token},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_chain_that_a_container_does_not_show_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leased(monkeypatch, tmp_path / "not-mounted" / "fence.json", "mine")
    monkeypatch.setattr("outlast.records.lease._watching", set())
    with pytest.warns(UserWarning, match="not-mounted, the folder of the chain, is not visible"):
        leave_without_lease()
    check_lease()


def test_a_process_whose_reader_is_gone_ends_all_the_same(tmp_path: Path) -> None:
    """As that of a task whose srun has died."""
    fence = tmp_path / "fence.json"
    give(fence, "mine")
    with watched(fence, "mine", 1e9) as process:
        try:
            assert process.stderr is not None
            process.stderr.close()
            give(fence, "other")
            assert process.wait(timeout=20) == EXIT_CRASHED
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["taken", "gone", "silent", "suspended"])
def test_a_process_without_its_lease_ends(tmp_path: Path, lost: str) -> None:
    fence = tmp_path / "fence.json"
    give(fence, "mine")
    # Wherever the clock of the host stands that touches it.
    os.utime(fence, (4e9, 4e9))
    with watched(fence, "mine", 0.5 if lost == "silent" else 1e9) as process:
        try:
            if lost == "suspended":
                process.send_signal(signal.SIGSTOP)
            if lost in ("taken", "suspended"):
                give(fence, "other")
            if lost == "gone":
                fence.unlink()
            process.send_signal(signal.SIGCONT)
            assert process.wait(timeout=20) == EXIT_CRASHED
            assert process.stderr is not None
            words = {"gone": "is gone", "silent": "has been silent for"}
            said = process.stderr.read()
            assert words.get(lost, "job 8 on host gpu8 has taken over this run") in said
        finally:
            process.kill()


@pytest.mark.slow
def test_a_process_lives_while_its_lease_is_touched_or_cannot_be_read(tmp_path: Path) -> None:
    fence = tmp_path / "fence.json"
    give(fence, "mine")
    with watched(fence, "mine", 1.0) as process:
        try:
            for beat in range(12):
                os.utime(fence, (float(beat), float(beat)))
                time.sleep(0.2)
            assert process.poll() is None
        finally:
            process.kill()
    assert Lease(tmp_path / "not-mounted" / "fence.json", "mine").problem() == ""
    (tmp_path / "folder").mkdir()
    assert Lease(tmp_path / "folder", "mine").problem() == ""


def test_refresh_is_the_heartbeat(tmp_path: Path) -> None:
    lock = lock_of(tmp_path)
    lock.refresh()
    assert list(tmp_path.iterdir()) == []
    lock.acquire()
    os.utime(tmp_path / "lock", (0, 0))
    lock.refresh()
    assert time.time() - (tmp_path / "lock").stat().st_mtime < 10


def test_lock_that_another_host_broke_is_left_to_its_new_owner(tmp_path: Path) -> None:
    lock = lock_of(tmp_path)
    lock.acquire()
    edit(tmp_path, host="elsewhere")
    os.utime(tmp_path / "lock", (0, 0))
    lock.refresh()
    assert (tmp_path / "lock").stat().st_mtime == 0
    lock.release()
    assert (tmp_path / "lock").exists()


@pytest.mark.parametrize("content", ["", "{", "5", "[]", '{"pid": 1}', "\0" * 80])
def test_old_lock_without_an_owner_is_broken(tmp_path: Path, content: str) -> None:
    (tmp_path / "lock").write_text(content)
    os.utime(tmp_path / "lock", (0, 0))
    lock_of(tmp_path).acquire()
    assert_is_ours(tmp_path)


def test_lock_that_is_just_being_written_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("")
    begun = time.time()
    os.utime(tmp_path / "lock", (begun - 4.7, begun - 4.7))
    lock_of(tmp_path).acquire()
    assert time.time() - begun > 0.2


def test_lock_that_never_gets_an_owner_is_given_up_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outlast.records.lock._ACQUIRE_SECONDS", 0.1)
    (tmp_path / "lock").write_text("")
    with pytest.raises(RunError, match=r"could not be taken within 0.1 s; if no other process wor"):
        lock_of(tmp_path).acquire()


def test_lock_on_a_full_disk_is_refused_and_leaves_none(
    tmp_path: Path, file_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    with file_limit(0), pytest.raises(RunError, match="lock cannot be taken: "):
        lock_of(tmp_path).acquire()
    assert list(tmp_path.iterdir()) == []


def test_lock_in_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be taken: No such file or directory"):
        lock_of(tmp_path / "absent").acquire()


def test_lock_that_another_contender_replaced_meanwhile_is_not_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = lock_of(tmp_path)
    other.acquire()
    owner = (tmp_path / "lock").read_bytes()
    edit(tmp_path, started=0.0)

    def flock(*_: object) -> None:
        # Between this contender's look and its turn, the other broke the lock and took it.
        (tmp_path / "lock").rename(tmp_path / "broken")
        (tmp_path / "lock").write_bytes(owner)
        monkeypatch.undo()

    monkeypatch.setattr("outlast.records.lock.fcntl.flock", flock)
    with pytest.raises(RunError, match="is in use"):
        lock_of(tmp_path).acquire()
    assert (tmp_path / "lock").read_bytes() == owner


def _contend(paths: list[Path], barrier: Any, results: Any) -> None:
    for number, path in enumerate(paths):
        lock = lock_of(path)
        barrier.wait(timeout=30)
        try:
            lock.acquire()
            results.put((number, os.getpid(), "won"))
        except RunError as error:
            results.put((number, os.getpid(), str(error)))
        barrier.wait(timeout=30)


@pytest.mark.distributed
@pytest.mark.parametrize("left_behind", ["no lock", "a dead owner's lock"])
def test_of_contenders_at_once_exactly_one_wins(tmp_path: Path, left_behind: str) -> None:
    context = multiprocessing.get_context("fork")
    contenders, rounds = 4, 40
    paths = [tmp_path / str(number) for number in range(rounds)]
    for path in paths:
        path.mkdir()
        if left_behind == "a dead owner's lock":
            lock_of(path).acquire()
            edit(path, started=0.0)
    barrier, results = context.Barrier(contenders), context.Queue()
    processes = [
        context.Process(target=_contend, args=(paths, barrier, results)) for _ in range(contenders)
    ]
    for process in processes:
        process.start()
    heard = [results.get(timeout=60) for _ in range(contenders * rounds)]
    for process in processes:
        process.join(timeout=30)
        assert process.exitcode == 0
    for number, path in enumerate(paths):
        answers = {pid: said for round_, pid, said in heard if round_ == number}
        winners = [pid for pid, said in answers.items() if said == "won"]
        assert len(winners) == 1, answers
        assert json.loads((path / "lock").read_text())["pid"] == winners[0]
        losers = [said for said in answers.values() if said != "won"]
        assert all(f"is in use by process {winners[0]} on host" in said for said in losers)
