"""Sharded models change their ranks as a whole, and the loss continues where it was."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensorized_ranks import joined
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from outlast.errors import TensorizeError
from outlast.tensorize import LowRankLinear, TTLinear
from outlast.tensorize.fsdp import shard_tensorized
from outlast.tensorize.ranks import change_sharded, match_ranks, resize, shrink

WIDTH = 24


def _build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(LowRankLinear(WIDTH, WIDTH, 16), TTLinear(WIDTH, WIDTH, 6, cores=2))
    model[0].reset_parameters(0.02)  # what is learned is soon larger
    return model


def _plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0, foreach=False)


def _shard(model: nn.Module) -> torch.optim.Optimizer:
    shard_tensorized(model, init_device_mesh("cpu", (dist.get_world_size(),)), units=[model[0]])
    return _plain(model)


def _loss(model: nn.Module, seed: int) -> Tensor:
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(seed))
    low = x[:, :3].repeat(1, WIDTH // 3)
    return (model(x) - low).square().mean()


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> float:
    for seed in seeds:
        loss = _loss(model, seed)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float(_loss(model, -1))


def _refusals(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    state = nn.Sequential(LowRankLinear(WIDTH, WIDTH, 2)).state_dict()
    found = 0
    for change in (
        lambda: resize(model[0], 4, optimizers=[optimizer]),
        lambda: shrink(model, 0.5),
        lambda: match_ranks(model, state),
    ):
        with pytest.raises(TensorizeError, match="change_sharded"):
            change()
        found += 1
    return found


def _run() -> dict[str, Any]:
    joined()
    model = _build()
    optimizer = _shard(model)
    with torch.no_grad():
        start = float(_loss(model, -1))
    before = _train(model, optimizer, range(120))
    refused = _refusals(model, optimizer)

    def change(whole: nn.Module, own: torch.optim.Optimizer) -> None:
        shrink(whole, 0.999, optimizers=[own])

    changed, fresh = change_sharded(
        model, optimizer, change, build=_build, shard=_shard, plain=_plain
    )
    steps = {float(fresh.state[each]["step"]) for each in changed.parameters()}
    with torch.no_grad():
        after = float(_loss(changed, -1))
    later = _train(changed, fresh, range(120, 140))
    twin = _train(model, optimizer, range(120, 140))
    return {
        "losses": (start, before, after, later, twin),
        "refused": refused,
        "ranks": (changed[0].rank, changed[1].rank),
        "shapes": [tuple(each.shape) for each in changed.parameters()],
        "steps": steps,
    }


@pytest.mark.distributed
def test_a_sharded_model_shrinks_and_goes_on(ranks: Any) -> None:
    results = ranks(2)(_run)
    for key in ("losses", "ranks", "shapes"):
        assert results[0][key] == results[1][key]
    start, before, after, later, twin = results[0]["losses"]
    assert before < 0.1 * start
    assert results[0]["ranks"][0] < 16
    assert results[0]["shapes"][0] == (results[0]["ranks"][0], WIDTH)
    assert results[0]["refused"] == 3
    assert results[0]["steps"] == {120.0}
    assert abs(after - before) < 0.01 * start
    assert later < after
    assert abs(later - twin) < 0.02 * start
