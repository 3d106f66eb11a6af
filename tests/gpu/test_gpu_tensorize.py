"""The kernels of structured layers on a CUDA device, beside the same products in double."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from outlast.tensorize import BottleneckLinear, BTTLinear, LowRankLinear, MonarchLinear
from outlast.tensorize.bottleneck import bottleneck
from outlast.tensorize.kernels import available
from outlast.tensorize.layer import StructuredLinear
from outlast.tensorize.measure import warm, warm_model
from outlast.tensorize.planner import PLANS, READY, explain, kernel_seconds, plan_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(
        not available("cuda"), reason="no Triton (pip install 'outlast[gpu]'), or an old device"
    ),
]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BOTTLENECKS = (
    (1, 33, 5, 7),
    (17, 130, 48, 70),
    (64, 70, 128, 333),
    (8192, 2048, 64, 2048),
    (8192, 2048, 128, 2048),
    (1021, 768, 256, 3072),  # does not fit in fp32
)
"""Tokens, inputs, rank and outputs."""
BLOCKS = (
    (1, (3, 5), (2, 7), 1),
    (17, (4, 16), (3, 33), 5),
    (8192, (8, 256), (8, 256), 32),
    (8192, (32, 64), (32, 64), 2),
    (1021, (16, 48), (48, 64), 4),
)
"""Tokens, (m1, m0), (n0, n1) and rank."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda h: h,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "gelu": functional.gelu,
}


@pytest.fixture(autouse=True)
def tf32() -> Iterator[None]:
    """Products of fp32 on matrix units, which is where the kernels are of use."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    yield
    matmul.fp32_precision = before


def normal(seed: int, *sizes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    drawn = [torch.randn(*size, generator=generator, device="cuda") for size in sizes]
    return [(each / each.shape[-1] ** 0.25).to(dtype) for each in drawn]


def near(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Equal but for the roundings of a few numbers of about the size of the largest."""
    assert found.dtype == dtype
    assert found.shape == exact.shape
    # TF32 reads 10 bits after the first, as fp16 has.
    rounding = torch.finfo(torch.float16 if dtype == torch.float32 else dtype).eps
    error = (found.double() - exact).abs().max().item()
    assert error <= 8 * rounding * exact.abs().max().item()


def test_the_kernels_are_available() -> None:
    device = torch.device("cuda", 0)
    assert available(device)
    assert available(device, torch.float32)
    assert not available(device, torch.float64)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert not available(device, torch.float32)


@pytest.mark.parametrize("shape", BOTTLENECKS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fused_bottleneck_is_two_products(
    dtype: torch.dtype, activation: str, shape: tuple[int, int, int, int]
) -> None:
    from outlast.tensorize.kernels.bottleneck import bottleneck_backward, bottleneck_forward, fits

    tokens, inputs, rank, outputs = shape
    if not fits(rank, dtype):
        pytest.skip(f"rank {rank} does not fit in {dtype}")
    sizes = (tokens, inputs), (rank, inputs), (outputs, rank), (1, outputs), (tokens, outputs)
    operands = normal(tokens, *sizes, dtype=dtype)
    x, down, up, bias, dy = operands
    y, hidden = bottleneck_forward(x, down, up, bias[0], activation=activation, save=True)
    assert hidden is not None
    dx, gradient, activated = bottleneck_backward(dy, hidden, down, up, activation=activation)
    assert activated is not None

    x, down, up, bias, dy = (each.double().requires_grad_() for each in operands)
    exact_hidden = x @ down.t()
    exact_hidden.retain_grad()
    exact_activated = ACTIVATIONS[activation](exact_hidden)
    exact = functional.linear(exact_activated, up, bias[0])
    exact.backward(dy)
    assert x.grad is not None
    assert exact_hidden.grad is not None
    near(y, exact, dtype)
    near(hidden, exact_hidden, dtype)
    near(activated, exact_activated, dtype)
    near(gradient, exact_hidden.grad, dtype)
    near(dx, x.grad, dtype)


@pytest.mark.parametrize("shape", BLOCKS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_blocks_are_the_contraction(
    dtype: torch.dtype, shape: tuple[int, tuple[int, int], tuple[int, int], int]
) -> None:
    from outlast.tensorize.kernels.blocks import (
        blocks_backward,
        blocks_forward,
        blocks_hidden,
        blocks_weight_gradients,
    )

    tokens, (m1, m0), (n0, n1), rank = shape
    sizes = (tokens, m1 * m0), (m1, n0, rank, m0), (n0, n1, m1, rank), (1, n0 * n1)
    operands = normal(tokens, *sizes, (tokens, n0 * n1), dtype=dtype)
    x, right, left, bias, dy = operands
    y, hidden = blocks_forward(x, right, left, bias[0]), blocks_hidden(x, right)
    dx, gradient = blocks_backward(dy, right, left)
    d_right, d_left = blocks_weight_gradients(x, dy, hidden, gradient)

    x, right, left, bias, dy = (each.double().requires_grad_() for each in operands)
    exact_hidden = torch.einsum("abrm,tam->bart", right, x.view(tokens, m1, m0))
    exact_hidden.retain_grad()
    exact = torch.einsum("bnar,bart->tbn", left, exact_hidden).reshape(tokens, -1) + bias
    exact.backward(dy)
    assert exact_hidden.grad is not None
    pairs = (
        (y, exact),
        (hidden, exact_hidden),
        (dx, x.grad),
        (gradient, exact_hidden.grad.transpose(0, 1)),
        (d_right, right.grad),
        (d_left, left.grad),
    )
    for found, reference in pairs:
        assert reference is not None
        near(found, reference, dtype)


def test_inference_in_chunks_keeps_little_memory() -> None:
    from outlast.tensorize.kernels.blocks import blocks_forward

    tokens = 65536
    sizes = (tokens, 2048), (8, 8, 32, 256), (8, 256, 8, 32)
    x, right, left = normal(0, *sizes, dtype=torch.bfloat16)
    blocks_forward(x, right, left)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = blocks_forward(x, right, left)
    kept = torch.cuda.max_memory_allocated() - before - y.nbytes
    # h as a whole would be as large as y.
    assert kept < y.nbytes / 4


LAYERS: dict[str, Callable[[], StructuredLinear]] = {
    "low_rank": lambda: LowRankLinear(2048, 2048, 64),
    "cola": lambda: BottleneckLinear(2048, 2048, 128),
    "btt": lambda: BTTLinear(2048, 2048, 2),
    "monarch": lambda: MonarchLinear(2048, 2048, 8, bias=False),
}
TOKENS = 8192


@pytest.fixture
def no_plans() -> Iterator[None]:
    READY.clear()
    PLANS.clear()
    yield
    READY.clear()
    PLANS.clear()


def learned(layer: StructuredLinear, x: Tensor, dy: Tensor) -> list[Tensor]:
    """y and all gradients."""
    x = x.detach().requires_grad_()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)]


