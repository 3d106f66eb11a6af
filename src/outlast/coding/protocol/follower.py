"""What the other ranks do in every protocol with a rank 0: follow its steps, as far as they can.

A thread takes letters in while the rank computes, so that it knows that a step is over, and the
newest parameters are there when it asks for them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from outlast.coding.protocol.encoding import clear
from outlast.coding.protocol.leader import LEADER
from outlast.coding.protocol.messages import Kind, Layout, Letter, read_parameters
from outlast.coding.protocol.post import Post, waitable
from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outlast.coding.protocol.flat import FlatGradients

_PAUSE_SECONDS = 1.0


class Follower(ABC):
    """A rank that computes its share of the steps that rank 0 publishes.

    The listening thread starts here, so a subclass calls this when all of its own is there.

    Args:
        gradients: Made for the parameters that are trained.
        layout: Of the parameters in a message.
        post: To rank 0, at least.
        name: What the rank is called in errors.
        patience_seconds: Longest wait for rank 0 to publish another step.
    """

    def __init__(
        self,
        gradients: FlatGradients,
        layout: Layout,
        post: Post,
        *,
        name: str,
        patience_seconds: float,
    ) -> None:
        self.patience_seconds = patience_seconds
        self._gradients = gradients
        self._parameters = layout
        self._post = post
        self._name = name
        self._changed = threading.Condition()
        self._newest: Letter | None = None
        self._published = -1
        self._step = -1
        self._over = False
        self._failure: Exception | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def wanted(self) -> bool:
        """Whether rank 0 has not gone on to a later step."""
        return self._published <= self._step and not self._over and self._failure is None

    def steps(self) -> Iterator[int]:
        """The steps that rank 0 publishes; the model has their parameters and no gradients.

        Skips missed ones.

        Raises:
            CodingError: When rank 0 is gone, or publishes nothing for `patience_seconds`.
            Exception: What a letter that could not be taken in has raised meanwhile.
        """
        while True:
            letter = self._await_newer()
            if letter is None:
                return
            read_parameters(self._gradients, self._parameters, letter)
            self._post.buffers.release(letter)
            clear(self._gradients)
            yield self._step

    @abstractmethod
    def _begin(self, step: int) -> None:
        """Forget the last step; called with `_changed` held."""

    @abstractmethod
    def _answer(self, letter: Letter) -> list[Letter]:
        """Take a letter that is not about a step's beginning or end, with `_changed` held.

        Returns:
            Letters that are not needed any more.
        """

    def _pass_on(self, letter: Letter) -> None:
        """Send new parameters on, where others get them from this rank; here nobody does."""
        del letter

    def _wait_for(self, enough: Callable[[], bool]) -> bool:
        """Wait, with `_changed` held; whether it came, or nothing more can, in time."""
        return self._changed.wait_for(
            lambda: (
                enough() or self._over or self._failure is not None or LEADER in self._post.gone
            ),
            waitable(self.patience_seconds),
        )

    def _await_newer(self) -> Letter | None:
        """The newest parameters, once they are newer than the rank's; None at the end."""
        with self._changed:
            came = self._wait_for(lambda: self._newest is not None)
            if self._failure is not None:
                raise self._failure
            letter, self._newest = self._newest, None
            if self._over:
                return None
            if letter is not None:
                self._step = letter.header.step
                self._begin(self._step)
                return letter
        why = "rank 0 is gone" if came else f"waited {self.patience_seconds:g} s in vain"
        raise CodingError(f"{why}; {self._name} awaited a step after step {self._step}")

    def _listen(self) -> None:
        """Take in what comes while the rank computes."""
        try:
            while not self._over:
                letter = self._post.receive(_PAUSE_SECONDS)
                with self._changed:
                    for dropped in self._take(letter) if letter is not None else ():
                        self._post.buffers.release(dropped)
                    self._changed.notify_all()
                if letter is None and LEADER in self._post.gone:
                    return
        except Exception as error:  # of whatever kind: the main thread waits, and raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _take(self, letter: Letter) -> list[Letter]:
        """Keep a letter; returns those that are not needed any more."""
        header = letter.header
        if header.kind == Kind.STOP:
            self._over = True
            return [letter]
        if header.kind == Kind.PARAMETERS:
            if header.step <= self._published:
                return [letter]
            self._published = header.step
            self._pass_on(letter)
            replaced, self._newest = self._newest, letter
            return [] if replaced is None else [replaced]
        return self._answer(letter)
