"""The records of a run as `outlast report` and the sinks read them: steps, energy, peak memory.

A run directory is the same whoever trains: `job.toml`, `events.jsonl`, a lock while it lives. What
is in it are the settings that Outlast follows, what every step took, each save, finding and joule.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import platform
import resource
import socket
import sys
import time
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from outlast.distributed.group import gather_objects, raise_together
from outlast.errors import OutlastError, RunError
from outlast.hardware import this_machine
from outlast.job import differences, fingerprint, loop_job_from_text, to_toml
from outlast.records import (
    AttemptEnded,
    AttemptStarted,
    CheckpointFailed,
    CheckpointSaved,
    MemoryMeasured,
    RecordWriter,
    RunDirectory,
    StepsDone,
    TrainingStarted,
    Warned,
    open_sinks,
)
from outlast.records.process import age_seconds
from outlast.records.stopwatch import Stopwatch
from outlast.runtime.display import Shown, progress_sink
from outlast.runtime.energy import run_meter
from outlast.version import __version__

if TYPE_CHECKING:
    from outlast.checkpoint import SaveResult
    from outlast.distributed.ranks import Ranks
    from outlast.job import LoopJob
    from outlast.records import Event, OwnerLock, Predicted
    from outlast.runtime.energy import RunMeter
    from outlast.runtime.engine import StepResult
    from outlast.runtime.guarding import RunGuard
    from outlast.runtime.stop import JobChain


_STATUS = Path("/proc/self/status")


_GROWTH = 1.01


@dataclass
class MemoryWatch:
    """This process's peak memory, and whether it is worth a record.

    Args:
        ranks: Who this process is.
        device: What it computes on.
    """

    ranks: Ranks
    device: torch.device
    _recorded: dict[str, int] = field(default_factory=dict)

    def grown(self) -> bool:
        """True if a peak is more than 1 % above what was recorded last; takes 0.1 ms at most."""
        return any(
            peak > _GROWTH * self._recorded.get(name, 0) for name, peak in self._peaks().items()
        )

    def grown_anywhere(self, step: int) -> MemoryMeasured | None:
        """As `measured`, where a peak is worth a record on any rank; all ranks call it together."""
        return self.measured(step) if any(gather_objects(self.grown())) else None

    def measured(self, step: int) -> MemoryMeasured:
        """The peaks of all processes since they began; all ranks call it together."""
        self._recorded = self._peaks()
        mine = {"rank": self.ranks.rank, "host": socket.gethostname(), **self._recorded}
        on_device = "torch.cuda.max_memory_allocated and max_memory_reserved, "
        what = f"{on_device if self.device.type == 'cuda' else ''}{resident_peak()[1]}"
        return MemoryMeasured(step, gather_objects(mine), what)

    def _peaks(self) -> dict[str, int]:
        found = {"resident_bytes": resident_peak()[0]}
        if self.device.type == "cuda":
            found["allocated_bytes"] = torch.cuda.max_memory_allocated(self.device)
            found["reserved_bytes"] = torch.cuda.max_memory_reserved(self.device)
        return found


def resident_peak(status: Path = _STATUS) -> tuple[int, str]:
    """This process's peak resident set in bytes, and where the figure is from.

    Linux hands the maximum of getrusage(2) on through execve(2): a small program that a large one
    starts begins with the large one's peak. VmHWM (proc_pid_status(5)) is this program's own.
    """
    try:
        for line in status.read_bytes().splitlines():
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * 1024, "VmHWM of /proc/self/status"
    except (OSError, ValueError, IndexError):
        pass
    # Kilobytes, but on macOS, which has bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * unit, "ru_maxrss of getrusage, which may be that of the program that started it"


@dataclass(frozen=True)
class LoopFacts:
    """Facts about a training loop that is not ours, as it tells them itself.

    Attributes:
        framework: Whose loop it is, e.g. ``pytorch`` or ``transformers``.
        steps: Optimizer steps of the whole run; 0: not known.
        samples_per_step: Over all processes; 0: not known.
        tokens_per_step: Over all processes; 0: not known.
        parameters: Of the model; 0: not known.
        flops_per_token: Forward and backward; 0: not known.
        parallel: Sizes of the parallel dimensions, as far as they are known.
        versions: Of the framework's packages, by name.
    """

    framework: str
    steps: int = 0
    samples_per_step: int = 0
    tokens_per_step: int = 0
    parameters: int = 0
    flops_per_token: float = 0.0
    parallel: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


class StepRecords:
    """The records of the steps of one attempt, and of the energy and memory that they take.

    All ranks of the run call `begin`, `record_steps` and `finish` together; only the first has a
    writer.

    Args:
        writer: Of the run's events; None on other ranks.
        ranks: This process among the others.
        log_every: Steps between two records.
        memory: Of this process.
        total_steps: Of the run; 0: not known.
        tokens_per_step: Over all processes; 0: not known.

    Attributes:
        watch: Time by purpose; ``with records.watch("data"):`` counts for another one.
        meter: Of energy; None where nothing is measured.
        tell_every: Steps from which on several ranks record again what their guards have found.
    """

    def __init__(
        self,
        writer: RecordWriter | None,
        ranks: Ranks,
        *,
        log_every: int,
        memory: MemoryWatch,
        total_steps: int = 0,
        tokens_per_step: int = 0,
    ) -> None:
        self.watch = Stopwatch()
        self.memory = memory
        self.meter: RunMeter | None = None
        self.tell_every = 1
        self._writer = writer
        self._ranks = ranks
        self._log_every = log_every
        self._total_steps = total_steps
        self._tokens_per_step = tokens_per_step
        self.token_offset = 0
        self._step = 0
        self._losses: list[torch.Tensor | float | None] = []
        self._metrics: dict[str, list[torch.Tensor | float]] = {}
        self._not_finite: set[str] = set()
        self._step_seconds: list[float] = []
        self._boundary = 0.0
        self._last: tuple[torch.Tensor | float, torch.Tensor | float] = (math.nan, math.nan)

    @property
    def writes(self) -> bool:
        """Return whether this process writes the records."""
        return self._writer is not None

    def is_due(self, step: int) -> bool:
        """Return whether the steps up to `step` are to be recorded, by calling `record_steps`."""
        return step % self._log_every == 0 or step == self._total_steps

    def begin(self, ready: TrainingStarted, guard: RunGuard | None = None) -> None:
        """Record that set-up is over; the first step begins.

        Args:
            ready: The event.
            guard: Whose checks' time is told apart.
        """
        self._step = ready.step
        self.write(ready)
        if guard is not None:
            guard.records_warnings = True
        if self.meter is not None:
            self.meter.guard = guard
            self._measured(self.meter.begin(ready.step))
        self._boundary = time.perf_counter()

    def step(self, result: StepResult) -> bool:
        """Take in one more optimizer step.

        Tensors are looked at when they are recorded, so that no step waits for a device; nobody
        may change them until then.

        Returns:
            Whether these steps are to be recorded, by calling `record_steps` on all ranks.
        """
        now, seconds = time.perf_counter(), result.seconds
        self._step_seconds.append(now - self._boundary if seconds is None else seconds)
        self._losses.append(None)
        self._boundary, self._step = now, result.step
        self.amend(result)
        return self.is_due(result.step)

    def amend(self, result: StepResult) -> None:
        """Give the last step the figures that are known only after it, before `record_steps`."""
        if self._losses:
            self._losses[-1] = result.loss
            self._last = (result.gradient_norm, result.learning_rate)
            for name, value in (result.metrics or {}).items():
                self._metrics.setdefault(name, []).append(value)

    def record_steps(self) -> None:
        """Record the steps since the last call."""
        if not self._step_seconds:
            return
        known = [float(loss) for loss in self._losses if loss is not None]
        norm, rate = map(float, self._last)
        means = {
            name: sum(map(float, metric)) / len(metric) for name, metric in self._metrics.items()
        }
        self._metrics = {}
        seconds = self.watch.lap()
        self.write(
            StepsDone(
                step=self._step,
                steps=len(self._losses),
                loss=sum(known) / len(known) if known else math.nan,
                gradient_norm=norm,
                learning_rate=rate,
                tokens=self._step * self._tokens_per_step + self.token_offset,
                step_seconds=[round(second, 6) for second in self._step_seconds],
                seconds=seconds,
                metrics=means,
            )
        )
        for name, mean in means.items():
            if not math.isfinite(mean) and name not in self._not_finite:
                self._not_finite.add(name)
                sentence = f"{name} = {mean} up to step {self._step}; it is recorded as it is"
                self.write(Warned(sentence))
                if self._ranks.is_first:
                    warnings.warn(sentence, stacklevel=3)
        if self.meter is not None:
            self._measured(self.meter.steps_done(self._step, len(self._losses), seconds))
        self._losses, self._step_seconds = [], []

    def drop_steps(self) -> None:
        """Forget the steps since the last record, which are done again."""
        self._losses, self._step_seconds, self._metrics = [], [], {}

    def leave_out(self, seconds: float) -> None:
        """Do not count `seconds` of the step under way, which were spent on something else."""
        self._boundary += seconds

    def write(self, event: Event | None) -> None:
        """Write any other event down."""
        if self._writer is not None and event is not None:
            self._writer.write(event)

    def saved(self, result: SaveResult) -> None:
        """A save has ended, well or not; of one that was not made there is nothing to say."""
        if result.error is not None:
            self.write(CheckpointFailed(result.step, result.error))
        elif not result.skipped:
            self.write(
                CheckpointSaved(result.step, result.blocked_seconds, result.seconds, result.bytes)
            )

    def finish(self, step: int) -> None:
        """Close the last window of energy after `step` steps, and record peak memory."""
        if self.meter is not None:
            self._measured(self.meter.finish(step, self.watch.so_far()))
        self.write(self.memory.measured(step))

    def close(self, outcome: str, reason: str = "") -> None:
        """Give up the meter; a second call does nothing.

        Args:
            outcome: As which the attempt ends, which whoever made the writer writes down.
            reason: Why it ends before its last step.
        """
        if self.meter is not None:
            self.meter.close()

    def _measured(self, event: Event | None) -> None:
        assert self.meter is not None
        self.write(event)
        for message in self.meter.warnings if event is not None else ():
            self.write(Warned(message))


class Recording(StepRecords):
    """The records of one attempt of a run whose loop is not ours, in a directory that it claims.

    All ranks of the default process group, if there is one, make it and call its methods together,
    but for `step`, `saved` and `write`, which the first rank alone may call. Only the first writes.

    Args:
        job: The settings.
        ranks: This process among the others.
        device: What it computes on.
        facts: About the loop.
        fresh: Move a run aside that is in the directory already, but not when a launcher starts
            this one again.
        prediction: What the run is expected to need; recorded before the first step.
        chain: Told how the run stands; None: nobody is.
        display: Show progress where standard output goes.

    Attributes:
        directory: Of the run.

    Raises:
        OutlastError: On all ranks, when the directory is in use, is another job's, or cannot be
            written, or a sink cannot be opened.
    """

    def __init__(
        self,
        job: LoopJob,
        ranks: Ranks,
        device: torch.device,
        facts: LoopFacts,
        *,
        fresh: bool = False,
        prediction: Predicted | None = None,
        chain: JobChain | None = None,
        display: bool = False,
    ) -> None:
        super().__init__(
            None,
            ranks,
            log_every=job.log.every_steps,
            memory=MemoryWatch(ranks, device),
            total_steps=facts.steps,
            tokens_per_step=facts.tokens_per_step,
        )
        self.directory = directory_of(job)
        self.tell_every = job.energy.every_steps
        self._job = job
        self._facts = facts
        self._chain = chain
        self._display = display
        self._lock: OwnerLock | None = None
        self._closed = False
        raise_together(lambda: self._open(fresh) if ranks.is_first else None)
        try:
            self.meter = raise_together(
                lambda: run_meter(job.energy, ranks, device, tokens_per_step=facts.tokens_per_step)
            )
        except BaseException as error:
            self.close("failed", f"{type(error).__name__}: {error}")
            raise
        if prediction is not None:
            self.write(prediction)

    def started(self, step: int) -> TrainingStarted:
        """The event that set-up is over, after `step` steps; whoever waits for the run is told."""
        seconds = self.watch.lap()
        started = age_seconds(psutil.Process())
        seconds["startup"] = max(started - sum(seconds.values()), 0.0)
        if self._ranks.is_first and self._chain is not None:
            self._chain.report_outcome("running", steps=self._facts.steps)
        return TrainingStarted(step, started, seconds)

    def close(self, outcome: str, reason: str = "") -> None:
        """The attempt ends; all ranks call it together, and a second call does nothing.

        Args:
            outcome: ``completed``; ``left`` before the last step, which for a chain is the end,
                too; ``to_be_continued``; or ``failed``: then this process may be the only one that
                calls it, and nobody is waited for.
            reason: Why it ends before its last step.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if outcome != "failed":
                self.record_steps()
                self.finish(self._step)
            self.write(AttemptEnded(self._step, outcome, reason, self.watch.lap()))
            if self._ranks.is_first and self._chain is not None:
                self._chain.report_outcome("completed" if outcome == "left" else outcome)
        finally:
            super().close(outcome, reason)
            if self._writer is not None:
                self._writer.close()
            if self._lock is not None:
                self._lock.release()

    def _open(self, fresh: bool) -> None:
        """Take the directory for this attempt, and write down that it begins."""
        directory = self.directory
        check = partial(_refuse_another, self._job, directory)
        lock = directory.claim(to_toml(self._job), check, fresh=fresh)
        try:
            job, name = self._job, f"{self._job.run.name}-{directory.identifier}"
            sinks = open_sinks(job.log, directory, name, job.model_dump())
            if self._display:
                facts = self._facts
                shown = Shown(job.run.name, facts.steps, facts.tokens_per_step, brief=True)
                sinks.append(progress_sink(shown))
            self._writer = RecordWriter(directory.path, 0, directory.next_attempt(), sinks)
        except BaseException:
            lock.release()
            raise
        self._lock = lock
        facts = self._facts
        self.write(
            AttemptStarted(
                fingerprint=fingerprint(self._job),
                world_size=self._ranks.world_size,
                launch=self._ranks.launch,
                parallel=facts.parallel,
                machine=this_machine().to_dict(),
                versions={**versions(), **facts.versions},
                total_steps=facts.steps,
                samples_per_step=facts.samples_per_step,
                tokens_per_step=facts.tokens_per_step,
                parameters=facts.parameters,
                flops_per_token=facts.flops_per_token,
                data={"framework": facts.framework},
            )
        )


def versions() -> dict[str, str]:
    """Versions of what a run depends on, by name."""
    found = {"outlast": __version__, "python": platform.python_version()}
    found["torch"] = torch.__version__
    for name in ("transformers", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def directory_of(job: LoopJob) -> RunDirectory:
    """The directory of the job's run."""
    return RunDirectory(Path(job.run.directory) / job.run.name)


def _refuse_another(job: LoopJob, directory: RunDirectory) -> None:
    """Refuse a directory that holds another run.

    Raises:
        RunError: With what differs and what can be done.
    """
    if not directory.exists():
        return
    remedy = "give this run another name (run.name), or start anew with fresh=True"
    try:
        earlier = loop_job_from_text(directory.job_file.read_text(encoding="utf-8"))
    except (OutlastError, OSError, UnicodeDecodeError):
        raise RunError(
            f"the run directory {directory.path} holds a run of another kind, perhaps one of "
            f"`outlast train`; {remedy}"
        ) from None
    if changed := differences(earlier, job):
        raise RunError(
            f"the run directory {directory.path} belongs to a run with other settings "
            f"({'; '.join(changed)}); set them back, {remedy}"
        )
