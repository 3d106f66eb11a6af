"""Ranks change in the middle of a run: sizes, moments and steps follow, and the loss continues."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize import (
    BottleneckLinear,
    BTTLinear,
    LowRankLinear,
    MonarchLinear,
    TTLinear,
    TTMLinear,
)
from outlast.tensorize.ranks import (
    energy_rank,
    grow,
    match_ranks,
    resize,
    shrink,
    singular_values,
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
        mine = singular_values(layer.network, layer.factors(), bond)
        right = torch.linalg.svdvals(unfolding(layer, bond))
        torch.testing.assert_close(mine, right[: len(mine)], rtol=1e-6, atol=1e-8)


@named(layers())
def test_every_spectrum_has_the_weights_norm(layer):
    for bond in layer.network.bonds:
        values = singular_values(layer.network, layer.factors(), bond)
        torch.testing.assert_close(values.norm(), layer.to_dense().norm(), rtol=1e-8, atol=0.0)


@named(layers())
def test_shrinking_loses_what_the_spectrum_says(layer):
    bond = layer.network.bonds[-1]
    weight = layer.to_dense().detach()
    values = singular_values(layer.network, layer.factors(), bond)
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
    cores = layer.factors()
    gradient = cores[core].grad
    assert gradient.narrow(place, rank - 2, 2).abs().sum() > 0
    # What came out of the new entries was zero, and is not any more.
    last = next(k for k in range(core + 1, len(cores)) if bond in layer.network.cores[k])
    place = layer.network.cores[last].index(bond)
    assert cores[last].narrow(place, rank - 2, 2).abs().min() > 0


class Task:
    """A linear map of low rank to be learned, with a bit of everything else."""

    def __init__(self, layer, seed=0):
        self.layer = layer
        self.generator = torch.Generator().manual_seed(seed)
        into, out = layer.in_features, layer.out_features
        target = self.normal(into, 4) @ self.normal(4, out) + 1e-2 * self.normal(into, out)
        self.target = target / into**0.5
        self.optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, weight_decay=0.0)
        self.fixed = self.normal(256, into)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator, **DOUBLE)

    def loss(self, x):
        return (self.layer(x) - x @ self.target).square().mean()

    def measured(self):
        with torch.no_grad():
            return float(self.loss(self.fixed))

    def step(self):
        x = self.normal(64, self.layer.in_features)
        self.optimizer.zero_grad()
        self.loss(x).backward()
        self.optimizer.step()


def test_shrinking_in_mid_run_keeps_moments_steps_and_the_course_of_the_loss():
    torch.manual_seed(0)
    runs = [Task(LowRankLinear(16, 12, 12, **DOUBLE)) for _ in range(2)]
    runs[1].layer.load_state_dict(runs[0].layer.state_dict())
    start = runs[0].measured()
    for run in runs:
        for _ in range(300):
            run.step()
    shrunk, twin = runs
    before = shrunk.measured()
    assert before < 0.02 * start
    assert before == twin.measured()
    layer, optimizer = shrunk.layer, shrunk.optimizer
    parameters = sum(each.numel() for each in layer.parameters())
    heard = []
    changes = shrink(layer, 0.999, optimizers=[optimizer], on_change=heard.append)
    assert heard == changes
    assert 4 <= changes[0].after < 12
    assert sum(each.numel() for each in layer.parameters()) < parameters
    held = [each for group in optimizer.param_groups for each in group["params"]]
    assert {id(each) for each in held} == {id(each) for each in layer.parameters()}
    for each in layer.parameters():
        state = optimizer.state[each]
        assert state["step"] == 300
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == each.shape
    assert shrunk.measured() < before + 2e-3 * start
    for _ in range(20):
        for run in runs:
            run.step()
        # Never farther from the run that was left alone than what was cut off and a bit of Adam.
        assert abs(shrunk.measured() - twin.measured()) < 5e-3 * start


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
    assert match_ranks(target, source.state_dict()) == ["0", "2"]
    target.load_state_dict(source.state_dict())
    optimizer = torch.optim.AdamW(target.parameters())
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


@pytest.mark.parametrize(
    ("rank", "multiple", "ranks"), [(12, 16, [16]), (24, 16, []), (12, 4, [20]), (16, 16, [])]
)
def test_grown_ranks_are_multiples(rank, multiple, ranks):
    torch.manual_seed(0)
    layer = LowRankLinear(30, 30, rank, **DOUBLE)
    changes = grow(layer, factor=1.5, used=0.5, multiple=multiple)
    assert [each.after for each in changes] == ranks


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=12), st.floats(0.05, 1.0))
@settings(max_examples=50, deadline=None)
def test_the_energy_rank_is_the_smallest_that_suffices(values, energy):
    ordered = torch.tensor(sorted(values, reverse=True), dtype=torch.float64)
    rank = energy_rank(ordered, energy)
    squares = ordered.square()
    assert squares[:rank].sum() >= energy * squares.sum() * (1 - 1e-9)
    if rank > 1:
        assert squares[: rank - 1].sum() < energy * squares.sum() * (1 + 1e-9)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: resize(LowRankLinear(4, 4, 2), 0), "rank = 0"),
        (lambda: resize(TTLinear(8, 8, 2, 2), 1), "name one"),
        (lambda: shrink(LowRankLinear(4, 4, 2), 1.5), "energy = 1.5"),
        (lambda: grow(LowRankLinear(4, 4, 2), factor=0.5), "factor = 0.5"),
        (lambda: grow(LowRankLinear(4, 4, 2), multiple=0), "multiple = 0"),
        (lambda: resize(MonarchLinear(8, 8, 2), 1), "rank that its blocks say"),
    ],
)
def test_wrong_input_is_refused_with_its_value(call, words):
    with pytest.raises(TensorizeError, match=words):
        call()
