"""Online RMSNorm and grouped projections: the numbers of the plain ones."""

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorized_ranks import (
    dense_llama,
    gradients,
    joined,
    loss_of,
    low_rank_llama,
    tokens,
    worst_difference,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from outlast.errors import TensorizeError
from outlast.tensorize.bottleneck import ACTIVATIONS
from outlast.tensorize.tensor_parallel import (
    _ActivatedLinear,
    local,
    normalized_projection,
    parallelize_bottleneck,
)

EPSILON = 1e-5


def _plain(x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(nn.functional.rms_norm(x, x.shape[-1:], scale, EPSILON), weight)


@given(
    tokens=st.integers(0, 4),
    features=st.integers(1, 9),
    rows=st.integers(1, 5),
    power=st.integers(-3, 3),
)
@settings(deadline=None, max_examples=25)
def test_alone_it_is_rms_norm_and_linear(tokens: int, features: int, rows: int, power: int) -> None:
    generator = torch.Generator().manual_seed(tokens + 10 * features + 100 * rows)
    shapes = ((2, tokens, features), (features,), (rows, features))
    inputs = [torch.randn(shape, generator=generator).double() for shape in shapes]
    inputs[0] *= 10.0**power
    for each in inputs:
        each.requires_grad_()
    found = normalized_projection(*inputs, epsilon=EPSILON, features=features)
    expected = _plain(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    upstream = torch.randn(found.shape, generator=generator).double()
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def test_gradcheck_and_zero_tokens_of_zeros() -> None:
    inputs = [torch.randn(shape).double() for shape in ((3, 6), (6,), (4, 6))]
    inputs[0][1] = 0
    for each in inputs:
        each.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *given: normalized_projection(*given, epsilon=EPSILON, features=6), inputs
    )
    result = normalized_projection(inputs[0], *inputs[1:], epsilon=0.0, features=6)
    result.sum().backward()
    assert all(bool(each.grad.isfinite().all()) for each in inputs)


def test_frozen_inputs_get_no_gradient() -> None:
    x, scale, weight = torch.randn(3, 6), torch.randn(6, requires_grad=True), torch.randn(4, 6)
    normalized_projection(x, scale, weight, epsilon=EPSILON, features=6).sum().backward()
    expected = torch.autograd.grad(_plain(x, scale, weight).sum(), scale)[0]
    torch.testing.assert_close(scale.grad, expected)
    assert weight.grad is None


def test_a_second_derivative_is_refused() -> None:
    x = torch.randn(3, 6, requires_grad=True)
    result = normalized_projection(x, torch.ones(6), torch.ones(4, 6), epsilon=0.0, features=6)
    (gradient,) = torch.autograd.grad(result.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_autocast_multiplies_in_half_precision() -> None:
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((5, 32), (32,), (8, 32))]
    with torch.autocast("cpu", torch.bfloat16):
        found = normalized_projection(*inputs, epsilon=EPSILON, features=32)
    assert found.dtype == torch.bfloat16
    found.float().sum().backward()
    mine = [each.grad for each in inputs]
    expected = torch.autograd.grad(_plain(*inputs).sum(), inputs)
    for ours, theirs in zip(mine, expected, strict=True):
        assert ours.dtype == torch.float32
        assert float((ours - theirs).norm() / theirs.norm()) < 0.03


def _split_norm(dtype: torch.dtype) -> tuple[float, float]:
    joined()
    generator = torch.Generator().manual_seed(3)
    features, rows = 32, 64
    x = torch.randn(6, features, generator=generator)
    x[:, :16] *= torch.tensor([1.0, 30.0, 1e3, 1e-3, 1.0, 1.0])[:, None]
    x[4, 16:] = 0  # nothing on rank 1
    x[5] = 0
    scale = torch.rand(features, generator=generator) + 0.5
    weight = torch.randn(rows, features, generator=generator)
    inputs = [each.to(dtype) for each in (x, scale, weight)]
    exact = [each.float().clone().requires_grad_() for each in inputs]
    expected = _plain(*exact)
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    part = slice(16 * rank, 16 * rank + 16)
    mine = [each[..., part].clone().requires_grad_() for each in inputs]
    found = normalized_projection(*mine, epsilon=EPSILON, features=features, group=group)
    # Each rank uses its half of the rows, so the gradients that come back are parts.
    half = slice(rows // 2 * rank, rows // 2 * (rank + 1))
    found[:, half].float().square().sum().backward()
    expected.square().sum().backward()
    entries = float((found.float() - expected).abs().max() / expected.abs().max())
    gradient = 0.0
    for each, whole in zip(mine, exact, strict=True):
        target = whole.grad[..., part]
        gradient = max(gradient, float((each.grad.float() - target).norm() / whole.grad.norm()))
    return entries, gradient


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 3e-3), (torch.bfloat16, 0.02)]
)
def test_split_features_give_the_same_numbers(
    ranks: Any, dtype: torch.dtype, tolerance: float
) -> None:
    for entries, gradient in ranks(2)(_split_norm, dtype):
        assert entries < tolerance
        assert gradient < tolerance


