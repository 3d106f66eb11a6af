"""Float8 factors (emulated here), and a dtype per core."""

import math

import pytest
import torch
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize import BottleneckLinear, BTTLinear, LowRankLinear, TTLinear
from outlast.tensorize.precision import has_float8, set_core_precision, use_float8


def test_float8_rounds_the_products_and_trains():
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    model = nn.Sequential(
        BottleneckLinear(64, 64, 16), LowRankLinear(64, 32, 16), LowRankLinear(32, 8, 5)
    )
    x = torch.randn(32, 64)
    exact = model(x).detach()
    assert use_float8(model) == ["0.down", "0.up", "1.down", "1.up"]
    y = model(x)
    error = float((y - exact).detach().norm() / exact.norm())
    assert 1e-4 < error < 0.1
    y.square().sum().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())
    assert sorted(model.state_dict())[:3] == ["0.down.weight", "0.up.bias", "0.up.weight"]


def test_float8_without_fitting_sizes_is_refused_with_the_remedy():
    pytest.importorskip("torchao")
    with pytest.raises(TensorizeError, match="multiple = 16"):
        use_float8(nn.Sequential(LowRankLinear(60, 60, 15)))


def test_the_cpu_has_no_float8():
    assert not has_float8(torch.device("cpu"))


def test_cores_of_different_dtypes_multiply_in_the_widest():
    torch.manual_seed(0)
    layer = TTLinear(24, 24, 6, 2)
    weight = layer.to_dense().detach()
    set_core_precision(
        nn.Sequential(layer),
        lambda name, shape: torch.bfloat16 if math.prod(shape) > 100 else torch.float32,
    )
    assert {core.dtype for core in layer.factors()} == {torch.bfloat16, torch.float32}
    x = torch.randn(5, 24)
    y = layer(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, nn.functional.linear(x, weight, layer.bias), rtol=0.05, atol=0.02)
    torch.testing.assert_close(layer.to_dense(), weight, rtol=0.05, atol=0.02)
    y.sum().backward()
    assert all(core.grad.dtype == core.dtype for core in layer.factors())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "make", [lambda: TTLinear(24, 24, 6, 2), lambda: BottleneckLinear(24, 24, 6)]
)
def test_autocast_rounds_activations_and_not_parameters(make, dtype):
    torch.manual_seed(0)
    layer = make()
    x = torch.randn(2, 1024, 24, requires_grad=True)
    exact = layer(x)
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), exact, rtol=0.1, atol=0.05)
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32
    assert all(each.grad.dtype == torch.float32 for each in layer.parameters())


@pytest.mark.parametrize("tokens", [5, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        lambda: LowRankLinear(24, 24, 6),
        lambda: BottleneckLinear(24, 24, 6),
        lambda: TTLinear(24, 24, 6, 2, bias=False),
        lambda: BTTLinear(24, 24, 2, bias=False),
    ],
    ids=["low_rank", "cola", "tt", "btt"],
)
def test_every_form_takes_cores_of_two_dtypes_at_any_size(make, tokens, dtype):
    torch.manual_seed(0)
    layer = make()
    x = torch.randn(tokens, 24)
    exact = layer(x).detach()
    last = len(layer.factors()) - 1
    kinds = iter([torch.float32] * last + [torch.bfloat16])
    set_core_precision(layer, lambda *_: next(kinds))
    assert {core.dtype for core in layer.factors()} == {torch.bfloat16, torch.float32}
    y = layer(x.to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), exact, rtol=0.05, atol=0.05)
    y.sum().backward()
    assert all(each.grad.dtype == each.dtype for each in layer.parameters())


@pytest.mark.parametrize("kind", [LowRankLinear, BottleneckLinear])
@pytest.mark.parametrize("tokens", [5, 1024])
def test_factors_of_two_dtypes_that_are_listened_to(kind, tokens):
    torch.manual_seed(0)
    layer = kind(24, 24, 6)
    x = torch.randn(tokens, 24)
    exact = layer(x).detach()
    seen = []
    layer.up.register_forward_hook(lambda module, given, y: seen.append(y.dtype))
    kinds = iter([torch.float32, torch.bfloat16])
    set_core_precision(layer, lambda *_: next(kinds))
    y = layer(x)
    assert (seen, y.dtype) == ([torch.bfloat16], torch.float32)
    torch.testing.assert_close(y, exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", [LowRankLinear, BottleneckLinear])
def test_factors_of_two_dtypes_compile(kind):
    torch.manual_seed(0)
    layer = kind(24, 24, 6)
    kinds = iter([torch.float32, torch.bfloat16])
    set_core_precision(layer, lambda *_: next(kinds))
    x = torch.randn(5, 24)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x), rtol=0.02, atol=0.02)
    compiled(x).sum().backward()
    assert all(core.grad.dtype == core.dtype for core in layer.factors())


def test_a_core_stored_as_integers_is_refused():
    with pytest.raises(TensorizeError, match="int8"):
        set_core_precision(nn.Sequential(TTLinear(4, 4, 2, 2)), lambda *_: torch.int8)
