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

if TYPE_CHECKING:
    from outlast.coding.assignment import Assignment, Spread
    from outlast.coding.certificate import Certificate, Decoded
    from outlast.coding.choose import Choice, choose_code
    from outlast.coding.code import Bound, Conditioning, GradientCode, decode
    from outlast.coding.codes.bernoulli import BernoulliCode, StochasticBlock, StochasticCode
    from outlast.coding.codes.blocks import BlockCode
    from outlast.coding.codes.communication import StableBlocks, YeAbbe
    from outlast.coding.codes.cyclic import CyclicMDS, CyclicRepetition
    from outlast.coding.codes.design import BlockDesign, SoftDesign, SymmetricDesign
    from outlast.coding.codes.graph import Expander, GraphCode
    from outlast.coding.codes.heterogeneous import GroupedBySpeed, HeterogeneityAware
    from outlast.coding.codes.partial import PartialCode
    from outlast.coding.codes.product import Kronecker, ProductCode
    from outlast.coding.codes.reed_solomon import RealReedSolomon, ReedSolomon
    from outlast.coding.codes.repetition import FractionalRepetition
    from outlast.coding.cost import CostModel

_HOMES = {
    "Assignment": "assignment",
    "BernoulliCode": "codes.bernoulli",
    "BlockCode": "codes.blocks",
    "BlockDesign": "codes.design",
    "Bound": "code",
    "Certificate": "certificate",
    "Choice": "choose",
    "Conditioning": "code",
    "CostModel": "cost",
    "CyclicMDS": "codes.cyclic",
    "CyclicRepetition": "codes.cyclic",
    "Decoded": "certificate",
    "Expander": "codes.graph",
    "FractionalRepetition": "codes.repetition",
    "GradientCode": "code",
    "GraphCode": "codes.graph",
    "GroupedBySpeed": "codes.heterogeneous",
    "HeterogeneityAware": "codes.heterogeneous",
    "PartialCode": "codes.partial",
    "Kronecker": "codes.product",
    "ProductCode": "codes.product",
    "RealReedSolomon": "codes.reed_solomon",
    "ReedSolomon": "codes.reed_solomon",
    "SoftDesign": "codes.design",
    "Spread": "assignment",
    "StableBlocks": "codes.communication",
    "StochasticBlock": "codes.bernoulli",
    "StochasticCode": "codes.bernoulli",
    "SymmetricDesign": "codes.design",
    "YeAbbe": "codes.communication",
    "choose_code": "choose",
    "decode": "code",
}

__all__ = [
    "Assignment",
    "BernoulliCode",
    "BlockCode",
    "BlockDesign",
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
    "GroupedBySpeed",
    "HeterogeneityAware",
    "Kronecker",
    "PartialCode",
    "ProductCode",
    "RealReedSolomon",
    "ReedSolomon",
    "SoftDesign",
    "Spread",
    "StableBlocks",
    "StochasticBlock",
    "StochasticCode",
    "SymmetricDesign",
    "YeAbbe",
    "choose_code",
    "decode",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
