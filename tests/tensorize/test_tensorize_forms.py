"""All forms as what they are for: to stand in for an `nn.Linear`."""

import copy
import dataclasses
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck

from outlast.errors import TensorizeError
from outlast.tensorize import (
    BottleneckLinear,
    BTTLinear,
    CPLinear,
    LatentLinear,
    LowRankEmbedding,
    LowRankLinear,
    MonarchLinear,
    SparseLowRankLinear,
    TTLinear,
    TTMEmbedding,
    TTMLinear,
    TuckerLinear,
    bottleneck,
    low_rank,
    operator,
)
from outlast.tensorize.contraction import LayerPlan
from outlast.tensorize.layer import CoredLinear, StructuredLinear, merged
from outlast.tensorize.ranks import resize

Build = Callable[..., StructuredLinear]

FORMS: dict[str, Build] = {
    "low_rank": lambda **o: LowRankLinear(12, 20, 3, **o),
    "cola": lambda **o: BottleneckLinear(12, 20, 3, **o),
    "tt": lambda **o: TTLinear(12, 20, 3, 2, **o),
    "ttm": lambda **o: TTMLinear(12, 20, 3, 2, **o),
    "btt": lambda **o: BTTLinear(12, 20, 2, **o),
    "monarch": lambda **o: MonarchLinear(12, 20, 2, **o),
    "tucker": lambda **o: TuckerLinear(12, 20, (2, 3, 2, 2), **o),
    "cp": lambda **o: CPLinear(12, 20, 5, **o),
    "lax": lambda **o: LatentLinear(12, 20, 3, **o),
    "sparse": lambda **o: SparseLowRankLinear(12, 20, 3, 0.1, **o),
}
LINEAR = [name for name in FORMS if name != "cola"]
all_forms = pytest.mark.parametrize("name", FORMS)

GRADCHECKED: dict[str, Build] = {
    "low rank 1": lambda **o: LowRankLinear(5, 4, 1, **o),
    "low rank": lambda **o: LowRankLinear(5, 4, 3, **o),
    "cola rank 1": lambda **o: BottleneckLinear(5, 4, 1, **o),
    "cola gelu": lambda **o: BottleneckLinear(5, 4, 3, "gelu", **o),
    "tt of 1 + 1 cores": lambda **o: TTLinear(6, 4, 2, 1, **o),
    "tt of 1 + 2 cores": lambda **o: TTLinear(6, 8, (2, 2), in_modes=(6,), out_modes=(2, 4), **o),
    "tt of 2 + 2 cores": lambda **o: TTLinear(6, 8, (2, 3, 2), 2, **o),
    "tt of 2 + 3 cores": lambda **o: TTLinear(6, 11, 2, in_modes=(2, 3), out_modes=(2, 2, 3), **o),
    "tt rank 1": lambda **o: TTLinear(6, 8, 1, 2, **o),
    "ttm of 2 cores": lambda **o: TTMLinear(5, 8, 2, in_modes=(2, 3), out_modes=(4, 2), **o),
    "ttm of 3 cores": lambda **o: TTMLinear(12, 8, (2, 3), 3, **o),
    "ttm of 4 cores": lambda **o: TTMLinear(
        8, 6, 2, in_modes=(2, 1, 2, 2), out_modes=(1, 3, 2, 1), **o
    ),
    "ttm of 5 cores": lambda **o: TTMLinear(
        8, 4, 2, in_modes=(2, 1, 2, 2, 1), out_modes=(1, 2, 1, 1, 2), **o
    ),
    "ttm rank 1": lambda **o: TTMLinear(4, 4, 1, 2, **o),
    "btt": lambda **o: BTTLinear(6, 8, 2, **o),
    "btt rank 1, uneven and padded": lambda **o: BTTLinear(
        7, 5, 1, in_modes=(2, 4), out_modes=(3, 2), **o
    ),
    "monarch": lambda **o: MonarchLinear(6, 7, 2, **o),
    "tucker": lambda **o: TuckerLinear(6, 4, (2, 3, 1, 2), **o),
    "tucker rank 1": lambda **o: TuckerLinear(6, 4, 1, **o),
    "cp": lambda **o: CPLinear(6, 4, 3, **o),
    "cp rank 1": lambda **o: CPLinear(6, 4, 1, **o),
    "lax": lambda **o: LatentLinear(5, 4, 2, "tanh", **o),
    "sparse": lambda **o: SparseLowRankLinear(5, 4, 2, 0.2, alpha=3.0, **o),
    "sparse rank 1": lambda **o: SparseLowRankLinear(5, 4, 1, 1.0, **o),
}


