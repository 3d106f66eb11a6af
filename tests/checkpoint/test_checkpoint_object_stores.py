"""Object stores whose clients fail with errors of their own: nothing is lost, all is said."""

import uuid
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from checkpoint_states import Holder, open_store
from fsspec.implementations.memory import MemoryFileSystem

from outlast.checkpoint import Retention, list_versions, storage_of
from outlast.checkpoint.retention import prune
from outlast.checkpoint.storage import UnreadableError
from outlast.checkpoint.version import SEAL, Version, is_published
from outlast.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:.*offers no conditional write")

Refuses = Callable[[str, str], bool]


class ThrottledFileSystem(MemoryFileSystem):
    """Raises what is no OSError, as the clients of object stores do."""

    protocol = "throttled"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    refuses: ClassVar[Refuses] = staticmethod(lambda kind, path: False)

    def _ask(self, kind: str, path: str) -> None:
        if ThrottledFileSystem.refuses(kind, path):
            raise RuntimeError("throttled")

    def _open(self, path: str, mode: str = "rb", **settings: Any) -> Any:
        self._ask("write" if "w" in mode else "read", path)
        file = super()._open(path, mode, **settings)
        if "w" in mode:
            commit = file.commit

            def ask_and_commit() -> None:
                self._ask("commit", path)
                commit()

            file.commit = ask_and_commit
            # Memory files are there from the start; those of object stores, once committed.
            file.discard = lambda: type(self).store.pop(path, None)
        return file

    def cat_file(self, path: str, *range_of: Any, **settings: Any) -> Any:
        self._ask("read", path)
        return super().cat_file(path, *range_of, **settings)

    def size(self, path: str) -> Any:
        self._ask("read", path)
        return super().size(path)

    def ls(self, path: str, detail: bool = True, **settings: Any) -> Any:
        self._ask("list", path)
        return super().ls(path, detail, **settings)

    def rm_file(self, path: str) -> None:
        self._ask("delete", path)
        super().rm_file(path)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self._ask("delete", path)
        super().rm(path, recursive, maxdepth)


