"""The section of a job file that says what the links of its chain ask Slurm for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from outlast.job.section import Count, Positive, Section, setting

ChainKind = Literal["dependent", "presubmitted", "array"]

# Slurm's forms of a time limit, and a number with a unit.
_CLOCK = r"[0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2}"
_UNIT = r"[0-9]+(\.[0-9]+)?(s|sec|m|min|h|d)"
WALL_TIME = rf"^({_CLOCK}|{_UNIT}|auto)?$"
CHOSEN = "auto"
"""A `wall_time` that is chosen from the live queue whenever a link is submitted."""
_ONE_WORD = r"^\S*$"


class SlurmSection(Section):
    """A long run on a shared cluster, as a chain of jobs: see outlast submit."""

    wall_time: str = setting(
        "",
        "time limit of a link, e.g. 8:00:00, 2-00:00:00, 90min or 8h; auto: for each link the one "
        "that is predicted to end the run first on the queue as it is then; empty: the longest "
        "that the partition allows, 7 days where it has no limit",
        identity=False,
        form="a time such as 8:00:00, 2-00:00:00, 90min or 8h, or auto",
        pattern=WALL_TIME,
    )
    link_seconds: Annotated[float, Field(ge=0.0)] = setting(
        0.0,
        "end every link after so long, whatever is left of its time limit; 0: use the whole limit",
        identity=False,
    )
    nodes: list[Positive] = setting(
        [1],
        "nodes of a link; several: the first link has the first number, the next the next, and "
        "all later ones the last",
        identity=False,
        min_length=1,
    )
    sizes: list[Positive] = setting(
        [],
        'node counts that outlast cluster plan compares, and that wall_time = "auto" chooses '
        "from; empty: those of nodes alone are submitted, and their halves and doubles compared",
        identity=False,
    )
    tasks_per_node: Positive = setting(1, "processes of the run on a node", identity=False)
    cpus_per_task: Count = setting(
        0, "cores of a process; 0: the cluster's default", identity=False
    )
    gpus_per_node: Count = setting(0, "GPUs of a node; 0: ask for none", identity=False)
    partition: str = setting(
        "",
        "partition, or several separated by commas; empty: the cluster's default",
        identity=False,
        form="a name, or names separated by commas, without spaces",
        pattern=_ONE_WORD,
    )
    account: str = setting(
        "",
        "account that pays; empty: your default",
        identity=False,
        form="a name without spaces",
        pattern=_ONE_WORD,
    )
    qos: str = setting(
        "",
        "quality of service; empty: your default",
        identity=False,
        form="a name without spaces",
        pattern=_ONE_WORD,
    )
    directives: list[str] = setting(
        [],
        'more lines of the batch script: options such as "--constraint=a100", or whole lines such '
        'as "#BB ..."',
        identity=False,
    )
    setup: list[str] = setting(
        [], 'shell lines before the run, e.g. "module load cuda"', identity=False
    )
    python: str = setting(
        "", "Python on the compute nodes; empty: the one that submits", identity=False
    )
    command: str = setting(
        "",
        "what a link runs in place of outlast train, as a shell line with its own srun; it ends "
        "with 0 when all is done and with 3 when it is to be continued",
        identity=False,
    )
    chain: ChainKind = setting(
        "dependent",
        "dependent: a running link submits the next one, which waits for it; presubmitted: all "
        "are submitted at once, where compute nodes have no sbatch; array: one job array whose "
        "places run one after the other, which starts fastest",
        identity=False,
    )
    links: Count = setting(
        0,
        "most links of the chain; 0: as many as it takes (dependent alone)",
        identity=False,
    )
    filler_nodes: list[Positive] = setting(
        [],
        "node counts of fillers: while a link waits in the queue, a smaller job trains on nodes "
        "that are free meanwhile, and hands over when the link starts; none: no fillers",
        identity=False,
    )
    filler_minutes: Annotated[float, Field(gt=0.0)] = setting(
        60.0, "shortest hole in the queue that is worth a filler", identity=False
    )
    attempts_without_progress: Positive = setting(
        3,
        "the chain gives up after so many links in a row that have saved no step",
        identity=False,
    )
    lead_seconds: Annotated[float, Field(ge=0.0)] = setting(
        0.0,
        "begin the last save of a link so long before its end; 0: as measured saves say",
        identity=False,
    )
    restart_seconds: Annotated[float, Field(ge=0.0)] = setting(
        0.0,
        "what a link needs to its first step; 0: as measured in earlier links",
        identity=False,
    )
