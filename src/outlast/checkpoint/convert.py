"""Checkpoints of other programs into a store, and versions of a store out of it.

import_checkpoint("pretrained/", "ckpt/", prefix="model.")
export_checkpoint("ckpt/", "model/", kind="safetensors", prefix="model.")

Nothing is executed that a checkpoint contains: what is pickled is read by restricted readers. A
result appears complete or not at all.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from outlast.checkpoint.content import FILE_BYTES, appearing, safetensors_file, shares_of
from outlast.checkpoint.dcp_format import (
    DCP_FILE,
    DCP_NOTE,
    DcpContent,
    decode_object,
    newest_contents,
    pickled,
)
from outlast.checkpoint.encoder import Encoder, PartJob, Reduction, StagedPiece
from outlast.checkpoint.foreign_formats import (
    COMMON,
    COMMON_FILE,
    MEGATRON_FORMAT,
    MEGATRON_FORMAT_FILE,
    SAFETENSORS_READ,
    STRUCTURE,
    open_source,
    reading,
    split_rows,
)
from outlast.checkpoint.manifest import Catalogue, TensorFacts
from outlast.checkpoint.owner import Ownership, claimed
from outlast.checkpoint.reader import VersionReader
from outlast.checkpoint.restore import whole_tensor
from outlast.checkpoint.storage import sentence_of, storage_of
from outlast.checkpoint.version import Version, list_versions, load, seal
from outlast.checkpoint.writer import Arena
from outlast.errors import CheckpointError, OutlastError
from outlast.state import values
from outlast.state.box import Box, aligned
from outlast.state.tensors import dtype_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.checkpoint.metadata import StorageMeta
    from torch.distributed.checkpoint.planner import WriteItem

    from outlast.checkpoint.foreign_formats import ForeignCheckpoint
    from outlast.checkpoint.storage import Storage
    from outlast.checkpoint.version import Contents


Progress: TypeAlias = "Callable[[int, int], None]"
EXPORT_KINDS = ("safetensors", "torch", "dcp", "megatron")
_ONE_FILE_BYTES = 1 << 30
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class Converted:
    """Result of a conversion.

    Attributes:
        step: Step of the store's version.
        tensors: Number of tensors.
        bytes: Their bytes.
        notes: What was left out or should be known, a sentence each.
    """

    step: int
    tensors: int
    bytes: int
    notes: list[str] = field(default_factory=list)


def export_checkpoint(
    store_place: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    kind: str,
    step: int | None = None,
    prefix: str = "",
    shard_bytes: int = FILE_BYTES,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Write a version of a store as a checkpoint of another format.

    Kinds: ``safetensors`` (a folder as Hugging Face's, in shards of at most `shard_bytes` with an
    index; tensors only), ``torch`` (one file of torch.save: nested as it was saved with DCP or
    imported, else a flat dictionary; needs memory for all of it), ``dcp`` (a folder for torch's own
    dcp.load; needs memory for one tensor, or for 1 GiB of them), ``megatron`` (the same for
    Megatron-core's dist_checkpointing.load, with the ``common.pt`` that was imported).

    Args:
        store_place: Directory or fsspec URL of the store.
        target: Folder or file to be made, which must not exist; or an fsspec URL, to which it is
            sent from a temporary folder when it is complete, what says so last.
        kind: One of the kinds above.
        step: Which version; default: the newest that is whole.
        prefix: Export only names that begin with it, without it.
        shard_bytes: Largest file of ``safetensors``; one tensor may exceed it.
        progress: Called with the bytes of tensors that are read, and those in all.

    Raises:
        CheckpointError: When the target exists, nothing fits, or the version is damaged.
    """
    if kind not in EXPORT_KINDS:
        raise CheckpointError(f'kind = "{kind}" is unknown; take {", ".join(EXPORT_KINDS)}')
    storage = storage_of(store_place)
    contents, dcp_content, skipped = newest_contents(storage, step)
    if dcp_content.notes.shares:
        raise CheckpointError(
            f"{storage.location} holds one rank's share of the tensors (use_collectives=False); "
            "load it with DCP on all ranks and save it together"
        )
    exporters: dict[str, Callable[[_Selection, Path, int], None]] = {
        "safetensors": _export_safetensors,
        "torch": _export_torch,
        "dcp": _export_dcp,
        "megatron": _export_megatron,
    }
    with VersionReader(storage, contents) as reader:
        selection = _Selection(reader, dcp_content, prefix, progress)
        selection.notes += [f"skipped a newer checkpoint: {sentence}" for sentence in skipped]
        if not selection.tensors:
            raise CheckpointError(
                f"step {contents.version.step} in {storage.location} has no tensor whose name "
                f'begins with "{prefix}"'
                if prefix
                else f"step {contents.version.step} in {storage.location} has no tensors"
            )
        with _appearing(os.fspath(target)) as path:
            exporters[kind](selection, path, shard_bytes)
    return Converted(
        contents.version.step,
        len(selection.tensors),
        selection.bytes,
        selection.notes,
    )


