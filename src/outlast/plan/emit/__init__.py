"""A plan as the configuration of a framework.

from outlast.plan.emit import emit, problem
problem("deepspeed", model, run)                        # None, or why not, in one sentence
emit("sbatch", model, run, cluster, out=Path("run"))    # job.sbatch and job.toml
"""

from outlast.plan.emit.outlast_job import mechanism_tables
from outlast.plan.emit.settings import EmitSettings
from outlast.plan.emit.targets import TARGETS, Target, can_express, problem, target_named
from outlast.plan.emit.write import emit, emitted

__all__ = [
    "TARGETS",
    "EmitSettings",
    "Target",
    "can_express",
    "emit",
    "emitted",
    "mechanism_tables",
    "problem",
    "target_named",
]
