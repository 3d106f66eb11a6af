"""Execution of a schedule: copies in threads, in the planned order, within bandwidth caps.

    def drain(transfer):                       # e.g. of a checkpoint store, or of staging
        for block in blocks_of(transfer.name, transfer.block_bytes):
            transfer.take(len(block))          # waits as long as the cap asks for
            target.write(block)

    report = Executor(schedule, {"drain": drain, "train": train}, deadline_seconds=3600).run()

What is to be done is given in by the caller as functions; nothing here knows of checkpoints. A
task starts when those before it have ended and its nodes are free in the planned order, be that
sooner or later than planned. Whenever a transfer begins or ends, bandwidth is shared anew: those
that the plan serves first come first.

`TransferPlan` is for copies that are under way anyhow, those of the trainer: training does not wait
for the plan, nor the plan for training; whatever copy is under way takes the bandwidth that its
place in the schedule gives it among the others that are.
"""

from __future__ import annotations

import heapq
import os
import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from outlast.cluster.storage.pace import TokenBucket
from outlast.cluster.tasks.build import run_graph
from outlast.cluster.tasks.planner import plan
from outlast.cluster.tasks.schedule import Flow, fair_rates
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from outlast.cluster.tasks.build import RunFigures
    from outlast.cluster.tasks.schedule import Schedule


LEAST_SHARE = 0.01
"""Share of its cap that a transfer gets even when others should come first: those may hang."""


class Shares:
    """Transfers that come and go; whenever one does, bandwidth is shared anew.

    Those of a smaller level come first, equal ones share fairly. Used from any number of threads.

    Args:
        bytes_per_s: Bandwidth by resource.
        part: What of each rate is this process's, where others carry out the same transfers beside
            it; between 0 and 1.
    """

    def __init__(self, bytes_per_s: Mapping[str, float], part: float = 1.0) -> None:
        self._bytes_per_s = dict(bytes_per_s)
        self._part = part
        self._lock = threading.Lock()
        self._flowing: dict[Hashable, tuple[Flow, TokenBucket]] = {}

    def begin(self, name: Hashable, flow: Flow, bucket: TokenBucket) -> None:
        """Let a transfer join; its bucket has the rate that is its own, until it leaves.

        Args:
            name: Its own.
            flow: What it goes through, with a finite cap.
            bucket: Gets the rate.
        """
        with self._lock:
            self._flowing[name] = (flow, bucket)
            self._share()

    def end(self, name: Hashable) -> None:
        """The transfer has ended; may be called twice."""
        with self._lock:
            if self._flowing.pop(name, None) is not None:
                self._share()

    def stop(self) -> None:
        """Let no transfer go on."""
        with self._lock:
            for _, bucket in self._flowing.values():
                bucket.stop()

    def _share(self) -> None:
        flows = [flow for flow, _ in self._flowing.values()]
        rates = fair_rates(flows, self._bytes_per_s)
        for (flow, bucket), rate in zip(self._flowing.values(), rates, strict=True):
            bucket.set_rate(self._part * max(rate, LEAST_SHARE * flow.cap_bytes_per_s))


_MOST_THREADS = 64
_LOOK_SECONDS = 0.2
Outcome = Literal["done", "failed", "not started"]


