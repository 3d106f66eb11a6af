"""Batches as a function of the step, whatever the number of ranks.

The global batch of step s holds the global samples [s * B, (s + 1) * B). Each rank takes a
contiguous share of it and gathers it in micro-batches. Nothing is remembered from step to step,
so a run resumes by asking for another step, on any number of ranks. Where the batch size B has
changed at an earlier step, an offset is added, so that every sample is still read once.

The order of samples as a function of (seed, global sample index), with no state.

Global sample g belongs to epoch e = g // n and stands at position p = g % n of it, n being the
number of samples. The sample to read is P(p), where P is a pseudo-random permutation of
[0, n) keyed by (seed, e). P is the generalised Feistel network with cycle walking of J. Black
and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002 (their methods "generalized
Feistel" and "cycle walking"): with a = ceil(sqrt(n)) and b = ceil(n / a), a position is the pair
(left, right) = (p mod a, p div a), and the rounds in turn do

    left  <- (left  + F_r(right)) mod a        right <- (right + F_r(left)) mod b.

Each round can be undone, so the network permutes [0, ab); repeating it until the result falls
below n permutes [0, n), and as ab < n + a that is seldom more than once. F is the SplitMix64
generator of G. Steele, D. Lea and C. Flood, "Fast Splittable Pseudorandom Number Generators",
OOPSLA 2014. This shuffles well; it is not meant as a secret.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from outlast.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from outlast.data.tokens import TokenFile


def share(start: int, stop: int, rank: int, ranks: int) -> tuple[int, int]:
    """The contiguous part [first, last) of [start, stop) that rank `rank` of `ranks` takes.

    The parts of all ranks follow each other and cover the range; their sizes differ by at most
    one.
    """
    size = stop - start
    return start + size * rank // ranks, start + size * (rank + 1) // ranks


def samples_until(step: int, starts: Iterable[tuple[int, int]]) -> int:
    """Samples of the first `step` steps of a run whose batch size may have changed.

    Args:
        step: Steps done.
        starts: Of every start of the run in turn, the step that it began from and its batch size.
            A start takes the place of what earlier ones did beyond its first step.
    """
    stretches: list[tuple[int, int]] = []
    for first, size in starts:
        stretches = [stretch for stretch in stretches if stretch[0] < first] + [(first, size)]
    stretches = [stretch for stretch in stretches if stretch[0] < step]
    ends = [first for first, _ in stretches[1:]] + [step]
    # What came before the first start that is known had its size, for all that is known.
    begins = [0, *ends[:-1]]
    sizes = [size for _, size in stretches]
    return sum(size * (end - begin) for size, begin, end in zip(sizes, begins, ends, strict=False))


def microbatches(first: int, last: int, count: int) -> list[tuple[int, int]]:
    """Divide [first, last) into `count` contiguous parts whose sizes differ by at most one.

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
        sample_ids: (samples,) int64, global sample indices: step * batch_size + offset + i.
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
        """Divide a token file into samples.

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
        """Read samples.

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


