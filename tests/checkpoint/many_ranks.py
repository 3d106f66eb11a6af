"""Versions as thousands of ranks save them: their real manifests and packs, written by one process.

Every rank has six small tensors: of its own, as in stages and experts, or its rows of tensors that
all ranks share. Rank 0 has a value besides.
"""

from pathlib import Path
from typing import Literal

import numpy as np
import torch
import xxhash
from torch import nn

from outlast.checkpoint import Version, storage_of
from outlast.checkpoint.manifest import Catalogue, Chunk, Part, Piece, root_of
from outlast.checkpoint.plan import Holding, make_plan
from outlast.checkpoint.version import leaders, seal_group, seal_groups
from outlast.state.box import Box

TENSORS = 6
ROWS, COLUMNS = 4, 8
ITEM_BYTES = 4
Layout = Literal["own", "shared"]


def names_of(layout: Layout, rank: int) -> list[str]:
    owner = f"{rank}." if layout == "own" else ""
    return [f"model.blocks.{owner}w{number}.weight" for number in range(TENSORS)]


def box_of(layout: Layout, rank: int) -> Box:
    return Box((0 if layout == "own" else rank * ROWS, 0), (ROWS, COLUMNS))


def content_of(layout: Layout, step: int, rank: int, number: int) -> np.ndarray:
    """(ROWS, COLUMNS) float32 that no other rank, tensor or step has."""
    first = ((step * TENSORS + number) << 16) + rank
    return (np.arange(ROWS * COLUMNS, dtype=np.float32) / 64 + first).reshape(ROWS, COLUMNS)


def holdings_of(layout: Layout, world_size: int) -> list[Holding]:
    """What the ranks hold."""
    rows = ROWS if layout == "own" else ROWS * world_size
    return [
        Holding(
            {
                name: ("float32", (rows, COLUMNS), box_of(layout, rank))
                for name in names_of(layout, rank)
            },
            ("data",) if rank == 0 else (),
        )
        for rank in range(world_size)
    ]


def write_parts(
    directory: Path, step: int, world_size: int, layout: Layout, catalogue: Catalogue
) -> Version:
    """Write the files of all ranks, as they are before anything is sealed."""
    version = Version(1, step)
    folder = directory / version.folder
    folder.mkdir(parents=True)
    listed = catalogue.to_bytes()
    root = root_of(listed)
    (directory / version.catalogue_name(root)).write_bytes(listed)
    for rank in range(world_size):
        pack = version.pack_name(rank, world_size)
        blocks = [content_of(layout, step, rank, number).tobytes() for number in range(TENSORS)]
        chunks, box = [], box_of(layout, rank)
        for number, block in enumerate(blocks):
            digest = xxhash.xxh3_128_hexdigest(block)
            chunks.append(Chunk(0, number * len(block), len(block), 0, len(block), digest, digest))
        part = Part(
            step,
            version.session,
            rank,
            world_size,
            catalogue=root,
            packs=[pack],
            codecs=["raw"],
            chunks=chunks,
            pieces={
                name: [Piece(box, [number])] for number, name in enumerate(names_of(layout, rank))
            },
            values={"data": {"position": step}} if rank == 0 else {},
            notes={"metrics": {"loss": 1.0 / step}},
        )
        (directory / pack).write_bytes(b"".join(blocks))
        (directory / version.part_name(rank, world_size)).write_bytes(part.to_bytes())
    return version


def save(directory: Path, step: int, world_size: int, layout: Layout) -> Version:
    """A version of very many ranks, sealed as they do it."""
    catalogue = make_plan(holdings_of(layout, world_size), 0).catalogue
    version = write_parts(directory, step, world_size, layout, catalogue)
    storage = storage_of(directory)
    for rank in leaders(world_size):
        seal_group(storage, version, rank, world_size)
    seal_groups(storage, version, world_size)
    return version


class Blocks(nn.Module):
    """The tensors of one rank, by the names that they have in the plain model."""

    def __init__(self, layout: Layout, rank: int, world_size: int) -> None:
        super().__init__()
        rows = ROWS if layout == "own" else ROWS * world_size
        inner = nn.ModuleDict(
            {f"w{number}": nn.Linear(COLUMNS, rows, bias=False) for number in range(TENSORS)}
        )
        self.blocks = nn.ModuleDict({str(rank): inner}) if layout == "own" else inner
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)
