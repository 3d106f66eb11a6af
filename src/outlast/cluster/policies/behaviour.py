"""What users of a queue do: how much of their wall times jobs use, and what arrives.

Learnt from a log of past jobs, or assumed where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outlast.cluster.simulate.queue import Queue
from outlast.cluster.workload.jobs import Array, Integers, Workload

DAY = 86_400.0
_FEWEST = 40
"""Past jobs below which a class of limits is not told apart."""
_CLASSES = 8
_EMPTY = np.zeros(0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Arrivals:
    """Jobs that come later.

    Attributes:
        submit_seconds: (jobs,) on the queue's clock, ascending.
        nodes: (jobs,)
        limit_seconds: (jobs,)
        run_seconds: (jobs,) how long each really runs.
    """

    submit_seconds: Array
    nodes: Integers
    limit_seconds: Array
    run_seconds: Array


NOTHING = Arrivals(
    submit_seconds=_EMPTY, nodes=np.zeros(0, np.int64), limit_seconds=_EMPTY, run_seconds=_EMPTY
)


@dataclass(frozen=True, eq=False, kw_only=True)
class World:
    """One way in which a queue may go on.

    Attributes:
        running_end_seconds: (running,) when each running job ends.
        pending_run_seconds: (pending,) how long each pending job runs.
        arrivals: What comes later.
    """

    running_end_seconds: Array
    pending_run_seconds: Array
    arrivals: Arrivals = NOTHING


@dataclass(frozen=True, eq=False, kw_only=True)
class Behaviour:
    """What is known of a queue's users.

    Attributes:
        edges: (classes - 1,) limits in seconds that part the classes.
        used: (classes,) of each class of limits, sorted shares of the wall time that jobs used.
        past: Past jobs from which those that come later are drawn; None: nothing comes.
    """

    edges: Array
    used: tuple[Array, ...]
    past: Workload | None = None

    @classmethod
    def assumed(cls) -> Behaviour:
        """Without a log: run time over request is uniform and one job in ten meets its limit.

        As Tsafrir, Etsion and Feitelson (JSSPP 2005) describe users' estimates.
        """
        return cls(edges=_EMPTY, used=(np.append((np.arange(90) + 0.5) / 90.0, np.ones(10)),))

    @classmethod
    def learnt(cls, past: Workload, *, arrivals: bool = True) -> Behaviour:
        """From a log of jobs that have ended.

        Args:
            past: The log; limits that are infinite say nothing of shares.
            arrivals: Whether jobs like these come later too: only where the log has everybody's.
        """
        known = np.isfinite(past.limit_seconds)
        limits = past.limit_seconds[known]
        if len(limits) < _FEWEST:
            base = cls.assumed()
            return cls(edges=base.edges, used=base.used, past=past if arrivals else None)
        shares = np.minimum(past.run_seconds[known] / limits, 1.0)
        count = min(_CLASSES, len(limits) // _FEWEST)
        edges = np.unique(np.quantile(limits, np.arange(1, count) / count))
        classes = np.searchsorted(edges, limits, side="right")
        everything = np.sort(shares)
        used = []
        for index in range(len(edges) + 1):
            members = np.sort(shares[classes == index])
            used.append(members if len(members) >= _FEWEST else everything)
        return cls(edges=edges, used=tuple(used), past=past if arrivals else None)

    def shares(self, limits: Array, elapsed: Array, source: np.random.Generator) -> Array:
        """Shares of their limits that jobs use, given how much they have used already: (jobs,)."""
        found = np.ones(len(limits))
        classes = np.searchsorted(self.edges, limits, side="right")
        begun = np.clip(elapsed / limits, 0.0, 1.0)
        for item, used in enumerate(self.used):
            mine = np.flatnonzero(classes == item)
            first = np.searchsorted(used, begun[mine], side="right")
            drawn = first + (source.random(len(mine)) * (len(used) - first)).astype(np.int64)
            # A job that has run longer than all others is taken to go on up to its limit.
            found[mine] = np.append(used, 1.0)[drawn]
        return found

    def world(self, queue: Queue, horizon_seconds: float, source: np.random.Generator) -> World:
        """One way in which the queue may go on, with arrivals up to a horizon."""
        now, ends = queue.now_seconds, queue.running_end_seconds
        starts = queue.running_start_seconds
        if starts is None:
            # Seen at a random moment of its limit, a job has used a random part of it.
            left = ends - now
            starts = now - left * source.random(len(left))
        limits = np.maximum(ends - starts, 1.0)
        finite = np.where(np.isfinite(limits), limits, 7 * DAY)
        used = self.shares(finite, now - starts, source)
        running = np.clip(starts + used * finite, now + 1.0, np.maximum(ends, now + 1.0))
        asked = queue.pending_limit_seconds
        asked = np.where(np.isfinite(asked), asked, 7 * DAY)
        pending = asked * self.shares(asked, np.zeros(len(asked)), source)
        return World(
            running_end_seconds=running,
            pending_run_seconds=pending,
            arrivals=self._arrivals(now, queue.nodes, horizon_seconds, source),
        )

    def _arrivals(
        self, now: float, nodes: int, horizon_seconds: float, source: np.random.Generator
    ) -> Arrivals:
        """Whole days of the log at the same time of day, each drawn at random."""
        past = self.past
        if past is None or len(past) < 2:
            return NOTHING
        submits = past.submit_seconds
        days = int((submits[-1] - submits[0]) // DAY)
        if days < 1:
            return NOTHING
        # The last whole days of the log, such that each begins at the queue's time of day.
        latest = submits[-1] - (submits[-1] - now) % DAY - DAY
        first = max(0, int((latest - submits[0]) // DAY))
        parts, shifts = [], []
        for day in range(int(np.ceil(horizon_seconds / DAY))):
            begin = latest - DAY * int(source.integers(0, first + 1))
            low, high = np.searchsorted(submits, (begin, begin + DAY), side="left")
            parts.append(np.arange(low, high))
            shifts.append(np.full(high - low, now + day * DAY - begin))
        chosen = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        if not len(chosen):
            return NOTHING
        return Arrivals(
            submit_seconds=submits[chosen] + np.concatenate(shifts),
            nodes=np.minimum(past.nodes[chosen], nodes),
            limit_seconds=past.limit_seconds[chosen],
            run_seconds=past.run_seconds[chosen],
        )
