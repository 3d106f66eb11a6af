"""From durations that may lie between measured ones to clocks that exist.

Rounding every operation down meets the deadline but wastes time; giving the rest to operations one
by one ends where no single change fits. So several plans are made, each fills its slack, and the
best one is kept: the plain one, two that follow the relaxed plan's times from either end (see
`followed`), and beam searches from either end (see `Beam`), as many as the step's size allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from outlast.energy.frontier.beam import Beam, Width, mirrored, mirrored_optimum
from outlast.energy.frontier.slack import Slack, followed
from outlast.energy.frontier.table import Curves

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from outlast.energy.frontier.linear import Relaxed
    from outlast.energy.frontier.table import Places
    from outlast.energy.profile import Point
    from outlast.energy.schedule.dag import Schedule

# Operations that are placed in beam searches for one deadline: 0.3 to 0.6 s. Long steps gain little
# from more searches.
_PLACED = 7000
_FEWEST, _MOST = 4, 16

# Whether backwards in time, and how strong the pull is; the most useful ones first. No setting is
# best everywhere: tight deadlines need less pull.
_SEARCHES = (
    (False, Width(pull=2.0)),
    (True, Width(pull=10.0)),
    (False, Width(pull=0.3, grain=1e-2)),
    (False, Width(pull=5.0, grain=1e-2)),
    (True, Width(pull=1.0, grain=1e-2)),
    (True, Width(pull=30.0, grain=1e-2)),
    (False, Width(pull=0.3)),
    (False, Width(pull=10.0)),
    (True, Width(pull=3.0)),
    (True, Width(pull=10.0, grain=1e-2)),
    (False, Width(pull=1.0)),
    (False, Width(pull=10.0, grain=1e-2)),
    (False, Width(pull=30.0)),
    (True, Width(pull=30.0)),
    (False, Width(pull=100.0)),
    (True, Width(pull=0.3)),
)


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
    schedule: Schedule, choices: Choices, relaxed: Relaxed, deadline_seconds: float
) -> list[Point]:
    """Measured points of all operations with which the step meets the deadline.

    Args:
        schedule: The step.
        choices: What its operations may run at.
        relaxed: The linear programme's optimum for the deadline.
        deadline_seconds: Met but for rounding errors of floating point (one part in a thousand
            million), and not below the time of the fastest plan.
    """
    curves = choices.curves
    best = [0] * len(choices.points)
    fastest_seconds = schedule.makespan(curves.durations(best))
    # A deadline that is the fastest plan's own time must not fail by rounding.
    deadline = max(deadline_seconds, fastest_seconds)
    least = curves.energy(best)
    for places in _plans(schedule, curves, relaxed, deadline):
        if schedule.makespan(curves.durations(places)) > deadline * (1 + 1e-9):
            continue
        joules = curves.energy(places)
        if joules < least:
            best, least = places, joules
    return [own[place] for own, place in zip(choices.points, best, strict=True)]


def _plans(
    schedule: Schedule, curves: Curves, relaxed: Relaxed, deadline: float
) -> Iterator[Places]:
    """All plans that are tried, the cheap ones first."""
    seconds = relaxed.seconds.tolist()
    everywhere = [range(len(own)) for own in curves.seconds]
    back = mirrored(schedule)
    for places in (
        curves.below(seconds),
        followed(schedule, curves, seconds, deadline),
        followed(back, curves, seconds, deadline),
    ):
        slack = Slack(schedule, curves, places, deadline)
        # Corners first: a point above the hull takes time that saves more elsewhere.
        slack.fill(curves.corners)
        slack.fill(everywhere)
        yield slack.places
    beams = {
        False: Beam(schedule, curves, relaxed, deadline),
        True: Beam(back, curves, mirrored_optimum(relaxed, deadline), deadline),
    }
    count = min(max(_PLACED // max(len(seconds), 1), _FEWEST), _MOST)
    for backwards, width in _SEARCHES[:count]:
        slack = Slack(schedule, curves, beams[backwards].search(width), deadline)
        slack.fill(everywhere)
        yield slack.places
