"""One step of a replica group, and where groups find a state that outlives them all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outlast.errors import RecoverError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from outlast.recover.live.tree import PartSums


@dataclass(frozen=True)
class Refuge:
    """Where a state is kept that outlives all groups, e.g. a run's checkpoints.

    Attributes:
        newest: Step of the newest state there; 0 where there is none.
        restore: Loads it into the live objects and returns its step.
    """

    newest: Callable[[], int]
    restore: Callable[[], int]


@dataclass
class LiveStep:
    """One step, or one more attempt at it, of this group.

    Attributes:
        number: Steps committed before it.
        share: This group's index and the number of groups among which the global batch is divided.
        idle: Whether the others do this step's whole batch, because this group has only just taken
            their state. A loop may then leave out both passes, which spares the others a wait;
            what it computes does not count.
        committed: Whether it has been committed; None before `commit`.
        loss: Sum of the groups' losses, once committed.
        sums: Sums over the groups of what was given to `commit`, once committed.
    """

    number: int
    share: tuple[int, int]
    idle: bool
    _commit: Callable[[LiveStep, torch.Tensor | float, bool, Sequence[float]], bool]
    _parts: PartSums | None = None
    committed: bool | None = None
    loss: float = float("nan")
    sums: list[float] = field(default_factory=list)

    @property
    def parts(self) -> range:
        """Numbers of the batch's parts that this group computes, where it was cut into parts."""
        return self._sums.own

    def add(self, part: int, loss: torch.Tensor | float = 0.0) -> None:
        """Take the gradients as those of one part of the batch, and drop them from the parameters.

        Args:
            part: One of `parts`, each once.
            loss: The part's share of the loss.

        Raises:
            RecoverError: Without `LiveGroups(parts=...)`, or for another part.
        """
        self._sums.add(part, float(loss))

    def clear(self) -> None:
        """Forget what was added, to compute all of `parts` again."""
        self._sums.clear()

    @property
    def _sums(self) -> PartSums:
        if self._parts is None:
            raise RecoverError(
                "the batch is not cut into parts: give LiveGroups(parts=...), or only commit"
            )
        return self._parts

    def commit(
        self, loss: torch.Tensor | float = 0.0, *, good: bool = True, values: Sequence[float] = ()
    ) -> bool:
        """Sum the gradients over the groups in place, and vote.

        Args:
            loss: This group's part of the loss; of a batch in parts, those given to `add` count.
            good: Whether this group trusts its gradients. If one group does not, none commits.
            values: Further numbers to be summed, as many in every group.

        Returns:
            Whether every group has all sums: step the optimizer then. If not, the gradients are
            gone, and the next attempt at this step follows.
        """
        return self._commit(self, loss, good, values)
