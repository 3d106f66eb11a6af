"""The rules on parameters that FSDP2 has sharded do what they do on one rank."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from outlast.tensorize.initialize import initialize_, squared_norm
from outlast.tensorize.layer import TTLinear
from outlast.tensorize.low_rank import LowRankLinear
from outlast.tensorize.optimizers import (
    ProductDecay,
    SpectralBound,
    UnfoldedMuon,
    factor_unfoldings,
)
from outlast.tensorize.parameters import parameter_groups
from outlast.tensorize.sharded import whole

pytestmark = pytest.mark.distributed


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(LowRankLinear(12, 16, 5), nn.Tanh(), TTLinear(16, 12, 3, cores=2))


def _train(model: nn.Sequential, *, muon: bool) -> dict[str, torch.Tensor]:
    if muon:
        cores = factor_unfoldings(model)
        optimizer: torch.optim.Optimizer = UnfoldedMuon(cores, cores, lr=0.05)
    else:
        optimizer = torch.optim.AdamW(parameter_groups(model, 0.05, 0.1))
    ProductDecay(optimizer, model, 0.1)
    SpectralBound(optimizer, model, 0.05)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        # The same batch on all ranks: the mean of gradients is that of one rank.
        optimizer.zero_grad()
        model(torch.randn(8, 12, generator=generator)).square().mean().backward()
        optimizer.step()
    return {name: whole(tensor.detach()) for name, tensor in model.named_parameters()}


def _compare() -> list[float]:
    dist.init_process_group("gloo")
    worst = []
    for muon in (False, True):
        plain = _model()
        sharded = copy.deepcopy(plain)
        fully_shard(sharded[0])
        fully_shard(sharded[2])
        fully_shard(sharded)
        assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
        expected = _train(plain, muon=muon)
        found = _train(sharded, muon=muon)
        worst.append(max((expected[name] - found[name]).abs().max().item() for name in expected))
    dist.destroy_process_group()
    return worst


def test_sharded_training_is_that_of_one_rank(
    ranks: Callable[[int], Callable[..., list[Any]]],
) -> None:
    assert max(max(differences) for differences in ranks(2)(_compare)) < 1e-4


def _initialized() -> tuple[float, list[tuple[int, ...]]]:
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    layer = TTLinear(16, 12, 3, cores=2)
    factors = [distribute_tensor(each.detach(), mesh, [Shard(0)]) for each in layer.factors()]
    initialize_(factors, layer.network, 0.2)
    entries = layer.in_features * layer.out_features
    norm = squared_norm([whole(factor) for factor in factors], layer.network)
    shapes = [tuple(factor.to_local().shape) for factor in factors]
    dist.destroy_process_group()
    return (norm / entries).sqrt().item(), shapes


def test_sharded_cores_are_initialised_together(
    ranks: Callable[[int], Callable[..., list[Any]]],
) -> None:
    results = ranks(2)(_initialized)
    assert [std for std, _ in results] == pytest.approx([0.2, 0.2], rel=1e-3)
    assert results[0][1] != [tuple(core.shape) for core in TTLinear(16, 12, 3, cores=2).factors()]
