"""``outlast plan calibrate``: the model's constants from measured runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli.plan_rank import AsJson
from outlast.errors import OutlastError, PlanError

if TYPE_CHECKING:
    from outlast.cli.plan_fitted import Fitted
    from outlast.cli.plan_fitted_memory import FittedMemory
    from outlast.plan.calibration.rows import Refused, Row

FEWEST = 5
"""Runs below which a calibration says little."""
_FOLDS = 10
_LISTED = 12


def calibrate(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN | LOG ...]",
            help="Run directories of Outlast, or logs of torchtitan, Megatron-LM, DeepSpeed, "
            "nanotron, HF Trainer with a TOML of the same name beside them. With --run: a job.",
        ),
    ] = None,
    *,
    settings: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML for all logs: tables model and run, and cluster."),
    ] = None,
    table: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="CSV with the columns of published runs; repeat."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Where the runs ran; default: here, or a log's own.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Also fit rows that are flagged.")] = False,
    run: Annotated[
        bool, typer.Option("--run", help="Measure this machine: launches short probe runs.")
    ] = False,
    minutes: Annotated[float, typer.Option(help="With --run: for all probes together.")] = 5.0,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --run: keeps the probes, to go on from."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the calibration here, as TOML. With --run, default: where `outlast train` "
            "and --cluster here look for it.",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Fit the model's constants to measured runs, and say how far off it is.

    Time is fitted for all of them, memory for each framework whose runs say
    how much they held or that it ran out.

    Rows that cannot be true (swapped columns, impossible FLOPs, a slow link
    class) are flagged with a sentence and left out. The errors are of
    cross-validation: each row is predicted by a fit that has not seen its
    configuration. Five runs that differ are the least that is worth it.

    Example: outlast plan calibrate --run

    Example: outlast plan calibrate runs/a runs/b --cluster mine.toml --out
    mine.calibration.toml

    --json: {"rows", "used", "refused", "flagged", "constants": [{"name", "unit",
    "before", "after", "log_deviation"}], "errors", "intervals", "memory": {framework:
    {"rows", "constants", "unseen_error", "error_before", "log_deviation"}}, "out"}.
    """
    if run:
        others = {"settings": settings, "table": table, "cluster": cluster, "force": force}
        if given := next((name for name, value in others.items() if value), None):
            raise PlanError(
                f"--{given} is of runs that are there: leave it out, or leave out --run"
            )
        _measure(paths or [], 60.0 * minutes, out, keep)
        return
    if keep is not None:
        raise PlanError(f"--keep = {keep} is of probes: leave it out, or give --run")
    from outlast.cli.figures import print_json
    from outlast.cli.plan_fitted_memory import fitted_memory, memory_document, memory_lines

    rows, refused = _rows(paths or [], settings, table or [], cluster)
    # A table may hold the rows that the shipped constants come from: these must not count twice.
    found = _fitted(rows, force, alone=bool(table))
    memory = fitted_memory(found.rows, alone=bool(table))
    if out is not None:
        _write(found, memory, out)
    document = {**_document(found, refused, out), "memory": memory_document(memory)}
    if json:
        print_json(document)
    else:
        _print(found, refused, document, memory_lines(memory), out)


def _measure(paths: list[Path], seconds: float, out: Path | None, keep: Path | None) -> None:
    from outlast.cli.forecast import calibration_home
    from outlast.cli.plan_probes import calibrate_here

    if len(paths) > 1:
        raise PlanError(f"--run varies one job, and {len(paths)} are named: keep one or none")
    job = paths[0] if paths else None
    calibrate_here(job, out or calibration_home(), seconds, keep)


def _rows(
    paths: list[Path], settings: Path | None, tables: list[Path], cluster: str | None
) -> tuple[list[Row], list[Refused]]:
    from outlast.cli.plan_place import HERE, place_of, ranks_of
    from outlast.plan.calibration.rows import Refused
    from outlast.plan.calibration.run_rows import read_log_row, read_run_row
    from outlast.plan.calibration.table_rows import read_rows
    from outlast.records import read_run

    if not paths and not tables:
        raise PlanError(
            "nothing to calibrate from: name run directories, logs or --table, or --run"
        )
    rows: list[Row] = []
    refused: list[Refused] = []
    for path in paths:
        if not path.exists():
            raise PlanError(f"{path} cannot be read: it is not there")
        try:
            if path.is_dir():
                rows.append(read_run_row(path, place_of(cluster or HERE, ranks_of(read_run(path)))))
                continue
            beside = settings or path.with_suffix(".toml")
            if not beside.is_file():
                raise PlanError(f"no log says its model and layout: write {beside}, or --settings")
            rows.append(read_log_row(path, beside, place_of(cluster) if cluster else None))
        except OutlastError as error:
            refused.append(Refused(str(path), str(error)))
    for path in tables:
        read, cannot = read_rows(path)
        rows += read
        refused += cannot
    if not rows:
        said = f": {refused[0].name}: {refused[0].reason}" if refused else ""
        raise PlanError(f"none of the {len(refused)} sources gives a row{said}")
    return rows, refused


