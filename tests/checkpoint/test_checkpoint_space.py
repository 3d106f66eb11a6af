"""Full disks, limits, failing storage: one clear sentence, nothing published, nothing left over."""

import errno
import multiprocessing
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import (
    Holder,
    bits,
    make_state,
    open_store,
    restore_step,
    steps_in,
    total_bytes,
    train,
)

from outlast.checkpoint import CheckpointStore, SaveResult
from outlast.checkpoint.convert import export_checkpoint
from outlast.checkpoint.storage import LocalStorage, PendingFile
from outlast.errors import CheckpointError

BYTES = 174_000


def state_of(value: int, size: int = BYTES) -> dict[str, Any]:
    """Random bytes, which no codec makes smaller."""
    generator = torch.Generator().manual_seed(value)
    content = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
    return {"data": Holder({"x": content, "value": value})}


def restored_value(directory: Path) -> int:
    """Restore the newest version and check its bits."""
    found: dict[str, Any] = {"data": Holder()}
    step = restore_step(directory, found)
    value = found["data"].state["value"]
    expected = state_of(value, found["data"].state["x"].numel())
    assert torch.equal(found["data"].state["x"], expected["data"].state["x"])
    assert step == value
    return step


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "outlast-test", str(place)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(place: Path) -> Path:
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return filler


def files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("free_kilobytes", [0, 4, 8, 60, 172, 176])
def test_a_full_disk_is_one_clear_sentence(small_disk: Path, free_kilobytes: int) -> None:
    directory = small_disk / "store"
    with open_store(directory, keep=2) as store:
        store.save(1, state_of(1))
        before = files_in(directory)
        filler = fill(small_disk)
        os.truncate(filler, filler.stat().st_size - 1024 * free_kilobytes)
        handle = store.save_async(2, state_of(2))
        result = handle.result()
        assert result.error is not None
        assert "step 2" in result.error
        assert "No space left" in result.error
        assert "free some space or keep fewer checkpoints" in result.error
        assert "\n" not in result.error
        assert result.bytes == 0
        with pytest.raises(CheckpointError, match="No space left"):
            handle.wait()
        assert not list(directory.rglob("*.tmp"))
        assert files_in(directory) == before, "nothing is left behind on the full disk"
        assert restored_value(directory) == 1
        filler.unlink()
        store.save(3, state_of(3))
    assert restored_value(directory) == 3


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp", "megatron"])
def test_an_export_to_a_full_disk_is_one_clear_sentence(
    small_disk: Path, tmp_path: Path, kind: str
) -> None:
    with open_store(tmp_path / "store") as store:
        store.save(1, {"model": torch.nn.Linear(500, 500)})
    filler = fill(small_disk)
    os.truncate(filler, filler.stat().st_size - (200 << 10))
    with pytest.raises(CheckpointError, match="cannot be written: No space left") as caught:
        export_checkpoint(tmp_path / "store", small_disk / "exported", kind=kind)
    assert "\n" not in str(caught.value)
    assert files_in(small_disk) == [filler]


def test_a_full_disk_is_told_by_the_writer_process(small_disk: Path) -> None:
    directory = small_disk / "store"
    with CheckpointStore(directory, keep=2) as store:
        store.save(1, state_of(1))
        filler = fill(small_disk)
        error = store.save_async(2, state_of(2)).result().error or ""
        assert "No space left" in error
        filler.unlink()
        store.save(3, state_of(3))
    assert restored_value(directory) == 3


def test_a_disk_that_stays_full_loses_no_version_and_gathers_no_litter(small_disk: Path) -> None:
    directory = small_disk / "store"
    with open_store(directory, keep=1) as store:
        store.save(1, state_of(1))
        fill(small_disk)
        size = total_bytes(directory)
        for step in range(2, 8):
            assert store.save_async(step, state_of(step)).result().error
        assert total_bytes(directory) == size
    assert restored_value(directory) == 1


