"""``outlast plan``: what a run will take, every figure with its interval and its source.

Here are the group, and its commands ``explain``, ``compare``, ``simulate``, ``clusters`` and
``models``.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli.console import (
    Column,
    bar,
    bytes_words,
    count_words,
    output,
    print_facts,
    print_json,
    print_table,
    range_words,
    seconds_words,
)
from outlast.cli.options import AsJson, Layout, PlanOptions, with_options
from outlast.cli.plan_calibrate import calibrate
from outlast.cli.plan_pareto import check, emit, pareto, targets
from outlast.cli.plan_rank import rank
from outlast.errors import EXIT_CRASHED, PlanError
from outlast.paths import read_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from outlast.cli.plan_pareto import Chosen
    from outlast.plan.estimate import Source, Total
    from outlast.plan.goodput import Finish, Goodput
    from outlast.plan.prediction import Estimate
    from outlast.plan.simulate import Scenario, Simulated
    from outlast.records import Compared, Forecast, Run


@with_options
def explain(asked: PlanOptions, layout: Layout, json: AsJson = False) -> None:
    """Take one way to run apart: every figure, its interval and its terms.

    Shown are the source's own configuration, a row of the ranking (--choose 2),
    or one in your words (--tensor 8 --pipeline 4). Each term has its formula, the
    values and constants in it, and where these come from; terms add up to the
    total.

    Example: outlast plan explain llama-3-8b --cluster h100x64 --tensor 2 --shard
    parameters

    --json: {"planned", "origin", "layout", "configuration", "settings",
    "estimate", "warnings", "assumed", "cluster"}.
    """
    from outlast.cli.plan_pareto import answers, chosen, chosen_facts
    from outlast.cli.plan_rank import print_planned
    from outlast.cli.plan_source import planned
    from outlast.hardware.figure import Unavailable
    from outlast.plan.configuration import layout_words, settings_words

    read = planned(asked)
    found = chosen(read, layout)
    if json:
        print_json(
            {
                "kind": "predicted",
                "planned": {"source": asked.source, "model": read.training.model},
                **chosen_facts(found),
                "assumed": list(read.assumed),
                "cluster": read.cluster,
            }
        )
        return
    console = output()
    each = found.estimate
    print_planned(console, read)
    facts = [
        ("layout", f"{layout_words(found.run)} ({found.origin})"),
        ("mechanisms", settings_words(found.settings)),
        *answers(each, read.cluster.prices.currency),
        ("throughput", range_words(each.tokens_per_s, "tokens/s")),
        ("MFU", range_words(each.utilisation, "% of the peak, no recomputation counted", 0.01)),
        ("checkpoints", f"every {seconds_words(each.checkpoint_seconds)}"),
        ("redone work", seconds_words(each.lost_work_seconds)),
        *(("flag", text) for text in found.warnings),
    ]
    print_facts(console, "What is predicted", facts)
    _print_total(console, "time of a step", each.step_seconds)
    _print_total(console, "reserved memory of the fullest device", each.memory)
    _print_stages(console, found)
    if isinstance(each.joules, Unavailable):
        console.print(f"\nenergy of a step: {each.joules}", soft_wrap=True, markup=False)
    else:
        _print_total(console, "energy of a step, all devices", each.joules)
    _print_total(console, "share of the wall time that is progress (ETTR)", each.ettr)
    _print_total(console, "loss against the baseline at equal data", each.loss_difference)
    console.print("\n[bold]figures of the cluster[/bold]")
    for name, source in sorted(read.cluster.sources.items()):
        _print_wrapped(console, f"{name} = {source_words(source)}", "  ")


def _print_total(console: Console, title: str, total: Total) -> None:
    """A total, its terms, and the constants in them."""
    terms = [term for term in total.terms if term.value]
    nothing = [term.name for term in total.terms if not term.value]
    words = range_words(total.figure, _shown_unit(total.unit), _factor(total.unit))
    console.print(f"\n[bold]{title}[/bold]: {words}", soft_wrap=True)
    # Values that all terms share, to be said once.
    common: dict[str, float] = {}
    if len(terms) > 1:
        common = {
            name: value
            for name, value in terms[0].inputs.items()
            if all(term.inputs.get(name) == value for term in terms)
        }
    unit, whole = total.unit, total.figure.middle
    for term in sorted(terms, key=lambda term: -abs(term.value)):
        value = f"{term.value / _factor(unit):.6g} {_shown_unit(unit)}".strip()
        share = f"{100 * term.value / whole:.1f} %" if whole and unit not in ("1", "nats") else ""
        values = ", ".join(
            f"{name} = {given:.6g}" for name, given in term.inputs.items() if name not in common
        )
        parts = [f"= {term.formula}", f"with {values}" if values else "", f"[{term.source}]"]
        if console.is_terminal:
            console.print(f"  {term.name:<28} {value:>18} {share:>8}", markup=False)
            for part in filter(None, parts):
                _print_wrapped(console, part, "      ")
        else:
            line = "  ".join(filter(None, [f"  {term.name}", value, share, *parts]))
            console.print(line, soft_wrap=True, markup=False)
    if common:
        values = ", ".join(f"{name} = {value:.6g}" for name, value in common.items())
        _print_wrapped(console, f"with {values} in all terms", "  ")
    if nothing:
        _print_wrapped(console, f"nothing: {', '.join(nothing)}", "  ")
    summed = math.fsum(term.value for term in total.terms)
    console.print(
        f"  sum of {len(total.terms)} terms: {summed / _factor(total.unit):.6g} "
        f"{_shown_unit(total.unit)}".rstrip()
    )
    for name, source in sorted(
        {name: source for term in total.terms for name, source in term.constants.items()}.items()
    ):
        _print_wrapped(console, f"{name} = {source_words(source)}", "  ")


def _print_wrapped(console: Console, text: str, indent: str) -> None:
    """Wrapped on a terminal, else one line."""
    if not console.is_terminal:
        console.print(f"{indent}{text}", soft_wrap=True, markup=False, style="dim")
        return
    for line in textwrap.wrap(
        text, console.width, initial_indent=indent, subsequent_indent=f"{indent}  "
    ):
        console.print(line, markup=False, style="dim", soft_wrap=True)


def source_words(source: Source) -> str:
    """A constant: value, unit, origin and where to find it."""
    unit = "" if source.unit == "1" else f" {source.unit}"
    return f"{source.value:.6g}{unit} ({source.origin}: {source.text})"


def _print_stages(console: Console, found: Chosen) -> None:
    """Memory of every stage, alike ones in one line."""
    capacity = found.estimate.capacity_bytes
    if len(found.estimate.memory_by_stage) < 2:
        return
    console.print("  by stage of the pipeline:")
    for first, last, held in _runs(found.estimate.memory_by_stage):
        name = f"stage {first}" if first == last else f"stages {first} to {last}"
        picture = bar(held / capacity) if console.encoding.startswith("utf") else ""
        console.print(
            f"  {name:<16} {picture} {bytes_words(held)} of {bytes_words(capacity)}", markup=False
        )


def _runs(values: tuple[float, ...]) -> Iterator[tuple[int, int, float]]:
    """First and last index of stages that hold the same, to a per cent."""
    first = 0
    for index in range(1, len(values) + 1):
        if index == len(values) or abs(values[index] / values[first] - 1.0) > 0.01:
            yield first, index - 1, max(values[first:index])
            first = index


def _shown_unit(unit: str) -> str:
    return {"B": "GiB", "J": "MJ", "1": "", "s": "s"}.get(unit, unit)


def _factor(unit: str) -> float:
    return {"B": 2.0**30, "J": 1e6}.get(unit, 1.0)


_PURPOSES: Mapping[str, tuple[str, ...]] = {
    "compute": (
        "matrix products",
        "attention",
        "memory-bound operations",
        "head and loss",
        "gradient accumulation",
        "optimizer",
        "orthogonal updates",
        "host and kernel starts",
        "fixed",
        "uneven stages",
        "pipeline bubble",
        "slowest node",
        "structured layers",
        "guard",
        "gradient coding",
        "lower clocks",
        "correction from similar runs",
        "held to the best published MFU",
    ),
    "communication": (
        "tensor-parallel collectives",
        "context-parallel transfers",
        "expert all-to-all",
        "pipeline transfers",
        "gradient sum",
        "gathering of weights",
    ),
}
"""Terms of a step by the purpose under which the trainer's clock counts them. Collectives that run
within the backward pass are counted as compute there, so that the sum of both is what compares."""


_LOSSES = {"checkpoint saves": "checkpoint", "lost work": "lost", "restart": "restart"}
"""Terms of the ETTR and the purposes that measure the same."""


def compare(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    *,
    cluster: Annotated[
        str | None,
        typer.Option(help="Predict now, on this cluster, in place of what the run recorded."),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Predict now, with this calibration.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Hold a prediction against the run: time, memory, energy, parts of a step.

    Compared is what `outlast train` recorded before the first step; with
    --cluster or --calibration, or where the run recorded nothing, what is
    predicted now. Exit code 0: all measured figures lie in their intervals; 1:
    one does not (drift: calibrate again, or look for what slows the run down).

    Example: outlast plan compare runs/quickstart --cluster mine.toml
    --calibration fitted.toml

    --json: {"run", "predicted_by", "figures": [{"name", "unit", "predicted",
    "low", "high", "measured", "ratio", "inside", "missing"}], "parts": [{"part",
    "unit", "predicted", "measured"}], "drift"}.
    """
    from outlast.records import forecast_of, read_run

    read = read_run(run)
    if not read.attempts:
        raise PlanError(f"{run} holds no start of a run: name a run directory of `outlast train`")
    forecast = forecast_of(read)
    losses: list[tuple[str, str, float, float]] = []
    by = "recorded before the run"
    if cluster is not None or calibration is not None or forecast is None:
        forecast, losses = _predicted_now(read, cluster, calibration)
        by = "predicted now"
    prediction = forecast.prediction
    by += f" ({prediction.calibration or 'no calibration named'})"
    figures = list(forecast.compared())
    parts = [*_step_parts(prediction.terms, read), *losses]
    drift = [figure for figure in figures if figure.inside is False]
    if json:
        print_json(
            {
                "run": str(run),
                "predicted_by": by,
                "figures": [
                    {
                        "name": figure.name,
                        "unit": figure.unit,
                        "predicted": figure.predicted,
                        "low": figure.low,
                        "high": figure.high,
                        "measured": figure.measured,
                        "ratio": figure.ratio,
                        "inside": figure.inside,
                        "missing": figure.missing if figure.measured is None else "",
                    }
                    for figure in figures
                ],
                "parts": [
                    {"part": name, "unit": unit, "predicted": predicted, "measured": measured}
                    for name, unit, predicted, measured in parts
                ],
                "drift": [compared.name for compared in drift],
            }
        )
    else:
        _print_comparison(read, by, prediction.extrapolated, figures, parts)
        for compared in drift:
            print(
                f"drift: {compared.name}: {compared.sentence()}; calibrate again with this run "
                "(`outlast plan calibrate`), or look for what has changed"
            )
    raise typer.Exit(EXIT_CRASHED if drift else 0)


