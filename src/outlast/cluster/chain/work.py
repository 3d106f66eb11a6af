"""What is left to train, in seconds on so many nodes, from the steps that were measured."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.cluster.chain.journal import entries, of_kind
from outlast.cluster.chain.progress import run_log

if TYPE_CHECKING:
    from outlast.cluster.chain.plan import ChainFiles, ChainPlan

SPEED_EXPONENT = 0.9
"""How the speed grows with nodes beyond the counts that were measured."""
_LAST_STEPS = 50


@dataclass(frozen=True)
class StepTimes:
    """What a step has taken so far.

    Attributes:
        seconds: Of a step, by the number of processes; at least one.
        tasks_per_node: Processes of a node.
    """

    seconds: dict[int, float]
    tasks_per_node: int

    def seconds_on(self, nodes: int) -> float:
        """Of a step on so many nodes: measured, interpolated, or beyond by `SPEED_EXPONENT`."""
        from outlast.cluster.policies.job import TableSpeed

        points = tuple((count, 1.0 / second) for count, second in sorted(self.seconds.items()))
        return 1.0 / TableSpeed(points, beyond=SPEED_EXPONENT)(nodes * self.tasks_per_node)

    def speed(self, reference: int) -> Callable[[int], float]:
        """The speed on node counts, relative to that on `reference`."""
        base = self.seconds_on(reference)
        return lambda nodes: base / self.seconds_on(nodes)


def step_times(files: ChainFiles, plan: ChainPlan) -> StepTimes | None:
    """What the run has written down, or a program that writes nothing has reported; None: nothing.

    Of each number of processes the newest steps count.
    """
    found = _recorded_steps(files) or _steps_of_links(files)
    return StepTimes(found, plan.tasks_per_node) if found else None


def work_seconds(
    files: ChainFiles,
    plan: ChainPlan,
    nodes: int,
    *,
    step: int | None = None,
    times: StepTimes | None = None,
) -> float | None:
    """Training that is left, in seconds on `nodes`; None before any step was measured.

    Args:
        files: Of the chain.
        plan: Of the chain.
        nodes: Of the link whose seconds are meant.
        step: What is done; None: the newest checkpoint.
        times: Of steps, where they were read already.
    """
    log = run_log(files)
    steps = log.steps or plan.steps
    times = times or step_times(files, plan)
    if times is None or not steps:
        return None
    left = max(steps - (log.step if step is None else step), 0)
    return float(left * times.seconds_on(nodes))


def _recorded_steps(files: ChainFiles) -> dict[int, float]:
    """Seconds of a step by processes, by the run's own records."""
    from outlast.errors import OutlastError
    from outlast.records import read_run

    try:
        run = read_run(files.run)
        sizes = {attempt.number: attempt.world_size for attempt in run.attempts}
        steps = run.steps()
    except OutlastError:
        return {}
    newest: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_LAST_STEPS))
    for record, event in steps:
        newest[sizes[record.attempt]].extend(event.step_seconds)
    means = {size: statistics.mean(item) for size, item in newest.items() if item}
    return {size: mean for size, mean in means.items() if mean > 0.0}


def _steps_of_links(files: ChainFiles) -> dict[int, float]:
    """The same of the newest link of each size that has saved a step, its start included."""
    journal = entries(files)
    ended = {str(entry["job"]): entry for entry in of_kind(journal, "ended")}
    found: dict[int, float] = {}
    for start in of_kind(journal, "started"):
        end = ended.get(str(start["job"]))
        steps = int(end["step"]) - int(start["step"]) if end is not None else 0
        if end is not None and steps > 0 and float(end["seconds"]) > 0.0:
            found[int(start.get("processes", 1))] = float(end["seconds"]) / steps
    return found
