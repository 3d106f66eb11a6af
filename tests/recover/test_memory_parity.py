"""Lost nodes of a sharded run come back from the parity that the others keep, bit for bit."""

from pathlib import Path

import pytest
import torch.distributed as dist
from forked import RanksFailedError, run_ranks
from kept_models import join, keeper_for, model_and_optimizer, reference, train, whole_state
from parity_members import die_at

from outlast.recover import slot
from outlast.recover.parity import Transport
from outlast.recover.redundancy import Redundancy

pytestmark = pytest.mark.distributed


def _train(memory: Path, nodes: list[str], redundancy: Redundancy, steps: int) -> str:
    rank = join()
    state = model_and_optimizer(sharded=True)
    keeper = keeper_for(state, memory, nodes[rank], redundancy=redundancy)
    train(keeper, state, 0, steps)
    keeper.settle()
    dist.barrier()
    return keeper.problem


def _restored(
    memory: Path, nodes: list[str], redundancy: Redundancy, last: int
) -> tuple[str, int, dict[str, bytes]]:
    rank = join()
    state = model_and_optimizer(sharded=True, seed=1)
    keeper = keeper_for(state, memory, nodes[rank], redundancy=redundancy)
    recovered = keeper.restore()
    assert recovered is not None
    train(keeper, state, recovered.step, last)
    keeper.settle()
    dist.barrier()
    return recovered.source, recovered.step, whole_state(state)


def _nothing_found(memory: Path, nodes: list[str]) -> str:
    rank = join()
    state = model_and_optimizer(sharded=True, seed=1)
    try:
        return str(keeper_for(state, memory, nodes[rank]).restore())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


NODES = ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("now", "losses"),
    [
        (["a", "new", "c", "d"], 1),
        (["new", "d", "a", "c"], 1),
        (["new", "newer", "c", "a"], 2),
    ],
    ids=["in place", "in other places", "two"],
)
def test_lost_nodes_come_back_bit_for_bit(tmp_path: Path, now: list[str], losses: int) -> None:
    redundancy = Redundancy("auto" if losses == 1 else 2)
    assert run_ranks(4, _train, tmp_path, NODES, redundancy, 3) == [""] * 4
    for lost in set(NODES) - set(now):
        slot.remove_path(tmp_path / lost)
    for source, step, found in run_ranks(4, _restored, tmp_path, now, redundancy, 5):
        assert (source, step) == ("parity", 3)
        assert found == reference(5)


def test_a_second_loss_after_the_first_was_made_good(tmp_path: Path) -> None:
    run_ranks(4, _train, tmp_path, NODES, Redundancy(), 3)
    slot.remove_path(tmp_path / "b")
    run_ranks(4, _restored, tmp_path, ["a", "e", "c", "d"], Redundancy(), 5)
    slot.remove_path(tmp_path / "a")
    outcomes = run_ranks(4, _restored, tmp_path, ["f", "e", "c", "d"], Redundancy(), 6)
    for source, step, found in outcomes:
        assert (source, step) == ("parity", 5)
        assert found == reference(6)


def test_more_losses_than_parity_are_said(tmp_path: Path) -> None:
    run_ranks(4, _train, tmp_path, NODES, Redundancy(), 3)
    for lost in ("a", "b"):
        slot.remove_path(tmp_path / lost)
    for said in run_ranks(4, _nothing_found, tmp_path, ["x", "y", "c", "d"]):
        assert "no step's state can be rebuilt: more than 1 of a group have lost theirs" in said


def test_another_number_of_nodes_cannot_rebuild_and_says_so(tmp_path: Path) -> None:
    run_ranks(4, _train, tmp_path, NODES, Redundancy(), 3)
    slot.remove_path(tmp_path / "b")
    for nodes, these in (
        (["a", "c", "d"], "3 nodes with 1 process each"),
        (["a", "c", "d", "d"], "3 nodes with 1, 1 and 2 processes"),
        (["a"], "1 node with 1 process each"),
    ):
        for said in run_ranks(len(nodes), _nothing_found, tmp_path, nodes):
            assert f"the parity of 4 nodes with 1 process each, but these are {these}; " in said
            assert "start as many on each again, or resume from a checkpoint" in said


