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
from typing import TYPE_CHECKING

from outlast.distributed.group import Group
from outlast.errors import OutlastError, RecoverError
from outlast.records.process import boot_identity
from outlast.recover.memory.fetch import fill
from outlast.recover.memory.find import generation_folder, generations, newest_whole, scan
from outlast.recover.memory.keep import StateKeeper
from outlast.recover.memory.room import Claim, clean, forget, run_folder
from outlast.recover.memory.spread import Redundancy
from outlast.state.install import Saved, check_fit, find_targets, install

if TYPE_CHECKING:
    from outlast.recover.memory.find import Whole
    from outlast.state.live import State

MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Recovered:
    """What was restored from memory.

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

    def find(self) -> Whole | None:
        """The newest state in all nodes' memory that is complete, or made so; None without one.

        Raises:
            RecoverError: On all processes, when more is lost than parity makes good.
        """
        begun = time.perf_counter()
        # Loads a compiled kernel, which others need not wait for.
        from outlast.recover.memory.parity import rebuild

        whole = self._newest()
        if whole is None and rebuild(self._folder, self._identity, self._peers):
            whole = self._newest()
            self._rebuilt = whole is not None
        self._finding_seconds = time.perf_counter() - begun
        return whole

    def _newest(self) -> Whole | None:
        """The newest state that is whole without parity."""
        peers = self._peers
        node = peers.node
        first = peers.gather(node).index(node)
        mine = scan(self._folder, self._identity, node, peers.rank) if first == peers.rank else []
        return newest_whole(name for found in peers.gather(mine) for name in found)

    def restore(self, whole: Whole | None = None, part: State | None = None) -> Recovered | None:
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
        """Whether `keep` needs a new plan for the state after `step` steps.

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
            if plan:
                self._peers.raise_together(self._all_well)
            assert self._keeper is not None
            self._keeper.keep(step, plan=plan)
            self._kept = step
        except OutlastError as error:
            self._give_up(str(error))

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
        """Whether parity of what is kept is kept, too."""
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
            forget(self._folder)

    def _due(self, step: int) -> bool:
        return not self._over and step % self._every_steps == 0

    def _begun(self) -> StateKeeper:
        def claimed() -> tuple[Claim, list[int]]:
            clean(self._memory, self._run)
            return Claim(self._folder), generations(self._folder)

        self._claim, own = self._peers.raise_together(claimed)
        numbers = self._peers.gather(own)
        older = sorted({number for array in numbers for number in array})
        folder = generation_folder(self._folder, max(older, default=0) + 1)
        keeper = StateKeeper(self._state, folder, self._identity, self._peers, self._redundancy)
        keeper.outdates([generation_folder(self._folder, number) for number in older])
        return keeper

    def _all_well(self) -> None:
        if self.problem:
            raise RecoverError(self.problem)

    def _let_go(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        self._over = True
        self._let_go()
        # What is there grows old: nobody must go on from it.
        forget(self._folder)


def node_of(memory: str | Path) -> str:
    """What processes have in common that see the same memory: machine, boot, and mount."""
    place = Path(memory)
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        return f"{boot_identity()}-{place.stat().st_dev}"
    return ""
