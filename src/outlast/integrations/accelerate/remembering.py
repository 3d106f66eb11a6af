"""Each step's state of an accelerator in memory, outside of its processes, for restarts."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from outlast.integrations.entries import TextEntry
from outlast.integrations.memory import LoopMemory
from outlast.integrations.place import ranks_here

if TYPE_CHECKING:
    from accelerate import Accelerator

    from outlast.integrations.accelerate.saving import Saving
    from outlast.job import LoopJob
    from outlast.records import Event, RunDirectory

_FACTS, _RANDOM = "accelerator", "random-"


class Remembering:
    """Keeps the state of a loop on an accelerator, and finds it again after a restart.

    All processes make it before `Accelerator.load_state`, and call its methods together. From then
    on, loading the newest state takes that from memory where it is newer than the store's.

    Args:
        accelerator: After `prepare`.
        saving: Its store.
        job: The settings; [recover] counts here.
        directory: Of the run.

    Attributes:
        facts: What was found in memory beside the objects; empty where nothing was.
        events: What there is to say and not yet said.
    """

    def __init__(
        self, accelerator: Accelerator, saving: Saving, job: LoopJob, directory: RunDirectory
    ) -> None:
        self.facts: dict[str, Any] = {}
        self.events: list[Event] = []
        self._saving = saving
        self._ranks = ranks_here()
        self._text = TextEntry()
        self._state: dict[str, Any] = {}
        self._kept_steps = -1
        self._names: list[str] = []
        self._memory = LoopMemory(
            job, self._ranks, directory, saving.store, self._state, note=self._note
        )
        for optimizer in accelerator._optimizers:
            optimizer.optimizer.register_step_pre_hook(self._settle)
        own_end = accelerator.end_training

        def end_training() -> None:
            own_end()
            self.close()

        accelerator.end_training = end_training
        saving.memory = self

    def keep(self) -> None:
        """Keep the state of the step that was done last; called after each step of the loop.

        It stands where `save_state` could stand. In the middle of a gradient accumulation it does
        nothing.

        Raises:
            IntegrationError: When a process does not come to this step.
        """
        steps = self._saving.steps
        if steps == self._kept_steps:
            return
        self._kept_steps = steps
        warning = self._memory.keep(steps)
        if warning is not None and self._ranks.is_first:
            warnings.warn(warning.message, stacklevel=2)

    def find(self) -> int | None:
        """Steps of the state in memory that is newer than the store's newest; None without one.

        Raises:
            RecoverError: On all processes, when what was in memory is lost, and there is no
                checkpoint.
        """
        found = self._memory.find()
        self.events = self._memory.events
        return found

    def read(self) -> bool:
        """Fill `facts` with what `find` has found; else the newest checkpoint must be taken."""
        text = TextEntry()
        found = self._memory.read({_FACTS: text})
        self.facts = text.content if found else {}
        return found

    def take(self, wanted: dict[str, Any]) -> bool:
        """Fill the live objects with what was found; else the newest checkpoint must be taken.

        Args:
            wanted: Objects by their names in the store, and the random numbers of a process.

        Raises:
            RecoverError: On all processes, when it does not fit, and there is no checkpoint.
        """
        self._state.clear()
        self._state |= wanted
        taken = self._memory.take()
        self._state.clear()
        return taken

    def close(self, *, forget: bool = True) -> None:
        """The loop has ended.

        Args:
            forget: Give the memory back. Otherwise it is kept for the next start.
        """
        self._memory.close(forget=forget)

    def _settle(self, *_: Any) -> None:
        self._memory.settle()

    def _note(self) -> None:
        if not self._state:
            objects = self._saving.objects()
            own = f"{_RANDOM}{self._ranks.rank}"
            self._names = [*objects]
            self._state |= {**objects, own: self._saving.own}
            if self._ranks.is_first:
                self._state[_FACTS] = self._text
        self._text.content = self._saving.facts(self._names)
