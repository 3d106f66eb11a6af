"""``outlast plan calibrate``, and what this machine's calibration predicts before a training.

The model's constants come from measured runs. `prediction_of` is the planner's word on a job here.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli.console import Column, output, print_json, print_table, stdout_kept
from outlast.cli.options import AsJson
from outlast.errors import OutlastError, PlanError

if TYPE_CHECKING:
    import numpy as np

    from outlast.job import Job
    from outlast.plan.api import Training
    from outlast.plan.calibration import Calibration, Constant
    from outlast.plan.cluster import Cluster
    from outlast.plan.memory_fit import Learned, MemoryFit, Resident
    from outlast.plan.prediction import Estimate
    from outlast.plan.probes import Probe
    from outlast.plan.rows import Refused, Row
    from outlast.plan.step_fit import Belonging
    from outlast.plan.step_model import StepModel, Validation
    from outlast.records import Predicted, Run


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
        typer.Option(metavar="DIR", help="With --run: keeps the probes, to continue from."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
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

    Example: outlast plan calibrate runs/a runs/b --cluster mine.toml --output
    mine.calibration.toml

    --json: {"rows", "used", "refused", "flagged", "constants": [{"name", "unit",
    "before", "after", "log_deviation"}], "errors", "intervals", "memory": {framework:
    {"rows", "constants", "unseen_error", "error_before", "log_deviation"}},
    "output"}; with --run {"kind", "probes": [{"name", "seconds", "steps"}], "seconds", "failures",
    "output", "cluster"}.
    """
    if run:
        others = {"settings": settings, "table": table, "cluster": cluster, "force": force}
        if given := next((name for name, value in others.items() if value), None):
            raise PlanError(
                f"--{given} is of runs that are there: leave it out, or leave out --run"
            )
        if paths and len(paths) > 1:
            raise PlanError(f"--run varies one job, and {len(paths)} are named: keep one or none")
        job = paths[0] if paths else None
        if not 0.0 < minutes < math.inf:
            raise PlanError(
                f"--minutes = {minutes:g}: give more than 0, {SECONDS / 60:g} are usual"
            )
        with stdout_kept(json):
            here, files = calibrate_here(job, output or calibration_home(), 60.0 * minutes, keep)
        if json:
            print_json(_document_here(here, files))
        return
    if keep is not None:
        raise PlanError(f"--keep = {keep} is of probes: leave it out, or give --run")

    rows, refused = _rows(paths or [], settings, table or [], cluster)
    found = _fitted(rows, alone=bool(table), force=force)
    memory = fitted_memory(found.rows, alone=bool(table))
    if output is not None:
        found.write(output, memory)
    document = {**_document(found, refused, output), "memory": memory_document(memory)}
    if json:
        print_json(document)
    else:
        _print(found, refused, document, memory_lines(memory), output)


def _fitted(rows: list[Row], *, alone: bool, force: bool) -> Fitted:
    from outlast.plan.api import published_constants
    from outlast.plan.batch import cases
    from outlast.plan.rows import clean, forced
    from outlast.plan.step_fit import Belonging
    from outlast.plan.step_model import belonging, step_model, validate

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
    # A table may hold the rows that the shipped constants come from: these must not count twice.
    prior = None if alone else before
    known = None if prior is None else prior.constants
    held = validate(usable, min(_FOLDS, configurations), prior=known)
    most = Counter(belonging(row) for row in usable).most_common(1)[0][0]
    whose = Belonging(most.chip, most.cluster, most.framework)
    return Fitted(rows, step_model(usable, held=held, prior=prior), before, held, whose)


def _rows(
    paths: list[Path], settings: Path | None, tables: list[Path], cluster: str | None
) -> tuple[list[Row], list[Refused]]:
    from outlast.plan.rows import Refused
    from outlast.plan.run_rows import read_log_row, read_rows, read_run_row
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


def _document(found: Fitted, refused: list[Refused], out: Path | None) -> dict[str, Any]:
    return {
        "rows": len(found.rows),
        "used": [row.name for row in found.used],
        "refused": [{"name": item.name, "reason": item.reason} for item in refused],
        "flagged": [text for row in found.rows for text in (*row.flags, *row.time_flags)],
        "whose": f"{found.whose.framework} on {found.whose.chip}",
        "constants": constants_of(found),
        "errors": errors_of(found),
        "intervals": intervals_of(found),
        "output": out,
    }


