"""Outlast's storage under torch.distributed.checkpoint: exact, reduced, verified, atomic."""

import dataclasses
import errno
import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_states import Net, bits, make_optimizers, make_state, train
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from outlast.checkpoint import (
    Bound,
    CheckpointStore,
    Compression,
    Reduction,
    Retention,
    list_versions,
    storage_of,
)
from outlast.checkpoint import dcp as dcp_storage
from outlast.checkpoint.dcp import OutlastReader, OutlastWriter
from outlast.checkpoint.storage import LocalStorage
from outlast.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (un|dis)")

Group = Callable[[int], Callable[..., list[Any]]]


def make_dcp_state(seed: int = 0, rows: int = 300) -> dict[str, Any]:
    """Every element type and shape that a state has, nested, with objects between."""
    torch.manual_seed(seed)
    embedding = torch.randn(rows, 200)
    return {
        "model": {
            "embedding": embedding,
            "head": embedding,
            "scale": torch.tensor(float(seed)),
            "empty": torch.empty(0, 4),
            "half": torch.randn(7).bfloat16(),
            "waves": torch.randn(3, 3, dtype=torch.complex64),
            "wide": torch.randn(4, dtype=torch.complex128),
            "mask": torch.rand(5) > 0.5,
            "view": torch.randn(6, 4).t(),
        },
        "groups": [{"lr": 0.1 * seed, "betas": (0.9, 0.95)}, {"step": torch.tensor(seed)}],
        "epoch": seed,
        "text": "a" * seed,
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def saved_steps(place: Path) -> list[int]:
    return [version.step for version in list_versions(storage_of(place))]


def pack_bytes(place: Path, step: int) -> int:
    [folder] = place.glob(f"step-{step:08d}-a*")
    return sum(pack.stat().st_size for pack in folder.glob("*.pack"))


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_what_is_saved_comes_back_exactly(tmp_path: Path) -> None:
    writer = OutlastWriter(tmp_path)
    state = make_dcp_state(1)
    for _ in range(4):
        state["model"]["embedding"] += 1e-4
        dcp.save(state, storage_writer=writer)
    found = make_dcp_state(2)
    reader = OutlastReader(tmp_path)
    dcp.load(found, storage_reader=reader)
    assert same(state, found)
    assert saved_steps(tmp_path)[-1] == 4
    assert reader.version is not None
    assert reader.version.step == 4
    assert reader.skipped == []


def test_an_object_store_does_too() -> None:
    place = "memory://dcp-test"
    state = make_dcp_state(1)
    dcp.save(state, storage_writer=OutlastWriter(place, step=7))
    found = make_dcp_state(2)
    dcp.load(found, storage_reader=OutlastReader(place))
    assert same(state, found)


def test_digits_at_the_end_of_the_place_are_no_step(tmp_path: Path) -> None:
    place = tmp_path / "run-7"
    state = make_dcp_state(1)
    writer = OutlastWriter(place)
    for _ in range(2):
        dcp.save(state, storage_writer=writer, checkpoint_id=place)
    dcp.save(state, storage_writer=writer, checkpoint_id=place / "step-7")
    assert saved_steps(place) == [1, 2, 7]
    found = make_dcp_state(2)
    dcp.load(found, storage_reader=OutlastReader(place, step=2), checkpoint_id=f"{place}/")
    assert same(state, found)


def test_a_place_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp.save(make_dcp_state(1), storage_writer=OutlastWriter(tmp_path))

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(LocalStorage, "folders", fail)
    for asks in (OutlastReader(tmp_path).newest, OutlastReader(tmp_path).read_metadata):
        with pytest.raises(CheckpointError, match=f"{tmp_path} cannot be read: Input/output err"):
            asks()


def test_metadata_is_that_of_the_stock_writer_and_no_pickle(tmp_path: Path) -> None:
    state = make_dcp_state(1)
    state["trained"] = torch.ones(2, requires_grad=True)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "stock"))
    returned = dcp.save(state, storage_writer=OutlastWriter(tmp_path / "ours", step=1))
    stock = dcp.FileSystemReader(tmp_path / "stock").read_metadata()
    ours = OutlastReader(tmp_path / "ours").read_metadata()
    assert list(ours.state_dict_metadata) == list(stock.state_dict_metadata)
    assert ours.state_dict_metadata == stock.state_dict_metadata
    assert ours.planner_data == stock.planner_data
    assert ours.storage_data == returned.storage_data
    assert ours.storage_data.keys() == stock.storage_data.keys()
    [folder] = (tmp_path / "ours").iterdir()
    for path in folder.iterdir():
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        else:
            assert path.suffix == ".pack"


