"""Faults put into a training run on purpose, seeded, and the statistics of what came of them.

from outlast.guard.inject import inject, parse_faults
injector = inject(handle, parse_faults(["linear.output:bit=13:every=5"]), seed=0)
...                                         # train
injector.injections                         # what was changed, where and when
"""

from outlast.guard.inject.campaign import Campaign, Rate, SiteOutcomes, campaign
from outlast.guard.inject.fault import (
    Fault,
    Injection,
    Injector,
    ProcessFault,
    ProcessFaults,
    inject,
    parse_fault,
    parse_faults,
)
from outlast.guard.inject.operations import (
    OTHERS,
    PRODUCTS,
    OperationDrill,
    OperationFault,
    by_harm,
    drill_operations,
    faults_at,
    summary_of,
)
from outlast.guard.inject.zoo import DTYPES, Case, families

__all__ = [
    "DTYPES",
    "OTHERS",
    "PRODUCTS",
    "Campaign",
    "Case",
    "Fault",
    "Injection",
    "Injector",
    "OperationDrill",
    "OperationFault",
    "ProcessFault",
    "ProcessFaults",
    "Rate",
    "SiteOutcomes",
    "by_harm",
    "campaign",
    "drill_operations",
    "families",
    "faults_at",
    "inject",
    "parse_fault",
    "parse_faults",
    "summary_of",
]
