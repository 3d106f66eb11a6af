"""What is kept can be restored, what is not kept is gone, and nothing leaks."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import Holder, open_store, restore_step, steps_in, total_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.checkpoint import Compression, Reduction, Retention, list_versions, load, storage_of
from outlast.checkpoint.manifest import STATE
from outlast.checkpoint.retention import prune, to_keep
from outlast.checkpoint.storage import LocalStorage
from outlast.checkpoint.version import Seal, Version
from outlast.errors import CheckpointError


def tensors_at(step: int) -> dict[str, torch.Tensor]:
    """A frozen tensor, one that changes a little, one that changes wholly, one now and then."""
    slow = torch.arange(3000, dtype=torch.float32) + 0.25
    slow[step % 50] += step
    generator = torch.Generator().manual_seed(step)
    return {
        "frozen": torch.rand(500, generator=torch.Generator().manual_seed(0)),
        "slow": slow,
        "fast": torch.rand(700, generator=generator),
        "sometimes": torch.full((400,), float(step // 4)) + torch.arange(400),
        "empty": torch.empty(3),
    }


def state_at(step: int) -> dict[str, Any]:
    state = tensors_at(step)
    state["empty"] = torch.ones(3)
    return {"data": Holder(state)}


def check(directory: Path, steps: list[int]) -> None:
    """Every version of `steps` can be restored bit for bit, and no other is there."""
    assert steps_in(directory) == steps
    for step in steps:
        found = Holder()
        restored = open_store(directory).restore({"data": found}, step=step)
        assert restored is not None
        assert restored.skipped == []
        for name, tensor in state_at(step)["data"].state.items():
            assert torch.equal(found.state[name], tensor), (step, name)


def test_every_kept_version_is_whole_after_every_save(tmp_path: Path) -> None:
    with open_store(tmp_path, keep=2) as store:
        for step in range(1, 9):
            store.save(step, state_at(step))
            check(tmp_path, list(range(max(step - 1, 1), step + 1)))


def test_multiples_are_kept_for_ever(tmp_path: Path) -> None:
    retention = Retention(1, every=4)
    with open_store(tmp_path, keep=retention) as store:
        for step in range(1, 11):
            store.save(step, state_at(step))
    check(tmp_path, [4, 8, 10])


@pytest.mark.parametrize(("mode", "best"), [("min", [3, 6]), ("max", [2, 5])])
def test_the_best_are_kept(tmp_path: Path, mode: Any, best: list[int]) -> None:
    figures = {1: 5.0, 2: 9.0, 3: 1.0, 4: 5.0, 5: 8.0, 6: 2.0, 7: 5.0, 8: 5.0}
    retention = Retention(1, best=2, metric="loss", mode=mode)
    with open_store(tmp_path, keep=retention) as store:
        for step, figure in figures.items():
            store.save(step, state_at(step), metrics={"loss": figure})
    check(tmp_path, [*best, 8])


def test_versions_without_the_figure_are_not_the_best(tmp_path: Path) -> None:
    with open_store(tmp_path, keep=Retention(1, best=1, metric="loss")) as store:
        store.save(1, state_at(1))
        store.save(2, state_at(2), metrics={"loss": 7.0})
        store.save(3, state_at(3), metrics={"other": 0.0})
        store.save(4, state_at(4))
    check(tmp_path, [2, 4])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"keep": 0}, "keep = 0"),
        ({"every": -1}, "every = -1"),
        ({"best": 1, "metric": "loss", "mode": "least"}, 'mode = "least"'),
        ({"best": -2}, "best = -2"),
        ({"best": 2}, "best = 2 needs the name of a metric"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        Retention(**settings)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 30)), unique=True, max_size=12),
    st.integers(1, 4),
    st.integers(0, 5),
    st.integers(0, 3),
    st.data(),
)
def test_the_newest_are_always_kept(
    names: list[tuple[int, int]], keep: int, every: int, best: int, data: st.DataObject
) -> None:
    figures = st.dictionaries(st.just("loss"), st.floats(-9, 9))
    known = {Version(*name): Seal({}, [], [], data.draw(figures), STATE) for name in sorted(names)}
    kept = to_keep(known, Retention(keep, every=every, best=best, metric="loss"))
    versions = [*known]
    assert kept <= set(versions)
    assert set(versions[-keep:]) <= kept
    assert len(kept) >= min(keep, len(known))
    for version in known:
        if every and version.step % every == 0:
            assert version in kept
    rated = {version: seal.metrics["loss"] for version, seal in known.items() if seal.metrics}
    if best and rated:
        assert any(
            loss == min(rated.values()) for version, loss in rated.items() if version in kept
        )


@settings(max_examples=15, deadline=None)
@given(
    keep=st.integers(1, 3),
    every=st.sampled_from([0, 3]),
    gaps=st.lists(st.integers(1, 4), min_size=1, max_size=9),
    restarts=st.sets(st.integers(0, 8)),
)
def test_all_that_is_kept_can_be_restored(
    tmp_path_factory: pytest.TempPathFactory,
    keep: int,
    every: int,
    gaps: list[int],
    restarts: set[int],
) -> None:
    directory = tmp_path_factory.mktemp("store")
    step = 0

    def opened() -> Any:
        reduction = Reduction(Compression("lz4"))
        return open_store(directory, keep=Retention(keep, every=every), reduction=reduction)

    store = opened()
    saved = []
    for number, gap in enumerate(gaps):
        if number in restarts:
            store.close()
            store = opened()
        step += gap
        store.save(step, state_at(step))
        saved.append(step)
    store.close()
    expected = [s for s in saved if s in saved[-keep:] or (every and s % every == 0)]
    check(directory, expected)


def test_a_dry_run_deletes_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path, keep=9) as store:
        for step in (1, 2, 3):
            store.save(step, state_at(step))
    storage = storage_of(tmp_path)
    before = total_bytes(tmp_path)
    deleted = prune(storage, Retention(1), dry_run=True)
    assert [version.step for version in deleted] == [1, 2]
    assert total_bytes(tmp_path) == before
    assert prune(storage, Retention(1)) == deleted
    check(tmp_path, [3])


def test_files_that_are_referred_to_stay_and_others_go(tmp_path: Path) -> None:
    with open_store(tmp_path, keep=1) as store:
        for step in range(1, 12):
            store.save(step, state_at(step))
            storage = storage_of(tmp_path)
            [version] = [v for v in list_versions(storage) if v.step == step]
            used = load(storage, version).packs
            found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.pack")}
            assert found == used
    check(tmp_path, [11])


def test_a_folder_that_holds_nothing_in_use_is_gone(tmp_path: Path) -> None:
    with open_store(tmp_path, keep=1) as store:
        for step in range(1, 4):
            fresh = torch.rand(400, generator=torch.Generator().manual_seed(step))
            store.save(step, {"data": Holder({"x": fresh})})
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-00000003-a1"]


def test_retention_that_cannot_delete_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path, keep=1) as store:
        store.save(1, state_at(1))

        def refuse(*args: object, **kwargs: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(type(store.storage), "remove", refuse)
        monkeypatch.setattr(type(store.storage), "remove_folder", refuse)
        assert store.save(2, state_at(2)).error is None
        monkeypatch.undo()
        assert restore_step(tmp_path, {"data": Holder()}) == 2
        store.save(3, state_at(3))
    check(tmp_path, [3])


def test_manifests_go_before_the_chunks_that_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = storage_of(tmp_path)
    with open_store(tmp_path, keep=9) as store:
        for step in range(1, 4):
            store.save(step, {"data": Holder({"x": torch.arange(900.0) + (step % 2)})})
        store.save(4, {"data": Holder({"x": torch.rand(900)})})
    broken: list[str] = []

    def watch() -> None:
        """Whoever restores now must not find a version whose chunks are gone."""
        for version in list_versions(storage):
            try:
                packs = load(storage, version).packs
            except CheckpointError:
                continue
            broken.extend(f"{version.step}: {p}" for p in packs if not (tmp_path / p).exists())

    for name in ("remove", "remove_folder"):
        original = getattr(type(storage), name)

        def watched(*args: Any, call: Any = original) -> None:
            call(*args)
            watch()

        monkeypatch.setattr(type(storage), name, watched)
    prune(storage, Retention(1))
    assert broken == []


@pytest.mark.parametrize("private", [False, True])
def test_a_save_reads_no_more_where_many_versions_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private: bool
) -> None:
    calls: list[str] = []
    for name in ("read", "files", "folders", "open"):
        original = getattr(LocalStorage, name)

        def counted(*args: Any, call: Any = original) -> Any:
            calls.append(call.__name__)
            return call(*args)

        monkeypatch.setattr(LocalStorage, name, counted)
    counts = {}
    with open_store(tmp_path, keep=Retention(1, every=1), private=private) as store:
        for step in range(1, 13):
            calls.clear()
            store.save(step, state_at(step))
            counts[step] = len(calls)
        assert counts[12] == counts[3] > 0
        place = Path(store.storage.location)
    # Versions that others have deleted are not remembered.
    with open_store(tmp_path, keep=2, private=private) as store:
        store.save(13, state_at(13))
        assert steps_in(place) == [12, 13]
        shutil.rmtree(place / "step-00000013-a2")
        store.save(14, state_at(14))
        assert steps_in(place) == [12, 14]


def test_what_was_deleted_is_not_remembered_where_its_folder_stays(tmp_path: Path) -> None:
    with open_store(tmp_path, keep=9) as store:
        for step in (1, 2, 3):
            store.save(step, state_at(1))
    cache: dict[Version, Seal] = {}
    storage = storage_of(tmp_path)
    prune(storage, Retention(1), cache=cache)
    assert list_versions(storage) == [Version(1, 1), Version(1, 3)], "step 3 needs its pack"
    assert list(cache) == [Version(1, 3)]


def part_file(directory: Path, version: Version, world_size: int) -> None:
    path = directory / version.part_name(0, world_size)
    path.parent.mkdir()
    path.touch()


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=9), st.integers(1, 3))
def test_versions_of_another_number_of_ranks_go_only_after_a_newer_one_of_this(
    tmp_path_factory: pytest.TempPathFactory, saves: list[tuple[int, bool]], keep: int
) -> None:
    directory = tmp_path_factory.mktemp("rank-00000")
    cache = {}
    sizes = {}
    for step, (world_size, complete) in enumerate(saves, 1):
        version = Version(1, step)
        part_file(directory, version, world_size)
        sizes[version] = world_size
        if complete:
            part = version.part_name(0, world_size).partition("/")[2]
            cache[version] = Seal({part: ""}, [], [], {}, STATE)
    deleted = prune(storage_of(directory), Retention(keep), world_size=2, cache=dict(cache))
    left = set(list_versions(storage_of(directory)))
    assert left == sizes.keys() - set(deleted)
    ours = [version for version in cache if sizes[version] == 2]
    assert set(ours[-keep:]) <= left
    for version in deleted:
        assert any(newer in left and newer > version for newer in ours)
    if ours:
        # However often the number of ranks changed, few versions stay behind.
        assert len([version for version in left if version < ours[-1]]) < 2 * keep
