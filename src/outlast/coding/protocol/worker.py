"""The workers' side of the parameter server; see `outlast.coding.protocol.server`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from outlast.coding.codes.blocks import BlockCode, as_blocks
from outlast.coding.codes.partial import PartialCode
from outlast.coding.protocol.encoding import Encoder, Shelf
from outlast.coding.protocol.flat import FlatGradients
from outlast.coding.protocol.follower import Follower
from outlast.coding.protocol.leader import LEADER
from outlast.coding.protocol.messages import Header, Kind, Layout, Letter
from outlast.coding.protocol.post import Post, check_seconds
from outlast.coding.protocol.server import coded_layout, hub_works, letter_bytes, share
from outlast.errors import CodingError

if TYPE_CHECKING:
    from torch import nn

    from outlast.coding.code import GradientCode


class Worker(Follower):
    """A rank that computes chunks for the hub.

    Args:
        model: As the hub's; its parameters are overwritten by the hub's at each step.
        code: As the hub's.
        patience_seconds: Longest wait for the hub to publish another step.

    Raises:
        CodingError: When the number of ranks does not fit the code, or this is the hub's rank.
    """

    def __init__(
        self,
        model: nn.Module,
        code: GradientCode | BlockCode | PartialCode,
        *,
        patience_seconds: float = 600.0,
    ) -> None:
        check_seconds("patience_seconds", patience_seconds)
        self.code = code if isinstance(code, PartialCode) else as_blocks(code)
        shift = 0 if hub_works(self.code.workers) else 1
        rank = dist.get_rank()
        if rank == LEADER:
            raise CodingError("rank 0 is the hub: make a Hub there")
        self.worker = rank - shift
        gradients = FlatGradients(model.parameters())
        parameters = Layout(gradients.buffers)
        self._coded = coded_layout(gradients, self.code)
        self._share = share(gradients, self.code, self.worker)
        capacity = letter_bytes(parameters, self._coded, self.code)
        super().__init__(
            gradients,
            parameters,
            Post([LEADER], capacity),
            name=f"worker {self.worker}",
            patience_seconds=patience_seconds,
        )

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunks that this worker computes, in this order."""
        return self._share.chunks

    def add(self, chunk: int) -> bool:
        """Say that the parameters' gradients are those of `chunk`; they are moved away.

        Returns:
            Whether the step is still wanted; if not, the loop over chunks may be left.

        Raises:
            CodingError: For a chunk of another worker, or one that was added before.
        """
        with self._changed:
            self._share.add(chunk)
        if isinstance(self._share, Shelf):
            header = Header(Kind.FINISHED, self._step, worker=self.worker, chunk=chunk)
            self._post.send(self._post.letter(header), [LEADER])
        return self.wanted

    def send(self, step: int) -> bool:
        """Send the coded message, unless the step is over; whether it is still wanted.

        With a `PartialCode` nothing is to be sent here: the hub asks for what it needs.

        Raises:
            CodingError: When chunks are missing, or for another step than the current one.
        """
        if step != self._step:
            raise CodingError(f"step {step} cannot be sent, the worker is at step {self._step}")
        if not self.wanted:
            return False
        if isinstance(self._share, Encoder):
            if not self._share.finished:
                raise CodingError(f"step {step} cannot be sent before {self.chunks} are added")
            letter = self._coded_letter(step)
            self._share.write(self._coded.views(letter.payload))
            self._post.send(letter, [LEADER])
        return True

    def _coded_letter(self, step: int, plan: int = 0) -> Letter:
        size = self._coded.payload_bytes
        header = Header(Kind.CODED, step, worker=self.worker, plan=plan, payload_bytes=size)
        return self._post.letter(header)

    def _begin(self, step: int) -> None:
        """Begin an empty message."""
        del step
        self._share.begin()

    def _answer(self, letter: Letter) -> list[Letter]:
        """Encode what a plan asks for; the main thread may be in the middle of a chunk."""
        header = letter.header
        asked = header.kind == Kind.PLAN and header.step == self._step
        if asked and isinstance(self._share, Shelf):
            rows = letter.payload.view(torch.float64).view(self.code.chunks, -1).numpy()
            chunks = [chunk for chunk in self.chunks if rows[chunk].any()]
            answer = self._coded_letter(header.step, header.plan)
            self._share.write(self._coded.views(answer.payload), chunks, rows[chunks])
            self._post.send(answer, [LEADER])
        return [letter]
