"""Gradients of single chunks, and their sum, on one process."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from outlast.coding.protocol.fingerprint import Fingerprint, Fingerprints
from outlast.coding.protocol.flat import FlatGradients
from outlast.coding.protocol.interrupt import Interrupt
from outlast.coding.protocol.randomness import keyed
from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from outlast.coding.protocol.team import Team


class ChunkGradients:
    """Computes chunks one after the other, and adds up those that count.

    Two flat buffers: the gradient of the chunk at hand, and the sum. The parameters' gradients lie
    in the first.

    Args:
        model: The model; its parameters' gradients are computed.
        team: The processes that compute it together.
        seed: Of random numbers inside chunks.
        unwanted: Whether a chunk that is being computed would come too late; asked between layers
            where the process is alone in its team.

    Raises:
        CodingError: Where there is nothing to train.
    """

    def __init__(
        self, model: nn.Module, team: Team, *, seed: int, unwanted: Callable[[], bool]
    ) -> None:
        self._team, self._seed = team, seed
        self._sums = FlatGradients(model.parameters())
        if not self._sums.buffers:
            raise CodingError("the model has no parameter that requires a gradient")
        self._chunk = FlatGradients(model.parameters())
        self._fingerprints = Fingerprints()
        # Layers of a team's processes wait for each other: none may leave in the middle.
        self._interrupt = Interrupt(model, unwanted) if team.size == 1 else None

    @property
    def device(self) -> torch.device:
        """Where gradients are."""
        return self._sums.buffers[0].device

    @property
    def dtype(self) -> str:
        """Type of the (first) gradients."""
        return str(self._sums.buffers[0].dtype).removeprefix("torch.")

    def compute(
        self, step: int, chunk: int, loss_of: Callable[[int], torch.Tensor]
    ) -> tuple[torch.Tensor, Fingerprint]:
        """Both passes of a chunk, to their end also on a device that runs behind the host.

        Raises:
            Abandoned: When the chunk is no longer wanted.
        """
        self._chunk.zero_()
        self._chunk.write_back()
        place = chunk * self._team.size + self._team.rank
        listening = (
            contextlib.nullcontext() if self._interrupt is None else self._interrupt.listening()
        )
        with keyed(self._seed, step, place), listening:
            loss = loss_of(chunk)
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), self._fingerprints.take(self._chunk.buffers)

    def count(self, *, first: bool) -> None:
        """Add the chunk at hand to the sum, which begins with the first."""
        if first:
            self._sums, self._chunk = self._chunk, self._sums
        else:
            self._sums.plus_(self._chunk)

    def buffers(self, *, empty: bool) -> list[torch.Tensor]:
        """A copy of the sum for a collective; the sum itself stays for another one.

        Args:
            empty: Whether no chunk was counted.
        """
        if empty:
            self._sums.zero_()
        self._chunk.copy_(self._sums)
        return self._chunk.buffers

    def give_up(self) -> None:
        """Do without the buffers of a collective that has failed and may still write to them."""
        self._chunk = FlatGradients(self._sums.parameters)

    def like(self) -> list[torch.Tensor]:
        """Buffers of zeros of the same shapes."""
        return FlatGradients(self._sums.parameters).buffers

    def finish(self, scale: float) -> None:
        """Make the collective's result, scaled, the parameters' gradients."""
        self._chunk.mul_(scale)
        self._chunk.write_back()

    def close(self) -> None:
        """Take the hooks off the model."""
        if self._interrupt is not None:
            self._interrupt.remove()
