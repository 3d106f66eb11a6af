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
import fnmatch
import io
import logging
import os
import re
import threading
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from outlast.checkpoint.dcp.content import (
    DCP_FILE,
    DCP_NOTE,
    StoredItem,
    metadata_file,
    newest_contents,
)
from outlast.checkpoint.encoder import Encoder, PartJob, Reduction, StagedPiece
from outlast.checkpoint.manifest import Catalogue, TensorFacts
from outlast.checkpoint.owner import Claim, Ownership, claimed
from outlast.checkpoint.plan import add_facts
from outlast.checkpoint.reader import Counters, VersionReader, Wanted
from outlast.checkpoint.retention import Retention, prune
from outlast.checkpoint.storage import LocalStorage, sentence_of, storage_of
from outlast.checkpoint.version import UnfinishedError, Version, list_versions, seal
from outlast.checkpoint.writer import Arena
from outlast.errors import CheckpointError
from outlast.state.box import Box, aligned, whole
from outlast.state.tensors import dtype_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.distributed.checkpoint.planner import (
        LoadPlan,
        LoadPlanner,
        ReadItem,
        SavePlan,
        SavePlanner,
        WriteItem,
    )

    from outlast.checkpoint.lossy import Bound
    from outlast.checkpoint.storage import Storage
    from outlast.checkpoint.version import Contents


@dataclass(frozen=True)
class SaveTask:
    """The coordinator's message to a rank, in `SavePlan.storage_data`."""

    version: Version
    rank: int
    world_size: int
    tensors: dict[str, TensorFacts]
    metrics: dict[str, float]

    @property
    def part_name(self) -> str:
        """File of the rank's part."""
        return self.version.part_name(self.rank, self.world_size)


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
        self._arenas: list[Arena] = []
        self._encoder: Encoder | None = None
        self._last_arena = -1

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
        objects = {item.index: planner.resolve_data(item) for item in items if _is_bytes(item)}
        tensors = dict(task.tensors)
        sizes: list[int] = []
        boxes: list[Box] = []
        for item in items:
            name = item.index.fqn
            if _is_bytes(item):
                length = _bytes_of(objects[item.index]).nbytes
                tensors[name] = TensorFacts.of("uint8", (length,))
                boxes.append(whole((length,)))
            else:
                assert item.tensor_data is not None
                chunk = item.tensor_data.chunk
                boxes.append(Box(tuple(chunk.offsets), tuple(chunk.sizes)))
            sizes.append(boxes[-1].elements * tensors[name].itemsize)
        places, total = [], 0
        for size in sizes:
            places.append(total)
            total += aligned(size)
        arena = self._free_arena(total)
        memory = torch.frombuffer(self._arenas[arena].memory, dtype=torch.uint8)
        pieces = []
        for item, box, start, size in zip(items, boxes, places, sizes, strict=True):
            if size == 0:
                continue
            pieces.append(StagedPiece(item.index.fqn, box, start))
            target = memory[start : start + size]
            if _is_bytes(item):
                content = np.frombuffer(_bytes_of(objects.pop(item.index)), np.uint8)
                target.numpy()[:] = content
            else:
                _stage(item, planner.resolve_data(item), target)
        del memory
        assert self._encoder is not None
        self._encoder.write(
            PartJob(
                arena=arena,
                version=task.version,
                rank=task.rank,
                world_size=task.world_size,
                catalogue=Catalogue(tensors),
                pieces=pieces,
                bounds=self._bounds(task.tensors, pieces),
                notes={"metrics": task.metrics, "torch": str(torch.__version__), **DCP_NOTE},
            ),
            _go_on,
        )
        self._last_arena = arena
        stored = StoredItem(task.part_name)
        return [
            WriteResult(index=item.index, size_in_bytes=size, storage_data=stored)
            for item, size in zip(items, sizes, strict=True)
        ]

    def close(self) -> None:
        """Give the memory back."""
        self._encoder = None
        self._arenas, self._last_arena = [], -1

    def _free_arena(self, size: int) -> int:
        """The arena that does not hold the last version's bytes."""
        if not self._arenas or self._arenas[0].size < size:
            self.close()
            count = 2 if self.reduction.chain else 1
            self._arenas = [Arena(aligned(max(size, 1))) for _ in range(count)]
            for item in self._arenas:
                # No other process needs the descriptor; the memory goes with its last user.
                item.detach()
            memories = [arena.memory for arena in self._arenas]
            self._encoder = Encoder(self.storage, self.reduction, memories)
        return (self._last_arena + 1) % len(self._arenas)

    def _bounds(
        self, tensors: dict[str, TensorFacts], pieces: list[StagedPiece]
    ) -> dict[str, Bound]:
        bounds = {}
        for name in {piece.name for piece in pieces if piece.name in tensors}:
            for pattern, bound in self.reduction.lossy.items():
                if fnmatch.fnmatchcase(name, pattern):
                    bounds[name] = bound
                    break
        return bounds


