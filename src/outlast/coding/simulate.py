"""Step times of coded and uncoded training under models of delay; no torch.

A worker's own share of the batch takes `share_seconds` at slowdown 1. A scheme says when the step
ends and which part of the batch its gradient holds; neither includes the all-reduce.

Coverage is simulated event by event, for many draws at once, by the rules of the protocol:

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
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from outlast.coding.assignment import Spread
from outlast.coding.delays import Array, Delays
from outlast.errors import CodingError

if TYPE_CHECKING:
    from outlast.coding.graph import GraphCode


_HALVINGS = 60
Integers = npt.NDArray[np.int64]
_NOTHING = -1
_WAITING = -2
_NEVER = np.iinfo(np.int64).max
_ENTRIES = 10_000_000


@dataclass(frozen=True, eq=False)
class Steps:
    """Simulated steps.

    Attributes:
        seconds: (draws, steps); infinite where a step never ends.
        kept: (draws, steps) share of the batch's chunks that the gradient holds.
    """

    seconds: Array
    kept: Array

    @classmethod
    def whole(cls, seconds: Array) -> Steps:
        """Steps that lose nothing."""
        return cls(seconds, np.ones(seconds.shape))


def wait_all(delays: Delays, share_seconds: float) -> Steps:
    """Without a code: every worker its own share, and the slowest decides."""
    return Steps.whole(_own(delays, share_seconds).max(axis=-1))


def fixed_load(delays: Delays, share_seconds: float, copies: int) -> Steps:
    """An exact code with d cyclic shares per worker, done when n - d + 1 workers are.

    That is every code that meets the bound d >= s + 1 of Tandon et al. (2017): cyclic repetition,
    cyclic MDS, Reed-Solomon.
    """
    _check_copies(delays, copies)
    cost = np.sum([np.roll(delays.chunk_cost, -i, axis=-1) for i in range(copies)], axis=0)
    ends = delays.start_seconds + delays.slowdown * cost * share_seconds
    return Steps.whole(_smallest(ends, delays.workers - copies + 1))


def repetition(delays: Delays, share_seconds: float, copies: int) -> Steps:
    """Fractional repetition: groups of d workers that compute all of each other's shares.

    The step ends when one worker of every group has finished, without waiting for a fixed number.
    """
    grouped = _grouped(delays, copies)
    cost = grouped.chunk_cost.sum(axis=-1, keepdims=True)
    ends = grouped.start_seconds + grouped.slowdown * cost * share_seconds
    return Steps.whole(ends.min(axis=-1).max(axis=-1))


def erasure_head(delays: Delays, share_seconds: float, copies: int, drop: float) -> Steps:
    """ErasureHead (Wang et al., 2019): fractional repetition that continues without some groups.

    The chunks of the slowest groups are lost, the rest is rescaled.

    Args:
        delays: The draws.
        share_seconds: See above.
        copies: Workers of a group, d.
        drop: Largest share of the groups to lose, rounded down to whole ones.
    """
    grouped = _grouped(delays, copies)
    cost = grouped.chunk_cost.sum(axis=-1, keepdims=True)
    ends = grouped.start_seconds + grouped.slowdown * cost * share_seconds
    return _without_slowest(ends.min(axis=-1), drop)


def repetition_on_demand(delays: Delays, share_seconds: float, copies: int) -> Steps:
    """Fractional repetition in which everybody begins with its own share and stops when it may.

    The t-th share that a worker computes is that of the t-th next worker of its group; the step
    ends when every share is finished by someone.
    """
    grouped = _grouped(delays, copies)
    first = np.full(grouped.slowdown.shape, math.inf)
    cost = np.zeros(grouped.slowdown.shape)
    for place in range(copies):
        cost = cost + np.roll(grouped.chunk_cost, -place, axis=-1)
        ends = grouped.start_seconds + grouped.slowdown * cost * share_seconds
        # Who computes its place-th share finishes the share of the worker so many places on.
        first = np.minimum(first, np.roll(ends, place, axis=-1))
    return Steps.whole(first.max(axis=(-2, -1)))


def drop_slowest(delays: Delays, share_seconds: float, drop: float) -> Steps:
    """Backup workers (Chen et al., 2016): continue without the slowest share of the workers.

    Their chunks are lost, the rest is rescaled.

    Args:
        delays: The draws.
        share_seconds: See above.
        drop: Largest share of the workers to lose, rounded down to whole ones.
    """
    return _without_slowest(_own(delays, share_seconds), drop)


def deadline(
    delays: Delays, share_seconds: float, chunks_per_worker: int, deadline_seconds: float
) -> Steps:
    """DropCompute (Giladi et al., 2023): at the deadline all drop their unfinished microbatches.

    A worker is taken to stop at once, which favours the scheme: the published one stops after the
    microbatch that it is at.
    """
    chunk = delays.slowdown * delays.chunk_cost * (share_seconds / chunks_per_worker)
    with np.errstate(invalid="ignore", over="ignore"):
        # A microbatch that ends at the deadline counts, whatever rounding makes of it.
        finished = np.floor((deadline_seconds - delays.start_seconds) / chunk + 1e-9)
    finished = np.clip(np.nan_to_num(finished, nan=0.0), 0, chunks_per_worker)
    seconds = np.minimum(_own(delays, share_seconds).max(axis=-1), deadline_seconds)
    return Steps(seconds, finished.mean(axis=-1) / chunks_per_worker)


def rebalance(delays: Delays, share_seconds: float, chunks_per_worker: int) -> Steps:
    """Loads after the speeds measured in the step before; the first step has equal loads.

    Whole chunks are dealt so that the step would be shortest, were every worker as fast as in the
    step before. What chunks cost is known beforehand, as sequence lengths are, and every worker
    gets dear and cheap ones.
    """
    cost = delays.chunk_cost.mean(axis=-1, keepdims=True)
    pace = delays.slowdown * cost * (share_seconds / chunks_per_worker)
    seen = delays.slowdown + delays.start_seconds / share_seconds
    loads = np.full(pace.shape, chunks_per_worker, dtype=np.float64)
    if pace.shape[1] > 1:
        loads[:, 1:] = _dealt(seen[:, :-1], chunks_per_worker * delays.workers)
    with np.errstate(invalid="ignore"):
        ends = np.where(loads > 0, delays.start_seconds + loads * pace, 0.0)
    return Steps.whole(ends.max(axis=-1))


def graph_code(
    delays: Delays, share_seconds: float, code: GraphCode, deadline_seconds: float
) -> Steps:
    """A graph code (Glasgow and Wootters, 2021), decoded optimally at the deadline.

    Worker w computes the two chunks at the ends of edge w. The decoded coefficients are a
    projection of 1, so that their sum is that of their squares: with the error of the certificate
    the gradient is as noisy as one of chunks - error chunks of equal weight, which is what is kept.

    Args:
        delays: The draws, of as many workers.
        share_seconds: See above; a chunk is degree / 2 shares.
        code: Of a regular graph of even degree.
        deadline_seconds: Of the step, which ends earlier once all workers have finished.

    Raises:
        CodingError: For another number of workers, or chunks that are no whole number of shares.
    """
    if delays.workers != code.workers:
        raise CodingError(f"delays of {delays.workers} workers, but the code has {code.workers}")
    if delays.workers % code.chunks:
        raise CodingError(
            f"code = {code!r} divides {code.workers} shares into {code.chunks} chunks; take a "
            "regular graph of even degree"
        )
    chunk_cost = delays.chunk_cost.reshape(*delays.chunk_cost.shape[:-1], code.chunks, -1)
    cost = chunk_cost.sum(axis=-1)[..., code.graph.edges].sum(axis=-1)
    ends = delays.start_seconds + delays.slowdown * cost * share_seconds
    alive = ends <= deadline_seconds
    errors = code.errors(alive.reshape(-1, code.workers)).reshape(alive.shape[:-1])
    # Rounding must not make an exact gradient an approximate one.
    kept = np.where(errors <= 1e-9, 1.0, 1.0 - errors / code.chunks)
    return Steps(np.minimum(ends.max(axis=-1), deadline_seconds), np.maximum(kept, 0.0))


def fluid(delays: Delays, share_seconds: float) -> Steps:
    """Lower bound of every scheme without lost chunks: all work divided at will, at no cost."""
    earliest = np.argsort(delays.start_seconds, axis=-1)
    start = np.take_along_axis(delays.start_seconds, earliest, axis=-1)
    speed = 1.0 / np.take_along_axis(delays.slowdown, earliest, axis=-1)
    begins = np.isfinite(start)
    work = delays.chunk_cost.sum(axis=-1, keepdims=True) * share_seconds
    # With the m earliest at work the batch ends at (work + sum speed x start) / sum speed.
    idle = np.cumsum(np.where(begins, start, 0.0) * speed, axis=-1)
    ends = np.where(begins, (work + idle) / np.cumsum(speed, axis=-1), math.inf)
    return Steps.whole(ends.min(axis=-1))


def _own(delays: Delays, share_seconds: float) -> Array:
    return delays.start_seconds + delays.slowdown * delays.chunk_cost * share_seconds


def _without_slowest(ends: Array, drop: float) -> Steps:
    """Without the slowest share of (..., units), each of which holds as much of the batch."""
    if not 0.0 <= drop < 1.0:
        raise CodingError(f"drop = {drop} is not in [0, 1)")
    units = ends.shape[-1]
    kept = units - math.floor(drop * units + 1e-9)
    seconds = _smallest(ends, kept)
    return Steps(seconds, np.full(seconds.shape, kept / units))


def _smallest(ends: Array, count: int) -> Array:
    """Time at which so many workers have finished."""
    return np.asarray(np.partition(ends, count - 1, axis=-1)[..., count - 1])


def _grouped(delays: Delays, copies: int) -> Delays:
    """The arrays as (draws, steps, groups, members)."""
    _check_copies(delays, copies)
    if delays.workers % copies:
        possible = [d for d in range(1, delays.workers + 1) if delays.workers % d == 0]
        nearest = min(possible, key=lambda d: (abs(d - copies), d))
        raise CodingError(
            f"copies = {copies} does not divide the {delays.workers} workers; {nearest} would"
        )
    shape = (*delays.slowdown.shape[:-1], -1, copies)
    return Delays(
        delays.start_seconds.reshape(shape),
        delays.slowdown.reshape(shape),
        delays.chunk_cost.reshape(shape),
    )


def _check_copies(delays: Delays, copies: int) -> None:
    if not 1 <= copies <= delays.workers:
        raise CodingError(f"copies = {copies} is not in [1, {delays.workers}]")


def _dealt(seconds_per_chunk: Array, chunks: int) -> Array:
    """(..., workers) whole loads that sum to `chunks`, the slowest as early as can be.

    The shortest makespan T is the least with sum floor(T / c_w) >= chunks, found by halving. At T
    itself several workers may finish together; as many of those as are needed get one more.
    """
    finite = np.where(np.isfinite(seconds_per_chunk), seconds_per_chunk, math.inf)
    low = np.zeros((*finite.shape[:-1], 1))
    high = chunks * finite.min(axis=-1, keepdims=True) * (1.0 + 1e-9)
    nobody = ~np.isfinite(high)
    high = np.where(nobody, 1.0, high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        enough = np.floor(middle / finite).sum(axis=-1, keepdims=True) >= chunks
        high, low = np.where(enough, middle, high), np.where(enough, low, middle)
    fewer, more = np.floor(low / finite), np.floor(high / finite)
    spare = chunks - fewer.sum(axis=-1, keepdims=True)
    before = np.cumsum(more - fewer, axis=-1) - (more - fewer)
    dealt = fewer + np.clip(spare - before, 0.0, more - fewer)
    return np.asarray(np.where(nobody, chunks / finite.shape[-1], dealt))


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
    if len(parts) == 1:
        return parts[0]
    names = [item.name for item in fields(Covered)]
    return Covered(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


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