@dataclass
class BatchLoader:
    """One rank's part of every global batch.

    Attributes:
        windows: Where samples are read.
        order: Which sample stands at each global sample index.
        batch_size: Samples in a global batch, over all ranks.
        rank: This data-parallel rank.
        ranks: Number of data-parallel ranks.
        microbatches: Micro-batches that the rank's share is divided into.
        offset: Added to every global sample index, in samples; see `continue_from`.
    """

    windows: SampleWindow
    order: SampleOrder
    batch_size: int
    rank: int = 0
    ranks: int = 1
    microbatches: int = 1
    offset: int = 0

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

    def continue_from(self, step: int, samples: int) -> None:
        """Let the batch of `step` begin at global sample index `samples`, and others follow."""
        self.offset = samples - step * self.batch_size

    def batch(self, step: int) -> list[MicroBatch]:
        """Gather this rank's share of the global batch of a step.

        Returns:
            `microbatches` parts in the order of their global sample indices. A part may be empty
            when the share has fewer samples than parts, so that ranks stay in step.
        """
        return [self.part(step, self.rank, number) for number in range(self.microbatches)]

    def part(self, step: int, rank: int, number: int) -> MicroBatch:
        """Gather one micro-batch of any rank.

        Args:
            step: The step.
            rank: Whose share of the global batch, in [0, ranks).
            number: Which of its micro-batches, in [0, microbatches).
        """
        start = step * self.batch_size + self.offset
        first, last = share(start, start + self.batch_size, rank, self.ranks)
        low, high = microbatches(first, last, self.microbatches)[number]
        sample_ids = np.arange(low, high, dtype=np.int64)
        inputs, targets = self.windows.gather(self.order.consecutive(low, high))
        return MicroBatch(sample_ids, inputs, targets)

    def reload(self, batch: MicroBatch) -> MicroBatch:
        """Gather the samples of a micro-batch a second time; their ids must be consecutive."""
        if not len(batch.sample_ids):
            return batch
        low, high = int(batch.sample_ids[0]), int(batch.sample_ids[-1]) + 1
        inputs, targets = self.windows.gather(self.order.consecutive(low, high))
        return MicroBatch(np.arange(low, high, dtype=np.int64), inputs, targets)

    def prefetching(
        self, first_step: int, last_step: int
    ) -> Generator[tuple[int, list[MicroBatch]], None, None]:
        """Go through steps while one background thread gathers the batch after.

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


# Fewer rounds shuffle a dozen samples visibly unevenly; with 12, all orders are equally likely.
ROUNDS = 12

MOST_SAMPLES = 1 << 62

_UNSIGNED_MASK = (1 << 64) - 1

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)

_MIX_2 = np.uint64(0x94D049BB133111EB)

_HALF = np.uint64(32)

Unsigned = npt.NDArray[np.uint64]

_STRETCH = 4096


@dataclass(frozen=True)
class SampleOrder:
    """A shuffled order of samples, another one in each epoch.

    Attributes:
        samples: Samples in one epoch, n.
        seed: Any integer; taken modulo 2**64.
    """

    samples: int
    seed: int

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= MOST_SAMPLES:
            raise DataError(f"an order of {self.samples} samples: there must be 1 to 2**62")

    def epoch(self, global_sample: int) -> int:
        """The epoch, from 0, that a global sample index belongs to."""
        return global_sample // self.samples

    def consecutive(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """`index` of the global sample indices [start, stop), (stop - start,) int64.

        A few indices at a time cost as much as thousands, so long stretches are kept for a while.
        """
        first, last = start // _STRETCH, max(stop - 1, start) // _STRETCH
        stretches = [_stretch(self, number) for number in range(first, last + 1)]
        offset = first * _STRETCH
        return np.concatenate(stretches)[start - offset : stop - offset]

    def index(self, global_sample: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Say which sample to read at each global sample index.

        Args:
            global_sample: Integers >= 0 of any shape, counted from the start of the run.

        Returns:
            Sample indices in [0, samples), int64, of the same shape.

        Raises:
            DataError: An index is negative.
        """
        given = np.asarray(global_sample, dtype=np.int64)
        if given.size and int(given.min()) < 0:
            raise DataError(f"global sample index {int(given.min())} is negative")
        flat = given.ravel()
        epochs = (flat // self.samples).astype(np.uint64)
        seed_key = _mix(np.array([self.seed & _UNSIGNED_MASK], dtype=np.uint64) + _GOLDEN)
        key = _mix(_mix(epochs * _GOLDEN + seed_key))
        result = (flat % self.samples).astype(np.uint64)
        root = math.isqrt(self.samples)
        left_size = root if root * root == self.samples else root + 1
        right_size = -(-self.samples // left_size)
        walking = np.arange(flat.size)
        while walking.size:
            # Permutes [0, left_size * right_size); both sizes at most 2**32.
            keys, width = key[walking], np.uint64(left_size)
            right, left = np.divmod(result[walking], width)
            for number in range(ROUNDS):
                round_key = keys + _mix(np.array([number + 1], dtype=np.uint64))
                if number % 2 == 0:
                    left = _add(left, _mix(right + round_key), width)
                else:
                    right = _add(right, _mix(left + round_key), np.uint64(right_size))
            moved = right * width + left
            result[walking] = moved
            walking = walking[moved >= np.uint64(self.samples)]
        return result.astype(np.int64).reshape(given.shape)


@functools.lru_cache(maxsize=4)
def _stretch(order: SampleOrder, number: int) -> npt.NDArray[np.int64]:
    """Samples at the global indices [number, number + 1) * `_STRETCH`; not to be written to."""
    start = number * _STRETCH
    return order.index(np.arange(start, start + _STRETCH))


def _add(value: Unsigned, random: Unsigned, size: np.uint64) -> Unsigned:
    """(value + random') mod size, with random' in [0, size) from the high bits of `random`."""
    total = value + (((random >> _HALF) * size) >> _HALF)
    return np.where(total >= size, total - size, total)


def _mix(value: Unsigned) -> Unsigned:
    """The output function of SplitMix64; unsigned arithmetic wraps by design."""
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))
