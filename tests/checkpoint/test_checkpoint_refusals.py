"""What the store refuses, and what it does when something unexpected happens around it."""

import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoint_meshes import fsdp
from checkpoint_states import Holder, Net, make_state, open_store, restore_step, steps_in, train
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.testing._internal.two_tensor import TwoTensor

from outlast.checkpoint import Bound, CheckpointStore, Reduction, Tier
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


@pytest.mark.distributed
def test_what_has_no_memory_is_refused_before_training_and_at_a_restore(
    ranks: Group, tmp_path: Path
) -> None:
    for sentences in ranks(2)(save_and_restore_without_memory, tmp_path):
        for sentence in sentences:
            assert "`model.weight`" in sentence
            assert "meta tensor" in sentence
            assert "to_empty()" in sentence


def save_and_restore_without_memory(directory: Path) -> list[str]:
    """FSDP2 on the meta device without `to_empty()`; returns what `check`, save and restore say."""
    dist.init_process_group("gloo")
    with torch.device("meta"):
        bare = nn.Linear(4, 4)
    fully_shard(bare)
    found = []
    with open_store(directory) as store:
        store.save(1, {"model": fully_shard(nn.Linear(4, 4))})
        for call in (store.check, lambda state: store.save(2, state), store.restore):
            with pytest.raises(CheckpointError) as refused:
                call({"model": bare})
            found.append(str(refused.value))
        assert not store._tiers.first.damaged
    return found


def test_a_quantised_type_is_refused_whatever_made_it(tmp_path: Path) -> None:
    state = {"data": Holder({"x": torch.arange(3, dtype=torch.uint8).view(torch.quint8)})}
    with open_store(tmp_path) as store, pytest.raises(CheckpointError, match=r"data\.x.*quantised"):
        store.check(state)


def test_two_optimizers_of_one_parameter_need_keys_of_their_own(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    first, second = torch.optim.SGD(model.parameters(), lr=0.5), torch.optim.AdamW([model.bias])
    with open_store(tmp_path) as store:
        with pytest.raises(CheckpointError, match="two optimizers of `both` have the parameter"):
            store.check({"model": model, "both": [first, second]})
        store.save(1, {"model": model, "first": first, "second": second})
    first.param_groups[0]["lr"] = second.param_groups[0]["lr"] = 0.0
    restore_step(tmp_path, {"model": model, "first": first, "second": second})
    assert [each.param_groups[0]["lr"] for each in (first, second)] == [0.5, 0.001]


def test_weights_that_were_not_tied_are_not_put_into_one(tmp_path: Path) -> None:
    model = Net()
    model.head = nn.Linear(*reversed(model.embedding.weight.shape), bias=False)
    with open_store(tmp_path) as store:
        store.save(1, {"model": model})
        with pytest.raises(CheckpointError, match=r"one tensor in the model.*different content"):
            store.restore({"model": Net()})
        # Equal ones lose nothing.
        model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
        store.save(2, {"model": model})
    tied = Net(1)
    restore_step(tmp_path, {"model": tied})
    assert torch.equal(tied.head.weight, model.embedding.weight)


def test_rows_that_differ_are_not_put_into_one_row_of_memory(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("x", torch.ones(1, 3).expand(2, 3))
    with open_store(tmp_path) as store:
        store.save(1, {"model": model})
        model.register_buffer("x", torch.zeros(1, 3).expand(2, 3))
        assert store.restore({"model": model}) is not None
        assert torch.equal(model.x, torch.ones(2, 3))
        model.register_buffer("x", torch.arange(6.0).reshape(2, 3))
        store.save(2, {"model": model})
        model.register_buffer("x", torch.zeros(1, 3).expand(2, 3))
        with pytest.raises(CheckpointError, match=r"`model\.x` .*expanded"):
            store.restore({"model": model}, step=2)


def test_a_step_may_be_any_whole_number_and_nothing_else(tmp_path: Path) -> None:
    state = {"data": Holder({"x": 1})}
    with open_store(tmp_path) as store:
        for step in (np.int64(1), torch.tensor(2), 3):
            store.save(step, state)
        for wrong in (1.5, "4", None, -1):
            with pytest.raises(CheckpointError, match=r"step = .* cannot be saved"):
                store.save(wrong, state)  # type: ignore[arg-type]
    assert steps_in(tmp_path) == [1, 2, 3]


def test_a_folder_beyond_all_counters_keeps_no_run_from_saving(tmp_path: Path) -> None:
    state = {"data": Holder({"x": 1})}
    (tmp_path / f"step-00000001-a{10**30}").mkdir(parents=True)
    with open_store(tmp_path) as store:
        store.save(1, state)
    assert (tmp_path / "step-00000001-a1" / "version.json").exists()


@pytest.mark.parametrize(
    "writer", ["thread", pytest.param("process", marks=pytest.mark.distributed)]
)
def test_a_relative_place_stays_where_it_was_when_the_program_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: Any
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    state = {"data": Holder({"x": torch.arange(9)})}
    with CheckpointStore("run", writer=writer, tiers=[Tier("tier")]) as store:
        store.save(1, state)
        monkeypatch.chdir(there)
        store.save(2, state)
        restored = store.restore(state)
        assert restored is not None
        assert (restored.step, restored.place) == (2, "run")
    assert steps_in(here / "run") == [1, 2]
    assert steps_in(here / "tier") == [1, 2]
    assert not [*there.iterdir()]


def test_threads_that_save_to_one_store_take_turns(tmp_path: Path) -> None:
    def save(first: int) -> None:
        for step in range(first, first + 8):
            store.save(step, {"data": Holder({"x": torch.full((50_000,), step)})})

    with open_store(tmp_path, keep=100) as store:
        threads = [threading.Thread(target=save, args=(first,)) for first in (100, 200, 300)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(steps_in(tmp_path)) == 24
        for step in steps_in(tmp_path):
            state = {"data": Holder({})}
            store.restore(state, step=step)
            assert torch.equal(state["data"].state["x"], torch.full((50_000,), step))


def in_child(store: CheckpointStore, state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="the process that this one was forked from"), store:
        store.save(2, state)


def test_a_forked_process_neither_saves_to_the_store_of_its_parent_nor_ends_it(
    tmp_path: Path,
) -> None:
    state = {"data": Holder({"x": 1})}
    with open_store(tmp_path) as store:
        store.save(1, state)
        process = get_context("fork").Process(target=in_child, args=(store, state))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        store.save(2, state)
    assert steps_in(tmp_path) == [1, 2]


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
