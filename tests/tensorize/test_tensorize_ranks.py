"""Ranks change in the middle of a run: sizes, moments and steps follow, and the loss goes on."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize.forms import (
    BottleneckLinear,
    BTTLinear,
    LowRankLinear,
    TTLinear,
    TTMLinear,
)
from outlast.tensorize.ranks import (
    RankControl,
    energy_rank,
    explained_rank,
    grow,
    match_ranks,
    resize,
    shrink,
    spectrum,
)

DOUBLE = {"dtype": torch.float64}


def layers():
    return [
        LowRankLinear(12, 10, 6, **DOUBLE),
        TTLinear(12, 20, 5, 2, in_modes=(3, 4), out_modes=(4, 5), **DOUBLE),
        TTMLinear(24, 12, 4, 3, in_modes=(2, 3, 4), out_modes=(3, 2, 2), **DOUBLE),
        BTTLinear(12, 20, 3, in_modes=(3, 4), out_modes=(4, 5), **DOUBLE),
    ]


def named(all_layers):
    return pytest.mark.parametrize("layer", all_layers, ids=[each.form for each in all_layers])


def unfolding(layer, bond):
    """The weight as a matrix over a bond, for those whose sides are plain to see."""
    weight = layer.to_dense().detach()
    if layer.form == "tt":
        cores = list(layer.network.cores)
        left = next(k for k, core in enumerate(cores) if bond in core) + 1
        modes = [layer.network.size(mode) for mode in layer.network.outputs]
        modes += [layer.network.size(mode) for mode in layer.network.inputs]
        count = len(layer.network.outputs)
        order = [*range(count, len(modes)), *range(count)]
        tensor = weight.reshape(modes).permute(order)
        return tensor.reshape(math.prod(tensor.shape[:left]), -1)
    return weight


@named(layers()[:2])
def test_the_spectrum_is_that_of_the_unfolded_weight(layer):
    for bond in layer.network.bonds:
        mine = spectrum(layer.network, layer.factors(), bond)
        right = torch.linalg.svdvals(unfolding(layer, bond))
        torch.testing.assert_close(mine, right[: len(mine)], rtol=1e-6, atol=1e-8)


@named(layers())
def test_every_spectrum_has_the_weights_norm(layer):
    for bond in layer.network.bonds:
        values = spectrum(layer.network, layer.factors(), bond)
        torch.testing.assert_close(values.norm(), layer.to_dense().norm(), rtol=1e-8, atol=0.0)


@named(layers())
def test_shrinking_loses_what_the_spectrum_says(layer):
    bond = layer.network.bonds[-1]
    weight = layer.to_dense().detach()
    values = spectrum(layer.network, layer.factors(), bond)
    rank = layer.network.size(bond) - 1
    change = resize(layer, rank, bond=bond)
    error = (layer.to_dense() - weight).norm() / weight.norm()
    assert error.item() == pytest.approx(float(values[rank:].norm() / values.norm()), rel=1e-6)
    assert change.error == pytest.approx(error.item(), rel=1e-6)
    assert layer.network.size(bond) == rank
    for core, tensor in enumerate(layer.factors()):
        assert tuple(tensor.shape) == layer.network.shape(core)


@named(layers())
def test_growing_keeps_the_weight_and_the_new_entries_learn(layer):
    bond = layer.network.bonds[0]
    weight = layer.to_dense().detach()
    rank = layer.network.size(bond) + 2
    resize(layer, rank, bond=bond)
    torch.testing.assert_close(layer.to_dense(), weight, rtol=0.0, atol=1e-12)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.randn(30, layer.in_features, **DOUBLE)).square().sum().backward()
        optimizer.step()
    core = next(k for k, letters in enumerate(layer.network.cores) if bond in letters)
    place = layer.network.cores[core].index(bond)
    gradient = layer.factors()[core].grad
    assert gradient.narrow(place, rank - 2, 2).abs().sum() > 0
    assert spectrum(layer.network, layer.factors(), bond)[rank - 1] >= 0


def trained(layer, steps, seed=0):
    """An optimizer that has learned a little; squared error of a linear map."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(layer.in_features, layer.out_features, generator=generator, **DOUBLE)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, weight_decay=0.0)

    def step():
        x = torch.randn(64, layer.in_features, generator=generator, **DOUBLE)
        optimizer.zero_grad()
        loss = (layer(x) - x @ target).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss)

    losses = [step() for _ in range(steps)]
    return optimizer, step, losses


