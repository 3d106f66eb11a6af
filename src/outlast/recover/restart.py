"""Keeping the last step's state in each node's memory, and restoring it after a restart.

In any loop::

    keeper = Keeper({"model": model, "optimizer": optimizer}, run="my-run", identity="v1")
    restored = keeper.restore()
    for step in range(restored.step if restored else 0, steps):
        loss(step).backward()
        keeper.settle()              # the state of the step before is kept
        optimizer.step()
        keeper.keep(step + 1)        # begins to keep this one; training continues
    keeper.close(forget_run=True)

Every node keeps what its processes hold, once. The state is copied into two slots that take turns,
in the background of the next step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from outlast.distributed.group import Group
from outlast.errors import CheckpointError, OutlastError, RecoverError
from outlast.records.process import boot_identity
from outlast.recover.redundancy import Redundancy, parity_group, rebuild
from outlast.recover.slot import (
    Catalogue,
    Claim,
    Slot,
    SlotEntry,
    SlotReader,
    SlotState,
    check_capacity,
    generation_folder,
    generations,
    read_slot,
    remove_old_runs,
    remove_path,
    remove_run,
    run_folder,
)
from outlast.state.box import Box, aligned, covers
from outlast.state.install import Saved, check_fit, find_targets, install
from outlast.state.live import Filling, collect, local_box
from outlast.state.sharded import is_dtensor
from outlast.state.tensors import dtype_name, is_dense, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from outlast.recover.parity import ParityGroup
    from outlast.state.install import Targets
    from outlast.state.live import Live, State

MEMORY = "/dev/shm"
_SLOTS = 2


@dataclass(frozen=True)
class StoredSlot:
    """A slot that a process can read.

    Attributes:
        reader: Rank of the process that reads it for others.
        node: Whose memory it lies in.
        generation: Of the processes that have written it.
        kept: What it holds.
    """

    reader: int
    node: str
    generation: int
    kept: SlotState


@dataclass(frozen=True)
class CompleteState:
    """A state of the run that the nodes' memories hold together.

    Attributes:
        step: Steps done.
        generation: Of the processes that have kept it.
        slots: In the order of their readers.
    """

    step: int
    generation: int
    slots: tuple[StoredSlot, ...]

    def tensors(self) -> dict[str, SlotEntry]:
        """Name to one of the entries of every tensor."""
        return {entry.name: entry for slot in self.slots for entry in slot.kept.catalogue.entries}

    def values(self) -> dict[str, Any]:
        """Name to value; of several processes the first."""
        found: dict[str, Any] = {}
        for slot in self.slots:
            for name, value in slot.kept.values.items():
                found.setdefault(name, value)
        return found


def scan(folder: Path, identity: str, node: str, reader: int) -> list[StoredSlot]:
    """All complete states of a run in this node's memory."""
    return [
        StoredSlot(reader, node, number, kept)
        for number in generations(folder)
        for path in sorted(generation_folder(folder, number).glob("rank-*"))
        if (kept := read_slot(path, identity)) is not None
    ]


def newest_whole(found: Iterable[StoredSlot]) -> CompleteState | None:
    """The newest state of which no element is missing: of the newest generation, its last step."""
    groups: dict[tuple[int, int, str, str], list[StoredSlot]] = {}
    for stored in found:
        catalogue = stored.kept.catalogue
        key = (stored.generation, stored.kept.step, catalogue.everything, catalogue.lineage)
        groups.setdefault(key, []).append(stored)
    for (generation, step, everything, _), slots in sorted(groups.items(), reverse=True):
        boxes: dict[str, list[SlotEntry]] = {}
        for slot in slots:
            for entry in slot.kept.catalogue.entries:
                boxes.setdefault(entry.name, []).append(entry)
        values = {name for slot in slots for name in slot.kept.values}
        if digest_of(boxes, values) == everything and all(
            covers(entries[0].shape, [entry.box for entry in entries]) for entries in boxes.values()
        ):
            return CompleteState(step, generation, tuple(slots))
    return None


class SlotPiece(NamedTuple):
    """A box that lies in one slot and goes into one tensor.

    Attributes:
        slot: Its number among those of the state.
        entry: Number of the entry in the slot.
        box: The part of it that is wanted.
    """

    slot: int
    entry: int
    box: Box


