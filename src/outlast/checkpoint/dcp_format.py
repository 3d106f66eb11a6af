"""Content of a version that was saved through DCP: its metadata, and objects without pickle.

``dcp.json`` keeps what DCP has in its ``.metadata``. An object that the store's own formats cover
(see `outlast.state.values`) is stored as JSON and the bytes of the tensors in it; DCP's planner
gets it back pickled by this process. Any other object is stored as the bytes that the planner made,
and a quantised tensor as those of ``torch.save``: both are pickles, of which
``torch.load`` takes none with ``weights_only=True`` that could run code.

The notes of a part say which of its tensors are such bytes, and which are one rank's share of a
tensor that was saved without collectives.
"""

from __future__ import annotations

import dataclasses
import io
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
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
    DTYPES,
    FORMAT,
    STATE,
    Fields,
    ManifestError,
    TensorFacts,
    sealed,
    unsealed,
)
from outlast.checkpoint.storage import sentence_of
from outlast.checkpoint.version import (
    UnfinishedError,
    Version,
    list_versions,
    listing,
    load,
    read_seal,
)
from outlast.errors import CheckpointError
from outlast.state import values
from outlast.state.box import Box, whole
from outlast.state.tensors import dtype_name, dtype_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from outlast.checkpoint.storage import Storage
    from outlast.checkpoint.version import Contents

DCP_FILE = "dcp.json"
DCP_NOTE = {"by": "dcp"}
"""Among the notes of a part: its version counts only with `DCP_FILE`."""

SAVE_ID = "save_id"
"""Among the notes of a part: what DCP's metadata has under this name."""

_PLAIN, _PICKLED, _SHARES = "plain", "pickled", "shares"
_QUANTISED = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
}


def is_quantised(dtype: torch.dtype) -> bool:
    """Return whether a tensor of this type is more than its elements, which needs a pickle."""
    return dtype in _QUANTISED.values()


@dataclass(frozen=True)
class Share:
    """One rank's part of a tensor, saved without collectives; stored as a tensor of its own.

    Attributes:
        name: Of the whole tensor.
        shape: Of the whole tensor.
        offset: Of the part in it.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass
class Notes:
    """Notes of a part's manifest on its tensors.

    Attributes:
        plain: Names of the objects that are stored without pickle.
        pickled: Name to type and shape of the quantised tensors, which are stored as pickles.
        shares: Name under which it is stored to the share that it is.
    """

    plain: list[str] = field(default_factory=list)
    pickled: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    shares: dict[str, Share] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Notes for the manifest; none of what is empty."""
        found = {
            _PLAIN: self.plain,
            _PICKLED: {name: [dtype, [*shape]] for name, (dtype, shape) in self.pickled.items()},
            _SHARES: {
                name: [share.name, [*share.shape], [*share.offset]]
                for name, share in self.shares.items()
            },
        }
        return {name: note for name, note in found.items() if note}

    def add(self, found: Fields) -> None:
        """Add the notes of a part; raises ManifestError."""
        empty: dict[str, Any] = {_PLAIN: [], _PICKLED: {}, _SHARES: {}}
        found = Fields(f"{found.file}: notes", {**empty, **found.content})
        self.plain += found.names(_PLAIN)
        for name, row in found.table(_PICKLED).items():
            dtype, shape = found.checked_rows(_PICKLED, row, 2)
            found.one_of(_PICKLED, dtype, _QUANTISED)
            self.pickled[name] = dtype, found.extents(_PICKLED, shape)
        for name, row in found.table(_SHARES).items():
            of, shape, offset = found.checked_rows(_SHARES, row, 3)
            share = Share(of, found.extents(_SHARES, shape), found.extents(_SHARES, offset))
            if type(of) is not str or len(share.shape) != len(share.offset):
                raise found.error(_SHARES, "names no share of a tensor")
            self.shares[name] = share


@dataclass(frozen=True)
class DcpContent:
    """DCP's metadata: what ``dcp.json`` holds, and the notes of the parts.

    Attributes:
        names: Everything that was saved, in DCP's order.
        objects: Those names that are objects, stored as bytes.
        requires_grad: Names of the tensors that require a gradient.
        planner_data: JSON of what the planner left, e.g. the paths of a nested state.
        notes: Of all parts.
    """

    names: list[str]
    objects: list[str]
    requires_grad: list[str] = field(default_factory=list)
    planner_data: Any = None
    notes: Notes = field(default_factory=Notes)

    def to_bytes(self) -> bytes:
        """The content of the file."""
        found = dataclasses.asdict(self)
        del found["notes"]
        return sealed({"format": FORMAT, **found})

    def decoded_planner_data(self) -> Any:
        """Decode the planner's own data."""

        def refuse(name: str, _: str) -> Any:
            raise CheckpointError(
                f"`{name}` in the planner's data is a tensor, which it cannot hold"
            )

        return values.decode(self.planner_data, refuse)


