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
        fused: Take the Triton kernels of `outlast.tensorize.kernels` instead of the routes, which
            only tensors go that no kernel reads. On CUDA devices alone, and not yet run on one.
        seconds: Time of forward and backward; of forward alone without gradients.
        dense_seconds: Likewise of the dense layer.
        timed: Whether both were timed; predicted otherwise.
        reason: Why this plan, in words.
    """

    forward: Route
    input_gradient: Route
    core_gradients: tuple[Route, ...]
    plain: bool = False
    fused: bool = False
    seconds: float = field(default=0.0, compare=False)
    dense_seconds: float = field(default=0.0, compare=False)
    timed: bool = field(default=False, compare=False)
    reason: str = field(default="", compare=False)

    @staticmethod
    def uniform(route: Route, cores: int, *, plain: bool = False) -> Plan:
        """The same route for everything."""
        return Plan(route, route, (route,) * cores, plain)
