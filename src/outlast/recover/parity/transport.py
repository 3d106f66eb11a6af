"""Messages between the members of a group, each with a deadline."""

from __future__ import annotations

import datetime
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.distributed import ProcessGroup, Work

from outlast.errors import RecoverError
from outlast.recover.parity.code import Bytes

# What members tell each other mostly fits into one message with its length.
_SHORT_BYTES = 1024
_COUNT_BYTES = 8
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class RowWork:
    """Sends and receives of one member for one row.

    Attributes:
        sends: To whom, and which bytes; they must stay as they are until the row is finished.
        receives: From whom, and how many bytes.
        finish: Called with what was received, in this order.
    """

    sends: list[tuple[int, Bytes]] = field(default_factory=list)
    receives: list[tuple[int, int]] = field(default_factory=list)
    finish: Callable[[list[Bytes]], None] | None = None


class Transport:
    """A process group as its members use it.

    Args:
        group: A gloo group that nothing else uses at the same time.
        stripe_bytes: The longest message between two members.
        timeout_seconds: How long any one message may take.
    """

    def __init__(self, group: ProcessGroup, stripe_bytes: int, timeout_seconds: float) -> None:
        self._group = group
        self._stripe_bytes = stripe_bytes
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        # Kept from update to update: fresh memory costs more than what is received into it.
        self._pools: tuple[list[tuple[torch.Tensor, Bytes]], ...] = ([], [])
        self.sent_bytes = 0
        self.received_bytes = 0

    def gather(self, content: bytes) -> list[bytes]:
        """A few bytes of every member, in order of members."""
        first = self._allgather(
            np.frombuffer(len(content).to_bytes(_COUNT_BYTES, "little") + content, np.uint8),
            _SHORT_BYTES,
        )
        lengths = [int.from_bytes(bytes_[:_COUNT_BYTES].tobytes(), "little") for bytes_ in first]
        if max(lengths) > _SHORT_BYTES - _COUNT_BYTES:
            whole = self._allgather(np.frombuffer(content, np.uint8), max(lengths))
        else:
            whole = [bytes_[_COUNT_BYTES:] for bytes_ in first]
        return [item[:size].tobytes() for item, size in zip(whole, lengths, strict=True)]

    def _allgather(self, content: Bytes, size: int) -> list[Bytes]:
        """The first `size` bytes of every member's content, with zeros behind a shorter one's."""
        own = torch.zeros(size, dtype=torch.uint8)
        own.numpy()[: content.size] = content[:size]
        all_of_them = [torch.empty_like(own) for _ in range(self._group.size())]
        try:
            self._group.allgather([all_of_them], [own]).wait(self._timeout)
        except RuntimeError as error:
            raise self._failed("the others", error) from error
        return [item.numpy() for item in all_of_them]

    def stream(self, rows: Iterable[int], plan: Callable[[int], RowWork]) -> None:
        """Send, receive and finish rows in order, while the next few are on their way.

        Args:
            rows: The same for all members.
            plan: What this member does for a row; called when the row is due.
        """
        due = iter(rows)
        ahead = self._post(due, plan, 0)
        turn = 1
        while ahead:
            now, ahead = ahead, self._post(due, plan, turn)
            turn = 1 - turn
            for work, got, pending in now:
                for peer, message in pending:
                    try:
                        message.wait(self._timeout)
                    except RuntimeError as error:
                        raise self._failed(f"member {peer}", error) from error
                if work.finish is not None:
                    work.finish(got)

    def _post(
        self, due: Iterator[int], plan: Callable[[int], RowWork], turn: int
    ) -> list[tuple[RowWork, list[Bytes], list[tuple[int, Work]]]]:
        """Start as many rows as there are members: in those, all members do the same work."""
        posted = []
        buffers = self._buffers(turn)
        for _, row in zip(range(self._group.size()), due, strict=False):
            work = plan(row)
            got: list[Bytes] = []
            pending: list[tuple[int, Work]] = []
            for peer, size in work.receives:
                buffer, content = next(buffers)
                if size < self._stripe_bytes:
                    buffer, content = buffer[:size], content[:size]
                pending.append((peer, self._start(self._group.recv, buffer, peer, row)))
                got.append(content)
                self.received_bytes += size
            for peer, data in work.sends:
                message = self._start(self._group.send, torch.from_numpy(data), peer, row)
                pending.append((peer, message))
                self.sent_bytes += data.nbytes
            posted.append((work, got, pending))
        return posted

    def _start(self, how: Callable[..., Work], data: torch.Tensor, peer: int, row: int) -> Work:
        try:
            return how([data], peer, row)
        except RuntimeError as error:
            raise self._failed(f"member {peer}", error) from error

    def _buffers(self, turn: int) -> Iterator[tuple[torch.Tensor, Bytes]]:
        pool = self._pools[turn]
        for place in itertools.count():
            if place == len(pool):
                buffer = torch.empty(self._stripe_bytes, dtype=torch.uint8)
                pool.append((buffer, buffer.numpy()))
            yield pool[place]

    def _failed(self, whom: str, error: RuntimeError) -> RecoverError:
        said = str(error).strip().splitlines()
        return RecoverError(
            f"the exchange of parity with {whom} failed, or took longer than "
            f"{self._timeout.total_seconds():g} s: {said[0] if said else 'no message'}"
        )


class AgreedError(RecoverError):
    """All members know of this failure, so they can continue together."""


def gather(transport: Transport, content: Any) -> list[Any]:
    """Contents of all members, as JSON, in order of members."""
    return [json.loads(item) for item in transport.gather(json.dumps(content).encode())]


def raise_together(transport: Transport, action: Callable[[], _Result]) -> _Result:
    """Do something that may fail at any member, and fail at all members where it does.

    Raises:
        AgreedError: It failed somewhere; says at whom and why.
    """
    result, problem = None, ""
    try:
        result = action()
    except Exception as error:
        problem = str(error) or type(error).__name__
    for member, said in enumerate(gather(transport, problem)):
        if said:
            raise AgreedError(f"member {member} of the parity group: {said}")
    return cast("_Result", result)
