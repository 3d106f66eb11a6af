"""The processes that recover together, and how they come to one mind."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from outlast.errors import OutlastError, RecoverError
from outlast.records.process import boot_identity

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Peers:
    """This process among those of the run.

    Args:
        group: With a backend for host memory (gloo); None for the default group, or for one process
            alone where there is none.
        node: What processes with one memory have in common; empty: this boot of this machine.

    Attributes:
        rank: In the group.
        world_size: Of the group.
        node: As given or found.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, node: str = "") -> None:
        self.group = group
        self.alone = not dist.is_initialized()
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.world_size = 1 if self.alone else dist.get_world_size(group)
        self.node = node or boot_identity() or f"{socket.gethostname()}-{os.getuid()}"

    def gather(self, mine: T) -> list[T]:
        """Every process's `mine`, by rank."""
        if self.world_size == 1:
            return [mine]
        found = [mine] * self.world_size
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def any(self, mine: bool) -> bool:
        """Whether any process says so."""
        if self.world_size == 1:
            return mine
        said = torch.tensor([float(mine)])
        dist.all_reduce(said, group=self.group)
        return bool(said.item())

    def together(self, work: Callable[[], T]) -> T:
        """Run `work`, which waits for nobody; where it fails on one, all raise its sentence.

        Raises:
            RecoverError: The first sentence of any process.
        """
        result, problem = None, ""
        try:
            result = work()
        except OutlastError as error:
            problem = str(error)
        except Exception as error:  # whatever it is, the others must not wait for this one
            problem = f"{type(error).__name__}: {error}"
        first = next((each for each in self.gather(problem) if each), "")
        if first:
            raise RecoverError(first)
        return result  # type: ignore[return-value]

    def send(self, content: torch.Tensor, to: int) -> None:
        """Give `content`, in host memory, to the process of rank `to`."""
        dist.send(content, group=self.group, group_dst=to)

    def receive(self, content: torch.Tensor, source: int) -> None:
        """Fill `content`, in host memory, with what the process of rank `source` sends."""
        dist.recv(content, group=self.group, group_src=source)
