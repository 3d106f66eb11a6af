"""CodedReduce: a gradient code in every group of a parent and its children.

Reisizadeh, Prakash, Pedarsani and Avestimehr, "CodedReduce: A Fast and Robust Framework for
Gradient Aggregation in Distributed Learning" (IEEE/ACM Transactions on Networking, 2021). With one
code over all workers a master receives from nearly all of them. In a tree it receives from n - s
children, as does every inner node, and what one worker computes is about as little.

The master's batch is cut into chunks for its n children as a code for n workers says. A child keeps
some points of its chunks for itself and hands the rest to its own children in the same way, and so
on. A node's message is the sum of its own points' gradients, with the coefficients that they came
with, and of its children's messages, decoded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from outlast.coding.codes.inner import checked_code
from outlast.errors import CodingError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from outlast.coding.code import GradientCode

MASTER = 0
"""The number of the tree's root, which has no data of its own."""


@dataclass(frozen=True, eq=False)
class NodePlan:
    """What one node does in every step.

    Its message is sum_i coefficients[i] gradient(points[i]) + sum_c weights[c] message(children[c])
    with the weights of `weights`; at the master that is the gradient of the batch.

    Attributes:
        node: Its number.
        parent: To whom it sends; None for the master.
        children: From whom it receives; empty for a leaf.
        points: (points,) int64, points of the batch whose gradients it computes.
        coefficients: (points,) with which their gradients enter its message.
        code: The code of its children; None for a leaf.
    """

    node: int
    parent: int | None
    children: range
    points: npt.NDArray[np.int64]
    coefficients: npt.NDArray[Any]
    code: GradientCode | None

    def weights(self, delivered: Iterable[int]) -> npt.NDArray[Any]:
        """(children,) weights of the children's messages; 0 for those that did not deliver.

        Args:
            delivered: Numbers of the children whose messages are there.

        Raises:
            CodingError: For nodes that are no children, or when these messages do not determine the
                sum: the node should then wait for more.
        """
        present = sorted(set(delivered))
        strange = [number for number in present if number not in self.children]
        if strange:
            raise CodingError(f"nodes {strange} are no children of node {self.node}")
        if self.code is None:
            return np.zeros(0)
        decoded = self.code.decode([number - self.children.start for number in present])
        if not decoded.certificate.exact:
            raise CodingError(
                f"node {self.node} cannot decode the messages of {len(present)} of its "
                f"{len(self.children)} children; any {len(self.children) - self.code.tolerance} "
                "would do"
            )
        return decoded.weights


