"""Coverage, event by event, for many draws at once.

The rules are those of the protocol:

- A rank computes its own chunks first, in order, without those that others have finished.
- An idle rank takes, among the chunks that it holds and nobody has finished, the one that fewest
  have begun, of the owner with fewest finished chunks. If somebody is working on it already, the
  rank waits first, for `patience` times the seconds of a chunk of its own.
- Who works on a chunk that another has finished gives it up, at the next point where it can.
- The step ends when every chunk is finished by someone.

Since a rank never puts a chunk of another before its own, and gives a chunk up only when it is
finished, no chunk is finished later than its owner alone would have: whatever the delays, the step
is never longer than without coverage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outlast.coding.simulate.delays import Array, Delays
from outlast.coding.spread import Spread
from outlast.errors import CodingError

Integers = npt.NDArray[np.int64]

_NOTHING = -1
_WAITING = -2
_NEVER = np.iinfo(np.int64).max
_ENTRIES = 10_000_000


@dataclass(frozen=True, eq=False)
class Covered:
    """The course of many steps; a draw is one step of one stretch, in the order of `Delays.flat`.

    Attributes:
        seconds: (draws,) until every chunk was finished, or the deadline; infinite where chunks
            stay unfinished and there is no deadline.
        last_seconds: (draws,) when the last of the finished chunks was.
        uncovered: (draws,) chunks that nobody finished.
        finished: (draws, workers) chunks of which each rank was the first to finish.
        helped: (draws,) chunks that another than their owner finished first.
        duplicates: (draws,) times that a chunk was begun which somebody had begun before.
    """

    seconds: Array
    last_seconds: Array
    uncovered: Integers
    finished: Integers
    helped: Integers
    duplicates: Integers

    @property
    def shares(self) -> Array:
        """(draws, workers) share of the batch that each rank's results make up."""
        chunks = self.finished.sum(axis=1) + self.uncovered
        return np.asarray(self.finished / chunks[:, None])


