"""Goodput of a drill: measured, and predicted from the undisturbed run."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outlast.cli.drill_processes import Asked
    from outlast.job import Job
    from outlast.records import RunDirectory
    from outlast.recover.cost import WayBack
    from outlast.recover.drill import TrialOutcome

_BEFORE_PAGES = ("start and imports", "process group")
"""Parts of a set-up before a process has its page; the first is another one in a restart, since a
worker is forked from a launcher that has imported everything."""


def goodput(
    job: Job,
    asked: Asked,
    clean: RunDirectory,
    disturbed: RunDirectory,
    struck: list[TrialOutcome],
) -> dict[str, float]:
    """Share of the struck run's time that was progress: measured, and predicted from the other."""
    from outlast.recover.cost import lost_seconds, share_of_progress

    work, _ = _progress(clean, None)
    step = work / max(job.train.steps - 1, 1)
    # At a rate, what comes after the last strike is at another rate: none.
    until = max((outcome.struck + outcome.seconds for outcome in struck), default=None)
    wall, steps = _progress(disturbed, until if asked.kill else None)
    live = job.recover.mode == "live"
    every, back = _kept_every(job), _way_back_live(job) if live else _way_back(clean)
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


def _way_back(clean: RunDirectory) -> WayBack:
    """How long a restart takes, from the set-up of a run that was not disturbed."""
    from outlast.records import Ready, StepsDone, read_run
    from outlast.recover.cost import REFORM_SECONDS, WayBack, detection_seconds

    run = read_run(clean.path)
    parts = run.of(Ready)[0][1].parts
    again = sum(seconds for name, seconds in parts.items() if name not in _BEFORE_PAGES)
    steps = [seconds for _, event in run.of(StepsDone) for seconds in event.step_seconds]
    warming = max(steps[0] - statistics.median(steps), 0.0)
    reform = REFORM_SECONDS + parts.get("process group", 0.0)
    return WayBack(detection_seconds(), reform, again + warming)


def _kept_every(job: Job) -> int:
    """After how many steps a state is kept from which a loss is made good."""
    if job.recover.mode == "live":
        return 1
    if job.recover.mode == "restart" and job.launch.nproc > 1:
        return job.recover.every_steps
    every = job.checkpoint.every_steps
    # Nobody knows here what `auto` has come to.
    return 1 if every == "auto" else every or 1


def _way_back_live(job: Job) -> WayBack:
    """How long survivors wait: for the silence after which a group counts as dead."""
    from outlast.recover.cost import SILENCE_SHARE, WayBack, detection_seconds

    silence = SILENCE_SHARE * job.recover.heartbeat_seconds
    return WayBack(detection_seconds(look_seconds=0.0, silence_seconds=silence), 0.0)


def _planned(kill: str, step: float, every: int, back: WayBack) -> float:
    """What `outlast plan`'s model of failures expects at this rate."""
    from outlast.plan.cluster import FailureCause
    from outlast.plan.reliability.goodput import goodput as planned
    from outlast.plan.reliability.recovery import DAY_SECONDS, Reliability, Restart, Tier
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
