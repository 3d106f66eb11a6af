import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from outlast.errors import TensorizeError
from outlast.hardware.figure import Unavailable
from outlast.tensorize.accounting import (
    account,
    backward_flops,
    counted_flops,
    factor_numbers,
    forward_flops,
    kept_bytes,
    merge_flops,
)
from outlast.tensorize.contraction import LayerPlan
from outlast.tensorize.cost import layer_cost
from outlast.tensorize.layer import BTTLinear, TTLinear, TTMLinear
from outlast.tensorize.low_rank import BottleneckLinear, LowRankLinear
from outlast.tensorize.network import Route, dense_route
from outlast.tensorize.operator import chain
from outlast.tensorize.route_search import route_flops
from outlast.tensorize.shapes import FORMS

TOKENS = 512


def _both(layer: nn.Module, tokens: int = TOKENS) -> int:
    x = torch.randn(tokens, layer.in_features, requires_grad=True)
    return counted_flops(lambda: layer(x).sum().backward())


@pytest.mark.parametrize("kind", [LowRankLinear, BottleneckLinear])
@pytest.mark.parametrize(("into", "out", "rank"), [(96, 96, 24), (96, 40, 10), (64, 128, 32)])
def test_formula_and_counter_agree(kind: type[nn.Module], into: int, out: int, rank: int) -> None:
    layer = kind(into, out, rank)
    formula = layer_cost(layer.form, into, out, rank).training_flops_per_token * TOKENS
    assert formula == 6 * rank * (into + out) * TOKENS
    assert _both(layer) == formula


