"""Plans that go through the Triton kernels: in Triton's interpreter, and what the planner says.

The interpreter is chosen when Triton is imported, so one process of its own runs what needs it; see
test_tensorize_kernels.
"""

import importlib.util
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_tensorize_kernels import begin_interpreting
from torch import Tensor

from outlast.errors import TensorizeError
from outlast.tensorize import BottleneckLinear, BTTLinear, LowRankLinear, MonarchLinear, TTLinear
from outlast.tensorize.bottleneck import FEW, bottleneck
from outlast.tensorize.contraction import LayerPlan
from outlast.tensorize.layer import StructuredLinear
from outlast.tensorize.measure import kernels_fit, tune_kernels, warm, warm_model
from outlast.tensorize.network import Network
from outlast.tensorize.operator import chain, two_products
from outlast.tensorize.planner import (
    PLANS,
    READY,
    BlockPair,
    LowRankPair,
    bottleneck_pays,
    explain,
    kernel_seconds,
    pair_of,
    plan_for,
)
from outlast.tensorize.prices import OperationPrices, default_table

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed (pip install 'outlast[gpu]')",
)
Run = Callable[..., Any]
CUDA = torch.device("cuda")
FORMS: dict[str, Callable[[], StructuredLinear]] = {
    "low_rank": lambda: LowRankLinear(24, 40, 5),
    "wide low_rank": lambda: LowRankLinear(24, 40, 20, bias=False),
    "btt": lambda: BTTLinear(24, 40, 3),
    "monarch": lambda: MonarchLinear(32, 16, 4, bias=False),
}


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Run]:
    """``interpreted(work, *args)``: what `work` returns in the process of the interpreter."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=begin_interpreting) as pool:
        yield lambda work, *args: pool.submit(work, *args).result(timeout=120)


@pytest.fixture
def ready() -> Iterator[Callable[[Network, int, torch.dtype], None]]:
    """Say that kernels are ready for a network, as `warm` does on a CUDA device."""
    added = []

    def add(network: Network, bucket: int, dtype: torch.dtype) -> None:
        added.append((pair_of(network), bucket, dtype))
        READY.add(added[-1])
        PLANS.clear()

    yield add
    READY.difference_update(added)
    PLANS.clear()


def plan_of(network: Network, *, fused: bool) -> LayerPlan:
    return replace(LayerPlan.uniform(two_products(network), len(network.cores)), fused=fused)


def made(form: str) -> StructuredLinear:
    torch.manual_seed(3)
    return FORMS[form]()


def derived(layer: StructuredLinear, learns: tuple[bool, ...], fused: bool) -> list[Tensor]:
    """y and the gradients of what learns, of x, the two cores and the bias."""
    torch.manual_seed(5)
    dtype = layer.factors()[0].dtype
    x = torch.randn(2, 17, layer.in_features)
    dy = torch.randn(2, 17, layer.out_features)
    leaves = [x, *layer.factors()]
    leaves += [] if layer._bias() is None else [layer._bias()]
    for leaf, mine in zip(leaves, learns, strict=False):
        leaf.requires_grad_(mine)
    y = chain(x, layer.factors(), layer.network, layer._bias(), plan_of(layer.network, fused=fused))
    found = torch.autograd.grad(y, [leaf for leaf in leaves if leaf.requires_grad], dy)
    assert layer.factors()[0].dtype == dtype
    return [y.detach(), *found]


def both(form: str, learns: tuple[bool, ...], dtype: torch.dtype) -> list[list[Tensor]]:
    return [derived(made(form).to(dtype), learns, fused) for fused in (True, False)]


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    "learns",
    [
        (True, True, True, True),
        (False, True, True, True),
        (True, False, False, False),
        (True, True, False, True),
        (False, False, True, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", FORMS)
def test_a_fused_plan_gives_what_a_route_gives(
    interpreted: Run, form: str, learns: tuple[bool, ...]
) -> None:
    fused, plain = interpreted(both, form, learns, torch.float32)
    for found, exact in zip(fused, plain, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("form", ["low_rank", "btt"])
def test_gradients_have_the_dtypes_of_the_cores(interpreted: Run, form: str) -> None:
    fused, plain = interpreted(both, form, (True, True, True, False), torch.float64)
    assert [each.dtype for each in fused] == [torch.float32] * 2 + [torch.float64] * 2
    for found, exact in zip(fused, plain, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


def without_gradients(form: str) -> list[Tensor]:
    layer = made(form)
    x = torch.randn(17, layer.in_features)
    with torch.no_grad():
        return [
            chain(x, layer.factors(), layer.network, None, plan_of(layer.network, fused=fused))
            for fused in (True, False)
        ]


@needs_triton
@pytest.mark.parametrize("form", FORMS)
def test_a_fused_plan_serves_without_gradients(interpreted: Run, form: str) -> None:
    torch.testing.assert_close(*interpreted(without_gradients, form), rtol=1e-4, atol=1e-5)


def through_operators(form: str) -> list[list[Tensor]]:
    """What the operators for the compiler give: y and all gradients, fused and not."""
    layer, results = made(form), []
    x = torch.randn(17, layer.in_features, requires_grad=True)
    dy = torch.randn(17, layer.out_features)
    for fused in (True, False):
        PLANS[layer.network, 5, x.dtype, "cpu", True] = plan_of(layer.network, fused=fused)
        y = torch.ops.outlast.chain(x, list(layer.factors()), str(layer.network))
        results.append([y.detach(), *torch.autograd.grad(y, [x, *layer.factors()], dy)])
    PLANS.clear()
    return results


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("form", FORMS)
def test_the_operators_take_fused_plans(interpreted: Run, form: str) -> None:
    for found, exact in zip(*interpreted(through_operators, form), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


def twice(form: str) -> list[Tensor]:
    """The gradient of a gradient of x."""
    layer, results = made(form), []
    for fused in (True, False):
        torch.manual_seed(7)
        x = torch.randn(4, layer.in_features, requires_grad=True)
        y = chain(x, layer.factors(), layer.network, None, plan_of(layer.network, fused=fused))
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), x)[0])
    return results


@needs_triton
@pytest.mark.parametrize("form", ["low_rank", "btt"])
def test_gradients_of_a_fused_plan_have_gradients(interpreted: Run, form: str) -> None:
    torch.testing.assert_close(*interpreted(twice, form), rtol=1e-4, atol=1e-4)


def activated(activation: str, learns: tuple[bool, ...]) -> list[list[Tensor]]:
    torch.manual_seed(11)
    x, down, up = torch.randn(FEW // 32, 48), torch.randn(20, 48) / 7, torch.randn(33, 20) / 5
    bias, dy = torch.randn(33), torch.randn(FEW // 32, 33)
    leaves = [x, down, up, bias]
    for leaf, mine in zip(leaves, learns, strict=True):
        leaf.requires_grad_(mine)
    results = []
    for fused in (True, False):
        y = bottleneck(x, down, up, bias, activation, fused=fused)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        results.append([y.detach(), *torch.autograd.grad(y, wanted, dy)])
    return results


@needs_triton
@pytest.mark.parametrize(
    "learns",
    [(True, True, True, True), (False, True, True, False), (True, False, False, False)],
    ids=str,
)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_fused_bottleneck_learns_as_two_products_do(
    interpreted: Run, activation: str, learns: tuple[bool, ...]
) -> None:
    for found, exact in zip(*interpreted(activated, activation, learns), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=2e-4)


def tuned() -> list[bool]:
    found = [
        LowRankPair(24, 16, 40),
        LowRankPair(24, 5, 40, "silu"),
        BlockPair((2, 16), (4, 16), 8),
    ]
    for pair in found:
        tune_kernels(pair, 17, torch.float32, torch.device("cpu"))
    found += [
        LowRankPair(24, 16, 40, "mish"),
        LowRankPair(24, 512, 40),
        BlockPair((2, 4), (4, 16), 8),
    ]
    return [kernels_fit(pair, torch.float32) for pair in found]


@needs_triton
def test_all_kernels_of_a_pair_can_be_tuned_before(interpreted: Run) -> None:
    assert interpreted(tuned) == [True] * 3 + [False] * 3


class Named(Tensor):
    """A tensor that a kernel must not take for memory."""


@needs_triton
def test_subclasses_of_tensors_go_along_the_routes() -> None:
    # Outside of the interpreter the kernels would refuse a CPU.
    layer = made("btt")
    x = torch.randn(17, layer.in_features)
    plans = [plan_of(layer.network, fused=fused) for fused in (True, False)]
    given = x.as_subclass(Named)
    with torch.no_grad():
        fused = chain(given, layer.factors(), layer.network, None, plans[0])
        plain = chain(x, layer.factors(), layer.network, None, plans[1])
    assert torch.equal(fused.as_subclass(Tensor), plain)
    with pytest.raises(TensorizeError, match="need CUDA"):
        chain(x, layer.factors(), layer.network, None, plans[0])


def test_networks_that_the_kernels_know() -> None:
    with torch.device("meta"):
        assert pair_of(LowRankLinear(24, 40, 5).network) == LowRankPair(24, 5, 40)
        cola = pair_of(BottleneckLinear(24, 40, 5).network, "silu")
        assert cola == LowRankPair(24, 5, 40, "silu")
        btt = BTTLinear(24, 40, 3, in_modes=(4, 6), out_modes=(5, 8)).network
        assert pair_of(btt) == BlockPair((4, 6), (5, 8), 3)
        assert pair_of(MonarchLinear(32, 16, 4).network) == BlockPair((4, 8), (4, 4), 1)
        assert pair_of(btt, "silu") is None
        assert pair_of(btt.backwards()) is None
        padded = BTTLinear(23, 40, 3, in_modes=(4, 6), out_modes=(5, 8)).network
        assert pair_of(padded) is None
        assert pair_of(TTLinear(24, 40, 3, cores=2).network) is None
        assert pair_of(TTLinear(24, 40, 3, cores=3).network) is None


def test_a_cpu_never_gets_a_kernel(ready: Callable[[Network, int, torch.dtype], None]) -> None:
    cpu, before = torch.device("cpu"), len(READY)
    with torch.device("meta"):
        layers = [MonarchLinear(2048, 2048, 8), LowRankLinear(2048, 2048, 64)]
    for layer in layers:
        for dtype in (torch.float32, torch.bfloat16):
            assert not warm(layer.network, 8192, dtype, cpu)
            assert len(READY) == before
    assert warm_model(torch.nn.Sequential(BTTLinear(64, 64), BottleneckLinear(64, 64, 8)), 256) == 0
    # Nor if a GPU of this machine has them.
    for layer in layers:
        ready(layer.network, 13, torch.float32)
        assert not plan_for(layer.network, 8192, torch.float32, cpu, True).fused
        assert "fused" not in explain(layer.network, 8192, torch.float32, cpu)
    assert not bottleneck_pays(LowRankPair(2048, 64, 2048), 8192, torch.float32, cpu)


def test_the_planner_takes_a_kernel_that_is_ready_and_cheaper(
    ready: Callable[[Network, int, torch.dtype], None],
) -> None:
    bf16 = torch.bfloat16
    with torch.device("meta"):
        network = MonarchLinear(2048, 2048, 8).network
        wide = LowRankLinear(2048, 2048, 256).network
    before = plan_for(network, 8000, bf16, CUDA, True)
    assert not before.fused
    assert "fused" not in explain(network, 8000, bf16, CUDA)
    for each in (network, wide):
        ready(each, 13, bf16)
    for learns in (True, False):
        plan = plan_for(network, 8000, bf16, CUDA, learns)
        assert plan.fused
        assert not plan.plain
        assert "not measured" in plan.reason
    assert plan_for(network, 8000, bf16, CUDA, True).seconds < before.seconds
    assert plan_for(network, 8000, bf16, CUDA, True).forward == before.forward
    # It has been warmed for these tokens and this dtype alone.
    assert not plan_for(network, 8193, bf16, CUDA, True).fused
    assert not plan_for(network, 8000, torch.float16, CUDA, True).fused
    assert "fused kernel:" in explain(network, 8000, bf16, CUDA)
    # Where the sums fill the registers, two products are as good.
    assert not plan_for(wide, 8000, bf16, CUDA, True).fused
    assert ": fused kernel" in explain(wide, 8000, bf16, CUDA)


def test_a_bottleneck_pays_for_many_tokens_alone() -> None:
    pair, bf16 = LowRankPair(2048, 128, 2048, "silu"), torch.bfloat16
    keys = {(pair, bucket, bf16) for bucket in (7, 15)}
    READY.update(keys)
    try:
        assert bottleneck_pays(pair, 32768, bf16, CUDA)
        assert not bottleneck_pays(pair, 128, bf16, CUDA)
        assert not bottleneck_pays(pair, 4096, bf16, CUDA)
    finally:
        READY.difference_update(keys)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("learns", [True, False])
def test_a_kernels_price_grows_with_the_tokens(form: str, learns: bool) -> None:
    prices = OperationPrices(default_table("cuda", "bfloat16"))
    network = made(form).network
    seconds = [kernel_seconds(network, 1 << bucket, prices, learns) for bucket in (14, 16, 18)]
    assert 0 < seconds[0] < seconds[1] < seconds[2] < 1
    assert kernel_seconds(network.backwards(), 64, prices, learns) == float("inf")
