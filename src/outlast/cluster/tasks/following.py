"""A plan as the running copies need it: who comes first, and through what.

Training does not wait for the plan, nor the plan for training: whatever copy is under way takes the
bandwidth that its place in the schedule gives it among the others that are. That is what
`Executor` does with functions of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.cluster.tasks.build import run_graph
from outlast.cluster.tasks.execute import flow_of
from outlast.cluster.tasks.planner import plan
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outlast.cluster.tasks.build import RunFigures
    from outlast.cluster.tasks.fluid import Flow


@dataclass(frozen=True)
class TransferPlan:
    """The transfers of a planned run; travels to other processes.

    Attributes:
        bytes_per_s: Bandwidth by resource, of all that use it together.
        copies: For each tier, its copies by the step that was saved.
        stage_in: Of the data before the first step; None: nothing is staged.
    """

    bytes_per_s: Mapping[str, float]
    copies: Mapping[str, Mapping[int, Flow]]
    stage_in: Flow | None

    def copy(self, tier: str, step: int) -> Flow:
        """What the copy of a step to a tier is to others under way.

        A save of another step than those planned, as that of a stop, has the place of the nearest.

        Raises:
            ClusterError: For a tier that is not planned.
        """
        planned = self.copies.get(tier)
        if not planned:
            raise ClusterError(f'no copies to a tier named "{tier}" are planned: add such a tier')
        return planned[min(planned, key=lambda item: (abs(item - step), item))]


def transfer_plan(figures: RunFigures) -> TransferPlan:
    """Plan a run and keep what its copies need of the plan.

    Raises:
        ClusterError: For figures without a meaning.
    """
    schedule = plan(run_graph(figures))
    numbers = {activity.name: number for number, activity in enumerate(schedule.graph.activities)}
    saves = -(-figures.steps // figures.save_every_steps) if figures.save_bytes else 0
    copies: dict[str, dict[int, Flow]] = {}
    for tier in figures.tiers:
        copies[tier.name] = {
            min(save * figures.save_every_steps, figures.steps): flow_of(
                schedule, numbers[f"drain {save} to {tier.name}"]
            )
            for save in range(tier.every, saves + 1, tier.every)
        }
    staged = numbers.get("stage-in")
    return TransferPlan(
        dict(figures.bytes_per_s), copies, None if staged is None else flow_of(schedule, staged)
    )