def cover(
    held: Spread,
    delays: Delays,
    chunk_seconds: float,
    *,
    patience: float = 0.25,
    granularity: float = 0.0,
    deadline_seconds: float = math.inf,
) -> Covered:
    """Steps with coverage under these delays.

    Args:
        held: Who holds which chunks.
        delays: Of as many workers.
        chunk_seconds: Of a chunk at slowdown 1, its claim included.
        patience: Idle time before a chunk is begun a second time, in seconds of an own chunk.
        granularity: Share of a chunk after which a rank can notice that it is finished: 0 at once,
            1 only when it has computed it to the end.
        deadline_seconds: The step ends here at the latest.

    Raises:
        CodingError: For delays of another number of workers, or settings out of range.
    """
    if delays.workers != held.workers:
        raise CodingError(f"delays of {delays.workers} workers, but {held.workers} hold chunks")
    if not chunk_seconds > 0.0 or not patience >= 0.0 or not 0.0 <= granularity <= 1.0:
        raise CodingError(
            f"chunk_seconds = {chunk_seconds}, patience = {patience} and granularity = "
            f"{granularity} are not above 0, at least 0, and from 0 to 1"
        )
    start, slowdown, cost = delays.flat()
    size = max(_ENTRIES // held.chunks, 1)
    parts = []
    for first in range(0, len(start), size):
        some = slice(first, first + size)
        race = _Race(held, start[some], slowdown[some] * chunk_seconds, cost[some])
        parts.append(race.run(patience, granularity, deadline_seconds))
    return parts[0] if len(parts) == 1 else _joined(parts)


class _Race:
    """The state of all draws' steps. Each turn handles the next event of every draw.

    An event is the end of a rank's computation or of its waiting; `at` holds when each rank's next
    one is, `doing` the chunk, or that it waits or has nothing to do.
    """

    def __init__(self, held: Spread, start: Array, pace: Array, cost: Array) -> None:
        draws, workers = start.shape
        self.held = held
        self.start, self.pace, self.cost = start, pace, cost
        self.at = start.copy()
        self.doing = np.full((draws, workers), _NOTHING, dtype=np.int64)
        self.done = np.zeros((draws, held.chunks), dtype=bool)
        self.begun = np.zeros((draws, held.chunks), dtype=np.int64)
        self.progress = np.zeros((draws, workers), dtype=np.int64)
        self.left = np.full(draws, held.chunks, dtype=np.int64)
        self.number = np.arange(draws)
        self.outcome = Covered(
            np.full(draws, math.inf),
            np.zeros(draws),
            np.full(draws, held.chunks, dtype=np.int64),
            np.zeros((draws, workers), dtype=np.int64),
            np.zeros(draws, dtype=np.int64),
            np.zeros(draws, dtype=np.int64),
        )

    def run(self, patience: float, granularity: float, deadline: float) -> Covered:
        """All steps to their ends."""
        self.skip_own(deadline)
        while len(self.number):
            worker = np.argmin(self.at, axis=1)
            every = np.arange(len(worker))
            now = self.at[every, worker]
            over = ~((now <= deadline) & (now < math.inf))
            if over.any():
                self.close(over, deadline)
                continue
            self.finish(every, worker, now, granularity)
            ended = self.left == 0
            if ended.any():
                self.outcome.seconds[self.number[ended]] = now[ended]
                self.outcome.uncovered[self.number[ended]] = 0
                going = ~ended
                worker, now = worker[going], now[going]
                self.keep(going)
            self.begin(np.arange(len(worker)), worker, now, patience)
        return self.outcome

    def skip_own(self, deadline: float) -> None:
        """Go to the time when the first rank is idle: until then all compute their own chunks."""
        count = self.held.chunks_per_worker
        with np.errstate(invalid="ignore"):
            own = self.pace * self.cost
            first = np.minimum((self.start + count * own).min(axis=1), deadline)[:, None]
            before = np.ceil((first - self.start) / own) - 1.0
        started = (self.start < first) & np.isfinite(first)
        finished = np.where(started & np.isfinite(own), np.clip(before, 0, count - 1), 0)
        finished = finished.astype(np.int64)
        self.progress[:] = finished
        self.left -= finished.sum(axis=1)
        owner = np.arange(self.held.chunks) // count
        position = np.arange(self.held.chunks) % count
        self.done = position < finished[:, owner]
        self.begun = (position < finished[:, owner] + started[:, owner]).astype(np.int64)
        self.doing = np.where(started, np.arange(self.start.shape[1]) * count + finished, _NOTHING)
        self.at = np.where(started, self.start + (finished + 1) * own, self.start)
        self.outcome.finished[:] = finished
        last = np.where(finished > 0, self.start + finished * own, 0.0)
        self.outcome.last_seconds[:] = np.where(finished > 0, last, 0.0).max(axis=1)

    def finish(self, every: Integers, worker: Integers, now: Array, granularity: float) -> None:
        """Count the chunks that end here, and let those who work on them, too, know."""
        chunk = self.doing[every, worker]
        fresh = (chunk >= 0) & ~self.done[every, chunk]
        draw, worker, chunk, now = every[fresh], worker[fresh], chunk[fresh], now[fresh]
        owner = chunk // self.held.chunks_per_worker
        self.done[draw, chunk] = True
        self.left[draw] -= 1
        self.progress[draw, owner] += 1
        number = self.number[draw]
        self.outcome.finished[number, worker] += 1
        self.outcome.helped[number] += owner != worker
        self.outcome.last_seconds[number] = now
        others = self.held.holder_table[chunk]
        also = (self.doing[draw[:, None], others] == chunk[:, None]) & (others != worker[:, None])
        at, which = np.nonzero(also)
        if not len(at):
            return
        draw, chunk, other = draw[at], chunk[at], others[at, which]
        ends = self.at[draw, other]
        duration = self.pace[draw, other] * self.cost[draw, owner[at]]
        notices = now[at]
        if granularity > 0.0:
            with np.errstate(invalid="ignore"):
                begun = ends - duration
                part = granularity * duration
                notices = np.minimum(begun + np.ceil((notices - begun) / part) * part, ends)
        self.at[draw, other] = np.where(np.isfinite(ends), notices, math.inf)

    def begin(self, every: Integers, worker: Integers, now: Array, patience: float) -> None:
        """Let each of these ranks choose what to do next."""
        held = self.held
        count = held.chunks_per_worker
        own = worker[:, None] * count + np.arange(count)
        open_own = ~self.done[every[:, None], own]
        chunk = own[every, np.argmax(open_own, axis=1)]
        idle = np.flatnonzero(~open_own.any(axis=1))
        waits = np.zeros(len(every), dtype=bool)
        if len(idle):
            chunk[idle] = self.backup(idle, worker[idle])
            waits[idle] = (self.doing[idle, worker[idle]] != _WAITING) & (chunk[idle] != _NOTHING)
            waits &= self.begun[every, chunk] > 0
        works = (chunk != _NOTHING) & ~waits
        until = np.where(chunk == _NOTHING, math.inf, now + patience * self.pace[every, worker])
        self.at[every, worker] = until
        self.doing[every, worker] = np.where(chunk == _NOTHING, _NOTHING, _WAITING)
        draw, worker, chunk = every[works], worker[works], chunk[works]
        self.outcome.duplicates[self.number[draw]] += self.begun[draw, chunk] > 0
        self.begun[draw, chunk] += 1
        self.doing[draw, worker] = chunk
        cost = self.cost[draw, chunk // count]
        self.at[draw, worker] = now[works] + self.pace[draw, worker] * cost

    def backup(self, draw: Integers, worker: Integers) -> Integers:
        """The chunk of another that each rank would take, or `_NOTHING`."""
        candidates = self.held.backup_table[worker]
        if not candidates.shape[1]:
            return np.full(len(draw), _NOTHING, dtype=np.int64)
        rows = draw[:, None]
        count = self.held.chunks_per_worker
        score = self.begun[rows, candidates] * (count + 1)
        score += self.progress[rows, candidates // count]
        score[self.done[rows, candidates]] = _NEVER
        best = np.argmin(score, axis=1)
        first = np.arange(len(draw))
        return np.where(score[first, best] == _NEVER, _NOTHING, candidates[first, best])

    def close(self, over: npt.NDArray[np.bool_], deadline: float) -> None:
        """End the steps in which nothing happens any more before the deadline."""
        number = self.number[over]
        self.outcome.seconds[number] = deadline
        self.outcome.uncovered[number] = self.left[over]
        self.keep(~over)

    def keep(self, going: npt.NDArray[np.bool_]) -> None:
        """Forget the steps that have ended."""
        for name in ("pace", "cost", "at", "doing", "done", "begun", "progress", "left", "number"):
            setattr(self, name, getattr(self, name)[going])


def _joined(parts: list[Covered]) -> Covered:
    return Covered(
        np.concatenate([part.seconds for part in parts]),
        np.concatenate([part.last_seconds for part in parts]),
        np.concatenate([part.uncovered for part in parts]),
        np.concatenate([part.finished for part in parts]),
        np.concatenate([part.helped for part in parts]),
        np.concatenate([part.duplicates for part in parts]),
    )
