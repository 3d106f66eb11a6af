"""What the store refuses, and what it does when something unexpected happens around it."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_meshes import fsdp
from checkpoint_states import Holder, Net, make_state, open_store, restore_step, steps_in, train
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

from outlast.checkpoint import Bound, CheckpointStore, Reduction
from outlast.checkpoint import lane as lane_module
from outlast.checkpoint.storage import storage_of
from outlast.checkpoint.version import Version, load
from outlast.errors import CheckpointError

Group = Callable[[int], Callable[..., list[Any]]]


def test_a_lossy_name_leaves_the_exact_names_of_the_same_memory_exact(tmp_path: Path) -> None:
    model = nn.Module()
    model.exact = nn.Parameter(torch.randn(300, 7))
    model.coarse = model.exact
    model.finer = model.exact
    lossy = {"*.coarse": Bound(relative=2**-3), "*.finer": Bound(relative=2**-9)}
    with open_store(tmp_path, reduction=Reduction(lossy=lossy)) as store:
        store.save(1, {"model": model})
    fresh = nn.Module()
    for name in ("exact", "coarse", "finer"):
        fresh.register_parameter(name, nn.Parameter(torch.zeros(300, 7)))
    restore_step(tmp_path, {"model": fresh})
    assert torch.equal(fresh.exact, model.exact)
    errors = {
        name: float((getattr(fresh, name).double() / model.exact.double() - 1).detach().abs().max())
        for name in ("coarse", "finer")
    }
    assert 2**-9 < errors["coarse"] <= 2**-3
    assert 0 < errors["finer"] <= 2**-9
    [part] = load(storage_of(tmp_path), Version(1, 1)).parts
    certified = {
        name: max(
            part.chunks[number].max_error for number in part.pieces[f"model.{name}"][0].chunks
        )
        for name in ("exact", "coarse", "finer")
    }
    assert certified["exact"] == 0.0
    # The quotients above are rounded themselves, by up to 2**-53 of what is nearly one.
    rounding = 1 + 2**-40
    assert errors["coarse"] <= rounding * certified["coarse"] <= rounding * 2**-3
    assert errors["finer"] <= rounding * certified["finer"] <= rounding * 2**-9


def test_lossy_without_a_bound_or_for_integers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="bound"):
        Bound()
    reduction = Reduction(lossy={"*": Bound(relative=0.1)})
    with (
        open_store(tmp_path, reduction=reduction) as store,
        pytest.raises(CheckpointError, match=r'lossy = "\*" takes in `data.counts` of type int64'),
    ):
        store.save(1, {"data": Holder({"counts": torch.arange(5)})})


def test_fsdp1_is_refused_before_it_is_saved_wrongly(ranks: Group, tmp_path: Path) -> None:
    def refused(directory: Path) -> str:
        dist.init_process_group("gloo")
        model = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
        with open_store(directory) as store, pytest.raises(CheckpointError) as caught:
            store.save_async(1, {"model": model})
        return str(caught.value)

    for sentence in ranks(2)(refused, tmp_path):
        assert "FSDP2's fully_shard" in sentence


def test_a_state_that_no_parameter_owns_is_refused(tmp_path: Path) -> None:
    state = make_state()
    train(state, 1, 1)
    state["optimizer"][1].state["everywhere"] = torch.zeros(3)
    with (
        open_store(tmp_path) as store,
        pytest.raises(CheckpointError, match="keeps a state under 'everywhere'"),
    ):
        store.save(1, state)


def test_a_tensor_made_of_others_is_refused(tmp_path: Path) -> None:
    wrapped = TwoTensor(torch.ones(3), torch.zeros(3))
    with (
        open_store(tmp_path) as store,
        pytest.raises(CheckpointError, match="a TwoTensor cannot be saved"),
    ):
        store.save(1, {"data": Holder({"wrapped": wrapped})})


def test_a_closed_store_saves_no_more_and_still_restores(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(1, {"data": Holder({"value": 1})})
    store.close()
    with pytest.raises(CheckpointError, match="is closed; make another"):
        store.save(2, {"data": Holder({"value": 2})})
    found = Holder()
    assert store.restore({"data": found}) is not None
    assert found.state == {"value": 1}


def test_an_error_of_the_state_itself_comes_through(tmp_path: Path) -> None:
    class Broken(Holder):
        def state_dict(self) -> dict[Any, Any]:
            raise ZeroDivisionError("the sampler is at fault")

    with open_store(tmp_path) as store:
        with pytest.raises(ZeroDivisionError):
            store.save(1, {"data": Broken()})
        store.save(2, {"data": Holder({"value": 2})})
    assert steps_in(tmp_path) == [2]


def save_with_one_broken(directory: Path) -> str:
    """Rank 1's sampler raises; the others must not wait for it."""
    dist.init_process_group("gloo")

    class Broken(Holder):
        def state_dict(self) -> dict[Any, Any]:
            if dist.get_rank() == 1:
                raise ZeroDivisionError("the sampler is at fault")
            return super().state_dict()

    with open_store(directory) as store:
        try:
            store.save(1, {"data": Broken({"value": 1})})
        except (CheckpointError, ZeroDivisionError) as error:
            return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.distributed
