"""Step times of schemes whose work is settled before the step begins, all draws at once.

A worker's own share of the batch takes `share_seconds` at slowdown 1. A scheme says when the step
ends and which part of the batch its gradient holds; neither includes the all-reduce.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from outlast.coding.simulate.delays import Array, Delays
from outlast.errors import CodingError

if TYPE_CHECKING:
    from outlast.coding.codes.graph.code import GraphCode

_HALVINGS = 60


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


def fixed_load(
    delays: Delays, share_seconds: float, copies: int, stragglers: int | None = None
) -> Steps:
    """An exact code with d cyclic shares per worker, done when n - s workers are.

    With s = d - 1, the default, that is every code that meets the bound d >= s + 1 of Tandon et al.
    (2017): cyclic repetition, cyclic MDS, Reed-Solomon. Ye and Abbe (2018)'s codes with messages of
    one m-th have s = d - m.
    """
    _check_copies(delays, copies)
    behind = copies - 1 if stragglers is None else stragglers
    if not 0 <= behind < copies:
        raise CodingError(
            f"stragglers = {behind} is not possible with copies = {copies}: at most {copies - 1}"
        )
    cost = np.sum([np.roll(delays.chunk_cost, -i, axis=-1) for i in range(copies)], axis=0)
    ends = delays.start_seconds + delays.slowdown * cost * share_seconds
    return Steps.whole(_smallest(ends, delays.workers - behind))


def repetition(delays: Delays, share_seconds: float, copies: int) -> Steps:
    """Fractional repetition: groups of d workers that compute all of each other's shares.

    The step ends when one worker of every group has finished, without waiting for a fixed number.
    """
    grouped = _grouped(delays, copies)
    cost = grouped.chunk_cost.sum(axis=-1, keepdims=True)
    ends = grouped.start_seconds + grouped.slowdown * cost * share_seconds
    return Steps.whole(ends.min(axis=-1).max(axis=-1))


def erasure_head(delays: Delays, share_seconds: float, copies: int, drop: float) -> Steps:
    """ErasureHead (Wang et al., 2019): fractional repetition that goes on without some groups.

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
    """Backup workers (Chen et al., 2016): go on without the slowest share of the workers.

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


def partial(
    delays: Delays,
    share_seconds: float,
    copies: int,
    deadline_seconds: float,
    *,
    parts: int = 1,
    order: Literal["matching", "random"] = "matching",
    seed: int = 0,
) -> Steps:
    """Coding with the results of partial stragglers (Ramamoorthy, Meng and Girimaji, 2024).

    Worker w holds the shares w to w + d - 1, and computes them one after the other until every
    share is finished by l workers, or until the deadline. A share with fewer copies is kept for so
    many l-ths, which is what the certificate of the decoding says.

    Args:
        delays: The draws.
        share_seconds: See above; a chunk is a share here.
        copies: Shares that each worker holds, d.
        deadline_seconds: What is not finished by then is lost; may be infinite.
        parts: Messages are one so-many-th of a gradient, and shares need so many copies, l.
        order: ``matching`` computes them in that cyclic order, in which the t-th shares of all
            workers are all different; ``random`` in an order of each worker's own.
        seed: Of the random orders.
    """
    _check_copies(delays, copies)
    if not 1 <= parts <= copies:
        raise CodingError(f"parts = {parts} is not in [1, {copies}], as copies = {copies} allow")
    shape = delays.slowdown.shape
    place = np.broadcast_to(np.arange(copies), (*shape, copies))
    if order == "random":
        place = np.argsort(np.random.default_rng(seed).random(place.shape), axis=-1)
    costs = np.stack([np.roll(delays.chunk_cost, -i, axis=-1) for i in range(copies)], axis=-1)
    spent = np.cumsum(np.take_along_axis(costs, place, axis=-1), axis=-1)
    ends = delays.start_seconds[..., None] + delays.slowdown[..., None] * spent * share_seconds
    # ends[..., w, t] is when worker w has finished share w + place[..., w, t].
    of_share = np.empty(ends.shape)
    np.put_along_axis(of_share, place, ends, axis=-1)
    copied = np.sort([np.roll(of_share[..., i], i, axis=-1) for i in range(copies)], axis=0)
    needed = copied[:parts]
    kept = (needed <= deadline_seconds).mean(axis=(0, -1))
    return Steps(np.minimum(needed[-1].max(axis=-1), deadline_seconds), kept)


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
    """What no scheme without lost chunks can beat: all work divided at will, at no cost."""
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
    """When so many workers have finished."""
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
