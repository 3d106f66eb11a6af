"""Sums over replica groups whose members may die at any moment, and their common vote.

The connections of a round are made for its members alone. What fails, or concerns a group that has
gone silent, gives them up; the next round makes new ones. Sums are taken on copies, so that a sum
which was given up and yet arrives later spoils no gradient.

`PartSums` adds in one order, whoever computes: bits that no death of a group changes. The global
batch is cut into parts, always the same ones. Their gradients are the leaves of a binary tree over
their places in the batch; every node is the sum of its left and its right half. A group has
neighbouring parts, and adds up alone those nodes that lie wholly within them; of these, each is
handed to all groups, which add up the rest. Which groups there are decides who adds what, and never
what is added to what, so the root has the same bits. It costs a sum over the groups for every such
node, up to `2 log2(parts)` for each group, in place of one.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from outlast.errors import RecoverError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from outlast.recover.live.quorum import Member, Membership, QuorumClient


BUCKET_BYTES = 32 << 20

Span = tuple[int, int]
"""Parts from the first to before the second."""

Flat = list[torch.Tensor]
"""Gradients as `Buckets` packs them."""


class RoundFailedError(Exception):
    """A round's connections are of no more use; its step is done again in another round."""


class Connections:
    """Sums over the groups of a membership.

    Args:
        client: Tells whether peers are alive.
        device: Where the sums are taken: gloo for ``cpu``, NCCL for ``cuda``.
        timeout_seconds: Longest wait for peers that are alive.
    """

    def __init__(self, client: QuorumClient, device: torch.device, timeout_seconds: float) -> None:
        from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

        self._kind: Any = ProcessGroupNCCL if device.type == "cuda" else ProcessGroupGloo
        self._client = client
        self._timeout_seconds = timeout_seconds
        self._link: _Link | None = None
        self._members: tuple[Member, ...] = ()
        self._given_up: list[_Link] = []

    @property
    def round(self) -> str:
        """In which the connections were made; an empty text while there are none."""
        return "" if self._link is None else self._link.found.round

    def connect(self, found: Membership) -> None:
        """Connect the members of a round, unless they are connected already.

        Raises:
            RoundFailedError: When one of them does not come.
        """
        self._members = found.members
        # All members decide alike: a group that was stopped meanwhile may still hold old ones.
        same = self._link is not None and self._link.found.lives == found.lives
        if same and all(member.connected == self.round for member in found.members):
            return
        self.drop()
        self._given_up = [link for link in self._given_up if not link.closed()]
        if found.count == 1:
            return
        done, problem, link = threading.Event(), [], _Link(found)

        def configure() -> None:
            try:
                at = found.members[0].store
                host, _, port = at.rpartition(":")
                limit = timedelta(seconds=self._timeout_seconds)
                link.store = dist.TCPStore(
                    host, int(port), is_master=False, wait_for_workers=False, timeout=limit
                )
                group = self._kind(timeout=limit)
                name = f"{at}/outlast/{found.round}"
                group.configure(name, self._client.life, found.index, found.count)
                link.group = group
            except Exception as error:
                problem.append(error)
            done.set()

        # Waits for all members; a peer that dies now must not hold this process up.
        threading.Thread(target=configure, daemon=True).start()
        why = self._client.wait(done, found.members, self._timeout_seconds, link.given_up)
        if why or problem:
            link.give_up()
            raise RoundFailedError(why or str(problem[0]))
        self._link = link

    def drop(self) -> None:
        """Give the connections up, and tell the peers."""
        link, self._link = self._link, None
        if link is not None:
            link.give_up()
            if not link.closed():
                self._given_up.append(link)

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its sum over the members; all together call it alike.

        Raises:
            RoundFailedError: When a member is gone; the tensors' content is then undefined.
        """
        if self._link is None:
            if len(self._members) > 1:
                raise RoundFailedError("there are no connections")
            return
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        try:
            for tensor in tensors:
                self._link.works.append(self._link.group.allreduce([tensor], options))
            for work in self._link.works:
                self._await(work)
            self._link.works = []
        except RuntimeError as error:
            self.drop()
            raise RoundFailedError(str(error)) from None
        except RoundFailedError:
            self.drop()
            raise

    def _await(self, work: Any) -> None:
        assert self._link is not None
        done = threading.Event()
        work.get_future().add_done_callback(lambda _: done.set())
        why = self._client.wait(done, self._members, self._timeout_seconds, self._link.given_up)
        if why:
            raise RoundFailedError(why)
        work.wait()


@dataclass
class _Link:
    """The connections of one round.

    gloo cannot end a sum in which a peer hangs: ending its process group waits for that. So the
    group is kept until its works are done, and the round's store tells the peers.
    """

    found: Membership
    group: Any = None
    store: dist.TCPStore | None = None
    works: list[Any] = field(default_factory=list)

    @property
    def _key(self) -> str:
        return f"outlast/{self.found.round}/given up"

    def give_up(self) -> None:
        """Tell the peers that this member waits for them no more."""
        # Whose store is gone is a member itself, and its peers find it silent.
        with contextlib.suppress(RuntimeError):
            if self.store is not None:
                self.store.set(self._key, "1")

    def given_up(self) -> str:
        """Why the round is of no more use, or an empty text."""
        with contextlib.suppress(RuntimeError):
            given_up = self.store is not None and self.store.check([self._key])
            return "a member has given the round up" if given_up else ""
        return "the round's store has gone"

    def closed(self) -> bool:
        """End the process group if nothing is under way in it; whether it is ended."""
        if all(work.is_completed() for work in self.works):
            self.works = []
            self.group.abort(errored=False)
            return True
        return False


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Buckets:
    """The gradients of a model as few flat tensors, equal in every group.

    Args:
        parameters: Those that are trained, in an order that all groups share.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._buckets: list[list[int]] = []
        size, last = 0, None
        for number, parameter in enumerate(self._parameters):
            local = _local(parameter.detach())
            kind = (local.dtype, local.device)
            if kind != last or size > BUCKET_BYTES:
                self._buckets.append([])
                size, last = 0, kind
            self._buckets[-1].append(number)
            size += local.nbytes

    def packed(self) -> tuple[list[torch.Tensor], list[float]]:
        """Copies of the gradients, and for each parameter 1.0 if it has one, else 0.0."""
        gradients = [parameter.grad for parameter in self._parameters]
        parts = [
            torch.zeros_like(_local(parameter.detach())) if gradient is None else _local(gradient)
            for parameter, gradient in zip(self._parameters, gradients, strict=True)
        ]
        flat = [
            torch.cat([parts[number].detach().reshape(-1) for number in bucket])
            for bucket in self._buckets
        ]
        return flat, [0.0 if gradient is None else 1.0 for gradient in gradients]

    def drop(self) -> None:
        """Leave no parameter a gradient."""
        for parameter in self._parameters:
            parameter.grad = None

    def zeros(self) -> list[torch.Tensor]:
        """The form of `packed` where there is no gradient."""
        found = []
        for bucket in self._buckets:
            parts = [_local(self._parameters[number].detach()) for number in bucket]
            size = sum(part.numel() for part in parts)
            found.append(torch.zeros(size, dtype=parts[0].dtype, device=parts[0].device))
        return found

    def unpack(self, flat: list[torch.Tensor], used: Sequence[float]) -> None:
        """Give every parameter that any group has used its summed gradient."""
        for bucket, content in zip(self._buckets, flat, strict=True):
            start = 0
            for number in bucket:
                parameter = self._parameters[number]
                local = _local(parameter.detach())
                part = content[start : start + local.numel()].view_as(local)
                start += local.numel()
                if used[number] > 0:
                    _set_gradient(parameter, part)


def _set_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    if parameter.grad is not None:
        _local(parameter.grad).copy_(gradient)
    elif isinstance(parameter, DTensor):
        parameter.grad = DTensor.from_local(
            gradient.clone(),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    else:
        parameter.grad = gradient.clone()


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
    """Sums of a group over its parts of one step.

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
            exchange(
                [
                    tensor.view(torch.int32 if tensor.element_size() % 4 == 0 else torch.uint8)
                    for tensor in flat
                ]
            )
            return flat
        left, right = halves(node)
        return _added(self._total(left, exchange), self._total(right, exchange))


def _added(left: Flat, right: Flat) -> Flat:
    for one, other in zip(left, right, strict=True):
        one.add_(other)
    return left
