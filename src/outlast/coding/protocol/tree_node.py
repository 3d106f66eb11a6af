"""The nodes of CodedReduce between processes; see `outlast.coding.protocol.tree`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.coding.protocol.encoding import Encoder
from outlast.coding.protocol.follower import Follower
from outlast.coding.protocol.messages import Header, Kind, Letter, Newest
from outlast.coding.protocol.post import check_seconds
from outlast.coding.protocol.tree import Group, Place
from outlast.errors import CodingError

if TYPE_CHECKING:
    from torch import nn

    from outlast.coding.codes.tree import CodedReduce


class TreeNode(Follower):
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
        check_seconds("patience_seconds", patience_seconds)
        self._place = place = Place(model, tree)
        self.tree = tree
        self.plan = plan = place.plan
        if plan.parent is None:
            raise CodingError("rank 0 is the root: make a TreeRoot there")
        self._parent = plan.parent
        self._encoder = Encoder(
            place.gradients, place.layout, plan.points.tolist(), plan.coefficients[:, None]
        )
        self._group = Group(plan, -1)
        self._early = Newest()
        super().__init__(
            place.gradients,
            place.layout,
            place.post,
            name=f"node {plan.node}",
            patience_seconds=patience_seconds,
        )

    @property
    def points(self) -> tuple[int, ...]:
        """The points of the batch that this node computes."""
        return self._encoder.chunks

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
            came = self._wait_for(lambda: not self.wanted or group.settled(self._post.gone))
            # What comes later must not change the messages while they are added up.
            group.closed = True
        if not came:
            missing = [child for child in self.plan.children if child not in group.letters]
            raise CodingError(
                f"step {step}: node {self.plan.node} waited {self.patience_seconds:g} s in vain "
                f"for messages of its children {missing}"
            )
        if not self.wanted or group.weights is None:
            return False
        self._encoder.write(self._gradients.buffers)
        group.add_to(self._gradients.buffers, self._parameters)
        size = self._parameters.payload_bytes
        header = Header(Kind.UP, step, worker=self.plan.node, payload_bytes=size)
        letter = self._post.letter(header)
        views = self._parameters.views(letter.payload)
        for view, buffer in zip(views, self._gradients.buffers, strict=True):
            view.copy_(buffer)
        self._post.send(letter, [self._parent])
        return True

    def _begin(self, step: int) -> None:
        """Forget the last step's messages; children may have begun the new one before."""
        old = [*self._group.letters.values()]
        self._encoder.begin()
        self._group = Group(self.plan, step)
        early, self._early = self._early, Newest()
        for letter in early:
            if letter.header.step > step:
                self._early.put(letter)
            elif not self._group.take(letter):
                old.append(letter)
        for letter in old:
            self._post.buffers.release(letter)

    def _pass_on(self, letter: Letter) -> None:
        """Send new parameters down at once: the children need not wait for this node."""
        self._post.buffers.hold(letter)
        self._place.hand_down(letter)

    def _answer(self, letter: Letter) -> list[Letter]:
        """Keep a child's message, which may be of a step that this node has not begun."""
        header = letter.header
        if header.kind == Kind.UP and header.step > self._step:
            replaced = self._early.put(letter)
            return [] if replaced is None else [replaced]
        return [] if self._group.take(letter) else [letter]
