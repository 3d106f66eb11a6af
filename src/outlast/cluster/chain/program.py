"""What a link runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.cluster.chain.stopping import RECORD_TELLS
from outlast.cluster.slurm.commands import installed

if TYPE_CHECKING:
    from outlast.cluster.chain.plan import ChainFiles, ChainPlan


def program_of(files: ChainFiles, plan: ChainPlan, number: int) -> list[str]:
    """Name and arguments of the program of link `number`.

    ``outlast train`` as a step of all processes, or the job's own shell line. One process needs no
    srun, which containers may lack.
    """
    if plan.command:
        return ["bash", "-c", plan.command]
    train = [plan.python, "-m", "outlast", "train", str(files.job)]
    nodes, processes = plan.nodes_of(number), plan.processes_of(number)
    if processes == 1 and not installed("srun"):
        return train
    # A rank that died must not leave the others waiting for it. Those that stop to be continued end
    # with 0 here, one after the other.
    return [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={processes}",
        "--kill-on-bad-exit=1",
        f"--export=ALL,{RECORD_TELLS}=1",
        *train,
    ]
