"""Every family of models under the guard: nothing found without a fault, and what is not covered.

The figures of faults over the same models are those of `benchmarks/guard.py`.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import DTYPES, FAMILIES, Case

from outlast.guard import Guard, guard

STEPS = 4


def train(case: Case, steps: int, *, guarded: bool) -> Guard | None:
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-3)
    handle = guard(case.model, optimizer, "full") if guarded else None
    for step in range(steps):
        optimizer.zero_grad()
        case.loss(case.model, case.batch(step)).backward()
        optimizer.step()
    return handle


@pytest.fixture(autouse=True)
def _without_warnings_of_gaps():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*not guarded", UserWarning)
        yield


@pytest.mark.parametrize("kind", [*DTYPES, "autocast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_healthy_steps_have_no_finding_and_the_unguarded_bits(family: str, kind: str) -> None:
    cases = [FAMILIES[family](dtype=DTYPES.get(kind, torch.float32)) for _ in range(2)]
    if kind == "autocast":
        cases = [case.under_autocast() for case in cases]
    train(cases[0], STEPS, guarded=False)
    handle = train(cases[1], STEPS, guarded=True)
    assert handle is not None
    assert handle.ledger.findings == []
    assert handle.ledger.checks > 0
    plain, watched = (case.model.state_dict() for case in cases)
    for name, tensor in plain.items():
        assert torch.equal(tensor, watched[name]), name


@torch.library.custom_op("outlast_zoo::blend", mutates_args=())
def blend(x: Tensor) -> Tensor:
    return x + 0.125 * x.flip(-1)


blend.register_fake(torch.empty_like)
blend.register_autograd(lambda ctx, dy: dy + 0.125 * dy.flip(-1))


class Blend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + 0.125 * x.flip(-1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy + 0.125 * dy.flip(-1)


def with_unknown(model: nn.Module, operation: Any) -> str:
    """Let an unknown operation change what one layer in the middle of the model gives."""
    kinds = (nn.Linear, nn.Conv2d, nn.LSTM, nn.GRU, nn.LayerNorm, nn.Embedding)
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, kinds)]
    name, layer = layers[len(layers) // 2]

    def changed(_: nn.Module, __: Any, found: Any) -> Any:
        return (operation(found[0]), *found[1:]) if isinstance(found, tuple) else operation(found)

    layer.register_forward_hook(changed)
    return name


@pytest.mark.parametrize("operation", [blend, Blend.apply], ids=["custom_op", "autograd_function"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_unknown_operation_is_named_in_every_family(family: str, operation: Any) -> None:
    case = FAMILIES[family]()
    with_unknown(case.model, operation)
    with pytest.warns(UserWarning, match="not guarded in step 1"):
        handle = train(case, 1, guarded=True)
    assert handle is not None
    uncovered = handle.uncovered()
    assert uncovered
    assert [name for name in uncovered.operations if "blend" in name.lower()], str(uncovered)