def test_a_state_is_rebuilt_without_a_template(tmp_path: Path) -> None:
    state = make_dcp_state(3)
    dcp.save(state, storage_writer=OutlastWriter(tmp_path))
    assert same(_load_state_dict_from_keys(storage_reader=OutlastReader(tmp_path)), state)
    found = _load_state_dict_from_keys("epoch", storage_reader=OutlastReader(tmp_path))
    assert found == {"epoch": 3}


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    tied = make_dcp_state(1)
    untied = make_dcp_state(1)
    untied["model"]["head"] = torch.randn(300, 200)
    reduction = Reduction(Compression("none"))
    sizes = {}
    for name, state in (("tied", tied), ("untied", untied)):
        writer = OutlastWriter(tmp_path / name, step=1, reduction=reduction)
        dcp.save(state, storage_writer=writer)
        sizes[name] = pack_bytes(tmp_path / name, 1)
    assert sizes["untied"] - sizes["tied"] == 300 * 200 * 4


def test_a_second_save_stores_what_has_changed(tmp_path: Path) -> None:
    writer = OutlastWriter(tmp_path, step=1)
    state = make_dcp_state(1)
    frozen = torch.randn(500, 200)
    state["frozen"] = frozen
    dcp.save(state, storage_writer=writer)
    state["model"]["embedding"] *= 1.0001
    dcp.save(state, storage_writer=writer, checkpoint_id="out/step-2")
    full = pack_bytes(tmp_path, 1)
    # The frozen tensor is known.
    assert pack_bytes(tmp_path, 2) < full - 0.8 * frozen.nbytes


def test_steps_come_from_ids_settings_and_counting(tmp_path: Path) -> None:
    writer = OutlastWriter(tmp_path, step=10, keep=99)
    state = {"a": torch.ones(2)}
    dcp.save(state, storage_writer=writer)
    dcp.save(state, storage_writer=writer)
    dcp.save(state, storage_writer=writer, checkpoint_id="runs/x/step-20")
    dcp.save(state, storage_writer=writer, checkpoint_id="runs/x/last")
    writer.step = 30
    dcp.save(state, storage_writer=writer)
    assert saved_steps(tmp_path) == [10, 11, 20, 21, 30]
    dcp.save(state, storage_writer=OutlastWriter(tmp_path, keep=99))
    assert saved_steps(tmp_path)[-1] == 31
    with pytest.raises(CheckpointError, match="step = -1"):
        writer.step = -1


def test_a_step_saved_again_replaces_nothing_and_is_the_newest(tmp_path: Path) -> None:
    writer = OutlastWriter(tmp_path, keep=9)
    for value, name in ((1.0, "step-5"), (2.0, "step-9"), (3.0, "step-5")):
        dcp.save({"a": torch.tensor(value)}, storage_writer=writer, checkpoint_id=name)
    assert saved_steps(tmp_path) == [5, 9, 5]
    found = {"a": torch.tensor(0.0)}
    dcp.load(found, storage_reader=OutlastReader(tmp_path))
    assert found["a"] == 3.0
    dcp.load(found, storage_reader=OutlastReader(tmp_path), checkpoint_id="any/step-9")
    assert found["a"] == 2.0
    with pytest.raises(CheckpointException, match=r"step = 6 is not in .* there are 5, 9"):
        dcp.load(found, storage_reader=OutlastReader(tmp_path, step=6))


def test_old_versions_go_and_the_best_stays(tmp_path: Path) -> None:
    writer = OutlastWriter(tmp_path, keep=Retention(keep=2, best=1, metric="loss"))
    for loss in (3.0, 1.0, 2.0, 4.0, 5.0):
        writer.metrics = {"loss": loss}
        dcp.save({"a": torch.tensor(loss)}, storage_writer=writer)
    assert saved_steps(tmp_path) == [2, 4, 5]


