"""What is kept in the memory of all nodes, and the newest of it that is whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outlast.recover.memory.share import digest_of
from outlast.recover.memory.slot import Entry, Kept, read_slot
from outlast.state.box import covers

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_GENERATION = "generation-"


@dataclass(frozen=True)
class Found:
    """A slot that a process can read.

    Attributes:
        reader: Rank of the process that reads it for others.
        node: Whose memory it lies in.
        generation: Of the processes that have written it.
        kept: What it holds.
    """

    reader: int
    node: str
    generation: int
    kept: Kept


@dataclass(frozen=True)
class Whole:
    """A state of the run that the nodes' memories hold together.

    Attributes:
        step: Steps done.
        generation: Of the processes that have kept it.
        slots: In the order of their readers.
    """

    step: int
    generation: int
    slots: tuple[Found, ...]

    def tensors(self) -> dict[str, Entry]:
        """Name to one of the entries of every tensor."""
        return {entry.name: entry for slot in self.slots for entry in slot.kept.catalogue.entries}

    def values(self) -> dict[str, Any]:
        """Name to value; of several processes the first."""
        found: dict[str, Any] = {}
        for slot in self.slots:
            for name, value in slot.kept.values.items():
                found.setdefault(name, value)
        return found


def generation_folder(folder: Path, number: int) -> Path:
    """Where the processes of a generation keep their states."""
    return folder / f"{_GENERATION}{number}"


def generations(folder: Path) -> list[int]:
    """The numbers of the generations that are in `folder`, ascending."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return []
    found = [name.removeprefix(_GENERATION) for name in names if name.startswith(_GENERATION)]
    return sorted(int(name) for name in found if name.isdecimal())


def scan(folder: Path, identity: str, node: str, reader: int) -> list[Found]:
    """All complete states of a run in this node's memory."""
    found = []
    for number in generations(folder):
        for path in sorted(generation_folder(folder, number).glob("rank-*")):
            kept = read_slot(path, identity)
            if kept is not None:
                found.append(Found(reader, node, number, kept))
    return found


def newest_whole(found: Iterable[Found]) -> Whole | None:
    """The newest state of which no element is missing: of the newest generation, its last step."""
    groups: dict[tuple[int, int, str, str], list[Found]] = {}
    for found_item in found:
        catalogue = found_item.kept.catalogue
        key = (found_item.generation, found_item.kept.step, catalogue.everything, catalogue.lineage)
        groups.setdefault(key, []).append(found_item)
    for key in sorted(groups, reverse=True):
        generation, step, everything, _ = key
        slots = groups[key]
        if _is_whole(slots, everything):
            return Whole(step, generation, tuple(slots))
    return None


def _is_whole(slots: list[Found], everything: str) -> bool:
    boxes: dict[str, list[Entry]] = {}
    values: set[str] = set()
    for slot in slots:
        values.update(slot.kept.values)
        for entry in slot.kept.catalogue.entries:
            boxes.setdefault(entry.name, []).append(entry)
    if digest_of(boxes, values) != everything:
        return False
    return all(
        covers(entries[0].shape, [entry.box for entry in entries]) for entries in boxes.values()
    )
