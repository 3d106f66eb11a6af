"""One writer for a directory, any number of readers, also while a save or a deletion continues."""

import multiprocessing
import os
import shutil
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import fsspec
import fsspec.implementations.local
import pytest
import torch
from checkpoint_states import Holder, WritingHeld, open_store, restore_step, save_once, steps_in

from outlast.checkpoint import CheckpointStore, Version, load, storage_of
from outlast.checkpoint import storage as storage_module
from outlast.checkpoint import store as store_module
from outlast.checkpoint.owner import Ownership
from outlast.checkpoint.reader import VersionReader, Wanted
from outlast.checkpoint.storage import LocalStorage
from outlast.errors import CheckpointError, LeaseLostError
from outlast.records.lease import LEASE_FILE, LEASE_TOKEN
from outlast.state.box import whole


def state_of(value: int) -> dict[str, Any]:
    return {"data": Holder({"x": torch.arange(500) * value, "value": value})}


def check(directory: Path, step: int) -> None:
    found: dict[str, Any] = {"data": Holder()}
    assert restore_step(directory, found) == step
    assert found["data"].state["value"] == step
    assert torch.equal(found["data"].state["x"], torch.arange(500) * step)


def own_and_wait(directory: Path, sender: Any) -> None:
    store = open_store(directory)
    store.save(1, state_of(1))
    sender.send(os.getpid())
    threading.Event().wait(60)


def other_owner(directory: Path) -> Any:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=own_and_wait, args=(directory, sender), daemon=True)
    process.start()
    assert receiver.poll(60)
    return process


@pytest.mark.distributed
def test_a_second_writer_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    owner = other_owner(tmp_path)
    with open_store(tmp_path) as store:
        with pytest.raises(CheckpointError) as caught:
            store.save_async(2, state_of(2))
        assert f"process {owner.pid} on host {socket.gethostname()}" in str(caught.value)
        assert str(tmp_path) in str(caught.value)
        assert "save to another directory" in str(caught.value)
        check(tmp_path, 1)
        assert steps_in(tmp_path) == [1]
        os.kill(owner.pid, signal.SIGKILL)
        owner.join(60)
        assert store.save(2, state_of(2)).error is None
    check(tmp_path, 2)
    assert (tmp_path / "step-00000002-a2").is_dir()


def test_two_stores_of_one_process_do_not_write_to_one_directory(tmp_path: Path) -> None:
    with open_store(tmp_path) as first:
        first.save(1, state_of(1))
        with open_store(tmp_path) as second, pytest.raises(CheckpointError, match="in use"):
            second.save_async(2, state_of(2))
        assert first.save(2, state_of(2)).error is None
    save_once(tmp_path, 3, state_of(3))
    check(tmp_path, 3)


def test_a_closed_store_leaves_no_lock(tmp_path: Path) -> None:
    save_once(tmp_path, 1, state_of(1))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001-a1"]


def test_a_reader_needs_no_ownership_and_writes_nothing(tmp_path: Path) -> None:
    save_once(tmp_path, 1, state_of(1))
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    check(tmp_path, 1)
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


def test_another_process_reads_the_version_before_while_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path) as store:
        store.save(1, state_of(1))
        writing = WritingHeld(monkeypatch)
        handle = store.save_async(2, state_of(2))
        assert writing.begun.wait(30)
        reader = multiprocessing.get_context("fork").Process(target=check, args=(tmp_path, 1))
        reader.start()
        reader.join(60)
        assert reader.exitcode == 0
        writing.gate.set()
        handle.wait()
        check(tmp_path, 2)


@pytest.mark.distributed
def test_another_process_restores_while_versions_come_and_go(tmp_path: Path) -> None:
    stop = multiprocessing.get_context("fork").Event()

    def read_for_ever(sender: Any) -> None:
        steps = []
        while not stop.is_set():
            found: dict[str, Any] = {"data": Holder()}
            restored = open_store(tmp_path).restore(found)
            assert restored is not None
            value = found["data"].state["value"]
            assert restored.step == value
            assert torch.equal(found["data"].state["x"], torch.arange(500) * value)
            steps.append(value)
        sender.send(steps)

    context = multiprocessing.get_context("fork")
    # No reader is so slow that what it has listed is deleted before it is read.
    with open_store(tmp_path, keep=20) as store:
        store.save(1, state_of(1))
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=read_for_ever, args=(sender,), daemon=True)
        process.start()
        sender.close()
        for step in range(2, 60):
            store.save(step, state_of(step))
        stop.set()
        assert receiver.poll(60), "the reader failed"
        steps = receiver.recv()
        process.join(60)
    assert steps == sorted(steps)
    assert len(steps) > 2


def read_all(reader: VersionReader, name: str) -> torch.Tensor:
    facts = reader.contents.catalogue.tensors[name]
    out = torch.zeros(facts.shape, dtype=torch.int64)
    reader.read([Wanted(name, whole(facts.shape), out.numpy().view("u8"))])
    return out


def test_a_version_that_is_open_can_be_read_after_its_deletion(tmp_path: Path) -> None:
    save_once(tmp_path, 1, state_of(1))
    storage = storage_of(tmp_path)
    with VersionReader(storage, load(storage, Version(1, 1))) as reader:
        save_once(tmp_path, 2, state_of(2), keep=1)
        assert steps_in(tmp_path) == [2]
        assert torch.equal(read_all(reader, "data.x"), torch.arange(500))


