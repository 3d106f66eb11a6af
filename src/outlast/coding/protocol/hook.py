"""Decoding inside DDP's own reduction, where the survivors are known before the last microbatch.

DDP reduces buckets of gradients while the backward pass still runs. A decoding weight that is known
by then costs nothing: the hook multiplies the bucket, and the sum overlaps with the rest of the
backward pass as before. Encoding is the caller's, by weights on losses::

    ddp = DistributedDataParallel(model)
    state = DecodingState(code, worker=dist.get_rank())
    ddp.register_comm_hook(state, coded_hook)

    with ddp.no_sync():                              # sums in .grad, reduces nothing
        for chunk, weight in state.first_chunks():
            (weight * loss_of(ddp(data(step, chunk)))).backward()
    certificate = state.agree(step)                  # who survives: equal on all workers
    chunk, weight = state.last_chunk
    (weight * loss_of(ddp(data(step, chunk)))).backward()

A worker says on a board that it has done all but its last chunk. The one whose word makes the
announced workers sufficient publishes them as the survivors, or any other does when the deadline
passes; who is late learns of it between two chunks, and drops those before its last. It has the
weight 0: what it sends is zeros, whatever its backward pass gives, but it has to run one, since DDP
waits for its buckets. So a slow worker costs the time of one chunk instead of all of its load, and
a dead one ends the run. `outlast.coding.protocol.coded` adds up after the backward pass: it decides
later, goes on without the dead, and overlaps nothing.
"""

# No annotations as strings in this module: DDP examines those of a hook.

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from outlast.coding.certificate import Certificate
from outlast.coding.code import Decoder, GradientCode, Survivors
from outlast.coding.protocol.board import Board, board_name
from outlast.coding.protocol.decider import Decider, synchronise
from outlast.coding.protocol.decoding import Decoding, Rules
from outlast.coding.protocol.weighting import LossWeights
from outlast.errors import CodingError

_LOOK_SECONDS = 0.01


class DecodingState:
    """What `coded_hook` needs to know, and the agreement on it.

    Until the first `decode` or `agree` all workers count as survivors.

    Args:
        code: A real code with one worker per process of the group.
        worker: This process's number among the workers: its rank in the group, for `agree`.
        group: The group that DDP reduces over; the default one if None.
        decoder: See `GradientCode.decode`.
        deadline_seconds: How long a worker that is at its last chunk waits for others in `agree`
            before the survivors are those that are there by then.
        largest_error: The `Certificate.error` that is good enough for `agree`; 0 asks for the exact
            gradient.

    Attributes:
        weight: What this worker's buckets are multiplied by.

    Raises:
        CodingError: For a complex code, a worker that the code does not have, or settings out of
            range.
    """

    def __init__(
        self,
        code: GradientCode,
        worker: int,
        *,
        group: ProcessGroup | None = None,
        decoder: Decoder = "optimal",
        deadline_seconds: float = 60.0,
        largest_error: float = 0.0,
    ) -> None:
        if not 0 < deadline_seconds < float("inf"):
            raise CodingError(
                f"deadline_seconds = {deadline_seconds} is not a positive, finite number"
            )
        self._losses = LossWeights(code, worker)
        rules = Rules("raise", largest_error, decoder)
        self._decoding = Decoding(code, rules, [getattr(torch, code.dtype)])
        self.group = group
        self._deadline_seconds = deadline_seconds
        self._decider: Decider | None = None
        self._round, self._met, self._finished = 0, False, True
        self.weight = 1.0
        self.decode(range(code.workers))

    def decode(self, survivors: Survivors) -> Certificate:
        """Take the weights that decode for `survivors`; returns what they are worth."""
        decoded = self._losses.code.decode(survivors, self._decoding.rules.decoder)
        self.weight = float(decoded.weights[self._losses.worker])
        return decoded.certificate

    def agree(self, step: int) -> Certificate:
        """Agree on the survivors, before the last chunk, and take the weights that decode for them.

        All workers call it once per step, with the same number, and then run one backward pass that
        reduces.

        Args:
            step: The training step.

        Returns:
            What the decoding is worth.

        Raises:
            LostChunksError: On all workers alike, when those that were at their last chunk by the
                deadline do not decode well enough. The step can be computed again, from gradients
                of zero.
            CodingError: When the group does not fit the code, the workers disagree about the step,
                the board does not answer, or this worker was ready before an error and is not now.
        """
        decider, workers = self._decider_now(), frozenset(range(self._losses.code.workers))
        if self._finished and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            synchronise([torch.device("cuda", torch.cuda.current_device())])
        decision = decider.agree(
            self._round,
            0,
            step=step,
            members=workers,
            sufficient=self._decoding.good_enough,
            seconds=self._deadline_seconds if self._finished else None,
        )
        self._finished = True
        useful = self._decoding.good_enough(decision.survivors)
        if useful and self._met:
            # The survivors come from the sum of the round before, so everybody has left that round.
            decider.forget(self._round - 1, 0, workers)
        self._round, self._met = self._round + 1, useful
        if not useful:
            raise self._decoding.lost(decision.survivors, step)
        return self.decode(sorted(decision.survivors))

    def chunks(self) -> Iterator[tuple[int, float]]:
        """This worker's chunks and the weights of their losses."""
        return iter(self._losses.coefficients.items())

    def first_chunks(self) -> Iterator[tuple[int, float]]:
        """All chunks of this worker but the last, and the weights of their losses.

        Ends early when the survivors were decided without this worker. A loop that is left before
        the end makes it no survivor.
        """
        decider, next_look = self._decider_now(), 0.0
        self._finished = False
        for chunk, weight in list(self.chunks())[:-1]:
            if time.monotonic() >= next_look:
                if decider.is_decided_without(self._round, 0):
                    return
                next_look = time.monotonic() + _LOOK_SECONDS
            yield chunk, weight
        self._finished = True

    @property
    def last_chunk(self) -> tuple[int, float]:
        """This worker's last chunk and the weight of its loss.

        Raises:
            CodingError: When it has none.
        """
        if not self._losses.coefficients:
            raise CodingError(
                f"worker {self._losses.worker} has no chunks, but DDP waits for its backward pass: "
                "run one on any samples, with the weight 0"
            )
        return list(self.chunks())[-1]

    def _decider_now(self) -> Decider:
        """Made at the first use, since `decode` needs no process group."""
        if self._decider is None:
            size, workers = dist.get_world_size(self.group), self._losses.code.workers
            if size != workers:
                raise CodingError(
                    f"the code is for {workers} workers, but the group has {size} processes: "
                    f"build it for {size}"
                )
            self._decider = Decider(
                Board(board_name("hook", self.group)),
                worker=self._losses.worker,
                workers=workers,
                timeout_seconds=self._deadline_seconds,
            )
        return self._decider


def coded_hook(state: DecodingState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A DDP communication hook: this worker's weight times its bucket, summed over the workers.

    DDP divides nothing once a hook is registered, so the sum is the decoded gradient.
    """
    buffer = bucket.buffer()
    if state.weight == 0.0:
        # Not a product, since 0 times infinity would make every worker's gradient a NaN.
        buffer.zero_()
    elif state.weight != 1.0:
        buffer.mul_(state.weight)
    work = dist.all_reduce(buffer, group=state.group, async_op=True)
    assert work is not None
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(
        lambda done: done.value()[0]
    )
    return future