def fill(targets: Targets, state: CompleteState, peers: Group) -> int:
    """Fill the live tensors of `targets`; all processes call it together.

    Returns:
        The bytes that have come from other nodes to this process.

    Raises:
        RecoverError: When a slot has gone meanwhile, here or elsewhere.
    """
    tensors = state.tensors()
    by_memory: dict[int, Filling] = {}
    for name, tensor in targets.tensors.items():
        # Tied tensors have several names and one memory.
        if name in tensors and id(tensor) not in by_memory:
            by_memory[id(tensor)] = Filling(name, tensor, tensors[name])
    fillings = list(by_memory.values())
    found: dict[str, list[tuple[int, int, StoredSlot, SlotEntry]]] = {}
    for slot_number, item in enumerate(state.slots):
        for number, entry in enumerate(item.kept.catalogue.entries):
            found.setdefault(entry.name, []).append((slot_number, number, item, entry))
    wanted = [
        pieces_of(filling.box, found.get(filling.name, []), peers.node) for filling in fillings
    ]
    slots = {piece.slot for pieces in wanted for piece in pieces}
    # Of the slots of this node, those that this process reads, for itself or for others.
    readers = peers.raise_together(
        lambda: {
            number: SlotReader(slot.kept.path)
            for number, slot in enumerate(state.slots)
            if slot.node == peers.node and (number in slots or slot.reader == peers.rank)
        }
    )

    def content(piece: SlotPiece) -> NDArray[Any]:
        """The elements of a piece, as opaque ones."""
        entry = state.slots[piece.slot].kept.catalogue.entries[piece.entry]
        itemsize = entry.size // max(entry.box.elements, 1)
        kind = "u" if itemsize in (1, 2, 4, 8) else "V"
        raw = np.frombuffer(readers[piece.slot].bytes_of(entry), f"{kind}{itemsize}")
        # Of a tensor without dimensions, too, an array: a number would be converted by its value.
        place: Any = (*piece.box.within(entry.box), ...)
        part: NDArray[Any] = raw.reshape(entry.box.shape)[place]
        return part

    far: list[tuple[Filling, SlotPiece]] = []
    for filling, pieces in zip(fillings, wanted, strict=True):
        for piece in pieces:
            if piece.slot in readers:
                filling.out[piece.box.within(filling.box)] = content(piece)
            else:
                far.append((filling, piece))
    moved = _exchange(state, far, peers, content)
    for filling in fillings:
        filling.finish()
    for reader in readers.values():
        reader.close()
    return moved


def _exchange(
    state: CompleteState,
    far: list[tuple[Filling, SlotPiece]],
    peers: Group,
    content: Callable[[SlotPiece], NDArray[Any]],
) -> int:
    """Get the pieces `far` from their readers; returns their bytes."""
    moved = 0
    # Everybody sends and receives in one order.
    for target, pieces in enumerate(peers.gather([piece for _, piece in far])):
        for number, piece in enumerate(pieces):
            source = state.slots[piece.slot].reader
            if target == peers.rank:
                filling = far[number][0]
                arrived = np.empty(piece.box.shape, filling.out.dtype)
                peers.receive(_tensor(arrived), source)
                filling.out[piece.box.within(filling.box)] = arrived
                moved += arrived.nbytes
            elif source == peers.rank:
                peers.send(_tensor(np.ascontiguousarray(content(piece))), target)
    return moved


def pieces_of(
    wanted: Box, holders: list[tuple[int, int, StoredSlot, SlotEntry]], node: str
) -> list[SlotPiece]:
    """Sources of the elements of `wanted`, this node first, none twice over the network.

    Args:
        wanted: Box of a tensor.
        holders: Slot, number of the entry in it, where it is, and the entry.
        node: This one.
    """
    pieces: dict[Box, SlotPiece] = {}
    for slot, number, _, entry in sorted(holders, key=lambda holder: holder[2].node != node):
        # Equal boxes on several nodes are copies of each other.
        if (box := entry.box.overlap(wanted)) is not None:
            pieces.setdefault(box, SlotPiece(slot, number, box))
    return list(pieces.values())


