"""Gradients that survive slow and dead workers, with a certificate of their error.

from outlast.coding import FractionalRepetition, decode
code = FractionalRepetition(workers=12, stragglers=2)
weights, error = decode(code, survivors=[0, 1, 2, 5, 7, 8, 10])   # error = 0: exact

Names are loaded when they are used. Codes, their simulation and their cost need no torch; the
protocols are in `outlast.coding.protocol`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from outlast.extras import require

if TYPE_CHECKING:
    from outlast.coding.assignment import Spread
    from outlast.coding.certificate import Certificate, Decoded
    from outlast.coding.choose import Choice, choose_code
    from outlast.coding.code import (
        Assignment,
        Bound,
        Conditioning,
        FractionalRepetition,
        GradientCode,
        decode,
    )
    from outlast.coding.cost import CostModel
    from outlast.coding.cyclic import CyclicMDS, CyclicRepetition, RealReedSolomon, ReedSolomon
    from outlast.coding.design import BernoulliCode, SoftDesign, SymmetricDesign
    from outlast.coding.graph import Expander, GraphCode

_NAMES = {
    "assignment": ("Spread",),
    "certificate": ("Certificate", "Decoded"),
    "choose": ("Choice", "choose_code"),
    "code": (
        *("Assignment", "Bound", "Conditioning", "FractionalRepetition", "GradientCode", "decode"),
    ),
    "cost": ("CostModel",),
    "cyclic": ("CyclicMDS", "CyclicRepetition", "RealReedSolomon", "ReedSolomon"),
    "design": ("BernoulliCode", "SoftDesign", "SymmetricDesign"),
    "graph": ("Expander", "GraphCode"),
}

__all__ = [
    "Assignment",
    "BernoulliCode",
    "Bound",
    "Certificate",
    "Choice",
    "Conditioning",
    "CostModel",
    "CyclicMDS",
    "CyclicRepetition",
    "Decoded",
    "Expander",
    "FractionalRepetition",
    "GradientCode",
    "GraphCode",
    "RealReedSolomon",
    "ReedSolomon",
    "SoftDesign",
    "Spread",
    "SymmetricDesign",
    "choose_code",
    "decode",
]


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            if module not in ("assignment", "certificate"):
                require("coding", f"outlast.coding.{name}", "scipy")
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