_copies: dict[str, SaveEngine] = {}


def engine_of_copies(place: str, reduction: Reduction) -> SaveEngine:
    """The engine of all unpickled writers of a place in this process.

    DCP's process executor pickles the writer at every save; its copies go on where the last one
    stopped.
    """
    if place not in _copies or _copies[place].reduction != reduction:
        if place in _copies:
            _copies[place].close()
        _copies[place] = SaveEngine(place, reduction)
    return _copies[place]


def _go_on() -> None:
    """DCP has no way to give up a save."""


def _is_bytes(item: WriteItem) -> bool:
    return item.type == WriteItemType.BYTE_IO


def _bytes_of(content: Any) -> memoryview:
    if not isinstance(content, io.BytesIO):
        raise CheckpointError(
            f"the planner gave a {type(content).__name__} where it had announced bytes"
        )
    return content.getbuffer()


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


@dataclass
class _Hold:
    ownership: Ownership
    process: int
    thread: threading.Thread


_held: dict[str, _Hold] = {}


def hold(storage: Storage) -> None:
    """Own the store until `give_up`.

    DCP does not tell the coordinator when another rank fails, so a lock may be left over; it is,
    when its thread works on the next save or has ended.
    """
    if not isinstance(storage, LocalStorage):
        return
    key = str(storage.root.absolute())
    left = _held.get(key)
    if left is not None and left.process == os.getpid():
        if left.thread is not threading.current_thread() and left.thread.is_alive():
            raise CheckpointError(
                f"another save to {storage.root} is under way in this process; wait for its future"
            )
        give_up(storage)
    ownership = Ownership(storage)
    ownership.lock()
    _held[key] = _Hold(ownership, os.getpid(), threading.current_thread())


def check_held(storage: Storage) -> None:
    """Raise LeaseLostError where another process has taken over the store that this one owns."""
    if isinstance(storage, LocalStorage):
        held = _held.get(str(storage.root.absolute()))
        if held is not None and held.process == os.getpid():
            held.ownership.check()


def give_up(storage: Storage) -> None:
    """Own the store no longer, if this process does."""
    if isinstance(storage, LocalStorage):
        left = _held.pop(str(storage.root.absolute()), None)
        if left is not None and left.process == os.getpid():
            left.ownership.release()


_COPIED_BYTES = 256 << 20
_STEP = re.compile(r"(\d+)/*$", re.ASCII)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_logger = logging.getLogger(__name__)


