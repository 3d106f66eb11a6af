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
    from outlast.coding.assignment import Assignment
    from outlast.coding.certificate import Certificate, Decoded
    from outlast.coding.choose import Choice, choose_code
    from outlast.coding.code import Bound, GradientCode, decode
    from outlast.coding.codes.bernoulli import BernoulliCode, StochasticBlock, StochasticCode
    from outlast.coding.codes.blocks import BlockCode
    from outlast.coding.codes.byzantine.aspis import Aspis, AspisPlus
    from outlast.coding.codes.byzantine.cyclic import DracoCyclic
    from outlast.coding.codes.byzantine.shield import ByzShield
    from outlast.coding.codes.byzantine.vote import Draco
    from outlast.coding.codes.communication import StableBlocks, YeAbbe
    from outlast.coding.codes.cyclic import CyclicMDS, CyclicRepetition
    from outlast.coding.codes.design import BlockDesign, SymmetricDesign
    from outlast.coding.codes.graph.code import GraphCode
    from outlast.coding.codes.graph.expander import Expander
    from outlast.coding.codes.heterogeneous import GroupedBySpeed, HeterogeneityAware
    from outlast.coding.codes.partial import PartialCode
    from outlast.coding.codes.product import Kronecker, ProductCode
    from outlast.coding.codes.repetition import FractionalRepetition
    from outlast.coding.codes.roots import RealReedSolomon, ReedSolomon
    from outlast.coding.codes.sequential.schemes import EveryRound, Multiplexed, SelectiveReattempt
    from outlast.coding.codes.soft_design import SoftDesign
    from outlast.coding.codes.tree import CodedReduce
    from outlast.coding.conditioning import Conditioning
    from outlast.coding.cost import CostModel
    from outlast.coding.spread import Spread

_HOMES = {
    "Aspis": "codes.byzantine.aspis",
    "AspisPlus": "codes.byzantine.aspis",
    "Assignment": "assignment",
    "BernoulliCode": "codes.bernoulli",
    "BlockCode": "codes.blocks",
    "BlockDesign": "codes.design",
    "Bound": "code",
    "ByzShield": "codes.byzantine.shield",
    "Certificate": "certificate",
    "Choice": "choose",
    "CodedReduce": "codes.tree",
    "Conditioning": "conditioning",
    "CostModel": "cost",
    "CyclicMDS": "codes.cyclic",
    "CyclicRepetition": "codes.cyclic",
    "Decoded": "certificate",
    "Draco": "codes.byzantine.vote",
    "DracoCyclic": "codes.byzantine.cyclic",
    "EveryRound": "codes.sequential.schemes",
    "Expander": "codes.graph.expander",
    "FractionalRepetition": "codes.repetition",
    "GradientCode": "code",
    "GraphCode": "codes.graph.code",
    "GroupedBySpeed": "codes.heterogeneous",
    "HeterogeneityAware": "codes.heterogeneous",
    "Multiplexed": "codes.sequential.schemes",
    "PartialCode": "codes.partial",
    "Kronecker": "codes.product",
    "ProductCode": "codes.product",
    "RealReedSolomon": "codes.roots",
    "ReedSolomon": "codes.roots",
    "SelectiveReattempt": "codes.sequential.schemes",
    "SoftDesign": "codes.soft_design",
    "Spread": "spread",
    "StableBlocks": "codes.communication",
    "StochasticBlock": "codes.bernoulli",
    "StochasticCode": "codes.bernoulli",
    "SymmetricDesign": "codes.design",
    "YeAbbe": "codes.communication",
    "choose_code": "choose",
    "decode": "code",
}

__all__ = [
    "Aspis",
    "AspisPlus",
    "Assignment",
    "BernoulliCode",
    "BlockCode",
    "BlockDesign",
    "Bound",
    "ByzShield",
    "Certificate",
    "Choice",
    "CodedReduce",
    "Conditioning",
    "CostModel",
    "CyclicMDS",
    "CyclicRepetition",
    "Decoded",
    "Draco",
    "DracoCyclic",
    "EveryRound",
    "Expander",
    "FractionalRepetition",
    "GradientCode",
    "GraphCode",
    "GroupedBySpeed",
    "HeterogeneityAware",
    "Kronecker",
    "Multiplexed",
    "PartialCode",
    "ProductCode",
    "RealReedSolomon",
    "ReedSolomon",
    "SelectiveReattempt",
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