def test_shrinking_in_mid_run_keeps_moments_steps_and_the_course_of_the_loss():
    torch.manual_seed(0)
    layer = LowRankLinear(16, 12, 12, **DOUBLE)
    with torch.no_grad():  # two directions carry next to nothing
        layer.down.weight[10:] *= 1e-3
        layer.up.weight[:, 10:] *= 1e-3
    optimizer, step, losses = trained(layer, 5)
    before = sum(each.numel() for each in layer.parameters())
    heard = []
    changes = shrink(layer, 0.999, optimizers=[optimizer], on_change=heard.append)
    assert heard == changes
    assert changes[0].after < 12
    assert sum(each.numel() for each in layer.parameters()) < before
    held = [each for group in optimizer.param_groups for each in group["params"]]
    assert {id(each) for each in held} == {id(each) for each in layer.parameters()}
    for each in layer.parameters():
        state = optimizer.state[each]
        assert state["step"] == 5
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == each.shape
        assert (state["exp_avg_sq"] >= 0).all()
    later = [step() for _ in range(5)]
    assert max(later) < max(losses) * 1.05


def test_a_moment_of_the_new_coordinates_is_that_of_the_mapped_gradient():
    """With plain averages of gradients, resizing and averaging change places."""
    torch.manual_seed(1)
    layer = LowRankLinear(7, 6, 4, bias=False, **DOUBLE)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0, momentum=0.9)
    x, dy = torch.randn(20, 7, **DOUBLE), torch.randn(20, 6, **DOUBLE)
    layer(x).backward(dy)
    optimizer.step()
    # Of full rank, so that the map is a change of coordinates that loses nothing.
    layer.up.weight.data[:, 3] = 0.0
    layer.zero_grad()
    layer(x).backward(dy)
    fresh = torch.optim.SGD(layer.parameters(), lr=0.0, momentum=0.9)
    fresh.step()
    resize(layer, 3, optimizers=[fresh])
    layer.zero_grad()
    layer(x).backward(dy)
    moment = fresh.state[layer.down.weight]["momentum_buffer"]
    torch.testing.assert_close(moment, layer.down.weight.grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("rank", [2, 9])
def test_a_checkpoint_of_another_rank_loads(rank):
    source = nn.Sequential(LowRankLinear(12, 10, rank), nn.ReLU(), TTLinear(10, 12, 2, 2))
    target = nn.Sequential(LowRankLinear(12, 10, 6), nn.ReLU(), TTLinear(10, 12, 3, 2))
    optimizer = torch.optim.AdamW(target.parameters())
    changes = match_ranks(target, source.state_dict(), [optimizer])
    assert changes
    target.load_state_dict(source.state_dict())
    x = torch.randn(3, 12)
    torch.testing.assert_close(target(x), source(x))
    target(x).sum().backward()
    optimizer.step()


def test_a_checkpoint_of_other_modes_is_refused():
    source = TTLinear(12, 12, 2, in_modes=(3, 4), out_modes=(3, 4))
    target = TTLinear(12, 12, 2, in_modes=(4, 3), out_modes=(3, 4))
    with pytest.raises(TensorizeError, match="modes"):
        match_ranks(nn.Sequential(target), nn.Sequential(source).state_dict())


def test_units_of_a_nonlinear_bottleneck_are_chosen_not_mixed():
    torch.manual_seed(0)
    layer = BottleneckLinear(8, 6, 5, **DOUBLE)
    with torch.no_grad():
        layer.up.weight[:, 2] = 0.0  # says nothing
    x = torch.randn(9, 8, **DOUBLE)
    y = layer(x).detach()
    change = resize(layer, 4)
    assert math.isnan(change.error)
    torch.testing.assert_close(layer(x), y, rtol=0.0, atol=1e-12)
    resize(layer, 7)
    torch.testing.assert_close(layer(x), y, rtol=0.0, atol=1e-12)


def test_growth_goes_where_the_spectrum_is_flat():
    torch.manual_seed(0)
    flat, steep = (LowRankLinear(16, 16, 4, **DOUBLE) for _ in range(2))
    with torch.no_grad():
        steep.up.weight[:, 1:] *= 1e-3
    model = nn.Sequential(flat, steep)
    changes = grow(model, factor=1.5, used=0.6, multiple=2)
    assert [(each.name, each.after) for each in changes] == [("0", 6)]


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=12), st.floats(0.05, 1.0))
@settings(max_examples=50, deadline=None)
def test_the_energy_rank_is_the_smallest_that_suffices(values, energy):
    ordered = torch.tensor(sorted(values, reverse=True), dtype=torch.float64)
    rank = energy_rank(ordered, energy)
    squares = ordered.square()
    assert squares[:rank].sum() >= energy * squares.sum() * (1 - 1e-9)
    if rank > 1:
        assert squares[: rank - 1].sum() < energy * squares.sum() * (1 + 1e-9)
    assert 0 < explained_rank(ordered) <= 1


