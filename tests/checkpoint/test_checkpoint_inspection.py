"""What can be learnt of a store without torch: state, content, differences, space, extraction."""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoint_states import Sampler, make_state, train
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from outlast.checkpoint import Bound, CheckpointStore, Compression, Reduction, Retention, storage_of
from outlast.checkpoint.content import Difference, Distance, compare, extract, numbers_of
from outlast.checkpoint.encoder import Encoder, PartJob
from outlast.checkpoint.inspection import (
    describe,
    find_version,
    hold,
    list_saved,
    open_store,
    prune_store,
    summarize,
    summarize_logs,
    usage,
    verify,
)
from outlast.checkpoint.manifest import REPLAY, Catalogue
from outlast.checkpoint.storage import LocalStorage
from outlast.checkpoint.version import SEAL, Version, list_versions, load, seal
from outlast.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Group = Callable[[int], Callable[..., list[Any]]]

# Every chunk that is not known is stored as it is.
PLAIN = Reduction(Compression("none"))


class Tensors(nn.Module):
    """Any tensors, by name."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def store_at(directory: Path, reduction: Reduction | None = None) -> CheckpointStore:
    return CheckpointStore(directory, keep=100, reduction=reduction, writer="thread")


def save_tensors(directory: Path, step: int, **tensors: torch.Tensor) -> None:
    with store_at(directory, PLAIN) as store:
        store.save(step, {"model": Tensors(**tensors)})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four versions of a small training, with lossy momenta and metrics."""
    directory = tmp_path_factory.mktemp("trained")
    state = make_state()
    reduction = Reduction(lossy={"*.exp_avg": Bound(relative=1e-2)})
    with store_at(directory, reduction) as store:
        for step in range(1, 5):
            train(state, step, step)
            store.save(step, state, metrics={"loss": 4.0 / step})
    return directory


