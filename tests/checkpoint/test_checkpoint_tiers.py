"""Lower tiers: what reaches them, what is restored from them, and what never hurts a save."""

import errno
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from checkpoint_states import (
    Holder,
    Net,
    bits,
    make_optimizers,
    make_state,
    open_store,
    steps_in,
    train,
)
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from outlast.checkpoint import (
    CheckpointStore,
    DrainResult,
    Restored,
    Retention,
    Tier,
    Version,
    list_versions,
    load,
    storage_of,
)
from outlast.checkpoint.reader import VersionReader
from outlast.checkpoint.storage import LocalStorage, RateLimiter
from outlast.checkpoint.tiers import Copy, Place, Tiers
from outlast.checkpoint.version import SEAL, is_published
from outlast.distributed.group import Group as OneRank
from outlast.distributed.group import StoreAgreement
from outlast.errors import CheckpointError

Group = Callable[[int], Callable[..., list[Any]]]

FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir"}


def make_model(value: float, width: int = 4) -> dict[str, Any]:
    model = nn.Linear(width, width)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return {"model": model}


def random_model(seed: int, width: int) -> dict[str, Any]:
    """A model that no codec makes much smaller."""
    torch.manual_seed(seed)
    return {"model": nn.Linear(width, width)}


def restored_from(*places: Path | str, **settings: Any) -> Restored:
    """Restore weights that are their step, from the first of `places` and its tiers."""
    store = open_store(places[0], tiers=[Tier(place) for place in places[1:]])  # type: ignore[arg-type]
    state = make_model(-1.0)
    restored = store.restore(state, **settings)
    assert restored is not None
    for parameter in state["model"].parameters():
        assert torch.equal(parameter, torch.full_like(parameter, float(restored.step)))
    store.close(drain=False)
    return restored


def failures(results: list[DrainResult]) -> list[str]:
    return [each.error for each in results if each.error is not None]


pytestmark = pytest.mark.usefixtures("either_seal")


@pytest.fixture
def memory() -> Iterator[str]:
    """An object store that belongs to this test."""
    name = f"tier-{uuid.uuid4().hex}"
    yield f"memory://{name}"
    filesystem = MemoryFileSystem()
    if filesystem.exists(f"/{name}"):
        filesystem.rm(f"/{name}", recursive=True)


def steps_at(url: str) -> list[int]:
    storage = storage_of(url)
    return [each.step for each in list_versions(storage) if is_published(storage, each)]


def test_each_tier_has_its_own_interval_and_retention(tmp_path: Path, memory: str) -> None:
    disk = tmp_path / "disk"
    tiers = [Tier(disk, every=2, keep=2), Tier(memory, every=3, keep=Retention(1, every=3))]
    with open_store(tmp_path / "first", keep=1, tiers=tiers) as store:
        for step in range(1, 10):
            store.save(step, make_model(float(step)))
            assert failures(store.drained(wait=True)) == []
            assert steps_in(tmp_path / "first") == [step]
        assert steps_in(disk) == [6, 8]
        assert steps_at(memory) == [3, 6, 9]
        copied = [(each.place, each.step) for each in store.drained()]
        assert copied.count((memory, 6)) == 1
        assert all(each.bytes > 0 and each.seconds > 0 for each in store.drained())
    assert steps_in(disk) == [8, 9], "closing copies the newest version to all tiers"
    assert restored_from(memory).step == 9
    assert restored_from(disk).step == 9


