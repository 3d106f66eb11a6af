"""Coded sums from process to process: through a server, or between pairs (gossip).

They are used as the coded all-reduce is, agree on a step's survivors as it does, and leave the same
gradient, bit for bit, on all workers. What differs is the way of the messages. Only survivors whose
decoding weight is not 0 send theirs; who is late takes no part in the sum and gets the result. So a
process that is slow, or stopped, holds nobody up: the others are up to two steps ahead of it, then
wait until the timeout, and continue without it for good.

A sum is committed, through the key-value store, when those who make it have it; where one of them
is lost before, the others decide again without it and repeat the sum from the messages, which are
still in ``grad``. Nothing is regrouped: a dead worker is not sent anything any more.

- `CodedServer`: worker 0 gets the survivors' messages, adds them up and sends the sum to all. It is
  a worker as well; where it is slow it gives up its own chunks when the others suffice. The server
  cannot be replaced: when it dies, all others are told so at once and the run must be restarted.
- `CodedGossip`: survivors exchange their sums in pairs, with twice as many of the messages in it
  after every exchange (recursive doubling; survivors beyond a power of two hand theirs to another
  one before). Both of a pair add the same two numbers, so there is no consensus error to bound: the
  sums are equal to the last bit. They pass the sum on to all others, and where one
  of them dies, the next one does. Nobody is special, and any worker may die.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from outlast.coding.protocol.all_reduce import CodedReduce
from outlast.coding.protocol.gradients import FlatGradients
from outlast.coding.protocol.membership import PeerLostError
from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from outlast.coding.protocol.all_reduce import Decision

_SERVER = 0
_FOREVER = datetime.timedelta(days=365)
_SLICE_SECONDS, _LOOK_SECONDS, _DEVICE_LOOK_SECONDS = 0.25, 0.01, 5e-4
_PIECE_BYTES = 16_000_000
_WATCH_TAG, _TAGS = 0, 2**30
_STAGE_TIMEOUTS = 0.25
_EXCHANGE_TIMEOUTS = 2.0
"""Longest waits, in timeouts: a worker may wait for one timeout before it takes part, and in later
stages longer than in earlier ones, so that who waits for a silent worker itself says so first."""

_OUTCOME_TIMEOUTS = 4.0


class Transfer:
    """Tensors on their way to or from one process, in order; whoever waits has a deadline.

    gloo's point-to-point calls have two traps: a wait that runs out of time closes the connections
    to all ranks, and `is_completed` stays false until somebody waits. So a thread of its own waits
    without end, and is left alone where nothing comes.

    Args:
        move: Begins to send or receive one tensor.
        tensors: Them; not to be used before the end.
    """

    def __init__(self, move: Callable[[Tensor], Any], tensors: Sequence[Tensor]) -> None:
        self._ended = threading.Event()
        self._error: RuntimeError | None = None
        try:
            works = [(move(tensor), tensor) for tensor in tensors]
        except RuntimeError as error:
            works, self._error = [], error
        # A daemon: a wait for a stopped process cannot be ended, and must not keep this one alive.
        threading.Thread(target=self._run, args=(works,), daemon=True).start()

    def _run(self, works: list[tuple[Any, Tensor]]) -> None:
        try:
            for work, tensor in works:
                # A wait of NCCL's returns when the operation is queued.
                while tensor.is_cuda and not work.is_completed():
                    time.sleep(_DEVICE_LOOK_SECONDS)
                if not tensor.is_cuda:
                    work.wait(_FOREVER)
        except RuntimeError as error:
            self._error = error
        self._ended.set()

    @property
    def failed(self) -> bool:
        """True if the other process is known to be gone."""
        return self._ended.is_set() and self._error is not None

    def wait(self, deadline: float, broken: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the end; False if the transfer is not needed any more.

        Args:
            deadline: On ``time.monotonic``.
            broken: Asked now and then during the wait: whether the sum was given up.

        Raises:
            PeerLostError: When the other process is gone, or the time is over.
        """
        while not self._ended.wait(_SLICE_SECONDS):
            if broken():
                return False
            if time.monotonic() > deadline:
                raise PeerLostError("the other process does not answer")
        if self._error is not None:
            raise PeerLostError(f"the other process is gone: {self._error}")
        return True


