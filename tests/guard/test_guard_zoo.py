"""Every family of models under the guard: nothing found without a fault, and what is not covered.

The figures of faults over the same models are those of `benchmarks/guard.py`.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from zoo import DTYPES, FAMILIES, UNKNOWN_OPERATIONS, Case, with_unknown

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


@pytest.mark.parametrize("kind", [*DTYPES, pytest.param("autocast", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_healthy_steps_have_no_finding_and_the_unguarded_bits(family: str, kind: str) -> None:
    cases = [FAMILIES[family](dtype=DTYPES.get(kind, torch.float32)) for _ in range(2)]
    if kind == "autocast":
        cases = [case.under_autocast() for case in cases]
    train(cases[0], STEPS, guarded=False)
    handle = train(cases[1], STEPS, guarded=True)
    assert handle is not None
    handle.remove()
    assert handle.ledger.findings == []
    assert handle.ledger.checks > 0
    plain, watched = (case.model.state_dict() for case in cases)
    for name, tensor in plain.items():
        assert torch.equal(tensor, watched[name]), name


@pytest.mark.parametrize("operation", UNKNOWN_OPERATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_unknown_operation_is_named_in_every_family(family: str, operation: str) -> None:
    case = FAMILIES[family]()
    with_unknown(case.model, UNKNOWN_OPERATIONS[operation])
    with pytest.warns(UserWarning, match="not guarded in step 1"):
        handle = train(case, 1, guarded=True)
    assert handle is not None
    uncovered = handle.uncovered()
    handle.remove()
    assert uncovered
    assert [name for name in uncovered.operations if "blend" in name.lower()], str(uncovered)
