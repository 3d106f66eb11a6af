import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import TensorizeError
from outlast.tensorize import decompose
from outlast.tensorize.decompose import (
    cp,
    cp_product,
    cp_weight,
    to_cp,
    to_tucker,
    tucker,
    tucker_weight,
)
from outlast.tensorize.svd import low_rank


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_one_mode_on_each_side_is_the_singular_value_decomposition() -> None:
    weight = draw(10, 12)
    factored = to_tucker(weight, in_modes=(12,), out_modes=(10,), rank=4)
    assert [tuple(core.shape) for core in factored] == [(12, 4), (4, 4), (4, 10)]
    assert factored.error == pytest.approx(low_rank(weight, rank=4).error)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.integers(1, 3), st.integers(0, 99))
def test_tensors_of_low_rank_are_recovered(modes: list[int], rank: int, seed: int) -> None:
    whole = draw(*(min(rank, mode) for mode in modes), seed=seed)
    for mode, size in enumerate(modes):
        matrix = draw(size, whole.shape[mode], seed=seed + mode + 1)
        whole = torch.tensordot(matrix, whole, dims=([1], [mode])).movedim(0, mode)
    core, factors = tucker(whole, rank=rank)
    for mode, factor in enumerate(factors):
        torch.testing.assert_close(factor.mT @ factor, torch.eye(factor.shape[1]).double())
        core = torch.tensordot(factor, core, dims=([1], [mode])).movedim(0, mode)
    torch.testing.assert_close(core, whole)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(0, 99))
def test_the_error_is_within_the_bound_of_the_best(rank: int, seed: int) -> None:
    tensor = draw(4, 5, 3, seed=seed)
    core, _ = tucker(tensor, rank=rank)
    error = float((tensor.square().sum() - core.square().sum()).clamp(min=0).sqrt())
    lacking = [
        float(torch.linalg.svdvals(tensor.movedim(mode, 0).flatten(1))[rank:].norm())
        for mode in range(3)
    ]
    assert max(lacking) - 1e-9 <= error <= sum(one**2 for one in lacking) ** 0.5 + 1e-6


def test_iteration_never_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    def norm_after(sweeps: int) -> torch.Tensor:
        monkeypatch.setattr(decompose, "SWEEPS", sweeps)
        return tucker(tensor, rank=2)[0].norm()

    gained = 0.0
    for seed in range(10):
        tensor = draw(5, 5, 5, 5, seed=seed)
        cut, once, more = map(norm_after, (0, 1, 6))
        assert cut <= once + 1e-9
        assert once <= more + 1e-9
        gained += float(more - cut)
    assert gained > 0.1


def test_index_order_and_error_of_a_tucker_weight() -> None:
    weight = draw(11, 19)
    factored = to_tucker(weight, in_modes=(4, 5), out_modes=(3, 4), rank=(3, 4, 2, 3))
    assert [tuple(core.shape) for core in factored] == [
        (4, 3),
        (5, 4),
        (3, 4, 2, 3),
        (2, 3),
        (3, 4),
    ]
    dense = tucker_weight(factored.cores, 19, 11, inputs=2)
    assert float((weight - dense).norm()) == pytest.approx(factored.error)
    x = torch.nn.functional.pad(draw(6, 19, seed=3), (0, 1))
    y = torch.einsum("tab,ap,bq,pqsu,sc,ud->tcd", x.reshape(6, 4, 5), *factored).reshape(6, 12)
    torch.testing.assert_close(y[:, :11], x[:, :19] @ dense.mT)


def test_a_tucker_error_budget_is_kept() -> None:
    weight = draw(16, 16)
    factored = to_tucker(weight, in_modes=(4, 4), out_modes=(4, 4), error=0.5)
    assert 0 < factored.relative_error <= 0.5
    assert to_tucker(weight, in_modes=(4, 4), out_modes=(4, 4), error=0.0).relative_error < 1e-9


