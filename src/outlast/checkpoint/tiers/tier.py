"""What a lower tier of a store is, and what is said of the copies to it.

    memory (tmpfs)  ->  node-local disk  ->  shared file system or object store

A version is saved to the first tier; `tiers` copies every n-th one on to each lower tier.

Of a *private* tier, such as a node's own disk, other ranks see nothing. Each rank has a store of
its own there, in a folder ``rank-00003``, with all that it holds. Copied on to a shared tier, the
parts of all ranks make a version as any other, in which replicated tensors lie once per rank.

A lower tier that cannot be reached hinders no save. While it is away, its sessions are not known,
and a restore that finds no version in the other tiers fails rather than to start anew.

Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.checkpoint.format.retention import Retention
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    import os

    from outlast.checkpoint.tiers.pace import Pacing


@dataclass(frozen=True)
class Tier:
    """A lower tier of a store.

    Attributes:
        place: A directory, made if missing, or any fsspec URL.
        every: Every how many-th save of the store is copied here, whatever the tiers between do,
            counted from the first save of this `CheckpointStore`.
        keep: Newest versions kept here, or a `Retention`.
        bytes_per_second: Most that each rank writes here; None: no limit.
        private: Whether ranks do not see each other's files here, as on a node's own disk.
        pacing: What else decides how fast each copy is, e.g. a share of what others leave.
    """

    place: str | os.PathLike[str]
    every: int = 1
    keep: int | Retention = 3
    bytes_per_second: float | None = None
    private: bool = False
    pacing: Pacing | None = None

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        if self.every < 1:
            raise CheckpointError(f"every = {self.every} of tier {self.place} must be at least 1")
        if self.bytes_per_second is not None and not self.bytes_per_second > 0:
            raise CheckpointError(
                f"bytes_per_second = {self.bytes_per_second} of tier {self.place} must be larger "
                "than 0, or None for no limit"
            )


@dataclass(frozen=True)
class DrainResult:
    """How the copy of one version to a lower tier went.

    Attributes:
        place: The tier.
        step: The version's step; -1 for what concerns the tier and no version.
        seconds: Time of the copy, without the wait before it.
        bytes: Bytes that this rank wrote there.
        error: Why it failed, or None.
        skipped: Why it was not made, although nothing failed; else empty.
    """

    place: str
    step: int
    seconds: float = 0.0
    bytes: int = 0
    error: str | None = None
    skipped: str = ""
