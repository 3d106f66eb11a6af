"""No step moves a product by more than its limit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from outlast.errors import TensorizeError
from outlast.tensorize.layer import TTLinear
from outlast.tensorize.low_rank import BottleneckLinear, LowRankLinear
from outlast.tensorize.optimizers import (
    SpectralBound,
    bounded_root,
    power_norm,
    product_norm_bound,
)

KINDS = ["random", "aligned", "gauge", "one factor", "from zero", "back and forth"]


def _changes(
    kind: str, layer: LowRankLinear, size: float, generator: torch.Generator
) -> list[Tensor]:
    """What a step would do to down and up."""
    down, up = layer.down.weight.detach(), layer.up.weight.detach()
    free = [torch.randn(each.shape, generator=generator) for each in (down, up)]
    if kind == "aligned":
        # Along the largest singular vectors, where all three terms add up.
        left, _, right = torch.linalg.svd(up @ down, full_matrices=False)
        middle = torch.linalg.svd(down).U[:, 0]
        return [size * torch.outer(middle, right[0]), size * torch.outer(left[:, 0], middle)]
    if kind == "gauge":
        # The first-order terms cancel.
        turn = torch.randn(down.shape[0], down.shape[0], generator=generator)
        return [-size * turn @ down, size * up @ turn]
    if kind == "one factor":
        return [torch.zeros_like(down), size * free[1]]
    if kind == "back and forth":
        return [-2.0 * down, size * free[1]]
    return [size * each for each in free]


def _step(layer: LowRankLinear, optimizer: torch.optim.Optimizer, changes: list[Tensor]) -> float:
    """Ask for the changes; the spectral norm of what the product did, in float64."""
    factors = layer.factors()
    before = factors[1].detach().double() @ factors[0].detach().double()
    for factor, change in zip(factors, changes, strict=True):
        factor.grad = -change
    optimizer.step()
    after = factors[1].detach().double() @ factors[0].detach().double()
    return torch.linalg.matrix_norm(after - before, 2).item()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.tuples(st.integers(2, 24), st.integers(2, 24), st.integers(1, 24)),
    exponent=st.sampled_from([-5, -3, -2, -1, 0, 1, 5, 25]),
    limit=st.sampled_from([1e-3, 0.1, 3.0]),
    imbalance=st.sampled_from([1e-2, 1.0, 1e2]),
)
def test_no_step_exceeds_the_limit(
    *,
    kind: str,
    seed: int,
    sizes: tuple[int, int, int],
    exponent: int,
    limit: float,
    imbalance: float,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = LowRankLinear(*sizes, bias=False)
    layer.reset_parameters(0.0 if kind == "from zero" else 0.3, generator)
    with torch.no_grad():
        layer.down.weight.mul_(imbalance)
        layer.up.weight.div_(imbalance)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    SpectralBound(optimizer, layer, limit)
    norms = [torch.linalg.matrix_norm(each.detach(), 2).item() for each in layer.factors()]
    changes = _changes(kind, layer, 10.0**exponent, generator)
    moved = _step(layer, optimizer, changes)
    # Factors are stored in float32.
    assert moved <= limit * (1 + 1e-5) + 1e-6 * (1 + norms[0]) * (1 + norms[1])


def test_small_steps_are_not_touched_and_large_ones_use_the_limit() -> None:
    torch.manual_seed(0)
    layer = LowRankLinear(40, 30, 6, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    SpectralBound(optimizer, layer, 0.1)
    old = layer.up.weight.detach().clone()
    changes = [1e-4 * torch.randn(6, 40), 1e-4 * torch.randn(30, 6)]
    assert _step(layer, optimizer, changes) < 0.01
    assert torch.equal(layer.up.weight, old + changes[1])
    moved = _step(layer, optimizer, [10.0 * torch.randn(6, 40), 10.0 * torch.randn(30, 6)])
    # Certified norms are a few percent too large, and the two terms need not add up.
    assert 0.07 < moved <= 0.1 * (1 + 1e-4)


def test_limit_follows_the_schedule() -> None:
    torch.manual_seed(2)
    layer = LowRankLinear(20, 20, 4, bias=False)
    group = {"params": list(layer.parameters()), "lr": 1.0, "initial_lr": 1.0}
    optimizer = torch.optim.SGD([group])
    SpectralBound(optimizer, layer, 0.1)
    optimizer.param_groups[0]["lr"] = 0.25
    assert _step(layer, optimizer, [torch.randn(4, 20), torch.randn(20, 4)]) <= 0.025 * (1 + 1e-4)


def _train(rate: float, limit: float | None) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(
        BottleneckLinear(16, 32, 8), nn.Tanh(), BottleneckLinear(32, 32, 8), nn.Tanh(),
        BottleneckLinear(32, 4, 4),
    )  # fmt: skip
    x = torch.randn(128, 16)
    target = torch.sin(x @ torch.randn(16, 4) / 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    if limit is not None:
        SpectralBound(optimizer, model, limit)
    losses = []
    for _ in range(80):
        loss = (model(x) - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def test_too_large_a_rate_blows_up_without_the_bound_alone() -> None:
    plain, bounded = _train(1.0, None), _train(1.0, 0.1)
    assert max(plain) > 20.0 * plain[0]
    assert max(bounded) < 5.0 * bounded[0]
    plain, bounded = _train(0.3, None), _train(0.3, 0.1)
    assert bounded[-1] < 0.7 * plain[-1]


def test_optimizer_keeps_class_and_state_and_bound_has_its_own() -> None:
    def build(certified: bool) -> tuple[LowRankLinear, torch.optim.Optimizer, SpectralBound]:
        torch.manual_seed(3)
        layer = LowRankLinear(12, 10, 4)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        return layer, optimizer, SpectralBound(optimizer, layer, 0.05, certified=certified)

    for certified in (True, False):
        layer, optimizer, _ = build(certified)
        x = torch.randn(4, 7, 12)
        for batch in x:
            optimizer.zero_grad()
            layer(batch).square().sum().backward()
            optimizer.step()
        assert type(optimizer) is torch.optim.AdamW
        resumed, again, other = build(certified)
        for batch in x[:2]:
            again.zero_grad()
            resumed(batch).square().sum().backward()
            again.step()
        states = again.state_dict(), other.state_dict(), resumed.state_dict()
        resumed, again, other = build(certified)
        for target, state in zip((again, other, resumed), states, strict=True):
            target.load_state_dict(state)
        for batch in x[2:]:
            again.zero_grad()
            resumed(batch).square().sum().backward()
            again.step()
        assert all(map(torch.equal, layer.parameters(), resumed.parameters()))


def test_power_iteration_holds_the_limit_up_to_its_error() -> None:
    torch.manual_seed(4)
    layer = LowRankLinear(30, 40, 8, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    SpectralBound(optimizer, layer, 0.1, certified=False)
    for _ in range(6):
        moved = _step(layer, optimizer, [torch.randn(8, 30), torch.randn(40, 8)])
        assert moved <= 0.15


def test_what_is_not_finite_is_left_for_others_to_see() -> None:
    layer = LowRankLinear(6, 5, 3, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    SpectralBound(optimizer, layer, 0.1)
    old = layer.up.weight.detach().clone()
    layer.down.weight.grad = torch.full((3, 6), torch.nan)
    layer.up.weight.grad = -torch.ones(5, 3)
    optimizer.step()
    assert layer.down.weight.isnan().all()
    assert torch.equal(layer.up.weight, old + 1.0)


def test_frozen_factor_stays() -> None:
    layer = LowRankLinear(6, 5, 3, bias=False)
    layer.down.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([layer.up.weight], lr=1.0)
    SpectralBound(optimizer, layer, 0.1)
    old, before = layer.down.weight.detach().clone(), layer.to_dense().detach()
    layer.up.weight.grad = torch.randn(5, 3)
    optimizer.step()
    assert torch.equal(layer.down.weight, old)
    assert torch.linalg.matrix_norm(layer.to_dense() - before, 2) <= 0.1 * (1 + 1e-4)


def test_short_types_are_bounded_up_to_their_rounding() -> None:
    torch.manual_seed(5)
    layer = LowRankLinear(40, 30, 6, bias=False, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    SpectralBound(optimizer, layer, 0.5)
    changes = [torch.randn(6, 40).bfloat16(), torch.randn(30, 6).bfloat16()]
    assert 0.3 < _step(layer, optimizer, changes) <= 0.5 * 1.02
    assert layer.up.weight.dtype == torch.bfloat16


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31),
    st.tuples(*[st.integers(1, 40)] * 3),
    st.floats(0.0, 3.0),
)
def test_norms_are_bounded_from_both_sides(
    seed: int, sizes: tuple[int, int, int], decay: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.arange(1, sizes[2] + 1) ** -decay
    left = torch.randn(sizes[0], sizes[2], generator=generator) * spectrum
    right = torch.randn(sizes[2], sizes[1], generator=generator)
    true = torch.linalg.matrix_norm(left.double() @ right.double(), 2).item()
    bound = product_norm_bound(left.T @ left, right @ right.T).item()
    assert true <= bound * (1 + 1e-5)
    assert bound <= 1.1 * true + 0.01 * left.norm().item() * right.norm().item()
    start = torch.randn(sizes[1], generator=generator)
    estimate, vector = power_norm([left, right], start, iterations=200)
    assert 0.9 * true <= estimate.item() <= true * (1 + 1e-4)
    assert vector.norm().item() == pytest.approx(1.0, abs=1e-4)


def test_norm_of_nothing_is_nothing() -> None:
    assert product_norm_bound(torch.zeros(3, 3), torch.eye(3)) <= 1e-15
    assert bounded_root(torch.tensor(0.0), torch.tensor(0.0), torch.tensor(1.0)) == torch.inf


def test_what_cannot_be_bounded_is_refused() -> None:
    layer = LowRankLinear(6, 5, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    with pytest.raises(TensorizeError, match="limit = 0"):
        SpectralBound(optimizer, layer, 0.0)
    train = TTLinear(8, 8, 2, cores=2)
    with pytest.raises(TensorizeError, match="no two-factor layers"):
        SpectralBound(torch.optim.SGD(train.parameters(), lr=1.0), train, 0.1)
    half = torch.optim.SGD([layer.up.weight], lr=1.0)
    with pytest.raises(TensorizeError, match="only one factor of down"):
        SpectralBound(half, nn.ModuleDict({"down": layer}), 0.1)
