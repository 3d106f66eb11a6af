"""When failures strike in a simulated run, drawn for many trials at once.

Times are seconds of exposure: of the run's life in which failures can strike. Each block of nodes
that fail together renews itself: after a failure it is as good as new.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outlast.plan.cases import Array
from outlast.plan.reliability.failures import FailureCause
from outlast.plan.reliability.recovery import DAY_SECONDS
from outlast.plan.reliability.scenario import Lemons, Scenario

Indices = NDArray[np.int64]
END = -1
"""Cause of the entry that ends a trial's events in a chunk."""
EVENTS_PER_CHUNK = 1_000_000


@dataclass(frozen=True, slots=True)
class Chunk:
    """Failures of a stretch of exposure, (trials, events), in order; each row ends with END.

    Attributes:
        seconds: When.
        cause: Index of the cause; the number of causes for a false alarm.
        first_node: Of the nodes hit.
    """

    seconds: Array
    cause: Indices
    first_node: Indices


Drawn = tuple[Indices, Array, Indices]
"""Trial, time and block of each event."""


class Strikes:
    """Draws one chunk after the other."""

    def __init__(self, scenario: Scenario, generator: np.random.Generator) -> None:
        self._run, self._trials = scenario.reliability, scenario.trials
        self._nodes = int(float(np.max(self._run.nodes)))
        self._generator = generator
        self._sources: list[_Memoryless | _Renewed] = []
        per_second = 1e-12
        for cause in self._run.causes:
            each = float(cause.per_day(self._nodes)) / DAY_SECONDS
            per_second += each * scenario.lemons.mean_factor
            blocks = max(1, round(self._nodes / cause.nodes_hit))
            if cause.shape == 1.0 and scenario.lemons.share == 0.0:
                self._sources.append(_Memoryless(each, blocks))
            else:
                shape = (scenario.trials, blocks)
                self._sources.append(_Renewed(cause, each, shape, scenario.lemons, generator))
        alarms = float(np.max(self._run.guard.false_alarms_per_day)) / DAY_SECONDS
        self._sources.append(_Memoryless(alarms, 1))
        expected = (per_second + alarms) * scenario.trials
        self._length = min(EVENTS_PER_CHUNK / expected, scenario.limit_days * DAY_SECONDS)
        self._start = 0.0

    def next_chunk(self) -> Chunk:
        """The failures of the next stretch of exposure."""
        start, end = self._start, self._start + self._length
        self._start = end
        drawn = [s.draw(start, end, self._trials, self._generator) for s in self._sources]
        last = np.arange(self._trials, dtype=np.int64)
        trial = np.concatenate([*(item[0] for item in drawn), last])
        seconds = np.concatenate([*(item[1] for item in drawn), np.full(self._trials, end)])
        cause = np.concatenate(
            [np.full(item[0].size, index, dtype=np.int64) for index, item in enumerate(drawn)]
            + [np.full(self._trials, END, dtype=np.int64)]
        )
        hits = [cause.nodes_hit for cause in self._run.causes] + [1]
        first = np.concatenate(
            [item[2] * hit for item, hit in zip(drawn, hits, strict=True)] + [last * 0]
        )
        order = np.lexsort((seconds, trial))
        counts = np.bincount(trial, minlength=self._trials)
        column = np.arange(trial.size) - np.repeat(np.cumsum(counts) - counts, counts)
        shape, row = (self._trials, int(counts.max())), trial[order]
        times, kinds = np.full(shape, end), np.full(shape, END, dtype=np.int64)
        places = np.zeros(shape, dtype=np.int64)
        times[row, column], kinds[row, column] = seconds[order], cause[order]
        places[row, column] = first[order]
        return Chunk(times, kinds, places)


class _Memoryless:
    """Exponential times: all blocks together are one Poisson process."""

    def __init__(self, per_second: float, blocks: int) -> None:
        self._per_second, self._blocks = per_second, blocks

    def draw(self, start: float, end: float, trials: int, generator: np.random.Generator) -> Drawn:
        counts = generator.poisson(self._per_second * (end - start), trials)
        total = int(counts.sum())
        return (
            np.repeat(np.arange(trials, dtype=np.int64), counts),
            generator.uniform(start, end, total),
            generator.integers(0, self._blocks, total),
        )


class _Renewed:
    """Weibull times of every block, some of which are lemons."""

    def __init__(
        self,
        cause: FailureCause,
        per_second: float,
        shape: tuple[int, int],
        lemons: Lemons,
        generator: np.random.Generator,
    ) -> None:
        self._shape = cause.shape
        self._scale = math.inf
        if per_second > 0.0:
            self._scale = shape[1] / per_second / math.gamma(1.0 + 1.0 / cause.shape)
        self._lemons = lemons
        chosen = generator.permutation(shape[1])[: round(lemons.share * shape[1])]
        self._factor = np.ones(shape)
        self._factor[:, chosen] = lemons.factor
        self._failed = np.zeros(shape, dtype=np.int32)
        self._next = generator.weibull(self._shape, shape) * self._scale / self._factor

    def draw(self, start: float, end: float, trials: int, generator: np.random.Generator) -> Drawn:
        found: list[Drawn] = []
        trial, block = np.nonzero(self._next < end)
        while trial.size:
            found.append((trial, self._next[trial, block], block))
            self._failed[trial, block] += 1
            factor = self._factor[trial, block]
            if self._lemons.removed_after:
                gone = self._failed[trial, block] >= self._lemons.removed_after
                factor = np.where(gone, 1.0, factor)
            drawn = generator.weibull(self._shape, trial.size) * self._scale / factor
            self._next[trial, block] += drawn
            again = self._next[trial, block] < end
            trial, block = trial[again], block[again]
        if not found:
            empty = np.zeros(0, dtype=np.int64)
            return empty, np.zeros(0), empty
        return (
            np.concatenate([strikes[0] for strikes in found]),
            np.concatenate([strikes[1] for strikes in found]),
            np.concatenate([strikes[2] for strikes in found]),
        )