def _document_here(found: Here, files: list[Path]) -> dict[str, Any]:
    return {
        "kind": "measured",
        "probes": [
            {"name": probe.setting.name, "seconds": probe.seconds, "steps": probe.steps}
            for probe in found.probes
        ],
        "seconds": found.seconds,
        "failures": found.failures,
        "output": files[0],
        "cluster": files[1] if len(files) > 1 else None,
    }


def _print(
    found: Fitted,
    refused: list[Refused],
    document: dict[str, Any],
    memory: list[str],
    out: Path | None,
) -> None:
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
    console.print(
        f"wrote {out}" if out is not None else "nothing was written: give --output FILE",
        markup=False,
        soft_wrap=True,
    )


@dataclass(frozen=True, slots=True)
class Fitted:
    """A calibration and what it was fitted to.

    Attributes:
        rows: All, flagged ones included.
        model: The calibration.
        before: Constants that were fitted to published runs.
        held: The rows as fits predict them that have not seen their configuration.
        whose: The place that most rows come from.
    """

    rows: list[Row]
    model: StepModel
    before: StepModel
    held: Validation
    whose: Belonging

    @property
    def used(self) -> list[Row]:
        """Those whose time was fitted."""
        return [row for row in self.rows if row.fits_time]

    def write(self, out: Path, memory: FittedMemory) -> None:
        """Write a calibration file with the constants, and what they come from."""
        from outlast.plan.calibration import Provenance, calibration_of, write_calibration
        from outlast.version import __version__

        used = self.used
        provenance = Provenance(
            date=datetime.now(UTC).date().isoformat(),
            version=__version__,
            rows=tuple(row.name for row in used),
            sources=tuple(dict.fromkeys(row.source for row in used)),
            flagged=tuple(
                text
                for row in self.rows
                for text in (*row.flags, *row.time_flags)
                if row not in used
            ),
            text=f"outlast plan calibrate, {len(used)} of {len(self.rows)} rows",
        )
        write_calibration(calibration_of(self.model, provenance, stored_memory(memory)), out)


def constants_of(found: Fitted) -> list[dict[str, Any]]:
    """Of the place that most rows come from: before is what published runs gave."""
    import numpy as np

    from outlast.plan.constants import NAMES, PRIORS

    before, after = (m.constants.constants([found.whose]) for m in (found.before, found.model))
    deviations = np.sqrt(np.diag(found.model.constants.covariance))
    own = {
        column.constant: float(deviation)
        for column, deviation in zip(found.model.constants.columns, deviations, strict=True)
        if column.level is None
    }
    return [
        {
            "name": name,
            "unit": PRIORS[name].unit,
            "before": float(getattr(before, name)[0]),
            "after": float(getattr(after, name)[0]),
            "log_deviation": own[name],
        }
        for name in NAMES
    ]


def errors_of(found: Fitted) -> dict[str, dict[str, float]]:
    """Absolute relative errors of rows that a fit has not seen, and of one constant MFU."""
    import numpy as np

    errors = np.abs(np.expm1(-found.held.log_errors))
    return {"model": _summary(errors), "constant MFU": _summary(_baseline(found))}


def _summary(errors: np.ndarray) -> dict[str, float]:
    import numpy as np

    return {
        "median": float(np.median(errors)),
        "mean": float(errors.mean()),
        "p90": float(np.quantile(errors, 0.9)),
        "rows": len(errors),
    }


def _baseline(found: Fitted) -> np.ndarray:
    """Errors of the median MFU of the other configurations of a framework, chip and precision."""
    import numpy as np

    from outlast.plan.step_model import utilisation

    rows = found.used
    shares = utilisation(rows)
    kinds = [f"{row.framework}/{row.chip}/{row.run.precision}" for row in rows]
    keys = [row.key for row in rows]
    errors = []
    for index, (kind, key) in enumerate(zip(kinds, keys, strict=True)):
        unseen = np.array([item != key for item in keys])
        alike = unseen & np.array([pair == kind for pair in kinds])
        others = alike if alike.any() else unseen
        errors.append(abs(shares[index] / np.median(shares[others]) - 1.0))
    return np.array(errors)


