"""``outlast plan pareto``, ``check``, ``emit``, ``targets``, and the search behind them.

A search gives the exact front first, and what comes next behind it; the front goes into files, one
configuration into a file of a framework, one question into an exit code.
"""

from __future__ import annotations

import json as json_text
import shlex
import sys
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli.console import (
    Column,
    bytes_words,
    joules_range,
    joules_words,
    output,
    print_json,
    print_table,
    range_words,
    rounded,
    seconds_range,
    seconds_words,
    share_words,
)
from outlast.cli.options import AsJson, Layout, PlanOptions, with_options
from outlast.errors import EXIT_CRASHED, NothingAllowedError, PlanError

if TYPE_CHECKING:
    import numpy as np

    from outlast.cli.options import Layout
    from outlast.cli.plan_source import Planned
    from outlast.hardware.figure import Unavailable
    from outlast.plan.configuration import Configuration, Settings
    from outlast.plan.estimate import Interval
    from outlast.plan.objectives import Objectives
    from outlast.plan.pareto import Evaluate, Front
    from outlast.plan.prediction import Estimate
    from outlast.plan.space import Block, Space


@with_options
def pareto(
    asked: PlanOptions,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the interactive page here.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one line per point here.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Search the exact Pareto front, as a page to look at, CSV or JSON.

    The front weighs time, energy, expected lost time, the probability to miss a
    --deadline and loss against each other. The page loads nothing from anywhere.

    Example: outlast plan pareto llama-3-8b --cluster h100x64 --html front.html

    --json: {"axes", "left_out", "limits", "coverage", "kind", "searched",
    "allowed", "within", "knee", "points": [{"cluster", "configuration",
    "settings", "figures", "extrapolated"}]}.
    """
    from outlast.cli.plan_source import planned
    from outlast.plan.objectives import FIGURES
    from outlast.plan.pareto import page

    read = planned(asked)
    front, _, _ = search_front(read)
    refuse_unknown(front, asked.by)
    front = front.ordered(asked.by)
    if html is not None:
        title = f"{read.training.model.name} on {read.cluster.name}"
        within, start = asked.budget or (), datetime.now().astimezone()
        _write(html, page(front, title=title, within=within, minimise=asked.by, start=start))
    if csv is not None:
        _write(csv, front.to_csv())
    if json:
        print(front.to_json(indent=2))
        return
    print(
        f"{front.searched:,} configurations searched, {front.allowed:,} fit with headroom, "
        f"{len(front):,} on the exact front of {', '.join(FIGURES[e].words for e in front.axes)}"
    )
    for path in (html, csv):
        if path is not None:
            print(f"wrote {path}")
    if html is None and csv is None:
        print("nothing was written: give --html FILE, --csv FILE or --json")


@with_options
def check(
    asked: PlanOptions,
    layout: Layout,
    *,
    headroom: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help='Memory of a device that must stay free: "20%" or "10 GiB"; default: what keeps '
            "clear of the memory cliff.",
        ),
    ] = None,
    surely: Annotated[
        bool, typer.Option("--surely", help="Limits hold at the unfavourable end of the intervals.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    json: AsJson = False,
) -> None:
    """Answer one question by exit code: will it fit and keep to the budget?

    0: yes; 1: no, with a sentence why; 2: wrong input, or a limit on what is not
    known. For CI, or the prolog of a Slurm job. Checked is the job's own
    configuration, or the one that --choose or the sizes name; of a source without
    one, the best that can be found.

    Example: outlast plan check job.toml --cluster h100x64 --budget "40 h"
    --budget "3 MWh"

    --json: {"holds", "reasons", "layout", "configuration", "limits", "figures",
    "extrapolated"}.
    """
    from outlast.cli.plan_source import planned
    from outlast.plan.configuration import layout_words

    read = planned(asked)
    bounds = _bounds(read, headroom)
    try:
        found = chosen(read, layout)
    except NothingAllowedError as error:
        reasons = [str(error)]
        if json:
            print_json({"holds": False, "reasons": reasons, "limits": bounds})
        elif not quiet:
            print(f"no: {error}")
        raise typer.Exit(EXIT_CRASHED) from None
    reasons = _reasons(found, bounds, surely)
    if json:
        figures = {name: figure_of(found.estimate, name) for name in bounds}
        print_json(
            {
                "holds": not reasons,
                "reasons": reasons,
                "layout": layout_words(found.run),
                "configuration": found.run,
                "limits": bounds,
                "figures": figures,
                "extrapolated": list(beyond(found.estimate)),
            }
        )
    elif not quiet:
        words = f"{layout_words(found.run)} ({found.origin})"
        print(f"no: {'; '.join(reasons)} [{words}]" if reasons else f"yes: {words}")
        for item in beyond(found.estimate):
            print(f"extrapolated: {item}")
    raise typer.Exit(EXIT_CRASHED if reasons else 0)


def _bounds(planned: Planned, headroom: str | None) -> dict[str, float]:
    from outlast.plan.objectives import limits

    asked, prices = planned.asked, planned.cluster.prices
    start = datetime.now().astimezone()
    found = limits(asked.budget or (), start=start, currency=prices.currency)
    if headroom is not None:
        least = _headroom_bytes(headroom, planned.cluster.memory_bytes)
        found["headroom_bytes"] = max(found.get("headroom_bytes", 0.0), least)
    return found


def _headroom_bytes(text: str, capacity: float) -> float:
    from outlast.plan.objectives import parse

    if text.strip().endswith("%"):
        try:
            share = float(text.strip().removesuffix("%")) / 100.0
        except ValueError:
            share = -1.0
        if not 0.0 <= share < 1.0:
            raise PlanError(f"--headroom = {text}: give 0 to 100 %, or as 10 GiB")
        return share * capacity
    limit = parse(text, name="--headroom")
    if limit.figure != "headroom_bytes":
        raise PlanError(f"--headroom = {text!r} is no amount of memory: give 20% or 10 GiB")
    return limit.value


def _reasons(found: Chosen, bounds: dict[str, float], surely: bool) -> list[str]:
    """Violated conditions, a phrase each.

    Raises:
        PlanError: A limited figure is not known.
    """
    from outlast.hardware.figure import Unavailable
    from outlast.plan.objectives import FIGURES

    each = found.estimate
    used = each.capacity_bytes - each.headroom_bytes
    memory = f"{bytes_words(used)} of {bytes_words(each.capacity_bytes)} on the fullest device"
    reasons = []
    if not each.fits:
        reasons.append(f"it does not fit: {memory}")
    elif each.cliff:
        reasons.append(f"it is in the memory cliff: {memory}, so that the allocator slows it down")
    for name, bound in bounds.items():
        figure = figure_of(each, name)
        if isinstance(figure, Unavailable):
            raise PlanError(
                f"a limit of {FIGURES[name].words} cannot be checked, since it is not known: "
                f"{figure}"
            )
        more = FIGURES[name].more
        worst = figure.low if more else figure.high
        value = worst if surely else figure.middle
        if (value < bound) if more else (value > bound):
            end = " at the unfavourable end" if surely else ""
            least = "at least" if more else "at most"
            reasons.append(
                f"{FIGURES[name].words} is {_words(name, value)}{end}, and {least} "
                f"{_words(name, bound)} was asked for"
            )
    return reasons


def figure_of(found: Estimate, name: str) -> Interval | Unavailable:
    """A figure of the search in an estimate, in the search's units."""
    from outlast.hardware.figure import Unavailable
    from outlast.plan.estimate import Interval

    hours = found.finish_seconds.scaled(1.0 / 3600.0)
    half = found.memory.figure
    figures: dict[str, Any] = {
        "hours": hours,
        "device_hours": hours.scaled(float(found.devices)),
        "lost_hours": hours.scaled(1.0 - found.ettr.figure.middle),
        "loss_difference": found.loss_difference.figure,
        "money": found.money,
        "grams_co2": found.carbon_grams,
        "kwh": found.run_joules
        if isinstance(found.run_joules, Unavailable)
        else found.run_joules.scaled(1.0 / 3.6e6),
        "headroom_bytes": Interval(
            found.headroom_bytes - (half.high - half.middle),
            found.headroom_bytes,
            found.headroom_bytes + (half.middle - half.low),
            half.coverage,
        ),
    }
    if name == "miss_probability":
        if found.on_time is None:
            return Unavailable("no deadline was given", "give --deadline")
        missed = 1.0 - found.on_time
        return Interval(missed, missed, missed)
    figure: Interval | Unavailable = figures[name]
    return figure


def _words(name: str, value: float) -> str:
    from outlast.plan.objectives import FIGURES

    if name in ("hours", "lost_hours"):
        return seconds_words(3600.0 * value)
    if name == "kwh":
        return joules_words(3.6e6 * value)
    if name == "headroom_bytes":
        return bytes_words(value)
    if name == "miss_probability":
        return f"{100 * value:.3g} %"
    return f"{rounded(value, 4)} {FIGURES[name].unit}".strip()


def _write(path: Path, text: str) -> None:
    from outlast.records import replace_file

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
    except OSError as error:
        raise PlanError(f"{path} cannot be written: {error.strerror}") from None


@with_options
def emit(
    asked: PlanOptions,
    layout: Layout,
    *,
    target: Annotated[
        str, typer.Option(help="Framework: see `outlast plan targets`.", show_default=False)
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="Folder; made where it is missing."),
    ],
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
        bool,
        typer.Option("--force", "--replace", help="Replace files that are there and differ."),
    ] = False,
    json: AsJson = False,
) -> None:
    """Write a plan out as a framework's files, the prediction in their head.

    Without --choose or a layout, the best that the target can express is taken,
    also where --framework names another one. What it cannot express is refused in
    one sentence, and nothing is written. Of a job, the target outlast keeps all
    that the plan does not change.

    Example: outlast plan emit llama-3-8b --cluster h100x64 --target torchtitan
    --output run/

    --json: {"kind", "target", "files", "origin", "layout", "configuration", "settings", "estimate",
    "warnings"}.
    """
    from dataclasses import fields
    from dataclasses import replace as with_fields

    from outlast.cli.plan_source import planned
    from outlast.plan.configuration import Settings
    from outlast.plan.constraints import FRAMEWORKS
    from outlast.plan.emit import EmitSettings
    from outlast.plan.emit import emit as write
    from outlast.plan.targets import target_named

    target_named(target)
    trains = (launches or "outlast") if target == "sbatch" else target
    if asked.framework is None and trains in FRAMEWORKS:
        asked = with_fields(asked, framework=trains)
    read = planned(asked)
    if trains != "outlast":
        # Without what only Outlast can do: the other framework runs a job without it.
        kept = Settings(checkpoint_seconds=read.training.settings.checkpoint_seconds)
        read = with_fields(read, training=with_fields(read.training, settings=kept))
    if not own and all(getattr(layout, field.name) is None for field in fields(layout)):
        layout = with_fields(layout, choose=1)
        read = with_fields(read, target=trains)
    found = chosen(read, layout)
    wanted = ("fits", "takes", "energy", "failures", "extrapolated")
    settings = EmitSettings(
        **_of_job(read),
        name=name or _name(read),
        predicted="\n".join(
            f"{key} {text}" for key, text in answers(found.estimate) if key in wanted
        ),
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
    files = list(write(target, model, found.run, read.cluster, out=output, settings=settings))
    if not json:
        for path in files:
            print(f"wrote {path}")
        return
    print_json({"kind": "predicted", "target": target, "files": files, **chosen_facts(found)})


def chosen_facts(found: Chosen) -> dict[str, Any]:
    """One way to run and what is predicted of it, for --json."""
    from outlast.plan.configuration import layout_words

    return {
        "origin": found.origin,
        "layout": layout_words(found.run),
        "configuration": found.run,
        "settings": found.settings,
        "estimate": found.estimate,
        "warnings": list(found.warnings),
    }


def targets(json: AsJson = False) -> None:
    """List the frameworks that a plan can be written out for.

    Example: outlast plan targets

    --json: [{"name", "title", "files", "expresses"}].
    """
    from outlast.plan.targets import TARGETS

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


def _name(planned: Planned) -> str:
    if planned.job is not None:
        return planned.job.run.name
    letters = (
        item if item.isalnum() or item in "._-" else "-" for item in planned.training.model.name
    )
    return "".join(letters).strip("-.") or "run"


def _every_steps(planned: Planned, found: Chosen) -> int:
    """The interval with the least waste, as steps."""
    each = found.estimate
    steps = round(each.checkpoint_seconds / each.step_seconds.figure.middle)
    return max(min(steps, planned.context.steps), 1)


def _of_job(planned: Planned) -> dict[str, Any]:
    """Settings of a job beside its plan."""
    from outlast.cli.plan_source import whole_path

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
    """Tables of a job with absolute paths of its files: it is written to another folder."""
    from outlast.cli.plan_source import with_whole_paths

    job = planned.job
    if job is None:
        return {}
    tables = with_whole_paths(job.model_dump(exclude_unset=True, exclude_none=True))
    if planned.asked.checkpoint_seconds:
        tables.setdefault("checkpoint", {})["every_steps"] = _every_steps(planned, found)
    return tables


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
    from outlast.plan.configuration import layout_words, settings_words

    front, space, nearest = search_front(planned, top)
    by = planned.asked.by
    refuse_unknown(front, by)
    # Nothing here depends on `top` but the end, so that a row keeps its number.
    shown = (front.thinned(_THINNED) if len(front) > _MANY else front).ordered(by)
    rows = [int(row) for row in shown.rows]
    # The rows with the next best behind them, no layout twice.
    found: dict[str, int] = {}
    for row in (*rows, *nearest.rows(front.limits)):
        if len(found) == top:
            break
        candidate = space.candidate(row)
        words = f"{layout_words(candidate.configuration)} {settings_words(candidate.settings)}"
        found.setdefault(words, row)
    return front, space, list(found.values())


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
    # The mechanisms that were asked for, of each only one, where no search chooses among several.
    mechanisms = planned.mechanisms
    for field in fields(mechanisms):
        if len(choices := getattr(mechanisms, field.name)) > 1:
            said = ", ".join(
                "+".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in choices
            )
            raise PlanError(
                f"{field.name} = {said}: a layout that is given takes one choice of each mechanism;"
                " keep one, or take a row of the ranking (--choose)"
            )
    settings = mechanisms.settings()[0]
    estimate = predict(planned.context, run, settings)
    return Chosen(
        run=run, settings=settings, origin=origin, estimate=estimate, warnings=estimate.warnings
    )


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


def answers(found: Estimate, currency: str = "") -> list[tuple[str, str]]:
    """Will it fit, how long, how much energy, what do failures cost, what does it cost."""
    used = found.capacity_bytes - found.headroom_bytes
    fits = "yes" if found.fits and not found.cliff else "no"
    if found.fits and found.cliff:
        fits = "only in the memory cliff, where the allocator slows it down"
    lost = sorted(found.ettr.terms[1:], key=lambda term: term.value)
    wall = found.finish_seconds.middle
    largest = [
        f"{term.name.removeprefix('lost to ')} {seconds_words(-term.value * wall)}"
        for term in lost[:3]
        if -term.value >= 5e-5
    ]
    worst = f": {', '.join(largest)}" if largest else ""
    share = 1.0 - found.ettr.figure.middle
    answered = [
        (
            "fits",
            (
                f"{fits}: {bytes_words(used)} of {bytes_words(found.capacity_bytes)} on the "
                "fullest device"
            ),
        ),
        *([("because", found.unfit)] if found.unfit else []),
        ("takes", f"{seconds_range(found.finish_seconds)}, failures included"),
        ("energy", joules_range(found.run_joules)),
        ("failures", f"{share_words(share)} of the time, {seconds_words(share * wall)}{worst}"),
        ("money", range_words(found.money, currency)),
        ("CO2", range_words(found.carbon_grams, "kg", 1e3)),
    ]
    loss = found.loss_difference.figure
    if loss.high != loss.low:
        words = f"{range_words(loss, 'nats')} above the bf16 baseline at equal data"
        answered.append(("loss", words))
    if found.on_time is not None:
        answered.append(("in time", f"with probability {found.on_time:.2f}"))
    answered += [("extrapolated", name) for name in beyond(found)]
    return answered


def beyond(found: Estimate) -> tuple[str, ...]:
    """Why figures are beyond what was measured: of all of them first, then of one by its name."""
    from outlast.hardware.figure import Unavailable

    shared = found.finish_seconds.extrapolated
    single = {
        "memory": found.memory.figure,
        "energy": found.run_joules,
        "loss": found.loss_difference.figure,
    }
    alone = [
        f"{name}: {phrase}"
        for name, figure in single.items()
        if not isinstance(figure, Unavailable)
        for phrase in figure.extrapolated
        if phrase not in shared
    ]
    return (*shared, *alone)
