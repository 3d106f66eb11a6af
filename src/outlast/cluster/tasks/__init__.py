"""Tasks, data and transfers as one schedule: planned before a run, followed during it.

from outlast.cluster.tasks import RunFigures, plan, run_graph
schedule = plan(run_graph(RunFigures(steps=6000, step_seconds=2.0, nodes=8, ...)))
"""

from outlast.cluster.tasks.build import Evaluation, RunFigures, TierFigures, run_graph
from outlast.cluster.tasks.execute import Executor, Happened, Report, Transfer, copy_file
from outlast.cluster.tasks.graph import Edge, Graph, Machine, Place, Task
from outlast.cluster.tasks.planner import Bounds, lower_bounds, plan, run_greedily, upward_ranks
from outlast.cluster.tasks.schedule import Flow, Row, Schedule, fair_rates, problems

__all__ = [
    "Bounds",
    "Edge",
    "Evaluation",
    "Executor",
    "Flow",
    "Graph",
    "Happened",
    "Machine",
    "Place",
    "Report",
    "Row",
    "RunFigures",
    "Schedule",
    "Task",
    "TierFigures",
    "Transfer",
    "copy_file",
    "fair_rates",
    "lower_bounds",
    "plan",
    "problems",
    "run_graph",
    "run_greedily",
    "upward_ranks",
]
