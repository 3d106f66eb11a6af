import pytest
import torch
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize.conversion import InputMoments
from outlast.tensorize.svd import low_rank, low_rank_for_inputs, output_change


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
    down, up = low_rank_for_inputs(weight, moment, rank=3)
    outputs = inputs @ weight.mT
    best = torch.linalg.svdvals(outputs)[3:].norm() / 300**0.5
    assert output_change(weight - up @ down, moment) == pytest.approx(float(best), rel=1e-5)


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


def test_fewer_tokens_than_features_leave_directions_that_follow_the_weight() -> None:
    weight, inputs = draw(12, 10), draw(4, 10, seed=1)
    factored = low_rank_for_inputs(weight, inputs.mT @ inputs / 4, rank=4)
    assert factored.relative_error < 1e-3
    whole = low_rank_for_inputs(weight, inputs.mT @ inputs / 4, rank=10)
    down, up = whole
    torch.testing.assert_close(up @ down, weight, atol=1e-4, rtol=1e-4)


def test_a_moment_that_is_not_quite_positive_is_repaired() -> None:
    moment = torch.eye(6, dtype=torch.float64)
    moment[0, 1] = moment[1, 0] = 1.0 + 1e-4
    factored = low_rank_for_inputs(draw(8, 6), moment, rank=6)
    assert all(bool(torch.isfinite(core).all()) for core in factored)
    assert factored.relative_error < 1e-2


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        (torch.eye(4), "wants \\(5, 5\\)"),
        (torch.zeros(5, 5), "calibration"),
        (-torch.eye(5), "calibration"),
        (torch.full((5, 5), float("nan")), "not finite"),
    ],
)
def test_impossible_moments_are_refused(moment, words: str) -> None:
    with pytest.raises(TensorizeError, match=words):
        low_rank_for_inputs(draw(3, 5), moment, rank=2)


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
    assert moments.tokens == {"first": 42, "second": 42}
    assert moments["first"].dtype == torch.float64
    torch.testing.assert_close(moments["first"], rows.mT @ rows / 42)
    assert moments["second"].shape == (4, 4)


def test_moments_of_some_layers_in_inference_mode_too() -> None:
    model = nn.Sequential(Pair(), Pair())[:1]
    batch = draw(6, 5).float()
    with torch.inference_mode(), InputMoments(model, match=["*.first"]) as moments:
        model(batch)
    with moments:
        model(batch)
    assert moments.tokens == {"0.first": 12}
    torch.testing.assert_close(moments["0.first"], batch.double().mT @ batch.double() / 6)


def test_moments_that_do_not_exist_are_refused() -> None:
    model = Pair()
    with pytest.raises(TensorizeError, match="fits the name of no"):
        InputMoments(model, match="third")
    moments = InputMoments(model, match="first")
    with pytest.raises(TensorizeError, match="no input yet"):
        moments["first"]
    with pytest.raises(TensorizeError, match="does not fit"):
        moments["second"]
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
