"""Append-only event logs, one file per rank.

Rank 0 writes ``events.jsonl`` (step metrics and everything else), other ranks write
``events.rank<N>.jsonl``. A line is one ``write`` to a file opened with O_APPEND: a killed process
or a full disk leaves at most one torn line, which the next line that can be written closes first.

run = read_run("runs/quickstart")
run.losses()          # [(step, nats per token), ...], each step once
run.seconds()         # {"compute": 101.2, "data": 0.4, ..., "lost": 0.0}
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from outlast.errors import RunError
from outlast.records.directory import RunDirectory
from outlast.records.events import (
    FORMAT_VERSION,
    PURPOSES,
    AttemptEnded,
    AttemptStarted,
    EnergyMeasured,
    Event,
    RanksChanged,
    StateRecovered,
    StepsDone,
    Tensorized,
    TrainingStarted,
    Warned,
    finite,
    from_fields,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.records.sinks import Sink


def event_file(directory: Path, rank: int) -> Path:
    """The event log of `rank` in the run directory."""
    return directory / ("events.jsonl" if rank == 0 else f"events.rank{rank}.jsonl")


class RecordWriter:
    """Writes one rank's events and hands each to the sinks.

    Args:
        directory: The run directory, which exists.
        rank: This process's rank.
        attempt: Which start of the run this is, from 1.
        sinks: Other places that want the events, e.g. TensorBoard. One that fails is left out
            from then on, and a `Warned` event says so.

    Raises:
        RunError: When the event log cannot be opened.
    """

    def __init__(
        self, directory: Path, rank: int = 0, attempt: int = 1, sinks: Sequence[Sink] = ()
    ) -> None:
        self.path = event_file(directory, rank)
        self.rank = rank
        self.attempt = attempt
        self._sinks = list(sinks)
        self._lost = 0
        self._closed = False
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._torn = False
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            self._torn = file.read(1) != b"\n"
        try:
            self._descriptor = os.open(self.path, flags, 0o644)
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {error.strerror}") from None

    @property
    def lost_events(self) -> int:
        """Events that could not be written, because the disk was full for example."""
        return self._lost

    def write(self, event: Event) -> None:
        """Append `event`. A full disk never stops training: the loss is counted instead.

        So is an event that comes after `close`.
        """
        if self._descriptor < 0:
            self._lost += 1
            return
        line = {
            "v": FORMAT_VERSION,
            "kind": event.kind,
            "time": time.time(),
            "monotonic": time.monotonic(),
            "rank": self.rank,
            "attempt": self.attempt,
            **finite(vars(event)),
        }
        content = (json.dumps(line, allow_nan=False) + "\n").encode()
        content = b"\n" + content if self._torn else content
        try:
            written = os.write(self._descriptor, content)
        except OSError:
            written = 0
        if written < len(content):
            self._lost += 1
            # A disk that fills up takes the beginning of a line without an error.
            self._torn = self._torn or written > 0
        else:
            self._torn = False
        for sink in [*self._sinks]:
            if sink not in self._sinks:  # it failed meanwhile, with the warning about another
                continue
            try:
                sink.write(event)
            except Exception as error:  # a display must not end the training that it shows
                self._drop(sink, error)

    def _drop(self, sink: Sink, error: Exception) -> None:
        self._sinks.remove(sink)
        self.write(Warned(f"{type(sink).__name__} failed and gets no more events: {error}"))

    def flush(self) -> None:
        """Force what was written to the disk, as far as the disk can."""
        with contextlib.suppress(OSError):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Flush and close the file and the sinks; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        while self._sinks:
            sink = self._sinks[0]
            try:
                sink.close()
                self._sinks.remove(sink)
            except Exception as error:  # the other sinks and the file still want to be closed
                self._drop(sink, error)
        self.flush()
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        # Another file may get its number.
        self._descriptor = -1


LOST = "lost"
E = TypeVar("E", bound=Event)
_ENVELOPE = ("v", "kind", "time", "monotonic", "rank", "attempt")


@dataclass(frozen=True)
class Record:
    """One event with its envelope.

    Attributes:
        time: Wall clock, seconds since the epoch.
        monotonic: Monotonic clock of the writing host, seconds.
        rank: Who wrote it.
        attempt: Which start of the run, from 1.
        event: The event itself.
    """

    time: float
    monotonic: float
    rank: int
    attempt: int
    event: Event


@dataclass(frozen=True)
class Attempt:
    """One start of the run, as rank 0 saw it.

    Attributes:
        start_time: Wall clock when the process began, seconds since the epoch.
        end_time: Wall clock of the last event.
        first_step: Steps already done when it was ready, or None when it never was.
        outcome: ``completed``, ``to_be_continued``, ``failed`` or ``died``.
    """

    number: int
    start_time: float
    end_time: float
    first_step: int | None
    world_size: int
    outcome: str


@dataclass(frozen=True)
class Run:
    """A run's directory and its events, oldest first, over all ranks."""

    path: Path
    job_text: str
    records: list[Record]

    @property
    def name(self) -> str:
        """The run directory's name."""
        return self.path.name

    def of(self, kind: type[E], rank: int = 0) -> list[tuple[Record, E]]:
        """All events of this kind that `rank` wrote, with their records."""
        return [
            (record, record.event)
            for record in self.records
            if record.rank == rank and isinstance(record.event, kind)
        ]

    @cached_property
    def attempts(self) -> list[Attempt]:
        """All starts of the run, oldest first."""
        found = []
        own = [record for record in self.records if record.rank == 0]
        for number in sorted({record.attempt for record in own}):
            records = [record for record in own if record.attempt == number]
            start_time, first_step, world_size, outcome = records[0].time, None, 1, "died"
            for record in records:
                match record.event:
                    case AttemptStarted(world_size=size):
                        world_size = size
                    case TrainingStarted(step=step, seconds=seconds):
                        start_time, first_step = record.time - seconds, step
                    case AttemptEnded(outcome=ended):
                        outcome = ended
                    case _:
                        pass
            end_time = records[-1].time
            found.append(Attempt(number, start_time, end_time, first_step, world_size, outcome))
        return found

    @property
    def ranks(self) -> RanksChanged | None:
        """The change from which the newest attempt's ranks are; None: they are the job's."""
        trained = self.of(TrainingStarted)
        changes = self.of(RanksChanged)
        newest = trained[-1][0].attempt if trained else 0
        return changes[-1][1] if changes and changes[-1][0].attempt == newest else None

    @property
    def tensorized(self) -> Tensorized | None:
        """The layers that were replaced, with the size of a model of the newest ranks."""
        found, ranks = self.of(Tensorized), self.ranks
        if not found or ranks is None:
            return found[-1][1] if found else None
        return replace(
            found[-1][1], parameters=ranks.parameters, flops_per_token=ranks.flops_per_token
        )

    @property
    def batch_sizes(self) -> dict[int, tuple[int, int]]:
        """Of each attempt that trained, its first step and the samples of a step."""
        sizes = {
            record.attempt: event.samples_per_step for record, event in self.of(AttemptStarted)
        }
        return {
            attempt.number: (attempt.first_step, sizes[attempt.number])
            for attempt in self.attempts
            if attempt.first_step is not None and attempt.number in sizes
        }

    def completion(self, steps: int = 0) -> str:
        """In words, where and when the run was complete; empty where its last end was another.

        Starts that found it so, and did nothing, have not completed it. A run that was complete
        with fewer than `steps` steps is not.
        """
        complete: tuple[int, float] | None = None
        for record, event in self.of(AttemptEnded):
            if event.outcome != "completed":
                complete = None
            elif complete is None or event.step != complete[0]:
                complete = event.step, record.time
        if complete is None or complete[0] < steps:
            return ""
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(complete[1]))
        return f"{self.path} is complete: step {complete[0]:,}, since {when}"

    def steps(self) -> list[tuple[Record, StepsDone]]:
        """The step events that count.

        Left out are those that reach beyond the step from which a later attempt continued, or to
        which the same one went back: their work was lost, and is done again.
        """
        return [
            (record, event)
            for record, event in self.of(StepsDone)
            if event.step <= self._kept_of(record)
        ]

    def _kept_of(self, record: Record) -> float:
        """The last step that counts of those that were done when `record` was written."""
        later = (
            step
            for attempt, time, step in self._gone_back
            if attempt == record.attempt and time > record.monotonic
        )
        return min([self.kept_until[record.attempt], *later])

    @cached_property
    def _gone_back(self) -> list[tuple[int, float, int]]:
        """Attempt, time and step of each return to an earlier step within an attempt."""
        return [
            (record.attempt, record.monotonic, event.step)
            for record, event in self.of(StateRecovered)
            if event.cause
        ]

    def share_redone(self, record: Record, event: StepsDone | EnergyMeasured) -> float:
        """Share of the steps of `event` that a later attempt has done again."""
        beyond = max(event.step - self._kept_of(record), 0)
        return min(beyond, event.steps) / event.steps if event.steps else 0.0

    def losses(self) -> list[tuple[int, float]]:
        """Training loss by step: (steps done, mean loss in nats per token)."""
        return [(event.step, event.loss) for _, event in self.steps()]

    def seconds(self) -> dict[str, float]:
        """Wall seconds of all attempts by purpose.

        The purposes are those of `PURPOSES` and ``lost``: the time of steps that a later attempt
        did again (of an event that covers both kinds of step, the share of the steps). Their sum
        is the time from each attempt's process start to its last lap; an attempt that died before
        it was ready counts nothing.
        """
        total = dict.fromkeys([*PURPOSES, LOST], 0.0)
        for record, event in self.of(Event):
            match event:
                case TrainingStarted(seconds=seconds):
                    first = record.attempt == self.attempts[0].number
                    total["startup" if first else "restart"] += seconds
                case StepsDone():
                    share_lost = self.share_redone(record, event)
                    for purpose, value in event.seconds.items():
                        total[purpose] = total.get(purpose, 0.0) + value * (1 - share_lost)
                        total[LOST] += value * share_lost
                case AttemptEnded(seconds=seconds):
                    for purpose, value in seconds.items():
                        total[purpose] = total.get(purpose, 0.0) + value
                case _:
                    pass
        return total

    @cached_property
    def kept_until(self) -> dict[int, float]:
        """For each attempt, the lowest step from which a later one resumed; infinity for none."""
        lowest, found = math.inf, {}
        for attempt in reversed(self.attempts):
            found[attempt.number] = lowest
            lowest = min(lowest, math.inf if attempt.first_step is None else attempt.first_step)
        return found


