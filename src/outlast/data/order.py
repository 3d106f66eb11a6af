"""The order of samples as a function of (seed, global sample index), with no state.

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

import numpy as np
import numpy.typing as npt

from outlast.errors import DataError

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
        """Says which sample to read at each global sample index.

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
        key = _keys(self.seed, (flat // self.samples).astype(np.uint64))
        result = (flat % self.samples).astype(np.uint64)
        left_size = _ceiling_root(self.samples)
        right_size = -(-self.samples // left_size)
        walking = np.arange(flat.size)
        while walking.size:
            moved = _feistel(result[walking], key[walking], left_size, right_size)
            result[walking] = moved
            walking = walking[moved >= np.uint64(self.samples)]
        return result.astype(np.int64).reshape(given.shape)


@functools.lru_cache(maxsize=4)
def _stretch(order: SampleOrder, number: int) -> npt.NDArray[np.int64]:
    """Samples at the global indices [number, number + 1) * `_STRETCH`; not to be written to."""
    start = number * _STRETCH
    return order.index(np.arange(start, start + _STRETCH))


def _keys(seed: int, epochs: Unsigned) -> Unsigned:
    """One 64-bit key per element, from the seed and its epoch."""
    seed_key = _mix(np.array([seed & _UNSIGNED_MASK], dtype=np.uint64) + _GOLDEN)
    return _mix(_mix(epochs * _GOLDEN + seed_key))


def _feistel(position: Unsigned, key: Unsigned, left_size: int, right_size: int) -> Unsigned:
    """Permutes [0, left_size * right_size); both sizes at most 2**32."""
    width = np.uint64(left_size)
    right, left = np.divmod(position, width)
    for number in range(ROUNDS):
        round_key = key + _mix(np.array([number + 1], dtype=np.uint64))
        if number % 2 == 0:
            left = _add(left, _mix(right + round_key), width)
        else:
            right = _add(right, _mix(left + round_key), np.uint64(right_size))
    return right * width + left


def _add(value: Unsigned, random: Unsigned, size: np.uint64) -> Unsigned:
    """(value + random') mod size, with random' in [0, size) from the high bits of `random`."""
    total = value + (((random >> _HALF) * size) >> _HALF)
    return np.where(total >= size, total - size, total)


def _mix(value: Unsigned) -> Unsigned:
    """The output function of SplitMix64; unsigned arithmetic wraps by design."""
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


def _ceiling_root(number: int) -> int:
    root = math.isqrt(number)
    return root if root * root == number else root + 1