def _fitted(rows: list[Row], force: bool, *, alone: bool) -> Fitted:
    from outlast.cli.plan_fitted import Fitted
    from outlast.plan.api import published_constants
    from outlast.plan.batch import cases
    from outlast.plan.calibration.clean import clean
    from outlast.plan.calibration.fit import Belonging
    from outlast.plan.calibration.rows import forced
    from outlast.plan.calibration.step_model import belonging, step_model, validate

    before = published_constants()
    numbers = cases([(row.model, row.run, row.cluster) for row in rows])
    rows = clean(rows, before.seconds(numbers, [belonging(row) for row in rows]))
    if force:
        rows = forced(rows)
    usable = [row for row in rows if row.fits_time]
    configurations = len({row.key for row in usable})
    if configurations < 2:
        flagged = [sentence for row in rows for sentence in (*row.flags, *row.time_flags)]
        said = f" ({flagged[0]})" if flagged else ""
        raise PlanError(
            f"{len(usable)} of {len(rows)} rows with {configurations} different configurations can "
            f"be used{said}: give at least 2, better {FEWEST} to 12"
        )
    prior = None if alone else before
    known = None if prior is None else prior.constants
    held = validate(usable, min(_FOLDS, configurations), prior=known)
    most = Counter(belonging(row) for row in usable).most_common(1)[0][0]
    whose = Belonging(most.chip, most.cluster, most.framework)
    return Fitted(rows, step_model(usable, held=held, prior=prior), before, held, whose)


def _write(found: Fitted, memory: FittedMemory, out: Path) -> None:
    from outlast.cli.plan_fitted_memory import stored_memory
    from outlast.plan.calibration.calibration_file import Provenance, write_calibration
    from outlast.plan.calibration.step_model import calibration_of
    from outlast.version import __version__

    used = found.used
    provenance = Provenance(
        date=datetime.now(UTC).date().isoformat(),
        version=__version__,
        rows=tuple(row.name for row in used),
        sources=tuple(dict.fromkeys(row.source for row in used)),
        flagged=tuple(
            text for row in found.rows for text in (*row.flags, *row.time_flags) if row not in used
        ),
        text=f"outlast plan calibrate, {len(used)} of {len(found.rows)} rows",
    )
    calibration = calibration_of(found.model, provenance)
    constants = {**calibration.constants, **stored_memory(memory)}
    write_calibration(replace(calibration, constants=constants), out)


def _document(found: Fitted, refused: list[Refused], out: Path | None) -> dict[str, Any]:
    from outlast.cli.plan_fitted import constants_of, errors_of, intervals_of

    return {
        "rows": len(found.rows),
        "used": [row.name for row in found.used],
        "refused": [{"name": item.name, "reason": item.reason} for item in refused],
        "flagged": [text for row in found.rows for text in (*row.flags, *row.time_flags)],
        "whose": f"{found.whose.framework} on {found.whose.chip}",
        "constants": constants_of(found),
        "errors": errors_of(found),
        "intervals": intervals_of(found),
        "out": None if out is None else str(out),
    }


def _print(
    found: Fitted,
    refused: list[Refused],
    document: dict[str, Any],
    memory: list[str],
    out: Path | None,
) -> None:
    from outlast.cli.figures import Column, output, print_table

    console = output()
    used = found.used
    names = ", ".join(row.name for row in used[:_LISTED])
    more = f" and {len(used) - _LISTED} more" if len(used) > _LISTED else ""
    console.print(f"{len(used)} of {len(found.rows)} rows are fitted: {names}{more}", markup=False)
    sentences = [f"left out: {text}" for text in document["flagged"]]
    sentences += [f"cannot be read: {item.name}: {item.reason}" for item in refused]
    for text in sentences[:_LISTED]:
        console.print(text, markup=False, soft_wrap=True)
    if len(sentences) > _LISTED:
        console.print(f"and {len(sentences) - _LISTED} more sentences: see --json")
    if len(used) < FEWEST:
        console.print(f"fewer than {FEWEST} runs: intervals stay wide")
    console.print()
    rows = [
        [
            constant["name"],
            f"{constant['before']:.4g}",
            f"{constant['after']:.4g}",
            f"{constant['log_deviation']:.2g}",
            "" if constant["unit"] == "1" else constant["unit"],
        ]
        for constant in document["constants"]
    ]
    columns = [
        Column("constant", number=False),
        Column("before"),
        Column("after"),
        Column("log deviation", optional=1),
        Column("unit", number=False, optional=2),
    ]
    title = f"Constants of {document['whose']} (before: fitted to published runs)"
    print_table(console, columns, rows, title)
    console.print()
    for name, error in document["errors"].items():
        console.print(
            f"error of unseen rows, {name}: median {error['median']:.1%}, mean {error['mean']:.1%},"
            f" 90 % below {error['p90']:.1%}"
        )
    width = document["intervals"]
    console.print(
        f"{width['coverage_asked']:.0%} intervals: half-width {width['median_half_width']:.1%} in "
        f"the median, {width['coverage_found']:.1%} of these rows inside"
    )
    for text in memory:
        console.print(text, markup=False, soft_wrap=True)
    console.print(f"wrote {out}" if out is not None else "nothing was written: give --out FILE")
