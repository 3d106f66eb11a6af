"""Batches as a function of the step, whatever the number of ranks.

The global batch of step s holds the global samples [s * B, (s + 1) * B). Each rank takes a
contiguous share of it and gathers it in micro-batches. Nothing is remembered from step to step,
so a run resumes by asking for another step, on any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from outlast.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Generator

    import numpy.typing as npt

    from outlast.data.order import SampleOrder
    from outlast.data.tokens import TokenFile


def share(start: int, stop: int, rank: int, ranks: int) -> tuple[int, int]:
    """The contiguous part [first, last) of [start, stop) that rank `rank` of `ranks` takes.

    The parts of all ranks follow each other and cover the range; their sizes differ by at most
    one.
    """
    size = stop - start
    return start + size * rank // ranks, start + size * (rank + 1) // ranks


def microbatches(first: int, last: int, count: int) -> list[tuple[int, int]]:
    """Divides [first, last) into `count` contiguous parts whose sizes differ by at most one.

    Always gives `count` parts, some of them empty when there are fewer samples than parts.
    """
    return [share(first, last, number, count) for number in range(count)]


def microbatch_count(batch_size: int, ranks: int, micro_batch_size: int) -> int:
    """Micro-batches that each rank needs so that none exceeds `micro_batch_size` samples.

    The same for every rank, as their collective operations must be. 0 samples means no limit:
    one micro-batch.
    """
    if micro_batch_size == 0:
        return 1
    largest_share = -(-batch_size // ranks)
    return -(-largest_share // micro_batch_size)


@dataclass(frozen=True)
class MicroBatch:
    """Samples for one forward pass.

    Attributes:
        sample_ids: (samples,) int64, global sample indices: step * batch_size + i.
        inputs: (samples, sequence_length) int64, token ids.
        targets: (samples, sequence_length) int64, the token after each input.
    """

    sample_ids: npt.NDArray[np.int64]
    inputs: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]


class SampleWindow:
    """The tokens of a file as samples: windows of `sequence_length` that do not overlap.

    Sample i has the inputs [i * L, (i + 1) * L) and the targets one token later, so that each
    token but the first is predicted once per epoch; the tail shorter than a window is unused.

    Attributes:
        file: The token file.
        sequence_length: Tokens in a sample, L.
        samples: Number of samples, (tokens - 1) // L.
    """

    def __init__(self, file: TokenFile, sequence_length: int) -> None:
        """Divides a token file into samples.

        Raises:
            DataError: The file is too short for one sample.
        """
        self.file = file
        self.sequence_length = sequence_length
        self.samples = (len(file.tokens) - 1) // max(sequence_length, 1)
        if sequence_length < 1:
            raise DataError(f"data.sequence_length = {sequence_length} must be at least 1")
        if self.samples < 1:
            raise DataError(
                f"{file.path} holds {len(file.tokens)} tokens, too few for one sample of "
                f"data.sequence_length = {sequence_length} (it takes {sequence_length + 1}); "
                "give more text or a shorter sequence_length"
            )

    def gather(
        self, indices: npt.NDArray[np.integer[Any]]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Reads samples.

        Args:
            indices: (n,) sample indices in [0, samples).

        Returns:
            Inputs and targets, each (n, sequence_length) int64, contiguous.

        Raises:
            DataError: An index is out of range.
        """
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < self.samples:
            raise DataError(
                f"sample indices {int(indices.min())} to {int(indices.max())} are not all in "
                f"[0, {self.samples}) of {self.file.path}"
            )
        inputs = np.empty((indices.size, self.sequence_length), dtype=np.int64)
        targets = np.empty_like(inputs)
        for row, index in enumerate(indices.tolist()):
            start = index * self.sequence_length
            window = self.file.tokens[start : start + self.sequence_length + 1]
            inputs[row] = window[:-1]
            targets[row] = window[1:]
        return inputs, targets


@dataclass(frozen=True)
class BatchLoader:
    """One rank's part of every global batch.

    Attributes:
        windows: Where samples are read.
        order: Which sample stands at each global sample index.
        batch_size: Samples in a global batch, over all ranks.
        rank: This data-parallel rank.
        ranks: Number of data-parallel ranks.
        microbatches: Micro-batches that the rank's share is divided into.
    """

    windows: SampleWindow
    order: SampleOrder
    batch_size: int
    rank: int = 0
    ranks: int = 1
    microbatches: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise DataError(f"rank {self.rank} is not in [0, {self.ranks})")
        if self.batch_size < self.ranks:
            raise DataError(
                f"train.batch_size = {self.batch_size} is less than the {self.ranks} data-parallel "
                "ranks: each rank needs at least one sample of every batch"
            )
        if self.microbatches < 1:
            raise DataError(f"{self.microbatches} micro-batches: there must be at least one")
        if self.order.samples != self.windows.samples:
            raise DataError(
                f"the order is of {self.order.samples} samples, the data of {self.windows.samples}"
            )

    def batch(self, step: int) -> list[MicroBatch]:
        """Gathers this rank's share of the global batch of a step.

        Returns:
            `microbatches` parts in the order of their global sample indices. A part may be empty
            when the share has fewer samples than parts, so that ranks stay in step.
        """
        return [self.part(step, self.rank, number) for number in range(self.microbatches)]

    def part(self, step: int, rank: int, number: int) -> MicroBatch:
        """Gathers one micro-batch of any rank.

        Args:
            step: The step.
            rank: Whose share of the global batch, in [0, ranks).
            number: Which of its micro-batches, in [0, microbatches).
        """
        start = step * self.batch_size
        first, last = share(start, start + self.batch_size, rank, self.ranks)
        low, high = microbatches(first, last, self.microbatches)[number]
        sample_ids = np.arange(low, high, dtype=np.int64)
        inputs, targets = self.windows.gather(self.order.consecutive(low, high))
        return MicroBatch(sample_ids, inputs, targets)

    def prefetching(
        self, first_step: int, last_step: int
    ) -> Generator[tuple[int, list[MicroBatch]], None, None]:
        """Goes through steps while one background thread gathers the batch after.

        Close the generator (or exhaust it) to end the thread.

        Args:
            first_step: First step.
            last_step: One past the last step.

        Yields:
            (step, this rank's micro-batches).

        Raises:
            DataError: As `batch` does, at the step that it belongs to.
        """
        from concurrent.futures import ThreadPoolExecutor

        if first_step >= last_step:
            return
        with ThreadPoolExecutor(1, thread_name_prefix="outlast-data") as executor:
            upcoming = executor.submit(self.batch, first_step)
            for step in range(first_step, last_step):
                current = upcoming.result()
                if step + 1 < last_step:
                    upcoming = executor.submit(self.batch, step + 1)
                yield step, current
