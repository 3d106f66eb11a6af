"""``outlast plan explain``: every figure as a sum of terms with formulas, values and sources."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli.console import (
    Column,
    bar,
    bytes_words,
    output,
    plain,
    print_facts,
    print_json,
    print_table,
    range_words,
    seconds_words,
)
from outlast.cli.options import AsJson, Layout, PlanOptions, with_options
from outlast.errors import EXIT_CRASHED, PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from outlast.cli.plan_search import Chosen
    from outlast.cli.plan_source import Planned
    from outlast.plan.estimate import Source, Term, Total
    from outlast.plan.prediction import Estimate
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
    from outlast.cli.plan_search import chosen
    from outlast.cli.plan_source import planned
    from outlast.plan.configuration import layout_words

    read = planned(asked)
    found = chosen(read, layout)
    if json:
        print_json(
            {
                "kind": "predicted",
                "planned": {"source": asked.source, "model": plain(read.training.model)},
                "origin": found.origin,
                "layout": layout_words(found.run),
                "configuration": plain(found.run),
                "settings": plain(found.settings),
                "estimate": plain(found.estimate),
                "warnings": list(found.warnings),
                "assumed": list(read.assumed),
                "cluster": plain(read.cluster),
            }
        )
        return
    _print_explanation(output(), read, found)


def _print_explanation(console: Console, planned: Planned, found: Chosen) -> None:
    from outlast.cli.plan_rank import answers, print_planned
    from outlast.hardware.figure import Unavailable
    from outlast.plan.configuration import layout_words, settings_words

    each = found.estimate
    print_planned(console, planned)
    facts = [
        ("layout", f"{layout_words(found.run)} ({found.origin})"),
        ("mechanisms", settings_words(found.settings)),
        *answers(each, planned.cluster.prices.currency),
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
    for name, source in sorted(planned.cluster.sources.items()):
        _print_wrapped(console, f"{name} = {source_words(source)}", "  ")


def _print_total(console: Console, title: str, total: Total) -> None:
    """A total, its terms, and the constants in them."""
    terms = [term for term in total.terms if term.value]
    nothing = [term.name for term in total.terms if not term.value]
    words = range_words(total.figure, _shown_unit(total.unit), _factor(total.unit))
    console.print(f"\n[bold]{title}[/bold]: {words}", soft_wrap=True)
    common = _common(terms)
    for term in sorted(terms, key=lambda term: -abs(term.value)):
        _print_term(console, term, total, set(common))
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


def _common(terms: list[Term]) -> dict[str, float]:
    """Values that all terms share, to be said once."""
    if len(terms) < 2:
        return {}
    return {
        name: value
        for name, value in terms[0].inputs.items()
        if all(term.inputs.get(name) == value for term in terms)
    }


def _print_term(console: Console, term: Term, total: Total, said: set[str]) -> None:
    unit, whole = total.unit, total.figure.middle
    value = f"{term.value / _factor(unit):.6g} {_shown_unit(unit)}".strip()
    share = f"{100 * term.value / whole:.1f} %" if whole and unit not in ("1", "nats") else ""
    values = ", ".join(
        f"{name} = {given:.6g}" for name, given in term.inputs.items() if name not in said
    )
    parts = [f"= {term.formula}", f"with {values}" if values else "", f"[{term.source}]"]
    if console.is_terminal:
        console.print(f"  {term.name:<28} {value:>18} {share:>8}", markup=False)
        for part in filter(None, parts):
            _print_wrapped(console, part, "      ")
        return
    line = "  ".join(filter(None, [f"  {term.name}", value, share, *parts]))
    console.print(line, soft_wrap=True, markup=False)


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
        print_json(_document(run, by, figures, parts, drift))
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
    from outlast.cli.forecast import HERE, calibration_for, place_of, ranks_of, record_of
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


def _document(
    run: Path,
    by: str,
    figures: list[Compared],
    parts: list[tuple[str, str, float, float]],
    drift: list[Compared],
) -> dict[str, Any]:
    return {
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
