"""What is left to train, in seconds on so many nodes, from the steps that were measured."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from outlast.cluster.chain.journal import entries, of_kind
from outlast.cluster.chain.progress import run_log

if TYPE_CHECKING:
    from outlast.cluster.chain.plan import ChainFiles, ChainPlan

SPEED_EXPONENT = 0.9
"""How the speed grows with nodes, before it was measured on several counts."""
_LAST_STEPS = 50


def work_seconds(
    files: ChainFiles, plan: ChainPlan, nodes: int, *, step: int | None = None
) -> float | None:
    """Training that is left, in seconds on `nodes`; None before any step was measured.

    Step times are those that the run has written down, or of a program that writes none those of
    the chain's links. Those of other node counts are converted by `SPEED_EXPONENT`.

    Args:
        files: Of the chain.
        plan: Of the chain.
        nodes: Of the link whose seconds are meant.
        step: What is done; None: the newest checkpoint.
    """
    log = run_log(files)
    steps = log.steps or plan.steps
    found = _recorded_step(files) or _step_of_links(files)
    if found is None or not steps:
        return None
    seconds, processes = found
    speed = (processes / (nodes * plan.tasks_per_node)) ** SPEED_EXPONENT
    return float(max(steps - (log.step if step is None else step), 0) * seconds * speed)


def _recorded_step(files: ChainFiles) -> tuple[float, int] | None:
    """Seconds of a step and the processes that took them, by the run's own records."""
    from outlast.errors import OutlastError
    from outlast.records import read_run

    try:
        run = read_run(files.run)
        done = run.steps()[-_LAST_STEPS:]
    except OutlastError:
        return None
    seconds = [each for _, event in done for each in event.step_seconds]
    return (statistics.mean(seconds), run.attempts[-1].world_size) if seconds else None


def _step_of_links(files: ChainFiles) -> tuple[float, int] | None:
    """The same of the newest link that has saved a step, its start included."""
    journal = entries(files)
    ended = {str(each["job"]): each for each in of_kind(journal, "ended")}
    for start in reversed(of_kind(journal, "started")):
        end = ended.get(str(start["job"]))
        steps = int(end["step"]) - int(start["step"]) if end is not None else 0
        if end is not None and steps > 0:
            return float(end["seconds"]) / steps, int(start.get("processes", 1))
    return None
