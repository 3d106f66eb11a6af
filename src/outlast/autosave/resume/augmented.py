"""What ``place += value`` computes, by the kind of its operator."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_OPERATIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": operator.iadd,
    "Sub": operator.isub,
    "Mult": operator.imul,
    "MatMult": operator.imatmul,
    "Div": operator.itruediv,
    "FloorDiv": operator.ifloordiv,
    "Mod": operator.imod,
    "Pow": operator.ipow,
    "LShift": operator.ilshift,
    "RShift": operator.irshift,
    "BitOr": operator.ior,
    "BitXor": operator.ixor,
    "BitAnd": operator.iand,
}
"""Name of an operator in `ast` to what it does."""


def augmented(kind: str, before: Any, value: Any) -> Any:
    """What is assigned; an object that can is changed in place.

    Args:
        kind: Name of the operator in `ast`.
        before: What was at the place.
        value: What stands behind the operator.
    """
    return _OPERATIONS[kind](before, value)
