"""What a DCP writer keeps between saves: the staged bytes, the encoder, the session, the lock."""

from __future__ import annotations

import dataclasses
import fnmatch
import io
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from outlast.checkpoint.arena import Arena
from outlast.checkpoint.dcp.content import DCP_NOTE, StoredItem
from outlast.checkpoint.format.encoder import Encoder
from outlast.checkpoint.format.job import PartJob, Reduction, StagedPiece
from outlast.checkpoint.format.manifest import Catalogue, TensorFacts
from outlast.checkpoint.format.owner import Claim, claimed, own
from outlast.checkpoint.format.storage import LocalStorage, storage_of
from outlast.checkpoint.format.version import Version, list_versions
from outlast.checkpoint.plan import add_facts
from outlast.errors import CheckpointError
from outlast.records import OwnerLock
from outlast.state.alignment import aligned
from outlast.state.box import Box, whole

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

    from outlast.checkpoint.format.lossy import Bound
    from outlast.checkpoint.format.storage import Storage


@dataclass(frozen=True)
class Task:
    """What the coordinator tells a rank, in `SavePlan.storage_data`."""

    version: Version
    rank: int
    world_size: int
    tensors: dict[str, TensorFacts]
    metrics: dict[str, float]

    @property
    def part_name(self) -> str:
        """File of the rank's part."""
        return self.version.part_name(self.rank, self.world_size)


class Engine:
    """What a writer keeps from one save to the next."""

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

    def write(self, task: Task, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
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


_copies: dict[str, Engine] = {}


def engine_of_copies(place: str, reduction: Reduction) -> Engine:
    """The engine of all unpickled writers of a place in this process.

    DCP's process executor pickles the writer at every save; its copies go on where the last one
    stopped.
    """
    if place not in _copies or _copies[place].reduction != reduction:
        if place in _copies:
            _copies[place].close()
        _copies[place] = Engine(place, reduction)
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
    lock: OwnerLock
    process: int
    thread: threading.Thread


_held: dict[str, _Hold] = {}


def hold(storage: Storage) -> None:
    """Own the store until `_give_up`.

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
    _held[key] = _Hold(own(storage), os.getpid(), threading.current_thread())


def check_held(storage: Storage) -> None:
    """Raise LeaseLostError where another process has taken over the store that this one owns."""
    if isinstance(storage, LocalStorage):
        held = _held.get(str(storage.root.absolute()))
        if held is not None and held.process == os.getpid():
            held.lock.check()


def give_up(storage: Storage) -> None:
    """Own the store no longer, if this process does."""
    if isinstance(storage, LocalStorage):
        left = _held.pop(str(storage.root.absolute()), None)
        if left is not None and left.process == os.getpid():
            left.lock.release()
