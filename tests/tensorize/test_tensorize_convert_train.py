import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import TensorizeError
from outlast.tensorize.decompose import (
    tensor_train,
    to_tensor_train,
    to_tensor_train_matrix,
    to_tucker,
    train_matrix_weight,
    train_product,
    train_weight,
    tucker,
    tucker_weight,
)
from outlast.tensorize.shapes import bond_ranks
from outlast.tensorize.svd import Factored, low_rank, padded

modes_of_tensors = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def random_train(modes: list[int], rank: int, seed: int) -> torch.Tensor:
    """A tensor whose train ranks are at most `rank`."""
    ranks = (1, *bond_ranks(rank, modes), 1)
    whole = torch.ones(1, dtype=torch.float64)
    for k, mode in enumerate(modes):
        whole = torch.tensordot(whole, draw(ranks[k], mode, ranks[k + 1], seed=seed + k), dims=1)
    return whole.squeeze(-1)


@settings(max_examples=30, deadline=None)
@given(modes_of_tensors, st.integers(1, 4), st.integers(0, 99))
def test_tensors_of_low_rank_are_recovered(modes: list[int], rank: int, seed: int) -> None:
    tensor = random_train(modes, rank, seed)
    factored = tensor_train(tensor, rank=rank)
    torch.testing.assert_close(train_product(factored.cores), tensor)
    assert factored.error <= 1e-7 * (1 + factored.norm)


@settings(max_examples=30, deadline=None)
@given(modes_of_tensors, st.integers(1, 4), st.integers(0, 99))
def test_the_error_is_known_and_near_the_best(modes: list[int], rank: int, seed: int) -> None:
    tensor = draw(*modes, seed=seed)
    factored = tensor_train(tensor, rank=rank)
    error = float((tensor - train_product(factored.cores)).norm())
    assert error == pytest.approx(factored.error, abs=1e-8)
    lacking = [
        float(torch.linalg.svdvals(tensor.reshape(math.prod(modes[:bond]), -1))[kept:].norm())
        for bond, kept in enumerate(bond_ranks(rank, modes), start=1)
    ]
    # What any tensor of these ranks lacks at its worst bond bounds the best error from below.
    best = max(lacking, default=0.0)
    assert best <= error + 1e-8
    assert error <= math.sqrt(sum(one**2 for one in lacking)) + 1e-8
    assert error <= math.sqrt(max(1, len(modes) - 1)) * best + 1e-8


@settings(max_examples=30, deadline=None)
@given(modes_of_tensors, st.floats(0.0, 0.9), st.integers(0, 99))
def test_an_error_budget_is_kept(modes: list[int], budget: float, seed: int) -> None:
    tensor = draw(*modes, seed=seed)
    factored = tensor_train(tensor, error=budget)
    error = float((tensor - train_product(factored.cores)).norm())
    assert error <= budget * float(tensor.norm()) + 1e-8


def test_a_budget_saves_parameters() -> None:
    tensor = random_train([4, 4, 4, 4], 3, 0) + 1e-3 * draw(4, 4, 4, 4, seed=9)
    exact, loose = tensor_train(tensor, error=0.0), tensor_train(tensor, error=0.05)
    assert [core.shape[-1] for core in loose.cores[:-1]] == [3, 3, 3]
    assert loose.parameters < exact.parameters


def test_shapes_are_those_of_the_ranks_whatever_the_values() -> None:
    factored = tensor_train(torch.zeros(3, 4, 5, 2, dtype=torch.float64), rank=3)
    assert [tuple(core.shape) for core in factored] == [(3, 3), (3, 4, 3), (3, 5, 2), (2, 2)]
    assert factored.relative_error == 0.0
    assert bool((train_product(factored.cores) == 0).all())
    assert [tuple(core.shape) for core in tensor_train(draw(7), rank=3)] == [(7,)]


def test_both_sides_of_every_bond_are_balanced() -> None:
    modes = [3, 4, 5, 4]
    cores = tensor_train(draw(*modes), rank=3).cores
    for bond in range(1, 4):
        left = train_product(cores[:bond]).reshape(-1, cores[bond].shape[0])
        right = train_product(cores[bond:]).reshape(cores[bond].shape[0], -1)
        gram = left.mT @ left
        torch.testing.assert_close(gram, right @ right.mT)
        torch.testing.assert_close(gram, torch.diag(gram.diagonal()))


def test_two_cores_are_the_singular_value_decomposition() -> None:
    weight = draw(12, 10)
    found = to_tensor_train(weight, in_modes=(10,), out_modes=(12,), rank=4)
    expected = low_rank(weight, rank=4)
    assert found.error == pytest.approx(expected.error)
    torch.testing.assert_close(
        train_weight(found.cores, 10, 12, inputs=1), expected.cores[1] @ expected.cores[0]
    )


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("out_features", "in_features"), [(12, 20), (23, 11), (16, 16)])
def test_weights_of_any_size_at_full_rank(count: int, out_features: int, in_features: int) -> None:
    weight = draw(out_features, in_features)
    in_modes, out_modes = (
        (math.ceil(features ** (1 / count)),) * count for features in (in_features, out_features)
    )
    train = to_tensor_train(weight, in_modes=in_modes, out_modes=out_modes, rank=1000)
    torch.testing.assert_close(
        train_weight(train.cores, in_features, out_features, inputs=count), weight
    )
    matrix = to_tensor_train_matrix(weight, in_modes=in_modes, out_modes=out_modes, rank=1000)
    torch.testing.assert_close(train_matrix_weight(matrix.cores, in_features, out_features), weight)


