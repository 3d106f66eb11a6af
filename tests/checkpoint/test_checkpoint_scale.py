"""Very many ranks: sealed by groups, opened by an index, and nobody reads all manifests."""

import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import many_ranks
import pytest
import torch
import torch.distributed as dist
from checkpoint_meshes import matrix_state
from checkpoint_states import Holder, open_store, steps_in
from forked import run_ranks
from many_ranks import Blocks, Layout

from outlast.checkpoint import CheckpointStore, Retention, Tier, list_versions, load, storage_of
from outlast.checkpoint import plan as plans
from outlast.checkpoint import version as versions
from outlast.checkpoint.inspection import find_version, summarize, usage, verify
from outlast.checkpoint.manifest import Index, Part, root_of
from outlast.checkpoint.retention import prune
from outlast.checkpoint.storage import LocalStorage
from outlast.checkpoint.tiers import Place
from outlast.checkpoint.version import (
    Version,
    is_published,
    open_version,
    read_seal,
    seal_group,
    seal_groups,
)
from outlast.errors import CheckpointError

Group = Callable[[int], Callable[..., list[Any]]]
LAYOUTS: tuple[Layout, ...] = ("own", "shared")
RANKS = 512


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the manifests that this process parses."""
    names: list[str] = []
    parse = Part.from_bytes

    def counting(content: bytes, name: str) -> Part:
        names.append(name.rpartition("/")[2])
        return parse(content, name)

    monkeypatch.setattr(Part, "from_bytes", counting)
    return names


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rank_parses_more_manifests_than_its_group_has(
    tmp_path: Path, parsed: list[str], layout: Layout
) -> None:
    catalogue = plans.make_plan(many_ranks.holdings_of(layout, RANKS), 0).catalogue
    version = many_ranks.write_parts(tmp_path, 1, RANKS, layout, catalogue)
    storage = storage_of(tmp_path)
    for leader in versions.leaders(RANKS):
        parsed.clear()
        seal_group(storage, version, leader, RANKS)
        assert len(parsed) == versions.GROUP_RANKS == 128
    parsed.clear()
    seal_groups(storage, version, RANKS)
    assert is_published(storage, version)
    assert not parsed, "rank 0 makes index and seal of what the groups say"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_restore_parses_only_the_manifests_that_hold_what_it_wants(
    tmp_path: Path, parsed: list[str], layout: Layout
) -> None:
    many_ranks.save(tmp_path, 1, RANKS, layout)
    parsed.clear()
    contents = open_version(storage_of(tmp_path), Version(1, 1))
    assert contents.on_demand is not None
    assert not parsed
    rank = 300
    boxes = dict.fromkeys(many_ranks.names_of(layout, rank), many_ranks.box_of(layout, rank))
    contents.on_demand.read(boxes)
    assert parsed == [f"rank-{rank:05d}-of-{RANKS:05d}.json"]
    assert contents.values["data"] == {"position": 1}
    assert len(parsed) == 2
    assert "absent" not in contents.values


def test_one_of_very_many_ranks_restores_its_own_tensors(tmp_path: Path, parsed: list[str]) -> None:
    for step in (1, 2):
        many_ranks.save(tmp_path, step, RANKS, "own")
    parsed.clear()
    state = {"model": Blocks("own", 130, RANKS), "data": Holder()}
    restored = open_store(tmp_path).restore(state, allow=["unexpected"])
    assert restored is not None
    assert restored.step == 2
    assert len(parsed) == 2
    for number, weight in enumerate(state["model"].parameters()):
        expected = torch.from_numpy(many_ranks.content_of("own", 2, 130, number))
        assert torch.equal(weight, expected)
    assert state["data"].state == {"position": 2}


def test_all_rows_of_very_many_ranks_make_the_tensor(tmp_path: Path) -> None:
    many_ranks.save(tmp_path, 1, RANKS, "shared")
    state = {"model": Blocks("shared", 0, RANKS), "data": Holder()}
    assert open_store(tmp_path).restore(state) is not None
    for number, weight in enumerate(state["model"].parameters()):
        blocks = [many_ranks.content_of("shared", 1, rank, number) for rank in range(RANKS)]
        assert torch.equal(weight, torch.cat([*map(torch.from_numpy, blocks)]))


def test_few_ranks_have_one_seal_and_very_many_have_an_index(tmp_path: Path) -> None:
    for ranks in (128, 129):
        storage = storage_of(tmp_path / str(ranks))
        catalogue = plans.make_plan(many_ranks.holdings_of("own", ranks), 0).catalogue
        version = many_ranks.write_parts(tmp_path / str(ranks), 1, ranks, "own", catalogue)
        versions.seal(storage, load(storage, version))
        names = [name for name in storage.files(version.folder) if versions.is_of_groups(name)]
        assert bool(names) == (ranks > 128)
        seal = versions.read_seal(storage, version)
        assert seal is not None
        assert seal.world_size == ranks
        assert seal.metrics == {"loss": 1.0}
        assert seal.packs == [version.pack_name(rank, ranks) for rank in range(ranks)]
        assert verify(storage, version).state == "ok"


def test_groups_that_hold_not_everything_are_not_sealed(tmp_path: Path) -> None:
    catalogue = plans.make_plan(many_ranks.holdings_of("shared", 256), 0).catalogue
    version = many_ranks.write_parts(tmp_path, 1, 128, "shared", catalogue)
    storage = storage_of(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "INDEXED_ABOVE", 0)
        seal_group(storage, version, 0, 128)
        with pytest.raises(
            CheckpointError, match=r"is incomplete: `model.blocks.w0.weight` is not"
        ):
            seal_groups(storage, version, 128)
    assert not is_published(storage, version)


def test_a_version_with_some_of_its_groups_is_sealed_from_its_manifests(
    tmp_path: Path, small_groups: None
) -> None:
    catalogue = plans.make_plan(many_ranks.holdings_of("shared", 4), 0).catalogue
    version = many_ranks.write_parts(tmp_path, 1, 4, "shared", catalogue)
    place = Place(storage_of(tmp_path), Retention(1), private=False, rank=0, world_size=4)
    # Whoever would have sealed the other group was killed.
    seal_group(place.storage, version, 0, 4)
    place.seal(version)
    found = read_seal(place.storage, version)
    assert found is not None
    assert found.indexed == 4
    assert verify(place.storage, version).state == "ok"


# Damage ----------------------------------------------------------------------------------------


GROUP, INDEX = "group-00001-of-00004.json", "index-of-00004.json"
DAMAGES = ["flipped", "cut", "missing", "of the step before"]


@pytest.fixture
def two_versions(tmp_path: Path, small_groups: None) -> Path:
    """Steps 1 and 2, of four ranks in groups of two."""
    for step in (1, 2):
        many_ranks.save(tmp_path, step, 4, "shared")
    return tmp_path


def restore_all(directory: Path) -> tuple[int, list[str]]:
    """Restore everything on one rank; returns the step, and what was passed over."""
    state = {"model": Blocks("shared", 0, 4), "data": Holder()}
    restored = open_store(directory).restore(state, warn=False)
    assert restored is not None
    for number, weight in enumerate(state["model"].parameters()):
        step = restored.step
        blocks = [many_ranks.content_of("shared", step, rank, number) for rank in range(4)]
        assert torch.equal(weight, torch.cat([*map(torch.from_numpy, blocks)]))
    assert state["data"].state == {"position": restored.step}
    return restored.step, restored.skipped


def harm(directory: Path, name: str, damage: str) -> None:
    """Damage a file of step 2."""
    path = directory / "step-00000002-a1" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    before = (directory / "step-00000001-a1" / name).read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes({"flipped": bytes(content), "cut": content[:-9]}.get(damage, before))


@pytest.mark.parametrize("name", ["group-00000-of-00004.json", GROUP, INDEX])
@pytest.mark.parametrize("damage", DAMAGES)
def test_without_its_index_a_version_is_restored_by_its_manifests(
    two_versions: Path, name: str, damage: str
) -> None:
    harm(two_versions, name, damage)
    step, [said] = restore_all(two_versions)
    assert step == 2
    assert name in said
    assert "all manifests of the version were read instead" in said
    state = {"model": Blocks("shared", 0, 4), "data": Holder()}
    with pytest.warns(UserWarning, match=f"restored step 2 .*{name}") as warned:
        open_store(two_versions).restore(state)
    assert len(warned) == 1
    storage = storage_of(two_versions)
    assert is_published(storage, Version(1, 2))
    verdict = verify(storage, Version(1, 2))
    assert verdict.state == "damaged"
    assert name in verdict.problems[0]
    Place(storage, Retention(1), private=False, rank=0, world_size=4).prune([])
    assert list_versions(storage) == [Version(1, 2)]
    assert restore_all(two_versions)[0] == 2


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_value_is_found_without_the_group_that_has_it(
    two_versions: Path, damage: str, parsed: list[str]
) -> None:
    harm(two_versions, "group-00000-of-00004.json", damage)
    contents = open_version(storage_of(two_versions), Version(1, 2))
    assert not parsed
    assert contents.values["data"] == {"position": 2}
    assert len(parsed) == len(contents.parts) == 4
    assert contents.values["data"] == {"position": 2}
    contents.on_demand.read({"model.blocks.w0.weight": many_ranks.box_of("shared", 3)})
    assert len(parsed) == 4
    assert len(contents.remarks) == 1


def test_neither_index_nor_all_manifests_make_no_version(two_versions: Path) -> None:
    harm(two_versions, INDEX, "flipped")
    harm(two_versions, "rank-00003-of-00004.json", "flipped")
    step, [skipped] = restore_all(two_versions)
    assert step == 1
    assert "rank-00003-of-00004.json" in skipped


@pytest.mark.parametrize("name", ["rank-00003-of-00004.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_a_manifest_is_found_and_the_version_before_is_taken(
    two_versions: Path, name: str, damage: str
) -> None:
    harm(two_versions, name, damage)
    step, [skipped] = restore_all(two_versions)
    assert step == 1
    assert name in skipped
    storage = storage_of(two_versions)
    verdict = verify(storage, Version(1, 2))
    assert verdict.state == "damaged"
    assert name in verdict.problems[0]
    assert summarize(storage, Version(1, 2)).state == "damaged"
    assert find_version(storage).version.step == 1


def test_no_flipped_bit_of_any_file_is_restored(two_versions: Path) -> None:
    files = sorted((two_versions / "step-00000002-a1").iterdir())
    assert len(files) == 4 + 4 + 2 + 3
    for path in files:
        content = path.read_bytes()
        for place in range(0, len(content), max(len(content) // 4, 1)):
            changed = bytearray(content)
            changed[place] ^= 1 << place % 8
            path.write_bytes(changed)
            step, said = restore_all(two_versions)
            # Seal, index and groups are not needed where all manifests are there.
            needed = path.name != "version.json" and not versions.is_of_groups(path.name)
            assert step == (1 if needed else 2)
            assert len(said) == (path.name != "version.json")
        path.write_bytes(content)
    assert restore_all(two_versions) == (2, [])


def test_an_index_that_names_too_little_restores_nothing_wrong(two_versions: Path) -> None:
    """What no save can have written, although all hashes are right."""
    folder = two_versions / "step-00000002-a1"
    index = Index.from_bytes((folder / INDEX).read_bytes(), INDEX)
    seal = versions.Seal.from_bytes((folder / "version.json").read_bytes(), "version.json")
    for name in index.tensors:
        index.tensors[name] = [(0, None)]
    content = index.to_bytes()
    (folder / INDEX).write_bytes(content)
    seal.roots[INDEX] = root_of(content)
    (folder / "version.json").write_bytes(seal.to_bytes())
    step, [said] = restore_all(two_versions)
    assert step == 2
    assert f"{INDEX} does not name all that holds `model.blocks" in said
    assert (
        "does not say what its groups hold"
        in verify(storage_of(two_versions), Version(1, 2)).problems[0]
    )


def test_a_storage_that_fails_is_no_damage(
    two_versions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = LocalStorage.read

    def failing(storage: LocalStorage, name: str) -> bytes:
        if name.endswith(f"00000002-a1/{GROUP}"):
            raise OSError(5, "Input/output error")
        return read(storage, name)

    monkeypatch.setattr(LocalStorage, "read", failing)
    store = open_store(two_versions)
    state = {"model": Blocks("shared", 0, 4), "data": Holder()}
    restored = store.restore(state, warn=False)
    assert restored is not None
    assert restored.step == 1
    assert store._tiers.first.damaged == set()


# Retention and space ---------------------------------------------------------------------------


def test_versions_of_very_many_ranks_are_pruned_and_counted(two_versions: Path) -> None:
    storage = storage_of(two_versions)
    before = usage(storage)
    assert [version.complete for version in before.versions] == [True, True]
    assert before.orphan_bytes == 0
    assert prune(storage, Retention(1)) == [Version(1, 1)]
    assert list_versions(storage) == [Version(1, 2)]
    assert restore_all(two_versions) == (2, [])


def test_a_cut_deletion_leaves_no_version(
    two_versions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = storage_of(two_versions)
    removed: list[str] = []
    remove = LocalStorage.remove

    def one(here: LocalStorage, name: str) -> None:
        if len(removed) > 1:
            raise OSError(5, "Input/output error")
        removed.append(name)
        remove(here, name)

    monkeypatch.setattr(LocalStorage, "remove", one)
    prune(storage, Retention(1))
    assert removed[0].endswith("step-00000001-a1/version.json")
    assert not is_published(storage, Version(1, 1))


# Real ranks ------------------------------------------------------------------------------------


def save_steps(directory: Path, *steps: int, tiers: tuple[Tier, ...] = (), **settings: Any) -> None:
    dist.init_process_group("gloo")
    with open_store(directory, keep=9, tiers=tiers, **settings) as store:
        for step in steps:
            store.save(step, matrix_state(step, (64, 64), 0))
        dist.barrier()


def restore_matrix(directory: Path, **settings: Any) -> tuple[int, list[str], bool]:
    dist.init_process_group("gloo")
    state = matrix_state(9, (64, 64), 0)
    restored = open_store(directory, **settings).restore(state, warn=False)
    assert restored is not None
    whole = state["model"].weight.full_tensor()
    expected = torch.randn((64, 64), generator=torch.Generator().manual_seed(restored.step))
    return restored.step, restored.skipped, torch.equal(whole, expected)


def group_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if versions.is_of_groups(path.name))


FOUR = ["group-00000-of-00004.json", "group-00001-of-00004.json", "index-of-00004.json"]


@pytest.mark.distributed
@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("now", [1, 3, 4])
def test_ranks_in_groups_save_and_others_restore(ranks: Group, tmp_path: Path, now: int) -> None:
    ranks(4)(save_steps, tmp_path, 1, 2)
    assert group_files(tmp_path / "step-00000002-a1") == FOUR
    for outcome in ranks(now)(restore_matrix, tmp_path):
        assert outcome == (2, [], True)
    assert verify(storage_of(tmp_path), Version(1, 2)).state == "ok"


@pytest.mark.distributed
@pytest.mark.usefixtures("small_groups")
def test_damage_seen_by_one_rank_of_a_group_makes_all_fall_back(
    ranks: Group, tmp_path: Path
) -> None:
    ranks(4)(save_steps, tmp_path, 1, 2)
    (tmp_path / "step-00000002-a1" / "rank-00003-of-00004.json").unlink()
    outcomes = ranks(4)(restore_matrix, tmp_path)
    assert outcomes == [outcomes[0]] * 4
    step, [skipped], right = outcomes[0]
    assert (step, right) == (1, True)
    assert "rank-00003-of-00004.json" in skipped


@pytest.mark.distributed
@pytest.mark.usefixtures("small_groups")
def test_a_group_that_one_rank_misses_is_told_by_all(ranks: Group, tmp_path: Path) -> None:
    ranks(4)(save_steps, tmp_path, 1, 2)
    (tmp_path / "step-00000002-a1" / GROUP).unlink()
    outcomes = ranks(4)(restore_matrix, tmp_path)
    assert outcomes == [outcomes[0]] * 4
    step, [said], right = outcomes[0]
    assert (step, right) == (2, True)
    assert GROUP in said


@pytest.mark.distributed
@pytest.mark.usefixtures("small_groups")
def test_a_private_tier_is_copied_to_a_shared_one_by_groups(ranks: Group, tmp_path: Path) -> None:
    shared = (Tier(tmp_path / "shared"), Tier(tmp_path / "archive"))
    ranks(4)(lambda: save_steps(tmp_path / "private", 1, tiers=shared, private=True))
    assert group_files(tmp_path / "private" / "rank-00002" / "step-00000001-a1") == []
    for place in ("shared", "archive"):
        assert group_files(tmp_path / place / "step-00000001-a1") == FOUR
        assert verify(storage_of(tmp_path / place), Version(1, 1)).state == "ok"
        assert ranks(2)(restore_matrix, tmp_path / place) == [(1, [], True)] * 2
    assert (tmp_path / "shared" / "step-00000001-a1" / "index-of-00004.json").read_bytes() == (
        tmp_path / "archive" / "step-00000001-a1" / "index-of-00004.json"
    ).read_bytes()


def save_and_be_killed(directory: Path, rank: int, stage: str) -> str:
    """Step 1 is saved; in step 2, one rank is killed at a stage of its save."""
    dist.init_process_group("gloo")
    store = CheckpointStore(directory, writer="thread", keep=9, timeout_seconds=4.0)
    store.save(1, matrix_state(1, (64, 64), 0))
    dist.barrier()
    if dist.get_rank() == rank:
        make = LocalStorage.create

        def create(storage: LocalStorage, name: str, **settings: Any) -> Any:
            if stage in name:
                os.kill(os.getpid(), signal.SIGKILL)
            return make(storage, name, **settings)

        LocalStorage.create = create  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = store.save_async(2, matrix_state(2, (64, 64), 0)).result()
    return result.error or ""


@pytest.mark.distributed
@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize(
    ("rank", "stage"),
    [
        pytest.param(1, "rank-00001-of-00004.json", marks=pytest.mark.slow),
        pytest.param(3, "rank-00003-of-00004.json", marks=pytest.mark.slow),
        pytest.param(0, "group-00000", marks=pytest.mark.slow),
        (2, "group-00001"),
        pytest.param(0, "index-of", marks=pytest.mark.slow),
        pytest.param(0, "version.json", marks=pytest.mark.slow),
    ],
)
def test_a_rank_killed_at_any_stage_of_sealing_loses_nothing(
    ranks: Group, tmp_path: Path, rank: int, stage: str
) -> None:
    errors = run_ranks(4, save_and_be_killed, tmp_path, rank, stage, may_die=range(4))
    folder = tmp_path / "step-00000002-a1"
    assert not (folder / "version.json").exists()
    survivors = [error for number, error in enumerate(errors) if number != rank and error]
    assert all("step 2" in error for error in survivors)
    whole = len([*folder.glob("rank-*.json")]) == 4
    for step, skipped, right in ranks(2)(restore_matrix, tmp_path):
        assert right
        assert step == (2 if whole else 1), "parts that are all there make a version"
        assert len(skipped) == (0 if whole else 1)
    # The next run saves there again.
    ranks(4)(save_steps, tmp_path, 3)
    assert steps_in(tmp_path)[-1] == 3
    assert ranks(4)(restore_matrix, tmp_path) == [(3, [], True)] * 4


def save_and_lose_a_member(directory: Path, place: str) -> str:
    """Rank 3 is killed, while rank 2, which leads its group, is somewhat late."""
    dist.init_process_group("gloo")
    is_tier = place == "tier"
    store = CheckpointStore(
        directory / "store",
        writer="thread",
        timeout_seconds=6.0,
        private=is_tier,
        tiers=[Tier(directory / "tier")] if is_tier else [],
    )
    make = LocalStorage.create

    def create(storage: LocalStorage, name: str, **settings: Any) -> Any:
        if storage.root == directory / place and "rank-00003-of-00004.json" in name:
            os.kill(os.getpid(), signal.SIGKILL)
        if storage.root == directory / place and "rank-00002-of-00004.json" in name:
            time.sleep(0.6)
        return make(storage, name, **settings)

    LocalStorage.create = create  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        error = store.save_async(1, matrix_state(1, (64, 64), 0)).result().error
    deadline = time.monotonic() + 30.0
    while is_tier and not error and time.monotonic() < deadline:
        error = next((copied.error for copied in store.drained()), "")
        time.sleep(0.05)
    heard = [directory / f"heard-{rank}" for rank in range(3)]
    heard[dist.get_rank()].touch()
    # Rank 0 hosts the store that the others hear by.
    while not all(path.exists() for path in heard) and time.monotonic() < deadline:
        time.sleep(0.05)
    return error or ""


@pytest.mark.distributed
@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("place", ["store", pytest.param("tier", marks=pytest.mark.slow)])
def test_a_member_of_a_group_that_dies_is_named_and_not_who_waited_for_it(
    tmp_path: Path, place: str
) -> None:
    errors = run_ranks(4, save_and_lose_a_member, tmp_path, place, may_die=[3])
    for error in errors[:3]:
        assert "rank 3 did not report on the save within 4.5 s (timeout_seconds = 6)" in error


def save_by_themselves(directory: Path) -> None:
    dist.init_process_group("gloo")
    with open_store(directory, keep=9, coordinated=False) as store:
        store.save(1, matrix_state(1, (64, 64), 0))
        dist.barrier()


@pytest.mark.distributed
@pytest.mark.usefixtures("small_groups")
def test_ranks_that_do_not_coordinate_have_no_index(ranks: Group, tmp_path: Path) -> None:
    ranks(4)(save_by_themselves, tmp_path)
    assert group_files(tmp_path / "step-00000001-a1") == []
    assert ranks(2)(restore_matrix, tmp_path) == [(1, [], True)] * 2


def count_plans(directory: Path) -> list[int]:
    """How many plans were made after each save: of a state, after a step, and of another shape."""
    dist.init_process_group("gloo")
    counts, made = [], 0
    make = plans.make_plan

    def counting(*args: Any, **settings: Any) -> Any:
        nonlocal made
        made += 1
        return make(*args, **settings)

    from outlast.checkpoint import lane

    lane.make_plan = counting  # type: ignore[assignment]
    with open_store(directory, keep=9) as store:
        state = matrix_state(1, (64, 64), 0)
        for step in (1, 2, 3):
            store.save(step, state)
            counts.append(made)
        store.save(4, matrix_state(4, (32, 64), 0))
        counts.append(made)
        dist.barrier()
    return counts


@pytest.mark.distributed
@pytest.mark.usefixtures("small_groups")
def test_a_plan_is_made_once_and_again_when_shapes_change(ranks: Group, tmp_path: Path) -> None:
    assert ranks(2)(count_plans, tmp_path) == [[1, 1, 1, 2]] * 2