def intervals_of(found: Fitted) -> dict[str, Any]:
    """Widths of intervals, and the share of the rows that lie in theirs."""
    import numpy as np

    from outlast.plan.step_model import interval_groups

    widths, held = found.model.widths, found.held
    groups = interval_groups(held.rows)
    half = widths.half_widths(held.deviations, groups, held.distances)
    return {
        "coverage_asked": widths.coverage,
        "coverage_found": float((np.abs(held.log_errors) <= half).mean()),
        "median_half_width": float(np.expm1(np.median(half))),
        "quantiles": dict(widths.quantiles),
    }


MOVED = 0.05
"""Relative change of a constant from which on it is worth a word."""


@dataclass(frozen=True, slots=True)
class FittedMemory:
    """Memory constants fitted to measured rows.

    Attributes:
        learned: Of devices, by framework.
        before: What was known of them before; a framework that is not in it had the priors.
        resident: Of processes on processors; None without a row of one.
        machine: Name of the cluster of these processes.
    """

    learned: Mapping[str, Learned]
    before: Mapping[str, MemoryFit]
    resident: Resident | None
    machine: str = ""


def fitted_memory(rows: Sequence[Row], *, alone: bool) -> FittedMemory:
    """Fit the memory of devices and of processes to the rows that say something of them.

    Args:
        rows: Flagged ones included, which do not count.
        alone: Begin with the priors, not with what published runs have taught.
    """
    from outlast.plan.api import published_memory
    from outlast.plan.memory_fit import fit_device_memory, fit_resident

    before = {} if alone else published_memory()
    processes = [row for row in rows if row.cluster.processor and row.fits_memory]
    processes = [row for row in processes if row.reserved_bytes is not None]
    return FittedMemory(
        learned=fit_device_memory(rows, before),
        before=before,
        resident=fit_resident(processes) if processes else None,
        machine=processes[0].cluster.name if processes else "",
    )


def stored_memory(found: FittedMemory) -> dict[str, Constant]:
    """Memory constants as the calibration file stores them."""
    from outlast.plan.memory_fit import device_constants, resident_constants

    stored = device_constants({name: item.fit for name, item in found.learned.items()})
    if found.resident is not None:
        stored |= resident_constants(found.resident, found.machine)
    return stored


def memory_document(found: FittedMemory) -> dict[str, Any]:
    """For --json, by framework: runs, constants before and after, errors of unseen runs."""
    return {
        framework: {
            "rows": item.fit.runs,
            "constants": _constants(item.fit, found.before.get(framework)),
            "unseen_error": _median(item.unseen),
            "error_before": _median(item.before),
            "log_deviation": item.fit.log_deviation,
        }
        for framework, item in found.learned.items()
    }


def memory_lines(found: FittedMemory) -> list[str]:
    """Sentences about what was learned."""
    import numpy as np

    lines = []
    for framework, item in found.learned.items():
        said = [f"memory of {framework}: {item.fit.runs} runs"]
        unseen, before = _median(item.unseen), _median(item.before)
        if unseen is not None:
            said.append(f"error of unseen ones {unseen:.1%} in the median")
        if before is not None:
            said.append(f"{before:.1%} before")
        said.append(f"90 % intervals of +{np.expm1(1.645 * item.fit.log_deviation):.0%}")
        moved = [
            f"{one['name']} {one['before']:.4g} -> {one['after']:.4g}"
            for one in _constants(item.fit, found.before.get(framework))
            if abs(one["after"] / one["before"] - 1.0) > MOVED
        ]
        lines.append("; ".join([", ".join(said), *moved]))
    if found.resident is not None:
        lines.append(
            f"memory of processes on {found.machine}: {found.resident.rows} runs, for the "
            "predictions of `outlast train`"
        )
    return lines


def _constants(after: MemoryFit, before: MemoryFit | None) -> list[dict[str, Any]]:
    from outlast.plan.constants import MEMORY_NAMES, MEMORY_PRIORS

    return [
        {
            "name": name,
            "unit": MEMORY_PRIORS[name].unit,
            "before": MEMORY_PRIORS[name].median if before is None else before.values[name],
            "after": after.values[name],
            "log_deviation": after.deviations[name],
        }
        for name in MEMORY_NAMES
    ]


def _median(log_errors: np.ndarray) -> float | None:
    """Of absolute relative errors; None of none."""
    import numpy as np

    return float(np.median(np.abs(np.expm1(log_errors)))) if log_errors.size else None


SECONDS = 300.0


CALIBRATION, CLUSTER = "calibration.toml", "cluster.toml"


