"""Layers under the transforms of torch.func: grad, vmap, jacrev, jvp."""

import pytest
import torch
from test_tensorize_forms import FORMS, all_forms, as_function, reference
from torch import Tensor

from outlast.errors import TensorizeError
from outlast.tensorize import TTEmbedding, TTMEmbedding


@all_forms
def test_grad_is_that_of_autograd(name: str) -> None:
    torch.manual_seed(0)
    layer = FORMS[name](dtype=torch.float64)
    x = torch.randn(6, 12, dtype=torch.float64)
    function, parameters = as_function(layer)

    def loss(*values: Tensor) -> Tensor:
        return function(x, *values).square().sum()

    found = torch.func.grad(loss, tuple(range(len(parameters))))(*parameters)
    expected = torch.autograd.grad(reference(layer, x).square().sum(), parameters)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@all_forms
def test_gradients_per_sample(name: str) -> None:
    torch.manual_seed(0)
    layer = FORMS[name](dtype=torch.float64)
    x = torch.randn(4, 3, 12, dtype=torch.float64)
    function, parameters = as_function(layer)

    def loss(sample: Tensor, *values: Tensor) -> Tensor:
        return function(sample, *values).square().sum()

    places = tuple(range(1, len(parameters) + 1))
    shared = (None,) * len(parameters)
    found = torch.func.vmap(torch.func.grad(loss, places), (0, *shared))(x, *parameters)
    for sample in range(4):
        value = reference(layer, x[sample]).square().sum()
        expected = torch.autograd.grad(value, parameters)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one[sample], other)


@all_forms
def test_an_ensemble_of_layers(name: str) -> None:
    torch.manual_seed(0)
    layers = [FORMS[name](dtype=torch.float64) for _ in range(3)]
    if name == "sparse":
        layers[1].indices = layers[2].indices = layers[0].indices
    function, _ = as_function(layers[0])
    stacked = [
        torch.stack(each) for each in zip(*(one.parameters() for one in layers), strict=True)
    ]
    x = torch.randn(5, 12, dtype=torch.float64)
    found = torch.func.vmap(function, (None, *([0] * len(stacked))))(x, *stacked)
    for layer, y in zip(layers, found, strict=True):
        torch.testing.assert_close(y, layer(x))


@all_forms
def test_jacobians_by_both_modes_are_the_weight(name: str) -> None:
    torch.manual_seed(0)
    layer = FORMS[name](dtype=torch.float64)
    x = torch.randn(12, dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(lambda each: reference(layer, each), x)
    torch.testing.assert_close(torch.func.jacrev(layer)(x), expected)
    torch.testing.assert_close(torch.func.jacfwd(layer)(x), expected)
    if name != "cola":
        torch.testing.assert_close(expected, layer.to_dense())


@all_forms
def test_hessian_vector_products(name: str) -> None:
    torch.manual_seed(0)
    layer = FORMS[name](dtype=torch.float64)
    x, v = torch.randn(2, 12, dtype=torch.float64)

    def loss(each: Tensor) -> Tensor:
        return layer(each).pow(3).sum()

    found = torch.func.jvp(torch.func.grad(loss), (x,), (v,))[1]
    hessian = torch.autograd.functional.hessian(lambda each: reference(layer, each).pow(3).sum(), x)
    torch.testing.assert_close(found, hessian @ v)


@pytest.mark.parametrize("kind", [TTEmbedding, TTMEmbedding])
def test_embeddings(kind: type[TTEmbedding] | type[TTMEmbedding]) -> None:
    torch.manual_seed(0)
    layer = kind(30, 8, 2, 2, padding_idx=3, dtype=torch.float64)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    index = torch.tensor([[1, 3], [29, 1], [0, 3]])

    def loss(sample: Tensor, *values: Tensor) -> Tensor:
        given = dict(zip(names, values, strict=True))
        return torch.func.functional_call(layer, given, (sample,)).pow(3).sum()

    places = tuple(range(1, len(parameters) + 1))
    shared = (None,) * len(parameters)
    found = torch.func.vmap(torch.func.grad(loss, places), (0, *shared))(index, *parameters)
    for sample in range(3):
        value = layer.to_dense()[index[sample]].pow(3).sum()
        for one, other in zip(found, torch.autograd.grad(value, parameters), strict=True):
            torch.testing.assert_close(one[sample], other)


def test_x_of_another_size_is_refused_there_too() -> None:
    with pytest.raises(TensorizeError, match="must end in the layer's 12 features"):
        torch.func.jacrev(FORMS["tt"]())(torch.randn(13))
