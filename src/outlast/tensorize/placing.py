"""Putting new layers into a model, and giving some the very factors of others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from outlast.tensorize.policy import Target


def is_bias(name: str) -> bool:
    """Whether a parameter is a bias, by its name."""
    return name.rpartition(".")[2] == "bias"


def share_factors(layer: nn.Module, leader: nn.Module) -> None:
    """Give a layer the very factors of another."""
    for name, parameter in list(leader.named_parameters()):
        if is_bias(name):
            continue
        owner, _, last = name.rpartition(".")
        home = layer.get_submodule(owner)
        if isinstance(home, nn.ParameterList):
            home[int(last)] = parameter
        else:
            setattr(home, last, parameter)
    for name, buffer in leader.named_buffers():
        owner, _, last = name.rpartition(".")
        setattr(layer.get_submodule(owner), last, buffer)


def put_in(model: nn.Module, target: Target, module: nn.Module) -> None:
    """Put a layer where another one is, under all its names."""
    for name in target.names:
        owner, _, last = name.rpartition(".")
        parent = model.get_submodule(owner)
        setattr(parent, last, module)
        if isinstance(parent, nn.TransformerEncoderLayer):
            # Its fused kernel for inference, which reads dense weights, is for these two alone.
            parent.activation_relu_or_gelu = 0