@pytest.fixture
def damaged(trained: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def folder(directory: Path, step: int) -> Path:
    (found,) = directory.glob(f"step-{step:08d}-a*")
    return found


def flip(path: Path, where: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if where is None else where] ^= 1
    path.write_bytes(content)


def test_a_run_directory_leads_to_its_store(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(trained)
    assert open_store(tmp_path / "run").location == str(tmp_path / "run" / "checkpoints")
    assert open_store(f"file://{trained}").location == str(trained)


def test_a_place_without_checkpoints_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("text")
    for place, words in (
        (tmp_path, "holds no checkpoint"),
        (tmp_path / "notes", "does not exist, is empty or is a file"),
        (tmp_path / "missing", "does not exist"),
        (tmp_path / "file", "is a file"),
        ("nosuch://place", "Protocol not known"),
        ("memory://nothing-here", "does not exist"),
    ):
        with pytest.raises(CheckpointError, match=words):
            open_store(place)


def test_a_store_behind_a_url_is_read(trained: Path) -> None:
    import fsspec

    filesystem = fsspec.filesystem("memory")
    filesystem.put(str(trained), "/inspected", recursive=True)
    storage = open_store("memory://inspected")
    local = storage_of(trained)
    assert [summarize(storage, v) for v in list_saved(storage)] == [
        summarize(local, v) for v in list_saved(local)
    ]
    assert verify(storage, list_saved(storage)[-1]).state == "ok"
    assert usage(storage) == usage(local)


def test_a_summary_adds_up(trained: Path) -> None:
    storage = storage_of(trained)
    summaries = [summarize(storage, version) for version in list_saved(storage)]
    assert [each.step for each in summaries] == [1, 2, 3, 4]
    raw_bytes = sum(
        tensor.nbytes for tensor in make_state()["model"].state_dict(keep_vars=True).values()
    )
    for each in summaries:
        assert (each.state, each.problem, each.kind, each.ranks) == ("complete", "", "state", 1)
        assert each.metrics == {"loss": 4.0 / each.step}
        files = list((trained / each.folder).iterdir())
        assert each.stored_bytes == sum(path.stat().st_size for path in files)
        assert each.raw_bytes is not None
        assert each.raw_bytes > raw_bytes, "the model's tensors and the optimizer's"
        assert each.ratio == each.raw_bytes / each.stored_bytes
    assert summaries[0].referred_bytes == 0
    assert summaries[1].referred_bytes, "the buffers, which do not change"


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a bit of the pack": lambda path: flip(path / "rank-00000-of-00001.pack"),
    "pack deleted": lambda path: (path / "rank-00000-of-00001.pack").unlink(),
    "pack cut": lambda path: os.truncate(
        path / "rank-00000-of-00001.pack", (path / "rank-00000-of-00001.pack").stat().st_size - 1
    ),
    "a bit of the manifest": lambda path: flip(path / "rank-00000-of-00001.json"),
    "manifest deleted": lambda path: (path / "rank-00000-of-00001.json").unlink(),
    "a bit of the catalogue": lambda path: flip(next(path.glob("catalogue-*"))),
    "catalogue deleted": lambda path: next(path.glob("catalogue-*")).unlink(),
    "a bit of the seal": lambda path: flip(path / SEAL),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_and_named(damaged: Path, kind: str) -> None:
    storage = storage_of(damaged)
    before = {version: verify(storage, version).state for version in list_saved(storage)}
    assert set(before.values()) == {"ok"}
    DAMAGE[kind](folder(damaged, 4))
    version = list_saved(storage)[-1]
    verdict = verify(storage, version)
    assert verdict.state == "damaged"
    assert any(folder(damaged, 4).name in problem for problem in verdict.problems)
    assert verdict.restorable == ("seal" in kind)
    for older in list_saved(storage)[:-1]:
        assert verify(storage, older).state == "ok"


def test_damage_of_a_base_is_damage_of_all_that_build_on_it(damaged: Path) -> None:
    storage = storage_of(damaged)
    flip(folder(damaged, 1) / "rank-00000-of-00001.pack", 0)
    known: set[Any] = set()
    states = [verify(storage, version, known).state for version in list_saved(storage)]
    assert states[0] == "damaged"
    assert states == [verify(storage, version).state for version in list_saved(storage)]


def test_known_chunks_are_not_read_again(tmp_path: Path) -> None:
    with store_at(tmp_path, PLAIN) as store:
        model = Tensors(large=torch.arange(300_000), small=torch.zeros(3))
        store.save(1, {"model": model})
        model.small += 1
        store.save(2, {"model": model})
    storage = storage_of(tmp_path)
    known: set[Any] = set()
    first, second = (verify(storage, version, known) for version in list_saved(storage))
    assert (first.state, second.state) == ("ok", "ok")
    assert first.read_bytes >= 300_000 * 8
    assert second.read_bytes < 100
    assert second.known_chunks == first.chunks - 1


def test_progress_ends_at_the_whole(trained: Path) -> None:
    storage = storage_of(trained)
    contents = find_version(storage)
    told: list[tuple[int, int]] = []
    verify(storage, contents.version, None, lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] > 0
    assert told == sorted(told)


def test_a_seal_of_another_version_is_found(damaged: Path) -> None:
    shutil.copy(folder(damaged, 3) / SEAL, folder(damaged, 4) / SEAL)
    storage = storage_of(damaged)
    verdict = verify(storage, list_saved(storage)[-1])
    assert verdict.state == "damaged"
    assert any("names another manifest of rank 0" in each for each in verdict.problems)


def test_a_manifest_in_the_wrong_folder_is_found(damaged: Path) -> None:
    for path in folder(damaged, 3).glob("*.json"):
        shutil.copy(path, folder(damaged, 4) / path.name)
    storage = storage_of(damaged)
    verdict = verify(storage, list_saved(storage)[-1])
    assert verdict.state == "damaged"
    assert any("belongs to another version" in each for each in verdict.problems)


def write_replay(directory: Path, step: int, requires: list[int], *, sealed: bool = True) -> None:
    """A log that holds one value, as of the store's first session."""
    storage = storage_of(directory / "replay")
    memory = memoryview(bytearray(8))
    job = PartJob(
        version=Version(1, step),
        rank=0,
        world_size=1,
        catalogue=Catalogue({}, ("log",)),
        pieces=[],
        values={"log": [1, 2]},
        kind=REPLAY,
        requires=requires,
    )
    Encoder(storage, PLAIN, memory).write(job, lambda: None)
    if sealed:
        seal(storage, load(storage, job.version))


def test_a_replay_log_needs_the_state_that_it_starts_from(damaged: Path) -> None:
    write_replay(damaged, 5, [4])
    storage = storage_of(damaged / "replay")
    [version] = list_saved(storage)
    summary = summarize(storage, version)
    assert (summary.kind, summary.state, summary.raw_bytes) == ("replay", "complete", 0)
    assert describe(storage, find_version(storage)).requires == (4,)
    assert verify(storage, version).state == "ok"
    (folder(damaged, 4) / "rank-00000-of-00001.json").unlink()
    verdict = verify(storage, version)
    assert verdict.state == "damaged"
    assert any("starts from step 4, which cannot be used" in each for each in verdict.problems)


def test_logs_lead_as_far_as_they_have_no_gap(damaged: Path) -> None:
    storage = storage_of(damaged)
    newest = list_saved(storage)[-1]
    assert summarize_logs(storage, newest) is None
    write_replay(damaged, 4, [3])
    found = summarize_logs(storage, newest)
    assert found is not None
    assert (found.logs, found.leading_on, found.step, found.problem) == (1, 0, None, "")
    for step in (5, 6, 8):
        write_replay(damaged, step, [4])
    found = summarize_logs(storage, newest)
    assert found is not None
    assert (found.logs, found.base, found.leading_on, found.step) == (4, 4, 2, 6)
    assert "step 8 cannot be used: that of step 7 is missing" in found.problem
    files = [path for path in (damaged / "replay").rglob("*") if path.is_file()]
    assert found.stored_bytes == sum(path.stat().st_size for path in files)
    without = summarize_logs(storage, None)
    assert without is not None
    assert (without.logs, without.base, without.step) == (4, None, None)


def test_a_newest_log_that_was_cut_short_does_not_count(damaged: Path) -> None:
    storage = storage_of(damaged)
    write_replay(damaged, 5, [4])
    write_replay(damaged, 6, [4], sealed=False)
    (folder(damaged / "replay", 6) / "rank-00000-of-00001.json").unlink()
    found = summarize_logs(storage, list_saved(storage)[-1])
    assert found is not None
    assert (found.leading_on, found.step, found.problem) == (1, 5, "")


def test_an_unfinished_save_is_no_damage(damaged: Path) -> None:
    for name in (SEAL, "rank-00000-of-00001.json"):
        (folder(damaged, 4) / name).unlink()
    storage = storage_of(damaged)
    summary = summarize(storage, list_saved(storage)[-1])
    assert (summary.state, summary.raw_bytes) == ("incomplete", None)
    assert "no manifest" in summary.problem
    assert verify(storage, list_saved(storage)[-1]).state == "incomplete"
    assert find_version(storage).version.step == 3
    with pytest.raises(CheckpointError, match="step-00000004-a1 has no manifest"):
        find_version(storage, 4)
    with pytest.raises(CheckpointError, match=r"step = 9 is not in .* are 1, 2, 3, 4"):
        find_version(storage, 9)


def test_a_folder_with_nothing_but_chunks_is_no_version(damaged: Path) -> None:
    for path in folder(damaged, 1).glob("*.json"):
        path.unlink()
    storage = storage_of(damaged)
    assert [version.step for version in list_saved(storage)] == [2, 3, 4]


def test_the_newest_session_of_a_step_is_shown(tmp_path: Path) -> None:
    save_tensors(tmp_path, 5, weight=torch.zeros(3))
    save_tensors(tmp_path, 5, weight=torch.ones(3))
    assert find_version(storage_of(tmp_path), 5).version.session == 2


def test_a_description_says_how_each_tensor_is_stored(trained: Path) -> None:
    storage = storage_of(trained)
    found = describe(storage, find_version(storage, 3))
    content = (trained / found.folder / SEAL).read_bytes()
    assert json.loads(content)["blake3"] == found.root
    assert found.notes["torch"] == torch.__version__
    assert found.metrics == {"loss": 4.0 / 3}
    groups = {group.name: group for group in found.groups}
    assert {"model.*", "optimizer.state.*.exp_avg", "data.*"} <= groups.keys()
    assert sum(group.tensors for group in found.groups) == len(found.tensors)
    assert sum(group.raw_bytes for group in found.groups) == found.raw_bytes
    tensors = {tensor.name: tensor for tensor in found.tensors}
    weight = tensors["model.embedding.weight"]
    assert (weight.dtype, weight.shape, weight.pieces) == ("float32", (11, 6), 1)
    assert weight.coding.full + weight.coding.deltas == 1
    assert tensors["model.seen"].shape == ()
    lossy = tensors["optimizer.state.embedding.weight.exp_avg"]
    assert lossy.bound is not None
    assert lossy.bound["relative"] == 1e-2
    assert lossy.coding.max_error is not None
    assert 0 < lossy.coding.max_error <= 1e-2
    assert weight.coding.max_error is None
    assert found.values["data"]["position"] == 3
    assert found.coding.stored_bytes <= found.referred_bytes + found.own_bytes


def difference(directory: Path, before: int, after: int) -> Difference:
    storage = storage_of(directory)
    return compare(storage, find_version(storage, before), find_version(storage, after))


def test_a_version_does_not_differ_from_itself_and_nothing_is_read(trained: Path) -> None:
    found = difference(trained, 3, 3)
    assert {tensor.change for tensor in found.tensors} == {"same"}
    assert found.values == ()
    assert found.read_bytes == 0
    assert found.equal_bytes == found.content_bytes > 0


def test_every_kind_of_change_is_named(tmp_path: Path) -> None:
    save_tensors(
        tmp_path,
        1,
        equal=torch.ones(9),
        gone=torch.ones(1),
        retyped=torch.ones(2),
        reshaped=torch.ones(2),
        flipped=torch.tensor([True, False]),
        nothing=torch.zeros(0, 3),
    )
    save_tensors(
        tmp_path,
        2,
        equal=torch.ones(9),
        new=torch.ones(1),
        retyped=torch.ones(2, 1, dtype=torch.bfloat16),
        reshaped=torch.ones(3),
        flipped=torch.tensor([True, True]),
        nothing=torch.zeros(0, 3),
    )
    found = difference(tmp_path, 1, 2)
    changes = {tensor.name.removeprefix("model."): tensor for tensor in found.tensors}
    assert {name: each.change for name, each in changes.items()} == {
        "gone": "removed",
        "new": "added",
        "retyped": "retyped",
        "reshaped": "reshaped",
        "flipped": "changed",
        "equal": "same",
        "nothing": "same",
    }
    assert list(changes)[-2:] == ["equal", "nothing"], "the unchanged come last"
    assert (changes["retyped"].was_dtype, changes["retyped"].was_shape) == ("float32", (2,))
    assert (changes["reshaped"].was_shape, changes["reshaped"].shape) == ((2,), (3,))
    assert changes["flipped"].fraction == 0.5


def test_the_size_of_a_change_is_that_of_torch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    before = torch.randn(300, 500)
    after = before.clone()
    after[7:9] += torch.randn(2, 500)
    save_tensors(tmp_path, 1, weight=before, little=torch.ones(4))
    save_tensors(tmp_path, 2, weight=after, little=torch.ones(4) * 1.001)
    found = difference(tmp_path, 1, 2)
    weight, little = found.tensors
    assert (weight.name, little.name) == ("model.weight", "model.little"), "the largest first"
    assert weight.changed_elements == 1000
    assert weight.fraction == 1000 / 150_000
    relative = (before - after).double().norm() / after.double().norm()
    assert weight.relative_change == pytest.approx(relative.item(), rel=1e-6)
    assert weight.max_difference == pytest.approx((before - after).abs().max().item(), rel=1e-6)
    # Equal tiles of the later version are read for its norm, those of the earlier one are not.
    assert found.equal_bytes > 0
    assert found.read_bytes < 2 * before.nbytes
    # A tensor of one value is stored as that value.
    assert found.read_bytes == 2 * before.nbytes - found.equal_bytes + 2 * 4


def test_changed_values_are_listed(trained: Path) -> None:
    found = difference(trained, 2, 4)
    changes = {value.name: value for value in found.values}
    assert (changes["data.position"].before, changes["data.position"].after) == (2, 4)
    assert changes["data.position"].change == "changed"
    assert not any(name.startswith("optimizer") for name in changes)


def test_settings_that_parameters_share_have_one_group(tmp_path: Path) -> None:
    state = make_state()
    sampler = Sampler()
    with store_at(tmp_path) as store:
        sampler.state = {"old": 1, "list": [1, 2]}
        store.save(1, {**state, "data": sampler})
        for group in state["optimizer"][1].param_groups:
            group["lr"] = 0.5
        sampler.state = {"new": None, "list": [1, 3]}
        store.save(2, {**state, "data": sampler})
    found = difference(tmp_path, 1, 2).values
    rates = [value for value in found if value.name.startswith("optimizer")]
    assert {value.group for value in rates} == {"optimizer.groups.*.lr"}
    assert len(rates) == 3
    others = {value.name: (value.change, value.before, value.after) for value in found}
    assert others["data.old"] == ("removed", 1, None)
    assert others["data.new"] == ("added", None, None)
    assert others["data.list.1"] == ("changed", 2, 3)


TYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
]


def raw_of(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_numbers_are_those_of_torch(dtype: torch.dtype) -> None:
    codes = torch.arange(256).repeat(4).to(torch.uint8)
    tensor = (codes % 2 == 1) if dtype == torch.bool else codes[torch.randperm(1024)].view(dtype)
    found = numbers_of(raw_of(tensor), str(dtype).removeprefix("torch."))
    assert found is not None
    if dtype.is_complex:
        expected = tensor.to(torch.complex128).numpy()
    elif dtype.is_floating_point:
        expected = tensor.to(torch.float64).numpy()
    else:
        expected = tensor.numpy()
    np.testing.assert_array_equal(found, expected)


def test_a_type_of_unknown_layout_is_compared_as_bytes() -> None:
    distance = Distance("float8_e8m0fnu", 1)
    distance.add(np.array([1, 2], np.uint8), np.array([1, 3], np.uint8))
    assert (distance.changed, distance.comparable, distance.relative) == (1, False, None)


@settings(max_examples=50, deadline=None)
@given(pairs=st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2), min_size=1, max_size=20))
def test_differences_of_integers_are_exact(pairs: list[tuple[int, int]]) -> None:
    before, after = np.array(pairs, np.int64).T.copy()
    distance = Distance("int64", 8)
    distance.add(before.view(np.uint8), after.view(np.uint8))
    assert distance.largest == max(abs(a - b) for a, b in pairs)
    assert distance.changed == sum(a != b for a, b in pairs)


