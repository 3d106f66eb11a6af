"""Sums of gradients in one order, whoever computes them: bits that no death of a group changes.

The global batch is cut into parts, always the same ones. Their gradients are the leaves of a binary
tree over their places in the batch; every node is the sum of its left and its right half. A group
has neighbouring parts, and adds up alone those nodes that lie wholly within them; of these, each
is handed to all groups, which add up the rest. Which groups there are decides who adds what, and
never what is added to what, so the root has the same bits. It costs a sum over the groups for
every such node, up to `2 log2(parts)` for each group, in place of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outlast.errors import RecoverError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outlast.recover.live.reduce import Buckets

Span = tuple[int, int]
"""Parts from the first to before the second."""
Flat = list[torch.Tensor]
"""Gradients as `Buckets` packs them."""


def span_of(parts: int, index: int, count: int) -> Span:
    """The parts of one of `count` groups; empty where there are more groups than parts."""
    return parts * index // count, parts * (index + 1) // count


def halves(span: Span) -> tuple[Span, Span]:
    """The children of a node of more than one part."""
    low, high = span
    middle = (low + high + 1) // 2
    return (low, middle), (middle, high)


def nodes_within(root: Span, own: Span) -> Iterator[Span]:
    """The largest nodes of the tree below `root` that lie within `own`, from the left."""
    low, high = max(root[0], own[0]), min(root[1], own[1])
    if low >= high:
        return
    if (low, high) == root:
        yield root
        return
    for half in halves(root):
        yield from nodes_within(half, own)


class PartSums:
    """What a group has added up of the parts of one step.

    Args:
        buckets: Of the parameters whose gradients are summed.
        parts: Of the global batch.
    """

    def __init__(self, buckets: Buckets, parts: int) -> None:
        self.parts = parts
        self._buckets = buckets
        self._own: Span = (0, 0)
        self._nodes: dict[Span, Flat] = {}
        self.begin((0, 1), idle=True)

    def begin(self, share: tuple[int, int], *, idle: bool) -> None:
        """A new attempt at a step.

        Args:
            share: Index of this group among those that compute, and their number.
            idle: Whether the others do this group's part.
        """
        self._groups = share[1]
        self._own = (0, 0) if idle else span_of(self.parts, *share)
        self.clear()

    @property
    def own(self) -> range:
        """Numbers of the parts that this group computes."""
        return range(*self._own)

    def clear(self) -> None:
        """Forget what has been added, to compute all own parts again."""
        self._nodes = {}
        self.losses = [0.0] * self.parts
        self.used: list[float] = []
        self._added: set[int] = set()

    def add(self, part: int, loss: float) -> None:
        """Take the parameters' gradients as those of one part, each part once, and drop them.

        Raises:
            RecoverError: For a part that is not this group's, or was added already.
        """
        if part not in self.own or part in self._added:
            whose = (
                f"this group adds each of the parts {self._own[0]} to {self._own[1] - 1} once"
                if self.own
                else "this group adds none in this step: others do its part, or there are more "
                "groups than parts"
            )
            raise RecoverError(f"part {part} is not to be added: {whose}")
        self._added.add(part)
        flat, used = self._buckets.packed()
        self._buckets.drop()
        self.losses[part] = loss
        self.used = [max(pair) for pair in zip(used, self.used or used, strict=True)]
        self._nodes[part, part + 1] = flat
        for node in nodes_within((0, self.parts), self._own):
            if node[0] <= part < node[1]:
                self._fold(node)

    def sum(self, exchange: Callable[[Flat], None]) -> Flat:
        """The gradients of all parts, equal to the bit in all groups.

        Args:
            exchange: Replaces each of some integer tensors by its sum over the groups.

        Raises:
            RecoverError: A part of this group is missing.
        """
        if len(self._added) < len(self.own):
            missing = min(set(self.own) - self._added)
            raise RecoverError(
                f"part {missing} is missing: call step.add(part, loss) for each of step.parts "
                "before step.commit()"
            )
        return self._total((0, self.parts), exchange)

    def _fold(self, node: Span) -> Flat | None:
        """The sum of a node of one's own, once all of its parts are there."""
        if node in self._nodes:
            return self._nodes[node]
        if node[1] - node[0] == 1:
            return None
        left, right = halves(node)
        sums = self._fold(left), self._fold(right)
        if sums[0] is None or sums[1] is None:
            return None
        self._nodes[node] = _added(sums[0], sums[1])
        del self._nodes[left], self._nodes[right]
        return self._nodes[node]

    def _total(self, node: Span, exchange: Callable[[Flat], None]) -> Flat:
        spans = [span_of(self.parts, index, self._groups) for index in range(self._groups)]
        if any(low <= node[0] and node[1] <= high for low, high in spans):
            mine = self._nodes.pop(node, None)
            flat = self._buckets.zeros() if mine is None else mine
            # Of all groups one has it. Bits are summed as whole numbers: a float's sum with zeros
            # would lose the sign of a zero.
            exchange([_bits(tensor) for tensor in flat])
            return flat
        left, right = halves(node)
        return _added(self._total(left, exchange), self._total(right, exchange))


def _added(left: Flat, right: Flat) -> Flat:
    for one, other in zip(left, right, strict=True):
        one.add_(other)
    return left


def _bits(flat: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers."""
    return flat.view(torch.int32 if flat.element_size() % 4 == 0 else torch.uint8)