def metadata_file(metadata: Metadata) -> bytes:
    """The content of ``dcp.json``.

    Raises:
        CheckpointError: When the planner left something that JSON cannot hold.
    """
    entries = metadata.state_dict_metadata
    objects = [name for name, entry in entries.items() if isinstance(entry, BytesStorageMetadata)]
    requires_grad = [
        name
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and entry.properties.requires_grad
    ]
    planner_data = values.encode(metadata.planner_data, "planner_data", lambda *_: None)
    return DcpContent(list(entries), objects, requires_grad, planner_data).to_bytes()


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
    notes = Notes()
    for part in contents.parts:
        part_name = contents.version.part_name(part.rank, part.world_size)
        notes.add(Fields(f"{storage.location}/{part_name}", part.notes))
    content = DcpContent(
        found.names("names"),
        found.names("objects"),
        found.names("requires_grad"),
        found.tree("planner_data", found.content["planner_data"]),
        notes,
    )
    tensors = contents.catalogue.tensors
    known = {*tensors, *(share.name for share in notes.shares.values())}
    for listed, held in (
        (content.names, known),
        (content.objects, content.names),
        (content.requires_grad, content.names),
        (notes.plain, content.objects),
        (notes.pickled, tensors),
        (notes.shares, tensors),
    ):
        absent = sorted(set(listed) - set(held))
        if absent:
            raise ManifestError(f"{place} names `{absent[0]}`, which no part holds")
    for name in (*content.objects, *notes.pickled):
        if tensors[name].dtype != "uint8" or len(tensors[name].shape) != 1:
            raise ManifestError(f"{place} says that `{name}` is bytes, which it is not")
    shapes = shapes_of_shares(notes)
    for name, share in notes.shares.items():
        parts = zip(share.offset, tensors[name].shape, share.shape, strict=False)
        fits = len(share.shape) == len(tensors[name].shape) and all(a + b <= c for a, b, c in parts)
        if not fits or share.shape != shapes[share.name]:
            raise ManifestError(f"{place} says that `{name}` is a share, which it is not")
    return content


def metadata_of(storage: Storage, contents: Contents) -> Metadata:
    """DCP's metadata of a version, without pickle; raises CheckpointError."""
    return metadata_with(storage, contents, read_dcp_content(storage, contents))


def metadata_with(storage: Storage, contents: Contents, content: DcpContent) -> Metadata:
    """The same where `content` has been read."""
    notes, tensors = content.notes, contents.catalogue.tensors
    objects, trained = set(content.objects), set(content.requires_grad)
    shapes = shapes_of_shares(notes)
    boxes: dict[str, dict[Box, int]] = {}
    types = {share.name: tensors[name] for name, share in notes.shares.items()}
    for part in contents.parts:
        for stored_name, pieces in part.pieces.items():
            share = notes.shares.get(stored_name)
            name = stored_name if share is None else share.name
            of_name = boxes.setdefault(name, {})
            types[name] = tensors[stored_name]
            for piece in pieces:
                box = piece.box
                if share is not None:
                    offset = (a + b for a, b in zip(share.offset, box.offset, strict=True))
                    box = Box(tuple(offset), box.shape)
                of_name.setdefault(box, part.rank)
    for stored_name, share in notes.shares.items():
        # An empty one has no pieces.
        box = Box(share.offset, tensors[stored_name].shape)
        if not box.elements:
            boxes.setdefault(share.name, {})[box] = contents.parts[0].rank
    entries: dict[str, Any] = {}
    # Where an item is: the manifest that lists it, relative to the store.
    stored: dict[MetadataIndex, str] = {}
    world_size = contents.parts[0].world_size
    for name in content.names:
        facts = types.get(name) or tensors[name]
        dtype, shape = "", shapes.get(name, facts.shape)
        of_name = boxes.get(name) or {whole(shape): 0}
        if name in notes.pickled:
            dtype, shape = notes.pickled[name]
            of_name = {whole(shape): min(of_name.values())}
        for number, (box, rank) in enumerate(of_name.items()):
            offset_of = None if name in objects else box.offset
            part_name = contents.version.part_name(rank, world_size)
            stored[MetadataIndex(name, offset_of, number)] = part_name
        if name in objects:
            entries[name] = BytesStorageMetadata()
            continue
        entries[name] = TensorStorageMetadata(
            TensorProperties(
                dtype=_QUANTISED[dtype] if dtype else dtype_of(facts),
                requires_grad=name in trained,
            ),
            torch.Size(shape),
            [ChunkStorageMetadata(torch.Size(b.offset), torch.Size(b.shape)) for b in of_name],
        )
    return Metadata(
        entries,
        planner_data=content.decoded_planner_data(),
        storage_data=stored,
        storage_meta=StorageMeta(
            checkpoint_id=storage.location, save_id=contents.parts[0].notes.get(SAVE_ID)
        ),
    )


