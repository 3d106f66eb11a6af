"""Files of a chain: its plan, its journal and the progress of its run.

RUN/chain/
  chain.json         the plan, written once; `outlast cluster adopt` writes it too
  job.toml           the job of all links, with the overrides of the submission
  journal.jsonl      the journal, see below
  fence.json         the link that may write, see `outlast.cluster.fence`
  clock.json         time left to the running link, see `outlast.cluster.stopping`
  progress.json      steps that a program other than ``outlast train`` says that it has saved
  handover           asks a running filler to save and end, since the link has started
  stop               asks the running link to save and end the chain
  link-N.sbatch      the scripts
  link-JOBID.log     output of the links

The journal has one JSON object a line, appended by whoever acted. A line is one write to a file
opened with O_APPEND, so links, a login node and a node that was believed dead may all write; a torn
last line is passed over. Kinds of entry (each has ``time``, seconds since the epoch, and ``kind``):

==============  ================================================================================
created         the chain was made; ``chain``
submitted       ``job``, ``number`` of its (first) link, ``after`` (a job or ""), ``nodes``; of a
                filler ``role`` and the number of the link that waits
chosen          the link ``job``, whose limit was chosen; ``nodes``, ``wall_seconds``, ``reason``,
                ``waits`` (predicted: P10, P50, P90 and longest, seconds), ``told`` (P10, P50 and
                P90, corrected by past errors), ``after`` as above
refused         a link could not be submitted; ``number``, ``words``
started         a link; ``job``, ``number``, ``began`` (its script), ``step``, ``nodes``, ``hosts``
fenced          a link found another one alive and went away; ``job``, ``holder``
signalled       ``job``, ``signal``, ``left`` (seconds by the limit), ``state`` (as Slurm says)
prefetched      data were copied beside the training of the link ``job``; ``code`` of the copying
ended           a link; ``job``, ``number``, ``code``, ``reason``, ``step``, ``seconds``, and
                ``state`` as Slurm said then, if it was asked
lost            the link ``job`` ended without a word; ``state`` as Slurm says, noted by the next
judged          the link ``job`` was told to end, or is adopted; ``state`` as Slurm says, noted by
                the next
finished        the chain; ``outcome``: done, gave_up, cancelled, stopped; ``reason``
resumed         the chain continues after ``finished``
==============  ================================================================================

The run's event log may have millions of lines; only those of the few kinds that matter are parsed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.errors import ClusterError
from outlast.records.directory import replace_file
from outlast.records.lease import check_lease, json_object

if TYPE_CHECKING:
    from collections.abc import Sequence


FORMAT_VERSION = 1


@dataclass
class ChainFiles:
    """Paths of a chain's files, in the folder `path` of a run; see the module."""

    path: Path

    def __post_init__(self) -> None:
        self.run = self.path.parent
        self.plan = self.path / "chain.json"
        self.job = self.path / "job.toml"
        self.journal = self.path / "journal.jsonl"
        self.fence = self.path / "fence.json"
        self.clock = self.path / "clock.json"
        self.handover = self.path / "handover"
        self.stop = self.path / "stop"
        self.progress = self.path / "progress.json"

    def script(self, number: int, *, filler: bool = False) -> Path:
        """The batch script of link `number`, from 1, or of a filler that trains while it waits."""
        return self.path / f"{'filler' if filler else 'link'}-{number}.sbatch"


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
        filler_seconds: Shortest backfill window in the queue that is worth a filler.
        preemptible: Whether others can push its jobs out.
        restart_seconds: From the beginning of a link to its first step, measured or assumed.
        save_seconds: Of one save, measured or assumed; what the first links go by.
        chooses: Whether each link's time limit is chosen as it is submitted; `limit_seconds` is the
            longest then. See `outlast.cluster.choosing`.
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

    def shaped(self, nodes: int, limit_seconds: float, *, filler: bool = False) -> ChainPlan:
        """The plan as one link sees it that was submitted with other nodes and another limit.

        Args:
            nodes: Of the link.
            limit_seconds: Of the link.
            filler: Whether it is a filler, which no other filler trains for.
        """
        changes: dict[str, Any] = {"kind": "filler", "filler_nodes": ()} if filler else {}
        return dataclasses.replace(self, nodes=(nodes,), limit_seconds=limit_seconds, **changes)

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
        reason = getattr(error, "strerror", None) or f"it is damaged ({error})"
        raise ClusterError(f"{files.plan} cannot be read: {reason}") from None


Entry = dict[str, Any]


