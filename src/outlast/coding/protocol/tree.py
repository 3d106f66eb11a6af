"""CodedReduce between processes: messages go up a tree that waits for n - s children at each node.

Rank 0 is the tree's root, rank r node r of the `CodedReduce` plan. Parameters go down the tree;
each node computes its own points, waits until its children's messages decode, adds its own, and
sends the sum up. So nobody receives from more than its children. On the root:

    root = TreeRoot(model, tree, deadline_seconds=30.0)
    for step in range(steps):
        root.publish(step)
        gradients, outcome = root.collect(step)     # also in the parameters' .grad
        optimizer.step()

and on every other rank (`outlast.coding.protocol.tree_node`):

    node = TreeNode(model, tree)
    for step in node.steps():
        for point in node.points:
            loss(model, batch(step, point)).backward()
            node.add(point)
        node.send(step)

As with the parameter server (`outlast.coding.protocol.server`), parameters are sent down instead of
the gradient, so that a node which was late needs no history. A dead node's parent sends them to its
children, who would otherwise be lost after the step; what they send up is not needed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from outlast.coding.protocol.encoding import clear, recombine_
from outlast.coding.protocol.flat import FlatGradients
from outlast.coding.protocol.messages import (
    Header,
    Kind,
    Layout,
    Letter,
    write_parameters,
)
from outlast.coding.protocol.post import Post
from outlast.errors import CodingError, LostChunksError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt
    from torch import nn

    from outlast.coding.codes.tree import CodedReduce, NodePlan

ROOT = 0


@dataclass(frozen=True)
class TreeOutcome:
    """How one step went at the root.

    Attributes:
        step: The step.
        delivered: Children whose messages are in the gradient.
        stragglers: The other children.
        gone: Nodes of the tree whose connection is closed.
        late: Messages of earlier steps that came meanwhile and were dropped.
        payload_bytes: Length of a message.
        received_bytes: What the root received since the last outcome, headers included.
        seconds: From publishing the step to its gradient.
    """

    step: int
    delivered: tuple[int, ...]
    stragglers: tuple[int, ...]
    gone: tuple[int, ...]
    late: int
    payload_bytes: int
    received_bytes: int
    seconds: float


class Group:
    """A node's messages from its children in one step.

    Attributes:
        letters: The messages, by child.
        weights: (children,) decoding weights once the messages are enough, before that None.
        closed: Whether messages are no longer taken.
    """

    def __init__(self, plan: NodePlan, step: int) -> None:
        self.plan = plan
        self.step = step
        self.letters: dict[int, Letter] = {}
        self.closed = False
        self.weights: npt.NDArray[Any] | None = None if plan.children else np.zeros(0)

    def take(self, letter: Letter) -> bool:
        """Keep a child's message of this step; False for any other."""
        header = letter.header
        wanted = header.kind == Kind.UP and header.step == self.step and not self.closed
        if not wanted or header.worker in self.letters:
            return False
        self.letters[header.worker] = letter
        code = self.plan.code
        if code is not None:
            first = self.plan.children.start
            decoded = code.decode([child - first for child in self.letters])
            self.weights = decoded.weights if decoded.certificate.exact else None
        return True

    def hopeless(self, gone: Iterable[int]) -> bool:
        """Whether the children that are left cannot make the sum."""
        code = self.plan.code
        if code is None:
            return False
        left = (set(self.plan.children) - set(gone)) | self.letters.keys()
        first = self.plan.children.start
        return not code.decode([child - first for child in left]).certificate.exact

    def add_to(self, buffers: list[torch.Tensor], layout: Layout) -> None:
        """Add the children's decoded sum."""
        assert self.weights is not None
        for child, letter in self.letters.items():
            weight = self.weights[child - self.plan.children.start]
            recombine_(buffers, layout.views(letter.payload), np.array([weight]))


class Member:
    """What root and nodes have in common.

    Args:
        model: Its parameters are those that go down the tree.
        tree: Of as many nodes as there are ranks.

    Attributes:
        plan: What this rank does.

    Raises:
        CodingError: When the number of ranks does not fit the tree, or its code is complex.
    """

    def __init__(self, model: nn.Module, tree: CodedReduce) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else 0
        if ranks != tree.workers + 1:
            raise CodingError(
                f"the tree has a root and {tree.workers} nodes, but the job {ranks} ranks instead "
                f"of {tree.workers + 1}"
            )
        if tree.code.matrix.dtype.kind == "c":
            raise CodingError(f"{tree.code.name} is complex; take a tree with a real code")
        self.tree = tree
        self.plan = tree.plan(dist.get_rank())
        self._gradients = FlatGradients(model.parameters())
        self._layout = Layout(self._gradients.buffers)
        below = list(_below(tree, self.plan))
        above = list(_above(tree, self.plan))
        slots = tree.stragglers + 2
        self._post = Post([*above, *below], self._layout.payload_bytes, slots=slots)

    def _hand_down(self, letter: Letter) -> None:
        """Send a letter to the children, and to those of children that are gone."""
        receivers = []
        waiting = list(self.plan.children)
        while waiting:
            child = waiting.pop()
            if child in self._post.gone:
                waiting.extend(self.tree.plan(child).children)
            else:
                receivers.append(child)
        self._post.buffers.hold(letter)
        self._post.send(letter, receivers)


