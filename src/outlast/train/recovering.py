"""Restarting from memory, composed for the trainer; see `outlast.recover.restart`."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from outlast.distributed.group import Group
from outlast.errors import RecoverError
from outlast.records import (
    CheckpointRestored,
    MembershipChanged,
    StateRecovered,
    StepsDone,
    Warned,
    read_run,
)
from outlast.recover.cost import RestoreSource, cheapest_source
from outlast.recover.redundancy import Redundancy
from outlast.recover.restart import Keeper, node_of
from outlast.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch.distributed as dist

    from outlast.checkpoint import CheckpointStore
    from outlast.distributed.ranks import Ranks
    from outlast.job.sections import RecoverSection
    from outlast.records import Event, Run, RunDirectory
    from outlast.recover.phase_page import EnterPhase
    from outlast.recover.restart import CompleteState
    from outlast.state.live import State

_RECENT_STEPS = 20


def kept_run(directory: RunDirectory) -> str:
    """Under which name the states of this run are kept in memory."""
    # Of an earlier run with the same name nothing must be taken.
    return f"{directory.path.name}-{directory.identifier}"


def is_kept(settings: RecoverSection, ranks: Ranks) -> bool:
    """Whether states are kept in memory: a launcher would start these ranks again."""
    restarted = ranks.launch == "nproc" or (
        ranks.launch == "torchrun" and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    )
    return settings.mode == "restart" and restarted


def run_memory(
    settings: RecoverSection,
    identity: str,
    *,
    ranks: Ranks,
    directory: RunDirectory,
    state: State,
    store: CheckpointStore,
    group: dist.ProcessGroup | None = None,
    steps_before: int = 0,
) -> RunMemory | None:
    """What keeps this run's states in memory; None where nobody would start the ranks again.

    Args:
        settings: How.
        identity: Of the job: what was kept under another one is not restored.
        ranks: This process among the others.
        directory: Of the run; it has its identifier.
        state: Model, optimizers, and whatever else is kept.
        store: The run's checkpoints.
        group: Of all ranks, for host memory; None: the default group.
        steps_before: That the process with this rank had done when it was killed, if it is known.

    Raises:
        RecoverError: On all ranks, when the parity that is asked for is not possible.
    """
    if not is_kept(settings, ranks):
        return None
    redundancy = Redundancy(settings.parity, settings.parity_group, settings.domain)
    peers = Group(group, error=RecoverError, node=node_of(settings.memory))
    redundancy.check(peers.gather(peers.node))
    keeper = Keeper(
        state,
        kept_run(directory),
        f"{identity} outlast-{__version__}",
        memory=settings.memory,
        every_steps=settings.every_steps,
        peers=peers,
        redundancy=redundancy,
    )
    known = ranks.is_first and directory.exists()
    records = directory.path if known else None
    return RunMemory(keeper, state, store, records, peers, steps_before=steps_before)


def from_disk(
    store: CheckpointStore, state: State, passed_over: Sequence[str] = ()
) -> tuple[int, list[Event]]:
    """Restore the newest checkpoint: the steps that it has done, and the events.

    Args:
        store: The run's checkpoints.
        state: Model and optimizers.
        passed_over: One sentence for each newer state that could not be used.

    Raises:
        RecoverError: When a newer state could not be used, and there is no checkpoint.
    """
    begun = time.perf_counter()
    restored = store.restore(state)
    if restored is None:
        if passed_over:
            # Steps were done: whoever began anew would lose them without a word.
            raise RecoverError(
                f"{'; '.join(passed_over)}; and there is no checkpoint to go on from: start with "
                "the settings and the code of before, or anew in another directory"
            )
        # Not silently: a run that had saved nothing looks just like one that has lost its files.
        return 0, [Warned(store.unfinished)] if store.unfinished else []
    skipped = [*passed_over, *restored.skipped]
    events: list[Event] = [
        Warned(f"{name}; the run goes on from the version of step {restored.step}")
        for name in skipped
    ]
    seconds = time.perf_counter() - begun
    return restored.step, [*events, CheckpointRestored(restored.step, seconds, skipped)]


class RunMemory:
    """Restores a run from the cheapest place, and keeps its newest state in memory.

    Args:
        keeper: Of the memory.
        state: Model and optimizers.
        store: The run's checkpoints.
        directory: Of the run, on rank 0, where it has records; None elsewhere.
        peers: The ranks.
        steps_before: That the process with this rank had done when it was killed, if it is known.

    Attributes:
        saved: Steps of the newest checkpoint when `find` looked; -1 without one.
        unsaved: Whether what was restored is on no disk, so that it must be saved in the end.
    """

    def __init__(
        self,
        keeper: Keeper,
        state: State,
        store: CheckpointStore,
        directory: Path | None,
        peers: Group,
        *,
        steps_before: int = 0,
    ) -> None:
        self._keeper = keeper
        self._state = state
        self._store = store
        self._directory = directory
        self._peers = peers
        self._steps_before = steps_before
        self.saved = -1
        self._told = False
        self.unsaved = False

    def restore(self) -> tuple[int, list[Event]]:
        """Restore the newest state that is known; the steps that it has done, and the events."""
        history, passed_over = self._history(), list[str]()
        try:
            whole = self.find(history)
            if whole is not None:
                event = self.take(whole, history)
                return event.step, [event, *self._changed(history, event.step)]
        except RecoverError as error:
            passed_over.append(str(error))
        step, events = from_disk(self._store, self._state, passed_over)
        return step, [*events, *self._changed(history, step)]

    def find(self, history: Run | None = None) -> CompleteState | None:
        """The state in memory from which the run is sooner back than from its newest checkpoint.

        Args:
            history: Of the run, on the first rank; None: look now.

        Raises:
            RecoverError: On all ranks, when more is lost than parity makes good.
        """
        self.saved = max(self._peers.gather(self._saved_step()))
        whole = self._keeper.find()
        if whole is None or self._choice(whole, history or self._history()) == "disk":
            return None
        return whole

    def read(self, whole: CompleteState, entries: State) -> None:
        """Restore a part of what `find` has found, before the rest has a place.

        Raises:
            RecoverError: As `take`.
        """
        self._keeper.restore(whole, entries)

    def take(self, whole: CompleteState, history: Run | None = None) -> StateRecovered:
        """Restore what `find` has found.

        Args:
            whole: The state.
            history: Of the run, on the first rank; None: look now.

        Raises:
            RecoverError: On all ranks, when it does not fit, or has gone meanwhile; the live state
                may be filled in part and must be restored from elsewhere.
        """
        recovered = self._keeper.restore(whole)
        assert recovered is not None
        self.unsaved = recovered.step > self.saved
        # What was done may not be on record yet.
        done = max(_recorded(history or self._history()), self._steps_before)
        lost = max(0, *(peer - recovered.step for peer in self._peers.gather(done)))
        return StateRecovered(
            recovered.step, recovered.source, recovered.seconds, lost, recovered.size
        )

    def look(self, done: int) -> bool:
        """As `Keeper.look`."""
        return self._keeper.look(done)

    def keep(self, done: int, *, plan: bool) -> Warned | None:
        """As `Keeper.keep`; a warning when nothing is kept from now on."""
        self._keeper.keep(done, plan=plan)
        if self._keeper.problem and not self._told:
            self._told = True
            return Warned(
                f"{self._keeper.problem}; a restart goes on from the newest checkpoint "
                '(recover.memory names another place, recover.mode = "off" is silent)'
            )
        return None

    def settle(self, mark: EnterPhase) -> None:
        """As `Keeper.settle`; `mark` is told when it is parity that is waited for."""
        if self._keeper.has_parity:
            mark("parity")
        self._keeper.settle()

    def holds(self, done: int) -> bool:
        """Whether the state after `done` steps is kept on all ranks, which ask together."""
        self._keeper.settle()
        return not self._peers.any(self._keeper.kept != done or bool(self._keeper.problem))

    def close(self, *, forget: bool) -> None:
        """End keeping; `forget`: what is kept is on disk as well."""
        self._keeper.close(forget_run=forget)

    def _history(self) -> Run | None:
        return None if self._directory is None else read_run(self._directory)

    def _choice(self, whole: CompleteState, history: Run | None) -> str:
        """``memory`` or ``disk``; all ranks do as rank 0 says, who knows the run's step times."""
        size = sum(entry.size for entry in whole.tensors().values())
        candidates = [RestoreSource("memory", whole.step, size)]
        if self.saved >= 0:
            candidates.append(RestoreSource("disk", self.saved, size))
        chosen = cheapest_source(candidates, _step_seconds(history))
        assert chosen is not None
        return self._peers.gather(chosen.source)[0]

    def _saved_step(self) -> int:
        version = self._store.newest()
        return -1 if version is None else version.step

    def _changed(self, history: Run | None, step: int) -> list[Event]:
        """The event of another number of processes than before; rank 0 alone knows."""
        # The newest attempt is this one.
        before = [] if history is None else history.attempts[-2:-1]
        if not before or before[0].world_size == self._peers.size:
            return []
        reason = "resized" if before[0].outcome == "to_be_continued" else "lost"
        seconds = max(time.time() - before[0].end_time, 0.0)
        return [MembershipChanged(step, before[0].world_size, self._peers.size, reason, seconds)]


def _steps(history: Run | None) -> list[StepsDone]:
    return [] if history is None else [event for _, event in history.of(StepsDone)]


def _recorded(history: Run | None) -> int:
    """The last step that is on record; 0 on other ranks, which record nothing."""
    return max((step.step for step in _steps(history)), default=0)


def _step_seconds(history: Run | None) -> float:
    recent = [second for event in _steps(history) for second in event.step_seconds][-_RECENT_STEPS:]
    return sorted(recent)[len(recent) // 2] if recent else 0.0
