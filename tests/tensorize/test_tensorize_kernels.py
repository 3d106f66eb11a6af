"""The Triton kernels in Triton's interpreter, on the CPU.

The interpreter is chosen when Triton is imported, so one process of its own runs all tests' work.
It computes products in bf16 wrongly, which the kernels refuse. That kernels also compile for a
device is tested without one, in this process.
"""

import importlib.util
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from outlast.errors import TensorizeError
from outlast.tensorize.kernels import available

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed (pip install 'outlast[gpu]')",
)

DTYPES = (torch.float32, torch.float16)
BOTTLENECKS = ((1, 33, 5, 7), (17, 48, 16, 70), (64, 70, 48, 33), (17, 5, 1, 3))
"""Tokens, inputs, rank and outputs."""
BLOCKS = (
    (1, (3, 5), (2, 7), 1),
    (17, (4, 16), (3, 33), 2),
    (64, (2, 24), (4, 8), 16),
    (40, (1, 48), (5, 3), 5),
)
"""Tokens, (m1, m0), (n0, n1) and rank."""
Run = Callable[..., Any]


def begin_interpreting() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    # numpy warns of what kernels leave out afterwards.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Run]:
    """``interpreted(work, *args)``: what `work` returns in the process of the interpreter."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=begin_interpreting) as pool:
        yield lambda work, *args: pool.submit(work, *args).result(timeout=120)


def normal(seed: int, *sizes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Tensors whose products over the last dimension keep a deviation of about 1."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(*size, generator=generator) for size in sizes]
    return [(each / each.shape[-1] ** 0.25).to(dtype) for each in drawn]


def middle(h: Tensor, activation: str) -> Tensor:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "identity": lambda h: h,
        "silu": functional.silu,
        "relu": functional.relu,
        "tanh": torch.tanh,
        "gelu": functional.gelu,
    }
    return functions[activation](h)


def near(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Equal but for the roundings of a few numbers of about the size of the largest."""
    assert found.dtype == dtype
    assert found.shape == exact.shape
    error = (found.double() - exact).abs().max().item()
    assert error <= 8 * torch.finfo(dtype).eps * exact.abs().max().item()


