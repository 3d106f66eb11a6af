"""Weight decay on the product, without building it."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from outlast.errors import TensorizeError
from outlast.tensorize.initialize import norm_gradients, squared_norm
from outlast.tensorize.layer import BTTLinear, MonarchLinear, StructuredLinear, TTLinear, TTMLinear
from outlast.tensorize.low_rank import BottleneckLinear, LowRankLinear
from outlast.tensorize.network import Network
from outlast.tensorize.optimizers import ProductDecay, SpectralBound
from outlast.tensorize.parameters import parameter_groups
from outlast.tensorize.ranks import resize


def _layers() -> list[StructuredLinear]:
    torch.manual_seed(0)
    options = {"dtype": torch.float64}
    return [
        LowRankLinear(12, 20, 5, **options),
        LowRankLinear(7, 3, 1, **options),
        TTLinear(24, 12, 4, cores=2, **options),
        TTLinear(24, 30, (2, 5, 3, 2, 2), cores=3, **options),
        TTMLinear(24, 12, 3, cores=3, **options),
        TTMLinear(24, 12, 3, cores=2, **options),
        BTTLinear(24, 12, 2, **options),
        MonarchLinear(16, 16, 4, **options),
    ]


LAYERS = _layers()


def _dense(layer: StructuredLinear, factors: list[Tensor]) -> Tensor:
    network = layer.network
    return torch.einsum(f"{','.join(network.cores)}->{network.outputs}{network.inputs}", *factors)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.form)
def test_norm_and_gradients_are_those_of_the_dense_weight(layer: StructuredLinear) -> None:
    factors = list(layer.factors())
    norm, gradients = norm_gradients(factors, layer.network)
    dense = layer.to_dense()
    expected = torch.autograd.grad(dense.square().sum() / 2, factors)
    assert norm.item() == pytest.approx(dense.square().sum().item(), rel=1e-12)
    for found, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)
    assert all(factor.grad is None for factor in factors)


def test_gradients_of_two_factors_are_the_written_ones() -> None:
    down, up = (factor.detach() for factor in LAYERS[0].factors())
    _, (of_down, of_up) = norm_gradients([down, up], LAYERS[0].network)
    torch.testing.assert_close(of_down, up.T @ up @ down)
    torch.testing.assert_close(of_up, up @ (down @ down.T))


def test_bonds_that_many_cores_share() -> None:
    sizes = tuple(zip("abcdr", (2, 4, 3, 2, 5), strict=True))
    network = Network("ab", "cd", ("ra", "rb", "rc", "rd"), sizes, 8, 6)
    factors = [torch.randn(network.shape(core), dtype=torch.float64) for core in range(4)]
    dense = torch.einsum("ra,rb,rc,rd->cdab", *factors)
    assert squared_norm(factors, network).item() == pytest.approx(dense.square().sum().item())


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.form)
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_product_shrinks_at_the_pace_of_a_dense_layer(
    layer: StructuredLinear, scale: float
) -> None:
    layer = copy.deepcopy(layer)
    with torch.no_grad():
        layer.factors()[0].mul_(scale)
    before = layer.to_dense().detach().norm()
    rate, decay, steps = 1e-3, 0.1, 20
    optimizer = torch.optim.SGD(parameter_groups(layer, rate, decay))
    ProductDecay(optimizer, layer, decay)
    for _ in range(steps):
        optimizer.step()
    shrunk = (layer.to_dense().detach().norm() / before).item()
    assert shrunk == pytest.approx((1 - rate * decay) ** steps, rel=1e-5)


def test_change_follows_the_gradient_of_the_dense_norm() -> None:
    layer = TTLinear(24, 12, 4, cores=2, dtype=torch.float64)
    before = [factor.detach().clone() for factor in layer.factors()]
    gradients = torch.autograd.grad(layer.to_dense().square().sum() / 2, layer.factors())
    optimizer = torch.optim.AdamW(parameter_groups(layer, 0.01, 0.0))
    ProductDecay(optimizer, layer, 0.5)
    optimizer.step()
    dense = _dense(layer, before)
    share = dense.square().sum() / sum(gradient.square().sum() for gradient in gradients)
    for factor, old, gradient in zip(layer.factors(), before, gradients, strict=True):
        torch.testing.assert_close(factor.detach(), old - 0.01 * 0.5 * share * gradient)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.form)
def test_no_core_moves_by_more_than_rate_times_decay_of_its_norm(layer: StructuredLinear) -> None:
    layer = copy.deepcopy(layer)
    with torch.no_grad():
        layer.factors()[0].mul_(1e4)
        layer.factors()[-1].mul_(torch.logspace(0, -6, layer.factors()[-1].shape[-1]))
    before = [factor.detach().clone() for factor in layer.factors()]
    optimizer = torch.optim.SGD(parameter_groups(layer, 1.0, 0.0))
    ProductDecay(optimizer, layer, 0.9)
    optimizer.step()
    for factor, old in zip(layer.factors(), before, strict=True):
        assert (factor - old).norm() <= 0.9 * old.norm() * (1 + 1e-9)


def test_decay_is_outside_of_the_moments() -> None:
    torch.manual_seed(1)
    layer = BottleneckLinear(8, 8, 4)
    optimizer = torch.optim.AdamW(parameter_groups(layer, 1e-2, 0.1), weight_decay=0.0)
    ProductDecay(optimizer, layer, 0.1)
    layer(torch.randn(5, 8)).sum().backward()
    gradient = layer.up.weight.grad
    assert gradient is not None
    optimizer.step()
    torch.testing.assert_close(optimizer.state[layer.up.weight]["exp_avg"], 0.1 * gradient)
    assert type(optimizer) is torch.optim.AdamW


def test_frozen_factors_stay_and_others_decay() -> None:
    layer = LowRankLinear(8, 8, 4)
    layer.down.weight.requires_grad_(False)
    old = layer.down.weight.detach().clone()
    before = layer.to_dense().norm().item()
    optimizer = torch.optim.SGD(parameter_groups(layer, 1e-3, 0.0))
    ProductDecay(optimizer, layer, 0.1)
    optimizer.step()
    assert torch.equal(layer.down.weight, old)
    assert layer.to_dense().norm().item() / before == pytest.approx(1 - 1e-4, rel=1e-6)


def test_cores_of_different_types_decay_together() -> None:
    torch.manual_seed(2)
    layer = LowRankLinear(30, 30, 8, bias=False)
    layer.up.weight.data = layer.up.weight.data.double()
    optimizer = torch.optim.SGD(parameter_groups(layer, 1e-2, 0.0))
    ProductDecay(optimizer, layer, 0.1)
    before = (layer.up.weight @ layer.down.weight.double()).norm().item()
    optimizer.step()
    after = (layer.up.weight @ layer.down.weight.double()).norm().item()
    assert after / before == pytest.approx(1 - 1e-3, rel=1e-5)


def test_a_change_of_rank_is_followed() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(LowRankLinear(20, 20, 8, bias=False), TTLinear(16, 16, 6, cores=2))
    optimizer = torch.optim.AdamW(parameter_groups(model, 1e-3, 0.1))
    ProductDecay(optimizer, model, 0.1)
    SpectralBound(optimizer, model, 0.5)
    optimizer.step()
    resize(model[0], 4, optimizers=[optimizer])
    resize(model[1], 3, bond=model[1].network.bonds[1], optimizers=[optimizer])
    before = [layer.to_dense().norm().item() for layer in model]
    optimizer.step()
    for layer, old in zip(model, before, strict=True):
        assert layer.to_dense().norm().item() / old == pytest.approx(1 - 1e-4, rel=1e-5)


def test_zero_product_stays_and_nothing_becomes_nan() -> None:
    layer = LowRankLinear(8, 8, 4)
    layer.reset_parameters(0.0)
    old = layer.down.weight.detach().clone()
    optimizer = torch.optim.SGD(parameter_groups(layer, 1e-1, 0.0))
    ProductDecay(optimizer, layer, 0.1)
    optimizer.step()
    assert torch.equal(layer.down.weight, old)
    assert not layer.up.weight.any()


def test_what_would_decay_wrongly_is_refused() -> None:
    layer = nn.Sequential(LowRankLinear(8, 8, 4))
    twice = torch.optim.AdamW(layer.parameters(), weight_decay=0.1)
    with pytest.raises(TensorizeError, match=r"weight_decay = 0.1 of the group with 0's factors"):
        ProductDecay(twice, layer, 0.1)
    fine = torch.optim.AdamW(layer.parameters(), weight_decay=0.0)
    with pytest.raises(TensorizeError, match="weight_decay = nan"):
        ProductDecay(fine, layer, math.nan)
    with pytest.raises(TensorizeError, match="no structured layers whose factors"):
        ProductDecay(fine, nn.Sequential(nn.Linear(3, 3)), 0.1)