@settings(max_examples=50, deadline=None)
@given(
    pairs=st.lists(st.tuples(*[st.floats(width=32)] * 2), min_size=1, max_size=20),
    cut=st.integers(0, 20),
)
def test_parts_add_up_and_what_is_not_finite_is_counted_apart(
    pairs: list[tuple[float, float]], cut: int
) -> None:
    before, after = np.array(pairs, np.float32).T.copy()
    whole, parts = Distance("float32", 4), Distance("float32", 4)
    whole.add(before.view(np.uint8), after.view(np.uint8))
    for piece in (slice(cut), slice(cut, None)):
        parts.add(before[piece].view(np.uint8), after[piece].view(np.uint8))
    assert (whole.changed, whole.not_finite, whole.largest) == (
        parts.changed,
        parts.not_finite,
        parts.largest,
    )
    differ = before.view(np.uint32) != after.view(np.uint32)
    finite = np.isfinite(before) & np.isfinite(after)
    assert whole.changed == differ.sum()
    assert whole.not_finite == (differ & ~finite).sum()
    assert math.isfinite(whole.largest)
    assert whole.relative is None or math.isfinite(whole.relative)
    if whole.relative is not None:
        assert parts.relative == pytest.approx(whole.relative, rel=1e-9)


def test_usage_adds_up_to_the_files(trained: Path) -> None:
    found = usage(storage_of(trained))
    files = [path for path in trained.rglob("*") if path.is_file()]
    assert found.total_bytes == sum(path.stat().st_size for path in files)
    assert found.temporary_bytes == found.orphan_bytes == 0
    assert found.raw_bytes == sum(each.raw_bytes or 0 for each in found.versions)
    assert found.shared_bytes > 0, "the buffers, which do not change"
    assert (
        found.own_bytes + found.shared_bytes + found.manifest_bytes
        == found.total_bytes
        == sum(each.freed_bytes for each in found.versions) + found.shared_bytes
    )


