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
import os
import re
import threading
import uuid
from concurrent.futures import CancelledError
from concurrent.futures import Future as ConcurrentFuture
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from outlast.checkpoint.dcp_format import (
    DCP_FILE,
    DCP_NOTE,
    SAVE_ID,
    DcpContent,
    Notes,
    Share,
    decode_object,
    encode_object,
    is_quantised,
    metadata_file,
    metadata_with,
    newest_contents,
    pickled,
    unpickled,
)
from outlast.checkpoint.encoder import Encoder, PartJob, Reduction, StagedPiece
from outlast.checkpoint.manifest import Catalogue, TensorFacts
from outlast.checkpoint.owner import Claim, Ownership, claimed
from outlast.checkpoint.plan import add_facts
from outlast.checkpoint.reader import Counters, VersionReader, Wanted
from outlast.checkpoint.storage import LocalStorage, describe_failure, sentence_of, storage_of
from outlast.checkpoint.version import (
    Retention,
    UnfinishedError,
    Version,
    is_published,
    list_versions,
    load,
    prune,
    seal,
)
from outlast.checkpoint.writer import Arena
from outlast.distributed.group import StoreAgreement
from outlast.errors import CheckpointError
from outlast.state.box import Box, aligned, whole
from outlast.state.live import Filling
from outlast.state.tensors import is_dense

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.checkpoint.planner import (
        LoadPlan,
        LoadPlanner,
        ReadItem,
        SavePlan,
        SavePlanner,
        WriteItem,
    )

    from outlast.checkpoint.codec import Bytes
    from outlast.checkpoint.storage import Storage
    from outlast.checkpoint.version import Contents

T = TypeVar("T")


@dataclass(frozen=True)
class SaveTask:
    """The coordinator's message to a rank, in `SavePlan.storage_data`.

    Attributes:
        version: Of the save.
        rank: Who writes the part.
        world_size: How many write.
        tensors: Facts of all tensors of all ranks.
        metrics: Figures of the version.
        save_id: Of the coordinator's writer.
        key: Tells this save from others, where ranks must agree on how it ended.
    """

    version: Version
    rank: int
    world_size: int
    tensors: dict[str, TensorFacts]
    metrics: dict[str, float]
    save_id: str
    key: str


class _Staged(NamedTuple):
    """An item to write; `content` is that of an object, None of a tensor, which is asked for."""

    item: WriteItem
    piece: StagedPiece
    size: int
    content: Bytes | None


