import pytest
import torch
from test_tensorize_operator import kept_numbers
from torch import Tensor, nn
from torch.nn import functional

from outlast.tensorize import BottleneckLinear, LowRankLinear
from outlast.tensorize.bottleneck import ACTIVATIONS, bottleneck
from outlast.tensorize.initialize import activation_gain


def factors(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (8, 64), (48, 8), (48,)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def plainly(x: Tensor, down: Tensor, up: Tensor, bias: Tensor, activation: str) -> Tensor:
    return functional.linear(ACTIVATIONS[activation](functional.linear(x, down)), up, bias)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [1, 20, 600])
def test_it_is_the_formula_with_all_its_gradients(activation: str, tokens: int) -> None:
    down, up, bias = factors()
    x = torch.randn(2, tokens, 64, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(2, tokens, 48, dtype=torch.float64)
    one = bottleneck(x, down, up, bias, activation)
    other = plainly(x, down, up, bias, activation)
    torch.testing.assert_close(one, other)
    for found, expected in zip(
        torch.autograd.grad(one, [x, down, up, bias], dy),
        torch.autograd.grad(other, [x, down, up, bias], dy),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("tokens", [3, 400])
def test_second_derivatives(tokens: int) -> None:
    down, up, bias = factors()
    x = torch.randn(tokens, 64, dtype=torch.float64, requires_grad=True)
    results = []
    for function in (bottleneck, plainly):
        y = function(x, down, up, bias, "silu")
        first = torch.autograd.grad(y.square().mean(), [x, down, up], create_graph=True)
        total = sum((each.square().sum() for each in first), torch.zeros(()))
        results.append(torch.autograd.grad(total, [x, down, up, bias]))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_few_frozen_factors() -> None:
    x = torch.randn(600, 64, dtype=torch.float64)
    down, up, bias = factors()
    expected = torch.autograd.grad(plainly(x, down, up, bias, "silu").sum(), [down, up, bias])
    for frozen in range(3):
        given = factors()
        given[frozen].requires_grad_(False)
        bottleneck(x, given[0], given[1], given[2], "silu").sum().backward()
        for place, (each, gradient) in enumerate(zip(given, expected, strict=True)):
            if place == frozen:
                assert each.grad is None
            else:
                torch.testing.assert_close(each.grad, gradient)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_more_is_kept_than_x_and_what_is_rank_wide(activation: str) -> None:
    tokens, rank = 2048, 16
    layer = BottleneckLinear(128, 96, rank, activation)
    x = torch.randn(tokens, 128, requires_grad=True)
    beyond, has_x = kept_numbers(layer, x)
    assert has_x
    assert beyond <= tokens * rank


def test_under_autocast_x_is_kept_in_its_dtype() -> None:
    tokens, rank = 2048, 16
    layer = BottleneckLinear(128, 96, rank)
    x = torch.randn(tokens, 128, requires_grad=True)
    bytes_kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal bytes_kept
        bytes_kept += tensor.nbytes
        return tensor

    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    weights = sum(each.numel() for each in layer.parameters())
    assert bytes_kept <= 2 * (tokens * (128 + rank) + weights)
    y.float().sum().backward()
    assert layer.down.weight.grad is not None
    assert layer.down.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("kind", [LowRankLinear, BottleneckLinear])
def test_children_that_were_replaced_or_are_listened_to_are_called(
    kind: type[LowRankLinear],
) -> None:
    layer = kind(64, 48, 8)
    x = torch.randn(600, 64)
    expected = layer(x)
    calls = []
    handle = layer.down.register_forward_hook(lambda *given: calls.append(given))
    torch.testing.assert_close(layer(x), expected)
    assert len(calls) == 1
    handle.remove()

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    doubled = Doubled(8, 48)
    doubled.load_state_dict(layer.up.state_dict())
    layer.up = doubled
    torch.testing.assert_close(layer(x), expected * 2)


@pytest.mark.parametrize("kind", [LowRankLinear, BottleneckLinear])
@pytest.mark.parametrize("hook", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_children_whose_gradients_are_listened_to_are_called(
    kind: type[LowRankLinear], hook: str
) -> None:
    layer = kind(64, 48, 8)
    calls = []
    getattr(layer.up, hook)(lambda *given: calls.append(given) or None)
    layer(torch.randn(600, 64)).sum().backward()
    assert len(calls) == 1


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_y_starts_with_the_variance_of_a_dense_layer(activation: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4096, 512)
    layer = BottleneckLinear(512, 512, 256, activation, bias=False)
    dense = nn.Linear(512, 512, bias=False)
    with torch.no_grad():
        y, expected = layer(x), dense(x)
    # Activations that are positive on average add a mean that a single draw of `up` scatters.
    assert float(y.square().mean() / expected.square().mean()) == pytest.approx(1.0, rel=0.05)
    assert activation_gain("relu") == pytest.approx(0.5**0.5, rel=1e-5)
