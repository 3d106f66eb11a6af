"""Muon on unfolded cores."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize.embedding import LowRankEmbedding
from outlast.tensorize.layer import BTTLinear, TTLinear, TTMLinear
from outlast.tensorize.low_rank import LowRankLinear
from outlast.tensorize.optimizers import (
    UnfoldedMuon,
    Unfolding,
    factor_unfoldings,
    orthogonalize,
    unfoldings,
)
from outlast.tensorize.ranks import resize


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
def test_matrices_get_what_torch_gives_them(nesterov: bool, adjust: str | None) -> None:
    torch.manual_seed(0)
    ours = nn.ParameterList(torch.randn(shape) for shape in [(8, 12), (20, 6), (5, 5), (1, 7)])
    theirs = copy.deepcopy(ours)
    options = {"lr": 0.1, "weight_decay": 0.2, "nesterov": nesterov, "adjust_lr_fn": adjust}
    optimizers = (
        UnfoldedMuon(ours.parameters(), **options),
        torch.optim.Muon(theirs.parameters(), **options),
    )
    for _ in range(4):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_state_is_exchanged_with_torch() -> None:
    torch.manual_seed(1)
    ours = nn.Parameter(torch.randn(6, 4))
    theirs = nn.Parameter(ours.detach().clone())
    ours.grad, theirs.grad = torch.ones(6, 4), torch.ones(6, 4)
    reference = torch.optim.Muon([theirs], lr=0.1)
    reference.step()
    optimizer = UnfoldedMuon([ours], lr=0.5)
    optimizer.load_state_dict(reference.state_dict())
    with torch.no_grad():
        ours.copy_(theirs)
    for each in (reference, optimizer):
        each.step()
    torch.testing.assert_close(ours, theirs)


def test_unfoldings_put_what_the_chain_sums_on_columns() -> None:
    low_rank = LowRankLinear(6, 10, 3)
    assert unfoldings(low_rank.network) == (Unfolding((), (0,), (1,)),) * 2
    train = TTLinear(12, 15, 2, cores=2, in_modes=(3, 4), out_modes=(5, 3))
    sides = [
        unfolding.sides(tuple(core.shape))
        for unfolding, core in zip(unfoldings(train.network), train.factors(), strict=True)
    ]
    # Inputs go into bonds: 3 -> 2, then (2, 4) -> 2; bonds into outputs: 2 -> (5, 2), 2 -> 3.
    assert sides == [(1, 2, 3), (1, 2, 8), (1, 10, 2), (1, 3, 2)]
    block = BTTLinear(12, 15, 2, in_modes=(3, 4), out_modes=(5, 3))
    sides = [
        unfolding.sides(tuple(core.shape))
        for unfolding, core in zip(unfoldings(block.network), block.factors(), strict=True)
    ]
    # 3 blocks of 4 -> (5, 2), then 5 blocks of (3, 2) -> 3.
    assert sides == [(3, 10, 4), (5, 3, 6)]


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(4)), st.integers(0, 2), st.integers(1, 2), st.integers(0, 2**31))
def test_fold_undoes_unfold(order: list[int], batch: int, rows: int, seed: int) -> None:
    core = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(seed))
    ends = batch, batch + rows
    unfolding = Unfolding(
        tuple(order[: ends[0]]), tuple(order[ends[0] : ends[1]]), tuple(order[ends[1] :])
    )
    matrices = unfolding.unfold(core)
    assert matrices.ndim == (3 if batch else 2)
    assert torch.equal(unfolding.fold(matrices, tuple(core.shape)), core)


@pytest.mark.parametrize("shape", [(30, 8), (8, 30), (16, 16), (4, 12, 20), (3, 20, 12)])
def test_singular_values_come_near_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)).float())
    assert values.max() < 1.3
    assert values.median() > 0.6


def test_every_block_is_orthogonalised_by_itself() -> None:
    torch.manual_seed(3)
    matrices = torch.randn(4, 6, 10) * torch.tensor([1e-3, 1.0, 10.0, 1e3])[:, None, None]
    together = orthogonalize(matrices).float()
    for one, found in zip(matrices, together, strict=True):
        torch.testing.assert_close(found, orthogonalize(one).float(), rtol=0.0, atol=0.03)
    assert not orthogonalize(torch.zeros(2, 3, 4)).any()


@pytest.mark.parametrize(
    "layer",
    [
        TTLinear(24, 24, 6, cores=3),
        TTMLinear(24, 24, 6, cores=2),
        BTTLinear(24, 24, 2),
        LowRankLinear(24, 24, 8),
    ],
    ids=lambda layer: layer.form,
)
def test_cores_of_all_forms_learn(layer: nn.Module) -> None:
    torch.manual_seed(4)
    teacher = copy.deepcopy(layer)
    teacher.reset_parameters()
    x = torch.randn(64, 24)
    target = teacher(x).detach()
    vectors = [parameter for parameter in layer.parameters() if parameter.ndim < 2]
    others = torch.optim.AdamW(vectors, lr=0.01)
    cores = factor_unfoldings(layer)
    optimizer = UnfoldedMuon(cores, cores, lr=0.01)
    losses = []
    for _ in range(40):
        loss = (layer(x) - target).square().mean()
        losses.append(loss.item())
        for each in (optimizer, others):
            each.zero_grad()
        loss.backward()
        for each in (optimizer, others):
            each.step()
    assert losses[-1] < 0.5 * losses[0]


def test_a_change_of_rank_is_followed() -> None:
    torch.manual_seed(5)
    layer = TTLinear(24, 24, 6, cores=2)
    cores = factor_unfoldings(layer)
    optimizer = UnfoldedMuon(cores, cores, lr=0.01)
    for rank in (6, 3):
        if rank == 3:
            change = resize(layer, 3, bond=layer.network.bonds[1], optimizers=[optimizer])
            optimizer.exchange(change.parameters)
        layer(torch.randn(8, 24)).square().sum().backward()
        before = [core.detach().clone() for core in layer.factors()]
        optimizer.step()
        assert not any(map(torch.equal, layer.factors(), before))
    assert optimizer.state[layer.factors()[1]]["momentum_buffer"].shape == layer.factors()[1].shape


def test_embeddings_are_left_to_others() -> None:
    model = nn.Sequential(LowRankEmbedding(10, 8, 4), LowRankLinear(8, 8, 4))
    assert set(factor_unfoldings(model)) == set(model[1].factors())


def test_what_is_no_matrix_is_refused() -> None:
    with pytest.raises(TensorizeError, match=r"shape \(2, 3, 4\) is no matrix"):
        UnfoldedMuon([nn.Parameter(torch.zeros(2, 3, 4))])
    with pytest.raises(TensorizeError, match="momentum = 2"):
        UnfoldedMuon([nn.Parameter(torch.zeros(3, 4))], momentum=2.0)
    with pytest.raises(TensorizeError, match="adjust_lr_fn = 'mine'"):
        UnfoldedMuon([nn.Parameter(torch.zeros(3, 4))], adjust_lr_fn="mine")


def test_a_group_that_is_refused_is_not_added() -> None:
    matrix, other = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(5, 2))
    optimizer = UnfoldedMuon([matrix])
    with pytest.raises(TensorizeError, match=r"shape \(2, 3, 4\) is no matrix"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 3, 4))]})
    assert [group["params"] for group in optimizer.param_groups] == [[matrix]]
    optimizer.add_param_group({"params": iter([other])})
    assert optimizer.param_groups[1]["params"] == [other]
    named = UnfoldedMuon([("matrix", matrix)])
    assert named.param_groups[0]["param_names"] == ["matrix"]