def test_a_flipped_bit_is_named_and_the_older_step_loads(tmp_path: Path) -> None:
    for step in (1, 2):
        dcp.save(make_dcp_state(step), storage_writer=OutlastWriter(tmp_path, step=step))
    flip_a_bit(tmp_path / "step-00000002-a2" / "rank-00000-of-00001.pack")
    found = make_dcp_state(0)
    with pytest.raises(CheckpointException, match=r"step-00000002-a2/\S+ is damaged .*in `model\."):
        dcp.load(found, storage_reader=OutlastReader(tmp_path))
    dcp.load(found, storage_reader=OutlastReader(tmp_path, step=1))
    assert same(found, make_dcp_state(1))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    dcp.save(make_dcp_state(1), storage_writer=OutlastWriter(tmp_path, step=1))
    (tmp_path / "step-00000001-a1" / "rank-00000-of-00001.pack").unlink()
    with pytest.raises(CheckpointException, match=r"rank-00000-of-00001\.pack cannot be read"):
        dcp.load(make_dcp_state(0), storage_reader=OutlastReader(tmp_path))


def test_lossy_tensors_keep_their_bound_and_the_others_are_exact(tmp_path: Path) -> None:
    reduction = Reduction(lossy={"optimizer.*": Bound(relative=1e-2)})
    state = {"model": torch.randn(5000), "optimizer": {"m": torch.randn(5000), "lr": 0.1}}
    dcp.save(state, storage_writer=OutlastWriter(tmp_path, reduction=reduction))
    found = {"model": torch.zeros(5000), "optimizer": {"m": torch.zeros(5000), "lr": 0.0}}
    dcp.load(found, storage_reader=OutlastReader(tmp_path))
    assert torch.equal(found["model"], state["model"])
    assert found["optimizer"]["lr"] == 0.1
    error = (found["optimizer"]["m"] / state["optimizer"]["m"] - 1).abs().max()
    assert 1e-4 < error <= 1e-2


class ChattyPlanner(DefaultSavePlanner):
    """Leaves something in the metadata that JSON cannot hold."""

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data={"x": object()})


def test_planner_data_that_needs_pickle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"`planner_data\.x` is of type object"):
        dcp.save(
            {"a": torch.ones(1)},
            storage_writer=OutlastWriter(tmp_path),
            planner=ChattyPlanner(),
        )
    with pytest.raises(CheckpointException, match="was not completed"):
        dcp.load({"a": torch.ones(1)}, storage_reader=OutlastReader(tmp_path))


@pytest.mark.parametrize("file", ["rank-00000-of-00001.json", "dcp.json"])
@pytest.mark.parametrize("damage", [flip_a_bit, Path.unlink])
def test_without_its_manifests_the_version_before_is_loaded(
    tmp_path: Path, file: str, damage: Callable[[Path], None]
) -> None:
    for step in (1, 2):
        dcp.save(make_dcp_state(step), storage_writer=OutlastWriter(tmp_path, step=step))
    damage(tmp_path / "step-00000002-a2" / file)
    found = make_dcp_state(0)
    reader = OutlastReader(tmp_path)
    dcp.load(found, storage_reader=reader)
    assert same(found, make_dcp_state(1))
    assert "step-00000002-a2" in reader.skipped[0]


def test_an_empty_store_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="there is no checkpoint in"):
        dcp.load({"a": torch.ones(1)}, storage_reader=OutlastReader(tmp_path))


def test_strictness_is_that_of_the_stock_planner(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3), "b": torch.ones(2)}, storage_writer=OutlastWriter(tmp_path))
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: c"):
        dcp.load({"c": torch.ones(1)}, storage_reader=OutlastReader(tmp_path))
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({"a": torch.ones(4)}, storage_reader=OutlastReader(tmp_path))
    found = {"a": torch.zeros(3, dtype=torch.bfloat16), "c": torch.zeros(1)}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(found, storage_reader=OutlastReader(tmp_path), planner=planner)
    assert same(found, {"a": torch.ones(3, dtype=torch.bfloat16), "c": torch.zeros(1)})


