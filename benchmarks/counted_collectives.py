"""Bytes that collectives carry, counted as they are called.

Works forward and backward, for functional and for in-place collectives, and below DTensor. What is
counted is what the caller hands over, not what a library puts on the wire; `Traffic.ring_bytes`
is what a bandwidth-optimal ring would send from every rank (Thakur et al. 2005).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator


_REDUCING = {"all_reduce", "all_reduce_", "allreduce_"}
"""Counted: the tensor; a ring sends 2 (p - 1) / p of it."""

_GATHERING = {"all_gather_into_tensor", "_allgather_base_", "allgather_"}
"""Counted: the result of all ranks; a ring sends (p - 1) / p of it."""

_SCATTERING = {"reduce_scatter_tensor", "_reduce_scatter_base_", "reduce_scatter_"}
"""Counted: the input of all ranks; a ring sends (p - 1) / p of it."""

_MOVING = {"broadcast", "broadcast_", "all_to_all_single", "alltoall_base_", "scatter_"}
"""Counted: the tensor, and as much on the wire."""


@dataclass(frozen=True)
class Call:
    """One collective.

    Attributes:
        name: The operator, such as ``all_reduce``.
        payload_bytes: Bytes of the whole tensor.
        ranks: Size of the process group.
    """

    name: str
    payload_bytes: int
    ranks: int

    @property
    def ring_bytes(self) -> float:
        """Bytes that a ring sends from every rank."""
        share = (self.ranks - 1) / self.ranks
        if self.name in _REDUCING:
            return 2 * share * self.payload_bytes
        return share * self.payload_bytes if self.name not in _MOVING else self.payload_bytes


@dataclass
class Traffic:
    """Collectives that have been called so far, in order."""

    calls: list[Call] = field(default_factory=list)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors handed to collectives."""
        return sum(call.payload_bytes for call in self.calls)

    @property
    def ring_bytes(self) -> float:
        """Bytes that rings would send from every rank."""
        return sum(call.ring_bytes for call in self.calls)


class CountedCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives of this process inside a ``with`` block.

    The reducer of DistributedDataParallel is outside: its collectives come from C++.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.traffic = Traffic()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`, and note it if it is a collective."""
        if any(issubclass(type_, DTensor) for type_ in types):
            return NotImplemented  # DTensor turns itself into local operators, which come back here
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func.name().partition("::")
        name = name.split(".")[0]
        if namespace in ("_c10d_functional", "c10d"):
            carried = _carried_bytes(name, args, result)
            if carried is not None:
                self.traffic.calls.append(Call(name, carried, _ranks(args)))
        return result


def _carried_bytes(name: str, args: tuple[Any, ...], result: Any) -> int | None:
    if name in _REDUCING or name in _MOVING:
        return sum(map(_size, _tensors(args[0])))
    if name in _GATHERING:
        # In place the result is the first argument, else what is returned.
        functional = name == "all_gather_into_tensor"
        return sum(map(_size, _tensors(result if functional else args[0])))
    if name in _SCATTERING:
        functional = name == "reduce_scatter_tensor"
        return sum(map(_size, _tensors(args[0] if functional else args[1])))
    return None


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _ranks(args: tuple[Any, ...]) -> int:
    """Size of the group among a collective's arguments: a name, or a boxed group."""
    for argument in args:
        if isinstance(argument, str) and argument not in ("sum", "avg", "max", "min", "product"):
            return _resolve_process_group(argument).size()  # type: ignore[arg-type]
        if isinstance(argument, dist.ProcessGroup):
            return argument.size()
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return int(dist.ProcessGroup.unbox(argument).size())
    raise AssertionError("a collective without a process group")