@pytest.mark.parametrize(("modes", "rank"), [((4, 5, 3), 2), ((3, 3, 4, 2), 3), ((6, 7), 4)])
def test_sums_of_outer_products_are_recovered(
    modes: tuple[int, ...], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decompose, "ITERATIONS", 500)
    monkeypatch.setattr(decompose, "TOLERANCE", 1e-10)
    tensor = cp_product([draw(mode, rank, seed=mode + k) for k, mode in enumerate(modes)])
    factored = cp(tensor, rank=rank)
    assert factored.relative_error < 1e-3
    difference = float((tensor - cp_product(factored.cores)).norm())
    assert difference == pytest.approx(factored.error, abs=1e-9)


def test_more_terms_and_more_starts_never_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = draw(4, 4, 4)
    errors = [cp(tensor, rank=rank).relative_error for rank in (1, 3, 9)]
    assert errors[0] > errors[1] > errors[2]
    assert cp(tensor, rank=3).error == pytest.approx(cp(tensor, rank=3).error)
    by_starts = {}
    for starts in (1, 6):
        monkeypatch.setattr(decompose, "RESTARTS", starts)
        by_starts[starts] = cp(tensor, rank=3).error
    assert by_starts[6] <= by_starts[1]


def test_two_modes_reach_the_singular_value_decomposition() -> None:
    weight = draw(8, 9)
    factored = to_cp(weight, in_modes=(9,), out_modes=(8,), rank=3)
    assert factored.error == pytest.approx(low_rank(weight, rank=3).error, rel=1e-4)


def test_index_order_of_a_cp_weight() -> None:
    weight = draw(11, 19)
    factored = to_cp(weight.float(), in_modes=(4, 5), out_modes=(3, 4), rank=6)
    assert [tuple(factor.shape) for factor in factored] == [(4, 6), (5, 6), (3, 6), (4, 6)]
    assert {factor.dtype for factor in factored} == {torch.float32}
    dense = cp_weight(factored.cores, 19, 11, inputs=2)
    error = float((weight - dense.double()).norm())
    assert error <= factored.error + 1e-5
    sizes = torch.stack([factor.norm(dim=0) for factor in factored])
    torch.testing.assert_close(sizes, sizes[:1].expand(4, 6))
    x = torch.nn.functional.pad(draw(6, 19, seed=3).float(), (0, 1)).reshape(6, 4, 5)
    y = torch.einsum("tab,ar,br,cr,dr->tcd", x, *factored).reshape(6, 12)
    torch.testing.assert_close(y[:, :11], x.reshape(6, 20)[:, :19] @ dense.mT)


def test_a_weight_of_zeros() -> None:
    zeros = torch.zeros(12, 12)
    for factored in (
        to_cp(zeros, in_modes=(3, 4), out_modes=(3, 4), rank=2),
        to_tucker(zeros, in_modes=(3, 4), out_modes=(3, 4), rank=2),
    ):
        assert factored.relative_error == 0.0
        assert all(bool(torch.isfinite(core).all()) for core in factored)
        # One core of zeros at most, or no core would get a gradient.
        assert sum(not core.any() for core in factored) == 1


def test_what_cannot_be_converted_is_refused() -> None:
    with pytest.raises(TensorizeError, match="one per mode"):
        tucker(draw(3, 4), rank=(1, 2, 3))
    with pytest.raises(TensorizeError, match="rank = 0"):
        cp(draw(3, 4), rank=0)
    with pytest.raises(TensorizeError, match="not finite"):
        to_cp(torch.full((3, 4), torch.nan), in_modes=(4,), out_modes=(3,), rank=1)


def test_the_error_of_cp_is_measured_without_padding() -> None:
    weight = draw(13, 17)
    found = to_cp(weight, in_modes=(4, 5), out_modes=(4, 4), rank=4)
    dense = cp_weight(found.cores, 17, 13, inputs=2)
    assert found.error == pytest.approx(float((weight - dense).norm()))
