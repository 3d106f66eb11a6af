"""``outlast plan compare``: what was predicted of a run beside what was measured of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli.plan_rank import AsJson
from outlast.errors import EXIT_CRASHED, PlanError

if TYPE_CHECKING:
    from outlast.plan.prediction import Estimate
    from outlast.records import Compared, Forecast, Run

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

_LOSSES = {
    "checkpoint saves": "checkpoint",
    "lost work": "lost",
    "restart": "restart",
}
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
    from outlast.cli.figures import print_json
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
        _print(read, by, prediction.extrapolated, figures, parts)
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
    from outlast.cli.forecast import record_of
    from outlast.cli.plan_place import HERE, calibration_for, place_of, ranks_of
    from outlast.job import job_from_text
    from outlast.plan.api import Training, predict
    from outlast.plan.calibration.calibration_file import read_calibration
    from outlast.plan.calibration.memory_fit import (
        COMPILED,
        OUTLAST,
        known_of,
    )
    from outlast.plan.calibration.run_rows import read_run_row
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
    both = sum(each[2] for each in found), sum(each[3] for each in found)
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


def _print(
    read: Run,
    by: str,
    beyond: Sequence[str],
    figures: list[Compared],
    parts: list[tuple[str, str, float, float]],
) -> None:
    from outlast.cli.figures import Column, output, print_table

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
    from outlast.cli.plan_words import seconds_words

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