def in_child(work: Any, *args: Any) -> Any:
    """What ``work(*args)`` returns or raises in a forked process."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def send() -> None:
        try:
            sender.send(work(*args))
        except Exception as error:
            sender.send(error)

    process = context.Process(target=send, daemon=True)
    process.start()
    assert receiver.poll(60)
    outcome = receiver.recv()
    process.join(60)
    return outcome


def save_with_small_files(directory: Path) -> list[SaveResult]:
    with open_store(directory, keep=2) as store:
        store.save(1, state_of(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (120_000, 120_000))
        large = store.save_async(2, state_of(2)).result()
        return [large, store.save_async(3, state_of(3, 999)).result()]


@pytest.mark.distributed
def test_a_limit_of_the_file_size_is_reported(tmp_path: Path) -> None:
    large, small = in_child(save_with_small_files, tmp_path)
    assert "File too large" in (large.error or "")
    assert small.error is None
    assert restored_value(tmp_path) == 3
    assert steps_in(tmp_path) == [1, 3]


def save_first_with_small_files(directory: Path) -> SaveResult:
    resource.setrlimit(resource.RLIMIT_FSIZE, (120_000, 120_000))
    with open_store(directory) as store:
        return store.save_async(1, state_of(1)).result()


@pytest.mark.distributed
def test_memory_for_the_copy_that_cannot_be_had_stops_no_training(tmp_path: Path) -> None:
    outcome = in_child(save_first_with_small_files, tmp_path)
    # Whether in the result or at once, in a sentence of Outlast.
    assert isinstance(outcome, (SaveResult, CheckpointError)), repr(outcome)
    assert steps_in(tmp_path) == []


class Failing:
    """Fails the n-th operation that changes files, counted from the moment it is armed."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int, code: int) -> None:
        self.count = 0
        self._number = number
        self._code = code
        for owner, name in [
            (PendingFile, "write"),
            (LocalStorage, "create"),
            (LocalStorage, "files"),
            (LocalStorage, "read"),
            (LocalStorage, "folders"),
            (os, "fsync"),
            (os, "replace"),
            (os, "rename"),
            (os, "mkdir"),
        ]:
            self._wrap(patch, owner, name)

    def _wrap(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self._number:
                raise OSError(self._code, os.strerror(self._code))
            return original(*args, **kwargs)

        patch.setattr(owner, name, counted)


@pytest.mark.distributed
@pytest.mark.parametrize("code", [errno.EIO, errno.EDQUOT])
def test_an_error_at_every_single_operation_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    number, failures, reached = 0, 0, True
    while reached:
        number += 1
        directory = tmp_path / f"fails-at-{number}"
        state, plain = make_state(), make_state()
        with open_store(directory, keep=2) as store:
            for step in (1, 2):
                train(state, step, step)
                store.save(step, state)
            train(state, 3, 3)
            with monkeypatch.context() as patch:
                failing = Failing(patch, number, code)
                result = store.save_async(3, state).result()
                reached = failing.count >= number
            if result.error is not None:
                failures += 1
                assert os.strerror(code) in result.error
                assert "step 3" in result.error
                assert "\n" not in result.error
                assert result.bytes == 0
            assert not list(directory.rglob("*.tmp"))
            other = make_state(seed=7)
            found = restore_step(directory, other)
            train(plain, 1, found)
            assert bits(other) == bits(plain)
            assert found == 3 or result.error is not None
            train(state, 4, 4)
            store.save(4, state)
        assert restore_step(directory, other) == 4
        assert bits(other) == bits(state)
    assert failures > 10


def test_a_file_in_the_place_of_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    with open_store(tmp_path / "store") as store:
        with pytest.warns(UserWarning, match=f"{tmp_path}/store.*(exists|Not a directory)"):
            assert store.save_async(1, state_of(1)).result().error
        (tmp_path / "store").unlink()
        assert store.save(2, state_of(2)).error is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.warns(UserWarning, match="Permission denied"):
        assert open_store(tmp_path / "store").save_async(1, state_of(1)).result().error
    tmp_path.chmod(0o700)


def test_a_step_that_failed_can_be_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path) as store:
        with monkeypatch.context() as patch:
            Failing(patch, 5, errno.EIO)
            assert store.save_async(1, state_of(1)).result().error
        assert store.save(1, state_of(1)).error is None
    assert restored_value(tmp_path) == 1


def test_an_unknown_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nosuch://place cannot be used"):
        CheckpointStore("nosuch://place")


def test_a_store_in_memory_behind_a_url_keeps_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    place = "memory://outlast-test-store"
    with CheckpointStore(place, keep=2, writer="thread") as store:
        for step in range(1, 5):
            store.save(step, state_of(step))
        found: dict[str, Any] = {"data": Holder()}
        restored = store.restore(found)
    assert restored is not None
    assert restored.step == found["data"].state["value"] == 4
    folders = fsspec.filesystem("memory").ls("/outlast-test-store", detail=False)
    assert [name.rsplit("/")[-1] for name in sorted(folders)] == [
        "step-00000003-a1",
        "step-00000004-a1",
    ]
    fsspec.filesystem("memory").rm("/outlast-test-store", recursive=True)