def _predicted_now(
    read: Run, cluster: str | None, calibration: Path | None
) -> tuple[Forecast, list[tuple[str, str, float, float]]]:
    """A prediction of the run that was done, and what it says of the time that is lost."""
    from outlast.cli.plan_calibrate import HERE, calibration_for, place_of, ranks_of, record_of
    from outlast.job import job_from_text
    from outlast.plan.api import Training, predict
    from outlast.plan.calibration import read_calibration
    from outlast.plan.memory_fit import COMPILED, OUTLAST, known_of
    from outlast.plan.run_rows import read_run_row
    from outlast.records import Forecast, measured_figures

    row = read_run_row(read.path, place_of(cluster or HERE, ranks_of(read)))
    steps = job_from_text(read.job_text).train.steps
    training = Training(
        model=row.model,
        run=row.run,
        tokens=float(row.run.tokens) * steps,
        framework=OUTLAST,
        compiled=row.framework == COMPILED,
    )
    file = calibration_for(cluster or HERE, calibration)
    used = None if file is None else read_calibration(Path(file))
    known = None if used is None else known_of(used)
    try:
        estimate = predict(training, row.cluster, calibration=known)
    except PlanError as error:
        raise PlanError(f"{read.path} cannot be predicted on {row.cluster.name}: {error}") from None
    measured = measured_figures(read)
    assert measured is not None
    record = record_of(estimate, training, row.cluster, used, file)
    return Forecast(record, measured), _loss_parts(estimate, read)


