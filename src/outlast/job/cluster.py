"""Sections [slurm] and [staging]: requests of a chain's links, and copies of the data on nodes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

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
        0, "most links of the chain; 0: as many as it takes (dependent alone)", identity=False
    )
    filler_nodes: list[Positive] = setting(
        [],
        "node counts of fillers: while a link waits in the queue, a smaller job trains on nodes "
        "that are free meanwhile, and hands over when the link starts; none: no fillers",
        identity=False,
    )
    filler_minutes: Annotated[float, Field(gt=0.0)] = setting(
        60.0, "shortest backfill window in the queue that is worth a filler", identity=False
    )
    attempts_without_progress: Positive = setting(
        3, "the chain gives up after so many links in a row that have saved no step", identity=False
    )
    lead_seconds: Annotated[float, Field(ge=0.0)] = setting(
        0.0,
        "begin the last save of a link so long before its end; 0: as measured saves say",
        identity=False,
    )
    restart_seconds: Annotated[float, Field(ge=0.0)] = setting(
        0.0, "what a link needs to its first step; 0: as measured in earlier links", identity=False
    )


Gigabytes = Annotated[float, Field(ge=0.0)]
MegabytesPerSecond = Annotated[float, Field(ge=0.0)]


def _directive(line: str) -> str:
    if line.startswith("#") and not line.startswith(("#!", "#SBATCH")) and line.isprintable():
        return line
    right = (
        'one line that begins with the site\'s directive, such as "#BB ...", "#DW ...", "#DB ..."'
    )
    raise PydanticCustomError("directive", "{right}", {"right": right})


Directive = Annotated[str, AfterValidator(_directive)]


class StagingSection(Section):
    """Copy of the tokens on each node's own disk, made once for all its processes."""

    directory: str = setting(
        "",
        "directory of the node's own disk or memory, e.g. $SLURM_TMPDIR, /local or /dev/shm; "
        "empty: tokens are read where they are",
        identity=False,
    )
    limit_gigabytes: Gigabytes = setting(
        0.0,
        "most that all copies of this user may take there (10^9 bytes); those used longest ago go "
        "first, never one that a live process uses; 0: no limit but the disk",
        identity=False,
    )
    keep_free_gigabytes: Gigabytes = setting(
        1.0, "what is to stay free on that disk (10^9 bytes)", identity=False
    )
    required: bool = setting(
        False,
        "stop where a copy cannot be made; false: read in place, with a warning (a URL is always "
        "required)",
        identity=False,
    )
    wait: bool = setting(
        True,
        "begin when the copies are there; false: where there is none yet, read in place and leave "
        "the copying to the prefetch beside training, for the next link (a URL is waited for)",
        identity=False,
    )
    prefetch: bool = setting(
        True,
        "in a chain, copy what a node lacks beside training, once that is under way, for the next "
        "link",
        identity=False,
    )
    prefetch_megabytes_per_s: Annotated[float, Field(gt=0.0)] = setting(
        200.0,
        "most that a node takes for the next link; half of what it gets when others want it too",
        identity=False,
    )
    megabytes_per_s: MegabytesPerSecond = setting(
        0.0,
        "most that a node takes while its processes wait for a copy; 0: no limit",
        identity=False,
    )
    read_back: bool = setting(
        True, "read each new copy from the disk once and compare its digest", identity=False
    )
    timeout_seconds: Annotated[float, Field(gt=0.0)] = setting(
        3600.0, "longest time for one copy, and for waiting for it", identity=False
    )
    block_megabytes: Positive = setting(8, "size of one read of the source (MiB)", identity=False)
    read_ahead: Positive = setting(4, "reads of the source on the way at once", identity=False)
    burst_buffer: Literal["off", "datawarp", "rabbit", "lines"] = setting(
        "off",
        "have the site copy the files of data.train and data.validation before the job starts: "
        "directives for DataWarp or Rabbit, or those of staging.burst_buffer_lines; "
        "staging.directory is then where they appear, e.g. $DW_JOB_STRIPED or $DW_JOB_outlast",
        identity=False,
    )
    burst_buffer_gigabytes: Gigabytes = setting(
        0.0, "capacity to ask for; 0: the size of the files and a tenth more", identity=False
    )
    burst_buffer_lines: list[Directive] = setting(
        [],
        "the site's own directives, as in its manual; {gigabytes} is the capacity, and a line with "
        "{source} is repeated for every file, {name} being its name without folders",
        identity=False,
    )
