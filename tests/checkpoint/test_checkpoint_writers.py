"""Two writers of one store: never do both say that they saved while one state is lost."""

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import Holder, open_store
from s3_server import s3_server

from outlast.checkpoint import CheckpointStore, Retention, list_versions, load, storage_of
from outlast.checkpoint.inspection import prune_store
from outlast.checkpoint.owner import Claim, OwnedError, claimed
from outlast.checkpoint.reader import VersionReader
from outlast.checkpoint.storage import publish
from outlast.checkpoint.version import SEAL
from outlast.errors import CheckpointError, LeaseLostError

RIVAL = """
import sys, torch
from outlast.checkpoint import CheckpointStore
from outlast.errors import CheckpointError

class Holder:
    def __init__(self, state): self.state = state
    def state_dict(self): return self.state
    def load_state_dict(self, state): self.state = state

value = int(sys.argv[1])
for line in sys.stdin:
    place, steps = line.split()
    store = CheckpointStore(place, writer="thread", keep=9)
    print("open", flush=True)
    sys.stdin.readline()
    said = []
    for step in range(1, int(steps) + 1):
        try:
            error = store.save_async(step, {"data": Holder({"x": torch.full((3000,), value)})})
            error = error.result().error
        except CheckpointError as refused:
            error = str(refused)
        said.append("saved" if error is None else error)
    print("|".join(said), flush=True)
    sys.stdin.readline()
    store.close()
"""


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "store")
        return
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with s3_server(f"b{uuid.uuid4().hex}") as url:
        yield f"{url}/run"