class OutlastWriter(StorageWriter):
    """Saves DCP states as versions of a store.

    One writer may serve many saves; then later versions refer to content that earlier ones hold,
    and `Reduction.chain` stores differences. It needs a copy of this rank's share of the state in
    host memory (two with a chain), which it keeps until `close`.

    The step of a save comes from the ``checkpoint_id`` when that ends in digits, else from `step`
    when it was set since the last save, else it is one more than the last. A step that is not
    larger than the one before begins a new session of the store: nothing is overwritten.

    Works with ``dcp.save`` and ``dcp.async_save`` (both executors). Set `step` and `metrics` only
    while no save is under way.

    Args:
        place: Directory or fsspec URL of the store.
        step: Steps done, at the first save.
        keep: Newest versions kept, or a `Retention`.
        reduction: Codecs, deltas and error bounds; by default everything is exact.

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
    def step(self, step: int) -> None:
        if step < 0:
            raise CheckpointError(f"step = {step} cannot be saved; steps are counted from 0")
        self._step = step
        self._request += 1

    @property
    def checkpoint_id(self) -> str:
        """The store, for DCP's log."""
        return self._place

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the step from a checkpoint_id such as ``step-100``; others are ignored."""
        step = _step_of(checkpoint_id)
        if step is not None:
            self.step = step

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
        except BaseException as error:
            give_up(engine.storage)
            if isinstance(error, OSError):
                raise CheckpointError(f"{self._place}: {sentence_of(error)}") from error
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
        try:
            task = plan.storage_data
            if not isinstance(task, SaveTask):
                raise CheckpointError(
                    "the planner replaced SavePlan.storage_data, which OutlastWriter needs"
                )
            self._task = task
            results = self._engine.write(task, plan.items, planner)
        except BaseException as error:
            if self._is_coordinator:
                give_up(self._engine.storage)
            if isinstance(error, OSError):
                raise CheckpointError(
                    f"the checkpoint in {self._place} failed: {sentence_of(error)}"
                ) from error
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the version: the metadata, then the seal, then delete what is too old."""
        assert self._task is not None
        storage, version = self._engine.storage, self._task.version
        try:
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
            seal(storage, version)
            self._engine.served = (self._identity, self._request)
            with contextlib.suppress(OSError, CheckpointError):
                prune(storage, self._retention)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint in {self._place} failed: {sentence_of(error)}"
            ) from error
        finally:
            give_up(storage)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the text can name a store."""
        return bool(os.fspath(checkpoint_id))

    def storage_meta(self) -> StorageMeta:
        """Return the metadata for planners."""
        return StorageMeta(checkpoint_id=self._place, save_id=self._identity)

    def close(self) -> None:
        """Give the memory back; the next save starts anew, without deltas."""
        self._engine.close()

    def __getstate__(self) -> dict[str, Any]:
        skipped = ("_engine", "_task", "_rank", "_is_coordinator")
        return {name: value for name, value in vars(self).items() if name not in skipped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin(engine_of_copies(self._place, self._reduction))


def _step_of(checkpoint_id: str | os.PathLike[str] | None) -> int | None:
    found = None if checkpoint_id is None else _STEP.search(os.fspath(checkpoint_id))
    return None if found is None else int(found[1])


class OutlastReader(StorageReader):
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
        self._step = step
        self._contents: Contents | None = None
        self._reader: VersionReader | None = None
        self.version: Version | None = None
        self.skipped: list[str] = []
        self.counters = Counters()

    @property
    def checkpoint_id(self) -> str:
        """The store, for DCP's log."""
        return self._storage.location

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the step from a checkpoint_id such as ``step-100``; others are ignored."""
        step = _step_of(checkpoint_id)
        if step is not None:
            self._step = step

    def newest(self) -> Version | None:
        """The version that a load takes; None where no save was completed yet.

        Raises:
            CheckpointError: When there are versions, and none can be used.
        """
        try:
            return newest_contents(self._storage, self._step)[0].version
        except UnfinishedError:
            return None

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        """DCP's metadata of the version to be loaded; raises CheckpointError when there is none.

        No parameter is named ``kwargs``: DCP would take it for an offer to load without agreement
        between the ranks.
        """
        self._contents, metadata, self.skipped = newest_contents(self._storage, self._step)
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
        assert self._reader is not None
        try:
            batch: list[_Filling] = []
            size = 0
            for item in plan.items:
                batch.append(_Filling(item, planner, self._reader))
                size += batch[-1].extra_bytes
                if size > _COPIED_BYTES:
                    self._fill(batch, planner)
                    batch, size = [], 0
            self._fill(batch, planner)
        finally:
            self._close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the text can name a store."""
        return bool(os.fspath(checkpoint_id))

    def _fill(self, batch: list[_Filling], planner: LoadPlanner) -> None:
        assert self._reader is not None
        assert self.version is not None
        try:
            self._reader.read([sample.wanted for sample in batch if sample.wanted.box.elements])
        except CheckpointError as error:
            raise CheckpointError(
                f"step {self.version.step} cannot be loaded: {error}; load an older step with "
                "OutlastReader(..., step=...)"
            ) from None
        for sample in batch:
            sample.finish(planner)

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class _Filling:
    """A read item and the host memory that it is read into: the tensor's own, where possible."""

    def __init__(self, item: ReadItem, planner: LoadPlanner, reader: VersionReader) -> None:
        name = item.storage_index.fqn
        facts = reader.contents.catalogue.tensors[name]
        self._item = item
        self._target: torch.Tensor | None = None
        self._host: torch.Tensor | None = None
        self.extra_bytes = 0
        if item.type == LoadItemType.BYTE_IO:
            self.wanted = Wanted(name, whole(facts.shape), np.empty(facts.shape, np.uint8))
            self.extra_bytes = self.wanted.out.nbytes
            return
        self._target = planner.resolve_tensor(item).detach()
        if self._target.shape != item.lengths:
            raise CheckpointError(
                f"`{name}` gives {list(item.lengths)} elements, but the planner has room for "
                f"{list(self._target.shape)}"
            )
        into = self._target
        if not (
            into.device.type == "cpu"
            and into.dtype == dtype_of(facts)
            and into.element_size() in _INTEGERS
            and not (into.is_conj() or into.is_neg())
        ):
            into = self._host = torch.empty(item.lengths, dtype=dtype_of(facts))
            self.extra_bytes = into.numel() * facts.itemsize
        first = item.storage_index.offset or (0,) * len(facts.shape)
        offset = tuple(a + b for a, b in zip(first, item.storage_offsets, strict=True))
        self.wanted = Wanted(name, Box(offset, tuple(item.lengths)), _array(into))

    def finish(self, planner: LoadPlanner) -> None:
        """Hand over what was read."""
        if self._target is None:
            planner.load_bytes(self._item, io.BytesIO(self.wanted.out.tobytes()))
            return
        if self._host is not None:
            with torch.no_grad():
                self._target.copy_(self._host)
        planner.commit_tensor(self._item, self._target)


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    """The memory of a host tensor, contiguous or not, as an array of opaque elements."""
    itemsize = tensor.element_size()
    if itemsize in _INTEGERS:
        found: NDArray[Any] = tensor.view(_INTEGERS[itemsize]).numpy()
        return found
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat.view(f"V{itemsize}").reshape(tuple(tensor.shape))
