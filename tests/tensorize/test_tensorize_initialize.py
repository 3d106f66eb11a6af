"""Layers start with the variance of the dense weight that they replace."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outlast.errors import TensorizeError
from outlast.tensorize.initialize import activation_gain, core_stds, fans, initialize_, squared_norm
from outlast.tensorize.layer import BTTLinear, TTLinear, TTMLinear
from outlast.tensorize.low_rank import BottleneckLinear, LowRankLinear, low_rank_network
from outlast.tensorize.network import Network, block_network, train_matrix_network, train_network

MODES = st.tuples(st.integers(2, 9), st.integers(2, 9), st.integers(2, 9))


def _two_factor(data: st.DataObject) -> Network:
    sizes = st.integers(8, 200)
    return low_rank_network(data.draw(sizes), data.draw(sizes), data.draw(st.integers(1, 40)))


def _train(data: st.DataObject) -> Network:
    into, out = data.draw(MODES), data.draw(MODES)
    rank = data.draw(st.integers(1, 12))
    sizes = math.prod(into), math.prod(out)
    return train_network(*sizes, rank, in_modes=into, out_modes=out)


def _train_matrix(data: st.DataObject) -> Network:
    into, out = data.draw(MODES), data.draw(MODES)
    rank = data.draw(st.integers(1, 12))
    sizes = math.prod(into), math.prod(out)
    return train_matrix_network(*sizes, rank, in_modes=into, out_modes=out)


def _block(data: st.DataObject) -> Network:
    into, out = data.draw(MODES)[:2], data.draw(MODES)[:2]
    rank = data.draw(st.integers(1, 6))
    sizes = math.prod(into), math.prod(out)
    return block_network(*sizes, rank, in_modes=into, out_modes=out)


FORMS = [_two_factor, _train, _train_matrix, _block]


def _product(factors: list[Tensor], network: Network) -> Tensor:
    equation = f"{','.join(network.cores)}->{network.outputs}{network.inputs}"
    product = torch.einsum(equation, *factors)
    return product.reshape(network.size(network.outputs), network.size(network.inputs))


def _drawn(network: Network, std: float, generator: torch.Generator) -> list[Tensor]:
    factors = [torch.empty(network.shape(core)) for core in range(len(network.cores))]
    initialize_(factors, network, std, generator)
    return factors


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), std=st.floats(1e-3, 10.0), seed=st.integers(0, 2**31))
def test_product_has_the_deviation_that_was_asked_for(
    form: object, data: st.DataObject, std: float, seed: int
) -> None:
    network = form(data)  # type: ignore[operator]
    weight = _product(_drawn(network, std, torch.Generator().manual_seed(seed)), network)
    assert weight.square().mean().sqrt().item() == pytest.approx(std, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), std=st.floats(1e-3, 10.0))
def test_variances_multiply_to_the_target(form: object, data: st.DataObject, std: float) -> None:
    network = form(data)  # type: ignore[operator]
    deviations = core_stds(network, std)
    variance = math.prod(each**2 for each in deviations) * network.size(network.bonds)
    assert variance == pytest.approx(std**2, rel=1e-9)


def test_no_form_varies_more_than_its_deviations_say() -> None:
    # The law itself, without the correction of small cores: the mean over many draws.
    generator = torch.Generator().manual_seed(0)
    sizes = (("a", 2), ("b", 4), ("c", 3), ("d", 2), ("r", 5))
    networks = [
        low_rank_network(6, 5, 3),
        train_network(8, 6, 3, in_modes=(2, 4), out_modes=(3, 2)),
        train_matrix_network(8, 6, 3, in_modes=(2, 4), out_modes=(3, 2)),
        block_network(8, 6, 3, in_modes=(2, 4), out_modes=(3, 2)),
        Network("ab", "cd", ("ra", "rb", "rc", "rd"), sizes, 8, 6),
    ]
    for network in networks:
        squares = 0.0
        for _ in range(500):
            factors = [
                torch.randn(network.shape(core), generator=generator) * deviation
                for core, deviation in enumerate(core_stds(network, 0.3))
            ]
            squares += _product(factors, network).square().mean().item() / 500
        assert math.sqrt(squares) == pytest.approx(0.3, rel=0.1)


def test_unit_features_stay_so_up_to_the_last_core() -> None:
    network = train_network(4096, 4096, 16, in_modes=(16, 16, 16), out_modes=(16, 16, 16))
    x = torch.randn(64, 16, 16, 16, generator=torch.Generator().manual_seed(1))
    factors = _drawn(network, 1 / math.sqrt(4096), torch.Generator().manual_seed(2))
    x = torch.einsum("tabc,ap->tpbc", x, factors[0])
    for core in factors[1:3]:
        x = torch.einsum("tpbc,pbq->tqc" if x.ndim == 4 else "tqc,qcr->tr", x, core)
        assert x.square().mean().sqrt().item() == pytest.approx(1.0, rel=0.25)


def test_fans_count_summed_and_new_features() -> None:
    assert fans(low_rank_network(20, 30, 5)) == ((20, 5), (5, 30))
    # m1 = 2 blocks of 4 inputs each; 3 blocks of 2 outputs each; rank 3.
    block = block_network(8, 6, 3, in_modes=(2, 4), out_modes=(3, 2))
    assert fans(block) == ((4, 3 * 3), (2 * 3, 2))


@pytest.mark.parametrize(
    ("activation", "square"),
    [("silu", 0.35578), ("relu", 0.5), ("gelu", 0.42522), ("tanh", 0.39429)],
)
def test_gain_is_the_root_mean_square_after_the_activation(activation: str, square: float) -> None:
    assert activation_gain(activation) ** 2 == pytest.approx(square, abs=1e-5)


@pytest.mark.parametrize("activation", ["silu", "relu", "tanh"])
@pytest.mark.parametrize("shape", [(256, 384, 96), (300, 200, 50)])
def test_outputs_after_a_nonlinearity_vary_as_those_of_the_dense_layer(
    activation: str, shape: tuple[int, int, int]
) -> None:
    torch.manual_seed(3)
    layer = BottleneckLinear(*shape, activation, bias=False)
    layer.reset_parameters(0.05)
    x = torch.randn(2000, shape[0])
    dense = torch.randn(shape[1], shape[0]) * 0.05
    with torch.no_grad():
        assert layer(x).std().item() == pytest.approx((x @ dense.T).std().item(), rel=0.05)


def test_gain_is_taken_from_the_last_core_alone() -> None:
    network = low_rank_network(64, 32, 8)
    plain, active = core_stds(network, 0.1), core_stds(network, 0.1, activation_gain("silu"))
    assert plain[0] == active[0] == 1 / 8
    assert active[1] == pytest.approx(plain[1] / math.sqrt(0.35578), rel=1e-4)


@pytest.mark.parametrize("shape", [(97, 113), (61, 40), (127, 86)])
def test_layers_whose_features_do_not_factor_have_it_too(shape: tuple[int, int]) -> None:
    torch.manual_seed(6)
    for layer in (TTLinear(*shape, 8), TTMLinear(*shape, 8), BTTLinear(*shape, 2)):
        layer.reset_parameters(0.04)
        weight = layer.to_dense()
        assert weight.shape == shape[::-1]
        assert weight.square().mean().sqrt().item() == pytest.approx(0.04, rel=0.05)
        # The same for what the layer makes of white noise.
        x = torch.randn(2000, shape[0])
        y = torch.nn.functional.linear(x, weight)
        assert y.square().mean().sqrt().item() == pytest.approx(0.04 * shape[0] ** 0.5, rel=0.05)


def test_zero_weight_has_only_its_last_core_zero() -> None:
    network = train_network(27, 27, 4, in_modes=(3, 3, 3), out_modes=(3, 3, 3))
    factors = _drawn(network, 0.0, torch.Generator().manual_seed(0))
    assert [bool(factor.any()) for factor in factors] == [True] * 5 + [False]
    layer = LowRankLinear(12, 10, 4, bias=False)
    layer.reset_parameters(0.0)
    layer(torch.randn(3, 12)).square().sum().backward()
    loss = (layer(torch.randn(3, 12)) - 1.0).square().sum()
    loss.backward()
    assert layer.up.weight.grad is not None
    assert layer.up.weight.grad.any()


def test_generator_and_meta_device() -> None:
    network = low_rank_network(30, 20, 5)
    drawn = [_drawn(network, 0.1, torch.Generator().manual_seed(5)) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))
    meta = [torch.empty(network.shape(core), device="meta") for core in range(2)]
    initialize_(meta, network, 0.1)


def test_more_terms_than_integers_of_64_bits_count() -> None:
    # 2^88 products of entries make this weight.
    network = train_network(4096, 4096, 256, in_modes=(8,) * 4, out_modes=(8,) * 4)
    small = train_network(64, 64, 64, in_modes=(2,) * 6, out_modes=(2,) * 6)
    assert network.size("abcdABCD" + network.bonds) > 2**63
    initialize_([torch.empty(network.shape(core), device="meta") for core in range(8)], network, 1)
    weight = _product(_drawn(small, 0.3, torch.Generator().manual_seed(0)), small)
    assert weight.square().mean().sqrt().item() == pytest.approx(0.3, rel=0.05)
    many = train_network(2**8, 2**8, 48, in_modes=(2,) * 8, out_modes=(2,) * 8)
    assert many.size(many.inputs + many.outputs + many.bonds) > 2**63
    factors = _drawn(many, 0.3, torch.Generator().manual_seed(0))
    norm = squared_norm([factor.double() for factor in factors], many)
    assert (norm / 2**16).sqrt().item() == pytest.approx(0.3, rel=0.05)


def test_short_types_are_scaled_in_float32() -> None:
    network = train_network(64, 64, 3, in_modes=(8, 8), out_modes=(8, 8))
    factors = [torch.empty(network.shape(core), dtype=torch.bfloat16) for core in range(4)]
    initialize_(factors, network, 1e-6)
    weight = _product([factor.double() for factor in factors], network)
    assert weight.square().mean().sqrt().item() == pytest.approx(1e-6, rel=0.05)


def test_what_cannot_be_is_refused() -> None:
    network = low_rank_network(30, 20, 5)
    with pytest.raises(TensorizeError, match="std = -1"):
        core_stds(network, -1.0)
    with pytest.raises(TensorizeError, match="activation_gain = 0"):
        core_stds(network, 1.0, 0.0)
    with pytest.raises(TensorizeError, match="'swish' is not one of silu"):
        activation_gain("swish")
    with pytest.raises(TensorizeError, match=r"\(5, 30\)"):
        initialize_([torch.empty(30, 5), torch.empty(20, 5)], network, 1.0)