@dataclass(frozen=True)
class _Held:
    """A committed sum that this worker has for others.

    Attributes:
        round: Its round.
        tag: Under which it is sent.
        holders: Who has it, in the order in which they pass it on for each other.
        sources: Each other worker, to the holder that sends it.
        sending: To whom, and on its way.
    """

    round: int
    tag: int
    holders: list[int]
    sources: dict[int, int]
    sending: dict[int, Transfer] = field(default_factory=dict)


class _PeerReduce(CodedReduce):
    """The common part of server and gossip: a sum at some workers, its commit, its way to all."""

    def _set_up(self) -> None:
        super()._set_up()
        self._workers = frozenset(range(len(self._ranks)))
        self._lost: frozenset[int] = frozenset()
        # Gradients are clipped in place, while the buffers of sums may still be on their way.
        self._result = FlatGradients(self._parameters)
        self._held: list[_Held | None] = [None, None]
        self._consensus.meanwhile = self._serve

    @property
    def _epoch(self) -> int:
        return self._attempt

    def _alive(self) -> frozenset[int]:
        return self._workers - self._lost

    def _is_left_behind(self) -> bool:
        self._serve()
        return self.worker in self._lost

    def _begin_round(self, round_: int) -> None:
        super()._begin_round(round_)
        self._attempt = 0

    def _leave(self) -> None:
        self._consensus.leave(self._round, self._attempt + 1, self._alive())

    def _write_back(self, round_: int) -> None:
        self._result.write_back()

    def close(self) -> None:
        """Wait until all have the last sum; take the hooks of `computing` off the model."""
        if self._round:
            self._await_all(self._round - 1)
        super().close()

    def _add_up(self, decision: Decision) -> bool:
        scale = self._decoding.scale(decision.survivors)
        if scale is None:
            return True
        weights = self._decoding.of(decision.survivors).weights
        senders = [worker for worker in sorted(decision.survivors) if weights[worker]]
        holders = self._holders(senders)
        if self._round >= 2 and not self._attempt:
            self._await_all(self._round - 2)
        if self.worker in senders or self.worker in holders:
            self._message(decision, scale)
        try:
            well = self._gather(senders)
        except _LostWorkerError as error:
            self._consensus.lose(error.worker)
            well = False
        round_, attempt = self._round, self._attempt
        if self.worker in holders:
            committed: bool | None = self._consensus.vote(
                round_, attempt, voters=len(holders), well=well
            )
        else:
            seconds = _OUTCOME_TIMEOUTS * self._members.timeout_seconds
            committed = self._consensus.outcome(round_, attempt, seconds, self._is_hopeless)
        self._lost = self._consensus.lost()
        if committed is None or self.worker in self._lost:
            raise self._without_the_sum()
        if not committed:
            self._attempt += 1
            return False
        others = enumerate(sorted(self._workers - set(holders)))
        sources = {worker: holders[place % len(holders)] for place, worker in others}
        held = _Held(round_, self._tag(), holders, sources)
        if self.worker in sources:
            self._fetch(held)
        else:
            self._pass_on(held, round_ % 2)
        return True

    def _pass_on(self, held: _Held, parity: int) -> None:
        """Send this round's sum, which is in a buffer, to those who have it from this worker."""
        self._held[parity] = held
        for worker, source in held.sources.items():
            if source == self.worker and worker not in self._lost:
                held.sending[worker] = self._send(_pieces(self._buffers[parity]), worker, held.tag)
        self._result.copy_(self._buffers[parity])

    def _fetch(self, held: _Held) -> None:
        """Get this round's sum; from the next holder where one is gone."""
        first = held.sources[self.worker]
        for source in (first, *held.holders):
            if source in self._lost:
                continue
            if source != first:
                self._consensus.ask(held.round)
            transfer = self._receive(_pieces(self._result), source, held.tag)
            with contextlib.suppress(PeerLostError):
                transfer.wait(self._deadline(_EXCHANGE_TIMEOUTS))
                return
            self._consensus.lose(source)
            self._lost = self._consensus.lost()
            # What comes too late must not be written over what comes then.
            self._result = FlatGradients(self._parameters)
        raise self._without_the_sum()

    def _serve(self) -> bool:
        """Pass sums on for holders that are lost, to who asks for them; False, as if to say: wait.

        Notes workers that are gone.
        """
        for kept in filter(None, self._held):
            for worker, transfer in kept.sending.items():
                if transfer.failed and worker not in self._lost:
                    self._consensus.lose(worker)
        self._lost = self._consensus.lost()
        for parity, held in enumerate(self._held):
            if held is None or self.worker != next(
                (holder for holder in held.holders if holder not in self._lost), None
            ):
                continue
            for worker, source in held.sources.items():
                if (
                    source in self._lost
                    and worker not in held.sending
                    and self._consensus.is_asked(held.round, worker)
                ):
                    pieces = _pieces(self._buffers[parity])
                    held.sending[worker] = self._send(pieces, worker, held.tag)
        return False

    def _await_all(self, round_: int) -> None:
        """Wait until all members are done with a round, for which its sum is kept.

        Who is not in time is lost.
        """
        deadline = self._deadline()
        while behind := self._consensus.behind(round_, self._alive()):
            self._serve()
            if time.monotonic() > deadline:
                for worker in behind:
                    self._consensus.lose(worker)
                # The sum may still be read one day.
                self._buffers[round_ % 2] = FlatGradients(self._parameters)
                self._lost = self._consensus.lost()
            else:
                time.sleep(_LOOK_SECONDS)
        self._held[round_ % 2] = None

    def _without_the_sum(self) -> CodingError:
        """The error of a worker that does not get the sum."""
        return self._left_behind() if self.worker in self._lost else self._nobody_left()

    def _deadline(self, timeouts: float = 1.0) -> float:
        return time.monotonic() + timeouts * self._members.timeout_seconds

    def _is_broken(self) -> bool:
        return self._serve() or self._consensus.is_broken(self._round, self._attempt)

    def _send(self, tensors: Sequence[Tensor], worker: int, tag: int) -> Transfer:
        group = self._members.group
        return Transfer(
            lambda tensor: dist.isend(tensor, group=group, group_dst=worker, tag=tag), tensors
        )

    def _receive(self, tensors: Sequence[Tensor], worker: int, tag: int) -> Transfer:
        group = self._members.group
        return Transfer(
            lambda tensor: dist.irecv(tensor, group=group, group_src=worker, tag=tag), tensors
        )

    def _tag(self) -> int:
        """Different in each attempt of each round: what was given up must not be received later."""
        return 1 + (self._round * (len(self._ranks) + 2) + self._attempt) % _TAGS

    def _arrived(self, transfers: Iterable[tuple[int, Transfer]], timeouts: float = 1.0) -> bool:
        """Wait for transfers with these workers; False if the sum was given up meanwhile.

        Raises:
            _LostWorkerError: Naming the worker that is gone or silent.
        """
        deadline = self._deadline(timeouts)
        for worker, transfer in transfers:
            try:
                if not transfer.wait(deadline, self._is_broken):
                    return False
            except PeerLostError as error:
                raise _LostWorkerError(worker) from error
        return True

    @abstractmethod
    def _holders(self, senders: list[int]) -> list[int]:
        """Workers that have the sum of the senders' messages after `_gather`."""

    @abstractmethod
    def _gather(self, senders: list[int]) -> bool:
        """Add the senders' messages up in the holders' buffers; False if that was given up.

        Raises:
            _LostWorkerError: Naming a worker that is gone or silent.
        """

    @abstractmethod
    def _is_hopeless(self) -> bool:
        """Return whether nobody is left who could commit the sum."""

    @abstractmethod
    def _nobody_left(self) -> CodingError:
        """The error of a member that does not get the sum from those who have it."""