def test_a_version_deleted_before_it_is_open_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path) as store:
        for step in (1, 2):
            store.save(step, state_of(step))
    opened = VersionReader.__init__

    def late(reader: VersionReader, storage: Any, contents: Any, *args: Any) -> None:
        if contents.version.step == 2:
            shutil.rmtree(tmp_path / contents.version.folder)
        opened(reader, storage, contents, *args)

    monkeypatch.setattr(VersionReader, "__init__", late)
    found: dict[str, Any] = {"data": Holder()}
    restored = open_store(tmp_path).restore(found)
    assert restored is not None
    assert restored.step == found["data"].state["value"] == 1
    assert "step-00000002-a1/rank-00000-of-00001.pack cannot be read" in restored.skipped[0]


def test_a_reader_whose_versions_all_went_meanwhile_takes_the_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = open_store(tmp_path, keep=1)
    writer.save(1, state_of(1))
    listed = LocalStorage.folders
    calls = 0

    def then_save(storage: LocalStorage) -> list[str]:
        nonlocal calls
        found = listed(storage)
        calls += 1
        if calls == 1:
            # The listing that the reader goes by is out of date when it opens the version.
            writer.save(2, state_of(2))
        return found

    monkeypatch.setattr(LocalStorage, "folders", then_save)
    found: dict[str, Any] = {"data": Holder()}
    restored = open_store(tmp_path).restore(found)
    writer.close()
    assert restored is not None
    assert restored.step == found["data"].state["value"] == 2


@pytest.mark.parametrize("made", ["owned", "written"])
def test_every_directory_that_is_made_is_durable_in_the_one_that_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    events: list[tuple[str, Path]] = []
    mkdir, sync = Path.mkdir, storage_module.sync_directory

    def mkdir_and_note(path: Path, *args: Any, **settings: Any) -> None:
        mkdir(path, *args, **settings)
        events.append(("made", path))

    def sync_and_note(path: Path) -> None:
        sync(path)
        events.append(("synced", path))

    monkeypatch.setattr(Path, "mkdir", mkdir_and_note)
    monkeypatch.setattr(storage_module, "sync_directory", sync_and_note)
    root = tmp_path / "runs" / "run" / "checkpoints"
    expected = [tmp_path / "runs", tmp_path / "runs" / "run", root]
    if made == "owned":
        ownership = Ownership(LocalStorage(root))
        ownership.lock()
        ownership.release()
    else:
        with LocalStorage(root).create("step-00000001-a1/file") as file:
            file.write(b"content")
        expected.append(root / "step-00000001-a1")
    assert [path for kind, path in events if kind == "made"] == expected
    for path in expected:
        assert ("synced", path.parent) in events[events.index(("made", path)) :]


def test_a_store_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="checkpoints cannot be made: "):
        Ownership(LocalStorage(tmp_path / "file" / "run" / "checkpoints")).lock()


@pytest.mark.parametrize("writer", ["thread", "process"])
@pytest.mark.parametrize("place", ["local", "url"])
def test_a_save_whose_lease_is_lost_meanwhile_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: Any, place: str
) -> None:
    """Another job of the chain has begun: also what was copied before is made visible no more."""
    fence = tmp_path / "fence.json"
    fence.write_text('{"job": "7", "host": "h", "token": "mine"}')
    monkeypatch.setenv(LEASE_FILE, str(fence))
    monkeypatch.setenv(LEASE_TOKEN, "mine")
    # It would end this process: see tests/records/test_run_lock.py.
    monkeypatch.setattr(store_module, "leave_without_lease", lambda: None)
    directory = tmp_path / "store"
    url = directory if place == "local" else f"local-url://{directory}"
    if place == "url":
        if writer == "process":
            pytest.skip("the writer's own process does not know the protocol")
        fsspec.register_implementation("local-url", LocalUrl, clobber=True)
    with CheckpointStore(url, writer=writer) as store:
        store.save(1, state_of(1))
        names = sorted(path for path in directory.rglob("*") if path.is_file())
        # As the last bytes are written.
        state = {"data": LosesLease(fence)}
        handle = store.save_async(2, state)
        assert "job 8 on host h2 has taken over this run" in str(handle.result().error)
        with pytest.raises(LeaseLostError, match="nothing more is saved by this process"):
            store.save_async(3, state_of(3))
        left = [path for path in directory.rglob("*") if path.is_file() and path not in names]
        assert not [path for path in left if path.suffix == ".json"], left
    monkeypatch.delenv(LEASE_FILE)
    check(directory, 1)


class LosesLease(Holder):
    """A state while whose copy another job takes the lease."""

    def __init__(self, fence: Path) -> None:
        super().__init__({"x": torch.arange(500) * 2, "value": 2})
        self._fence = fence

    def state_dict(self) -> dict[str, Any]:
        self._fence.write_text('{"job": "8", "host": "h2", "token": "other"}')
        return super().state_dict()


class LocalUrl(fsspec.implementations.local.LocalFileSystem):
    """Files behind a protocol, so that the store takes them for objects."""

    protocol = "local-url"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("local-url://")))


def test_a_store_that_was_taken_over_is_not_sealed_by_its_first_owner(tmp_path: Path) -> None:
    """As when this process was suspended for so long that another host broke its lock."""
    with open_store(tmp_path) as store:
        store.save(1, state_of(1))
        lock = tmp_path / "owner"
        lock.write_text(lock.read_text().replace(f'"pid": {os.getpid()}', '"pid": 1'))
        with pytest.raises(LeaseLostError, match="was taken over by process 1 on host"):
            store.save_async(2, state_of(2))
    assert steps_in(tmp_path) == [1]
