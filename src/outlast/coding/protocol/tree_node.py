"""The nodes of CodedReduce between processes; see `outlast.coding.protocol.tree`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from outlast.coding.protocol.encoding import Encoder, clear
from outlast.coding.protocol.messages import Header, Kind, Letter, read_parameters
from outlast.coding.protocol.tree import ROOT, Group, Member
from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from outlast.coding.codes.tree import CodedReduce

_PAUSE_SECONDS = 1.0


class TreeNode(Member):
    """Any other rank.

    Args:
        model: As the root's; its parameters are overwritten by the root's at each step.
        tree: As the root's.
        patience_seconds: Longest wait for another step, and for children's messages.

    Raises:
        CodingError: When the number of ranks does not fit the tree, or this is the root's rank.
    """

    def __init__(
        self, model: nn.Module, tree: CodedReduce, *, patience_seconds: float = 600.0
    ) -> None:
        if not patience_seconds > 0:
            raise CodingError(f"patience_seconds = {patience_seconds} is not above 0")
        super().__init__(model, tree)
        if self.plan.parent is None:
            raise CodingError("rank 0 is the root: make a TreeRoot there")
        self.patience_seconds = patience_seconds
        self._encoder = Encoder(
            self._gradients,
            self._layout,
            self.plan.points.tolist(),
            self.plan.coefficients[:, None],
        )
        self._changed = threading.Condition()
        self._newest: Letter | None = None
        self._published = -1
        self._step = -1
        self._group = Group(self.plan, -1)
        self._early: dict[int, Letter] = {}
        self._over = False
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def points(self) -> tuple[int, ...]:
        """The points of the batch that this node computes."""
        return self._encoder.chunks

    @property
    def wanted(self) -> bool:
        """Whether the root has not gone on to a later step."""
        return self._published <= self._step and not self._over

    def steps(self) -> Iterator[int]:
        """The steps that the root publishes; the model has their parameters and no gradients.

        Skips missed ones.

        Raises:
            CodingError: When the root is gone, or publishes nothing for `patience_seconds`.
        """
        while True:
            letter = self._await_newer()
            if letter is None:
                return
            read_parameters(self._gradients, self._layout, letter)
            self._post.buffers.release(letter)
            clear(self._gradients)
            self._encoder.begin()
            yield self._step

    def add(self, point: int) -> bool:
        """Say that the parameters' gradients are those of `point`; they are moved away.

        Returns:
            Whether the step is still wanted; if not, the loop over points may be left.

        Raises:
            CodingError: For a point of another node, or one that was added before.
        """
        self._encoder.add(point)
        return self.wanted

    def send(self, step: int) -> bool:
        """Wait until the children's messages decode and send the sum up.

        Returns:
            False, and nothing is sent, where the step is over, or too many children are gone.

        Raises:
            CodingError: When points are missing, for another step than the current one, or when
                `patience_seconds` have passed.
        """
        if step != self._step:
            raise CodingError(f"step {step} cannot be sent, the node is at step {self._step}")
        if self.wanted and not self._encoder.finished:
            raise CodingError(f"step {step} cannot be sent before {self.points} are added")
        with self._changed:
            group = self._group
            came = self._changed.wait_for(
                lambda: (
                    group.weights is not None
                    or not self.wanted
                    or ROOT in self._post.gone
                    or group.hopeless(self._post.gone)
                ),
                self.patience_seconds,
            )
            # What comes later must not change the messages while they are added up.
            group.closed = True
        if not came:
            missing = [each for each in self.plan.children if each not in group.letters]
            raise CodingError(
                f"step {step}: node {self.plan.node} waited {self.patience_seconds:g} s in vain "
                f"for messages of its children {missing}"
            )
        if not self.wanted or group.weights is None:
            return False
        self._encoder.write(self._gradients.buffers)
        group.add_to(self._gradients.buffers, self._layout)
        size = self._layout.payload_bytes
        header = Header(Kind.UP, step, worker=self.plan.node, payload_bytes=size)
        letter = self._post.letter(header)
        for view, buffer in zip(
            self._layout.views(letter.payload), self._gradients.buffers, strict=True
        ):
            view.copy_(buffer)
        parent = self.plan.parent
        self._post.send(letter, [] if parent is None else [parent])
        return True

    def _await_newer(self) -> Letter | None:
        """The newest parameters, once they are newer than the node's; None at the end."""
        with self._changed:
            came = self._changed.wait_for(
                lambda: self._newest is not None or self._over or ROOT in self._post.gone,
                self.patience_seconds,
            )
            letter, self._newest = self._newest, None
            if self._over:
                return None
            if letter is not None:
                self._begin(letter.header.step)
                return letter
        why = "rank 0 is gone" if came else f"waited {self.patience_seconds:g} s in vain"
        raise CodingError(f"{why}; node {self.plan.node} awaited a step after step {self._step}")

    def _begin(self, step: int) -> None:
        """Forget the last step's messages; children may have begun the new one before."""
        old = [*self._group.letters.values()]
        self._step = step
        self._group = Group(self.plan, step)
        early, self._early = self._early, {}
        for letter in early.values():
            if letter.header.step > step:
                self._early[letter.header.worker] = letter
            elif not self._group.take(letter):
                old.append(letter)
        for letter in old:
            self._post.buffers.release(letter)

    def _listen(self) -> None:
        """Take in messages, and pass parameters on, while the node computes."""
        while not self._over:
            letter = self._post.receive(_PAUSE_SECONDS)
            with self._changed:
                if letter is not None:
                    for dropped in self._take(letter):
                        self._post.buffers.release(dropped)
                self._changed.notify_all()
            if letter is None and ROOT in self._post.gone:
                return

    def _take(self, letter: Letter) -> list[Letter]:
        """Keep a letter; returns those that are not needed any more."""
        header = letter.header
        if header.kind == Kind.STOP:
            self._over = True
            return [letter]
        if header.kind == Kind.PARAMETERS and header.step > self._published:
            self._published = header.step
            self._hand_down(letter)
            replaced, self._newest = self._newest, letter
            return [] if replaced is None else [replaced]
        if header.kind == Kind.UP and header.step > self._step:
            replaced = self._early.get(header.worker)
            self._early[header.worker] = letter
            return [] if replaced is None else [replaced]
        return [] if self._group.take(letter) else [letter]
