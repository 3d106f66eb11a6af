"""Members of a process group that survives losses, and their re-rendezvous after one.

Assumption: a process that does not report itself within the grace time is dead, or will find out
that it was left behind before it does any harm. The first to see all members, or the end of the
grace time, decides who remains; what it writes down first holds for all.
"""

from __future__ import annotations

import datetime
import itertools
import json
import threading
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from outlast.coding.protocol.key_value_store import StoreLostError
from outlast.errors import CodingError, LeftBehindError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup, Store, Work

    from outlast.coding.protocol.key_value_store import KeyValueStore


_SLICE_SECONDS = 0.25
_DEVICE_LOOK_SECONDS = 5e-4
_LOOK_SECONDS = 0.02
_STANDING, _FALLEN = "standing", "fallen"


class PeerLostError(CodingError):
    """A collective failed or did not end in time: a member is dead or has stopped."""


class Members:
    """A process group that can lose members.

    Args:
        group: The process group to begin with; the default one if None. It is only read: losing a
            member makes a group of its own for the others.
        timeout_seconds: Longest time that a collective may take.

    Attributes:
        group: Theirs.
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
        self.group: Any = dist.group.WORLD if group is None else group
        self.timeout_seconds = timeout_seconds
        self.ranks = tuple(dist.get_process_group_ranks(self.group))
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
            works = [self.group.allreduce([tensor]) for tensor in tensors]
            for work, tensor in zip(works, tensors, strict=True):
                _wait(work, deadline, broken, on_device=tensor.is_cuda)
        except (RuntimeError, TimeoutError) as error:
            raise PeerLostError(
                f"summing gradients over ranks {list(self.ranks)} failed: {error}"
            ) from error

    def keep(self, ranks: Collection[int], name: str, store: Store | None = None) -> None:
        """Continue with `ranks` only; all of them call this with the same set, nobody else does.

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
            self.group = dist.new_group(
                list(self.ranks), timeout=timeout, use_local_synchronization=True
            )
            return
        # torch.distributed.new_group counts this process's groups into the name under which they
        # meet, and survivors may have made different ones.
        below = _get_default_store() if store is None else store
        meeting = dist.PrefixStore(f"outlast/group/{name}", below.clone())  # type: ignore[attr-defined]
        self.group = dist.ProcessGroupGloo(meeting, self.index, len(self.ranks), timeout)


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


@dataclass(frozen=True)
class Meeting:
    """State of the others, once all have found the restarted store.

    Attributes:
        committed: Whether the others have committed its step already, so that it need not be
            repeated.
        sums_behind: Sums that others have begun, and perhaps given up, but this process has not.
    """

    committed: bool
    sums_behind: int


