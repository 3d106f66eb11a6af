"""The processes that still work together, and the collectives among them."""

from __future__ import annotations

import datetime
import threading
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup, Store, Work

_SLICE_SECONDS = 0.25
_DEVICE_LOOK_SECONDS = 5e-4


class PeerLostError(CodingError):
    """A collective failed or did not end in time: a member is dead or has stopped."""


class Members:
    """A process group that can lose members.

    Args:
        group: The process group to begin with; the default one if None. It is only read: losing a
            member makes a group of its own for the others.
        timeout_seconds: Longest time that a collective may take.

    Attributes:
        ranks: Global ranks of the members, ascending.
        epoch: How often members were lost.
        sums: Sums begun in this epoch.

    Raises:
        CodingError: When there is no process group.
    """

    def __init__(self, group: ProcessGroup | None = None, timeout_seconds: float = 60.0) -> None:
        if not dist.is_initialized():
            raise CodingError(
                "there is no process group yet: call torch.distributed.init_process_group first"
            )
        self._group: Any = dist.group.WORLD if group is None else group
        self.timeout_seconds = timeout_seconds
        self.ranks = tuple(dist.get_process_group_ranks(self._group))
        self.rank = dist.get_rank()
        self.epoch = 0
        self.sums = 0

    @property
    def index(self) -> int:
        """This process's place among the members."""
        return self.ranks.index(self.rank)

    def __len__(self) -> int:
        return len(self.ranks)

    def sum_(self, tensors: Sequence[Tensor], broken: Callable[[], bool] | None = None) -> None:
        """Sum each tensor over the members, in place.

        Args:
            tensors: Equal shapes and types on all members.
            broken: Asked now and then during the wait; when it says yes, another member has seen
                the sum fail, and this one gives up too.

        Raises:
            PeerLostError: When a member did not take part. The tensors must not be used again: a
                collective that was given up may still write to them (torch, gloo).
        """
        deadline = time.monotonic() + self.timeout_seconds
        self.sums += 1
        try:
            works = [self._group.allreduce([tensor]) for tensor in tensors]
            for work, tensor in zip(works, tensors, strict=True):
                _wait(work, deadline, broken, on_device=tensor.is_cuda)
        except (RuntimeError, TimeoutError) as error:
            raise PeerLostError(
                f"summing gradients over ranks {list(self.ranks)} failed: {error}"
            ) from error

    def keep(self, ranks: Collection[int], name: str, store: Store | None = None) -> None:
        """Go on with `ranks` only; all of them call this with the same set, nobody else does.

        Args:
            ranks: Global ranks.
            name: Under which they meet: equal on all of them, and never used before.
            store: Where they meet; the default process group's store if None.

        Raises:
            CodingError: When this process is not among them.
            RuntimeError: When they do not all come within the timeout.
        """
        if self.rank not in ranks:
            raise CodingError(f"rank {self.rank} is not among the members {sorted(ranks)} to keep")
        self.ranks = tuple(sorted(ranks))
        self.epoch += 1
        self.sums = 0
        timeout = datetime.timedelta(seconds=self.timeout_seconds)
        if dist.get_backend(dist.group.WORLD) != "gloo":
            self._group = dist.new_group(
                list(self.ranks), timeout=timeout, use_local_synchronization=True
            )
            return
        # torch.distributed.new_group counts this process's groups into the name under which they
        # meet, and survivors may have made different ones.
        below = _get_default_store() if store is None else store
        meeting = dist.PrefixStore(f"outlast/group/{name}", below.clone())  # type: ignore[attr-defined]
        self._group = dist.ProcessGroupGloo(meeting, self.index, len(self.ranks), timeout)


def _wait(
    work: Work, deadline: float, broken: Callable[[], bool] | None, *, on_device: bool
) -> None:
    """Wait for a collective in slices, since gloo's own wait cannot be left early."""
    ended = threading.Event()
    if not on_device:
        work.get_future().add_done_callback(lambda _: ended.set())
    look = time.monotonic() + _SLICE_SECONDS
    # A future of NCCL is done when the collective is queued; what it says itself is true.
    while not (work.is_completed() if on_device else ended.wait(_SLICE_SECONDS)):
        if on_device:
            time.sleep(_DEVICE_LOOK_SECONDS)
        if time.monotonic() < look:
            continue
        look = time.monotonic() + _SLICE_SECONDS
        if broken is not None and broken():
            raise TimeoutError("another member has lost a peer")
        if time.monotonic() > deadline:
            raise TimeoutError("the time is over")
    work.wait()
