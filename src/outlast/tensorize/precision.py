"""Precision of factors: float8 products where the hardware has them, and a dtype per core.

Autocast needs nothing from here: under it x and the merged cores get its dtype, while small cores
are merged in their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from outlast.errors import TensorizeError
from outlast.tensorize.layer import StructuredLinear
from outlast.tensorize.low_rank import LowRankLinear, SparseLowRankLinear
from outlast.tensorize.parameters import factor_parameters

if TYPE_CHECKING:
    from collections.abc import Callable

MULTIPLE = 16
"""Both sizes of a float8 matrix must be multiples of this (torch._scaled_mm)."""

# Ada and Hopper; older devices and CPUs compute the same numbers in their own precision.
_FLOAT8_CAPABILITY = (8, 9)

Recipe = Literal["tensorwise", "rowwise"]


def has_float8(device: torch.device) -> bool:
    """Return whether a device multiplies float8 matrices itself."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= _FLOAT8_CAPABILITY


def use_float8(model: nn.Module, *, recipe: Recipe = "rowwise") -> list[str]:
    """Train the two factors of low-rank layers with float8 products, by torchao.

    What is between the factors stays in the activations' dtype. Layers of which a size is no
    multiple of 16 are left as they are: ask `tensorize` for ``multiple=16``. Where the hardware has
    no float8, its rounding is emulated, which shows what it does to the loss and gains no time.
    (torchao finds float8 worth it for large matrices, 1.25x for 8B models: with small ranks, time
    it before you rely on it.)

    Args:
        model: Its low-rank layers are changed in place.
        recipe: Scales per ``tensorwise`` or ``rowwise``.

    Returns:
        The names of the products that were changed.

    Raises:
        TensorizeError: torchao is missing, or no layer has sizes that fit.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise TensorizeError(
            "float8 products come from torchao, which is not installed: pip install outlast[float8]"
        ) from None
    from dataclasses import replace

    factors = {
        f"{name}.{side}"
        for name, layer in model.named_modules()
        if isinstance(layer, LowRankLinear) and not isinstance(layer, SparseLowRankLinear)
        for side in ("down", "up")
    }
    fitting = sorted(
        name
        for name in factors
        if all(size % MULTIPLE == 0 for size in model.get_submodule(name).weight.shape)  # type: ignore[union-attr]
    )
    if not fitting:
        raise TensorizeError(
            f"none of the {len(factors)} factors has sizes that are multiples of {MULTIPLE}, which "
            f"float8 needs: tensorize with form = 'low_rank' or 'cola' and multiple = {MULTIPLE}"
        )
    device = next(model.parameters()).device
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=not has_float8(device))
    convert_to_float8_training(
        model, module_filter_fn=lambda _, name: name in fitting, config=config
    )
    return fitting


def set_core_precision(
    model: nn.Module, policy: Callable[[str, tuple[int, ...]], torch.dtype]
) -> None:
    """Store every core in a dtype of its own, and the bias of two factors in that of the last.

    Cores are multiplied with each other in the wider of their dtypes, and with x in that of x (or
    of autocast), which is also the dtype of y. Small cores cost nothing in float32, and their
    products are sensitive; large ones may be bfloat16. Call it before the optimizer is built.

    FSDP2 gathers the parameters of a unit in one buffer and wants one dtype for all of them: with
    `shard_tensorized`, choose one dtype per unit, or give it a mixed-precision policy instead.

    Args:
        model: Its structured layers are changed in place.
        policy: (name of the core, its shape) -> dtype, e.g.
            ``lambda name, shape: torch.float32 if math.prod(shape) < 1e5 else torch.bfloat16``.

    Raises:
        TensorizeError: The policy gives something that is no floating-point dtype.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, StructuredLinear):
            continue
        cores = {id(core) for core in factor_parameters(layer)}
        for key, parameter in layer.named_parameters(prefix=name):
            if id(parameter) in cores:
                dtype = policy(key, tuple(parameter.shape))
                if not dtype.is_floating_point:
                    raise TensorizeError(f"{key} cannot be stored as {dtype}: choose a float dtype")
                parameter.data = parameter.data.to(dtype)
        for child in layer.modules():
            # A linear layer adds its bias in the dtype of its weight.
            if (
                isinstance(child, nn.Linear)
                and id(child.weight) in cores
                and child.bias is not None
            ):
                child.bias.data = child.bias.data.to(child.weight.dtype)
