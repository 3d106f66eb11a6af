"""``outlast drill``: train with faults on purpose, and see what was found and corrected."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli.console import (
    Column,
    json_text,
    print_json,
    print_table,
    stdout_kept,
)
from outlast.cli.console import output as console_of
from outlast.cli.options import AsJson
from outlast.cli.train import JobFile, Overrides, Processes, job_arguments
from outlast.errors import EXIT_CRASHED, EXIT_DATA_CORRUPTION, EXIT_DONE, GuardError, OutlastError
from outlast.extras import require
from outlast.paths import check_writable

if TYPE_CHECKING:
    from outlast.job import Job
    from outlast.records import RunDirectory
    from outlast.recover.cost import RecoveryTime
    from outlast.recover.drill import DrilledRun, Trial, TrialOutcome


_BEFORE_PAGES = ("start and imports", "process group")
"""Parts of a set-up before a process has its page; the first is another one in a restart, since a
worker is forked from a launcher that has imported everything."""


def goodput(
    job: Job,
    asked: DrillOptions,
    clean: RunDirectory,
    disturbed: RunDirectory,
    struck: list[TrialOutcome],
) -> dict[str, float]:
    """Share of the struck run's time that was progress: measured, and predicted from the other."""
    from outlast.job import tiers_of
    from outlast.recover.cost import lost_seconds, share_of_progress

    work, _ = _progress(clean, None)
    step = work / max(job.train.steps - 1, 1)
    # At a rate, what comes after the last strike is at another rate: none.
    until = max((outcome.struck + outcome.seconds for outcome in struck), default=None)
    wall, steps = _progress(disturbed, until if asked.kill else None)
    back = _recovery_time(job, clean)
    # After so many steps a state is kept from which a loss is made good.
    live = job.recover.mode == "live"
    every = 1
    if "memory" in tiers_of(job.checkpoint, job.recover) and job.launch.nproc > 1:
        every = job.recover.every_steps
    elif not live and job.checkpoint.every_steps != "auto":
        # Nobody knows here what `auto` comes to.
        every = job.checkpoint.every_steps or 1
    if asked.stop_seconds:
        predicted = work / (work + len(struck) * asked.stop_seconds)
    elif asked.kill:
        predicted = _planned(asked.kill, step, every, back)
    else:
        # Striking who takes over a state takes a death before; live groups wait for one of them.
        healing = sum(outcome.phase == "heal" for outcome in struck if not live)
        deaths = len(struck) + healing
        predicted = share_of_progress(work, deaths, back, lost_seconds(step, every))
    return {"measured": min(steps * step / wall, 1.0), "predicted": predicted}


def _progress(directory: RunDirectory, until: float | None) -> tuple[float, int]:
    """Seconds from the first step to the last one until a moment, and steps that count."""
    from outlast.records import StepsDone, read_run

    done = [
        (record.monotonic, event.step)
        for record, event in read_run(directory.path).of(StepsDone)
        if until is None or record.monotonic <= until
    ]
    return max(done[-1][0] - done[0][0], 1e-9), done[-1][1] - done[0][1]


def _recovery_time(job: Job, clean: RunDirectory) -> RecoveryTime:
    """Seconds of a restart, from the set-up of the run without faults.

    In live mode they are those that survivors wait: the silence after which a group counts as dead.
    """
    from outlast.records import StepsDone, TrainingStarted, read_run
    from outlast.recover.cost import REFORM_SECONDS, SILENCE_SHARE, RecoveryTime, detection_seconds

    if job.recover.mode == "live":
        silence = SILENCE_SHARE * job.recover.heartbeat_seconds
        return RecoveryTime(detection_seconds(look_seconds=0.0, silence_seconds=silence), 0.0)
    run = read_run(clean.path)
    parts = run.of(TrainingStarted)[0][1].parts
    again = sum(seconds for name, seconds in parts.items() if name not in _BEFORE_PAGES)
    steps = [seconds for _, event in run.of(StepsDone) for seconds in event.step_seconds]
    warming = max(steps[0] - statistics.median(steps), 0.0)
    reform = REFORM_SECONDS + parts.get("process group", 0.0)
    return RecoveryTime(detection_seconds(), reform, again + warming)


