"""What all ranks know of a step before the optimizer applies it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """Whether a step's numbers may be used, equal on all ranks.

    Attributes:
        step: Optimizer steps done before.
        bad_ranks: Ranks whose own numbers are wrong and could not be put right.
    """

    step: int
    bad_ranks: tuple[int, ...]

    @property
    def clean(self) -> bool:
        """No rank has wrong numbers."""
        return not self.bad_ranks
