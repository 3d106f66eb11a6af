"""A parameter server that goes on with the first messages that decode: the hub's side.

The hub sends parameters, workers send coded gradients, and the hub decodes as soon as enough are
there, whoever sent them. Five lines on rank 0:

    hub = Hub(model, code, deadline_seconds=30.0)
    for step in range(steps):
        hub.publish(step)
        gradients, outcome = hub.collect(step)      # also in the parameters' .grad
        optimizer.step()

and on every other rank (`outlast.coding.protocol.worker`):

    worker = Worker(model, code)
    for step in worker.steps():
        for chunk in worker.chunks:
            loss(model, batch(step, chunk)).backward()
            worker.add(chunk)
        worker.send(step)

What is sent back are parameters, not gradients: they are as many bytes, and a worker that was late
needs no history. It gets the newest ones and skips the steps that it missed; at most one older
version can be on its way to it. The gradient is that of the sum of all chunks' losses: divide each
loss by `code.chunks` for their mean. Buffers of the model (running means) are not sent.

With a `PartialCode` a slow worker's finished chunks count although it has not finished all: workers
tell what they have finished, and send when the hub has told them what to encode.

With n workers and s = `code.tolerance` the hub holds up to n + s + 1 places for messages, one for
each worker and one for each of the s + 1 that can arrive at the same time; and the parameters in a
place of their own, once more for each worker that stopped while they were on the way to it. Each
place is as long as the longest message, in general the parameters. With a `PartialCode` the plans
that were not sent yet take n more. There are 2n + s + 1 threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from outlast.coding.codes.blocks import BlockCode, as_blocks
from outlast.coding.codes.partial import PartialCode
from outlast.coding.protocol.encoding import Encoder, Shelf, recombine_
from outlast.coding.protocol.flat import FlatGradients
from outlast.coding.protocol.leader import Leader
from outlast.coding.protocol.messages import Header, Kind, Layout
from outlast.coding.protocol.post import Post, check_seconds
from outlast.coding.protocol.rounds import Collected, PartialRound, Round, WholeRound
from outlast.errors import CodingError, LostChunksError

if TYPE_CHECKING:
    from torch import nn

    from outlast.coding.code import GradientCode
    from outlast.coding.codes.partial import PartialDecoding

OnLoss = Literal["raise", "rescale"]


class Hub(Leader):
    """Rank 0 of a parameter server.

    It is worker 0 itself where the job has as many ranks as the code has workers, and no worker
    where the job has one rank more.

    Args:
        model: Its parameters are trained; equal on all ranks in order and shape.
        code: Who computes what and what is sent.
        deadline_seconds: Longest time from publishing a step to its gradient.
        answer_seconds: With a `PartialCode`, longest wait for the messages of a plan; may come on
            top of the deadline.
        largest_error: `collect` ends when decoding leaves no more than this; see
            `Certificate.error`.
        on_loss: What follows when the deadline comes, or nobody is left, before that: ``raise``
            `LostChunksError`, or ``rescale`` the best decoding so that its coefficients sum to the
            number of chunks.

    Raises:
        CodingError: For settings out of range, or a number of ranks that does not fit the code.
    """

    def __init__(
        self,
        model: nn.Module,
        code: GradientCode | BlockCode | PartialCode,
        *,
        deadline_seconds: float,
        answer_seconds: float = 5.0,
        largest_error: float = 0.0,
        on_loss: OnLoss = "raise",
    ) -> None:
        check_seconds("deadline_seconds", deadline_seconds)
        check_seconds("answer_seconds", answer_seconds)
        if largest_error < 0:
            raise CodingError(f"largest_error = {largest_error} is below 0")
        if on_loss not in {"raise", "rescale"}:
            raise CodingError(f"on_loss = {on_loss!r} is not one of raise, rescale")
        self.code = code if isinstance(code, PartialCode) else as_blocks(code)
        self.works = hub_works(self.code.workers)
        self.answer_seconds = answer_seconds
        self.largest_error = largest_error
        self.on_loss = on_loss
        gradients = FlatGradients(model.parameters())
        parameters = Layout(gradients.buffers)
        self._coded = coded_layout(gradients, self.code)
        capacity = letter_bytes(parameters, self._coded, self.code)
        slots = max(self.code.tolerance, 0) + 1
        super().__init__(
            gradients,
            parameters,
            Post(range(dist.get_world_size()), capacity, slots=slots),
            deadline_seconds=deadline_seconds,
            shift=0 if self.works else 1,
        )
        self._own = share(gradients, self.code, 0) if self.works else None

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunks that the hub itself computes; none where it is no worker."""
        return self._own.chunks if self._own is not None else ()

    def publish(self, step: int) -> None:
        """Send the model's parameters to all workers, who begin this step; returns at once.

        The parameters have no gradients afterwards.

        Raises:
            CodingError: When the step is not after the last one.
        """
        super().publish(step)
        if self._own is not None:
            self._own.begin()

    def add(self, chunk: int) -> bool:
        """Where the hub is a worker: the parameters' gradients are those of `chunk`.

        Returns:
            True, as `Worker.add` does while the step is still wanted.

        Raises:
            CodingError: When the hub is no worker, or for a chunk that is not its own.
        """
        if self._own is None:
            raise CodingError("this hub is no worker: the job has one rank more than the code")
        self._own.add(chunk)
        return True

    def collect(self, step: int) -> tuple[FlatGradients, Collected]:
        """Wait for enough messages and decode them.

        Returns:
            The sum of the chunks' gradients, which are the parameters' ``.grad`` as well until the
            next call, and how it came about.

        Raises:
            CodingError: When the step is not the one that was published last.
            LostChunksError: When too few messages came and ``on_loss = "raise"``, or none at all.
        """
        self._check(step)
        current = self._round(step)
        try:
            late = self._gather(current)
            outcome = self._decode(current, late)
        finally:
            self._release(current)
        self.gradients.write_back()
        return self.gradients, outcome

    def _round(self, step: int) -> Round:
        """The step with what the hub itself contributes."""
        if isinstance(self.code, PartialCode):
            partial = PartialRound(
                self.code,
                step,
                self.largest_error,
                announce=lambda plan, number: self._announce(partial, plan, number),
                answer_seconds=self.answer_seconds,
                incomplete=self.on_loss == "rescale",
            )
            for chunk in self._own.added if self._own is not None else ():
                partial.finish(0, chunk)
            return partial
        whole = WholeRound(self.code, step, self.largest_error)
        if isinstance(self._own, Encoder) and self._own.finished:
            size = self._coded.payload_bytes
            letter = self._post.letter(Header(Kind.CODED, step, payload_bytes=size))
            self._own.write(self._coded.views(letter.payload))
            whole.take(letter)
        return whole

    def _announce(self, current: PartialRound, plan: PartialDecoding, number: int) -> None:
        """Tell the workers that a plan counts on what to encode."""
        for worker in range(plan.workers):
            coefficients = plan.coefficients(worker)
            if not coefficients.any():
                continue
            chunks = plan.assignment.chunks_of(worker)
            if worker == 0 and isinstance(self._own, Shelf):
                header = Header(
                    Kind.CODED,
                    current.step,
                    plan=number,
                    payload_bytes=self._coded.payload_bytes,
                )
                letter = self._post.letter(header)
                self._own.write(self._coded.views(letter.payload), chunks, coefficients)
                current.take(letter)
                continue
            content = torch.zeros(self.code.chunks, plan.parts, dtype=torch.float64)
            content[torch.from_numpy(chunks)] = torch.from_numpy(coefficients)
            size = content.numel() * content.element_size()
            header = Header(Kind.PLAN, current.step, worker=worker, plan=number, payload_bytes=size)
            letter = self._post.letter(header)
            letter.payload.copy_(content.view(-1).view(torch.uint8))
            self._post.send(letter, [worker + self._shift])

    def _decode(self, current: Round, late: int) -> Collected:
        decoded = current.decoded()
        scale = 1.0
        if not current.good:
            self._refuse(current)
            scale = decoded.certificate.scale
        self.gradients.zero_()
        for worker, letter in current.letters.items():
            views = self._coded.views(letter.payload)
            recombine_(self.gradients.buffers, views, decoded.weights[:, worker])
        self.gradients.mul_(scale)
        return Collected(
            step=current.step,
            survivors=tuple(sorted(current.letters)),
            stragglers=tuple(w for w in range(self.code.workers) if w not in current.letters),
            gone=self.gone,
            late=late,
            plans=current.plans,
            certificate=decoded.certificate,
            scale=scale,
            payload_bytes=self._coded.payload_bytes,
            received_bytes=self._received(),
            seconds=self._waited(),
        )

    def _refuse(self, current: Round) -> None:
        """Raise unless what is there may be rescaled."""
        certificate = current.decoded().certificate
        if self.on_loss == "rescale" and certificate.scale < float("inf"):
            return
        missing = [w for w in range(self.code.workers) if w not in current.letters]
        raise LostChunksError(
            f"step {current.step}: waited {self._waited():.3g} s for messages of "
            f"workers {missing}, of whom {list(self.gone)} are gone; without them the error is "
            f"{certificate.error:.3g}, above largest_error = {self.largest_error:g}",
            current.lost(),
        )


