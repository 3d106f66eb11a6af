"""Checkpoints on an S3 server: uploads in parts, one writer, outages, kills, lost answers."""

import re
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from s3_faults import Faults, fail_requests, faulty_place, kill_ranks, open_quietly, race, state_of

from outlast.checkpoint import CheckpointStore, storage_of
from outlast.checkpoint.owner import OwnedError
from outlast.checkpoint.storage import _FsspecReader

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")


@pytest.fixture
def server() -> Iterator[tuple[str, Faults]]:
    with faulty_place(0) as found:
        yield found


def uploads(place: str) -> list[str]:
    """Keys of the uploads that were begun and neither completed nor dropped."""
    bucket = place.split("/")[2]
    listed = fsspec.filesystem("s3").call_s3("list_multipart_uploads", Bucket=bucket)
    return [each["Key"] for each in listed.get("Uploads", ())]


def test_what_goes_in_parts_comes_back_whole_and_only_once(server: tuple[str, Faults]) -> None:
    place, _ = server
    storage, content = storage_of(place), bytes(torch.randint(256, (50_001,), dtype=torch.uint8))
    first = storage.create("folder/pack", exclusive=True)
    with storage.create("folder/pack", exclusive=True) as file:
        slow = first.__enter__()
        slow.write(b"x" * 50_000)
        for start in range(0, len(content), 777):
            file.write(memoryview(content)[start : start + 777])
    with pytest.raises(FileExistsError, match="another process has written"):
        first.__exit__(None, None, None)
    given_up = storage.create("folder/other")
    given_up.__enter__().write(content)
    assert not given_up.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert storage.read("folder/pack") == content
    assert storage.files("folder") == {"pack": len(content)}
    assert uploads(place) == []


@pytest.mark.parametrize(
    ("size", "request_of"), [(10, "PUT file?"), (50_000, "PUT part"), (50_000, "POST uploadId")]
)
@pytest.mark.parametrize("kind", ["refuse", "lose", "busy"])
def test_a_writer_whose_answer_is_lost_knows_its_own_object(
    server: tuple[str, Faults], kind: str, size: int, request_of: str
) -> None:
    place, faults = server
    asked, part = request_of.split()
    faults.arm(kind, 0, 1, lambda method, address: method == asked and part in address)
    storage = storage_of(place)
    with storage.create("folder/file", exclusive=True) as file:
        file.write(bytes(size))
    assert faults.staged[kind] == 1
    assert storage.files("folder") == {"file": size}


def test_what_a_killed_writer_has_sent_is_dropped_by_the_next_one(
    server: tuple[str, Faults],
) -> None:
    place, _ = server
    with open_quietly(place) as store:
        store.save(1, state_of(1))
    for name in ("step-00000002-a1/pack", "besides"):
        storage_of(place).create(name).__enter__().write(bytes(50_000))
    assert len(uploads(place)) == 2
    with open_quietly(place) as store:
        store.save(3, state_of(3))
        assert uploads(place) == [f"{place.split('/', 3)[3]}/besides"]


def test_who_saves_where_no_write_is_conditional_is_told_once(server: tuple[str, Faults]) -> None:
    place, faults = server
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        with open_quietly(place) as store:
            store.save(1, state_of(1))
        assert told == []
        faults.arm("blind")
        with open_quietly(f"{place}/blind") as store:
            for step in (1, 2, 1):
                store.save(step, state_of(step))
    [sentence] = [str(each.message) for each in told]
    assert sentence.startswith(f"{place}/blind offers no conditional write")


@pytest.mark.parametrize("kind", ["refuse", "busy", "lose"])
@pytest.mark.parametrize("first", [True, False])
def test_an_outage_is_a_failed_save_and_a_warning_and_the_next_one_succeeds(
    server: tuple[str, Faults], kind: str, first: bool
) -> None:
    place, faults = server
    with open_quietly(place) as store:
        if not first:
            store.save(1, state_of(1))
        faults.arm(kind)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for step in (2, 3):
                store.save_async(step, state_of(step))
        said = [str(each.message) for each in told]
        assert any("the checkpoint of step 2" in each and "continues" in each for each in said)
        if not first:
            assert store.save_async(4, state_of(4)).result().error is not None
        faults.disarm()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert store.save_async(5, state_of(5)).result().error is None
            store.close()
    restored = open_quietly(place).restore(state_of(0))
    assert restored is not None
    assert restored.step == 5


