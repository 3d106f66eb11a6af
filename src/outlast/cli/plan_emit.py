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

if TYPE_CHECKING:
    from outlast.cli.plan_choice import Chosen
    from outlast.cli.plan_source import Planned


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

    Without --choose or a layout, the best that the target can express is taken,
    also where --framework names another one. What it cannot express is refused in
    one sentence, and nothing is written. Of a job, the target outlast keeps all
    that the plan does not change.

    Example: outlast plan emit llama-3-8b --cluster h100x64 --target torchtitan
    --out run/
    """
    from dataclasses import fields
    from dataclasses import replace as with_fields

    from outlast.cli.plan_choice import chosen
    from outlast.cli.plan_source import planned
    from outlast.plan.constraints import FRAMEWORKS
    from outlast.plan.emit import EmitSettings
    from outlast.plan.emit import emit as write
    from outlast.plan.emit.targets import target_named

    target_named(target)
    trains = (launches or "outlast") if target == "sbatch" else target
    if asked.framework is None and trains in FRAMEWORKS:
        asked = with_fields(asked, framework=trains)
    read = planned(asked) if trains == "outlast" else _without_mechanisms(planned(asked))
    if not own and all(getattr(layout, field.name) is None for field in fields(layout)):
        layout = with_fields(layout, choose=1)
        read = with_fields(read, target=trains)
    found = chosen(read, layout)
    settings = EmitSettings(
        **_of_job(read),
        name=name or _name(read),
        predicted=_predicted(found),
        origin=shlex.join(["outlast", *sys.argv[1:]]),
        steps=read.context.steps,
        checkpoint_every_steps=_every_steps(read, found),
        model_config=_model_config(read),
        job=_tables(read, found),
        mechanisms=found.settings,
        own_mechanisms=None if read.job is None else read.training.settings,
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
                    "name": target.name,
                    "title": target.title,
                    "files": list(target.files),
                    "expresses": target.expresses,
                }
                for target in TARGETS.values()
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


def _without_mechanisms(planned: Planned) -> Planned:
    """Of a job, without what only Outlast can do: the other framework runs without it."""
    from dataclasses import replace as with_fields

    from outlast.plan.pareto.settings import Settings

    kept = Settings(checkpoint_seconds=planned.training.settings.checkpoint_seconds)
    return with_fields(planned, training=with_fields(planned.training, settings=kept))


def _name(planned: Planned) -> str:
    if planned.job is not None:
        return planned.job.run.name
    letters = (item if item.isalnum() or item in "._-" else "-" for item in _plain_name(planned))
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
    from outlast.cli.plan_paths import whole_path

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
        found["train"] = tuple(map(whole_path, job.data.train))
    if job.data.tokenizer != "byte":
        found["tokenizer"] = whole_path(job.data.tokenizer)
    return found


def _model_config(planned: Planned) -> dict[str, Any]:
    """The source's own config, so that nothing of it is lost."""
    from outlast.plan.huggingface import MODELS, SYNONYMS

    source = planned.asked.source
    job = planned.job
    if job is not None:
        if job.model.settings:
            return dict(job.model.settings)
        source = job.model.config or job.model.directory or ""
    elif source.casefold() in MODELS and not Path(source).exists():
        table = dict(MODELS[source.casefold()].config)
        if not any(name in table for name in SYNONYMS["max_position_embeddings"]):
            table["max_position_embeddings"] = planned.training.run.sequence
        return table
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    found: dict[str, Any] = json_text.loads(path.read_text(encoding="utf-8"))
    return found


def _tables(planned: Planned, found: Chosen) -> dict[str, dict[str, Any]]:
    """What a job says, with its files by their whole paths: it is written to another folder."""
    from outlast.cli.plan_paths import with_whole_paths

    job = planned.job
    if job is None:
        return {}
    tables = with_whole_paths(job.model_dump(exclude_unset=True, exclude_none=True))
    if planned.asked.checkpoint_seconds:
        tables.setdefault("checkpoint", {})["every_steps"] = _every_steps(planned, found)
    return tables
