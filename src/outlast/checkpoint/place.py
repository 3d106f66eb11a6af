"""A tier as one rank sees it. Needs no torch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outlast.checkpoint.manifest import Part, root_of
from outlast.checkpoint.owner import Ownership
from outlast.checkpoint.retention import Known, Retention, prune
from outlast.checkpoint.storage import describe_failure, sentence_of, storage_of
from outlast.checkpoint.version import (
    SEAL,
    Contents,
    UnfinishedError,
    UnreadableError,
    Version,
    check_contents,
    is_published,
    list_versions,
    load,
    read_catalogue,
    seal,
    unreadable,
    world_sizes,
    write_seal,
)
from outlast.errors import CheckpointError
from outlast.state.box import Box, covers

if TYPE_CHECKING:
    import os
    from collections.abc import Collection

    from outlast.checkpoint.storage import Storage
    from outlast.distributed.group import Group


@dataclass(frozen=True)
class Place:
    """One tier as one rank sees it.

    Attributes:
        storage: Where; of a private tier, the folder of this rank.
        retention: What stays there.
        private: Whether other ranks do not see it.
        rank: This rank.
        world_size: How many save together.
        known: What was found out about sealed versions, for the next `prune`.
        verified: Packs whose content here this rank has compared with what it is to be.
        ownership: Of this rank over the place.
    """

    storage: Storage
    retention: Retention
    private: bool
    rank: int
    world_size: int
    known: dict[Version, Known] = field(init=False, default_factory=dict, repr=False, compare=False)
    verified: set[str] = field(init=False, default_factory=set, repr=False, compare=False)
    ownership: Ownership = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Begin without the right to write."""
        object.__setattr__(self, "ownership", Ownership(self.storage))

    @classmethod
    def of(
        cls, place: str | os.PathLike[str], keep: int | Retention, ranks: Group, *, private: bool
    ) -> Place:
        """The place of this rank."""
        storage = storage_of(place)
        if private:
            storage = storage_of(f"{storage.location}/rank-{ranks.rank:05d}")
        retention = keep if isinstance(keep, Retention) else Retention(keep)
        return cls(storage, retention, private, ranks.rank, ranks.size)

    @property
    def keeps_house(self) -> bool:
        """True if this rank seals and prunes here."""
        return self.private or self.rank == 0

    def load(self, version: Version) -> Contents:
        """The manifests of a version; in a private place those of this rank alone.

        Raises:
            UnfinishedError: When it was never published.
            UnreadableError: When the storage fails.
            CheckpointError: When something is missing or damaged, or, in a private place, it was
                saved by another number of ranks.
        """
        try:
            return self._own(version) if self.private else load(self.storage, version)
        except CheckpointError:
            raise
        except Exception as error:  # clients of object stores raise what they like
            kind = UnreadableError if isinstance(error, OSError) else CheckpointError
            where = f"{self.storage.location}/{version.folder}"
            raise kind(f"{where} cannot be read: {describe_failure(error)}") from error

    def newest(self) -> Version | None:
        """The newest complete version, verified or not.

        Raises:
            CheckpointError: When the place cannot be listed.
        """
        try:
            versions = list_versions(self.storage)
        except OSError as error:
            raise CheckpointError(
                f"{self.storage.location} cannot be listed: {sentence_of(error)}"
            ) from None
        return next(filter(self._holds, reversed(versions)), None)

    def seal(self, version: Version) -> None:
        """Seal a version: in a shared place the whole, in a private one what this rank has.

        Raises:
            CheckpointError: When it is not complete, or another process owns the place now.
            OSError: When the storage fails.
        """
        self.ownership.check()
        if not self.private:
            seal(self.storage, version)
            return
        write_seal(self.storage, self.load(version))

    def prune(self, protected: Collection[Version]) -> None:
        """Delete what need not stay, if that is this rank's part; failures wait for next time."""
        if self.keeps_house:
            with contextlib.suppress(OSError, CheckpointError):
                prune(
                    self.storage,
                    self.retention,
                    protected=protected,
                    read=lambda _, version: self._sealed(version),
                    world_size=self.world_size if self.private else None,
                    cache=self.known,
                )

    def _own(self, version: Version) -> Contents:
        name = version.part_name(self.rank, self.world_size)
        files = self.storage.files(version.folder)
        if name.partition("/")[2] not in files:
            if others := world_sizes(files) - {self.world_size}:
                # No remains of a save, but what another number of ranks relies on.
                saved = max(others)
                raise CheckpointError(
                    f"{self.storage.location}/{version.folder} was saved by {saved} "
                    f"rank{'s' if saved > 1 else ''}, each with its part, and now there "
                    f"{'are' if self.world_size > 1 else 'is'} {self.world_size}; start {saved}, "
                    "or give a shared tier that has the version"
                )
            missing = CheckpointError if SEAL in files else UnfinishedError
            raise missing(f"{self.storage.location}/{name} is missing")
        content = self._read(name)
        part = Part.from_bytes(content, f"{self.storage.location}/{name}")
        catalogue = read_catalogue(self.storage, version, part.catalogue)
        contents = Contents(version, catalogue, [part], [root_of(content)], [])
        check_contents(self.storage, contents)
        return contents

    def _sealed(self, version: Version) -> Contents:
        """As `load`, but what other ranks may not have is not complete in a private place."""
        if self.private and SEAL not in self.storage.files(version.folder):
            raise UnfinishedError(f"{self.storage.location}/{version.folder} has no seal")
        return self.load(version)

    def _holds(self, version: Version) -> bool:
        try:
            if not self.private:
                return is_published(self.storage, version)
            self.load(version)
        except CheckpointError:
            return False
        return True

    def _read(self, name: str) -> bytes:
        try:
            return self.storage.read(name)
        except OSError as error:
            raise unreadable(self.storage, name, error) from None


def not_held(contents: Contents, boxes: dict[str, Box]) -> str:
    """The first tensor of which `contents` lacks a part of the given box; empty when none."""
    for name, box in boxes.items():
        pieces = [piece.box for part in contents.parts for piece in part.pieces.get(name, ())]
        if name not in contents.catalogue.tensors or box in pieces or not box.elements:
            continue
        common = (box.overlap(piece) for piece in pieces if len(piece.shape) == len(box.shape))
        inside = [
            Box(tuple(a - b for a, b in zip(item.offset, box.offset, strict=True)), item.shape)
            for item in common
            if item is not None
        ]
        if not covers(box.shape, inside):
            return name
    return ""
