"""Choosing the routes of a layer for a number of tokens."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from outlast.tensorize.network import Network, Route, lower
from outlast.tensorize.plan import Plan

if TYPE_CHECKING:
    import torch


def plan_for(
    network: Network, tokens: int, dtype: torch.dtype, device: torch.device, learns: bool
) -> Plan:
    """The plan for a number of tokens."""
    return _plan(network, max(tokens - 1, 0).bit_length(), dtype, device.type, learns)


@functools.lru_cache(maxsize=65536)
def _plan(
    network: Network, bucket: int, dtype: torch.dtype, device: str, learns: bool
) -> Plan:
    count = len(network.cores)
    cuts = [Route((left, count - left)) for left in range(1, count)] or [Route((1,))]
    best = min(cuts, key=lambda route: lower(network, route).stages[-1].width)
    if len(best.groups) == 2 and lower(network, best).stages[1].b > 1:
        best = Route(best.groups, layout="features", chunk=64)
    return Plan.uniform(best, count)


def explain(network: Network, tokens: int, dtype: torch.dtype, device: torch.device) -> str:
    """The plan in words."""
    return str(plan_for(network, tokens, dtype, device, True))
