"""``outlast cluster``: plan, watch and steer a run on a shared cluster.

The commands live in modules of their own, whose imports happen when one is called.
"""

from __future__ import annotations

import typer

from outlast.cli.cluster_control import adopt, resume, stop
from outlast.cli.cluster_plan import explain, plan
from outlast.cli.cluster_prefetch import prefetch
from outlast.cli.cluster_simulate import simulate
from outlast.cli.cluster_status import status
from outlast.cli.cluster_tasks import tasks

cluster = typer.Typer(
    name="cluster",
    help="Long runs on a shared Slurm cluster: plan them, watch them, steer them.",
    no_args_is_help=True,
)
for command in (plan, status, resume, stop, adopt, explain, simulate, tasks, prefetch):
    cluster.command()(command)
