"""The best of a search, ranked: the front first of all, and what comes next behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np

from outlast.errors import PlanError
from outlast.hardware.figure import Unavailable

if TYPE_CHECKING:
    from outlast.cli.plan_source import Planned
    from outlast.plan.configuration import Configuration
    from outlast.plan.pareto.objectives import Objectives
    from outlast.plan.pareto.search import Evaluate, Front
    from outlast.plan.pareto.settings import Settings
    from outlast.plan.pareto.space import Block, Space
    from outlast.plan.prediction import Estimate

_THINNED = 0.02
_SPARE = 8
"""Candidates behind the front that are kept for each row asked for: some exceed the budget."""
_MANY = 10
"""Points of a front from which on those that are nearly alike are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A row of the ranking.

    Attributes:
        number: From 1.
        run: How the work is divided.
        settings: The mechanisms.
        estimate: What is predicted.
        on_front: No other candidate is better in one figure and no worse in the others.
        knee: Giving up more of one figure begins to buy little of the others here.
    """

    number: int
    run: Configuration
    settings: Settings
    estimate: Estimate
    on_front: bool
    knee: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """A search and its best.

    Attributes:
        planned: What was searched.
        front: All of the exact front.
        choices: The best by the figure asked for.
    """

    planned: Planned
    front: Front
    choices: tuple[Choice, ...]


def ranking(planned: Planned, top: int) -> Ranking:
    """Search, and predict the best in full.

    Args:
        planned: The run.
        top: Rows at most.

    Raises:
        PlanError: Nothing is legal, fits, or keeps to the budget; the sentence says what the least
            is.
    """
    front, space, rows = _ranked(planned, top)
    return Ranking(
        planned=planned,
        front=front,
        choices=tuple(
            _choice(planned, space, front, row, number) for number, row in enumerate(rows, 1)
        ),
    )


def row_of_ranking(planned: Planned, number: int) -> Choice:
    """One row of the ranking, the others not predicted.

    Raises:
        PlanError: As `ranking`, or there is no such row.
    """
    front, space, rows = _ranked(planned, max(number, 1))
    if not 1 <= number <= len(rows):
        raise PlanError(
            f"--choose = {number}: the ranking has {len(rows):,} rows; give one of them"
        )
    return _choice(planned, space, front, rows[number - 1], number)


def _ranked(planned: Planned, top: int) -> tuple[Front, Space, list[int]]:
    """The front, its space, and the rows of the best."""
    front, space, nearest = search_front(planned, top)
    by = planned.asked.by
    refuse_unknown(front, by)
    # Nothing here depends on `top` but the end, so that a row keeps its number.
    shown = (front.thinned(_THINNED) if len(front) > _MANY else front).ordered(by)
    rows = [int(row) for row in shown.rows]
    return front, space, _filled(rows, nearest.rows(front.limits), space, top)


def refuse_unknown(front: Front, by: str) -> None:
    """Refuse to order a front by a figure that is not known.

    Raises:
        PlanError: It is not.
    """
    if isinstance(why := front.objectives.column(by), Unavailable):
        raise PlanError(f"--by = {by}: it is not known: {why.reason}")


def search_front(planned: Planned, top: int = 0) -> tuple[Front, Space, Nearest]:
    """The exact front, the space it is of, and the best of all candidates by one figure.

    Raises:
        PlanError: As `ranking`.
    """
    from outlast.plan.feasibility import refuse_impossible
    from outlast.plan.model import evaluator
    from outlast.plan.pareto.search import search
    from outlast.plan.pareto.space import space

    training = planned.training
    candidates = space(
        training.model,
        training.run,
        planned.cluster,
        planned.axes,
        planned.mechanisms,
        framework=training.framework,
        target=planned.target,
    )
    refuse_impossible(planned.cluster, candidates.whole)
    nearest = Nearest(evaluator(planned.context), planned.asked.by, _SPARE * top)
    front = search(
        candidates,
        nearest,
        planned.asked.budget or (),
        start=datetime.now().astimezone(),
    )
    return front, candidates, nearest


class Nearest:
    """An evaluation that remembers the best rows by one figure, on the front or behind it."""

    def __init__(self, evaluate: Evaluate, by: str, most: int) -> None:
        self._evaluate, self._by, self._most = evaluate, by, most
        self._begin = 0
        self._found: list[tuple[np.ndarray, Objectives]] = []

    def __call__(self, block: Block) -> Objectives:
        """Judge a block."""
        from outlast.plan.pareto.objectives import minimised

        judged = self._evaluate(block)
        if self._most and self._by in judged.available([self._by]):
            allowed = np.flatnonzero(judged.allowed)
            values = minimised(judged, [self._by])[allowed, 0]
            best = allowed[np.argsort(values, kind="stable")[: self._most]]
            self._found.append((best + self._begin, judged.taken(best)))
        self._begin += len(block)
        return judged

    def rows(self, limits: object) -> list[int]:
        """Rows of the space within limits, the best first."""
        from outlast.plan.pareto.objectives import joined, minimised
        from outlast.plan.pareto.search import kept

        if not self._found:
            return []
        rows = np.concatenate([item for item, _ in self._found])
        judged = joined([item for _, item in self._found])
        bounds = dict(limits)  # type: ignore[call-overload]
        if len(judged.available(tuple(bounds))) < len(bounds):
            return []
        inside = np.flatnonzero(kept(judged, bounds))
        values = minimised(judged, [self._by])[inside, 0]
        return [int(rows[inside[at]]) for at in np.argsort(values, kind="stable")]


def _filled(rows: Sequence[int], more: Sequence[int], space: Space, top: int) -> list[int]:
    """The rows with the next best behind them, no layout twice."""
    from outlast.plan.pareto.formatting import layout_words, settings_words

    found: dict[str, int] = {}
    for row in (*rows, *more):
        if len(found) == top:
            break
        each = space.candidate(row)
        words = f"{layout_words(each.configuration)} {settings_words(each.settings)}"
        found.setdefault(words, row)
    return list(found.values())


def _choice(planned: Planned, space: Space, front: Front, row: int, number: int) -> Choice:
    from outlast.plan.prediction import predict

    each = space.candidate(row)
    return Choice(
        number=number,
        run=each.configuration,
        settings=each.settings,
        estimate=predict(planned.context, each.configuration, each.settings),
        on_front=bool((front.rows == row).any()),
        knee=row == int(front.rows[front.knee]),
    )
