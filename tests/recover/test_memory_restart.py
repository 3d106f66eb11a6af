"""States kept in memory outlive the processes, on any number of ranks, bit for bit."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import RanksFailedError, run_ranks
from kept_models import join, keeper_for, model_and_optimizer, reference, train, whole_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from outlast.errors import RecoverError
from outlast.recover import restart as keeping
from outlast.recover import slot as room
from outlast.recover.restart import newest_whole, scan
from outlast.recover.slot import Claim, remove_old_runs, run_folder


def test_one_process_alone_goes_on_from_its_last_state(tmp_path: Path) -> None:
    state = model_and_optimizer()
    keeper = keeper_for(state, tmp_path)
    assert keeper.restore() is None
    train(keeper, state, 0, 5)
    keeper.close()
    fresh = model_and_optimizer(seed=1)
    again = keeper_for(fresh, tmp_path)
    recovered = again.restore()
    assert recovered is not None
    assert (recovered.step, recovered.source) == (5, "memory")
    assert whole_state(fresh) == reference(5)
    train(again, fresh, 5, 8)
    again.close(forget_run=True)
    assert whole_state(fresh) == reference(8)
    assert list(tmp_path.rglob("rank-*")) == []


def test_a_run_goes_back_to_an_earlier_state_and_forgets_later_ones(tmp_path: Path) -> None:
    state = model_and_optimizer()
    keeper = keeper_for(state, tmp_path)
    train(keeper, state, 0, 5)
    found = keeper.find_until(4)
    assert found is not None
    recovered = keeper.restore(found)
    assert recovered is not None
    assert (recovered.step, whole_state(state)) == (4, reference(4))
    keeper.go_back(4)
    # Nobody that starts now takes the state of step 5.
    newest = keeper_for(model_and_optimizer(seed=1), tmp_path).find()
    assert newest is not None
    assert newest.step == 4
    assert keeper.find_until(3) is None
    train(keeper, state, 4, 6)
    keeper.close()
    fresh = model_and_optimizer(seed=1)
    again = keeper_for(fresh, tmp_path).restore()
    assert again is not None
    assert (again.step, whole_state(fresh)) == (6, reference(6))


def test_a_negative_number_without_dimensions_comes_back(tmp_path: Path) -> None:
    state = model_and_optimizer()
    state["model"].register_parameter("scale", torch.nn.Parameter(torch.tensor(-0.5)))
    keeper = keeper_for(state, tmp_path)
    train(keeper, state, 0, 1)
    keeper.close()
    fresh = model_and_optimizer(seed=1)
    fresh["model"].register_parameter("scale", torch.nn.Parameter(torch.tensor(3.0)))
    assert keeper_for(fresh, tmp_path).restore() is not None
    assert float(fresh["model"].scale) == -0.5


def test_settings_of_the_optimizer_come_back(tmp_path: Path) -> None:
    state = model_and_optimizer()
    keeper = keeper_for(state, tmp_path)
    state["optimizer"].param_groups[0]["lr"] = 0.125
    train(keeper, state, 0, 1)
    keeper.close()
    fresh = model_and_optimizer()
    assert keeper_for(fresh, tmp_path).restore() is not None
    assert fresh["optimizer"].param_groups[0]["lr"] == 0.125


def test_what_another_job_or_code_has_kept_is_not_restored(tmp_path: Path) -> None:
    state = model_and_optimizer()
    keeper = keeper_for(state, tmp_path)
    train(keeper, state, 0, 2)
    keeper.close()
    assert keeper_for(model_and_optimizer(), tmp_path, identity="other").restore() is None


def test_a_model_that_does_not_fit_is_refused_with_names(tmp_path: Path) -> None:
    state = model_and_optimizer()
    keeper = keeper_for(state, tmp_path)
    train(keeper, state, 0, 2)
    keeper.close()
    other = model_and_optimizer()
    other["model"][0] = torch.nn.Linear(7, 14)
    other["optimizer"] = torch.optim.AdamW(other["model"].parameters())
    with pytest.raises(RecoverError, match=r"step 2 in memory does not fit: .*`model\.0\.weight`"):
        keeper_for(other, tmp_path).restore()


def _train_and_die(memory: Path, sharded: bool, victim: int, at: tuple[int, str]) -> None:
    rank = join()
    state = model_and_optimizer(sharded=sharded)
    keeper = keeper_for(state, memory)
    train(keeper, state, 0, 6, die_before=at if rank == victim else None)


def _restored(memory: Path, sharded: bool) -> tuple[int, dict[str, bytes]]:
    join()
    state = model_and_optimizer(sharded=sharded, seed=1)
    recovered = keeper_for(state, memory).restore()
    assert recovered is not None
    return recovered.step, whole_state(state)


@pytest.mark.distributed
@pytest.mark.parametrize("phase", ["settle", "step", "keep", "next"])
def test_a_killed_rank_costs_at_most_one_step_wherever_it_dies(tmp_path: Path, phase: str) -> None:
    with pytest.raises(RanksFailedError, match=r"died|raised"):
        run_ranks(4, _train_and_die, tmp_path, True, 1, (3, phase))
    outcomes = run_ranks(4, _restored, tmp_path, True)
    (step,) = {step for step, _ in outcomes}
    # The last copy may have been under way when the others were ended, too.
    assert step in ((3, 4) if phase == "next" else (2, 3))
    assert all(found == reference(step) for _, found in outcomes)


@pytest.mark.distributed
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shards_of_four_ranks_come_back_on_other_numbers(tmp_path: Path, size: int) -> None:
    with pytest.raises(RanksFailedError, match=r"died|raised"):
        run_ranks(4, _train_and_die, tmp_path, True, 2, (4, "step"))
    for step, found in run_ranks(size, _restored, tmp_path, True):
        assert found == reference(step)


def _die_while_copying(memory: Path) -> None:
    rank = join()
    state = model_and_optimizer(sharded=True)
    keeper = keeper_for(state, memory)
    train(keeper, state, 0, 3)
    keeper.settle()
    if rank == 1:
        made: list[Any] = []
        original = keeping.Copy.make

        def make(self: keeping.Copy, slot: int, source: torch.Tensor) -> None:
            original(self, slot, source)
            made.append(self)
            if len(made) == 4:
                (memory / "killed").touch()
                os.kill(os.getpid(), 9)

        keeping.Copy.make = make  # type: ignore[method-assign]
    train(keeper, state, 3, 6)


@pytest.mark.distributed
def test_a_death_in_the_middle_of_a_copy_leaves_the_state_before(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match=r"died|raised"):
        run_ranks(4, _die_while_copying, tmp_path)
    assert (tmp_path / "killed").exists()
    for step, found in run_ranks(4, _restored, tmp_path, True):
        assert step == 3
        assert found == reference(3)


def _train_replicas(memory: Path, nodes: list[str]) -> list[int]:
    rank = join()
    state = model_and_optimizer()
    keeper = keeper_for(state, memory, nodes[rank])
    train(keeper, state, 0, 2)
    keeper.settle()
    torch.distributed.barrier()
    found = keeper.find()
    assert found is not None
    return sorted(entry.size for each in found.slots for entry in each.kept.catalogue.entries)


@pytest.mark.distributed
def test_replicas_on_one_node_keep_each_tensor_once(tmp_path: Path) -> None:
    (one,) = run_ranks(1, _train_replicas, tmp_path / "a", ["one"])
    three = run_ranks(3, _train_replicas, tmp_path / "b", ["one"] * 3)
    assert three == [one] * 3
    two = run_ranks(2, _train_replicas, tmp_path / "c", ["one", "other"])
    assert two == [sorted(one * 2)] * 2


class Held:
    """A tensor of an object."""

    def __init__(self, number: int) -> None:
        self.tensor = torch.full((40,), number)

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


def with_own_tensors(number: int) -> dict[str, Any]:
    state = {**model_and_optimizer(), "object": Held(number)}
    for each in state["model"].buffers():
        each.fill_(number)
    return state


def _keep_own_tensors(memory: Path) -> None:
    keeper = keeper_for(with_own_tensors(join()), memory)
    keeper.keep(1)
    keeper.settle()
    dist.barrier()


def _restore_own_tensors(memory: Path) -> set[float]:
    join()
    state = with_own_tensors(9)
    assert keeper_for(state, memory).restore() is not None
    found = [*state["model"].buffers(), state["object"].tensor]
    return {number for each in found for number in each.double().unique().tolist()}


@pytest.mark.distributed
def test_what_each_rank_has_of_its_own_is_taken_from_the_first(tmp_path: Path) -> None:
    run_ranks(3, _keep_own_tensors, tmp_path)
    assert run_ranks(2, _restore_own_tensors, tmp_path) == [{0.0}, {0.0}]


def _restored_on(memory: Path, nodes: list[str]) -> tuple[str, int, dict[str, bytes]]:
    rank = join()
    state = model_and_optimizer(seed=1)
    recovered = keeper_for(state, memory, nodes[rank]).restore()
    assert recovered is not None
    return recovered.source, recovered.step, whole_state(state)


@pytest.mark.distributed
def test_a_new_node_gets_the_state_from_another_nodes_memory(tmp_path: Path) -> None:
    run_ranks(4, _train_replicas, tmp_path, ["left", "left", "right", "right"])
    room.remove_path(tmp_path / "left")
    for source, step, found in run_ranks(
        4, _restored_on, tmp_path, ["new", "new", "right", "right"]
    ):
        assert (source, step) == ("peer", 2)
        assert found == reference(2)


def _keep_without_room(memory: Path) -> tuple[str, dict[str, bytes]]:
    rank = join()
    state = model_and_optimizer()
    keeper = keeper_for(state, memory, f"node-{rank}")
    train(keeper, state, 0, 2)
    if rank == 1:
        keeping.check_capacity = lambda folder, size, own: (_ for _ in ()).throw(
            RecoverError("no room")
        )
    state["model"].register_buffer("late", torch.zeros(3))
    train(keeper, state, 2, 4)
    assert keeper_for(state, memory, f"node-{rank}").find() is None
    return keeper.problem, whole_state(state)


@pytest.mark.distributed
def test_where_one_has_no_room_all_go_on_without(tmp_path: Path) -> None:
    expected = reference(4)
    for problem, found in run_ranks(2, _keep_without_room, tmp_path):
        assert problem == "no room"
        found.pop("model.late")
        assert found == expected


def test_new_tensors_within_a_run_are_kept_too(tmp_path: Path) -> None:
    state = model_and_optimizer()
    keeper = keeper_for(state, tmp_path)
    train(keeper, state, 0, 2)
    state["model"].register_buffer("late", torch.arange(3.0))
    train(keeper, state, 2, 4)
    keeper.close()
    fresh = model_and_optimizer(seed=1)
    fresh["model"].register_buffer("late", torch.zeros(3))
    assert keeper_for(fresh, tmp_path).restore() is not None
    assert torch.equal(fresh["model"].late, torch.arange(3.0))
    # The slots of the plan before are gone.
    assert len(list(tmp_path.rglob("rank-*"))) == 2


def test_objects_that_hand_out_new_tensors_come_back(tmp_path: Path) -> None:
    state = {**model_and_optimizer(), "random": RandomState(), "tied": Counter()}
    keeper = keeper_for(state, tmp_path)
    train(keeper, state, 0, 4)
    keeper.close()
    # One plan was enough.
    names = {each.name for each in tmp_path.rglob("rank-*")}
    assert names == {"rank-0.plan-1.slot-0", "rank-0.plan-1.slot-1"}
    expected = torch.rand(3)
    fresh = {**model_and_optimizer(seed=5), "random": RandomState(), "tied": Counter()}
    assert keeper_for(fresh, tmp_path).restore() is not None
    assert torch.equal(torch.rand(3), expected)
    assert fresh["tied"].count == 4


class RandomState:
    """Torch's own generator, whose state is a new tensor each time."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])


