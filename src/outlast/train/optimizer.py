"""The optimizers of a job and their learning rates by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.job import OptimizerSection


def build_optimizers(model: nn.Module, settings: OptimizerSection) -> list[torch.optim.Optimizer]:
    """AdamW alone, or Muon for hidden matrices and AdamW for the rest.

    Embeddings, the output head and vectors never go to Muon, whose orthogonal update is meant for
    matrices between hidden layers (Jordan et al. 2024). Weight decay is applied to matrices only.
    Every group keeps its peak rate as ``initial_lr``.
    """
    outer = _outer_matrices(model)
    hidden, decayed, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            vectors.append(parameter)
        elif settings.name == "muon" and parameter.ndim == 2 and name not in outer:
            hidden.append(parameter)
        else:
            decayed.append(parameter)
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = []
    if hidden:
        optimizers.append(
            torch.optim.Muon(
                hidden,
                lr=settings.muon_learning_rate,
                momentum=settings.momentum,
                weight_decay=settings.weight_decay,
            )
        )
    if groups := [group for group in groups if group["params"]]:
        optimizers.append(
            torch.optim.AdamW(
                groups,
                lr=settings.learning_rate,
                betas=(settings.beta1, settings.beta2),
                eps=settings.epsilon,
            )
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def _outer_matrices(model: nn.Module) -> set[str]:
    """Names of the embedding and output matrices."""
    found = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    last_linear = None
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            last_linear = f"{name}.weight"
            if module is head:
                return found | {last_linear}
    # Without an accessor the last linear layer is the head.
    return found | ({last_linear} if last_linear and get_head is None else set())


def set_learning_rate(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> float:
    """Set every group to `factor` times its peak; returns the first group's rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
    return float(optimizers[0].param_groups[0]["lr"])
