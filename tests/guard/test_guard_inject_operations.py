"""Faults in results of operations: where they strike, and what a drill says of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import FAMILIES

from outlast.errors import GuardError
from outlast.guard import guard
from outlast.guard.inject import zoo
from outlast.guard.inject.fault import Pattern
from outlast.guard.inject.operations import (
    OTHERS,
    PRODUCTS,
    Call,
    OperationFault,
    Trial,
    by_harm,
    drill_operations,
    faults_at,
    summary_of,
)
from outlast.guard.inject.zoo import Case

TOP = Pattern(bits=(30,))


def product() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.rand(4, 8, generator=draw), torch.rand(8, 3, generator=draw)


def differing(found: torch.Tensor, wanted: torch.Tensor) -> list[int]:
    return (found != wanted).view(-1).nonzero().view(-1).tolist()


def test_a_transient_fault_changes_one_number_once():
    a, b = product()
    wanted = a @ b
    with faults_at(["mm"]) as kernels:
        [call] = kernels.record(lambda: a @ b)
        assert (call.operation, call.number, call.shape) == ("mm", 0, (4, 3))
        kernels.arm(OperationFault(call, 5, TOP))
        assert differing(b.T @ a.T, wanted.T) == []
        assert differing(a @ b, wanted) == [5]
        assert differing(a @ b, wanted) == []
        assert kernels.strikes == 1
    assert differing(a @ b, wanted) == []


def test_a_stuck_unit_strikes_every_result_of_its_shape():
    a, b = product()
    wanted = a @ b
    with faults_at(["mm"]) as kernels:
        [call] = kernels.record(lambda: a @ b)
        kernels.arm(OperationFault(call, 5, TOP, stuck=True))
        assert differing(a @ b, wanted) == [5]
        assert differing((2 * a) @ b, 2 * wanted) == [5]
        assert kernels.strikes == 2


@pytest.mark.parametrize("kind", ["flip", "carry", "stuck"])
def test_every_operation_of_a_step_can_be_struck(kind: str):
    """Forward and backward results, also of operations that composites call in C++."""
    case = FAMILIES["unet"]()

    def step() -> None:
        case.model.zero_grad()
        case.loss(case.model, case.batch(0)).backward()

    with faults_at((*PRODUCTS, *OTHERS)) as kernels:
        calls = kernels.record(step)
        found = {call.operation for call in calls}
        assert {"convolution", "convolution_backward", "addmm", "mm", "bmm", "silu"} <= found or {
            *("convolution", "convolution_backward", "addmm", "mm", "silu"),
            "_scaled_dot_product_flash_attention_for_cpu",
        } <= found
        for call in {call.operation: call for call in calls}.values():
            pattern = (
                Pattern(kind, (12,), value=7.0) if kind != "stuck" else Pattern(kind, (), 1, 7.0)
            )
            kernels.arm(OperationFault(call, math.prod(call.shape) - 1, pattern))
            step()
            assert kernels.strikes == 1, call


@pytest.mark.parametrize("family", ["gpt2", "mamba", "resnet", "transformer"])
def test_overridden_kernels_change_no_bit(family: str):
    case = FAMILIES[family]()

    def gradients() -> list[torch.Tensor]:
        case.model.zero_grad()
        case.loss(case.model, case.batch(0)).backward()
        return [parameter.grad.clone() for parameter in case.model.parameters()]

    wanted = gradients()
    with faults_at((*PRODUCTS, *OTHERS)) as kernels:
        assert kernels.record(gradients)
        found = gradients()
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_an_lstm_is_struck_in_both_passes():
    case = FAMILIES["lstm"]()
    with faults_at() as kernels:
        calls = kernels.record(lambda: case.loss(case.model, case.batch(0)).backward())
    found = {call.operation for call in calls}
    assert {"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"} <= found


def test_unknown_operations_and_checks_below_are_refused():
    with pytest.raises(GuardError, match="'matmull' has no kernel for the CPU"):
        faults_at(["matmull"]).__enter__()
    a, b = product()
    with (
        faults_at(["mm"]),
        pytest.raises(GuardError, match=r"overridden already .* before guard\(\)"),
    ):
        faults_at(["mm"]).__enter__()
    assert torch.equal(a @ b, a @ b)


def test_the_guard_computes_again_through_the_overridden_kernels():
    """A stuck product is found, and cannot be put right by the unit that made it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    x = torch.randn(24, 16)
    with faults_at() as kernels:
        calls = kernels.record(lambda: model(x))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = guard(model, optimizer, "linear")
        try:
            model(x).square().mean().backward()
            kernels.arm(OperationFault(calls[0], 40, TOP, stuck=True))
            model(x)
            assert kernels.strikes > 1
            [finding, *_] = handle.ledger.findings
            assert (finding.operation, finding.outcome) == ("linear.forward", "persistent")
        finally:
            handle.remove()