def test_gates_find_the_rank_that_the_task_has():
    torch.manual_seed(0)
    layer = LowRankLinear(12, 12, 8, bias=False, **DOUBLE)
    target = torch.randn(12, 3, **DOUBLE) @ torch.randn(3, 12, **DOUBLE) / 12**0.5
    control = RankControl(layer, weight=0.3)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=5e-3, weight_decay=0.0)
    assert control.share == 1.0
    for _ in range(800):
        optimizer.zero_grad()
        x = torch.randn(64, 12, **DOUBLE)
        control.objective((layer(x) - x @ target).square().mean()).backward()
        optimizer.step()
    assert control.share <= 0.75
    x = torch.randn(5, 12, **DOUBLE)
    y = layer(x).detach()
    changes = control.finish([optimizer])
    assert 3 <= changes[0].after < 8
    assert list(layer.state_dict()) == ["down.weight", "up.weight"]
    torch.testing.assert_close(layer(x), y, rtol=0.1, atol=0.1)
    layer(x).sum().backward()
    optimizer.step()


def test_the_late_stage_works_on_what_is_farther_from_its_target():
    layer = LowRankLinear(6, 6, 4)
    control = RankControl(layer, target_loss=1.0, target_share=0.5)
    term = float(control.rank_term())
    near, far = torch.tensor(1.1), torch.tensor(5.0)
    assert float(control.objective(near)) == pytest.approx(0.11 + 1.01 * term, rel=1e-5)
    assert float(control.objective(far)) == pytest.approx(5.5 + 0.01 * term, rel=1e-5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: resize(LowRankLinear(4, 4, 2), 0), "rank = 0"),
        (lambda: resize(TTLinear(8, 8, 2, 2), 1), "name one"),
        (lambda: shrink(LowRankLinear(4, 4, 2), 1.5), "energy = 1.5"),
        (lambda: grow(LowRankLinear(4, 4, 2), factor=0.5), "factor = 0.5"),
        (lambda: RankControl(nn.Linear(3, 3)), "no structured layer"),
        (lambda: RankControl(LowRankLinear(4, 4, 2), target_loss=1.0), "go together"),
    ],
)
def test_wrong_input_is_refused_with_its_value(call, words):
    with pytest.raises(TensorizeError, match=words):
        call()