def test_replay_logs_are_counted_apart(damaged: Path) -> None:
    before = usage(storage_of(damaged))
    write_replay(damaged, 5, [4])
    (folder(damaged / "replay", 5) / "rank-00000-of-00001.pack.1234.tmp").write_bytes(bytes(70))
    (damaged / "replay" / "left.tmp").write_bytes(bytes(7))
    found = usage(storage_of(damaged))
    files = [path for path in (damaged / "replay").rglob("*") if path.is_file()]
    assert found.log_bytes == sum(path.stat().st_size for path in files) > 77
    assert found.total_bytes == before.total_bytes + found.log_bytes
    assert replace(found, log_bytes=0, total_bytes=before.total_bytes) == before


def test_pruning_leaves_the_replay_logs(damaged: Path) -> None:
    for step in (5, 6):
        write_replay(damaged, step, [4])
    log_bytes = usage(storage_of(damaged)).log_bytes
    assert len(prune_store(storage_of(damaged), Retention(keep=1)).deleted) == 3
    assert usage(storage_of(damaged)).log_bytes == log_bytes
    with pytest.raises(CheckpointError, match="holds replay logs, each of which needs those"):
        prune_store(storage_of(damaged / "replay"), Retention(keep=1))
    assert len(list_versions(storage_of(damaged / "replay"))) == 2


