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

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from outlast.coding.protocol.encoding import recombine_
from outlast.coding.protocol.flat import FlatGradients
from outlast.coding.protocol.leader import Gathering, Leader
from outlast.coding.protocol.messages import Kind, Layout, Letter
from outlast.coding.protocol.post import Post, check_seconds
from outlast.errors import CodingError, LostChunksError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import numpy.typing as npt
    from torch import nn

    from outlast.coding.codes.tree import CodedReduce, NodePlan


@dataclass(frozen=True)
class TreeOutcome:
    """How one step went at the root.

    Attributes:
        step: The step.
        delivered: Children whose messages are in the gradient.
        stragglers: The other children.
        gone: Nodes of the tree whose connection is closed.
        late: Messages of earlier steps that came meanwhile and were dropped; without those of which
            the same child's newer one took the place before.
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


class Group(Gathering):
    """A node's messages from its children in one step.

    Attributes:
        weights: (children,) decoding weights once the messages are enough, before that None.
        closed: Whether messages are no longer taken.
    """

    def __init__(self, plan: NodePlan, step: int) -> None:
        super().__init__(step)
        self.plan = plan
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

    def settled(self, gone: Collection[int]) -> bool:
        """Whether the messages decode, or those of the children that are left could not."""
        code = self.plan.code
        if self.weights is not None or code is None:
            return self.weights is not None
        left = (set(self.plan.children) - set(gone)) | self.letters.keys()
        first = self.plan.children.start
        return not code.decode([child - first for child in left]).certificate.exact

    def add_to(self, buffers: list[torch.Tensor], layout: Layout) -> None:
        """Add the children's decoded sum."""
        assert self.weights is not None
        for child, letter in self.letters.items():
            weight = self.weights[child - self.plan.children.start]
            recombine_(buffers, layout.views(letter.payload), np.array([weight]))


class Place:
    """What root and nodes have in common: where they stand in the tree.

    Args:
        model: Its parameters are those that go down the tree.
        tree: Of as many nodes as there are ranks.

    Attributes:
        plan: What this rank does.
        gradients: Made for the model's parameters.
        layout: Of a message, whether of parameters or of gradients.
        post: To all nodes above and below.

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
        self.gradients = FlatGradients(model.parameters())
        self.layout = Layout(self.gradients.buffers)
        below = list(_below(tree, self.plan))
        above = list(_above(tree, self.plan))
        slots = tree.stragglers + 2
        self.post = Post([*above, *below], self.layout.payload_bytes, slots=slots)

    def hand_down(self, letter: Letter) -> None:
        """Send a letter to the children, and to those of children that are gone."""
        receivers = []
        waiting = list(self.plan.children)
        while waiting:
            child = waiting.pop()
            if child in self.post.gone:
                waiting.extend(self.tree.plan(child).children)
            else:
                receivers.append(child)
        self.post.send(letter, receivers)


class TreeRoot(Leader):
    """Rank 0.

    Args:
        model: Its parameters are trained; equal on all ranks in order and shape.
        tree: Who computes what and sends to whom; of as many nodes as there are ranks.
        deadline_seconds: Longest time from publishing a step to its gradient.

    Raises:
        CodingError: For settings out of range, or a number of ranks that does not fit the tree.
    """

    def __init__(self, model: nn.Module, tree: CodedReduce, *, deadline_seconds: float) -> None:
        check_seconds("deadline_seconds", deadline_seconds)
        self._place = place = Place(model, tree)
        self.tree = tree
        self.plan = place.plan
        super().__init__(
            place.gradients, place.layout, place.post, deadline_seconds=deadline_seconds
        )

    def hand_out(self, letter: Letter) -> None:
        """Send the parameters down the tree."""
        self._place.hand_down(letter)

    def collect(self, step: int) -> tuple[FlatGradients, TreeOutcome]:
        """Wait until the children's messages decode.

        Returns:
            The sum of all points' gradients, which are the parameters' ``.grad`` as well until the
            next call, and how it came about.

        Raises:
            CodingError: When the step is not the one that was published last.
            LostChunksError: When too few messages came before the deadline, or can come.
        """
        self._check(step)
        group = Group(self.plan, step)
        try:
            late = self._gather(group)
            if group.weights is None:
                self._refuse(group)
            self.gradients.zero_()
            group.add_to(self.gradients.buffers, self._parameters)
        finally:
            self._release(group)
        self.gradients.write_back()
        return self.gradients, TreeOutcome(
            step=step,
            delivered=tuple(sorted(group.letters)),
            stragglers=tuple(child for child in self.plan.children if child not in group.letters),
            gone=self.gone,
            late=late,
            payload_bytes=self._parameters.payload_bytes,
            received_bytes=self._received(),
            seconds=self._waited(),
        )

    def _refuse(self, group: Group) -> None:
        missing = [child for child in self.plan.children if child not in group.letters]
        alive = np.ones(self.tree.workers + 1, dtype=bool)
        alive[missing] = False
        off = np.abs(self.tree.coefficients(alive) - 1.0) > 1e-6
        raise LostChunksError(
            f"step {group.step}: waited {self._waited():.3g} s for messages of "
            f"nodes {missing}; any {self.tree.messages_received} of the root's children would do; "
            f"gone are nodes {list(self.gone)}",
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
