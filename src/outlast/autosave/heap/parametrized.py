"""Modules whose class `torch.nn.utils.parametrize` has replaced by one of their own.

Such a class is made for one module and has no name that another process could find; it is made
again from the class before and the names of the tensors that it computes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils import parametrize


class ParametrizedClass(NamedTuple):
    """How the class of a parametrized module is made.

    Attributes:
        base: The class before.
        tensors: Names of the tensors that are computed.
    """

    base: type
    tensors: tuple[str, ...]

    def made(self) -> type:
        """A class of this kind."""
        blank: Any = object.__new__(self.base)
        parametrize._inject_new_class(blank)
        for tensor in self.tensors:
            parametrize._inject_property(blank, tensor)
        made: type = type(blank)
        return made


def class_of(value: Any) -> type | ParametrizedClass:
    """The class of an object, as it can be written down."""
    kind = type(value)
    if kind.__module__ != parametrize.__name__ or not isinstance(value, nn.Module):
        return kind
    if not parametrize.is_parametrized(value):
        return kind
    tensors: Any = value.parametrizations
    return ParametrizedClass(kind.__mro__[1], tuple(tensors))


def class_from(kind: type | ParametrizedClass) -> type:
    """The class that `class_of` has written down."""
    return kind.made() if isinstance(kind, ParametrizedClass) else kind