def test_closing_may_leave_the_tiers_as_they_are(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    store = open_store(tmp_path / "first", tiers=[Tier(disk, every=2)])
    store.save(1, make_model(1.0))
    store.close(drain=False)
    assert steps_in(disk) == []
    store = open_store(tmp_path / "second", tiers=[Tier(disk, every=2)])

    def fail() -> None:
        with store:
            store.save(1, make_model(1.0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert steps_in(disk) == [], "an error in the block does not make it wait"


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_the_nearest_tier_is_read_and_a_lost_node_is_no_loss(
    tmp_path: Path, memory: str, protocol: str
) -> None:
    place = memory if protocol == "memory" else f"file://{tmp_path}/shared"
    first, disk = tmp_path / "first", tmp_path / "disk"
    tiers = [Tier(disk), Tier(place)]
    state = make_state()
    with open_store(first, keep=1, tiers=tiers) as store:
        for step in (1, 2, 3):
            train(state, step, step)
            store.save(step, state)
    expected = bits(state)
    shared = storage_of(place).location
    for where in (first, disk, shared):
        back = make_state(5)
        with open_store(first, tiers=tiers) as store:
            assert store.newest() == Version(1, 3)
            restored = store.restore(back)
        assert restored is not None
        assert (restored.step, restored.place, restored.skipped) == (3, str(where), [])
        assert bits(back) == expected
        if where != shared:
            shutil.rmtree(where)
    with open_store(first, keep=1, tiers=tiers) as store:
        assert store.restore(back) is not None
        train(back, 4, 4)
        store.save(4, back)
        assert store.newest() == Version(2, 4), "sessions continue from those of all tiers"
    assert steps_in(first) == [4]
    assert steps_in(disk)[-1] == 4
    again = make_state(6)
    restored = open_store(first).restore(again)
    assert restored is not None
    assert restored.place == str(first)
    assert bits(again) == bits(back)


def test_a_tier_that_got_half_of_a_version_is_passed_over(tmp_path: Path) -> None:
    first, disk, shared = tmp_path / "first", tmp_path / "disk", tmp_path / "shared"
    with open_store(first, tiers=[Tier(disk), Tier(shared)]) as store:
        for step in (1, 2):
            store.save(step, make_model(float(step)))
            store.drained(wait=True)
    shutil.rmtree(first)
    folder = disk / "step-00000002-a1"
    (folder / SEAL).unlink()
    assert restored_from(first, disk, shared).place == str(disk), "all parts are there"
    (folder / "rank-00000-of-00001.json").unlink()
    restored = restored_from(first, disk, shared)
    assert (restored.step, restored.place) == (2, str(shared))
    assert len(restored.skipped) == 1
    assert str(folder) in restored.skipped[0]
    shutil.rmtree(shared)
    restored = restored_from(first, disk, shared)
    assert (restored.step, restored.place) == (1, str(disk))
    shutil.rmtree(disk / "step-00000001-a1")
    assert open_store(first, tiers=[Tier(disk)]).restore(make_model(0.0)) is None


def flip(path: Path, at: int = -9) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_damage_in_a_near_tier_is_read_from_a_farther_one(tmp_path: Path) -> None:
    first, disk = tmp_path / "first", tmp_path / "disk"
    with open_store(first, tiers=[Tier(disk)]) as store:
        for step in (1, 2):
            store.save(step, random_model(step, 40))
            store.drained(wait=True)
    flip(first / "step-00000002-a1" / "rank-00000-of-00001.pack")
    state = random_model(9, 40)
    restored = open_store(first, tiers=[Tier(disk)]).restore(state)
    assert restored is not None
    assert (restored.step, restored.place) == (2, str(disk))
    assert "is damaged" in restored.skipped[0]
    expected = random_model(2, 40)["model"].weight
    assert torch.equal(state["model"].weight, expected)


def test_a_damaged_source_is_not_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, disk = tmp_path / "first", tmp_path / "disk"
    run = Copy.run

    def run_on_damage(copy: Any) -> None:
        if copy._version.step == 2:
            flip(first / "step-00000002-a1" / "rank-00000-of-00001.pack")
        run(copy)

    monkeypatch.setattr(Copy, "run", run_on_damage)
    with open_store(first, tiers=[Tier(disk)]) as store:
        for step in (1, 2, 3):
            store.save(step, random_model(step, 40))
            store.drained(wait=True)
    [error] = failures(store.drained())
    assert error.startswith(f"the copy of step 2 to {disk} failed:")
    assert "is damaged" in error
    assert steps_in(disk) == [1, 3]
    assert not list((disk / "step-00000002-a1").rglob("*.pack")), "nothing of it is left"


@pytest.mark.parametrize("every", [1, 3])
def test_versions_arrive_with_what_they_refer_to(tmp_path: Path, memory: str, every: int) -> None:
    first = tmp_path / "first"
    frozen = torch.randn(90, 90)
    state = {**make_state(), "frozen": Holder(frozen)}
    expected = {}
    tiers = [Tier(memory, every=every, keep=1)]
    with open_store(first, keep=1, tiers=tiers) as store:
        for step in range(1, 10):
            train(state, step, step)
            store.save(step, state)
            expected[step] = bits(state)
            assert failures(store.drained(wait=True)) == []
            newest = step // every * every
            if newest:
                storage = storage_of(memory)
                contents = load(storage, Version(1, newest))
                with VersionReader(storage, contents) as reader:
                    reader.check()
        assert len(contents.packs) > 1, "it needs packs of versions that were not copied"
    shutil.rmtree(first)
    back = {**make_state(4), "frozen": Holder(torch.zeros(90, 90))}
    restored = open_store(first, tiers=tiers).restore(back)
    assert restored is not None
    assert bits(back) == expected[restored.step]
    assert torch.equal(back["frozen"].state, frozen)
    assert restored.step == 9


@pytest.mark.slow
def test_the_bandwidth_cap_holds(tmp_path: Path) -> None:
    cap = 600e3
    disk = tmp_path / "disk"
    with open_store(tmp_path / "first", tiers=[Tier(disk, bytes_per_second=cap)]) as store:
        store.save(1, random_model(1, 400))
        begun = time.perf_counter()
        [result] = store.drained(wait=True)
        elapsed = time.perf_counter() - begun
    assert result.error is None
    made = "index-of-00001.json", SEAL
    written = sum(p.stat().st_size for p in disk.rglob("*") if p.is_file() and p.name not in made)
    assert result.bytes == written > 400e3
    assert result.bytes / result.seconds <= 1.2 * cap
    assert result.bytes / elapsed <= 1.2 * cap
    assert elapsed < 5 * result.bytes / cap


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


class SlowTier:
    """Holds all copies to one directory until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.gate = threading.Event()
        self.begun = threading.Event()
        run = Copy.run

        def held(copy: Any) -> None:
            if copy._to.location == str(directory):
                self.begun.set()
                assert self.gate.wait(20)
            run(copy)

        monkeypatch.setattr(Copy, "run", held)


def test_what_is_being_copied_is_not_deleted_and_only_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, disk = tmp_path / "first", tmp_path / "disk"
    slow = SlowTier(monkeypatch, disk)
    with open_store(first, keep=1, tiers=[Tier(disk, keep=9)]) as store:
        store.save(1, make_model(1.0))
        assert slow.begun.wait(30)
        for step in range(2, 7):
            store.save(step, make_model(float(step)))
            assert steps_in(first) == [1, step], "one is being copied, the newest waits"
        slow.gate.set()
        results = store.drained(wait=True)
        assert failures(results) == []
        assert [each.step for each in results if each.skipped] == [2, 3, 4, 5]
        assert {each.skipped for each in results} == {"", "a newer one came first"}
        store.save(7, make_model(7.0))
        assert steps_in(first)[-1] == 7
        assert 1 not in steps_in(first)
    assert steps_in(disk) == [1, 6, 7]
    for step in (1, 6, 7):
        assert restored_from(disk, step=step).step == step


def test_a_tier_copies_from_the_tier_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, disk, shared = tmp_path / "first", tmp_path / "disk", tmp_path / "shared"
    slow = SlowTier(monkeypatch, shared)
    tiers = [Tier(disk, keep=1), Tier(shared, keep=9)]
    with open_store(first, keep=1, tiers=tiers) as store:
        store.save(1, make_model(1.0))
        assert slow.begun.wait(30)
        for step in (2, 3):
            store.save(step, make_model(float(step)))
            # Pruning of the disk follows its seal.
            wait_until(lambda: steps_in(disk) == [1, step])  # noqa: B023 called at once
        store.save(4, make_model(4.0))
        assert 1 not in steps_in(first), "the slow copy does not hold it in the first tier"
        slow.gate.set()
    assert failures(store.drained()) == []
    assert restored_from(shared, step=1).step == 1
    assert restored_from(shared).step == 4


class FullFileSystem(MemoryFileSystem):
    """A file system on which nothing can be written any more."""

    protocol = "full"
    store: dict[str, Any] = {}  # noqa: RUF012 as in MemoryFileSystem
    pseudo_dirs = [""]  # noqa: RUF012

    def _open(self, path: str, mode: str = "rb", **settings: Any) -> Any:
        if "w" in mode:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super()._open(path, mode, **settings)


class GoneFileSystem(MemoryFileSystem):
    """An object store that nobody reaches."""

    protocol = "gone"

    def ls(self, path: str, detail: bool = True, **settings: Any) -> Any:
        raise ConnectionError("no route to host")


fsspec.register_implementation("full", FullFileSystem, clobber=True)
fsspec.register_implementation("gone", GoneFileSystem, clobber=True)


@pytest.mark.parametrize("place", ["full://run", "gone://run"])
def test_a_tier_that_fails_is_reported_and_hinders_nothing(tmp_path: Path, place: str) -> None:
    first, disk = tmp_path / "first", tmp_path / "disk"
    tiers = [Tier(place), Tier(disk)]
    with open_store(first, keep=1, tiers=tiers) as store:
        for step in (1, 2):
            assert store.save(step, make_model(float(step))).error is None
            store.drained(wait=True)
        results = store.drained()
    assert steps_in(first) == [2]
    assert steps_in(disk) == [1, 2]
    errors = [each for each in results if each.error is not None]
    assert {each.place for each in errors} == {place}
    words = "No space left" if place.startswith("full") else "no route to host"
    assert all(words in (each.error or "") for each in errors)
    assert {1, 2} <= {each.step for each in errors}
    restored = restored_from(first, place)
    assert restored.step == 2
    assert len(restored.skipped) == place.startswith("gone")


def test_an_unreachable_tier_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    store = open_store(tmp_path / "first", tiers=[Tier("gone://run")])
    with pytest.raises(CheckpointError, match="gone://run cannot be listed"):
        store.restore(make_model(0.0))
    assert store.newest() is None


def test_what_a_session_did_not_copy_any_more_the_next_one_copies(tmp_path: Path) -> None:
    first, disk = tmp_path / "first", tmp_path / "disk"
    store = open_store(first, tiers=[Tier(disk, every=10)])
    for step in (1, 2):
        store.save(step, make_model(float(step)))
    store.close(drain=False)
    assert steps_in(disk) == []
    store = open_store(first, keep=1, tiers=[Tier(disk, every=10)])
    store.save(3, make_model(3.0))
    results = store.drained(wait=True)
    assert [(each.step, each.error) for each in results] == [(2, None)]
    assert steps_in(disk) == [2]
    store.close(drain=False)
    assert restored_from(disk).step == 2


@pytest.mark.parametrize("width", [20, 21])
def test_files_of_another_run_in_a_tier_are_not_touched(tmp_path: Path, width: int) -> None:
    disk, other = tmp_path / "disk", tmp_path / "other"
    # Two runs that cannot know of each other, as the tier was away when the second began.
    for place, seed, columns in ((other, 5, 20), (tmp_path / "first", 1, width)):
        with open_store(place) as store:
            store.save(1, random_model(seed, columns))
    shutil.copytree(other, disk)
    before = {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()}
    copy = Copy(
        place_of(tmp_path / "first"),
        place_of(disk),
        Version(1, 1),
        RateLimiter(None, threading.Event()),
    )
    with pytest.raises(CheckpointError, match="of another run"):
        copy.run()
    copy.undo()
    assert {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()} == before


def place_of(directory: Path) -> Place:
    return Place(LocalStorage(directory), Retention(), False, 0, 1)


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        (lambda p: [Tier(p / "a", every=0)], "every = 0"),
        (lambda p: [Tier(p / "a", bytes_per_second=0.0)], "bytes_per_second = 0.0"),
        (lambda p: [Tier(p / "a", keep=0)], "keep = 0"),
        (lambda p: [Tier(p / "a"), Tier(p / "a")], "two tiers"),
        (lambda p: [Tier(p / "a", private=True)], "private tiers first"),
        (lambda p: [Tier("nonsense://a")], "nonsense"),
    ],
)
def test_tiers_without_sense_are_refused(
    tmp_path: Path, tiers: Callable[[Path], list[Tier]], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        open_store(tmp_path / "first", tiers=tiers(tmp_path))


def forked(work: Callable[..., Any], *args: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=work, args=args)
    process.start()
    return process


def drain_and_die(first: Path, disk: Path, events: int) -> None:
    """Save step 3 and die at file event number `events` of the copy of it."""
    store = open_store(first, keep=1, tiers=[Tier(disk, keep=1)])
    count = 0

    def count_event(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        copying = threading.current_thread().name.startswith("tier-1")
        if copying and name in FILE_EVENTS and str(disk) in str(arguments[0]):
            count += 1
            if count == events:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count_event)
    store.save(3, make_model(3.0))
    store.close()
    os._exit(0)


@pytest.mark.distributed
def test_a_kill_before_every_file_event_of_a_copy_leaves_no_half_version(tmp_path: Path) -> None:
    template = tmp_path / "template"
    tiers = [Tier(template / "disk", keep=1)]
    with open_store(template / "first", keep=1, tiers=tiers) as store:
        for step in (1, 2):
            store.save(step, make_model(float(step)))
    killed, ended, seen = 0, False, set()
    while not ended:
        place = tmp_path / f"killed-{killed + 1}"
        shutil.copytree(template, place)
        first, disk = place / "first", place / "disk"
        process = forked(drain_and_die, first, disk, killed + 1)
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        ended = process.exitcode == 0
        killed += not ended
        step = restored_from(disk).step
        seen.add(step)
        storage = storage_of(disk)
        for version in filter(lambda each: is_published(storage, each), list_versions(storage)):
            with VersionReader(storage, load(storage, version)) as reader:
                reader.check()
        assert restored_from(first, disk).step == 3
        with open_store(first, keep=1, tiers=[Tier(disk, keep=1)]) as store:
            store.save(4, make_model(4.0))
        assert failures(store.drained()) == []
        assert restored_from(disk).step == 4
        assert steps_in(disk) == [4], "what the kill left behind is gone"
        shutil.rmtree(place)
    assert seen == {2, 3}
    assert killed > 10, "the events of copying, sealing and deleting were met"


def private_store(directory: Path, **settings: Any) -> CheckpointStore:
    """Memory and disk of a node, as this rank sees them, and a file system that all ranks see."""
    node = directory / f"node-{dist.get_rank()}"
    tiers = [
        Tier(node / "disk", every=2, private=True),
        Tier(directory / "shared", every=4, keep=1),
    ]
    return open_store(
        node / "memory", keep=1, private=True, tiers=tiers, timeout_seconds=60, **settings
    )


def mixed_state(seed: int) -> dict[str, Any]:
    """A sharded model; its buffers are the same on every rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Net(seed)
    for layer in model.hidden:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": make_optimizers(model)}


def save_privately(directory: Path, last: int) -> tuple[dict[str, Any], list[DrainResult]]:
    dist.init_process_group("gloo")
    state = mixed_state(0)
    with private_store(directory) as store:
        for step in range(1, last + 1):
            train(state, step, step)
            store.save(step, state)
            store.drained(wait=True)
    dist.barrier()
    return bits(state), store.drained()


def restore_privately(directory: Path) -> tuple[dict[str, Any], Restored | None]:
    dist.init_process_group("gloo")
    state = mixed_state(7)
    store = private_store(directory)
    restored = store.restore(state)
    store.close(drain=False)
    found = bits(state)
    dist.barrier()
    return found, restored


def places_of(outcomes: list[Any], directory: Path) -> list[str]:
    return [str(Path(each.place).relative_to(directory)) for _, each in outcomes]


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 3])
def test_private_tiers_are_read_when_every_rank_has_its_part(
    ranks: Group, tmp_path: Path, size: int
) -> None:
    saved = ranks(size)(save_privately, tmp_path, 5)
    expected = saved[0][0]
    for rank, (content, results) in enumerate(saved):
        assert content == expected
        assert failures(results) == []
        memory = tmp_path / f"node-{rank}" / "memory" / f"rank-{rank:05d}"
        assert steps_in(memory) == [5], "each rank deletes its own"
    assert steps_in(tmp_path / "shared") == [5]

    outcomes = ranks(size)(restore_privately, tmp_path)
    assert [content for content, _ in outcomes] == [expected] * size
    assert all((each.step, each.skipped) == (5, []) for _, each in outcomes)
    assert places_of(outcomes, tmp_path) == [f"node-{n}/memory/rank-{n:05d}" for n in range(size)]

    # One node was replaced: all ranks go to the next tier that has everything, together.
    shutil.rmtree(tmp_path / "node-1" / "memory")
    outcomes = ranks(size)(restore_privately, tmp_path)
    assert places_of(outcomes, tmp_path) == [f"node-{n}/disk/rank-{n:05d}" for n in range(size)]
    assert "node-1/memory" in outcomes[0][1].skipped[0]
    shutil.rmtree(tmp_path / "node-1")
    outcomes = ranks(size)(restore_privately, tmp_path)
    assert places_of(outcomes, tmp_path) == ["shared"] * size
    assert [content for content, _ in outcomes] == [expected] * size
    assert all(each.step == 5 for _, each in outcomes)


@pytest.mark.distributed
def test_a_damaged_part_sends_all_ranks_to_the_next_tier(ranks: Group, tmp_path: Path) -> None:
    (expected, _), _ = ranks(2)(save_privately, tmp_path, 4)
    for which in ("memory", "disk"):
        pack = next((tmp_path / "node-1" / which / "rank-00001").rglob("*.pack"))
        flip(pack)
        outcomes = ranks(2)(restore_privately, tmp_path)
        assert [content for content, _ in outcomes] == [expected] * 2
        places = {Path(place).parts[-2:][0] for place in places_of(outcomes, tmp_path)}
        assert places == ({"disk"} if which == "memory" else {"shared"})


@pytest.mark.distributed
def test_another_number_of_ranks_reads_the_shared_tier(ranks: Group, tmp_path: Path) -> None:
    (expected, _), _ = ranks(2)(save_privately, tmp_path, 3)
    for size in (1, 3):
        outcomes = ranks(size)(restore_privately, tmp_path)
        assert [content for content, _ in outcomes] == [expected] * size
        assert places_of(outcomes, tmp_path) == ["shared"] * size
    saved = ranks(3)(save_privately, tmp_path, 4)
    assert [failures(results) for _, results in saved] == [[]] * 3
    outcomes = ranks(2)(restore_privately, tmp_path)
    assert [content for content, _ in outcomes] == [saved[0][0]] * 2
    assert places_of(outcomes, tmp_path) == ["shared"] * 2


def layers(*numbers: int) -> dict[str, Any]:
    """Some layers of a model whose weights are the layer's number."""
    model = nn.ModuleDict()
    for number in numbers:
        model[f"layer{number}"] = nn.Linear(3, 3)
        for parameter in model[f"layer{number}"].parameters():
            nn.init.constant_(parameter, float(number))
    return {"model": model}


def save_layers(directory: Path) -> None:
    dist.init_process_group("gloo")
    with private_store(directory) as store:
        store.save(1, layers(dist.get_rank()))
    dist.barrier()


def restore_other_layers(directory: Path, allow: list[Any]) -> tuple[str, bool]:
    dist.init_process_group("gloo")
    state, expected = layers(0, 1), layers(0, 1)
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.fill_(-1.0)
    restored = private_store(directory).restore(state, allow=allow)
    assert restored is not None
    pairs = zip(state["model"].parameters(), expected["model"].parameters(), strict=True)
    dist.barrier()
    return restored.place, all(torch.equal(first, second) for first, second in pairs)


@pytest.mark.distributed
@pytest.mark.parametrize("allow", [[], ["missing"]])
def test_ranks_with_another_share_of_the_model_read_the_shared_tier(
    ranks: Group, tmp_path: Path, allow: list[Any]
) -> None:
    ranks(2)(save_layers, tmp_path)
    outcomes = ranks(2)(restore_other_layers, tmp_path, allow)
    assert outcomes == [(str(tmp_path / "shared"), True)] * 2


def restore_whole(directory: Path) -> tuple[str, dict[str, Any]]:
    dist.init_process_group("gloo")
    model = Net(9)
    state = {"model": model, "optimizer": make_optimizers(model)}
    restored = private_store(directory).restore(state)
    assert restored is not None
    dist.barrier()
    return restored.place, bits(state)


@pytest.mark.distributed
def test_ranks_that_now_hold_all_read_the_shared_tier(ranks: Group, tmp_path: Path) -> None:
    (expected, _), _ = ranks(2)(save_privately, tmp_path, 1)
    assert ranks(2)(restore_whole, tmp_path) == [(str(tmp_path / "shared"), expected)] * 2


def save_apart(directory: Path) -> list[DrainResult]:
    dist.init_process_group("gloo")
    state = mixed_state(0)
    with open_store(
        directory / "first",
        coordinated=False,
        tiers=[Tier(directory / "shared", every=2, keep=1)],
        timeout_seconds=60,
    ) as store:
        for step in range(1, 6):
            train(state, step, step)
            store.save(step, state)
            store.drained(wait=True)
    dist.barrier()
    return store.drained()


@pytest.mark.distributed
def test_ranks_that_do_not_coordinate_copy_each_their_part(ranks: Group, tmp_path: Path) -> None:
    for results in ranks(2)(save_apart, tmp_path):
        assert [(each.step, each.error) for each in results] == [(2, None), (4, None), (5, None)]
    assert steps_at(str(tmp_path / "shared"))[-1] == 5


def save_where_one_rank_fails(directory: Path) -> list[Any]:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        run = Copy.run

        def failing(copy: Any) -> None:
            if copy._version.step == 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            run(copy)

        Copy.run = failing  # type: ignore[method-assign]
    store = open_store(directory / "first", tiers=[Tier(directory / "shared")], timeout_seconds=60)
    found: list[Any] = []
    state = mixed_state(0)
    for step in (1, 2):
        train(state, step, step)
        found.append(store.save(step, state).error)
        found += [(each.step, each.error) for each in store.drained(wait=True)[-1:]]
        dist.barrier()
        found.append([path.name for path in (directory / "shared").rglob("rank-*")])
        dist.barrier()
    store.close()
    dist.barrier()
    return found


@pytest.mark.distributed
def test_ranks_agree_on_what_a_shared_tier_has(ranks: Group, tmp_path: Path) -> None:
    for outcomes in ranks(2)(save_where_one_rank_fails, tmp_path):
        first_save, first_copy, first_files, second_save, second_copy, second_files = outcomes
        assert (first_save, second_save) == (None, None)
        assert first_copy[0] == 1
        assert "No space left" in first_copy[1]
        assert first_files == [], "what no version needs does not fill the tier"
        assert second_copy == (2, None)
        assert len(second_files) >= 4
    storage = storage_of(tmp_path / "shared")
    assert steps_at(str(tmp_path / "shared")) == [2]
    with VersionReader(storage, load(storage, Version(1, 2))) as reader:
        reader.check()


def save_faster_than_a_rank_copies(directory: Path) -> tuple[list[DrainResult], int]:
    dist.init_process_group("gloo")
    state = make_model(0.0)
    node = directory / f"node-{dist.get_rank()}"
    tiers = [Tier(node / "disk", keep=2, private=True), Tier(directory / "shared", keep=9)]
    run = Copy.run

    def slow(copy: Any) -> None:
        time.sleep(0.05 + 0.2 * dist.get_rank())
        run(copy)

    Copy.run = slow  # type: ignore[method-assign]
    most = 0
    with open_store(
        node / "memory", keep=1, private=True, tiers=tiers, timeout_seconds=60
    ) as store:
        for step in range(1, 16):
            nn.init.constant_(state["model"].weight, float(step))
            nn.init.constant_(state["model"].bias, float(step))
            store.save(step, state)
            own = store.storage.location
            most = max(most, len(steps_in(Path(own))))
            time.sleep(0.02)
    dist.barrier()
    return store.drained(), most


@pytest.mark.distributed
def test_ranks_copy_and_drop_the_same_versions(ranks: Group, tmp_path: Path) -> None:
    (mine, most), (theirs, others) = ranks(2)(save_faster_than_a_rank_copies, tmp_path)
    assert failures(mine) == failures(theirs) == []

    def copied(results: list[DrainResult], name: str) -> list[int]:
        return [each.step for each in results if name in each.place and not each.skipped]

    for name in ("disk", "shared"):
        assert copied(mine, name) == copied(theirs, name)
        assert 1 < len(copied(mine, name)) < 15, "some were dropped"
        assert copied(mine, name)[-1] == 15
    assert max(most, others) <= 4, "the newest, and for each tier at most one or two more"
    assert restored_from(tmp_path / "shared").step == 15
    for step in copied(mine, "shared"):
        assert restored_from(tmp_path / "shared", step=step).step == step


def save_in_private(directory: Path, steps: list[int]) -> None:
    dist.init_process_group("gloo")
    place = directory / f"node-{dist.get_rank()}"
    with open_store(place, keep=9, private=True, timeout_seconds=60) as store:
        for step in steps:
            store.save(step, make_model(float(step)))
    dist.barrier()


@pytest.mark.distributed
def test_what_another_number_of_ranks_saved_privately_is_named_and_stays(
    ranks: Group, tmp_path: Path
) -> None:
    ranks(2)(save_in_private, tmp_path, [1, 2, 3])
    node, own = tmp_path / "node-0", tmp_path / "node-0" / "rank-00000"
    # A kill after its part was written, before the seal.
    (own / "step-00000003-a1" / SEAL).unlink()
    store = open_store(node, keep=1, private=True)
    with pytest.raises(CheckpointError, match=r"step-00000003-a1 was saved by 2 ranks.*now.* 1;"):
        store.restore(make_model(0.0))
    Place(storage_of(own), Retention(1), True, 0, 1).prune(())
    assert steps_in(own) == [1, 2, 3]
    with open_store(tmp_path / "shared") as shared:
        shared.save(7, make_model(7.0))
    tiers = [Tier(tmp_path / "shared")]
    with open_store(node, keep=1, private=True, tiers=tiers) as store:
        state = make_model(0.0)
        restored = store.restore(state)
        assert restored is not None
        assert (restored.step, restored.place) == (7, str(tmp_path / "shared"))
        store.save(8, state)
    assert steps_in(own) == [8], "what these ranks have saved replaces it"
    Place(storage_of(own), Retention(1), True, 0, 2).prune(())
    assert steps_in(own) == [8]


def test_a_sealed_version_that_lost_its_part_is_damaged(tmp_path: Path) -> None:
    with open_store(tmp_path, private=True) as store:
        store.save(1, make_model(1.0))
    (tmp_path / "rank-00000" / "step-00000001-a1" / "rank-00000-of-00001.json").unlink()
    with pytest.raises(CheckpointError, match=r"rank-00000-of-00001\.json is missing"):
        open_store(tmp_path, private=True).restore(make_model(0.0))


class LostSignals(StoreAgreement):
    """Words that do not reach the other ranks any more, once they are lost."""

    lost = False

    def tell(self, key: str, problem: str) -> None:
        if self.lost:
            raise CheckpointError("the other ranks cannot be told")


def test_words_that_do_not_arrive_fail_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, disk = tmp_path / "first", tmp_path / "disk"
    slow = SlowTier(monkeypatch, disk)
    with open_store(first) as store:
        for step in (1, 2, 3):
            store.save(step, make_model(float(step)))
    tiers = Tiers(place_of(first), [Tier(disk)], OneRank(alone=True), 9.0)
    signals = LostSignals()
    tiers.begin(signals, coordinated=True)
    assert slow.begun.wait(9)
    signals.lost = True
    tiers.offer(Version(1, 1), 1)
    tiers.offer(Version(1, 2), 2)
    slow.gate.set()
    tiers.close(drain=True)
    skipped = [(each.step, each.skipped) for each in tiers.results() if each.skipped]
    assert skipped == [(1, "a newer one came first")]


def change_pack(directory: Path) -> None:
    """Change a byte of the pack in `directory`; only its content tells."""
    [pack] = directory.rglob("*.pack")
    flip(pack, 0)


def test_a_pack_of_the_same_size_in_a_tier_is_compared_before_it_counts(tmp_path: Path) -> None:
    first, disk, other = tmp_path / "first", tmp_path / "disk", tmp_path / "other"
    for place, value in ((first, 1.5), (other, 2.5)):
        with open_store(place) as store:
            store.save(1, make_model(value))
    name = "step-00000001-a1/rank-00000-of-00001.pack"
    for origin in (first, other):
        (disk / name).parent.mkdir(parents=True)
        shutil.copy(origin / name, disk / name)
        if origin == first:
            change_pack(disk)
        assert (disk / name).stat().st_size == (first / name).stat().st_size
        before = (disk / name).read_bytes()
        copy = Copy(
            place_of(first), place_of(disk), Version(1, 1), RateLimiter(None, threading.Event())
        )
        with pytest.raises(CheckpointError, match="of another run, or damaged; take") as caught:
            copy.run()
        assert str(disk / name) in str(caught.value)
        copy.undo()
        left = {path for path in disk.rglob("*") if path.is_file()}
        assert left == {disk / name}, "a file of another run is never changed"
        assert (disk / name).read_bytes() == before
        shutil.rmtree(disk)


def test_a_pack_that_is_there_is_read_back_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, disk = tmp_path / "first", tmp_path / "disk"
    with open_store(first, tiers=[Tier(disk)]) as store:
        store.save(1, make_model(1.0))
    opened: list[str] = []
    original = LocalStorage.open

    def open_and_note(storage: LocalStorage, name: str) -> Any:
        opened.append(storage.location)
        return original(storage, name)

    monkeypatch.setattr(LocalStorage, "open", open_and_note)
    target = place_of(disk)
    for _ in range(3):
        copy = Copy(place_of(first), target, Version(1, 1), RateLimiter(None, threading.Event()))
        copy.run()
        assert copy.bytes == 0
    assert opened == [str(disk)]
    opened.clear()
    target = place_of(tmp_path / "new")
    for _ in range(2):
        Copy(place_of(first), target, Version(1, 1), RateLimiter(None, threading.Event())).run()
    assert opened == [str(first)], "what was written by this session need not be read back"


def test_a_copy_that_was_undone_is_not_trusted_any_more(tmp_path: Path) -> None:
    first, disk = tmp_path / "first", tmp_path / "disk"
    with open_store(first) as store:
        store.save(1, random_model(1, 20))
    target = place_of(disk)
    copy = Copy(place_of(first), target, Version(1, 1), RateLimiter(None, threading.Event()))
    copy.run()
    copy.undo()
    [pack] = first.rglob("*.pack")
    (disk / pack.relative_to(first)).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(pack, disk / pack.relative_to(first))
    change_pack(disk)
    again = Copy(place_of(first), target, Version(1, 1), RateLimiter(None, threading.Event()))
    with pytest.raises(CheckpointError, match="is damaged at byte"):
        again.run()


def test_tiers_have_names_by_which_a_restore_says_where_it_was(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    settings: dict[str, Any] = {"name": "memory", "tiers": [Tier(far, name="shared")]}
    with CheckpointStore(near, writer="thread", **settings) as store:
        store.save(1, {"model": make_model(1.0)["model"]})
        assert store.tier_names == {str(near): "memory", str(far): "shared"}
    for lost, name in ((None, "memory"), (near, "shared")):
        if lost is not None:
            shutil.rmtree(lost)
        with CheckpointStore(near, **settings) as store:
            restored = store.restore({"model": make_model(0.0)["model"]})
            assert restored is not None
            assert store.tier_names[restored.place] == name
