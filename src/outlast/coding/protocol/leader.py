"""What rank 0 does in every protocol with a rank 0: publish a step, and wait for what comes of it.

The parameter server's hub and the tree's root differ in whom they send to and in what they wait
for; the first is `Leader.hand_out`, the second a `Gathering`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from outlast.coding.protocol.encoding import clear
from outlast.coding.protocol.messages import Header, Kind, Layout, Letter, write_parameters
from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Collection

    from outlast.coding.protocol.flat import FlatGradients
    from outlast.coding.protocol.post import Post

LEADER = 0
"""The rank of the hub, and of the tree's root."""


class Gathering(ABC):
    """The messages of one step that are waited for.

    Args:
        step: The step's number.

    Attributes:
        letters: The coded messages that count, by worker.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.letters: dict[int, Letter] = {}

    @abstractmethod
    def take(self, letter: Letter) -> bool:
        """Note what a letter says; False for one that is late or has been seen."""

    @abstractmethod
    def settled(self, gone: Collection[int]) -> bool:
        """Whether the messages are enough, or nothing more can come.

        Args:
            gone: Workers whose connection is closed.
        """

    def extension(self, gone: Collection[int]) -> float:
        """Called at the deadline: seconds for the last answers."""
        del gone
        return 0.0

    @property
    def patience(self) -> float:
        """Seconds after which `settled` should be asked again although nothing came."""
        return float("inf")


class Leader:
    """Rank 0 of a training.

    Args:
        gradients: Made for the parameters that are trained.
        layout: Of the parameters in a message.
        post: To all others.
        deadline_seconds: Longest time from publishing a step to its gradient.
        shift: Rank of worker 0.
    """

    def __init__(
        self,
        gradients: FlatGradients,
        layout: Layout,
        post: Post,
        *,
        deadline_seconds: float,
        shift: int = 0,
    ) -> None:
        self.gradients = gradients
        self.deadline_seconds = deadline_seconds
        self._parameters = layout
        self._post = post
        self._shift = shift
        self._step: int | None = None
        self._begun = 0.0
        self._counted_bytes = 0

    @property
    def gone(self) -> tuple[int, ...]:
        """Workers whose connection is closed."""
        return tuple(sorted(rank - self._shift for rank in self._post.gone))

    def publish(self, step: int) -> None:
        """Send the model's parameters to all others, who begin this step; returns at once.

        The parameters have no gradients afterwards.

        Raises:
            CodingError: When the step is not after the last one.
        """
        if self._step is not None and step <= self._step:
            raise CodingError(f"step {step} is not after step {self._step}, published before")
        self._step = step
        self._begun = time.monotonic()
        size = self._parameters.payload_bytes
        letter = self._post.letter(Header(Kind.PARAMETERS, step, payload_bytes=size))
        write_parameters(self.gradients, self._parameters, letter)
        self.hand_out(letter)
        clear(self.gradients)

    def hand_out(self, letter: Letter) -> None:
        """Send the parameters to those who get them from rank 0 itself."""
        self._post.send(letter, self._post.peers)

    def close(self, seconds: float = 10.0) -> None:
        """Tell all others that there are no more steps; waits so long for who does not listen."""
        self._post.send(self._post.letter(Header(Kind.STOP, 0)), self._post.peers)
        self._post.flush(seconds)

    def _check(self, step: int) -> None:
        if step != self._step:
            raise CodingError(f"step {step} cannot be collected, step {self._step} was published")

    def _gather(self, current: Gathering) -> int:
        """Take letters until the step is settled or the deadline is there; counts late ones."""
        deadline = self._begun + self.deadline_seconds
        late, extended = 0, False
        while True:
            letter = self._post.receive(0.0)
            while letter is not None:
                late += not self._take(current, letter)
                letter = self._post.receive(0.0)
            if current.settled(self.gone):
                return late
            if time.monotonic() >= deadline:
                if extended:
                    return late
                extended = True
                deadline += current.extension(self.gone)
                continue
            letter = self._post.receive(min(deadline - time.monotonic(), current.patience))
            if letter is not None:
                late += not self._take(current, letter)

    def _take(self, current: Gathering, letter: Letter) -> bool:
        taken = current.take(letter)
        if not taken:
            self._post.buffers.release(letter)
        return taken

    def _release(self, current: Gathering) -> None:
        """The step is decoded, or given up."""
        for letter in current.letters.values():
            self._post.buffers.release(letter)

    def _waited(self) -> float:
        """Seconds since the step was published."""
        return time.monotonic() - self._begun

    def _received(self) -> int:
        """Bytes that came since this was asked last."""
        received = self._post.received_bytes
        self._counted_bytes, before = received, self._counted_bytes
        return received - before
