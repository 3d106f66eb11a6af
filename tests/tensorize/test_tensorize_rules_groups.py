"""Rates and decay of factors, matrices and vectors."""

import math

import pytest
import torch
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize.embedding import LowRankEmbedding
from outlast.tensorize.initialize import activation_gain
from outlast.tensorize.layer import BTTLinear, TTLinear
from outlast.tensorize.low_rank import BottleneckLinear, LowRankLinear
from outlast.tensorize.parameters import (
    factor_multipliers,
    mup_initialize_,
    mup_multipliers,
    mup_stds,
    parameter_groups,
)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(10, 32),
        LowRankLinear(32, 64, 8),
        nn.LayerNorm(64),
        TTLinear(64, 32, 4, cores=2),
        nn.Linear(32, 10),
    )


def test_every_trained_parameter_is_in_one_group() -> None:
    model = _model()
    model[4].bias.requires_grad_(False)
    for mup in (False, True):
        groups = parameter_groups(model, 0.1, 0.01, mup)
        found = [id(parameter) for group in groups for parameter in group["params"]]
        expected = {id(each) for each in model.parameters() if each.requires_grad}
        assert len(found) == len(set(found))
        assert set(found) == expected


def test_only_dense_matrices_are_decayed() -> None:
    model = _model()
    groups = {group["name"]: group for group in parameter_groups(model, 0.1, 0.01)}
    assert set(groups) == {"factors", "matrices", "vectors"}
    assert {name: group["weight_decay"] for name, group in groups.items()} == {
        "factors": 0.0,
        "matrices": 0.01,
        "vectors": 0.0,
    }
    assert len(groups["factors"]["params"]) == 2 + 4
    assert len(groups["matrices"]["params"]) == 2
    assert all(parameter.ndim == 1 for parameter in groups["vectors"]["params"])
    assert {group["lr"] for group in groups.values()} == {0.1}


def test_mup_rates_are_those_of_the_paper() -> None:
    low_rank = LowRankLinear(32, 64, 8)
    # (d_in / fan in) / cores: 32/32/2 and 32/8/2.
    assert mup_multipliers(low_rank.network) == (0.5, 2.0)
    assert mup_stds(low_rank.network) == pytest.approx(
        (math.sqrt(8 / 32) / math.sqrt(32), 1 / math.sqrt(8))
    )
    block = BTTLinear(64, 36, 2, in_modes=(8, 8), out_modes=(6, 6))
    # Core 1 sums 8 inputs of a block and makes 6 x 2; core 2 sums 8 x 2 and makes 6.
    assert mup_multipliers(block.network) == (64 / 8 / 2, 64 / 16 / 2)
    assert mup_stds(block.network) == pytest.approx((8**-0.5, 16**-0.5 * math.sqrt(6 / 16)))


def test_groups_carry_the_rates_and_say_so() -> None:
    model = _model()
    multipliers = factor_multipliers(model)
    groups = parameter_groups(model, 0.1, 0.01, True)
    for group in groups:
        for parameter in group["params"]:
            assert group["lr"] == group["initial_lr"] == 0.1 * multipliers.get(parameter, 1.0)
    assert "factors x 0.5" in [group["name"] for group in groups]
    optimizer = torch.optim.AdamW(groups)
    assert sorted(group["name"] for group in optimizer.param_groups) == sorted(
        group["name"] for group in groups
    )


def test_base_width_scales_hidden_layers_and_no_embedding() -> None:
    model = _model()
    groups = parameter_groups(model, 0.1, 0.01, True, base_width=16)
    rates = {id(each): group["lr"] for group in groups for each in group["params"]}
    assert rates[id(model[0].weight)] == 0.1
    assert rates[id(model[4].weight)] == pytest.approx(0.1 * 16 / 32)
    assert rates[id(model[1].down.weight)] == pytest.approx(0.1 * 0.5 * 16 / 32)
    assert rates[id(model[2].weight)] == 0.1


def test_tied_head_keeps_the_rate_of_the_embedding() -> None:
    embedding, head = nn.Embedding(10, 32), nn.Linear(32, 10, bias=False)
    head.weight = embedding.weight
    (group,) = parameter_groups(nn.Sequential(embedding, head), 0.1, 0.0, True, base_width=16)
    assert group["lr"] == 0.1


@pytest.mark.parametrize("width", [64, 512])
def test_mup_features_move_alike_at_every_width(width: int) -> None:
    # One Adam step moves outputs by about the same at any width, for unit features.
    moved = []
    for seed in range(3):
        torch.manual_seed(seed)
        layer = LowRankLinear(width, width, width // 4, bias=False)
        mup_initialize_(layer)
        x = torch.randn(256, width)
        # The dense rule alone would give a rate of 1 / width.
        optimizer = torch.optim.Adam(parameter_groups(layer, 0.02, 0.0, True, base_width=16))
        before = layer(x)
        target = torch.randn(1, width)
        (before * target).mean().backward()
        optimizer.step()
        moved.append((layer(x) - before).square().mean().sqrt().item())
    assert 0.01 < sum(moved) / 3 < 0.2


def test_embeddings_are_picked_from_and_not_summed() -> None:
    table = LowRankEmbedding(1000, 24, 8)
    # One-hot inputs have one term, and the bond has 8; two cores share the rate.
    assert mup_multipliers(table.network, one_hot=True) == (1 / 2, 1 / 8 / 2)
    expected = {table.table.weight: 1 / 2, table.up.weight: 1 / 16}
    assert factor_multipliers(table, base_width=16) == expected
    before = table.table.weight.detach().clone()
    model = nn.Sequential(table, LowRankLinear(24, 8, 4))
    mup_initialize_(model)
    assert torch.equal(table.table.weight, before)


def test_mup_initialize_draws_the_deviations_it_says() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "low": LowRankLinear(300, 500, 64),
            "cola": BottleneckLinear(300, 500, 64),
            "out": LowRankLinear(300, 500, 64),
            "dense": nn.Linear(4, 4),
        }
    )
    dense = model["dense"].weight.detach().clone()
    mup_initialize_(model, zero=["out"])
    stds = mup_stds(model["low"].network)
    assert model["low"].down.weight.std().item() == pytest.approx(stds[0], rel=0.03)
    assert model["low"].up.weight.std().item() == pytest.approx(stds[1], rel=0.03)
    expected = stds[1] / activation_gain("silu")
    assert model["cola"].up.weight.std().item() == pytest.approx(expected, rel=0.03)
    assert model["out"].down.weight.any()
    assert not model["out"].up.weight.any()
    assert not model["low"].up.bias.any()
    assert torch.equal(model["dense"].weight, dense)


def test_mistakes_are_refused() -> None:
    model = _model()
    with pytest.raises(TensorizeError, match="lr = -1"):
        parameter_groups(model, -1.0, 0.0)
    with pytest.raises(TensorizeError, match="base_width = 16 needs mup"):
        parameter_groups(model, 1.0, 0.0, base_width=16)
    with pytest.raises(TensorizeError, match=r"zero = '\*.o_proj' fits"):
        mup_initialize_(model, zero=["*.o_proj"])
    with pytest.raises(TensorizeError, match="no structured linear layers: call tensorize"):
        mup_initialize_(nn.Linear(3, 3))
