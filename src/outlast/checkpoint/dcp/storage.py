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
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from outlast.checkpoint.dcp.content import DCP_FILE, metadata_file, newest_contents
from outlast.checkpoint.dcp.engine import (
    Engine,
    Task,
    check_held,
    engine_of_copies,
    facts_of,
    give_up,
    hold,
)
from outlast.checkpoint.format.job import Reduction
from outlast.checkpoint.format.reader import Counters, VersionReader, Wanted
from outlast.checkpoint.format.retention import Retention, prune
from outlast.checkpoint.format.storage import sentence_of, storage_of
from outlast.checkpoint.format.version import UnfinishedError, Version, seal
from outlast.errors import CheckpointError
from outlast.state.box import Box, whole
from outlast.state.tensors import dtype_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.distributed.checkpoint.planner import (
        LoadPlan,
        LoadPlanner,
        ReadItem,
        SavePlan,
        SavePlanner,
    )

    from outlast.checkpoint.format.version import Contents

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
        self._begin(Engine(self._place, self._reduction))

    def _begin(self, engine: Engine) -> None:
        self._engine = engine
        self._rank = 0
        self._is_coordinator = False
        self._task: Task | None = None

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
                plan, storage_data=Task(version, rank, len(plans), tensors, dict(self.metrics))
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
            if not isinstance(task, Task):
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
        """Whether the text can name a store."""
        return bool(os.fspath(checkpoint_id))

    def storage_meta(self) -> StorageMeta:
        """What planners are told."""
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
        """Whether the text can name a store."""
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
        if not _is_plain(into, dtype_of(facts)):
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


def _is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the memory of `tensor` can be written to as it was stored."""
    return (
        tensor.device.type == "cpu"
        and tensor.dtype == dtype
        and tensor.element_size() in _INTEGERS
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    """The memory of a host tensor, contiguous or not, as an array of opaque elements."""
    itemsize = tensor.element_size()
    if itemsize in _INTEGERS:
        found: NDArray[Any] = tensor.view(_INTEGERS[itemsize]).numpy()
        return found
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat.view(f"V{itemsize}").reshape(tuple(tensor.shape))