def _planned(kill: str, step: float, every: int, back: RecoveryTime) -> float:
    """Goodput that `outlast plan`'s model of failures expects at this rate."""
    from outlast.plan.cluster import FailureCause
    from outlast.plan.goodput import goodput as planned
    from outlast.plan.reliability import DAY_SECONDS, Reliability, Restart, Tier
    from outlast.recover.drill import per_second

    cause = FailureCause(
        name="kill",
        per_node_day=per_second(kill) * DAY_SECONDS,
        # Until the processes are there again, nobody can be killed.
        detection_seconds=back.detection_seconds + back.reform_seconds,
    )
    run = Reliability(
        nodes=1,
        causes=(cause,),
        interval_seconds=every * step,
        tiers=(Tier(name="memory", restore_seconds=back.load_seconds),),
        restart=Restart(restart_seconds=0.0),
    )
    return float(planned(run).ettr[0])


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
class DrillOptions:
    """Options of ``outlast drill`` that kill or stop processes.

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
        """Return True if processes are to be killed or stopped at all."""
        return bool(self.kill or self.phases or self.stop_seconds)


def drill_processes(
    job_file: Path | None, settings: list[str], asked: DrillOptions
) -> dict[str, Any]:
    """Train undisturbed and under trials, and compare; prints a table and what it means."""
    from outlast.job import load_job

    if job_file is None and not any(setting.startswith("train.steps") for setting in settings):
        settings = [*DEMONSTRATION, *settings]
    job = load_job(job_file, settings)
    if job.launch.nproc == 1:
        settings = [*settings, "launch.nproc=2"]
        job = load_job(job_file, settings)
    from outlast.train.live import group_count

    processes = group_count(job) if job.recover.mode == "live" else job.launch.nproc
    trials = trials_of(job, asked, processes)
    settings = [
        *settings,
        "log.every_steps=1",
        # Striking who comes up takes two restarts.
        f"launch.restarts={2 * len(trials) + _SPARE_RESTARTS}",
    ]
    clean = _run(job_file, settings, _named(job, "drill-clean"), asked, processes)
    drilled = _run(job_file, settings, _named(job, "drill-struck"), asked, processes)
    # The runs are in sessions of their own, and would stay behind.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
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
    struck = [outcome for outcome in outcomes if outcome.took_place]
    survived = [outcome for outcome in struck if outcome.survived]
    undisturbed, disturbed = (_directory(job, name) for name in ("drill-clean", "drill-struck"))
    equal, distance = _compare(job)
    seconds = [outcome.seconds for outcome in survived]
    result = {
        "mode": job.recover.mode,
        "processes": processes,
        "seed": asked.seed,
        "stop_seconds": asked.stop_seconds,
        "trials": [dataclasses.asdict(outcome) for outcome in outcomes],
        "struck": len(struck),
        "survived": len(survived),
        "starts": drilled.starts,
        "lost_steps": sum(outcome.lost_steps for outcome in survived),
        "lost_samples": sum(outcome.lost_steps for outcome in survived) * job.train.batch_size,
        "median_seconds": statistics.median(seconds) if seconds else None,
        "longest_seconds": max(seconds, default=None),
        "goodput": goodput(job, asked, undisturbed, disturbed, struck),
        "comparison": comparison(job),
        "bits_equal": equal,
        "largest_difference": distance,
    }
    print_processes(result)
    return result


def trials_of(job: Job, asked: DrillOptions, ranks: int) -> list[Trial]:
    """The processes that are struck, and when.

    Raises:
        RecoverError: When that cannot be drilled.
    """
    from outlast.errors import RecoverError
    from outlast.job import tiers_of
    from outlast.recover.drill import per_second, trials_at, trials_by_rate

    if asked.kill and asked.phases:
        raise RecoverError("--kill and --at say both when to strike: give one of them")
    if not 0.0 <= asked.stop_seconds < math.inf:
        raise RecoverError(f"--stop {asked.stop_seconds:g}: give seconds above 0")
    if asked.trials is not None and asked.trials < 1:
        raise RecoverError(f"--trials {asked.trials}: give at least 1")
    if asked.kill:
        rate = per_second(asked.kill)
        return trials_by_rate(rate, ranks, asked.trials or _DEMONSTRATED_KILLS, asked.seed)
    phases = asked.phases or STRUCK
    if "all" in phases:
        kept = "memory" in tiers_of(job.checkpoint, job.recover)
        phases = STRUCK + (("memory",) if kept else ())
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
        said = f"rank {outcome.rank} in {outcome.phase or 'any phase'} after step {outcome.step}"
        if not outcome.took_place:
            said += f" was not struck: {outcome.note}"
        elif not outcome.survived:
            said += f": NOT survived: {outcome.note}"
        else:
            said += f": next step after {outcome.seconds:.2f} s, {outcome.lost_steps} done again"
        print(f"drill: {number} of {len(trials)}: {said}", flush=True)
        if outcome.took_place and not outcome.survived and run.starts < _MOST_STARTS:
            run.end()
            run.start()
            resumed = time.monotonic()
            began = None if (now := run.began()) is None else began + now - resumed
    return outcomes


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


def _directory(job: Job, name: str) -> RunDirectory:
    from outlast.records import RunDirectory

    return RunDirectory(Path(job.run.directory) / f"{job.run.name}-{name}")


def _log(directory: RunDirectory) -> Path:
    return directory.path.with_name(f"{directory.path.name}.log")


def _run(
    job_file: Path | None, settings: list[str], job: Job, asked: DrillOptions, processes: int
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


def comparison(job: Job) -> str:
    """`ROUNDING` where survivors of a death sum in another order, else `BITS`."""
    reordered = job.recover.mode == "live" and not job.recover.fixed_order
    return ROUNDING if reordered else BITS


def _compare(job: Job) -> tuple[bool, float]:
    """Compare the last weights of both runs: equal bit for bit or not, and the largest difference.

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
    taken = [trial for trial in result["trials"] if trial["struck"]]
    table = []
    for phase in dict.fromkeys(box["phase"] for box in taken):
        rows = [box for box in taken if box["phase"] == phase]
        well = [row for row in rows if row["survived"]]
        seconds = [box["seconds"] for box in well]
        table.append(
            [
                phase or "any",
                str(len(rows)),
                str(len(well)),
                str(sum(box["lost_steps"] for box in well)),
                f"{statistics.median(seconds):.2f}" if seconds else "-",
            ]
        )
    heads = ("struck", "survived", "steps done again", "next step after (s)")
    columns = [Column("phase", number=False), *map(Column, heads)]
    title = f"drill, recover.mode = {result['mode']}, {result['processes']} processes"
    print_table(console_of(), columns, table, title)
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


