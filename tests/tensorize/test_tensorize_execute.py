from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outlast.tensorize.contraction import LayerPlan
from outlast.tensorize.execute import MergedPath
from outlast.tensorize.low_rank import low_rank_network
from outlast.tensorize.network import (
    Network,
    Route,
    block_network,
    cp_network,
    train_matrix_network,
    train_network,
    tucker_network,
)
from outlast.tensorize.operator import chain

NETWORKS = {
    "low_rank": low_rank_network(7, 9, 3),
    "dense": Network("i", "o", ("oi",), (("i", 5), ("o", 6)), 5, 6),
    "three factors": Network("i", "o", ("ri", "r", "or"), (("i", 5), ("r", 4), ("o", 6)), 5, 6),
    "btt": block_network(20, 28, 2, in_modes=(4, 5), out_modes=(7, 4)),
    "btt padded": block_network(19, 27, 3, in_modes=(4, 5), out_modes=(7, 4)),
    "tt padded": train_network(11, 30, (2, 3, 2), in_modes=(3, 4), out_modes=(5, 6)),
    "tt uneven": train_network(3, 10, 2, in_modes=(3,), out_modes=(5, 2)),
    "ttm": train_matrix_network(6, 30, 3, in_modes=(2, 3), out_modes=(5, 6)),
    "ttm padded": train_matrix_network(23, 29, 3, in_modes=(2, 3, 4), out_modes=(5, 2, 3)),
    "tucker": tucker_network(6, 8, (2, 3, 1, 2), in_modes=(2, 3), out_modes=(4, 2)),
    "cp": cp_network(6, 7, 3, in_modes=(2, 3), out_modes=(4, 2)),
}


def compositions(count: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut so many cores into groups of neighbours."""
    if count == 0:
        yield ()
    for first in range(1, count + 1):
        for rest in compositions(count - first):
            yield (first, *rest)


def routes(network: Network) -> Iterator[Route]:
    for groups in compositions(len(network.cores)):
        for backwards in (False, True):
            yield Route(groups, backwards, "tokens", 0)
            yield Route(groups, backwards, "features", 2)
            yield Route(groups, not backwards, "tokens", 2)
            yield Route(groups, not backwards, "features", 0)


def random_cores(network: Network) -> list[Tensor]:
    shapes = [network.shape(core) for core in range(len(network.cores))]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def dense(network: Network, cores: list[Tensor]) -> Tensor:
    """The weight by one einsum, in the definition's words."""
    equation = ",".join(network.cores) + "->" + network.outputs + network.inputs
    weight = torch.einsum(equation, *cores).reshape(network.size(network.outputs), -1)
    return weight[: network.out_features, : network.in_features]


def expect(network: Network, given_routes: list[Route], *, tokens: int, plain: bool) -> None:
    """Assert that y and all gradients are those of the dense weight."""
    cores = random_cores(network)
    x = torch.randn(tokens, network.in_features, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(network.out_features, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(tokens, network.out_features, dtype=torch.float64)
    y = x @ dense(network, cores).t() + bias
    wanted = torch.autograd.grad(y, [x, bias, *cores], dy)
    for route in given_routes:
        plan = LayerPlan.uniform(route, len(cores), plain=plain)
        found = chain(x, cores, network, bias, plan)
        gradients = torch.autograd.grad(found, [x, bias, *cores], dy)
        torch.testing.assert_close(found, y, atol=1e-10, rtol=0)
        for gradient, expected in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(gradient, expected, atol=1e-10, rtol=1e-10, msg=str(route))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("name", NETWORKS)
def test_all_routes_compute_the_dense_layer_and_its_gradients(
    name: str, tokens: int, plain: bool
) -> None:
    torch.manual_seed(0)
    expect(NETWORKS[name], list(routes(NETWORKS[name])), tokens=tokens, plain=plain)


@st.composite
def random_networks(draw: st.DrawFn) -> Network:
    """Cores that carry any letters, so that indices are shared, passed by and summed anywhere."""
    inputs = "abc"[: draw(st.integers(1, 3))]
    outputs = "ABC"[: draw(st.integers(1, 3))]
    count = draw(st.integers(1, 4))
    bonds = "pqr"[: draw(st.integers(0, 3)) if count > 1 else 0]
    cores = [""] * count
    for letter in draw(st.permutations(inputs + outputs + bonds)):
        least = 2 if letter in bonds else 1
        places = st.sets(st.integers(0, count - 1), min_size=least, max_size=min(count, 3))
        for core in sorted(draw(places)):
            cores[core] += letter
    cores = [core or inputs[0] for core in cores]
    sizes = tuple((letter, draw(st.integers(1, 3))) for letter in inputs + outputs + bonds)
    whole = Network(inputs, outputs, tuple(cores), sizes, 1, 1)
    into, out = whole.size(inputs), whole.size(outputs)
    padding = st.integers(0, 1)
    return Network(
        inputs,
        outputs,
        tuple(cores),
        sizes,
        max(1, into - draw(padding)),
        max(1, out - draw(padding)),
    )


@settings(max_examples=60, deadline=None)
@given(random_networks(), st.data())
def test_random_networks(network: Network, data: st.DataObject) -> None:
    torch.manual_seed(0)
    groups = data.draw(st.sampled_from(list(compositions(len(network.cores)))))
    layout = data.draw(st.sampled_from(["tokens", "features"]))
    route = Route(groups, data.draw(st.booleans()), layout, data.draw(st.integers(0, 3)))
    expect(network, [route], tokens=data.draw(st.integers(0, 4)), plain=data.draw(st.booleans()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_over_chunks_do_not_lose_half_precision(dtype: torch.dtype) -> None:
    # 1024 equal terms: added one chunk after the other in bfloat16 the sum would stop at 256.
    network = NETWORKS["btt"]
    cores = [torch.ones(network.shape(core), requires_grad=True) for core in range(2)]
    x = torch.full((1024, 20), 1 / 16, dtype=dtype)
    dy = torch.full((1024, 28), 1 / 64, dtype=dtype)
    y = chain(x, cores, network, None, LayerPlan.uniform(Route((1, 1), chunk=1), 2))
    chunked = torch.autograd.grad(y, cores, dy)
    y = chain(x.float(), cores, network, None, LayerPlan.uniform(Route((1, 1)), 2))
    for gradient, exact in zip(chunked, torch.autograd.grad(y, cores, dy.float()), strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, exact, rtol=0.02, atol=0)


def test_the_merged_matrices_have_the_dtype_of_x() -> None:
    network = NETWORKS["btt"]
    path = MergedPath(network, Route((1, 1)), random_cores(network), torch.float32)
    assert all(matrix.dtype == torch.float32 for matrix in path.matrices)
