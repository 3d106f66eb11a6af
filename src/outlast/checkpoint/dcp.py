"""The store as a backend of ``torch.distributed.checkpoint``: one argument for DCP code to get it.

dcp.save(state, storage_writer=OutlastWriter("ckpt/", step=100, keep=3))
dcp.load(state, storage_reader=OutlastReader("ckpt/"))

A save writes one version of the store: a part per rank, then ``dcp.json`` with what DCP keeps in
its ``.metadata``, then the seal. Tensors keep their fully qualified names. What is no tensor has
been pickled by DCP's planner and is stored as the bytes that it gave; the store itself adds no
pickle and reads none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import re
import threading
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
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
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from outlast.checkpoint.encoder import Encoder, PartJob, Reduction, StagedPiece
from outlast.checkpoint.manifest import (
    FORMAT,
    STATE,
    Catalogue,
    Fields,
    ManifestError,
    TensorFacts,
    sealed,
    unsealed,
)
from outlast.checkpoint.owner import Claim, Ownership, claimed
from outlast.checkpoint.plan import add_facts
from outlast.checkpoint.reader import Counters, VersionReader, Wanted
from outlast.checkpoint.retention import Retention, prune
from outlast.checkpoint.storage import LocalStorage, sentence_of, storage_of
from outlast.checkpoint.version import (
    UnfinishedError,
    Version,
    list_versions,
    listing,
    load,
    read_seal,
    seal,
)
from outlast.checkpoint.writer import Arena
from outlast.errors import CheckpointError
from outlast.state import values
from outlast.state.box import Box, aligned, whole
from outlast.state.live import Filling
from outlast.state.tensors import dtype_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.checkpoint.planner import (
        LoadPlan,
        LoadPlanner,
        ReadItem,
        SavePlan,
        SavePlanner,
        WriteItem,
    )

    from outlast.checkpoint.storage import Storage
    from outlast.checkpoint.version import Contents

T = TypeVar("T")
DCP_FILE = "dcp.json"
DCP_NOTE = {"by": "dcp"}
"""Among the notes of a part: its version counts only with `DCP_FILE`."""


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
    content = DcpContent(
        found.names("names"),
        found.names("objects"),
        found.names("requires_grad"),
        found.tree("planner_data", found.content["planner_data"]),
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
    # Where an item is: the manifest that lists it, relative to the store.
    stored: dict[MetadataIndex, str] = {}
    world_size = contents.parts[0].world_size
    for name in content.names:
        facts = contents.catalogue.tensors[name]
        of_name = boxes.get(name) or {whole(facts.shape): 0}
        for number, (box, rank) in enumerate(of_name.items()):
            offset = None if name in objects else box.offset
            part_name = contents.version.part_name(rank, world_size)
            stored[MetadataIndex(name, offset, number)] = part_name
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
        f"no checkpoint in {storage.location} can be used: {listing(skipped)}"
        if skipped
        else f"there is no checkpoint in {storage.location}; give a store or a run directory"
    )


@dataclass(frozen=True)
class SaveTask:
    """The coordinator's message to a rank, in `SavePlan.storage_data`."""

    version: Version
    rank: int
    world_size: int
    tensors: dict[str, TensorFacts]
    metrics: dict[str, float]


