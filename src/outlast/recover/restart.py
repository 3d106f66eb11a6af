"""Keeping the last step's state in each node's memory, and restoring it after a restart.

In any loop::

    keeper = Keeper({"model": model, "optimizer": optimizer}, run="my-run", identity="v1")
    restored = keeper.restore()
    for step in range(restored.step if restored else 0, steps):
        loss(step).backward()
        keeper.settle()              # the state of the step before is kept
        optimizer.step()
        keeper.keep(step + 1)        # begins to keep this one; training goes on
    keeper.close(forget_run=True)
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from outlast.distributed.group import Group
from outlast.errors import OutlastError, RecoverError
from outlast.records.process import boot_identity
from outlast.recover.redundancy import Redundancy
from outlast.recover.slot import (
    Claim,
    SlotEntry,
    SlotReader,
    SlotState,
    generation_folder,
    generations,
    read_slot,
    remove_old_runs,
    remove_run,
    run_folder,
)
from outlast.recover.snapshot import StateKeeper, digest_of
from outlast.state.box import Box, covers
from outlast.state.install import Saved, check_fit, find_targets, install
from outlast.state.live import Filling

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from outlast.state.install import Targets
    from outlast.state.live import State

MEMORY = "/dev/shm"


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
    found = []
    for number in generations(folder):
        for path in sorted(generation_folder(folder, number).glob("rank-*")):
            kept = read_slot(path, identity)
            if kept is not None:
                found.append(StoredSlot(reader, node, number, kept))
    return found


def newest_whole(found: Iterable[StoredSlot]) -> CompleteState | None:
    """The newest state of which no element is missing: of the newest generation, its last step."""
    groups: dict[tuple[int, int, str, str], list[StoredSlot]] = {}
    for found_item in found:
        catalogue = found_item.kept.catalogue
        key = (found_item.generation, found_item.kept.step, catalogue.everything, catalogue.lineage)
        groups.setdefault(key, []).append(found_item)
    for key in sorted(groups, reverse=True):
        generation, step, everything, _ = key
        slots = groups[key]
        if _is_whole(slots, everything):
            return CompleteState(step, generation, tuple(slots))
    return None


def _is_whole(slots: list[StoredSlot], everything: str) -> bool:
    boxes: dict[str, list[SlotEntry]] = {}
    values: set[str] = set()
    for slot in slots:
        values.update(slot.kept.values)
        for entry in slot.kept.catalogue.entries:
            boxes.setdefault(entry.name, []).append(entry)
    if digest_of(boxes, values) != everything:
        return False
    return all(
        covers(entries[0].shape, [entry.box for entry in entries]) for entries in boxes.values()
    )


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
    fillings = []
    seen: set[int] = set()
    for name, tensor in targets.tensors.items():
        # Tied tensors have several names and one memory.
        if name in tensors and id(tensor) not in seen:
            seen.add(id(tensor))
            fillings.append(Filling(name, tensor, tensors[name]))
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
    far = [
        (number, piece)
        for number, pieces in enumerate(wanted)
        for piece in pieces
        if piece.slot not in readers
    ]
    for filling, pieces in zip(fillings, wanted, strict=True):
        for piece in pieces:
            if piece.slot in readers:
                part = piece.box.within(filling.box)
                filling.out[part] = _content(state, piece, readers[piece.slot])
    moved = _exchange(state, far, fillings, peers, readers)
    for filling in fillings:
        filling.finish()
    for reader in readers.values():
        reader.close()
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
    pieces: list[SlotPiece] = []
    taken: list[Box] = []
    for slot, number, _, entry in sorted(holders, key=lambda holder: holder[2].node != node):
        box = entry.box.overlap(wanted)
        # Equal boxes on several nodes are copies of each other.
        if box is not None and box not in taken:
            taken.append(box)
            pieces.append(SlotPiece(slot, number, box))
    return pieces


def _content(state: CompleteState, piece: SlotPiece, reader: SlotReader) -> NDArray[Any]:
    """The elements of a piece, as opaque ones."""
    entry = state.slots[piece.slot].kept.catalogue.entries[piece.entry]
    itemsize = entry.size // max(entry.box.elements, 1)
    kind = "u" if itemsize in (1, 2, 4, 8) else "V"
    array = np.frombuffer(reader.bytes_of(entry), f"{kind}{itemsize}").reshape(entry.box.shape)
    return array[piece.box.within(entry.box)]


def _exchange(
    state: CompleteState,
    far: list[tuple[int, SlotPiece]],
    fillings: list[Filling],
    peers: Group,
    readers: dict[int, SlotReader],
) -> int:
    """Get the pieces `far` from their readers; everybody sends and receives in one order."""
    moved = 0
    for target, pieces in enumerate(peers.gather([piece for _, piece in far])):
        mine = [number for number, _ in far] if target == peers.rank else [-1] * len(pieces)
        for number, piece in zip(mine, pieces, strict=True):
            source = state.slots[piece.slot].reader
            if target == peers.rank:
                filling = fillings[number]
                content = np.empty(piece.box.shape, filling.out.dtype)
                peers.receive(_tensor(content), source)
                filling.out[piece.box.within(filling.box)] = content
                moved += content.nbytes
            elif source == peers.rank:
                part = _content(state, piece, readers[piece.slot])
                peers.send(_tensor(np.ascontiguousarray(part)), target)
    return moved


def _tensor(content: NDArray[Any]) -> torch.Tensor:
    """The bytes of an array; shared with it where it can be written."""
    flat = content.reshape(-1).view(np.uint8)
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy())


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
        every_steps: Keep the state after every so many steps.
        peers: The processes; None: all of the default group, or this one alone.
        redundancy: Parity across nodes, which makes good lost nodes.

    Attributes:
        problem: Why nothing is kept any more; empty while all is well. Training goes on without.
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
        self._state = state
        self._memory = Path(memory)
        self._folder = run_folder(self._memory, run)
        self._run = run
        self._identity = identity
        self._every_steps = every_steps
        self._peers = peers or Group(error=RecoverError, node=node_of(self._memory))
        self._redundancy = redundancy or Redundancy()
        self._keeper: StateKeeper | None = None
        self._claim: Claim | None = None
        self._kept = -1
        self._rebuilt = False
        self._finding_seconds = 0.0
        self._over = False
        self.problem = ""

    def find(self) -> CompleteState | None:
        """The newest state in all nodes' memory that is complete, or made so; None without one.

        Raises:
            RecoverError: On all processes, when more is lost than parity makes good.
        """
        begun = time.perf_counter()
        # Loads a compiled kernel, which others need not wait for.
        from outlast.recover.slot_parity import rebuild

        whole = self._newest()
        if whole is None and rebuild(self._folder, self._identity, self._peers):
            whole = self._newest()
            self._rebuilt = whole is not None
        self._finding_seconds = time.perf_counter() - begun
        return whole

    def _newest(self) -> CompleteState | None:
        """The newest state that is whole without parity."""
        peers = self._peers
        node = peers.node
        first = peers.gather(node).index(node)
        mine = scan(self._folder, self._identity, node, peers.rank) if first == peers.rank else []
        return newest_whole(name for found in peers.gather(mine) for name in found)

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

    def look(self, step: int) -> bool:
        """Return whether `keep` needs a new plan for the state after `step` steps.

        For callers that have a collective of their own between the optimizer step and `keep`: they
        tell all processes whether any needs one.
        """
        if not self._due(step):
            return False
        try:
            if self._keeper is None:
                self._keeper = self._begun()
            # A problem is told to all by asking for a plan.
            return self._keeper.look() or bool(self.problem)
        except OutlastError as error:
            self.problem = str(error)
            return True

    def keep(self, step: int, *, plan: bool | None = None) -> None:
        """Begin to keep the live state as that after `step` steps.

        What goes wrong stops no training: `problem` says it, and nothing is kept from then on.

        Args:
            step: Steps done.
            plan: Whether `look` was true on any process; None: look and agree here.
        """
        if not self._due(step):
            return
        if plan is None:
            plan = self._peers.any(self.look(step))
        try:
            if plan and (problem := self._peers.first_problem(self.problem)):
                raise RecoverError(problem)
            assert self._keeper is not None
            self._keeper.keep(step, plan=plan)
            self._kept = step
        except OutlastError as error:
            self.problem = str(error)
            self._over = True
            self._let_go()
            # What is there grows old: nobody must resume from it.
            remove_run(self._folder)

    def settle(self) -> None:
        """Wait until the state under way is kept; before parameters or optimizer states change."""
        if self._keeper is None:
            return
        try:
            self._keeper.settle()
        except OutlastError as error:
            self.problem = str(error)

    @property
    def has_parity(self) -> bool:
        """True if there is parity of the kept state."""
        return self._keeper is not None and self._keeper.has_parity

    @property
    def kept(self) -> int:
        """The step of the newest state that was begun to be kept; -1 for none."""
        return self._kept

    def close(self, *, forget_run: bool = False) -> None:
        """End keeping; `forget_run`: give the memory back, since the run is safe elsewhere."""
        self.settle()
        self._let_go()
        if forget_run:
            remove_run(self._folder)

    def _due(self, step: int) -> bool:
        return not self._over and step % self._every_steps == 0

    def _begun(self) -> StateKeeper:
        def claimed() -> tuple[Claim, list[int]]:
            remove_old_runs(self._memory, self._run)
            return Claim(self._folder), generations(self._folder)

        self._claim, own = self._peers.raise_together(claimed)
        numbers = self._peers.gather(own)
        older = sorted({number for array in numbers for number in array})
        folder = generation_folder(self._folder, max(older, default=0) + 1)
        keeper = StateKeeper(self._state, folder, self._identity, self._peers, self._redundancy)
        keeper.outdates([generation_folder(self._folder, number) for number in older])
        return keeper

    def _let_go(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
        if self._claim is not None:
            self._claim.close()
            self._claim = None


def node_of(memory: str | Path) -> str:
    """Identity of the memory that processes share: machine, boot, and mount."""
    place = Path(memory)
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        return f"{boot_identity()}-{place.stat().st_dev}"
    return ""
