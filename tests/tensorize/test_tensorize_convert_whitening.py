import pytest
import torch
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize.convert.distill import InputMoments
from outlast.tensorize.convert.svd import low_rank, low_rank_for_inputs, output_change


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def uneven_inputs(tokens: int, features: int) -> torch.Tensor:
    """Inputs with correlated features of very different sizes."""
    scales = torch.logspace(1, -1, features, dtype=torch.float64)
    return draw(tokens, features, seed=1) @ (draw(features, features, seed=2) * scales)


def test_it_beats_plain_svd_on_the_outputs_and_loses_on_the_weight() -> None:
    weight, inputs = draw(20, 16), uneven_inputs(500, 16)
    moment = inputs.mT @ inputs / 500
    weighted = low_rank_for_inputs(weight, moment, rank=4)
    plain = low_rank(weight, rank=4)
    changes = [
        float((inputs @ (weight - up @ down).mT).square().sum(1).mean().sqrt())
        for down, up in (weighted, plain)
    ]
    assert changes[0] < 0.95 * changes[1]
    assert changes[0] == pytest.approx(weighted.error)
    assert changes[1] == pytest.approx(
        output_change(weight - plain.cores[1] @ plain.cores[0], moment)
    )
    assert weighted.norm == pytest.approx(float((inputs @ weight.mT).square().sum(1).mean().sqrt()))
    assert float((weight - weighted.cores[1] @ weighted.cores[0]).norm()) > plain.error


def test_it_is_the_minimiser() -> None:
    weight, inputs = draw(12, 10), uneven_inputs(300, 10)
    moment = inputs.mT @ inputs / 300
    down, up = low_rank_for_inputs(weight, moment, rank=3, damping=0.0)
    outputs = inputs @ weight.mT
    best = torch.linalg.svdvals(outputs)[3:].norm() / 300**0.5
    assert output_change(weight - up @ down, moment) == pytest.approx(float(best), rel=1e-6)


def test_features_alone_do_as_a_diagonal_moment() -> None:
    weight, squares = draw(12, 10), torch.logspace(2, -2, 10, dtype=torch.float64)
    of_features = low_rank_for_inputs(weight, squares, rank=3)
    of_matrix = low_rank_for_inputs(weight, torch.diag(squares), rank=3)
    assert of_features.error == pytest.approx(of_matrix.error)
    products = [up @ down for down, up in (of_features, of_matrix)]
    torch.testing.assert_close(*products)


def test_white_inputs_give_plain_svd() -> None:
    weight = draw(9, 12)
    weighted, plain = low_rank_for_inputs(weight, torch.eye(12), rank=5), low_rank(weight, rank=5)
    torch.testing.assert_close(
        weighted.cores[1] @ weighted.cores[0], plain.cores[1] @ plain.cores[0]
    )
    assert weighted.error == pytest.approx(plain.error)


def test_factors_are_balanced() -> None:
    inputs = uneven_inputs(100, 10)
    down, up = low_rank_for_inputs(draw(12, 10), inputs.mT @ inputs, rank=4)
    torch.testing.assert_close(up.mT @ up, down @ down.mT)


@pytest.mark.parametrize("damping", [1e-6, 0.0])
def test_fewer_tokens_than_features_leave_directions_that_follow_the_weight(damping) -> None:
    weight, inputs = draw(12, 10), draw(4, 10, seed=1)
    factored = low_rank_for_inputs(weight, inputs.mT @ inputs / 4, rank=4, damping=damping)
    assert factored.relative_error < 1e-3
    whole = low_rank_for_inputs(weight, inputs.mT @ inputs / 4, rank=10, damping=damping)
    down, up = whole
    torch.testing.assert_close(up @ down, weight, atol=1e-4, rtol=1e-4)


def test_a_moment_that_is_not_quite_positive_is_repaired() -> None:
    moment = torch.eye(6, dtype=torch.float64)
    moment[0, 1] = moment[1, 0] = 1.0 + 1e-4
    factored = low_rank_for_inputs(draw(8, 6), moment, rank=6)
    assert all(bool(torch.isfinite(core).all()) for core in factored)
    assert factored.relative_error < 1e-2


def test_an_error_is_kept_to() -> None:
    weight, inputs = draw(20, 16), uneven_inputs(500, 16)
    factored = low_rank_for_inputs(weight, inputs.mT @ inputs, error=0.05)
    assert factored.relative_error <= 0.05
    rank = factored.cores[0].shape[0]
    fewer = low_rank_for_inputs(weight, inputs.mT @ inputs, rank=rank - 1)
    assert fewer.relative_error > 0.05


@pytest.mark.parametrize(
    ("moment", "damping", "words"),
    [
        (torch.eye(4), 0.0, "wants \\(5, 5\\)"),
        (torch.zeros(5, 5), 0.0, "calibration"),
        (-torch.ones(5), 0.0, "calibration"),
        (torch.full((5,), float("nan")), 0.0, "not finite"),
        (torch.eye(5), -1.0, "damping = -1.0"),
    ],
)
def test_impossible_moments_are_refused(moment, damping, words: str) -> None:
    with pytest.raises(TensorizeError, match=words):
        low_rank_for_inputs(draw(3, 5), moment, rank=2, damping=damping)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.second = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_moments_of_calibration_batches() -> None:
    model = Pair()
    batches = [draw(2, 7, 5, seed=seed).float() for seed in range(3)]
    with InputMoments(model) as moments:
        for batch in batches:
            model(batch)
    model(batches[0])
    rows = torch.cat(batches).reshape(-1, 5).double()
    assert moments.names == ("first", "second")
    assert moments.tokens == {"first": 42, "second": 42}
    assert moments["first"].dtype == torch.float64
    torch.testing.assert_close(moments["first"], rows.mT @ rows / 42)
    torch.testing.assert_close(moments.mean("first"), rows.mean(0))
    assert moments["second"].shape == (4, 4)


def test_diagonal_moments_of_some_layers() -> None:
    model = nn.Sequential(Pair(), Pair())[:1]
    batch = draw(6, 5).float()
    with torch.inference_mode(), InputMoments(model, match=["*.first"], diagonal=True) as moments:
        model(batch)
    with moments:
        model(batch)
    assert moments.names == ("0.first",)
    torch.testing.assert_close(moments["0.first"], batch.double().square().mean(0))


def test_moments_that_do_not_exist_are_refused() -> None:
    model = Pair()
    with pytest.raises(TensorizeError, match="fits the name of no"):
        InputMoments(model, match="third")
    moments = InputMoments(model, match="first")
    with pytest.raises(TensorizeError, match="no input yet"):
        moments["first"]
    with pytest.raises(TensorizeError, match="does not fit"):
        moments.mean("second")
    with moments, pytest.raises(TensorizeError, match="not finite"):
        model(torch.full((1, 5), float("inf")))


class ByName(nn.Module):
    """Gives its layer x by name, as some models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(input=x)


def test_moments_of_inputs_that_are_given_by_name() -> None:
    model, x = ByName(), torch.eye(4)
    with InputMoments(model) as moments:
        model(x)
    torch.testing.assert_close(moments["first"], torch.eye(4, dtype=torch.float64) / 4)
