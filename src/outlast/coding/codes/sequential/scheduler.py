"""Jobs worked on over several rounds: who is given what, and what follows from who delivered."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from outlast.errors import CodingError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from outlast.coding.code import GradientCode


@dataclass(frozen=True)
class Task:
    """What a worker computes and sends: sum of coefficient x gradient of a chunk of one job.

    Attributes:
        job: The job.
        round: When it is to be delivered.
        worker: By whom.
        part: Which of the job's parts it helps to decode; see `Scheduler.decoding`.
        chunks: Chunks of the job's data.
        coefficients: Of the chunks' gradients.
    """

    job: int
    round: int
    worker: int
    part: int
    chunks: tuple[int, ...]
    coefficients: tuple[complex, ...]


class Scheduler(ABC):
    """Gives out tasks round by round and says when, and from what, a job's gradient follows.

    For each round: `tasks`, then `observe` with who delivered. A job can be decoded from the round
    in which it is complete until the round after its last, then it is forgotten.

    Attributes:
        workers: Number of workers, n.
        jobs: Number of jobs; None for no end. No tasks are given for later ones.
        delay: Rounds after its first in which a job must be complete, T.
        memory: Rounds before this one that decide whether further stragglers are tolerated.
        job_share: Share of a job's data that each worker processes per round, at most.
        shares: (chunks,) share of a job's data in each chunk; they sum to 1.
        round: The round that is to be observed next.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    workers: int
    jobs: int | None
    delay: int
    memory: int
    job_share: float
    shares: npt.NDArray[np.float64]
    round: int

    def _begin(self, workers: int, jobs: int | None) -> None:
        self.workers, self.jobs, self.round = workers, jobs, 0
        self._parts: dict[int, dict[int, dict[int, Task]]] = {}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(workers={self.workers}, jobs={self.jobs}, "
            f"delay={self.delay}, job_share={self.job_share:g})"
        )

    @abstractmethod
    def admits(self, history: npt.NDArray[np.bool_]) -> bool:
        """Whether the scheme promises to complete every job in time under this history."""

    @abstractmethod
    def _give(self, job: int, slot: int) -> list[Task]:
        """Tasks for `job` in its round number `slot`, at most one for each worker."""

    @abstractmethod
    def _code(self, part: int) -> GradientCode | None:
        """The code that protects a part; None where it is one task that must be delivered."""

    @property
    @abstractmethod
    def _part_count(self) -> int:
        """Parts that a job's gradient is the sum of."""

    def tasks(self, round: int) -> list[list[Task]]:
        """(workers,) lists of what each worker is to deliver in this round, oldest job first.

        Raises:
            CodingError: For another round than the next to be observed.
        """
        if round != self.round:
            raise CodingError(f"round = {round} is not the one to come, {self.round}")
        given: list[list[Task]] = [[] for _ in range(self.workers)]
        for job in self._active():
            for task in self._give(job, round - job):
                given[task.worker].append(task)
        return given

    def observe(self, round: int, finished: npt.NDArray[np.bool_]) -> None:
        """Take note of who delivered in this round.

        Args:
            round: The round that `tasks` was asked for.
            finished: (workers,) whether each worker delivered all its tasks.

        Raises:
            CodingError: For another round, or a mask of another shape.
        """
        if finished.shape != (self.workers,):
            raise CodingError(
                f"finished has shape {finished.shape}, but there are {self.workers} workers"
            )
        for tasks in self.tasks(round):
            for task in tasks:
                if finished[task.worker]:
                    part = self._parts.setdefault(task.job, {}).setdefault(task.part, {})
                    part[task.worker] = task
        self.round += 1
        self._parts.pop(self.round - self.delay - 2, None)

    def complete(self, job: int) -> bool:
        """Whether what was delivered gives the job's gradient."""
        delivered = self._parts.get(job, {})
        return all(
            self._weights(part, delivered.get(part, {})) is not None
            for part in range(self._part_count)
        )

    def decoding(self, job: int) -> list[tuple[Task, complex]]:
        """Delivered tasks and the weights with which their results sum to the job's gradient.

        Raises:
            CodingError: When the job is not complete, or forgotten.
        """
        delivered = self._parts.get(job, {})
        used: list[tuple[Task, complex]] = []
        for part in range(self._part_count):
            tasks = delivered.get(part, {})
            weights = self._weights(part, tasks)
            if weights is None:
                raise CodingError(
                    f"job = {job} cannot be decoded in round {self.round}: part {part} of its "
                    "gradient was not delivered, or the job was forgotten after its last round"
                )
            used += [(tasks[worker], weight) for worker, weight in weights.items() if weight]
        return used

    def _weights(self, part: int, tasks: dict[int, Task]) -> dict[int, complex] | None:
        code = self._code(part)
        if code is None:
            return dict.fromkeys(tasks, 1.0) if tasks else None
        solved = _exact_weights(code, frozenset(tasks))
        return None if solved is None else {worker: solved[worker].item() for worker in tasks}

    def _active(self) -> range:
        """Jobs that may still be worked on in this round."""
        last = self.round if self.jobs is None else min(self.round, self.jobs - 1)
        return range(max(self.round - self.delay, 0), last + 1)

    def _coded(self, job: int, slot: int, worker: int, part: int) -> Task:
        """A worker's task of a part that a code protects."""
        code = self._code(part)
        assert code is not None
        start, stop = code.matrix.indptr[worker : worker + 2]
        first = self._first_chunk(part)
        chunks = tuple(int(chunk) + first for chunk in code.matrix.indices[start:stop])
        coefficients = tuple(code.matrix.data[start:stop].tolist())
        return Task(job, job + slot, worker, part, chunks, coefficients)

    def _first_chunk(self, part: int) -> int:
        """Number of the first chunk of a coded part."""
        return 0


@functools.lru_cache(1024)
def _exact_weights(code: GradientCode, alive: frozenset[int]) -> npt.NDArray[Any] | None:
    """Decoding weights, remembered: each job is asked about often, and most lack the same few."""
    decoded = code.decode(alive)
    return decoded.weights if decoded.certificate.exact else None