@dataclass(frozen=True)
class Here:
    """Results of the probes of this machine.

    Attributes:
        cluster: The machine with one rank, or one rank per GPU; `here.divided` shares it out.
        probes: What was run, or read again.
        step: The calibrated time model.
        memory: The peak resident memory of ranks; None on GPUs.
        seconds: Wall time of everything.
        failures: Sentences about settings that did not run.
    """

    cluster: Cluster
    probes: tuple[Probe, ...]
    step: StepModel
    memory: Resident | None
    seconds: float
    failures: tuple[str, ...]


def calibrate_here(
    job: Path | None, out: Path, seconds: float = SECONDS, keep: Path | None = None
) -> tuple[Here, list[Path]]:
    """Run probes of this machine, fit the model to them, and write both files down.

    Args:
        job: Whose model and batch are varied; None for the quickstart's.
        out: The calibration's file; the cluster's is written beside it. A folder takes both.
        seconds: Wall time of everything that runs.
        keep: Folder for the probes' runs; what it holds already is not run again. None for a
            temporary one.

    Returns:
        What was found; the files that were written, the calibration first.

    Raises:
        PlanError: The machine or the job cannot be probed, or too few probes finish in time.
    """
    console = output()
    calibration, cluster = places(out)
    try:
        calibration.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(
            f"--output = {out} cannot be made: {error.strerror}; give another"
        ) from None

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say("measuring products and memory of this machine")
    found, text = probed(job, seconds, keep, say)
    write(found, text, (calibration, cluster))
    files = [calibration, *([cluster] if text else [])]
    names = " and ".join(map(str, files))
    say(f"{len(found.probes)} probes took {found.seconds:.0f} s; wrote {names}")
    return found, files


def places(out: Path) -> tuple[Path, Path]:
    """Paths of the calibration file and of the cluster file."""
    if out.is_dir() or not out.suffix:
        return out / CALIBRATION, out / CLUSTER
    stem = out.name.removesuffix(".toml").removesuffix(".calibration")
    return out, out.with_name(f"{stem}.{CLUSTER}")


def probed(
    job: Path | None, seconds: float, keep: Path | None, say: Callable[[str], None]
) -> tuple[Here, str]:
    """Probes of this machine and what they teach; the text of its cluster file.

    Args:
        job: As of `calibrate_here`.
        seconds: Likewise.
        keep: Likewise.
        say: Told in words what happens.

    Raises:
        PlanError: As `calibrate_here`.
    """
    from outlast.job import load_job
    from outlast.plan.memory_fit import fit_resident
    from outlast.plan.probes import Probing, family, kept_cluster
    from outlast.plan.step_model import step_model

    if not seconds > 0.0:
        raise PlanError(f"seconds = {seconds:g}: give more than 0, 300 are usual")
    begun = time.monotonic()
    base = load_job(job)
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="probes-")))
        cluster, text = kept_cluster(folder / CLUSTER)
        settings = family(base, most_ranks(cluster))
        left = seconds - (time.monotonic() - begun)
        probing = Probing(cluster, settings, folder, left, say)
        probes = probing.run()
    rows = [probe.row for probe in probes]
    found = Here(
        cluster=cluster,
        probes=tuple(probes),
        step=step_model(rows),
        memory=fit_resident(rows) if cluster.processor else None,
        seconds=time.monotonic() - begun,
        failures=tuple(probing.failures),
    )
    return found, text


def most_ranks(cluster: Cluster) -> int:
    """Ranks that probes start at most: one per GPU, or two where there are two cores."""
    return min(cluster.host_cores, 2) if cluster.processor else cluster.devices_per_node


def write(found: Here, cluster_text: str, files: tuple[Path, Path]) -> None:
    """Write the calibration, and the cluster's file where the catalogue does not know it.

    Args:
        found: By `probed`.
        cluster_text: Likewise.
        files: By `places`.
    """
    from outlast.plan.calibration import Provenance, calibration_of, write_calibration
    from outlast.plan.memory_fit import (
        device_constants,
        fit_device_memory,
        resident_constants,
    )
    from outlast.records import replace_file
    from outlast.version import __version__

    provenance = Provenance(
        date=datetime.now(UTC).date().isoformat(),
        version=__version__,
        rows=tuple(probe.setting.name for probe in found.probes),
        sources=(found.cluster.name,),
        flagged=found.failures,
        text=f"outlast plan calibrate --run, {len(found.probes)} probes",
    )
    learned = fit_device_memory([probe.row for probe in found.probes])
    memory = device_constants({name: item.fit for name, item in learned.items()})
    if found.memory is not None:
        memory |= resident_constants(found.memory, found.cluster.name)
    write_calibration(calibration_of(found.step, provenance, memory), files[0])
    if cluster_text:
        replace_file(files[1], cluster_text.encode())


