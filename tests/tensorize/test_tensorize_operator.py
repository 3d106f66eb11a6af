import pytest
import torch
from torch import Tensor, nn

from outlast.errors import TensorizeError
from outlast.tensorize import BTTLinear, LowRankLinear, MonarchLinear, TTLinear, TTMLinear
from outlast.tensorize.contraction import LayerPlan
from outlast.tensorize.low_rank import low_rank_network
from outlast.tensorize.network import Route, block_network, train_network
from outlast.tensorize.operator import Merged, chain, two_products

BLOCK = block_network(20, 28, 2, in_modes=(4, 5), out_modes=(7, 4))
TRAIN = train_network(12, 30, 3, in_modes=(3, 4), out_modes=(5, 6))


def kept_numbers(layer: nn.Module, x: Tensor) -> tuple[int, bool]:
    """Numbers that autograd keeps beyond x and the parameters, and whether x is kept."""
    own = {each.untyped_storage().data_ptr() for each in layer.parameters()}
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.numel():
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(x)
    has_x = found.pop(x.untyped_storage().data_ptr(), 0) > 0
    total = sum(size for place, size in found.items() if place not in own)
    y.sum().backward()
    return total, has_x


@pytest.mark.parametrize("tokens", [1024, 4096])
@pytest.mark.parametrize(
    ("build", "rank"),
    [
        (lambda: LowRankLinear(256, 384, 32), 32),
        (lambda: TTLinear(256, 384, 16, 2), 16),
        (lambda: TTLinear(250, 384, 16, 3), 16),
        (lambda: TTMLinear(256, 384, 8, 3), 0),
        (lambda: BTTLinear(256, 384, 2), 0),
        (lambda: MonarchLinear(256, 384, 4), 0),
    ],
)
def test_no_more_is_kept_than_x_and_what_is_rank_wide(build, rank: int, tokens: int) -> None:  # type: ignore[no-untyped-def]
    layer = build()
    x = torch.randn(tokens, layer.in_features, requires_grad=True)
    beyond, _ = kept_numbers(layer, x)
    # A folded bias is one more column; a plan may keep what is half as wide as x.
    limit = max(rank + 1, layer.in_features // 2) if rank else 0
    assert beyond <= tokens * limit


def test_autograd_alone_would_keep_more() -> None:
    x = torch.randn(1024, 256)
    layer = BTTLinear(256, 384, 2)

    class Plainly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            plan = LayerPlan.uniform(Route((1, 1)), 2, plain=True)
            return chain(x, self.layer.factors(), self.layer.network, None, plan)

    assert kept_numbers(Plainly(), x)[0] > 1024 * 256


def test_x_of_another_size_is_refused() -> None:
    cores = [torch.randn(BLOCK.shape(core)) for core in range(2)]
    with pytest.raises(TensorizeError, match=r"x of shape \(2, 10\) must end in the layer's 20"):
        chain(torch.randn(2, 10), cores, BLOCK)


@pytest.mark.parametrize("plain", [False, True])
def test_each_computation_may_go_its_own_way(plain: bool) -> None:
    torch.manual_seed(0)
    cores = [
        torch.randn(TRAIN.shape(core), dtype=torch.float64, requires_grad=True) for core in range(4)
    ]
    x = torch.randn(7, 12, dtype=torch.float64, requires_grad=True)
    mixed = LayerPlan(
        Route((2, 2)),
        Route((4,)),
        (Route((2, 2)), Route((1, 1, 2), layout="features"), Route((1, 3), chunk=3), Route((4,))),
        plain,
    )
    one = chain(x, cores, TRAIN, None, mixed)
    other = chain(x, cores, TRAIN, None, LayerPlan.uniform(Route((4,)), 4))
    torch.testing.assert_close(one, other)
    dy = torch.randn_like(one)
    for found, expected in zip(
        torch.autograd.grad(one, [x, *cores], dy),
        torch.autograd.grad(other, [x, *cores], dy),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def test_only_what_is_asked_for_is_differentiated() -> None:
    cores = [torch.randn(TRAIN.shape(core)) for core in range(4)]
    plan = LayerPlan.uniform(Route((2, 2)), 4)
    x = torch.randn(3, 12)
    assert not chain(x, cores, TRAIN, None, plan).requires_grad
    cores[2].requires_grad_()
    chain(x, cores, TRAIN, None, plan).sum().backward()
    assert cores[2].grad is not None
    assert cores[2].grad.shape == cores[2].shape
    assert cores[0].grad is None
    assert x.grad is None


def test_a_bias_alone_learns() -> None:
    cores = [torch.randn(BLOCK.shape(core)) for core in range(2)]
    bias = torch.zeros(28, requires_grad=True)
    chain(torch.randn(3, 20), cores, BLOCK, bias).sum().backward()
    torch.testing.assert_close(bias.grad, torch.full((28,), 3.0))


@pytest.mark.parametrize("plain", [False, True])
def test_one_tensor_as_two_cores(plain: bool) -> None:
    """W = A^T A with one A: first and second derivatives must not count it twice."""
    network = low_rank_network(4, 4, 4)
    plan = LayerPlan.uniform(Route((1, 1)), 2, plain=plain)
    core = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor, core: Tensor) -> Tensor:
        return chain(x, (core, core), network, None, plan)

    assert torch.autograd.gradcheck(function, (x, core))
    assert torch.autograd.gradgradcheck(function, (x, core))


def test_second_derivatives_where_a_core_depends_on_x() -> None:
    network = low_rank_network(3, 2, 3)
    plan = LayerPlan.uniform(Route((1, 1)), 2)
    up = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor, up: Tensor) -> Tensor:
        return chain(x, (x.sin(), up), network, None, plan)

    assert torch.autograd.gradcheck(function, (x, up))
    assert torch.autograd.gradgradcheck(function, (x, up))