class Transfer:
    """Argument of the function that does a task.

    Attributes:
        name: Of the task, or of the edge ("a -> b").
        kind: Of the task; "move" for an edge.
        size_bytes: What the plan thinks that it moves.
        moved_bytes: What it has moved.
    """

    def __init__(self, name: str, kind: str, size_bytes: float, bucket: TokenBucket, end: float):
        self.name, self.kind, self.size_bytes = name, kind, size_bytes
        self._bucket = bucket
        self._end = end

    @property
    def moved_bytes(self) -> int:
        """Bytes taken."""
        return self._bucket.passed_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes to move between two calls of `take`."""
        return self._bucket.block_bytes

    @property
    def left_seconds(self) -> float:
        """Until the deadline of the whole run; a function that waits must not wait longer."""
        return max(self._end - time.monotonic(), 0.0)

    def take(self, size_bytes: int) -> None:
        """Wait until so many bytes may be moved.

        Raises:
            ClusterError: At the deadline, or when the run is given up.
        """
        self._bucket.take(size_bytes, self.left_seconds)


class Action(Protocol):
    """Does a task; an exception says that it failed."""

    def __call__(self, transfer: Transfer, /) -> object:
        """Do it; called in a thread of its own."""


@dataclass(frozen=True, slots=True)
class Happened:
    """A task, as planned and as it was.

    Attributes:
        name: Of the task or edge.
        kind: Of the task; "move" for an edge.
        outcome: "not started" where a task before it failed, or time was up.
        planned_start_seconds: From the beginning.
        planned_end_seconds: From the beginning.
        start_seconds: From the beginning; what was not started has 0.
        end_seconds: From the beginning.
        planned_bytes: What it was to move.
        moved_bytes: What it moved.
        error: Why it failed or was not started, else empty.
    """

    name: str
    kind: str
    outcome: Outcome
    planned_start_seconds: float
    planned_end_seconds: float
    start_seconds: float
    end_seconds: float
    planned_bytes: float
    moved_bytes: int
    error: str = ""

    @property
    def late_seconds(self) -> float:
        """Seconds by which it ended later than planned; negative: earlier."""
        return self.end_seconds - self.planned_end_seconds


@dataclass(frozen=True)
class Report:
    """Result of carrying out a schedule.

    Attributes:
        tasks: By start.
        planned_seconds: The makespan of the plan.
        seconds: What it took.
    """

    tasks: tuple[Happened, ...]
    planned_seconds: float
    seconds: float

    @property
    def problems(self) -> list[str]:
        """One sentence for each task that was not done."""
        return [f"{task.name}: {task.error}" for task in self.tasks if task.outcome != "done"]

    def task(self, name: str) -> Happened:
        """One task or edge."""
        return next(task for task in self.tasks if task.name == name)


class Executor:
    """Carries out a schedule once.

    Args:
        schedule: The plan.
        actions: What does a task, by its name or else by its kind; "move" for data of edges. A
            task without work, bytes and action is done at once.
        deadline_seconds: Longest run; then what is under way is given up.
        told: Called after each task, e.g. to write a log.

    Raises:
        ClusterError: When there is no action for a task.
    """

    def __init__(
        self,
        schedule: Schedule,
        actions: Mapping[str, Action],
        *,
        deadline_seconds: float,
        told: Callable[[Happened], None] | None = None,
    ) -> None:
        self._schedule = schedule
        self._graph = schedule.graph
        self._told = told
        self._deadline_seconds = deadline_seconds
        self._actions: list[Action | None] = []
        for activity in self._graph.activities:
            action = actions.get(activity.name, actions.get(activity.kind))
            if action is None and (activity.size_bytes or any(o.seconds for o in activity.options)):
                raise ClusterError(
                    f'nothing is given that does "{activity.name}": add an action for its name or '
                    f'for its kind, "{activity.kind}"'
                )
            self._actions.append(action)
        self._before = _with_node_order(schedule)
        self._after: list[list[int]] = [[] for _ in self._before]
        for number, sources in enumerate(self._before):
            for source in sources:
                self._after[source].append(number)
        self._shares = Shares(self._graph.machine.bytes_per_s)
        self._stopped = threading.Event()
        self._ended: queue.SimpleQueue[tuple[int, Happened]] = queue.SimpleQueue()

    def stop(self) -> None:
        """Give up what is under way and start nothing more; may be called from any thread."""
        self._stopped.set()
        self._shares.stop()

    def run(self) -> Report:
        """Do all tasks; returns when all are done, failed or given up."""
        self._zero = time.monotonic()
        self._end = self._zero + self._deadline_seconds
        found: dict[int, Happened] = {}
        missing = [len(item) for item in self._before]
        ready = [(self._schedule.starts[n], n) for n, count in enumerate(missing) if not count]
        heapq.heapify(ready)
        running: dict[int, float] = {}
        try:
            while (ready or running) and not (
                self._stopped.is_set() or time.monotonic() >= self._end
            ):
                wake = self._start(ready, running)
                happened = self._next(wake)
                if happened is None:
                    continue
                number, told = happened
                del running[number]
                found[number] = told
                if self._told is not None:
                    self._told(told)
                if told.outcome == "done":
                    for target in self._after[number]:
                        missing[target] -= 1
                        if not missing[target]:
                            heapq.heappush(ready, (self._schedule.starts[target], target))
        finally:
            self.stop()
        for number, start in running.items():
            # A task under way when the run ended; its thread may still wait for something.
            now = time.monotonic()
            reason = "the run was stopped"
            if now >= self._end:
                reason = f"the run took longer than {self._deadline_seconds:g} s"
            found[number] = self._happened(number, "failed", (start, now - self._zero), 0, reason)
        return self._report(found)

    def _start(self, ready: list[tuple[float, int]], running: dict[int, float]) -> float:
        """Start what may start now; returns the seconds until something else may."""
        now = time.monotonic() - self._zero
        later: list[tuple[float, int]] = []
        wake = self._end - self._zero - now
        while ready and len(running) < _MOST_THREADS:
            start, number = heapq.heappop(ready)
            earliest = self._graph.activities[number].earliest_seconds
            if now < earliest:
                later.append((start, number))
                wake = min(wake, earliest - now)
                continue
            running[number] = now
            # A daemon: what hangs beyond the deadline must not keep the program from its end.
            threading.Thread(
                target=self._do,
                args=(number,),
                name=self._graph.activities[number].name,
                daemon=True,
            ).start()
        for pair in later:
            heapq.heappush(ready, pair)
        return wake

    def _next(self, seconds: float) -> tuple[int, Happened] | None:
        """Wait for the next end, at most so many seconds; None now and then, to see `stop`."""
        try:
            return self._ended.get(timeout=max(min(seconds, _LOOK_SECONDS), 0.0))
        except queue.Empty:
            return None

    def _do(self, number: int) -> None:
        """One task, in its thread."""
        activity, action = self._graph.activities[number], self._actions[number]
        bucket = TokenBucket()
        start = time.monotonic() - self._zero
        error = ""
        if activity.size_bytes:
            self._shares.begin(number, flow_of(self._schedule, number), bucket)
        try:
            if self._stopped.is_set():
                bucket.stop()
            if action is not None:
                action(
                    Transfer(activity.name, activity.kind, activity.size_bytes, bucket, self._end)
                )
        except Exception as problem:  # what an action may raise is not known here
            error = f"{type(problem).__name__}: {problem}"
        finally:
            self._shares.end(number)
        end = time.monotonic() - self._zero
        outcome: Outcome = "failed" if error else "done"
        moved = bucket.passed_bytes
        self._ended.put((number, self._happened(number, outcome, (start, end), moved, error)))

    def _happened(
        self, number: int, outcome: Outcome, times: tuple[float, float], moved: int, error: str
    ) -> Happened:
        activity = self._graph.activities[number]
        return Happened(
            activity.name,
            activity.kind,
            outcome,
            self._schedule.starts[number],
            self._schedule.ends[number],
            *times,
            activity.size_bytes,
            moved,
            error,
        )

    def _report(self, found: dict[int, Happened]) -> Report:
        failed = [happened.name for happened in found.values() if happened.outcome == "failed"]
        reason = f'"{failed[0]}" failed before' if failed else "the run was stopped"
        for number in range(len(self._graph.activities)):
            if number not in found:
                found[number] = self._happened(number, "not started", (0.0, 0.0), 0, reason)
        seconds = max((happened.end_seconds for happened in found.values()), default=0.0)
        tasks = sorted(
            found.values(), key=lambda happened: (happened.start_seconds, happened.end_seconds)
        )
        return Report(tuple(tasks), self._schedule.makespan_seconds, seconds)


def flow_of(schedule: Schedule, number: int) -> Flow:
    """Flow of an activity that moves bytes."""
    activity, names = schedule.graph.activities[number], list(schedule.graph.machine.bytes_per_s)
    via = tuple(names[resource] for resource in activity.via)
    return Flow(via, activity.cap_bytes_per_s, schedule.levels[number])


def _with_node_order(schedule: Schedule) -> list[list[int]]:
    """Predecessors of each task: those before it, and those that have its nodes before it."""
    before = [list(sources) for sources in schedule.graph.before]
    last: dict[tuple[int, int], int] = {}
    place = {number: at for at, number in enumerate(schedule.graph.order)}
    numbers = sorted(
        place, key=lambda number: (schedule.starts[number], schedule.ends[number], place[number])
    )
    for number in numbers:
        row = schedule.row(schedule.graph.activities[number].name)
        for node in row.nodes:
            previous = last.get((row.group, node))
            if previous is not None and previous not in before[number]:
                before[number].append(previous)
            last[row.group, node] = number
    return before


def copy_file(source: Path, target: Path, transfer: Transfer) -> int:
    """Copy a file within the cap of a transfer; returns its bytes.

    The target appears whole or not at all, and is on disk when this returns.

    Raises:
        OSError: When a file cannot be read or written.
        ClusterError: At the deadline, or when the run is given up.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
    size = 0
    try:
        with source.open("rb") as reader, draft.open("wb") as writer:
            while block := reader.read(transfer.block_bytes):
                transfer.take(len(block))
                writer.write(block)
                size += len(block)
            writer.flush()
            os.fsync(writer.fileno())
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return size