class SaveEngine:
    """State of a writer from one save to the next.

    Args:
        place: Directory or URL of the store.
        reduction: Codecs and error bounds.
        folder: Of one rank that saves without collectives; empty where all save together.
    """

    def __init__(self, place: str, reduction: Reduction, folder: str = "") -> None:
        self.root = storage_of(place)
        self.storage = storage_of(_joined(place, folder)) if folder else self.root
        self.alone = bool(folder)
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
            if self.alone:
                self._session = _agreed_session(self.root)
            if not isinstance(self.storage, LocalStorage):
                # Between two saves, as in a file system, others may save here.
                self.claim = Claim(self.storage, self._session, held=False)
        self._step = step
        return Version(self._session, step)

    def check_way(self) -> None:
        """See that no version was saved here in the other way, with or without collectives.

        Raises:
            CheckpointError: When one was, which a load would prefer, or never find.
        """
        taken = list_versions(self.root) if self.alone else rank_folders(self.root)
        if taken:
            one, other = ("with", "without") if self.alone else ("without", "with")
            raise CheckpointError(
                f"{self.root.location} holds what was saved {one} collectives; save {other} them "
                "(use_collectives) to another directory"
            )

    def prune(self, retention: Retention) -> None:
        """Delete what is too old; what all ranks have saved last stays."""
        protected = common_versions(self.root)[-1:] if self.alone else []
        with contextlib.suppress(OSError, CheckpointError):
            prune(self.storage, retention, protected=protected)

    def part(
        self, task: SaveTask, items: list[WriteItem], planner: SavePlanner, *, allow_pickle: bool
    ) -> tuple[PartJob, list[_Staged]]:
        """The part of this rank, and where its content comes from.

        Raises:
            CheckpointError: When an object needs a pickle, which is not allowed.
        """
        tensors, names = dict(task.tensors), dict[str, str]()
        notes, staged, total = Notes(), list[_Staged](), 0
        for item in items:
            name, content = item.index.fqn, None
            data = item.tensor_data
            if data is None:
                content, is_plain = _object_bytes(item, planner, allow_pickle=allow_pickle)
                notes.plain += [name] if is_plain else []
            elif is_quantised(data.properties.dtype):
                content = _bytes_of(pickled(planner.resolve_data(item)))
                notes.pickled[name] = _name_of(data.properties.dtype), tuple(data.size)
            if content is not None:
                tensors[name] = TensorFacts.of("uint8", (content.size,))
                box = whole(tensors[name].shape)
            else:
                assert data is not None
                box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
                stored = name
                if self.alone and box != whole(tuple(data.size)):
                    stored = f"{name}{[*box.offset]}"
                    notes.shares[stored] = Share(name, tuple(data.size), box.offset)
                    tensors[stored] = TensorFacts.of(_name_of(data.properties.dtype), box.shape)
                    tensors.pop(name, None)
                    box = whole(box.shape)
                names[stored], name = name, stored
            size = box.elements * tensors[name].itemsize
            staged.append(_Staged(item, StagedPiece(name, box, total), size, content))
            total += aligned(size)
        bounds = self.reduction.bounds_of(Catalogue(task.tensors), {*names.values()})
        job = PartJob(
            version=task.version,
            rank=task.rank,
            world_size=task.world_size,
            catalogue=Catalogue(tensors),
            pieces=[found.piece for found in staged if found.size],
            bounds={stored: bounds[name] for stored, name in names.items() if name in bounds},
            notes={
                "metrics": task.metrics,
                "torch": str(torch.__version__),
                SAVE_ID: task.save_id,
                **DCP_NOTE,
                **notes.to_json(),
            },
        )
        return job, staged

    def write(self, job: PartJob, staged: list[_Staged], planner: SavePlanner) -> None:
        """Write the part of this rank from where its tensors lie."""

        def contents() -> Iterator[Bytes]:
            for item, piece, size, content in staged:
                if not size:
                    continue
                if content is None:
                    tensor = _resolved(item, planner)
                    content = _memory_of(tensor, copied=piece.name in job.bounds)  # noqa: PLW2901
                yield content

        if self._encoder is None:
            self._encoder = Encoder(self.storage, self.reduction)
        # DCP has no way to give up a save.
        self._encoder.write(job, lambda: None, contents())

    def stage(
        self, job: PartJob, staged: list[_Staged], planner: SavePlanner
    ) -> Callable[[], None]:
        """Copy the part of this rank; returns what writes it, from the copies."""
        encoder, arena = self._room(sum(aligned(found.size) for found in staged))
        memory = torch.frombuffer(arena, dtype=torch.uint8)
        for item, piece, size, content in staged:
            target = memory[piece.start : piece.start + size]
            if size and content is not None:
                target.numpy()[:] = content
            elif size:
                tensor = _resolved(item, planner)
                target.view(tensor.dtype).view(tensor.shape).copy_(tensor)

        def write() -> None:
            encoder.write(job, lambda: None)

        return write

    def close(self) -> None:
        """Give the memory back."""
        self._encoder = self._arena = None

    def _room(self, size: int) -> tuple[Encoder, memoryview]:
        """The arena, made anew where it is too small, and what writes from it."""
        if self._arena is None or self._encoder is None or self._arena.size < size:
            self.close()
            self._arena = Arena(aligned(max(size, 1)))
            # No other process needs the descriptor; the memory goes with its last user.
            self._arena.detach()
            self._encoder = Encoder(self.storage, self.reduction, self._arena.memory)
        return self._encoder, self._arena.memory


class BackgroundSave:
    """What of a save goes on after ``dcp.save`` has returned, in a thread of its own.

    The program does not end before it has: the thread is no daemon.

    Args:
        task: Which save.
        storage: Where to.
        write: Writes the part of this rank.
        agreement: Of the ranks; rank 0 publishes the version when all have written.
    """

    def __init__(
        self,
        task: SaveTask,
        storage: Storage,
        write: Callable[[], None],
        agreement: StoreAgreement,
    ) -> None:
        self._task = task
        self._storage = storage
        self._write = write
        self._agreement = agreement
        self._publish: ConcurrentFuture[Callable[[], None]] = ConcurrentFuture()
        self._caller = threading.current_thread()
        self.problem = ""
        self._thread = threading.Thread(target=self._run, name="checkpoint")
        if task.rank == 0:
            hand_over(storage, self._thread)
        self._thread.start()

    def publish(self, work: Callable[[], None]) -> None:
        """Say, on rank 0, how to publish the version."""
        self._publish.set_result(work)

    def wait(self) -> str:
        """Wait for the end; returns what went wrong, or an empty text."""
        self._publish.cancel()
        self._thread.join()
        return self.problem

    def _run(self) -> None:
        try:
            problem = _problem_of(self._write)
            if self._task.rank:
                problem = self._agreement.hear(self._task.key, problem)
            else:
                problem = self._published(problem)
                self._agreement.tell(self._task.key, problem)
        except Exception as error:
            problem = describe_failure(error)
        finally:
            if self._task.rank == 0:
                give_up(self._storage)
        if problem:
            self.problem = (
                f"the checkpoint of step {self._task.version.step} in {self._storage.location} "
                f"failed: {problem}"
            )
            _logger.warning("%s", self.problem)

    def _published(self, problem: str) -> str:
        """Publish when all ranks have written; returns what went wrong on any."""
        work = None
        while work is None and not self._publish.cancelled():
            with contextlib.suppress(TimeoutError, CancelledError):
                work = self._publish.result(_PAUSE_SECONDS)
            # A save that fails on another rank gets no further than this.
            if work is None and not self._caller.is_alive():
                break
        if work is None:
            problem = problem or "dcp.save did not come to its end on all ranks"
        found = self._agreement.gather(self._task.key, problem)
        problem = next((name for name in found if name), "")
        return problem or _problem_of(work or (lambda: None))


