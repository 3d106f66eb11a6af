"""Copying the live state into an arena: the only part of a save that training waits for.

Of late tensors it waits only for what is not copied when it wants to write to them again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outlast.checkpoint.arena import Arena
from outlast.checkpoint.format.job import StagedPiece
from outlast.checkpoint.window import CopyWindow, may_be_late
from outlast.errors import CheckpointError
from outlast.state.alignment import aligned
from outlast.state.tensors import is_dense, place_of

if TYPE_CHECKING:
    from outlast.state.box import Box


@dataclass(frozen=True)
class StagingPlan:
    """Where everything goes.

    Attributes:
        pieces: Every saved box and its place in an arena.
        copies: Name of a tensor to the byte where its memory goes; of tied tensors one only.
        size: Bytes of an arena.
    """

    pieces: list[StagedPiece]
    copies: dict[str, int]
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
    pieces, copies, size = [], {}, 0
    places: dict[tuple[object, ...], int] = {}
    for name, box in boxes.items():
        tensor = memory[name]
        same = place_of(tensor)
        # Empty tensors all have the same address.
        if tensor.numel() == 0 or same not in places or name in lossy:
            start = size
            if name not in lossy:
                places[same] = start
            copies[name] = start
            size += aligned(tensor.numel() * tensor.element_size())
        else:
            start = places[same]
        pieces.append(StagedPiece(name, box, start))
    return StagingPlan(pieces, copies, size)


class StagingMemory:
    """The arenas of a store: one, or two that take turns when deltas need the state before."""

    def __init__(self, size: int, count: int, device: torch.device) -> None:
        try:
            self.arenas = [Arena(size) for _ in range(count)]
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{count * size / 1e9:.1f} GB of host memory to copy the state to cannot be had "
                f"({error}); free some, shard the model over more ranks, or save without deltas"
            ) from None
        self.size = size
        self._bytes = [
            torch.frombuffer(arena.memory, dtype=torch.uint8) if size else torch.empty(0)
            for arena in self.arenas
        ]
        self._pinned = size > 0 and device.type == "cuda" and self._pin(device)

    def stage(
        self,
        number: int,
        plan: StagingPlan,
        memory: dict[str, torch.Tensor],
        late: Mapping[str, torch.Tensor],
        timeout_seconds: float,
    ) -> CopyWindow:
        """Copy the tensors of `plan` into arena `number`.

        Args:
            number: Which arena.
            plan: Where everything goes.
            memory: Name to this rank's part of each tensor.
            late: Name to tensor of those that need not be copied at once; of tied tensors all must
                be there.
            timeout_seconds: Longest wait for copies in the background.

        Returns:
            The copies that are still to be made; all others are made.
        """
        arena = self._bytes[number]
        devices: set[torch.device] = set()
        window = CopyWindow(pinned=self._pinned, timeout_seconds=timeout_seconds)
        names = plan.names_at()
        for name, start in plan.copies.items():
            own = memory[name]
            if own.numel() == 0:
                continue
            ties = names[start]
            if may_be_late(own) and all(tie in late for tie in ties):
                witnesses = [own, *(late[tie] for tie in ties)]
                window.add(name, *_copy(own, arena, start), witnesses)
                continue
            target, source = _copy(own.resolve_conj().resolve_neg(), arena, start)
            if source.is_cuda:
                devices.add(source.device)
            with torch.no_grad():
                target.copy_(source, non_blocking=self._pinned)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return window

    def close(self) -> None:
        """Give the memory back."""
        if self._pinned:
            for byte in self._bytes:
                runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                runtime.cudaHostUnregister(byte.data_ptr())
        self._bytes = []
        for arena in self.arenas:
            arena.close()

    def _pin(self, device: torch.device) -> bool:
        """Page-lock the arenas, so that the GPU copies into them directly; False if refused."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        done: list[torch.Tensor] = []
        with torch.cuda.device(device):
            for byte in self._bytes:
                if int(runtime.cudaHostRegister(byte.data_ptr(), byte.numel(), 0)) == 0:
                    done.append(byte)
                    continue
                for earlier in done:
                    runtime.cudaHostUnregister(earlier.data_ptr())
                # The refusal stays noted as CUDA's last error until a launch takes it up; that
                # launch must not be one of the training's.
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=device).add_(1)
                return False
        return True


def _copy(
    source: torch.Tensor, arena: torch.Tensor, start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes at `start` of `arena`, and a tensor to copy there; dense ones as their bytes."""
    target = arena[start : start + source.numel() * source.element_size()]
    if is_dense(source):
        return target, source.reshape(-1).view(torch.uint8)
    return target.view(source.dtype).view(source.shape), source
