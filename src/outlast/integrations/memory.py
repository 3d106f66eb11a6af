"""The newest state of a loop in each node's memory, from which a restart by torchrun goes on.

An adapter that restores and saves by itself uses it so::

    memory = LoopMemory(job, ranks, directory, store, state, note=bring_entries_up_to_date)
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
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.errors import RecoverError
from outlast.integrations.agreement import Agreement, host_group
from outlast.job import fingerprint
from outlast.records import Warned
from outlast.recover.phase_page import ignore_phase
from outlast.train.recovering import from_disk, is_kept, run_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from outlast.checkpoint import CheckpointStore
    from outlast.distributed.ranks import Ranks
    from outlast.job import LoopJob
    from outlast.records import Event, RunDirectory
    from outlast.recover.restart import CompleteState
    from outlast.state.live import State


class LoopMemory:
    """Keeps the state of a loop in memory outside of its processes, and finds it again.

    All ranks make it and call its methods together, but for `settle` and `close`. Where nobody
    would start the ranks again, or ``recover.mode = "off"``, it does nothing.

    What is kept is as in `outlast.recover.restart.Keeper`: of buffers, tensors of objects other
    than modules and optimizers, and values that are no tensors, the first rank's of those that have
    their name; what each rank must get back for itself has a name of its own, such as ``random-3``.

    Args:
        job: The settings; [recover] counts here.
        ranks: This process among the others.
        directory: Of the run; it has its identifier.
        store: The run's checkpoints.
        state: What is kept: name -> module, optimizer, or object with a ``state_dict``. It may be
            filled later, before `take` and `keep`.
        note: Called before the state is looked at, to bring entries up to date.
        otherwise: What the loop does where the memory cannot be used, for a warning; empty: it goes
            on from its newest checkpoint.

    Attributes:
        events: What `find` and `take` had to say.

    Raises:
        RecoverError: On all ranks, when the parity that is asked for is not possible.
    """

    def __init__(
        self,
        job: LoopJob,
        ranks: Ranks,
        directory: RunDirectory,
        store: CheckpointStore,
        state: State,
        *,
        note: Callable[[], None] = lambda: None,
        otherwise: str = "",
    ) -> None:
        self.events: list[Event] = []
        self._otherwise = otherwise
        self._every_steps = job.recover.every_steps
        self._store = store
        self._state = state
        self._note = note
        self._whole: CompleteState | None = None
        self._several = ranks.world_size > 1
        self._own_agreement: Agreement | None = None
        group = host_group() if self._several and is_kept(job.recover, ranks) else None
        self._memory = run_memory(
            job.recover,
            fingerprint(job),
            ranks=ranks,
            directory=directory,
            state=state,
            store=store,
            group=group,
        )

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self._memory is not None

    @property
    def unsaved(self) -> bool:
        """Whether what was restored is on no disk, so that it must be saved in the end."""
        return self._memory is not None and self._memory.unsaved

    def restore(self) -> tuple[int, list[Event]]:
        """Fill the state from memory or the newest checkpoint, whatever is sooner back.

        Returns:
            The steps that it has done, and what there is to say.

        Raises:
            RecoverError: When steps were done, and no state of them can be used.
        """
        if self._memory is None:
            return from_disk(self._store, self._state)
        return self._memory.restore()

    def find(self) -> int | None:
        """Steps of the state in memory that is better than the newest checkpoint; None without one.

        Raises:
            RecoverError: On all ranks, when what was in memory is lost, and there is no checkpoint.
        """
        self.events, self._whole = [], None
        if self._memory is not None:
            try:
                self._whole = self._memory.find()
            except RecoverError as error:
                self._pass_over(error)
        return None if self._whole is None else self._whole.step

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

    def settle(self) -> None:
        """To be called before an optimizer's step: what was being copied is copied."""
        if self._memory is not None:
            self._memory.settle(ignore_phase)

    def keep(self, step: int, agreement: Agreement | None = None) -> Warned | None:
        """Between two steps, after `step` of them: begin to keep the state, where that is due.

        Parameters and optimizers must not change until `settle`.

        Args:
            step: Steps done.
            agreement: What the ranks of this loop agree by on other things; None: nothing else.

        Returns:
            A warning when nothing is kept from now on.

        Raises:
            IntegrationError: When a rank does not come to this step.
        """
        if self._memory is None or step % self._every_steps:
            return None
        self._note()
        plan = self._memory.look(step)
        if self._several:
            plan = self._agreed(agreement).any(step, plan)
        return self._memory.keep(step, plan=plan)

    def forget_earlier(self) -> None:
        """The loop does not go on from what an earlier start has kept: no restart of it must."""
        if self._memory is not None:
            self._memory.close(forget=True)

    def close(self, *, forget: bool) -> None:
        """End keeping.

        Args:
            forget: Give the memory back: all is on disk, or may be wrong. Otherwise it is kept
                for a restart.
        """
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close(forget=forget)

    def _agreed(self, agreement: Agreement | None) -> Agreement:
        if agreement is None:
            agreement = self._own_agreement = self._own_agreement or Agreement(0)
        return agreement

    def _filled(self, entries: State | None) -> bool:
        if self._memory is None or self._whole is None:
            return False
        try:
            if entries is None:
                self.events.append(self._memory.take(self._whole))
            else:
                self._memory.read(self._whole, entries)
        except RecoverError as error:
            self._whole = None
            self._pass_over(error)
            return False
        return True

    def _pass_over(self, error: RecoverError) -> None:
        assert self._memory is not None
        if self._memory.saved < 0:
            # Steps were done: whoever began anew would lose them without a word.
            raise RecoverError(
                f"{error}; and there is no checkpoint to go on from: start with the settings and "
                "the code of before, or anew in another directory"
            )
        follows = self._otherwise or (
            f"the run goes on from its newest checkpoint, of step {self._memory.saved}"
        )
        self.events.append(Warned(f"{error}; {follows}"))
