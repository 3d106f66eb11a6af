"""Embeddings: same numbers, no false alarms, and every wrong number found."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from outlast.guard.layers import EmbeddingChecks, why_no_embedding
from outlast.guard.policy import Policy
from outlast.guard.watch import Watch

ROWS, FEATURES, PADDING = 50, 24, 3


def build(dtype: torch.dtype = torch.float32) -> tuple[nn.Embedding, EmbeddingChecks, Watch]:
    torch.manual_seed(0)
    module = nn.Embedding(ROWS, FEATURES, padding_idx=PADDING, dtype=dtype)
    watch = Watch(Policy(), None)
    return module, EmbeddingChecks(watch, module, "embed").forward, watch


def tokens(count: int = 60) -> tuple[Tensor, Tensor]:
    # Few rows are used often, as in text; rows above 40 never.
    ids = (40 * torch.rand(2, count) ** 3).long()
    return ids, 1e-5 * (torch.randn(2, count, FEATURES) + 1.0)


def passes(forward: Any, ids: Tensor, dy: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = forward(ids)
    return y, torch.autograd.grad(y, weight, dy.to(y.dtype))[0]


def once(site: str, change: Any) -> Any:
    done: list[str] = []

    def fault_hook(at: str, module: str, numbers: Tensor) -> None:
        if at == site and not done:
            done.append(at)
            change(numbers)

    return fault_hook


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("count", [1, 60, 3000])
def test_numbers_are_the_same_and_clean_ones_pass(dtype: torch.dtype, count: int) -> None:
    module, checks, watch = build(dtype)
    for _ in range(3):
        ids, dy = tokens(count)
        dy = dy * 1e4 if dtype == torch.float16 else dy
        plain, checked = (
            passes(module, ids, dy, module.weight),
            passes(checks, ids, dy, module.weight),
        )
        assert all(map(torch.equal, plain, checked))
        watch.advance()
    assert watch.ledger.findings == []
    assert watch.ledger.site("embed", "embedding.forward").checks == 6 * count
    rows = min(2 * count, len(module.weight))
    assert watch.ledger.site("embed", "embedding.dw").checks == 3 * (rows + 1)
    assert watch.ledger.site("embed", "embedding.dw").spread < 1.1


@given(bit=st.integers(0, 31), token=st.integers(0, 119), column=st.integers(0, FEATURES - 1))
@settings(max_examples=30, deadline=None)
def test_any_wrong_bit_of_the_output_is_put_right(bit: int, token: int, column: int) -> None:
    module, checks, watch = build()
    ids, dy = tokens()
    plain = passes(module, ids, dy, module.weight)

    def flip(numbers: Tensor) -> None:
        mask = torch.tensor(1, dtype=torch.int32) << bit
        numbers.view(-1, FEATURES).view(torch.int32)[token, column] ^= mask

    watch.fault_hook = once("embedding.output", flip)
    assert all(map(torch.equal, plain, passes(checks, ids, dy, module.weight)))
    assert [each.outcome for each in watch.ledger.findings] == ["corrected"]


@pytest.mark.parametrize(
    ("row", "size"),
    [(0, 1e-6), (1, 1e-9), (PADDING, 1e-30), (45, 1e-30), (0, torch.nan), (45, torch.nan)],
)
def test_a_wrong_gradient_is_put_right(row: int, size: float) -> None:
    module, checks, watch = build()
    ids, dy = tokens()
    plain = passes(module, ids, dy, module.weight)
    watch.fault_hook = once("embedding.dw", lambda numbers: numbers[row, 5].add_(size))
    assert all(map(torch.equal, plain, passes(checks, ids, dy, module.weight)))
    assert [each.outcome for each in watch.ledger.findings] == ["corrected"]


def test_a_row_that_one_token_uses_is_exact() -> None:
    module, checks, watch = build()
    ids, dy = torch.tensor([[7]]), torch.full((1, 1, FEATURES), 1e-3)
    watch.fault_hook = once("embedding.dw", lambda numbers: numbers[7, 0].mul_(1.0 + 2.0**-23))
    passes(checks, ids, dy, module.weight)
    # One unit in the last place of one number.
    assert len(watch.ledger.findings) == 1


def test_infinite_gradients_are_no_fault() -> None:
    module, checks, watch = build()
    ids, dy = tokens()
    dy[0, 0, 0] = torch.inf
    passes(checks, ids, dy, module.weight)
    assert [each.outcome for each in watch.ledger.findings] == ["not_finite"]
    assert watch.uncorrected == 0


def test_frozen_and_evaluated_tables() -> None:
    module, checks, watch = build()
    ids, _ = tokens()
    module.weight.requires_grad_(False)
    assert torch.equal(checks(ids), module(ids))
    assert watch.ledger.checks == ids.numel()
    module.eval()
    checks(ids)
    assert watch.ledger.checks == ids.numel()


def test_what_cannot_be_checked_says_why() -> None:
    assert why_no_embedding(nn.Embedding(4, 4)) == ""
    assert why_no_embedding(nn.Embedding(4, 4, max_norm=1.0)) == "max_norm is set"
    assert why_no_embedding(nn.Embedding(4, 4, sparse=True)) == "sparse is set"
    assert why_no_embedding(nn.EmbeddingBag(4, 4)) == "no check for this kind of module"