def _step_parts(terms: Mapping[str, float], read: Run) -> list[tuple[str, str, float, float]]:
    """Name, unit, predicted and measured, of what a step's seconds are spent on."""
    from outlast.records import StepsDone

    events = [event for _, event in read.of(StepsDone) if event.steps]
    if not events or not terms:
        return []
    found = []
    for purpose, names in _PURPOSES.items():
        predicted = sum(value for name, value in terms.items() if name in names)
        # The median leaves out the first steps, as that of the step time does.
        each = [event.seconds.get(purpose, 0.0) / event.steps for event in events]
        found.append((f"{purpose} in a step", "s", predicted, statistics.median(each)))
    both = sum(part[2] for part in found), sum(part[3] for part in found)
    return [*found, ("both in a step", "s", *both)]


def _loss_parts(estimate: Estimate, read: Run) -> list[tuple[str, str, float, float]]:
    """Shares of the wall time: what the run lost, and what it was predicted to lose."""
    seconds = read.seconds()
    wall = sum(seconds.values())
    if not wall:
        return []
    lost = {
        term.name.removeprefix("lost to "): -term.value
        for term in estimate.ettr.terms
        if term.name.startswith("lost to ")
    }
    return [
        (f"{name}, of the wall time", "1", lost.get(name, 0.0), seconds.get(purpose, 0.0) / wall)
        for name, purpose in _LOSSES.items()
    ]


