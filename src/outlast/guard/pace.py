"""How much checks may do now, and when they may go on, to take a given share of the time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

LONGEST_GAP = 1000
"""Steps after which a round is made even if it takes more than was earned."""


class Pace:
    """How much may be checked, when all of it may take a share of the steps' time.

    Every step earns ``budget`` times a step's usual time; what checks took is subtracted, so that
    over any number of steps they take at most what was earned, and one round. What a round has
    overdrawn is earned before the next one, unless that takes more than `LONGEST_GAP` steps.

    A round of some blocks with some numbers is predicted to take ``blocks x + numbers y`` seconds,
    with x and y fitted to the rounds so far, old ones counting less and less.

    Args:
        budget: Share of the time.

    Attributes:
        credit: Seconds earned and not yet spent.
        step_seconds: A step's usual time.
    """

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.credit = 0.0
        self.step_seconds = 0.0
        # Two imagined rounds to begin with: a block takes 0.2 ms, a million numbers take 2 ms.
        self._blocks, self._both, self._numbers = 1.0, 0.0, 1.0
        self._block_seconds, self._number_seconds = 2e-4, 2e-3

    def earn(self, seconds: float, steps: int = 1) -> None:
        """So many steps took so long; a pause among them counts as much as they do."""
        usual = self.step_seconds
        mean = min(seconds / steps, 2.0 * usual) if usual else seconds / steps
        self.step_seconds = mean + (usual - mean) * (7.0 / 8.0) ** steps if usual else mean
        # Never more than the share of what has really passed.
        self.credit += self.budget * min(seconds, steps * self.step_seconds)

    def spend(self, seconds: float) -> None:
        """The checks took so long."""
        self.credit -= seconds

    def learn(self, blocks: int, numbers: int, seconds: float) -> None:
        """A round of so many blocks with so many numbers took so long."""
        millions = numbers / 1e6
        fade = 0.95
        self._blocks = fade * self._blocks + blocks * blocks
        self._both = fade * self._both + blocks * millions
        self._numbers = fade * self._numbers + millions * millions
        self._block_seconds = fade * self._block_seconds + blocks * seconds
        self._number_seconds = fade * self._number_seconds + millions * seconds

    def predict(self, blocks: int, numbers: int) -> float:
        """Seconds of a round."""
        determinant = self._blocks * self._numbers - self._both**2
        per_block = self._block_seconds / self._blocks
        per_million = 0.0
        if determinant > 1e-9 * self._blocks * self._numbers:
            per_million = self._blocks * self._number_seconds - self._both * self._block_seconds
            per_million = max(per_million / determinant, 0.0)
            per_block = max((self._block_seconds - self._both * per_million) / self._blocks, 0.0)
        return blocks * per_block + numbers / 1e6 * per_million

    def plan(self, sizes: Sequence[int], first: int) -> tuple[int, int]:
        """When the next round should be, and how far it should go.

        Args:
            sizes: Numbers of each block.
            first: The block to begin with.

        Returns:
            Steps to wait, and the block to end before, at least ``first + 1``.
        """
        last, numbers = first + 1, sizes[first]
        missing = self.predict(1, numbers) - self.credit
        if missing > 0.0:
            earned = self.budget * self.step_seconds
            return (min(math.ceil(missing / earned), LONGEST_GAP) if earned else 1), last
        while last < len(sizes):
            numbers += sizes[last]
            if self.predict(last + 1 - first, numbers) > self.credit:
                break
            last += 1
        if last - first == len(sizes):
            # There is nothing to save for.
            self.credit = min(self.credit, self.predict(len(sizes), numbers))
        return 0, last
