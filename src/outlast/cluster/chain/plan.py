"""What a chain was submitted with, as one JSON file beside the run's checkpoints.

RUN/chain/
  chain.json         this, written once; `outlast cluster adopt` writes it too
  job.toml           the job of all links, with the overrides of the submission
  journal.jsonl      what has happened, see `outlast.cluster.chain.journal`
  fence.json         the link that may write, see `outlast.cluster.chain.fence`
  clock.json         how long the running link has left, see `outlast.cluster.chain.clock`
  handover           asks a running filler to save and end, since the link has started
  stop               asks the running link to save and end the chain
  link-N.sbatch      the scripts
  link-JOBID.log     what links have printed
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outlast.errors import ClusterError
from outlast.records.directory import replace_file

FORMAT_VERSION = 1


@dataclass(frozen=True)
class ChainFiles:
    """Paths of a chain's files, in the folder `path`."""

    path: Path

    @property
    def plan(self) -> Path:
        """What was asked for."""
        return self.path / "chain.json"

    @property
    def job(self) -> Path:
        """The job of all links."""
        return self.path / "job.toml"

    @property
    def journal(self) -> Path:
        """What has happened."""
        return self.path / "journal.jsonl"

    @property
    def fence(self) -> Path:
        """The link that may write."""
        return self.path / "fence.json"

    @property
    def clock(self) -> Path:
        """What the running link has left."""
        return self.path / "clock.json"

    @property
    def stop(self) -> Path:
        """There when the running link shall save and the chain end."""
        return self.path / "stop"

    @property
    def handover(self) -> Path:
        """There when a link has started and waits for the filler to save and end."""
        return self.path / "handover"

    @property
    def progress(self) -> Path:
        """Steps that a program other than ``outlast train`` says that it has saved."""
        return self.path / "progress.json"

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.path.parent

    def script(self, number: int) -> Path:
        """The batch script of link `number`, from 1."""
        return self.path / f"link-{number}.sbatch"


@dataclass(frozen=True)
class ChainPlan:
    """A chain as it was submitted; see the [slurm] section for what the settings mean.

    Attributes:
        chain: Eight characters that tell it from others.
        name: Of the run, and of its jobs.
        kind: ``dependent``, ``presubmitted`` or ``array``; ``filler`` of a job that is a filler.
        limit_seconds: Time limit of a link; None where the partition's default is not known.
        directory: Where links run.
        python: Interpreter on the compute nodes.
        steps: Of the whole run, for what is left to do; 0 where it is not known.
        links: Number of the last link; 0: as many as it takes.
        first_number: Of the link that has the first of `nodes`; above 1 where earlier links of the
            run were submitted as a chain that has ended.
        filler_seconds: Shortest hole in the queue that is worth a filler.
        preemptible: Whether others can push its jobs out.
        restart_seconds: From the beginning of a link to its first step, measured or assumed.
        save_seconds: Of one save, measured or assumed; what the first links go by.
        chooses: Whether each link's time limit is chosen as it is submitted; `limit_seconds` is the
            longest then. See `outlast.cluster.chain.choosing`.
        sizes: Node counts that are chosen from, too; none: the nodes are those of `nodes`.
        reason: Why a link that was chosen is as it is.
        work_seconds: Training that was said to be left when the chain was submitted, on the first
            of `nodes`, for choices before a step is measured; 0: nothing was said.
    """

    chain: str
    name: str
    kind: str
    nodes: tuple[int, ...]
    tasks_per_node: int
    limit_seconds: float | None
    directory: str
    python: str
    steps: int = 0
    link_seconds: float = 0.0
    links: int = 0
    first_number: int = 1
    attempts_without_progress: int = 3
    lead_seconds: float = 0.0
    cpus_per_task: int = 0
    gpus_per_node: int = 0
    partition: str = ""
    account: str = ""
    qos: str = ""
    directives: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    command: str = ""
    preemptible: bool = False
    filler_nodes: tuple[int, ...] = ()
    filler_seconds: float = 3600.0
    restart_seconds: float = 60.0
    save_seconds: float = 30.0
    chooses: bool = False
    sizes: tuple[int, ...] = ()
    reason: str = ""
    work_seconds: float = 0.0

    def nodes_of(self, number: int) -> int:
        """Nodes of link `number`; the last of `nodes` stands for all later links."""
        place = max(number - self.first_number, 0)
        return self.nodes[min(place, len(self.nodes) - 1)]

    def processes_of(self, number: int) -> int:
        """Processes of link `number`."""
        return self.nodes_of(number) * self.tasks_per_node

    def from_link(self, number: int) -> ChainPlan:
        """The same, begun at link `number`: its nodes and its count of links are from there on."""
        links = self.links - self.first_number + number if self.links else 0
        return dataclasses.replace(self, first_number=number, links=links)

    def shaped(self, nodes: int, limit_seconds: float) -> ChainPlan:
        """The plan as one link sees it that was submitted with other nodes and another limit."""
        return dataclasses.replace(self, nodes=(nodes,), limit_seconds=limit_seconds)

    def usable_seconds(self) -> float | None:
        """Longest that a link runs, by its limit and by ``slurm.link_seconds``; None: not known."""
        if self.limit_seconds is None:
            return self.link_seconds or None
        return min(self.limit_seconds, self.link_seconds or self.limit_seconds)


def chain_files(run: Path) -> ChainFiles:
    """The chain's files of a run directory."""
    return ChainFiles(run / "chain")


def write_plan(files: ChainFiles, plan: ChainPlan) -> None:
    """Publish `plan`, and make the chain's folder.

    Raises:
        ClusterError: It cannot be written.
    """
    try:
        files.path.mkdir(parents=True, exist_ok=True)
        content = {"v": FORMAT_VERSION, **dataclasses.asdict(plan)}
        replace_file(files.plan, json.dumps(content, indent=1).encode())
    except OSError as error:
        raise ClusterError(f"{files.plan} cannot be written: {error.strerror}") from None


def read_plan(files: ChainFiles) -> ChainPlan:
    """The plan of a chain.

    Raises:
        ClusterError: There is none, or it cannot be read.
    """
    try:
        content: dict[str, Any] = json.loads(files.plan.read_text(encoding="utf-8"))
        known = {field.name for field in dataclasses.fields(ChainPlan)}
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in content.items()
            if name in known
        }
        return ChainPlan(**values)
    except FileNotFoundError:
        raise ClusterError(
            f"{files.run} has no chain: `outlast submit job.toml` makes one"
        ) from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ClusterError(f"{files.plan} cannot be read: {error}") from None