def _print_comparison(
    read: Run,
    by: str,
    beyond: Sequence[str],
    figures: list[Compared],
    parts: list[tuple[str, str, float, float]],
) -> None:
    console = output()
    rows = [
        [
            figure.name,
            figure.words(figure.predicted),
            figure.interval_words() or "-",
            f"unavailable: {figure.missing}"
            if figure.measured is None
            else figure.words(figure.measured),
            "-" if figure.ratio is None else f"{figure.ratio:.3f}",
            figure.verdict or "-",
        ]
        for figure in figures
    ]
    columns = [
        Column("figure", number=False),
        Column("predicted"),
        Column("interval", optional=2),
        Column("measured", least=12, optional=1),
        Column("ratio"),
        Column("verdict", number=False, optional=3),
    ]
    print_table(console, columns, rows, f"{read.name}: {by}")
    for item in beyond:
        console.print(f"extrapolated: {item}", markup=False, soft_wrap=True)
    if parts:
        console.print()
        rows = [[name, _part(p, unit), _part(m, unit)] for name, unit, p, m in parts]
        columns = [Column("part", number=False), Column("predicted"), Column("measured")]
        print_table(console, columns, rows)
        console.print(
            "collectives within the backward pass are measured as compute: compare the sum",
            style="dim",
        )


def _part(value: float, unit: str) -> str:
    return seconds_words(value) if unit == "s" else f"{100 * value:.3f} %"


def clusters(json: AsJson = False) -> None:
    """List the shipped clusters, files to copy, and parts for shorthands.

    A shorthand is a part and a number of devices: h100x64, 512xa100. Whatever a
    cluster file leaves out comes from the catalogue of `outlast.hardware`.

    Example: outlast plan clusters

    --json: {"clusters": [{"name", "nodes", "devices", "device", "file"}],
    "parts": [...]}.
    """
    from importlib.resources import files

    from outlast.hardware import devices
    from outlast.plan.cluster_file import cluster_of, shipped_clusters

    folder = files("outlast.plan").joinpath("clusters")
    found = [(name, cluster_of(name), str(folder / f"{name}.toml")) for name in shipped_clusters()]
    parts = [device.key for device in devices()]
    if json:
        print_json(
            {
                "clusters": [
                    {
                        "name": name,
                        "nodes": item.nodes,
                        "devices": item.devices,
                        "device": item.device,
                        "file": path,
                    }
                    for name, item, path in found
                ],
                "parts": parts,
            }
        )
        return
    console = output()
    rows = [
        [name, f"{e.nodes:,} x {e.devices_per_node}", e.device, f"{e.memory_bytes / 2**30:.0f} GiB"]
        for name, e, _ in found
    ]
    columns = [
        Column("cluster", number=False),
        Column("nodes"),
        Column("device", number=False),
        Column("memory"),
    ]
    print_table(console, columns, rows)
    console.print(
        f"\nfiles to copy and change, each NAME.toml in {folder}", markup=False, soft_wrap=True
    )
    console.print(f"parts for shorthands such as h100x64: {', '.join(parts)}", markup=False)


