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
"""

from __future__ import annotations

import heapq
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from outlast.cluster.copying import TokenBucket
from outlast.cluster.tasks.schedule import Flow, fair_rates
from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

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
        """Let no transfer continue."""
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


@dataclass
class Transfer:
    """Argument of the function that does a task.

    Attributes:
        name: Of the task, or of the edge ("a -> b").
        kind: Of the task; "move" for an edge.
        size_bytes: What the plan thinks that it moves.
    """

    name: str
    kind: str
    size_bytes: float
    _end: float
    _bucket: TokenBucket = field(default_factory=TokenBucket)

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


Action = Callable[[Transfer], object]
"""Does a task, in a thread of its own; an exception says that it failed."""


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

    Raises:
        ClusterError: When there is no action for a task.
    """

    def __init__(
        self, schedule: Schedule, actions: Mapping[str, Action], *, deadline_seconds: float
    ) -> None:
        self._schedule = schedule
        self._deadline_seconds = deadline_seconds
        self._actions: list[Action] = []
        for activity in schedule.graph.activities:
            action = actions.get(activity.name, actions.get(activity.kind))
            if action is None and (activity.size_bytes or any(o.seconds for o in activity.options)):
                raise ClusterError(
                    f'nothing is given that does "{activity.name}": add an action for its name or '
                    f'for its kind, "{activity.kind}"'
                )
            self._actions.append(action or (lambda transfer: None))
        self._before = _with_node_order(schedule)
        self._shares = Shares(schedule.graph.machine.bytes_per_s)
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
        activities, starts = self._schedule.graph.activities, self._schedule.starts
        after: list[list[int]] = [[] for _ in activities]
        for number, sources in enumerate(self._before):
            for source in sources:
                after[source].append(number)
        missing = [len(item) for item in self._before]
        ready = [(starts[number], number) for number, count in enumerate(missing) if not count]
        heapq.heapify(ready)
        found: dict[int, Happened] = {}
        running: dict[int, float] = {}
        try:
            while (
                (ready or running) and not self._stopped.is_set() and time.monotonic() < self._end
            ):
                wake = self._start(ready, running)
                try:
                    # Not for long, to see whether it was stopped.
                    number, happened = self._ended.get(timeout=max(min(wake, _LOOK_SECONDS), 0.0))
                except queue.Empty:
                    continue
                del running[number]
                found[number] = happened
                for target in after[number] if happened.outcome == "done" else ():
                    missing[target] -= 1
                    if not missing[target]:
                        heapq.heappush(ready, (starts[target], target))
        finally:
            self.stop()
        now = time.monotonic()
        late = now >= self._end
        why = f"the run took longer than {self._deadline_seconds:g} s"
        reason = why if late else "the run was stopped"
        for number, start in running.items():
            # A task under way when the run ended; its thread may still wait for something.
            found[number] = self._happened(number, "failed", (start, now - self._zero), 0, reason)
        failed = [happened.name for happened in found.values() if happened.outcome == "failed"]
        reason = f'"{failed[0]}" failed before' if failed else "the run was stopped"
        for number in range(len(activities)):
            if number not in found:
                found[number] = self._happened(number, "not started", (0.0, 0.0), 0, reason)
        tasks = sorted(found.values(), key=lambda task: (task.start_seconds, task.end_seconds))
        seconds = max((task.end_seconds for task in tasks), default=0.0)
        return Report(tuple(tasks), self._schedule.makespan_seconds, seconds)

    def _start(self, ready: list[tuple[float, int]], running: dict[int, float]) -> float:
        """Start what may start now; returns the seconds until something else may."""
        now = time.monotonic() - self._zero
        later: list[tuple[float, int]] = []
        wake = self._end - self._zero - now
        while ready and len(running) < _MOST_THREADS:
            start, number = heapq.heappop(ready)
            activity = self._schedule.graph.activities[number]
            if now < activity.earliest_seconds:
                later.append((start, number))
                wake = min(wake, activity.earliest_seconds - now)
                continue
            running[number] = now
            # A daemon: what hangs beyond the deadline must not keep the program from its end.
            threading.Thread(
                target=self._do, args=(number,), name=activity.name, daemon=True
            ).start()
        for pair in later:
            heapq.heappush(ready, pair)
        return wake

    def _do(self, number: int) -> None:
        """One task, in its thread."""
        activity, bucket = self._schedule.graph.activities[number], TokenBucket()
        transfer = Transfer(activity.name, activity.kind, activity.size_bytes, self._end, bucket)
        start, error = time.monotonic() - self._zero, ""
        if activity.size_bytes:
            self._shares.begin(number, self._schedule.flow_of(number), bucket)
        try:
            if self._stopped.is_set():
                bucket.stop()
            self._actions[number](transfer)
        except Exception as problem:  # what an action may raise is not known here
            error = f"{type(problem).__name__}: {problem}"
        finally:
            self._shares.end(number)
        times, moved = (start, time.monotonic() - self._zero), bucket.passed_bytes
        happened = self._happened(number, "failed" if error else "done", times, moved, error)
        self._ended.put((number, happened))

    def _happened(
        self, number: int, outcome: Outcome, times: tuple[float, float], moved: int, error: str
    ) -> Happened:
        schedule, activity = self._schedule, self._schedule.graph.activities[number]
        planned = (schedule.starts[number], schedule.ends[number])
        sizes = (activity.size_bytes, moved)
        return Happened(activity.name, activity.kind, outcome, *planned, *times, *sizes, error)


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