class SaveEngine:
    """State of a writer from one save to the next."""

    def __init__(self, place: str, reduction: Reduction) -> None:
        self.storage = storage_of(place)
        self.reduction = reduction
        self.served = ("", 0)
        self.local_plan: SavePlan | None = None
        self._plans: list[SavePlan] = []
        self._session = 0
        self.claim: Claim | None = None
        self._step = 0
        self._arena: Arena | None = None
        self._encoder: Encoder | None = None

    def whole_plans(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The ranks' plans, where a planner that caches sends no more than what changed."""
        if len(self._plans) != len(plans):
            self._plans = []
        if not self._plans and not all(plan.usable for plan in plans):
            raise CheckpointError(
                "the planner caches its plans (enable_plan_caching), but this OutlastWriter has "
                "not seen them; use one writer for all saves, or a planner without a cache"
            )
        self._plans = [
            plan if plan.usable else self._plans[rank] for rank, plan in enumerate(plans)
        ]
        return list(self._plans)

    def with_gathered_bytes(self, plans: list[SavePlan], own: int) -> list[SavePlan]:
        """Let the coordinator write all objects that it holds too.

        DCP spreads objects over the ranks, and only their writer knows how long they are; in one
        place, all other ranks agree on one catalogue.
        """
        held = set()
        if self.local_plan is not None:
            held = {item.index for item in self.local_plan.items if _is_bytes(item)}
        moved: list[WriteItem] = []
        found: list[list[WriteItem]] = []
        for rank, plan in enumerate(plans):
            stays: list[WriteItem] = []
            for item in plan.items:
                moves = rank != own and _is_bytes(item) and item.index in held
                (moved if moves else stays).append(item)
            found.append(stays)
        found[own] += moved
        return [
            dataclasses.replace(plan, items=items) for plan, items in zip(plans, found, strict=True)
        ]

    def next_version(self, request: tuple[str, int], step: int | None) -> Version:
        """The name of the version to be written."""
        versions = list_versions(self.storage)
        newest = versions[-1] if versions else Version(0, 0)
        session = max(newest.session, *claimed(self.storage), 0)
        if step is None or request == self.served:
            step = (self._step if self._session else newest.step) + 1
        if not self._session or session > self._session or step <= self._step:
            self._session = max(self._session, session) + 1
            if not isinstance(self.storage, LocalStorage):
                # Between two saves, as in a file system, others may save here.
                self.claim = Claim(self.storage, self._session, held=False)
        self._step = step
        return Version(self._session, step)

    def write(
        self, task: SaveTask, items: list[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        """Stage and write the part of this rank."""
        tensors = dict(task.tensors)
        contents: dict[MetadataIndex, memoryview] = {}
        staged: list[tuple[WriteItem, StagedPiece, int]] = []
        total = 0
        for item in items:
            name = item.index.fqn
            if _is_bytes(item):
                found = planner.resolve_data(item)
                if not isinstance(found, io.BytesIO):
                    raise CheckpointError(
                        f"the planner gave a {type(found).__name__} where it had announced bytes"
                    )
                contents[item.index] = found.getbuffer()
                tensors[name] = TensorFacts.of("uint8", (contents[item.index].nbytes,))
                box = whole(tensors[name].shape)
            else:
                assert item.tensor_data is not None
                chunk = item.tensor_data.chunk
                box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            size = box.elements * tensors[name].itemsize
            staged.append((item, StagedPiece(name, box, total), size))
            total += aligned(size)
        memory = torch.frombuffer(self._room(total), dtype=torch.uint8)
        for item, piece, size in staged:
            target = memory[piece.start : piece.start + size]
            if size and _is_bytes(item):
                target.numpy()[:] = np.frombuffer(contents.pop(item.index), np.uint8)
            elif size:
                _stage(item, planner.resolve_data(item), target)
        del memory
        assert self._encoder is not None
        pieces = [piece for _, piece, size in staged if size]
        announced = {piece.name for piece in pieces if piece.name in task.tensors}
        self._encoder.write(
            PartJob(
                version=task.version,
                rank=task.rank,
                world_size=task.world_size,
                catalogue=Catalogue(tensors),
                pieces=pieces,
                bounds=self.reduction.bounds_of(Catalogue(task.tensors), announced),
                notes={"metrics": task.metrics, "torch": str(torch.__version__), **DCP_NOTE},
            ),
            # DCP has no way to give up a save.
            lambda: None,
        )
        part_name = task.version.part_name(task.rank, task.world_size)
        return [
            WriteResult(index=item.index, size_in_bytes=size, storage_data=part_name)
            for item, _, size in staged
        ]

    def close(self) -> None:
        """Give the memory back."""
        self._encoder = self._arena = None

    def _room(self, size: int) -> memoryview:
        """The arena, made anew where it is too small."""
        if self._arena is None or self._arena.size < size:
            self.close()
            self._arena = Arena(aligned(max(size, 1)))
            # No other process needs the descriptor; the memory goes with its last user.
            self._arena.detach()
            self._encoder = Encoder(self.storage, self.reduction, self._arena.memory)
        return self._arena.memory


_copies: dict[str, SaveEngine] = {}


def engine_of_copies(place: str, reduction: Reduction) -> SaveEngine:
    """The engine of all unpickled writers of a place in this process.

    DCP's process executor pickles the writer at every save; its copies continue where the last one
    stopped.
    """
    if place not in _copies or _copies[place].reduction != reduction:
        if place in _copies:
            _copies[place].close()
        _copies[place] = SaveEngine(place, reduction)
    return _copies[place]


def _is_bytes(item: WriteItem) -> bool:
    return item.type == WriteItemType.BYTE_IO


def facts_of(plans: list[SavePlan]) -> dict[str, TensorFacts]:
    """All tensors of all ranks; raises CheckpointError when the ranks disagree about one."""
    tensors: dict[str, TensorFacts] = {}
    for item in (item for plan in plans for item in plan.items):
        if item.tensor_data is None:
            continue
        name, data = item.index.fqn, item.tensor_data
        add_facts(tensors, name, _name_of(data.properties.dtype), tuple(data.size), where="another")
    return tensors


def _stage(item: WriteItem, tensor: Any, target: torch.Tensor) -> None:
    """Copy a resolved tensor to its place, once it is what was announced."""
    name, data = item.index.fqn, item.tensor_data
    assert data is not None
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        raise CheckpointError(f"`{name}` cannot be saved: only dense tensors can")
    tensor = tensor.detach()
    announced = (data.properties.dtype, tuple(data.chunk.sizes))
    if (tensor.dtype, tuple(tensor.shape)) != announced:
        raise CheckpointError(
            f"`{name}` is {_name_of(tensor.dtype)}{list(tensor.shape)}, but the planner announced "
            f"{_name_of(announced[0])}{list(announced[1])}; a planner that caches plans "
            "(enable_plan_caching) does not notice such a change"
        )
    target.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_COPIED_BYTES = 256 << 20
_STEP = re.compile(r"(\d+)/*$", re.ASCII)
_logger = logging.getLogger(__name__)

_held: dict[str, tuple[Ownership, int, threading.Thread]] = {}
"""Owned stores of file systems, by path; the process and the thread that own them."""


def hold(storage: Storage) -> None:
    """Own the store until `give_up`.

    DCP does not tell the coordinator when another rank fails, so a lock may be left over; it is,
    when its thread works on the next save or has ended.
    """
    if not isinstance(storage, LocalStorage):
        return
    _, process, thread = _held.get(_key(storage), (None, 0, threading.current_thread()))
    if process == os.getpid():
        if thread is not threading.current_thread() and thread.is_alive():
            raise CheckpointError(
                f"another save to {storage.root} is under way in this process; wait for its future"
            )
        give_up(storage)
    ownership = Ownership(storage)
    ownership.lock()
    _held[_key(storage)] = ownership, os.getpid(), threading.current_thread()


def check_held(storage: Storage) -> None:
    """Raise LeaseLostError where another process has taken over the store that this one owns."""
    ownership, process, _ = _held.get(_key(storage), (None, 0, None))
    if ownership is not None and process == os.getpid():
        ownership.check()


def give_up(storage: Storage) -> None:
    """Own the store no longer, if this process does."""
    ownership, process, _ = _held.pop(_key(storage), (None, 0, None))
    if ownership is not None and process == os.getpid():
        ownership.release()


def _key(storage: Storage) -> str:
    return str(Path(storage.location).absolute())


class _AtStore:
    """Questions of DCP that writer and reader answer alike."""

    _place: str
    step: int | None

    @property
    def checkpoint_id(self) -> str:
        """The store, for DCP's log."""
        return self._place

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the text can name a store."""
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the step from a checkpoint_id such as ``step-100``; others are ignored."""
        found = None if checkpoint_id is None else _STEP.search(os.fspath(checkpoint_id))
        if found is not None:
            self.step = int(found[1])


class OutlastWriter(_AtStore, StorageWriter):
    """Saves DCP states as versions of a store.

    One writer may serve many saves; then later versions refer to content that earlier ones hold.
    It needs a copy of this rank's share of the state in host memory, which it keeps until `close`.

    The step of a save comes from the ``checkpoint_id`` when that ends in digits, else from `step`
    when it was set since the last save, else it is one more than the last. A step that is not
    larger than the one before begins a new session of the store: nothing is overwritten.

    Works with ``dcp.save`` and ``dcp.async_save`` (both executors). Set `step` and `metrics` only
    while no save is under way.

    Args:
        place: Directory or fsspec URL of the store.
        step: Steps done, at the first save.
        keep: Newest versions kept, or a `Retention`.
        reduction: Codecs and error bounds; by default everything is exact.

    Attributes:
        metrics: Figures of the next saves, for `Retention.best`.

    Raises:
        CheckpointError: When a setting is wrong.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        step: int | None = None,
        keep: int | Retention = 3,
        reduction: Reduction | None = None,
    ) -> None:
        self._place = os.fspath(place)
        self._retention = keep if isinstance(keep, Retention) else Retention(keep)
        self._reduction = reduction or Reduction()
        self.metrics: dict[str, float] = {}
        # A copy that DCP pickles must find out whether its request was served by another copy.
        self._identity = uuid.uuid4().hex
        self._request = 0
        self._step: int | None = None
        if step is not None:
            self.step = step
        self._begin(SaveEngine(self._place, self._reduction))

    def _begin(self, engine: SaveEngine) -> None:
        self._engine = engine
        self._rank = 0
        self._is_coordinator = False
        self._task: SaveTask | None = None

    @property
    def step(self) -> int | None:
        """The step of the next save, if it was given."""
        return self._step

    @step.setter
    def step(self, step: int | None) -> None:
        if step is not None and step < 0:
            raise CheckpointError(f"step = {step} cannot be saved; steps are counted from 0")
        self._step = step
        self._request += 1

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn the role; DCP passes the rank only if the last parameter is named ``kwargs``."""
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(
                "use_collectives = False cannot be used with OutlastWriter; for ranks that save "
                "at their own pace use CheckpointStore(coordinated=False)"
            )
        self._is_coordinator = is_coordinator
        self._rank = int(kwargs.get("rank") or 0)
        self._task = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Remember the own plan; nothing changes."""
        if plan.usable:
            self._engine.local_plan = plan
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose the version and tell every rank; on the coordinator only."""
        engine = self._engine
        plans = engine.whole_plans(plans)
        tensors = facts_of(plans)
        hold(engine.storage)
        try:
            version = engine.next_version((self._identity, self._request), self._step)
        except OSError as error:
            give_up(engine.storage)
            raise CheckpointError(f"{self._place}: {sentence_of(error)}") from error
        except BaseException:
            give_up(engine.storage)
            raise
        return [
            dataclasses.replace(
                plan, storage_data=SaveTask(version, rank, len(plans), tensors, dict(self.metrics))
            )
            for rank, plan in enumerate(engine.with_gathered_bytes(plans, self._rank))
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part; it is durable when this returns.

        Raises:
            CheckpointError: When the storage fails or the planner gives other data than it
                announced; the version is never published then.
        """
        with self._reported(give_up_always=False):
            task = plan.storage_data
            if not isinstance(task, SaveTask):
                raise CheckpointError(
                    "the planner replaced SavePlan.storage_data, which OutlastWriter needs"
                )
            self._task = task
            results = self._engine.write(task, plan.items, planner)
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the version: the metadata, then the seal, then delete what is too old."""
        assert self._task is not None
        storage, version = self._engine.storage, self._task.version
        with self._reported(give_up_always=True):
            written = [result for of_rank in results for result in of_rank]
            missing = set(metadata.state_dict_metadata) - {result.index.fqn for result in written}
            if missing:
                raise CheckpointError(f"`{min(missing)}` was planned, but no rank wrote it")
            # DCP hands on the object that it gave, so it is changed in place.
            metadata.storage_data = {result.index: result.storage_data for result in written}
            metadata.storage_meta = self.storage_meta()
            content = metadata_file(metadata)
            with storage.create(f"{version.folder}/{DCP_FILE}") as file:
                file.write(content)
            check_held(storage)
            if self._engine.claim is not None:
                self._engine.claim.check()
            seal(storage, load(storage, version))
            self._engine.served = (self._identity, self._request)
            with contextlib.suppress(OSError, CheckpointError):
                prune(storage, self._retention)

    @contextlib.contextmanager
    def _reported(self, *, give_up_always: bool) -> Iterator[None]:
        """Give up the store when the block fails, or ends; what the storage says is a sentence."""
        failed = True
        try:
            yield
            failed = False
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint in {self._place} failed: {sentence_of(error)}"
            ) from error
        finally:
            if give_up_always or (failed and self._is_coordinator):
                give_up(self._engine.storage)

    def storage_meta(self) -> StorageMeta:
        """Return the metadata for planners."""
        return StorageMeta(checkpoint_id=self._place, save_id=self._identity)

    def close(self) -> None:
        """Give the memory back; the next save starts anew."""
        self._engine.close()

    def __getstate__(self) -> dict[str, Any]:
        skipped = ("_engine", "_task", "_rank", "_is_coordinator")
        return {name: value for name, value in vars(self).items() if name not in skipped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin(engine_of_copies(self._place, self._reduction))


class OutlastReader(_AtStore, StorageReader):
    """Loads DCP states from a store, whoever wrote it and on however many ranks.

    Only the tiles that this rank needs are read, and each is checked. All ranks take the newest
    version that is whole, or that of `step`, or of a ``checkpoint_id`` that ends in digits. Of
    versions that a `CheckpointStore` wrote, the tensors can be loaded under their names there.

    DCP's planner unpickles what is no tensor (``torch.load(weights_only=False)``): load only what
    you trust.

    Args:
        place: Directory or fsspec URL of the store.
        step: Load this step instead of the newest.

    Attributes:
        version: The version that `read_metadata` chose.
        skipped: A sentence for every newer version that is not whole.
        counters: Bytes needed and read by the last load on this rank.
    """

    def __init__(self, place: str | os.PathLike[str], *, step: int | None = None) -> None:
        self._storage = storage_of(place)
        self._place = self._storage.location
        self.step = step
        self._contents: Contents | None = None
        self._reader: VersionReader | None = None
        self.version: Version | None = None
        self.skipped: list[str] = []
        self.counters = Counters()

    def newest(self) -> Version | None:
        """The version that a load takes; None where no save was completed yet.

        Raises:
            CheckpointError: When there are versions, and none can be used.
        """
        try:
            return newest_contents(self._storage, self.step)[0].version
        except UnfinishedError:
            return None

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        """DCP's metadata of the version to be loaded; raises CheckpointError when there is none.

        No parameter is named ``kwargs``: DCP would take it for an offer to load without agreement
        between the ranks.
        """
        self._contents, metadata, self.skipped = newest_contents(self._storage, self.step)
        self.version = self._contents.version
        for sentence in self.skipped:
            _logger.warning("skipped a checkpoint: %s", sentence)
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Open the version's files, so that it stays readable when it is deleted meanwhile."""
        if self._contents is None:
            self.read_metadata()
        assert self._contents is not None
        self._close()
        self._reader = VersionReader(self._storage, self._contents)
        self.counters = self._reader.counters

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Tell the coordinator which version this rank reads."""
        return dataclasses.replace(plan, storage_data=self.version)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See that all ranks read the same version."""
        found = sorted({plan.storage_data for plan in plans})
        if len(found) > 1:
            raise CheckpointError(
                f"the ranks see different newest checkpoints in {self._storage.location}: "
                f"{', '.join(storage_data.folder for storage_data in found)}; load again, or "
                "give a step"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors.

        Raises:
            CheckpointError: Naming the file and tensor that is damaged.
        """
        try:
            batch: list[tuple[ReadItem, Filling]] = []
            size = 0
            for item in plan.items:
                batch.append((item, self._filling(item, planner)))
                size += batch[-1][1].extra_bytes
                if size > _COPIED_BYTES:
                    self._fill(batch, planner)
                    batch, size = [], 0
            self._fill(batch, planner)
        finally:
            self._close()
        return _done(None)

    def _filling(self, item: ReadItem, planner: LoadPlanner) -> Filling:
        """The planner's memory for an item, or memory for its bytes."""
        assert self._contents is not None
        name = item.storage_index.fqn
        facts = self._contents.catalogue.tensors[name]
        if item.type == LoadItemType.BYTE_IO:
            return Filling(name, torch.empty(facts.shape, dtype=torch.uint8), facts)
        target = planner.resolve_tensor(item)
        if target.shape != item.lengths:
            raise CheckpointError(
                f"`{name}` gives {list(item.lengths)} elements, but the planner has room for "
                f"{list(target.shape)}"
            )
        first = item.storage_index.offset or (0,) * len(facts.shape)
        offset = tuple(a + b for a, b in zip(first, item.storage_offsets, strict=True))
        return Filling(name, target, facts, Box(offset, tuple(item.lengths)))

    def _fill(self, batch: list[tuple[ReadItem, Filling]], planner: LoadPlanner) -> None:
        assert self._reader is not None
        assert self.version is not None
        fillings = [filling for _, filling in batch if filling.box.elements]
        try:
            self._reader.read([Wanted(found.name, found.box, found.out) for found in fillings])
        except CheckpointError as error:
            raise CheckpointError(
                f"step {self.version.step} cannot be loaded: {error}; load an older step with "
                "OutlastReader(..., step=...)"
            ) from None
        for item, filling in batch:
            filling.finish()
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(filling.out.tobytes()))
            else:
                planner.commit_tensor(item, filling.local)

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future
