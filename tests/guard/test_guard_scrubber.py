"""Numbers at rest and on replicas: equal bit for bit, or found, and repaired where that can be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from outlast.guard.policy import Policy
from outlast.guard.replica_hashes import Comparison, Replica, compare, hash64, hash_words
from outlast.guard.scrubber import Scrubber
from outlast.guard.watch import Watch

TYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("function", [hash_words, lambda numbers: hash64([numbers])])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 4096])
def test_any_changed_bit_changes_the_hash(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, size: int
) -> None:
    numbers = (torch.randn(size) * 10).to(dtype)
    before = int(function(numbers))
    assert int(function(numbers.clone())) == before
    data = numbers.view(torch.uint8)
    for place in range(0, data.numel(), max(1, data.numel() // 16)):
        for bit in (0, 7):
            data[place] ^= 1 << bit
            assert int(function(numbers)) != before
            data[place] ^= 1 << bit


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 255), min_size=2, max_size=64), st.integers(0, 2**20))
def test_words_that_change_places_change_the_hash(values: list[int], seed: int) -> None:
    numbers = torch.tensor(values, dtype=torch.int32)
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    same = torch.equal(numbers[order], numbers)
    assert (int(hash_words(numbers[order])) == int(hash_words(numbers))) == same
    assert int(hash_words(numbers)) != int(hash_words(numbers[:-1]))


def test_two_flipped_signs_do_not_cancel() -> None:
    numbers = torch.ones(512, dtype=torch.float32)
    clean = int(hash_words(numbers))
    collisions = 0
    for first in range(0, 512, 8):
        for second in range(first + 1, 512, 7):
            numbers[[first, second]] = -1.0
            collisions += int(hash_words(numbers)) == clean
            numbers[[first, second]] = 1.0
    assert collisions == 0


def test_parts_of_long_tensors_and_unaligned_slices_are_hashed() -> None:
    numbers = torch.arange(2**20 + 5, dtype=torch.int32)
    before = int(hash_words(numbers))
    numbers[-1] += 1
    assert int(hash_words(numbers)) != before
    halves = torch.randn(64).bfloat16()
    assert int(hash_words(halves[3:40])) == int(hash_words(halves[3:40].clone()))


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        ([Replica(1, 1), Replica(1, 1)], Comparison(0, ())),
        ([Replica(1, 1), Replica(2, 2)], Comparison(None, ())),
        ([Replica(1, 1), Replica(1, 2)], Comparison(0, (1,))),
        ([Replica(3, 3, True), Replica(1, 1)], Comparison(1, (0,))),
        ([Replica(1, 1), Replica(2, 2), Replica(1, 1)], Comparison(0, (1,))),
        ([Replica(1, 1), Replica(2, 2), Replica(3, 3)], Comparison(None, ())),
        ([Replica(1, 1, True), Replica(2, 2), Replica(2, 2)], Comparison(1, (0,))),
        ([Replica(1, 2), Replica(1, 3)], Comparison(None, ())),
        # All are suspect, as after a wrong setting, but none differs.
        ([Replica(1, 1, True), Replica(1, 1, True)], Comparison(0, ())),
    ],
)
def test_the_majority_of_those_above_suspicion_is_right(
    replicas: list[Replica], expected: Comparison
) -> None:
    assert compare(replicas) == expected


class Flip:
    """A fault_hook that flips bits once, in numbers at rest."""

    def __init__(self, site: str, module: str, bit: int, step: int) -> None:
        self.site, self.module, self.bit, self.step = site, module, bit, step
        self.calls = 0

    def __call__(self, site: str, module: str, numbers: Tensor) -> None:
        if (site, module) != (self.site, self.module):
            return
        if self.calls == self.step:
            numbers.view(-1).view(torch.int32)[5] ^= 1 << self.bit
        self.calls += 1


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def one_training(
    steps: int,
    fault_hook: Flip | None = None,
    whole: bool = True,
    between: Callable[[int, nn.Module], None] | None = None,
) -> dict[str, Any]:
    """Train a little on as many ranks as there are; the scrubber's findings, and the parameters."""
    joined = dist.is_initialized()
    size, rank = (dist.get_world_size(), dist.get_rank()) if joined else (1, 0)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watch = Watch(Policy(level="light", light_budget=0.002), None)
    watch.fault_hook = fault_hook
    now = [0.0]

    def clock() -> float:
        now[0] += 1e-4 * (1 + rank)
        return now[0]

    group = dist.group.WORLD if size > 1 else None
    scrubber = Scrubber(
        watch, model.named_parameters(), [optimizer], group=group, whole=whole, clock=clock
    )
    x = torch.randn(24, 16)
    tainted = 0
    for step in range(steps):
        optimizer.zero_grad()
        (model(x) - x.roll(1, 1)).square().mean().backward()
        now[0] += 0.1
        if between is not None:
            between(step, model)
        scrubber.before_step()
        tainted += watch.uncorrected
        watch.begin()
        optimizer.step()
        scrubber.after_step()
        watch.advance()
    scrubber.finish()
    state = [value for each in optimizer.state.values() for value in each.values()]
    return {
        "found": [(f.module, f.operation, f.outcome) for f in watch.ledger.findings],
        "weights": [each.detach().numpy().copy() for each in (*model.parameters(), *state)],
        "period": scrubber.period_steps,
        "tainted": tainted,
    }


