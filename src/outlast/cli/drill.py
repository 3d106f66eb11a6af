"""``outlast drill``: train with faults on purpose, and see what was found and put right."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli.drill_processes import ROUNDING, Asked, drill_processes
from outlast.cli.train import JobFile, Overrides, Processes, jobs_arguments
from outlast.errors import (
    EXIT_CRASHED,
    EXIT_DONE,
    EXIT_WRONG_NUMBERS,
    GuardError,
    OutlastError,
)

if TYPE_CHECKING:
    from outlast.job import Job

_MOST_STARTS = 5
_TABLE_WIDTH = 120
_COLUMNS = ("masked", "harmful", "detected", "corrected", "missed")


def drill(
    job_file: JobFile = None,
    overrides: Overrides = None,
    *,
    faults: Annotated[
        list[str] | None,
        typer.Option(
            "--faults",
            metavar="FAULT",
            help="What goes wrong, e.g. linear.output:bit=14:every=5, attention.output:nan:step=7, "
            "kill:step=12, stop:step=5:seconds=2, disk-full:step=8; may be given several times. "
            "Without it, one flip of any bit at every site in turn.",
        ),
    ] = None,
    kill: Annotated[
        str,
        typer.Option(
            metavar="RATE", help="Kill processes at this rate, e.g. 6/min, 0.1/s or 30/h."
        ),
    ] = "",
    at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PHASE",
            help="Kill a process in this phase (data, forward, backward, reduce, vote, optimizer, "
            "agree, memory, parity, save, evaluate, heal), or all; may be given several times.",
        ),
    ] = None,
    stop: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Stop processes for so long, and do not kill them."),
    ] = 0.0,
    trials: Annotated[
        int | None,
        typer.Option(help="How often: at each phase (1), or in all at the rate (6)."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything that a fault leaves open.")] = 0,
    nproc: Processes = None,
    output: Annotated[
        Path | None, typer.Option("--json", help="Also write the result to this file.")
    ] = None,
) -> None:
    """Train with faults on purpose: what do they harm, what is found, what is put right?

    With --kill, --at or --stop, real processes of a run are killed or stopped again and again: how
    many times does it go on, how fast, what is done twice, and are the last weights the same?

    Wrong numbers go into one process group with three copies of the run: without faults, with
    faults and no protection, with faults and the job's guard (guard.policy=full unless the
    overrides say otherwise). Process faults go into a training of its own, which is started again
    as long as it takes. Both end with the question whether the last weights are those of an
    undisturbed run, bit for bit: otherwise the exit code is 4 (wrong numbers) or 1 (processes).
    """
    from outlast.guard.inject import Fault, parse_faults
    from outlast.job import load_job

    job_file, settings = jobs_arguments(job_file, overrides)
    asked = Asked(kill, tuple(at or ()), stop, trials, seed)
    if asked.wanted:
        _strike_processes(job_file, settings, asked, nproc, output)
        return
    settings = ["guard.policy=full", *settings]
    if nproc is not None:
        settings.append(f"launch.nproc={nproc}")
    job = load_job(job_file, settings)
    if job.guard.policy == "off":
        raise GuardError('guard.policy = "off" leaves nothing to drill; set it to "full"')
    given = parse_faults(faults or [])
    numbers = tuple(str(fault) for fault in given if isinstance(fault, Fault))
    processes = tuple(str(fault) for fault in given if not isinstance(fault, Fault))
    result: dict[str, Any] = {}
    if numbers or not processes:
        result |= _drill_numbers(job, numbers, seed)
    if processes:
        result["processes"] = _drill_processes(job, job_file, settings, processes)
    if output is not None and result:
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if not result.get("processes", {}).get("bits_equal", True):
        raise typer.Exit(EXIT_CRASHED)
    if not result.get("bits_equal", True):
        raise typer.Exit(EXIT_WRONG_NUMBERS)


def _strike_processes(
    job_file: Path | None,
    settings: list[str],
    asked: Asked,
    nproc: int | None,
    output: Path | None,
) -> None:
    if nproc is not None:
        settings = [*settings, f"launch.nproc={nproc}"]
    result = drill_processes(job_file, settings, asked)
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    # Survivors that go on without the dead sum up in another order, unless it is fixed.
    near = result["comparison"] == ROUNDING and math.isfinite(result["largest_difference"])
    same = result["bits_equal"] or near
    if not same or result["survived"] < result["struck"]:
        raise typer.Exit(EXIT_CRASHED)


def _named(job: Job, name: str) -> Job:
    run = job.run.model_copy(update={"name": f"{job.run.name}-{name}"})
    return job.model_copy(update={"run": run})


def _drill_numbers(job: Job, faults: tuple[str, ...], seed: int) -> dict[str, Any]:
    from outlast.distributed.ranks import ALONE, launched_by, ranks_from
    from outlast.train.drill import RESULT, Drill, default_faults
    from outlast.train.run import Start, run_directory, work

    job = _named(job, "drill")
    ranks = None if launched_by(os.environ) == "alone" else ranks_from(os.environ)
    if not faults:
        size = job.launch.nproc if ranks is None else ranks.world_size
        faults = tuple(default_faults(size, job.train.steps))
    start = Start(job, fresh=True, drill=Drill(faults, seed))
    if ranks is not None:
        work(start, ranks)
        if not ranks.is_first:
            return {}
    elif job.launch.nproc > 1:
        from outlast.train.launch import launch_group

        launch_group(start)
    else:
        work(start, ALONE)
    result: dict[str, Any] = json.loads((run_directory(job).path / RESULT).read_bytes())
    print_drill(result)
    return result


def print_drill(result: dict[str, Any]) -> None:
    """The table of a drill, and in words what it means."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"drill, policy {result['policy']}: counts, and 95 % intervals in per cent",
        title_justify="left",
    )
    table.add_column("site", no_wrap=True)
    for name in ("injected", *_COLUMNS, "latency"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        latency = row["longest_latency_steps"]
        cells = [_cell(row[name]) for name in _COLUMNS]
        table.add_row(row["site"], str(row["injected"]), *cells, _steps(latency))
    # A table that is cut off is of no use in a log.
    Console(width=max(Console().width, _TABLE_WIDTH)).print(table)
    alarms = result["false_alarms"]
    print(
        f"false alarms: {alarms['count']} in {alarms['total']:,} checks, at most "
        f"{alarms['at_most']:.2g} per check (95 %)"
    )
    print(
        "harmful: the step's weights differ from the clean ones by more than "
        f"{result['noise']:.2g} of the update, which another order of sums makes"
    )
    if idle := result["idle"]:
        print(f"without effect, since no such numbers were computed then: {', '.join(idle)}")
    if stops := result["stops"]:
        times = f"{len(stops)} times" if len(stops) > 1 else "once"
        print(f"stopped {times}, to go on from a checkpoint; the last time: {stops[-1]}")
    same = "equal the clean run's bit for bit"
    if not result["bits_equal"]:
        same = f"differ from the clean run's by {float(result['distance']):.2g} of the training"
    print(f"the final weights {same}")
    if not result["bits_equal"]:
        print(
            "what the guard did not find, or found below its thresholds, has stayed in the run: "
            f"exit code {EXIT_WRONG_NUMBERS}"
        )


def _steps(count: int | None) -> str:
    if count is None:
        return ""
    return f"{count} step{'' if count == 1 else 's'}"


def _cell(rate: dict[str, Any]) -> str:
    if not rate["total"]:
        return "-"
    return f"{rate['count']} ({100 * rate['low']:.3g}-{100 * rate['high']:.3g})"


def _drill_processes(
    job: Job, job_file: Path | None, settings: list[str], faults: tuple[str, ...]
) -> dict[str, Any]:
    """Train undisturbed and with process faults, starting again until the job is done."""
    import torch

    from outlast.train.export import load_trained
    from outlast.train.run import run_directory

    clean, disturbed = (_named(job, name) for name in ("drill-clean", "drill-faults"))
    base = [sys.executable, "-m", "outlast", "train", *([str(job_file)] if job_file else [])]
    states, starts = [], 0
    for item, options in ((clean, ()), (disturbed, faults)):
        name = f"run.name={json.dumps(item.run.name)}"
        chosen = [argument for fault in options for argument in ("--process-fault", fault)]
        starts = 0
        while True:
            fresh = ["--fresh"] if starts == 0 else []
            starts += 1
            done = subprocess.run([*base, *settings, name, *fresh, *chosen], check=False)
            if done.returncode == EXIT_DONE:
                break
            if starts == _MOST_STARTS:
                raise OutlastError(
                    f"the drill's run {item.run.name} was started {starts} times and ended with "
                    f"exit code {done.returncode} at last; see its messages above"
                )
            print(f"drill: the run ended with exit code {done.returncode}; starting it again")
        model, _ = load_trained(item, run_directory(item))
        states.append(model.state_dict())
    first, second = states
    equal = first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )
    same = "equal" if equal else "differ from"
    print(
        f"process faults {', '.join(faults)}: {starts} start{'s' if starts > 1 else ''}; the final "
        f"weights {same} the undisturbed run's{' bit for bit' if equal else ''}"
    )
    return {"faults": list(faults), "starts": starts, "bits_equal": equal}
