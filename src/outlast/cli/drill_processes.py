"""``outlast drill --kill/--at/--stop``: kill the processes of a real run, and see what it costs."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.cli.drill_goodput import goodput
from outlast.errors import EXIT_DONE, OutlastError

if TYPE_CHECKING:
    from types import FrameType

    from outlast.job import Job
    from outlast.records import RunDirectory
    from outlast.recover.drill import (
        DrilledRun,
        Trial,
        TrialOutcome,
    )

DEMONSTRATION = (
    "train.steps=150",
    "checkpoint.every_steps=25",
    "evaluate.every_steps=0",
    "sample.tokens=0",
    "export.huggingface=false",
)
"""Settings of the embedded job where nothing else is asked for: a minute."""

STRUCK = ("data", "forward", "backward", "reduce", "vote", "optimizer", "agree", "save", "heal")
"""What ``--at all`` stands for, but ``memory`` and ``parity`` where the run has them."""

BITS, ROUNDING = "bit for bit", "within rounding"
"""How the last weights must agree with those of the undisturbed run."""

_COMPARED = {
    BITS: "bit for bit: both runs sum in the same order, so any difference is a fault",
    ROUNDING: "within rounding: survivors sum in another order (recover.fixed_order keeps it)",
}

_DEADLINE_SECONDS = 120.0
_MOST_STARTS = 5
_SPARE_RESTARTS = 3
_DEMONSTRATED_KILLS = 6


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the command line asks for.

    Attributes:
        kill: Kills per time, as text; empty for none.
        phases: In which phases; ``all`` for all.
        stop_seconds: Stop processes for so long in the place of killing them.
        trials: How often at each phase, or how many kills at the rate; None: once, or 6.
        seed: Of everything that is drawn.
    """

    kill: str
    phases: tuple[str, ...]
    stop_seconds: float
    trials: int | None
    seed: int

    @property
    def wanted(self) -> bool:
        """Whether processes are to be struck at all."""
        return bool(self.kill or self.phases or self.stop_seconds)


def drill_processes(job_file: Path | None, settings: list[str], asked: Asked) -> dict[str, Any]:
    """Train undisturbed and under trials, and compare; prints a table and what it means."""
    from outlast.job import load_job

    if job_file is None and not any(setting.startswith("train.steps") for setting in settings):
        settings = [*DEMONSTRATION, *settings]
    job = load_job(job_file, settings)
    if job.launch.nproc == 1:
        settings = [*settings, "launch.nproc=2"]
        job = load_job(job_file, settings)
    processes = _processes(job)
    trials = _trials(job, asked, processes)
    settings = [
        *settings,
        "log.every_steps=1",
        # Striking who comes up takes two restarts.
        f"launch.restarts={2 * len(trials) + _SPARE_RESTARTS}",
    ]
    clean = _run(job_file, settings, _named(job, "drill-clean"), asked, processes)
    drilled = _run(job_file, settings, _named(job, "drill-struck"), asked, processes)
    # The runs are in sessions of their own, and would stay behind.
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        clean.start()
        print("drill: training undisturbed, to compare with", flush=True)
        _must_end(clean, _directory(job, "drill-clean"))
        outcomes = _struck(drilled, trials)
        _must_end(drilled, _directory(job, "drill-struck"))
    finally:
        clean.end()
        drilled.end()
        signal.signal(signal.SIGTERM, before)
    result = _result(job, asked, outcomes, drilled.starts, processes)
    print_processes(result)
    return result


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _processes(job: Job) -> int:
    """How many there are to strike: with live recovery, one for each group."""
    from outlast.train.live_launch import group_count

    return group_count(job) if job.recover.mode == "live" else job.launch.nproc