def _problem_of(work: Callable[[], None]) -> str:
    try:
        work()
    except Exception as error:
        return describe_failure(error)
    return ""


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


def facts_of(plans: list[SavePlan], *, allow_pickle: bool) -> dict[str, TensorFacts]:
    """All tensors of all ranks that are stored as their elements.

    Raises:
        CheckpointError: When the ranks disagree about one, or one needs a pickle, which is not
            allowed or cannot be because it is cut.
    """
    tensors: dict[str, TensorFacts] = {}
    for item in (item for plan in plans for item in plan.items):
        if item.tensor_data is None:
            continue
        name, data = item.index.fqn, item.tensor_data
        if is_quantised(data.properties.dtype):
            if not allow_pickle:
                raise CheckpointError(
                    f"`{name}` is quantised, which only a pickle can hold; give "
                    "OutlastWriter(..., allow_pickle=True), or save its int_repr(), scale and zero "
                    "point"
                )
            if tuple(data.chunk.sizes) != tuple(data.size):
                raise CheckpointError(f"`{name}` is quantised and cut, which cannot be saved")
            continue
        add_facts(tensors, name, _name_of(data.properties.dtype), tuple(data.size), where="another")
    return tensors


def _object_bytes(
    item: WriteItem, planner: SavePlanner, *, allow_pickle: bool
) -> tuple[Bytes, bool]:
    """An object's bytes, and whether they are no pickle.

    Of a planner that makes bytes in its own way, what ``torch.load(weights_only=True)`` reads.
    """
    name, made = item.index.fqn, None
    if isinstance(planner, DefaultSavePlanner) and all(
        getattr(type(planner), method) is getattr(DefaultSavePlanner, method)
        for method in ("resolve_data", "transform_object")
    ):
        value = planner.lookup_object(item.index)
    else:
        made = planner.resolve_data(item)
        if not isinstance(made, io.BytesIO):
            raise CheckpointError(
                f"the planner gave a {type(made).__name__} where it had announced bytes"
            )
        try:
            value = torch.load(io.BytesIO(made.getbuffer()), weights_only=True)
        except Exception:
            value = made
    try:
        return _bytes_of(encode_object(name, value)), True
    except CheckpointError as error:
        if not allow_pickle:
            raise CheckpointError(
                f"{error}, or OutlastWriter(..., allow_pickle=True) to let DCP pickle it"
            ) from None
    found = planner.resolve_data(item) if made is None else made
    assert isinstance(found, io.BytesIO)
    return _bytes_of(found.getbuffer()), False


def _bytes_of(content: bytes | memoryview) -> Bytes:
    return np.frombuffer(content, np.uint8)