class CachingPlanner(DefaultSavePlanner):
    """DCP's caches are class-wide, by the class's name; this name is the test's own."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)


def test_a_planner_that_caches_saves_every_version_anew(tmp_path: Path) -> None:
    writer = OutlastWriter(tmp_path)
    for value in (1.0, 2.0, 3.0):
        state = {"a": torch.tensor(value), "epoch": value}
        dcp.save(state, storage_writer=writer, planner=CachingPlanner())
    for step in (1, 2, 3):
        found = {"a": torch.tensor(0.0), "epoch": 0.0}
        dcp.load(found, storage_reader=OutlastReader(tmp_path, step=step))
        assert found == {"a": torch.tensor(float(step)), "epoch": float(step)}
    other = OutlastWriter(tmp_path)
    with pytest.raises(CheckpointException, match="use one writer for all saves"):
        dcp.save(state, storage_writer=other, planner=CachingPlanner())
    half = {"a": torch.tensor(4.0, dtype=torch.bfloat16), "epoch": 4.0}
    with pytest.raises(CheckpointException, match=r"`a` is bfloat16\[\], but .* announced float32"):
        dcp.save(half, storage_writer=writer, planner=CachingPlanner())
    assert saved_steps(tmp_path) == [1, 2, 3]


def test_versions_of_a_checkpoint_store_load_and_the_other_way_round(tmp_path: Path) -> None:
    state = make_state(1)
    train(state, 1, 2)
    with CheckpointStore(tmp_path / "a", writer="thread") as store:
        store.save(2, state)
    other = Net(2)
    dcp.load({"model": other}, storage_reader=OutlastReader(tmp_path / "a"))
    expected = {k: v for k, v in bits(state).items() if k.startswith("model.")}
    assert bits({"model": other}) == expected
    dcp.save({"model": other}, storage_writer=OutlastWriter(tmp_path / "b", step=2))
    third = Net(3)
    with CheckpointStore(tmp_path / "b", writer="thread") as store:
        assert store.restore({"model": third}) is not None
    assert bits({"model": third}) == expected


def test_ranks_that_see_other_versions_do_not_mix_them(tmp_path: Path) -> None:
    plans = []
    for step in (1, 2):
        dcp.save({"a": torch.ones(1)}, storage_writer=OutlastWriter(tmp_path, step=step))
        reader = OutlastReader(tmp_path)
        reader.read_metadata()
        plans.append(reader.prepare_local_plan(dcp.LoadPlan([])))
    with pytest.raises(CheckpointError, match="different newest checkpoints"):
        reader.prepare_global_plan(plans)


def save_under_a_limit(place: Path) -> tuple[str, list[int]]:
    """The second of three saves cannot write its file."""
    writer = OutlastWriter(place)
    dcp.save(make_dcp_state(1), storage_writer=writer)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    message = ""
    try:
        dcp.save(make_dcp_state(2), storage_writer=writer)
    except CheckpointException as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    found = make_dcp_state(0)
    dcp.load(found, storage_reader=OutlastReader(place))
    assert same(found, make_dcp_state(1))
    dcp.save(make_dcp_state(3), storage_writer=writer)
    dcp.load(found, storage_reader=OutlastReader(place))
    assert same(found, make_dcp_state(3))
    return message, saved_steps(place)


@pytest.mark.distributed
def test_a_write_that_fails_fails_the_save_and_the_next_one_works(
    ranks: Group, tmp_path: Path
) -> None:
    [(message, steps)] = ranks(1)(save_under_a_limit, tmp_path)
    assert "File too large" in message
    assert steps == [1, 3]


def fail_on_one_rank(place: Path) -> list[str]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    value = torch.arange(100_000, dtype=torch.float32).reshape(1000, 100)
    state = {"a": distribute_tensor(value, mesh, [Shard(0)])}
    messages = []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for failing in (1, 0):
        if rank == failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))
        try:
            # A new writer each time: the lock of the failed save must not be in its way.
            dcp.save(state, storage_writer=OutlastWriter(place, step=5))
        except CheckpointException as error:
            messages.append(f"{sorted(error.failures)}")
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        try:
            dcp.load(state, storage_reader=OutlastReader(place))
        except CheckpointException:
            messages.append("nothing")
    dcp.save(state, storage_writer=OutlastWriter(place, step=5))
    found = {"a": distribute_tensor(torch.zeros_like(value), mesh, [Shard(0)])}
    dcp.load(found, storage_reader=OutlastReader(place))
    assert torch.equal(found["a"].full_tensor(), value)
    return messages


@pytest.mark.distributed
def test_a_rank_that_fails_fails_the_save_on_all(ranks: Group, tmp_path: Path) -> None:
    expected = ["[1]", "nothing", "[0]", "nothing"]
    assert ranks(2)(fail_on_one_rank, tmp_path) == [expected, expected]


def die_in(place: Path, function: str) -> None:
    setattr(dcp_storage, function, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    dcp.save(make_dcp_state(2), storage_writer=OutlastWriter(place, step=2))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("function", "newest"), [("hold", 1), ("metadata_file", 1), ("seal", 2), ("prune", 2)]
)
def test_a_save_that_is_killed_is_loaded_whole_or_not_at_all(
    tmp_path: Path, function: str, newest: int
) -> None:
    """All parts and ``dcp.json`` make a version; the seal only makes it quick to recognise."""
    dcp.save(make_dcp_state(1), storage_writer=OutlastWriter(tmp_path, step=1))
    child = multiprocessing.get_context("fork").Process(target=die_in, args=(tmp_path, function))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    found = make_dcp_state(0)
    reader = OutlastReader(tmp_path)
    dcp.load(found, storage_reader=reader)
    assert same(found, make_dcp_state(newest))
    if function == "metadata_file":
        assert "was not completed" in reader.skipped[0]
    # The dead process's lock is no obstacle.
    dcp.save(make_dcp_state(3), storage_writer=OutlastWriter(tmp_path, step=3))
    dcp.load(found, storage_reader=OutlastReader(tmp_path))
    assert same(found, make_dcp_state(3))


def save_for_ever(place: Path) -> None:
    writer = OutlastWriter(place)
    state = {str(name): torch.zeros(50, 100) for name in range(20)}
    for step in range(1, 1000):
        for tensor in state.values():
            tensor.fill_(step)
            tensor[0] = torch.arange(100) + step
        dcp.save({**state, "step": step}, storage_writer=writer)


@pytest.mark.distributed
@pytest.mark.parametrize("seconds", [0.3, 0.45, 0.6])
def test_a_kill_at_any_time_leaves_no_mixture(tmp_path: Path, seconds: float) -> None:
    child = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(tmp_path,))
    child.start()
    deadline = time.monotonic() + 60
    while not any(tmp_path.glob("*/version.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(seconds)
    child.kill()
    child.join()
    found: dict[str, Any] = {str(name): torch.zeros(50, 100) for name in range(20)}
    found["step"] = 0
    dcp.load(found, storage_reader=OutlastReader(tmp_path))
    step = found.pop("step")
    assert step >= 1
    expected = torch.full((50, 100), float(step))
    expected[0] = torch.arange(100) + step
    assert all(torch.equal(tensor, expected) for tensor in found.values())


def sharded(seed: int) -> tuple[Net, list[torch.optim.Optimizer]]:
    dist.init_process_group("gloo")
    model = Net(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.hidden:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, make_optimizers(model)


def dcp_state(model: Net, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizers)
    return {"model": model_state, "optimizer": optimizer_state}


def save_fsdp(place: Path) -> dict[str, Any]:
    model, optimizers = sharded(0)
    train({"model": model, "optimizer": optimizers}, 1, 2)
    writer = OutlastWriter(place, step=2)
    dcp.save(dcp_state(model, optimizers), storage_writer=writer)
    train({"model": model, "optimizer": optimizers}, 3, 3)
    dcp.save(dcp_state(model, optimizers), storage_writer=writer)
    return bits({"model": model, "optimizer": optimizers})


def load_fsdp(place: Path, again: Path | None) -> dict[str, Any]:
    model, optimizers = sharded(1)
    state = dcp_state(model, optimizers)
    dcp.load(state, storage_reader=OutlastReader(place))
    set_state_dict(
        model,
        optimizers,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    if again is not None:
        dcp.save(dcp_state(model, optimizers), storage_writer=OutlastWriter(again))
    return bits({"model": model, "optimizer": optimizers})


@pytest.mark.smoke
@pytest.mark.distributed
def test_fsdp_goes_from_four_ranks_to_two_to_one(ranks: Group, tmp_path: Path) -> None:
    expected = ranks(4)(save_fsdp, tmp_path / "four")
    assert saved_steps(tmp_path / "four") == [2, 3]
    # However many ranks there are: one with, one without the objects, which rank 0 writes.
    assert len(list((tmp_path / "four").glob("step-00000003-*/catalogue-*"))) == 2
    assert ranks(2)(load_fsdp, tmp_path / "four", tmp_path / "two") == [expected[0]] * 2
    assert ranks(1)(load_fsdp, tmp_path / "two", None) == [expected[0]]


def save_rows(place: Path, shape: tuple[int, int]) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"a": distribute_tensor(torch.randn(shape), mesh, [Shard(0)])}
    writer = OutlastWriter(place, step=1, reduction=Reduction(Compression("none")))
    dcp.save(state, storage_writer=writer)


def load_columns(place: Path, shape: tuple[int, int], placement: Any) -> tuple[bool, int, int]:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    expected = torch.randn(shape)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, DTensor] = {"a": distribute_tensor(torch.zeros(shape), mesh, [placement])}
    reader = OutlastReader(place)
    dcp.load(state, storage_reader=reader)
    counters = reader.counters
    exact = torch.equal(state["a"].full_tensor(), expected)
    return exact, counters.needed_bytes, counters.read_bytes


@pytest.mark.distributed
def test_a_rank_reads_little_more_than_it_needs(ranks: Group, tmp_path: Path) -> None:
    shape = (1536, 1024)
    ranks(3)(save_rows, tmp_path, shape)
    for placement, count in ((Shard(1), 4), (Shard(0), 2), (Replicate(), 2)):
        for exact, needed, read in ranks(count)(load_columns, tmp_path, shape, placement):
            assert exact
            share = 1 if placement == Replicate() else count
            assert needed == shape[0] * shape[1] * 4 // share
            assert read < 1.1 * needed


def save_async(place: Path, kind: AsyncCheckpointerType) -> list[int]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    value = torch.randn(400, 200, generator=torch.Generator().manual_seed(0))
    frozen = distribute_tensor(torch.randn(900, 200), mesh, [Shard(0)])
    state = {"a": distribute_tensor(value, mesh, [Shard(0)]), "frozen": frozen, "epoch": 1}
    writer = OutlastWriter(place, step=1)
    for step in (1, 2, 3):
        state["epoch"] = step
        future = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)
        # The state was copied: what happens to it now is not saved.
        state["a"] = state["a"] * 1.0001
        future.result()
    found = {"a": distribute_tensor(torch.zeros_like(value), mesh, [Shard(0)]), "epoch": 0}
    dcp.load(found, storage_reader=OutlastReader(place))
    assert found["epoch"] == 3
    assert torch.equal(found["a"].full_tensor(), value * 1.0001 * 1.0001)
    return [pack_bytes(place, step) for step in (1, 2, 3)]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
def test_async_saves_of_both_kinds_know_what_was_saved_before(
    ranks: Group, tmp_path: Path, kind: AsyncCheckpointerType
) -> None:
    sizes = ranks(2)(save_async, tmp_path, kind)[0]
    assert saved_steps(tmp_path) == [1, 2, 3]
    assert max(sizes[1:]) < 0.8 * sizes[0]


def test_two_saves_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.ones(2)}
    writer = OutlastWriter(tmp_path, step=1)
    real = dcp_storage.metadata_file
    refused = []

    def while_saving(metadata: Any) -> bytes:
        monkeypatch.setattr(dcp_storage, "metadata_file", real)
        other = dcp.async_save(
            state, storage_writer=OutlastWriter(tmp_path, step=2), no_dist=True
        ).exception()
        refused.append(str(other))
        return real(metadata)

    monkeypatch.setattr(dcp_storage, "metadata_file", while_saving)
    dcp.save(state, storage_writer=writer)
    assert "another save to" in refused[0]
    assert saved_steps(tmp_path) == [1]


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = OutlastWriter(tmp_path, step=1)

    def full(_: Any) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dcp_storage, "metadata_file", full)
    with pytest.raises(CheckpointException, match="No space left on device; free some space"):
        dcp.save({"a": torch.ones(2)}, storage_writer=writer)
    with pytest.raises(CheckpointException, match=r"was not completed"):
        dcp.load({"a": torch.ones(2)}, storage_reader=OutlastReader(tmp_path))
