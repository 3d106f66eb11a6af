"""Letters between processes of which some are slow, stopped or dead: nobody waits for them.

gloo's point-to-point calls have two traps. A wait that runs out of time closes the connections to
all ranks, and `is_completed` stays false until somebody waits. So every wait here is made by a
thread of its own and never runs out; what the protocols wait for is an inbox, with a deadline.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from outlast.coding.protocol.messages import HEADER_BYTES, Buffers, Header, Letter, Newest
from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import ProcessGroup

_FOREVER = datetime.timedelta(days=365)
_LETTERS = 1
_PULSE = 2
_FAILURES = 20
_GRACE_SECONDS = 0.1


class Post:
    """Sends and receives letters.

    All ranks of the job make their post at the same time: it has a gloo group of its own.

    Letters come in while the rank computes. A newer letter of the same worker and key replaces one
    that was not read yet, so memory is bounded however slow the reader is. There are up to
    two threads for each peer, and one for each slot.

    Args:
        peers: Ranks that letters are exchanged with.
        capacity: Largest payload, bytes.
        slots: Letters that can arrive at the same time. A sender that stops in the middle of a
            letter occupies one, so slots = s + 1 tolerates s of them.

    Attributes:
        buffers: Where letters are written.
        gone: Peers whose connection is closed: they are dead or have left.
        received_bytes: Sum of what came, headers included.
    """

    def __init__(self, peers: Iterable[int], capacity: int, *, slots: int = 1) -> None:
        if not dist.is_initialized():
            raise CodingError(
                "there is no process group yet: call torch.distributed.init_process_group first"
            )
        self.buffers = Buffers(capacity)
        self.rank = dist.get_rank()
        self.peers = frozenset(peers) - {self.rank}
        self.gone: frozenset[int] = frozenset()
        self.received_bytes = 0
        self._lock = threading.Lock()
        self._group: ProcessGroup = dist.new_group(backend="gloo")
        # A rank that is connected may begin, and die, while others are still connecting to it.
        dist.barrier(group=self._group)
        self._inbox = Newest()
        self._lost_one = False
        self._news = threading.Condition()
        self._boxes: dict[int, _Outbox] = {}
        for rank in self.peers:
            _start(self._watch, rank)
        for _ in range(slots if self.peers else 0):
            _start(self._receive)

    def letter(self, header: Header) -> Letter:
        """A letter whose payload is to be filled."""
        return self.buffers.letter(header)

    def send(self, letter: Letter, ranks: Iterable[int]) -> None:
        """Hand a letter over, once; returns at once, and the letter is not to be changed any more.

        A letter to the same rank that was not sent yet and has the same key is forgotten.
        """
        for rank in ranks:
            self.buffers.hold(letter)
            with self._lock:
                if rank not in self._boxes:
                    self._boxes[rank] = _Outbox(self, rank)
            self._boxes[rank].put(letter)
        self.buffers.release(letter)

    def receive(self, seconds: float) -> Letter | None:
        """The next letter; the caller releases it in `buffers`.

        Returns:
            None when the time is over, or when a peer has gone, which the caller may want to know.
        """
        with self._news:
            self._news.wait_for(lambda: self._inbox or self._lost_one, waitable(seconds))
            if self._inbox:
                return self._inbox.pop()
            self._lost_one = False
        return None

    def flush(self, seconds: float) -> bool:
        """Wait until all letters are sent, or their receivers gone; whether that is so."""
        deadline = time.monotonic() + seconds
        return all(box.empty(deadline - time.monotonic()) for box in list(self._boxes.values()))

    def transmit(self, letter: Letter, rank: int) -> bool:
        """Send and wait; False if the connection is closed."""
        try:
            work = dist.isend(letter.sent, rank, group=self._group, tag=_LETTERS)
            if work is not None:
                work.wait(_FOREVER)
        except RuntimeError:
            self._lose(rank)
            return False
        return True

    def _lose(self, rank: int) -> None:
        with self._lock:
            self.gone |= {rank}
        with self._news:
            self._lost_one = True
            self._news.notify_all()

    def _watch(self, rank: int) -> None:
        """Nothing is ever sent under this tag: the wait ends when the connection does."""
        work = dist.irecv(torch.empty(1), rank, group=self._group, tag=_PULSE)
        with contextlib.suppress(RuntimeError):
            if work is not None:
                work.wait(_FOREVER)
        # Its last letters came before, but to other threads: they are to be in the inbox first.
        time.sleep(_GRACE_SECONDS)
        self._lose(rank)

    def _receive(self) -> None:
        failures = 0
        while failures < _FAILURES:
            buffer = self.buffers.take()
            letter = self._next(buffer)
            if letter is None:
                # The sender died in the middle, or wrote something else: not this buffer again,
                # which a late write could still reach.
                failures += 1
                time.sleep(0.01 * failures)
                continue
            failures = 0
            if letter.header.payload_bytes == 0:
                short = Letter(letter.header, buffer[:HEADER_BYTES].clone())
                self.buffers.release(letter)
                letter = short
            with self._news:
                self.received_bytes += letter.sent.numel()
                replaced = self._inbox.put(letter)
                self._news.notify_all()
            if replaced is not None:
                self.buffers.release(replaced)

    def _next(self, buffer: torch.Tensor) -> Letter | None:
        try:
            work = dist.irecv(buffer, None, group=self._group, tag=_LETTERS)
            if work is not None:
                work.wait(_FOREVER)
            return Letter(Header.unpack(buffer[:HEADER_BYTES].numpy().tobytes()), buffer)
        except (RuntimeError, CodingError):
            return None


class _Outbox:
    """Letters to one rank, sent one after the other by a thread."""

    def __init__(self, post: Post, rank: int) -> None:
        self._post = post
        self._rank = rank
        self._waiting = Newest()
        self._busy = False
        self._changed = threading.Condition()
        _start(self._run)

    def put(self, letter: Letter) -> None:
        with self._changed:
            gone = self._rank in self._post.gone
            replaced = letter if gone else self._waiting.put(letter)
            self._changed.notify_all()
        if replaced is not None:
            self._post.buffers.release(replaced)

    def empty(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._waiting or self._busy) or self._rank in self._post.gone,
                waitable(seconds),
            )

    def _run(self) -> None:
        alive = True
        while alive:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                letter = self._waiting.pop()
                self._busy = True
            alive = self._post.transmit(letter, self._rank)
            if alive:
                self._post.buffers.release(letter)
        with self._changed:
            self._busy = False
            self._changed.notify_all()


def check_seconds(name: str, seconds: float) -> None:
    """Refuse a longest wait that is none; infinity is one.

    Raises:
        CodingError: When it is not above 0.
    """
    if not seconds > 0:
        raise CodingError(f"{name} = {seconds} is not above 0")


def waitable(seconds: float) -> float:
    """What a lock can be told to wait for; infinity it does not take."""
    return min(max(seconds, 0.0), _FOREVER.total_seconds())


def _start(work: object, *arguments: object) -> None:
    # Daemons: a wait for a stopped process cannot be ended, and must not keep this one alive.
    threading.Thread(target=work, args=arguments, daemon=True).start()  # type: ignore[arg-type]
