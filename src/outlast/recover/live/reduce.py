"""Sums over replica groups whose members may die at any moment, and their common vote.

The connections of a round are made for its members alone. What fails, or concerns a group that has
gone silent, gives them up; the next round makes new ones. Sums are taken on copies, so that a sum
which was given up and yet arrives later spoils no gradient.
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

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outlast.recover.live.membership import Seat
    from outlast.recover.live.rules import Member, Membership

BUCKET_BYTES = 32 << 20


class RoundFailedError(Exception):
    """A round's connections are of no more use; its step is done again in another round."""


class Connections:
    """Sums over the groups of a membership.

    Args:
        seat: Tells whether peers are alive.
        device: Where the sums are taken: gloo for ``cpu``, NCCL for ``cuda``.
        timeout_seconds: Longest wait for peers that are alive.
    """

    def __init__(self, seat: Seat, device: torch.device, timeout_seconds: float) -> None:
        from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

        self._kind: Any = ProcessGroupNCCL if device.type == "cuda" else ProcessGroupGloo
        self._seat = seat
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
                self._configure(link)
            except Exception as error:
                problem.append(error)
            done.set()

        # Waits for all members; a peer that dies now must not hold this process up.
        threading.Thread(target=configure, daemon=True).start()
        why = self._seat.wait(done, found.members, self._timeout_seconds, link.given_up)
        if why or problem:
            link.give_up()
            raise RoundFailedError(why or str(problem[0]))
        self._link = link

    def _configure(self, link: _Link) -> None:
        found, place = link.found, link.found.members[0].store
        host, _, port = place.rpartition(":")
        limit = timedelta(seconds=self._timeout_seconds)
        link.store = dist.TCPStore(
            host, int(port), is_master=False, wait_for_workers=False, timeout=limit
        )
        group = self._kind(timeout=limit)
        at = f"{place}/outlast/{found.round}"
        group.configure(at, self._seat.life, found.index, found.count)
        link.group = group

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
        try:
            for tensor in tensors:
                self._link.works.append(self._link.group.allreduce([tensor], _sum_options()))
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
        why = self._seat.wait(done, self._members, self._timeout_seconds, self._link.given_up)
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


def _sum_options() -> Any:
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.SUM
    return options


def gradients_of(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor | None]:
    """The part of every gradient that this process holds; None for a parameter without one."""
    return [_local(parameter.grad) for parameter in parameters]


def _local(tensor: torch.Tensor | None) -> torch.Tensor | None:
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
            assert local is not None
            kind = (local.dtype, local.device)
            if kind != last or size > BUCKET_BYTES:
                self._buckets.append([])
                size, last = 0, kind
            self._buckets[-1].append(number)
            size += local.numel() * local.element_size()

    def packed(self) -> tuple[list[torch.Tensor], list[float]]:
        """Copies of the gradients, and for each parameter 1.0 if it has one, else 0.0."""
        gradients = gradients_of(self._parameters)
        flat = []
        for bucket in self._buckets:
            parts = []
            for number in bucket:
                gradient = gradients[number]
                if gradient is None:
                    local = _local(self._parameters[number].detach())
                    assert local is not None
                    gradient = torch.zeros_like(local)
                parts.append(gradient.detach().reshape(-1))
            flat.append(torch.cat(parts))
        return flat, [0.0 if gradient is None else 1.0 for gradient in gradients]

    def drop(self) -> None:
        """Leave no parameter a gradient."""
        for parameter in self._parameters:
            parameter.grad = None

    def zeros(self) -> list[torch.Tensor]:
        """What `packed` gives where there is no gradient."""
        found = []
        for bucket in self._buckets:
            locals_ = [_local(self._parameters[number].detach()) for number in bucket]
            sizes = [name.numel() for name in locals_ if name is not None]
            first = locals_[0]
            assert first is not None
            found.append(torch.zeros(sum(sizes), dtype=first.dtype, device=first.device))
        return found

    def unpack(self, flat: list[torch.Tensor], used: Sequence[float]) -> None:
        """Give every parameter that any group has used its summed gradient."""
        for bucket, content in zip(self._buckets, flat, strict=True):
            start = 0
            for number in bucket:
                parameter = self._parameters[number]
                local = _local(parameter.detach())
                assert local is not None
                part = content[start : start + local.numel()].view_as(local)
                start += local.numel()
                if used[number] > 0:
                    _give(parameter, part)

    @property
    def bytes(self) -> int:
        """Summed in each step by this process."""
        return sum(
            parameter.numel() * parameter.element_size()
            for parameter in map(_local, self._parameters)
            if parameter is not None
        )


def _give(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    held = _local(parameter.grad)
    if held is not None:
        held.copy_(gradient)
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
