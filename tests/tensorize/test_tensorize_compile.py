"""Layers under torch.compile: whole graphs, any number of tokens, and a legal custom operator."""

import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from test_tensorize_forms import FORMS, all_forms, as_function
from torch import Tensor, nn

from outlast.tensorize import LowRankEmbedding, TTEmbedding, TTMEmbedding
from outlast.tensorize.network import Network, block_network, train_network

NETWORKS = {
    "btt": block_network(20, 28, 2, in_modes=(4, 5), out_modes=(7, 4)),
    "tt padded": train_network(11, 29, (2, 3, 2), in_modes=(3, 4), out_modes=(5, 6)),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def gradients(layer: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """y, then the gradients of x and of all parameters."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = call(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y, x.grad, *(each.grad.clone() for each in layer.parameters())]  # type: ignore[union-attr]


@pytest.mark.slow
@all_forms
def test_one_graph_serves_any_number_of_tokens(name: str) -> None:
    layer = FORMS[name](dtype=torch.float64)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")

    def expect(*shape: int) -> None:
        x = torch.randn(*shape, 12, dtype=torch.float64)
        found, expected = gradients(layer, compiled, x), gradients(layer, layer, x)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)

    expect(5, 2)
    with torch.compiler.set_stance("fail_on_recompile"):
        for tokens in (70, 6, 700):
            expect(tokens, 2)
    for tokens in (1, 0):
        expect(tokens)


@pytest.mark.parametrize("name", ["tt", "btt", "cola", "sparse", "lax"])
def test_compiled_autocast(name: str) -> None:
    layer = FORMS[name]()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(40, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = compiled(x)
        expected = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("name", ["tt", "btt", "cola", "sparse"])
def test_compiled_without_gradients(name: str) -> None:
    layer = FORMS[name]()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 12)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tt", "btt", "cola", "sparse"])
def test_transforms_within_compiled_code(name: str) -> None:
    layer = FORMS[name](dtype=torch.float64)
    function, parameters = as_function(layer)
    x = torch.randn(4, 12, dtype=torch.float64)

    def gradient(*values: Tensor) -> tuple[Tensor, ...]:
        places = tuple(range(len(values)))
        return torch.func.grad(lambda *given: function(x, *given).square().sum(), places)(*values)

    found = torch.compile(gradient, fullgraph=True, backend="aot_eager")(*parameters)
    for one, other in zip(found, gradient(*parameters), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TTEmbedding, TTMEmbedding, LowRankEmbedding])
def test_embeddings(kind: type[TTEmbedding]) -> None:
    layer = kind(30, 8, 2, padding_idx=4, dtype=torch.float64)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((3, 4), (5, 30)):
        index = torch.randint(30, shape)
        found = torch.autograd.grad(compiled(index).pow(3).sum(), list(layer.parameters()))
        expected = torch.autograd.grad(layer(index).pow(3).sum(), list(layer.parameters()))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_operators_keep_the_rules_of_torch_library(name: str, tokens: int) -> None:
    network = NETWORKS[name]
    cores = [
        torch.randn(network.shape(core), requires_grad=True) for core in range(len(network.cores))
    ]
    x = torch.randn(tokens, network.in_features, requires_grad=True)
    torch.library.opcheck(torch.ops.outlast.chain.default, (x, cores, str(network)))
    dy = torch.randn(tokens, network.out_features)
    detached = [core.detach() for core in cores]
    torch.library.opcheck(
        torch.ops.outlast.chain_backward.default, (dy, x.detach(), detached, str(network))
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_the_operators_gradients_within_autocast_are_those_outside(name: str) -> None:
    network = NETWORKS[name]
    cores = [torch.randn(network.shape(core)) for core in range(len(network.cores))]
    given = torch.randn(70, network.out_features), torch.randn(70, network.in_features), cores
    outside = torch.ops.outlast.chain_backward(*given, str(network))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.ops.outlast.chain_backward(*given, str(network))
    assert all(torch.equal(*pair) for pair in zip(inside, outside, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["low_rank", "tt", "btt", "sparse"])
def test_the_weight_in_compiled_code(name: str) -> None:
    layer = FORMS[name]()

    def function(x: Tensor) -> Tensor:
        return layer(x.to(layer.weight.dtype)) + layer.weight.sum()

    x = torch.randn(3, 12, dtype=torch.float64)
    found = torch.compile(function, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, function(x))


def test_gradients_of_the_operator() -> None:
    network: Network = NETWORKS["tt padded"]
    cores = [
        torch.randn(network.shape(core), dtype=torch.float64, requires_grad=True)
        for core in range(len(network.cores))
    ]
    x = torch.randn(3, network.in_features, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor, *cores: Tensor) -> Tensor:
        y: Tensor = torch.ops.outlast.chain(x, list(cores), str(network))
        return y

    assert torch.autograd.gradcheck(function, (x, *cores), fast_mode=True)


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
def test_a_compiled_model_gives_what_the_compiler_generates_code_for() -> None:
    model = nn.Sequential(FORMS["btt"](), nn.GELU(), nn.LayerNorm(20), nn.Linear(20, 4))
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(9, 12)
    torch.testing.assert_close(compiled(x), model(x))
