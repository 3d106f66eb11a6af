"""What to do in one layer for a number of tokens: a route for each of its computations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outlast.tensorize.network import Route


@dataclass(frozen=True)
class Plan:
    """The routes of a layer.

    Attributes:
        forward: That of y.
        input_gradient: That of the gradient of x.
        core_gradients: That of every core's gradient, in the order of the network's cores.
        plain: Leave differentiation to autograd, which keeps what is between the stages: cheapest
            where the tokens are so few that starting operations is what takes the time.
        seconds: Predicted time of forward and backward; of forward alone without gradients.
        dense_seconds: Likewise of the dense layer.
        reason: Why this plan, in words.
    """

    forward: Route
    input_gradient: Route
    core_gradients: tuple[Route, ...]
    plain: bool = False
    seconds: float = field(default=0.0, compare=False)
    dense_seconds: float = field(default=0.0, compare=False)
    reason: str = field(default="", compare=False)

    @staticmethod
    def uniform(route: Route, cores: int, *, plain: bool = False) -> Plan:
        """The same route for everything."""
        return Plan(route, route, (route,) * cores, plain)
