"""Snapshots of the live state in memory: every node keeps what its processes hold, once.

The state is copied into two slots that take turns, in the background of the next step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from outlast.errors import CheckpointError, RecoverError
from outlast.recover.slot import Catalogue, Slot, SlotEntry, check_capacity, remove_path
from outlast.state.box import aligned
from outlast.state.live import collect, local_box
from outlast.state.tensors import dtype_name, is_dense, place_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from numpy.typing import NDArray

    from outlast.distributed.group import Group
    from outlast.recover.parity import ParityGroup
    from outlast.recover.redundancy import Redundancy
    from outlast.state.box import Box
    from outlast.state.live import Live, State

_SLOTS = 2


@dataclass(frozen=True)
class Part:
    """A process's part of a tensor: element type, shape of the whole, its box, its bytes.

    `varies`: others that hold the same box may have other content in it; see `Live.varying`.
    """

    dtype: str
    shape: tuple[int, ...]
    box: Box
    size: int
    varies: bool = False


@dataclass(frozen=True)
class Holding:
    """Tensors and values of a process.

    Attributes:
        node: Which processes share their memory with it.
        parts: Name of a tensor to what it holds of it.
        values: Names of its values.
        tied: Name of a tensor whose memory another one has as well, to the first name of that.
    """

    node: str
    parts: dict[str, Part]
    values: tuple[str, ...]
    tied: dict[str, str] = field(default_factory=dict)

    def memories(self) -> dict[tuple[tuple[str, ...], Box], int]:
        """All names of each memory, the first one first, and its box, to its bytes."""
        names: dict[str, list[str]] = {}
        for name in self.parts:
            names.setdefault(self.tied.get(name, name), []).append(name)
        return {
            (tuple(name), self.parts[first].box): self.parts[first].size
            for first, name in names.items()
        }


def memories(live: Live) -> dict[str, tuple[Box, torch.Tensor]]:
    """Name to box and this process's memory of every tensor.

    Raises:
        RecoverError: Naming a tensor that cannot be kept.
    """
    found = {}
    for name, tensor in live.tensors.items():
        try:
            found[name] = local_box(tensor)
        except CheckpointError as error:
            raise RecoverError(f"`{name}`: {error}") from None
    return found


def holding(node: str, live: Live, memory: dict[str, tuple[Box, torch.Tensor]]) -> Holding:
    """The holding of this process; `memory` as `memories` gives it."""
    parts = {
        name: Part(
            dtype_name(live.tensors[name]),
            tuple(live.tensors[name].shape),
            box,
            local.numel() * local.element_size(),
            name in live.varying,
        )
        for name, (box, local) in memory.items()
    }
    return Holding(node, parts, tuple(live.values), _tied(live, memory))


def _tied(live: Live, memory: dict[str, tuple[Box, torch.Tensor]]) -> dict[str, str]:
    """Name of a tensor to that of an earlier one with the same memory and the same times to change.

    Objects may hand out other tensors next time, so theirs are left alone.
    """
    first: dict[object, str] = {}
    tied = {}
    for name, (box, local) in memory.items():
        if name in live.objects or not local.numel():
            continue
        key = (place_of(local), box, name in live.varying)
        if (earlier := first.setdefault(key, name)) != name:
            tied[name] = earlier
    return tied


def share(holdings: Sequence[Holding], rank: int) -> tuple[list[str], set[str]]:
    """Names of the tensors and of the values that `rank` keeps, the largest tensors first.

    All processes come to the same result from the same `holdings`. Boxes that several processes of
    a node hold are given to the one with the fewest bytes so far, tied tensors together; those that
    vary between them, and values, to the first.
    """
    node = holdings[rank].node
    local = [item for item, held in enumerate(holdings) if held.node == node]
    sizes: dict[tuple[tuple[str, ...], Box], int] = {}
    holders: dict[tuple[tuple[str, ...], Box], list[int]] = {}
    values: dict[str, int] = {}
    for item in local:
        for memory, size in holdings[item].memories().items():
            sizes.setdefault(memory, size)
            holders.setdefault(memory, []).append(item)
        for name in holdings[item].values:
            values.setdefault(name, item)
    load = dict.fromkeys(local, 0)
    mine: list[str] = []
    for memory in sorted(sizes, key=lambda size: -sizes[size]):
        first = holders[memory][0]
        varies = holdings[first].parts[memory[0][0]].varies
        owner = first if varies else min(holders[memory], key=load.__getitem__)
        load[owner] += sizes[memory]
        if owner == rank:
            mine += memory[0]
    return mine, {name for name, owner in values.items() if owner == rank}


def everything_of(holdings: Iterable[Holding]) -> str:
    """Digest of what all processes hold together."""
    held = list(holdings)
    return digest_of(
        {name for item in held for name in item.parts},
        {name for item in held for name in item.values},
    )


def digest_of(tensors: Iterable[str], values: Iterable[str]) -> str:
    """32 hexadecimal digits that change with any name."""
    text = "\0".join([*sorted(tensors), "\1", *sorted(values)])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


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
        self._parity: ParityGroup | None = None
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
            remove_path(path)
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
        self._under_way = self._thread.submit(self._copy_and_publish, slot, step, self._text)
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
        """True if there is parity of the kept state."""
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

    def _copy_and_publish(self, slot: int, step: int, values: bytes) -> None:
        try:
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
        except (OSError, RuntimeError) as error:
            raise RecoverError(f"the state of step {step} could not be kept: {error}") from None

    def _replan(self) -> None:
        """Lay out what this process keeps; the slots so far stay until the next state is kept."""
        assert self._live is not None
        live = self._live

        def hold() -> tuple[dict[str, tuple[Box, torch.Tensor]], Holding]:
            memory = memories(live)
            return memory, holding(self._peers.node, live, memory)

        memory, held = self._peers.raise_together(hold)
        holdings = self._peers.gather(held)
        names, self._values = share(holdings, self._peers.rank)
        entries, starts, end = [], dict[str, int](), 0
        for name in names:
            part, first = held.parts[name], held.tied.get(name, name)
            if first == name:
                starts[name], end = end, aligned(end + part.size)
            start = starts[first]
            entries.append(SlotEntry(name, part.dtype, part.shape, part.box, start, part.size))
        everything = everything_of(holdings)
        catalogue = Catalogue(self._identity, everything, self._lineage, tuple(entries))
        self._text = json.dumps({name: live.values[name] for name in self._values}).encode()
        sizes = self._peers.gather((self._peers.node, _SLOTS * catalogue.data_bytes))
        size = sum(item for node, item in sizes if node == self._peers.node)
        self._peers.raise_together(lambda: check_capacity(self._folder, size, self._folder.parent))
        slots = self._peers.raise_together(lambda: self._new_slots(catalogue))
        self._stale += [slot.path for slot in self._slots]
        self._let_go()
        self._slots, self._next = slots, 0
        self._spread_parity(holdings)
        # Tied tensors are one memory, kept once.
        self._copies = []
        for entry in entries:
            if entry.name in held.tied:
                continue
            targets = tuple(
                torch.frombuffer(
                    slot.memory, dtype=torch.uint8, count=entry.size, offset=entry.start
                )
                if entry.size
                else torch.empty(0, dtype=torch.uint8)
                for slot in slots
            )
            varies = entry.name in live.varying
            self._copies.append(Copy(entry.name, memory[entry.name][1], targets, at_once=varies))
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
        from outlast.recover.slot_parity import parity_group

        name = f"{self._folder.name}-{self._plans}"
        self._parity = self._peers.raise_together(
            lambda: parity_group(spread, self._folder, rank, name)
        )

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
    """Conditions under which a plan holds: places of all tensors, and names of the values.

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
