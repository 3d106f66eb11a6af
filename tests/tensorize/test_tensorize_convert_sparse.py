from itertools import pairwise

import pytest
import torch

from outlast.errors import TensorizeError
from outlast.tensorize import svd
from outlast.tensorize.svd import low_rank, low_rank_and_sparse


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def dense(factored) -> torch.Tensor:
    down, up, values, indices = factored
    product = up @ down
    return product.reshape(-1).index_add(0, indices, values).reshape(product.shape)


def spiked() -> tuple[torch.Tensor, torch.Tensor]:
    """Rank 3 and 30 large entries, with their places."""
    weight = draw(30, 3) @ draw(3, 40, seed=1)
    places = torch.randperm(1200, generator=torch.Generator().manual_seed(2))[:30].sort().values
    weight.reshape(-1)[places] += 20 * draw(30, seed=3).sign()
    return weight, places


def test_low_rank_and_large_entries_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, places = spiked()
    monkeypatch.setattr(svd, "SWEEPS", 30)
    factored = low_rank_and_sparse(weight, rank=3, density=30 / 1200)
    assert factored.relative_error < 1e-3
    assert torch.equal(factored.cores[3], places)
    assert low_rank(weight, rank=4).relative_error > 0.3
    torch.testing.assert_close(dense(factored), weight, atol=0.1, rtol=0.01)


def test_the_error_is_measured_and_never_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = draw(20, 25)
    errors = []
    for sweeps in (1, 2, 5, 12):
        monkeypatch.setattr(svd, "SWEEPS", sweeps)
        factored = low_rank_and_sparse(weight, rank=5, density=0.1)
        errors.append(factored.error)
        assert float((weight - dense(factored)).norm()) == pytest.approx(factored.error)
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(errors))
    assert errors[-1] < errors[0] < low_rank(weight, rank=5).error


def test_places_are_ascending_and_factors_in_the_weights_type() -> None:
    weight = draw(20, 25).to(torch.bfloat16)
    down, up, values, indices = low_rank_and_sparse(weight, rank=5, density=0.1)
    assert len(indices) == 50
    assert bool((indices.diff() > 0).all())
    assert down.dtype == up.dtype == values.dtype == torch.bfloat16


def test_no_entries_are_plain_low_rank() -> None:
    weight = draw(20, 25)
    factored = low_rank_and_sparse(weight, rank=5, density=0.0)
    assert factored.cores[2].numel() == 0
    assert factored.error == pytest.approx(low_rank(weight, rank=5).error)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"density": 1.5}, "density = 1.5"),
        ({"density": 0.1, "rank": 21}, "rank = 21"),
    ],
)
def test_what_cannot_be_converted_is_refused(settings, words: str) -> None:
    with pytest.raises(TensorizeError, match=words):
        low_rank_and_sparse(draw(20, 25), **{"rank": 5, **settings})
