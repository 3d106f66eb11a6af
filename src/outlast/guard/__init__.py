"""Wrong values found and corrected while training (algorithm-based fault tolerance).

from outlast.guard import guard
handle = guard(model, optimizer)            # every product, forward and backward
...                                         # train as before, with the same bits
handle.ledger.findings                      # what was wrong, where, and how it ended

Names are loaded when they are used: policies, thresholds and the cost model need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.guard.audit_schedule import AuditReport
    from outlast.guard.findings import Finding, Ledger, Site
    from outlast.guard.handle import Guard, Verdict, guard
    from outlast.guard.policy import LEVELS, OPERATIONS, Coverage, Policy, Uncovered

_HOMES = {
    "LEVELS": "policy",
    "OPERATIONS": "policy",
    "AuditReport": "audit_schedule",
    "Coverage": "policy",
    "Finding": "findings",
    "Guard": "handle",
    "Ledger": "findings",
    "Policy": "policy",
    "Site": "findings",
    "Uncovered": "policy",
    "Verdict": "handle",
    "guard": "handle",
}

__all__ = [
    "LEVELS",
    "OPERATIONS",
    "AuditReport",
    "Coverage",
    "Finding",
    "Guard",
    "Ledger",
    "Policy",
    "Site",
    "Uncovered",
    "Verdict",
    "guard",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