@contextlib.contextmanager
def _appearing(target: str) -> Iterator[Path]:
    """Give a path to write; its content appears at `target` when the block ends well.

    Raises:
        CheckpointError: When it is there, or cannot be written.
    """
    parent, _, name = target.rstrip("/").rpartition("/")
    is_remote = "://" in target
    if is_remote and ("://" not in parent or not name):
        raise CheckpointError(f"{target} must name a folder or file below its place")
    try:
        if not is_remote:
            path = Path(target)
            if path.exists():
                raise CheckpointError(f"{path} exists already; give a new name")
            path.parent.mkdir(parents=True, exist_ok=True)
            with appearing(path) as temporary:
                yield temporary
            return
        storage = storage_of(parent)
        if name in storage.files("") or storage.files(name):
            raise CheckpointError(f"{target} exists already; give a new name")
        with tempfile.TemporaryDirectory(prefix="outlast-export-") as folder:
            yield (made := Path(folder) / name)
            files = [file for file in [made, *made.rglob("*")] if file.is_file()]
            # Readers begin with an index.
            files.sort(key=lambda file: (file.suffix == ".json" or file.name == ".metadata", file))
            try:
                for file in files:
                    to = str(file.relative_to(folder))
                    with storage.create(to) as sent, file.open("rb") as read:
                        while block := read.read(_BLOCK_BYTES):
                            sent.write(block)
            except BaseException:
                with contextlib.suppress(OSError):
                    storage.remove_folder(name)
                raise
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {sentence_of(error)}") from error


class _Selection:
    """Part of a version that is exported.

    Attributes:
        tensors: Exported name to stored name.
        bytes: Of the tensors.
        objects: The same for objects that were saved through DCP, and tensors saved as pickles.
        values: The same for JSON values.
        within_values: Stored names of tensors that lie within a value that was asked for.
        notes: Sentences for the user.
    """

    def __init__(
        self, reader: VersionReader, content: DcpContent, prefix: str, progress: Progress
    ) -> None:
        self.reader = reader
        self._progress = progress
        self._done = 0
        self.prefix = prefix
        self.content = content
        self.contents: Contents = reader.contents
        self.facts = reader.contents.catalogue.tensors
        self.json = reader.contents.values
        objects = {*content.objects, *content.notes.pickled}
        # The order in which the names were saved, then by the alphabet.
        places = {name: place for place, name in enumerate(content.names)}
        names = sorted(self.facts, key=lambda name: (places.get(name, len(places)), name))
        chosen = [name for name in names if name.startswith(prefix) and name != prefix]
        self.tensors = {name[len(prefix) :]: name for name in chosen if name not in objects}
        self.objects = {name[len(prefix) :]: name for name in chosen if name in objects}
        self.bytes = sum(self.facts[name].bytes for name in self.tensors.values())
        self.values = {
            name[len(prefix) :]: name
            for name in self.json
            if name.startswith(prefix) and name not in (prefix, STRUCTURE)
        }
        self.notes: list[str] = []
        self.within_values: set[str] = set()

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor exported as `name`."""
        tensor = whole_tensor(self.reader, self.tensors[name])
        self.advance(tensor.nbytes)
        return tensor

    def advance(self, size: int) -> None:
        """Tell that `size` more bytes are read."""
        self._done += size
        self._progress(self._done, self.bytes)

    def object_bytes(self, name: str) -> bytes:
        """The object exported as `name`, as DCP's planner pickles it."""
        if self.objects[name] in self.content.notes.plain:
            return pickled(self.object_of(name))
        return self._stored_bytes(name)

    def object_of(self, name: str) -> Any:
        """The object exported as `name`; raises UnpicklingError where reading it could run code."""
        content = self._stored_bytes(name)
        if self.objects[name] in self.content.notes.plain:
            return decode_object(name, content)
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)

    def _stored_bytes(self, name: str) -> bytes:
        return whole_tensor(self.reader, self.objects[name]).numpy().tobytes()

    def value(self, name: str) -> Any:
        """The value exported as `name`, with its tensors."""
        return values.decode(self.json[self.values[name]], self._stored)

    def structure(self) -> Any:
        """Everything, nested as it was imported; None when that is not known or not wanted."""
        found = self.json.get(STRUCTURE)
        if found is None or self.prefix:
            return None
        if type(found) is not dict or type(found.get("prefix")) is not str or "root" not in found:
            raise CheckpointError(
                f"{self.contents.version.folder} is malformed: its value `{STRUCTURE}` does not "
                "say how it was nested"
            )
        before = found["prefix"]
        return values.decode(
            found["root"], lambda name, kind: self._stored(before + name[1:], kind)
        )

    def paths(self) -> dict[str, tuple[str | int, ...]] | None:
        """The place of every name in the nested state that DCP saved; None when not known."""
        found = self.content.decoded_planner_data()
        if self.prefix or not isinstance(found, dict) or not set(self.tensors) <= set(found):
            return None
        return found

    def _stored(self, name: str, kind: str) -> Any:
        tensor = whole_tensor(self.reader, name)
        self.within_values.add(name)
        return tensor.numpy() if kind == "numpy" else tensor