def test_a_claim_that_an_outage_hides_keeps_nobody_out(server: tuple[str, Faults]) -> None:
    place, faults = server
    with open_quietly(place) as store:
        # The claim is made, and neither its answer nor what is asked next arrives.
        claimed = []

        def away(method: str, address: str) -> bool:
            claimed.extend([method] if method == "PUT" and "/session-1.json" in address else [])
            return bool(claimed)

        faults.arm("lose", where=away)
        assert store.save_async(1, state_of(1)).result().error is not None
        faults.disarm()
        assert "session-1.json" in storage_of(place).files("")
        with pytest.raises(OwnedError, match="in use by process"), open_quietly(place) as other:
            other.save(1, state_of(1))
        store.save(2, state_of(2))
        store.save(1, state_of(1))
    assert [name for name in storage_of(place).files("") if "session" in name] == []


@pytest.mark.slow
def test_storage_that_hangs_holds_no_save_longer_than_its_time(
    server: tuple[str, Faults],
) -> None:
    place, faults = server
    gate = threading.Event()
    with open_quietly(place, timeout_seconds=3.0, keep=1) as store:
        store.save(1, state_of(1))
        faults.arm("slow", where=lambda method, _: method == "DELETE" and gate.wait(20))
        # Its version is there; what hangs is the deletion of the one before.
        assert store.save_async(2, state_of(2)).result().error is None
        error = store.save_async(3, state_of(3)).result().error
        assert error is not None
        assert re.search(r"within 3 s .timeout_seconds", error)
        gate.set()
        store.save(4, state_of(4))


def test_a_failure_that_nobody_asked_about_is_a_warning_later(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run", writer="thread")
    store.save(1, state_of(1))

    def fail(step: int) -> Any:
        (tmp_path / f"run/step-{step:08d}-a1").write_text("in the way")
        return store.save_async(step, state_of(step))

    assert fail(2).result().error is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fail(3)
    with pytest.warns(UserWarning, match="checkpoint of step 3 .* failed: .*training continues"):
        fail(4)
    with pytest.warns(UserWarning, match="checkpoint of step 4 .* failed"):
        store.close()


def test_tiles_are_fetched_from_an_object_store_by_several_requests_at_once(
    server: tuple[str, Faults], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, _ = server
    with open_quietly(place) as store:
        store.save(1, state_of(1))
    monkeypatch.setattr("outlast.checkpoint.reader._BATCH_BYTES", 2048)
    monkeypatch.setattr("outlast.checkpoint.storage.FsspecStorage.reads_at_once", 3)
    together = threading.Barrier(3)
    read: Callable[..., bytes] = _FsspecReader.read
    calls = []

    def meet(self: Any, offset: int, length: int) -> bytes:
        calls.append(offset)
        if len(calls) <= 3:
            together.wait(20)
        return read(self, offset, length)

    monkeypatch.setattr(_FsspecReader, "read", meet)
    assert open_quietly(place).restore(state_of(0)) is not None
    assert len(calls) > 3


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["thread", "process"])
def test_requests_that_fail_at_random_never_give_a_wrong_state(
    server: tuple[str, Faults], writer: str
) -> None:
    place, faults = server
    fail_requests(place, faults, 10 if writer == "thread" else 3, writer=writer)
    assert faults.staged.total() >= 3


@pytest.mark.distributed
def test_ranks_that_are_killed_leave_the_newest_version_and_no_other_state(
    server: tuple[str, Faults],
) -> None:
    place, faults = server
    kill_ranks(place, faults, 4)
    assert faults.staged["kill"] >= 2


@pytest.mark.distributed
def test_of_two_processes_that_race_at_most_one_saves_a_step(server: tuple[str, Faults]) -> None:
    place, faults = server
    race(place, faults, 3)