class CodedServer(_PeerReduce):
    """A coded sum by a parameter server, the group's first process; see the module."""

    def _set_up(self) -> None:
        super()._set_up()
        # Nothing is ever sent under this tag: the wait ends when the connection does.
        on_device = any(parameter.is_cuda for parameter in self._parameters)
        watched = self.worker != _SERVER and not on_device
        self._server = self._receive([torch.empty(1)] * watched, _SERVER, _WATCH_TAG)

    def _holders(self, senders: list[int]) -> list[int]:
        return [_SERVER]

    def _gather(self, senders: list[int]) -> bool:
        pieces = _pieces(self._buffers[self._round % 2])
        if self.worker != _SERVER:
            if self.worker in senders:
                self._send(pieces, _SERVER, self._tag())
            return True
        others = [worker for worker in senders if worker != _SERVER]
        for piece in pieces:
            spaces = {worker: torch.empty_like(piece) for worker in others}
            transfers = [
                (worker, self._receive([spaces[worker]], worker, self._tag())) for worker in others
            ]
            if not self._arrived(transfers):
                return False
            for space in spaces.values():
                piece.add_(space)
        return True

    def _is_hopeless(self) -> bool:
        return self._server.failed

    def _nobody_left(self) -> CodingError:
        return CodingError(
            f"rank {self._ranks[_SERVER]}, the server of the gradients, is gone or was silent for "
            f"more than timeout_seconds = {self._members.timeout_seconds:g}; restart from a "
            "checkpoint (the protocols all_reduce and gossip have no server)"
        )