def read_run(path: Path | str) -> Run:
    """Read the run directory at `path`.

    A torn or damaged line is skipped: after a ``kill -9`` or a full disk the rest still counts.

    Raises:
        RunError: When `path` is not a run directory.
    """
    directory = RunDirectory(Path(path))
    if not directory.exists():
        raise _no_run(path)
    files = [event_file(directory.path, 0), *sorted(directory.path.glob("events.rank*.jsonl"))]
    stamped: list[tuple[tuple[int, float], Record]] = []
    try:
        for file in filter(Path.exists, files):
            # The wall clock may be set back while a run writes; its events do not change places.
            latest = (0, -math.inf)
            with file.open("rb") as lines:
                for record in filter(None, map(_parse, lines)):
                    latest = max(latest, (record.attempt, record.time))
                    stamped.append((latest, record))
        job_text = directory.job_file.read_text(encoding="utf-8")
    except OSError as error:
        raise RunError(f"{error.filename} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RunError(
            f"{directory.job_file} is damaged: it is not UTF-8 text; restore it from a copy"
        ) from None
    stamped.sort(key=lambda item: item[0])
    return Run(directory.path, job_text, [record for _, record in stamped])


class RunFollower:
    """Reads what is added to the records of a run, by any process, also on another host.

    Args:
        path: The run directory.

    Raises:
        RunError: When `path` is not a run directory.
    """

    def __init__(self, path: Path) -> None:
        self.directory = RunDirectory(path)
        if not self.directory.exists():
            raise _no_run(path)
        # Of each file its inode, bytes read, and a line that has no end yet.
        self._read: dict[Path, tuple[int, int, bytes]] = {}

    def new_records(self) -> list[Record]:
        """The records since the last call, those of each process in order.

        A run that was started anew in the same place (`--fresh`) is read from its beginning.

        Raises:
            RunError: When a file cannot be read.
        """
        folder, found = self.directory.path, list[Record]()
        for file in [event_file(folder, 0), *sorted(folder.glob("events.rank*.jsonl"))]:
            try:
                with file.open("rb") as opened:
                    inode, offset, torn = self._read.get(file, (0, 0, b""))
                    status = os.fstat(opened.fileno())
                    if status.st_ino != inode or status.st_size < offset:
                        offset, torn = 0, b""
                    opened.seek(offset)
                    content = opened.read()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise RunError(f"{file} cannot be read: {error.strerror}") from None
            *lines, rest = (torn + content).split(b"\n")
            self._read[file] = status.st_ino, offset + len(content), rest
            found += filter(None, map(_parse, lines))
        return found


def _no_run(path: Path | str) -> RunError:
    return RunError(
        f"{path} is not a run directory: it has no job.toml; "
        "name a folder that `outlast train` made, e.g. runs/quickstart"
    )


def _parse(line: bytes) -> Record | None:
    try:
        fields: dict[str, Any] = json.loads(line)
        time, monotonic = float(fields["time"]), float(fields["monotonic"])
        rank, attempt, kind = int(fields["rank"]), int(fields["attempt"]), str(fields["kind"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    payload = {name: value for name, value in fields.items() if name not in _ENVELOPE}
    event = from_fields(kind, payload)
    return None if event is None else Record(time, monotonic, rank, attempt, event)
