"""Checkpoints of several ranks: other numbers of ranks, shared errors, no borrowed group."""

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_states import Net, Sampler, bits, make_optimizers, make_state, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from outlast.checkpoint import CheckpointStore, SaveResult, list_versions, verify
from outlast.errors import CheckpointError

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

Ranks = Callable[[int], Callable[..., list[Any]]]


def sharded_state(seed: int) -> dict[str, Any]:
    """The state of `make_state` (without data), sharded over all ranks; odd sizes leave gaps."""
    dist.init_process_group("gloo")
    model = Net(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.hidden:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": make_optimizers(model)}


def save_sharded(directory: Path) -> tuple[dict[str, Any], SaveResult]:
    state = sharded_state(seed=0)
    train(state, 1, 2)
    result = CheckpointStore(directory).save(2, state)
    return bits(state), result


def restore_sharded(directory: Path) -> tuple[dict[str, Any], int]:
    state = sharded_state(seed=1)
    restored = CheckpointStore(directory).restore(state)
    assert restored is not None
    return bits(state), restored.step


def restore_alone(directory: Path) -> dict[str, Any] | None:
    """Rank 1 of 2 restores by itself, the other rank takes no part."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        return None
    return restore_plain(directory, collective=False)


def restore_plain(directory: Path, *, collective: bool = True) -> dict[str, Any]:
    state = make_state(seed=3)
    del state["data"]
    restored = CheckpointStore(directory, collective=collective).restore(state)
    assert restored is not None
    return bits(state)


def test_four_sharded_ranks_restore_on_any_number(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks(4)(save_sharded, tmp_path)
    expected = saved[0][0]
    assert all(content == expected for content, _ in saved)
    [version] = list_versions(tmp_path)
    verify(version)
    size = sum(path.stat().st_size for path in version.path.iterdir() if path.suffix != ".json")
    assert [result.bytes for _, result in saved] == [size] * 4
    for count in (1, 2, 3):
        assert ranks(count)(restore_sharded, tmp_path) == [(expected, 2)] * count
    assert ranks(2)(restore_alone, tmp_path)[1] == expected
    assert restore_plain(tmp_path) == expected


def save_replicated(directory: Path) -> dict[str, Any]:
    dist.init_process_group("gloo")
    model = Net(0)
    state = {"model": DistributedDataParallel(model), "optimizer": make_optimizers(model)}
    train(state, 1, 2)
    CheckpointStore(directory).save(2, state)
    return bits(state)


def restore_replicated(directory: Path) -> dict[str, Any]:
    dist.init_process_group("gloo")
    model = Net(3)
    state = {"model": DistributedDataParallel(model), "optimizer": make_optimizers(model)}
    assert CheckpointStore(directory).restore(state)
    return bits(state)


def test_replicas_and_plain_models_share_names(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks(2)(save_replicated, tmp_path / "replicas")
    assert restore_plain(tmp_path / "replicas") == saved[0] == saved[1]
    assert ranks(2)(restore_sharded, tmp_path / "replicas") == [(saved[0], 2)] * 2
    state = make_state()
    del state["data"]
    train(state, 1, 2)
    CheckpointStore(tmp_path / "plain").save(2, state)
    assert ranks(2)(restore_replicated, tmp_path / "plain") == [bits(state)] * 2


def restore_misfits(directory: Path) -> list[str]:
    """The errors of a wider model and of one with another name, then a restore that fits."""
    dist.init_process_group("gloo")
    store = CheckpointStore(directory)
    errors = []
    renamed = Net(0)
    renamed.other = nn.Linear(2, 2)
    for model in (Net(0, width=7), renamed):
        with pytest.raises(CheckpointError) as caught:
            store.restore({"model": model})
        errors.append(str(caught.value))
    assert store.restore({"model": Net(5)}) is not None
    return errors


def test_a_model_that_does_not_fit_is_refused_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    CheckpointStore(tmp_path).save(1, {"model": Net(0)})
    for wider, renamed in ranks(3)(restore_misfits, tmp_path):
        assert "step-00000001 does not fit" in wider
        assert "model." in wider
        assert "(6,)" in wider or "6)" in wider
        assert "model.other." in renamed


def restore_damaged(directory: Path) -> str:
    dist.init_process_group("gloo")
    with pytest.raises(CheckpointError) as caught:
        CheckpointStore(directory).restore({"model": Net(0)})
    return str(caught.value)


def test_damage_is_an_error_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    CheckpointStore(tmp_path).save(1, {"model": Net(0)})
    manifest = tmp_path / "step-00000001" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("xxh3_128", "xxh3"))
    first, second = ranks(2)(restore_damaged, tmp_path)
    assert first == second
    assert "manifest.json is missing or damaged" in first


def save_into(directory: Path) -> list[SaveResult]:
    dist.init_process_group("gloo")
    store = CheckpointStore(directory)
    failed = store.save_async(1, {"model": Net(0)}).result()
    dist.barrier()
    if dist.get_rank() == 0:
        directory.unlink()
    dist.barrier()
    return [failed, store.save_async(2, {"model": Net(0)}).result()]


def test_when_rank_zero_cannot_write_every_rank_learns_it(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    for failed, later in ranks(2)(save_into, tmp_path / "store"):
        assert "Not a directory" in (failed.error or "")
        assert later.error is None
    assert [version.step for version in list_versions(tmp_path / "store")] == [2]


def save_with_one_limited(directory: Path) -> list[SaveResult]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(nn.Linear(200, 200), mesh=mesh)
    store = CheckpointStore(directory)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    failed = store.save_async(1, {"model": model}).result()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return [failed, store.save_async(2, {"model": model}).result()]


def test_when_another_rank_cannot_write_every_rank_learns_it(ranks: Ranks, tmp_path: Path) -> None:
    for failed, later in ranks(2)(save_with_one_limited, tmp_path):
        assert "File too large" in (failed.error or "")
        assert later.error is None
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def save_while_training(directory: Path) -> int:
    """Collectives of the training on every rank at its own pace, while saves are under way."""
    state = sharded_state(seed=0)
    sync = os.fsync

    def slow_sync(descriptor: int) -> None:
        # Ranks reach the background's collectives at different times.
        time.sleep(0.02 * (1 + dist.get_rank()))
        sync(descriptor)

    os.fsync = slow_sync
    store = CheckpointStore(directory)
    overlapped = 0
    for save in range(1, 4):
        handle = store.save_async(save, state)
        for number in range(40):
            total = torch.tensor([float(number)])
            dist.all_reduce(total)
            assert total.item() == number * dist.get_world_size()
            overlapped += not handle.done()
        train(state, save, save)
    handle.wait()
    restored = store.restore(state)
    assert restored is not None
    assert restored.step == 3
    return overlapped


def test_saves_leave_the_training_group_alone(ranks: Ranks, tmp_path: Path) -> None:
    overlapped = ranks(2)(save_while_training, tmp_path)
    assert min(overlapped) >= 40, "the collectives ran during the saves"
    for version in list_versions(tmp_path):
        verify(version)


def restore_during_a_save(directory: Path) -> int:
    state = sharded_state(seed=0)
    store = CheckpointStore(directory)
    store.save(1, state)
    sampler = Sampler()
    sampler.state["average"] = next(state["model"].parameters()).detach()
    with pytest.raises(CheckpointError, match="`data` holds sharded tensors"):
        store.save_async(2, {**state, "data": sampler})
    store.save_async(2, state)
    restored = store.restore(state)
    assert restored is not None
    return restored.step


def test_restore_waits_for_the_save_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2)(restore_during_a_save, tmp_path) == [2, 2]


def save_after_the_other_left(directory: Path) -> str | None:
    dist.init_process_group("gloo")
    store = CheckpointStore(directory)
    store.save(1, {"model": Net(0)})
    return None if dist.get_rank() else store.save_async(2, {"model": Net(0)}).result().error


def test_a_rank_that_is_gone_is_an_error_not_a_wait(ranks: Ranks, tmp_path: Path) -> None:
    error, _ = ranks(2)(save_after_the_other_left, tmp_path)
    assert "the checkpoint of step 2" in error
    assert [version.step for version in list_versions(tmp_path)] == [1]
