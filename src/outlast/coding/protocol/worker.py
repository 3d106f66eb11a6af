"""The workers' side of the parameter server; see `outlast.coding.protocol.server`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from outlast.coding.codes.blocks import BlockCode, as_blocks
from outlast.coding.codes.partial import PartialCode
from outlast.coding.protocol.encoding import Encoder, Shelf, clear
from outlast.coding.protocol.flat import FlatGradients
from outlast.coding.protocol.messages import Header, Kind, Layout, Letter, read_parameters
from outlast.coding.protocol.post import Post
from outlast.coding.protocol.server import HUB, coded_layout, hub_works, letter_bytes, share
from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from outlast.coding.code import GradientCode

_PAUSE_SECONDS = 1.0


class Worker:
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
        if not patience_seconds > 0:
            raise CodingError(f"patience_seconds = {patience_seconds} is not above 0")
        self.code = code if isinstance(code, PartialCode) else as_blocks(code)
        shift = 0 if hub_works(self.code.workers) else 1
        rank = dist.get_rank()
        if rank == HUB:
            raise CodingError("rank 0 is the hub: make a Hub there")
        self.worker = rank - shift
        self.patience_seconds = patience_seconds
        self._gradients = FlatGradients(model.parameters())
        self._parameters = Layout(self._gradients.buffers)
        self._coded = coded_layout(self._gradients, self.code)
        self._share = share(self._gradients, self.code, self.worker)
        capacity = letter_bytes(self._parameters, self._coded, self.code)
        self._post = Post([HUB], capacity)
        self._changed = threading.Condition()
        self._newest: Letter | None = None
        self._published = -1
        self._step = -1
        self._over = False
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunks that this worker computes, in this order."""
        return self._share.chunks

    def steps(self) -> Iterator[int]:
        """The steps that the hub publishes; the model has their parameters and no gradients.

        Skips missed ones.

        Raises:
            CodingError: When the hub is gone, or publishes nothing for `patience_seconds`.
        """
        while True:
            letter = self._await_newer()
            if letter is None:
                return
            read_parameters(self._gradients, self._parameters, letter)
            self._post.buffers.release(letter)
            clear(self._gradients)
            with self._changed:
                self._step = letter.header.step
                self._share.begin()
            yield self._step

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
            self._post.send(self._post.letter(header), [HUB])
        return self.wanted

    @property
    def wanted(self) -> bool:
        """Whether the hub has not gone on to a later step."""
        return self._published <= self._step and not self._over

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
            self._post.send(letter, [HUB])
        return True

    def _coded_letter(self, step: int, plan: int = 0) -> Letter:
        size = self._coded.payload_bytes
        header = Header(Kind.CODED, step, worker=self.worker, plan=plan, payload_bytes=size)
        return self._post.letter(header)

    def _answer(self, letter: Letter) -> None:
        """Encode what a plan asks for; the main thread may be in the middle of a chunk."""
        header = letter.header
        if header.step != self._step or not isinstance(self._share, Shelf):
            return
        rows = letter.payload.view(torch.float64).view(self.code.chunks, -1).numpy()
        chunks = [chunk for chunk in self.chunks if rows[chunk].any()]
        answer = self._coded_letter(header.step, header.plan)
        self._share.write(self._coded.views(answer.payload), chunks, rows[chunks])
        self._post.send(answer, [HUB])

    def _await_newer(self) -> Letter | None:
        """The newest parameters, once they are newer than the worker's; None at the end."""
        with self._changed:
            came = self._changed.wait_for(
                lambda: self._newest is not None or self._over or HUB in self._post.gone,
                self.patience_seconds,
            )
            letter, self._newest = self._newest, None
            if self._over:
                return None
            if letter is not None:
                return letter
        why = "rank 0 is gone" if came else f"waited {self.patience_seconds:g} s in vain"
        raise CodingError(f"{why}; worker {self.worker} awaited a step after step {self._step}")

    def _listen(self) -> None:
        """Take in what the hub sends while the worker computes."""
        while not self._over:
            letter = self._post.receive(_PAUSE_SECONDS)
            if letter is None and HUB in self._post.gone:
                with self._changed:
                    self._changed.notify_all()
                return
            if letter is not None:
                self._take(letter)

    def _take(self, letter: Letter) -> None:
        with self._changed:
            dropped: Letter | None = letter
            if letter.header.kind == Kind.STOP:
                self._over = True
            elif letter.header.kind == Kind.PARAMETERS and letter.header.step > self._published:
                self._published = letter.header.step
                dropped, self._newest = self._newest, letter
            elif letter.header.kind == Kind.PLAN:
                self._answer(letter)
            self._changed.notify_all()
        if dropped is not None:
            self._post.buffers.release(dropped)
