"""What surrounds a call: transforms that need plain operations, autocast, fake tensors."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

Result = TypeVar("Result")


def transformed() -> bool:
    """Whether derivatives are taken that need plain operations.

    These are the transforms of ``torch.func``, and forward mode (``forward_ad.dual_level``).
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for a device."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which operations on a device have the dtypes of their operands."""
    if not autocasts(device):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def has_values(tensor: Tensor) -> bool:
    """Whether numbers can be read from a tensor: it is neither on meta nor fake."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def without_autocast(backward: Callable[..., Result]) -> Callable[..., Result]:
    """Make the backward pass of an autograd function the same inside autocast and outside.

    The forward pass has its dtypes by then, and merging small cores again in a shorter one would
    change their gradients.

    Args:
        backward: A function of the context and the gradients.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *gradients: Tensor) -> Result:
        with no_autocast(gradients[0].device):
            return backward(ctx, *gradients)

    return wrapped
