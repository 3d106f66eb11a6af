"""A lane: one stream of saves with its own plan, memory, writer and background thread.

A store has a lane for versions of the state and, where it is asked for, one for replay logs, so
that neither waits for the other.

Training waits only while the live state is copied into an arena. Of late tensors it waits only for
what is not copied when it wants to write to them again. A copy window copies their pieces in the
background from the front, and whoever closes it the rest from the back. What training may have
written to meanwhile is never handed to the writer.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from outlast.checkpoint.encoder import AbandonedError, PartJob, StagedPiece, Written
from outlast.checkpoint.manifest import STATE
from outlast.checkpoint.plan import Holding, Plan, make_plan
from outlast.checkpoint.storage import describe_failure, within
from outlast.checkpoint.writer import Arena, ProcessWriter, ThreadWriter, Writer
from outlast.errors import CheckpointError
from outlast.state.box import aligned
from outlast.state.tensors import is_dense, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from outlast.checkpoint.codec import Bound
    from outlast.checkpoint.encoder import Reduction
    from outlast.checkpoint.plan import Holdings
    from outlast.checkpoint.storage import Storage
    from outlast.checkpoint.version import Version
    from outlast.distributed.group import Group
    from outlast.state.box import Box


_PIECE_BYTES = 4 << 20
_SAMPLE_BYTES = 64
_SAMPLES = 3
_PIECE_SAMPLES = 16
"""Places of a tensor, and of a piece of one, from which bytes are compared."""

_NICE = 5
_SMALL_BYTES = 16 << 10
_GROUP_BYTES = 16 << 20
# Types that torch can put side by side.
_STACKED = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}


class _Piece(NamedTuple):
    """A part of a tensor, and where it goes; of equal shapes and types.

    Attributes:
        target: In host memory.
        source: Memory of the tensor.
        sample: Some of the bytes that it had when the window was opened.
    """

    target: torch.Tensor
    source: torch.Tensor
    sample: list[bytes]

    def lies_still(self) -> bool:
        """Return whether the bytes that are compared are those of the beginning."""
        return _sample(self.source, _PIECE_SAMPLES) == self.sample


class _Late(NamedTuple):
    """A tensor that is copied late.

    Attributes:
        name: Of the tensor.
        source: Its memory.
        seen: Tensors on it, with the versions that they had when the window was opened.
        sample: A few of the bytes that it had then.
    """

    name: str
    source: torch.Tensor
    seen: list[tuple[torch.Tensor, int]]
    sample: list[bytes]


class CopyWindow:
    """The late copies of one save.

    Training may read the tensors but not write to them until `close` has returned. What it does
    write is found by the tensors' version counters, in the thread that closes the window: an
    operation counts a version up only at its end, so another thread could look too early. Of
    tensors in host memory, a few bytes are compared besides with what they were, because writes
    through ``.data`` and by fused optimizers count no versions.

    Args:
        pinned: Whether the copies lie in page-locked memory.
        timeout_seconds: Longest wait for the background thread.
    """

    def __init__(self, *, pinned: bool, timeout_seconds: float) -> None:
        self._pinned = pinned
        self._timeout_seconds = timeout_seconds
        self._late: list[_Late] = []
        self._pieces: deque[_Piece] = deque()
        self._under_way = 0
        self._moved = threading.Condition()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._problem = ""

    def __bool__(self) -> bool:
        return bool(self._late)

    def add(
        self,
        name: str,
        target: torch.Tensor,
        source: torch.Tensor,
        witnesses: Iterable[torch.Tensor],
    ) -> None:
        """Copy `source` to `target` later.

        Args:
            name: Of the tensor, for errors.
            target: In host memory, of the same shape and type.
            source: Memory of the tensor; bytes in a row are copied in pieces.
            witnesses: Tensors whose version counters tell of writes to it.
        """
        if source.is_cuda and source.device not in self._streams:
            # What is queued already comes before the copies.
            stream = torch.cuda.Stream(source.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(source.device))
            self._streams[source.device] = stream
        seen = [(witness, witness._version) for witness in witnesses]
        self._late.append(_Late(name, source, seen, _sample(source, _SAMPLES)))
        if source.is_cuda or not _in_a_row(source):
            self._pieces.append(_Piece(target, source, []))
            return
        for start in range(0, source.numel(), _PIECE_BYTES):
            part = slice(start, start + _PIECE_BYTES)
            sample = _sample(source[part], _PIECE_SAMPLES)
            self._pieces.append(_Piece(target[part], source[part], sample))

    def copy(self) -> None:
        """Copy in the background until nothing is left; in a thread of its own.

        Weights may be exchanged for a while, as those of an average for an evaluation, and be back
        when the window is closed. What is copied meanwhile is copied again then.
        """
        # Let the training go first, where threads have priorities of their own.
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                thread = threading.get_native_id()
                if os.getpriority(os.PRIO_PROCESS, thread) < _NICE:
                    os.setpriority(os.PRIO_PROCESS, thread, _NICE)
        while (piece := self._next(last=False)) is not None:
            with self._accounted(piece):
                still = piece.lies_still()
                if still:
                    self._copy(piece, alone=True)
                    still = piece.lies_still()
                if not still:
                    with self._moved:
                        self._pieces.append(piece)
                    return

    def drop(self) -> None:
        """Copy no more, because the save is given up."""
        with self._moved:
            self._pieces.clear()

    def close(self) -> str:
        """Make the copies that are missing, together with the background thread.

        Returns:
            Why the copies must not be used, or an empty text.
        """
        while (piece := self._next(last=True)) is not None:
            with self._accounted(piece):
                self._copy(piece, alone=False)
        with self._moved:
            if not self._moved.wait_for(lambda: not self._under_way, self._timeout_seconds):
                return (
                    f"a copy in the background was not made within {self._timeout_seconds:g} s "
                    "(timeout_seconds)"
                )
        try:
            for stream in self._streams.values():
                stream.synchronize()
            self._problem = self._problem or self._written()
        except Exception as error:
            self._problem = describe_failure(error)
        # Somebody may keep the save's handle, which must not keep the memory.
        self._late.clear()
        return self._problem

    def _next(self, *, last: bool) -> _Piece | None:
        with self._moved:
            if not self._pieces:
                return None
            self._under_way += 1
            return self._pieces.pop() if last else self._pieces.popleft()

    @contextlib.contextmanager
    def _accounted(self, piece: _Piece) -> Iterator[None]:
        """Note how the copying of `piece` goes, which is then no longer under way."""
        try:
            yield
        except Exception as error:
            self._problem = self._problem or describe_failure(error)
        except BaseException:
            # Interrupted from the keyboard: whoever closes the window again makes this copy.
            with self._moved:
                self._pieces.append(piece)
            raise
        finally:
            with self._moved:
                self._under_way -= 1
                self._moved.notify_all()

    def _copy(self, piece: _Piece, *, alone: bool) -> None:
        target, source = piece.target, piece.source
        if source.is_cuda:
            with torch.no_grad(), torch.cuda.stream(self._streams[source.device]):
                target.copy_(source, non_blocking=self._pinned)
            return
        address = _address(source)
        if alone and _in_a_row(source):
            # Torch would share the work out to all processors, which training needs.
            ctypes.memmove(target.data_ptr(), address, source.numel())
        else:
            with torch.no_grad():
                target.copy_(source)

    def _written(self) -> str:
        """The sentence that names a tensor to which training has written, if there is one."""
        names = [
            late.name
            for late in self._late
            if any(tensor._version != version for tensor, version in late.seen)
            or _sample(late.source, _SAMPLES) != late.sample
        ]
        if not names:
            return ""
        what = f"`{names[0]}` was written before its copy was made"
        if len(names) > 1:
            what = (
                f"`{names[0]}` and {len(names) - 1} other tensors were written before their copies "
                "were made"
            )
        return (
            f"{what}; call copied() of the save's handle before the first write, or do not name "
            "them in late"
        )


def may_be_late(tensor: torch.Tensor) -> bool:
    """Return whether writes to a tensor are counted, and its memory can be copied as it lies."""
    return tensor.device.type in ("cpu", "cuda") and not (
        tensor.is_inference() or tensor.is_conj() or tensor.is_neg() or tensor.numel() == 0
    )


def _in_a_row(source: torch.Tensor) -> bool:
    return source.dtype == torch.uint8 and source.ndim == 1 and source.is_contiguous()


def _address(source: torch.Tensor) -> int:
    """Address of a tensor, unless its memory has been given back meanwhile."""
    if source.untyped_storage().nbytes() == 0:
        raise CheckpointError(
            "the memory of a tensor was given back before its copy was made; do not name tensors "
            "in late that are resized before copied()"
        )
    return source.data_ptr()


def _sample(source: torch.Tensor, count: int) -> list[bytes]:
    """A few bytes of a tensor in host memory, from `count` places that are spread evenly."""
    if source.is_cuda or not _in_a_row(source):
        return []
    size, address = source.numel(), _address(source)
    length = min(size, _SAMPLE_BYTES)
    starts = dict.fromkeys((size - length) * place // (count - 1) for place in range(count))
    return [ctypes.string_at(address + start, length) for start in starts]


@dataclass(frozen=True)
class StagingPlan:
    """Place of every piece in the arena.

    Attributes:
        pieces: Every saved box and its place in an arena.
        copies: Name of a tensor to the byte where its memory goes; of tied tensors one only.
        single: Names of those that are copied one by one.
        groups: Names of small tensors of one shape and type, whose places lie side by side: a call
            for each would cost more than its copy.
        size: Bytes of an arena.
    """

    pieces: list[StagedPiece]
    copies: dict[str, int]
    single: list[str]
    groups: list[list[str]]
    size: int

    def names_at(self) -> dict[int, list[str]]:
        """All names of what is copied to each place."""
        names: dict[int, list[str]] = {}
        for piece in self.pieces:
            names.setdefault(piece.start, []).append(piece.name)
        return names


def plan_staging(
    boxes: dict[str, Box], memory: dict[str, torch.Tensor], lossy: Collection[str] = ()
) -> StagingPlan:
    """Lay the boxes of this rank out in an arena; memory with several names is laid out once.

    Tensors in `lossy` are rounded in the arena, so each of them has a place of its own.
    """
    copies, groups, size = {}, [], 0
    places: dict[tuple[object, ...], str] = {}
    first_names = {}
    alike: dict[object, list[str]] = {}
    for name in boxes:
        tensor = memory[name]
        bytes_ = tensor.numel() * tensor.element_size()
        # Empty tensors all have the same address.
        if bytes_ and name not in lossy:
            first_names[name] = places.setdefault(place_of(tensor), name)
        if first_names.get(name, name) != name:
            continue
        if bytes_ <= _SMALL_BYTES and tensor.dtype in _STACKED:
            key = tensor.dtype, tensor.shape, tensor.device
            group = alike.setdefault(key, [])
            if len(group) * bytes_ >= _GROUP_BYTES:
                group = alike[key] = []
            if not group:
                groups.append(group)
            group.append(name)
        else:
            copies[name] = size
            size += aligned(bytes_)
    single = [*copies]
    for group in groups:
        bytes_ = memory[group[0]].numel() * memory[group[0]].element_size()
        copies.update((name, size + number * bytes_) for number, name in enumerate(group))
        size += aligned(len(group) * bytes_)
    pieces = [
        StagedPiece(name, box, copies[first_names.get(name, name)]) for name, box in boxes.items()
    ]
    return StagingPlan(pieces, copies, single, groups, size)


class StagingMemory:
    """The arena of a store."""

    def __init__(self, size: int, device: torch.device) -> None:
        try:
            self.arena = Arena(size)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{size / 1e9:.1f} GB of host memory to copy the state to cannot be had "
                f"({error}); free some, or shard the model over more ranks"
            ) from None
        self.size = size
        self._bytes = (
            torch.frombuffer(self.arena.memory, dtype=torch.uint8) if size else torch.empty(0)
        )
        self._pinned = size > 0 and device.type == "cuda" and self._pin(device)

    def stage(
        self,
        plan: StagingPlan,
        memory: dict[str, torch.Tensor],
        late: Mapping[str, torch.Tensor],
        timeout_seconds: float,
    ) -> CopyWindow:
        """Copy the tensors of `plan` into the arena.

        Args:
            plan: Where everything goes.
            memory: Name to this rank's part of each tensor.
            late: Name to tensor of those that need not be copied at once; of tied tensors all must
                be there.
            timeout_seconds: Longest wait for copies in the background.

        Returns:
            The copies that are still to be made; all others are made.
        """
        arena = self._bytes
        devices: set[torch.device] = set()
        window = CopyWindow(pinned=self._pinned, timeout_seconds=timeout_seconds)
        names = plan.names_at() if late else {}
        single = [*plan.single]
        for group in plan.groups:
            if late and not late.keys().isdisjoint(group):
                single += group
                continue
            sources = [*map(memory.__getitem__, group)]
            first, start = sources[0], plan.copies[group[0]]
            place = arena[start : start + len(group) * first.numel() * first.element_size()]
            target = place.view(first.dtype).view(len(group), *first.shape)
            if first.device.type == "cpu":
                torch.stack(sources, out=target)
            else:
                target.copy_(torch.stack(sources), non_blocking=self._pinned)
                devices.add(first.device)
        for name in single:
            own, start = memory[name], plan.copies[name]
            if own.numel() == 0:
                continue
            ties = names.get(start, ())
            if ties and may_be_late(own) and all(tie in late for tie in ties):
                witnesses = [own, *(late[tie] for tie in ties)]
                window.add(name, *_copy(own, arena, start), witnesses)
                continue
            target, source = _copy(own.resolve_conj().resolve_neg(), arena, start)
            if source.is_cuda:
                devices.add(source.device)
            target.copy_(source, non_blocking=self._pinned)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return window

    def close(self) -> None:
        """Give the memory back."""
        if self._pinned:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self._bytes.data_ptr())
        self._bytes = torch.empty(0)
        self.arena.close()

    def _pin(self, device: torch.device) -> bool:
        """Page-lock the arena, so that the GPU copies into it directly; False if refused."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            pinned = int(runtime.cudaHostRegister(self._bytes.data_ptr(), self._bytes.numel(), 0))
            if pinned == 0:
                return True
            # The refusal stays noted as CUDA's last error until a launch takes it up; that launch
            # must not be one of the training's.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device).add_(1)
            return False