class Counter:
    """How often it was asked."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        self.count += 1
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_values_that_grow_are_kept_all_the_same(tmp_path: Path) -> None:
    text = Text()
    state = {**model_and_optimizer(), "text": text}
    keeper = keeper_for(state, tmp_path)
    train(keeper, state, 0, 2)
    text.text = "x" * 100_000
    train(keeper, state, 2, 4)
    assert keeper.problem == ""
    keeper.close()
    fresh = {**model_and_optimizer(), "text": Text()}
    assert keeper_for(fresh, tmp_path).restore() is not None
    assert fresh["text"].text == text.text


class Text:
    """A value of any length."""

    text = ""

    def state_dict(self) -> dict[str, Any]:
        return {"text": self.text}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.text = state["text"]


def tied(*, sharded: bool = False) -> dict[str, Any]:
    """Two layers with one weight, sharded or not."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
    model[1].weight = model[0].weight
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def test_tied_weights_stay_tied_and_are_kept_once(tmp_path: Path) -> None:
    state, fresh = tied(), tied()
    state["model"](torch.ones(2, 6)).sum().backward()
    state["optimizer"].step()
    keeper = keeper_for(state, tmp_path)
    keeper.keep(1)
    keeper.close()
    with torch.no_grad():
        fresh["model"][0].weight.zero_()
    assert keeper_for(fresh, tmp_path).restore() is not None
    assert fresh["model"][1].weight is fresh["model"][0].weight
    assert torch.equal(fresh["model"][1].weight, state["model"][0].weight)
    (found,) = scan(run_folder(tmp_path / "one", "run"), "job", "one", 0)
    entries = {each.name: each for each in found.kept.catalogue.entries}
    assert entries["model.0.weight"].start == entries["model.1.weight"].start
    distinct = {each.start: each.size for each in entries.values()}
    assert len(distinct) == len(entries) - 1
    assert found.kept.catalogue.data_bytes == sum(-(-each // 64) * 64 for each in distinct.values())
    # A model without the tie gets both.
    loose = tied()
    loose["model"][1].weight = torch.nn.Parameter(torch.zeros(6, 6))
    del loose["optimizer"]
    assert keeper_for(loose, tmp_path).restore() is not None
    assert torch.equal(loose["model"][1].weight, state["model"][0].weight)
    assert torch.equal(loose["model"][0].weight, state["model"][0].weight)


def _keep_tied(memory: Path) -> dict[str, bytes]:
    join()
    state = tied(sharded=True)
    keeper = keeper_for(state, memory)
    for step in range(3):
        state["model"](torch.ones(2, 6)).sum().backward()
        keeper.settle()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        keeper.keep(step + 1)
    keeper.settle()
    dist.barrier()
    return whole_state(state)


def _restore_tied(memory: Path) -> tuple[bool, dict[str, bytes]]:
    join()
    state = tied(sharded=dist.get_world_size() > 1)
    assert keeper_for(state, memory).restore() is not None
    weights = [each.weight for each in state["model"]]
    return weights[0] is weights[1], whole_state(state)


@pytest.mark.distributed
@pytest.mark.parametrize("size", [1, 3])
def test_tied_shards_come_back_as_ties_on_any_number_of_ranks(tmp_path: Path, size: int) -> None:
    (kept, _) = run_ranks(2, _keep_tied, tmp_path)
    for is_tied, found in run_ranks(size, _restore_tied, tmp_path):
        assert is_tied
        assert found == kept


def test_states_of_two_histories_are_never_mixed(tmp_path: Path) -> None:
    for memory in ("one", "two"):
        state = model_and_optimizer(seed=len(memory) + (memory == "two"))
        keeper = keeper_for(state, tmp_path, memory)
        train(keeper, state, 0, 2)
        keeper.close()
    found = [
        each
        for memory in ("one", "two")
        for each in scan(run_folder(tmp_path / memory, "run"), "job", memory, 0)
    ]
    assert len(found) == 4
    whole = newest_whole(found)
    assert whole is not None
    assert len({each.kept.catalogue.lineage for each in whole.slots}) == 1


def test_only_what_dead_runs_have_left_for_a_day_is_removed(tmp_path: Path) -> None:
    held = []
    for name, age in (("dead", 2.0), ("fresh", 0.01), ("held", 2.0), ("own", 2.0)):
        folder = run_folder(tmp_path, name)
        claim = Claim(folder)
        if name == "held":
            held.append(claim)
        else:
            claim.close()
        then = time.time() - age * 86400.0
        for path in (*folder.iterdir(), folder):
            os.utime(path, (then, then))
    remove_old_runs(tmp_path, "own")
    left = {each.name for each in run_folder(tmp_path, "x").parent.iterdir()}
    assert left == {"fresh", "held", "own"}
    held[0].close()
    remove_old_runs(tmp_path, "own")
    assert not run_folder(tmp_path, "held").exists()
