"""Layers of other kinds whose products are checked."""

from __future__ import annotations

import copy

import torch
from torch import nn

from outlast.guard import guard
from outlast.guard.inject import inject, parse_faults
from outlast.guard.install import plain_product


class LowRank(nn.Module):
    product_names = ("down", "up")

    def __init__(self, inputs: int, rank: int, outputs: int) -> None:
        super().__init__()
        self.product = plain_product
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.randn(outputs, rank) / rank**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product("up", self.product("down", x, self.down), self.up, self.bias)


def train(model: nn.Module, steps: int = 6) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        x = torch.randn(32, 24, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach().clone() for each in model.parameters()]


def test_products_of_a_low_rank_layer_are_checked_with_unchanged_numbers() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(LowRank(24, 6, 40), nn.Tanh(), LowRank(40, 6, 8))
    watched = copy.deepcopy(plain)
    handle = guard(watched)
    assert [each.operations[0] for each in handle.coverage()] == ["linear.forward"] * 2
    weights = train(watched)
    assert all(torch.equal(a, b) for a, b in zip(train(plain), weights, strict=True))
    checked = {name for (name, operation), site in handle.ledger.sites.items() if site.checks}
    # The loss multiplies, too.
    assert checked - {"operations"} == {"0.down", "0.up", "2.down", "2.up"}
    assert not handle.ledger.findings


def test_a_fault_in_one_of_a_layers_products_is_put_right() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(LowRank(24, 6, 40), nn.Tanh(), LowRank(40, 6, 8))
    watched = copy.deepcopy(plain)
    handle = guard(watched)
    inject(handle, parse_faults(["linear.output:module=2.down:bit=30:step=0"]))
    weights = train(watched)
    assert all(torch.equal(a, b) for a, b in zip(train(plain), weights, strict=True))
    assert [(each.module, each.outcome) for each in handle.ledger.findings] == [
        ("2.down", "corrected")
    ]


def test_a_removed_guard_gives_the_product_back() -> None:
    layer = LowRank(4, 2, 4)
    guard(layer).remove()
    assert layer.product is plain_product