class TreeRoot(Member):
    """Rank 0.

    Args:
        model: Its parameters are trained; equal on all ranks in order and shape.
        tree: Who computes what and sends to whom; of as many nodes as there are ranks.
        deadline_seconds: Longest time from publishing a step to its gradient.

    Raises:
        CodingError: For settings out of range, or a number of ranks that does not fit the tree.
    """

    def __init__(self, model: nn.Module, tree: CodedReduce, *, deadline_seconds: float) -> None:
        if not deadline_seconds > 0:
            raise CodingError(f"deadline_seconds = {deadline_seconds} is not above 0")
        super().__init__(model, tree)
        self.deadline_seconds = deadline_seconds
        self._step: int | None = None
        self._begun = 0.0
        self._counted_bytes = 0

    def publish(self, step: int) -> None:
        """Send the model's parameters down the tree; returns at once.

        The parameters have no gradients afterwards.

        Raises:
            CodingError: When the step is not after the last one.
        """
        if self._step is not None and step <= self._step:
            raise CodingError(f"step {step} is not after step {self._step}, published before")
        self._step = step
        self._begun = time.monotonic()
        size = self._layout.payload_bytes
        letter = self._post.letter(Header(Kind.PARAMETERS, step, payload_bytes=size))
        write_parameters(self._gradients, self._layout, letter)
        self._hand_down(letter)
        self._post.buffers.release(letter)
        clear(self._gradients)

    def collect(self, step: int) -> tuple[FlatGradients, TreeOutcome]:
        """Wait until the children's messages decode.

        Returns:
            The sum of all points' gradients, which are the parameters' ``.grad`` as well until the
            next call, and how it came about.

        Raises:
            CodingError: When the step is not the one that was published last.
            LostChunksError: When too few messages came before the deadline, or can come.
        """
        if step != self._step:
            raise CodingError(f"step {step} cannot be collected, step {self._step} was published")
        group = Group(self.plan, step)
        try:
            late = self._gather(group)
            self._gradients.zero_()
            group.add_to(self._gradients.buffers, self._layout)
        finally:
            for letter in group.letters.values():
                self._post.buffers.release(letter)
        self._gradients.write_back()
        received = self._post.received_bytes
        self._counted_bytes, before = received, self._counted_bytes
        return self._gradients, TreeOutcome(
            step=step,
            delivered=tuple(sorted(group.letters)),
            stragglers=tuple(each for each in self.plan.children if each not in group.letters),
            gone=tuple(sorted(self._post.gone)),
            late=late,
            payload_bytes=self._layout.payload_bytes,
            received_bytes=received - before,
            seconds=time.monotonic() - self._begun,
        )

    def close(self, seconds: float = 10.0) -> None:
        """Tell all nodes that there are no more steps; waits so long for who does not listen."""
        self._post.send(self._post.letter(Header(Kind.STOP, 0)), self._post.peers)
        self._post.flush(seconds)

    def _gather(self, group: Group) -> int:
        deadline = self._begun + self.deadline_seconds
        late = 0
        letter = self._post.receive(0.0)
        while True:
            if letter is not None:
                if not group.take(letter):
                    late += 1
                    self._post.buffers.release(letter)
                letter = self._post.receive(0.0)
                continue
            remaining = deadline - time.monotonic()
            if group.weights is not None:
                return late
            if remaining <= 0 or group.hopeless(self._post.gone):
                self._refuse(group)
            letter = self._post.receive(remaining)

    def _refuse(self, group: Group) -> None:
        missing = [each for each in self.plan.children if each not in group.letters]
        alive = np.ones(self.tree.workers + 1, dtype=bool)
        alive[missing] = False
        off = np.abs(self.tree.coefficients(alive) - 1.0) > 1e-6
        raise LostChunksError(
            f"step {group.step}: waited {time.monotonic() - self._begun:.3g} s for messages of "
            f"nodes {missing}; any {self.tree.messages_received} of the root's children would do; "
            f"gone are nodes {sorted(self._post.gone)}",
            tuple(int(point) for point in np.flatnonzero(off)),
        )


def _below(tree: CodedReduce, plan: NodePlan) -> Iterator[int]:
    """All nodes that a node's parameters reach."""
    for child in plan.children:
        yield child
        yield from _below(tree, tree.plan(child))


def _above(tree: CodedReduce, plan: NodePlan) -> Iterator[int]:
    """All nodes that a node's parameters come through."""
    while plan.parent is not None:
        yield plan.parent
        plan = tree.plan(plan.parent)