class CodedGossip(_PeerReduce):
    """A coded sum by exchanges between pairs of survivors; see the module."""

    def _holders(self, senders: list[int]) -> list[int]:
        return senders[: 1 << (len(senders).bit_length() - 1)]

    def _gather(self, senders: list[int]) -> bool:
        if self.worker not in senders:
            return True
        pieces = _pieces(self._buffers[self._round % 2])
        place, holders = senders.index(self.worker), self._holders(senders)
        if place >= len(holders):
            self._send(pieces, senders[place - len(holders)], self._tag())
            return True
        stages = {
            bit + 1: holders[place ^ (1 << bit)] for bit in range(len(holders).bit_length() - 1)
        }
        if place + len(holders) < len(senders):
            stages = {0: senders[place + len(holders)], **stages}
        return all(self._exchange(pieces, worker, stage) for stage, worker in stages.items())

    def _exchange(self, pieces: list[Tensor], worker: int, stage: int) -> bool:
        """Add another worker's numbers to these, which it gets too but in stage 0."""
        for piece in pieces:
            space = torch.empty_like(piece)
            transfers = [(worker, self._receive([space], worker, self._tag()))]
            if stage:
                transfers.append((worker, self._send([piece], worker, self._tag())))
            if not self._arrived(transfers, _EXCHANGE_TIMEOUTS + stage * _STAGE_TIMEOUTS):
                return False
            # The other one adds the same two numbers the other way round: the same to the bit.
            piece.add_(space)
        return True

    def _is_hopeless(self) -> bool:
        return False

    def _nobody_left(self) -> CodingError:
        return self._left_behind()


class _LostWorkerError(CodingError):
    """A worker of a sum is gone or silent."""

    def __init__(self, worker: int) -> None:
        super().__init__(f"worker {worker} is gone or silent")
        self.worker = worker


def _pieces(gradients: FlatGradients) -> list[Tensor]:
    """Views of all numbers, each short enough that several fit into memory beside a gradient."""
    return [
        piece
        for buffer in gradients.buffers
        for piece in torch.split(buffer, max(_PIECE_BYTES // buffer.element_size(), 1))
    ]