def _tensor(content: NDArray[Any]) -> torch.Tensor:
    """The bytes of an array; shared with it where it can be written."""
    flat = content.reshape(-1).view(np.uint8)
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy())


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


def holding(node: str, live: Live) -> tuple[dict[str, torch.Tensor], Holding]:
    """Name to this process's memory of every tensor, and the holding of this process.

    Raises:
        RecoverError: Naming a tensor that cannot be kept.
    """
    memory: dict[str, torch.Tensor] = {}
    parts: dict[str, Part] = {}
    first: dict[object, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in live.tensors.items():
        try:
            box, local = local_box(tensor)
        except CheckpointError as error:
            raise RecoverError(f"`{name}`: {error}") from None
        size, varies = local.numel() * local.element_size(), name in live.varying
        memory[name] = local
        parts[name] = Part(dtype_name(tensor), tuple(tensor.shape), box, size, varies)
        # The same memory, with the same times to change. Objects may hand out other tensors next
        # time, so theirs are left alone.
        if name not in live.objects and local.numel():
            earlier = first.setdefault((place_of(local), box, varies), name)
            if earlier != name:
                tied[name] = earlier
    return memory, Holding(node, parts, tuple(live.values), tied)


def share(holdings: Sequence[Holding], rank: int) -> tuple[list[str], set[str]]:
    """Names of the tensors and of the values that `rank` keeps, the largest tensors first.

    All processes come to the same result from the same `holdings`. Boxes that several processes of
    a node hold are given to the one with the fewest bytes so far, tied tensors together; those that
    vary between them, and values, to the first.
    """
    node = holdings[rank].node
    local = [item for item, held in enumerate(holdings) if held.node == node]
    # All names of a memory, the first one first, and its box.
    holders: dict[tuple[tuple[str, ...], Box], list[int]] = {}
    parts: dict[tuple[tuple[str, ...], Box], Part] = {}
    values: dict[str, int] = {}
    for item in local:
        held = holdings[item]
        names: dict[str, list[str]] = {}
        for name in held.parts:
            names.setdefault(held.tied.get(name, name), []).append(name)
        for first, same in names.items():
            memory = (tuple(same), held.parts[first].box)
            parts.setdefault(memory, held.parts[first])
            holders.setdefault(memory, []).append(item)
        for name in held.values:
            values.setdefault(name, item)
    load = dict.fromkeys(local, 0)
    mine: list[str] = []
    for memory in sorted(parts, key=lambda memory: -parts[memory].size):
        part, able = parts[memory], holders[memory]
        owner = able[0] if part.varies else min(able, key=load.__getitem__)
        load[owner] += part.size
        if owner == rank:
            mine += memory[0]
    return mine, {name for name, owner in values.items() if owner == rank}


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
        at_once: Whether it must be copied before training continues, because it changes within a
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


@dataclass(frozen=True)
class Recovered:
    """Result of a restore from memory.

    Attributes:
        step: Steps done.
        source: ``memory``: every process has found all on its node; ``peer``: some process has got
            a part of it from another node; ``parity``: what a node has lost was rebuilt.
        seconds: From the look around to the last byte in place.
        size: Bytes of the live tensors that came from other nodes, of all processes.
    """

    step: int
    source: str
    seconds: float
    size: int


class Keeper:
    """Keeps the last two states of a run in each node's memory; all processes call it together.

    Every box of a tensor is kept once per node, so the memory taken on a node is twice what its
    processes hold together without repetition. A state is complete when all processes have settled
    it; two of them take turns, so that a death at any moment leaves one of them whole.

    Parameters and optimizer states must be equal where several processes hold the same box of
    them. Of buffers and tensors of other objects those of each node's first process come back, of
    values of a ``state_dict`` that are no tensors those of the first process of all.

    Args:
        state: Name to module, optimizer (or several), or an object with a ``state_dict``.
        run: Name of the run, for its folder below `memory`.
        identity: Of the job and the code: what was kept under another one is not restored.
        memory: A directory on tmpfs.
        every_steps: Keep the state after every so many steps, or at the next chance after that.
        peers: The processes; None: all of the default group, or this one alone.
        redundancy: Parity across nodes, which makes good lost nodes.

    Attributes:
        problem: Why nothing is kept any more; empty while all is well. Training continues without.
        kept: The step of the newest state that was begun to be kept; -1 for none.
        damaged: One sentence for each damaged state, and for each that could not be rebuilt, that
            `find` has passed over.
        lacking: Of ``memory`` and ``peer``, a phrase for each that held no state at `find`.
    """

    def __init__(
        self,
        state: State,
        run: str,
        identity: str,
        *,
        memory: str | Path = MEMORY,
        every_steps: int = 1,
        peers: Group | None = None,
        redundancy: Redundancy | None = None,
    ) -> None:
        self._state, self._run, self._identity = state, run, identity
        self._memory = Path(memory)
        self._run_folder = run_folder(self._memory, run)
        self._every_steps = every_steps
        self._peers = peers or Group(error=RecoverError, node=node_of(self._memory))
        self._redundancy = redundancy or Redundancy()
        self._rebuilt, self._finding_seconds, self._over = False, 0.0, False
        self.problem, self.kept = "", -1
        self.damaged, self.lacking = list[str](), list[str]()
        # Of this generation of processes, from the first state that they keep on.
        self._claim: Claim | None = None
        self._folder = self._run_folder
        self._lineage = ""
        self._parity: ParityGroup | None = None
        self._covered: Slot | None = None
        self._slots: list[Slot] = []
        self._copies: list[Copy] = []
        self._next, self._plans = 0, 0
        # To be deleted as soon as all processes have kept a state after them; to be deleted.
        self._stale: list[Path] = []
        self._doomed: list[Path] = []
        self._streams: list[torch.cuda.Stream] = []
        self._live: Live | None = None
        self._planned: dict[str, object] | None = None
        self._values: set[str] = set()
        self._text = b""
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None

    def find(self) -> CompleteState | None:
        """The newest intact state in all nodes' memory that is complete, or made so; None without.

        All bytes of it are compared with their checksums. Where a newer one is damaged, it is
        rebuilt from parity, if that is there, before an older one is taken.

        Raises:
            RecoverError: On all processes, when more is lost than parity makes good.
        """
        begun = time.perf_counter()
        self._rebuilt, self.damaged, self.lacking = False, [], []
        whole, newer = self._newest()
        if whole is None or newer:
            if not newer:
                self.lacking.append("memory: holds no complete state of this run")
            try:
                made = rebuild(self._run_folder, self._identity, self._peers)
            except RecoverError as error:
                if whole is None:
                    raise
                made = False
                self.damaged.append(f"peer: {error}")
            else:
                if not made:
                    self.lacking.append("peer: holds nothing to rebuild it from")
            if made:
                whole, _ = self._newest()
                self._rebuilt = whole is not None
        self._finding_seconds = time.perf_counter() - begun
        return whole

    def find_until(self, step: int) -> CompleteState | None:
        """As `find`, of states after at most `step` steps; nothing is rebuilt from parity."""
        begun = time.perf_counter()
        self._rebuilt, self.damaged, self.lacking = False, [], []
        whole, _ = self._newest(step)
        self._finding_seconds = time.perf_counter() - begun
        return whole

    def go_back(self, step: int) -> None:
        """Training continues after `step` steps: states of later ones must not be restored.

        What this process has kept of `step`, or of steps before, stays until the next is kept.
        """
        self.settle()
        for slot in self._slots:
            if slot.step > step:
                slot.begin()
        self.kept = step
        # The next state is kept in slots of its own, with parity of its own.
        self._planned = None

    def _newest(self, until: int | None = None) -> tuple[CompleteState | None, bool]:
        """The newest state that is whole and intact without parity; whether a newer is damaged.

        With `until`, of states after at most so many steps.
        """
        peers, mine = self._peers, []
        nodes = peers.gather(peers.node)
        local = [rank for rank, node in enumerate(nodes) if node == peers.node]
        if local[0] == peers.rank:
            mine = scan(self._run_folder, self._identity, peers.node, peers.rank)
        found = [stored for array in peers.gather(mine) for stored in array]
        if until is not None:
            found = [stored for stored in found if stored.kept.step <= until]
        newest = (-1, -1)
        while (whole := newest_whole(found)) is not None:
            # The processes of a node read its slots side by side.
            here = [stored for stored in whole.slots if stored.node == peers.node]
            problems = {
                (stored.node, str(stored.kept.path)): problem
                for stored in here[local.index(peers.rank) :: len(local)]
                if (problem := stored.kept.damage())
            }
            damaged = {key: text for held in peers.gather(problems) for key, text in held.items()}
            if not damaged:
                return whole, (whole.generation, whole.step) < newest
            newest = max(newest, (whole.generation, whole.step))
            for problem in damaged.values():
                if (sentence := f"memory: {problem}") not in self.damaged:
                    self.damaged.append(sentence)
            found = [item for item in found if (item.node, str(item.kept.path)) not in damaged]
        return None, newest >= (0, 0)

    def restore(
        self, whole: CompleteState | None = None, part: State | None = None
    ) -> Recovered | None:
        """Fill the live state from memory; None where there is nothing to restore.

        Args:
            whole: What `find` has found; None: look now.
            part: Entries of the state to fill, which may be other objects; None: all of it.

        Raises:
            RecoverError: On all processes, when it does not fit, or has gone meanwhile; the live
                state may be filled in part and must be restored from elsewhere.
        """
        whole = whole or self.find()
        begun = time.perf_counter() - self._finding_seconds
        if whole is None:
            return None
        peers = self._peers
        saved = Saved(whole.tensors(), whole.values(), whole.values())
        state = self._state if part is None else part
        targets = peers.raise_together(lambda: find_targets(state, saved))
        names = peers.gather([*targets.tensors, *targets.values])
        taken = {name for array in names for name in array}
        problem = check_fit(targets, saved, taken, ())
        if found := next((peer for peer in peers.gather(problem) if peer), ""):
            raise RecoverError(f"the state of step {whole.step} in memory does not fit: {found}")
        moved = sum(peers.gather(fill(targets, whole, peers)))
        peers.raise_together(lambda: install(state, targets, saved))
        source = "parity" if self._rebuilt else "peer" if moved else "memory"
        return Recovered(whole.step, source, time.perf_counter() - begun, moved)

    def due(self, step: int) -> bool:
        """Return whether the state after `step` steps is to be kept; the same on all processes."""
        every = self._every_steps
        return not self._over and step // every != max(self.kept, 0) // every

    def look(self, step: int) -> bool:
        """Return whether `keep` needs a new plan for the state after `step` steps.

        For callers that have a collective of their own between the optimizer step and `keep`: they
        tell all processes whether any needs one.
        """
        if not self.due(step):
            return False
        try:
            if self._claim is None:
                self._begin_generation()
            self._live = live = collect(self._state)
            if self._planned != _places(live):
                return True
            self._text = json.dumps({name: live.values[name] for name in self._values}).encode()
            # A problem is told to all by asking for a plan.
            return len(self._text) > self._slots[0].capacity or bool(self.problem)
        except OutlastError as error:
            self.problem = str(error)
            return True

    def keep(self, step: int, *, plan: bool | None = None) -> None:
        """Begin to keep the live state as that after `step` steps.

        Nobody may change parameters and optimizer states until `settle` has returned. What goes
        wrong stops no training: `problem` says it, and nothing is kept from then on.

        Args:
            step: Steps done.
            plan: Whether `look` was true on any process; None: look and agree here.
        """
        if not self.due(step):
            return
        if plan is None:
            plan = self._peers.any(self.look(step))
        try:
            if plan and (problem := self._peers.first_problem(self.problem)):
                raise RecoverError(problem)
            self._begin_to_copy(step, plan=plan)
            self.kept = step
        except OutlastError as error:
            self.problem = str(error)
            self._over = True
            self._let_go()
            # What is there grows old: nobody must resume from it.
            remove_run(self._run_folder)

    def settle(self) -> None:
        """Wait until the state under way is kept; before parameters or optimizer states change."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            try:
                under_way.result()
            except OutlastError as error:
                self.problem = str(error)

    @property
    def has_parity(self) -> bool:
        """True if there is parity of the kept state."""
        return self._parity is not None

    def close(self, *, forget_run: bool = False) -> None:
        """End keeping; `forget_run`: give the memory back, since the run is safe elsewhere."""
        self.settle()
        self._let_go()
        if forget_run:
            remove_run(self._run_folder)

    def _begin_generation(self) -> None:
        def claimed() -> tuple[Claim, list[int]]:
            remove_old_runs(self._memory, self._run)
            return Claim(self._run_folder), generations(self._run_folder)

        self._claim, own = self._peers.raise_together(claimed)
        older = sorted({number for found in self._peers.gather(own) for number in found})
        self._folder = generation_folder(self._run_folder, max(older, default=0) + 1)
        # Of the first process: states of these processes and no others.
        self._lineage = self._peers.gather(uuid.uuid4().hex)[0]
        self._stale += [generation_folder(self._run_folder, number) for number in older]

    def _begin_to_copy(self, step: int, *, plan: bool) -> None:
        """Copy what `look` has seen, at once what changes within a step, else in the background.

        Raises:
            RecoverError: On all processes, when one cannot have the memory or keep a tensor.
        """
        assert self._live is not None, "look() goes before keep()"
        for path in self._doomed:
            # All have settled a state that was kept elsewhere since.
            remove_path(path)
        if plan:
            self._plan(self._live)
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

    def _plan(self, live: Live) -> None:
        """Lay out what this process keeps; the slots so far stay until the next state is kept."""
        peers = self._peers
        memory, held = peers.raise_together(lambda: holding(peers.node, live))
        holdings = peers.gather(held)
        names, self._values = share(holdings, peers.rank)
        entries, starts, end = [], dict[str, int](), 0
        for name in names:
            part, first = held.parts[name], held.tied.get(name, name)
            if first == name:
                starts[name], end = end, aligned(end + part.size)
            start = starts[first]
            entries.append(SlotEntry(name, part.dtype, part.shape, part.box, start, part.size))
        everything = digest_of(
            {name for item in holdings for name in item.parts},
            {name for item in holdings for name in item.values},
        )
        catalogue = Catalogue(self._identity, everything, self._lineage, tuple(entries))
        self._text = json.dumps({name: live.values[name] for name in self._values}).encode()
        sizes = peers.gather((peers.node, _SLOTS * catalogue.data_bytes))
        size = sum(item for node, item in sizes if node == peers.node)
        peers.raise_together(lambda: check_capacity(self._folder, size, self._run_folder))
        slots = peers.raise_together(lambda: self._new_slots(catalogue))
        self._stale += [slot.path for slot in self._slots]
        self._let_go_of_slots()
        self._slots, self._next = slots, 0
        spread = self._redundancy.spread(holdings)
        if spread is not None:
            node = next(node for node, ranks in enumerate(spread.nodes) if peers.rank in ranks)
            writes = spread.nodes[node][0] == peers.rank
            peers.raise_together(lambda: spread.write(self._folder, node) if writes else None)
            making = f"{self._folder.name}-{self._plans}"
            self._parity = peers.raise_together(
                lambda: parity_group(spread, self._folder, peers.rank, making)
            )
        # Tied tensors are one memory, kept once.
        self._copies = [
            Copy(
                entry.name,
                memory[entry.name],
                tuple(
                    torch.frombuffer(
                        slot.memory, dtype=torch.uint8, count=entry.size, offset=entry.start
                    )
                    if entry.size
                    else torch.empty(0, dtype=torch.uint8)
                    for slot in slots
                ),
                at_once=entry.name in live.varying,
            )
            for entry in entries
            if entry.name not in held.tied
        ]
        devices = {copy_.source.device for copy_ in self._copies if copy_.source.is_cuda}
        self._streams = [torch.cuda.Stream(device) for device in devices]  # type: ignore[no-untyped-call]
        self._planned = _places(live)

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
        """Let go of the memory; what is kept stays in the files."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._let_go_of_slots()
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def _let_go_of_slots(self) -> None:
        self._copies, self._covered, self._planned = [], None, None
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
            local = tensor.to_local() if is_dtensor(tensor) else tensor
            found[name] = local.data_ptr()
    return found


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The memory of a dense tensor on the host."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def node_of(memory: str | Path) -> str:
    """Identity of the memory that processes share: machine, boot, and mount."""
    place = Path(memory)
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        return f"{boot_identity()}-{place.stat().st_dev}"
    return ""
