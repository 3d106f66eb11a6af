"""One save as the writer sees it: what to write, how to make it smaller, and what became of it."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outlast.checkpoint.format.codec import Compression
from outlast.checkpoint.format.lossy import LOSSY_DTYPES, Bound
from outlast.checkpoint.format.manifest import MAX_CHAIN, STATE, Catalogue
from outlast.checkpoint.format.version import Version
from outlast.errors import CheckpointError
from outlast.state.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Reduction:
    """How a store makes its versions smaller.

    Attributes:
        compression: Codec and level of every tile.
        chain: Versions in a row that may be stored as differences to the one before; 0: every
            version is stored in full. Deltas keep a second copy of the state in host memory.
        lossy: Pattern of tensor names (as in `fnmatch`) to the bound of their error; the first
            pattern that fits counts. Empty: everything is exact.

    Raises:
        CheckpointError: When `chain` is longer than what is read back.
    """

    compression: Compression = field(default_factory=Compression)
    chain: int = 0
    lossy: dict[str, Bound] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.chain <= MAX_CHAIN:
            raise CheckpointError(f"chain = {self.chain} must be from 0 to {MAX_CHAIN}")

    def bounds_of(self, catalogue: Catalogue, names: Iterable[str]) -> dict[str, Bound]:
        """Error bound of each lossy tensor among `names`; scalars, such as counters, stay exact.

        Raises:
            CheckpointError: When a pattern takes in a tensor that cannot be rounded.
        """
        found = {}
        for name in names:
            facts = catalogue.tensors[name]
            fits = (item for item in self.lossy if fnmatch.fnmatchcase(name, item))
            pattern = next(fits, None)
            if pattern is None or not facts.shape:
                continue
            if facts.dtype not in LOSSY_DTYPES:
                raise CheckpointError(
                    f'lossy = "{pattern}" takes in `{name}` of type {facts.dtype}, which cannot be '
                    "rounded; give a narrower pattern"
                )
            found[name] = self.lossy[pattern]
        return found


@dataclass(frozen=True)
class StagedPiece:
    """A box of a tensor in the arena: contiguous, row-major, from byte `start`."""

    name: str
    box: Box
    start: int


@dataclass(frozen=True)
class PartJob:
    """All that the writer needs to know of one save.

    Attributes:
        arena: Number of the memory that holds the staged bytes.
        version: Session and step.
        rank: Who saves.
        world_size: How many save.
        catalogue: Facts of all tensors of all ranks.
        pieces: What to save.
        values: JSON values to save.
        bounds: Tensor name to its error bound, for the lossy ones.
        kind: ``state`` or ``replay``.
        requires: Steps that a replay log needs.
        notes: Free JSON for the manifest.
        alone: Whether the version counts without a seal, because ranks do not coordinate.
    """

    arena: int
    version: Version
    rank: int
    world_size: int
    catalogue: Catalogue
    pieces: list[StagedPiece]
    values: dict[str, Any] = field(default_factory=dict)
    bounds: dict[str, Bound] = field(default_factory=dict)
    kind: str = STATE
    requires: list[int] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    alone: bool = False

    @property
    def name(self) -> str:
        """File of the part."""
        return self.version.part_name(self.rank, self.world_size)


@dataclass(frozen=True)
class Written:
    """What became of a part.

    Attributes:
        raw_bytes: Bytes of the staged content.
        stored_bytes: Bytes that this save wrote.
        cpu_seconds: CPU time spent on coding and writing.
        chunks: Tiles stored in full, as deltas, and found stored already.
    """

    raw_bytes: int
    stored_bytes: int
    cpu_seconds: float
    chunks: dict[str, int]


class AbandonedError(Exception):
    """The save was given up: a newer one replaces it, or its trainer is gone."""