def _statistic() -> float:
    """The largest relative error that all entries of a token have in common, in bfloat16."""
    joined()
    generator = torch.Generator().manual_seed(3)
    rank, rows = torch.distributed.get_rank(), 4096
    weight = torch.randn(rows, 32, generator=generator).bfloat16().float()
    # Every rank's features are equal, so that its norm gives ones; these need 8 bits, and their
    # squares more.
    sizes = (1 + torch.arange(8.0) / 128)[:, None] * torch.tensor([1.0, 1.203125])
    x = sizes.repeat_interleave(16, dim=1)
    expected = _plain(x, torch.ones(32), weight)
    part = slice(16 * rank, 16 * rank + 16)
    mine = [each[..., part].bfloat16() for each in (x, torch.ones(32), weight)]
    group = torch.distributed.group.WORLD
    found = normalized_projection(*mine, epsilon=EPSILON, features=32, group=group).float()
    # Rounding of entries is random and averages out; the divisor's would not.
    common = (found * expected).sum(-1) / expected.square().sum(-1)
    return float((common - 1).abs().max())


@pytest.mark.distributed
def test_in_bfloat16_the_sum_of_squares_stays_exact(ranks: Any) -> None:
    # A divisor from a sum in 8 bits would be off by up to 2e-3.
    assert max(ranks(2)(_statistic)) < 6e-4


def _compiled_norm() -> float:
    joined()
    group = torch.distributed.group.WORLD
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    shapes = ((6, 16), (16,), (8, 16))
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]

    def project(*given: torch.Tensor) -> torch.Tensor:
        return normalized_projection(*given, epsilon=EPSILON, features=32, group=group)

    calls = (project, torch.compile(project, fullgraph=True))
    results = [torch.autograd.grad(call(*inputs).square().sum(), inputs) for call in calls]
    pairs = zip(*results, strict=True)
    return max(float((ours - theirs).abs().max() / ours.abs().max()) for ours, theirs in pairs)


@pytest.mark.distributed
def test_compiled_with_collectives_in_place_it_keeps_its_gradients(ranks: Any) -> None:
    assert max(ranks(2)(_compiled_norm)) < 1e-5


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_an_activated_product_and_its_gradients(activation: str) -> None:
    latents = torch.randn(2, 3, 9).double().requires_grad_()
    weight, bias = torch.randn(5, 4).double(), torch.randn(5).double()
    inputs = [latents, weight.requires_grad_(), bias.requires_grad_()]

    def product(latents: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return _ActivatedLinear.apply(latents[..., 2:6], weight, bias, activation)

    expected = nn.functional.linear(ACTIVATIONS[activation](latents[..., 2:6]), weight, bias)
    torch.testing.assert_close(product(*inputs), expected)
    assert torch.autograd.gradcheck(product, inputs)


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class _Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.name()] += func.name() in ("aten::mm", "aten::addmm")
        return func(*args, **(kwargs or {}))


def _products(block: nn.Module) -> int:
    """Matrix products from the block's input to its queries, keys and values."""
    attention = block.self_attn
    with _Products() as products, torch.no_grad():
        shared = block.input_layernorm(torch.randn(5, 64))
        for each in (attention.q_proj, attention.k_proj, attention.v_proj):
            each(shared)
    return products.seen.total()


@pytest.mark.parametrize("form", ["low_rank", "cola"])
def test_grouping_changes_nothing_but_the_number_of_products(
    form: str, one_rank: DeviceMesh
) -> None:
    plain, grouped = low_rank_llama(form), low_rank_llama(form)
    parallelize_bottleneck(grouped, one_rank)
    assert _products(grouped.model.layers[0]) == 1 + 3
    assert grouped.state_dict().keys() == plain.state_dict().keys()
    again = copy.deepcopy(grouped)
    for model in (plain, grouped):
        loss_of(model, tokens()).backward()
    assert worst_difference(gradients(grouped), gradients(plain)) < 1e-5
    with torch.no_grad():
        before = grouped(input_ids=tokens()).logits
        for parameter in again.parameters():
            parameter.zero_()
        # The copy's norms read the copy's projections, and these theirs.
        torch.testing.assert_close(grouped(input_ids=tokens()).logits, before)
        assert not again(input_ids=tokens()).logits.any()


def _saved_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes that a block keeps for its backward pass, of distinct storages that are no weights."""
    weights = {local(each).untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        y = model.model.layers[0].mlp(model.model.layers[0].post_attention_layernorm(x))
    assert y.requires_grad
    return sum(kept.values())


def test_a_grouped_mlp_keeps_less_than_its_parts(one_rank: DeviceMesh) -> None:
    plain, grouped = low_rank_llama("cola"), low_rank_llama("cola")
    parallelize_bottleneck(grouped, one_rank)
    x = torch.randn(4, 32, plain.config.hidden_size, requires_grad=True)
    # Neither the normalised input, nor float copies of it, nor activations of latents.
    saved = _saved_bytes(plain, x) - _saved_bytes(grouped, x)
    assert saved >= x.numel() * 4


@pytest.mark.slow
def test_grouped_blocks_compile_without_a_break(one_rank: DeviceMesh) -> None:
    plain, grouped = low_rank_llama("cola"), low_rank_llama("cola")
    parallelize_bottleneck(grouped, one_rank)
    x = torch.randn(2, 7, plain.config.hidden_size, requires_grad=True)
    places = plain.model.rotary_emb(x, torch.arange(7)[None])
    results = []
    for model in (plain, grouped):
        block = model.model.layers[0]
        call = (
            torch.compile(block, backend="aot_eager", fullgraph=True) if model is grouped else block
        )
        y = call(x, position_embeddings=places)
        results.append((y.detach(), torch.autograd.grad(y.square().sum(), x)[0]))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_model_without_low_rank_layers_is_refused(one_rank: DeviceMesh) -> None:
    with pytest.raises(TensorizeError, match="tensorize all projections"):
        parallelize_bottleneck(dense_llama(), one_rank)