def test_a_gradient_that_is_a_view_of_one_number() -> None:
    cores = [torch.randn(BLOCK.shape(core), requires_grad=True) for core in range(2)]
    x = torch.randn(300, 20, requires_grad=True)
    for route in (Route((2,)), Route((1, 1)), Route((1, 1), layout="features", chunk=64)):
        y = chain(x, cores, BLOCK, None, LayerPlan.uniform(route, 2))
        expanded = torch.autograd.grad(y, [x, *cores], torch.ones(()).expand(y.shape))
        y = chain(x, cores, BLOCK, None, LayerPlan.uniform(route, 2))
        whole = torch.autograd.grad(y, [x, *cores], torch.ones(y.shape))
        for one, other in zip(expanded, whole, strict=True):
            torch.testing.assert_close(one, other)


def test_without_gradients_y_is_contiguous_and_leaves_no_graph() -> None:
    cores = [torch.randn(BLOCK.shape(core), requires_grad=True) for core in range(2)]
    with torch.no_grad():
        for layout in ("tokens", "features"):
            plan = LayerPlan.uniform(Route((1, 1), layout=layout), 2)
            y = chain(torch.randn(2, 3, 20), cores, BLOCK, None, plan)
            assert y.is_contiguous()
            assert y.grad_fn is None


def test_two_products_are_cut_where_the_chain_is_narrowest() -> None:
    assert two_products(low_rank_network(8, 8, 2)) == Route((1, 1))
    narrow = train_network(16, 16, (4, 3, 4), in_modes=(4, 4), out_modes=(4, 4))
    assert two_products(narrow) == Route((2, 2))


def test_merged_cores_are_made_again_for_another_dtype() -> None:
    cores = [torch.randn(BLOCK.shape(core)) for core in range(2)]
    kept, route = Merged(), Route((2,))
    first = kept.path(BLOCK, route, cores, torch.float32)
    assert kept.path(BLOCK, route, cores, torch.float32) is first
    assert kept.path(BLOCK, route, cores, torch.float64) is not first
    assert kept.path(BLOCK, route, cores, torch.float32) is first
    cores[0].add_(1.0)
    assert kept.path(BLOCK, route, cores, torch.float32) is not first


def test_merged_cores_in_inference_mode() -> None:
    with torch.inference_mode():
        cores = [torch.randn(BLOCK.shape(core)) for core in range(2)]
        x = torch.randn(3, 20)
        kept = Merged()
        torch.testing.assert_close(
            chain(x, cores, BLOCK, merged=kept), chain(x, cores, BLOCK), rtol=1e-4, atol=1e-4
        )
