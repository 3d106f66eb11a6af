"""What tensors and arrays hold beside their numbers: gradients and attributes."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from outlast.autosave.heap.content import Content, flat, own_attributes, pairs, put_own_attributes

if TYPE_CHECKING:
    from collections.abc import Iterator

_GRADIENT: Any = torch._C.TensorBase.grad
"""The attribute itself, whoever watches it on `torch.Tensor`."""


HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of leaves, each a dictionary of hooks or None."""


class Gradient(enum.Enum):
    """Stands for a gradient that is not saved, since the program loses it before it reads it.

    DROPPED: it will be set to None. ZEROED: it will be filled with zeros.
    """

    DROPPED = enum.auto()
    ZEROED = enum.auto()


def plain_gradient(value: torch.Tensor) -> torch.Tensor | None:
    """The gradient of any tensor, unwatched."""
    found: torch.Tensor | None = _GRADIENT.__get__(value)
    return found


def gradient(value: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a leaf; None of other tensors."""
    return plain_gradient(value) if value.is_leaf else None


def set_gradient(value: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Set the gradient of a leaf, be it that of the size it had before it got another."""
    if grad is None or (grad.shape, grad.dtype) == (value.shape, value.dtype):
        _GRADIENT.__set__(value, grad)
        return
    numbers = value.data
    value.data = torch.empty_like(grad)
    _GRADIENT.__set__(value, grad)
    value.data = numbers


def hooks_of(value: Any) -> tuple[Any, ...]:
    """The dictionaries of a leaf's hooks, None for each that there is not; nothing of others."""
    return tuple(getattr(value, hook) for hook in HOOKS) if value.is_leaf else ()


def set_hooks(value: Any, hooks: tuple[Any, ...]) -> None:
    """Give a leaf the dictionaries of hooks that `hooks_of` gave."""
    for name, hook in zip(HOOKS, hooks, strict=False):
        if getattr(value, name) is not hook:
            setattr(value, name, hook)


def is_composed(value: torch.Tensor) -> bool:
    """Whether a tensor is made of others, as a `DTensor` is of its local part."""
    return hasattr(value, "__tensor_flatten__")


def has_storage(value: torch.Tensor) -> bool:
    """Whether a tensor lies in a storage of its own kind, as strides say."""
    strided = value.layout == torch.strided and value.device.type != "meta"
    return strided and not is_composed(value) and not is_lazy(value)


def of_tensor(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """What a tensor leads to."""
    grad = gradient(value)
    if grad is not None:
        yield ".%s", "grad", grad
    for name, hooks in zip(HOOKS, hooks_of(value), strict=False):
        if hooks is not None:
            yield ".%s", name, hooks
    if is_composed(value):
        names, context = value.__tensor_flatten__()
        yield from ((".%s", name, getattr(value, name)) for name in names)
        yield ".%s", "__context__", context
    yield from ((".%s", name, attribute) for name, attribute in own_attributes(value).items())


def tensor_content(value: Any) -> Content:
    """What a tensor holds beside the numbers in its storage."""
    whole = None
    if value.layout != torch.strided and not is_composed(value):
        whole = value.detach()
    return Content(
        "tensor",
        (value.requires_grad, gradient(value), whole, *hooks_of(value)),
        flat(own_attributes(value)),
    )


def tensor_put(value: Any, seen: Content) -> None:
    """Put back what a tensor held; a gradient that was not saved is None or zero."""
    requires_grad, grad, whole, *hooks = seen.items
    if whole is not None:
        value.data = whole
    if value.is_leaf:
        value.requires_grad_(requires_grad)
        if grad is Gradient.ZEROED:
            grad = torch.zeros_like(value, requires_grad=False)
        set_gradient(value, None if grad is Gradient.DROPPED else grad)
        set_hooks(value, tuple(hooks))
    put_own_attributes(value, dict(pairs(seen.attributes)))


def of_array(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """What an array leads to: objects, if it holds objects."""
    if value.dtype.hasobject:
        yield from (("[%d]", place, item) for place, item in enumerate(value.flat))
    yield from ((".%s", name, attribute) for name, attribute in own_attributes(value).items())


def array_content(value: Any) -> Content:
    """What an array holds beside numbers in a block of memory."""
    items: tuple[Any, ...] = ()
    if value.dtype.hasobject:
        items = tuple(value.flat)
    elif value.flags.writeable and not is_block(value):
        items = (np.array(value),)
    return Content("array", items, flat(own_attributes(value)))


def array_put(value: Any, seen: Content) -> None:
    """Put back what an array held."""
    if seen.items and value.flags.writeable:
        if value.dtype.hasobject:
            for place, item in enumerate(seen.items):
                value.flat[place] = item
        else:
            np.copyto(value, seen.items[0])
    put_own_attributes(value, dict(pairs(seen.attributes)))


def is_block(value: np.ndarray) -> bool:
    """Whether the numbers of an array lie in one piece of memory that can be written as such."""
    return not value.dtype.hasobject and owner_of(value).flags.forc


def owner_of(value: np.ndarray) -> np.ndarray:
    """The array whose memory another one looks at, perhaps itself."""
    while isinstance(value.base, np.ndarray):
        value = value.base
    return value