@pytest.mark.parametrize("bit", [0, 12, 31])
@pytest.mark.parametrize(
    ("site", "module"),
    [
        ("weight.rest", "0.weight"),
        ("optimizer.state", "2.bias.exp_avg"),
        ("optimizer.state", "2.weight.exp_avg_sq"),
    ],
)
def test_a_bit_that_flips_between_steps_is_found(site: str, module: str, bit: int) -> None:
    found = one_training(8, Flip(site, module, bit, step=4))["found"]
    assert ("optimizer", "rest", "detected") in found


def test_a_seam_that_does_nothing_finds_nothing() -> None:
    assert one_training(8, Flip("weight.rest", "none", 0, 0))["found"] == []


def joined(rank_of_fault: int, steps: int, *arguments: Any) -> dict[str, Any]:
    dist.init_process_group("gloo")
    fault_hook = Flip(*arguments[:4]) if arguments and dist.get_rank() == rank_of_fault else None
    result = one_training(steps, fault_hook, *arguments[4:])
    dist.barrier()
    dist.destroy_process_group()
    return result


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        a.tobytes() == b.tobytes() for a, b in zip(one["weights"], other["weights"], strict=True)
    )


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 3])
def test_replicas_without_a_fault_agree(ranks: Any, size: int) -> None:
    results = ranks(size)(joined, -1, 40, "", "", 0, 0, False)
    assert all(each["found"] == [] for each in results)
    # Their clocks differ, and yet they check the same slices in the same steps.
    assert len({each["period"] for each in results}) == 1
    assert results[0]["period"] > 4


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("site", "module", "taints"),
    [("weight.rest", "2.weight", 1), ("optimizer.state", "0.weight.exp_avg", 0)],
)
def test_what_changed_at_rest_is_repaired_from_a_replica_bit_for_bit(
    ranks: Any, size: int, site: str, module: str, taints: int
) -> None:
    results = ranks(size)(joined, 1, 8, site, module, 20, 4)
    assert ("optimizer", "replicas", "corrected") in results[1]["found"]
    assert {outcome for _, _, outcome in results[1]["found"]} == {"corrected"}
    assert results[0]["found"] == []
    # Passes that have used a wrong weight are not clean.
    assert [each["tainted"] for each in results][:2] == [0, taints]
    assert all(same(each, results[0]) for each in results)
    assert same(results[0], one_training(8))


@pytest.mark.distributed
def test_three_replicas_outvote_a_wrong_one_within_a_period(ranks: Any) -> None:
    results = ranks(3)(apart, 2)
    # It is corrected, but the steps since it changed have used it.
    assert ("optimizer", "replicas", "detected") in results[2]["found"]
    assert results[2]["tainted"] > 0
    assert results[0]["found"] == results[1]["found"] == []
    assert all(same(each, results[0]) for each in results)


@pytest.mark.distributed
def test_two_replicas_cannot_tell_which_is_wrong(ranks: Any) -> None:
    results = ranks(2)(apart, 1)
    for each in results:
        assert ("optimizer", "replicas", "detected") in each["found"]
    assert not same(*results)


def apart(rank_of_fault: int) -> dict[str, Any]:
    """A weight changes a little on one rank, before the first look at it, in the eyes of no other
    check; the gradients stay equal, since they are taken of the same weights on all ranks."""
    dist.init_process_group("gloo")
    gradients = torch.Generator().manual_seed(1)

    def between(step: int, model: nn.Module) -> None:
        for each in model.parameters():
            each.grad = torch.randn(each.shape, generator=gradients)
        if step == 0 and dist.get_rank() == rank_of_fault:
            model[2].weight.data[3, 3] += 1e-3

    result = one_training(60, None, False, between)
    dist.barrier()
    dist.destroy_process_group()
    return result