def shapes_of_shares(notes: Notes) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of which `notes` names shares."""
    return {share.name: share.shape for share in notes.shares.values()}


def newest_contents(
    storage: Storage, step: int | None, among: Collection[Version] | None = None
) -> tuple[Contents, DcpContent, list[str]]:
    """The newest version that is whole, or that of `step`.

    Args:
        storage: The store.
        step: Which, or None.
        among: Versions that may be taken; None: all.

    Returns:
        Its manifests, DCP's part of it, and a sentence for every newer one that is not whole.

    Raises:
        UnfinishedError: When none was completed yet.
        CheckpointError: When there is none of `step`, or all are damaged.
    """
    versions = list_versions(storage)[::-1]
    versions = [version for version in versions if among is None or version in among]
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
                return contents, read_dcp_content(storage, contents), skipped
        except CheckpointError as error:
            damaged = damaged or not isinstance(error, UnfinishedError)
            skipped.append(str(error))
    raise (CheckpointError if damaged else UnfinishedError)(
        f"no checkpoint in {storage.location} can be used: {listing(skipped)}"
        if skipped
        else f"there is no checkpoint in {storage.location}; give a store or a run directory"
    )


def encode_object(name: str, value: Any) -> bytes:
    """An object as JSON, a line feed, and the bytes of its tensors.

    Raises:
        CheckpointError: When only pickle can hold it; names the place in it.
    """
    tensors: dict[str, list[Any]] = {}
    contents: list[bytes] = []

    def put(path: str, found: Any) -> str | None:
        if type(found) is np.ndarray:
            try:
                tensor = torch.from_numpy(np.ascontiguousarray(found)).reshape(found.shape)
            except (TypeError, ValueError):
                return None
        elif type(found) in (torch.Tensor, nn.Parameter):
            tensor = found.detach()
        else:
            return None
        # What is elsewhere, or no memory, would come back as something else.
        if tensor.device.type != "cpu" or dtype_name(tensor) not in DTYPES:
            return None
        if tensor.layout != torch.strided or tensor.is_nested:
            return None
        flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
        tensors[path] = [dtype_name(tensor), [*tensor.shape], sum(map(len, contents))]
        contents.append(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        return "torch" if isinstance(found, torch.Tensor) else "numpy"

    found = {"value": values.encode(value, name, put), "tensors": tensors}
    return b"\n".join([json.dumps(found, separators=(",", ":")).encode(), b"".join(contents)])


def decode_object(name: str, content: bytes) -> Any:
    """The inverse of `encode_object`; raises CheckpointError."""
    text, _, memory = content.partition(b"\n")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if type(found) is not dict:
        raise ManifestError(f"the object `{name}` is malformed: it is no JSON")
    fields = Fields(f"the object `{name}`", found)
    fields.only("value", "tensors")

    def get_tensor(path: str, kind: str) -> Any:
        row = fields.checked_rows("tensors", fields.table("tensors").get(path), 3)
        dtype = fields.one_of("tensors", row[0], DTYPES)
        facts = TensorFacts.of(dtype, fields.extents("tensors", row[1]))
        start = fields.checked_number("tensors", row[2], most=len(memory))
        if start + facts.bytes > len(memory):
            raise fields.error("tensors", f"ends before `{path}`")
        tensor = torch.empty(facts.shape, dtype=dtype_of(facts))
        if facts.bytes:
            own = bytearray(memory[start : start + facts.bytes])
            tensor = torch.frombuffer(own, dtype=tensor.dtype).reshape(facts.shape)
        return tensor.numpy() if kind == "numpy" else tensor

    return values.decode(fields.tree("value", found["value"]), get_tensor)


def pickled(value: Any) -> bytes:
    """The bytes that DCP's planner makes of an object."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpickled(name: str, content: bytes, *, allow_pickle: bool) -> Any:
    """The object that `pickled` was given.

    Raises:
        CheckpointError: When reading it could run code, and that is not allowed.
    """
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        if not allow_pickle:
            raise CheckpointError(
                f"`{name}` was saved as a pickle, which could run any code when it is loaded; if "
                "you trust who saved it, give OutlastReader(..., allow_pickle=True)"
            ) from error
    return torch.load(io.BytesIO(content), weights_only=False)