def test_leftovers_are_told_apart(damaged: Path) -> None:
    before = usage(storage_of(damaged))
    (folder(damaged, 4) / "rank-00000-of-00001.pack.1234.tmp").write_bytes(bytes(100))
    orphan = damaged / "step-00000009-a7"
    orphan.mkdir()
    (orphan / "rank-00000-of-00001.pack").write_bytes(bytes(30))
    for name in (SEAL, "rank-00000-of-00001.json"):
        (folder(damaged, 3) / name).unlink()
    found = usage(storage_of(damaged))
    assert (found.temporary_bytes, found.orphan_bytes) == (100, 30)
    assert [each.complete for each in found.versions] == [True, True, False, True]
    assert found.total_bytes < before.total_bytes + 130


def test_what_a_deletion_frees_is_what_was_said(damaged: Path) -> None:
    storage = storage_of(damaged)
    before = usage(storage)
    planned = prune_store(storage, Retention(keep=1), dry_run=True)
    assert usage(storage) == before
    done = prune_store(storage, Retention(keep=1))
    assert (done.deleted, done.kept, done.freed_bytes) == (
        planned.deleted,
        planned.kept,
        planned.freed_bytes,
    )
    assert planned.dry_run
    assert not done.dry_run
    assert done.kept == ("step-00000004-a1",)
    assert len(done.deleted) == 3
    assert usage(storage).total_bytes == before.total_bytes - done.freed_bytes
    assert verify(storage, list_saved(storage)[-1]).state == "ok"
    assert not (damaged / "owner").exists()