def force_kernels(layer: StructuredLinear) -> None:
    """Let the layer's plans take the kernels, whatever is predicted."""
    for learns in (True, False):
        plan = plan_for(layer.network, TOKENS, torch.bfloat16, torch.device("cuda"), learns)
        key = layer.network, (TOKENS - 1).bit_length(), torch.bfloat16, "cuda", learns
        PLANS[key] = replace(plan, fused=True, plain=False)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("form", LAYERS)
def test_layers_through_kernels_learn_as_in_double(
    no_plans: None, form: str, compiles: bool
) -> None:
    layer = LAYERS[form]().to("cuda", torch.bfloat16)
    x, dy = normal(1, (TOKENS, 2048), (TOKENS, 2048), dtype=torch.bfloat16)
    assert warm_model(layer, TOKENS) == 1
    force_kernels(layer)
    run = torch.compile(layer, fullgraph=True) if compiles else layer
    found = learned(run, x, dy)
    exact = learned(layer.double(), x.double(), dy.double())
    for mine, reference in zip(found, exact, strict=True):
        near(mine, reference, torch.bfloat16)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_fused_bottleneck_learns_as_in_double(activation: str) -> None:
    layer = BottleneckLinear(2048, 2048, 128, activation).to("cuda", torch.bfloat16)
    operands = normal(2, (TOKENS, 2048), (TOKENS, 2048), dtype=torch.bfloat16)

    def learn(fused: bool, dtype: torch.dtype) -> list[Tensor]:
        leaves = [each.detach().to(dtype).requires_grad_() for each in (*layer.parameters(),)]
        down, up, bias = leaves
        x = operands[0].to(dtype).requires_grad_()
        y = bottleneck(x, down, up, bias, activation, fused=fused)
        return [y.detach(), *torch.autograd.grad(y, [x, *leaves], operands[1].to(dtype))]

    for mine, reference in zip(
        learn(True, torch.bfloat16), learn(False, torch.float64), strict=True
    ):
        near(mine, reference, torch.bfloat16)


@pytest.mark.parametrize("form", ["low_rank", "btt", "monarch"])
def test_the_planner_considers_what_was_warmed(no_plans: None, form: str) -> None:
    device, bf16 = torch.device("cuda"), torch.bfloat16
    network = LAYERS[form]().network
    before = plan_for(network, TOKENS, bf16, device, True)
    assert not before.fused
    assert "fused kernel" not in explain(network, TOKENS, bf16, device)
    assert warm(network, TOKENS, bf16, device)
    plan = plan_for(network, TOKENS, bf16, device, True)
    assert "fused kernel" in explain(network, TOKENS, bf16, device)
    if not before.timed:
        from outlast.tensorize.planner import prices_of

        seconds = kernel_seconds(network, TOKENS, prices_of(bf16, device), True)
        assert plan.fused == (seconds < before.seconds)


@pytest.mark.parametrize("form", LAYERS)
def test_warmed_kernels_can_be_captured(no_plans: None, form: str) -> None:
    layer = LAYERS[form]().to("cuda", torch.bfloat16)
    (x,) = normal(3, (TOKENS, 2048), dtype=torch.bfloat16)
    assert warm_model(layer, TOKENS) == 1
    force_kernels(layer)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        expected = layer(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = layer(x)
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)