@dataclass(frozen=True)
class TransferPlan:
    """The transfers of a planned run; travels to other processes.

    Attributes:
        bytes_per_s: Bandwidth by resource, of all that use it together.
        copies: For each tier, its copies by the step that was saved.
        stage_in: Of the data before the first step; None: nothing is staged.
    """

    bytes_per_s: Mapping[str, float]
    copies: Mapping[str, Mapping[int, Flow]]
    stage_in: Flow | None

    def copy(self, tier: str, step: int) -> Flow:
        """Flow of the copy of a step to a tier.

        A save of another step than those planned, as that of a stop, has the place of the nearest.

        Raises:
            ClusterError: For a tier that is not planned.
        """
        planned = self.copies.get(tier)
        if not planned:
            raise ClusterError(f'no copies to a tier named "{tier}" are planned: add such a tier')
        return planned[min(planned, key=lambda item: (abs(item - step), item))]


def transfer_plan(figures: RunFigures) -> TransferPlan:
    """Plan a run and keep what its copies need of the plan.

    Raises:
        ClusterError: For figures without a meaning.
    """
    schedule = plan(run_graph(figures))
    numbers = {activity.name: number for number, activity in enumerate(schedule.graph.activities)}
    saves = -(-figures.steps // figures.save_every_steps) if figures.save_bytes else 0
    copies: dict[str, dict[int, Flow]] = {}
    for tier in figures.tiers:
        copies[tier.name] = {
            min(save * figures.save_every_steps, figures.steps): flow_of(
                schedule, numbers[f"drain {save} to {tier.name}"]
            )
            for save in range(tier.every, saves + 1, tier.every)
        }
    staged = numbers.get("stage-in")
    return TransferPlan(
        dict(figures.bytes_per_s), copies, None if staged is None else flow_of(schedule, staged)
    )
