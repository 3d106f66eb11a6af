import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import TensorizeError
from outlast.tensorize.svd import (
    balanced,
    discarded_shares,
    low_rank,
    singular,
    spectrum,
    split,
    tails,
)


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 99), st.data())
def test_the_error_is_what_is_discarded(rows: int, columns: int, seed: int, data) -> None:
    weight = matrix(rows, columns, seed)
    rank = data.draw(st.integers(1, min(rows, columns)))
    factored = low_rank(weight, rank=rank)
    down, up = factored
    assert down.shape == (rank, columns)
    assert up.shape == (rows, rank)
    sigma = torch.linalg.svdvals(weight)
    assert factored.error == pytest.approx(float(sigma[rank:].norm()), abs=1e-9)
    assert float((weight - up @ down).norm()) == pytest.approx(factored.error, abs=1e-9)
    assert factored.norm == pytest.approx(float(weight.norm()))
    assert factored.parameters == rank * (rows + columns)


def test_no_other_factors_are_better() -> None:
    weight = matrix(12, 9)
    down, up = low_rank(weight, rank=3)
    best = (weight - up @ down).norm()
    for seed in range(20):
        moved = up + 0.05 * matrix(12, 3, 100 + seed)
        answer = torch.linalg.lstsq(moved, weight).solution
        assert (weight - moved @ answer).norm() > best


def test_the_factors_are_balanced() -> None:
    weight = matrix(12, 9)
    down, up = low_rank(weight, rank=4)
    sigma = torch.diag(torch.linalg.svdvals(weight)[:4])
    torch.testing.assert_close(down @ down.mT, sigma)
    torch.testing.assert_close(up.mT @ up, sigma)


def test_an_error_finds_the_smallest_rank() -> None:
    weight = matrix(16, 16)
    factored = low_rank(weight, error=0.3)
    rank = factored.cores[0].shape[0]
    assert factored.relative_error <= 0.3
    assert low_rank(weight, rank=rank - 1).relative_error > 0.3
    assert low_rank(weight, error=0.0).relative_error < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_factors_have_the_type_of_the_weight(dtype: torch.dtype) -> None:
    weight = (matrix(8, 3) @ matrix(3, 10, 1)).to(dtype)
    factored = low_rank(weight, rank=8)
    down, up = factored
    assert down.dtype == up.dtype == dtype
    rounding = torch.finfo(dtype).eps
    assert (weight.double() - up.double() @ down.double()).norm() < 8 * rounding * weight.norm()


def test_shares_fall_from_one_to_nothing() -> None:
    weight = matrix(6, 9)
    shares = discarded_shares(weight)
    assert shares.shape == (7,)
    assert shares[0] == 1.0
    assert shares[-1] == 0.0
    assert bool((shares.diff() < 0).all())
    assert float(shares[2]) == pytest.approx(low_rank(weight, rank=2).relative_error)
    torch.testing.assert_close(spectrum(weight), torch.linalg.svdvals(weight))


@pytest.mark.parametrize("weight", [torch.zeros(6, 5), torch.ones(6, 5)])
def test_rank_beyond_the_weight_still_gets_gradients(weight: torch.Tensor) -> None:
    down, up = (core.requires_grad_() for core in low_rank(weight, rank=4))
    torch.testing.assert_close((up @ down).detach(), weight, atol=1e-6, rtol=1e-6)
    target = matrix(6, 5).float()
    ((up @ down - target) ** 2).sum().backward()
    assert bool((up.grad.abs().sum(0) > 0).all())


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8))
def test_split_multiplies_back(values: list[float]) -> None:
    sigma = torch.tensor(sorted(values, reverse=True), dtype=torch.float64)
    left, right = split(sigma)
    torch.testing.assert_close(left * right, sigma)
    assert bool((right > 0).all())


def test_balancing_keeps_the_product() -> None:
    down, up = matrix(3, 10) * 100, matrix(8, 3, 1) / 100
    new_down, new_up = balanced(down, up)
    torch.testing.assert_close(new_up @ new_down, up @ down)
    torch.testing.assert_close(new_up.mT @ new_up, new_down @ new_down.mT)


def test_tails_of_a_batch_sum_over_it() -> None:
    values = torch.tensor([[3.0, 1.0], [2.0, 0.5]])
    expected = torch.tensor([math.sqrt(14.25), math.sqrt(1.25), 0.0])
    torch.testing.assert_close(tails(values), expected)


def test_a_matrix_that_does_not_converge_takes_the_slower_way(monkeypatch) -> None:
    weight = matrix(6, 4).reshape(3, 2, 4)

    def fails(*arguments: object, **settings: object) -> None:
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "svd", fails)
    u, sigma, vh = singular(weight)
    torch.testing.assert_close(u @ torch.diag_embed(sigma) @ vh, weight)
    one = singular(weight[0])
    torch.testing.assert_close(one[1], sigma[0])


@pytest.mark.parametrize(
    ("weight", "settings_", "words"),
    [
        (torch.ones(4, 4), {"rank": 5}, "rank = 5 must be between 1 and 4"),
        (torch.ones(4, 4), {"rank": 0}, "rank = 0"),
        (torch.ones(4, 4), {}, "give one of them"),
        (torch.ones(4, 4), {"rank": 2, "error": 0.1}, "give one of them"),
        (torch.ones(4, 4), {"error": 1.5}, "error = 1.5"),
        (torch.tensor([[1.0, math.nan]]), {"rank": 1}, "not finite"),
        (torch.tensor([[1.0, math.inf]]), {"rank": 1}, "not finite"),
        (torch.ones(4, 4, device="meta"), {"rank": 1}, "meta device"),
        (torch.ones(4), {"rank": 1}, "shape"),
        (torch.ones(0, 4), {"rank": 1}, "shape"),
    ],
)
def test_what_cannot_be_converted_is_refused(weight, settings_, words: str) -> None:
    with pytest.raises(TensorizeError, match=words):
        low_rank(weight, **settings_)
