"""Saves of a rank for DCP: its part of a version, also in the background; who owns the store.

`outlast.checkpoint.dcp` has the writer that DCP calls.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401
import contextlib
import dataclasses
import io
import logging
import os
import re
import threading
from concurrent.futures import CancelledError, InvalidStateError
from concurrent.futures import Future as ConcurrentFuture
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType

from outlast.checkpoint.dcp_format import (
    DCP_NOTE,
    SAVE_ID,
    Notes,
    Share,
    encode_object,
    is_quantised,
    pickled,
)
from outlast.checkpoint.encoder import Encoder, PartJob, Reduction, StagedPiece
from outlast.checkpoint.manifest import Catalogue, TensorFacts
from outlast.checkpoint.owner import Claim, Ownership, claimed
from outlast.checkpoint.plan import add_facts
from outlast.checkpoint.storage import LocalStorage, describe_failure, rank_folder, storage_of
from outlast.checkpoint.version import (
    Version,
    is_published,
    list_versions,
)
from outlast.checkpoint.writer import Arena
from outlast.distributed.group import StoreAgreement
from outlast.errors import CheckpointError
from outlast.state.box import Box, aligned, whole
from outlast.state.tensors import is_dense

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.checkpoint.planner import (
        SavePlan,
        SavePlanner,
        WriteItem,
    )

    from outlast.checkpoint.codec import Bytes
    from outlast.checkpoint.storage import Storage


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
        self.storage = storage_of(joined(place, folder)) if folder else self.root
        self.alone = bool(folder)
        self.reduction = reduction
        self.asked = self.served = ("", 0)
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
        """The name of the version to be written.

        Args:
            request: Tells the request for `step` from others; one that was served is none.
            step: What was asked for.
        """
        versions = list_versions(self.storage)
        newest = versions[-1] if versions else Version(0, 0)
        session = max(newest.session, *claimed(self.storage), 0)
        # The next one may be asked for before this one is served in the background.
        self.asked = request
        is_counted = step is None or request == self.served
        if step is None or is_counted:
            step = (self._step if self._session else newest.step) + 1
        if not self._session or session > self._session or step <= self._step:
            begun, claim = max(self._session, session) + 1, None
            if self.alone:
                begun, last_step = _agreed_start(self.root)
                if is_counted and not self._session:
                    # After a kill, some ranks have saved a step that others have not.
                    step = last_step + 1
            if not isinstance(self.storage, LocalStorage):
                # Between two saves, as in a file system, others may save here.
                claim = Claim(self.storage, begun, held=False)
            # Nothing of a session that could not be begun stays for the next save.
            self._session, self.claim = begun, claim
        self._step = step
        return Version(self._session, step)

    def check_way(self) -> None:
        """See that no version was saved here in the other way, with or without collectives.

        Raises:
            CheckpointError: When one was, which a load would prefer, or never find, or when more
                ranks saved here without collectives than there are now.
        """
        taken = list_versions(self.root) if self.alone else rank_folders(self.root)
        if taken:
            one, other = ("with", "without") if self.alone else ("without", "with")
            raise CheckpointError(
                f"{self.root.location} holds what was saved {one} collectives; save {other} them "
                "(use_collectives) to another directory"
            )
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if self.alone and (saved := max(rank_folders(self.root), default="")) >= rank_folder(ranks):
            raise CheckpointError(
                f"{self.root.location} has {saved}, which these {ranks} ranks cannot complete; "
                "save with as many ranks as before, or to another directory"
            )

    def protected(self) -> list[Version]:
        """Versions that stay however old: the last that all ranks without collectives have."""
        return common_versions(self.root)[-1:] if self.alone else []

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
    """The rest of a save after ``dcp.save`` has returned, in a thread of its own.

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
        self.problem = "its thread was ended"
        self._thread = threading.Thread(target=self._run, name="checkpoint")
        if task.rank == 0:
            hand_over(storage, self._thread)
        _under_way.add(self)
        self._thread.start()

    def publish(self, work: Callable[[], None]) -> None:
        """Say, on rank 0, how to publish the version; raises CheckpointError after `cancel`."""
        try:
            self._publish.set_result(work)
        except InvalidStateError:
            raise CheckpointError("the save was given up by a wait for it") from None

    def cancel(self) -> None:
        """Publish nothing, unless `publish` has said how."""
        self._publish.cancel()

    def wait(self) -> str:
        """Wait for the end; returns what went wrong, or an empty text."""
        self.cancel()
        self._thread.join()
        return self.problem

    def end(self) -> None:
        """Wait for the end, where the thread that saved may still be in ``dcp.save``."""
        if self._caller is threading.current_thread():
            self.cancel()
        self._thread.join()

    def _run(self) -> None:
        try:
            problem = _problem_of(self._write)
            if self._task.rank:
                problem = self._agreement.hear(self._task.key, problem)
            else:
                problem = self._published(problem)
                self._agreement.tell(self._task.key, problem)
                if not problem:
                    # This process may host their store: if it ended, they would hear of a failure.
                    self._agreement.close()
        except Exception as error:
            problem = describe_failure(error)
        finally:
            _under_way.discard(self)
            if self._task.rank == 0:
                give_up(self._storage)
        self.problem = ""
        if problem:
            self.problem = (
                f"the checkpoint of step {self._task.version.step} in {self._storage.location} "
                f"failed: {problem}"
            )
            _logger.warning("%s", self.problem)

    def _published(self, problem: str) -> str:
        """Publish when all ranks have written; returns what went wrong on any."""
        work, is_waited_for = None, True
        while work is None and is_waited_for:
            # A save that fails on another rank gets no further than this.
            is_waited_for = self._caller.is_alive() and not self._publish.cancelled()
            with contextlib.suppress(TimeoutError, CancelledError):
                work = self._publish.result(_PAUSE_SECONDS)
        if work is None:
            # The rank that failed has not begun to write, and will never report.
            return problem or "dcp.save did not come to its end on all ranks"
        found = self._agreement.gather(self._task.key, problem)
        problem = next((name for name in found if name), "")
        return problem or _problem_of(work)