class Rendezvous:
    """Brings the survivors together again.

    Args:
        key_values: Where they report themselves.
        members: The group that has lost a member.
        timeout_seconds: Longest wait for a decision.
        grace_seconds: Longest wait for members to report themselves.

    Attributes:
        life: Changes when the store has been restarted empty.
    """

    def __init__(
        self,
        key_values: KeyValueStore,
        members: Members,
        timeout_seconds: float,
        grace_seconds: float,
    ) -> None:
        self._key_values = key_values
        self._members = members
        self._timeout_seconds = timeout_seconds
        self._grace_seconds = grace_seconds
        self.life = self._key_values.publish("life", uuid.uuid4().hex[:8])

    def after_loss(self, prefix: str, won: Iterable[int]) -> set[int]:
        """Agree on who continues, and make a process group of them.

        Args:
            prefix: The round in which a member was lost.
            won: Chunks whose gradients this process keeps.

        Returns:
            Chunks whose gradients are kept by those who remain.

        Raises:
            LeftBehindError: When the others have decided without this process.
            CodingError: When those who remain cannot make a group.
        """
        before: Sequence[int] = ()
        for meeting in itertools.count():
            # At a further meeting, some may still be waiting for the group of the one before.
            grace = self._grace_seconds + (self._timeout_seconds if meeting else 0.0)
            going_on, kept = self._met(f"{prefix}/meeting{meeting}", won, grace)
            if self._stands(f"{prefix}/group{meeting}", going_on):
                return kept
            # One of them died since, or else it would fail again.
            if going_on == before:
                break
            before = going_on
        raise CodingError(
            f"ranks {before} are alive, but no process group of them can be made; restart from a "
            "checkpoint"
        )

    def _met(self, prefix: str, won: Iterable[int], grace: float) -> tuple[list[int], set[int]]:
        """Members after this many seconds, and the chunks that they keep."""
        ranks = self._members.ranks
        report = {rank: f"{prefix}/here{rank}" for rank in ranks}
        self._key_values.publish(report[self._members.rank], json.dumps(list(won)))
        decided = f"{prefix}/members"
        deadline = time.monotonic() + grace
        while not self._key_values.has(decided):
            here = [rank for rank in ranks if self._key_values.has(report[rank])]
            if len(here) == len(ranks) or time.monotonic() > deadline:
                self._key_values.publish(decided, json.dumps(here))
                break
            time.sleep(_LOOK_SECONDS)
        text = self._key_values.read(
            decided, self._timeout_seconds, "the decision on who continues"
        )
        going_on = json.loads(text)
        for rank in set(ranks) - set(going_on):
            self._key_values.publish(f"left{rank}", prefix)
        self.check_left_behind()
        if 2 * len(going_on) < len(ranks):
            raise CodingError(
                f"only ranks {going_on} of {list(ranks)} answered within {grace:g} s; the others "
                "may be continuing by themselves: restart from a checkpoint, or allow more "
                "grace_seconds"
            )
        kept = self._key_values.read_all([report[rank] for rank in going_on])
        return going_on, {chunk for text in kept for chunk in json.loads(text)}

    def _stands(self, key: str, ranks: Sequence[int]) -> bool:
        """Make a group of these ranks; whether all of them have it."""
        try:
            self._members.keep(ranks, f"{self._key_values.name}/{key}", self._key_values.below)
        except RuntimeError:
            return self._key_values.publish(key, _FALLEN) == _STANDING
        if self._key_values.add(f"{key}/in") == len(ranks):
            self._key_values.publish(key, _STANDING)
        try:
            return self._key_values.read(key, self._timeout_seconds, "a new group") == _STANDING
        except StoreLostError:
            raise
        except CodingError:
            return self._key_values.publish(key, _FALLEN) == _STANDING

    def check_left_behind(self) -> None:
        """Refuse to continue where the others have decided against it.

        Raises:
            LeftBehindError: Then.
        """
        rank = self._members.rank
        if self._key_values.has(f"left{rank}"):
            raise LeftBehindError(
                f"rank {rank} was silent for more than grace_seconds = {self._grace_seconds:g} "
                "after a process was lost, and the others have continued without it; restart it "
                "from a checkpoint"
            )

    def after_store_loss(self, round_number: int) -> Meeting:
        """Meet again at a restarted store.

        Args:
            round_number: The step that this process was in when the store was lost.

        Raises:
            StoreLostError: When the store is lost again meanwhile.
            CodingError: When the store, or a member, does not come back.
        """
        self._key_values.reopen(self._timeout_seconds)
        self.life = self._key_values.publish("life", uuid.uuid4().hex[:8])
        keys = {rank: f"{self.life}/round{rank}" for rank in self._members.ranks}
        mine = json.dumps([round_number, self._members.sums])
        self._key_values.publish(keys[self._members.rank], mine)
        reports = [
            json.loads(
                self._key_values.read(key, self._timeout_seconds, f"rank {rank} to come back")
            )
            for rank, key in keys.items()
        ]
        rounds, sums = zip(*reports, strict=True)
        if max(rounds) - min(rounds) > 1:
            raise CodingError(
                f"the processes are in steps {sorted(set(rounds))} after the store was restarted; "
                "restart from a checkpoint"
            )
        return Meeting(max(rounds) > round_number, max(sums) - self._members.sums)