def test_good_versions_are_not_deleted_for_a_damaged_one(damaged: Path) -> None:
    (folder(damaged, 4) / "rank-00000-of-00001.json").unlink()
    storage = storage_of(damaged)
    # Refusing is as good as keeping the newest version that can be restored.
    with contextlib.suppress(CheckpointError):
        prune_store(storage, Retention(keep=1))
    assert find_version(storage).version.step == 3
    assert verify(storage, find_version(storage).version).state == "ok"


@pytest.mark.parametrize("dry_run", [False, True])
def test_pruning_leaves_a_version_that_is_right_to_the_last_bit(
    damaged: Path, dry_run: bool
) -> None:
    pack = folder(damaged, 4) / "rank-00000-of-00001.pack"
    content = pack.read_bytes()
    pack.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    storage = storage_of(damaged)
    with pytest.raises(CheckpointError, match=r"none of the versions that would stay .*damaged"):
        prune_store(storage, Retention(keep=1), dry_run=dry_run)
    assert len(list_versions(storage)) == 4
    assert len(prune_store(storage, Retention(keep=2), dry_run=dry_run).deleted) == 2
    assert find_version(storage, 3).version.step == 3


def test_the_best_are_kept_by_a_metric_that_exists(damaged: Path) -> None:
    storage = storage_of(damaged)
    policy = Retention(keep=1, best=1, metric="loss", mode="max")
    found = prune_store(storage, policy, dry_run=True)
    assert found.kept == ("step-00000001-a1", "step-00000004-a1")
    with pytest.raises(CheckpointError, match=r'"lost" was saved with no version .* are loss'):
        prune_store(storage, Retention(keep=1, best=1, metric="lost"))
    assert len(list_versions(storage)) == 4


