"""What is done along a route, worked out once: every change of order and every product. No torch.

Between two stages, what is on its way has the dimensions (b, t f, m) in the token-major layout and
(b, m, f t) in the other, where t are the tokens of a chunk; there is no b where it is one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outlast.tensorize.contraction import Merging, merging
from outlast.tensorize.network import lower
from outlast.tensorize.turn import TOKENS, Groups, Turn, turn

if TYPE_CHECKING:
    from outlast.tensorize.network import Network, Route, Stage
    from outlast.tensorize.plan import Plan


@dataclass(frozen=True)
class Leg:
    """One stage on the way.

    Attributes:
        stage: Which.
        merging: How its matrix is made.
        enter: From what the stage before gives, or x, to what this one takes.
        back: From the gradient of what it takes to that of what the stage before gives, or of x.
    """

    stage: Stage
    merging: Merging
    enter: Turn | None
    back: Turn | None


@dataclass(frozen=True)
class Course:
    """A route in all detail.

    Attributes:
        legs: Its stages.
        features: Whether the layout is feature-major.
        leave: From what the last stage gives to y.
        leave_back: From the gradient of y to that of what the last stage gives.
        width: Features of x, with the padding if the first stage needs it.
        out_width: Likewise of y.
        narrow: Whether nothing between the stages is wider than half of x.
    """

    legs: tuple[Leg, ...]
    features: bool
    leave: Turn | None
    leave_back: Turn | None
    width: int
    out_width: int
    narrow: bool


@functools.lru_cache(maxsize=16384)
def course(network: Network, route: Route) -> Course:
    """Everything that is done along a route."""
    lowered = lower(network, route)
    stages, sizes = lowered.stages, dict(network.sizes)
    features = route.layout == "features"
    given = _ends(network.inputs, features)
    legs = []
    for stage in stages:
        batch = (stage.batch,) if stage.b > 1 else ()
        if features:
            taken: Groups = (*batch, stage.contracted, stage.free + TOKENS)
            gives: Groups = (*batch, stage.new, stage.free + TOKENS)
        else:
            taken = (*batch, TOKENS + stage.free, stage.contracted)
            gives = (*batch, TOKENS + stage.free, stage.new)
        enter, back = turn(given, taken, sizes), turn(taken, given, sizes)
        legs.append(Leg(stage, merging(network, stage), enter, back))
        given = gives
    outputs = _ends(network.outputs, features)
    return Course(
        tuple(legs),
        features,
        turn(given, outputs, sizes),
        turn(outputs, given, sizes),
        stages[0].width,
        stages[-1].out_width,
        all(2 * stage.width <= network.in_features for stage in stages[1:]),
    )


def _ends(letters: str, features: bool) -> Groups:
    return (letters, TOKENS) if features else (TOKENS, letters)


def keeps(network: Network, plan: Plan, tokens: int) -> bool:
    """Whether the inputs of the stages are kept for the backward pass, and not made again.

    They are where they are narrow, all tokens go at once, and some core's gradient uses them.
    """
    if 0 < plan.forward.chunk < tokens or plan.forward not in plan.core_gradients:
        return False
    return course(network, replace(plan.forward, chunk=0)).narrow
