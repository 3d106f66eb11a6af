"""Copying the live state into two slots that take turns, in the background of the next step."""

from __future__ import annotations

import contextlib
import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from outlast.errors import RecoverError
from outlast.recover.memory.room import check_room, remove
from outlast.recover.memory.share import everything_of, holding, memories, share
from outlast.recover.memory.slot import Catalogue, Entry, Slot
from outlast.state.box import aligned
from outlast.state.live import collect, local_box
from outlast.state.tensors import is_dense

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    from numpy.typing import NDArray

    from outlast.distributed.group import Group
    from outlast.recover.memory.parity import SlotParity
    from outlast.recover.memory.share import Holding
    from outlast.recover.memory.spread import Redundancy
    from outlast.state.box import Box
    from outlast.state.live import Live, State

_SLOTS = 2


@dataclass(frozen=True)
class Copy:
    """One tensor on its way into the slots.

    Attributes:
        name: Of the tensor.
        source: This process's memory of it.
        targets: Its place in each slot.
        at_once: Whether it must be copied before training goes on, because it changes within a
            step: all but parameters and optimizer states.
    """

    name: str
    source: torch.Tensor
    targets: tuple[torch.Tensor, ...]
    at_once: bool

    def make(self, slot: int, source: torch.Tensor) -> None:
        """Copy from `source`; a large copy lets other threads run meanwhile."""
        target = self.targets[slot]
        if source.numel() == 0:
            return
        if source.device.type == "cpu" and is_dense(source):
            # One thread, unlike torch's copy: training has the other cores.
            np.copyto(_bytes(target), _bytes(source))
        else:
            target.view(source.dtype).view(source.shape).copy_(source)


