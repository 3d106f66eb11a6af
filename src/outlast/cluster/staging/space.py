"""Room for a copy: what is counted, what may go, and in which order.

Copies that no live process uses go when room is needed, the one that was used longest ago first.
Nothing is deleted where even that would not make enough room.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from outlast.cluster.staging.source import Source


@dataclass(frozen=True)
class Kept:
    """A copy, whole or in part, that takes room in a stage.

    Attributes:
        key: Name of its folder.
        bytes: What it takes.
        planned_bytes: What it will take when it is whole.
        last_used: When it was used last, seconds since the epoch.
        busy: Whether a live process uses it or works on it.
    """

    key: str
    bytes: int
    planned_bytes: int
    last_used: float
    busy: bool


@dataclass(frozen=True)
class Room:
    """What a stage may take.

    Attributes:
        free_bytes: Free on its file system.
        keep_free_bytes: What is to stay free there.
        limit_bytes: Most that all copies may take together; 0: no limit.
    """

    free_bytes: int
    keep_free_bytes: int
    limit_bytes: int

    def lacking_bytes(self, total_bytes: int, present_bytes: int, others: Iterable[Kept]) -> int:
        """How much must be freed before a copy can be made; 0 or less: nothing.

        Args:
            total_bytes: What the copy takes when it is whole.
            present_bytes: What of it is there already.
            others: All other copies.
        """
        held = list(others)
        # What others are about to write is as good as taken.
        coming = sum(max(kept.planned_bytes - kept.bytes, 0) for kept in held if kept.busy)
        lacking = total_bytes - present_bytes + coming + self.keep_free_bytes - self.free_bytes
        if self.limit_bytes:
            used = sum(kept.bytes for kept in held) + coming
            lacking = max(lacking, used + total_bytes - self.limit_bytes)
        return lacking


def victims(kept: Sequence[Kept], lacking_bytes: int) -> list[Kept] | None:
    """The copies to delete so that `lacking_bytes` are freed, least recently used first.

    Returns:
        As few as that order allows; None where all that are not busy would not be enough.
    """
    chosen: list[Kept] = []
    freed = 0
    for kept_item in sorted(kept, key=lambda kept: (kept.last_used, kept.key)):
        if freed >= lacking_bytes:
            break
        if not kept_item.busy and kept_item.bytes > 0:
            chosen.append(kept_item)
            freed += kept_item.bytes
    return chosen if freed >= lacking_bytes else None


def free_bytes_at(directory: Path) -> int:
    """Bytes that this user may still write to the file system of a directory."""
    facts = os.statvfs(directory)
    return facts.f_bavail * facts.f_frsize


def no_room(
    source: Source, present_bytes: int, directory: Path, room: Room, others: Sequence[Kept]
) -> ClusterError:
    """The sentence for a copy that there is no room for."""
    facts = [f"{_size(room.free_bytes)} are free"]
    if room.keep_free_bytes:
        facts.append(f"{_size(room.keep_free_bytes)} are to stay free")
    if room.limit_bytes:
        facts.append(f"all copies may take {_size(room.limit_bytes)} (staging.limit_gigabytes)")
    if busy := sum(other.planned_bytes for other in others if other.busy):
        facts.append(f"{_size(busy)} are copies that live processes use")
    return ClusterError(
        f"{source.location} needs {_size(source.bytes - present_bytes)} in {directory}, but "
        f"{', '.join(facts)}: free some space, raise the limit or name another staging.directory"
    )


def _size(count: int) -> str:
    if count < 1e7:
        return f"{count / 1e6:.3g} MB"
    return f"{count / 1e9:.3g} GB"
