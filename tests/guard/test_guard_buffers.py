"""Buffers under the guard: a flipped bit is put right, and what programs write is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from outlast.guard import Guard, guard


class Net(nn.Module):
    """Batch norm, a table that stays, one that its passes write, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.outer = nn.Linear(8, 3)
        self.register_buffer("table", torch.linspace(1.0, 2.0, 8), persistent=False)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.inner(x))) * self.table
        with torch.no_grad():
            # `.data` leaves no trace in torch's counters.
            self.mean.data.lerp_(hidden.mean(0), 0.1)
            self.calls.data.add_(1)
        return self.outer(hidden)


def train(net: Net, steps: int, strike: Any = lambda step, moment: None) -> Guard:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    handle = guard(net, optimizer, "full")
    handle.restart(0)
    draw = torch.Generator().manual_seed(1)
    for step in range(steps):
        x, y = torch.randn(16, 6, generator=draw), torch.randint(3, (16,), generator=draw)
        strike(step, "rest")
        for _ in handle.attempts():
            optimizer.zero_grad()
            functional.cross_entropy(net(x), y).backward()
            strike(step, "passed")
        optimizer.step()
    handle.finish()
    return handle


def state_of(net: Net) -> dict[str, torch.Tensor]:
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def flip(buffer: torch.Tensor, place: int, bit: int) -> None:
    words = buffer.detach().data.view(-1).view(torch.int32)
    words[place : place + 1].bitwise_xor_(1 << bit)


def test_what_passes_and_programs_write_is_no_fault() -> None:
    net = Net()

    def write(step: int, moment: str) -> None:
        if moment == "rest" and step % 3 == 0:
            net.table.data.mul_(1.5)

    handle = train(net, 30, write)
    assert handle.ledger.findings == []
    assert handle.certificate()["buffer.rest"].checks > 60
    assert float(net.table[0]) == pytest.approx(1.5**10)


@pytest.mark.parametrize("name", ["table", "mean", "norm.running_var"])
@pytest.mark.parametrize("bit", [0, 17, 30])
def test_a_bit_that_flips_between_steps_is_put_right(name: str, bit: int) -> None:
    clean, net = Net(), Net()
    train(clean, 8)

    def strike(step: int, moment: str) -> None:
        if (step, moment) == (5, "rest"):
            flip(dict(net.named_buffers())[name], 3, bit)

    handle = train(net, 8, strike)
    [finding] = handle.ledger.findings
    assert (finding.module, finding.operation, finding.outcome) == (
        name,
        "buffer.rest",
        "corrected",
    )
    assert finding.step == 5
    for key, value in state_of(clean).items():
        assert torch.equal(value, state_of(net)[key]), key


def test_a_step_that_has_used_a_flipped_bit_is_repeated() -> None:
    clean, net = Net(), Net()
    train(clean, 8)
    struck: list[int] = []

    def strike(step: int, moment: str) -> None:
        if (step, moment) == (5, "passed") and not struck:
            struck.append(step)
            flip(net.table, 2, 21)

    handle = train(net, 8, strike)
    assert [(item.module, item.outcome) for item in handle.ledger.findings] == [
        ("table", "corrected")
    ]
    for key, value in dict(clean.named_parameters()).items():
        assert torch.equal(value, dict(net.named_parameters())[key]), key
    assert torch.equal(clean.table, net.table)


def test_the_counters_of_a_model_are_left_alone() -> None:
    net = Net()
    handle = train(net, 5)
    assert int(net.calls) == 5
    assert ("calls", "buffer.rest") not in handle.ledger.sites


def test_a_guard_that_only_looks_on_leaves_the_bit() -> None:
    from outlast.guard import Policy

    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    handle = guard(net, optimizer, Policy("full", correct=False))
    handle.restart(0)
    flip(net.table, 1, 22)
    before = net.table.clone()
    for _ in handle.attempts():
        functional.cross_entropy(
            net(torch.randn(4, 6)), torch.zeros(4, dtype=torch.long)
        ).backward()
    optimizer.step()
    assert [item.outcome for item in handle.ledger.findings] == ["detected"] * 1
    assert torch.equal(net.table, before)