def test_a_store_with_a_live_owner_is_not_pruned(tmp_path: Path) -> None:
    with store_at(tmp_path) as store:
        for step in (1, 2):
            store.save(step, {"model": Tensors(weight=torch.ones(3))})
        with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()}"):
            prune_store(storage_of(tmp_path), Retention(keep=1))
        found = prune_store(storage_of(tmp_path), Retention(keep=1), dry_run=True)
        assert len(found.deleted) == 1
    assert len(list_saved(storage_of(tmp_path))) == 2
    with (
        hold(LocalStorage(tmp_path)),
        store_at(tmp_path) as store,
        pytest.raises(CheckpointError, match="in use by process"),
    ):
        store.save(3, {"model": Tensors(weight=torch.ones(3))})
    assert len(prune_store(storage_of(tmp_path), Retention(keep=1)).deleted) == 1


def extracted(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors, by way of the index."""
    index = json.loads((directory / "tensors.safetensors.index.json").read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(directory / file, "pt") as opened:
            found[name] = opened.get_tensor(name)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    return raw_of(one).tobytes() == raw_of(other).tobytes()


def test_all_types_arrive_in_safetensors(tmp_path: Path) -> None:
    codes = torch.randint(0, 256, (960,), dtype=torch.uint8)
    tensors = {
        str(dtype).replace("torch.", "of_"): codes.view(dtype).reshape(3, -1)
        for dtype in TYPES
        if dtype not in (torch.bool, torch.complex32, torch.complex128)
    }
    tensors |= {"flags": codes > 128, "scalar": torch.tensor(3.5), "none": torch.zeros(2, 0)}
    save_tensors(tmp_path / "store", 1, **tensors)
    storage = storage_of(tmp_path / "store")
    result = extract(storage, find_version(storage), tmp_path / "out", file_bytes=2000)
    found = extracted(tmp_path / "out")
    assert {f"model.{name}" for name in tensors} == set(found)
    assert all(same_bits(found[f"model.{name}"], tensor) for name, tensor in tensors.items())
    assert len(result.files) > 1
    for file in result.files:
        assert (tmp_path / "out" / file).stat().st_size < 2000 + 2000
    assert (result.tensors, result.bytes) == (len(tensors), sum(t.nbytes for t in tensors.values()))
    assert json.loads((tmp_path / "out" / "values.json").read_text()) == {}


def test_a_training_state_arrives_with_its_values(trained: Path, tmp_path: Path) -> None:
    storage = storage_of(trained)
    (tmp_path / "empty").mkdir()
    extract(storage, find_version(storage, 2), tmp_path / "empty")
    state = make_state()
    CheckpointStore(trained, writer="thread").restore(state, step=2)
    found = extracted(tmp_path / "empty")
    for name, tensor in state["model"].state_dict().items():
        assert same_bits(found[f"model.{name}"], tensor)
    values = json.loads((tmp_path / "empty" / "values.json").read_text())
    assert values["data"]["position"] == 2


def test_a_part_of_the_tensors_is_written(trained: Path, tmp_path: Path) -> None:
    storage = storage_of(trained)
    extract(storage, find_version(storage), tmp_path / "out", only="*.exp_avg")
    assert len(extracted(tmp_path / "out")) == 3
    with pytest.raises(CheckpointError, match='only = "weight" fits no tensor'):
        extract(storage, find_version(storage), tmp_path / "other", only="weight")


def test_nothing_appears_of_a_damaged_version(damaged: Path, tmp_path: Path) -> None:
    flip(folder(damaged, 4) / "rank-00000-of-00001.pack")
    storage = storage_of(damaged)
    (tmp_path / "place").mkdir()
    with pytest.raises(CheckpointError, match="is damaged at byte"):
        extract(storage, find_version(storage), tmp_path / "place" / "out")
    assert list((tmp_path / "place").iterdir()) == []


def test_a_directory_in_use_is_not_touched(trained: Path, tmp_path: Path) -> None:
    storage = storage_of(trained)
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(CheckpointError, match="is not an empty directory"):
            extract(storage, find_version(storage), place)
    with pytest.raises(CheckpointError, match="cannot be written: Not a directory"):
        extract(storage, find_version(storage), tmp_path / "file" / "out")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_type_that_safetensors_lacks_is_named(tmp_path: Path) -> None:
    save_tensors(tmp_path / "store", 1, wide=torch.zeros(2, dtype=torch.complex128))
    storage = storage_of(tmp_path / "store")
    with pytest.raises(CheckpointError, match=r"`model\.wide` is of type complex128"):
        extract(storage, find_version(storage), tmp_path / "out")


def sharded(seed: int, mesh_size: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 300), nn.Linear(300, 7))
    return fully_shard(model, mesh=init_device_mesh("cpu", (mesh_size,)))


def save_sharded(directory: Path) -> None:
    dist.init_process_group("gloo")
    model = sharded(0, 2)
    with store_at(directory, PLAIN) as store:
        store.save(1, {"model": model})
        with torch.no_grad():
            model[1].bias.mul_(2.0)
        store.save(2, {"model": model})
    # Rank 0 serves the others' store of keys: it must not end before they have heard of the save.
    dist.barrier()


@pytest.mark.distributed
def test_versions_of_two_ranks(ranks: Group, tmp_path: Path) -> None:
    ranks(2)(save_sharded, tmp_path / "store")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 300), nn.Linear(300, 7))
    # The same content, cut in another way.
    save_tensors_of(tmp_path / "store", 3, model)
    storage = storage_of(tmp_path / "store")
    first, second, third = (summarize(storage, version) for version in list_saved(storage))
    assert (first.ranks, second.ranks, third.ranks) == (2, 2, 1)
    assert first.raw_bytes == third.raw_bytes == sum(p.nbytes for p in model.parameters())
    for version in list_saved(storage):
        assert verify(storage, version).state == "ok"
    tensors = describe(storage, find_version(storage, 1)).tensors
    assert {t.pieces for t in tensors if t.name == "model.0.weight"} == {2}
    resharded = difference(tmp_path / "store", 1, 3)
    assert {tensor.change for tensor in resharded.tensors} == {"same"}
    trained = difference(tmp_path / "store", 1, 2)
    (changed,) = (tensor for tensor in trained.tensors if tensor.change == "changed")
    assert changed.name == "model.1.bias"
    assert changed.relative_change == pytest.approx(0.5)
    extract(storage, find_version(storage, 1), tmp_path / "out")
    found = extracted(tmp_path / "out")
    for name, tensor in model.state_dict().items():
        assert same_bits(found[f"model.{name}"], tensor)


def save_tensors_of(directory: Path, step: int, model: nn.Module) -> None:
    with store_at(directory, PLAIN) as store:
        store.save(step, {"model": model})


@pytest.mark.distributed
def test_a_lost_rank_is_damage(ranks: Group, tmp_path: Path) -> None:
    ranks(2)(save_sharded, tmp_path)
    (folder(tmp_path, 2) / "rank-00001-of-00002.json").unlink()
    storage = storage_of(tmp_path)
    summary = summarize(storage, list_saved(storage)[-1])
    assert summary.state == "damaged"
    assert "rank-00001-of-00002.json is missing" in summary.problem
    assert find_version(storage).version.step == 1
