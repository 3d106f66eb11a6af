"""Gradients that two runs of a script are compared without: those that a save has left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.autosave.heap.gradients import GradientUse, Seen
from outlast.autosave.heap.tensors import Gradient, gradient

if TYPE_CHECKING:
    import torch


class ComparedGradients(GradientUse):
    """As a run watches gradients; but what is compared lacks only what the save has lacked.

    A run that goes on has learnt which gradients its loop drops, and one that was resumed has not:
    what each would save is not the same. What the save has left out counts for none of both, as
    long as it lies there; whoever reads it in the resumed run ends that.

    Attributes:
        comparing: Whether what is captured now is to be compared, not to be gone on from.
    """

    def __init__(self) -> None:
        super().__init__()
        self.comparing = False
        self._left_out: dict[int, tuple[Seen, Gradient]] = {}

    def is_dead(self, owner: torch.Tensor) -> bool:
        """Whether the gradient of `owner` is left out."""
        if not self.comparing:
            return super().is_dead(owner)
        found = self._left_out.get(id(owner))
        return found is not None and found[0].lies()

    def stand_in(self, owner: torch.Tensor) -> Gradient | None:
        """What is captured in place of a gradient that is left out: as it is after a restore."""
        if not self.comparing:
            made = super().stand_in(owner)
            assert made is not None
            self._left_out[id(owner)] = (Seen.of(owner), made)
            return made
        _, made = self._left_out[id(owner)]
        return None if made is Gradient.DROPPED else made

    def expect(self, path: str, owner: torch.Tensor) -> None:
        """The gradient of `owner`, called `path`, was not saved."""
        super().expect(path, owner)
        made = Gradient.DROPPED if gradient(owner) is None else Gradient.ZEROED
        self._left_out[id(owner)] = (Seen.of(owner), made)
