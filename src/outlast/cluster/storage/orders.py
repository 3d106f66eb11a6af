"""In which order the saves of several jobs are served."""

from __future__ import annotations

import math
from typing import Literal, get_args

from outlast.errors import ClusterError

Order = Literal["fcfs", "least-waste", "set-10"]
"""fcfs: who asks first. least-waste: who keeps the others waiting shortest for each of its own
nodes. set-10: one job at a time of each class of periods, and classes share the bandwidth."""

ORDERS: tuple[Order, ...] = get_args(Order)


def checked(order: str) -> Order:
    """An order by its name; raises ClusterError for another."""
    for item in ORDERS:
        if item == order:
            return item
    raise ClusterError(f'order = "{order}" is not known: give one of {", ".join(ORDERS)}')


def priority(
    order: Order, *, asked_seconds: float, size_bytes: float, cost_per_second: float
) -> float:
    """What a request is sorted by; the smallest is served first.

    Serving request i for C_i seconds costs the others c_j C_i each, where c_j is what a second of
    waiting costs request j. Of those that wait, the order by C_i / c_i wastes the least (Smith
    1956, Various optimizers for single-stage production); with one bandwidth for all, C_i is as its
    bytes are. It is the Least-Waste rule of Herault et al. 2018 for two requests.

    Args:
        order: One of `ORDERS`.
        asked_seconds: When it was asked.
        size_bytes: What it is to move.
        cost_per_second: See `waiting_cost`.
    """
    if order == "least-waste":
        return size_bytes / max(cost_per_second, 1e-300)
    return asked_seconds


def waiting_cost(nodes: float, unsaved_seconds: float = 0.0, mtbf_seconds: float = 0.0) -> float:
    """Node-seconds that are wasted for each second that a request waits.

    Of a job that stands still: all its nodes. Of one that goes on computing until it is its turn,
    only what a failure would cost it: nodes times unsaved work over mean time between failures.

    Args:
        nodes: Of the job.
        unsaved_seconds: Work since what the last save holds.
        mtbf_seconds: Of the whole job; 0: the job stands still while it waits.
    """
    return nodes * unsaved_seconds / mtbf_seconds if mtbf_seconds else nodes


def set_of(order: Order, period_seconds: float) -> int:
    """The set within which one job at a time is served.

    In Set-10 (Boito, Pallez, Teylo and Vidal 2023, IO-SETS: Simple and efficient approaches for
    I/O bandwidth management) it is the rounded decimal logarithm of the mean time from one phase
    of I/O to the next; in the other orders there is one set.
    """
    if order != "set-10":
        return 0
    if not (period_seconds > 0 and math.isfinite(period_seconds)):
        raise ClusterError(
            f"period_seconds = {period_seconds}: set-10 needs the time from one save to the next"
        )
    return round(math.log10(period_seconds))


def weight_of(number: int) -> float:
    """The weight by which a set shares the bandwidth with the others."""
    return 10.0**-number
