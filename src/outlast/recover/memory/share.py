"""Who keeps what: every node keeps all that its processes hold, each box once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outlast.errors import CheckpointError, RecoverError
from outlast.state.live import local_box
from outlast.state.tensors import dtype_name, place_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from outlast.state.box import Box
    from outlast.state.live import Live


@dataclass(frozen=True)
class Part:
    """What a process holds of a tensor: element type, shape of the whole, its box, its bytes.

    `varies`: others that hold the same box may have other content in it; see `Live.varying`.
    """

    dtype: str
    shape: tuple[int, ...]
    box: Box
    size: int
    varies: bool = False


@dataclass(frozen=True)
class Holding:
    """What a process holds.

    Attributes:
        node: Which processes share their memory with it.
        parts: Name of a tensor to what it holds of it.
        values: Names of its values.
        tied: Name of a tensor whose memory another one has as well, to the first name of that.
    """

    node: str
    parts: dict[str, Part]
    values: tuple[str, ...]
    tied: dict[str, str] = field(default_factory=dict)

    def memories(self) -> dict[tuple[tuple[str, ...], Box], int]:
        """All names of each memory, the first one first, and its box, to its bytes."""
        names: dict[str, list[str]] = {}
        for name in self.parts:
            names.setdefault(self.tied.get(name, name), []).append(name)
        return {
            (tuple(name), self.parts[first].box): self.parts[first].size
            for first, name in names.items()
        }


def memories(live: Live) -> dict[str, tuple[Box, torch.Tensor]]:
    """Name to box and this process's memory of every tensor.

    Raises:
        RecoverError: Naming a tensor that cannot be kept.
    """
    found = {}
    for name, tensor in live.tensors.items():
        try:
            found[name] = local_box(tensor)
        except CheckpointError as error:
            raise RecoverError(f"`{name}`: {error}") from None
    return found


def holding(node: str, live: Live, memory: dict[str, tuple[Box, torch.Tensor]]) -> Holding:
    """What this process holds; `memory` as `memories` gives it."""
    parts = {
        name: Part(
            dtype_name(live.tensors[name]),
            tuple(live.tensors[name].shape),
            box,
            local.numel() * local.element_size(),
            name in live.varying,
        )
        for name, (box, local) in memory.items()
    }
    return Holding(node, parts, tuple(live.values), _tied(live, memory))


def _tied(live: Live, memory: dict[str, tuple[Box, torch.Tensor]]) -> dict[str, str]:
    """Name of a tensor to that of an earlier one with the same memory and the same times to change.

    Objects may hand out other tensors next time, so theirs are left alone.
    """
    first: dict[object, str] = {}
    tied = {}
    for name, (box, local) in memory.items():
        if name in live.objects or not local.numel():
            continue
        key = (place_of(local), box, name in live.varying)
        if (earlier := first.setdefault(key, name)) != name:
            tied[name] = earlier
    return tied


def share(holdings: Sequence[Holding], rank: int) -> tuple[list[str], set[str]]:
    """Names of the tensors and of the values that `rank` keeps, the largest tensors first.

    All processes come to the same result from the same `holdings`. Boxes that several processes of
    a node hold are given to the one with the fewest bytes so far, tied tensors together; those that
    vary between them, and values, to the first.
    """
    node = holdings[rank].node
    local = [item for item, held in enumerate(holdings) if held.node == node]
    sizes: dict[tuple[tuple[str, ...], Box], int] = {}
    holders: dict[tuple[tuple[str, ...], Box], list[int]] = {}
    values: dict[str, int] = {}
    for item in local:
        for memory, size in holdings[item].memories().items():
            sizes.setdefault(memory, size)
            holders.setdefault(memory, []).append(item)
        for name in holdings[item].values:
            values.setdefault(name, item)
    load = dict.fromkeys(local, 0)
    mine: list[str] = []
    for memory in sorted(sizes, key=lambda size: -sizes[size]):
        first = holders[memory][0]
        varies = holdings[first].parts[memory[0][0]].varies
        owner = first if varies else min(holders[memory], key=load.__getitem__)
        load[owner] += sizes[memory]
        if owner == rank:
            mine += memory[0]
    return mine, {name for name, owner in values.items() if owner == rank}


def everything_of(holdings: Iterable[Holding]) -> str:
    """Digest of what all processes hold together."""
    held = list(holdings)
    return digest_of(
        {name for item in held for name in item.parts},
        {name for item in held for name in item.values},
    )


def digest_of(tensors: Iterable[str], values: Iterable[str]) -> str:
    """32 hexadecimal digits that change with any name."""
    text = "\0".join([*sorted(tensors), "\1", *sorted(values)])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
