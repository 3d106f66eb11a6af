"""FSDP2 and DDP of small cores: no empty shards, the numbers of one rank, and few bytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counted_collectives import CountedCollectives
from hypothesis import given
from hypothesis import strategies as st
from tensorized_ranks import joined
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from outlast.checkpoint import CheckpointStore
from outlast.tensorize import BTTLinear, TTLinear, TTMLinear
from outlast.tensorize.fsdp import (
    WholeCores,
    average_gradients,
    clip_gradients,
    leaves_empty,
    shard_tensorized,
    sharded_dimension,
    whole_cores,
)
from outlast.tensorize.low_rank import LowRankLinear
from outlast.tensorize.sharded import whole

WIDTH = 24


@given(length=st.integers(1, 40), ranks=st.integers(1, 12))
def test_empty_shards_are_foreseen(length: int, ranks: int) -> None:
    assert leaves_empty(length, ranks) == (len(torch.empty(length).chunk(ranks)) < ranks)


@given(shape=st.lists(st.integers(1, 20), max_size=4), ranks=st.integers(1, 9))
def test_a_cut_leaves_no_rank_empty_and_later_dimensions_are_cut_evenly(
    shape: list[int], ranks: int
) -> None:
    dimension = sharded_dimension(shape, ranks)
    if dimension is None:
        assert not any(length % ranks == 0 for length in shape)
    elif dimension:
        assert shape[dimension] % ranks == 0
        assert leaves_empty(shape[0], ranks)
    else:
        assert not leaves_empty(shape[0], ranks)


class _Net(nn.Module):
    """Cores of many shapes; with three ranks some can be cut nowhere, with two others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = TTLinear(WIDTH, WIDTH, 4, 4)
        self.middle = TTMLinear(WIDTH, WIDTH, 5)
        self.blocks = BTTLinear(WIDTH, WIDTH, 2)
        self.last = LowRankLinear(WIDTH, 2, 6)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.first(x))
        x = x + torch.tanh(self.middle(x))
        return self.gain * self.last(x + torch.tanh(self.blocks(x)))


def _batch(step: int) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))