_TABLE_WIDTH = 120


_GREAT_HARM = 1e-2
"""Relative error of a gradient from which a fault must be put right."""
_SHOWN_MISSES = 6
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
        typer.Option(
            min=0.0, metavar="SECONDS", help="Stop processes for so long, and do not kill them."
        ),
    ] = 0.0,
    trials: Annotated[
        int | None,
        typer.Option(min=1, help="How often: at each phase (1), or in all at the rate (6)."),
    ] = None,
    operations: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="COUNT",
            help="Put so many faults into the results of matrix products, convolutions and "
            "attention, below every check; of the job's model, or of each model of --zoo (48).",
        ),
    ] = None,
    zoo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|all|FILE.py",
            help="Faults at operations of tiny models of these families (llama, gpt2, mixtral, "
            "bert, ...), in fp32 and bf16, instead of the job's; or those in FAMILIES of a file.",
        ),
    ] = None,
    everywhere: Annotated[
        bool,
        typer.Option(
            "--everywhere",
            help="With --operations or --zoo: also in element-wise operations, norms and losses.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of everything that a fault leaves open.")] = 0,
    nproc: Processes = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the result here too, as JSON."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train with faults on purpose: what do they harm, what is found, what is corrected?

    With --kill, --at or --stop, real processes of a run are killed or stopped again and again: how
    many times does it continue, how fast, what is done twice, and are the last weights the same?

    Wrong values go into one process group with three copies of the run: without faults, with
    faults and no protection, with faults and the job's guard (guard.policy=full unless the
    overrides say otherwise). Process faults go into a training of its own, which is started again
    as long as it takes. Both end with the question whether the last weights are those of an
    undisturbed run, bit for bit: otherwise the exit code is 4 (wrong values) or 1 (processes).

    With --operations or --zoo a fault strikes the result of an operation, wherever it was called:
    what part of the faults is found, by the harm that they do to the gradient? The exit code is 4
    if one that changes the gradient by more than 1 % did not end in the clean run's bits.

    --json: of --kill, --at and --stop {"mode", "processes", "trials", "struck", "survived",
    "lost_steps", "goodput", "bits_equal"}; of --operations and --zoo {"policy", "rows" by "dtype"
    and harm, "false_alarms", "trials"}; else {"policy", "rows", "false_alarms", "stops",
    "bits_equal", "distance"}, and "processes" of process faults. What the training says goes to
    stderr.
    """
    require("plan", "outlast drill", "scipy")
    # A file that was given to --json, as it was once.
    words = [str(job_file or ""), *(overrides or [])] if as_json else []
    if file := next((word for word in words if word.endswith(".json") and "=" not in word), None):
        raise OutlastError(f"--json takes no file, it prints to stdout: write --output {file}")
    job_file, settings = job_arguments(job_file, overrides)
    asked = DrillOptions(kill, tuple(at or ()), stop, trials, seed)
    if output is not None:
        _check_output(output)
    if nproc is not None:
        settings.append(f"launch.nproc={nproc}")
    with stdout_kept(as_json):
        if asked.wanted:
            result = drill_processes(job_file, settings, asked)
            code = _code_of_processes(result)
        elif trials is not None:
            raise GuardError(
                f"--trials {trials} is of --kill, --at and --stop: give one of them, too"
            )
        elif operations is not None or zoo:
            if faults:
                raise GuardError(
                    f"--faults {faults[0]} names a place in the guard, --operations and --zoo "
                    "strike at operations: give one of them"
                )
            settings = ["guard.policy=full", *settings]
            count = operations or 48
            result = _drill_operations(
                job_file, settings, zoo or [], count=count, seed=seed, everywhere=everywhere
            )
            code = _code_of_operations(result)
        elif everywhere:
            raise GuardError("--everywhere is of --operations and --zoo: give one of them, too")
        else:
            result = _drill_faults(job_file, ["guard.policy=full", *settings], faults or [], seed)
            code = _code_of_faults(result)
    if output is not None and result:
        output.write_text(json_text(result) + "\n", encoding="utf-8")
    if as_json and result:
        print_json(result)
    raise typer.Exit(code)


def _drill_faults(
    job_file: Path | None, settings: list[str], texts: list[str], seed: int
) -> dict[str, Any]:
    """Drill wrong values and process faults; empty on a rank that is not the first."""
    from outlast.guard.inject import Fault, parse_faults
    from outlast.job import load_job

    job = load_job(job_file, settings)
    if job.guard.policy == "off":
        raise GuardError('guard.policy = "off" leaves nothing to drill; set it to "full"')
    given = parse_faults(texts)
    numbers = tuple(str(fault) for fault in given if isinstance(fault, Fault))
    processes = tuple(str(fault) for fault in given if not isinstance(fault, Fault))
    result: dict[str, Any] = {}
    if numbers or not processes:
        result |= _drill_numbers(job, numbers, seed)
    if processes:
        result["processes"] = _drill_processes(job, job_file, settings, processes)
    return result


def _drill_operations(
    job_file: Path | None,
    settings: list[str],
    zoo: list[str],
    *,
    count: int,
    seed: int,
    everywhere: bool,
) -> dict[str, Any]:
    """Drill faults in the results of operations, of the job's model or of a zoo."""
    from outlast.job import load_job

    job = load_job(job_file, settings)
    if job.guard.policy == "off":
        raise GuardError('guard.policy = "off" leaves nothing to drill; set it to "full"')
    if zoo:
        result = _drill_zoo(job, zoo, count=count, seed=seed, everywhere=everywhere)
    else:
        from outlast.distributed.ranks import ALONE
        from outlast.train.drill import RESULT, Drill
        from outlast.train.run import Start, run_directory, work

        if job.launch.nproc > 1:
            raise GuardError(
                f"launch.nproc = {job.launch.nproc}: --operations is for one process; set it to 1"
            )
        job = _named(job, "drill")
        drill = Drill((), seed, operations=count, everywhere=everywhere)
        work(Start(job, fresh=True, drill=drill), ALONE)
        result = json.loads((run_directory(job).path / RESULT).read_bytes())
    _print_operations(result)
    return result