_under_way: set[BackgroundSave] = set()


def _end_saves() -> None:
    for save in [*_under_way]:
        save.end()


# Clients of object stores give work to thread pools, which refuse it when Python begins to end.
# What is registered last is called first, so the module of the pools must have been imported.
threading._register_atexit(_end_saves)  # type: ignore[attr-defined]


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
    if (
        not isinstance(tensor, torch.Tensor)
        or tensor.layout != torch.strided
        or tensor.device.type == "meta"
    ):
        raise CheckpointError(f"`{name}` cannot be saved: only dense tensors with memory can")
    tensor = tensor.detach()
    announced = (data.properties.dtype, tuple(data.chunk.sizes))
    if (tensor.dtype, tuple(tensor.shape)) != announced:
        raise CheckpointError(
            f"`{name}` is {_name_of(tensor.dtype)}{list(tensor.shape)}, but the planner announced "
            f"{_name_of(announced[0])}{list(announced[1])}; a planner that caches plans "
            "(enable_plan_caching) does not notice such a change"
        )
    if type(tensor) is torch.Tensor and tensor.numel() and not tensor.untyped_storage().nbytes():
        # To copy it would end the process.
        raise CheckpointError(f"the memory of `{name}` was given back before it was saved")
    return tensor


def _memory_of(tensor: torch.Tensor, *, copied: bool) -> Bytes:
    """The (bytes,) of a tensor, row-major: its own memory where it lies so, else a copy."""
    own = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and is_dense(tensor)
    if copied or not own or tensor.is_conj() or tensor.is_neg():
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    found: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return found


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def joined(place: str, folder: str) -> str:
    """The path or URL of a folder in a place."""
    return f"{place.rstrip('/')}/{folder}"


def rank_folders(root: Storage) -> list[str]:
    """The stores of ranks that saved without collectives."""
    return [name for name in root.folders() if _RANK.fullmatch(name)]


def common_versions(root: Storage) -> list[Version]:
    """Versions, from old to new, that all ranks have saved that saved without collectives."""
    found: set[Version] | None = None
    for folder in rank_folders(root):
        storage = storage_of(joined(root.location, folder))
        own = {name for name in list_versions(storage) if is_published(storage, name)}
        found = own if found is None else found & own
    return sorted(found or ())


_sessions_begun: dict[str, int] = {}


def _agreed_start(root: Storage) -> tuple[int, int]:
    """A session newer than all there, and the newest step there.

    Both are the same on all ranks that begin one for the same time. No rank waits for another: the
    first one says which, through the process group's own store.
    """
    newest, sessions = Version(0, 0), [0]
    for folder in rank_folders(root):
        storage = storage_of(joined(root.location, folder))
        newest = max([newest, *list_versions(storage)])
        sessions += claimed(storage)
    start = f"{max(newest.session, *sessions) + 1} {newest.step}"
    count = _sessions_begun[_key(root)] = _sessions_begun.get(_key(root), 0) + 1
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        key = f"outlast-dcp/{root.location}/{count}"
        start = store.compare_set(key, "", start).decode()
    session, step = map(int, start.split())
    return session, step


_PAUSE_SECONDS = 0.05
_RANK = re.compile(r"rank-\d{5,7}", re.ASCII)
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
