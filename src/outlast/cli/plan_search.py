"""The best of a search, ranked: the front first of all, and what comes next behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from outlast.errors import PlanError

if TYPE_CHECKING:
    import numpy as np

    from outlast.cli.options import Layout
    from outlast.cli.plan_source import Planned
    from outlast.plan.configuration import Configuration, Settings
    from outlast.plan.objectives import Objectives
    from outlast.plan.pareto import Evaluate, Front
    from outlast.plan.prediction import Estimate
    from outlast.plan.space import Block, Space


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
    from outlast.hardware.figure import Unavailable

    if isinstance(why := front.objectives.column(by), Unavailable):
        raise PlanError(f"--by = {by}: it is not known: {why.reason}")


def search_front(planned: Planned, top: int = 0) -> tuple[Front, Space, Nearest]:
    """The exact front, the space it is of, and the best of all candidates by one figure.

    Raises:
        PlanError: As `ranking`.
    """
    from outlast.plan.fault_tolerance import refuse_impossible
    from outlast.plan.model import evaluator
    from outlast.plan.pareto import search
    from outlast.plan.space import space

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
        candidates, nearest, planned.asked.budget or (), start=datetime.now().astimezone()
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
        import numpy as np

        from outlast.plan.objectives import minimised

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
        import numpy as np

        from outlast.plan.objectives import joined, minimised
        from outlast.plan.pareto import kept

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
    from outlast.plan.configuration import layout_words, settings_words

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


_ZERO = {"0": "none", "1": "optimizer", "2": "gradients", "3": "parameters"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """One way to run.

    Attributes:
        run: How the work is divided.
        settings: The mechanisms.
        origin: Where it comes from, for people.
        estimate: What is predicted.
        warnings: What is possible and costs something, a sentence each.
    """

    run: Configuration
    settings: Settings
    origin: str
    estimate: Estimate
    warnings: tuple[str, ...]


def chosen(planned: Planned, layout: Layout) -> Chosen:
    """Predict the configuration that a command is about.

    Raises:
        PlanError: The layout is not legal, both a row and sizes are given, or nothing is found.
    """
    from outlast.plan.prediction import predict

    sizes = {
        field.name: getattr(layout, field.name)
        for field in fields(layout)
        if field.name != "choose" and getattr(layout, field.name) is not None
    }
    if sizes and layout.choose is not None:
        raise PlanError(
            f"--choose = {layout.choose} and --{next(iter(sizes)).replace('_', '-')} both say "
            "which way to run: keep one"
        )
    if sizes:
        run, origin = _stated(planned, sizes), "as given"
    elif layout.choose is None and planned.own is not None:
        run, origin = planned.own, "the job's own"
    elif layout.choose is None and planned.own_problem:
        raise PlanError(planned.own_problem)
    else:
        number = 1 if layout.choose is None else layout.choose
        found = row_of_ranking(planned, number)
        run, settings, origin = found.run, found.settings, f"row {number} of the ranking"
        return Chosen(
            run=run,
            settings=settings,
            origin=origin,
            estimate=found.estimate,
            warnings=found.estimate.warnings,
        )
    settings = _one(planned)
    estimate = predict(planned.context, run, settings)
    return Chosen(
        run=run, settings=settings, origin=origin, estimate=estimate, warnings=estimate.warnings
    )


def _one(planned: Planned) -> Settings:
    """The mechanisms that were asked for, of each only one, where no search chooses among several.

    Raises:
        PlanError: Several choices of one mechanism.
    """
    found = planned.mechanisms
    for field in fields(found):
        if len(choices := getattr(found, field.name)) > 1:
            said = ", ".join(
                "+".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in choices
            )
            raise PlanError(
                f"{field.name} = {said}: a layout that is given takes one choice of each mechanism;"
                " keep one, or take a row of the ranking (--choose)"
            )
    return found.settings()[0]


def _stated(planned: Planned, sizes: dict[str, Any]) -> Configuration:
    from outlast.plan.constraints import problems

    names = {"shard": "sharding", "shard_ranks": "sharding_ranks"}
    wanted = {names.get(name, name): value for name, value in sizes.items()}
    if "sharding" in wanted:
        wanted["sharding"] = _ZERO.get(wanted["sharding"], wanted["sharding"])
    base = planned.own or planned.training.run
    if "stages_per_rank" in wanted and "schedule" not in wanted and wanted["stages_per_rank"] > 1:
        wanted["schedule"] = "interleaved"
    if "data" not in wanted:
        others = 1
        for name in ("tensor", "pipeline", "context"):
            others *= max(int(wanted.get(name, getattr(base, name))), 1)
        wanted["data"] = max(planned.cluster.devices // others, 1)
        wanted.setdefault("sharding_ranks", 0)
    if planned.asked.micro_batch is None and planned.own is None:
        wanted["micro_batch"] = max(min(base.micro_batch, base.batch // wanted["data"]), 1)
    run = replace(base, **wanted)
    training = planned.training
    wrong = problems(training.model, run, planned.cluster, training.framework)
    if wrong:
        raise PlanError("; ".join(wrong))
    return run
