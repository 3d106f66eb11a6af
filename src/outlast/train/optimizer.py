"""The optimizers of a job and their learning rates by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outlast.tensorize.optimizers import UnfoldedMuon

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.job import OptimizerSection
    from outlast.train.tensorizing import FactorRules


def build_optimizers(
    model: nn.Module, settings: OptimizerSection, factors: FactorRules | None = None
) -> list[torch.optim.Optimizer]:
    """AdamW alone, or Muon for hidden matrices and AdamW for the rest.

    Embeddings, the output head and vectors never go to Muon, whose orthogonal update is meant for
    matrices between hidden layers (Jordan et al. 2024); cores of structured layers are unfolded to
    such. Weight decay is applied to matrices only. Every group keeps its peak rate as
    ``initial_lr``.

    Args:
        model: Already parallel, on this rank.
        settings: The job's [optimizer].
        factors: What holds for the factors of structured layers.
    """
    outer = _outer_matrices(model)
    # By whether they are decayed, and the others by their rate, too.
    hidden: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    cores: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    others: dict[tuple[float, bool], list[nn.Parameter]] = {(1.0, True): [], (1.0, False): []}
    for name, parameter in model.named_parameters():
        identity, rate, decayed = id(parameter), 1.0, parameter.ndim >= 2
        is_matrix, is_core = parameter.ndim == 2 and name not in outer, False
        if factors is not None:
            rate = factors.multipliers.get(parameter, 1.0)
            decayed = decayed and identity not in factors.decayed_elsewhere
            is_core = parameter in factors.unfoldings
            is_matrix = is_matrix and not is_core and identity not in factors.looked_up
        if settings.name == "muon" and is_matrix:
            hidden[decayed].append(parameter)
        elif settings.name == "muon" and is_core:
            cores[decayed].append(parameter)
        else:
            others.setdefault((rate, decayed), []).append(parameter)
    optimizers: list[torch.optim.Optimizer] = []
    rates: dict[str, Any] = {"lr": settings.muon_learning_rate, "momentum": settings.momentum}
    if any(hidden.values()):
        optimizers.append(torch.optim.Muon(_groups(hidden, settings.weight_decay), **rates))
    if factors is not None and any(cores.values()):
        optimizers.append(
            UnfoldedMuon(_groups(cores, settings.weight_decay), factors.unfoldings, **rates)
        )
    groups = [
        {
            "params": parameters,
            "weight_decay": settings.weight_decay if decayed else 0.0,
            "lr": settings.learning_rate * rate,
        }
        for (rate, decayed), parameters in others.items()
        if parameters
    ]
    if groups:
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


def restore_constants(
    optimizers: Sequence[torch.optim.Optimizer], built: Sequence[torch.optim.Optimizer]
) -> None:
    """Give restored optimizers the peak rates and constants of newly `built` ones.

    A checkpoint brings back those of the job that saved it, and the job's may have changed since.
    """
    for optimizer, new in zip(optimizers, built, strict=True):
        for group, settings in zip(optimizer.param_groups, new.param_groups, strict=True):
            group.update({key: value for key, value in settings.items() if key != "params"})


def _groups(by_decay: dict[bool, list[nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    return [
        {"params": parameters, "weight_decay": weight_decay if decayed else 0.0}
        for decayed, parameters in by_decay.items()
        if parameters
    ]


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
