import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from outlast.tensorize import SparseLowRankLinear
from outlast.tensorize import low_rank as module


@pytest.mark.parametrize("tokens", [1, 4, 900])
@pytest.mark.parametrize("split", [False, True])
def test_both_ways_are_the_dense_layer(
    tokens: int, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_is_split", lambda *given: split)
    torch.manual_seed(0)
    layer = SparseLowRankLinear(24, 30, 4, 0.1, alpha=6.0, dtype=torch.float64)
    x = torch.randn(tokens, 24, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(tokens, 30, dtype=torch.float64)
    inputs = [x, *layer.parameters()]
    y, expected = layer(x), functional.linear(x, layer.to_dense(), layer.bias)
    torch.testing.assert_close(y, expected)
    for found, other in zip(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy), strict=True
    ):
        torch.testing.assert_close(found, other)


def test_few_tokens_do_not_build_the_weight_and_many_do() -> None:
    layer = SparseLowRankLinear(512, 512, 128)
    factors = layer.down.weight, layer.up.weight, layer.values
    assert module._is_split(1, *factors)
    assert not module._is_split(4096, *factors)


def test_the_weight_is_the_two_factors_and_the_entries() -> None:
    layer = SparseLowRankLinear(6, 5, 2, 0.2, alpha=8.0)
    rest = layer.to_dense() - 4.0 * layer.up.weight @ layer.down.weight
    expected = torch.zeros(30)
    expected[layer.indices] = layer.values.detach()
    torch.testing.assert_close(rest.detach(), expected.view(5, 6))
    assert layer.values.numel() == 6


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.001, 1.0), st.integers(0, 5))
def test_places_are_different_and_the_same_for_a_seed(
    into: int, out: int, density: float, seed: int
) -> None:
    layers = []
    for _ in range(2):
        layer = SparseLowRankLinear(into, out, 1, density)
        layer.reset_parameters(generator=torch.Generator().manual_seed(seed))
        layers.append(layer)
    places = layers[0].indices
    assert torch.equal(places, layers[1].indices)
    assert torch.equal(layers[0].to_dense(), layers[1].to_dense())
    assert (places.diff() > 0).all()
    assert int(places[0]) >= 0
    assert int(places[-1]) < into * out
    assert places.numel() == max(1, round(density * into * out))


@pytest.mark.parametrize("count", [20, 300])
def test_all_places_are_equally_likely(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hits = torch.zeros(400)
    for _ in range(300):
        hits[module._places(count, 400, torch.device("cpu"), generator)] += 1
    likely = count / 400
    # Five standard deviations of a binomial count.
    assert (hits / 300 - likely).abs().max() < 5 * (likely * (1 - likely) / 300) ** 0.5
    assert abs(float(hits[:200].sum() / hits.sum()) - 0.5) < 0.02


def test_the_weight_starts_with_the_deviation_of_a_dense_layer() -> None:
    torch.manual_seed(0)
    layer = SparseLowRankLinear(300, 400, 64, 0.05, alpha=16.0)
    size = float(layer.to_dense().detach().square().mean().sqrt())
    assert size == pytest.approx(1 / 900**0.5, rel=0.02)
    layer.reset_parameters(0.02)
    assert float(layer.to_dense().detach().square().mean().sqrt()) == pytest.approx(0.02, rel=0.02)


def test_no_more_than_x_is_kept() -> None:
    layer = SparseLowRankLinear(64, 96, 8)
    x = torch.randn(2048, 64, requires_grad=True)
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    own = [*layer.parameters(), *layer.buffers(), x]
    assert set(kept) <= {each.untyped_storage().data_ptr() for each in own}


def test_the_places_are_saved_and_need_four_bytes_each() -> None:
    first, second = (SparseLowRankLinear(20, 10, 2, 0.1) for _ in range(2))
    assert not torch.equal(first.indices, second.indices)
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(second.to_dense(), first.to_dense())
    assert first.indices.dtype == torch.int32
    assert SparseLowRankLinear(2**16, 2**15, 1, 1e-9, device="meta").indices.dtype == torch.int64
    assert first.half().indices.dtype == torch.int32


def test_the_scale_stays_when_the_rank_is_changed_in_place() -> None:
    layer = SparseLowRankLinear(20, 10, 4, 0.1, alpha=2.0)
    assert layer.settings()["alpha"] == 2.0
    assert SparseLowRankLinear(20, 10, 4, 0.1).settings()["alpha"] is None
    with torch.no_grad():
        layer.down.weight[2:] = 0.0
        before = layer.to_dense()
        layer.down.weight = torch.nn.Parameter(layer.down.weight[:2].clone())
        layer.up.weight = torch.nn.Parameter(layer.up.weight[:, :2].clone())
        torch.testing.assert_close(layer.to_dense(), before)