HOME = "OUTLAST_PLAN_HOME"
"""Folder of this machine's calibration; `~/.cache/outlast/plan` where it is not set."""


PUBLISHED = "published runs"
"""What the constants are from where nothing was calibrated."""


def calibration_home() -> Path:
    """Folder of the measurements of `outlast plan calibrate --run`."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get(HOME) or Path(cache) / "outlast" / "plan")


def prediction_of(job: Job, processes: int) -> Predicted | str:
    """The prediction of a job on this machine, or in a phrase why there is none.

    Args:
        job: Checked.
        processes: That will train.
    """
    try:
        from outlast.plan.api import predict, training_of
        from outlast.plan.calibration import read_calibration
        from outlast.plan.memory_fit import known_of

        cluster = place_of(HERE, processes)
        file = calibration_for(HERE, None)
        calibration = None if file is None else read_calibration(Path(file))
        known = None if calibration is None else known_of(calibration)
        training = training_of(job, processes, cluster, calibration=known)
        estimate = predict(training, cluster, calibration=known)
        return record_of(estimate, training, cluster, calibration, file)
    except OutlastError as error:
        return str(error).splitlines()[0]
    except Exception as error:
        # A run must not fail for want of its prediction.
        return f"{type(error).__name__}: {error}"


def record_of(
    estimate: Estimate,
    training: Training,
    cluster: Cluster,
    calibration: Calibration | None,
    file: str | Path | None,
) -> Predicted:
    """An estimate as a run's records hold it.

    On processors its memory is the resident one of a rank, where the calibration knows it: that is
    what is measured there.

    Args:
        estimate: Of `training` on `cluster`.
        training: What was predicted.
        cluster: Where.
        calibration: That was used; None for constants fitted to published runs.
        file: Its own.

    Raises:
        PlanError: The calibration knows only a part of what resident memory depends on.
    """
    import numpy as np

    from outlast.plan.batch import cases
    from outlast.plan.memory_fit import resident_of
    from outlast.plan.prediction import as_record

    record = as_record(estimate, PUBLISHED if file is None else str(file))
    found = None if calibration is None or not cluster.processor else resident_of(calibration)
    if found is None:
        return record
    numbers = cases([(training.model, training.run, cluster)])
    middle = float(found.bytes(numbers)[0])
    factor = float(np.exp(found.half_widths(numbers)[0]))
    return replace(
        record,
        memory_bytes=middle,
        memory_bytes_low=middle / factor,
        memory_bytes_high=middle * factor,
    )


HERE = "here"


def place_of(name: str, ranks: int = 0) -> Cluster:
    """A cluster by its name or file; `here` is this machine, as `calibrate --run` measured it.

    Args:
        name: As `--cluster` says it.
        ranks: Processes among which a machine without accelerators is shared; 0: as it stands.

    Raises:
        PlanError: It cannot be read, or nothing is known of this machine.
    """
    from outlast.plan.cluster import divided
    from outlast.plan.cluster_file import cluster_of, read_cluster, this_cluster

    measured = calibration_home() / "cluster.toml"
    if name == HERE and not measured.exists():
        try:
            return this_cluster(ranks)
        except PlanError as error:
            raise PlanError(f"{error}; or name a cluster, as --cluster h100x64") from None
    found = read_cluster(measured) if name == HERE else cluster_of(name)
    shared = ranks and (found.processor or name == HERE) and found.devices != ranks
    return divided(found, ranks) if shared else found


def calibration_for(name: str, given: str | Path | None) -> str | Path | None:
    """The calibration to use: the one given; on this machine, its own where there is one."""
    own = calibration_home() / "calibration.toml"
    return own if given is None and name == HERE and own.exists() else given


def ranks_of(run: Run) -> int:
    """Processes of the last start of a run; 0 where there is none."""
    from outlast.records import AttemptStarted

    started = [event.world_size for _, event in run.of(AttemptStarted)]
    return started[-1] if started else 0