def as_function(layer: nn.Module) -> tuple[Callable[..., Tensor], list[nn.Parameter]]:
    """A layer as a function of x and its parameters."""
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def function(x: Tensor, *values: Tensor) -> Tensor:
        given = dict(zip(names, values, strict=True))
        result: Tensor = torch.func.functional_call(layer, given, (x,))
        return result

    return function, list(parameters)


def reference(layer: StructuredLinear, x: Tensor) -> Tensor:
    if isinstance(layer, BottleneckLinear):
        return layer.up(nn.functional.silu(layer.down(x)))
    return nn.functional.linear(x, layer.to_dense(), layer.bias)


@pytest.fixture(params=["planned", "kept"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By the plans, which are plain for a few tokens; or by the functions that many tokens take."""
    if request.param == "kept":
        planned = operator.plan_for

        def kept(*given: Any) -> LayerPlan:
            return dataclasses.replace(planned(*given), plain=False)

        monkeypatch.setattr(operator, "plan_for", kept)
        monkeypatch.setattr(bottleneck, "FEW", -1)
        monkeypatch.setattr(low_rank, "FEW", -1)
    return str(request.param)


ways = pytest.mark.usefixtures("way")


@all_forms
def test_many_tokens_go_through_the_functions_that_keep_little(name: str, way: str) -> None:
    layer = FORMS[name]()
    y = layer(torch.randn(3, 12))
    functions = {"_ChainBackward", "_BottleneckBackward", "_SparseLowRankBackward"}
    seen, left = set(), [y.grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            seen.add(node.name())
            left += [other for other, _ in node.next_functions]
    if way == "kept":
        assert seen & functions
    elif name != "sparse":
        assert not seen & functions


@ways
@pytest.mark.parametrize("tokens", [0, 1, 3])
@pytest.mark.parametrize("name", GRADCHECKED)
def test_gradients(name: str, tokens: int) -> None:
    torch.manual_seed(0)
    layer = GRADCHECKED[name](dtype=torch.float64)
    function, parameters = as_function(layer)
    x = torch.randn(tokens, layer.in_features, dtype=torch.float64, requires_grad=True)
    assert gradcheck(function, (x, *parameters), fast_mode=tokens == 3)


@ways
@pytest.mark.parametrize("name", GRADCHECKED)
def test_second_derivatives(name: str) -> None:
    torch.manual_seed(0)
    layer = GRADCHECKED[name](dtype=torch.float64)
    function, parameters = as_function(layer)
    x = torch.randn(2, layer.in_features, dtype=torch.float64, requires_grad=True)
    assert gradgradcheck(function, (x, *parameters), fast_mode=True)


@all_forms
def test_any_leading_dimensions(name: str) -> None:
    torch.manual_seed(0)
    layer = FORMS[name](dtype=torch.float64)
    for shape in [(12,), (5, 12), (2, 3, 12), (2, 1, 3, 12), (0, 12), (2, 0, 12)]:
        x = torch.randn(shape, dtype=torch.float64)
        y = layer(x)
        assert y.shape == (*shape[:-1], 20)
        torch.testing.assert_close(y, reference(layer, x))


@ways
@all_forms
def test_x_need_not_be_contiguous(name: str) -> None:
    torch.manual_seed(0)
    layer = FORMS[name](dtype=torch.float64)
    x = torch.randn(12, 7, 3, dtype=torch.float64).transpose(0, 2).requires_grad_()
    y = layer(x)
    torch.testing.assert_close(y, layer(x.detach().contiguous()))
    y[..., ::2].sum().backward()
    other = x.detach().contiguous().requires_grad_()
    layer(other)[..., ::2].sum().backward()
    torch.testing.assert_close(x.grad, other.grad)


@all_forms
def test_another_number_of_features_is_refused(name: str) -> None:
    with pytest.raises((TensorizeError, RuntimeError)):
        FORMS[name]()(torch.randn(6, 10))


@all_forms
def test_without_bias(name: str) -> None:
    layer = FORMS[name](bias=False, dtype=torch.float64)
    assert layer.bias is None
    assert not any("bias" in key for key in layer.state_dict())
    assert layer(torch.zeros(2, 12, dtype=torch.float64)).abs().max() == 0


@all_forms
def test_layers_on_the_meta_device_get_storage_and_numbers_later(name: str) -> None:
    layer = FORMS[name](device="meta")
    assert all(value.is_meta for value in layer.state_dict().values())
    assert layer.weight.is_meta
    assert name == "cola" or layer.to_dense().shape == (20, 12)
    assert layer(torch.randn(3, 12, device="meta")).shape == (3, 20)
    layer.to_empty(device="cpu")
    torch.manual_seed(0)
    layer.reset_parameters()
    x = torch.randn(3, 12)
    torch.testing.assert_close(layer(x), reference(layer, x))
    assert 0.01 < layer(x).std() < 3.0


@all_forms
def test_copies_and_pickles_are_the_same_layer(name: str) -> None:
    layer = FORMS[name]()
    x = torch.randn(3, 12)
    layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        torch.testing.assert_close(other(x), layer(x))
        assert next(other.parameters()) is not next(layer.parameters())


STATE = {
    "low_rank": {"down.weight": (3, 12), "up.weight": (20, 3), "up.bias": (20,)},
    "cola": {"down.weight": (3, 12), "up.weight": (20, 3), "up.bias": (20,)},
    "lax": {"down.weight": (3, 12), "up.weight": (20, 3), "up.bias": (20,)},
    "sparse": {
        "values": (24,),
        "indices": (24,),
        "down.weight": (3, 12),
        "up.weight": (20, 3),
        "up.bias": (20,),
    },
    "tt": {
        "bias": (20,),
        "cores.0": (3, 3),
        "cores.1": (3, 4, 3),
        "cores.2": (3, 4, 3),
        "cores.3": (3, 5),
    },
    "ttm": {"bias": (20,), "cores.0": (4, 3, 3), "cores.1": (3, 5, 4)},
    "btt": {"bias": (20,), "cores.0": (3, 4, 2, 4), "cores.1": (4, 5, 3, 2)},
    "monarch": {"bias": (20,), "cores.0": (2, 2, 3, 6), "cores.1": (2, 10, 2, 3)},
    "tucker": {
        "bias": (20,),
        "cores.0": (3, 2),
        "cores.1": (4, 3),
        "cores.2": (2, 3, 2, 2),
        "cores.3": (2, 4),
        "cores.4": (2, 5),
    },
    "cp": {
        "bias": (20,),
        "cores.0": (3, 5),
        "cores.1": (4, 5),
        "cores.2": (5, 4),
        "cores.3": (5, 5),
    },
}


@all_forms
def test_names_and_shapes_in_checkpoints(name: str) -> None:
    state = FORMS[name]().state_dict()
    assert {key: tuple(value.shape) for key, value in state.items()} == STATE[name]


@all_forms
def test_loading_a_state_makes_the_same_layer(name: str) -> None:
    first, second = FORMS[name](), FORMS[name]()
    x = torch.randn(3, 12)
    assert not torch.allclose(first(x), second(x))
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(second(x), first(x))


@ways
@all_forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [3, 2048])
def test_autocast(name: str, dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(0)
    layer = FORMS[name]()
    x = torch.randn(tokens, 12, requires_grad=True)
    exact = layer(x)
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), exact, atol=0.05, rtol=0.05)
    y.float().square().mean().backward()
    assert x.grad is not None
    assert all(each.grad.dtype == torch.float32 for each in layer.parameters())  # type: ignore[union-attr]


@ways
@all_forms
def test_frozen_factors_get_no_gradient_and_the_others_the_same(name: str) -> None:
    torch.manual_seed(0)
    layer = FORMS[name](dtype=torch.float64)
    x = torch.randn(2000, 12, dtype=torch.float64)
    layer(x).square().sum().backward()
    full = {key: each.grad for key, each in layer.named_parameters()}
    for frozen in full:
        layer.zero_grad()
        for key, each in layer.named_parameters():
            each.requires_grad_(key != frozen)
        layer(x).square().sum().backward()
        for key, each in layer.named_parameters():
            if key == frozen:
                assert each.grad is None
            else:
                torch.testing.assert_close(each.grad, full[key])


@ways
@all_forms
def test_a_layer_that_is_used_twice(name: str) -> None:
    torch.manual_seed(0)
    layer = FORMS[name](dtype=torch.float64)
    x = torch.randn(2000, 12, dtype=torch.float64)
    both = layer(x) * 2 + layer(-x)
    both.sum().backward()
    found = [each.grad for each in layer.parameters()]
    layer.zero_grad()
    expected = reference(layer, x) * 2 + reference(layer, -x)
    torch.testing.assert_close(both, expected)
    expected.sum().backward()
    for gradient, each in zip(found, layer.parameters(), strict=True):
        torch.testing.assert_close(gradient, each.grad)


@all_forms
def test_settings_build_a_layer_that_takes_the_state(name: str) -> None:
    layer = FORMS[name](bias=False)
    other = type(layer)(**layer.settings())
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, 12)
    torch.testing.assert_close(other(x), layer(x))


@all_forms
def test_print_says_what_the_layer_is(name: str) -> None:
    text = repr(FORMS[name]())
    assert "12, 20, rank=" in text
    assert "% of the dense parameters" in text


def test_a_printed_layer() -> None:
    layer = TTLinear(768, 3072, 32)
    assert layer.extra_repr() == (
        "768, 3072, rank=(8, 32, 32, 32, 16), bias=True, 1.5% of the dense parameters"
    )


@pytest.mark.parametrize("name", LINEAR)
def test_the_dense_layer_of_a_form(name: str) -> None:
    layer = FORMS[name](dtype=torch.float64).eval()
    dense = layer.dense_linear()
    x = torch.randn(3, 12, dtype=torch.float64)
    assert not dense.training
    torch.testing.assert_close(dense(x), layer(x))


@pytest.mark.parametrize("name", LINEAR)
def test_the_dense_weight_is_differentiable(name: str) -> None:
    layer = FORMS[name](dtype=torch.float64)
    layer.to_dense().square().sum().backward()
    trained = [each for key, each in layer.named_parameters() if "bias" not in key]
    assert all(each.grad is not None and each.grad.abs().sum() > 0 for each in trained)


# Plain operations differentiate like those of an `nn.Linear`: within autocast in its dtype.
@pytest.mark.parametrize("way", ["kept"], indirect=True)
@ways
@all_forms
def test_gradients_within_autocast_are_those_outside(name: str) -> None:
    torch.manual_seed(0)
    layer = FORMS[name]()
    x = torch.randn(40, 12, requires_grad=True)
    inputs = [x, *layer.parameters()]

    def y() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x)

    outside = torch.autograd.grad(y().float().square().sum(), inputs)
    loss = y().float().square().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(loss, inputs)
    for one, other in zip(inside, outside, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", LINEAR)
def test_the_dense_weight_under_autocast_and_of_mixed_cores_is_exact(name: str) -> None:
    layer = FORMS[name]()
    exact = layer.to_dense()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer.to_dense(), exact)
    if name in ("sparse",):
        return
    first = layer.factors()[0]
    first.data = first.data.bfloat16()
    expected = copy.deepcopy(layer).float().to_dense()
    assert layer.to_dense().dtype == torch.float32
    assert torch.equal(layer.to_dense(), expected)
    assert "float32" in layer.explain(64)


@ways
@all_forms
def test_float64_is_left_alone_by_autocast(name: str) -> None:
    layer = FORMS[name](dtype=torch.float64)
    x = torch.randn(5, 12, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), layer(x))
        y = layer(x)
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, layer(x))


@ways
@all_forms
@pytest.mark.parametrize("learns", [False, True])
def test_y_has_the_dtype_of_x_whatever_that_of_the_cores(name: str, learns: bool) -> None:
    torch.manual_seed(0)
    layer = FORMS[name]()
    x = torch.randn(5, 12).bfloat16()
    with torch.set_grad_enabled(learns):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x.float()), atol=0.05, rtol=0.05)
    if learns:
        y.float().sum().backward()
        assert all(each.grad.dtype == torch.float32 for each in layer.parameters())  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["tt", "ttm", "btt", "monarch", "tucker", "cp"])
def test_whole_numbers_are_refused(name: str) -> None:
    with pytest.raises(TensorizeError, match="int64 is not of floating point"):
        FORMS[name]()(torch.ones(3, 12, dtype=torch.int64))


@pytest.mark.parametrize("name", LINEAR)
def test_the_weight_of_a_layer(name: str) -> None:
    layer = FORMS[name](dtype=torch.bfloat16)
    weight = layer.weight
    assert isinstance(weight, Tensor)
    assert (weight.dtype, weight.device, weight.shape) == (
        torch.bfloat16, torch.device("cpu"), (20, 12)
    )  # fmt: skip
    assert torch.equal(weight + 0, layer.to_dense())
    assert torch.equal(layer.weight.float(), layer.to_dense().float())
    nn.functional.linear(torch.randn(3, 12).bfloat16(), layer.weight).sum().backward()
    assert layer.factors()[0].grad is not None
    with pytest.raises((AttributeError, KeyError)):
        layer.weight = nn.Parameter(torch.zeros(20, 12))


def test_looking_at_the_weight_does_not_make_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = FORMS["tt"]()
    monkeypatch.setattr(type(layer), "to_dense", lambda self: pytest.fail("was made"))
    weight = layer.weight
    assert weight.dtype == torch.float32
    assert weight.size(0) == 20
    assert weight.dim() == 2
    assert not weight.is_cuda


def test_the_weight_of_a_nonlinear_layer_has_a_dtype_and_no_numbers() -> None:
    layer = FORMS["cola"]()
    assert layer.weight.dtype == torch.float32
    with pytest.raises(TensorizeError, match="is no matrix"):
        layer.weight.sum()


@ways
@all_forms
def test_forward_mode(name: str) -> None:
    torch.manual_seed(0)
    layer = FORMS[name](dtype=torch.float64)
    x, direction = torch.randn(2, 3, 12, dtype=torch.float64)
    with torch.autograd.forward_ad.dual_level():
        y = layer(torch.autograd.forward_ad.make_dual(x, direction))
        found = torch.autograd.forward_ad.unpack_dual(y).tangent
    expected = torch.func.jvp(lambda each: reference(layer, each), (x,), (direction,))[1]
    torch.testing.assert_close(found, expected)


@all_forms
def test_layers_of_fake_tensors(name: str) -> None:
    with FakeTensorMode():
        layer = FORMS[name]()
        layer.reset_parameters()
        y = layer(torch.randn(3, 12))
        y.sum().backward()
    assert y.shape == (3, 20)


def test_large_layers_have_numbers_whose_count_no_integer_holds() -> None:
    layer = TTLinear(4096, 4096, 256, cores=4, device="meta")
    assert layer.network.size(layer.network.bonds + "abcdABCD") > 2**63
    small = TTLinear(64, 64, 64, cores=6)
    assert small.to_dense().square().mean().sqrt().item() == pytest.approx(
        1 / math.sqrt(3 * 64), rel=0.3
    )


def test_copies_within_merged_keep_nothing() -> None:
    layer = FORMS["tt"]()
    x = torch.randn(1, 12)
    with torch.no_grad(), merged(layer):
        layer(x)
        copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    for other in copies:
        assert isinstance(other, CoredLinear)
        assert other._merged is None
        torch.testing.assert_close(other(x), layer(x))


def test_a_form_with_a_nonlinearity_has_no_dense_weight() -> None:
    with pytest.raises(TensorizeError, match="is no matrix"):
        FORMS["cola"]().to_dense()


@pytest.mark.parametrize(
    "build",
    [
        lambda: LowRankLinear(4, 4, 0),
        lambda: BTTLinear(4, 4, 0),
        lambda: TTLinear(4, 4, 0),
        lambda: TTLinear(4, 4, (1, 2), 2),
        lambda: TTMLinear(4, 4, 2, in_modes=(2, 2), out_modes=(4,)),
        lambda: TTMLinear(8, 4, 2, in_modes=(2, 2), out_modes=(2, 2)),
        lambda: CPLinear(4, 4, 0),
        lambda: TuckerLinear(4, 4, (1, 2)),
        lambda: TuckerLinear(4, 4, 0),
        lambda: MonarchLinear(4, 4, 5),
        lambda: LowRankLinear(4, 4, 2.0),
        lambda: LowRankLinear(4, 4, (2,)),
        lambda: LowRankLinear(0, 4, 2),
        lambda: BottleneckLinear(4, 4, True),
        lambda: BTTLinear(4, 4, 1.5),
        lambda: BTTLinear(8, 4, 1, in_modes=(2, 2, 2)),
        lambda: BTTLinear(8, 4, 1, in_modes=(-2, -4)),
        lambda: TTLinear(4, 4, 2.0),
        lambda: TTLinear(4, 4, (2, 1.5, 2), 2),
        lambda: TTLinear(4096, 4096, 2, 13),
        lambda: TTLinear(4096, 4096, 2, 10),
        lambda: TTLinear(4, 4, 2, 0),
        lambda: TTLinear(4, 4, 2, 2.0),
        lambda: TTLinear(4, 4, 2, in_modes=(-2, -2)),
        lambda: TTLinear(4, 4, 2, in_modes=()),
        lambda: TTMLinear(4, 4, "2"),
        lambda: TTMLinear(4, 4, 2, 13),
        lambda: TTMEmbedding(4096, 4096, 2, 13),
        lambda: LowRankEmbedding(4, 4, 2.0),
        lambda: TuckerLinear(4, 4, 2, 13),
        lambda: TuckerLinear(4, 4, 2.5),
        lambda: CPLinear(4, 4, 2, 13),
        lambda: CPLinear(4, 4, (2, 2)),
        lambda: BottleneckLinear(4, 4, 2, "sine"),
        lambda: LatentLinear(4, 4, 2, "sine"),
        lambda: SparseLowRankLinear(4, 4, 2, 0.0),
    ],
)
def test_settings_that_make_no_layer_are_refused(build: Callable[[], Any]) -> None:
    with pytest.raises(TensorizeError):
        build()


features = st.integers(2, 60)


@settings(max_examples=25, deadline=None)
@given(features, features, st.integers(1, 8), st.integers(1, 3), st.data())
def test_parameters_of_trains_by_their_formulas(
    into: int, out: int, rank: int, cores: int, data: st.DataObject
) -> None:
    layer: CoredLinear = TTLinear(into, out, rank, cores, device="meta", bias=False)
    settings = layer.settings()
    modes = (*settings["in_modes"], *settings["out_modes"])
    ranks = layer.rank if isinstance(layer.rank, tuple) else (layer.rank,) * (len(modes) - 1)
    ends = (1, *ranks, 1)
    expected = sum(ends[k] * mode * ends[k + 1] for k, mode in enumerate(modes))
    assert sum(map(Tensor.numel, layer.parameters())) == expected == layer.network.parameters
    layer = TTMLinear(into, out, rank, cores, device="meta", bias=False)
    settings = layer.settings()
    pairs = list(zip(settings["in_modes"], settings["out_modes"], strict=True))
    ranks = layer.rank if isinstance(layer.rank, tuple) else (layer.rank,) * (len(pairs) - 1)
    ends = (1, *ranks, 1)
    expected = sum(ends[k] * a * b * ends[k + 1] for k, (a, b) in enumerate(pairs))
    assert sum(map(Tensor.numel, layer.parameters())) == expected


@settings(max_examples=25, deadline=None)
@given(features, features, st.integers(1, 8))
def test_parameters_of_two_factor_forms_by_their_formulas(into: int, out: int, rank: int) -> None:
    def count(layer: nn.Module) -> int:
        return sum(map(Tensor.numel, layer.parameters()))

    options: dict[str, Any] = {"bias": False, "device": "meta"}
    for kind in (LowRankLinear, BottleneckLinear, LatentLinear):
        assert count(kind(into, out, rank, **options)) == rank * (into + out)
    sparse = SparseLowRankLinear(into, out, rank, 0.1, **options)
    assert count(sparse) == rank * (into + out) + max(1, round(0.1 * into * out))
    block = BTTLinear(into, out, rank, **options)
    (m1, m0), (n0, n1) = block.settings()["in_modes"], block.settings()["out_modes"]
    assert count(block) == rank * (m1 * m0 * n0 + n0 * n1 * m1)
    terms = CPLinear(into, out, rank, **options)
    modes = (*terms.settings()["in_modes"], *terms.settings()["out_modes"])
    assert count(terms) == rank * sum(modes)
    tucker = TuckerLinear(into, out, rank, **options)
    modes = (*tucker.settings()["in_modes"], *tucker.settings()["out_modes"])
    ranks = [min(rank, mode) for mode in modes]
    assert count(tucker) == math.prod(ranks) + sum(
        one * mode for one, mode in zip(ranks, modes, strict=True)
    )


@pytest.mark.parametrize(("width", "blocks"), [(512, 8), (1024, 16), (4096, 32)])
def test_parameters_of_a_square_monarch_layer(width: int, blocks: int) -> None:
    layer = MonarchLinear(width, width, blocks, bias=False, device="meta")
    assert sum(map(Tensor.numel, layer.parameters())) == 2 * width**2 // blocks


def test_monarch_is_two_block_diagonal_matrices_and_a_transposition() -> None:
    torch.manual_seed(0)
    layer = MonarchLinear(8, 8, 2, bias=False, dtype=torch.float64)
    right, left = layer.cores
    first = torch.block_diag(*right.reshape(2, 4, 4))
    second = torch.block_diag(*left.reshape(2, 4, 4))
    # (block, n, r) -> (n, block, r)
    order = torch.arange(8).reshape(2, 2, 2).transpose(0, 1).flatten()
    torch.testing.assert_close(layer.to_dense(), second @ first[order])


@pytest.mark.parametrize("name", ["tt", "ttm", "btt", "tucker", "cp"])
def test_merged_cores_are_kept_until_they_change(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outlast.tensorize import operator

    made = []
    path = operator.MergedPath
    monkeypatch.setattr(operator, "MergedPath", lambda *given: made.append(1) or path(*given))
    layer = FORMS[name](dtype=torch.float64).eval()
    x = torch.randn(1, 12, dtype=torch.float64)
    with torch.no_grad(), merged(layer):
        torch.testing.assert_close(layer(x), reference(layer, x))
        layer(x)
        assert len(made) == 1
        layer.factors()[-1].mul_(2.0)
        torch.testing.assert_close(layer(x), reference(layer, x))
        layer.load_state_dict(FORMS[name](dtype=torch.float64).state_dict())
        torch.testing.assert_close(layer(x), reference(layer, x))
        layer.to(torch.float32)
        torch.testing.assert_close(layer(x.float()), reference(layer, x.float()))
        assert len(made) == 4
    with merged(layer):
        x32 = x.float().requires_grad_()
        layer(x32).sum().backward()
        assert layer.factors()[0].grad is not None
    layer(x.float())
    assert layer._merged is None


def test_merged_cores_that_are_computed_are_computed_every_time() -> None:
    class Doubled(nn.Module):
        def forward(self, core: Tensor) -> Tensor:
            return core * 2

    layer = FORMS["tt"](dtype=torch.float64)
    x = torch.randn(1, 12, dtype=torch.float64)
    with torch.no_grad(), merged(layer):
        y = layer(x)
        assert isinstance(layer, CoredLinear)
        nn.utils.parametrize.register_parametrization(layer.cores, "1", Doubled())
        for factor in (2.0, 4.0, 8.0):
            torch.testing.assert_close(layer(x) - layer.bias, factor * (y - layer.bias))
            layer.cores.parametrizations["1"].original.mul_(2.0)


def test_merged_cores_follow_a_change_of_rank() -> None:
    layer = BTTLinear(12, 20, 2, dtype=torch.float64)
    x = torch.randn(1, 12, dtype=torch.float64)
    with torch.no_grad(), merged(layer):
        layer(x)
        resize(layer, 1)
        torch.testing.assert_close(layer(x), reference(layer, x))