def hub_works(workers: int) -> bool:
    """Whether rank 0 is a worker itself.

    Raises:
        CodingError: When there is no process group, or it has neither as many ranks as the code
            has workers, nor one more.
    """
    if not dist.is_initialized():
        raise CodingError(
            "there is no process group yet: call torch.distributed.init_process_group first"
        )
    ranks = dist.get_world_size()
    if ranks not in {workers, workers + 1}:
        raise CodingError(
            f"the job has {ranks} ranks, but a code for {workers} workers needs {workers} (the hub "
            f"works) or {workers + 1} (it only decodes)"
        )
    return ranks == workers


def coded_layout(gradients: FlatGradients, code: BlockCode | PartialCode) -> Layout:
    """How a worker's coded message lies in a letter."""
    is_complex = isinstance(code, BlockCode) and code.entries.dtype.kind == "c"
    return Layout(gradients.buffers, code.parts, is_complex=is_complex)


def letter_bytes(parameters: Layout, coded: Layout, code: BlockCode | PartialCode) -> int:
    """Longest payload between hub and workers."""
    plan = 8 * code.chunks * code.parts if isinstance(code, PartialCode) else 0
    return max(parameters.payload_bytes, coded.payload_bytes, plan)


def share(gradients: FlatGradients, code: BlockCode | PartialCode, worker: int) -> Encoder | Shelf:
    """What a worker has of a step; uses `gradients` as scratch."""
    layout = coded_layout(gradients, code)
    if isinstance(code, PartialCode):
        return Shelf(gradients, layout, code.order(worker).tolist())
    chunks = code.assignment.chunks_of(worker).tolist()
    return Encoder(gradients, layout, chunks, code.coefficients(worker))
