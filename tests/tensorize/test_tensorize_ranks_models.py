"""Ranks of whole models: other checkpoints, tied layers, and layers that must not change."""

import pytest
import torch
import torch.distributed as dist
from tensorized_ranks import joined, low_rank_llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from outlast.errors import TensorizeError
from outlast.tensorize import (
    BottleneckLinear,
    LatentLinear,
    LowRankLinear,
    SparseLowRankLinear,
    TTLinear,
)
from outlast.tensorize.embedding import LowRankEmbedding, TTEmbedding, TTMEmbedding
from outlast.tensorize.low_rank import link_latents
from outlast.tensorize.ranks import grow, match_ranks, resize, shrink
from outlast.tensorize.tensor_parallel import parallelize_bottleneck

DOUBLE = {"dtype": torch.float64}


def line(rank, gate="identity"):
    model = nn.Sequential(*(LatentLinear(8, 8, rank) for _ in range(3)))
    link_latents(model, gate)
    return model


@pytest.mark.parametrize("gate", ["identity", "vector"])
def test_a_line_of_latents_keeps_its_basis(gate):
    torch.manual_seed(0)
    model = nn.Sequential(line(4, gate), LowRankLinear(8, 8, 6))
    x = torch.randn(5, 8)
    y = model[0](x).detach()
    with pytest.raises(TensorizeError, match=r"0\.1 is in a line of latent crossing.*anew"):
        resize(model[0][1], 3, name="0.1")
    with pytest.raises(TensorizeError, match="line of latent crossing"):
        match_ranks(model[0], line(2, gate).state_dict())
    with pytest.warns(UserWarning, match=r"0\.0 is in a line"):
        changes = shrink(model, 0.5)
    assert {each.name for each in changes} == {"1"}
    with pytest.warns(UserWarning, match="stay as they are"):
        grow(model, used=0.01)
    assert torch.equal(model[0](x), y)


def test_a_latent_layer_that_stands_alone_is_like_any_other():
    torch.manual_seed(0)
    model = line(4)
    for layer in model:
        link_latents([layer])
    assert resize(model[1], 3).after == 3


def test_tied_factors_change_together():
    torch.manual_seed(0)
    for whole in (True, False):
        model = nn.Sequential(*(LowRankLinear(8, 8, 6, bias=False, **DOUBLE) for _ in range(3)))
        if whole:
            model[2].down, model[2].up = model[0].down, model[0].up
        else:
            model[2].down.weight, model[2].up.weight = model[0].down.weight, model[0].up.weight
        optimizer = torch.optim.AdamW(model.parameters())
        changes = shrink(model, 0.8, optimizers=[optimizer])
        assert sorted(each.name for each in changes) == ["0", "1"]
        assert model[2].up.weight is model[0].up.weight
        assert model[2].rank == model[0].rank == model[2].up.in_features < 6
        assert torch.equal(model[2].to_dense(), model[0].to_dense())
        held = [id(each) for group in optimizer.param_groups for each in group["params"]]
        assert sorted(held) == sorted(id(each) for each in model.parameters())
        model(torch.randn(3, 8, **DOUBLE)).sum().backward()
        optimizer.step()
        source = nn.Sequential(*(LowRankLinear(8, 8, 1, bias=False, **DOUBLE) for _ in range(3)))
        assert match_ranks(model, source.state_dict()) == ["0", "1"]
        assert [layer.rank for layer in model] == [1, 1, 1]


@pytest.mark.parametrize("other", [LowRankLinear, BottleneckLinear])
def test_layers_that_are_tied_by_half_or_differ_are_left_alone(other):
    torch.manual_seed(0)
    model = nn.Sequential(LowRankLinear(8, 8, 6), other(8, 8, 6), LowRankLinear(8, 8, 6))
    model[1].down.weight = model[0].down.weight
    if other is BottleneckLinear:
        model[1].up.weight = model[0].up.weight
    with pytest.raises(TensorizeError, match="shares a factor with 1"):
        resize(model[0], 3, model=model, name="0")
    with pytest.warns(UserWarning, match="shares a factor"):
        changes = shrink(model, 0.5)
    assert [each.name for each in changes] == ["2"]


@pytest.mark.parametrize("rank", [2, 9])
@pytest.mark.parametrize("alpha", [None, 16.0])
def test_a_sparse_checkpoint_of_another_rank_gives_its_function(rank, alpha):
    torch.manual_seed(0)
    source = nn.Sequential(SparseLowRankLinear(12, 10, rank, 0.2, alpha=alpha))
    target = nn.Sequential(SparseLowRankLinear(12, 10, 6, 0.2, alpha=alpha))
    match_ranks(target, source.state_dict())
    target.load_state_dict(source.state_dict())
    x = torch.randn(4, 12)
    torch.testing.assert_close(target(x), source(x))
    # Also of a run that changed its rank on its way.
    resize(source[0], 4)
    match_ranks(target, source.state_dict())
    target.load_state_dict(source.state_dict())
    torch.testing.assert_close(target(x), source(x))


@pytest.mark.parametrize("kind", [LowRankEmbedding, TTEmbedding, TTMEmbedding])
@pytest.mark.parametrize("rank", [2, 7])
def test_embeddings_match_a_checkpoint(kind, rank):
    torch.manual_seed(0)
    source, target = nn.Sequential(kind(30, 16, rank)), nn.Sequential(kind(30, 16, 4))
    index = torch.arange(30)
    assert match_ranks(target, source.state_dict()) == ["0"]
    target.load_state_dict(source.state_dict())
    torch.testing.assert_close(target(index), source(index))
    assert target[0].rank == source[0].rank
    if kind is LowRankEmbedding:
        assert target[0].table.embedding_dim == target[0].up.in_features == rank


def test_nothing_changes_where_a_later_layer_does_not_fit():
    model = nn.Sequential(LowRankLinear(12, 12, 4), TTLinear(12, 12, 2, in_modes=(3, 4)))
    state = nn.Sequential(LowRankLinear(12, 12, 2), TTLinear(12, 12, 2, in_modes=(4, 3)))
    with pytest.raises(TensorizeError, match="modes"):
        match_ranks(model, state.state_dict())
    assert model[0].rank == 4


def _refusals() -> int:
    joined()
    model = low_rank_llama()
    parallelize_bottleneck(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    layer = model.model.layers[0].self_attn.q_proj
    state = {"model.layers.0.self_attn.q_proj.down.weight": torch.empty(8, 64)}
    calls = (
        lambda: resize(layer, 8),
        lambda: shrink(model, 0.5),
        lambda: match_ranks(model, state),
    )
    for call in calls:
        with pytest.raises(TensorizeError, match="split over ranks"):
            call()
    return len(calls)


@pytest.mark.distributed
def test_split_layers_are_refused(ranks):
    assert ranks(2)(_refusals) == [3, 3]


def test_factors_with_another_parametrization_are_refused():
    layer = LowRankLinear(8, 8, 4)
    torch.nn.utils.parametrizations.orthogonal(layer.down)
    with pytest.raises(TensorizeError, match="as by a parametrization"):
        resize(layer, 2)
