"""Killed before every single file-system event of a save: nothing published is ever lost."""

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_states import bits, make_state, open_store, steps_in, train

from outlast.checkpoint import CheckpointStore, list_versions, storage_of
from outlast.checkpoint.reader import VersionReader
from outlast.checkpoint.storage import PendingFile
from outlast.checkpoint.version import is_published, load

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("either_seal")]

LAST = 6
# Audit events of calls that change files or make or list folders; os.fsync has none.
FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir"}
KINDS: dict[str, dict[str, Any]] = {
    "later": {"before": 2, "keep": 9},
    "retention": {"before": 3, "keep": 1},
    "first": {"before": 0, "keep": 1},
}


@pytest.fixture(scope="module")
def trained() -> dict[int, dict[str, Any]]:
    """The bits of a run after each step."""
    state = make_state()
    found = {0: bits(state)}
    for step in range(1, LAST + 1):
        train(state, step, step)
        found[step] = bits(state)
    return found


def forked(work: Callable[..., Any], *args: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=work, args=args, daemon=True)
    process.start()
    return process


def settings_of(kind: str) -> dict[str, Any]:
    return {"keep": KINDS[kind]["keep"]}


class Killer:
    """Kills this process before file event number `events`, counted from when it is armed.

    With `torn`, only writes count, and the last one gets half of its bytes into the file.
    """

    def __init__(self, directory: Path, events: int, *, torn: bool) -> None:
        self.count = 0
        self._events = events
        self._torn = torn
        self._armed = False
        sync, write = os.fsync, PendingFile.write

        def counted_sync(descriptor: int) -> None:
            self.event(write=False)
            sync(descriptor)

        def counted_write(pending: Any, data: Any) -> Any:
            if self._armed and self._torn and self.count + 1 == self._events:
                write(pending, memoryview(data)[: len(data) // 2])
                pending._file.flush()
            self.event(write=True)
            return write(pending, data)

        def audit(name: str, args: tuple[Any, ...]) -> None:
            if name in FILE_EVENTS and str(directory) in str(args[0]):
                self.event(write=False)

        os.fsync = counted_sync
        PendingFile.write = counted_write  # type: ignore[method-assign]
        sys.addaudithook(audit)

    def event(self, *, write: bool) -> None:
        if self._armed and (write or not self._torn):
            self.count += 1
            if self.count == self._events:
                os.kill(os.getpid(), signal.SIGKILL)

    def arm(self) -> None:
        self._armed = True


def save_and_die(directory: Path, kind: str, events: int, torn: bool) -> None:
    """Train and save each step, but die in the last save; exit code 0 if that did not happen."""
    killer = Killer(directory, events, torn=torn)
    state = make_state()
    store = open_store(directory, **settings_of(kind))
    steps = KINDS[kind]["before"] + 1
    for step in range(1, steps + 1):
        train(state, step, step)
        if step == steps:
            killer.arm()
        store.save(step, state)
    os._exit(0)


def check_all(directory: Path, kind: str, trained: dict[int, dict[str, Any]]) -> int:
    """Check all versions to be kept and restore the newest; returns its step, 0 for none."""
    storage = storage_of(directory)
    published = [each for each in list_versions(storage) if is_published(storage, each)]
    for version in published[-KINDS[kind]["keep"] :]:
        with VersionReader(storage, load(storage, version)) as reader:
            reader.check()
    state = make_state(seed=7)
    restored = open_store(directory).restore(state)
    if restored is None:
        return 0
    for skipped in restored.skipped:
        assert "has no manifest" in skipped or "is incomplete" in skipped
    assert bits(state) == trained[restored.step]
    return restored.step


def go_on(directory: Path, kind: str, trained: dict[int, dict[str, Any]]) -> None:
    """A new process restores, trains to the last step and saves on the way."""
    state = make_state(seed=7)
    with open_store(directory, **settings_of(kind)) as store:
        restored = store.restore(state)
        first = 1 if restored is None else restored.step + 1
        if restored is None:
            state = make_state()
        for step in range(first, LAST + 1):
            train(state, step, step)
            store.save(step, state)
    assert bits(state) == trained[LAST]
    assert check_all(directory, kind, trained) == LAST
    left = [path.name for path in directory.rglob("*.tmp")]
    # Of a kept version that was complete before it was sealed, those of sealing may stay.
    sealing = ("version.json", "group-", "index-")
    assert all(name.startswith(sealing) for name in left), "a killed save leaves litter"


@pytest.mark.parametrize("torn", [False, True], ids=["between writes", "half written"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_before_every_single_file_event_loses_nothing(
    tmp_path: Path, trained: dict[int, dict[str, Any]], kind: str, torn: bool
) -> None:
    before = KINDS[kind]["before"]
    events, published, outcomes = 0, False, set()
    while not published:
        events += 1
        directory = tmp_path / f"killed-at-{events}"
        process = forked(save_and_die, directory, kind, events, torn)
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        published = process.exitcode == 0
        step = check_all(directory, kind, trained)
        assert step in ((before + 1,) if published else (before, before + 1))
        outcomes.add(step)
        if torn or events % 3 == 0:
            go_on(directory, kind, trained)
        shutil.rmtree(directory, ignore_errors=True)
    assert events > (3 if torn else 20), "writing, publishing and deleting were met"
    assert outcomes == {before, before + 1}


def save_for_ever(directory: Path, ready: Any, first: int) -> None:
    state = make_state()
    store = open_store(directory, keep=2)
    for step in range(first, first + 10**6):
        state["model"].seen.fill_(step)
        state["data"].advance(step)
        store.save_async(step, state)
        ready.set()


def test_kills_at_any_time_lose_nothing_published(tmp_path: Path) -> None:
    delays = random.Random(0)
    newest = 0
    for _ in range(12):
        ready = multiprocessing.get_context("fork").Event()
        process = forked(save_for_ever, tmp_path, ready, newest + 1)
        assert ready.wait(60)
        time.sleep(delays.uniform(0.0, 0.1))
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        state = make_state(seed=7)
        restored = open_store(tmp_path).restore(state)
        step = 0 if restored is None else restored.step
        assert step >= newest, "a published version is gone"
        if step:
            assert int(state["model"].seen) == step
            assert state["data"].state["position"] == step
        newest = step
    assert newest > 0, "no process lived long enough to publish"
    with open_store(tmp_path, keep=2) as store:
        store.save(newest + 1, make_state())
    assert len(steps_in(tmp_path)) == 2


def writers_of(pid: int) -> list[int]:
    import psutil

    return [
        child.pid for child in psutil.Process(pid).children() if "writer" in str(child.cmdline())
    ]


def test_a_killed_writer_process_is_an_error_and_is_replaced(tmp_path: Path) -> None:
    state = make_state()
    with CheckpointStore(tmp_path) as store:
        train(state, 1, 1)
        store.save(1, state)
        train(state, 2, 2)
        [writer] = writers_of(os.getpid())
        os.kill(writer, signal.SIGSTOP)
        handle = store.save_async(2, state)
        train(state, 3, 3)
        assert not handle.done()
        os.kill(writer, signal.SIGKILL)
        result = handle.result()
        assert "the writer process died" in (result.error or "")
        assert "step 2" in (result.error or "")
        assert result.bytes == 0
        expected = bits(state)
        assert store.save(3, state).error is None
        assert writers_of(os.getpid()) != [writer]
    other = make_state(seed=7)
    restored = open_store(tmp_path).restore(other)
    assert restored is not None
    assert restored.step == 3
    assert bits(other) == expected


def test_a_writer_that_hangs_is_ended_at_the_deadline(tmp_path: Path) -> None:
    state = make_state()
    with CheckpointStore(tmp_path, timeout_seconds=8.0) as store:
        store.save(1, state)
        [writer] = writers_of(os.getpid())
        os.kill(writer, signal.SIGSTOP)
        result = store.save_async(2, state).result()
        assert "did not finish within 8 s (timeout_seconds)" in (result.error or "")
        assert store.save(3, state).error is None


def test_closing_does_not_wait_for_ever_for_a_writer_that_hangs(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, timeout_seconds=8.0)
    store.save(1, make_state())
    [writer] = writers_of(os.getpid())
    os.kill(writer, signal.SIGSTOP)
    closing = threading.Thread(target=store.close, daemon=True)
    closing.start()
    closing.join(16)
    ended = not closing.is_alive()
    with contextlib.suppress(ProcessLookupError):
        os.kill(writer, signal.SIGCONT)
    closing.join(30)
    assert ended


def save_with_a_stopped_writer(directory: Path, sender: Any) -> None:
    state = make_state()
    train(state, 1, 1)
    store = CheckpointStore(directory)
    store.save(1, state)
    [writer] = writers_of(os.getpid())
    os.kill(writer, signal.SIGSTOP)
    train(state, 2, 2)
    store.save_async(2, state)
    time.sleep(0.3)
    sender.send(writer)
    time.sleep(60)


def test_a_writer_whose_trainer_was_killed_publishes_nothing_and_ends(tmp_path: Path) -> None:
    import psutil

    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = forked(save_with_a_stopped_writer, tmp_path, sender)
    assert receiver.poll(60)
    writer = psutil.Process(receiver.recv())
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    writer.send_signal(signal.SIGCONT)
    _, alive = psutil.wait_procs([writer], timeout=30)
    assert not alive or writer.status() == psutil.STATUS_ZOMBIE
    assert steps_in(tmp_path) == [1]
    owner = json.loads((tmp_path / "owner").read_text())
    assert owner["pid"] == process.pid
    with open_store(tmp_path) as store:
        store.save(2, make_state())
    assert steps_in(tmp_path) == [1, 2]


def test_the_writer_process_loads_no_torch(tmp_path: Path) -> None:
    import psutil

    with CheckpointStore(tmp_path) as store:
        store.save(1, make_state())
        [writer] = writers_of(os.getpid())
        loaded = {Path(each.path).name for each in psutil.Process(writer).memory_maps()}
    assert "libtorch_cpu.so" not in loaded
