"""``outlast plan emit`` and ``targets``: a plan as the configuration of a framework."""

from __future__ import annotations

import json as json_text
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli.asks import asks
from outlast.cli.plan_asked import Asked, Layout
from outlast.cli.plan_rank import AsJson
from outlast.errors import PlanError

if TYPE_CHECKING:
    from outlast.cli.plan_choice import Chosen
    from outlast.cli.plan_source import Planned

_TRIED = 20
"""Rows of the ranking that are looked through for one that the target can express."""


@asks
def emit(
    asked: Asked,
    layout: Layout,
    *,
    target: Annotated[
        str, typer.Option(help="Framework: see `outlast plan targets`.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder; made where it is missing.")],
    launches: Annotated[
        str | None, typer.Option(help="Of sbatch: the target that it starts; default: outlast.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the run; default: the source's.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Of the Outlast job; repeat."),
    ] = None,
    partition: Annotated[str, typer.Option(help="Of the queue.")] = "",
    account: Annotated[str, typer.Option(help="Who pays.")] = "",
    longest_hours: Annotated[float, typer.Option(help="Largest time limit of the queue.")] = 24.0,
    own: Annotated[
        bool, typer.Option("--own", help="Write the job's own configuration, not the best.")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Overwrite files that are there and differ.")
    ] = False,
) -> None:
    """Write a plan out as a framework's files, the prediction in their head.

    The search keeps to what the target can do; without --choose the best that it
    can express is taken. What it cannot express is refused in one sentence, and
    nothing is written.

    Example: outlast plan emit llama-3-8b --cluster h100x64 --target torchtitan
    --out run/
    """
    from dataclasses import replace as with_fields

    from outlast.cli.plan_choice import chosen
    from outlast.cli.plan_source import planned
    from outlast.plan.emit import Settings
    from outlast.plan.emit import emit as write
    from outlast.plan.emit.targets import target_named
    from outlast.plan.frameworks import FRAMEWORKS

    target_named(target)
    trains = (launches or "outlast") if target == "sbatch" else target
    if asked.framework is None and trains in FRAMEWORKS:
        asked = with_fields(asked, framework=trains)
    read = planned(asked)
    found = chosen(read, layout) if own else _expressible(read, layout, trains)
    settings = Settings(
        **_of_job(read),
        name=name or _name(read),
        predicted=_predicted(found),
        origin=shlex.join(["outlast", *sys.argv[1:]]),
        steps=read.context.steps,
        checkpoint_every_steps=_every_steps(read, found),
        model_config=_model_config(read),
        overrides=tuple(set_ or ()),
        launches=trains,
        predicted_hours=found.estimate.finish_seconds.middle / 3600.0,
        longest_hours=longest_hours,
        partition=partition,
        account=account,
        replace=replace,
    )
    model = read.training.model
    for path in write(target, model, found.run, read.cluster, out=out, settings=settings):
        print(f"wrote {path}")


def targets(json: AsJson = False) -> None:
    """List the frameworks that a plan can be written out for.

    Example: outlast plan targets

    --json: [{"name", "title", "files", "expresses"}].
    """
    from outlast.cli.figures import Column, output, print_json, print_table
    from outlast.plan.emit import TARGETS

    if json:
        print_json(
            [
                {
                    "name": each.name,
                    "title": each.title,
                    "files": list(each.files),
                    "expresses": each.expresses,
                }
                for each in TARGETS.values()
            ]
        )
        return
    rows = [[e.name, e.title, ", ".join(e.files), e.expresses] for e in TARGETS.values()]
    columns = [
        Column("target", number=False),
        Column("framework", number=False),
        Column("files", number=False, optional=2, least=18),
        Column("expresses", number=False, optional=1, least=24),
    ]
    print_table(output(), columns, rows)


def _expressible(planned: Planned, layout: Layout, target: str) -> Chosen:
    """What is written: what was named, else the best row that the target can express."""
    from dataclasses import fields

    from outlast.cli.plan_choice import Chosen, chosen
    from outlast.cli.plan_ranking import ranking
    from outlast.plan.emit import problem

    named = any(getattr(layout, each.name) is not None for each in fields(layout))
    if named:
        return chosen(planned, layout)
    model = planned.training.model
    rows = ranking(planned, _TRIED).choices
    for each in rows:
        if problem(target, model, each.run) is None:
            return Chosen(
                run=each.run,
                settings=each.settings,
                origin=f"row {each.number} of the ranking",
                estimate=each.estimate,
                warnings=(),
            )
    raise PlanError(f"none of the best {len(rows)} rows: {problem(target, model, rows[0].run)}")


def _name(planned: Planned) -> str:
    if planned.job is not None:
        return planned.job.run.name
    letters = (each if each.isalnum() or each in "._-" else "-" for each in _plain_name(planned))
    return "".join(letters).strip("-.") or "run"


def _plain_name(planned: Planned) -> str:
    return planned.training.model.name


def _predicted(found: Chosen) -> str:
    from outlast.cli.plan_rank import answers

    wanted = ("fits", "takes", "energy", "failures", "extrapolated")
    return "\n".join(f"{key} {text}" for key, text in answers(found.estimate) if key in wanted)


def _every_steps(planned: Planned, found: Chosen) -> int:
    """The interval with the least waste, as steps."""
    each = found.estimate
    steps = round(each.checkpoint_seconds / each.step_seconds.figure.middle)
    return max(min(steps, planned.context.steps), 1)


def _of_job(planned: Planned) -> dict[str, Any]:
    """What a job says beside its plan."""
    job = planned.job
    if job is None:
        return {}
    found: dict[str, Any] = {
        "learning_rate": job.optimizer.learning_rate,
        "warmup_steps": job.schedule.warmup_steps,
        "gradient_clip": job.train.gradient_clip,
        "seed": job.run.seed,
        "keep": job.checkpoint.keep,
    }
    if job.data.source == "text":
        found["train"] = tuple(job.data.train)
    if job.data.tokenizer != "byte":
        found["tokenizer"] = job.data.tokenizer
    return found


def _model_config(planned: Planned) -> dict[str, Any]:
    """The source's own config, so that nothing of it is lost."""
    from outlast.plan.known_models import MODELS

    source = planned.asked.source
    job = planned.job
    if job is not None:
        if job.model.settings:
            return dict(job.model.settings)
        source = job.model.config or job.model.directory or ""
    elif source.casefold() in MODELS and not Path(source).exists():
        # Published sizes are not a whole config: what a framework needs is made from them.
        return {}
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    table: dict[str, Any] = json_text.loads(path.read_text(encoding="utf-8"))
    return table
