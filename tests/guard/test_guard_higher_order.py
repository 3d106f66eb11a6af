"""Gradients of gradients, ``torch.func`` and forward-mode differentiation under the guard."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from outlast.guard import Guard, guard

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _without_warnings_of_gaps():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*not guarded", UserWarning)
        yield


class Mixed(nn.Module):
    """Norms of several kinds, attention by hand, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(8, 16)
        self.norms = nn.ModuleList((nn.LayerNorm(16), nn.RMSNorm(16), nn.GroupNorm(4, 16)))
        self.mix = nn.Linear(16, 48)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for norm in self.norms:
            x = torch.tanh(norm(x))
        q, k, v = self.mix(x).view(-1, 4, 12).split(4, dim=-1)
        mixed = torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v
        logits: Tensor = self.head(x + mixed.flatten(1))
        return logits


def penalised(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    loss = functional.cross_entropy(model(x), labels)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.float().square().sum()


def per_sample(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    def one(parameters: dict[str, Tensor], x: Tensor, label: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, parameters, (x[None],))
        return functional.cross_entropy(logits, label[None])

    of_one = torch.vmap(torch.func.grad(one), (None, 0, 0))
    gradients = of_one(dict(model.named_parameters()), x, labels)
    sizes = sum(each.float().square().sum() for each in gradients.values())
    return functional.cross_entropy(model(x), labels) + 0.01 * sizes


def along(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    y, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return functional.cross_entropy(y, labels) + tangent.float().square().mean()


def train(loss: Loss, dtype: torch.dtype, level: str, steps: int = 6) -> tuple[nn.Module, Guard]:
    torch.manual_seed(0)
    model = Mixed().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = guard(model, optimizer, level)
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(6, 8, generator=draw).to(dtype)
        labels = torch.randint(5, (6,), generator=draw)
        optimizer.zero_grad()
        loss(model, x, labels).backward()
        optimizer.step()
    handle.remove()
    return model, handle


@pytest.mark.parametrize("level", ["linear", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("loss", [penalised, per_sample, along], ids=lambda loss: loss.__name__)
def test_derivatives_of_other_kinds_have_no_finding_and_the_unguarded_bits(
    loss: Loss, dtype: torch.dtype, level: str
) -> None:
    plain, _ = train(loss, dtype, "light")
    watched, handle = train(loss, dtype, level)
    assert handle.ledger.findings == []
    assert handle.ledger.checks > 0
    wanted = plain.state_dict()
    for name, tensor in watched.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize("level", ["linear", "full"])
def test_forward_mode_differentiation_is_possible(level: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = guard(model, optimizer, level)
    x = torch.randn(6, 8)
    for _ in range(3):
        optimizer.zero_grad()
        with forward_ad.dual_level():
            y = model(forward_ad.make_dual(x, torch.ones_like(x)))
            value, tangent = forward_ad.unpack_dual(y)
        assert tangent is not None
        labels = torch.zeros(6, dtype=torch.long)
        (functional.cross_entropy(value, labels) + tangent.square().mean()).backward()
        optimizer.step()
    handle.remove()
    assert handle.ledger.findings == []
    assert handle.ledger.checks > 0
