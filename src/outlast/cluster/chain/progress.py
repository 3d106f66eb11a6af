"""How far a run is, and what its saves and starts take, from what it has written down.

Logs of long runs have millions of lines; only those of the few kinds that matter are parsed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outlast.records.directory import replace_file
from outlast.records.lock import check_lease

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.cluster.chain.plan import ChainFiles, ChainPlan

_SAVED = b'"kind": "checkpoint_saved"'
_READY = b'"kind": "ready"'
_STARTED = b'"kind": "attempt_started"'
_STOPPING = b'"kind": "stop_requested"'
_FAILED = b'"kind": "checkpoint_failed"'
_ENDED = b'"kind": "attempt_ended"'
COMPLETED = 'report_outcome("completed")'
# A line begins with its envelope, the kind in it.
_HEAD_BYTES = 60
_WANTED = (_SAVED, _READY, _STARTED, _STOPPING, _FAILED, _ENDED)


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
            that Slurm has lost, may go on for a while.
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
                    if any(kind in line[:_HEAD_BYTES] for kind in _WANTED):
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
    """What `report_progress` has written; empty where it was never called."""
    try:
        found = json.loads(files.progress.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


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
        if log.outcome != "completed":
            return f"the run's record ends at {at} ({log.outcome or 'without an end'})"
        # A loop of one's own may end before its last step.
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
    """Whether all ranks of a script under ``outlast run`` have ended in order, not all done."""
    words = _script_outcomes(files.run / "script")
    return "stopped" in words and words <= {"stopped", "finished"}


def _script_outcomes(folder: Path) -> set[str]:
    """How the last start of a script under ``outlast run`` has ended on its ranks."""
    found = set()
    for file in folder.glob("outcome*.json"):
        try:
            found.add(str(json.loads(file.read_text(encoding="utf-8"))["word"]))
        except (OSError, ValueError, KeyError, TypeError):
            found.add("unreadable")
    return found
