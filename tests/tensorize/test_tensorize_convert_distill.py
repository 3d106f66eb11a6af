import copy
import math

import pytest
import torch
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize import conversion
from outlast.tensorize.bottleneck import ACTIVATIONS
from outlast.tensorize.conversion import (
    cosine,
    distill_model,
    linear_part,
    replaced_layers,
    start_from_dense,
)
from outlast.tensorize.svd import low_rank


class BottleneckLinear(nn.Module):
    """What conversion needs of the layer of that name, and nothing else."""

    def __init__(
        self, in_features: int, out_features: int, rank: int, activation: str = "silu", **options
    ) -> None:
        super().__init__()
        self.activation = activation
        dtype = options.get("dtype")
        self.down = nn.Linear(in_features, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, out_features, bias=options.get("bias", True), dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(ACTIVATIONS[self.activation](self.down(x)))


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense(in_features: int = 24, out_features: int = 20, *, rank: int = 24) -> nn.Linear:
    """A layer whose weight has a falling spectrum, and nothing beyond a rank."""
    layer = nn.Linear(in_features, out_features)
    left, right = draw(out_features, rank), draw(rank, in_features, seed=1)
    spectrum = 0.8 ** torch.arange(rank)
    with torch.no_grad():
        layer.weight.copy_((left * spectrum) @ right / 8)
        layer.bias.copy_(draw(out_features, seed=2))
    return layer


class Held(nn.Module):
    """A model of one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def change(student: nn.Module, teacher: nn.Module, x: torch.Tensor) -> float:
    with torch.no_grad():
        return float((student(x) - teacher(x)).norm() / teacher(x).norm())


def test_a_small_signal_makes_the_bottleneck_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, x = dense(), draw(4000, 24, seed=5)
    best = low_rank(teacher.weight, rank=8)
    errors = []
    for signal in (1.0, 0.25, 0.01):
        student = BottleneckLinear(24, 20, 8)
        monkeypatch.setattr(conversion, "SIGNAL", signal)
        start_from_dense(student, teacher)
        with torch.no_grad():
            y = student(x) - teacher.bias
        errors.append(float((y - x @ (best.cores[1] @ best.cores[0]).mT).norm() / y.norm()))
    assert errors[0] > errors[1] > errors[2]
    # The rest is s^2 / 2 of the variance: 18 % at s = 0.25, 0.7 % at 0.01.
    assert errors[1] == pytest.approx(0.25 / math.sqrt(2), rel=0.2)
    assert errors[2] == pytest.approx(0.01 / math.sqrt(2), rel=0.2)


def test_the_start_uses_the_inputs_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "SIGNAL", 0.05)
    teacher = dense()
    mix = draw(24, 24, seed=7) * torch.logspace(1, -1, 24)
    x = draw(3000, 24, seed=8) @ mix.mT
    moment = x.double().mT @ x.double() / 3000
    plain, weighted = BottleneckLinear(24, 20, 8), BottleneckLinear(24, 20, 8)
    start_from_dense(plain, teacher)
    start_from_dense(weighted, teacher, moment=moment)
    rms = weighted.down(x).square().mean(0).sqrt()
    torch.testing.assert_close(rms, torch.full((8,), 0.05), rtol=1e-3, atol=1e-5)
    assert change(weighted, teacher, x) < 0.5 * change(plain, teacher, x)


@pytest.mark.parametrize(("activation", "slope"), [("silu", 0.5), ("gelu", 0.5), ("relu", 0.5)])
@pytest.mark.parametrize("signal", [0.1, 1.0, 3.0])
def test_linear_parts(activation: str, slope: float, signal: float) -> None:
    mean, found = linear_part(activation, signal)
    assert found == pytest.approx(slope, abs=1e-6)
    assert mean > 0
    assert linear_part("relu", signal)[0] == pytest.approx(
        signal / math.sqrt(2 * math.pi), rel=1e-5
    )
    assert linear_part("tanh", signal)[0] == pytest.approx(0, abs=1e-9)


def test_distillation_improves_on_its_start() -> None:
    torch.manual_seed(0)
    teacher, student = dense(), BottleneckLinear(24, 20, 8)
    start_from_dense(student, teacher)
    held_out = draw(2000, 24, seed=9)
    before = change(student, teacher, held_out)
    batches = [draw(128, 24, seed=100 + step) for step in range(80)]
    seen: list[tuple[int, dict[str, float]]] = []
    errors = distill_model(
        nn.ModuleDict({"layer": student}),
        Held(teacher),
        batches,
        learning_rate=cosine(2e-2, 80, warmup=10),
        on_batch=lambda step, latest: seen.append((step, latest["layer"])),
    )["layer"]
    assert seen == list(enumerate(errors))
    assert len(errors) == 80
    after = change(student, teacher, held_out)
    assert after < 0.97 * before
    assert errors[0] == pytest.approx(before, rel=0.1)
    assert teacher.weight.grad is None


def test_half_precision_layers_learn_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(conversion, "SIGNAL", 0.5)
    teacher, student = dense(), BottleneckLinear(24, 20, 8, dtype=torch.bfloat16)
    start_from_dense(student, teacher)
    batches = [draw(64, 24, seed=100 + step) for step in range(40)]
    widths = set()
    errors = distill_model(
        nn.ModuleDict({"layer": student}),
        Held(teacher),
        batches,
        on_batch=lambda step, latest: widths.add(student.down.weight.dtype),
    )["layer"]
    assert widths == {torch.float32}
    assert {parameter.dtype for parameter in student.parameters()} == {torch.bfloat16}
    assert sum(errors[-5:]) < sum(errors[:5])


class Net(nn.Module):
    def __init__(self, layer: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.second = nn.Linear(16, 10)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.second(self.dropout(torch.tanh(self.first(x * scale))))


def students(teacher: Net) -> Net:
    student = copy.deepcopy(teacher)
    student.first = BottleneckLinear(12, 16, 4)
    student.second = BottleneckLinear(16, 10, 4)
    return student


def test_all_layers_of_a_model_learn() -> None:
    torch.manual_seed(0)
    teacher = Net()
    student = students(teacher)
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    assert set(replaced_layers(student, teacher)) == {"first", "second"}
    x = draw(64, 12)
    seen = []
    errors = distill_model(
        student,
        teacher,
        [{"x": x, "scale": 1.0}, (x,), [x, 1.0], *[x] * 37],
        learning_rate=2e-2,
        on_batch=lambda number, latest: seen.append((number, set(latest), teacher.training)),
    )
    assert seen == [(number, {"first", "second"}, False) for number in range(40)]
    for name in ("first", "second"):
        assert len(errors[name]) == 40
        assert errors[name][-1] < 0.9 * errors[name][0]
    # Evaluation mode while learning (no dropout), the mode of before afterwards, nothing left.
    assert teacher.training
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert not teacher.first._forward_hooks
    assert all(parameter.grad is None for parameter in student.parameters())


def test_a_model_in_which_nothing_was_replaced_is_refused() -> None:
    teacher = Net()
    with pytest.raises(TensorizeError, match="replace some"):
        distill_model(copy.deepcopy(teacher), teacher, [])


def test_hooks_are_gone_after_an_error() -> None:
    teacher = Net()
    student = students(teacher)
    with pytest.raises(TensorizeError, match="distillation of first is not finite at step 0"):
        distill_model(student, teacher, [torch.full((2, 12), torch.nan)])
    assert not teacher.first._forward_hooks
    assert teacher.training


def test_zero_tokens_are_no_step() -> None:
    teacher = dense()
    student = BottleneckLinear(24, 20, 8)
    held = nn.ModuleDict({"layer": student})
    assert distill_model(held, Held(teacher), [torch.zeros(0, 24)]) == {"layer": ()}


def test_learning_rate_rises_and_falls() -> None:
    rate = cosine(1.0, 110, warmup=10)
    assert rate(0) == pytest.approx(0.1)
    assert rate(10) == pytest.approx(1.0)
    assert rate(60) == pytest.approx(0.5)
    assert rate(110) == rate(500) == pytest.approx(0.0)


def test_layers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TensorizeError, match="shape"):
        start_from_dense(BottleneckLinear(20, 24, 4), dense())
    with pytest.raises(TensorizeError, match="bias = True"):
        start_from_dense(BottleneckLinear(24, 20, 4, bias=False), dense())
    with pytest.raises(TensorizeError, match="rank = 300"):
        start_from_dense(BottleneckLinear(24, 20, 300), dense())
    frozen = nn.ModuleDict({"layer": BottleneckLinear(24, 20, 4).requires_grad_(False)})
    with pytest.raises(TensorizeError, match="unfreeze"):
        distill_model(frozen, Held(dense()), [])


class ByName(nn.Module):
    """Gives its layer x by name, as some models do."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(input=x)


def test_layers_that_get_their_input_by_name_learn() -> None:
    torch.manual_seed(0)
    teacher, student = ByName(dense()), ByName(BottleneckLinear(24, 20, 8))
    errors = distill_model(student, teacher, [draw(64, 24)] * 20)
    assert errors["first"][-1] < errors["first"][0]
