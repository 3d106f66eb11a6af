"""Why and how often the nodes of a run stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outlast.errors import PlanError

if TYPE_CHECKING:
    from outlast.plan.cases import Array

SHAPES = 0.1, 20.0
"""Of Weibull distributions that times between failures have: published ones lie between 0.4 and 2,
and outside of these the mean is out of reach of a float, or all nodes fail at one time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCause:
    """One kind of failure; kinds are independent of each other.

    Attributes:
        name: For people, e.g. "gpu memory".
        per_node_day: Failures of one node in one day of running.
        nodes_hit: Nodes that stop together, as one failure (a switch, a rack); see `per_day`.
        detection_seconds: From the failure until somebody acts.
        repair_hours: Until the node can be used again; 0 where a restart is enough.
        silent: Wrong numbers in place of a stop: nobody sees it but a guard.
        shape: Of the Weibull distribution of times between failures of a node; 1 is exponential,
            below 1 means that a node that has just been put to use fails more often.
    """

    name: str
    per_node_day: float
    nodes_hit: int = 1
    detection_seconds: float = 60.0
    repair_hours: float = 0.0
    silent: bool = False
    shape: float = 1.0

    def __post_init__(self) -> None:
        for field in ("per_node_day", "detection_seconds", "repair_hours"):
            if not 0.0 <= getattr(self, field) < float("inf"):
                raise PlanError(
                    f"{field} = {getattr(self, field)} of failure cause {self.name!r}: give a "
                    "number of at least 0"
                )
        if self.nodes_hit < 1:
            raise PlanError(
                f"nodes_hit = {self.nodes_hit} of failure cause {self.name!r}: give at least 1"
            )
        if not SHAPES[0] <= self.shape <= SHAPES[1]:
            raise PlanError(
                f"shape = {self.shape} of failure cause {self.name!r}: give {SHAPES[0]:g} to "
                f"{SHAPES[1]:g}; 1 is exponential"
            )

    def per_day(self, nodes: float | Array) -> Array:
        """Failures of a run on so many nodes in a day: `nodes * per_node_day / nodes_hit`.

        A run on fewer nodes than stop together lies in one rack, and stops whenever this does.
        """
        found: Array = nodes * self.per_node_day / np.minimum(self.nodes_hit, nodes)
        return found
