"""When would a job start: the queue simulated forward many times, with what users really do.

Slurm's own estimate takes every wall time at its word and expects nobody else. Here each sample
draws how long jobs really run, given how long they have run already, and what arrives; the
scheduler is simulated with the wall times that were asked for. Quantiles over samples are the
prediction. Where past predictions and starts are known, they are corrected by the quantile of past
errors (conformalised quantiles: Romano, Patterson and Candes, NeurIPS 2019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outlast.cluster.policies.behaviour import Behaviour, World
from outlast.cluster.policies.holes import Backfill
from outlast.cluster.simulate.engine import Simulation
from outlast.cluster.simulate.queue import Queue, forward
from outlast.cluster.simulate.settings import IDEAL
from outlast.cluster.workload.jobs import Array

LEVELS = (0.1, 0.5, 0.9)
HORIZON_SECONDS = 7 * 86_400.0
_SOON = 300.0
"""Waits are compared as logarithms of themselves and these seconds."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StartForecast:
    """When a job of one shape would start if it were submitted now.

    Attributes:
        nodes: That it asks for.
        wall_seconds: That it asks for.
        wait_seconds: (samples,) one wait per sample, ascending in no order.
        p10_seconds: One wait in ten is shorter; likewise the next two.
    """

    nodes: int
    wall_seconds: float
    wait_seconds: Array
    p10_seconds: float
    p50_seconds: float
    p90_seconds: float

    @property
    def certain(self) -> bool:
        """Whether it starts at once in every sample: its nodes are free and nobody is before it."""
        return not self.wait_seconds.max() > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How far past predictions were off, at each level: what logarithms of waits are moved by.

    Attributes:
        p10: For the level 0.1; likewise the next two. 0: nothing is known.
        count: Past predictions that it comes from.
    """

    p10: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    count: int = 0

    @classmethod
    def learnt(cls, predicted: Sequence[StartForecast], waited: Sequence[float]) -> Correction:
        """From past predictions and how long the jobs did wait.

        Jobs whose start was certain say nothing and are left out.
        """
        pairs = [
            (forecast, wait)
            for forecast, wait in zip(predicted, waited, strict=True)
            if not forecast.certain
        ]
        if not pairs:
            return cls()
        moves = []
        for level, name in zip(LEVELS, ("p10_seconds", "p50_seconds", "p90_seconds"), strict=True):
            errors = sorted(_log(wait) - _log(getattr(item, name)) for item, wait in pairs)
            # The quantile that covers one more job, of all n + 1, at least at the level.
            rank = min(math.ceil(level * (len(errors) + 1)), len(errors)) - 1
            moves.append(errors[rank])
        return cls(p10=moves[0], p50=moves[1], p90=moves[2], count=len(pairs))


def forecast_waits(
    queue: Queue,
    shapes: Sequence[tuple[int, float]],
    behaviour: Behaviour | None = None,
    *,
    samples: int = 32,
    seed: int = 0,
    backfill: Backfill = "easy",
    correction: Correction | None = None,
    after: int | None = None,
) -> list[StartForecast]:
    """Predict how long jobs of several shapes would wait, each if it alone were submitted now.

    All shapes meet the same samples, so that their difference is not left to chance.

    Args:
        queue: What runs and waits.
        shapes: (nodes, wall seconds) of each.
        behaviour: Of the queue's users; None: what is assumed without a log.
        samples: Ways in which the queue may go on.
        seed: Of the random numbers: the same prediction for the same seed.
        backfill: Kind of the scheduler.
        correction: From past predictions.
        after: Number of a running job for whose end they wait (``afterany``). It is taken to use
            all of its limit, and waits are counted from there; None, or a job that does not run:
            they could start now.
    """
    knows = behaviour or Behaviour.assumed()
    source = np.random.default_rng(seed)
    worlds = [knows.world(queue, HORIZON_SECONDS, source) for _ in range(samples)]
    before = None if after is None else _running_place(queue, after)
    ready = queue.now_seconds if before is None else float(queue.running_end_seconds[before])
    if before is not None:
        worlds = [_with_end(world, before, ready) for world in worlds]
    waits = np.array(
        [[_wait(queue, world, shape, backfill, ready) for world in worlds] for shape in shapes]
    ).reshape(len(shapes), samples)
    return [
        _forecast(nodes, wall, wait, correction or Correction())
        for (nodes, wall), wait in zip(shapes, waits, strict=True)
    ]


def corrected(forecast: StartForecast, correction: Correction) -> StartForecast:
    """The same prediction with its quantiles moved by what past predictions were off."""
    return _forecast(forecast.nodes, forecast.wall_seconds, forecast.wait_seconds, correction)


def corrected_waits(forecast: StartForecast, correction: Correction) -> Array:
    """The samples, each moved by what past predictions of its rank were off: (samples,) seconds.

    Between the levels of the correction the move is interpolated, beyond them it stays.
    """
    waits = forecast.wait_seconds
    moved = (correction.p10, correction.p50, correction.p90)
    if forecast.certain or not any(moved):
        return waits
    ranks = np.argsort(np.argsort(waits, kind="stable"), kind="stable") + 0.5
    moves = np.interp(ranks / len(waits), LEVELS, moved)
    return np.maximum((waits + _SOON) * np.exp(moves) - _SOON, 0.0)


def _running_place(queue: Queue, job: int) -> int | None:
    """Where a running job stands in the queue's arrays; None where it does not run."""
    if queue.running_jobs is None:
        return None
    places = np.flatnonzero(queue.running_jobs == job)
    return int(places[0]) if len(places) else None


def _with_end(world: World, place: int, end_seconds: float) -> World:
    ends = world.running_end_seconds.copy()
    ends[place] = end_seconds
    return replace(world, running_end_seconds=ends)


def _wait(
    queue: Queue, world: World, shape: tuple[int, float], backfill: Backfill, ready: float
) -> float:
    nodes, wall = shape
    if nodes > queue.nodes:
        return math.inf
    simulation, _ = forward(
        queue, backfill, IDEAL, world.running_end_seconds, world.pending_run_seconds
    )
    job = simulation.submit(nodes, wall, wall, priority=0.5, at=ready)
    _come(simulation, world)
    return simulation.run_until_start(job) - ready


def _come(simulation: Simulation, world: World) -> None:
    """Submit what comes later."""
    later = world.arrivals
    for at, nodes, limit, run in zip(
        later.submit_seconds.tolist(),
        later.nodes.tolist(),
        later.limit_seconds.tolist(),
        later.run_seconds.tolist(),
        strict=True,
    ):
        simulation.submit(nodes, limit, run, at=at)


def _forecast(nodes: int, wall: float, waits: Array, correction: Correction) -> StartForecast:
    low, middle, high = (
        _moved(waits, level, move)
        for level, move in zip(
            LEVELS, (correction.p10, correction.p50, correction.p90), strict=True
        )
    )
    return StartForecast(
        nodes=nodes,
        wall_seconds=wall,
        wait_seconds=waits,
        p10_seconds=min(low, middle),
        p50_seconds=middle,
        p90_seconds=max(high, middle),
    )


def _moved(waits: Array, level: float, move: float) -> float:
    """A quantile of the waits, corrected; where all start at once, so it stays."""
    if not waits.max() > 0.0:
        return 0.0
    if not np.isfinite(waits).all():
        return math.inf
    wait = float(np.quantile(waits, level))
    return max(math.exp(_log(wait) + move) - _SOON, 0.0)


def _log(wait_seconds: float) -> float:
    return math.log(wait_seconds + _SOON)
