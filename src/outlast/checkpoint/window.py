"""A copy window: late tensors are copied while training goes on, until it writes to them again.

The background thread copies pieces from the front, and whoever closes the window the rest from the
back. What training may have written to meanwhile is never handed to the writer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch

from outlast.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PIECE_BYTES = 4 << 20
_SAMPLE_BYTES = 64
_SAMPLES = 3
_PIECE_SAMPLES = 16
"""Places of a tensor, and of a piece of one, from which bytes are compared."""
_NICE = 5


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
        """Whether the bytes that are compared are those of the beginning."""
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
        _give_way()
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
            self._problem = _sentence(error)
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
            self._problem = self._problem or _sentence(error)
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
    """Whether writes to a tensor are counted, and its memory can be copied as it lies."""
    return tensor.device.type in ("cpu", "cuda") and not (
        tensor.is_inference() or tensor.is_conj() or tensor.is_neg() or tensor.numel() == 0
    )


def _in_a_row(source: torch.Tensor) -> bool:
    return source.dtype == torch.uint8 and source.ndim == 1 and source.is_contiguous()


def _address(source: torch.Tensor) -> int:
    """Where a tensor lies, unless its memory has been given back meanwhile."""
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


def _give_way() -> None:
    """Let the training go first, where threads have priorities of their own."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):
        thread = threading.get_native_id()
        if os.getpriority(os.PRIO_PROCESS, thread) < _NICE:
            os.setpriority(os.PRIO_PROCESS, thread, _NICE)


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