def test_one_rank_that_cannot_collect_its_state_holds_up_nobody(
    ranks: Group, tmp_path: Path
) -> None:
    first, second = ranks(2)(save_with_one_broken, tmp_path)
    assert first == "CheckpointError: ZeroDivisionError: the sampler is at fault"
    assert second == "ZeroDivisionError: the sampler is at fault"


def test_after_memory_was_lacking_a_smaller_state_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = lane_module.StagingMemory

    def limited(size: int, *rest: Any) -> Any:
        if size > 10_000:
            raise CheckpointError("no memory")
        return memory(size, *rest)

    monkeypatch.setattr(lane_module, "StagingMemory", limited)
    with open_store(tmp_path) as store:
        store.save(1, {"data": Holder({"x": torch.ones(10)})})
        with pytest.raises(CheckpointError, match="no memory"):
            store.save(2, {"data": Holder({"x": torch.ones(10_000)})})
        store.save(3, {"data": Holder({"x": torch.ones(20)})})
    found = Holder()
    assert restore_step(tmp_path, {"data": found}) == 3
    assert torch.equal(found.state["x"], torch.ones(20))


@pytest.mark.distributed
def test_signals_that_stop_the_trainer_do_not_end_its_writer(tmp_path: Path) -> None:
    import psutil

    before = set(psutil.Process().children())  # Such as multiprocessing's resource tracker.
    with CheckpointStore(tmp_path) as store:
        store.save(1, make_state())
        [writer] = set(psutil.Process().children()) - before
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(writer.pid, number)
        store.save(2, make_state(2))
        assert writer.is_running()
    assert steps_in(tmp_path) == [1, 2]


def save_uncoordinated_with_a_growing_state(directory: Path) -> list[int]:
    dist.init_process_group("gloo")
    state = fsdp(seed=0)
    with open_store(directory, coordinated=False, keep=9) as store:
        store.save(0, state)
        train(state, 1, 1)
        dist.barrier()
        store.save(1, state)
        dist.barrier()
    return steps_in(directory)


@pytest.mark.distributed
def test_uncoordinated_ranks_may_save_what_they_had_not_at_first(
    ranks: Group, tmp_path: Path
) -> None:
    assert ranks(2)(save_uncoordinated_with_a_growing_state, tmp_path)[0] == [0, 1]
    model = Net(7)
    assert restore_step(tmp_path, {"model": model}) == 1


def test_private_ranks_that_do_not_agree_are_refused(ranks: Group, tmp_path: Path) -> None:
    def refused(directory: Path) -> str:
        dist.init_process_group("gloo")
        with pytest.raises(CheckpointError) as caught:
            open_store(directory, private=True, coordinated=False)
        return str(caught.value)

    assert "needs coordinated = True" in ranks(2)(refused, tmp_path)[0]


@pytest.mark.distributed
def test_a_vocabulary_that_the_ranks_do_not_divide_comes_back_on_any_number(
    ranks: Group, tmp_path: Path
) -> None:
    def save(directory: Path) -> None:
        dist.init_process_group("gloo")
        with open_store(directory) as store:
            store.save(1, fsdp(seed=3))

    # Eleven rows on three ranks: 4, 4 and 3.
    ranks(3)(save, tmp_path)
    model = Net(0)
    restore_step(tmp_path, {"model": model})
    assert torch.equal(model.embedding.weight, Net(3).embedding.weight)