def test_as_many_nodes_in_another_order_of_their_sizes_say_so(tmp_path: Path) -> None:
    run_ranks(3, _train, tmp_path, ["a", "a", "b"], Redundancy(1, domain="process"), 3)
    for path in tmp_path.rglob("generation-*/rank-1.*"):
        path.unlink()
    for said in run_ranks(3, _nothing_found, tmp_path, ["a", "b", "b"]):
        assert "of 2 nodes with 2 and 1 processes, but these are 2 nodes with 1 and 2 pro" in said


PAIRS = Redundancy(1, largest=2)


def test_each_of_two_groups_makes_its_own_loss_good_and_none_that_of_the_other(
    tmp_path: Path,
) -> None:
    run_ranks(4, _train, tmp_path, NODES, PAIRS, 3)
    for lost in ("a", "c"):
        slot.remove_path(tmp_path / lost)
    now = ["x", "b", "y", "d"]
    for source, step, found in run_ranks(4, _restored, tmp_path, now, PAIRS, 5):
        assert (source, step) == ("parity", 3)
        assert found == reference(5)
    for lost in ("y", "d"):
        slot.remove_path(tmp_path / lost)
    # All refuse, also those whose own group is whole.
    for said in run_ranks(4, _nothing_found, tmp_path, ["x", "b", "v", "w"]):
        assert "no step's state can be rebuilt: more than 1 of a group have lost theirs" in said


def _die_in_an_update(memory: Path) -> None:
    rank = join()
    state = model_and_optimizer(sharded=True)
    keeper = keeper_for(state, memory, NODES[rank], redundancy=PAIRS)
    train(keeper, state, 0, 3)
    keeper.settle()
    dist.barrier()
    if rank == 3:
        die_at(Transport, "gather")
    train(keeper, state, 3, 8)


def test_groups_whose_parity_is_a_step_apart_go_back_to_the_same_step(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match=r"died|raised"):
        run_ranks(4, _die_in_an_update, tmp_path)
    slot.remove_path(tmp_path / "d")
    now = ["a", "b", "c", "new"]
    outcomes = run_ranks(4, _restored, tmp_path, now, PAIRS, 7)
    # Nodes a and b may have the parity of step 4; c and d have that of step 3 alone.
    assert {(source, step) for source, step, _ in outcomes} == {("parity", 3)}
    assert all(found == reference(7) for _, _, found in outcomes)


def _train_and_die(memory: Path, nodes: list[str], phase: str) -> None:
    rank = join()
    state = model_and_optimizer(sharded=True)
    keeper = keeper_for(state, memory, nodes[rank])
    train(keeper, state, 0, 8, die_before=(4, phase) if rank == 2 else None)


@pytest.mark.parametrize("phase", ["settle", "step", "next"])
def test_a_node_that_dies_with_its_memory_costs_at_most_one_step(
    tmp_path: Path, phase: str
) -> None:
    with pytest.raises(RanksFailedError, match=r"died|raised"):
        run_ranks(4, _train_and_die, tmp_path, NODES, phase)
    slot.remove_path(tmp_path / "c")
    now = ["a", "b", "new", "d"]
    for source, step, found in run_ranks(4, _restored, tmp_path, now, Redundancy(), 7):
        assert source == "parity"
        # The last copy may have been under way when the others were ended, too.
        assert step in ((4, 5) if phase == "next" else (3, 4))
        assert found == reference(7)


def test_processes_that_lose_their_memory_one_by_one(tmp_path: Path) -> None:
    redundancy = Redundancy(2, domain="process")
    nodes = ["one"] * 4
    run_ranks(4, _train, tmp_path, nodes, redundancy, 3)
    (generation,) = tmp_path.rglob("generation-*")
    for rank in (0, 3):
        for path in (*generation.glob(f"rank-{rank}.*"), *generation.glob(f"*.{rank}.*")):
            path.unlink()
    for source, step, found in run_ranks(4, _restored, tmp_path, nodes, redundancy, 4):
        assert (source, step) == ("parity", 3)
        assert found == reference(4)
