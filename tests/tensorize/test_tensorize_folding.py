"""The bias as a column of the last factor: the same numbers, one pass over y and dy less."""

import pytest
import torch
from torch.nn import functional

from outlast.tensorize import BottleneckLinear, LowRankLinear, TTLinear, execute
from outlast.tensorize.contraction import LayerPlan
from outlast.tensorize.network import Route
from outlast.tensorize.operator import chain

LAYERS = {
    "low_rank": lambda: LowRankLinear(32, 24, 8, dtype=torch.float64),
    "tt": lambda: TTLinear(32, 24, 4, 2, dtype=torch.float64),
    "cola": lambda: BottleneckLinear(32, 24, 8, dtype=torch.float64),
}


TWO_PRODUCTS = LayerPlan.uniform(Route((2, 2)), 4)


def forward(layer, x):
    if isinstance(layer, TTLinear):
        return chain(x, layer.factors(), layer.network, layer.bias, TWO_PRODUCTS)
    return layer(x)


def gradients(layer, x, dy):
    wanted = [x, *layer.parameters()]
    return torch.autograd.grad(forward(layer, x), wanted, dy)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_a_bias_that_is_added(name, monkeypatch):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    x = torch.randn(700, 32, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(700, 24, dtype=torch.float64)
    expected, y = gradients(layer, x, dy), forward(layer, x).detach()
    seen, with_bias = [], execute.with_bias
    monkeypatch.setattr(execute, "_MANY", 0)
    for module in ("execute", "bottleneck"):
        target = f"outlast.tensorize.{module}.with_bias"
        monkeypatch.setattr(target, lambda *given: seen.append(1) or with_bias(*given))
    torch.testing.assert_close(forward(layer, x), y, rtol=1e-12, atol=1e-12)
    for mine, right in zip(gradients(layer, x, dy), expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-10)
    assert seen


def test_frozen_factors_leave_the_bias_its_gradient(monkeypatch):
    monkeypatch.setattr(execute, "_MANY", 0)
    layer = LAYERS["low_rank"]()
    layer.up.weight.requires_grad_(False)
    x, dy = torch.randn(700, 32, dtype=torch.float64), torch.randn(700, 24, dtype=torch.float64)
    layer(x).backward(dy)
    torch.testing.assert_close(layer.up.bias.grad, dy.sum(0))


def test_a_feature_major_middle_as_wide_as_the_tokens_is_not_taken_for_a_fold():
    layer = LAYERS["tt"]()
    x = torch.randn(9, 32, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(9, 24, dtype=torch.float64)
    plan = LayerPlan.uniform(Route((2, 2), layout="features"), 4)
    y = chain(x, layer.factors(), layer.network, layer.bias, plan)
    found = torch.autograd.grad(y, [layer.bias, *layer.cores], dy)
    right = functional.linear(x, layer.to_dense(), layer.bias)
    expected = torch.autograd.grad(right, [layer.bias, *layer.cores], dy)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)
