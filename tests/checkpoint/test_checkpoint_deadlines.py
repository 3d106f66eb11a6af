"""Group that are gone, silent or slow: an error within the deadline, never a wait without end."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_states import Holder, Net, open_store, steps_in
from fsspec.implementations.memory import MemoryFileSystem

from outlast.checkpoint import CheckpointStore, Tier
from outlast.checkpoint.encoder import Encoder
from outlast.checkpoint.storage import LocalStorage, PendingFile, _LocalReader
from outlast.checkpoint.tiers import Place
from outlast.checkpoint.writer import ProcessWriter
from outlast.distributed import group
from outlast.errors import CheckpointError

pytestmark = pytest.mark.distributed

Group = Callable[[int], Callable[..., list[Any]]]


def save_after_the_other_left(directory: Path) -> str | None:
    dist.init_process_group("gloo")
    store = open_store(directory, timeout_seconds=5.0)
    store.save(1, {"model": Net(0)})
    dist.barrier()
    if dist.get_rank():
        return None
    try:
        return store.save_async(2, {"model": Net(0)}).result().error
    except CheckpointError as error:
        return str(error)


def test_a_rank_that_is_gone_is_an_error_not_a_wait(ranks: Group, tmp_path: Path) -> None:
    error, _ = ranks(2)(save_after_the_other_left, tmp_path)
    assert error
    assert steps_in(tmp_path) == [1]


def save_while_the_other_sleeps(directory: Path) -> tuple[str, bool]:
    """Rank 1 lives but saves no more; returns what rank 0 learns, and whether it did in time."""
    dist.init_process_group("gloo")
    store = open_store(directory, timeout_seconds=2.0)
    store.save(1, {"model": Net(0)})
    dist.barrier()
    learned = directory.with_name(f"{directory.name}-learned")
    told: list[str] = []

    def save() -> None:
        try:
            told.append(str(store.save_async(2, {"model": Net(0)}).result().error))
        except CheckpointError as error:
            told.append(str(error))

    if dist.get_rank() == 0:
        thread = threading.Thread(target=save, daemon=True)
        thread.start()
        thread.join(10)
        in_time = not thread.is_alive()
        learned.touch()
        return "".join(told), in_time
    until = time.monotonic() + 60.0
    while not learned.exists() and time.monotonic() < until:
        time.sleep(0.05)
    return "", True


def test_a_rank_that_saves_no_more_is_an_error_within_the_deadline(
    ranks: Group, tmp_path: Path
) -> None:
    (error, in_time), _ = ranks(2)(save_while_the_other_sleeps, tmp_path)
    assert in_time, "rank 0 waited for longer than timeout_seconds"
    assert error


def save_while_the_other_writes_for_ever(directory: Path) -> str:
    """Rank 1's storage hangs in the background; the others learn it by the deadline."""
    dist.init_process_group("gloo")
    write = Encoder.write

    def slow(*args: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(4)
        return write(*args)

    Encoder.write = slow  # type: ignore[method-assign]
    store = open_store(directory, timeout_seconds=1.0)
    begun = time.monotonic()
    error = store.save_async(1, {"model": Net(0)}).result().error or ""
    assert dist.get_rank() == 1 or time.monotonic() - begun < 3.5
    time.sleep(5)
    return error


def test_a_rank_whose_storage_hangs_is_named_by_the_deadline(ranks: Group, tmp_path: Path) -> None:
    first, second, third = ranks(3)(save_while_the_other_writes_for_ever, tmp_path)
    # Rank 1 itself and who waits for it come to the end of their patience at the same time.
    for error in (first, third):
        assert re.search(r"rank 1 (did not report on the save )?within 1 s \(timeout_sec", error)
    assert second
    assert not list(tmp_path.rglob("version.json"))


def save_last(directory: Path) -> str | None:
    """All ranks end right after their last save; the others look again when rank 0 has ended."""
    dist.init_process_group("gloo")
    write = Encoder.write

    def slow(*args: Any) -> Any:
        time.sleep(0.2 * (dist.get_rank() == 0))
        return write(*args)

    Encoder.write = slow  # type: ignore[method-assign]
    group._FIRST_PAUSE_SECONDS = group._LONGEST_PAUSE_SECONDS = 1.0
    with open_store(directory) as store:
        return store.save_async(1, {"model": Net(0)}).result().error


def test_rank_zero_may_end_right_after_the_last_save(ranks: Group, tmp_path: Path) -> None:
    assert ranks(4)(save_last, tmp_path) == [None] * 4


class Hanging:
    """Storage that keeps one writer waiting until it is let go."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, kind: type, method: str, part: str, asks: str = ""
    ) -> None:
        self.answers, self.asked = threading.Event(), threading.Event()
        self._threads: set[threading.Thread] = set()
        original = getattr(kind, method)

        def hang(this: Any, *args: Any, **settings: Any) -> Any:
            where, thread = getattr(this, "storage", this), threading.current_thread()
            here = f"{getattr(where, 'location', '')} {args}"
            if part in here and thread.name.startswith(asks) and not self.asked.is_set():
                self._threads.add(thread)
                self.asked.set()
                self.answers.wait(60)
            return original(this, *args, **settings)

        monkeypatch.setattr(kind, method, hang)

    def let_go(self) -> None:
        """Answer, and wait for what was asked to end."""
        self.answers.set()
        for thread in self._threads:
            thread.join(30)


def numbers(value: int) -> dict[str, Any]:
    tensors = {f"{n}": torch.full((70_000,), 1000 * value + n) for n in range(4)}
    return {"data": Holder(tensors)}


def values_in(directory: Path, **settings: Any) -> tuple[int, int]:
    state = {"data": Holder({})}
    restored = open_store(directory).restore(state, **settings)
    assert restored is not None
    found = {int(tensor[0]) // 1000 for tensor in state["data"].state.values()}
    assert all(bool((each == each[0]).all()) for each in state["data"].state.values())
    [value] = found
    return restored.step, value


@pytest.mark.parametrize("part", ["pack", "catalogue", "00000-of-00001.json"])
def test_a_writer_thread_whose_storage_hangs_is_given_up_and_its_save_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    with open_store(tmp_path, timeout_seconds=2.0) as store:
        store.save(1, numbers(1))
        storage = Hanging(monkeypatch, LocalStorage, "create", part)
        begun = time.monotonic()
        error = store.save_async(2, numbers(2)).result().error
        assert time.monotonic() - begun < 10
        assert error is not None
        assert "did not take the part of rank 0 within 2 s (timeout_seconds)" in error
        assert storage.asked.is_set()
        # Its memory is used again while it may still look at it.
        assert store.save(3, numbers(3)).error is None
        storage.let_go()
        assert store.save(4, numbers(4)).error is None
    for step in (1, 3, 4):
        assert values_in(tmp_path, step=step) == (step, step)
    if part != "00000-of-00001.json":
        assert steps_in(tmp_path) == [1, 3, 4]


@pytest.mark.slow
def test_a_writer_process_that_has_stopped_is_ended(tmp_path: Path) -> None:
    states = [
        {"data": Holder({f"{kind}{n}": torch.ones(1) * n for n in range(9000)})} for kind in "ab"
    ]
    with CheckpointStore(tmp_path) as store:
        store.save(1, states[0])
        writer = store._states._writer
        assert isinstance(writer, ProcessWriter)
        assert writer.pid is not None
        writer._timeout_seconds = 2.0
        os.kill(writer.pid, signal.SIGSTOP)
        begun = time.monotonic()
        # Other names are told to the writer, and are more than a pipe holds.
        error = store.save_async(2, states[1]).result().error
        assert time.monotonic() - begun < 9
        assert error is not None
        assert "did not finish within 2 s (timeout_seconds)" in error
        writer._timeout_seconds = 60.0
        assert store.save(3, states[1]).error is None


@pytest.mark.parametrize(
    ("kind", "method", "part"),
    [
        (PendingFile, "write", ""),
        (LocalStorage, "create", "json"),
        (LocalStorage, "read", "json"),
        (Place, "seal", "slow"),
    ],
)
def test_a_copy_to_a_tier_whose_storage_hangs_is_told_and_undone_when_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type, method: str, part: str
) -> None:
    slow = tmp_path / "slow"
    tiers = [Tier(slow)]
    with open_store(tmp_path / "first", tiers=tiers, timeout_seconds=2.0) as store:
        store.save(1, numbers(1))
        assert [each.error for each in store.drained(wait=True)] == [None]
        with monkeypatch.context() as patch:
            storage = Hanging(patch, kind, method, part, "tier-1")
            store.save(2, numbers(2))
            until = time.monotonic() + 10
            while len(store.drained()) < 2 and time.monotonic() < until:
                time.sleep(0.05)
            result = store.drained()[-1]
            assert result.step == 2
            assert result.error is not None
            assert "did not answer within 2 s (timeout_seconds)" in result.error
            storage.let_go()
        # Once the storage has answered, the next one arrives.
        until = time.monotonic() + 10
        while any(not each.done() for each in store._tiers._undoing.values()):
            assert time.monotonic() < until
            time.sleep(0.05)
        store.save(3, numbers(3))
        assert store.drained(wait=True)[-1].error is None
    assert values_in(slow) == (3, 3)


def test_a_restore_from_a_place_that_hangs_takes_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = [Tier(tmp_path / "disk")]
    with open_store(tmp_path / "first", tiers=tiers) as store:
        store.save(1, numbers(1))
    storage = Hanging(monkeypatch, Place, "open", "first")
    with open_store(tmp_path / "first", tiers=tiers, timeout_seconds=2.0) as store:
        with pytest.warns(UserWarning, match="did not answer within 2 s"):
            restored = store.restore(numbers(0))
        assert restored is not None
        assert restored.place == str(tmp_path / "disk")
        storage.let_go()
        assert not store._tiers.first.damaged


@pytest.mark.parametrize(("kind", "method"), [(_LocalReader, "mapped"), (LocalStorage, "open")])
def test_a_restore_whose_storage_hangs_while_tensors_are_read_takes_the_next_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type, method: str
) -> None:
    model, tiers = Net(1), [Tier(tmp_path / "disk")]
    saved = [parameter.clone() for parameter in model.parameters()]
    with open_store(tmp_path / "first", tiers=tiers) as store:
        store.save(1, {"model": model})
    model = Net(2)
    storage = Hanging(monkeypatch, kind, method, "")
    with open_store(tmp_path / "first", tiers=tiers, timeout_seconds=2.0) as store:
        with pytest.warns(UserWarning, match=r"first did not answer within 2 s \(timeout_sec"):
            restored = store.restore({"model": model})
        assert restored is not None
        assert restored.place == str(tmp_path / "disk")
        assert all(map(torch.equal, model.parameters(), saved))
        assert not store._tiers.first.damaged
        # Training continues; an answer that comes late must not undo it.
        torch.nn.init.zeros_(next(model.parameters()))
        storage.let_go()
        assert not next(model.parameters()).any()


def restore_while_one_hangs(directory: Path, rank: int, what: str, part: str) -> tuple[str, Any]:
    dist.init_process_group("gloo")
    model, tiers = Net(1), [Tier(directory / "disk")]
    with open_store(directory / "first", tiers=tiers) as store:
        store.save(1, {"model": model})
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = {"mapped": _LocalReader, "open": Place, "folders": LocalStorage}[what]
        storage = Hanging(patch, kind, what, part if dist.get_rank() == rank else "nowhere")
        with open_store(directory / "first", tiers=tiers, timeout_seconds=2.0) as store:
            restored = store.restore({"model": Net(2)})
        storage.let_go()
    assert restored is not None
    return Path(restored.place).name, restored.skipped


@pytest.mark.parametrize(
    ("rank", "what", "part", "served"),
    [(1, "mapped", "", "disk"), (1, "open", "first", "disk"), (0, "folders", "disk", "first")],
)
def test_ranks_wait_for_the_one_whose_storage_hangs_and_take_another_place_together(
    ranks: Group, tmp_path: Path, rank: int, what: str, part: str, served: str
) -> None:
    first, second = ranks(2)(restore_while_one_hangs, tmp_path, rank, what, part)
    assert first == second
    assert first[0] == served
    assert "did not answer within 1.5 s (timeout_seconds)" in first[1][0]


STARTS_WITHOUT_STORAGE = """
import sys, time
from checkpoint_states import Net
from outlast.checkpoint import CheckpointStore
from outlast.checkpoint.storage import _LocalReader

_LocalReader.mapped = lambda *_: time.sleep(1000)
try:
    CheckpointStore(sys.argv[1], timeout_seconds=1.0).restore({"model": Net(2)})
except Exception as error:
    print(error)
"""


def test_a_program_whose_only_place_hangs_learns_it_and_can_end(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.save(1, {"model": Net(1)})
    found = subprocess.run(
        [sys.executable, "-c", STARTS_WITHOUT_STORAGE, tmp_path],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "did not answer within 1 s (timeout_seconds); see whether the storage" in found.stdout
    assert not found.stderr


@pytest.mark.slow
def test_a_lower_tier_that_hangs_from_the_start_hinders_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    listing = MemoryFileSystem.ls

    def hang(*args: Any, **settings: Any) -> Any:
        answers.wait(60)
        return listing(*args, **settings)

    monkeypatch.setattr(MemoryFileSystem, "ls", hang)
    tiers = [Tier(f"memory://{tmp_path.name}")]
    with open_store(tmp_path, tiers=tiers, timeout_seconds=2.0) as store:
        assert store.save_async(1, numbers(1)).result().error is None
        assert "did not answer within 2 s" in str(store.drained()[0].error)
        answers.set()
    assert steps_in(tmp_path) == [1]


def test_a_place_that_hangs_is_not_asked_for_its_newest_version_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Hanging(monkeypatch, LocalStorage, "folders", "")
    with open_store(tmp_path, timeout_seconds=2.0) as store:
        with pytest.raises(CheckpointError, match=r"did not answer within 2 s \(timeout_sec"):
            store.newest()
        storage.let_go()