def _drill_zoo(
    job: Job, zoo: list[str], *, count: int, seed: int, everywhere: bool
) -> dict[str, Any]:
    import warnings

    from outlast.guard import Policy
    from outlast.guard.inject import (
        DTYPES,
        OTHERS,
        PRODUCTS,
        drill_operations,
        families,
        summary_of,
    )
    from outlast.records import finite

    policy = Policy(job.guard.policy, dict(job.guard.modules), seed=job.run.seed)
    drills = []
    for name, build in families(zoo).items():
        for dtype, kind in DTYPES.items():
            with warnings.catch_warnings():
                # Here the figures say what is not guarded.
                warnings.simplefilter("ignore", UserWarning)
                done = drill_operations(
                    build(dtype=kind), policy, name=name, dtype=dtype, faults=count, seed=seed,
                    operations=(*PRODUCTS, *OTHERS) if everywhere else PRODUCTS,
                )  # fmt: skip
            drills.append(done)
            found = sum(trial.detected for trial in done.trials if trial.struck)
            struck = sum(trial.struck for trial in done.trials)
            print(f"drill: {name} {dtype}: {found} of {struck} faults found", flush=True)
    result: dict[str, Any] = finite(summary_of(drills, policy.level))
    return result


def _print_operations(result: dict[str, Any]) -> None:
    """The table of faults at operations."""
    table = []
    for row in result["rows"]:
        low, high = float(row["harm_from"]), float(row["harm_below"])
        harm = (
            f"< {high:g}"
            if not low
            else f"> {low:g}"
            if math.isinf(high)
            else f"{low:g} .. {high:g}"
        )
        cells = [
            f"{rate['count']} ({100 * rate['low']:.3g}-{100 * rate['high']:.3g})"
            for rate in (row["detected"], row["equal"])
        ]
        table.append(
            [row["dtype"], harm, str(row["detected"]["total"]), *cells, str(row["excused"])]
        )
    console = console_of()
    console.width = max(console.width, _TABLE_WIDTH)
    heads = ("faults", "detected", "clean bits", "excused")
    columns = [*(Column(name, number=False) for name in ("type", "harm")), *map(Column, heads)]
    title = (
        f"drill at operations, policy {result['policy']}: counts, and 95 % intervals in per cent"
    )
    print_table(console, columns, table, title)
    alarms = result["false_alarms"]
    print(
        f"false alarms: {alarms['count']:.0f} in {alarms['total']:,.0f} checks, at most "
        f"{alarms['at_most']:.2g} per check (95 %)"
    )
    print(
        "harm: relative error of the gradient without protection. clean bits: weights and "
        "optimizer state after the step equal the clean run's. excused: missed, though a check "
        "exceeded its threshold"
    )
    missed = [
        trial
        for trial in result["trials"]
        if trial["struck"] and not trial["equal"] and float(trial["harm"]) >= _GREAT_HARM
    ]
    missed.sort(key=lambda trial: -float(trial["harm"]))
    for trial in missed[:_SHOWN_MISSES]:
        call = trial["call"]
        print(
            f"not put right: {trial['model']} {trial['dtype']}, {call['operation']} (call "
            f"{call['number']}, result {call['output']}), {trial['change']}, harm "
            f"{float(trial['harm']):.2g}: {', '.join(trial['outcomes']) or 'no finding'}"
        )
    if len(missed) > _SHOWN_MISSES:
        print(f"and {len(missed) - _SHOWN_MISSES} more; --output FILE lists all")
    if result["not_struck"]:
        print(f"{result['not_struck']} faults met no such result under the guard and do not count")