def note(files: ChainFiles, kind: str, **fields: Any) -> Entry:
    """Append an entry.

    Raises:
        ClusterError: The journal cannot be written.
    """
    entry = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in {"time": time.time(), "kind": kind, **fields}.items()
    }
    # A torn line of somebody who died is closed by the line end at the beginning.
    line = ("\n" + json.dumps(entry) + "\n").encode()
    try:
        descriptor = os.open(files.journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ClusterError(f"{files.journal} cannot be written: {error.strerror}") from None
    return entry


def note_or_print(files: ChainFiles, kind: str, **fields: Any) -> None:
    """Append an entry; where that fails, say so: a full disk is no reason to end a training."""
    try:
        note(files, kind, **fields)
    except ClusterError as error:
        print(error, flush=True)


def entries(files: ChainFiles) -> list[Entry]:
    """All entries, oldest first; none where there is no journal.

    Raises:
        ClusterError: It is there and cannot be read.
    """
    try:
        lines = files.journal.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ClusterError(f"{files.journal} cannot be read: {error.strerror}") from None
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "kind" in entry and "time" in entry:
            found.append(entry)
    return found


def of_kind(journal: Sequence[Entry], *kinds: str) -> list[Entry]:
    """Entries of some kinds."""
    return [entry for entry in journal if entry["kind"] in kinds]


def by_job(journal: Sequence[Entry], kind: str) -> dict[str, Entry]:
    """The newest entry of a kind about each job, by its number."""
    return {str(entry["job"]): entry for entry in of_kind(journal, kind)}


def finished(journal: Sequence[Entry]) -> Entry | None:
    """Outcome of the chain; None while it runs, also after it was resumed."""
    ends = of_kind(journal, "finished", "resumed")
    return ends[-1] if ends and ends[-1]["kind"] == "finished" else None


def since_resumed(journal: Sequence[Entry]) -> list[Entry]:
    """Entries since the chain was made or resumed for the last time."""
    places = [index for index, item in enumerate(journal) if item["kind"] == "resumed"]
    return list(journal[places[-1] :]) if places else list(journal)


def is_filler(entry: Entry) -> bool:
    """True for an entry about a filler, which trains while a link waits."""
    return entry.get("role") == "filler"


def submitted_jobs(journal: Sequence[Entry]) -> list[str]:
    """Numbers of all jobs that were submitted for the chain, oldest first."""
    return [str(entry["job"]) for entry in of_kind(journal, "submitted")]


def links_submitted(journal: Sequence[Entry]) -> list[Entry]:
    """Entries of the links that were submitted, without fillers, oldest first."""
    return [entry for entry in of_kind(journal, "submitted") if not is_filler(entry)]


def choice_words(journal: Sequence[Entry]) -> str:
    """Shape of the last link submitted, and its reason; empty where it was not chosen."""
    chosen, links = of_kind(journal, "chosen"), links_submitted(journal)
    if not chosen or not links or str(chosen[-1]["job"]) != str(links[-1]["job"]):
        return ""
    found = chosen[-1]
    return f"link {found['number']}, job {found['job']}: {found['reason']}"


COMPLETED = 'report_outcome("completed")'
# A line begins with its envelope, the kind in it.
_HEAD_BYTES = 60
_WANTED = re.compile(
    rb'"kind": "(?:checkpoint_saved|ready|attempt_started|stop_requested|checkpoint_failed|'
    rb'attempt_ended)"'
)


@dataclass
class RunLog:
    """Reads the event log of a run as it grows.

    Attributes:
        step: Of the newest checkpoint that is complete; 0 before the first.
        save_seconds: Of each save, from its request to its publication.
        restart_seconds: Of each start, to its first step.
        steps: Of the whole run; 0 where not known.
        stops: How often its ranks have agreed to stop.
        failure: Why the newest checkpoint could not be written; empty where it was.
        attempt: Number of the newest start of the run; 0 before the first.
        outcome: As which that one has ended, see `AttemptEnded`; empty where it has not.
        over: Starts up to this number have ended, whatever they still write: an orphan, on a node
            that Slurm has lost, may continue for a while.
    """

    path: Path
    step: int = 0
    steps: int = 0
    stops: int = 0
    save_seconds: list[float] = field(default_factory=list)
    restart_seconds: list[float] = field(default_factory=list)
    failure: str = ""
    attempt: int = 0
    outcome: str = ""
    over: int = 0
    _offset: int = 0

    def read(self) -> bool:
        """Take in what was written since the last call; whether there was a save or a start."""
        found = False
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    if _WANTED.search(line[:_HEAD_BYTES]):
                        self._take(line)
                        found = True
        except OSError:
            return found
        return found

    def _take(self, line: bytes) -> None:
        try:
            event: dict[str, Any] = json.loads(line)
            attempt = int(event.get("attempt", self.attempt + 1))
            begins = event["kind"] == "attempt_started"
            if not begins and (attempt < self.attempt or attempt <= self.over):
                return
            match event["kind"]:
                case "checkpoint_saved":
                    self.step, self.failure = int(event["step"]), ""
                    if float(event["seconds"]) > 0.0:
                        self.save_seconds.append(float(event["seconds"]))
                case "ready":
                    self.restart_seconds.append(float(event["seconds"]))
                case "checkpoint_failed":
                    self.failure = str(event["reason"])
                case "stop_requested":
                    self.stops += 1
                case "attempt_started":
                    self.steps = int(event["total_steps"])
                    self.attempt, self.outcome = int(event["attempt"]), ""
                    # Where their count was lost, with the run's directory, it begins again at 1.
                    self.over = min(self.over, self.attempt - 1)
                case "attempt_ended":
                    self.outcome = str(event["outcome"])
        except (ValueError, KeyError, TypeError):
            return


def run_log(files: ChainFiles) -> RunLog:
    """The log of the chain's run, read once, with what another program has reported."""
    log = RunLog(files.run / "events.jsonl")
    log.read()
    reported = reported_progress(files)
    log.step = max(log.step, int(reported.get("step", 0)))
    log.steps = log.steps or int(reported.get("steps", 0))
    log.save_seconds += [float(item) for item in reported.get("save_seconds", []) if item > 0.0]
    return log


def reported_progress(files: ChainFiles) -> dict[str, Any]:
    """Content of the file written by `report_progress`; empty where it was never called."""
    try:
        return json_object(files.progress.read_bytes())
    except OSError:
        return {}


def write_progress(
    files: ChainFiles,
    step: int | None = None,
    steps: int = 0,
    save_seconds: float | None = None,
    outcome: str | None = None,
) -> None:
    """Publish that all up to `step` is saved, or how the program stands; None: as before.

    Raises:
        LeaseLostError: When another job has taken over the run.
    """
    check_lease()
    before = reported_progress(files)
    times = [*before.get("save_seconds", []), *([save_seconds] if save_seconds else [])]
    content = {
        "step": before.get("step", 0) if step is None else step,
        "steps": steps or before.get("steps", 0),
        "save_seconds": times[-200:],
        "outcome": before.get("outcome", "") if outcome is None else outcome,
    }
    replace_file(files.progress, json.dumps(content).encode())


def unfinished(files: ChainFiles, plan: ChainPlan) -> str | None:
    """Why the run is not complete by its own record: an exit code of 0 proves nothing.

    The record is the event log of `outlast train` and `outlast.Run`, the outcome that ``outlast
    run`` writes down, or what the program has reported to the chain.

    Returns:
        A few words; empty where the record shows that it is complete, None where there is none.
    """
    log = run_log(files)
    at = f"step {log.step} of {log.steps}" if log.steps else f"step {log.step}"
    if log.attempt:
        if log.outcome not in ("completed", "left"):
            return f"the run's record ends at {at} ({log.outcome or 'without an end'})"
        # A loop of one's own may be left before its last step, which is its end.
        short = not plan.command and log.step < max(log.steps, plan.steps)
        return f"the run's newest checkpoint is of {at}" if short else ""
    words = _script_outcomes(files.run / "script")
    if words:
        return "" if words == {"finished"} else f"`outlast run` says: {', '.join(sorted(words))}"
    reported = reported_progress(files)
    if outcome := reported.get("outcome"):
        return "" if outcome == "completed" else f"the program says that it is {outcome}, at {at}"
    if not reported.get("steps"):
        return None
    return "" if log.step >= log.steps else f"the program has reported {at}, and no {COMPLETED}"


def script_has_stopped(files: ChainFiles) -> bool:
    """True when all ranks of a script under ``outlast run`` ended in order, some unfinished."""
    words = _script_outcomes(files.run / "script")
    return "stopped" in words and words <= {"stopped", "finished"}


def _script_outcomes(folder: Path) -> set[str]:
    """Outcome on each rank of the last start of a script under ``outlast run``."""
    found = set()
    for file in folder.glob("outcome*.json"):
        try:
            found.add(str(json.loads(file.read_text(encoding="utf-8"))["word"]))
        except (OSError, ValueError, KeyError, TypeError):
            found.add("unreadable")
    return found