def _export_safetensors(selection: _Selection, folder: Path, shard_bytes: int) -> None:
    facts = {name: selection.facts[stored] for name, stored in selection.tensors.items()}
    for name, fact in facts.items():
        if fact.dtype not in SAFETENSORS_READ.values():
            raise CheckpointError(
                f"`{name}` is {fact.dtype}, which safetensors cannot hold; export as torch or dcp"
            )
    left_out = len(selection.objects) + len(selection.values)
    if left_out:
        selection.notes.append(f"{left_out} values that are no tensors were left out")
    shards = shares_of(facts, shard_bytes)
    folder.mkdir()
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = file if len(shards) > 1 else "model.safetensors"
        own = {name: (selection.tensors[name], facts[name]) for name in names}
        with safetensors_file(folder / file, own, {"format": "pt"}) as wanted:
            selection.reader.read([want for want in wanted if want.box.elements], selection.advance)
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        total = sum(fact.bytes for fact in facts.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n")


def _export_torch(selection: _Selection, path: Path, _: int) -> None:
    structure = selection.structure()
    if structure is not None:
        _save(structure, path)
        return
    found = {name: selection.value(name) for name in selection.values}
    flat: dict[str, Any] = {
        name: selection.tensor(name)
        for name, stored in selection.tensors.items()
        if stored not in selection.within_values
    }
    flat.update(found)
    refused = []
    for name in selection.objects:
        try:
            flat[name] = selection.object_of(name)
        except pickle.UnpicklingError:
            refused.append(name)
    if refused:
        selection.notes.append(
            f"{len(refused)} Python objects that torch.load(weights_only=True) refuses were left "
            f"out, e.g. `{refused[0]}`"
        )
    paths = selection.paths()
    if paths is not None:
        flat = _nested(flat, paths)
    _save(flat, path)


def _save(found: Any, path: Path) -> None:
    try:
        # With a path alone, torch does not say what the disk said.
        with path.open("xb") as file:
            torch.save(found, file)
    except RuntimeError as error:
        raise _met_by(error) from None


def _met_by(error: BaseException) -> BaseException:
    """The storage's failure that torch hides behind an unexpected position in its file."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, (OutlastError, OSError)):
        found = found.__context__
    return found or error


def _nested(flat: dict[str, Any], paths: dict[str, tuple[str | int, ...]]) -> dict[str, Any]:
    """`flat` with every value at its path; whole numbers in paths are places in lists."""
    root: dict[str, Any] = {}
    for name, value in flat.items():
        path = paths.get(name, (name,))
        at: Any = root
        for key, following in zip(path, (*path[1:], None), strict=True):
            empty: Any = value if following is None else [] if isinstance(following, int) else {}
            if isinstance(at, list):
                at.extend([None] * (int(key) + 1 - len(at)))
                if at[int(key)] is None:
                    at[int(key)] = empty
                at = at[int(key)]
            else:
                at = at.setdefault(key, empty)
    return root


def _export_dcp(selection: _Selection, folder: Path, _: int) -> None:
    # DCP's writer holds all tensors of a file until it is written.
    one_file = selection.bytes <= _ONE_FILE_BYTES
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save(
                {},
                storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=one_file),
                planner=_ExportPlanner(selection),
                no_dist=True,
            )
        except CheckpointException as error:
            cause = _met_by(error.failures[0][0])
            if isinstance(cause, (OutlastError, OSError)):
                raise cause from None
            raise CheckpointError(f"DCP cannot write {folder}: {cause}") from cause


def _export_megatron(selection: _Selection, folder: Path, shard_bytes: int) -> None:
    common = selection.object_bytes(COMMON) if COMMON in selection.objects else None
    selection.objects.pop(COMMON, None)
    if common is None:
        selection.notes.append("common.pt is empty, as the version was not imported from Megatron")
    _export_dcp(selection, folder, shard_bytes)
    if common is None:
        torch.save({}, empty := io.BytesIO())
        common = empty.getvalue()
    (folder / COMMON_FILE).write_bytes(common)
    # Last, as Megatron-core does: a folder without it is not complete.
    (folder / MEGATRON_FORMAT_FILE).write_text(json.dumps(MEGATRON_FORMAT), encoding="utf-8")


class _ExportPlanner(DefaultSavePlanner):
    """Gives DCP's own writer one tensor after the other."""

    def __init__(self, selection: _Selection) -> None:
        super().__init__()
        self._selection = selection

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Announce the selected names; their tensors are read when they are written."""
        selection = self._selection
        self.state_dict = {
            name: torch.empty(
                selection.facts[stored].shape,
                dtype=dtype_of(selection.facts[stored]),
                device="meta",
            )
            for name, stored in selection.tensors.items()
        }
        self.state_dict.update({name: selection.value(name) for name in selection.values})
        self.state_dict.update(dict.fromkeys(selection.objects, b""))
        paths = selection.paths() or {}
        self.mappings = {name: paths.get(name, (name,)) for name in self.state_dict}
        self.is_coordinator = is_coordinator

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The content of an item."""
        name = write_item.index.fqn
        if name in self._selection.tensors:
            return self._selection.tensor(name)
        if name in self._selection.objects:
            return io.BytesIO(self._selection.object_bytes(name))
        return super().resolve_data(write_item)


_BATCH_BYTES = 256 << 20


def import_checkpoint(
    source: str | os.PathLike[str],
    store_place: str | os.PathLike[str],
    *,
    step: int | None = None,
    kind: str = "auto",
    prefix: str = "",
    reduction: Reduction | None = None,
    progress: Progress = lambda done, total: None,
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
        progress: Called with the bytes that are written, before coding, and those in all.

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
        ownership = Ownership(storage, held=False)
        ownership.lock()
        try:
            sessions = [*claimed(storage), *(version.session for version in list_versions(storage))]
            version = Version(max(sessions, default=0) + 1, step)
            ownership.claim(version.session)
            try:
                reduction = reduction or Reduction()
                size = _write(storage, version, opened, prefix, reduction, progress=progress)
            except BaseException:
                storage.remove_folder(version.folder)
                raise
        except OSError as error:
            raise CheckpointError(
                f"the import into {storage.location} failed: {sentence_of(error)}"
            ) from error
        finally:
            ownership.release()
        return Converted(step, len(opened.tensors), size, opened.notes)


def _write(
    storage: Storage,
    version: Version,
    source: ForeignCheckpoint,
    prefix: str,
    reduction: Reduction,
    *,
    progress: Progress,
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
    encoder = Encoder(storage, reduction, arena.memory)
    memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
    done = 0
    for rank, batch in enumerate(batches):
        for name, box, start in batch:
            entry = source.tensors[name]
            target = memory[start : start + box.elements * facts[name].itemsize]
            with reading(f"`{name}`"):
                target.view(entry.dtype).view(box.shape).copy_(entry.read(box))
        encoder.write(
            PartJob(
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
        done += sum(box.elements * facts[name].itemsize for name, box, _ in batch)
        progress(done, total)
    if (dcp_content := source.dcp) is not None:
        if prefix:
            names = [prefix + name for name in dcp_content.names]
            objects = [prefix + name for name in dcp_content.objects]
            requires_grad = [prefix + name for name in dcp_content.requires_grad]
            paths = {name: {"!tuple": [name]} for name in names}
            dcp_content = DcpContent(names, objects, requires_grad, paths)
        with storage.create(f"{version.folder}/{DCP_FILE}") as file:
            file.write(dcp_content.to_bytes())
    seal(storage, load(storage, version))
    return total