def _code_of_operations(result: dict[str, Any]) -> int:
    right = all(
        row["equal"]["count"] == row["equal"]["total"]
        for row in result["rows"]
        if float(row["harm_from"]) >= _GREAT_HARM
    )
    return EXIT_DONE if right else EXIT_DATA_CORRUPTION


def _code_of_faults(result: dict[str, Any]) -> int:
    if not result.get("processes", {}).get("bits_equal", True):
        return EXIT_CRASHED
    return EXIT_DONE if result.get("bits_equal", True) else EXIT_DATA_CORRUPTION


def _code_of_processes(result: dict[str, Any]) -> int:
    # Survivors that continue without the dead sum up in another order, unless it is fixed.
    near = result["comparison"] == ROUNDING and math.isfinite(result["largest_difference"])
    same = result["bits_equal"] or near
    return EXIT_DONE if same and result["survived"] >= result["struck"] else EXIT_CRASHED


def _check_output(file: Path) -> None:
    """Refuse a file that cannot be written, before and not after the training."""
    try:
        if file.is_dir() or not file.absolute().parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is no name of a file in a folder")
        check_writable(file)
    except OSError as error:
        raise OutlastError(f"--output = {file}: {error.strerror}; name another file") from None


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
    table = []
    for row in result["rows"]:
        latency = row["longest_latency_steps"]
        rates = [row[name] for name in _COLUMNS]
        cells = [
            f"{rate['count']} ({100 * rate['low']:.3g}-{100 * rate['high']:.3g})"
            if rate["total"]
            else "-"
            for rate in rates
        ]
        latency_words = "" if latency is None else f"{latency} step{'' if latency == 1 else 's'}"
        table.append([row["site"], str(row["injected"]), *cells, latency_words])
    console = console_of()
    # A table that is cut off is of no use in a log.
    console.width = max(console.width, _TABLE_WIDTH)
    columns = [Column("site", number=False), *map(Column, ("injected", *_COLUMNS, "latency"))]
    title = f"drill, policy {result['policy']}: counts, and 95 % intervals in per cent"
    print_table(console, columns, table, title)
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
    if returns := result.get("returns"):
        times = f"{len(returns)} times" if len(returns) > 1 else "once"
        again = sum(item["step"] - item["to"] for item in returns)
        print(
            f"after memory faults, went back {times} to the state in memory from before them; "
            f"finished steps that were done again: {again}"
        )
    if stops := result["stops"]:
        times = f"{len(stops)} times" if len(stops) > 1 else "once"
        print(f"stopped {times}, to continue from a checkpoint; the last time: {stops[-1]}")
    same = "equal the clean run's bit for bit"
    if not result["bits_equal"]:
        same = f"differ from the clean run's by {float(result['distance']):.2g} of the training"
    print(f"the final weights {same}")
    if not result["bits_equal"]:
        print(
            "what the guard did not find, or found below its thresholds, has stayed in the run: "
            f"exit code {EXIT_DATA_CORRUPTION}"
        )


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