@pytest.mark.parametrize("dtype", zoo.DTYPES)
def test_a_drill_of_great_harm_ends_in_the_clean_bits(dtype: str):
    drill = drill_operations(
        *(FAMILIES["mlp"](dtype=zoo.DTYPES[dtype]), "full"),
        name="mlp",
        dtype=dtype,
        faults=16,
        accepted=lambda harm: harm > 1e-2,
    )
    assert len(drill.trials) == 16
    assert drill.alarms == ()
    for trial in drill.trials:
        assert trial.struck
        assert trial.detected, trial
        assert trial.equal, trial
    assert drill.equal_runs == drill.runs == 2


def test_a_drill_without_protection_measures_harm_and_finds_nothing():
    drill = drill_operations(FAMILIES["mlp"](), "off", name="mlp", dtype="fp32", faults=16)
    assert not any(trial.detected for trial in drill.trials)
    assert any(trial.harm > 1e-2 and not trial.equal for trial in drill.trials)
    # A change of the gradient stays in the optimizer's state.
    assert all(not trial.equal for trial in drill.trials if trial.harm > 0)


def trial(harm: float, *, dtype: str = "fp32", detected: bool = True, **other: Any) -> Trial:
    call = Call("mm", 0, 0, (2, 2), torch.float32, 1)
    values = {"struck": True, "equal": detected, "outcomes": (), "stopped": "", **other}
    return Trial("mlp", dtype, call, "flip 3", harm, detected=detected, **values)


def test_detection_is_counted_by_type_and_harm():
    rows = by_harm(
        [
            trial(math.inf),
            trial(0.5),
            trial(0.5, detected=False, outcomes=("linear.dw: rounding",)),
            trial(0.5, struck=False),
            trial(1e-3, detected=False),
            trial(0.0, dtype="bf16", detected=False, equal=True),
        ]
    )
    assert [(row.dtype, row.low, row.high) for row in rows] == [
        ("fp32", 1e-2, math.inf),
        ("fp32", 1e-4, 1e-2),
        ("bf16", 0.0, 1e-6),
    ]
    [great, middle, none] = rows
    assert (great.detected.count, great.detected.total, great.excused) == (2, 3, 1)
    assert great.detected.interval() == pytest.approx((0.0943, 0.9916), abs=1e-3)
    assert (middle.detected.count, middle.excused) == (0, 0)
    assert none.equal.share == 1.0


def test_the_summary_keeps_every_trial_as_json():
    drill = drill_operations(FAMILIES["mlp"](), "linear", name="mlp", dtype="fp32", faults=4)
    result = summary_of([drill], "linear")
    assert sum(row["detected"]["total"] for row in result["rows"]) == 4
    assert len(result["trials"]) == 4
    assert result["trials"][0]["call"]["dtype"] == "torch.float32"
    assert result["false_alarms"]["count"] == 0


