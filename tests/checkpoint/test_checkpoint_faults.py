"""Killed processes, full disks, forbidden directories: nothing published is ever lost."""

import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from outlast.checkpoint import CheckpointStore, SaveResult, list_versions, verify
from outlast.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

KEEP = 2
KILLS = 20
LATEST_KILL_SECONDS = 0.1
FILE_EVENTS = {
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.listdir",
    "os.scandir",
    "shutil.rmtree",
}


def make_state(value: float, width: int = 30) -> dict[str, Any]:
    """A model and AdamW of which every number is `value`."""
    model = nn.Linear(width, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[parameter][name].fill_(value)
    return {"model": model, "optimizer": optimizer}


def check_all(directory: Path) -> int:
    """Check every version and restore the newest; returns its step, 0 when there is none."""
    for version in list_versions(directory):
        verify(version)
    state = make_state(-1.0)
    restored = CheckpointStore(directory, keep=KEEP).restore(state)
    if restored is None:
        return 0
    assert restored.skipped == []
    for parameter in state["model"].parameters():
        moments = state["optimizer"].state[parameter]
        for tensor in (parameter, moments["exp_avg"], moments["exp_avg_sq"]):
            assert torch.equal(tensor, torch.full_like(tensor, float(restored.step)))
    return restored.step


def forked(work: Callable[..., Any], *args: Any) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=work, args=args)
    process.start()
    return process


def save_for_ever(directory: Path, first: int, ready: Any) -> None:
    store = CheckpointStore(directory, keep=KEEP)
    ready.set()
    for step in range(first, first + 10**6):
        store.save_async(step, make_state(float(step)))


@pytest.mark.distributed
def test_a_kill_at_any_time_loses_nothing_published(tmp_path: Path) -> None:
    delays = random.Random(0)
    newest, most = 0, 0
    for _ in range(KILLS):
        ready = multiprocessing.get_context("fork").Event()
        process = forked(save_for_ever, tmp_path, newest + 1, ready)
        assert ready.wait(60)
        time.sleep(delays.uniform(0.0, LATEST_KILL_SECONDS))
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join(60)
        step = check_all(tmp_path)
        assert step >= newest, "a published version is gone"
        most = max(most, len(list_versions(tmp_path)))
        newest = step
    assert newest > 0, "no process lived long enough to publish"
    assert most <= KEEP + 1
    CheckpointStore(tmp_path, keep=KEEP).save(newest + 1, make_state(float(newest + 1)))
    assert not list(tmp_path.glob("*.partial")), "the next save clears what the killed ones left"


def save_and_die(directory: Path, step: int, events: int) -> None:
    """Save `step`, but die at file event number `events` of the background thread."""
    store = CheckpointStore(directory, keep=KEEP)
    state = make_state(float(step))
    count = 0

    def count_event(name: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if name in FILE_EVENTS and str(directory) in str(args[0]):
            count += 1
            if count == events:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count_event)
    store.save(step, state)
    os._exit(0)


@pytest.mark.distributed
def test_a_kill_before_every_single_file_event_loses_nothing(tmp_path: Path) -> None:
    template = tmp_path / "template"
    store = CheckpointStore(template, keep=KEEP)
    for step in (1, 2):
        store.save(step, make_state(float(step)))
    killed, published = 0, False
    while not published:
        directory = tmp_path / f"killed-at-{killed + 1}"
        shutil.copytree(template, directory)
        process = forked(save_and_die, directory, 3, killed + 1)
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        published = process.exitcode == 0
        killed += not published
        assert check_all(directory) in ((3,) if published else (2, 3))
        if not published and check_all(directory) == 2:
            CheckpointStore(directory, keep=KEEP).save(3, make_state(3.0))
            assert check_all(directory) == 3
        shutil.rmtree(directory)
    assert killed > 10, "the events of writing, publishing and deleting were met"


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


@pytest.mark.parametrize("free_kilobytes", [0, 4, 8, 12, 60, 160])
def test_a_full_disk_is_one_clear_sentence(small_disk: Path, free_kilobytes: int) -> None:
    width = 120  # 174 kB of tensors
    directory = small_disk / "store"
    store = CheckpointStore(directory, keep=KEEP)
    store.save(1, make_state(1.0, width))
    before = sorted(path for path in directory.rglob("*"))
    filler = fill(small_disk)
    os.truncate(filler, filler.stat().st_size - 1024 * free_kilobytes)
    handle = store.save_async(2, make_state(2.0, width))
    result = handle.result()
    assert result.error is not None
    assert "step 2" in result.error
    assert "No space left" in result.error
    assert "\n" not in result.error
    assert result.bytes == 0
    with pytest.raises(CheckpointError, match="No space left"):
        handle.wait()
    assert sorted(path for path in directory.rglob("*")) == before, "nothing is left behind"
    [version] = list_versions(directory)
    verify(version)
    filler.unlink()
    store.save(3, make_state(3.0, width))
    state = make_state(0.0, width)
    restored = store.restore(state)
    assert restored is not None
    assert restored.step == 3


def save_with_small_files(directory: Path, sender: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (120_000, 120_000))
    store = CheckpointStore(directory, keep=KEEP)
    large = store.save_async(2, make_state(2.0, 120)).result()
    sender.send((large, store.save_async(3, make_state(3.0)).result()))


@pytest.mark.distributed
def test_a_limit_of_the_file_size_is_reported(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, keep=KEEP).save(1, make_state(1.0))
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = forked(save_with_small_files, tmp_path, sender)
    assert receiver.poll(60)
    large, small = receiver.recv()
    process.join(60)
    assert isinstance(large, SaveResult)
    assert "File too large" in (large.error or "")
    assert small.error is None
    assert check_all(tmp_path) == 3
    assert [version.step for version in list_versions(tmp_path)] == [1, 3]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    result = CheckpointStore(tmp_path / "store").save_async(1, make_state(1.0)).result()
    tmp_path.chmod(0o700)
    assert "Permission denied" in (result.error or "")


def test_a_file_in_the_place_of_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    store = CheckpointStore(tmp_path / "store")
    result = store.save_async(1, make_state(1.0)).result()
    assert "Not a directory" in (result.error or "")
    assert str(tmp_path / "store") in (result.error or "")
    (tmp_path / "store").unlink()
    assert store.save(2, make_state(2.0)).error is None
