"""Filling live tensors from slots: those of this node directly, others through their readers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from outlast.recover.memory.slot import Entry, SlotReader
from outlast.state.box import Box
from outlast.state.live import Filling

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from outlast.distributed.group import Group
    from outlast.recover.memory.find import Found, Whole
    from outlast.state.install import Targets


class Piece(NamedTuple):
    """A box that lies in one slot and goes into one tensor.

    Attributes:
        slot: Its number among those of the state.
        entry: Number of the entry in the slot.
        box: The part of it that is wanted.
    """

    slot: int
    entry: int
    box: Box


def fill(targets: Targets, state: Whole, peers: Group) -> int:
    """Fill the live tensors of `targets`; all processes call it together.

    Returns:
        The bytes that have come from other nodes to this process.

    Raises:
        RecoverError: When a slot has gone meanwhile, here or elsewhere.
    """
    tensors = state.tensors()
    fillings = []
    seen: set[int] = set()
    for name, tensor in targets.tensors.items():
        # Tied tensors have several names and one memory.
        if name in tensors and id(tensor) not in seen:
            seen.add(id(tensor))
            fillings.append(Filling(name, tensor, tensors[name]))
    found = _by_name(state)
    wanted = [
        pieces_of(filling.box, found.get(filling.name, []), peers.node) for filling in fillings
    ]
    slots = {piece.slot for pieces in wanted for piece in pieces}
    readers = peers.raise_together(lambda: _opened(state, slots, peers))
    far = [
        (number, piece)
        for number, pieces in enumerate(wanted)
        for piece in pieces
        if piece.slot not in readers
    ]
    for filling, pieces in zip(fillings, wanted, strict=True):
        for piece in pieces:
            if piece.slot in readers:
                part = piece.box.within(filling.box)
                filling.out[part] = _content(state, piece, readers[piece.slot])
    moved = _exchange(state, far, fillings, peers, readers)
    for filling in fillings:
        filling.finish()
    for reader in readers.values():
        reader.close()
    return moved


def _by_name(state: Whole) -> dict[str, list[tuple[int, int, Found, Entry]]]:
    found: dict[str, list[tuple[int, int, Found, Entry]]] = {}
    for slot, item in enumerate(state.slots):
        for number, entry in enumerate(item.kept.catalogue.entries):
            found.setdefault(entry.name, []).append((slot, number, item, entry))
    return found


def pieces_of(wanted: Box, holders: list[tuple[int, int, Found, Entry]], node: str) -> list[Piece]:
    """Where the elements of `wanted` come from, this node first, none twice over the network.

    Args:
        wanted: Box of a tensor.
        holders: Slot, number of the entry in it, where it is, and the entry.
        node: This one.
    """
    pieces: list[Piece] = []
    taken: list[Box] = []
    for slot, number, _, entry in sorted(holders, key=lambda holder: holder[2].node != node):
        box = entry.box.overlap(wanted)
        # Equal boxes on several nodes are copies of each other.
        if box is not None and box not in taken:
            taken.append(box)
            pieces.append(Piece(slot, number, box))
    return pieces


def _opened(state: Whole, slots: set[int], peers: Group) -> dict[int, SlotReader]:
    """Readers of the slots of this node that this process reads, for itself or for others."""
    return {
        number: SlotReader(slot.kept.path)
        for number, slot in enumerate(state.slots)
        if slot.node == peers.node and (number in slots or slot.reader == peers.rank)
    }


def _content(state: Whole, piece: Piece, reader: SlotReader) -> NDArray[Any]:
    """The elements of a piece, as opaque ones."""
    entry = state.slots[piece.slot].kept.catalogue.entries[piece.entry]
    itemsize = entry.size // max(entry.box.elements, 1)
    kind = "u" if itemsize in (1, 2, 4, 8) else "V"
    array = np.frombuffer(reader.bytes_of(entry), f"{kind}{itemsize}").reshape(entry.box.shape)
    return array[piece.box.within(entry.box)]


def _exchange(
    state: Whole,
    far: list[tuple[int, Piece]],
    fillings: list[Filling],
    peers: Group,
    readers: dict[int, SlotReader],
) -> int:
    """Get the pieces `far` from their readers; everybody sends and receives in one order."""
    moved = 0
    for target, pieces in enumerate(peers.gather([piece for _, piece in far])):
        mine = [number for number, _ in far] if target == peers.rank else [-1] * len(pieces)
        for number, piece in zip(mine, pieces, strict=True):
            source = state.slots[piece.slot].reader
            if target == peers.rank:
                filling = fillings[number]
                content = np.empty(piece.box.shape, filling.out.dtype)
                peers.receive(_tensor(content), source)
                filling.out[piece.box.within(filling.box)] = content
                moved += content.nbytes
            elif source == peers.rank:
                part = _content(state, piece, readers[piece.slot])
                peers.send(_tensor(np.ascontiguousarray(part)), target)
    return moved


def _tensor(content: NDArray[Any]) -> torch.Tensor:
    """The bytes of an array; shared with it where it can be written."""
    flat = content.reshape(-1).view(np.uint8)
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy())
