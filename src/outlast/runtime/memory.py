"""The in-memory checkpoint of a run, from which a restart by its launcher resumes.

See `outlast.recover.restart`. An adapter that restores and saves by itself uses it so::

    memory = MemoryCheckpoint(job, ranks, directory, store, state, note=bring_entries_up_to_date)
    if memory.find() is not None and memory.read({"framework": text}) and memory.take():
        ...                      # `state` is that of the step which `find` has told
    else:
        ...                      # the newest checkpoint, as without
    for event in memory.events:
        recording.write(event)
    ...
        memory.settle()          # before each optimizer's step
        optimizer.step()
        recording.write(memory.keep(step, stopping.agreement))       # between two steps
    memory.close(forget=True)    # all is on disk

Parameters and optimizer states are copied while the next step runs, until it is told that they are
about to change; whatever else an object hands out is copied at once. In a framework's checkpoint,
which is such an object, `settled` tells the parameters apart.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outlast.distributed.group import Group, gather_objects
from outlast.errors import CheckpointError, RecoverError
from outlast.job import fingerprint, tiers_of
from outlast.records import (
    MembershipChanged,
    StateRecovered,
    StepsDone,
    Warned,
    read_run,
)
from outlast.recover.phase_page import EnterPhase, ignore_phase
from outlast.recover.redundancy import Redundancy
from outlast.recover.restart import Keeper, node_of
from outlast.runtime.agreement import BoundaryAgreement, host_group
from outlast.runtime.saves import restored_event
from outlast.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from torch.optim import Optimizer

    from outlast.checkpoint import CheckpointStore
    from outlast.distributed.ranks import Ranks
    from outlast.job import Job, LoopJob
    from outlast.records import CheckpointRestored, Event, Run, RunDirectory
    from outlast.recover.restart import CompleteState
    from outlast.state.live import State


_NOBODY_RESTARTS = (
    'checkpoint.tiers has "memory", but nobody would start this process again, so nothing is kept '
    "in memory: start with outlast train --nproc or torchrun --max-restarts, or leave memory and "
    "peer out"
)


def kept_run(directory: RunDirectory) -> str:
    """Under which name the states of this run are kept in memory."""
    # Of an earlier run with the same name nothing must be taken.
    return f"{directory.path.name}-{directory.identifier}"


def is_kept(job: Job | LoopJob, ranks: Ranks) -> bool:
    """Return whether states are kept in memory: a launcher would start these ranks again."""
    restarted = ranks.launch == "nproc" or (
        ranks.launch == "torchrun" and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    )
    return "memory" in tiers_of(job.checkpoint, job.recover) and restarted


def from_disk(
    store: CheckpointStore,
    state: State,
    passed_over: Sequence[str] = (),
    *,
    shown: bool = False,
    lacking: Sequence[str] = (),
) -> tuple[int, list[Event]]:
    """Restore the newest checkpoint: the steps that it has done, and the events.

    Args:
        store: The run's checkpoints.
        state: Model and optimizers.
        passed_over: One sentence for each newer state that could not be used.
        shown: Whether the caller shows the events to the user, who else is warned.
        lacking: One phrase for each nearer tier that held nothing.

    Raises:
        RecoverError: When a newer state could not be used, and there is no checkpoint.
        CheckpointError: When none can be used, or a state that begins anew cannot be saved.
    """
    begun = time.perf_counter()
    restored = store.restore(state, warn=not shown)
    if restored is None:
        if passed_over:
            # Steps were done: whoever began anew would lose them without a word.
            raise RecoverError(
                f"{'; '.join(passed_over)}; and there is no checkpoint to continue from: start "
                "with the settings and the code of before, or anew in another directory"
            )
        store.check(state)
        # Not silently: a run that had saved nothing looks just like one that has lost its files.
        return 0, [Warned(store.unfinished)] if store.unfinished else []
    event = restored_event(store, restored, time.perf_counter() - begun, passed_over, lacking)
    warned = [
        Warned(f"{name}; the run continues from the version of step {restored.step}")
        for name in event.skipped
    ]
    return restored.step, [*warned, event]


def _warnings(passed_over: Sequence[str], step: int) -> list[Event]:
    return [Warned(f"{name}; the run continues from step {step}") for name in passed_over]


class MemoryCheckpoint:
    """Keeps the newest state of a run in memory outside of its processes, and finds it again.

    All ranks make it and call its methods together, but for `settle` and `close`. Where nobody
    would start the ranks again, or ``checkpoint.tiers`` has no ``memory``, nothing is kept, and
    `restore` takes the newest checkpoint.

    What is kept is as in `outlast.recover.restart.Keeper`: of buffers, tensors of objects other
    than modules and optimizers, and values that are no tensors, the first rank's of those that have
    their name; what each rank must get back for itself has a name of its own, such as ``random-3``.

    Args:
        job: The settings; [recover] counts here. What was kept for another job is not restored.
        ranks: This process among the others.
        directory: Of the run; it has its identifier.
        store: The run's checkpoints.
        state: What is kept: name -> module, optimizer, or object with a ``state_dict``. It may be
            filled later, before `take` and `keep`.
        begins_at: Step of the checkpoint that the run begins with, whatever is newer; None: the
            newest.
        note: Called before the state is looked at, to bring entries up to date.
        otherwise: What the loop does where the memory cannot be used, for a warning; empty: it goes
            on from its newest checkpoint.
        own_group: Whether the ranks agree in a group of their own for host memory, apart from the
            default group's collectives.
        shown: Whether the events that `restore` gives are shown to the user.
        steps_before: That the process with this rank had done when it was killed, if it is known.
        goes_back: Whether the loop goes back to what is kept, where memory was wrong: then it is
            kept also where nobody would start the ranks again, and given back when they end.

    Attributes:
        events: What `find` and `take` had to say.
        saved: Steps of the newest checkpoint when `find` looked; -1 without one.
        unsaved: Whether what was restored is on no disk, or not on all that the run saves to, so
            that it must be saved in the end.

    Raises:
        RecoverError: On all ranks, when the parity that is asked for is not possible.
    """

    def __init__(
        self,
        job: Job | LoopJob,
        ranks: Ranks,
        directory: RunDirectory,
        store: CheckpointStore,
        state: State,
        *,
        begins_at: int | None = None,
        note: Callable[[], None] = lambda: None,
        otherwise: str = "",
        own_group: bool = True,
        shown: bool = False,
        steps_before: int = 0,
        goes_back: bool = False,
    ) -> None:
        self.events: list[Event] = []
        self.saved = -1
        self.unsaved = False
        # Of the newest checkpoint, where `restore` found it unusable, and took an older state.
        self._unusable: int | None = None
        self._otherwise = otherwise
        self._store = store
        self._begins_at = begins_at
        self._state = state
        self._note = note
        self._shown = shown
        self._steps_before = steps_before
        self._told = False
        self._whole: CompleteState | None = None
        self._several = ranks.world_size > 1
        self._own_agreement: BoundaryAgreement | None = None
        self._keeper: Keeper | None = None
        self._directory = directory.path if ranks.is_first and directory.exists() else None
        tiers, settings = tiers_of(job.checkpoint, job.recover), job.recover
        # Whoever has asked for a tier by name is told where it is not there.
        asked = job.checkpoint.tiers != "auto"
        self._missing: list[Event] = []
        self._outlives = is_kept(job, ranks)
        if not (self._outlives or (goes_back and "memory" in tiers)):
            if asked and "memory" in tiers:
                self._missing.append(Warned(_NOBODY_RESTARTS))
            return
        group = host_group() if self._several and own_group else None
        losses = settings.parity if "peer" in tiers else 0
        redundancy = Redundancy(losses, settings.parity_group, settings.domain)
        self._peers = Group(group, error=RecoverError, node=node_of(settings.memory))
        nodes = self._peers.gather(self._peers.node)
        redundancy.check(nodes)
        if asked and "peer" in tiers and (lacking := redundancy.lacking(nodes)):
            self._missing.append(Warned(f'checkpoint.tiers has "peer", but {lacking}'))
        self._keeper = Keeper(
            state,
            kept_run(directory),
            f"{fingerprint(job, adjusted=False)} outlast-{__version__}",
            memory=settings.memory,
            every_steps=settings.every_steps,
            peers=self._peers,
            redundancy=redundancy,
        )

    @property
    def is_on(self) -> bool:
        """Return whether anything is kept."""
        return self._keeper is not None

    def restore(self) -> tuple[int, list[Event]]:
        """Fill the state from memory or the newest checkpoint, whatever is newer.

        Returns:
            The steps that it has done, and what there is to say.

        Raises:
            RecoverError: When steps were done, and no state of them can be used.
        """
        step, events = self._restored()
        behind = step > 0 and self._store.behind(step)
        self.unsaved = self.unsaved or behind
        return step, events

    def _restored(self) -> tuple[int, list[Event]]:
        missing, self._missing = self._missing, []
        if self._keeper is None:
            step, events = from_disk(self._store, self._state, shown=self._shown)
            return step, [*missing, *events]
        history, passed_over = self._history(), list[str]()
        whole = None
        try:
            whole = self._newest_in_memory()
        except RecoverError as error:
            passed_over.append(str(error))
        lacking = self._keeper.lacking
        try:
            if whole is not None and self.saved > whole.step:
                newer = self._newer(whole.step, passed_over)
                if newer is not None:
                    return newer.step, [*missing, newer, *self._changed(history, newer.step)]
                self._unusable = self.saved
            if whole is not None:
                event = self._take(whole, history, passed_over)
                told = [*missing, *_warnings([*passed_over, *self._keeper.damaged], event.step)]
                return event.step, [*told, event, *self._changed(history, event.step)]
        except RecoverError as error:
            passed_over.append(str(error))
        passed_over += self._keeper.damaged
        step, events = from_disk(
            self._store, self._state, passed_over, shown=self._shown, lacking=lacking
        )
        return step, [*missing, *events, *self._changed(history, step)]

    def go_back(
        self, newest: int, is_right: Callable[[int], bool], cause: str
    ) -> StateRecovered | None:
        """Fill the state with an earlier one of this run, in memory or of a checkpoint.

        Nothing that was kept in memory of later steps is restored any more.

        Args:
            newest: Steps that it has done at most.
            is_right: Looks at the state that was filled, on this rank; where it is wrong on one, an
                older one is taken.
            cause: Of going back, for the records.

        Returns:
            The event; None where there is no such state, and the live one may be any.

        Raises:
            CheckpointError: When nothing but damaged checkpoints is left.
        """
        self.settle()
        begun, passed_over, until = time.perf_counter(), list[str](), newest
        while until >= 0:
            found = self._filled_until(until, passed_over)
            if found is None:
                return None
            step, source = found
            wrong = [rank for rank, right in enumerate(gather_objects(is_right(step))) if not right]
            if not wrong:
                break
            held = f"{source} of step {step} holds the fault on rank {', '.join(map(str, wrong))}"
            passed_over.append(held)
            until = step - 1
        else:
            return None
        if self._keeper is not None:
            self._keeper.go_back(step)
        seconds = time.perf_counter() - begun
        return StateRecovered(step, source, seconds, 0, 0, passed_over, cause=cause)

    def _filled_until(self, until: int, passed_over: list[str]) -> tuple[int, str] | None:
        """Fill the state with the newest one of at most `until` steps; its step and source."""
        whole = None if self._keeper is None else self._keeper.find_until(until)
        after = -1 if whole is None else whole.step
        restored = None
        try:
            restored = self._store.restore(self._state, warn=False, after=after, until=until)
        except CheckpointError as error:
            if whole is None:
                raise
            passed_over.append(str(error))
        if restored is not None:
            source = self._store.tier_names.get(restored.place, "") or "shared"
            return restored.step, source
        if whole is None:
            return None
        assert self._keeper is not None
        recovered = self._keeper.restore(whole)
        assert recovered is not None
        return recovered.step, recovered.source

    def newest_saved(self) -> int:
        """Steps of the newest checkpoint; -1 without one. All ranks ask together."""
        version = self._store.newest(warn=False)
        return max(gather_objects(-1 if version is None else version.step))

    def find(self) -> int | None:
        """Steps of the state in memory that is better than the newest checkpoint; None without one.

        Raises:
            RecoverError: On all ranks, when what was in memory is lost, and there is no checkpoint.
        """
        self.events, self._missing, self._whole = self._missing, [], None
        if self._keeper is None:
            return None
        whole = None
        try:
            whole = self._newest_in_memory()
        except RecoverError as error:
            self._pass_over(str(error))
        if whole is not None and (whole.step >= self.saved or self.saved == self._unusable):
            self._whole = whole
            self.events += _warnings(self._keeper.damaged, whole.step)
            return whole.step
        for sentence in self._keeper.damaged:
            self._pass_over(sentence)
        return None

    def read(self, entries: State) -> bool:
        """Fill a part of the state that was found, before the rest has a place.

        Args:
            entries: Some of the state's names, with the objects that take them over.

        Returns:
            Whether it was there; else the newest checkpoint must be taken.

        Raises:
            RecoverError: On all ranks, when it was not, and there is no checkpoint.
        """
        return self._filled(entries)

    def take(self) -> bool:
        """Fill the state with what was found.

        Returns:
            Whether all of it was there and fits; else the newest checkpoint must be taken, and
            fill all of the state.

        Raises:
            RecoverError: On all ranks, when it does not, and there is no checkpoint.
        """
        return self._filled(None)

    def due(self, step: int) -> bool:
        """Return whether the state after `step` steps is to be kept; the same on all ranks."""
        return self._keeper is not None and self._keeper.due(step)

    def look(self, step: int) -> bool:
        """Return whether this rank wants what is kept to be planned anew; see `Keeper.look`."""
        return self._keeper is not None and self._keeper.look(step)

    def keep(
        self, step: int, agreement: BoundaryAgreement | None = None, *, plan: bool | None = None
    ) -> Warned | None:
        """Begin to keep the state after `step` steps, between two steps, where that is due.

        Parameters and optimizers must not change until `settle`.

        Args:
            step: Steps done.
            agreement: What the ranks of this loop agree by on other things; None: nothing else.
            plan: Whether any rank wants to plan anew; None: ask them now.

        Returns:
            A warning when nothing is kept from now on.

        Raises:
            IntegrationError: When a rank does not come to this step.
        """
        if self._keeper is None or not self._keeper.due(step):
            return None
        if plan is None:
            self._note()
            plan = self.look(step)
            if self._several:
                if agreement is None:
                    agreement = self._own_agreement = self._own_agreement or BoundaryAgreement(0)
                plan = agreement.any(step, plan)
        self._keeper.keep(step, plan=plan)
        if self._keeper.problem and not self._told:
            self._told = True
            return Warned(
                f"{self._keeper.problem}; a restart continues from the newest checkpoint "
                '(recover.memory names another place; without "memory" in checkpoint.tiers, '
                "nothing is kept)"
            )
        return None

    def settle(self, mark: EnterPhase = ignore_phase) -> None:
        """Wait until what was being copied is copied; to be called before an optimizer's step.

        Args:
            mark: Told when it is parity that is waited for.
        """
        if self._keeper is not None:
            if self._keeper.has_parity:
                mark("parity")
            self._keeper.settle()

    def holds(self, step: int) -> bool:
        """Return whether the state after `step` steps is kept on all ranks, which ask together."""
        if self._keeper is None:
            return False
        self._keeper.settle()
        return not self._peers.any(self._keeper.kept != step or bool(self._keeper.problem))

    def forget_earlier(self) -> None:
        """Forget what an earlier start has kept, from which this one does not continue."""
        if self._keeper is not None:
            self._keeper.close(forget_run=True)

    def close(self, *, forget: bool) -> None:
        """End keeping.

        Args:
            forget: Give the memory back: all is on disk, or may be wrong. Otherwise it is kept
                for a restart.
        """
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close(forget_run=forget or not self._outlives)

    def _newest_in_memory(self) -> CompleteState | None:
        """The newest intact state in memory; `saved` becomes the newest checkpoint's step.

        Raises:
            RecoverError: On all ranks, when more is lost than parity makes good.
        """
        assert self._keeper is not None
        saved = self._begins_at
        self.saved = max(self._peers.gather(self._store.newest_step())) if saved is None else saved
        return self._keeper.find()

    def _newer(self, step: int, passed_over: list[str]) -> CheckpointRestored | None:
        """Restore the newest intact checkpoint after `step`; None where none is intact."""
        begun = time.perf_counter()
        try:
            restored = self._store.restore(self._state, warn=False, after=step)
        except CheckpointError as error:
            passed_over.append(str(error))
            return None
        if restored is None:
            return None
        lacking = [f"memory: its newest state is of step {step}"]
        seconds = time.perf_counter() - begun
        return restored_event(self._store, restored, seconds, passed_over, lacking)

    def _take(
        self, whole: CompleteState, history: Run | None, passed_over: Sequence[str] = ()
    ) -> StateRecovered:
        """Restore what the keeper has found.

        Raises:
            RecoverError: On all ranks, when it does not fit, or has gone meanwhile; the live state
                may be filled in part and must be restored from elsewhere.
        """
        assert self._keeper is not None
        recovered = self._keeper.restore(whole)
        assert recovered is not None
        self.unsaved = recovered.step > self.saved or self.saved == self._unusable
        # What was done may not be on record yet.
        done = max(_recorded(history), self._steps_before)
        lost = max(0, *(peer - recovered.step for peer in self._peers.gather(done)))
        return StateRecovered(
            recovered.step,
            recovered.source,
            recovered.seconds,
            lost,
            recovered.size,
            [*passed_over, *self._keeper.damaged, *self._keeper.lacking],
        )

    def _filled(self, entries: State | None) -> bool:
        if self._keeper is None or self._whole is None:
            return False
        try:
            if entries is None:
                self.events.append(self._take(self._whole, self._history()))
            else:
                self._keeper.restore(self._whole, entries)
        except RecoverError as error:
            self._whole = None
            self._pass_over(str(error))
            return False
        return True

    def _pass_over(self, problem: str) -> None:
        if self.saved < 0:
            # Steps were done: whoever began anew would lose them without a word.
            raise RecoverError(
                f"{problem}; and there is no checkpoint to continue from: start with the settings "
                "and the code of before, or anew in another directory"
            )
        follows = self._otherwise or (
            f"the run continues from its newest checkpoint, of step {self.saved}"
        )
        self.events.append(Warned(f"{problem}; {follows}"))

    def _history(self) -> Run | None:
        return None if self._directory is None else read_run(self._directory)

    def _changed(self, history: Run | None, step: int) -> list[Event]:
        """The event of another number of processes than before; rank 0 alone knows."""
        # The newest attempt is this one.
        before = [] if history is None else history.attempts[-2:-1]
        if not before or before[0].world_size == self._peers.size:
            return []
        reason = "lost" if before[0].outcome in ("died", "failed") else "resized"
        seconds = max(time.time() - before[0].end_time, 0.0)
        return [MembershipChanged(step, before[0].world_size, self._peers.size, reason, seconds)]


def _recorded(history: Run | None) -> int:
    """The last step that is on record; 0 on other ranks, which record nothing."""
    steps = [] if history is None else history.of(StepsDone)
    return max((event.step for _, event in steps), default=0)


def places_of(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> set[int]:
    """Addresses of the parameters of `modules`, and of those and the states of `optimizers`."""
    found = {_place(parameter) for module in modules for parameter in module.parameters()}
    for optimizer in optimizers:
        found.update(
            _place(parameter) for group in optimizer.param_groups for parameter in group["params"]
        )
        found.update(
            _place(tensor)
            for state in optimizer.state.values()
            for tensor in state.values()
            if isinstance(tensor, torch.Tensor)
        )
    return found - {0}


def settled(value: Any, places: Collection[int]) -> Any:
    """`value` with its tensors that lie at `places` as parameters on the same memory.

    Args:
        value: Nested dictionaries, lists and tuples of tensors and anything else.
        places: Of `places_of`, seen in the same step.
    """
    if isinstance(value, torch.Tensor):
        if _place(value) not in places:
            return value
        return nn.Parameter(value.detach(), requires_grad=False)
    if isinstance(value, Mapping):
        return {key: settled(item, places) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(settled(item, places) for item in value)
    return value


def only_settled(value: Any) -> Any:
    """Return the parameters in `value`, as `settled` gives it, under the same keys."""
    if isinstance(value, nn.Parameter):
        return value
    if isinstance(value, Mapping):
        return {key: only_settled(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(only_settled(item) for item in value)
    return None


def _place(tensor: torch.Tensor) -> int:
    """The address of a tensor's first element; 0 for one without any, or with no single one."""
    if tensor.layout != torch.strided:
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:
        # It consists of other tensors, which whoever keeps it refuses by name.
        return 0