def models(json: AsJson = False) -> None:
    """List the published models that can stand for SOURCE.

    Example: outlast plan models

    --json: [{"name", "parameters", "active_parameters", "layers", "hidden",
    "source"}].
    """
    from outlast.plan.huggingface import MODELS, published

    found = [(name, published(name), model.source) for name, model in MODELS.items()]
    if json:
        print_json(
            [
                {
                    "name": name,
                    "parameters": item.parameters,
                    "active_parameters": item.active_parameters,
                    "layers": item.layers,
                    "hidden": item.hidden,
                    "source": source,
                }
                for name, item, source in found
            ]
        )
        return
    rows = [
        [
            name,
            count_words(item.parameters),
            count_words(item.active_parameters) if item.experts else "-",
            str(item.layers),
            f"{item.hidden:,}",
            source.removeprefix("config.json of ").replace(" on Hugging Face", ""),
        ]
        for name, item, source in found
    ]
    columns = [
        Column("model", number=False),
        Column("parameters"),
        Column("in use", optional=2),
        Column("layers"),
        Column("hidden"),
        Column("sizes from", number=False, optional=1, least=20),
    ]
    console = output()
    print_table(console, columns, rows)
    console.print("names with a slash: config.json on Hugging Face", style="dim")


DAY = 86_400.0


FEW = 400
"""Failures below which a simulation says little of rare causes."""


_OF_JOBS = {"train", "model", "data", "parallel", "optimizer"}


_SAME = {"restore": "restart", "silent errors": "lost work", "coding": "pace", "stragglers": "pace"}
"""Terms of the closed form that the simulation counts together with others."""


@with_options
def simulate(
    asked: PlanOptions,
    layout: Layout,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Runs to play; default: the scenario's, or 200.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the random numbers.")] = None,
    json: AsJson = False,
) -> None:
    """Play a run's failures event by event, beside the closed form.

    SOURCE is a scenario: a TOML file with the tables run (nodes,
    interval_seconds, productive_days), failure and tier; or as for the other
    commands, with --cluster: then the scenario is that of the run's checkpoints,
    restarts, guard and the cluster's failures.

    Example: outlast plan simulate scenario.toml --trials 1000

    Example: outlast plan simulate llama-3-8b --cluster h100x64

    --json: {"nodes", "trials", "seed", "simulated", "closed_form", "difference"},
    shares of the wall time and seconds.
    """
    from outlast.plan.goodput import finish, goodput
    from outlast.plan.simulate import simulate as play

    scenario = _scenario(asked, layout)
    if trials is not None:
        scenario = replace(scenario, trials=trials)
    if seed is not None:
        scenario = replace(scenario, seed=seed)
    closed = goodput(scenario.reliability)
    ends = finish(closed, scenario.productive_days * DAY)
    found = play(scenario)
    if json:
        quantiles = (0.1, 0.5, 0.9)
        print_json(
            {
                "nodes": _one(scenario.reliability.nodes),
                "productive_days": scenario.productive_days,
                "trials": scenario.trials,
                "seed": scenario.seed,
                "simulated": {
                    "ettr": found.ettr,
                    "standard_error": found.standard_error,
                    "lost_share": dict(found.lost_share),
                    "cause_share": dict(found.cause_share),
                    "failures": found.failures,
                    "unseen": found.unseen,
                    "finished": found.finished,
                    "finish_seconds": {
                        str(quantile): found.quantile_seconds(quantile) for quantile in quantiles
                    },
                },
                "closed_form": {
                    "ettr": float(closed.ettr[0]),
                    "lost_share": {name: float(share[0]) for name, share in closed.terms.items()},
                    "expected_seconds": float(ends.expected_seconds[0]),
                    "finish_seconds": {
                        str(quantile): float(ends.quantile_seconds(quantile)[0])
                        for quantile in quantiles
                    },
                },
                "difference": found.ettr - float(closed.ettr[0]),
            }
        )
        return
    _print_simulated(scenario, found, closed, ends)


def _scenario(asked: PlanOptions, layout: Layout) -> Scenario:
    from outlast.plan.simulate import load_scenario

    if asked.source.endswith(".toml"):
        path = Path(asked.source)
        # What is wrong with a file, its reader reports.
        tables: set[str] = set()
        with contextlib.suppress(OSError, ValueError):
            tables = set(tomllib.loads(read_text(path)))
        if not _OF_JOBS & tables:
            return load_scenario(path)
    from outlast.cli.plan_pareto import chosen
    from outlast.cli.plan_source import planned

    read = planned(asked)
    found = chosen(read, layout)
    return scenario_of(read.context, found.run, found.settings)


