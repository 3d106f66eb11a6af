import itertools
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outlast.errors import TensorizeError
from outlast.hardware.figure import Unavailable
from outlast.tensorize.cost import LAWS, OBSERVATIONS, effective_parameters, layer_cost, step_ratio
from outlast.tensorize.network import Route, lower
from outlast.tensorize.route_search import route_flops
from outlast.tensorize.shapes import FORMS

SIZES = [(64, 64), (48, 80), (97, 60), (512, 1376)]


def _layer(form: str, into: int, out: int, rank: int) -> nn.Module:
    with torch.device("meta"):
        return FORMS[form].build(into, out, rank, {"bias": False})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("into", "out"), SIZES)
def test_parameters_are_those_of_the_layer(form: str, into: int, out: int) -> None:
    for rank in (2, 5):
        layer = _layer(form, into, out, rank)
        cost = layer_cost(form, into, out, rank, cores=FORMS[form].modes or 3)
        assert cost.parameters == sum(parameter.numel() for parameter in layer.parameters())


@pytest.mark.parametrize(
    "form", ["low_rank", "cola", "tt", "ttm", "btt", "monarch", "cp", "tucker"]
)
@pytest.mark.parametrize(("into", "out"), SIZES)
def test_operations_are_those_of_a_route(form: str, into: int, out: int) -> None:
    network = _layer(form, into, out, 2).network
    cost = layer_cost(form, into, out, 2, cores=FORMS[form].modes or 3)
    found = {route_flops(network, route): route for route in _routes(len(network.cores))}
    two_factors = form in ("low_rank", "cola")
    assert cost.forward_flops_per_token == (2 * 2 * (into + out) if two_factors else min(found))
    if two_factors:
        return
    cheapest = []
    for route in _routes(len(network.cores)):
        stages = lower(network, route).stages
        sizes = [2 * stage.b * stage.m * stage.k * stage.f for stage in stages]
        narrow = all(2 * stage.width <= into for stage in stages[1:])
        kept = sum(stage.width for stage in stages[1:]) if narrow else 0
        cheapest.append((3 * sum(sizes) + (0 if narrow else sum(sizes[:-1])), kept))
    assert cost.training_flops_per_token == min(cheapest)[0]
    assert (cost.training_flops_per_token, cost.kept_values_per_token) in cheapest


def _routes(cores: int) -> list[Route]:
    """All ways to merge neighbours, in both directions."""
    found = []
    for cuts in itertools.product((False, True), repeat=cores - 1):
        places = [0, *(place for place, cut in enumerate(cuts, 1) if cut), cores]
        groups = tuple(end - begin for begin, end in itertools.pairwise(places))
        found += [Route(groups), Route(groups, backwards=True)]
    return found


def test_low_rank_keeps_what_is_between_if_it_is_narrow() -> None:
    assert layer_cost("low_rank", 64, 64, 32).kept_values_per_token == 32
    wide = layer_cost("low_rank", 64, 64, 33)
    assert wide.kept_values_per_token == 0
    assert wide.training_flops_per_token == 3 * wide.forward_flops_per_token + 2 * 64 * 33
    assert layer_cost("cola", 64, 64, 33).kept_values_per_token == 33


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from([form for form in FORMS if form != "monarch"]),
    st.integers(2, 2000),
    st.integers(2, 2000),
    st.integers(1, 100),
)
def test_a_larger_rank_never_has_fewer_parameters(
    form: str, into: int, out: int, rank: int
) -> None:
    modes = FORMS[form].modes or 3
    smaller = layer_cost(form, into, out, rank, cores=modes)
    larger = layer_cost(form, into, out, rank + 1, cores=modes)
    assert larger.parameters >= smaller.parameters
    assert larger.forward_flops_per_token >= smaller.forward_flops_per_token


def test_a_quarter_rank_halves_a_square_layer() -> None:
    dense, cola = layer_cost("dense", 2048, 2048), layer_cost("cola", 2048, 2048, 512)
    assert cola.parameters * 2 == dense.parameters
    assert cola.training_flops_per_token * 2 == dense.training_flops_per_token
    assert cola.kept_bytes(4096, 4.0) == 4096 * 512 * 4
    assert layer_cost("btt", 2048, 2048, 2).kept_values_per_token == 0


def test_step_ratio_is_amdahls() -> None:
    assert step_ratio(linear_share=1.0, flops_ratio=0.5) == 0.5
    assert step_ratio(linear_share=0.8, flops_ratio=0.4, efficiency=0.8) == pytest.approx(0.6)
    assert step_ratio(linear_share=0.0, flops_ratio=0.1) == 1.0
    with pytest.raises(TensorizeError, match="linear_share"):
        step_ratio(linear_share=1.5, flops_ratio=0.1)


def test_wrong_layers_are_refused() -> None:
    with pytest.raises(TensorizeError, match="form = 'svd' is not one of"):
        layer_cost("svd", 4, 4, 1)
    with pytest.raises(TensorizeError, match="rank = 0"):
        layer_cost("tt", 4, 4, 0)


def test_effective_parameters_solve_the_scaling_law() -> None:
    one = next(one for one in OBSERVATIONS if one.form == "cola" and one.share == 0.3)
    for law, (scale, exponent) in LAWS.items():
        smaller = one.parameters * one.ratio(law)
        gap = scale * (smaller**-exponent - one.parameters**-exponent)
        assert gap == pytest.approx(math.log(one.perplexity / one.dense_perplexity))
        assert one.ratio(law) < 1.0


def test_cola_is_about_as_good_as_dense_and_low_rank_is_not() -> None:
    cola = effective_parameters("cola", 0.395, 134e6)
    low_rank = effective_parameters("low_rank", 0.4, 134e6)
    assert not isinstance(cola, Unavailable)
    assert not isinstance(low_rank, Unavailable)
    assert cola.low < cola.value < cola.high
    assert cola.low < 0.75 * 134e6 < 134e6 < cola.high
    assert low_rank.ratio < 0.2
    assert not cola.extrapolated
    assert "2502.10940" in cola.source
    assert "derived" in cola.kind
    assert "unverified" in cola.source
    assert "unverified" not in low_rank.source


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["cola", "low_rank", "sltrain"]), st.floats(0.01, 0.99))
def test_fewer_parameters_are_never_worth_more(form: str, share: float) -> None:
    less = effective_parameters(form, share, 134e6)
    more = effective_parameters(form, min(1.0, share * 1.05), 134e6)
    assert not isinstance(less, Unavailable)
    assert not isinstance(more, Unavailable)
    assert less.low <= less.value <= less.high
    assert less.low <= more.low * (1 + 1e-9)
    assert less.value <= more.value * (1 + 1e-9)


def test_what_nobody_measured_is_said() -> None:
    beyond = effective_parameters("cola", 0.02, 134e6)
    large = effective_parameters("cola", 0.4, 70e9)
    assert not isinstance(beyond, Unavailable)
    assert not isinstance(large, Unavailable)
    assert beyond.extrapolated
    assert large.extrapolated
    nothing = effective_parameters("monarch", 0.4, 134e6)
    assert isinstance(nothing, Unavailable)
    assert "monarch" in nothing.reason
    dense = effective_parameters("dense", 1.0, 5e9)
    assert not isinstance(dense, Unavailable)
    assert dense.value == dense.low == dense.high == 5e9
    with pytest.raises(TensorizeError, match="share = 0"):
        effective_parameters("cola", 0.0, 134e6)


def test_no_torch_is_needed() -> None:
    program = (
        "import sys, outlast.tensorize, outlast.tensorize.cost; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