def test_families_are_found_by_name_and_in_files(tmp_path):
    assert list(zoo.families(["llama", "bert"])) == ["llama", "bert"]
    assert zoo.families(["all"]).keys() == zoo.FAMILIES.keys()
    file = tmp_path / "own.py"
    file.write_text("FAMILIES = {'mine': lambda dtype: None}")
    assert list(zoo.families([str(file)])) == ["mine"]
    with pytest.raises(GuardError, match="did you mean 'mixtral'"):
        zoo.families(["mixtrall"])
    file.write_text("")
    with pytest.raises(GuardError, match="has no FAMILIES"):
        zoo.families([str(file)])
    with pytest.raises(GuardError, match="no such file"):
        zoo.families([str(tmp_path / "none.py")])


def trials_that_end_clean(case: Case, operation: str, faults: int) -> int:
    """Number of trials of harmful faults at level linear, all found and put right."""
    drill = drill_operations(
        case,
        "linear",
        name="mine",
        dtype="fp32",
        faults=faults,
        steps=3,
        operations=[operation],
        accepted=lambda harm: harm > 1e-2,
    )
    assert drill.alarms == ()
    assert all(trial.detected and trial.equal for trial in drill.trials if trial.struck)
    return len(drill.trials)


@pytest.mark.parametrize("closed", [float("-inf"), -1e9])
def test_faults_beside_closed_places_of_a_mask_are_found(closed: float) -> None:
    """`nn.MultiheadAttention` with weights adds its mask in the product of Q and K."""

    def build() -> Case:
        torch.manual_seed(0)
        model = nn.ModuleDict(
            {"attention": nn.MultiheadAttention(16, 4, batch_first=True), "head": nn.Linear(16, 5)}
        )
        mask = torch.full((10, 10), closed).triu(1)

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            mixed, weights = model["attention"](x, x, x, attn_mask=mask)
            return model["head"](x + mixed).square().mean() + weights.square().mean()

        def batch(step: int) -> Tensor:
            return torch.randn(3, 10, 16, generator=torch.Generator().manual_seed(step))

        return Case(model, batch, loss)

    assert trials_that_end_clean(build(), "baddbmm", faults=30) > 20


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_equal_numbers_of_a_row_that_round_alike_are_no_finding(transposed: bool) -> None:
    torch.manual_seed(0)
    kind = nn.ConvTranspose3d if transposed else nn.Conv3d
    model = kind(8, 8, 2, stride=2, groups=4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle = guard(model, optimizer, "linear")
    for _ in range(60):
        optimizer.zero_grad()
        # A constant for each channel, as averages over all positions leave it.
        x = torch.randn(4, 8, 1, 1, 1).expand(4, 8, 4, 4, 6).bfloat16().requires_grad_()
        y = model(x)
        y.backward(torch.randn(4, 8, 1, 1, 1).bfloat16().expand(y.shape))
        optimizer.step()
    handle.remove()
    assert handle.ledger.findings == []


def test_gradients_of_no_samples_are_checked() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(8, 5), "not": nn.Conv2d(2, 3, 2)})

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model["used"](x).square().mean() + model["not"](x[:0].view(0, 2, 2, 2)).sum()

    def batch(step: int) -> Tensor:
        return torch.randn(6, 8, generator=torch.Generator().manual_seed(step))

    assert trials_that_end_clean(Case(model, batch, loss), "convolution_backward", faults=20)


def test_an_output_of_attention_that_leaves_no_gradient_is_put_right_at_level_linear() -> None:
    """As where a huge number saturates the softmax of a loss."""
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 10, 16)

    def step() -> Tensor:
        model.zero_grad()
        mixed, _ = model(x, x, x, need_weights=False)
        (mixed * 0.0).sum().backward()
        return mixed.detach()

    with faults_at(PRODUCTS) as kernels:
        calls = kernels.record(step)
        call = next(call for call in calls if "flash" in call.operation and call.output == 0)
        right = step()
        handle = guard(model, torch.optim.SGD(model.parameters(), lr=0.1), "linear")
        try:
            kernels.arm(OperationFault(call, 7, TOP))
            found = step()
            assert kernels.strikes == 1
            kernels.arm(None)
        finally:
            handle.remove()
    assert torch.equal(found, right)
    assert [finding.outcome for finding in handle.ledger.findings] == ["corrected"]