def scenario_of(context: Any, run: Any, settings: Any) -> Scenario:
    """The life of a predicted run as the simulator plays it."""
    import numpy as np

    from outlast.plan.batch import cases
    from outlast.plan.model import judge
    from outlast.plan.simulate import Scenario
    from outlast.plan.space import Block

    numbers = cases([(context.model, run, context.cluster)])
    one = np.zeros(1, dtype=np.intp)
    judged = judge(context, Block(numbers, (settings,), one, one))
    step = judged.step
    plain = step.seconds / (1.0 + step.guard_overhead) / (1.0 + step.coding_overhead)
    return Scenario(
        reliability=judged.survival.run, productive_days=float(context.steps * plain[0]) / DAY
    )


def _print_simulated(scenario: Scenario, found: Simulated, closed: Goodput, ends: Finish) -> None:
    console = output()
    run = scenario.reliability
    print_facts(
        console,
        "Scenario",
        [
            ("nodes", f"{_one(run.nodes):,.0f}"),
            ("failures", ", ".join(cause.name for cause in run.causes) or "none"),
            ("saves", f"every {seconds_words(_one(run.interval_seconds))}"),
            ("productive time", seconds_words(scenario.productive_days * DAY)),
            ("trials", f"{scenario.trials:,}, seed {scenario.seed}"),
        ],
    )
    difference = abs(found.ettr - float(closed.ettr[0]))
    rows = [
        [
            "ETTR",
            f"{100 * found.ettr:.3f} % +- {100 * found.standard_error:.3f}",
            f"{100 * float(closed.ettr[0]):.3f} %",
        ]
    ]
    for name, share in sorted(found.lost_share.items(), key=lambda pair: -pair[1]):
        # The closed form's share of what the simulation counts under a name.
        together = [term for term in closed.terms if _SAME.get(term, term) == name]
        form = sum(float(closed.terms[term][0]) for term in together)
        if share or form:
            rows.append([f"lost to {name}", f"{100 * share:.4f} %", f"{100 * form:.4f} %"])
    rows += [
        [
            f"finished with probability {share:g}",
            seconds_words(found.quantile_seconds(share)),
            seconds_words(float(ends.quantile_seconds(share)[0])),
        ]
        for share in (0.1, 0.5, 0.9)
    ]
    rows.append(["failures of a run", f"{found.failures:.4g}", f"{float(ends.failures[0]):.4g}"])
    console.print()
    columns = [Column("figure", number=False), Column("simulated"), Column("closed form")]
    print_table(console, columns, rows)
    console.print(f"ETTR differs by {100 * difference:.3f} points")
    if 0.0 < found.failures * scenario.trials < FEW:
        console.print(
            f"only {found.failures * scenario.trials:.0f} failures were played: rare ones need "
            "more --trials"
        )
    if found.finished < 1.0:
        share = 100 * found.finished
        console.print(f"{share:.3g} % of the trials ended within {scenario.limit_days:g} days")


def _one(value: Any) -> float:
    import numpy as np

    return float(np.ravel(value)[0])


_RANK = "rank"


_HELP = """Predict a run before it runs, and search for the best way to run it. Needs no
GPU.

`outlast plan SOURCE --cluster C` ranks all ways to run SOURCE on C: will it
fit, how long, how many kWh, what will failures cost, what to change. SOURCE
is an Outlast job, a Hugging Face config.json or a name such as llama-3-8b.
The options are those of `outlast plan rank --help`.

Example: outlast plan llama-3-8b --cluster h100x64 --tokens 300B
"""


class PlanGroup(typer.core.TyperGroup):
    """A group whose first word may also be a source, which is then ranked."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Both forms."""
        return ["SOURCE --cluster C [OPTIONS]", "|", "COMMAND [ARGS]..."]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Pass a first word that is no command of the group on to the ranking."""
        known = bool(args) and (args[0] in self.commands or args[0] in ("-h", "--help"))
        found: list[str] = super().parse_args(ctx, args if known or not args else [_RANK, *args])
        return found


plan = typer.Typer(name="plan", help=_HELP, no_args_is_help=True, cls=PlanGroup)


for command in (
    rank,
    explain,
    pareto,
    check,
    compare,
    calibrate,
    emit,
    targets,
    simulate,
    clusters,
    models,
):
    plan.command()(command)