def bottleneck(
    operands: list[Tensor], activation: str, bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from outlast.tensorize.kernels.bottleneck import bottleneck_backward, bottleneck_forward

    x, down, up, offset, dy = operands
    y, hidden = bottleneck_forward(
        x, down, up, offset[0] if bias else None, activation=activation, save=True
    )
    assert hidden is not None
    unsaved, nothing = bottleneck_forward(
        x, down, up, offset[0] if bias else None, activation=activation
    )
    assert nothing is None
    assert torch.equal(unsaved, y)
    dx, gradient, activated = bottleneck_backward(dy, hidden, down, up, activation=activation)
    assert activated is not None
    return y, hidden, dx, gradient, activated


@pytest.mark.slow
@pytest.mark.parametrize("shape", BOTTLENECKS, ids=str)
@pytest.mark.parametrize(
    ("activation", "bias"),
    [
        ("identity", False),
        ("silu", True),
        ("relu", False),
        ("tanh", True),
        ("gelu", True),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fused_bottleneck_is_two_products(
    interpreted: Run,
    dtype: torch.dtype,
    activation: str,
    bias: bool,
    shape: tuple[int, int, int, int],
) -> None:
    tokens, inputs, rank, outputs = shape
    sizes = (tokens, inputs), (rank, inputs), (outputs, rank), (1, outputs), (tokens, outputs)
    operands = normal(tokens, *sizes, dtype=dtype)
    y, hidden, dx, gradient, activated = interpreted(bottleneck, operands, activation, bias)

    x, down, up, offset, dy = (each.double().requires_grad_() for each in operands)
    exact_hidden = x @ down.t()
    exact_hidden.retain_grad()
    exact_activated = middle(exact_hidden, activation)
    exact = functional.linear(exact_activated, up, offset[0] if bias else None)
    exact.backward(dy)
    near(y, exact, dtype)
    near(hidden, exact_hidden, dtype)
    near(activated, exact_activated, dtype)
    assert x.grad is not None
    assert exact_hidden.grad is not None
    # The slope is that of the rounded h: near 0, relu's can be the other one.
    if activation == "relu":
        apart = (hidden > 0) != (exact_hidden > 0)
        assert not bool(apart.any()), "choose another seed"
    near(gradient, exact_hidden.grad, dtype)
    near(dx, x.grad, dtype)


def views() -> list[tuple[Tensor, Tensor]]:
    """Products of operands that are not contiguous, beside those of copies that are."""
    from outlast.tensorize.kernels.blocks import blocks_backward, blocks_forward
    from outlast.tensorize.kernels.bottleneck import bottleneck_backward, bottleneck_forward

    wide, tall, up, bias = normal(0, (9, 40), (20, 6), (10, 6), (1, 20), dtype=torch.float32)
    x, down, bias = wide[:, ::2], tall.t(), bias[0, ::2]
    pairs = []
    for convert in (lambda each: each, Tensor.contiguous):
        x, down, bias = convert(x), convert(down), convert(bias)
        y, _ = bottleneck_forward(x, down, up, bias, activation="silu")
        hidden = convert(wide[:, :12:2])
        dx, *_ = bottleneck_backward(y.t().contiguous().t(), hidden, down, up, activation="silu")
        right = convert(wide[:4, :10].reshape(5, 2, 2, 2).permute(1, 3, 2, 0))
        left = convert(wide[4:8, :6].reshape(3, 2, 2, 2).permute(2, 0, 3, 1))
        z = blocks_forward(convert(wide[:, 20:30]), right, left)
        dz, _ = blocks_backward(z, right, left)
        pairs.append((y, dx, z, dz))
    return list(zip(*pairs, strict=True))


def test_views_are_read_as_they_are(interpreted: Run) -> None:
    for one, other in interpreted(views):
        assert torch.equal(one, other)


def blocks(operands: list[Tensor]) -> tuple[Tensor, ...]:
    from outlast.tensorize.kernels import blocks as module

    x, right, left, bias, dy = operands

    def in_chunks(tokens: int) -> Tensor:
        with mock.patch.object(module, "chunk_of", return_value=tokens):
            return module.blocks_forward(x, right, left, bias[0])

    y, hidden = module.blocks_forward(x, right, left, bias[0]), module.blocks_hidden(x, right)
    # Whole tiles: the interpreter's products round by a row's place in its tile, as BLAS does.
    assert torch.equal(in_chunks(32), y)
    chunked = in_chunks(16)
    dx, gradient = module.blocks_backward(dy, right, left)
    weights = module.blocks_weight_gradients(x, dy, hidden, gradient)
    return y, chunked, hidden, dx, gradient, *weights


@pytest.mark.parametrize("shape", BLOCKS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_blocks_are_the_contraction(
    interpreted: Run, dtype: torch.dtype, shape: tuple[int, tuple[int, int], tuple[int, int], int]
) -> None:
    tokens, (m1, m0), (n0, n1), rank = shape
    sizes = (tokens, m1 * m0), (m1, n0, rank, m0), (n0, n1, m1, rank), (1, n0 * n1)
    operands = normal(tokens, *sizes, (tokens, n0 * n1), dtype=dtype)
    found = interpreted(blocks, operands)

    x, right, left, bias, dy = (each.double().requires_grad_() for each in operands)
    hidden = torch.einsum("abrm,tam->bart", right, x.view(tokens, m1, m0))
    hidden.retain_grad()
    y = torch.einsum("bnar,bart->tbn", left, hidden).reshape(tokens, -1) + bias
    y.backward(dy)
    assert hidden.grad is not None
    gradients = x.grad, hidden.grad.transpose(0, 1), right.grad, left.grad
    for each, exact in zip(found, (y, y, hidden, *gradients), strict=True):
        assert exact is not None
        near(each, exact, dtype)


def no_tokens() -> list[tuple[int, ...]]:
    from outlast.tensorize.kernels import blocks, bottleneck

    x, down, up = torch.empty(0, 6), torch.ones(3, 6), torch.ones(4, 3)
    y, hidden = bottleneck.bottleneck_forward(x, down, up, activation="silu", save=True)
    results = [y, *bottleneck.bottleneck_backward(y, hidden, down, up, activation="silu")]
    right, left = torch.ones(2, 2, 1, 3), torch.ones(2, 5, 2, 1)
    y, hidden = blocks.blocks_forward(x, right, left), blocks.blocks_hidden(x, right)
    dx, gradient = blocks.blocks_backward(y, right, left)
    results += [y, hidden, dx, gradient]
    weights = blocks.blocks_weight_gradients(x, y, hidden, gradient)
    assert not any(bool(each.any()) for each in weights)
    return [tuple(each.shape) for each in (*results, *weights) if each is not None]


def test_no_tokens_give_no_results(interpreted: Run) -> None:
    narrow = [(0, 4), (0, 6), (0, 3), (0, 3)]
    wide = [(0, 10), (2, 2, 1, 0), (0, 6), (2, 2, 1, 0)]
    assert interpreted(no_tokens) == [*narrow, *wide, (2, 2, 1, 3), (2, 5, 2, 1)]


def refusal(name: str, case: str) -> str:
    """The sentence with which a faulty call is refused."""
    from outlast.tensorize.kernels import blocks, bottleneck

    bf16 = torch.bfloat16
    x, down, up = torch.ones(2, 6), torch.ones(3, 6), torch.ones(4, 3)
    right, left = torch.ones(2, 2, 1, 3), torch.ones(2, 5, 2, 1)
    forward, backward = bottleneck.bottleneck_forward, bottleneck.bottleneck_backward
    btt = blocks.blocks_forward
    calls: dict[str, dict[str, Callable[[], Any]]] = {
        "bottleneck": {
            "bf16": lambda: forward(x.to(bf16), down.to(bf16), up.to(bf16)),
            "fp64": lambda: forward(x.double(), down.double(), up.double()),
            "mixed": lambda: forward(x, down.half(), up),
            "sizes": lambda: forward(x, down, torch.ones(4, 2)),
            "rank": lambda: forward(x, torch.ones(129, 6), torch.ones(4, 129)),
            "activation": lambda: forward(x, down, up, activation="mish"),
            "hidden": lambda: backward(torch.ones(2, 4), None, down, up, activation="silu"),
        },
        "blocks": {
            "bf16": lambda: btt(x.to(bf16), right.to(bf16), left.to(bf16)),
            "bf16 backward": lambda: blocks.blocks_backward(
                torch.ones(2, 10, dtype=bf16), right.to(bf16), left.to(bf16)
            ),
            "mixed": lambda: btt(x, right, left.half()),
            "sizes": lambda: btt(x, right, torch.ones(2, 5, 2, 2)),
            "features": lambda: btt(torch.ones(2, 7), right, left),
            "dimensions": lambda: btt(x, right[0], left),
        },
    }
    try:
        calls[name][case]()
    except TensorizeError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("name", "case", "said"),
    [
        ("bottleneck", "bf16", "interpreter"),
        ("bottleneck", "fp64", "torch.float64 has no fused kernel"),
        ("bottleneck", "mixed", "down is torch.float16"),
        ("bottleneck", "sizes", "up has shape (4, 2)"),
        ("bottleneck", "rank", "rank = 129 does not fit"),
        ("bottleneck", "activation", "activation = mish"),
        ("bottleneck", "hidden", "save=True"),
        ("blocks", "bf16", "interpreter"),
        ("blocks", "bf16 backward", "interpreter"),
        ("blocks", "mixed", "left is torch.float16"),
        ("blocks", "sizes", "left has shape (2, 5, 2, 2)"),
        ("blocks", "features", "x has shape (2, 7)"),
        ("blocks", "dimensions", "right has 3 dimensions"),
    ],
)
def test_faulty_calls_are_refused(interpreted: Run, name: str, case: str, said: str) -> None:
    assert said in interpreted(refusal, name, case)


def test_a_cpu_is_refused_outside_of_the_interpreter() -> None:
    from outlast.tensorize.kernels.bottleneck import bottleneck_forward

    assert not available("cpu")
    assert not available("meta", torch.float16)
    with pytest.raises(TensorizeError, match="need CUDA"):
        bottleneck_forward(torch.ones(2, 6), torch.ones(3, 6), torch.ones(4, 3))


def test_what_fits_is_said_before() -> None:
    from outlast.tensorize.kernels import blocks, bottleneck

    assert bottleneck.fits(256, torch.bfloat16)
    assert not bottleneck.fits(257, torch.bfloat16)
    assert bottleneck.fits(1, torch.float32)
    assert not bottleneck.fits(129, torch.float32)
    assert not bottleneck.fits(16, torch.float64)
    assert blocks.fits((8, 256), (8, 256), 32, torch.bfloat16)
    assert blocks.fits((32, 64), (32, 64), 1, torch.bfloat16)
    assert not blocks.fits((8, 256), (8, 256), 1, torch.bfloat16)
    assert not blocks.fits((8, 256), (8, 256), 32, torch.float64)


def compiled(kernel: Any, config: Any, dtype: str, *, pointers: set[str], fixed: Any) -> Any:
    """A kernel's binary for compute capability 9.0; numbers are multiples of 16 if not fixed."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fixed = {**config.kwargs, **fixed}
    names = kernel.fn.arg_names
    signature = dict.fromkeys(names, "i32") | dict.fromkeys(pointers, dtype)
    signature |= dict.fromkeys(fixed, "constexpr")
    constants = {(names.index(each),): value for each, value in fixed.items()}
    loose = {"size", "half", *fixed}
    aligned = {
        (index,): [["tt.divisibility", 16]] for index, each in enumerate(names) if each not in loose
    }
    source = ASTSource(kernel.fn, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["silu", "gelu", "identity"])
@pytest.mark.parametrize("backward", [False, True])
def test_the_bottleneck_compiles_for_a_device_to_its_matrix_units(
    backward: bool, activation: str
) -> None:
    pytest.importorskip("triton")
    from outlast.tensorize.kernels.bottleneck import _fitting, bottleneck_kernel

    fixed: dict[str, Any] = {"activation": activation, "backward": backward, "precision": "ieee"}
    # As launched: the stride of contiguous factors is 1, and absent tensors are known before.
    ones = ("down_rank_stride", "up_output_stride")
    ones = ones if backward else ("down_term_stride", "up_rank_stride")
    absent = ("bias",) if backward else ("gradient", "activated")
    fixed |= dict.fromkeys(ones, 1) | dict.fromkeys(absent, None) | {"tile_rank": 128}
    pointers = {"x", "down", "up", "bias", "hidden", "gradient", "activated", "y"}
    x = torch.empty(0, dtype=torch.bfloat16)
    config = _fitting(bottleneck_kernel.configs, {"x": x}, tile_rank=128)[-2]
    binary = compiled(bottleneck_kernel, config, "*bf16", pointers=pointers, fixed=fixed)
    assert "wgmma.mma_async" in binary.asm["ptx"]
    assert binary.metadata.shared <= 227 * 1024


@pytest.mark.parametrize("half", ["first", "second"])
@pytest.mark.parametrize("backward", [False, True])
def test_blocks_compile_for_a_device_to_its_matrix_units(half: str, backward: bool) -> None:
    pytest.importorskip("triton")
    from outlast.tensorize.kernels.blocks import block_kernel

    layout = {
        "first": ("x_term_stride", "y_token_stride"),
        "second": ("x_token_stride", "y_inner_stride"),
    }[half]
    weight = "weight_column_stride" if backward else "weight_term_stride"
    fixed = dict.fromkeys((*layout, weight), 1) | {"bias": None, "precision": "ieee"}
    pointers = {"x", "weight", "y"}
    config = block_kernel.configs[0]
    binary = compiled(block_kernel, config, "*bf16", pointers=pointers, fixed=fixed)
    assert "wgmma.mma_async" in binary.asm["ptx"]
    assert binary.metadata.shared <= 227 * 1024