class CodedReduce:
    """A regular tree of workers that survives s stragglers among the children of every node.

    Workers are nodes 1 to n + n^2 + ... + n^L; node 0 is the master. Each worker computes the share
    r = 1 / sum_{l=1..L} (n / (s + 1))^l of the batch. The gradient is exact for any s stragglers in
    every group at once, and whatever is below a straggler is not needed.

    Args:
        children: n, children of each node that is no leaf.
        levels: L, levels of workers below the master.
        stragglers: s, stragglers tolerated in every group.
        code: A code of n workers for s stragglers, all with equally many chunks.
        points: Points that the batch is cut into; the fewest that give every worker a whole number
            of them if None.

    Attributes:
        points: As the argument.
        local_points: Points that each worker computes.

    Raises:
        CodingError: For numbers that do not fit, with the nearest that do.
    """

    name = "CodedReduce"
    source = "Reisizadeh, Prakash, Pedarsani and Avestimehr (ToN 2021)"

    def __init__(
        self,
        children: int,
        levels: int,
        stragglers: int,
        *,
        code: GradientCode | None = None,
        points: int | None = None,
    ) -> None:
        if children < 1 or levels < 1:
            raise CodingError(
                f"children = {children} and levels = {levels} must both be at least 1"
            )
        if not 0 <= stragglers < children:
            raise CodingError(
                f"stragglers = {stragglers} is not in 0 to {children - 1} for {children} children; "
                f"{min(max(stragglers, 0), children - 1)} would do"
            )
        self.children, self.levels, self.stragglers = children, levels, stragglers
        self.code = checked_code(code, children, stragglers)
        loads = self.code.assignment.loads
        if loads.min() != loads.max():
            raise CodingError(
                f"code = {self.code!r} gives {loads.min()} to {loads.max()} chunks to a worker; "
                "the groups of a tree need one that gives all equally many"
            )
        remaining = self._remaining(Fraction(int(loads[0]), self.code.chunks))
        local = math.lcm(*((fraction / self.code.chunks).denominator for fraction in remaining))
        fewest = int(local * remaining[0])
        self.points = fewest if points is None else points
        if self.points < 1 or self.points % fewest:
            below = max(self.points // fewest, 1) * fewest
            raise CodingError(
                f"points = {points} cannot be shared equally by {self.workers} workers; "
                f"{below} or {below + fewest} can"
            )
        self.local_points = local * (self.points // fewest)
        self._plans = self._allocate()

    def __repr__(self) -> str:
        return (
            f"CodedReduce(children={self.children}, levels={self.levels}, "
            f"stragglers={self.stragglers}, points={self.points})"
        )

    def _remaining(self, share: Fraction) -> list[Fraction]:
        """Points that nodes hand to their children, by level from the master, for 1 per worker.

        A leaf has 1 point; a node above has its own and what is its children's, each of which has
        `share` of that.
        """
        handed: list[Fraction] = []
        size = Fraction(1)
        for _ in range(self.levels):
            handed.insert(0, size / share)
            size = handed[0] + 1
        return handed

    def _allocate(self) -> list[NodePlan]:
        pieces = self.code.chunks
        rows = [
            (self.code.matrix.indices[start:stop], self.code.matrix.data[start:stop])
            for start, stop in zip(
                self.code.matrix.indptr[:-1], self.code.matrix.indptr[1:], strict=True
            )
        ]
        inner = self.workers - self.children**self.levels + 1
        targets = {MASTER: (np.arange(self.points), np.ones(self.points))}
        plans = []
        for node in range(self.workers + 1):
            points, coefficients = targets.pop(node)
            own = 0 if node == MASTER else self.local_points
            first = node * self.children + 1
            below = range(first, first + self.children) if node < inner else range(0)
            parent = None if node == MASTER else (node - 1) // self.children
            plans.append(
                NodePlan(
                    node,
                    parent,
                    below,
                    points[:own].copy(),
                    coefficients[:own].copy(),
                    self.code if below else None,
                )
            )
            if below:
                chunks = points[own:].reshape(pieces, -1)
                weights = coefficients[own:].reshape(pieces, -1)
                for child, (chosen, values) in zip(below, rows, strict=True):
                    scaled = weights[chosen] * values[:, None]
                    targets[child] = (chunks[chosen].ravel(), scaled.ravel())
        return plans

    @property
    def workers(self) -> int:
        """Nodes without the master."""
        return sum(self.children**level for level in range(1, self.levels + 1))

    @property
    def share(self) -> float:
        """Share of the batch that each worker computes, r."""
        return self.local_points / self.points

    @property
    def messages_received(self) -> int:
        """Messages that a node must receive in a step, the master as well: n - s."""
        return self.children - self.stragglers

    def plan(self, node: int) -> NodePlan:
        """What `node` does; 0 is the master.

        Raises:
            CodingError: For a node that is not in the tree.
        """
        if not 0 <= node <= self.workers:
            raise CodingError(f"node = {node} is not in 0 to {self.workers}")
        return self._plans[node]

    def coefficients(self, alive: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
        """(points,) how often each point's gradient is in the master's sum; 1 is right.

        Every node decodes what it has with the weights of least error, also where it cannot be
        exact.

        Args:
            alive: (1 + workers,) whether each node delivers; the master is number 0.

        Raises:
            CodingError: For a mask of another shape.
        """
        if alive.shape != (self.workers + 1,):
            raise CodingError(
                f"alive has shape {alive.shape}, but the tree has {self.workers} workers and a "
                "master"
            )
        found = np.zeros(self.points, dtype=self.code.matrix.dtype)
        factors = {MASTER: 1.0}
        for plan in self._plans:
            factor = factors.pop(plan.node, 0.0)
            if not factor:
                continue
            np.add.at(found, plan.points, factor * plan.coefficients)
            if plan.code is not None:
                weights = plan.code.decode(alive[plan.children.start : plan.children.stop]).weights
                factors |= {
                    child: factor * weight
                    for child, weight in zip(plan.children, weights, strict=True)
                }
        return found

    def error(self, alive: npt.NDArray[np.bool_]) -> float:
        """Sum of squares of what the `coefficients` lack to 1; see `Certificate.error`."""
        return float(np.sum(np.abs(self.coefficients(alive) - 1.0) ** 2))
