"""From durations that may lie between measured ones to clocks that exist.

Rounding every operation down meets the deadline but wastes time; giving the rest to operations one
by one ends where no single change fits. So beam searches (see `Beam`) make many plans, forwards and
backwards in time, at the optimum's prices and at the mean prices of deadlines nearby. The best of
them fill their slack, and the best one is kept. Where it is near the bound, fewer are made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from outlast.energy.frontier.beam import Beam, Leaning, Width, mirrored, mirrored_optimum
from outlast.energy.frontier.slack import Slack
from outlast.energy.frontier.table import Curves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.energy.frontier.linear import Relaxed
    from outlast.energy.frontier.table import Places
    from outlast.energy.profile import Point
    from outlast.energy.schedule.dag import Schedule

# No setting is best everywhere: tight deadlines need less pull.
_LEANINGS = tuple(
    Leaning(pull, grain, early)
    for early in (1.0, 0.2)
    for grain in (2e-3, 1e-2)
    for pull in (0.3, 1.0, 2.0, 5.0, 10.0)
)

# Plans that a search keeps, more of them in short steps; wider searches help less than more.
_KEPT, _MOST_KEPT = 16, 48
# Their number times operations.
_PLACES = 6_000

# Longer steps are searched with every other leaning only, to save time.
_LONG = 1_000

# Plans of the searches whose slack is filled, the best ones: others hardly become the best.
_FILLED = 2


@dataclass(frozen=True)
class _Round:
    """Searches that are made together.

    Attributes:
        backwards: In time.
        price: Weight of the mean of deadlines nearby in the prices.
        time: The same in the times that plans are pulled to.
        above: Not made where the plan is nearer to the bound, as a share of the step's energy.
    """

    backwards: bool
    price: float
    time: float
    above: float


# The most useful ones first. Later ones pay where plans are still far from the bound.
_ROUNDS = (
    _Round(False, 0.0, 0.0, 0.0),
    _Round(True, 1.0, 0.0, 4e-4),
    _Round(False, 1.0, 0.0, 4e-4),
    _Round(True, 0.0, 0.0, 4e-4),
    _Round(False, 0.0, 1.0, 6e-4),
    _Round(False, 0.5, 0.0, 6e-4),
    _Round(True, 0.5, 0.0, 6e-4),
    _Round(False, 0.5, 0.5, 6e-4),
    _Round(True, 0.0, 1.0, 6e-4),
)
# Operations that rounds place for one deadline, and the fewest rounds.
_PLACED = 5_000
_FEWEST_ROUNDS = 3


@dataclass(frozen=True, eq=False)
class Choices:
    """What every operation may run at.

    Attributes:
        points: (operations,) Pareto points, fastest first.
        hulls: (operations,) those of them that are corners of the lower hull.
        blocking_watts: Power of a waiting device.
    """

    points: Sequence[Sequence[Point]]
    hulls: Sequence[Sequence[Point]]
    blocking_watts: float

    @cached_property
    def curves(self) -> Curves:
        """The same as arrays."""
        return Curves.of(self.points, self.hulls, self.blocking_watts)


def rounded(
    schedule: Schedule,
    choices: Choices,
    relaxed: Relaxed,
    deadline_seconds: float,
    nearby: Sequence[Relaxed] = (),
) -> list[Point]:
    """Measured points of all operations with which the step meets the deadline.

    Args:
        schedule: The step.
        choices: What its operations may run at.
        relaxed: The linear programme's optimum for the deadline.
        deadline_seconds: Met but for rounding errors of floating point (one part in a thousand
            million), and not below the time of the fastest plan.
        nearby: Optima of slightly shorter and longer deadlines. Prices jump from one deadline to
            the next; their mean weighs more operations.
    """
    curves = choices.curves
    fastest = [0] * len(choices.points)
    # A deadline that is the fastest plan's own time must not fail by rounding.
    deadline = max(deadline_seconds, schedule.makespan(curves.durations(fastest)))
    limit = deadline * (1 + 1e-9)
    mean = _mean(relaxed, nearby, deadline)
    full = relaxed.joules + schedule.devices * choices.blocking_watts * deadline
    rounds = max(_PLACED // max(len(fastest), 1), _FEWEST_ROUNDS)
    rough = curves.below(relaxed.seconds.tolist())
    best = _better(schedule, curves, fastest, ([rough], limit))
    for round_ in _ROUNDS[:rounds]:
        if curves.energy(best) - relaxed.joules > round_.above * full:
            optimum = _between(relaxed, mean, round_)
            plans = _searched(schedule, curves, optimum, (deadline, round_.backwards))
            best = _better(schedule, curves, best, (plans, limit))
    return [own[place] for own, place in zip(choices.points, best, strict=True)]


def _mean(relaxed: Relaxed, nearby: Sequence[Relaxed], deadline: float) -> Relaxed:
    """The mean of optima, as if all were for the deadline; its prices are a flow as well."""
    every = [relaxed]
    for item in nearby:
        longer = deadline / float((item.starts + item.seconds).max())
        every.append(replace(item, starts=item.starts * longer, seconds=item.seconds * longer))
    return replace(
        relaxed,
        starts=np.mean([said.starts for said in every], axis=0),
        seconds=np.mean([said.seconds for said in every], axis=0),
        edge_watts=np.mean([said.edge_watts for said in every], axis=0),
        operation_watts=np.mean([said.operation_watts for said in every], axis=0),
    )


def _between(relaxed: Relaxed, mean: Relaxed, weights: _Round) -> Relaxed:
    """An optimum's mixture with the mean."""
    price, time = weights.price, weights.time
    return replace(
        relaxed,
        starts=(1 - time) * relaxed.starts + time * mean.starts,
        seconds=(1 - time) * relaxed.seconds + time * mean.seconds,
        edge_watts=(1 - price) * relaxed.edge_watts + price * mean.edge_watts,
        operation_watts=(1 - price) * relaxed.operation_watts + price * mean.operation_watts,
    )


def _better(
    schedule: Schedule, curves: Curves, best: Places, rivals: tuple[list[Places], float]
) -> Places:
    """The plan that needs least, of the best so far and of rivals that keep to the limit."""
    plans, limit = rivals
    fitting = [p for p in plans if schedule.makespan(curves.durations(p)) <= limit]
    return min((best, *fitting), key=curves.energy)


def _searched(
    schedule: Schedule, curves: Curves, optimum: Relaxed, aim: tuple[float, bool]
) -> list[Places]:
    """The best plans of the searches of one round, with filled slack."""
    deadline, backwards = aim
    if backwards:
        optimum = mirrored_optimum(optimum, deadline)
    beam = Beam(mirrored(schedule) if backwards else schedule, curves, optimum, deadline)
    kept = min(max(_PLACES // len(schedule.operations), _KEPT), _MOST_KEPT)
    leanings = _LEANINGS[::2] if len(schedule.operations) > _LONG else _LEANINGS
    plans = sorted(beam.search(leanings, Width(plans=kept)), key=curves.energy)
    return [_filled(schedule, curves, places, deadline) for places in plans[:_FILLED]]


def _filled(schedule: Schedule, curves: Curves, places: Places, deadline: float) -> Places:
    """A plan with filled slack."""
    slack = Slack(schedule, curves, places, deadline)
    slack.fill([range(len(own)) for own in curves.seconds])
    return slack.places