def test_the_counter_of_torch_agrees_as_it_stands() -> None:
    layer = BottleneckLinear(96, 96, 24)
    x = torch.randn(TOKENS, 96, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    assert counter.get_total_flops() == 6 * 24 * 192 * TOKENS


@pytest.mark.parametrize(
    "route",
    [
        Route((1, 1)),
        Route((2,)),
        Route((1, 1), layout="features"),
        Route((1, 1), layout="features", chunk=64),
        Route((1, 1), chunk=100),
        Route((1, 1), backwards=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("want_x", [True, False])
def test_block_routes_are_counted_exactly(route: Route, want_x: bool) -> None:
    layer = BTTLinear(64, 96, 2, bias=False)
    plan = LayerPlan.uniform(route, 2)
    x = torch.randn(TOKENS, 64, requires_grad=want_x)
    counted = counted_flops(
        lambda: chain(x, layer.factors(), layer.network, plan=plan).sum().backward()
    )
    expected = forward_flops(layer.network, plan, TOKENS)
    expected += backward_flops(layer.network, plan, TOKENS, want_x=want_x)
    assert counted == expected


@pytest.mark.parametrize("groups", [(3, 3), (1, 5), (2, 2, 2), (1, 1, 1, 1, 1, 1), (6,)])
@pytest.mark.parametrize("plain", [True, False])
def test_merging_is_counted(groups: tuple[int, ...], plain: bool) -> None:
    layer = TTLinear(64, 60, 6, bias=False)
    plan = LayerPlan.uniform(Route(groups), 6, plain=plain)
    x = torch.randn(TOKENS, 64, requires_grad=True)
    counted = counted_flops(
        lambda: chain(x, layer.factors(), layer.network, plan=plan).sum().backward()
    )
    expected = forward_flops(layer.network, plan, TOKENS)
    expected += backward_flops(layer.network, plan, TOKENS)
    assert counted == expected


def test_only_what_is_asked_for_is_counted() -> None:
    layer = TTLinear(64, 64, 8, bias=False)
    for core in list(layer.cores)[1:]:
        core.requires_grad_(False)
    plan = LayerPlan.uniform(Route((3, 3)), 6)
    x = torch.randn(TOKENS, 64)
    counted = counted_flops(
        lambda: chain(x, layer.factors(), layer.network, plan=plan).sum().backward()
    )
    expected = forward_flops(layer.network, plan, TOKENS)
    expected += backward_flops(layer.network, plan, TOKENS, want_x=False, wanted=[0])
    assert counted == expected


def test_rebuilding_costs_as_much_as_dense() -> None:
    layer = TTMLinear(64, 64, 4)
    assert route_flops(layer.network, dense_route(layer.network)) == 2 * 64 * 64
    assert merge_flops(layer.network, dense_route(layer.network)) > 0
    assert merge_flops(layer.network, Route((1, 1, 1))) == 0


def test_the_operator_that_compilers_see_has_formulas() -> None:
    layer = LowRankLinear(96, 96, 24, bias=False)
    x = torch.randn(TOKENS, 96, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        y = torch.ops.outlast.chain(x, list(layer.factors()), str(layer.network))
        y.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    assert set(counts) == {torch.ops.outlast.chain, torch.ops.outlast.chain_backward}
    assert counts[torch.ops.outlast.chain] == 2 * 24 * 192 * TOKENS
    # The operator keeps x alone, so the narrow product comes again.
    narrow = 2 * 24 * 96 * TOKENS
    assert counts[torch.ops.outlast.chain_backward] in (
        4 * 24 * 192 * TOKENS,
        4 * 24 * 192 * TOKENS + narrow,
    )


@pytest.mark.parametrize("form", ["low_rank", "cola"])
def test_narrow_layers_keep_what_the_formula_says(form: str) -> None:
    layer = FORMS[form].build(128, 128, 16, {"bias": True})
    x = torch.randn(TOKENS, 128, requires_grad=True)
    kept = kept_bytes(lambda: layer(x), [x, *layer.parameters()])
    assert kept == layer_cost(form, 128, 128, 16).kept_bytes(TOKENS, 4.0)


def test_a_train_keeps_what_is_between_its_halves() -> None:
    layer = TTLinear(128, 128, 16, bias=False)
    x = torch.randn(TOKENS, 128, requires_grad=True)
    plan = LayerPlan.uniform(Route((3, 3)), 6)
    kept = kept_bytes(
        lambda: chain(x, layer.factors(), layer.network, plan=plan), [x, *layer.cores]
    )
    assert kept == layer_cost("tt", 128, 128, 16).kept_bytes(TOKENS, 4.0)


def test_memory_that_is_shared_counts_once() -> None:
    x = torch.randn(10, 10, requires_grad=True)
    assert kept_bytes(lambda: x * x) == 400
    assert kept_bytes(lambda: x * x, [x]) == 0
    assert kept_bytes(lambda: (x.exp() * 2).exp()) == 800


def test_account_of_a_model() -> None:
    model = nn.Sequential(LowRankLinear(64, 64, 8), nn.Linear(64, 8))
    x = torch.randn(256, 64)
    model[1].weight.grad = torch.ones(8, 64)
    readings = iter([10.0, 16.0])
    found = account(
        model, lambda: model(x).sum(), tokens=256, repeats=3, joules=lambda: next(readings)
    )
    assert found.parameters == 2 * 64 * 8 + 64 + 64 * 8 + 8
    assert found.factor_parameters == factor_numbers(model) == 1024
    # x needs no gradient: of the first product, that of its weight alone.
    assert found.flops_per_token == 6 * 1024 - 2 * 64 * 8 + 6 * 64 * 8
    assert found.joules_per_token == pytest.approx(6.0 / 3 / 256)
    assert found.tokens_per_s > 0
    assert torch.equal(model[1].weight.grad, torch.ones(8, 64))
    assert model[0].up.weight.grad is None
    assert "(measured)" in str(found)


def test_energy_without_a_meter_is_unavailable() -> None:
    model = LowRankLinear(32, 32, 4)
    x = torch.randn(8, 32)
    found = account(model, lambda: model(x).sum(), tokens=8, repeats=1)
    assert isinstance(found.joules_per_token, Unavailable)
    assert "unavailable: no meter" in str(found)


def test_tied_factors_count_once() -> None:
    layer = LowRankLinear(32, 32, 4)
    other = LowRankLinear(32, 32, 4)
    other.down.weight, other.up.weight = layer.down.weight, layer.up.weight
    assert factor_numbers(nn.ModuleList([layer, other])) == 256


def test_what_cannot_be_measured_is_refused() -> None:
    model = LowRankLinear(32, 32, 4)
    x = torch.randn(8, 32)
    with pytest.raises(TensorizeError, match="tokens = 0"):
        account(model, lambda: model(x).sum(), tokens=0)
    with pytest.raises(TensorizeError, match="no loss"):
        account(model, lambda: model(x), tokens=8)
