"""Sequential gradient coding: a job may finish some rounds after its first.

Job t, one gradient, begins in round t and must be complete at the end of round t + delay. What
stragglers fail to deliver in one round is done again in a later one, so bursts of slowness need
less redundancy than a code that must finish within the round. Training can use a delay where
several models are trained in turn, or where updates may be late; one synchronous model cannot.

Krishnan, Ebrahimi and Khisti, "Sequential Gradient Coding for Straggler Mitigation" (ICLR 2023).
A history is a (rounds, workers) boolean array, true where a worker straggled: all that it was to
deliver in that round is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from outlast.coding.codes.checks import check_positive, check_workers
from outlast.coding.codes.inner import checked_code
from outlast.coding.codes.sequential.histories import arbitrary, bursty, cut, per_round
from outlast.coding.codes.sequential.scheduler import Scheduler, Task
from outlast.errors import CodingError

if TYPE_CHECKING:
    import numpy.typing as npt

    from outlast.coding.code import GradientCode


class _OneCode(Scheduler):
    """Schemes in which a job is one part, under a code of all workers."""

    code: GradientCode

    def _begin_coded(self, code: GradientCode, jobs: int | None) -> None:
        self._begin(code.workers, jobs)
        self.code = code
        self.job_share = code.load / code.workers
        self.shares = np.full(code.chunks, 1.0 / code.chunks)

    def _everybody(self, job: int, slot: int) -> list[Task]:
        return [self._coded(job, slot, worker, 0) for worker in range(self.workers)]

    def _code(self, part: int) -> GradientCode | None:
        return self.code

    @property
    def _part_count(self) -> int:
        return 1


class EveryRound(_OneCode):
    """A gradient code used round by round: no delay. With no stragglers, uncoded training.

    The baseline of the sequential schemes; load (s + 1) / n.
    """

    name = "gradient code in every round"
    source = "Tandon et al. (ICML 2017)"
    delay = 0
    memory = 0

    def __init__(
        self,
        workers: int,
        stragglers: int = 0,
        *,
        code: GradientCode | None = None,
        jobs: int | None = None,
    ) -> None:
        self.stragglers = stragglers
        self._begin_coded(checked_code(code, workers, stragglers), jobs)

    def admits(self, history: npt.NDArray[np.bool_]) -> bool:
        """Whether at most s workers straggle in every round."""
        return per_round(history, self.stragglers)

    def _give(self, job: int, slot: int) -> list[Task]:
        return self._everybody(job, slot)


class SelectiveReattempt(_OneCode):
    """SR-SGC: a code for s stragglers, and a second try B rounds later for what it lacks.

    With s = ceil(B lambda / (W - 1 + B)) the load is (s + 1) / n, and every job is complete in time
    where each window of W rounds has at most s stragglers per round or is (B, W, lambda)-`bursty`.
    For a round t with more than s stragglers begins such a bursty window, in which rounds t, t + B,
    ..., t + W - 1 have no straggler in common, hence at most lambda <= s (W - 1 + B) / B in all:
    second tries go to workers that do not straggle, and are over with the window.

    Args:
        workers: n.
        burst: B, longest burst of a worker, in rounds; the delay.
        window: W, a multiple of B, plus 1.
        stragglers: lambda, distinct stragglers in W rounds.
        code: A code of n workers that tolerates s stragglers.
        jobs: See `Scheduler`.

    Raises:
        CodingError: For parameters outside these ranges.
    """

    name = "selective-reattempt sequential gradient code"
    source = "Krishnan, Ebrahimi and Khisti (ICLR 2023), SR-SGC"

    def __init__(
        self,
        workers: int,
        burst: int,
        window: int,
        stragglers: int,
        *,
        code: GradientCode | None = None,
        jobs: int | None = None,
    ) -> None:
        check_positive("burst", burst)
        if window <= burst or (window - 1) % burst:
            below = max((window - 1) // burst, 1) * burst + 1
            raise CodingError(
                f"window = {window} is not a multiple of burst = {burst} plus 1, at least "
                f"{burst + 1}; {below} or {below + burst} would do"
            )
        check_workers(workers, stragglers, workers)
        self.burst, self.window, self.stragglers = burst, window, stragglers
        self.delay = burst
        self.memory = window - 1
        self.tolerance = -(-burst * stragglers // (window - 1 + burst))
        self._begin_coded(checked_code(code, workers, self.tolerance), jobs)

    def admits(self, history: npt.NDArray[np.bool_]) -> bool:
        """Whether each window of W rounds has at most s stragglers per round, or is bursty."""
        return all(
            per_round(part, self.tolerance)
            or bursty(part, burst=self.burst, window=self.window, stragglers=self.stragglers)
            for part in cut(history, self.window)
        )

    def tasks(self, round: int) -> list[list[Task]]:
        """As `Scheduler.tasks`; a worker tries an old job again instead of its task of the new."""
        return [task[:1] for task in super().tasks(round)]

    def _give(self, job: int, slot: int) -> list[Task]:
        if slot == 0:
            return self._everybody(job, slot)
        if slot < self.burst or self.complete(job):
            return []
        done = self._parts.get(job, {}).get(0, {})
        missing = max(self.workers - self.tolerance - len(done), 0)
        # Whoever lacks the job straggled B, 2 B, ... rounds ago in a window that is bursty, hence
        # does not now: any of them will do.
        lacking = [worker for worker in range(self.workers) if worker not in done]
        return [self._coded(job, slot, worker, 0) for worker in lacking[:missing]]


class Multiplexed(Scheduler):
    """M-SGC: part of a job uncoded and tried again where it failed, part under a code.

    The uncoded part, (W - 1) n chunks, is worked on in a job's first W - 1 rounds. In each of the B
    rounds after these a worker tries one of its failed chunks again; a worker that has none left
    takes its task of one of B groups of chunks, each under a code for lambda stragglers. For
    lambda = n there are no groups.

    Every job is complete in time where each window of W - 1 + B rounds is (B, W, lambda)-`bursty`
    or (B, W - 1 + B, lambda)-`arbitrary`. The load is (lambda + 1) (W - 1 + B) / (n (B + (W - 1)
    (lambda + 1))), for lambda = n (W - 1 + B) / (n (W - 1)); delay W - 2 + B.

    Args:
        workers: n.
        burst: B, longest burst of a worker, in rounds.
        window: W, more than B.
        stragglers: lambda, distinct stragglers in W rounds, at most n.
        code: A code of n workers that tolerates lambda stragglers.
        jobs: See `Scheduler`.

    Raises:
        CodingError: For parameters outside these ranges.
    """

    name = "multiplexed sequential gradient code"
    source = "Krishnan, Ebrahimi and Khisti (ICLR 2023), M-SGC"

    def __init__(
        self,
        workers: int,
        burst: int,
        window: int,
        stragglers: int,
        *,
        code: GradientCode | None = None,
        jobs: int | None = None,
    ) -> None:
        check_positive("burst", burst)
        if window <= burst:
            raise CodingError(
                f"window = {window} is not above burst = {burst}; at least {burst + 1} would do"
            )
        check_workers(workers, stragglers, workers)
        self._begin(workers, jobs)
        self.burst, self.window, self.stragglers = burst, window, stragglers
        self.delay = self.memory = window - 2 + burst
        self.code = None if stragglers == workers else checked_code(code, workers, stragglers)
        self._uncoded = (window - 1) * workers
        groups = burst if self.code else 0
        # A mini-task takes equally long in both parts: one uncoded chunk is as large as a
        # worker's share of a group.
        share = self.code.load / workers if self.code else 0.0
        unit = 1.0 / (self._uncoded * share + groups) if self.code else 0.0
        one = share * unit if self.code else 1.0 / self._uncoded
        coded = self.code.chunks if self.code else 0
        self.shares = np.full(self._uncoded + groups * coded, one)
        if coded:
            self.shares[self._uncoded :] = unit / coded
        self.job_share = (window - 1 + burst) * one

    def admits(self, history: npt.NDArray[np.bool_]) -> bool:
        """Whether each window of W - 1 + B rounds is bursty or arbitrary."""
        length = self.memory + 1
        return all(
            bursty(part, burst=self.burst, window=self.window, stragglers=self.stragglers)
            or arbitrary(part, most=self.burst, window=length, stragglers=self.stragglers)
            for part in cut(history, length)
        )

    def _give(self, job: int, slot: int) -> list[Task]:
        if slot < self.window - 1:
            return [self._single(job, slot, worker, slot) for worker in range(self.workers)]
        given = []
        delivered = self._parts.get(job, {})
        for worker in range(self.workers):
            first = worker * (self.window - 1)
            failed = (j for j in range(self.window - 1) if first + j not in delivered)
            again = next(failed, None)
            if again is not None:
                given.append(self._single(job, slot, worker, again))
            elif self.code is not None:
                part = self._uncoded + slot - (self.window - 1)
                given.append(self._coded(job, slot, worker, part))
        return given

    def _single(self, job: int, slot: int, worker: int, number: int) -> Task:
        chunk = worker * (self.window - 1) + number
        return Task(job, job + slot, worker, chunk, (chunk,), (1.0,))

    def _code(self, part: int) -> GradientCode | None:
        return None if part < self._uncoded else self.code

    @property
    def _part_count(self) -> int:
        return self._uncoded + (self.burst if self.code else 0)

    def _first_chunk(self, part: int) -> int:
        assert self.code is not None
        return self._uncoded + (part - self._uncoded) * self.code.chunks