def _optimizer(net: nn.Module, unsharded: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    kept = {id(each) for each in unsharded.values()}
    groups = [
        {"params": [each for each in net.parameters() if id(each) not in kept]},
        {"params": list(unsharded.values())},
    ]
    return torch.optim.SGD(groups, lr=0.02, momentum=0.9)


def _steps(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Losses of the whole batch; every rank takes its share of it, in two micro-batches."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = []
    for step in steps:
        share = _batch(step).tensor_split(size)[rank]
        total = torch.zeros(())
        for part in share.chunk(2) if size < 3 else (share[:1], share[1:]):
            loss = (net(part) - part[:, :2]).square().sum() * size / 12
            loss.backward()
            total += loss.detach() / size
        if size > 1:
            dist.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses


def _run(place: str, first: int, last: int) -> tuple[list[float], list[str], bool]:
    """Resume at step `first` if it is not 0, train to `last`, save."""
    joined()
    net = _Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cores = shard_tensorized(net, mesh, units=[net.first, net.middle])
    kept = sorted(cores.parameters)
    parameters = dict(net.named_parameters())
    empty = any(
        isinstance(each, DTensor) and each.to_local().numel() == 0 for each in parameters.values()
    )
    optimizer = _optimizer(net, {name: parameters[name] for name in kept})
    state = {"model": net, "optimizer": optimizer}
    with CheckpointStore(place, writer="thread") as store:
        if first:
            restored = store.restore(state)
            assert restored is not None
            assert restored.step == first
        losses = _steps(net, optimizer, range(first, last))
        store.save(last, state)
    return losses, kept, empty


@pytest.mark.distributed
def test_three_ranks_then_two_then_one_train_like_one(ranks: Any, tmp_path: Path) -> None:
    net = _Net()
    expected = _steps(net, _optimizer(net, {"gain": net.gain}), range(9))
    found = []
    kept_by_size = {}
    for size, first in ((3, 0), (2, 3), (1, 6)):
        outcomes = ranks(size)(_run, str(tmp_path), first, first + 3)
        losses, kept_by_size[size], _ = outcomes[0]
        assert all(each[:2] == outcomes[0][:2] for each in outcomes)
        assert not any(empty for _, _, empty in outcomes)
        found += losses
    assert found == pytest.approx(expected, rel=3e-5)
    assert expected[-1] < 0.7 * expected[0]
    # Without cores that are kept whole, this would be no test of them.
    assert len(kept_by_size[3]) > 1
    assert kept_by_size[3] != kept_by_size[2]


def _plain_fsdp_leaves_empty() -> tuple[bool, float, float]:
    joined()
    mesh = init_device_mesh("cpu", (3,))
    plain, ours = _Net(), _Net()
    del plain.gain  # which FSDP2 refuses
    plain.gain = 1.0
    fully_shard(plain, mesh=mesh)
    empty = any(each.to_local().numel() == 0 for each in plain.parameters())
    shard_tensorized(ours, mesh)
    carried = []
    for net in (plain, ours):
        with CountedCollectives() as counted:
            net(_batch(0)).sum().backward()
        assert counted.traffic.calls
        carried.append(counted.traffic.ring_bytes)
    return empty, *carried


@pytest.mark.distributed
def test_plain_fsdp_has_empty_shards_and_sends_their_padding(ranks: Any) -> None:
    outcomes = ranks(3)(_plain_fsdp_leaves_empty)
    assert any(empty for empty, _, _ in outcomes)
    assert all(ours < plain for _, plain, ours in outcomes)


def _averaging() -> None:
    joined()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    odd = nn.Module()
    odd.core = nn.Parameter(torch.ones(1, 3))
    odd.frozen = nn.Parameter(torch.ones(1, 3), requires_grad=False)
    odd.scalar = nn.Parameter(torch.tensor(2.0))
    odd.even = nn.Parameter(torch.ones(2, 4))
    cores = whole_cores(odd, mesh)
    assert set(cores.parameters) == {"core", "frozen", "scalar"}
    assert cores.ignored == set(cores.parameters.values())
    cores.listen()
    rank = dist.get_rank()

    def loss() -> Tensor:
        return (odd.core * (rank + 1)).sum() * odd.scalar

    loss().backward()
    assert torch.equal(odd.core.grad, torch.full((1, 3), 2 * 2.5))
    assert float(odd.scalar.grad) == 3 * 2.5
    # A backward pass that is broken off must not keep the next one from averaging.
    broken = odd.core.clone()
    broken.register_hook(lambda _: 1 / 0)
    odd.core.grad = odd.scalar.grad = None
    with pytest.raises(ZeroDivisionError):
        ((broken + 1).sum() + (odd.scalar * 1.0)).backward()
    odd.core.grad = odd.scalar.grad = None
    loss().backward()
    loss().backward()
    assert torch.equal(odd.core.grad, torch.full((1, 3), 2 * 2 * 2.5))
    cores.close()
    odd.core.grad = odd.scalar.grad = None
    loss().backward()
    assert torch.equal(odd.core.grad, torch.full((1, 3), 2.0 * (rank + 1)))


@pytest.mark.distributed
def test_gradients_of_whole_cores_are_averaged_after_every_backward_pass(ranks: Any) -> None:
    ranks(4)(_averaging)


def _half_precision() -> float:
    joined()
    net, alone = _Net(), _Net()
    cores = shard_tensorized(
        net,
        init_device_mesh("cpu", (3,)),
        policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    assert isinstance(cores, WholeCores)
    assert cores.parameters
    x = _batch(0)
    for each in (net, alone):
        each(x).float().square().sum().backward()
    difference, size = 0.0, 0.0
    for (name, parameter), other in zip(net.named_parameters(), alone.parameters(), strict=True):
        assert parameter.grad is not None, name
        difference += float((whole(parameter.grad) - other.grad).square().sum())
        size += float(other.grad.square().sum())
    return (difference / size) ** 0.5


@pytest.mark.distributed
def test_half_precision_policy_works_around_whole_cores(ranks: Any) -> None:
    assert max(ranks(3)(_half_precision)) < 0.05


def _payload(tensorized: bool, place: str) -> tuple[int, int, int]:
    """Parameters, bytes of a DDP backward pass, and bytes of a checkpoint with AdamW's moments."""
    joined()
    torch.manual_seed(0)
    width = 256
    layer = (
        LowRankLinear(width, width, 32, bias=False)
        if tensorized
        else nn.Linear(width, width, False)
    )
    net = DistributedDataParallel(layer)
    sent = []

    def counted(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sent.append(bucket.buffer().numel() * bucket.buffer().element_size())
        return default_hooks.allreduce_hook(state, bucket)

    net.register_comm_hook(None, counted)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(64, width)).square().sum().backward()
    optimizer.step()
    with CheckpointStore(place, writer="thread") as store:
        store.save(1, {"model": net, "optimizer": optimizer})
    dist.barrier()
    files = [each for each in Path(place).rglob("*") if each.is_file()]
    return (
        sum(each.numel() for each in net.parameters()),
        sum(sent),
        sum(each.stat().st_size for each in files),
    )


@pytest.mark.distributed
def test_ddp_and_checkpoints_shrink_by_the_parameter_ratio(ranks: Any, tmp_path: Path) -> None:
    dense, _ = ranks(2)(_payload, False, str(tmp_path / "dense"))
    small, _ = ranks(2)(_payload, True, str(tmp_path / "small"))
    ratio = dense[0] / small[0]
    assert ratio == 4
    assert dense[1] / small[1] == ratio
    # A version has a few thousand bytes of its own beside the numbers.
    assert dense[2] / small[2] > 0.85 * ratio


def _sharded(net: nn.Module, ranks: int) -> WholeCores:
    return shard_tensorized(net, init_device_mesh("cpu", (ranks,)))


def _clipped() -> list[tuple[float, float, float]]:
    joined()
    found = []
    for norm_type in (2.0, 1.0, float("inf")):
        net, alone = _Net(), _Net()
        cores = _sharded(net, 3)
        assert len(cores.parameters) > 1
        for each in (net, alone):
            each(_batch(0)).square().sum().backward()
        limit = 0.3
        expected = nn.utils.clip_grad_norm_(alone.parameters(), limit, norm_type)
        norm = clip_gradients(net.parameters(), limit, norm_type)
        off = max(
            float((whole(one.grad) - other.grad).abs().max())
            for one, other in zip(net.parameters(), alone.parameters(), strict=True)
        )
        found.append((float(norm), float(expected), off))
    return found


@pytest.mark.distributed
def test_clipping_counts_whole_cores_once(ranks: Any) -> None:
    for found in ranks(3)(_clipped):
        for norm, expected, off in found:
            assert norm == pytest.approx(expected, rel=1e-5)
            assert off < 1e-5


def test_clipping_nothing_is_a_norm_of_zero() -> None:
    assert float(clip_gradients([nn.Parameter(torch.ones(2))], 1.0)) == 0.0


class _Branches(nn.Module):
    """Whole cores that a rank may not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.odd = nn.Parameter(torch.ones(1, 3))
        self.never = nn.Parameter(torch.ones(1, 3))

    def forward(self, x: Tensor, takes: bool) -> dict[str, Tensor]:
        y = self.used(x).sum()
        return {"y": y + self.odd.sum() if takes else y}


def _a_branch_not_taken() -> tuple[list[float], bool, list[float]]:
    joined()
    net = _Branches()
    cores = _sharded(net, 2)
    assert {"odd", "never"} <= set(cores.parameters)
    net(torch.ones(2, 4), dist.get_rank() == 0)["y"].backward()
    odd, used = net.odd.grad, whole(net.used.bias.grad)
    return odd.flatten().tolist(), net.never.grad is None, used.tolist()


@pytest.mark.distributed
def test_a_rank_without_gradients_of_whole_cores_takes_part(ranks: Any) -> None:
    for odd, never, used in ranks(2)(_a_branch_not_taken):
        assert odd == [0.5] * 3
        assert never
        assert used == [2.0] * 4


def _double() -> list[float]:
    joined()
    core = nn.Parameter(torch.zeros(1, 3, dtype=torch.float64))
    core.grad = torch.full((1, 3), 1.0 + 2.0**-40, dtype=torch.float64)
    average_gradients([core], init_device_mesh("cpu", (2,)))
    return core.grad.flatten().tolist()


@pytest.mark.distributed
def test_gradients_are_averaged_in_their_own_precision(ranks: Any) -> None:
    for mean in ranks(2)(_double):
        assert mean == [1.0 + 2.0**-40] * 3