def _trials(job: Job, asked: Asked, ranks: int) -> list[Trial]:
    from outlast.errors import RecoverError
    from outlast.recover.drill import per_second, trials_at, trials_by_rate

    if asked.kill and asked.phases:
        raise RecoverError("--kill and --at say both when to strike: give one of them")
    if asked.stop_seconds < 0.0:
        raise RecoverError(f"--stop {asked.stop_seconds:g}: give seconds above 0")
    if asked.trials is not None and asked.trials < 1:
        raise RecoverError(f"--trials {asked.trials}: give at least 1")
    if asked.kill:
        rate = per_second(asked.kill)
        return trials_by_rate(rate, ranks, asked.trials or _DEMONSTRATED_KILLS, asked.seed)
    phases = asked.phases or STRUCK
    if "all" in phases:
        phases = STRUCK + (("memory",) if job.recover.mode == "restart" else ())
    if asked.stop_seconds and "all" in asked.phases:
        # A process that is only stopped takes over no state.
        phases = tuple(phase for phase in phases if phase != "heal")
    return trials_at(phases, ranks, asked.trials or 1, asked.seed)


def _struck(run: DrilledRun, trials: list[Trial]) -> list[TrialOutcome]:

    outcomes: list[TrialOutcome] = []
    run.start()
    began = run.began()
    for number, trial in enumerate(trials, 1):
        if began is None:
            raise OutlastError("the drill's run ended before its first step; see its log")
        outcome = run.trial(trial, began)
        outcomes.append(outcome)
        print(f"drill: {number} of {len(trials)}: {_sentence(outcome)}", flush=True)
        if outcome.took_place and not outcome.survived and run.starts < _MOST_STARTS:
            run.end()
            run.start()
            resumed = time.monotonic()
            began = None if (now := run.began()) is None else began + now - resumed
    return outcomes


def _sentence(outcome: TrialOutcome) -> str:
    where = f"rank {outcome.rank} in {outcome.phase or 'any phase'} after step {outcome.step}"
    if not outcome.took_place:
        return f"{where} was not struck: {outcome.note}"
    if not outcome.survived:
        return f"{where}: NOT survived: {outcome.note}"
    return f"{where}: next step after {outcome.seconds:.2f} s, {outcome.lost_steps} done again"


def _must_end(run: DrilledRun, directory: RunDirectory) -> None:
    """Wait for the end, and start the run again where it ends before its last step."""
    while (
        code := run.finish(without_progress_seconds=_DEADLINE_SECONDS)
    ) != EXIT_DONE and run.starts < _MOST_STARTS:
        run.start()
    if code != EXIT_DONE:
        how = "hung" if code is None else f"ended with exit code {code}"
        raise OutlastError(
            f"the drill's run {directory.path.name} was started {run.starts} times and {how} at "
            f"last; see {_log(directory)}"
        )


def _named(job: Job, name: str) -> Job:
    run = job.run.model_copy(update={"name": f"{job.run.name}-{name}"})
    return job.model_copy(update={"run": run})


def _directory(job: Job, name: str) -> RunDirectory:
    from outlast.records import RunDirectory

    return RunDirectory(Path(job.run.directory) / f"{job.run.name}-{name}")


def _log(directory: RunDirectory) -> Path:
    return directory.path.with_name(f"{directory.path.name}.log")


def _run(
    job_file: Path | None, settings: list[str], job: Job, asked: Asked, processes: int
) -> DrilledRun:
    from outlast.records import RunDirectory
    from outlast.recover.drill import DrilledRun

    directory = RunDirectory(Path(job.run.directory) / job.run.name)
    if directory.exists():
        # Holding the lock for a moment makes sure that no live run is moved aside.
        lock = directory.lock()
        lock.acquire()
        lock.release()
        directory.move_aside()
    directory.path.parent.mkdir(parents=True, exist_ok=True)
    _log(directory).unlink(missing_ok=True)
    file = [str(job_file)] if job_file else []
    name = f"run.name={json.dumps(job.run.name)}"
    return DrilledRun(
        [sys.executable, "-m", "outlast", "train", *file, *settings, name],
        directory,
        memory=job.recover.memory,
        log=_log(directory),
        ranks=processes,
        deadline_seconds=_DEADLINE_SECONDS + asked.stop_seconds,
        stop_seconds=asked.stop_seconds,
        live=job.recover.mode == "live",
    )