def started(value: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RIVAL, str(value)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def tell(rival: subprocess.Popen[str], line: str) -> None:
    assert rival.stdin is not None
    rival.stdin.write(f"{line}\n")
    rival.stdin.flush()


def hear(rival: subprocess.Popen[str]) -> str:
    assert rival.stdout is not None
    return rival.stdout.readline().strip()


def values_at(place: str) -> dict[int, set[int]]:
    """Step to the contents of its versions, of which every byte is checked."""
    storage = storage_of(place)
    found: dict[int, set[int]] = {}
    for version in list_versions(storage):
        try:
            contents = load(storage, version)
        except CheckpointError:
            continue
        with VersionReader(storage, contents) as reader:
            reader.check()
        holder = Holder()
        open_store(place).restore({"data": holder}, step=version.step)  # type: ignore[arg-type]
        found.setdefault(version.step, set()).add(int(holder.state["x"][0]))
    return found


@pytest.mark.slow
def test_of_two_processes_that_save_one_step_at_once_one_is_refused(place: str) -> None:
    rivals = [started(value) for value in (1, 2)]
    try:
        for attempt in range(5):
            here = f"{place}/{attempt}"
            for rival in rivals:
                tell(rival, f"{here} 3")
            assert [hear(rival) for rival in rivals] == ["open", "open"]
            for rival in rivals:
                tell(rival, "go")
            outcomes = [hear(rival).split("|") for rival in rivals]
            for rival in rivals:
                tell(rival, "close")
            saved = [{step + 1 for step, said in enumerate(o) if said == "saved"} for o in outcomes]
            assert not saved[0] & saved[1], outcomes
            assert saved[0] == {1, 2, 3} or saved[1] == {1, 2, 3}, outcomes
            refused = [said for outcome in outcomes for said in outcome if said != "saved"]
            words = ("is in use by process", "since this one looked there last")
            assert all(any(each in said for each in words) for said in refused), refused
            kept = values_at(here)
            for value, steps in zip((1, 2), saved, strict=True):
                for step in steps:
                    assert value in kept[step]
    finally:
        for rival in rivals:
            rival.kill()
            rival.communicate()


def state_of(value: int) -> dict[str, Any]:
    return {"data": Holder({"x": torch.arange(500) * value})}


@pytest.fixture
def memory() -> str:
    return f"memory://{uuid.uuid4().hex}"


def test_a_second_store_in_this_process_is_refused_until_the_first_is_closed(memory: str) -> None:
    first = open_store(memory)  # type: ignore[arg-type]
    first.save(1, state_of(1))
    second = open_store(memory)  # type: ignore[arg-type]
    with pytest.raises(OwnedError, match=r"is in use by process \d+ on host"):
        second.save_async(1, state_of(2))
    with pytest.raises(OwnedError, match="is in use"):
        prune_store(storage_of(memory), Retention(1))
    first.close()
    assert second.restore(state_of(0)).step == 1  # type: ignore[union-attr]
    second.save(2, state_of(2))
    second.close()


def test_who_looked_before_another_saved_is_refused(memory: str) -> None:
    late = open_store(memory)  # type: ignore[arg-type]
    with open_store(memory) as first:  # type: ignore[arg-type]
        first.save(5, state_of(1))
    with pytest.raises(OwnedError, match="since this one looked there last: restore before"):
        late.save_async(5, state_of(2))
    # Once it has looked again, it continues from the newest state.
    assert late.restore(state_of(0)).step == 5  # type: ignore[union-attr]
    late.save(6, state_of(2))


def test_who_was_taken_over_publishes_nothing_more(memory: str) -> None:
    with open_store(memory) as first:  # type: ignore[arg-type]
        first.save(1, state_of(1))
        # As from another host, of which nothing can be known from here.
        rival = Claim(storage_of(memory), 2, mine=["session-1.json"], held=False)
        error = first.save_async(2, state_of(2)).result().error
        assert error is not None
        assert "which took over from this one; nothing more is published here" in error
        assert open_store(memory).restore(state_of(0)).step == 1  # type: ignore[union-attr]
        with pytest.raises(OwnedError, match="is in use"):
            first.save_async(2, state_of(3))
        rival.release()
        assert first.save_async(3, state_of(3)).result().error is None


def test_each_session_of_a_store_has_a_claim_of_its_own(memory: str) -> None:
    with open_store(memory, keep=9) as store:  # type: ignore[arg-type]
        for step in (1, 2, 1, 2):
            store.save(step, state_of(step))
        assert store.restore(state_of(0), step=1)
        store.save(2, state_of(2))
        assert sorted(claimed(storage_of(memory))) == [3]
    assert [v.session for v in list_versions(storage_of(memory))] == [1, 1, 2, 2, 3]
    assert claimed(storage_of(memory)) == {}


def test_a_file_that_is_there_is_not_replaced(place: str) -> None:
    storage = storage_of(place)
    publish(storage, "folder/file", b"first")
    publish(storage, "folder/file", b"first")
    with pytest.raises(FileExistsError, match="another process has written"):
        publish(storage, "folder/file", b"other")
    pending = storage.create("folder/pack", exclusive=True)
    file = pending.__enter__()
    file.write(b"slow")
    publish(storage, "folder/pack", b"fast")
    with pytest.raises(FileExistsError):
        pending.__exit__(None, None, None)
    assert storage.read("folder/file") == b"first"
    assert storage.read("folder/pack") == b"fast"
    assert set(storage.files("folder")) == {"file", "pack"}


def test_a_seal_of_another_writer_stays(tmp_path: Path) -> None:
    place = str(tmp_path)
    with CheckpointStore(place, writer="thread") as store:
        store.save(1, state_of(1))
        seal = storage_of(place).read(f"step-00000001-a1/{SEAL}")
        publish(storage_of(place), f"step-00000002-a1/{SEAL}", seal)
        error = store.save_async(2, state_of(2)).result().error
        assert error is not None
        assert "published already" in error
    assert storage_of(place).read(f"step-00000002-a1/{SEAL}") == seal


def test_a_lock_that_another_process_broke_is_found_at_the_next_save(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, writer="thread") as store:
        store.save(1, state_of(1))
        lock = tmp_path / "owner"
        lock.write_text(lock.read_text().replace('"pid": ', '"pid": 1'))
        with pytest.raises(LeaseLostError, match="was taken over by process 1"):
            store.save_async(2, state_of(2))
        # The other process has ended: what it saved must not be followed by this one's.
        lock.unlink()
        with pytest.raises(LeaseLostError, match="lost its lock"):
            store.save_async(3, state_of(3))
    assert not lock.exists()