def _copy(
    source: torch.Tensor, arena: torch.Tensor, start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes at `start` of `arena`, and a tensor to copy there; dense ones as their bytes."""
    target = arena[start : start + source.numel() * source.element_size()]
    if is_dense(source):
        return target, source.reshape(-1).view(torch.uint8)
    return target.view(source.dtype).view(source.shape), source


WriterKind = Literal["process", "thread"]
_REPLACED = "a newer save replaced it"


@dataclass(frozen=True)
class SaveResult:
    """Result of one save.

    Attributes:
        step: The step saved.
        blocked_seconds: How long the caller waited for copies: in `CheckpointStore.save_async`, and
            where tensors were late, in `SaveHandle.copied` or the call that did its work.
        seconds: From the request to the publication.
        bytes: Bytes that this rank wrote, on rank 0 those of all ranks that it can see; 0 when the
            save failed or was not made.
        raw_bytes: Bytes that this rank staged.
        error: Why it failed, or None.
        skipped: Why it was not made or was given up, although nothing failed; else empty.
    """

    step: int
    blocked_seconds: float
    seconds: float
    bytes: int
    raw_bytes: int = 0
    error: str | None = None
    skipped: str = ""


class SaveHandle:
    """A save under way.

    Args:
        future: Of its result.
        copied: Makes the copies that are missing; None where all are made.
        version: What is being written; None where that is not known, or nothing is.

    Attributes:
        version: As given.
        heard: Whether somebody has been told how it ended.
    """

    def __init__(
        self,
        future: Future[SaveResult],
        copied: Callable[[], None] | None = None,
        version: Version | None = None,
    ) -> None:
        self.version = version
        self._future = future
        self._copied = copied
        self.heard = False

    def done(self) -> bool:
        """Return whether the save has ended, well or not; never before all copies are made."""
        return self._future.done()

    def copied(self) -> None:
        """Make the copies that are missing, and let the writing begin.

        To be called, where tensors were late, by the thread that trains and before it writes to the
        first of them: after the backward pass, before the optimizer's step. Where none was late,
        and from the second call on, it does nothing.
        """
        if self._copied is not None:
            self._copied()

    def result(self) -> SaveResult:
        """Wait for the end, of the copies too; a failure is in the result's `error`."""
        self.copied()
        self.heard = True
        return self._future.result()

    def wait(self) -> SaveResult:
        """Wait for the end.

        Raises:
            CheckpointError: When the version was not published.
        """
        result = self.result()
        if result.error is not None:
            raise CheckpointError(result.error)
        return result


@dataclass(frozen=True)
class Save:
    """One save on its way.

    Attributes:
        version: What is saved.
        begun: When the caller asked for it, as `time.perf_counter` says.
        finish: Called in the background with the version and what went wrong on this rank; returns
            what went wrong on any.
        kind: ``state`` or ``replay``.
        requires: Steps that a replay log needs.
        notes: Free JSON for the manifest.
    """

    version: Version
    begun: float
    finish: Callable[[Version, str], str]
    kind: str = STATE
    requires: tuple[int, ...] = ()
    notes: dict[str, Any] | None = None


class _Copies:
    """The late copies of a save, and what comes after them.

    Args:
        window: With the copies that are still to be made.
        blocked_seconds: How long the caller has waited so far.
        write: Called once, with why the copies must not be used or an empty text, and with the
            seconds for which the caller has waited.
    """

    def __init__(
        self, window: CopyWindow, blocked_seconds: float, write: Callable[[str, float], None]
    ) -> None:
        self._window = window
        self._blocked_seconds = blocked_seconds
        self._write: Callable[[str, float], None] | None = write
        self._lock = threading.Lock()

    def close(self) -> None:
        """Make the copies that are missing and begin to write; does nothing when called again."""
        with self._lock:
            if self._write is None:
                return
            begun = time.perf_counter()
            problem = self._window.close()
            write, self._write = self._write, None
            write(problem, self._blocked_seconds + time.perf_counter() - begun)


class Lane:
    """Stages and writes, one save at a time.

    Args:
        storage: Of the store.
        ranks: This process among those that save together.
        holdings: What this process holds.
        reduction: Codecs and error bounds.
        writer: Who codes and writes.
        coordinated: Whether ranks share the work of every new plan.
        check: Called in the background before each write; raises CheckpointError or OSError when
            nothing may be written.
        timeout_seconds: Longest time of a write.
    """

    def __init__(
        self,
        storage: Storage,
        ranks: Group,
        holdings: Holdings,
        *,
        reduction: Reduction,
        writer: WriterKind,
        coordinated: bool,
        check: Callable[[], None],
        timeout_seconds: float,
    ) -> None:
        self._storage = storage
        self._place = storage.location
        self._ranks = ranks
        self.holdings = holdings
        self._reduction = reduction
        self._writer_kind = writer
        self._coordinated = coordinated
        self._check = check
        self._timeout_seconds = timeout_seconds
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._held: Holding | None = None
        self._plan: Plan | None = None
        self._bounds: dict[str, Bound] = {}
        self._staging: StagingPlan | None = None
        self._memory: StagingMemory | None = None
        self._writer: Writer | None = None
        self._abandoned = threading.Event()
        self._window: CopyWindow | None = None
        self._last: SaveHandle | None = None
        self.last_step = -1

    @property
    def busy(self) -> bool:
        """True while a save is under way."""
        return self._last is not None and not self._last.done()

    def copied(self) -> None:
        """Make the late copies of the save under way."""
        if self._last is not None:
            self._last.copied()

    def settle(self) -> str:
        """Wait for the save under way; returns why it failed, if nobody has heard of it."""
        if self._last is None:
            return ""
        was_heard = self._last.heard
        result = self._last.result()
        return "" if was_heard else result.error or ""

    def failed_at(self, step: int) -> bool:
        """Return whether the save before was of `step` and was not published."""
        if self._last is None or step != self.last_step:
            return False
        result = self._last.result()
        return result.error is not None or bool(result.skipped)

    def abandon(self) -> None:
        """Give up the save under way; it is never published."""
        self._abandoned.set()
        if self._window is not None:
            self._window.drop()

    def changed(self, held: Holding) -> bool:
        """Return whether this rank holds something else than when the work was shared out."""
        return held is not self._held and held != self._held

    def forget(self) -> None:
        """Share out the work anew with the next save, because it could not be done."""
        self._held = None

    def sharing(
        self, held: Holding, *, together: bool = True
    ) -> Callable[[], tuple[Plan, dict[str, Bound]]]:
        """Exchange what the ranks hold.

        Args:
            held: By this rank.
            together: Whether all ranks call this; else it plans for itself.

        Returns:
            What makes this rank's plan and the error bounds of its tensors, or raises
            CheckpointError when they cannot be saved.
        """
        alone = self._ranks.size > 1 and not together
        shared = self._ranks.gather(held) if self._ranks.size > 1 and together else [held]
        rank = self._ranks.rank if len(shared) > 1 else 0

        def plan() -> tuple[Plan, dict[str, Bound]]:
            made = make_plan(shared, rank, alone=alone)
            return made, self._reduction.bounds_of(made.catalogue, made.tensors)

        return plan

    def replan(self, held: Holding, memory: dict[str, torch.Tensor]) -> None:
        """Share out the work anew, because what is to be saved has changed.

        Ranks that coordinate all come here together, and all ranks do for their first save.
        """
        together = self._coordinated or self._plan is None
        plan, self._bounds = self.sharing(held, together=together)()
        self._held, self._plan = held, plan
        self._staging = plan_staging(plan.tensors, memory, self._bounds)
        if self._memory is None or self._memory.size < self._staging.size:
            self._grow(self._staging.size, memory)

    def submit(
        self,
        save: Save,
        memory: dict[str, torch.Tensor],
        values: dict[str, Any],
        late: Mapping[str, torch.Tensor],
    ) -> SaveHandle:
        """Copy the tensors and write them in the background.

        Args:
            save: Which.
            memory: Name to tensor, as `plan.holding` gives it.
            values: Name to JSON value.
            late: Name to tensor of those that may be copied while training continues.
        """
        assert self._plan is not None
        assert self._staging is not None
        assert self._memory is not None
        with torch.no_grad():
            window = self._memory.stage(self._staging, memory, late, self._timeout_seconds)
        job = PartJob(
            version=save.version,
            rank=self._ranks.rank,
            world_size=self._ranks.size,
            catalogue=self._plan.catalogue,
            pieces=self._staging.pieces,
            values={name: values[name] for name in self._plan.values},
            bounds=self._bounds,
            kind=save.kind,
            requires=list(save.requires),
            notes=save.notes or {},
            alone=self._ranks.size > 1 and not self._coordinated,
        )
        self.last_step = save.version.step
        self._abandoned = threading.Event()
        run = functools.partial(self._run, job, save, self._abandoned)
        future: Future[SaveResult] = Future()

        def write(problem: str, blocked_seconds: float) -> None:
            def work() -> None:
                try:
                    future.set_result(run(problem, blocked_seconds))
                except BaseException as error:
                    future.set_exception(error)

            self._in_background(work)

        copies = _Copies(window, time.perf_counter() - save.begun, write)
        self._window, self._last = window, SaveHandle(future, copies.close, save.version)
        if window:
            # The executor's thread must not wait for the caller: a program that ends without
            # closing its windows ends all the same, without this version.
            self._in_background(window.copy)
        else:
            copies.close()
        return self._last

    def close(self) -> None:
        """Wait for the save under way and give everything back."""
        self.copied()
        self._executor.shutdown(wait=True)
        if self._writer is not None:
            self._writer.close()
        if self._memory is not None:
            self._memory.close()
        self._writer = self._memory = None

    def _grow(self, size: int, memory: dict[str, torch.Tensor]) -> None:
        writer, old = self._writer, self._memory
        self._writer = self._memory = None
        if writer is not None:
            writer.close()
        if old is not None:
            old.close()
        # Both memories at once might be more than there is.
        del writer, old
        device = next((t.device for t in memory.values() if t.is_cuda), torch.device("cpu"))
        self._memory = StagingMemory(size, device)
        arena = self._memory.arena
        if self._writer_kind == "thread":
            kind: type[ThreadWriter | ProcessWriter] = ThreadWriter
        else:
            kind = ProcessWriter
        self._writer = kind(self._storage.address, self._reduction, arena, self._timeout_seconds)

    def _in_background(self, work: Callable[[], None]) -> None:
        try:
            self._executor.submit(work)
        except RuntimeError:
            # The interpreter is ending and starts no more work in threads.
            work()

    def _run(
        self,
        job: PartJob,
        save: Save,
        abandoned: threading.Event,
        problem: str,
        blocked_seconds: float,
    ) -> SaveResult:
        written = None
        try:
            if abandoned.is_set():
                raise AbandonedError
            if problem:
                raise CheckpointError(problem)
            within(self._timeout_seconds, self._check, self._place)
            assert self._writer is not None
            written = self._writer.write(job, abandoned)
        except AbandonedError:
            problem = _REPLACED
        except Exception as error:
            problem = describe_failure(error)
        problem = save.finish(job.version, problem)
        skipped = ""
        if problem == _REPLACED:
            # Also where this rank had written its part before another gave up.
            problem, skipped = "", _REPLACED
        step = job.version.step
        sentence = f"the checkpoint of step {step} in {self._place} failed: {problem}"
        return SaveResult(
            step,
            blocked_seconds,
            time.perf_counter() - save.begun,
            0 if written is None or problem or skipped else self._stored_bytes(job, written),
            0 if written is None else written.raw_bytes,
            sentence if problem else None,
            skipped,
        )

    def _stored_bytes(self, job: PartJob, written: Written) -> int:
        if job.rank > 0 or job.world_size == 1:
            return written.stored_bytes
        files = functools.partial(self._storage.files, job.version.folder)
        try:
            return sum(within(self._timeout_seconds, files, self._place).values())
        except (OSError, CheckpointError):
            return written.stored_bytes
