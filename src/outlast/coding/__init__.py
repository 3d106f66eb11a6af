"""Gradients that survive slow and dead workers, with a certificate of their error.

from outlast.coding import FractionalRepetition, decode
code = FractionalRepetition(workers=12, stragglers=2)
weights, error = decode(code, survivors=[0, 1, 2, 5, 7, 8, 10])   # error = 0: exact

Names are loaded when they are used. Codes, simulation and costs need no torch; the protocols are in
`outlast.coding.protocol`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.coding.code import GradientCode, decode
    from outlast.coding.codes.cyclic import CyclicMDS, CyclicRepetition
    from outlast.coding.codes.graph import GraphCode
    from outlast.coding.codes.repetition import FractionalRepetition

_HOMES = {
    "CyclicMDS": "codes.cyclic",
    "CyclicRepetition": "codes.cyclic",
    "FractionalRepetition": "codes.repetition",
    "GradientCode": "code",
    "GraphCode": "codes.graph",
    "decode": "code",
}

__all__ = [
    "CyclicMDS",
    "CyclicRepetition",
    "FractionalRepetition",
    "GradientCode",
    "GraphCode",
    "decode",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