def _resolved(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    """An item's tensor, once it is what was announced."""
    name, data = item.index.fqn, item.tensor_data
    assert data is not None
    tensor = planner.resolve_data(item)
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
    return tensor


def _memory_of(tensor: torch.Tensor, *, copied: bool) -> Bytes:
    """The (bytes,) of a tensor, row-major: its own memory where it lies so, else a copy."""
    own = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and is_dense(tensor)
    if copied or not own or tensor.is_conj() or tensor.is_neg():
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    elif tensor.untyped_storage().nbytes() == 0:
        raise CheckpointError("a tensor's memory was given back before it was saved")
    found: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return found


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _joined(place: str, folder: str) -> str:
    return f"{place.rstrip('/')}/{folder}"


def rank_folder(rank: int) -> str:
    """Name of the store of a rank that saves without collectives."""
    return f"rank-{rank:05d}"


def rank_folders(root: Storage) -> list[str]:
    """The stores of ranks that saved without collectives."""
    return [name for name in root.folders() if _RANK.fullmatch(name)]


def common_versions(root: Storage) -> list[Version]:
    """Versions, from old to new, that all ranks have saved that saved without collectives."""
    found: set[Version] | None = None
    for folder in rank_folders(root):
        storage = storage_of(_joined(root.location, folder))
        own = {name for name in list_versions(storage) if is_published(storage, name)}
        found = own if found is None else found & own
    return sorted(found or ())


_sessions_begun: dict[str, int] = {}


def _agreed_session(root: Storage) -> int:
    """A session newer than all there, the same on all ranks that begin one for the same time.

    No rank waits for another: the first one says which, through the process group's own store.
    """
    sessions = [0]
    for folder in rank_folders(root):
        storage = storage_of(_joined(root.location, folder))
        sessions += [version.session for version in list_versions(storage)]
        sessions += claimed(storage)
    session = max(sessions) + 1
    count = _sessions_begun[_key(root)] = _sessions_begun.get(_key(root), 0) + 1
    if not dist.is_initialized():
        return session
    store = dist.distributed_c10d._get_default_store()
    key = f"outlast-dcp/{root.location}/{count}"
    return int(store.compare_set(key, "", str(session)))


_COPIED_BYTES = 256 << 20
_PAUSE_SECONDS = 0.05
_RANK = re.compile(r"rank-\d{5,7}", re.ASCII)
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


def hand_over(storage: Storage, thread: threading.Thread) -> None:
    """Let another thread own the store, if this process does."""
    ownership, process, _ = _held.get(_key(storage), (None, 0, None))
    if ownership is not None and process == os.getpid():
        _held[_key(storage)] = ownership, process, thread


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

    When ``dcp.save`` returns, the version is durable. With ``background=True`` it returns when the
    state is copied: `wait` says how the save ended, a failure is also logged as a warning, and the
    next save waits for the one before. Until it has ended, a load takes the version before, also
    after a crash. The copy of this rank's share of the state takes as much host memory, which the
    writer keeps until `close`. With ``dcp.async_save``, which copies the state itself, leave it
    off: its future then says that the version is durable.

    The step of a save comes from the ``checkpoint_id`` when that ends in digits, else from `step`
    when it was set since the last save, else it is one more than the last. A step that is not
    larger than the one before begins a new session of the store: nothing is overwritten.

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
        if step is not None and step < 0:
            raise CheckpointError(f"step = {step} cannot be saved; steps are counted from 0")
        self._step = step
        self._request += 1

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn the role; DCP passes the rank only if the last parameter is named ``kwargs``."""
        self._settle()
        self._is_coordinator = is_coordinator
        self._rank = int(kwargs.get("rank") or 0)
        self._task = None
        alone = not kwargs.get("use_collectives", True)
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
            job, staged = engine.part(task, plan.items, planner, allow_pickle=self._allow_pickle)
            if self._background:
                write = engine.stage(job, staged, planner)
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

    def _agreed(self, task: SaveTask) -> StoreAgreement:
        if self._agreement is None:
            ranks = (task.rank, task.world_size)
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
        engine.served = (self.save_id, self._request)
        engine.prune(self._retention)

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
            if give_up_always or (failed and self._is_coordinator):
                give_up(self._engine.storage)

    def storage_meta(self) -> StorageMeta:
        """Return the metadata for planners."""
        return StorageMeta(checkpoint_id=self._place, save_id=self.save_id)

    def close(self) -> None:
        """Wait for the save in the background and give the memory back; a next save starts anew."""
        self._settle()
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None
        self._engine.close()

    def __getstate__(self) -> dict[str, Any]:
        made = ("_together", "_engine", "_agreement", "_save", "_problems", "_task")
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
        if rank_folders(self._root):
            saved = [name for name in common_versions(self._root) if self.step in (None, name.step)]
            return saved[-1] if saved else None
        try:
            return newest_contents(self._root, self.step)[0].version
        except UnfinishedError:
            return None

    def read_metadata(self, *_args: Any, **kwargs: Any) -> Metadata:
        """DCP's metadata of the version to be loaded.

        DCP asks first for what all ranks saved together, and where there is nothing, with the
        keyword `rank` for what that rank saved without collectives: then the newest version is
        taken that all of them have saved.

        Raises:
            CheckpointError: When there is none.
        """
        rank, among = kwargs.get("rank"), None
        folders = rank_folders(self._root)
        self._storage = self._root
        if rank is not None and folders:
            folder = rank_folder(rank)
            if folder not in folders:
                raise CheckpointError(
                    f"rank {rank} has saved nothing in {self._place}, of which each rank has saved "
                    f"its own part (use_collectives=False); load with {len(folders)} ranks"
                )
            self._storage = storage_of(_joined(self._root.location, folder))
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
        for stored, share in notes.shares.items():
            if (share.name, share.offset) == (name, first):
                facts = self._contents.catalogue.tensors[stored]
                return Filling(
                    stored, target, facts, Box(tuple(item.storage_offsets), tuple(item.lengths))
                )
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