def test_index_order_of_a_train() -> None:
    weight = draw(12, 20)
    factored = to_tensor_train(weight, in_modes=(4, 5), out_modes=(2, 6), rank=3)
    x = draw(7, 20, seed=1)
    a, b, c, d = factored.cores
    assert [tuple(core.shape) for core in factored] == [(4, 3), (3, 5, 3), (3, 2, 3), (3, 6)]
    y = torch.einsum("tab,ap,pbq,qcs,sd->tcd", x.reshape(7, 4, 5), a, b, c, d).reshape(7, 12)
    dense = train_weight(factored.cores, 20, 12, inputs=2)
    torch.testing.assert_close(y, x @ dense.mT)
    assert float((weight - dense).norm()) == pytest.approx(factored.error)


def test_index_order_of_a_train_matrix() -> None:
    weight = draw(24, 60)
    factored = to_tensor_train_matrix(weight, in_modes=(3, 4, 5), out_modes=(2, 3, 4), rank=5)
    x = draw(7, 60, seed=1)
    assert [tuple(core.shape) for core in factored] == [(2, 3, 5), (5, 3, 4, 5), (5, 4, 5)]
    y = torch.einsum("tace,bap,pdcq,qfe->tbdf", x.reshape(7, 3, 4, 5), *factored).reshape(7, 24)
    dense = train_matrix_weight(factored.cores, 60, 24)
    torch.testing.assert_close(y, x @ dense.mT)
    assert float((weight - dense).norm()) == pytest.approx(factored.error)


def test_kronecker_products_are_train_matrices_of_rank_one() -> None:
    weight = torch.kron(torch.kron(draw(2, 3), draw(3, 2, seed=1)), draw(4, 5, seed=2))
    factored = to_tensor_train_matrix(weight, in_modes=(3, 2, 5), out_modes=(2, 3, 4), rank=1)
    assert factored.relative_error < 1e-7
    torch.testing.assert_close(train_matrix_weight(factored.cores, 30, 24), weight)


def _padded_weight(out_features: int, in_features: int) -> torch.Tensor:
    """Low rank and a rest, so that a budget has something to choose."""
    weight = draw(out_features, 4, seed=1) @ draw(4, in_features, seed=2)
    return weight + 0.3 * draw(out_features, in_features, seed=3)


def _padded(form: str, weight: torch.Tensor, **what: object) -> tuple[Factored, torch.Tensor]:
    out_features, in_features = weight.shape
    sizes = {"in_modes": (8, 8), "out_modes": (6, 8)}
    if form == "tt":
        found = to_tensor_train(weight, **sizes, **what)
        return found, train_weight(found.cores, in_features, out_features, inputs=2)
    if form == "ttm":
        found = to_tensor_train_matrix(weight, **sizes, **what)
        return found, train_matrix_weight(found.cores, in_features, out_features)
    found = to_tucker(weight, **sizes, **what)
    return found, tucker_weight(found.cores, in_features, out_features, inputs=2)


@pytest.mark.parametrize("form", ["tt", "ttm"])
def test_the_error_is_measured_without_padding(form: str) -> None:
    weight = _padded_weight(41, 50)
    found, dense = _padded(form, weight, rank=5)
    assert found.error == pytest.approx(float((weight - dense).norm()))
    assert found.norm == pytest.approx(float(weight.norm()))


@pytest.mark.parametrize("form", ["tt", "ttm", "tucker"])
def test_a_budget_is_not_spent_on_padding(form: str) -> None:
    weight = _padded_weight(33, 50)
    fewer = 0
    for budget in (0.1, 0.2, 0.3, 0.4, 0.5):
        found, dense = _padded(form, weight, error=budget)
        error = float((weight - dense).norm())
        assert error == pytest.approx(found.error)
        assert error <= budget * float(weight.norm())
        # What a budget that counts padding would have taken.
        joined = padded(weight, 48, 64).mT.reshape(8, 8, 6, 8)
        if form == "ttm":
            joined = joined.permute(2, 0, 3, 1).reshape(48, 64)
        if form == "tucker":
            core, factors = tucker(joined, error=budget)
            counted = core.numel() + sum(each.numel() for each in factors)
        else:
            counted = tensor_train(joined, error=budget).parameters
        assert found.parameters <= counted
        fewer += found.parameters < counted
    assert fewer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cores_have_the_type_of_the_weight(dtype: torch.dtype) -> None:
    weight = draw(12, 12).to(dtype)
    for convert in (to_tensor_train, to_tensor_train_matrix):
        cores = convert(weight, in_modes=(3, 4), out_modes=(3, 4), rank=2).cores
        assert {core.dtype for core in cores} == {dtype}
        assert all(core.is_contiguous() for core in cores)


def test_what_cannot_be_converted_is_refused() -> None:
    weight = draw(12, 12)
    with pytest.raises(TensorizeError, match="modes hold 9 input"):
        to_tensor_train(weight, in_modes=(3, 3), out_modes=(3, 4), rank=2)
    with pytest.raises(TensorizeError, match="equally many"):
        to_tensor_train_matrix(weight, in_modes=(12,), out_modes=(3, 4), rank=2)
    modes = {"in_modes": (3, 4), "out_modes": (3, 4)}
    with pytest.raises(TensorizeError, match="one per bond"):
        to_tensor_train(weight, **modes, rank=(2, 2))
    with pytest.raises(TensorizeError, match="give one of them"):
        to_tensor_train(weight, **modes)
    with pytest.raises(TensorizeError, match="not finite"):
        to_tensor_train(torch.full((12, 12), math.nan), **modes, rank=1)
    with pytest.raises(TensorizeError, match="wants \\(out, in\\)"):
        to_tensor_train(torch.tensor(1.0), **modes, rank=1)
