"""Training steps as graphs of operations."""

from outlast.energy.schedule.additions import with_tail, with_transfers
from outlast.energy.schedule.dag import Operation, Schedule
from outlast.energy.schedule.executed import ExecutedStep
from outlast.energy.schedule.explain import Explanation, explained
from outlast.energy.schedule.from_torch import from_torch
from outlast.energy.schedule.linked import Work, linked
from outlast.energy.schedule.pipelines import (
    gpipe,
    interleaved,
    one_f_one_b,
    single_stage,
    zero_bubble,
)
from outlast.energy.schedule.plan_energy import PlanEnergy, fit_plan_energy
from outlast.energy.schedule.sharded import sharded
from outlast.energy.schedule.text import schedule_from_text, schedule_text

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
