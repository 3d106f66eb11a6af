"""Checkpoints of other programs into a store, and versions of a store out of it.

import_checkpoint("pretrained/", "ckpt/", prefix="model.")
export_checkpoint("ckpt/", "model/", kind="safetensors", prefix="model.")

Nothing is executed that a checkpoint contains: what is pickled is read by restricted readers. A
result appears complete or not at all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from outlast.checkpoint.arena import Arena
from outlast.checkpoint.convert.export import export_checkpoint
from outlast.checkpoint.convert.formats import open_source
from outlast.checkpoint.convert.source import STRUCTURE, Converted, split_rows
from outlast.checkpoint.dcp.content import DCP_FILE, DCP_NOTE, DcpContent
from outlast.checkpoint.format.encoder import Encoder
from outlast.checkpoint.format.job import PartJob, Reduction, StagedPiece
from outlast.checkpoint.format.manifest import Catalogue, TensorFacts
from outlast.checkpoint.format.owner import Claim, claimed, own
from outlast.checkpoint.format.storage import LocalStorage, sentence_of, storage_of
from outlast.checkpoint.format.version import Version, list_versions, seal
from outlast.errors import CheckpointError
from outlast.state.alignment import aligned
from outlast.state.box import Box

if TYPE_CHECKING:
    from outlast.checkpoint.convert.source import Source
    from outlast.checkpoint.format.storage import Storage

__all__ = ["Converted", "export_checkpoint", "import_checkpoint"]

_BATCH_BYTES = 256 << 20


def import_checkpoint(
    source: str | os.PathLike[str],
    store_place: str | os.PathLike[str],
    *,
    step: int | None = None,
    kind: str = "auto",
    prefix: str = "",
    reduction: Reduction | None = None,
) -> Converted:
    """Copy a checkpoint of another program into a store, as its newest version.

    Kinds: ``dcp`` (a folder of torch.distributed.checkpoint; its ``.metadata`` is a pickle of which
    only DCP's own classes are made), ``torch`` (a file of torch.save, read with
    ``weights_only=True``), ``safetensors`` (a file, or a folder with or without index),
    ``deepspeed`` (a folder of ZeRO 0 to 2 without tensor parallelism: the module's weights, and the
    float32 weights of the optimizer under ``master.``), ``megatron`` (a folder of Megatron-core's
    ``torch_dist``, or one that holds such folders: its newest).

    `CheckpointStore.restore` takes the result for ``{"model": model}`` when all names begin with
    ``model.``; give ``prefix="model."`` where they do not. Memory: a batch of 256 MiB and one
    tensor; one chunk of a DCP folder.

    Args:
        source: File or folder.
        store_place: Directory or fsspec URL of the store.
        step: Steps done; default: what the source says, else 0.
        kind: One of the kinds above, or ``auto``.
        prefix: Put before every name.
        reduction: Codecs and error bounds; by default everything is exact.

    Raises:
        CheckpointError: When the source cannot be read safely, or the storage fails.
    """
    storage = storage_of(store_place)
    with open_source(Path(source), kind) as opened:
        if not opened.tensors:
            raise CheckpointError(f"{source} holds no tensors")
        opened.tensors = {
            name if name in opened.unprefixed else prefix + name: entry
            for name, entry in opened.tensors.items()
        }
        step = step if step is not None else opened.step or 0
        if step < 0:
            raise CheckpointError(f"step = {step} must be 0 or larger")
        claim: Claim | None = None
        lock = own(storage) if isinstance(storage, LocalStorage) else None
        try:
            sessions = [*claimed(storage), *(version.session for version in list_versions(storage))]
            version = Version(max(sessions, default=0) + 1, step)
            claim = None if lock else Claim(storage, version.session, held=False)
            try:
                size = _write(storage, version, opened, prefix, reduction or Reduction())
            except BaseException:
                storage.remove_folder(version.folder)
                raise
        except OSError as error:
            raise CheckpointError(
                f"the import into {storage.location} failed: {sentence_of(error)}"
            ) from error
        finally:
            for held in (lock, claim):
                if held is not None:
                    held.release()
        return Converted(step, len(opened.tensors), size, opened.notes)


def _write(
    storage: Storage, version: Version, source: Source, prefix: str, reduction: Reduction
) -> int:
    """Write the version in parts of bounded size; returns the bytes of all tensors."""
    facts = {
        name: TensorFacts.of(str(entry.dtype).removeprefix("torch."), entry.shape)
        for name, entry in source.tensors.items()
    }
    batches: list[list[tuple[str, Box, int]]] = [[]]
    starts = [0]
    total = 0
    for name, entry in source.tensors.items():
        boxes = (part for box in entry.boxes for part in split_rows(box, facts[name], _BATCH_BYTES))
        for box in boxes:
            size = box.elements * facts[name].itemsize
            if size == 0:
                continue
            if batches[-1] and starts[-1] + size > _BATCH_BYTES:
                batches.append([])
                starts.append(0)
            batches[-1].append((name, box, starts[-1]))
            starts[-1] += aligned(size)
            total += size
    values_found = {}
    if source.structure is not None:
        values_found[STRUCTURE] = {"prefix": prefix, "root": source.structure}
    catalogue = Catalogue(facts, tuple(values_found))
    arena = Arena(aligned(max(*starts, 1)))
    arena.detach()
    encoder = Encoder(storage, reduction, [arena.memory])
    memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
    for rank, batch in enumerate(batches):
        for name, box, start in batch:
            entry = source.tensors[name]
            target = memory[start : start + box.elements * facts[name].itemsize]
            target.view(entry.dtype).view(box.shape).copy_(entry.read(box))
        encoder.write(
            PartJob(
                arena=0,
                version=version,
                rank=rank,
                world_size=len(batches),
                catalogue=catalogue,
                pieces=[StagedPiece(name, box, start) for name, box, start in batch],
                values=values_found if rank == 0 else {},
                notes=dict(DCP_NOTE) if source.dcp is not None else {},
            ),
            lambda: None,
        )
    if source.dcp is not None:
        with storage.create(f"{version.folder}/{DCP_FILE}") as file:
            file.write(_prefixed(source.dcp, prefix).to_bytes())
    seal(storage, version)
    return total


def _prefixed(content: DcpContent, prefix: str) -> DcpContent:
    if not prefix:
        return content
    names = [prefix + name for name in content.names]
    paths = {name: {"!tuple": [name]} for name in names}
    return DcpContent(
        names,
        [prefix + name for name in content.objects],
        [prefix + name for name in content.requires_grad],
        paths,
    )
