"""The copy of one version from one place to another, by one rank: checked and at an even pace.

Needs no torch.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING

import xxhash

from outlast.checkpoint.format.manifest import Part
from outlast.checkpoint.format.storage import publish
from outlast.checkpoint.format.version import SEAL, world_sizes
from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from outlast.checkpoint.format.manifest import Chunk
    from outlast.checkpoint.format.storage import Storage
    from outlast.checkpoint.format.version import Version
    from outlast.checkpoint.tiers.pace import Pace
    from outlast.checkpoint.tiers.place import Place


class Copy:
    """Copies what one rank is to copy of one version."""

    def __init__(self, source: Place, target: Place, version: Version, pace: Pace) -> None:
        self.bytes = 0
        self._source = source
        self._target = target
        self._from, self._to = source.storage, target.storage
        self._version = version
        self._pace = pace
        self._made: list[str] = []

    def run(self) -> None:
        """Copy packs, catalogues and manifests, in this order.

        Raises:
            CheckpointError: When the source is damaged, or the target has other content.
            OSError: When a storage fails.
        """
        parts = list(self._parts())
        for _, _, part in parts:
            for number, pack in enumerate(part.packs):
                self._copy_pack(pack, [chunk for chunk in part.chunks if chunk.pack == number])
        for root in {part.catalogue for _, _, part in parts}:
            self._publish(self._version.catalogue_name(root))
        for name, content, _ in parts:
            self._publish(name, content)

    def undo(self) -> None:
        """Delete what was copied, so that failures do not fill the tier."""
        seal_name = f"{self._version.folder}/{SEAL}"
        for name in [seal_name, *reversed(self._made)] if self._made else []:
            # Another rank may have found this catalogue there and rely on it.
            if "/catalogue-" not in name:
                with contextlib.suppress(Exception):
                    self._to.remove(name)
        self._target.verified.difference_update(self._made)

    def _parts(self) -> Iterable[tuple[str, bytes, Part]]:
        """The parts that are this rank's to copy: its own, or its share of another world's."""
        rank, world_size = self._source.rank, self._source.world_size
        if self._source.private:
            ranks = range(rank, rank + 1)
            saved = world_size
        else:
            files = self._from.files(self._version.folder)
            saved = max(world_sizes(files), default=0)
            ranks = range(rank, saved, world_size)
        for number in ranks:
            name = self._version.part_name(number, saved)
            try:
                content = self._from.read(name)
            except FileNotFoundError:
                if saved == world_size:
                    raise CheckpointError(f"{self._from.location}/{name} is missing") from None
                # Others may hold the same; the seal shows whether something is missing.
                continue
            yield name, content, Part.from_bytes(content, f"{self._from.location}/{name}")

    def _copy_pack(self, name: str, chunks: list[Chunk]) -> None:
        size = _size(self._from, name)
        if size is None:
            raise CheckpointError(f"{self._from.location}/{name} is missing")
        present = _size(self._to, name)
        if present is not None:
            if present != size:
                raise CheckpointError(
                    f"{self._to.location}/{name} has {present} bytes instead of {size}: it is of "
                    "another run, or damaged; take an empty place"
                )
            if name not in self._target.verified:
                self._verify(name, size, chunks)
            return
        with self._to.create(name, exclusive=True) as file:
            for block in self._blocks(self._from, name, size, chunks):
                file.write(block)
                self.bytes += len(block)
                self._pace.take(len(block))
        self._made.append(name)
        self._target.verified.add(name)

    def _verify(self, name: str, size: int, chunks: list[Chunk]) -> None:
        """Read back a pack that another session has left in the target: it may be another run's."""
        hint = "; it is of another run, or damaged; take an empty place"
        for _ in self._blocks(self._to, name, size, chunks, hint):
            self._pace.take(0)
        self._target.verified.add(name)

    def _blocks(
        self, storage: Storage, name: str, size: int, chunks: list[Chunk], hint: str = ""
    ) -> Iterator[bytes]:
        """A file of `size` bytes, block by block; raises CheckpointError when it is damaged."""
        check = _Check(f"{storage.location}/{name}", chunks, hint)
        reader = storage.open(name)
        try:
            offset = 0
            while block := reader.read(offset, min(self._pace.block_bytes, size - offset)):
                check.update(block)
                yield block
                offset += len(block)
            check.finish()
        finally:
            reader.close()

    def _publish(self, name: str, content: bytes | None = None) -> None:
        """Copy a small file, unless the same is there."""
        content = self._from.read(name) if content is None else content
        with contextlib.suppress(FileNotFoundError):
            if self._to.read(name) == content:
                return
            raise CheckpointError(
                f"{self._to.location}/{name} is there with other content: it is of another run, or "
                "damaged; take an empty place"
            )
        publish(self._to, name, content)
        self._made.append(name)
        self.bytes += len(content)
        self._pace.take(len(content))


class _Check:
    """Compares the chunks of a file with their checksums while the file goes by."""

    def __init__(self, where: str, chunks: list[Chunk], hint: str) -> None:
        self._where = where
        self._hint = hint
        found = {(chunk.offset, chunk.length, chunk.stored_hash) for chunk in chunks}
        self._chunks = deque(sorted(row for row in found if row[1]))
        self._hash = xxhash.xxh3_128()
        self._at = 0

    def update(self, block: bytes) -> None:
        """The next bytes; raises CheckpointError when a chunk that ends in them is damaged."""
        view, end = memoryview(block), self._at + len(block)
        while self._chunks and self._chunks[0][0] < end:
            offset, length, expected = self._chunks[0]
            first, last = max(offset, self._at), min(offset + length, end)
            self._hash.update(view[first - self._at : last - self._at])
            if last < offset + length:
                break
            if self._hash.hexdigest() != expected:
                raise CheckpointError(f"{self._where} is damaged at byte {offset}{self._hint}")
            self._chunks.popleft()
            self._hash = xxhash.xxh3_128()
        self._at = end

    def finish(self) -> None:
        """The file ends; raises CheckpointError when chunks are left."""
        if self._chunks:
            raise CheckpointError(f"{self._where} is cut short at byte {self._at}{self._hint}")


def _size(storage: Storage, name: str) -> int | None:
    folder, _, file = name.partition("/")
    return storage.files(folder).get(file)
