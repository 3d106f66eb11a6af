"""The way to run that a command is about: the source's own, a row of the ranking, or a user's."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from outlast.errors import PlanError

if TYPE_CHECKING:
    from outlast.cli.plan_asked import Layout
    from outlast.cli.plan_source import Planned
    from outlast.plan.configuration import Configuration
    from outlast.plan.pareto.settings import Settings
    from outlast.plan.prediction import Estimate

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
    """What a command is about, predicted.

    Raises:
        PlanError: The layout is not legal, both a row and sizes are given, or nothing is found.
    """
    from outlast.cli.plan_ranking import row_of_ranking
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
        run=run,
        settings=settings,
        origin=origin,
        estimate=estimate,
        warnings=estimate.warnings,
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
