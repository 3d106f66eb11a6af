"""Training steps as graphs of operations."""

from outlast.energy.schedule.graph import (
    Operation,
    Schedule,
    Work,
    linked,
    schedule_from_text,
    schedule_text,
)
from outlast.energy.schedule.measured import (
    ExecutedStep,
    Explanation,
    PlanEnergy,
    explained,
    fit_plan_energy,
)
from outlast.energy.schedule.pipelines import (
    from_torch,
    gpipe,
    interleaved,
    one_f_one_b,
    sharded,
    single_stage,
    with_tail,
    with_transfers,
    zero_bubble,
)

__all__ = [
    "ExecutedStep",
    "Explanation",
    "Operation",
    "PlanEnergy",
    "Schedule",
    "Work",
    "explained",
    "fit_plan_energy",
    "from_torch",
    "gpipe",
    "interleaved",
    "linked",
    "one_f_one_b",
    "schedule_from_text",
    "schedule_text",
    "sharded",
    "single_stage",
    "with_tail",
    "with_transfers",
    "zero_bubble",
]
