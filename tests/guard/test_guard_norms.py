"""Normalisation layers: same numbers, no false alarms, and every wrong number found."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from outlast.guard.layers import NormChecks, norm_kind
from outlast.guard.policy import Policy
from outlast.guard.watch import Watch

FEATURES = 96


class ToyRMSNorm(nn.Module):
    """As Llama's: rounds the normalised numbers to the input's type before the gain."""

    def __init__(self, features: int, shift: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features) - shift)
        self.variance_epsilon = 1e-6
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        if self.shift:
            return (wide * (self.shift + self.weight.float())).type_as(x)
        return self.weight * wide.to(x.dtype)


class OneRMSNorm(ToyRMSNorm):
    def __init__(self, features: int) -> None:
        super().__init__(features, shift=1.0)


class StrangeRMSNorm(ToyRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.5


KINDS = {
    "layer": nn.LayerNorm,
    "plain": lambda features: nn.LayerNorm(features, elementwise_affine=False),
    "rms": nn.RMSNorm,
    "llama": ToyRMSNorm,
    "gemma": OneRMSNorm,
}
TYPES = {
    "fp32": (torch.float32, torch.float32),
    "mixed": (torch.bfloat16, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
}


def build(kind: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, NormChecks, Watch]:
    torch.manual_seed(0)
    module = KINDS[kind](FEATURES)
    for parameter in module.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    module = module.to(dtype)
    watch = Watch(Policy(), None)
    return module, NormChecks(watch, module, "norm").forward, watch


def data(dtype: torch.dtype, mean: float = 0.0, rows: int = 40) -> tuple[Tensor, Tensor]:
    scale = torch.exp(torch.randn(2, rows, 1))
    x = (mean + scale * torch.randn(2, rows, FEATURES)).to(dtype)
    return x.requires_grad_(), 1e-4 * (torch.randn(2, rows, FEATURES) + 0.5)


def passes(forward: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor, module: nn.Module) -> Any:
    y = forward(x)
    return y, *torch.autograd.grad(y, [x, *module.parameters()], dy.to(y.dtype))


def injected(site: str, change: Callable[[Tensor], None], once: bool = True) -> Any:
    done = []

    def fault_hook(at: str, module: str, numbers: Tensor) -> None:
        if at == site and not (once and done):
            done.append(at)
            change(numbers)

    return fault_hook


@pytest.mark.parametrize("mean", [0.0, 20.0])
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_the_same_and_clean_ones_pass(kind: str, types: str, mean: float) -> None:
    of_data, of_weights = TYPES[types]
    module, checks, watch = build(kind, of_weights)
    for _ in range(3):
        x, dy = data(of_data, mean)
        plain, checked = passes(module, x, dy, module), passes(checks, x, dy, module)
        assert all(map(torch.equal, plain, checked))
        watch.advance()
    assert watch.ledger.findings == []
    for site in watch.ledger.sites.values():
        assert site.spread < 1.2
    expected = 3 if any(True for _ in module.parameters()) else 2
    assert sum(site.checks > 0 for site in watch.ledger.sites.values()) == expected


@pytest.mark.parametrize("kind", ["rms", "llama"])
def test_fp32_rms_norm_adds_to_a_residual_stream_in_the_same_order(kind: str) -> None:
    # The stream is used three times: by the residual sum and twice by the norm.
    module, checks, watch = build(kind)
    x, dy = data(torch.float32)

    def block(norm: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        stream = x * 1.1
        return stream + torch.tanh(norm(stream))

    plain = passes(lambda x: block(module, x), x, dy, module)
    checked = passes(lambda x: block(checks, x), x, dy, module)
    assert all(map(torch.equal, plain, checked))
    assert watch.ledger.site("norm", "norm.dx").checks == 80


@given(row=st.integers(0, 79), column=st.integers(0, FEATURES - 1), sign=st.sampled_from([1, -1]))
@settings(max_examples=25, deadline=None)
def test_an_error_above_the_detection_point_is_put_right(row: int, column: int, sign: int) -> None:
    for kind, types, share in (("layer", "fp32", 1e-5), ("llama", "mixed", 0.05)):
        module, checks, watch = build(kind, TYPES[types][1])
        x, dy = data(TYPES[types][0])
        plain = passes(module, x, dy, module)
        for site, index in (("norm.output", 0), ("norm.dx", 1), ("norm.dw", 2)):
            correct = plain[index].detach().reshape(-1, plain[index].shape[-1])
            at = row % len(correct) if correct.dim() > 1 else 0
            size = share * float(correct[at].float().norm())
            if site == "norm.dw":
                size = 10.0 * share * float(correct[at].float().abs().max())

            def change(numbers: Tensor, at: int = at, size: float = size) -> None:
                numbers.reshape(-1, numbers.shape[-1])[at, column] += sign * size

            watch.fault_hook = injected(site, change)
            before = len(watch.ledger.findings)
            checked = passes(checks, x, dy, module)
            assert [each.outcome for each in watch.ledger.findings[before:]] == ["corrected"]
            assert all(map(torch.equal, plain, checked))


def test_wrong_gradients_that_cannot_be_replaced_are_reported() -> None:
    module, checks, watch = build("llama")
    x, dy = data(torch.float32)
    watch.fault_hook = injected("norm.dx", lambda numbers: numbers[0, 3, 5].add_(1.0))
    passes(checks, x, dy, module)
    (finding,) = watch.ledger.findings
    assert (finding.operation, finding.outcome, finding.rows) == ("norm.dx", "detected", 1)
    assert watch.uncorrected == 1


@pytest.mark.parametrize("kind", ["layer", "rms", "llama"])
def test_an_input_that_changes_before_the_backward_pass_is_harmful(kind: str) -> None:
    # Gradients of other numbers than were used are not the step's, however often they come out.
    _, checks, watch = build(kind)
    x, dy = data(torch.float32)
    x.requires_grad_()
    y = checks(x)
    x.data[..., 5] *= 3.0
    y.backward(dy)
    assert watch.ledger.findings
    assert {each.outcome for each in watch.ledger.findings} == {"detected"}
    assert watch.uncorrected


def test_a_lasting_fault_is_left_to_another_attempt_at_the_step() -> None:
    module, checks, watch = build("layer")
    x, dy = data(torch.float32)
    watch.fault_hook = injected(
        "norm.output", lambda numbers: numbers[0, 3, 5].mul_(2.0), once=False
    )
    passes(checks, x, dy, module)
    assert [each.outcome for each in watch.ledger.findings] == ["detected"]


@pytest.mark.parametrize("site", ["norm.output", "norm.dx", "norm.dw"])
def test_nan_is_found(site: str) -> None:
    module, checks, watch = build("layer")
    x, dy = data(torch.float32)
    plain = passes(module, x, dy, module)
    watch.fault_hook = injected(site, lambda numbers: numbers.view(-1)[7].fill_(torch.nan))
    assert all(map(torch.equal, plain, passes(checks, x, dy, module)))
    assert [each.outcome for each in watch.ledger.findings] == ["corrected"]


@pytest.mark.parametrize("kind", ["layer", "llama"])
def test_infinite_data_are_no_fault(kind: str) -> None:
    module, checks, watch = build(kind)
    x, dy = data(torch.float32)
    dy[0, 3, 5] = torch.inf
    passes(checks, x, dy, module)
    assert watch.ledger.findings
    assert {each.outcome for each in watch.ledger.findings} == {"not_finite"}
    assert watch.uncorrected == 0


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("frozen", ["input", "weight"])
def test_frozen_tensors(kind: str, frozen: str) -> None:
    module, checks, watch = build(kind)
    x, dy = data(torch.float32)
    x.requires_grad_(frozen != "input")
    module.requires_grad_(frozen != "weight")
    checks(x).backward(dy)
    seen = {each.operation for each in watch.ledger.sites.values() if each.checks}
    missing = {"input": "norm.dx", "weight": "norm.dw"}[frozen]
    assert seen == {"norm.forward", "norm.dx", "norm.dw"} - {missing}
    assert watch.ledger.findings == []


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["layer", "llama"])
def test_under_activation_checkpointing(kind: str, reentrant: bool) -> None:
    module, checks, watch = build(kind)
    x, dy = data(torch.float32)
    plain = passes(module, x, dy, module)
    for parameter in module.parameters():
        parameter.grad = None
    leaf = x.detach().requires_grad_()
    y = checkpoint(checks, leaf, use_reentrant=reentrant)
    y.backward(dy)
    gradients = [leaf.grad, *(parameter.grad for parameter in module.parameters())]
    assert all(map(torch.equal, plain, (y, *gradients)))
    assert watch.ledger.findings == []
    assert watch.ledger.site("norm", "norm.dx").checks == 80


def test_under_autocast() -> None:
    module, checks, watch = build("layer")
    x, dy = data(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        plain = module(x)
        checked = checks(x)
    for y in (plain, checked):
        y.backward(dy.to(y.dtype))
    assert torch.equal(plain, checked)
    assert watch.ledger.site("norm", "norm.dx").checks == 80
    assert watch.ledger.findings == []


def test_long_sums_in_bf16_that_lose_their_last_terms_are_no_fault() -> None:
    module, checks, watch = build("layer", torch.bfloat16)
    x, dy = data(torch.bfloat16, rows=1500)
    passes(checks, x, dy.abs(), module)
    assert watch.ledger.findings == []


def test_an_unknown_formula_is_not_guarded_and_said_so() -> None:
    module = StrangeRMSNorm(FEATURES)
    checks = NormChecks(Watch(Policy(), None), module, "blocks.0.norm").forward
    x, _ = data(torch.float32)
    with pytest.warns(UserWarning, match="blocks.0.norm .StrangeRMSNorm. is not guarded"):
        y = checks(x)
    assert torch.equal(y, module(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checks(x)
    assert checks.__self__.watch.ledger.checks == 0


def test_kinds() -> None:
    assert norm_kind(nn.LayerNorm(4)) == "layer"
    assert norm_kind(nn.RMSNorm(4)) == "rms"
    assert norm_kind(ToyRMSNorm(4)) == "rms_like"
    assert norm_kind(nn.LayerNorm((4, 4))) is None
    assert norm_kind(nn.BatchNorm1d(4)) is None
    assert norm_kind(nn.Linear(4, 4)) is None


def test_evaluation_is_left_alone() -> None:
    module, checks, watch = build("layer")
    module.eval()
    with torch.no_grad():
        checks(data(torch.float32)[0])
    assert watch.ledger.checks == 0
