"""The newest state of a torchtitan training in memory, from which a restart by torchrun goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outlast.job import fingerprint
from outlast.records import CheckpointRestored, StateRecovered
from outlast.recover.beacon import no_mark
from outlast.train.recovering import run_memory

if TYPE_CHECKING:
    from outlast.checkpoint import CheckpointStore
    from outlast.integrations.agreement import Agreement
    from outlast.integrations.recording import Recording
    from outlast.integrations.torchtitan.state import Entries
    from outlast.job import LoopJob
    from outlast.train.ranks import Ranks
    from outlast.train.recovering import RunMemory


class Memory:
    """Keeps the entries of a checkpoint manager's states; all ranks call it together.

    Args:
        memory: Of the run.
        kept: What it keeps: entries of all states.
        entries: Who makes such entries, and brings them up to date.
        every_steps: Keep the state after every so many steps.
        recording: Of the run.
    """

    def __init__(
        self,
        memory: RunMemory,
        kept: dict[str, Any],
        entries: Entries,
        every_steps: int,
        recording: Recording,
    ) -> None:
        self._memory = memory
        self._kept = kept
        self._entries = entries
        self._every_steps = every_steps
        self._recording = recording

    @classmethod
    def of(
        cls,
        job: LoopJob,
        ranks: Ranks,
        recording: Recording,
        *,
        entries: Entries,
        kept: dict[str, Any],
        store: CheckpointStore,
    ) -> Memory | None:
        """That of a run as [recover] says; None where nobody would start the ranks again.

        Raises:
            RecoverError: On all ranks, when the parity that is asked for is not possible.
        """
        memory = run_memory(
            job.recover,
            fingerprint(job),
            ranks=ranks,
            directory=recording.directory,
            state=kept,
            store=store,
        )
        if memory is None:
            return None
        return cls(memory, kept, entries, job.recover.every_steps, recording)

    @property
    def unsaved(self) -> bool:
        """Whether what was restored is on no disk."""
        return self._memory.unsaved

    def restore(self) -> int | None:
        """Restore the newest state, from memory or from the store, whichever is cheaper.

        Returns:
            The steps that it has done; None where there is no state.

        Raises:
            RecoverError: When steps were done, and no state of them can be used.
            CheckpointError: When a version does not fit.
        """
        step, events = self._memory.restore()
        for event in events:
            self._recording.write(event)
        if not any(isinstance(each, CheckpointRestored | StateRecovered) for each in events):
            return None
        self._entries.loaded(self._kept)
        return step

    def keep(self, step: int, agreement: Agreement | None) -> None:
        """Begin to keep the state after `step` steps, if that is due."""
        if step % self._every_steps:
            return
        self._entries.note(self._kept)
        plan = self._memory.look(step)
        if agreement is not None:
            plan = agreement.any(step, plan)
        self._recording.write(self._memory.keep(step, plan=plan))

    def settle(self) -> None:
        """Wait until the state under way is kept: the next update writes to it."""
        self._memory.settle(no_mark)

    def close(self, *, forget: bool) -> None:
        """End keeping; `forget`: what is kept is on disk as well, or may be wrong."""
        self._memory.close(forget=forget)