class StateKeeper:
    """Keeps the last two states of this process in `folder`; all processes call it together.

    Args:
        state: As for a checkpoint: model, optimizers, other objects with a ``state_dict``.
        folder: Of this generation, on tmpfs; made when something is kept.
        identity: Of the run.
        peers: The processes of the run.
        redundancy: How much parity is kept of what is kept.
    """

    def __init__(
        self, state: State, folder: Path, identity: str, peers: Group, redundancy: Redundancy
    ) -> None:
        self._state = state
        self._folder = folder
        self._identity = identity
        self._peers = peers
        self._redundancy = redundancy
        self._parity: SlotParity | None = None
        self._covered: Slot | None = None
        self._slots: list[Slot] = []
        self._copies: list[Copy] = []
        self._next = 0
        self._stale: list[Path] = []
        self._doomed: list[Path] = []
        self._streams: list[torch.cuda.Stream] = []
        self._plans = 0
        self._live: Live | None = None
        self._planned: dict[str, object] | None = None
        self._values: set[str] = set()
        self._text = b""
        # Of the first process: states of these processes and no others.
        self._lineage = peers.gather(uuid.uuid4().hex)[0]
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None

    def look(self) -> bool:
        """Take in the state as it is; whether a new plan is needed, of which all must know."""
        self._live = live = collect(self._state)
        if self._planned != _places(live):
            return True
        self._text = json.dumps({name: live.values[name] for name in self._values}).encode()
        return len(self._text) > self._slots[0].capacity

    def keep(self, step: int, *, plan: bool) -> None:
        """Begin to keep the state that `look` has seen, as that after `step` steps.

        Nobody may change parameters and optimizer states until `settle` has returned, and all
        processes must have settled the state before.

        Args:
            step: Steps done.
            plan: Whether any process needs a new plan; equal on all.

        Raises:
            RecoverError: On all processes, when one cannot have the memory or keep a tensor.
        """
        assert self._live is not None, "look() goes before keep()"
        for path in self._doomed:
            # All have settled a state that was kept elsewhere since.
            remove(path)
        if plan:
            self._replan()
        slot = self._next
        self._next = (slot + 1) % _SLOTS
        self._slots[slot].begin()
        for copy_ in self._copies:
            if copy_.at_once:
                # Objects hand out new tensors each time.
                copy_.make(slot, local_box(self._live.tensors[copy_.name])[1])
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="outlast-memory")
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        self._under_way = self._thread.submit(self._finish, slot, step, self._text)
        self._doomed, self._stale = self._stale, []

    def settle(self) -> None:
        """Wait until the state under way is kept.

        Raises:
            RecoverError: When it could not be.
        """
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()

    @property
    def has_parity(self) -> bool:
        """Whether parity of what is kept is kept, too."""
        return self._parity is not None

    def outdates(self, paths: list[Path]) -> None:
        """Delete `paths` as soon as all processes have kept a state after them."""
        self._stale += paths

    def close(self) -> None:
        """Let go of the memory; what is kept stays in the files."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._let_go()

    def _finish(self, slot: int, step: int, values: bytes) -> None:
        try:
            self._copy_and_publish(slot, step, values)
        except (OSError, RuntimeError) as error:
            raise RecoverError(f"the state of step {step} could not be kept: {error}") from None

    def _copy_and_publish(self, slot: int, step: int, values: bytes) -> None:
        with torch.no_grad(), contextlib.ExitStack() as streams:
            for stream in self._streams:
                # Beside the training's own work; `settle` waits for it.
                streams.enter_context(torch.cuda.stream(stream))
            for copy_ in self._copies:
                if not copy_.at_once:
                    copy_.make(slot, copy_.source)
            for stream in self._streams:
                stream.synchronize()
        new = self._slots[slot]
        new.publish(step, values)
        if self._parity is not None:
            old = None if self._covered is None else self._covered.content
            self._parity.update(old, new.content, step)
            self._covered = new

    def _replan(self) -> None:
        """Lay out what this process keeps; the slots so far stay until the next state is kept."""
        assert self._live is not None
        live = self._live
        memory, held = self._peers.raise_together(lambda: self._held(live))
        holdings = self._peers.gather(held)
        names, self._values = share(holdings, self._peers.rank)
        entries, starts, end = [], dict[str, int](), 0
        for name in names:
            part, first = held.parts[name], held.tied.get(name, name)
            if first == name:
                starts[name], end = end, aligned(end + part.size)
            start = starts[first]
            entries.append(Entry(name, part.dtype, part.shape, part.box, start, part.size))
        everything = everything_of(holdings)
        catalogue = Catalogue(self._identity, everything, self._lineage, tuple(entries))
        self._text = json.dumps({name: live.values[name] for name in self._values}).encode()
        sizes = self._peers.gather((self._peers.node, _SLOTS * catalogue.data_bytes))
        size = sum(item for node, item in sizes if node == self._peers.node)
        self._peers.raise_together(lambda: check_room(self._folder, size, self._folder.parent))
        slots = self._peers.raise_together(lambda: self._new_slots(catalogue))
        self._stale += [slot.path for slot in self._slots]
        self._let_go()
        self._slots, self._next = slots, 0
        self._spread_parity(holdings)
        # Tied tensors are one memory, kept once.
        self._copies = [
            self._copy(name, memory[name.name][1], live)
            for name in entries
            if name.name not in held.tied
        ]
        devices = {copy_.source.device for copy_ in self._copies if copy_.source.is_cuda}
        self._streams = [torch.cuda.Stream(device) for device in devices]  # type: ignore[no-untyped-call]
        self._planned = _places(live)

    def _spread_parity(self, holdings: list[Holding]) -> None:
        spread = self._redundancy.spread(holdings)
        if spread is None:
            return
        rank = self._peers.rank
        number, node = next(
            (number, ranks) for number, ranks in enumerate(spread.nodes) if rank in ranks
        )
        self._peers.raise_together(
            lambda: spread.write(self._folder, number) if rank == node[0] else None
        )
        # Loads a compiled kernel, which others need not wait for.
        from outlast.recover.memory.parity import SlotParity

        name = f"{self._folder.name}-{self._plans}"
        self._parity = self._peers.raise_together(
            lambda: SlotParity(spread, self._folder, self._peers, name)
        )

    def _held(self, live: Live) -> tuple[dict[str, tuple[Box, torch.Tensor]], Holding]:
        memory = memories(live)
        return memory, holding(self._peers.node, live, memory)

    def _new_slots(self, catalogue: Catalogue) -> list[Slot]:
        """Two slots under names that this process has not used yet.

        Raises:
            RecoverError: When the memory cannot be had; nothing of it is taken then.
        """
        self._plans += 1
        slots: list[Slot] = []
        try:
            for number in range(_SLOTS):
                name = f"rank-{self._peers.rank}.plan-{self._plans}.slot-{number}"
                slots.append(Slot(self._folder / name, catalogue, len(self._text)))
        except RecoverError:
            for slot in slots:
                slot.close()
                slot.path.unlink(missing_ok=True)
            raise
        return slots

    def _copy(self, entry: Entry, source: torch.Tensor, live: Live) -> Copy:
        targets = tuple(
            torch.frombuffer(slot.memory, dtype=torch.uint8, count=entry.size, offset=entry.start)
            if entry.size
            else torch.empty(0, dtype=torch.uint8)
            for slot in self._slots
        )
        return Copy(entry.name, source, targets, at_once=entry.name in live.varying)

    def _let_go(self) -> None:
        self._copies = []
        self._covered = None
        if self._parity is not None:
            self._parity.close()
            self._parity = None
        for slot in self._slots:
            slot.close()
        self._slots = []


def _places(live: Live) -> dict[str, object]:
    """What a plan holds good for: where every tensor lies, and which values there are.

    Tensors of objects may lie elsewhere each time; of them shape and type count, but for
    parameters, which are copied from where they lay when it was planned.
    """
    found: dict[str, object] = dict.fromkeys(live.values)
    for name, tensor in live.tensors.items():
        if name in live.objects and not isinstance(tensor, nn.Parameter):
            found[name] = (tensor.shape, tensor.dtype)
        else:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            found[name] = local.data_ptr()
    return found


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The memory of a dense tensor on the host."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
