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

__all__ = [
    "Campaign",
    "Fault",
    "Injection",
    "Injector",
    "ProcessFault",
    "ProcessFaults",
    "Rate",
    "SiteOutcomes",
    "campaign",
    "inject",
    "parse_fault",
    "parse_faults",
]
