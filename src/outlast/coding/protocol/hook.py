"""Decoding inside DDP's own reduction, where the survivors are known before the last microbatch.

DDP reduces buckets of gradients while the backward pass still runs. A decoding weight that is known
by then costs nothing: the hook multiplies the bucket, and the sum overlaps with the rest of the
backward pass as before. Encoding is the caller's, by weights on losses::

    ddp = DistributedDataParallel(model)
    state = DecodingState(code, worker=dist.get_rank())
    ddp.register_comm_hook(state, coded_hook)

    own = list(state.chunks())
    with ddp.no_sync():                              # sums in .grad, reduces nothing
        for chunk, weight in own[:-1]:
            (weight * loss_of(ddp(data(step, chunk)))).backward()
    certificate = state.decode(survivors)            # equal on all workers, see below
    chunk, weight = own[-1]
    (weight * loss_of(ddp(data(step, chunk)))).backward()

All workers must take the same survivors (`outlast.coding.protocol.decider` makes them agree), and
those must finish their last microbatch. A worker that is not among them has the weight 0: what it
sends is zeros, whatever its backward pass gives, but it has to run one, since DDP waits for its
buckets. Where it is not known in time who survives, `outlast.coding.protocol.coded` adds up after
the backward pass.
"""

# No annotations as strings in this module: DDP examines those of a hook.

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from outlast.coding.certificate import Certificate
from outlast.coding.code import Decoder, GradientCode, Survivors
from outlast.coding.protocol.weighting import LossWeights


class DecodingState:
    """What `coded_hook` needs to know.

    Until the first `decode` all workers count as survivors.

    Args:
        code: A real code with one worker per process of the group.
        worker: This process's number among the workers.
        group: The group that DDP reduces over; the default one if None.
        decoder: See `GradientCode.decode`.

    Attributes:
        weight: What this worker's buckets are multiplied by.

    Raises:
        CodingError: For a complex code, or a worker that the code does not have.
    """

    def __init__(
        self,
        code: GradientCode,
        worker: int,
        *,
        group: ProcessGroup | None = None,
        decoder: Decoder = "optimal",
    ) -> None:
        self._losses = LossWeights(code, worker)
        self.group = group
        self._decoder: Decoder = decoder
        self.weight = 1.0
        self.decode(range(code.workers))

    def decode(self, survivors: Survivors) -> Certificate:
        """Take the weights that decode for `survivors`; returns what they are worth."""
        decoded = self._losses.code.decode(survivors, self._decoder)
        self.weight = float(decoded.weights[self._losses.worker])
        return decoded.certificate

    def chunks(self) -> Iterator[tuple[int, float]]:
        """This worker's chunks and the weights of their losses."""
        return iter(self._losses.coefficients.items())


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
