"""Cases of `never.py` about what the guard says that it covers: 4."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from harness import Bar, at_most
from torch import nn
from torch.nn import functional

from outlast.guard import guard
from outlast.guard.inject import inject, parse_faults

IDS = (torch.arange(32).view(2, 16) * 7) % 64
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

Loss = Callable[[nn.Module], torch.Tensor]
Change = Callable[[nn.Module, int], None]


class Net(nn.Module):
    """An embedding, two branches and a head; one layer is not called."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(64, 8), nn.LayerNorm(8)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, 64, bias=False)
        self.tied, self.both = tied, True

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(ids))
        x = self.left(x) + (self.right(x) if self.both else 0.0)
        return functional.linear(x, self.embedding.weight) if self.tied else self.lm_head(x)


class Own(torch.autograd.Function):
    """A product that only its author knows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return dy @ weight.T, x.T @ dy


class Weight(nn.Module):
    """A layer, and a weight that is used by a function."""

    def __init__(self, use: Callable[..., torch.Tensor], *shape: int) -> None:
        super().__init__()
        self.layer, self.experts = nn.Linear(8, 8), nn.Parameter(torch.randn(*shape) / 8)
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.layer(x), self.experts)


def text_model(kind: str, **settings: Any) -> nn.Module:
    """A tiny language model of a class of transformers."""
    config = getattr(transformers, f"{kind}Config")(**{**TEXT, **settings})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def text_loss(model: nn.Module) -> torch.Tensor:
    """Of a model of transformers."""
    return model(input_ids=IDS, labels=IDS).loss


def class_loss(model: nn.Module) -> torch.Tensor:
    """Of logits (rows, classes)."""
    return functional.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten())


def rows_loss(*shapes: tuple[int, ...]) -> Loss:
    """The mean square of what comes out for random data of these shapes."""

    def loss(model: nn.Module) -> torch.Tensor:
        made = model(*(torch.randn(shape) for shape in shapes))
        return (made[0] if isinstance(made, tuple) else made).square().mean()

    return loss


def compile_norm(model: nn.Module, step: int) -> None:
    """Compile the norm after the second step."""
    if step == 2:
        model.norm.forward = torch.compile(
            nn.LayerNorm.forward.__get__(model.norm), backend="eager"
        )


def take_one_branch(model: nn.Module, step: int) -> None:
    """Leave out one of two branches after the second step."""
    model.both = step < 2


def unchanged(model: nn.Module, step: int) -> None:
    """Leave the model as it is."""


# What has no check: names that must be said, and modules that must not be listed as covered.
STAGED: list[tuple[Callable[[], nn.Module], Loss, Change, set[str], set[str]]] = [
    (lambda: Net(tied=True), class_loss, unchanged, {"embedding.weight", "lm_head"}, {"lm_head"}),
    (Net, class_loss, compile_norm, {"norm.weight", "norm.bias"}, {"norm"}),
    (Net, class_loss, take_one_branch, {"right"}, {"right"}),
    (
        Net,
        lambda model: functional.cross_entropy(model(IDS).transpose(1, 2), IDS),
        unchanged,
        {"nll_loss2d"},
        set(),
    ),
    (
        lambda: text_model("Llama", attn_implementation="eager"),
        text_loss,
        unchanged,
        {"bmm", "softmax", "self_attn"},
        set(),
    ),
    (
        lambda: text_model("Mixtral", num_local_experts=4),
        text_loss,
        unchanged,
        {"experts.gate_up_proj", "experts.down_proj", "gate.weight"},
        set(),
    ),
    (
        lambda: nn.TransformerEncoderLayer(8, 2, 16),
        rows_loss((4, 2, 8)),
        unchanged,
        {"self_attn.in_proj_weight", "self_attn.out_proj.weight"},
        {"self_attn.out_proj"},
    ),
    (lambda: nn.LSTM(8, 8), rows_loss((5, 2, 8)), unchanged, {"weight_hh_l0"}, set()),
    (
        lambda: Weight(lambda x, w: torch.einsum("td,edf->etf", x, w), 2, 8, 8),
        rows_loss((4, 8)),
        unchanged,
        {"experts"},
        set(),
    ),
    (lambda: Weight(Own.apply, 8, 8), rows_loss((4, 8)), unchanged, {"experts", "Own"}, set()),
]


def staged(
    make: Callable[[], nn.Module], loss_of: Loss, change: Change, names: set[str], open_: set[str]
) -> int:
    """Train four steps: names that were not said, and modules wrongly listed as covered."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle = guard(model, optimizer, "full")
        for step in range(4):
            change(model, step)
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    said = " ".join(str(each.message) for each in caught)
    covered = {each.module for each in handle.coverage() if each.operations}
    said += " ".join(each.module for each in handle.coverage() if not each.operations)
    handle.remove()
    return sum(name not in said for name in names) + len(open_ & covered)


def unguarded_in_evaluation_mode() -> int:
    """Faults in layers set to ``.eval()`` that train: how many were used without a word."""
    missed = 0
    sites = {"embedding": "embedding.output", "norm": "norm.output", "left": "linear.dw"}
    for name, site in sites.items():
        model = Net()
        model.get_submodule(name).eval()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        handle = guard(model, optimizer, "full")
        try:
            inject(handle, parse_faults([f"{site}:module={name}:bit=30:step=1"]))
            for _ in range(3):
                optimizer.zero_grad()
                class_loss(model).backward()
                optimizer.step()
        finally:
            missed += [each.outcome for each in handle.ledger.findings] != ["corrected"]
            handle.remove()
    return missed


def coverage() -> Bar:
    """Case 4: what has no check is said, and is not listed as covered."""
    torch.manual_seed(0)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    wrong = sum(staged(*each) for each in STAGED) + unguarded_in_evaluation_mode()
    most = sum(len(names) + len(modules) for *_, names, modules in STAGED) + 3
    staged_on = (
        "ten models, of torch and transformers; uncalled, tied, compiled, eval(), eager, 3-D"
    )
    return at_most("guard: without a check and not said", wrong, f"of {most}", 0, staged_on)


CASES: dict[int, Callable[[], Bar]] = {4: coverage}
