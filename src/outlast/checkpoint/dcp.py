"""The store as a backend of ``torch.distributed.checkpoint``: one argument for DCP code to get it.

dcp.save(state, storage_writer=OutlastWriter("ckpt/", step=100, keep=3))
dcp.load(state, storage_reader=OutlastReader("ckpt/"))

A save writes one version of the store: a part per rank, then ``dcp.json`` with what DCP keeps in
its ``.metadata``, then the seal. Tensors keep their fully qualified names, and are coded where they
lie. With ``background=True`` they are copied first, and the rest goes on after `dcp.save` returned.

Ranks that save without collectives have a store of their own each, ``rank-00003/`` in the place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import logging
import math
import os
import re
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from outlast.checkpoint.dcp_format import (
    DCP_FILE,
    DcpContent,
    decode_object,
    metadata_file,
    metadata_with,
    newest_contents,
    pickled,
    shapes_of_shares,
    unpickled,
)
from outlast.checkpoint.dcp_save import (
    BackgroundSave,
    SaveEngine,
    SaveTask,
    check_held,
    common_versions,
    engine_of_copies,
    facts_of,
    give_up,
    hold,
    joined,
    rank_folders,
)
from outlast.checkpoint.encoder import Reduction
from outlast.checkpoint.reader import Counters, VersionReader, Wanted
from outlast.checkpoint.retention import Retention, prune
from outlast.checkpoint.storage import describe_failure, rank_folder, sentence_of, storage_of
from outlast.checkpoint.version import (
    UnfinishedError,
    Version,
    load,
    seal,
    whole_step,
)
from outlast.distributed.group import StoreAgreement
from outlast.errors import CheckpointError
from outlast.state.box import Box
from outlast.state.live import Filling

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.checkpoint.planner import (
        LoadPlan,
        LoadPlanner,
        ReadItem,
        SavePlan,
        SavePlanner,
    )

    from outlast.checkpoint.version import Contents

T = TypeVar("T")


_COPIED_BYTES = 256 << 20
_STEP = re.compile(r"(\d+)/*$", re.ASCII)
_logger = logging.getLogger(__name__)


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
        """Take the step from a checkpoint_id such as ``step-100``; others are ignored.

        So is the store's own name, whose digits are no step.
        """
        name = "" if checkpoint_id is None else os.fspath(checkpoint_id)
        found = _STEP.search(name)
        if found is not None and os.path.normpath(name) != os.path.normpath(self._place):
            self.step = int(found[1])


class OutlastWriter(_AtStore, StorageWriter):
    """Saves DCP states as versions of a store.

    One writer may serve many saves; then later versions refer to content that earlier ones hold.

    When ``dcp.save`` returns, the version is durable. With ``background=True`` it returns when the
    state is copied: `wait` says how the save ended, a failure is also logged as a warning, and the
    next save waits for the one before. Until it has ended, a load takes the version before, also
    after a crash. The copy of this rank's share of the state takes as much host memory, which the
    writer keeps until `close`. With ``dcp.async_save``, which copies the state itself, leave it
    off: its future then says that the version is durable.

    The step of a save comes from the ``checkpoint_id`` when that ends in digits and is not `place`,
    else from `step` when it was set since the last save, else it is one more than the last. A step
    that is not larger than the one before begins a new session of the store: nothing is
    overwritten.

    Works with ``dcp.save`` and ``dcp.async_save`` (both executors). Set `step` and `metrics` only
    while no save is under way. Ranks that save with ``use_collectives=False`` have a store of their
    own each in the place, ``rank-00003/``, and load what they saved.

    Args:
        place: Directory or fsspec URL of the store.
        step: Steps done, at the first save.
        keep: Newest versions kept, or a `Retention`.
        reduction: Codecs and error bounds; by default everything is exact.
        background: Whether ``dcp.save`` returns when the state is copied.
        allow_pickle: Whether objects are pickled that the store's own formats do not cover, and
            quantised tensors. Else such a state is refused.
        timeout_seconds: Longest wait in the background for another rank.

    Attributes:
        metrics: Figures of the next saves, for `Retention.best`.
        save_id: Tells this writer's versions from those of others, in DCP's `StorageMeta`.

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
        background: bool = False,
        allow_pickle: bool = False,
        timeout_seconds: float = 1800.0,
    ) -> None:
        self._place = os.fspath(place)
        self._background = background
        self._allow_pickle = allow_pickle
        self._timeout_seconds = timeout_seconds
        self._retention = keep if isinstance(keep, Retention) else Retention(keep)
        self._reduction = reduction or Reduction()
        self.metrics: dict[str, float] = {}
        # A copy that DCP pickles must find out whether its request was served by another copy.
        self.save_id = uuid.uuid4().hex
        self._request = 0
        self._step: int | None = None
        if step is not None:
            self.step = step
        self._begin(SaveEngine(self._place, self._reduction))

    def _begin(self, engine: SaveEngine) -> None:
        self._together = self._engine = engine
        self._agreement: StoreAgreement | None = None
        self._agreeing = 0, 1
        self._save: BackgroundSave | None = None
        self._problems: list[str] = []
        self._rank = 0
        self._is_coordinator = False
        self._task: SaveTask | None = None

    @property
    def step(self) -> int | None:
        """The step of the next save, if it was given."""
        return self._step

    @step.setter
    def step(self, step: int | None) -> None:
        self._step = None if step is None else whole_step(step)
        self._request += 1

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn the role; DCP passes the rank only if the last parameter is named ``kwargs``."""
        self._settle()
        alone = not kwargs.get("use_collectives", True)
        self._is_coordinator = is_coordinator or alone
        self._rank = int(kwargs.get("rank") or 0)
        self._task = None
        if alone != self._engine.alone:
            self._engine.close()
            folder = rank_folder(self._rank) if alone else ""
            self._engine = (
                SaveEngine(self._place, self._reduction, folder) if alone else self._together
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Remember the own plan; nothing changes."""
        if plan.usable:
            self._engine.local_plan = plan
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose the version and tell every rank; on the coordinator only."""
        engine = self._engine
        plans = engine.whole_plans(plans)
        tensors = facts_of(plans, allow_pickle=self._allow_pickle)
        hold(engine.storage)
        try:
            engine.check_way()
            version = engine.next_version((self.save_id, self._request), self._step)
        except OSError as error:
            give_up(engine.storage)
            raise CheckpointError(f"{self._place}: {sentence_of(error)}") from error
        except BaseException:
            give_up(engine.storage)
            raise
        own = 0 if engine.alone else self._rank
        task = SaveTask(
            version, 0, len(plans), tensors, dict(self.metrics), self.save_id, uuid.uuid4().hex
        )
        return [
            dataclasses.replace(plan, storage_data=dataclasses.replace(task, rank=rank))
            for rank, plan in enumerate(engine.with_gathered_bytes(plans, own))
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part; it is durable, or with `background` copied, when this returns.

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
            engine = self._engine
            with self._told(task):
                job, staged = engine.part(
                    task, plan.items, planner, allow_pickle=self._allow_pickle
                )
                if self._background:
                    write = engine.stage(job, staged, planner)
            if self._background:
                self._save = BackgroundSave(task, engine.storage, write, self._agreed(task))
            else:
                engine.write(job, staged, planner)
        part_name = task.version.part_name(task.rank, task.world_size)
        return _done(
            [
                WriteResult(
                    index=found.item.index, size_in_bytes=found.size, storage_data=part_name
                )
                for found in staged
            ]
        )

    @contextlib.contextmanager
    def _told(self, task: SaveTask) -> Iterator[None]:
        """Tell the ranks that wait for rank 0 in the background, if it fails in the block."""
        try:
            yield
        except Exception as error:
            if self._background and task.rank == 0:
                self._agreed(task).tell(task.key, describe_failure(error))
            raise

    def _agreed(self, task: SaveTask) -> StoreAgreement:
        ranks = (task.rank, task.world_size)
        if self._agreement is None or ranks != self._agreeing:
            self._agreeing = ranks
            self._agreement = StoreAgreement(
                "outlast-dcp" if task.world_size > 1 else None,
                self._timeout_seconds,
                error=CheckpointError,
                subject="the save",
                ranks=ranks,
            )
        return self._agreement

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the version: the metadata, then the seal, then delete what is too old."""
        assert self._task is not None
        with self._reported(give_up_always=self._save is None):
            written = [result for of_rank in results for result in of_rank]
            missing = set(metadata.state_dict_metadata) - {result.index.fqn for result in written}
            if missing:
                raise CheckpointError(f"`{min(missing)}` was planned, but no rank wrote it")
            # DCP hands on the object that it gave, so it is changed in place.
            metadata.storage_data = {result.index: result.storage_data for result in written}
            metadata.storage_meta = self.storage_meta()
            work = functools.partial(
                self._publish, self._engine, self._task.version, metadata_file(metadata)
            )
            if self._save is not None:
                self._save.publish(work)
            else:
                work()

    def _publish(self, engine: SaveEngine, version: Version, content: bytes) -> None:
        storage = engine.storage
        with storage.create(f"{version.folder}/{DCP_FILE}") as file:
            file.write(content)
        check_held(storage)
        if engine.claim is not None:
            engine.claim.check()
        seal(storage, load(storage, version))
        engine.served = engine.asked
        with contextlib.suppress(OSError, CheckpointError):
            prune(storage, self._retention, protected=engine.protected())

    def _settle(self) -> None:
        """Wait for the save in the background, and note its failure for the next `wait`."""
        save, self._save = self._save, None
        if save is not None and (problem := save.wait()):
            self._problems.append(problem)

    def wait(self) -> None:
        """Wait for the save in the background, if there is one.

        Raises:
            CheckpointError: When it failed, or one before it that nobody has heard of.
        """
        self._settle()
        problems, self._problems = self._problems, []
        if problems:
            raise CheckpointError("; ".join(problems))

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
            if failed and self._save is not None:
                # Its thread gives up the store when it has ended.
                self._save.cancel()
            elif give_up_always or (failed and self._is_coordinator):
                give_up(self._engine.storage)

    def storage_meta(self) -> StorageMeta:
        """Return the metadata for planners."""
        return StorageMeta(checkpoint_id=self._place, save_id=self.save_id)

    def close(self) -> None:
        """Wait for the save in the background and give the memory back; a next save starts anew.

        Raises:
            CheckpointError: As `wait`.
        """
        self._settle()
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None
        self._engine.close()
        self.wait()

    def __getstate__(self) -> dict[str, Any]:
        made = ("_together", "_engine", "_agreement", "_agreeing", "_save", "_problems", "_task")
        return {name: value for name, value in vars(self).items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # Its process does nothing but save.
        self._background = False
        self._begin(engine_of_copies(self._place, self._reduction))


class OutlastReader(_AtStore, StorageReader):
    """Loads DCP states from a store, whoever wrote it and on however many ranks.

    Only the tiles that this rank needs are read, and each is checked. All ranks take the newest
    version that is whole, or that of `step`, or of a ``checkpoint_id`` that ends in digits. Of
    versions that a `CheckpointStore` wrote, the tensors can be loaded under their names there.

    DCP's planner unpickles all objects (``torch.load(weights_only=False)``). What was saved without
    a pickle is pickled by this process for it; of pickles that were saved, those pass that
    ``weights_only=True`` takes, and all with `allow_pickle`: allow it only for what you trust.

    Args:
        place: Directory or fsspec URL of the store.
        step: Load this step instead of the newest.
        allow_pickle: Whether pickles are loaded that could run any code.

    Attributes:
        version: The version that `read_metadata` chose.
        skipped: A sentence for every newer version that is not whole.
        counters: Bytes needed and read by the last load on this rank.
        load_id: Tells this reader from others, in DCP's `StorageMeta`.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        step: int | None = None,
        allow_pickle: bool = False,
    ) -> None:
        self._root = self._storage = storage_of(place)
        self._place = os.fspath(place)
        self.step = step
        self._allow_pickle = allow_pickle
        self.load_id = uuid.uuid4().hex
        self._contents: Contents | None = None
        self._content: DcpContent | None = None
        self._reader: VersionReader | None = None
        self.version: Version | None = None
        self.skipped: list[str] = []
        self.counters = Counters()

    def newest(self) -> Version | None:
        """The version that a load takes; None where no save was completed yet.

        Raises:
            CheckpointError: When there are versions, and none can be used.
        """
        with self._answering():
            if rank_folders(self._root):
                found = common_versions(self._root)
                saved = [name for name in found if self.step in (None, name.step)]
                return saved[-1] if saved else None
            try:
                return newest_contents(self._root, self.step)[0].version
            except UnfinishedError:
                return None

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Say which store it is that the storage fails to list."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self._place} cannot be read: {sentence_of(error)}") from error

    def read_metadata(self, *_args: Any, **kwargs: Any) -> Metadata:
        """DCP's metadata of the version to be loaded.

        DCP asks first for what all ranks saved together, and where there is nothing, with the
        keyword `rank` for what that rank saved without collectives: then the newest version is
        taken that all of them have saved.

        Raises:
            CheckpointError: When there is none.
        """
        rank, among = kwargs.get("rank"), None
        with self._answering():
            folders = rank_folders(self._root)
            self._storage = self._root
            if rank is not None and folders:
                folder = rank_folder(rank)
                if folder not in folders:
                    raise CheckpointError(
                        f"rank {rank} has saved nothing in {self._place}, of which each rank has "
                        "saved its own part (use_collectives=False); load with "
                        f"{len(folders)} ranks"
                    )
                self._storage = storage_of(joined(self._root.location, folder))
                among = common_versions(self._root)
                if not among:
                    raise CheckpointError(f"no step in {self._place} was saved by all its ranks")
            self._contents, self._content, self.skipped = newest_contents(
                self._storage, self.step, among
            )
            metadata = metadata_with(self._storage, self._contents, self._content)
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
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
        """See that all ranks read the same version, and each rank what it saved alone."""
        found = sorted({plan.storage_data for plan in plans})
        if len(found) > 1:
            raise CheckpointError(
                f"the ranks see different newest checkpoints in {self._storage.location}: "
                f"{', '.join(storage_data.folder for storage_data in found)}; load again, or "
                "give a step"
            )
        saved = 0 if self._storage is self._root else len(rank_folders(self._root))
        if saved and len(plans) != saved:
            raise CheckpointError(
                f"{saved} ranks saved in {self._place} without collectives, and {len(plans)} load, "
                f"to which the shares of the others would be missing; load with {saved} ranks"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors.

        Raises:
            CheckpointError: Naming the file and tensor that is damaged.
        """
        try:
            self._check_shares(plan, planner)
            assert self._content is not None
            shares: dict[tuple[str, tuple[int, ...]], str] = {}
            for stored, share in self._content.notes.shares.items():
                shares.setdefault((share.name, share.offset), stored)
            batch: list[tuple[ReadItem, Filling]] = []
            size = 0
            for item in plan.items:
                batch.append((item, self._filling(item, planner, shares)))
                size += batch[-1][1].extra_bytes
                if size > _COPIED_BYTES:
                    self._fill(batch, planner)
                    batch, size = [], 0
            self._fill(batch, planner)
        finally:
            self._close()
        return _done(None)

    def _check_shares(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """See that the shares of this rank hold all of its tensors, since DCP does not."""
        assert self._content is not None
        wanted, found = getattr(planner, "state_dict", {}), Counter[str]()
        for item in plan.items:
            found[item.dest_index.fqn] += math.prod(item.lengths)
        for name, shape in shapes_of_shares(self._content.notes).items():
            if name not in wanted:
                continue
            chunks = _create_chunk_list(wanted[name])
            if found[name] != sum(math.prod(chunk.sizes) for chunk in chunks):
                raise CheckpointError(
                    f"`{name}` of shape {list(shape)} was saved without collectives, and this rank "
                    "has saved another share of it than it loads; load it cut as it was saved"
                )

    def _filling(
        self, item: ReadItem, planner: LoadPlanner, shares: dict[tuple[str, tuple[int, ...]], str]
    ) -> Filling:
        """The planner's memory for an item, or memory for its bytes.

        Args:
            item: To be read.
            planner: Knows where to.
            shares: Name and offset of what was saved as a share, to the name that it is stored by.
        """
        assert self._contents is not None
        assert self._content is not None
        name, notes = item.storage_index.fqn, self._content.notes
        facts = self._contents.catalogue.tensors.get(name)
        if item.type == LoadItemType.BYTE_IO or name in notes.pickled:
            assert facts is not None
            return Filling(name, torch.empty(facts.shape, dtype=torch.uint8), facts)
        target = planner.resolve_tensor(item)
        if target.shape != item.lengths:
            raise CheckpointError(
                f"`{name}` gives {list(item.lengths)} elements, but the planner has room for "
                f"{list(target.shape)}"
            )
        first = tuple(item.storage_index.offset or (0,) * len(item.lengths))
        if (stored := shares.get((name, first))) is not None:
            facts = self._contents.catalogue.tensors[stored]
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
            return Filling(stored, target, facts, box)
        assert facts is not None
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
                planner.load_bytes(item, io.BytesIO(self._planner_bytes(filling)))
            elif self._content is not None and filling.name in self._content.notes.pickled:
                found = unpickled(
                    filling.name, filling.out.tobytes(), allow_pickle=self._allow_pickle
                )
                for dimension, (first, length) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    if length < found.shape[dimension]:
                        found = found.narrow(dimension, first, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(found)
                planner.commit_tensor(item, target)
            else:
                planner.commit_tensor(item, filling.local)

    def _planner_bytes(self, filling: Filling) -> bytes:
        """An object as DCP's planner unpickles it."""
        assert self._content is not None
        content = filling.out.tobytes()
        if filling.name in self._content.notes.plain:
            return pickled(decode_object(filling.name, content))
        if not self._allow_pickle:
            unpickled(filling.name, content, allow_pickle=False)
        return content

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future