def _result(
    job: Job, asked: Asked, outcomes: list[TrialOutcome], starts: int, processes: int
) -> dict[str, Any]:
    struck = [outcome for outcome in outcomes if outcome.took_place]
    survived = [outcome for outcome in struck if outcome.survived]
    clean, disturbed = (_directory(job, name) for name in ("drill-clean", "drill-struck"))
    equal, distance = _compare(job)
    seconds = [outcome.seconds for outcome in survived]
    return {
        "mode": job.recover.mode,
        "processes": processes,
        "seed": asked.seed,
        "stop_seconds": asked.stop_seconds,
        "trials": [dataclasses.asdict(outcome) for outcome in outcomes],
        "struck": len(struck),
        "survived": len(survived),
        "starts": starts,
        "lost_steps": sum(outcome.lost_steps for outcome in survived),
        "lost_samples": sum(outcome.lost_steps for outcome in survived) * job.train.batch_size,
        "median_seconds": statistics.median(seconds) if seconds else None,
        "longest_seconds": max(seconds, default=None),
        "goodput": goodput(job, asked, clean, disturbed, struck),
        "comparison": comparison(job),
        "bits_equal": equal,
        "largest_difference": distance,
    }


def comparison(job: Job) -> str:
    """`ROUNDING` where survivors of a death sum in another order, else `BITS`."""
    reordered = job.recover.mode == "live" and not job.recover.fixed_order
    return ROUNDING if reordered else BITS


def _compare(job: Job) -> tuple[bool, float]:
    """Whether both runs' last weights are equal bit for bit, and their largest difference.

    It is infinite where one has other tensors, or numbers that are not finite.
    """
    import torch

    from outlast.train.export import load_trained

    first, second = (
        load_trained(_named(job, name), _directory(job, name))[0].state_dict()
        for name in ("drill-clean", "drill-struck")
    )
    if first.keys() != second.keys():
        return False, math.inf
    equal = all(torch.equal(first[name], second[name]) for name in first)
    differences = [
        float((first[name].double() - second[name].double()).abs().max())
        for name in first
        if first[name].numel()
    ]
    finite = all(map(math.isfinite, differences))
    return equal, max(differences, default=0.0) if finite else math.inf


def print_processes(result: dict[str, Any]) -> None:
    """The table of a drill of processes, and in words what it means."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"drill, recover.mode = {result['mode']}, {result['processes']} processes",
        title_justify="left",
    )
    table.add_column("phase")
    for name in ("struck", "survived", "steps done again", "next step after (s)"):
        table.add_column(name, justify="right")
    taken = [trial for trial in result["trials"] if trial["struck"]]
    for phase in dict.fromkeys(box["phase"] for box in taken):
        rows = [box for box in taken if box["phase"] == phase]
        well = [row for row in rows if row["survived"]]
        seconds = [box["seconds"] for box in well]
        table.add_row(
            phase,
            str(len(rows)),
            str(len(well)),
            str(sum(box["lost_steps"] for box in well)),
            f"{statistics.median(seconds):.2f}" if seconds else "-",
        )
    Console(width=100).print(table)
    missed = len(result["trials"]) - len(taken)
    print(
        f"{result['survived']} of {result['struck']} survived"
        + (f"; {missed} did not take place" if missed else "")
        + f"; {result['lost_steps']} steps ({result['lost_samples']} samples) were done again"
    )
    goodput = result["goodput"]
    print(
        f"goodput: {100 * goodput['measured']:.1f} % measured, "
        f"{100 * goodput['predicted']:.1f} % predicted"
    )
    same = "equal the undisturbed run's bit for bit"
    if not result["bits_equal"]:
        same = f"differ from the undisturbed run's by {result['largest_difference']:.3g} at most"
    print(f"the final weights {same}")
    print(f"compared {_COMPARED[result['comparison']]}")