fsspec.register_implementation("throttled", ThrottledFileSystem, clobber=True)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An object store that belongs to this test and does not fail yet."""
    monkeypatch.setattr(ThrottledFileSystem, "store", {})
    monkeypatch.setattr(ThrottledFileSystem, "pseudo_dirs", [""])
    refuse(lambda kind, path: False)
    yield f"throttled://{uuid.uuid4().hex}"
    refuse(lambda kind, path: False)


def refuse(refuses: Refuses) -> None:
    ThrottledFileSystem.refuses = staticmethod(refuses)  # type: ignore[assignment]


def state_of(value: int) -> dict[str, Any]:
    return {"data": Holder({"x": torch.arange(500) * value})}


def save(place: str, *steps: int, keep: int = 9) -> None:
    with open_store(place, keep=keep) as store:  # type: ignore[arg-type]
        for step in steps:
            store.save(step, state_of(step))


def restored(place: str, **settings: Any) -> tuple[int, list[str]]:
    found: dict[str, Any] = {"data": Holder()}
    outcome = open_store(place).restore(found, **settings)  # type: ignore[arg-type]
    assert outcome is not None
    assert torch.equal(found["data"].state["x"], torch.arange(500) * outcome.step)
    return outcome.step, outcome.skipped


def steps_at(place: str) -> list[int]:
    return [each.step for each in list_versions(storage_of(place))]


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("write", ".pack"),
        ("commit", ".pack"),
        ("write", "rank-00000-of-00001.json"),
        ("commit", "rank-00000-of-00001.json"),
        ("write", "catalogue"),
        ("write", SEAL),
        ("commit", SEAL),
        ("list", "step-"),
        ("read", "step-"),
    ],
)
def test_a_save_that_the_client_fails_is_reported_and_the_next_one_succeeds(
    place: str, kind: str, part: str
) -> None:
    with open_store(place) as store:  # type: ignore[arg-type]
        store.save(1, state_of(1))
        refuse(lambda asked, path: asked == kind and part in path and "step-00000002" in path)
        error = store.save_async(2, state_of(2)).result().error
        assert error is not None
        assert "the checkpoint of step 2 in" in error
        assert "RuntimeError: throttled" in error
        refuse(lambda asked, path: False)
        assert store.save(3, state_of(3)).error is None
    assert restored(place)[0] == 3
    assert restored(place, step=1)[0] == 1


@pytest.mark.parametrize("part", [".json", "catalogue", ".pack"])
def test_a_version_that_the_client_does_not_read_is_named_and_passed_over(
    place: str, part: str
) -> None:
    save(place, 1, 2)
    refuse(lambda kind, path: kind == "read" and part in path and "step-00000002" in path)
    step, [sentence] = restored(place)
    assert step == 1
    assert "step-00000002-a1" in sentence
    assert "RuntimeError: throttled" in sentence
    refuse(lambda kind, path: kind == "read" and part in path)
    with pytest.raises(CheckpointError, match="RuntimeError: throttled"):
        restored(place)
    refuse(lambda kind, path: kind == "list")
    with pytest.raises(CheckpointError, match="cannot be listed: RuntimeError: throttled"):
        restored(place)
    with pytest.raises(CheckpointError, match="cannot be listed: RuntimeError: throttled"):
        open_store(place).newest()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sealed", "kind", "part"),
    [
        (True, "read", ""),
        (True, "list", ""),
        (False, "read", ""),
        (False, "list", ""),
        (False, "read", "rank-00000-of-00001.json"),
        (False, "read", "catalogue"),
    ],
)
def test_what_cannot_be_read_now_is_not_deleted_as_remains(
    place: str, sealed: bool, kind: str, part: str
) -> None:
    save(place, 1, 2, 3)
    if not sealed:
        storage_of(place).remove(f"step-00000002-a1/{SEAL}")
    refuse(lambda asked, path: asked == kind and "step-00000002" in path and part in path)
    save(place, 4, keep=1)
    assert steps_at(place) == [1, 2, 4], "step 2 may need files of older ones, not of newer ones"
    refuse(lambda asked, path: False)
    assert restored(place, step=2)[0] == 2
    save(place, 5, keep=1)
    assert steps_at(place) == [5]


def test_deletion_that_the_client_refuses_waits_for_next_time(place: str) -> None:
    save(place, 1, 2)
    refuse(lambda kind, path: kind == "delete")
    save(place, 3, keep=1)
    assert restored(place)[0] == 3
    refuse(lambda kind, path: False)
    save(place, 4, keep=1)
    assert steps_at(place) == [4]


def test_whether_a_version_is_published_is_not_guessed(place: str) -> None:
    save(place, 1)
    storage = storage_of(place)
    assert is_published(storage, Version(1, 1))
    assert not is_published(storage, Version(1, 2))
    for kind in ("read", "list"):
        refuse(lambda asked, path: asked == kind)  # noqa: B023 asked at once
        with pytest.raises(UnreadableError, match="RuntimeError: throttled"):
            is_published(storage, Version(1, 1))


def test_an_unreadable_seal_leaves_it_to_the_parts(place: str) -> None:
    save(place, 1, 2)
    storage = storage_of(place)
    refuse(lambda kind, path: kind == "read" and SEAL in path)
    assert is_published(storage, Version(1, 1))
    assert open_store(place).newest() == Version(1, 2)  # type: ignore[arg-type]
    # By its seal the version was whole once, and retention is not to judge what happened since.
    name = Version(1, 1).part_name(0, 1)
    with storage.create(name) as file:
        file.write(b"damage")
    with pytest.raises(UnreadableError, match="RuntimeError: throttled"):
        is_published(storage, Version(1, 1))
    assert prune(storage, Retention(1)) == []
    refuse(lambda kind, path: False)
    assert prune(storage, Retention(1)) == [Version(1, 1)]


def test_errors_of_the_client_are_os_errors_with_its_words(place: str) -> None:
    save(place, 1)
    storage = storage_of(place)
    for missing in ("nothing", "step-00000001-a1/nothing"):
        with pytest.raises(FileNotFoundError):
            storage.read(missing)
        with pytest.raises(FileNotFoundError):
            storage.open(missing)
        storage.remove(missing)
        storage.remove_folder(missing)
        assert storage.files(missing) == {}
    name = f"step-00000001-a1/{SEAL}"
    reader = storage.open(name)
    refuse(lambda kind, path: True)

    def write() -> None:
        with storage.create("step-00000002-a1/file") as file:
            file.write(b"content")

    calls: list[Callable[[], object]] = [
        storage.folders,
        lambda: storage.files("step-00000001-a1"),
        lambda: storage.read(name),
        lambda: storage.open(name),
        lambda: reader.read(0, 9),
        lambda: storage.remove(name),
        lambda: storage.remove_folder("step-00000001-a1"),
        write,
    ]
    for call in calls:
        with pytest.raises(OSError, match=r"^RuntimeError: throttled$") as caught:
            call()
        assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_upload_that_is_not_finished_leaves_nothing(place: str) -> None:
    storage = storage_of(place)
    refuse(lambda kind, path: kind == "commit")
    with pytest.raises(OSError, match="throttled"), storage.create("folder/file") as file:
        file.write(b"content")
    refuse(lambda kind, path: False)
    assert storage.files("folder") == {}
    with pytest.raises(ZeroDivisionError), storage.create("folder/file") as file:
        raise ZeroDivisionError
    assert storage.files("folder") == {}
