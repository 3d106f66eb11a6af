"""Tasks, data and transfers as one schedule: planned before a run, followed during it.

from outlast.cluster.tasks import RunFigures, plan, run_graph
schedule = plan(run_graph(RunFigures(steps=6000, step_seconds=2.0, nodes=8, ...)))
"""

from outlast.cluster.tasks.execute import Executor, Transfer
from outlast.cluster.tasks.gantt import duration, page
from outlast.cluster.tasks.graph import (
    Edge,
    Evaluation,
    Graph,
    Machine,
    Place,
    RunFigures,
    Task,
    TierFigures,
    graph_from_toml,
    run_graph,
)
from outlast.cluster.tasks.planner import lower_bounds, plan, run_greedily, upward_ranks
from outlast.cluster.tasks.schedule import Flow, Fluid, Schedule, fair_rates

__all__ = [
    "Edge",
    "Evaluation",
    "Executor",
    "Flow",
    "Fluid",
    "Graph",
    "Machine",
    "Place",
    "RunFigures",
    "Schedule",
    "Task",
    "TierFigures",
    "Transfer",
    "duration",
    "fair_rates",
    "graph_from_toml",
    "lower_bounds",
    "page",
    "plan",
    "run_graph",
    "run_greedily",
    "upward_ranks",
]
