"""Content of DCP's ``.metadata`` as files of the store: no pickle."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from outlast.checkpoint.manifest import (
    FORMAT,
    STATE,
    Fields,
    ManifestError,
    sealed,
    unsealed,
)
from outlast.checkpoint.storage import sentence_of
from outlast.checkpoint.version import UnfinishedError, list_versions, load, read_seal
from outlast.errors import CheckpointError
from outlast.state import values
from outlast.state.box import Box, whole
from outlast.state.tensors import dtype_of

if TYPE_CHECKING:
    from outlast.checkpoint.storage import Storage
    from outlast.checkpoint.version import Contents

DCP_FILE = "dcp.json"
DCP_NOTE = {"by": "dcp"}
"""Among the notes of a part: its version counts only with `DCP_FILE`."""


@dataclass(frozen=True)
class StoredItem:
    """An entry of `Metadata.storage_data`.

    Attributes:
        part: The manifest that lists the item, relative to the store.
    """

    part: str


@dataclass(frozen=True)
class DcpContent:
    """Part of DCP's metadata that ``dcp.json`` holds; the rest is in the parts.

    Attributes:
        names: Everything that was saved, in DCP's order.
        objects: Those names whose content is bytes that DCP's planner made.
        requires_grad: Names of the tensors that require a gradient.
        planner_data: JSON of what the planner left, e.g. the paths of a nested state.
    """

    names: list[str]
    objects: list[str]
    requires_grad: list[str] = field(default_factory=list)
    planner_data: Any = None

    def to_bytes(self) -> bytes:
        """The content of the file."""
        return sealed({"format": FORMAT, **dataclasses.asdict(self)})

    def decoded_planner_data(self) -> Any:
        """Decode the planner's own data."""
        return values.decode(self.planner_data, _no_tensors)


def _no_tensors(name: str, _: str) -> Any:
    raise CheckpointError(f"`{name}` in the planner's data is a tensor, which it cannot hold")


def metadata_file(metadata: Metadata) -> bytes:
    """The content of ``dcp.json``.

    Raises:
        CheckpointError: When the planner left something that JSON cannot hold.
    """
    entries = metadata.state_dict_metadata
    return DcpContent(
        names=list(entries),
        objects=[
            name for name, entry in entries.items() if isinstance(entry, BytesStorageMetadata)
        ],
        requires_grad=[
            name
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata) and entry.properties.requires_grad
        ],
        planner_data=values.encode(metadata.planner_data, "planner_data", lambda *_: None),
    ).to_bytes()


def read_dcp_content(storage: Storage, contents: Contents) -> DcpContent:
    """Read what DCP saved; of a version that a `CheckpointStore` wrote: its tensors.

    Raises:
        CheckpointError: When DCP wrote the version and did not complete it, or it is damaged.
    """
    if not any(DCP_NOTE.items() <= part.notes.items() for part in contents.parts):
        return DcpContent(sorted(contents.catalogue.tensors), [])
    name = f"{contents.version.folder}/{DCP_FILE}"
    place = f"{storage.location}/{name}"
    try:
        found = Fields(place, unsealed(storage.read(name), place))
    except FileNotFoundError:
        # The seal is written after it, so a sealed version has lost it.
        is_sealed = read_seal(storage, contents.version) is not None
        raise (CheckpointError if is_sealed else UnfinishedError)(
            f"{storage.location}/{contents.version.folder} was not completed: it has no {DCP_FILE}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{place} cannot be read: {sentence_of(error)}") from None
    found.only("names", "objects", "requires_grad", "planner_data")
    content = DcpContent(
        names=found.names("names"),
        objects=found.names("objects"),
        requires_grad=found.names("requires_grad"),
        planner_data=found.tree("planner_data", found.content["planner_data"]),
    )
    for listed, known in (
        (content.names, contents.catalogue.tensors),
        (content.objects, content.names),
        (content.requires_grad, content.names),
    ):
        absent = sorted(set(listed) - set(known))
        if absent:
            raise ManifestError(f"{place} names `{absent[0]}`, which no part holds")
    for name in content.objects:
        facts = contents.catalogue.tensors[name]
        if facts.dtype != "uint8" or len(facts.shape) != 1:
            raise ManifestError(f"{place} says that `{name}` is bytes, which it is not")
    return content


def metadata_of(storage: Storage, contents: Contents) -> Metadata:
    """DCP's metadata of a version, without pickle; raises CheckpointError."""
    content = read_dcp_content(storage, contents)
    objects, trained = set(content.objects), set(content.requires_grad)
    boxes: dict[str, dict[Box, int]] = {}
    for part in contents.parts:
        for name, pieces in part.pieces.items():
            of_name = boxes.setdefault(name, {})
            for piece in pieces:
                of_name.setdefault(piece.box, part.rank)
    entries: dict[str, Any] = {}
    stored: dict[MetadataIndex, StoredItem] = {}
    world_size = contents.parts[0].world_size
    for name in content.names:
        facts = contents.catalogue.tensors[name]
        of_name = boxes.get(name) or {whole(facts.shape): 0}
        for number, (box, rank) in enumerate(of_name.items()):
            offset = None if name in objects else box.offset
            item = StoredItem(contents.version.part_name(rank, world_size))
            stored[MetadataIndex(name, offset, number)] = item
        if name in objects:
            entries[name] = BytesStorageMetadata()
            continue
        entries[name] = TensorStorageMetadata(
            TensorProperties(dtype=dtype_of(facts), requires_grad=name in trained),
            torch.Size(facts.shape),
            [ChunkStorageMetadata(torch.Size(b.offset), torch.Size(b.shape)) for b in of_name],
        )
    return Metadata(
        entries,
        planner_data=content.decoded_planner_data(),
        storage_data=stored,
        storage_meta=StorageMeta(checkpoint_id=storage.location),
    )


def newest_contents(storage: Storage, step: int | None) -> tuple[Contents, Metadata, list[str]]:
    """The newest version that is whole, or that of `step`.

    Returns:
        Its manifests, DCP's metadata of it, and a sentence for every newer one that is not whole.

    Raises:
        UnfinishedError: When none was completed yet.
        CheckpointError: When there is none of `step`, or all are damaged.
    """
    versions = list_versions(storage)[::-1]
    chosen = [version for version in versions if step is None or version.step == step]
    if not chosen and versions:
        listed = ", ".join(map(str, sorted({version.step for version in versions})))
        raise CheckpointError(
            f"step = {step} is not in {storage.location}; the steps there are {listed}"
        )
    skipped: list[str] = []
    damaged = False
    for version in chosen:
        try:
            contents = load(storage, version)
            if contents.kind == STATE:
                return contents, metadata_of(storage, contents), skipped
        except CheckpointError as error:
            damaged = damaged or not isinstance(error, UnfinishedError)
            skipped.append(str(error))
    raise (CheckpointError if damaged else UnfinishedError)(
        f"no checkpoint in {storage.location} can be used: {'; '.join(skipped)}"
        if skipped
        else f"there is no checkpoint in {storage.location}"
    )
